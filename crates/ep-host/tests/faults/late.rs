//! These tests check when a wait for a late rank ends, and when it goes on.

use std::sync::atomic::{AtomicBool, Ordering::SeqCst};
use std::time::{Duration, Instant};

use ep::workload::Workload;
use ep::{Backend, CallerError, Config, DispatchMode, Error, PeerFault, Rank, World};
use ep_host::HostBuffer;

use crate::{
    EXPERTS, HANGS, HIDDEN, TIMEOUT, TOKENS, WORLDS, config, on_threads, peer_error, round, until_error,
};

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
            assert!(error.to_string().contains("has left out reduce_gradients"), "{error}");
        }
    });

    let says_so = "it waits for gradients to be reduced: either rank ";
    let text = text_of(true);
    assert!(text.contains(says_so), "{text}");
    let text = text_of(false);
    assert!(!text.contains("gradients"), "{text}");
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
