//! `hybrid-ep verify` with threads, with processes and as a soak.
#![allow(clippy::unwrap_used, reason = "a test that cannot go on panics")]

mod common;

use common::{Finished, run};

/// The number of passed cases of a run without failures.
#[track_caller]
fn passed(finished: &Finished) -> usize {
    let line = finished.stdout.lines().find(|line| line.contains(" passed, ")).unwrap();
    assert!(line.ends_with(" passed, 0 failed"), "{line}");
    line.split(' ').next().unwrap().parse().unwrap()
}

/// The number of fixed cases that were left out for having more than `ranks` ranks, from the last line.
#[track_caller]
fn left_out(finished: &Finished, ranks: usize) -> usize {
    let last = finished.stdout.lines().last().unwrap();
    let (before, _) = last.split_once(&format!(" left out: more than {ranks} ranks)")).unwrap();
    before.rsplit('(').next().unwrap().parse().unwrap()
}

#[test]
fn cases_pass_with_ranks_as_threads() {
    let finished = run(&["verify", "--cases", "20", "--seed", "11"]).succeeded();
    let passed = passed(&finished);
    assert!(passed > 20);
    let last = finished.stdout.lines().last().unwrap();
    assert_eq!(last, format!("verified: {} fixed and 20 random cases, seed 11", passed - 20));
    assert_eq!(finished.stderr, "");
}

#[test]
fn cases_pass_with_ranks_as_processes() {
    let arguments = ["verify", "--cases", "12", "--seed", "11", "--ranks", "3", "--processes"];
    let finished = run(&arguments).succeeded();
    assert!(passed(&finished) > 12);
    assert!(finished.stdout.lines().last().unwrap().ends_with(" and 12 random cases, seed 11"));
    assert_eq!(finished.stderr, "");
}

#[test]
fn cases_of_more_ranks_are_left_out_and_counted() {
    let all = passed(&run(&["verify", "--suite-only"]).succeeded());
    for form in [&[][..], &["--processes"]] {
        let few = run(&[&["verify", "--suite-only", "--ranks", "2"], form].concat()).succeeded();
        assert_eq!(passed(&few) + left_out(&few, 2), all);
    }
}

#[test]
fn one_case_can_be_repeated() {
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
    for arguments in [&["verify", "--case", "0"][..], &["verify", "--soak", "2"]] {
        let finished = run(arguments).succeeded();
        let seed = |line: &str| line.split("seed ").nth(1).unwrap().parse::<u64>().unwrap();
        let lines: Vec<&str> = finished.stdout.lines().collect();
        assert_eq!(seed(lines[0]), seed(lines[lines.len() - 1]), "{finished:?}");
    }
}

#[test]
fn a_soak_passes_with_threads_and_processes() {
    for form in [&[][..], &["--processes"]] {
        let arguments = ["verify", "--soak", "100", "--ranks", "3", "--seed", "11"];
        let finished = run(&[&arguments, form].concat()).succeeded();
        assert_eq!(passed(&finished), 100);
        let kind = if form.is_empty() { "threads" } else { "processes" };
        let first =
            format!("soaking the host backend, ranks as {kind}: 100 iterations of 3 ranks in 1 domain with ");
        assert!(finished.stdout.starts_with(&first), "{finished:?}");
        assert_eq!(finished.stdout.lines().last(), Some("verified: 3 ranks through 100 iterations, seed 11"));
        assert_eq!(finished.stderr, "");
    }
}
