//! The checks that every engine must pass: [`check_transport`].
//!
//! Every rank of a rail, a thread or a process, calls [`check_transport`] with its own end. The ranks
//! synchronise through the engine only, so an engine that loses a signal exceeds the bound and fails.

mod reordering;
#[cfg(test)]
mod tests;

use std::collections::VecDeque;
use std::fmt;
use std::ops::Range;
use std::time::{Duration, Instant};

use crate::error::{Error, Result as EpResult};
use crate::topology::Rank;
use crate::transport::{Limits, Posted, Put, Rail, Signal, Transport};

pub use reordering::Reordering;

/// Slots from one rank to another.
const SLOTS: usize = 8;
/// Bytes of a slot.
const SLOT_BYTES: usize = 8192;
/// Puts into every slot in one stream.
const ROUNDS: usize = 12;
/// Lengths of puts, bytes.
const LENGTHS: [usize; 7] = [SLOT_BYTES, 0, 1, 7, 64, 4099, SLOT_BYTES - 9];

/// The limits with which the engine must be opened: a signal for the bytes and a credit for every slot, and one signal
/// by which the ranks agree that a check has ended.
pub const TRANSPORT_LIMITS: Limits =
    Limits { signals: 2 * SLOTS + 1, put_bytes: SLOT_BYTES, advice: "lower the limits of the suite" };

/// Bytes of every window that the checks need on a rail of `ranks` ranks.
pub fn transport_window_bytes(ranks: usize) -> usize {
    2 * ranks * SLOTS * SLOT_BYTES
}

/// Access to a rank's own window. `offset` is an offset in the window, as in [`Put`].
///
/// The checks access no byte that a put in flight may access.
pub trait WindowAccess: Send {
    /// The offsets that puts may use: at least [`transport_window_bytes`] bytes, the same range on all ranks.
    fn usable(&self) -> Range<usize>;
    /// Stores bytes.
    fn write(&self, offset: usize, bytes: &[u8]);
    /// Loads bytes.
    fn read(&self, offset: usize, bytes: &mut [u8]);
}

/// One rank's end of a rail.
pub struct End {
    /// The rail.
    pub rail: Rail,
    /// The engine under test.
    pub transport: Box<dyn Transport>,
    /// This rank's window.
    pub window: Box<dyn WindowAccess>,
}

impl fmt::Debug for End {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("End").field("rail", &self.rail).field("engine", &self.transport.name()).finish()
    }
}

/// A check of an engine that failed on one rank.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
#[error("engine {engine}, rank {rank}, {check}: {problem}")]
pub struct TransportFailure {
    /// The engine's name.
    pub engine: String,
    /// The rank that found the failure.
    pub rank: Rank,
    /// The check.
    pub check: &'static str,
    /// What is wrong.
    pub problem: String,
}

/// Checks one rank's end of an engine. Collective: every rank of the rail calls it. The last rank of the rail leaves
/// before the others end.
///
/// The checks: a signal arrives once, after the bytes of its put, with all its bits and the right sender; a put writes
/// no other bytes; puts of length 0; many puts in flight, to and from every peer; as many signals as the limits allow;
/// puts outside a window or to no peer are refused without effect; drained puts arrive even if the engine is then dropped;
/// a peer that has left disturbs no other peer, and calls that name it return.
///
/// # Errors
/// The first check that fails. Nothing may take longer than `bound`.
pub fn check_transport(end: End, bound: Duration) -> Result<(), TransportFailure> {
    let engine = end.transport.name().to_string();
    let rank = end.rail.own();
    let mut check = Check {
        bound,
        name: "",
        phase: 0,
        inbox: VecDeque::new(),
        left: None,
        excused: None,
        slots: (0..end.rail.ranks().len()).map(|_| Default::default()).collect(),
        end,
    };
    check.all().map_err(|problem| TransportFailure { engine, rank, check: check.name, problem })
}

/// The signal of a put has the put's number in bits 8 to 15 and its slot in bits 0 to 7. Its credit has bit 16 in addition.
const CREDIT: u32 = 1 << 16;
/// In the place of a slot: the check has ended.
const END: u32 = 0xFF;

