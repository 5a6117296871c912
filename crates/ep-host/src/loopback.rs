//! The loopback transport: an engine for ranks of one machine. A put is a copy between two windows, a signal a word
//! in a ring.

use std::ptr::NonNull;
use std::sync::atomic::{AtomicU32, AtomicU64, Ordering::Acquire, Ordering::Relaxed, Ordering::Release};
use std::sync::{Arc, Mutex, PoisonError, TryLockError};

use ep::{CallerError, Posted, Put, Rank, Result, Transport};

use crate::segment::Segment;

/// Puts between the ranks of a rail over memory that both can map.
///
/// At the front of each window stands a ring of signals for every rank of the rail; the rest is the caller's.
#[derive(Debug)]
pub(crate) struct Loopback {
    own: usize,
    /// By place on the rail.
    ends: Vec<End>,
    /// One poller at a time: rings have one consumer.
    polling: Mutex<()>,
    ring_slots: usize,
}

#[derive(Debug)]
struct End {
    rank: Rank,
    window: Arc<Segment>,
    /// One sender at a time: rings have one producer.
    sending: Mutex<()>,
}

/// The counters of a ring; its slots follow. `head` counts what was sent, `tail` what was taken.
#[repr(C)]
struct Ring {
    head: AtomicU64,
    _own_line: [u64; 15],
    tail: AtomicU64,
    _own_line_too: [u64; 15],
}

impl Loopback {
    /// Bytes at the front of a window that the engine keeps to itself.
    pub(crate) fn reserved(rail_size: usize, ring_slots: usize) -> usize {
        (rail_size * Self::ring_bytes(ring_slots)).next_multiple_of(4096)
    }

    fn ring_bytes(ring_slots: usize) -> usize {
        (size_of::<Ring>() + 4 * ring_slots).next_multiple_of(128)
    }

    /// The engine of the rank at place `own` of a rail, given everybody's window. `ring_slots`: signals in flight
    /// from one rank to another, at most.
    pub(crate) fn new(own: usize, windows: Vec<(Rank, Arc<Segment>)>, ring_slots: usize) -> Self {
        let ends =
            windows.into_iter().map(|(rank, window)| End { rank, window, sending: Mutex::new(()) }).collect();
        Self { own, ends, polling: Mutex::new(()), ring_slots }
    }

    /// The ring in `window` that the rank at place `sender` fills.
    fn ring<'a>(&self, window: &'a Segment, sender: usize) -> (&'a Ring, &'a [AtomicU32]) {
        let offset = sender * Self::ring_bytes(self.ring_slots);
        // SAFETY: `Ring` is integers that are only used as atomics (and padding); a new window is zeroed.
        let ring = unsafe { window.view::<Ring>(offset) };
        let slots = window.at(offset + size_of::<Ring>(), 4 * self.ring_slots).cast();
        // SAFETY: in bounds, aligned (`Ring` is a multiple of 8 bytes at a multiple of 128), and atomics.
        (ring, unsafe { std::slice::from_raw_parts(slots, self.ring_slots) })
    }

    fn check(&self, what: &'static str, window: &Segment, offset: usize, len: usize) -> Result<()> {
        let first = Self::reserved(self.ends.len(), self.ring_slots);
        match offset.checked_add(len) {
            Some(end) if offset >= first && end <= window.len() => Ok(()),
            _ => Err(CallerError::Shape {
                what,
                expected: window.len(),
                found: offset.saturating_add(len),
                unit: "bytes",
            }
            .into()),
        }
    }
}

