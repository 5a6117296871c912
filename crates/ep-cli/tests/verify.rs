//! `hybrid-ep verify` in both forms.
#![allow(clippy::unwrap_used, reason = "a test that cannot go on panics")]

mod common;

use common::{Finished, run};

/// The counts that a run ends with.
#[track_caller]
fn passed(finished: &Finished) -> usize {
    let line = finished.stdout.lines().find(|line| line.contains(" passed, ")).unwrap();
    assert!(line.ends_with(" passed, 0 failed"), "{line}");
    line.split(' ').next().unwrap().parse().unwrap()
}

#[test]
fn threads() {
    let finished = run(&["verify", "--cases", "20", "--seed", "11", "--ranks", "5"]).succeeded();
    assert!(passed(&finished) > 20);
    let last = finished.stdout.lines().last().unwrap();
    assert!(
        last.starts_with("verified: ") && last.ends_with(" fixed and 20 random cases, seed 11"),
        "{last}"
    );
    assert_eq!(finished.stderr, "");
}

#[test]
fn processes() {
    let arguments = ["verify", "--cases", "12", "--seed", "11", "--ranks", "3", "--processes"];
    let finished = run(&arguments).succeeded();
    assert!(passed(&finished) > 12);
    assert!(finished.stdout.lines().last().unwrap().ends_with(" fixed and 12 random cases, seed 11"));
    assert_eq!(finished.stderr, "");
}

#[test]
fn one_case_again() {
    for form in [&[][..], &["--processes"]] {
        let finished = run(&[&["verify", "--seed", "11", "--case", "7"], form].concat()).succeeded();
        assert_eq!(passed(&finished), 1);
        assert!(finished.stdout.contains("verified: 0 fixed and 1 random cases, seed 11"));
    }
    let finished = run(&["verify", "--suite-only", "--case", "3"]).succeeded();
    assert!(finished.stdout.contains("verified: 1 fixed and 0 random cases"));
}

#[test]
fn a_seed_is_always_printed() {
    let finished = run(&["verify", "--case", "0"]).succeeded();
    let seed = |line: &str| line.split("seed ").nth(1).unwrap().parse::<u64>().unwrap();
    let lines: Vec<&str> = finished.stdout.lines().collect();
    assert!(lines[0].starts_with("running on the "), "{}", lines[0]);
    assert_eq!(seed(lines[0]), seed(lines[lines.len() - 1]));
}
