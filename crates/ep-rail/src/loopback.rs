//! The loopback transport, for ranks of one machine. A put is a copy between two mapped windows; a signal is a word in
//! a ring.

use std::collections::HashSet;
use std::ptr::NonNull;
use std::sync::atomic::{AtomicU32, AtomicU64, Ordering::Acquire, Ordering::Relaxed, Ordering::Release};
use std::sync::{Arc, Mutex, PoisonError, TryLockError};
use std::time::Instant;

use ep::{CallerError, Error, Posted, Put, Rail, Rank, Result, Signal, Size, Transport, Unconnected};

use crate::{Segment, broken};

/// Moves bytes and signals between the ranks of a rail, over windows that all of them map.
///
/// At the front of each window lies a ring of signals for every rank of the rail; the caller uses the rest. The engine
/// lends the peers' windows ([`Transport::lend`]).
#[derive(Debug)]
pub struct Loopback {
    rail: Rail,
    /// By domain.
    endpoints: Vec<Endpoint>,
    /// By domain: signals taken so far; `None` once the ring was found damaged. The lock admits one poller at a time, as a ring requires. The count is kept
    /// here because a peer could change the `tail` in shared memory.
    taken: Mutex<Vec<Option<u64>>>,
    /// Signals that a ring has room for.
    ring_slots: usize,
    ring_bytes: usize,
    /// Offset of the caller's part of a window.
    reserved: usize,
}

/// One rank of the rail.
#[derive(Debug)]
struct Endpoint {
    window: Arc<Segment>,
    /// Signals sent to this rank so far. The lock admits one sender at a time, as a ring requires. The count is kept
    /// here because a peer could change the `head` in shared memory.
    sent: Mutex<u64>,
}

/// The counters of a ring; the slots of the ring follow.
#[repr(C)]
struct Ring {
    /// Signals sent so far; written by the sender.
    head: Counter,
    /// Signals taken so far; written by the receiver.
    tail: Counter,
}

/// A counter alone in 128 bytes.
#[repr(C, align(128))]
struct Counter(AtomicU64);

impl Loopback {
    /// Bytes at the front of a window that the engine reserves for its rings: the offset of the caller's part, a multiple
    /// of 4096. `rail_size` is the number of ranks of the rail, and `ring_slots` is as in [`new`](Self::new).
    pub fn reserved(rail_size: usize, ring_slots: usize) -> Size {
        (Size::new(rail_size) * Self::ring_bytes(ring_slots)).next_multiple_of(4096)
    }

    fn ring_bytes(ring_slots: usize) -> Size {
        (Size::new(ring_slots) * 4 + size_of::<Ring>()).next_multiple_of(128)
    }

    /// The engine of a rank. `windows` are those of its rail, by domain; `ring_slots` is the greatest number of signals
    /// in flight from one rank to another, at least 1. All engines of a rail get the same number.
    ///
    /// The first [`reserved`](Self::reserved) bytes of each window must be zero when the first engine of the rail is
    /// made, and belong to the engines afterwards. An engine that finds values there that no engine writes returns a
    /// [`PeerError`](ep::PeerError) that names the peer.
    ///
    /// # Safety
    /// A put copies with plain loads and stores, which must not race. So until the engine is dropped:
    /// - from the put until its peer has received the signal, no thread writes to its source, and no other thread accesses
    ///   its destination. This includes the puts of all ranks of the rail;
    /// - the program accesses the reserved bytes with atomics, or while no rank of the rail calls its engine.
    ///
    /// # Errors
    /// [`CallerError::Shape`] when the number of windows is not that of the ranks of the rail, when a window is shorter
    /// than the reserved bytes, or when `ring_slots` is 0; [`CallerError::Topology`] when two ranks have the same window;
    /// [`CallerError::TooLarge`] for more signals than memory can hold.
    pub unsafe fn new(rail: Rail, windows: Vec<Arc<Segment>>, ring_slots: usize) -> Result<Self> {
        const RINGS: &str = "the signal rings of a window";
        let ranks = rail.ranks().len();
        let ring_bytes = Self::ring_bytes(ring_slots).bytes(RINGS)?;
        let reserved = Self::reserved(ranks, ring_slots).bytes(RINGS)?;
        let shape = |what, expected, found, unit| CallerError::Shape { what, expected, found, unit };
        if ring_slots == 0 {
            return Err(shape("signals in flight", 1, 0, "or more").into());
        }
        if windows.len() != ranks {
            return Err(shape("windows of a rail", ranks, windows.len(), "windows").into());
        }
        let mut starts = HashSet::new();
        for (window, rank) in windows.iter().zip(rail.ranks()) {
            if window.len() < reserved {
                return Err(shape("window of a rank", reserved, window.len(), "bytes or more").into());
            }
            if !starts.insert(window.start()) {
                let problem =
                    format!("rank {rank} has the window of another rank of its rail; make one for each");
                return Err(CallerError::Topology(problem).into());
            }
        }
        let endpoints: Vec<Endpoint> =
            windows.into_iter().map(|window| Endpoint { window, sent: Mutex::new(0) }).collect();
        let taken = Mutex::new(vec![Some(0); ranks]);
        Ok(Self { rail, endpoints, taken, ring_slots, ring_bytes, reserved })
    }

