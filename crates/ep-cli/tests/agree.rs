//! Ranks that are processes with different options: all of them report the difference before anything is measured.
#![cfg(target_os = "linux")]
#![allow(clippy::unwrap_used, reason = "a test that cannot go on panics")]

mod common;

use std::net::TcpListener;

use common::{Directory, Finished, finish_in_time, program, trace};

/// Starts two ranks with different arguments, as a launcher does.
fn two(arguments: [&[&str]; 2]) -> [Finished; 2] {
    let store = TcpListener::bind("127.0.0.1:0").unwrap().local_addr().unwrap().to_string();
    let start = |rank: usize| {
        let mut command = program();
        command.args(arguments[rank]).env("RANK", rank.to_string()).env("WORLD_SIZE", "2");
        command.env("HYBRID_EP_STORE", &store).spawn().unwrap()
    };
    [0, 1].map(start).map(finish_in_time)
}

const BENCH: &[&str] = &[
    "bench",
    "--backend=host",
    "--processes",
    "--tokens=24",
    "--hidden=64",
    "--experts=8",
    "--topk=3",
    "--mode=permuted",
    "--pad=4",
    "--iters=2",
    "--seed=1",
    "--skew=0.5",
    "--dtype=bf16",
    "--domains=1",
];

const VERIFY: &[&str] =
    &["verify", "--backend=host", "--processes", "--cases=2", "--seed=1", "--ranks=2", "--domains=2"];

/// The arguments with one of them changed.
fn with<'a>(base: &[&'a str], changed: &'a str) -> Vec<&'a str> {
    let option = changed.split('=').next().unwrap();
    base.iter().map(|&given| if given.split('=').next() == Some(option) { changed } else { given }).collect()
}

#[test]
fn every_rank_names_the_option_that_differs() {
    for (base, changed, said) in [
        (BENCH, "--tokens=25", "--tokens is 24 on rank 0 and 25 on rank 1"),
        (BENCH, "--tokens=24,25", "--tokens is 24 on rank 0 and 24,25 on rank 1"),
        (BENCH, "--tokens=24+25", "--tokens is 24 on rank 0 and 24+25 on rank 1"),
        (BENCH, "--mode=plain,permuted", "--mode is permuted on rank 0 and plain,permuted on rank 1"),
        (BENCH, "--topk=2", "--topk is 3 on rank 0 and 2 on rank 1"),
        (BENCH, "--seed=2", "--seed is 1 on rank 0 and 2 on rank 1"),
        (BENCH, "--skew=0.6", "--skew is 0.5 on rank 0 and 0.6 on rank 1"),
        (BENCH, "--experts=16", "--experts is 8 on rank 0 and 16 on rank 1"),
        (BENCH, "--hidden=128", "--hidden is 64 on rank 0 and 128 on rank 1"),
        (BENCH, "--dtype=fp8", "--dtype is bf16 on rank 0 and fp8 on rank 1"),
        (BENCH, "--pad=8", "--pad is 4 on rank 0 and 8 on rank 1"),
        (BENCH, "--iters=3", "--iters is 2 on rank 0 and 3 on rank 1"),
        (BENCH, "--domains=2", "--domains is 1 on rank 0 and 2 on rank 1"),
        (VERIFY, "--seed=2", "--seed is 1 on rank 0 and 2 on rank 1"),
        (VERIFY, "--cases=3", "--cases is 2 on rank 0 and 3 on rank 1"),
        (VERIFY, "--ranks=3", "--ranks is 2 on rank 0 and 3 on rank 1"),
    ] {
        for finished in two([base, &with(base, changed)]) {
            finished_alike(&finished, said);
        }
    }
    for finished in two([BENCH, VERIFY]) {
        finished_alike(&finished, "command is bench on rank 0 and verify on rank 1");
    }
}

#[track_caller]
fn finished_alike(finished: &Finished, said: &str) {
    assert_eq!(finished.code, Some(2), "{said}: {finished:?}");
    let last = finished.stderr.lines().last().unwrap();
    assert!(
        last.contains(said) && last.contains("every rank must be given the same"),
        "{said}: {finished:?}"
    );
}

#[test]
fn different_recorded_routings_are_refused() {
    let directory = Directory::new("agree-trace");
    let [one, same, other] = ["one", "same", "other"].map(|name| directory.file(name));
    std::fs::write(&one, trace([5, 4], |_| {})).unwrap();
    std::fs::write(&same, trace([5, 4], |_| {})).unwrap();
    std::fs::write(&other, trace([5, 4], |indices| indices[0] = 7)).unwrap();
    let bench = |file: &str| {
        ["bench", "--backend=host", "--processes", "--hidden=64", "--iters=1", "--routing", file]
            .map(str::to_owned)
    };
    let run = |files: [&str; 2]| {
        let [first, second] = files.map(bench);
        let [first, second] = [&first, &second].map(|all| all.iter().map(String::as_str).collect::<Vec<_>>());
        two([&first, &second])
    };
    for finished in run([&one, &same]) {
        finished.succeeded();
    }
    for finished in run([&one, &other]) {
        finished_alike(&finished, "--routing is recorded (hash ");
    }
}

/// Only random cases have a seed, so ranks that a launcher starts need no seed for the fixed suite.
#[test]
fn the_fixed_cases_need_no_seed() {
    let arguments = &["verify", "--backend=host", "--processes", "--suite-only"][..];
    for (rank, finished) in two([arguments; 2]).into_iter().enumerate() {
        assert_eq!(finished.code, Some(0), "rank {rank}: {finished:?}");
    }
}

#[test]
fn a_job_without_a_case_of_its_size_is_refused() {
    let mut command = program();
    command.args(["verify", "--backend=host", "--processes", "--seed=1"]);
    command.env("RANK", "0").env("WORLD_SIZE", "9").env("HYBRID_EP_STORE", "127.0.0.1:1");
    let finished = finish_in_time(command.spawn().unwrap());
    assert_eq!(finished.code, Some(2), "{finished:?}");
    assert!(finished.stderr.contains("no selected case has 9 ranks"), "{finished:?}");
}
