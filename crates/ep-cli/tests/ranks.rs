//! Ranks as processes: what the others do when one is gone, and that none is left behind.
#![cfg(target_os = "linux")]
#![allow(clippy::unwrap_used, reason = "a test that cannot go on panics")]

mod common;

use std::net::TcpListener;
use std::process::{Child, Command};
use std::time::{Duration, Instant};

use common::{finish, program};

/// A benchmark that would take hours.
const ENDLESS: &[&str] = &[
    "bench",
    "--backend",
    "host",
    "--processes",
    "--ranks",
    "3",
    "--domains",
    "1",
    "--experts",
    "12",
    "--tokens",
    "400",
    "--hidden",
    "512",
    "--iters",
    "1000000",
    "--timeout-ms",
    "20000",
];

/// Long enough for ranks to have met and begun; when it is not, they notice the loss while they meet.
const BEGUN: Duration = Duration::from_secs(2);

#[test]
fn a_killed_rank_is_named_by_the_others() {
    let store = TcpListener::bind("127.0.0.1:0").unwrap().local_addr().unwrap().to_string();
    let start = |rank: usize| {
        let mut command = program();
        command
            .args(ENDLESS)
            .env("RANK", rank.to_string())
            .env("WORLD_SIZE", "3")
            .env("HYBRID_EP_STORE", &store);
        command.spawn().unwrap()
    };
    let [zero, one, mut two] = [0, 1, 2].map(start);
    std::thread::sleep(BEGUN);
    two.kill().unwrap();
    let begin = Instant::now();
    for survivor in [zero, one] {
        finish(survivor).refused(3, &["rank 2 "]);
    }
    assert!(begin.elapsed() < Duration::from_secs(25), "{:?}", begin.elapsed());
    two.wait().unwrap();
}

#[test]
fn the_launcher_says_how_ranks_ended() {
    let launcher = program().args(ENDLESS).spawn().unwrap();
    let ranks = ranks_of(&launcher);
    std::thread::sleep(BEGUN);
    kill(ranks[2]);
    let finished = finish(launcher);
    assert_eq!(finished.code, Some(1), "{finished:?}");
    let last = finished.stderr.lines().last().unwrap();
    assert_eq!(last, "hybrid-ep: error: rank 2 was killed by signal 9; ranks 0, 1 exited with code 3");
    assert!(ranks.iter().all(|&rank| !is_running(rank)));
}

#[test]
fn ranks_end_with_their_launcher() {
    let mut launcher = program().args(ENDLESS).spawn().unwrap();
    let ranks = ranks_of(&launcher);
    launcher.kill().unwrap();
    launcher.wait().unwrap();
    let begin = Instant::now();
    while ranks.iter().any(|&rank| is_running(rank)) {
        assert!(begin.elapsed() < Duration::from_secs(10), "ranks of a killed launcher still run");
        std::thread::sleep(Duration::from_millis(20));
    }
}

/// The processes that the launcher started, by rank, once all three are there.
fn ranks_of(launcher: &Child) -> Vec<u32> {
    let begin = Instant::now();
    loop {
        let mut found: Vec<(String, u32)> = processes()
            .filter(|&pid| parent(pid) == Some(launcher.id()))
            .filter_map(|p| Some((rank(p)?, p)))
            .collect();
        found.sort();
        if found.len() == 3 {
            return found.into_iter().map(|(_, pid)| pid).collect();
        }
        assert!(begin.elapsed() < Duration::from_secs(20), "the launcher has started {found:?}");
        std::thread::sleep(Duration::from_millis(20));
    }
}

fn processes() -> impl Iterator<Item = u32> {
    std::fs::read_dir("/proc").unwrap().filter_map(|entry| entry.ok()?.file_name().to_str()?.parse().ok())
}

/// State and parent of a process that exists.
fn status(pid: u32) -> Option<(char, u32)> {
    let stat = std::fs::read_to_string(format!("/proc/{pid}/stat")).ok()?;
    let mut fields = stat[stat.rfind(')')? + 1..].split_whitespace();
    Some((fields.next()?.chars().next()?, fields.next()?.parse().ok()?))
}

fn parent(pid: u32) -> Option<u32> {
    status(pid).map(|(_, parent)| parent)
}

fn is_running(pid: u32) -> bool {
    status(pid).is_some_and(|(state, _)| state != 'Z')
}

/// The process's RANK.
fn rank(pid: u32) -> Option<String> {
    let environment = std::fs::read(format!("/proc/{pid}/environ")).ok()?;
    let rank = environment.split(|&byte| byte == 0).find_map(|entry| entry.strip_prefix(b"RANK="))?;
    Some(String::from_utf8_lossy(rank).into_owned())
}

fn kill(pid: u32) {
    assert!(Command::new("kill").args(["-9", &pid.to_string()]).status().unwrap().success());
}
