//! The checks pass on a correct engine and fail on broken ones.

use std::sync::{Arc, Mutex, MutexGuard, PoisonError};

use super::*;
use crate::error::{CallerError, PeerError, PeerFault};

/// How an engine is broken.
#[derive(Debug, Clone, Copy, PartialEq)]
enum Fault {
    None,
    /// One signal in 200 is lost.
    Drops,
    /// One signal in 200 arrives twice.
    Duplicates,
    /// A signal arrives before the bytes of its put.
    Early,
    /// Signals name the next rank as their sender.
    NamesAnother,
    /// The last byte of a put is not copied.
    Truncates,
    /// A put of length 0 is forgotten.
    ForgetsEmpty,
    /// Signals lose their top bit.
    Narrow,
    /// A put outside a window is cut to fit.
    Lenient,
    /// An error about the rank that left names the first rank of the rail instead.
    BlamesAnother,
    /// After 300 puts of all ranks, the queue of the last rank stays full. The other ranks then wait for that rank, so only
    /// that rank can report the full queue.
    Clogs,
}

/// All windows and queues of a rail, in one process.
struct Shared {
    windows: Vec<Vec<u8>>,
    /// Indexed by receiver.
    queues: Vec<Vec<(Rank, Signal)>>,
    /// Puts whose bytes come later: receiver, destination, bytes.
    late: Vec<(usize, usize, Vec<u8>)>,
    /// By rank.
    gone: Vec<bool>,
    /// By rank: whether it has reported the rank that left.
    reported: Vec<bool>,
    signals: usize,
}

struct Engine {
    rail: Rail,
    shared: Arc<Mutex<Shared>>,
    fault: Fault,
}

struct Memory(usize, Arc<Mutex<Shared>>);

fn lock(shared: &Mutex<Shared>) -> MutexGuard<'_, Shared> {
    shared.lock().unwrap_or_else(PoisonError::into_inner)
}

impl WindowAccess for Memory {
    fn usable(&self) -> Range<usize> {
        128..lock(&self.1).windows[self.0].len()
    }

    fn write(&self, offset: usize, bytes: &[u8]) {
        lock(&self.1).windows[self.0][offset..offset + bytes.len()].copy_from_slice(bytes);
    }

    fn read(&self, offset: usize, bytes: &mut [u8]) {
        bytes.copy_from_slice(&lock(&self.1).windows[self.0][offset..offset + bytes.len()]);
    }
}

impl Engine {
    fn left(&self, peer: Rank) -> Error {
        let peer = if self.fault == Fault::BlamesAnother { self.rail.ranks()[0] } else { peer };
        PeerError::joining(self.rail.own(), peer, PeerFault::Left, "its engine", Duration::ZERO).into()
    }
}

impl Transport for Engine {
    fn name(&self) -> &str {
        "memory"
    }

    fn put(&self, put: Put) -> EpResult<Posted> {
        let (own, peer) = (self.rail.own_index(), self.rail.peer_index(put.peer)?);
        let mut shared = lock(&self.shared);
        let len = shared.windows[own].len();
        let inside = |offset: usize| offset.checked_add(put.len).is_some_and(|end| end <= len);
        let mut put = put;
        if put.len > 0 && !(inside(put.source) && inside(put.destination)) {
            if self.fault != Fault::Lenient {
                let (what, unit) = ("a put", "bytes");
                return Err(CallerError::Shape { what, expected: len, found: put.len, unit }.into());
            }
            put.len = 0;
        }
        if shared.gone[peer] {
            return Err(self.left(put.peer));
        }
        shared.signals += 1;
        let count = shared.signals;
        if self.fault == Fault::Clogs && count > 300 && own + 1 == shared.windows.len() {
            return Ok(Posted::Full);
        }
        if self.fault == Fault::ForgetsEmpty && put.len == 0 && count.is_multiple_of(3) {
            return Ok(Posted::Yes);
        }
        let copied = put.len - usize::from(self.fault == Fault::Truncates && put.len > 0);
        let bytes = shared.windows[own][put.source.min(len)..][..copied].to_vec();
        if self.fault == Fault::Early && count.is_multiple_of(5) {
            shared.late.push((peer, put.destination, bytes));
        } else if copied > 0 {
            shared.windows[peer][put.destination..][..copied].copy_from_slice(&bytes);
        }
        let mask = if self.fault == Fault::Narrow { 0xFFFF } else { u32::MAX };
        let signal = Signal::new(put.signal.word() & mask).expect("17 bits");
        let sender = match self.fault {
            Fault::NamesAnother => self.rail.ranks()[(own + 1) % self.rail.ranks().len()],
            _ => self.rail.own(),
        };
        let copies = match self.fault {
            Fault::Drops if count.is_multiple_of(200) => 0,
            Fault::Duplicates if count.is_multiple_of(200) => 2,
            _ => 1,
        };
        shared.queues[peer].extend(std::iter::repeat_n((sender, signal), copies));
        Ok(Posted::Yes)
    }

