//! These tests run ranks as processes, end or stop one of them, and check the errors of the others, and that nothing is
//! left.

use std::io::Read as _;
use std::net::TcpListener;
use std::os::unix::process::{CommandExt as _, ExitStatusExt as _};
use std::path::Path;
use std::process::{Child, Command, Output, Stdio};
use std::time::{Duration, Instant};

use ep::config::LaunchEnv;
use ep::join::TcpRendezvous;
use ep::{Backend, World};
use ep_host::HostBuffer;

use crate::leftovers::Held;
use crate::{EXPERTS, HANGS, HIDDEN, config, peer_error, round, until_error};

/// Not a test by itself: the tests below start processes that run this function as one rank.
#[test]
fn rank_process() {
    let Some(launch) = LaunchEnv::from_env().unwrap() else { return };
    let domains: usize = std::env::var("TEST_DOMAINS").unwrap().parse().unwrap();
    let world =
        World::builder().ranks(launch.world_size as usize).domains(domains).experts(EXPERTS).build().unwrap();
    // Processes may take long to start on a busy machine.
    let mut config = config();
    config.machine = std::env::var("TEST_MACHINE").ok();
    if let Ok(engine) = std::env::var("TEST_TRANSPORT") {
        config.host.transport.engine = engine;
        config.host.transport.libfabric = std::env::var_os("HYBRID_EP_LIBFABRIC").map(Into::into);
    }
    let mut patient = config.clone();
    patient.timeout = Duration::from_secs(20);
    let mut meet = TcpRendezvous::launched(&launch, &patient).unwrap();
    let mut buffer = HostBuffer::join(&world, &mut meet, &config).unwrap();
    round(&mut buffer, 0, HIDDEN).unwrap();
    println!("first round done");
    let error = peer_error(until_error(&mut buffer));
    let machine = error.machine.as_ref().map_or(String::new(), |machine| format!(" on {machine}"));
    let (peer, fault, waited) = (error.peer, error.fault, error.waited.as_millis());
    // Print the whole error, so that a test that expected a different one shows it.
    println!("\nnames {peer}{machine} {fault:?} after {waited} ms: {error}");
}

/// Starts the ranks of a world. They make their files, if any, in `directory`.
fn spawn(ranks: usize, domains: usize, directory: &Path) -> Vec<Child> {
    spawn_by(&[], |_| Vec::new(), ranks, domains, directory)
}