impl Transport for Loopback {
    fn name(&self) -> &'static str {
        "loopback"
    }

    fn put(&self, put: Put) -> Result<Posted> {
        let Some(end) = self.ends.iter().find(|end| end.rank == put.peer) else {
            return Err(CallerError::Topology(format!("rank {} is not on this rail", put.peer)).into());
        };
        let _one_at_a_time = end.sending.lock().unwrap_or_else(PoisonError::into_inner);
        let (ring, slots) = self.ring(&end.window, self.own);
        let head = ring.head.load(Relaxed);
        if head.wrapping_sub(ring.tail.load(Acquire)) >= slots.len() as u64 {
            return Ok(Posted::Full);
        }
        if put.len > 0 {
            let own = &self.ends[self.own].window;
            self.check("source of a put", own, put.source, put.len)?;
            self.check("destination of a put", &end.window, put.destination, put.len)?;
            // SAFETY: both ranges are inside mapped windows and apart (two windows). The layer above owns the source
            // until the peer signals, and the peer leaves the destination alone until it sees this put's signal.
            unsafe {
                own.at(put.source, put.len)
                    .copy_to_nonoverlapping(end.window.at(put.destination, put.len), put.len);
            }
        }
        slots[(head % slots.len() as u64) as usize].store(put.signal, Relaxed);
        ring.head.store(head + 1, Release);
        Ok(Posted::Yes)
    }

    fn lend(&self, peer: Rank, offset: usize, len: usize) -> Option<NonNull<u8>> {
        let end = self.ends.iter().find(|end| end.rank == peer)?;
        self.check("lent part of a window", &end.window, offset, len).ok()?;
        NonNull::new(end.window.at(offset, len))
    }

    fn poll(&self, on_signal: &mut dyn FnMut(Rank, u32)) -> Result<()> {
        let _one_at_a_time = match self.polling.try_lock() {
            Ok(guard) => guard,
            Err(TryLockError::Poisoned(guard)) => guard.into_inner(),
            // Somebody else is at it.
            Err(TryLockError::WouldBlock) => return Ok(()),
        };
        let own = &self.ends[self.own].window;
        for (sender, end) in self.ends.iter().enumerate().filter(|&(sender, _)| sender != self.own) {
            let (ring, slots) = self.ring(own, sender);
            let mut tail = ring.tail.load(Relaxed);
            while tail != ring.head.load(Acquire) {
                on_signal(end.rank, slots[(tail % slots.len() as u64) as usize].load(Relaxed));
                tail += 1;
                ring.tail.store(tail, Release);
            }
        }
        Ok(())
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn pair(ring_slots: usize) -> [Loopback; 2] {
        let windows: Vec<(Rank, Arc<Segment>)> =
            (0..2).map(|rank| (Rank(rank), Arc::new(Segment::private(1 << 16).unwrap()))).collect();
        [0, 1].map(|own| Loopback::new(own, windows.clone(), ring_slots))
    }

    fn signals(end: &Loopback) -> Vec<(Rank, u32)> {
        let mut seen = Vec::new();
        end.poll(&mut |rank, signal| seen.push((rank, signal))).unwrap();
        seen
    }

    #[test]
    fn bytes_come_before_their_signal() {
        let [a, b] = pair(4);
        let at = Loopback::reserved(2, 4);
        // SAFETY: inside the window, which this thread alone uses.
        unsafe { a.ends[0].window.at(at, 3).copy_from(b"abc".as_ptr(), 3) };
        let put = Put { peer: Rank(1), source: at, destination: at + 64, len: 3, signal: 7 };
        assert_eq!(a.put(put).unwrap(), Posted::Yes);
        assert_eq!(signals(&b), [(Rank(0), 7)]);
        // SAFETY: as above.
        let seen = unsafe { std::slice::from_raw_parts(b.ends[1].window.at(at + 64, 3), 3) };
        assert_eq!(seen, b"abc");
        assert!(signals(&b).is_empty() && signals(&a).is_empty());
    }

    #[test]
    fn a_full_ring_says_so_and_recovers() {
        let [a, b] = pair(2);
        let signal = |signal| Put { peer: Rank(1), source: 0, destination: 0, len: 0, signal };
        assert_eq!(a.put(signal(1)).unwrap(), Posted::Yes);
        assert_eq!(a.put(signal(2)).unwrap(), Posted::Yes);
        assert_eq!(a.put(signal(3)).unwrap(), Posted::Full);
        assert_eq!(signals(&b).len(), 2);
        assert_eq!(a.put(signal(3)).unwrap(), Posted::Yes);
        assert_eq!(signals(&b), [(Rank(0), 3)]);
    }

    #[test]
    fn what_is_lent_is_the_peers_window() {
        let [a, _b] = pair(2);
        let at = Loopback::reserved(2, 2);
        assert_eq!(a.lend(Rank(1), at + 128, 64).unwrap().as_ptr(), a.ends[1].window.at(at + 128, 64));
        assert_eq!(a.lend(Rank(1), 0, 64), None);
        assert_eq!(a.lend(Rank(1), (1 << 16) - 32, 64), None);
    }

    #[test]
    fn puts_outside_a_window_are_refused() {
        let [a, _b] = pair(2);
        let at = Loopback::reserved(2, 2);
        for put in [
            Put { peer: Rank(1), source: 0, destination: at, len: 8, signal: 0 },
            Put { peer: Rank(1), source: at, destination: (1 << 16) - 4, len: 8, signal: 0 },
            Put { peer: Rank(1), source: at, destination: usize::MAX, len: 8, signal: 0 },
            Put { peer: Rank(9), source: at, destination: at, len: 8, signal: 0 },
        ] {
            assert!(a.put(put).is_err(), "{put:?}");
        }
    }
}