fn signal(kind: u32, number: usize, slot: u32) -> Signal {
    Signal::new(kind | (number as u32 & 0xFF) << 8 | slot).expect("kind, number and slot fill 17 bits")
}

/// The state of two slots with the same number: one for puts to a peer, and one for puts from that peer.
#[derive(Debug, Clone, Default)]
struct Slot {
    /// Puts that this rank has posted.
    sent: usize,
    /// Credits that have arrived for these puts.
    credited: usize,
    /// Puts that have arrived.
    received: usize,
    /// The contents of the slot for puts from the peer.
    contents: Vec<u8>,
}

struct Check {
    end: End,
    bound: Duration,
    /// The current check.
    name: &'static str,
    /// Checks that have ended.
    phase: usize,
    /// Signals that have arrived but have not been handled.
    inbox: VecDeque<(Rank, Signal)>,
    /// The rank that has left.
    left: Option<Rank>,
    /// A rank that may have dropped its engine; errors may name it.
    excused: Option<Rank>,
    /// The slots of each peer, by the peer's index on the rail.
    slots: Vec<[Slot; SLOTS]>,
}

type Outcome = Result<(), String>;

impl Check {
    fn all(&mut self) -> Outcome {
        let usable = self.end.window.usable();
        if usable.len() < transport_window_bytes(self.end.rail.ranks().len()) {
            return Err(format!("a window of {} usable bytes is too short", usable.len()));
        }
        self.clear_slots();
        self.phase("start", |_| Ok(()))?;
        self.phase("stream", Self::stream)?;
        self.phase("refused puts", Self::refusals)?;
        self.phase("burst", |check| check.burst(&check.peers()))?;
        self.phase("drain", |check| {
            check.post_all(&check.peers())?;
            for peer in check.peers() {
                check.end.transport.drain(peer, Instant::now() + check.bound).map_err(|e| e.to_string())?;
            }
            check.take_all(&check.peers())
        })?;
        self.phase("stream again", |check| {
            check.stream()?;
            // From now on the last rank may leave before this rank learns that all others have ended the check.
            check.excused = check.end.rail.ranks().last().copied();
            Ok(())
        })?;
        self.leave()
    }

    /// Zeroes the receive slots of this rank's window. No peer writes to them before the first phase has ended.
    fn clear_slots(&mut self) {
        let zeros = vec![0; SLOT_BYTES];
        for index in 0..self.slots.len() {
            for slot in 0..SLOTS {
                self.end.window.write(self.receive_slot(index, slot), &zeros);
                self.slots[index][slot].contents = zeros.clone();
            }
        }
    }

    /// The peers that have not left.
    fn peers(&self) -> Vec<Rank> {
        self.end.rail.peers().filter(|&peer| Some(peer) != self.left).collect()
    }

    fn index(&self, peer: Rank) -> usize {
        self.end.rail.peer_index(peer).expect("callers pass peers of the rail")
    }

    /// The offset of the slot for puts from the rank with this index.
    fn receive_slot(&self, index: usize, slot: usize) -> usize {
        self.end.window.usable().start + (index * SLOTS + slot) * SLOT_BYTES
    }

    /// The offset of the slot for puts to the rank with this index.
    fn send_slot(&self, index: usize, slot: usize) -> usize {
        self.receive_slot(self.slots.len() + index, slot)
    }

    /// Runs a check, then waits until all peers have ended it. No signal may be left over.
    fn phase(&mut self, name: &'static str, check: impl FnOnce(&mut Self) -> Outcome) -> Outcome {
        self.name = name;
        check(self)?;
        self.phase += 1;
        let end = signal(0, self.phase, END);
        let mut awaited = self.peers();
        for peer in awaited.clone() {
            self.post(Put { peer, source: 0, destination: 0, len: 0, signal: end })?;
        }
        let start = Instant::now();
        while !awaited.is_empty() {
            self.poll(start, || format!("the ranks {awaited:?} to end the check"))?;
            // A peer that has ended this check may have begun the next one.
            let ended = |&(peer, found): &(Rank, Signal)| found == end && awaited.contains(&peer);
            let Some(at) = self.inbox.iter().position(ended) else { continue };
            let (peer, _) = self.inbox.remove(at).expect("`position` has just found it");
            awaited.retain(|&other| other != peer);
        }
        Ok(())
    }

