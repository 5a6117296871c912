//! Faults: when a rank leaves, stalls, dies, or makes another call than the others, every other rank gets a typed error
//! that names it within the bounds, and no resource outlives the processes.

#![allow(clippy::unwrap_used)]

use std::sync::atomic::{AtomicBool, Ordering::SeqCst};
use std::time::{Duration, Instant};

use ep::workload::Workload;
use ep::{
    Backend, BackendExt, CallerError, CombineInput, CombineOutput, Config, DispatchInput, DispatchMode,
    DispatchOutput, Error, PeerError, PeerFault, Probs, Rank, Result, TokenFormat, World,
};
use ep_host::HostBuffer;

#[cfg(target_os = "linux")]
mod leftovers;

const TIMEOUT: Duration = Duration::from_millis(1500);
/// Far beyond the timeout, even on a busy machine. A test that takes longer counts as hung.
const HANGS: Duration = Duration::from_secs(30);
const EXPERTS: usize = 8;
const TOKENS: usize = 100;
const HIDDEN: usize = 64;

fn config() -> Config {
    let mut config = Config::default();
    config.timeout = TIMEOUT;
    config.chunk_tokens = 8;
    config.host.slots = 2;
    config
}

/// One round: preprocess, dispatch and combine, with this width.
fn round(buffer: &mut HostBuffer, seed: u64, hidden: usize) -> Result<()> {
    let routing =
        Workload { tokens: TOKENS, experts: EXPERTS, topk: 3, skew: 0.5, seed }.routing(buffer.rank());
    let handle = buffer.preprocess(&routing, DispatchMode::permuted(4).unwrap(), None)?;
    let rows = buffer.receive_shape(&handle)?.allocated_rows();
    let tokens = buffer.alloc(TOKENS * 2 * hidden)?;
    let mut out = buffer.alloc(rows * 2 * hidden)?;
    buffer.dispatch(
        &handle,
        DispatchInput::new(&tokens, hidden).probs(Probs::Skip),
        DispatchOutput::new(&mut out),
    )?;
    let mut back = buffer.alloc(TOKENS * 2 * hidden)?;
    buffer.combine(&handle, CombineInput::new(&out, hidden), CombineOutput::new(&mut back))
}

