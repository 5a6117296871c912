//! These tests check the variables of a launcher and the secret of a job.

use super::{FakeMachine, assert_sound, find};
use crate::doctor::{check::Mark, render::render};

#[test]
fn launch_variables_are_shown_and_checked() {
    let machine = FakeMachine::new()
        .linux()
        .env("RANK", "3")
        .env("WORLD_SIZE", "8")
        .env("MASTER_ADDR", "10.0.0.1")
        .env("MASTER_PORT", "29500")
        .env("SLURM_PROCID", "");
    let report = machine.examine();
    assert_sound(&report);
    assert_eq!(find(&report, "RANK").found, "3");
    assert_eq!(find(&report, "MASTER_ADDR").found, "10.0.0.1");
    // Set but empty is not set.
    assert_eq!(report.launch.variables["SLURM_PROCID"], None);
    assert_eq!(find(&report, "Slurm").mark, Mark::Absent);
    assert_eq!(report.verdict.problems, 0);

    let broken = [
        ("RANK", "8", "rank 8 of 8"),
        ("RANK", "-1", "RANK is not a number"),
        ("WORLD_SIZE", "many", "WORLD_SIZE is not a number"),
        ("WORLD_SIZE", "", "WORLD_SIZE is not set"),
    ];
    for (name, value, found) in broken {
        let machine = FakeMachine::new().env("RANK", "3").env("WORLD_SIZE", "8");
        let report = machine.env(name, value).examine();
        let check = find(&report, "RANK/WORLD_SIZE");
        assert_eq!((check.mark, check.found.as_str()), (Mark::Problem, found));
    }
    for port in ["99999", "0", "http"] {
        let report = FakeMachine::new().env("MASTER_PORT", port).examine();
        let check = find(&report, "MASTER_PORT");
        assert_eq!(check.mark, Mark::Problem);
        assert_eq!(check.found, format!("{port} is not a port number"));
    }
}

#[test]
fn the_secret_is_reported_but_never_shown() {
    let find_secret = |machine: FakeMachine| {
        let report = machine.examine();
        assert!(!format!("{report:?}{}", render(&report)).contains("hush"), "the secret shows");
        find(&report, "job secret").clone()
    };
    let none = find_secret(FakeMachine::new().linux());
    assert_eq!(none.mark, Mark::Absent);
    assert!(none.found.contains("processes of this user on this machine"), "{}", none.found);
    let set = find_secret(FakeMachine::new().linux().env("HYBRID_EP_SECRET", "hush, this is a secret"));
    assert_eq!(
        (set.mark, set.found.as_str()),
        (Mark::Ok, "HYBRID_EP_SECRET is set: ranks must know it to join")
    );
    let file = find_secret(FakeMachine::new().linux().env("HYBRID_EP_SECRET_FILE", "/hush"));
    assert!(file.found.starts_with("HYBRID_EP_SECRET_FILE is set"), "{}", file.found);
}