    /// Takes the signals that have arrived. An error may name the excused rank, and no other.
    fn poll(&mut self, start: Instant, waiting: impl Fn() -> String) -> Outcome {
        let (before, inbox) = (self.inbox.len(), &mut self.inbox);
        let polled = self.end.transport.poll(&mut |peer, signal| inbox.push_back((peer, signal)));
        self.excuse(polled)?;
        if let Some((rank, signal)) =
            self.inbox.iter().find(|(rank, _)| self.end.rail.peer_index(*rank).is_err())
        {
            return Err(format!(
                "signal {:#x} names rank {rank} as its sender, which is not a peer",
                signal.word()
            ));
        }
        if self.inbox.len() > before {
            return Ok(());
        }
        if start.elapsed() > self.bound {
            return Err(format!("waited {:?} for {}; unhandled: {:?}", self.bound, waiting(), self.inbox));
        }
        std::thread::yield_now();
        Ok(())
    }

    /// Ignores an error that names the excused rank.
    fn excuse(&self, result: EpResult<()>) -> Outcome {
        match result {
            Err(Error::Peer(error)) if Some(error.peer) == self.excused => Ok(()),
            result => result.map_err(|error| error.to_string()),
        }
    }

    /// Posts a put; polls and retries while the queue is full.
    fn post(&mut self, put: Put) -> Outcome {
        let start = Instant::now();
        while self.end.transport.put(put).map_err(|error| error.to_string())? == Posted::Full {
            self.poll(start, || format!("room for a put to rank {}", put.peer))?;
        }
        Ok(())
    }

    /// Fills the send slot with the bytes of its next put and posts the put.
    fn send(&mut self, peer: Rank, slot: usize) -> Outcome {
        let (index, own) = (self.index(peer), self.end.rail.own_index());
        let number = self.slots[index][slot].sent;
        let part = Part::of(self.end.rail.own(), peer, slot, number);
        let source = self.send_slot(index, slot) + (number * 3) % (SLOT_BYTES - part.bytes.len() + 1);
        self.end.window.write(source, &part.bytes);
        self.slots[index][slot].sent += 1;
        self.post(Put {
            peer,
            source,
            destination: self.receive_slot(own, slot) + part.at,
            len: part.bytes.len(),
            signal: signal(0, number, slot as u32),
        })
    }

    /// Checks the signal of a put against the bytes in its slot.
    fn receive(&mut self, peer: Rank, found: Signal) -> Outcome {
        let index = self.index(peer);
        let number = (found.word() >> 8 & 0xFF) as usize;
        let slot = (found.word() & 0xFF) as usize;
        let unexpected = || format!("signal {:#x} of rank {peer} is not that of its next put", found.word());
        let offset = self.receive_slot(index, slot.min(SLOTS - 1));
        let expected = self.slots[index].get_mut(slot).ok_or_else(unexpected)?;
        if found.word() & CREDIT != 0 || number != expected.received & 0xFF {
            return Err(unexpected());
        }
        let part = Part::of(peer, self.end.rail.own(), slot, expected.received);
        expected.received += 1;
        expected.contents[part.at..][..part.bytes.len()].copy_from_slice(&part.bytes);
        let mut contents = vec![0; SLOT_BYTES];
        self.end.window.read(offset, &mut contents);
        match (0..SLOT_BYTES).find(|&at| contents[at] != expected.contents[at]) {
            None => Ok(()),
            Some(at) => {
                let inside = (part.at..part.at + part.bytes.len()).contains(&at);
                let place = if inside { "inside" } else { "outside" };
                Err(format!(
                    "byte {at} of slot {slot} from rank {peer} is {}, not {}, when the signal of put {number} of {} \
                     bytes at {} arrives; the byte is {place} the put",
                    contents[at],
                    expected.contents[at],
                    part.bytes.len(),
                    part.at,
                ))
            }
        }
    }