/// Runs `body` on one thread per rank and returns the results, by rank.
fn on_threads<T: Send>(
    ranks: usize,
    domains: usize,
    body: impl Fn(HostBuffer) -> T + Sync,
) -> Vec<std::thread::Result<T>> {
    let buffers = HostBuffer::threads(
        &World::builder().ranks(ranks).domains(domains).experts(EXPERTS).build().unwrap(),
        &config(),
    )
    .unwrap();
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

/// Runs rounds until the first error.
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
fn a_late_rank_that_waits_outside_of_operators_is_said_to_do_so() {
    let text_of = |outside: bool| {
        let world = World::builder().ranks(2).experts(EXPERTS).build().unwrap();
        let mut buffers = HostBuffer::threads(&world, &config()).unwrap();
        let waiting = buffers.pop().unwrap();
        let is_over = AtomicBool::new(false);
        std::thread::scope(|scope| {
            let is_over = &is_over;
            scope.spawn(move || {
                // Until the other rank has failed.
                while !is_over.load(SeqCst) {
                    if outside {
                        let _ = waiting.check_peers("all ranks to reduce gradients", Duration::ZERO);
                    }
                    std::thread::sleep(Duration::from_millis(5));
                }
            });
            let error = peer_error(round(&mut buffers[0], 0, HIDDEN));
            is_over.store(true, SeqCst);
            assert_eq!((error.peer, error.fault), (Rank(1), PeerFault::Late), "{error}");
            error.to_string()
        })
    };
    // Of several ranks that take part in the wait, none blames another.
    let world = World::builder().ranks(4).experts(EXPERTS).build().unwrap();
    let mut buffers = HostBuffer::threads(&world, &config()).unwrap();
    let waiting = buffers.split_off(1);
    std::thread::scope(|scope| {
        let waits = |buffer: HostBuffer| {
            let since = Instant::now();
            loop {
                match buffer.check_peers("all ranks to reduce gradients", since.elapsed()) {
                    Err(Error::Peer(error)) => break (buffer, error),
                    result => assert_eq!(result, Ok(())),
                }
                assert!(since.elapsed() < HANGS);
                std::thread::sleep(Duration::from_millis(5));
            }
        };
        let threads: Vec<_> = waiting.into_iter().map(|buffer| scope.spawn(move || waits(buffer))).collect();
        let error = peer_error(round(&mut buffers[0], 0, HIDDEN));
        assert_eq!(error.fault, PeerFault::Late, "{error}");
        for (buffer, error) in threads.into_iter().map(|thread| thread.join().unwrap()) {
            assert_eq!((error.peer, error.fault), (Rank(0), PeerFault::Failed), "{}: {error}", buffer.rank());
            assert!(error.to_string().contains("such as reduce_gradients?"), "{error}");
        }
    });

    let says_so =
        "it waits for gradients to be reduced (has this rank left out a call, such as reduce_gradients?)";
    let text = text_of(true);
    assert!(text.contains(says_so), "{text}");
    let text = text_of(false);
    assert!(!text.contains("gradients"), "{text}");
}

#[test]
fn a_wait_outside_of_operators_names_a_lost_rank() {
    let lost = |buffer: &HostBuffer| match buffer.check_peers("a collective", Duration::from_secs(7)) {
        Err(Error::Peer(error)) => Some(error),
        other => {
            assert_eq!(other, Ok(()));
            None
        }
    };
    let world = World::builder().ranks(4).experts(EXPERTS).build().unwrap();
    let mut buffers = HostBuffer::threads(&world, &config()).unwrap();
    assert_eq!(buffers.iter().find_map(lost), None);
    let leaving = buffers.pop().unwrap();
    drop(leaving);
    let error = lost(&buffers[0]).unwrap();
    assert_eq!((error.peer, error.rank, error.fault), (Rank(3), Rank(0), PeerFault::Left));
    assert!(
        error.to_string().starts_with("rank 3 left (reduce #0): rank 0 waited 7.000 s for a collective"),
        "{error}"
    );
    // A rank that has failed says who is at fault.
    let said = peer_error(round(&mut buffers[1], 0, HIDDEN));
    let error = lost(&buffers[0]).unwrap();
    assert_eq!((said.peer, error.peer, error.fault), (Rank(3), Rank(3), PeerFault::Left));
    assert!(error.to_string().contains("(rank 1 says so)"), "{error}");
    assert_eq!(buffers[1].check_peers("a collective", Duration::ZERO).unwrap_err(), said.into());

    // The rank at fault hears which rank has failed because of it, and why.
    let world = World::builder().ranks(2).experts(EXPERTS).build().unwrap();
    let mut buffers = HostBuffer::threads(&world, &config()).unwrap();
    assert_eq!(peer_error(round(&mut buffers[1], 0, HIDDEN)).peer, Rank(0));
    let error = lost(&buffers[0]).unwrap();
    assert_eq!((error.peer, error.fault), (Rank(1), PeerFault::Failed));
    assert!(error.cause.as_ref().is_some_and(|cause| cause.contains("rank 0 is late")), "{error}");
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
fn a_rank_that_does_not_enter_is_named_by_all_ranks_within_the_timeout() {
    for (ranks, domains) in WORLDS {
        let sleeper = Rank(ranks as u32 / 2);
        let results = on_threads(ranks, domains, |mut buffer| {
            round(&mut buffer, 0, HIDDEN).unwrap();
            let start = Instant::now();
            if buffer.rank() == sleeper {
                std::thread::sleep(4 * TIMEOUT);
                return (start..Instant::now(), round(&mut buffer, 1, HIDDEN));
            }
            let result = until_error(&mut buffer);
            (start..Instant::now(), result)
        });
        // The rank that has waited longest reports the fault to the others, which may have begun to wait later.
        let started = results.iter().flatten().map(|(span, _)| span.start).min().unwrap();
        for (rank, result) in results.into_iter().enumerate() {
            let (span, result) = result.unwrap();
            let took = span.end - started;
            let error = peer_error(result);
            if rank == sleeper.index() {
                // The other ranks have failed when the sleeper enters.
                assert_eq!(error.fault, PeerFault::Failed, "{error}");
            } else {
                assert_eq!((error.peer, error.fault), (sleeper, PeerFault::Late), "rank {rank}: {error}");
                let said = error.to_string();
                assert!(said.contains("timeout = 1.5 s") && said.contains("stall_timeout = 1.5 s"), "{said}");
                assert!(took >= TIMEOUT && took < HANGS, "{took:?}");
            }
        }
    }
}

/// A rank that writes a checkpoint or compiles for longer than the stall bound is healthy: its heartbeat runs.
#[test]
fn a_busy_rank_is_waited_for_beyond_the_stall_bound() {
    // Long enough for a busy machine: a rank inside an operator must make progress within this time.
    const STALL: Duration = Duration::from_secs(3);
    let mut config = config();
    config.timeout = Duration::from_secs(120);
    config.stall_timeout = STALL;
    for (ranks, domains) in [(2, 1), (4, 2)] {
        let world = World::builder().ranks(ranks).domains(domains).experts(EXPERTS).build().unwrap();
        let busy = Rank(ranks as u32 / 2);
        std::thread::scope(|scope| {
            for mut buffer in HostBuffer::threads(&world, &config).unwrap() {
                scope.spawn(move || {
                    if buffer.rank() == busy {
                        std::thread::sleep(STALL + STALL / 2);
                    }
                    round(&mut buffer, 0, HIDDEN).unwrap();
                });
            }
        });
    }
}

#[test]
fn the_cause_of_a_failure_reaches_the_other_ranks() {
    let results = on_threads(4, 2, |mut buffer| {
        let odd = buffer.rank() == Rank(1);
        let result = round(&mut buffer, 0, if odd { 2 * HIDDEN } else { HIDDEN });
        (odd, result)
    });
    let said: Vec<String> = results.into_iter().map(|r| r.unwrap().1.unwrap_err().to_string()).collect();
    for text in &said {
        let named = text.contains("hidden is 64 on rank") || text.contains("hidden is 128 on rank");
        assert!(named, "a rank was not told the cause: {said:?}");
    }
}

/// Ctrl-C in Python arrives as an interrupt, and a waiting operator then ends.
#[test]
fn a_waiting_operator_can_be_interrupted() {
    use std::sync::Arc;
    use std::sync::atomic::{AtomicBool, Ordering::Relaxed};
    for workers in [1, 3] {
        let stop = Arc::new(AtomicBool::new(false));
        let asked = Arc::clone(&stop);
        let mut config = Config::default();
        config.host.workers = workers;
        config.interrupt = ep::Interrupt::new(move || asked.load(Relaxed));
        let mut buffers =
            HostBuffer::threads(&World::builder().ranks(2).experts(EXPERTS).build().unwrap(), &config)
                .unwrap();
        let (mut other, mut one) = (buffers.remove(1), buffers.remove(0));
        std::thread::scope(|scope| {
            // Rank 1 takes part in preprocess and never dispatches.
            scope.spawn(|| {
                let routing = Workload { tokens: TOKENS, experts: EXPERTS, topk: 3, skew: 0.5, seed: 0 }
                    .routing(other.rank());
                other.preprocess(&routing, DispatchMode::permuted(4).unwrap(), None).unwrap();
            });
            scope.spawn(|| {
                std::thread::sleep(Duration::from_millis(200));
                stop.store(true, Relaxed);
            });
            let start = Instant::now();
            let error = round(&mut one, 0, HIDDEN).unwrap_err();
            assert!(matches!(error, Error::Caller(CallerError::Interrupted { .. })), "{error}");
            assert!(start.elapsed() < HANGS);
            assert_eq!(round(&mut one, 0, HIDDEN).unwrap_err(), error, "the buffer refuses further use");
        });
    }
}

/// Over a slow link, dispatch and combine take longer than the stall bound; each message takes a quarter of it.
#[test]
fn operators_that_make_progress_may_take_longer_than_the_stall_bound() {
    let mut config = config();
    (config.stall_timeout, config.timeout) = (Duration::from_secs(1), Duration::from_secs(20));
    config.host.transport.engine = "paced:0.1MB/s,1us".into();
    let world = World::builder().ranks(2).domains(2).experts(EXPERTS).build().unwrap();
    let buffers = HostBuffer::threads(&world, &config).unwrap();
    let start = Instant::now();
    std::thread::scope(|scope| {
        for mut buffer in buffers {
            scope.spawn(move || round(&mut buffer, 0, 1536).unwrap());
        }
    });
    assert!(start.elapsed() > 2 * Duration::from_secs(1), "the link is too fast for this test");
}

/// Rank 1 finishes a dispatch when its transport has taken its rows, then fails and drops its buffer before they have
/// arrived. Rank 0, which waits for the rows, names it.
#[test]
fn a_rank_that_fails_before_its_last_messages_arrive_is_named() {
    use std::cell::Cell;
    thread_local! {
        static STOP: Cell<bool> = const { Cell::new(false) };
    }
    let mut config = config();
    config.host.workers = 1;
    config.host.slots = 16;
    config.stall_timeout = Duration::from_secs(6);
    config.timeout = Duration::from_secs(20);
    config.host.transport.engine = "paced:1GB/s,1000000us".into();
    config.interrupt = ep::Interrupt::new(|| STOP.get());
    let world = World::builder().ranks(2).domains(2).experts(EXPERTS).build().unwrap();
    let buffers = HostBuffer::threads(&world, &config).unwrap();
    std::thread::scope(|scope| {
        for mut buffer in buffers {
            scope.spawn(move || {
                let rank = buffer.rank();
                // Rank 0 has no tokens, so rank 1 waits for nothing in dispatch.
                let tokens = TOKENS * rank.index();
                let routing =
                    || Workload { tokens, experts: EXPERTS, topk: 3, skew: 0.5, seed: 0 }.routing(rank);
                let mode = DispatchMode::permuted(4).unwrap();
                let handle = buffer.preprocess(&routing(), mode, None).unwrap();
                let rows = buffer.receive_shape(&handle).unwrap().allocated_rows();
                let input = buffer.alloc(tokens * 2 * HIDDEN).unwrap();
                let mut out = buffer.alloc(rows * 2 * HIDDEN).unwrap();
                let result = buffer.dispatch(
                    &handle,
                    DispatchInput::new(&input, HIDDEN).probs(Probs::Skip),
                    DispatchOutput::new(&mut out),
                );
                if rank == Rank(1) {
                    result.unwrap();
                    STOP.set(true);
                    let error = buffer.preprocess(&routing(), mode, None).unwrap_err();
                    assert!(matches!(error, Error::Caller(CallerError::Interrupted { .. })), "{error}");
                    return;
                }
                let Err(Error::Peer(error)) = result else {
                    panic!("the rows of rank 1 are lost: {result:?}")
                };
                assert_eq!((error.peer, error.fault), (Rank(1), PeerFault::Failed), "{error}");
            });
        }
    });
}

#[test]
fn ranks_that_pass_different_arguments_get_an_error_that_says_so() {
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

/// f32 tokens on one rank and bf16 tokens on another: the error names the types, not a width that follows from them.
#[test]
fn ranks_that_pass_different_types_get_an_error_that_names_the_types() {
    let results = on_threads(2, 1, |mut buffer| {
        let format = if buffer.rank() == Rank(1) { TokenFormat::F32 } else { TokenFormat::Bf16 };
        let routing =
            Workload { tokens: 4, experts: EXPERTS, topk: 1, skew: 0.0, seed: 1 }.routing(buffer.rank());
        let handle = buffer.preprocess(&routing, DispatchMode::Plain, None)?;
        let tokens = buffer.alloc(4 * format.input_row_bytes(HIDDEN))?;
        let input = DispatchInput::new(&tokens, HIDDEN).format(format).probs(Probs::Skip);
        buffer.dispatch_new(&handle, input).map(|_| ())
    });
    let errors: Vec<String> = results.into_iter().map(|r| r.unwrap().unwrap_err().to_string()).collect();
    let says = |error: &String| {
        error.contains("the format of tokens is bf16 on rank 0 and f32 on rank 1")
            || error.contains("the format of tokens is f32 on rank 1 and bf16 on rank 0")
    };
    assert!(errors.iter().all(says), "{errors:?}");
}

#[test]
fn ranks_that_pad_differently_get_an_error_that_names_the_modes() {
    for (other, name) in [
        (DispatchMode::Plain, "plain"),
        (DispatchMode::permuted(16).unwrap(), "permuted with pad_multiple 16"),
    ] {
        let results = on_threads(2, 1, |mut buffer| {
            let mode = if buffer.rank() == Rank(1) { other } else { DispatchMode::permuted(4).unwrap() };
            let routing =
                Workload { tokens: 4, experts: EXPERTS, topk: 1, skew: 0.0, seed: 1 }.routing(buffer.rank());
            buffer.preprocess(&routing, mode, None).map(|_| ())
        });
        let errors: Vec<String> = results.into_iter().map(|r| r.unwrap().unwrap_err().to_string()).collect();
        let (mine, theirs) = ("permuted with pad_multiple 4 on rank 0", format!("{name} on rank 1"));
        assert!(errors.iter().any(|error| error.contains(mine) && error.contains(&theirs)), "{errors:?}");
    }
}

#[test]
fn ranks_that_call_different_operators_get_an_error_that_says_so() {
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
            DispatchInput::new(&tokens, HIDDEN).probs(Probs::Skip),
            DispatchOutput::new(&mut out),
        )
    });
    let errors: Vec<String> = results.into_iter().map(|r| r.unwrap().unwrap_err().to_string()).collect();
    assert!(
        errors.iter().any(|e| e.contains("the operator is dispatch (or the backward pass of a combine) on rank 0 and preprocess (the first step")),
        "{errors:?}"
    );
}

