//! Streams of messages along a rail, on top of any [`Transport`]: slots, credits, and nothing that blocks.
//!
//! For every other domain a rank has a ring of slots to send from and one to receive into. Message `m` of a stream
//! uses slot `m % slots` on both sides. The receiver's credit frees the slot on both sides at once, which also tells
//! the sender that its bytes were taken: no other completion is needed, and no queue can overflow.

use std::ptr::NonNull;
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering::Acquire, Ordering::Relaxed, Ordering::Release};
use std::sync::{Arc, Mutex, PoisonError};

use ep::{Config, Posted, Put, Rank, Result, Transport, World};

use crate::loopback::Loopback;
use crate::segment::Segment;

/// A signal is one of these in its upper half, and a slot in its lower.
const DATA: u32 = 0;
const CREDIT: u32 = 1 << 16;

/// Where the slots are in a window.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) struct WindowLayout {
    domains: usize,
    slots: usize,
    slot_bytes: usize,
    first: usize,
}

impl WindowLayout {
    pub(crate) fn new(world: &World, config: &Config) -> Self {
        let domains = world.topology.domains();
        let first = Loopback::reserved(domains, Self::signals(config.slots));
        Self { domains, slots: config.slots, slot_bytes: config.slot_bytes.next_multiple_of(64), first }
    }

    /// Signals that can be under way between two ranks: one of data and one of credit for every slot.
    pub(crate) fn signals(slots: usize) -> usize {
        2 * slots
    }

    /// Bytes of a window. A world of one domain needs none beyond the engine's own.
    pub(crate) fn bytes(&self) -> usize {
        let rings = if self.domains > 1 { 2 * self.domains * self.slots } else { 0 };
        self.first + rings * self.slot_bytes
    }

    /// The slot for messages from `domain`.
    fn receive_slot(&self, domain: usize, slot: usize) -> usize {
        self.first + (domain * self.slots + slot) * self.slot_bytes
    }

    /// The slot for messages to `domain`.
    fn send_slot(&self, domain: usize, slot: usize) -> usize {
        self.first + ((self.domains + domain) * self.slots + slot) * self.slot_bytes
    }
}

/// The streams between a rank and the others of its rail.
pub(crate) struct Rails {
    transport: Box<dyn Transport>,
    window: Arc<Segment>,
    layout: WindowLayout,
    lend: bool,
    own_domain: usize,
    /// By domain; the own one is not used.
    streams: Vec<Stream>,
    bytes: AtomicU64,
    messages: AtomicU64,
}

struct Stream {
    peer: Rank,
    /// Messages that were claimed to be sent, ever.
    sent: Mutex<u64>,
    /// Messages that were claimed after they arrived, ever.
    received: Mutex<u64>,
    /// Send slots whose credit is out.
    busy: Vec<AtomicBool>,
    /// Receive slots with a message that nobody has claimed.
    full: Vec<AtomicBool>,
}

/// A slot of a stream that the holder may fill, or read.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) struct Claim {
    pub(crate) domain: usize,
    slot: usize,
}

impl Rails {
    pub(crate) fn new(
        world: &World,
        rank: Rank,
        window: Arc<Segment>,
        config: &Config,
        transport: Box<dyn Transport>,
    ) -> Self {
        let layout = WindowLayout::new(world, config);
        let local = world.topology.local_rank_of(rank);
        let flags = || (0..layout.slots).map(|_| AtomicBool::new(false)).collect();
        let streams = (0..layout.domains)
            .map(|domain| Stream {
                peer: world.topology.rank_at(domain, local),
                sent: Mutex::new(0),
                received: Mutex::new(0),
                busy: flags(),
                full: flags(),
            })
            .collect();
        let own_domain = world.topology.domain_of(rank);
        let (bytes, messages) = (AtomicU64::new(0), AtomicU64::new(0));
        Self { transport, window, layout, lend: config.lend, own_domain, streams, bytes, messages }
    }