    /// Keeps all slots to all peers busy, for some rounds.
    fn stream(&mut self) -> Outcome {
        let peers = self.peers();
        let goal: usize = peers.len() * SLOTS * ROUNDS;
        let (mut received, mut credited, mut start) = (0, 0, Instant::now());
        let first: Vec<[usize; SLOTS]> =
            self.slots.iter().map(|slots| slots.each_ref().map(|s| s.sent)).collect();
        for &peer in &peers {
            for slot in 0..SLOTS {
                self.send(peer, slot)?;
            }
        }
        while received < goal || credited < goal {
            let Some((peer, found)) = self.next_of_check(&peers) else {
                self.poll(start, || format!("{received} of {goal} puts and {credited} credits"))?;
                continue;
            };
            start = Instant::now();
            if found.word() & CREDIT == 0 {
                self.receive(peer, found)?;
                received += 1;
                let credit = Signal::new(found.word() | CREDIT).expect("`CREDIT` is bit 16 of 17");
                self.post(Put { peer, source: 0, destination: 0, len: 0, signal: credit })?;
                continue;
            }
            let slot = (found.word() & 0xFF) as usize;
            let index = self.index(peer);
            let state = self.slots[index].get_mut(slot).filter(|state| state.credited < state.sent);
            let Some(state) = state.filter(|state| found == signal(CREDIT, state.credited, slot as u32))
            else {
                return Err(format!("credit {:#x} of rank {peer} matches no put in flight", found.word()));
            };
            state.credited += 1;
            credited += 1;
            if self.slots[index][slot].sent - first[index][slot] < ROUNDS {
                self.send(peer, slot)?;
            }
        }
        Ok(())
    }

    /// The next signal that belongs to the current check.
    fn next_of_check(&mut self, peers: &[Rank]) -> Option<(Rank, Signal)> {
        let belongs = |(peer, found): &(Rank, Signal)| peers.contains(peer) && found.word() & 0xFF != END;
        let at = self.inbox.iter().position(belongs)?;
        self.inbox.remove(at)
    }

    /// Posts a put to every slot of these ranks, and the same number of signals without bytes. Handles no signal meanwhile.
    fn post_all(&mut self, peers: &[Rank]) -> Outcome {
        for slot in 0..SLOTS {
            for &peer in peers {
                let extra = signal(CREDIT, SLOTS - slot, slot as u32);
                self.send(peer, slot)?;
                self.post(Put { peer, source: 0, destination: 0, len: 0, signal: extra })?;
            }
        }
        for state in self.slots.iter_mut().flatten() {
            state.credited = state.sent;
        }
        Ok(())
    }

    /// Receives what [`post_all`](Self::post_all) sends on each of these ranks.
    fn take_all(&mut self, peers: &[Rank]) -> Outcome {
        let mut extras: Vec<(Rank, Signal)> = peers
            .iter()
            .flat_map(|&peer| (0..SLOTS).map(move |slot| (peer, signal(CREDIT, SLOTS - slot, slot as u32))))
            .collect();
        let (mut puts, start) = (peers.len() * SLOTS, Instant::now());
        while puts > 0 || !extras.is_empty() {
            let Some((peer, found)) = self.next_of_check(peers) else {
                self.poll(start, || format!("{puts} puts and {} signals without bytes", extras.len()))?;
                continue;
            };
            match extras.iter().position(|&extra| extra == (peer, found)) {
                Some(at) => drop(extras.swap_remove(at)),
                None => {
                    self.receive(peer, found)?;
                    puts = puts.checked_sub(1).ok_or("more puts arrive than were posted")?;
                }
            }
        }
        Ok(())
    }

    /// Puts as many signals in flight as the limits allow.
    fn burst(&mut self, peers: &[Rank]) -> Outcome {
        self.post_all(peers)?;
        self.take_all(peers)
    }

