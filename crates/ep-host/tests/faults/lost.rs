//! These tests check the errors about a rank that leaves, panics or fails.

use std::time::Duration;

use ep::workload::Workload;
use ep::{
    Backend, CallerError, DispatchInput, DispatchMode, DispatchOutput, Error, PeerFault, Probs, Rank, World,
};
use ep_host::HostBuffer;

use crate::{EXPERTS, HIDDEN, TOKENS, WORLDS, config, on_threads, peer_error, round, until_error};

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
    // A rank that has failed names the rank at fault.
    let said = peer_error(round(&mut buffers[1], 0, HIDDEN));
    let error = lost(&buffers[0]).unwrap();
    assert_eq!((said.peer, error.peer, error.fault), (Rank(3), Rank(3), PeerFault::Left));
    assert!(error.to_string().contains("(reported by rank 1)"), "{error}");
    assert_eq!(buffers[1].check_peers("a collective", Duration::ZERO).unwrap_err(), said.into());

    // A rank whose wait has failed also names the rank at fault, before it leaves because of the failure.
    let mut buffers = HostBuffer::threads(&world, &config()).unwrap();
    drop(buffers.pop().unwrap());
    let said = buffers[0].fail_wait("a collective", Duration::from_secs(7)).unwrap_err();
    assert_eq!(buffers[0].fail_wait("a collective", Duration::ZERO).unwrap_err(), said, "the error stays");
    drop(buffers.remove(0));
    let error = lost(&buffers[0]).unwrap();
    assert_eq!((error.peer, error.rank, error.fault), (Rank(3), Rank(1), PeerFault::Left));
    assert!(error.to_string().contains("(reported by rank 0)"), "{error}");

    // The rank at fault learns which rank has failed because of it, and why.
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

/// Rank 1 finishes a dispatch when its transport has accepted its rows, then fails and drops its buffer before the rows
/// have arrived. Rank 0, which waits for the rows, names rank 1.
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
