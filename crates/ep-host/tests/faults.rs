//! What happens when a rank leaves, stalls, dies, or does something else than the others: everybody else gets a
//! typed error that names it, in time, and nothing stays behind.

#![allow(clippy::unwrap_used)]

use std::time::{Duration, Instant};

use ep::workload::Workload;
use ep::{
    Backend, CallerError, CombineInput, CombineOutput, Config, DispatchInput, DispatchMode, DispatchOutput,
    Element, Error, PeerError, PeerFault, Probs, Rank, Result, TokenFormat, World,
};
use ep_host::HostBuffer;

const TIMEOUT: Duration = Duration::from_millis(1500);
/// Far beyond the timeout, however busy the machine: whoever takes longer hangs.
const HANGS: Duration = Duration::from_secs(30);
const EXPERTS: usize = 8;
const TOKENS: usize = 100;
const HIDDEN: usize = 64;

fn config() -> Config {
    let mut config = Config::default();
    config.timeout = TIMEOUT;
    config.chunk_tokens = 8;
    config.slots = 2;
    config
}

/// One round of everything, with this width.
fn round(buffer: &mut HostBuffer, seed: u64, hidden: usize) -> Result<()> {
    let routing =
        Workload { tokens: TOKENS, experts: EXPERTS, topk: 3, skew: 0.5, seed }.routing(buffer.rank());
    let handle = buffer.preprocess(&routing, DispatchMode::Permuted { pad_multiple: 4 }, None)?;
    let rows = buffer.receive_shape(&handle)?.allocated_rows();
    let tokens = buffer.alloc(TOKENS * 2 * hidden)?;
    let mut out = buffer.alloc(rows * 2 * hidden)?;
    buffer.dispatch(
        &handle,
        DispatchInput {
            hidden,
            format: TokenFormat::Bf16,
            tokens: &tokens,
            scales: None,
            probs: Probs::Skip,
        },
        DispatchOutput { tokens: &mut out, scales: None, probs: None, local_experts: None },
    )?;
    let mut back = buffer.alloc(TOKENS * 2 * hidden)?;
    buffer.combine(
        &handle,
        CombineInput { hidden, element: Element::Bf16, wire: Element::Bf16, rows: &out, probs: None },
        CombineOutput { tokens: &mut back, probs: None },
    )
}

/// Runs `body` on a thread per rank and returns what each got, by rank.
fn on_threads<T: Send>(
    ranks: usize,
    domains: usize,
    body: impl Fn(HostBuffer) -> T + Sync,
) -> Vec<std::thread::Result<T>> {
    let buffers = HostBuffer::threads(World::new(ranks, domains, EXPERTS).unwrap(), &config()).unwrap();
    std::thread::scope(|scope| {
        let threads: Vec<_> = buffers.into_iter().map(|buffer| scope.spawn(|| body(buffer))).collect();
        threads.into_iter().map(|thread| thread.join()).collect()
    })
}

fn peer_error(result: Result<()>) -> PeerError {
    match result {
        Err(Error::Peer(error)) => error,
        other => panic!("expected a peer error, got {other:?}"),
    }
}

/// Rounds until the first error.
fn until_error(buffer: &mut HostBuffer) -> Result<()> {
    (0..).try_for_each(|seed| round(buffer, seed, HIDDEN))
}

const WORLDS: [(usize, usize); 4] = [(2, 1), (4, 1), (4, 2), (4, 4)];

#[test]
fn a_rank_that_leaves_is_named() {
    for (ranks, domains) in WORLDS {
        let leaver = Rank(ranks as u32 - 1);
        let results = on_threads(ranks, domains, |mut buffer| {
            if buffer.rank() == leaver {
                return (0..3).try_for_each(|seed| round(&mut buffer, seed, HIDDEN));
            }
            let result = until_error(&mut buffer);
            // The buffer refuses further use, with the same error.
            assert_eq!(round(&mut buffer, 0, HIDDEN), result);
            result
        });
        for (rank, result) in results.into_iter().enumerate() {
            let result = result.unwrap();
            if rank == leaver.index() {
                result.unwrap();
            } else {
                let error = peer_error(result);
                assert_eq!((error.peer, error.fault), (leaver, PeerFault::Left), "{error}");
            }
        }
    }
}