    /// Posts puts that the engine must refuse with a caller's error. They must have no effect.
    fn refusals(&mut self) -> Outcome {
        let Some(&peer) = self.peers().first() else { return Ok(()) };
        let usable = self.end.window.usable();
        let (inside, own) = (usable.start, self.end.rail.own());
        let stranger = Rank(self.end.rail.ranks().iter().map(|rank| rank.0).max().unwrap_or(0) + 1);
        let put =
            |peer, source, destination, len| Put { peer, source, destination, len, signal: Signal::MAX };
        // Far outside, because a window may have bytes of its engine after the usable ones.
        let far = 1 << 46;
        for (what, put) in [
            ("its source ends outside the window", put(peer, far, inside, 8)),
            ("its destination ends outside the peer's window", put(peer, inside, far, 8)),
            ("its source overflows", put(peer, usize::MAX - 3, inside, 8)),
            ("its destination overflows", put(peer, inside, usize::MAX - 3, 8)),
            ("its length is that of the address space", put(peer, inside, inside, usize::MAX)),
            ("its peer is the rank itself", put(own, inside, inside, 8)),
            ("its peer is not a rank of the rail", put(stranger, inside, inside, 8)),
        ] {
            // An engine may be busy before it looks at a put.
            let deadline = Instant::now() + self.bound;
            let answer = loop {
                match self.end.transport.put(put) {
                    Ok(Posted::Full) if Instant::now() < deadline => std::thread::yield_now(),
                    answer => break answer,
                }
            };
            match answer {
                Err(Error::Caller(_)) => {}
                other => return Err(format!("a put must be refused, because {what}, but: {other:?}")),
            }
        }
        match self.end.transport.drain(stranger, Instant::now()) {
            Err(Error::Caller(_)) => Ok(()),
            other => {
                Err(format!("a drain of rank {stranger}, not of this rail, must be refused, but: {other:?}"))
            }
        }
    }

    /// The last rank drops its engine as soon as its puts are drained. The other ranks continue.
    fn leave(&mut self) -> Outcome {
        self.name = "a rank that leaves";
        let Some(&leaver) = self.end.rail.ranks().last() else { return Ok(()) };
        let others: Vec<Rank> = self.peers().into_iter().filter(|&peer| peer != leaver).collect();
        if self.end.rail.own() == leaver {
            self.post_all(&others)?;
            for peer in others {
                self.end.transport.drain(peer, Instant::now() + self.bound).map_err(|e| e.to_string())?;
            }
            return Ok(());
        }
        self.left = Some(leaver);
        self.take_all(&[leaver])?;
        self.phase("stream after a rank has left", Self::stream)?;
        self.name = "puts to a rank that has left";
        let put = Put { peer: leaver, source: 0, destination: 0, len: 0, signal: signal(0, 0, 0) };
        let start = Instant::now();
        for _ in 0..SLOTS {
            let posted = self.end.transport.put(put).map(drop);
            self.excuse(posted)?;
            self.poll(start, String::new)?;
        }
        let drained = self.end.transport.drain(leaver, Instant::now() + Duration::from_millis(50));
        self.excuse(drained)?;
        if start.elapsed() > self.bound {
            return Err(format!("the calls took {:?}", start.elapsed()));
        }
        self.phase("the end", |_| Ok(()))?;
        for peer in self.peers() {
            // The peer may have dropped its engine after it had received the last signal.
            self.excused = Some(peer);
            let drained =
                self.end.transport.drain(peer, Instant::now() + self.bound.min(Duration::from_secs(1)));
            self.excuse(drained)?;
        }
        Ok(())
    }
}

/// The bytes of one put, and where in the slot they belong. They follow from the put alone, and differ from put to put.
struct Part {
    at: usize,
    bytes: Vec<u8>,
}

impl Part {
    fn of(from: Rank, to: Rank, slot: usize, number: usize) -> Self {
        let len = LENGTHS[(number + slot + from.index()) % LENGTHS.len()];
        let at = (number * 5 + slot) % (SLOT_BYTES - len + 1);
        let seed = from.index() * 131 + to.index() * 31 + slot * 17 + number * 7 + 1;
        let mut state = seed as u32 | 1;
        let mut next = || {
            state ^= state << 13;
            state ^= state >> 17;
            state ^= state << 5;
            (state >> 11) as u8
        };
        Self { at, bytes: (0..len).map(|_| next()).collect() }
    }
}