    /// The engine's name.
    pub(crate) fn transport_name(&self) -> &'static str {
        self.transport.name()
    }

    /// The other domains.
    pub(crate) fn others(&self) -> impl Iterator<Item = usize> + Clone + use<> {
        let own = self.own_domain;
        (0..self.layout.domains).filter(move |&domain| domain != own)
    }

    /// The rank on this rail in a domain.
    pub(crate) fn peer(&self, domain: usize) -> Rank {
        self.streams[domain].peer
    }

    /// Bytes that a message may have.
    pub(crate) fn slot_bytes(&self) -> usize {
        self.layout.slot_bytes
    }

    /// Messages sent to, and received from, a domain so far; between operators both ends agree on them.
    pub(crate) fn position(&self, domain: usize) -> (u64, u64) {
        let stream = &self.streams[domain];
        (*lock(&stream.sent), *lock(&stream.received))
    }

    /// The next message to `domain`, if there is one before message `end` and its slot is free. Returns its number.
    pub(crate) fn claim_send(&self, domain: usize, end: u64) -> Option<(u64, Claim)> {
        let stream = &self.streams[domain];
        let mut next = lock(&stream.sent);
        let slot = (*next % self.layout.slots as u64) as usize;
        if *next >= end || stream.busy[slot].load(Acquire) {
            return None;
        }
        stream.busy[slot].store(true, Relaxed);
        *next += 1;
        Some((*next - 1, Claim { domain, slot }))
    }

    /// The next message from `domain`, if there is one before message `end` and it has arrived. Returns its number.
    pub(crate) fn claim_receive(&self, domain: usize, end: u64) -> Option<(u64, Claim)> {
        let stream = &self.streams[domain];
        let mut next = lock(&stream.received);
        let slot = (*next % self.layout.slots as u64) as usize;
        // Emptied here and not when it is released: its ring may come round to the slot while the message is read.
        if *next >= end || !stream.full[slot].swap(false, Acquire) {
            return None;
        }
        *next += 1;
        Some((*next - 1, Claim { domain, slot }))
    }

    /// Whether [`claim_send`](Self::claim_send) would find a free slot; for a caller that claims under its own lock.
    pub(crate) fn can_send(&self, domain: usize) -> bool {
        let (sent, _) = self.position(domain);
        !self.streams[domain].busy[(sent % self.layout.slots as u64) as usize].load(Acquire)
    }

    /// Whether [`claim_receive`](Self::claim_receive) would find a message.
    pub(crate) fn can_receive(&self, domain: usize) -> bool {
        let (_, received) = self.position(domain);
        self.streams[domain].full[(received % self.layout.slots as u64) as usize].load(Acquire)
    }

    /// Where to write a claimed message: in the peer's window where the engine lends it, else in this rank's own.
    pub(crate) fn outgoing(&self, claim: Claim) -> *mut u8 {
        match self.lent(claim) {
            Some(slot) => slot.as_ptr(),
            None => self.window.at(self.layout.send_slot(claim.domain, claim.slot), self.layout.slot_bytes),
        }
    }

    /// The peer's slot itself: free to be written, since its credit is here.
    fn lent(&self, claim: Claim) -> Option<NonNull<u8>> {
        let offset = self.layout.receive_slot(self.own_domain, claim.slot);
        let peer = self.streams[claim.domain].peer;
        self.lend.then(|| self.transport.lend(peer, offset, self.layout.slot_bytes)).flatten()
    }

    /// Where to read a claimed message.
    pub(crate) fn incoming(&self, claim: Claim) -> *const u8 {
        self.window.at(self.layout.receive_slot(claim.domain, claim.slot), self.layout.slot_bytes)
    }

    /// Sends the first `len` bytes of a claimed slot. `Full`: make progress and post again.
    pub(crate) fn post(&self, claim: Claim, len: usize) -> Result<Posted> {
        assert!(len <= self.layout.slot_bytes, "a message of {len} bytes is larger than a slot");
        let posted = self.transport.put(Put {
            peer: self.streams[claim.domain].peer,
            source: self.layout.send_slot(claim.domain, claim.slot),
            destination: self.layout.receive_slot(self.own_domain, claim.slot),
            len: if self.lent(claim).is_some() { 0 } else { len },
            signal: DATA | claim.slot as u32,
        })?;
        if posted == Posted::Yes {
            self.bytes.fetch_add(len as u64, Relaxed);
            self.messages.fetch_add(1, Relaxed);
        }
        Ok(posted)
    }

    /// Gives a read slot back to its sender. `Full`: make progress and release again.
    pub(crate) fn release(&self, claim: Claim) -> Result<Posted> {
        self.transport.put(Put {
            peer: self.streams[claim.domain].peer,
            source: 0,
            destination: 0,
            len: 0,
            signal: CREDIT | claim.slot as u32,
        })
    }

    /// Takes in what has arrived.
    pub(crate) fn poll(&self) -> Result<()> {
        self.transport.poll(&mut |peer, signal| {
            let slot = (signal & 0xFFFF) as usize;
            if let Some(stream) = self.streams.iter().find(|stream| stream.peer == peer)
                && slot < self.layout.slots
            {
                match signal & !0xFFFF {
                    CREDIT => stream.busy[slot].store(false, Release),
                    _ => stream.full[slot].store(true, Release),
                }
            }
        })
    }

    /// Bytes and messages sent so far.
    pub(crate) fn sent(&self) -> (u64, u64) {
        (self.bytes.load(Relaxed), self.messages.load(Relaxed))
    }
}

fn lock<T>(mutex: &Mutex<T>) -> std::sync::MutexGuard<'_, T> {
    mutex.lock().unwrap_or_else(PoisonError::into_inner)
}