#[test]
fn a_rank_that_panics_is_named() {
    let results = on_threads(4, 1, |mut buffer| {
        if buffer.rank() == Rank(1) {
            round(&mut buffer, 0, HIDDEN).unwrap();
            panic!("a bug in this rank's own code");
        }
        until_error(&mut buffer)
    });
    for (rank, result) in results.into_iter().enumerate().filter(|&(rank, _)| rank != 1) {
        assert_eq!(peer_error(result.unwrap()).peer, Rank(1), "as seen by rank {rank}");
    }
}

#[test]
fn a_rank_that_stalls_is_named_by_all_within_the_timeout() {
    for (ranks, domains) in WORLDS {
        let sleeper = Rank(ranks as u32 / 2);
        let results = on_threads(ranks, domains, |mut buffer| {
            round(&mut buffer, 0, HIDDEN).unwrap();
            if buffer.rank() == sleeper {
                std::thread::sleep(4 * TIMEOUT);
                return (Duration::ZERO, round(&mut buffer, 1, HIDDEN));
            }
            let start = Instant::now();
            let result = until_error(&mut buffer);
            (start.elapsed(), result)
        });
        for (rank, result) in results.into_iter().enumerate() {
            let (took, result) = result.unwrap();
            let error = peer_error(result);
            if rank == sleeper.index() {
                // It comes back to a world that has given up on it.
                assert_eq!(error.fault, PeerFault::Failed, "{error}");
            } else {
                assert_eq!((error.peer, error.fault), (sleeper, PeerFault::Stalled), "rank {rank}: {error}");
                assert!(took >= TIMEOUT && took < HANGS, "{took:?}");
            }
        }
    }
}

#[test]
fn ranks_that_pass_different_arguments_are_told_so() {
    for (ranks, domains) in WORLDS {
        let odd = Rank(1);
        let results = on_threads(ranks, domains, |mut buffer| {
            let hidden = if buffer.rank() == odd { 2 * HIDDEN } else { HIDDEN };
            round(&mut buffer, 0, hidden)
        });
        let mut told = 0;
        for (rank, result) in results.into_iter().enumerate() {
            match result.unwrap() {
                Err(Error::Caller(CallerError::Collective { field, mine, theirs, peer, .. })) => {
                    assert_eq!(field, "hidden");
                    assert!([&mine, &theirs].contains(&&(2 * HIDDEN).to_string()));
                    assert!(rank == odd.index() || peer == odd);
                    told += 1;
                }
                Err(Error::Peer(error)) => assert_eq!(error.fault, PeerFault::Failed, "{error}"),
                other => panic!("rank {rank}: {other:?}"),
            }
        }
        assert!(told >= 1, "{ranks} ranks in {domains} domains");
    }
}

#[test]
fn ranks_that_call_different_operators_are_told_so() {
    let results = on_threads(2, 1, |mut buffer| {
        let routing =
            Workload { tokens: 4, experts: EXPERTS, topk: 1, skew: 0.0, seed: 1 }.routing(buffer.rank());
        let handle = buffer.preprocess(&routing, DispatchMode::Plain, None)?;
        if buffer.rank() == Rank(1) {
            return buffer.preprocess(&routing, DispatchMode::Plain, None).map(|_| ());
        }
        let rows = buffer.receive_shape(&handle)?.allocated_rows();
        let (tokens, mut out) = (buffer.alloc(4 * 2 * HIDDEN)?, buffer.alloc(rows * 2 * HIDDEN)?);
        buffer.dispatch(
            &handle,
            DispatchInput {
                hidden: HIDDEN,
                format: TokenFormat::Bf16,
                tokens: &tokens,
                scales: None,
                probs: Probs::Skip,
            },
            DispatchOutput { tokens: &mut out, scales: None, probs: None, local_experts: None },
        )
    });
    let errors: Vec<String> = results.into_iter().map(|r| r.unwrap().unwrap_err().to_string()).collect();
    assert!(
        errors.iter().any(|e| e.contains("the operator is dispatch on rank 0 and preprocess on rank 1")),
        "{errors:?}"
    );
}

