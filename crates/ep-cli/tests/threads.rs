//! If the system refuses threads, commands end with an error that contains advice: they never panic or hang.
#![cfg(target_os = "linux")]
#![allow(clippy::unwrap_used, reason = "a test that cannot go on panics")]

mod common;

use std::net::TcpListener;
use std::os::unix::fs::MetadataExt as _;
use std::os::unix::process::CommandExt as _;
use std::process::{Command, Stdio};

use common::{Finished, TINY, finish_in_time, program};

/// A user that only this test uses, if the test runs as root: the limit does not apply to root.
fn user() -> Option<u32> {
    let root = std::fs::metadata("/proc/self").unwrap().uid() == 0;
    root.then(|| 50_000 + std::process::id() % 10_000)
}

/// The program as a user that may have this number of threads.
fn limited(threads: usize) -> Command {
    let inner = program();
    let mut command = Command::new("prlimit");
    command.arg(format!("--nproc={threads}")).arg(inner.get_program());
    for (key, _) in inner.get_envs() {
        command.env_remove(key);
    }
    if let Some(user) = user() {
        command.uid(user);
    }
    command.stdin(Stdio::null()).stdout(Stdio::piped()).stderr(Stdio::piped());
    command
}

/// Whether that user can run the program at all: the user cannot read a checkout below a private directory.
fn can_run() -> bool {
    let done = limited(1000).arg("--version").output();
    let can = done.is_ok_and(|output| output.status.success());
    if !can {
        eprintln!("skipped: no prlimit, or another user cannot run {:?}", program().get_program());
    }
    can
}

/// Runs the program with this limit of threads, which may be enough.
#[track_caller]
fn run(threads: usize, arguments: &[&str]) -> Finished {
    let finished = finish_in_time(limited(threads).args(arguments).spawn().unwrap());
    assert!(!finished.stderr.contains("panicked"), "{threads} threads, {arguments:?}: {finished:?}");
    finished
}

#[test]
fn commands_without_threads_end_with_an_error() {
    if !can_run() {
        return;
    }
    let commands =
        [TINY, &["verify", "--cases", "3"], &["verify", "--soak", "3"], &["calibrate", "--duration-ms", "2"]];
    for arguments in commands {
        let refused = run(1, arguments);
        assert_eq!(refused.code, Some(2), "{refused:?}");
        assert!(refused.stderr.contains("starting "), "{refused:?}");
    }
    // Only a user without other threads reaches every limit: at each limit, a different thread is the first to be refused.
    if user().is_some() {
        for threads in 2..=14 {
            for arguments in commands {
                let finished = run(threads, arguments);
                assert!(matches!(finished.code, Some(0 | 2 | 3)), "{threads} threads: {finished:?}");
            }
        }
    }
}

#[test]
fn doctor_without_threads_says_what_is_unknown() {
    if !can_run() {
        return;
    }
    let said = run(1, &["doctor"]).succeeded().stdout;
    for part in ["starting the thread that queries the driver", "starting the thread that queries libfabric"]
    {
        assert!(said.contains(part), "no `{part}` in: {said}");
    }
}

/// Rank 1 cannot start the thread that ends it with its launcher. It still tells rank 0 why it fails.
#[test]
fn a_rank_without_threads_tells_the_others() {
    if !can_run() {
        return;
    }
    let port = TcpListener::bind("127.0.0.1:0").unwrap().local_addr().unwrap().port();
    let ranks = ["0", "1"].map(|rank| {
        let (mut command, launched) =
            if rank == "0" { (program(), None) } else { (limited(1), Some("--launched")) };
        command
            .args(["verify", "--processes", "--ranks", "2", "--seed", "3", "--cases", "3"])
            .args(launched)
            .envs([("RANK", rank), ("WORLD_SIZE", "2"), ("MASTER_ADDR", "127.0.0.1")])
            .env("HYBRID_EP_SECRET", "no-one-else-knows-this-word")
            .env("HYBRID_EP_STORE", format!("127.0.0.1:{port}"));
        command.spawn().unwrap()
    });
    let [zero, one] = ranks.map(finish_in_time);
    assert_eq!((zero.code, one.code), (Some(3), Some(2)), "{zero:?} {one:?}");
    let reason = "starting the thread that ends this rank with its launcher";
    assert!(one.stderr.contains(reason), "{one:?}");
    assert!(zero.stderr.contains("rank 1") && zero.stderr.contains(reason), "{zero:?}");
}
