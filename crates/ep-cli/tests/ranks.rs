//! Ranks as processes: the others report a rank that dies, and no process is left behind.
#![cfg(target_os = "linux")]
#![allow(clippy::unwrap_used, reason = "a test that cannot go on panics")]

mod common;

use std::net::TcpListener;
use std::process::{Child, Command};
use std::time::{Duration, Instant};

use common::{finish, finish_in_time, program};

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

/// Usually long enough for the ranks to join and start. If not, they notice the loss while they join.
const BEGUN: Duration = Duration::from_secs(2);

#[test]
fn the_other_ranks_name_a_killed_rank() {
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
fn the_launcher_reports_how_ranks_ended() {
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

/// The launcher kills the stopped rank and reports that.
#[test]
fn the_launcher_kills_a_stopped_rank() {
    let mut command = program();
    // The last value of ENDLESS is that of --timeout-ms.
    command.args(&ENDLESS[..ENDLESS.len() - 1]).args(["3000", "--stall-timeout-ms", "2000"]);
    let launcher = command.spawn().unwrap();
    let ranks = ranks_of(&launcher);
    std::thread::sleep(BEGUN);
    assert!(Command::new("kill").args(["-STOP", &ranks[0].to_string()]).status().unwrap().success());
    let finished = finish_in_time(launcher);
    assert_eq!(finished.code, Some(3), "{finished:?}");
    let last = finished.stderr.lines().last().unwrap();
    assert!(
        last.starts_with("hybrid-ep: error: rank 0 was killed by this launcher, 7.0 s after rank "),
        "{last}"
    );
    assert!(last.ends_with(" had failed; ranks 1, 2 exited with code 3"), "{last}");
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

/// Waits until the launcher has started three processes, and returns them by rank.
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

/// State and parent of a process; `None` if it does not exist.
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

/// The variable RANK of a process.
fn rank(pid: u32) -> Option<String> {
    let environment = std::fs::read(format!("/proc/{pid}/environ")).ok()?;
    let rank = environment.split(|&byte| byte == 0).find_map(|entry| entry.strip_prefix(b"RANK="))?;
    Some(String::from_utf8_lossy(rank).into_owned())
}

fn kill(pid: u32) {
    assert!(Command::new("kill").args(["-9", &pid.to_string()]).status().unwrap().success());
}