#[test]
fn handles_do_not_travel_between_buffers() {
    let mut one = HostBuffer::threads(World::new(1, 1, EXPERTS).unwrap(), &config()).unwrap().remove(0);
    let mut other = HostBuffer::threads(World::new(1, 1, EXPERTS).unwrap(), &config()).unwrap().remove(0);
    let routing = Workload { tokens: 1, experts: EXPERTS, topk: 1, skew: 0.0, seed: 1 }.routing(Rank(0));
    let handle = one.preprocess(&routing, DispatchMode::Plain, None).unwrap();
    assert_eq!(
        other.receive_shape(&handle).unwrap_err().to_string(),
        "handle: it was made by another buffer"
    );
    let rows = one.alloc(2 * HIDDEN).unwrap();
    let mut back = one.alloc(2 * HIDDEN).unwrap();
    let early = one.combine(
        &handle,
        CombineInput {
            hidden: HIDDEN,
            element: Element::Bf16,
            wire: Element::Bf16,
            rows: &rows,
            probs: None,
        },
        CombineOutput { tokens: &mut back, probs: None },
    );
    assert!(early.unwrap_err().to_string().contains("never dispatched"));
}

#[cfg(target_os = "linux")]
mod processes {
    use std::net::TcpListener;
    use std::os::unix::process::ExitStatusExt as _;
    use std::process::{Child, Command, Output, Stdio};

    use ep::config::LaunchEnv;
    use ep::rendezvous::TcpRendezvous;

    use super::*;

    /// Not a test of its own: what a rank's process runs when one of the tests below starts it.
    #[test]
    fn rank_process() {
        let Some(launch) = LaunchEnv::from_env().unwrap() else { return };
        let domains: usize = std::env::var("TEST_DOMAINS").unwrap().parse().unwrap();
        let world = World::new(launch.world_size as usize, domains, EXPERTS).unwrap();
        let mut meet = TcpRendezvous::join(
            &launch.store,
            Rank(launch.rank),
            launch.world_size as usize,
            Duration::from_secs(20),
        )
        .unwrap();
        let mut buffer = HostBuffer::join(world, &mut meet, &config()).unwrap();
        round(&mut buffer, 0, HIDDEN).unwrap();
        println!("first round done");
        let error = peer_error(until_error(&mut buffer));
        println!("\nblames {} {:?} after {} ms", error.peer, error.fault, error.waited.as_millis());
    }

    fn spawn(ranks: usize, domains: usize) -> Vec<Child> {
        // The port is free again when the listener is dropped; rank 0 takes it over.
        let store = TcpListener::bind("127.0.0.1:0").unwrap().local_addr().unwrap().to_string();
        (0..ranks)
            .map(|rank| {
                Command::new(std::env::current_exe().unwrap())
                    .args(["--exact", "processes::rank_process", "--nocapture"])
                    .env("RANK", rank.to_string())
                    .env("WORLD_SIZE", ranks.to_string())
                    .env("HYBRID_EP_STORE", &store)
                    .env("TEST_DOMAINS", domains.to_string())
                    .stdout(Stdio::piped())
                    .stderr(Stdio::piped())
                    .spawn()
                    .unwrap()
            })
            .collect()
    }