    /// The ring in `window` that the rank in domain `sender` fills.
    fn ring<'a>(&self, window: &'a Segment, sender: usize) -> (&'a Ring, &'a [AtomicU32]) {
        let offset = sender * self.ring_bytes;
        // SAFETY: `Ring` consists of atomics and padding; any bytes are valid.
        let ring = unsafe { window.view::<Ring>(offset) };
        let slots = window.at(offset + size_of::<Ring>(), 4 * self.ring_slots).cast();
        // SAFETY: in bounds (checked by `at`), aligned (a ring begins at a multiple of 128), and atomics.
        (ring, unsafe { std::slice::from_raw_parts(slots, self.ring_slots) })
    }

    /// The error for a ring whose counters say that more signals were taken than sent, or that more are in flight than
    /// the ring has room for.
    fn damaged(&self, peer: Rank, sent: u64, taken: u64) -> Error {
        let room = self.ring_slots;
        let found = format!("a ring of {room} signals whose counters say {sent} sent and {taken} taken");
        broken(self.rail.own(), peer, found)
    }

    /// Passes the signals of one peer that have arrived.
    fn take_signals(
        &self,
        sender: usize,
        peer: Rank,
        taken: &mut u64,
        on_signal: &mut dyn FnMut(Rank, Signal),
    ) -> Result<()> {
        let (ring, slots) = self.ring(self.own(), sender);
        let room = slots.len() as u64;
        let head = ring.head.0.load(Acquire);
        let Some(waiting) = head.checked_sub(*taken).filter(|&waiting| waiting <= room) else {
            return Err(self.damaged(peer, head, *taken));
        };
        for _ in 0..waiting {
            let word = slots[(*taken % room) as usize].load(Relaxed);
            let Some(signal) = Signal::new(word) else {
                let found = format!("a signal of more than {} bits ({word:#x})", Signal::BITS);
                return Err(broken(self.rail.own(), peer, found));
            };
            on_signal(peer, signal);
            *taken += 1;
            ring.tail.0.store(*taken, Release);
        }
        Ok(())
    }

    /// Copies the bytes of a put and delivers no signal. The signal of a later put without bytes then announces them.
    ///
    /// # Errors
    /// [`CallerError`] when the put lies outside a window, or its peer is not on the rail.
    pub fn copy(&self, put: &Put) -> Result<()> {
        let end = &self.endpoints[self.rail.peer_index(put.peer)?];
        self.check_put(put, end)?;
        self.copy_bytes(put, end);
        Ok(())
    }

    /// Copies the bytes of a put that has passed [`check_put`](Self::check_put).
    fn copy_bytes(&self, put: &Put, end: &Endpoint) {
        if put.len == 0 {
            return;
        }
        // SAFETY: both ranges are inside mapped windows, and `new` checked that the windows differ. Its caller keeps other
        // threads from writing to the source and from accessing the destination until this put's signal.
        unsafe {
            self.own()
                .at(put.source, put.len)
                .copy_to_nonoverlapping(end.window.at(put.destination, put.len), put.len);
        }
    }

    fn check_put(&self, put: &Put, end: &Endpoint) -> Result<()> {
        if put.len == 0 {
            return Ok(());
        }
        self.check("source of a put", self.own(), put.source, put.len)?;
        self.check("destination of a put", &end.window, put.destination, put.len)
    }

    pub(crate) fn rail(&self) -> &Rail {
        &self.rail
    }

    fn own(&self) -> &Segment {
        &self.endpoints[self.rail.own_index()].window
    }

    /// Checks that `len` bytes at `offset` lie in the caller's part of a window.
    fn check(&self, what: &'static str, window: &Segment, offset: usize, len: usize) -> Result<()> {
        match offset.checked_add(len) {
            Some(end) if offset >= self.reserved && end <= window.len() => Ok(()),
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

/// The windows of the peers are mapped when the engine is made, so the engine has nothing to exchange.
impl Unconnected for Loopback {
    fn blob(&self) -> Vec<u8> {
        Vec::new()
    }

    fn connect(self: Box<Self>, _: &[Vec<u8>]) -> Result<Box<dyn Transport>> {
        Ok(self)
    }
}

impl Transport for Loopback {
    fn name(&self) -> &str {
        "loopback"
    }

    fn put(&self, put: Put) -> Result<Posted> {
        let end = &self.endpoints[self.rail.peer_index(put.peer)?];
        self.check_put(&put, end)?;
        let mut sent = end.sent.lock().unwrap_or_else(PoisonError::into_inner);
        let (ring, slots) = self.ring(&end.window, self.rail.own_index());
        let room = slots.len() as u64;
        let tail = ring.tail.0.load(Acquire);
        match sent.checked_sub(tail) {
            Some(in_flight) if in_flight == room => return Ok(Posted::Full),
            Some(in_flight) if in_flight < room => {}
            _ => return Err(self.damaged(put.peer, *sent, tail)),
        }
        self.copy_bytes(&put, end);
        slots[(*sent % room) as usize].store(put.signal.word(), Relaxed);
        *sent += 1;
        ring.head.0.store(*sent, Release);
        Ok(Posted::Yes)
    }

    fn lend(&self, peer: Rank, offset: usize, len: usize) -> Option<NonNull<u8>> {
        let end = &self.endpoints[self.rail.peer_index(peer).ok()?];
        self.check("lent part of a window", &end.window, offset, len).ok()?;
        NonNull::new(end.window.at(offset, len))
    }

    fn poll(&self, on_signal: &mut dyn FnMut(Rank, Signal)) -> Result<()> {
        let mut taken = match self.taken.try_lock() {
            Ok(guard) => guard,
            Err(TryLockError::Poisoned(guard)) => guard.into_inner(),
            // Another worker of this rank is polling.
            Err(TryLockError::WouldBlock) => return Ok(()),
        };
        let peers =
            self.rail.ranks().iter().enumerate().filter(|&(sender, _)| sender != self.rail.own_index());
        let mut first = None;
        for (sender, &peer) in peers {
            // Each damaged ring is reported once, and the other peers stay reachable.
            let Some(count) = &mut taken[sender] else { continue };
            if let Err(error) = self.take_signals(sender, peer, count, on_signal) {
                taken[sender] = None;
                first.get_or_insert(error);
            }
        }
        first.map_or(Ok(()), Err)
    }

    /// A put is complete when it is posted.
    fn drain(&self, peer: Rank, _: Instant) -> Result<()> {
        self.rail.peer_index(peer).map(drop)
    }
}

#[cfg(test)]
mod tests {
    use std::time::Duration;

    use ep::conformance::{End, Reordering, TRANSPORT_LIMITS, check_transport};

    use super::*;
    use crate::testing::Usable;

    /// The engines of a rail of `ranks` ranks.
    fn rail(ranks: usize, ring_slots: usize) -> Vec<Loopback> {
        let windows: Vec<Arc<Segment>> =
            (0..ranks).map(|_| Arc::new(Segment::private(1 << 20).unwrap())).collect();
        let ranks: Vec<Rank> = (0..ranks as u32).map(Rank).collect();
        let rail = |own| Rail::new(ranks.clone(), own).unwrap();
        let engine = |own| {
            // SAFETY: the tests access no byte that a put in flight may access, and rings with atomics only.
            unsafe { Loopback::new(rail(own), windows.clone(), ring_slots) }.unwrap()
        };
        (0..ranks.len()).map(engine).collect()
    }

    fn pair(ring_slots: usize) -> [Loopback; 2] {
        rail(2, ring_slots).try_into().expect("two engines")
    }

    fn signals(end: &Loopback) -> Vec<(Rank, u32)> {
        let mut seen = Vec::new();
        end.poll(&mut |rank, signal| seen.push((rank, signal.word()))).unwrap();
        seen
    }

    fn word(word: u32) -> Signal {
        Signal::new(word).unwrap()
    }

    #[test]
    fn windows_that_do_not_fit_the_rail_are_refused() {
        let window = |bytes| Arc::new(Segment::private(bytes).unwrap());
        let reserved = Loopback::reserved(2, 4).checked().unwrap();
        let (a, b) = (window(reserved), window(reserved));
        let open = |windows: &[&Arc<Segment>], ring_slots| {
            let rail = Rail::new(vec![Rank(3), Rank(7)], 0).unwrap();
            let windows = windows.iter().map(|&window| Arc::clone(window)).collect();
            // SAFETY: no engine posts a put.
            unsafe { Loopback::new(rail, windows, ring_slots) }.map(drop).map_err(|error| error.to_string())
        };
        assert_eq!(open(&[&a, &b], 4), Ok(()));
        for (windows, ring_slots, problem) in [
            (&[&a][..], 4, "windows of a rail"),
            (&[&a, &b, &window(reserved)], 4, "windows of a rail"),
            (&[&a, &window(reserved - 1)], 4, "window of a rank: expected 4096 bytes or more"),
            (&[&a, &b], 0, "signals in flight"),
            (&[&a, &a], 4, "rank 7 has the window of another rank"),
            (&[&a, &b], usize::MAX, "the signal rings of a window"),
        ] {
            let error = open(windows, ring_slots).unwrap_err();
            assert!(error.contains(problem), "{error}");
        }
    }

    #[test]
    fn bytes_come_before_their_signal() {
        let [a, b] = pair(4);
        let at = a.reserved;
        // SAFETY: inside the window, which this thread alone uses.
        unsafe { a.endpoints[0].window.at(at, 3).copy_from(b"abc".as_ptr(), 3) };
        let put = Put::new(Rank(1), word(7)).bytes(at..at + 3, at + 64);
        assert_eq!(a.put(put).unwrap(), Posted::Yes);
        assert_eq!(signals(&b), [(Rank(0), 7)]);
        // SAFETY: as above.
        let seen = unsafe { std::slice::from_raw_parts(b.endpoints[1].window.at(at + 64, 3), 3) };
        assert_eq!(seen, b"abc");
        assert!(signals(&b).is_empty() && signals(&a).is_empty());
    }

    #[test]
    fn a_full_ring_says_so_and_recovers() {
        let [a, b] = pair(2);
        let signal = |signal| Put::new(Rank(1), word(signal));
        assert_eq!(a.put(signal(1)).unwrap(), Posted::Yes);
        assert_eq!(a.put(signal(2)).unwrap(), Posted::Yes);
        assert_eq!(a.put(signal(3)).unwrap(), Posted::Full);
        assert_eq!(signals(&b).len(), 2);
        assert_eq!(a.put(signal(3)).unwrap(), Posted::Yes);
        assert_eq!(signals(&b), [(Rank(0), 3)]);
    }

    #[test]
    fn lent_addresses_lie_in_the_peers_window() {
        let [a, _b] = pair(2);
        let at = a.reserved;
        assert_eq!(a.lend(Rank(1), at + 128, 64).unwrap().as_ptr(), a.endpoints[1].window.at(at + 128, 64));
        assert_eq!(a.lend(Rank(1), 0, 64), None);
        assert_eq!(a.lend(Rank(1), (1 << 20) - 32, 64), None);
    }

    #[test]
    fn puts_outside_a_window_are_refused() {
        let [a, _b] = pair(2);
        let at = a.reserved;
        for put in [
            Put::new(Rank(1), word(0)).bytes(0..8, at),
            Put::new(Rank(1), word(0)).bytes(at..at + 8, (1 << 20) - 4),
            Put::new(Rank(1), word(0)).bytes(at..at + 8, usize::MAX),
            Put::new(Rank(0), word(0)).bytes(at..at + 8, at),
            Put::new(Rank(9), word(0)).bytes(at..at + 8, at),
        ] {
            assert!(a.put(put).is_err(), "{put:?}");
        }
    }

    #[test]
    fn a_damaged_ring_is_an_error_that_names_the_peer() {
        for damage in [3, 1 << 40, u64::MAX] {
            let [a, b] = pair(2);
            let signal = Put::new(Rank(1), word(1));
            assert_eq!(a.put(signal).unwrap(), Posted::Yes);
            let (ring, _) = b.ring(&b.endpoints[1].window, 0);
            ring.head.0.store(damage, Relaxed);
            let Err(Error::Peer(error)) = b.poll(&mut |_, _| {}) else { panic!("the head is {damage}") };
            assert_eq!((error.peer, error.rank), (Rank(0), Rank(1)), "{error}");
            assert!(error.to_string().contains("a ring of 2 signals"), "{error}");

            let (ring, _) = a.ring(&a.endpoints[1].window, 0);
            ring.tail.0.store(damage, Relaxed);
            let Err(Error::Peer(error)) = a.put(signal) else { panic!("the tail is {damage}") };
            assert_eq!((error.peer, error.rank), (Rank(1), Rank(0)), "{error}");
        }
    }

    #[test]
    fn a_damaged_ring_is_reported_once_and_hides_no_other_peer() {
        let ends = rail(3, 2);
        let (ring, _) = ends[0].ring(&ends[0].endpoints[0].window, 1);
        ring.head.0.store(3, Relaxed);
        assert_eq!(ends[2].put(Put::new(Rank(0), word(9))).unwrap(), Posted::Yes);
        let mut seen = Vec::new();
        let Err(Error::Peer(error)) = ends[0].poll(&mut |rank, signal| seen.push((rank, signal.word())))
        else {
            panic!("the ring of rank 1 is damaged")
        };
        assert_eq!((error.peer, &*seen), (Rank(1), &[(Rank(2), 9)][..]));
        assert_eq!(signals(&ends[0]), []);
    }

    #[test]
    fn counters_in_shared_memory_are_not_read_back() {
        let [a, b] = pair(2);
        let signal = |signal| Put::new(Rank(1), word(signal));
        assert_eq!(a.put(signal(1)).unwrap(), Posted::Yes);
        let (ring, _) = a.ring(&a.endpoints[1].window, 0);
        // A peer overwrites the counter of the sender, and then that of the receiver.
        ring.head.0.store(0, Relaxed);
        assert_eq!(a.put(signal(2)).unwrap(), Posted::Yes);
        ring.tail.0.store(7, Relaxed);
        assert_eq!(signals(&b), [(Rank(0), 1), (Rank(0), 2)]);
    }

    #[test]
    fn a_word_that_is_no_signal_is_an_error_that_names_the_peer() {
        let [a, b] = pair(2);
        let signal = Put::new(Rank(1), Signal::MAX);
        assert_eq!(a.put(signal).unwrap(), Posted::Yes);
        let (_, slots) = a.ring(&a.endpoints[1].window, 0);
        slots[0].store(1 << Signal::BITS, Relaxed);
        let Err(Error::Peer(error)) = b.poll(&mut |_, _| {}) else { panic!("a word of 18 bits") };
        assert_eq!((error.peer, error.rank), (Rank(0), Rank(1)), "{error}");
    }

    #[test]
    #[cfg_attr(miri, ignore = "hours")]
    fn the_engine_conformance_suite_passes() {
        for (ranks, reorder) in [(1, false), (2, false), (3, true), (4, false)] {
            let engines = rail(ranks, TRANSPORT_LIMITS.signals);
            let ends: Vec<End> = engines
                .into_iter()
                .map(|engine| {
                    let window = Arc::clone(&engine.endpoints[engine.rail.own_index()].window);
                    let (rail, usable) = (engine.rail.clone(), Usable::new(window, engine.reserved));
                    let engine = (Box::new(engine) as Box<dyn Unconnected>).connect(&[]).unwrap();
                    let transport = if reorder { Box::new(Reordering::new(engine, 7)) } else { engine };
                    End { rail, transport, window: Box::new(usable) }
                })
                .collect();
            std::thread::scope(|scope| {
                let check = |end| scope.spawn(|| check_transport(end, Duration::from_secs(60)));
                let threads: Vec<_> = ends.into_iter().map(check).collect();
                threads.into_iter().for_each(|thread| thread.join().unwrap().unwrap());
            });
        }
    }
}