    fn poll(&self, on_signal: &mut dyn FnMut(Rank, Signal)) -> EpResult<()> {
        let own = self.rail.own_index();
        let mut shared = lock(&self.shared);
        let arrived = std::mem::take(&mut shared.queues[own]);
        if arrived.is_empty() {
            let Shared { windows, late, .. } = &mut *shared;
            for (window, at, bytes) in late.extract_if(.., |(window, ..)| *window == own) {
                windows[window][at..at + bytes.len()].copy_from_slice(&bytes);
            }
        }
        let left = shared.gone.iter().position(|&gone| gone).filter(|_| !shared.reported[own]);
        shared.reported[own] |= left.is_some();
        drop(shared);
        arrived.into_iter().for_each(|(peer, signal)| on_signal(peer, signal));
        left.map_or(Ok(()), |left| Err(self.left(self.rail.ranks()[left])))
    }

    fn drain(&self, peer: Rank, _: Instant) -> EpResult<()> {
        let gone = lock(&self.shared).gone[self.rail.peer_index(peer)?];
        if gone { Err(self.left(peer)) } else { Ok(()) }
    }
}

impl Drop for Engine {
    fn drop(&mut self) {
        let last = self.rail.own_index() + 1 == self.rail.ranks().len();
        // Only the last rank leaves while others still run their checks.
        lock(&self.shared).gone[self.rail.own_index()] |= last;
    }
}

fn run(ranks: usize, fault: Fault, reorder: bool) -> Result<(), TransportFailure> {
    let shared = Arc::new(Mutex::new(Shared {
        windows: vec![vec![0; 128 + transport_window_bytes(ranks)]; ranks],
        queues: vec![Vec::new(); ranks],
        late: Vec::new(),
        gone: vec![false; ranks],
        reported: vec![false; ranks],
        signals: 0,
    }));
    // Rank numbers that differ from the indices on the rail.
    let names: Vec<Rank> = (0..ranks as u32).map(|rank| Rank(3 * rank + 2)).collect();
    let bound = Duration::from_secs(if fault == Fault::None { 60 } else { 2 });
    std::thread::scope(|scope| {
        let threads: Vec<_> = (0..ranks)
            .map(|own| {
                let rail = Rail::new(names.clone(), own).unwrap();
                let mut transport: Box<dyn Transport> =
                    Box::new(Engine { rail: rail.clone(), shared: Arc::clone(&shared), fault });
                if reorder {
                    transport = Box::new(Reordering::new(transport, own as u64));
                }
                let end = End { rail, transport, window: Box::new(Memory(own, Arc::clone(&shared))) };
                scope.spawn(move || check_transport(end, bound))
            })
            .collect();
        let failures: Vec<_> =
            threads.into_iter().filter_map(|thread| thread.join().unwrap().err()).collect();
        // The failure of a rank that only waited for a failed rank, or saw it leave, is weaker evidence.
        let follows = |problem: &str| match problem {
            problem if problem.contains(" left (") => 2,
            problem if problem.contains("room for a put") => 0,
            problem => i32::from(problem.starts_with("waited")),
        };
        failures.iter().min_by_key(|failure| follows(&failure.problem)).cloned().map_or(Ok(()), Err)
    })
}

#[test]
fn a_correct_engine_passes_in_any_order_of_signals() {
    for ranks in [1, 2, 3, 5] {
        for reorder in [false, true] {
            assert_eq!(run(ranks, Fault::None, reorder), Ok(()), "{ranks} ranks, reordered: {reorder}");
        }
    }
}

#[test]
fn broken_engines_fail_with_a_reason() {
    // The signal that is lost or delivered twice may be that of a put or a credit.
    let unexpected = ["is not that of its next put", "matches no put in flight"];
    for (fault, reasons) in [
        (Fault::Drops, ["waited"; 2]),
        (Fault::Duplicates, unexpected),
        (Fault::Early, ["inside the put"; 2]),
        (Fault::NamesAnother, ["which is not a peer", "of rank"]),
        (Fault::Truncates, ["inside the put"; 2]),
        (Fault::ForgetsEmpty, ["waited"; 2]),
        (Fault::Narrow, unexpected),
        (Fault::Lenient, ["must be refused"; 2]),
        (Fault::BlamesAnother, ["rank 2 left"; 2]),
        (Fault::Clogs, ["room for a put"; 2]),
    ] {
        let failure = run(3, fault, false).expect_err(&format!("{fault:?} must be detected"));
        assert!(reasons.iter().any(|reason| failure.problem.contains(reason)), "{fault:?}: {failure}");
    }
}