#[test]
fn handles_of_another_buffer_are_refused() {
    let mut one =
        HostBuffer::threads(&World::builder().ranks(1).experts(EXPERTS).build().unwrap(), &config())
            .unwrap()
            .remove(0);
    let mut other =
        HostBuffer::threads(&World::builder().ranks(1).experts(EXPERTS).build().unwrap(), &config())
            .unwrap()
            .remove(0);
    let routing = Workload { tokens: 1, experts: EXPERTS, topk: 1, skew: 0.0, seed: 1 }.routing(Rank(0));
    let handle = one.preprocess(&routing, DispatchMode::Plain, None).unwrap();
    let error = other.receive_shape(&handle).unwrap_err().to_string();
    assert!(error.starts_with("handle: it was made by another buffer, of rank 0"), "{error}");
    let rows = one.alloc(2 * HIDDEN).unwrap();
    let mut back = one.alloc(2 * HIDDEN).unwrap();
    let early = one.combine(&handle, CombineInput::new(&rows, HIDDEN), CombineOutput::new(&mut back));
    assert!(early.unwrap_err().to_string().contains("never dispatched"));
}

#[cfg(target_os = "linux")]
mod processes {
    use std::io::Read as _;
    use std::net::TcpListener;
    use std::os::unix::process::{CommandExt as _, ExitStatusExt as _};
    use std::path::Path;
    use std::process::{Child, Command, Output, Stdio};