/// Like [`spawn`], with a command that starts each rank, and environment variables for each rank.
fn spawn_by(
    starter: &[&str],
    variables: impl Fn(usize) -> Vec<(&'static str, String)>,
    ranks: usize,
    domains: usize,
    directory: &Path,
) -> Vec<Child> {
    // Dropping the listener frees the port for rank 0.
    let store = TcpListener::bind("127.0.0.1:0").unwrap().local_addr().unwrap().to_string();
    (0..ranks)
        .map(|rank| {
            let program = std::env::current_exe().unwrap().into_os_string();
            let words: Vec<_> = starter.iter().map(Into::into).chain([program]).collect();
            Command::new(&words[0])
                .args(&words[1..])
                .args(["--exact", "processes::rank_process", "--nocapture"])
                .env("RANK", rank.to_string())
                .env("WORLD_SIZE", ranks.to_string())
                .env("HYBRID_EP_STORE", &store)
                .env("TEST_DOMAINS", domains.to_string())
                .env("TMPDIR", directory)
                .env("XDG_RUNTIME_DIR", directory)
                .envs(variables(rank))
                .process_group(0)
                .stdout(Stdio::piped())
                .stderr(Stdio::piped())
                .spawn()
                .unwrap()
        })
        .collect()
}

/// Waits until all ranks have run their first round. Later output stays in the pipes.
fn wait_running(children: &mut [Child]) {
    let runs = |child: &mut Child| {
        let (mut seen, mut byte) = (String::new(), [0]);
        while !seen.contains("first round done") {
            if child.stdout.as_mut().unwrap().read(&mut byte).unwrap() == 0 {
                return false;
            }
            seen.push(byte[0] as char);
        }
        true
    };
    if children.iter_mut().all(runs) {
        return;
    }
    // When one rank ends early, the others end too. The errors of all ranks show which one was first.
    let said = children.iter_mut().zip(0..).map(|(child, rank)| {
        let mut why = String::new();
        child.stderr.as_mut().unwrap().read_to_string(&mut why).unwrap();
        format!("rank {rank}: {why}")
    });
    panic!("ended early:\n{}", said.collect::<String>());
}

fn signal(child: &Child, name: &str) {
    let status = Command::new("kill").args([name, &child.id().to_string()]).status().unwrap();
    assert!(status.success());
}

/// Runs a world, sends the signal `how` to one rank, and returns (rank, error line) of the others.
fn with_victim(
    ranks: usize,
    domains: usize,
    victim: usize,
    delay: Duration,
    how: &str,
) -> Vec<(usize, String)> {
    let directory = std::env::temp_dir().join(format!("hybrid-ep-faults-{}-{how}", std::process::id()));
    std::fs::create_dir_all(&directory).unwrap();
    lose(spawn(ranks, domains, &directory), &directory, victim, delay, how)
}

/// Sends the signal `how` to one of the processes, and returns (rank, error line) of the others. Removes `directory`,
/// which must then be empty.
fn lose(
    mut children: Vec<Child>,
    directory: &Path,
    victim: usize,
    delay: Duration,
    how: &str,
) -> Vec<(usize, String)> {
    let ranks = children.len();
    wait_running(&mut children);
    let pids: Vec<u32> = children.iter().map(Child::id).collect();
    let held = Held::by(&pids, directory);
    std::thread::sleep(delay);
    signal(&children[victim], how);
    let start = Instant::now();
    let mut victim_child = children.remove(victim);
    let mut said = Vec::new();
    for (rank, child) in (0..ranks).filter(|&rank| rank != victim).zip(children) {
        let Output { status, stdout, stderr } = child.wait_with_output().unwrap();
        let text = String::from_utf8_lossy(&stdout).into_owned();
        assert!(status.success(), "rank {rank}: {text} {}", String::from_utf8_lossy(&stderr));
        let line = text.lines().find(|line| line.starts_with("names")).expect("an error line").to_string();
        said.push((rank, line));
    }
    assert!(start.elapsed() < HANGS, "{:?}", start.elapsed());
    victim_child.kill().unwrap();
    assert_eq!(victim_child.wait().unwrap().signal(), Some(9));
    held.assert_gone();
    std::fs::remove_dir(directory).unwrap();
    said
}

#[test]
fn a_killed_process_is_named_as_dead() {
    for (case, (ranks, domains)) in [(2, 1), (4, 2), (4, 4)].into_iter().enumerate() {
        for victim in [0, ranks - 1] {
            // A different delay in each case, so that ranks are killed at different points of a round.
            let delay = Duration::from_micros(700 * (1 + 3 * case as u64 + victim as u64));
            for (rank, said) in with_victim(ranks, domains, victim, delay, "-KILL") {
                let expected = format!("names {victim} Died after ");
                assert!(said.starts_with(&expected), "rank {rank} of {ranks}/{domains}: {said}");
            }
        }
    }
}

#[test]
fn a_stopped_process_is_named_within_the_timeout() {
    for (ranks, domains, victim) in [(2, 1, 1), (4, 2, 3)] {
        for (rank, said) in with_victim(ranks, domains, victim, Duration::from_millis(3), "-STOP") {
            let expected = format!("names {victim} Stalled after ");
            assert!(said.starts_with(&expected), "rank {rank} of {ranks}/{domains}: {said}");
        }
    }
}

/// Runs a world whose domains are on machines of their own, and loses a rank as [`with_victim`] does.
#[cfg(feature = "fabric")]
fn with_victim_on_machines(ranks: usize, domains: usize, victim: usize, how: &str) {
    let directory = std::env::temp_dir().join(format!("hybrid-ep-nodes-{}-{how}", std::process::id()));
    std::fs::create_dir_all(&directory).unwrap();
    let machine = |rank: usize| format!("node-{}", rank * domains / ranks);
    let variables = |rank: usize| {
        let secret = "the secret of a test job".to_string();
        let engine = "tcp".to_string();
        vec![("TEST_MACHINE", machine(rank)), ("TEST_TRANSPORT", engine), ("HYBRID_EP_SECRET", secret)]
    };
    let children = spawn_by(&[], variables, ranks, domains, &directory);
    let fault = if how == "-KILL" { "Died" } else { "Stalled" };
    for (rank, said) in lose(children, &directory, victim, Duration::from_millis(3), how) {
        let expected = format!("names {victim} on {} {fault} after ", machine(victim));
        assert!(said.starts_with(&expected), "rank {rank} of {ranks}/{domains}: {said}");
    }
}

/// The provider `shm` leaves a file when its process is killed.
#[test]
#[cfg(feature = "fabric")]
fn a_rank_that_is_killed_over_shm_is_named_and_leaves_no_file() {
    if ep_fabric::testing::installed().is_none() {
        return;
    }
    let directory = std::env::temp_dir().join(format!("hybrid-ep-shm-{}", std::process::id()));
    std::fs::create_dir_all(&directory).unwrap();
    let over_shm = |_| vec![("TEST_TRANSPORT", "shm".to_string())];
    let children = spawn_by(&[], over_shm, 4, 2, &directory);
    let pids: Vec<u32> = children.iter().map(std::process::Child::id).collect();
    for (rank, said) in lose(children, &directory, 3, Duration::from_millis(3), "-KILL") {
        assert!(said.starts_with("names 3 Died after "), "rank {rank}: {said}");
    }
    let files = std::fs::read_dir("/dev/shm").unwrap().flatten();
    let left: Vec<String> = files
        .map(|file| file.file_name().to_string_lossy().into_owned())
        .filter(|name| {
            // Files of the provider, and the markers beside them.
            let is_of = |pid: &u32| {
                name.starts_with(&format!("{pid}:")) || name.starts_with(&format!("hybrid-ep-shm-{pid}-"))
            };
            pids.iter().any(is_of)
        })
        .collect();
    assert!(left.is_empty(), "{left:?}");
}

#[test]
#[cfg(feature = "fabric")]
fn a_rank_that_is_lost_on_another_machine_is_named_with_its_machine() {
    if ep_fabric::testing::installed().is_none() {
        return;
    }
    for (ranks, domains, victim) in [(2, 2, 0), (4, 2, 3), (4, 4, 1)] {
        for how in ["-KILL", "-STOP"] {
            with_victim_on_machines(ranks, domains, victim, how);
        }
    }
}

/// Ranks that cannot open each other's pidfd detect a death by their links.
#[test]
fn ranks_in_other_pid_namespaces_work_and_detect_a_death() {
    let starter = ["unshare", "--pid", "--fork", "--kill-child"];
    let may = Command::new(starter[0]).args(&starter[1..]).arg("true").output();
    if !may.is_ok_and(|output| output.status.success()) {
        println!("skipped: this user may not create PID namespaces");
        return;
    }
    let mut children = spawn_by(&starter, |_| Vec::new(), 4, 2, &std::env::temp_dir());
    wait_running(&mut children);
    let mut victim = children.remove(1);
    victim.kill().unwrap();
    for (rank, child) in [0, 2, 3].into_iter().zip(children) {
        let Output { status, stdout, stderr } = child.wait_with_output().unwrap();
        let text = String::from_utf8_lossy(&stdout).into_owned();
        assert!(status.success(), "rank {rank}: {text} {}", String::from_utf8_lossy(&stderr));
        assert!(text.contains("names 1 Died after "), "rank {rank}: {text}");
    }
    victim.wait().unwrap();
}