    /// Waits until a rank has run its first round; later output stays in the pipe.
    fn wait_running(child: &mut Child) {
        use std::io::Read as _;
        let mut seen = String::new();
        let mut byte = [0];
        while !seen.contains("first round done") {
            assert_eq!(child.stdout.as_mut().unwrap().read(&mut byte).unwrap(), 1, "ended early: {seen}");
            seen.push(byte[0] as char);
        }
    }

    fn signal(child: &Child, name: &str) {
        let status = Command::new("kill").args([name, &child.id().to_string()]).status().unwrap();
        assert!(status.success());
    }

    /// Processes that map memory of ours.
    fn mapping_processes() -> Vec<u32> {
        let mut found = Vec::new();
        for entry in std::fs::read_dir("/proc").unwrap().flatten() {
            let Some(pid) = entry.file_name().to_str().and_then(|name| name.parse().ok()) else { continue };
            let maps = std::fs::read_to_string(entry.path().join("maps")).unwrap_or_default();
            if maps.contains("memfd:hybrid-ep") {
                found.push(pid);
            }
        }
        found
    }

    fn shm_files() -> Vec<std::ffi::OsString> {
        let mut names: Vec<_> = std::fs::read_dir("/dev/shm")
            .into_iter()
            .flatten()
            .flatten()
            .map(|entry| entry.file_name())
            .collect();
        names.sort();
        names
    }

    /// Runs a world, does something to one rank, and returns (who, what) as the others say.
    fn with_victim(
        ranks: usize,
        domains: usize,
        victim: usize,
        delay: Duration,
        how: &str,
    ) -> Vec<(usize, String)> {
        let before = shm_files();
        let mut children = spawn(ranks, domains);
        children.iter_mut().for_each(wait_running);
        std::thread::sleep(delay);
        signal(&children[victim], how);
        let start = Instant::now();
        let pids: Vec<u32> = children.iter().map(Child::id).collect();
        let mut victim_child = children.remove(victim);
        let mut said = Vec::new();
        for (rank, child) in (0..ranks).filter(|&rank| rank != victim).zip(children) {
            let Output { status, stdout, stderr } = child.wait_with_output().unwrap();
            let text = String::from_utf8_lossy(&stdout).into_owned();
            assert!(status.success(), "rank {rank}: {text} {}", String::from_utf8_lossy(&stderr));
            let line = text.lines().find(|line| line.starts_with("blames")).expect("a blame").to_string();
            said.push((rank, line));
        }
        assert!(start.elapsed() < HANGS, "{:?}", start.elapsed());
        victim_child.kill().unwrap();
        assert_eq!(victim_child.wait().unwrap().signal(), Some(9));
        assert!(!mapping_processes().iter().any(|pid| pids.contains(pid)), "memory is still mapped");
        assert_eq!(shm_files(), before, "files stayed behind");
        said
    }

    #[test]
    fn a_killed_process_is_named_at_once() {
        for (case, (ranks, domains)) in [(2, 1), (4, 2), (4, 4)].into_iter().enumerate() {
            for victim in [0, ranks - 1] {
                // At any point of the rounds: a different one each time.
                let delay = Duration::from_micros(700 * (1 + 3 * case as u64 + victim as u64));
                for (rank, said) in with_victim(ranks, domains, victim, delay, "-KILL") {
                    let expected = format!("blames {victim} Died after ");
                    assert!(said.starts_with(&expected), "rank {rank} of {ranks}/{domains}: {said}");
                }
            }
        }
    }

    #[test]
    fn a_stopped_process_is_named_within_the_timeout() {
        for (ranks, domains, victim) in [(2, 1, 1), (4, 2, 3)] {
            for (rank, said) in with_victim(ranks, domains, victim, Duration::from_millis(3), "-STOP") {
                let expected = format!("blames {victim} Stalled after ");
                assert!(said.starts_with(&expected), "rank {rank} of {ranks}/{domains}: {said}");
            }
        }
    }
}