    use ep::config::LaunchEnv;
    use ep::join::TcpRendezvous;

    use super::*;
    use crate::leftovers::Held;

    /// Not a test by itself: the tests below start processes that run this function as one rank.
    #[test]
    fn rank_process() {
        let Some(launch) = LaunchEnv::from_env().unwrap() else { return };
        let domains: usize = std::env::var("TEST_DOMAINS").unwrap().parse().unwrap();
        let world = World::builder()
            .ranks(launch.world_size as usize)
            .domains(domains)
            .experts(EXPERTS)
            .build()
            .unwrap();
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
        // With the whole error, for a test that expects another one.
        println!("\nnames {peer}{machine} {fault:?} after {waited} ms: {error}");
    }

    /// Starts the ranks of a world. They make their files, if any, in `directory`.
    fn spawn(ranks: usize, domains: usize, directory: &Path) -> Vec<Child> {
        spawn_by(&[], |_| Vec::new(), ranks, domains, directory)
    }

    /// As [`spawn`], with a command that starts each rank, and variables of each rank.
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
            let line =
                text.lines().find(|line| line.starts_with("names")).expect("an error line").to_string();
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
        let pids: Vec<String> = children.iter().map(|child| format!("{}:", child.id())).collect();
        for (rank, said) in lose(children, &directory, 3, Duration::from_millis(3), "-KILL") {
            assert!(said.starts_with("names 3 Died after "), "rank {rank}: {said}");
        }
        let files = std::fs::read_dir("/dev/shm").unwrap().flatten();
        let left: Vec<String> = files
            .map(|file| file.file_name().to_string_lossy().into_owned())
            .filter(|name| pids.iter().any(|pid| name.starts_with(pid)))
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
}
