//! Streams of messages along a rail, on top of any [`Transport`]. No call blocks.
//!
//! For every other domain a rank has a ring of slots to send from and a ring of slots to receive into. Message `m` of a
//! stream uses slot `m % slots` on both sides. After the receiver has read the message it sends a credit, which frees
//! the slot on both sides. The credit also completes the send: no other completion is needed, and at most one message
//! and one credit per slot are in flight, so no queue overflows.
//!
//! The CPU backend's operators and the carrier of the migration use this module. The CUDA backend has lanes instead.

use std::ptr::NonNull;
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering::Acquire, Ordering::Relaxed, Ordering::Release};
use std::sync::{Arc, Mutex, PoisonError};
use std::time::Instant;

use ep::{
    CallerError, Copier, HostConfig, Limits, Posted, Put, Rail, Rank, Result, Signal, Size, Transport,
    Unconnected,
};

use crate::{Loopback, Paced, RankPlace, Segment, broken, open_fabric};

/// A signal has its kind in bit 16 and a slot in the 16 bits below. `DATA`: the slot holds a message.
const DATA: u32 = 0;
/// `CREDIT`: the receiver has read the message in the slot.
const CREDIT: u32 = 1 << 16;

/// Whether the ranks of a rail over this many domains must exchange blobs, because the engine does not map the windows of
/// the peers.
pub fn needs_blobs(domains: usize, config: &HostConfig) -> bool {
    domains > 1 && !config.transport.maps_windows()
}

/// Opens the engine that `config` selects, for [`Streams`] between the ranks of `rail`. `window` returns the window of a
/// rank: for an engine that maps the windows of the peers, of every rank of the rail, otherwise of this rank only. Each
/// has at least [`WindowLayout::bytes`] bytes.
///
/// A rail of one domain needs no engine: it gets `loopback`, whatever the settings select.
///
/// # Safety
/// Only one [`Streams`] of the same rail, window and configuration may use the engine.
///
/// # Errors
/// Those of `window`, [`Loopback::new`] and [`open_fabric`]; [`CallerError::Config`] for an emulated link whose bytes a
/// kernel copies.
pub unsafe fn open_streams(
    rail: Rail,
    place: &RankPlace,
    config: &HostConfig,
    window: impl Fn(Rank) -> Result<Arc<Segment>>,
) -> Result<Box<dyn Unconnected>> {
    let (domains, signals) = (rail.ranks().len(), WindowLayout::signals(config.slots));
    if needs_blobs(domains, config) {
        let put_bytes = config.slot_bytes.next_multiple_of(64);
        let limits = Limits { signals, put_bytes, advice: "lower HYBRID_EP_SLOTS or HYBRID_EP_SLOT_BYTES" };
        let own = window(rail.own())?;
        return open_fabric(rail, place, own, &config.transport, limits);
    }
    let windows = rail.ranks().iter().map(|&peer| window(peer)).collect::<Result<Vec<_>>>()?;
    // SAFETY: puts of `Streams` copy slots only. The sender fills a send slot after the credit of the slot's last message. The receiver
    // reads a receive slot after the message's signal and before it posts the credit, and no other rank writes to that slot.
    // The rings lie in front of all slots.
    let loopback = unsafe { Loopback::new(rail, windows, signals)? };
    let Some(pace) = config.transport.pace()? else { return Ok(Box::new(loopback)) };
    if pace.copier() == Copier::Kernel {
        let (key, value) = ("HYBRID_EP_TRANSPORT", config.transport.engine.clone());
        let problem = "only GPUs have a `kernel` that copies; leave this part out".into();
        return Err(CallerError::Config { key, value, problem }.into());
    }
    match domains {
        1 => Ok(Box::new(loopback)),
        _ => Ok(Box::new(Paced::new(loopback, pace, signals)?)),
    }
}

/// The layout of a window: signal rings of the engine, receive slots by domain, send slots by domain.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct WindowLayout {
    domains: usize,
    /// Slots per ring.
    slots: usize,
    slot_bytes: usize,
    /// Offset of the first slot.
    first: usize,
    /// Length of the window.
    bytes: usize,
}

impl WindowLayout {
    /// The layout of a rail over this many domains.
    ///
    /// # Errors
    /// [`CallerError::TooLarge`] for a window that is longer than the address space.
    pub fn new(domains: usize, config: &HostConfig) -> Result<Self> {
        const WHAT: &str = "the window of a rank";
        let slots = config.slots;
        let first = match needs_blobs(domains, config) {
            true => 0,
            // The engine is `loopback`, alone or inside `paced`. It is `loopback` on a rail of one domain, whatever the
            // settings select.
            false => Loopback::reserved(domains, Self::signals(slots)).bytes(WHAT)?,
        };
        let slot_bytes = Size::new(config.slot_bytes).next_multiple_of(64);
        // A rail of one domain carries no messages.
        let rings = if domains > 1 { Size::new(domains) * 2 * slots } else { Size::new(0) };
        let bytes = (rings * slot_bytes + first).bytes(WHAT)?;
        Ok(Self { domains, slots, slot_bytes: slot_bytes.bytes(WHAT)?, first, bytes })
    }

    /// Greatest number of signals in flight from one rank to another: one `DATA` and one `CREDIT` for every slot.
    pub fn signals(slots: usize) -> usize {
        2 * slots
    }

    /// Length of a window, bytes.
    pub fn bytes(&self) -> usize {
        self.bytes
    }

    /// The offset of a slot for messages from `domain`.
    fn receive_slot(&self, domain: usize, slot: usize) -> usize {
        self.first + (domain * self.slots + slot) * self.slot_bytes
    }

    /// The offset of a slot for messages to `domain`.
    fn send_slot(&self, domain: usize, slot: usize) -> usize {
        self.first + ((self.domains + domain) * self.slots + slot) * self.slot_bytes
    }
}

/// The streams between a rank and the others of its rail.
pub struct Streams {
    transport: Box<dyn Transport>,
    window: Arc<Segment>,
    layout: WindowLayout,
    /// Whether to write into lent slots of the peer, where the engine lends them.
    lend: bool,
    own_domain: usize,
    /// By domain; the entry of this rank's domain is not used.
    streams: Vec<Stream>,
    /// Bytes and messages sent so far.
    bytes: AtomicU64,
    messages: AtomicU64,
}

/// Both directions between this rank and its rail peer in one domain.
struct Stream {
    peer: Rank,
    /// Messages claimed for sending since the rank joined.
    sent: Mutex<u64>,
    /// Messages that have arrived and were claimed since the rank joined.
    received: Mutex<u64>,
    /// Send slots that wait for their credit.
    busy: Vec<AtomicBool>,
    /// Receive slots that hold a message which no worker has claimed.
    full: Vec<AtomicBool>,
}

/// A claimed slot of a stream: only the worker that holds the claim fills or reads it.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct ClaimedSlot {
    /// The domain of the stream.
    pub domain: usize,
    slot: usize,
}

impl ClaimedSlot {
    /// The signal of this kind for the slot. `Config::check` bounds the number of slots.
    fn signal(self, kind: u32) -> Signal {
        Signal::new(kind + self.slot as u32).expect("`Config::check` allows 1024 slots")
    }
}

impl Streams {
    /// The streams of this rank of `rail`. `window` is this rank's, and `transport` the connected engine
    /// ([`open_streams`]).
    ///
    /// # Errors
    /// As for [`WindowLayout::new`].
    pub fn new(
        rail: &Rail,
        window: Arc<Segment>,
        config: &HostConfig,
        transport: Box<dyn Transport>,
    ) -> Result<Self> {
        let layout = WindowLayout::new(rail.ranks().len(), config)?;
        let flags = || (0..layout.slots).map(|_| AtomicBool::new(false)).collect();
        let stream = |&peer: &Rank| Stream {
            peer,
            sent: Mutex::new(0),
            received: Mutex::new(0),
            busy: flags(),
            full: flags(),
        };
        let (streams, own_domain) = (rail.ranks().iter().map(stream).collect(), rail.own_index());
        let (bytes, messages) = (AtomicU64::new(0), AtomicU64::new(0));
        Ok(Self { transport, window, layout, lend: config.lend, own_domain, streams, bytes, messages })
    }

    /// The engine's name.
    pub fn transport_name(&self) -> &str {
        self.transport.name()
    }

    /// The domains other than this rank's, in order.
    pub fn others(&self) -> impl Iterator<Item = usize> + Clone + use<> {
        let own = self.own_domain;
        (0..self.layout.domains).filter(move |&domain| domain != own)
    }

    /// The rank on this rail in `domain`.
    pub fn peer(&self, domain: usize) -> Rank {
        self.streams[domain].peer
    }

    /// The CPUs near the engine's network card ([`Transport::near_cpus`]).
    pub fn near_cpus(&self) -> &[usize] {
        self.transport.near_cpus()
    }

    /// Slots per stream and direction.
    pub fn slots(&self) -> usize {
        self.layout.slots
    }

    /// Length of a slot, bytes: the greatest length of a message.
    pub fn slot_bytes(&self) -> usize {
        self.layout.slot_bytes
    }

    /// Messages sent to and received from `domain` so far. Between operators both ends of the stream agree on them.
    pub fn position(&self, domain: usize) -> (u64, u64) {
        let stream = &self.streams[domain];
        (*lock(&stream.sent), *lock(&stream.received))
    }

    /// Claims the next message to `domain` if its number is below `end` and its slot is free. Returns the number.
    pub fn claim_send(&self, domain: usize, end: u64) -> Option<(u64, ClaimedSlot)> {
        let stream = &self.streams[domain];
        let mut next = lock(&stream.sent);
        let slot = (*next % self.layout.slots as u64) as usize;
        if *next >= end || stream.busy[slot].load(Acquire) {
            return None;
        }
        stream.busy[slot].store(true, Relaxed);
        *next += 1;
        Some((*next - 1, ClaimedSlot { domain, slot }))
    }

    /// Claims the next message from `domain` if its number is below `end` and it has arrived. Returns the number.
    pub fn claim_receive(&self, domain: usize, end: u64) -> Option<(u64, ClaimedSlot)> {
        let stream = &self.streams[domain];
        let mut next = lock(&stream.received);
        let slot = (*next % self.layout.slots as u64) as usize;
        // Marked empty here and not on release: after the credit the peer may fill the slot again before `release`
        // returns.
        if *next >= end || !stream.full[slot].swap(false, Acquire) {
            return None;
        }
        *next += 1;
        Some((*next - 1, ClaimedSlot { domain, slot }))
    }

    /// Whether the peer has read the message that was sent from a claimed slot. The answer is meaningless once the slot is
    /// claimed again.
    pub fn is_free(&self, claim: ClaimedSlot) -> bool {
        !self.streams[claim.domain].busy[claim.slot].load(Acquire)
    }

    /// Whether [`claim_send`](Self::claim_send) would find a free slot. The caller must hold a lock that excludes other
    /// claims of this stream.
    pub fn can_send(&self, domain: usize) -> bool {
        let (sent, _) = self.position(domain);
        !self.streams[domain].busy[(sent % self.layout.slots as u64) as usize].load(Acquire)
    }

    /// Whether [`claim_receive`](Self::claim_receive) would find a message.
    pub fn can_receive(&self, domain: usize) -> bool {
        let (_, received) = self.position(domain);
        self.streams[domain].full[(received % self.layout.slots as u64) as usize].load(Acquire)
    }

    /// The address to write a claimed message to: in the peer's window where the engine lends it, else in this rank's.
    pub fn outgoing(&self, claim: ClaimedSlot) -> *mut u8 {
        match self.lent(claim) {
            Some(slot) => slot.as_ptr(),
            None => self.window.at(self.layout.send_slot(claim.domain, claim.slot), self.layout.slot_bytes),
        }
    }

    /// The peer's receive slot, where the engine lends it. The peer does not read it before this message's signal: its
    /// credit for the last message has arrived.
    fn lent(&self, claim: ClaimedSlot) -> Option<NonNull<u8>> {
        let offset = self.layout.receive_slot(self.own_domain, claim.slot);
        let peer = self.streams[claim.domain].peer;
        self.lend.then(|| self.transport.lend(peer, offset, self.layout.slot_bytes)).flatten()
    }

    /// The address to read a claimed message from.
    pub fn incoming(&self, claim: ClaimedSlot) -> *const u8 {
        self.window.at(self.layout.receive_slot(claim.domain, claim.slot), self.layout.slot_bytes)
    }

    /// Sends the first `len` bytes of a claimed slot. On [`Posted::Full`], poll and post again.
    ///
    /// # Safety
    /// [`claim_send`](Self::claim_send) of these streams has returned the claim, the slot was filled, no post of it has succeeded,
    /// and nothing writes to the slot from now on.
    pub unsafe fn post(&self, claim: ClaimedSlot, len: usize) -> Result<Posted> {
        assert!(len <= self.layout.slot_bytes, "a message of {len} bytes is larger than a slot");
        let mut put = Put::new(self.streams[claim.domain].peer, claim.signal(DATA));
        // The bytes of a lent slot are already in the peer's window.
        if self.lent(claim).is_none() {
            let source = self.layout.send_slot(claim.domain, claim.slot);
            put = put.bytes(source..source + len, self.layout.receive_slot(self.own_domain, claim.slot));
        }
        let posted = self.transport.put(put)?;
        if posted == Posted::Yes {
            self.bytes.fetch_add(len as u64, Relaxed);
            self.messages.fetch_add(1, Relaxed);
        }
        Ok(posted)
    }

    /// Sends the credit for a message that was read. On [`Posted::Full`], poll and release again.
    ///
    /// # Safety
    /// [`claim_receive`](Self::claim_receive) of these streams has returned the claim, no release of it has succeeded, and nothing
    /// reads the slot from now on.
    pub unsafe fn release(&self, claim: ClaimedSlot) -> Result<Posted> {
        self.transport.put(Put::new(self.streams[claim.domain].peer, claim.signal(CREDIT)))
    }

    /// Handles the signals that have arrived.
    ///
    /// # Errors
    /// Those of [`Transport::poll`]; [`PeerError`](ep::PeerError) for a signal that the protocol does not allow, with the
    /// operator of [`broken`].
    pub fn poll(&self) -> Result<()> {
        let mut invalid = None;
        self.transport.poll(&mut |peer, signal| {
            if !self.handle_signal(peer, signal) {
                invalid.get_or_insert((peer, signal));
            }
        })?;
        invalid.map_or(Ok(()), |(peer, signal)| {
            let what = format!("a signal ({:#x}) that matches no message in flight", signal.word());
            Err(broken(self.streams[self.own_domain].peer, peer, what))
        })
    }

    /// Handles one signal. Returns whether the protocol allows `peer` to send it now.
    fn handle_signal(&self, peer: Rank, signal: Signal) -> bool {
        let slot = (signal.word() & 0xFFFF) as usize;
        let Some(stream) =
            self.others().map(|domain| &self.streams[domain]).find(|stream| stream.peer == peer)
        else {
            return false;
        };
        let (Some(busy), Some(full)) = (stream.busy.get(slot), stream.full.get(slot)) else { return false };
        // A credit must follow a message that was sent; a slot must not be filled again before its credit.
        if signal.word() & CREDIT == CREDIT { busy.swap(false, Release) } else { !full.swap(true, Release) }
    }

    /// Waits until all puts to the rail peer in `domain` are complete.
    ///
    /// # Errors
    /// Those of [`Transport::drain`].
    pub fn drain(&self, domain: usize, deadline: Instant) -> Result<()> {
        self.transport.drain(self.peer(domain), deadline)
    }

    /// Bytes and messages sent so far.
    pub fn sent(&self) -> (u64, u64) {
        (self.bytes.load(Relaxed), self.messages.load(Relaxed))
    }
}

fn lock<T>(mutex: &Mutex<T>) -> std::sync::MutexGuard<'_, T> {
    mutex.lock().unwrap_or_else(PoisonError::into_inner)
}

#[cfg(test)]
mod tests {
    // SAFETY of `post` and `release`: a scripted engine copies nothing.
    #![allow(clippy::undocumented_unsafe_blocks)]

    use ep::{Error, PeerFault};

    use super::*;

    fn config(slots: usize) -> HostConfig {
        let mut config = HostConfig::default();
        config.slots = slots;
        config
    }

    fn rail(domains: u32) -> Rail {
        Rail::new((0..domains).map(Rank).collect(), 0).unwrap()
    }

    /// An engine that delivers the signals of a script and records its calls.
    #[derive(Default)]
    struct Scripted(Arc<Mutex<Script>>);

    #[derive(Default)]
    struct Script {
        /// Signals to deliver.
        signals: Vec<(Rank, u32)>,
        /// Whether the engine takes no puts.
        full: bool,
        /// Lent instead of the windows of all peers.
        lent: Option<Segment>,
        puts: Vec<Put>,
        drained: Vec<Rank>,
    }

    impl Transport for Scripted {
        fn name(&self) -> &str {
            "scripted"
        }

        fn put(&self, put: Put) -> Result<Posted> {
            let mut script = lock(&self.0);
            if script.full {
                return Ok(Posted::Full);
            }
            script.puts.push(put);
            Ok(Posted::Yes)
        }

        fn lend(&self, _: Rank, offset: usize, len: usize) -> Option<NonNull<u8>> {
            lock(&self.0).lent.as_ref().and_then(|window| NonNull::new(window.at(offset, len)))
        }

        fn poll(&self, on_signal: &mut dyn FnMut(Rank, Signal)) -> Result<()> {
            let mut pass = |(peer, signal)| on_signal(peer, Signal::new(signal).expect("17 bits"));
            lock(&self.0).signals.drain(..).for_each(&mut pass);
            Ok(())
        }

        fn drain(&self, peer: Rank, _: Instant) -> Result<()> {
            lock(&self.0).drained.push(peer);
            Ok(())
        }
    }

    /// The streams of rank 0 on a rail of three domains, with two slots per ring.
    fn streams() -> (Streams, Arc<Mutex<Script>>) {
        let config = config(2);
        let window = Segment::private(WindowLayout::new(3, &config).unwrap().bytes()).unwrap();
        let engine = Scripted::default();
        let script = Arc::clone(&engine.0);
        (Streams::new(&rail(3), Arc::new(window), &config, Box::new(engine)).unwrap(), script)
    }

    /// Delivers one signal.
    fn deliver(streams: &Streams, script: &Mutex<Script>, peer: Rank, signal: u32) {
        lock(script).signals.push((peer, signal));
        streams.poll().unwrap();
    }

    #[test]
    fn the_slots_of_a_window_are_adjacent_and_fill_it() {
        let mut config = config(1024);
        config.slot_bytes = 100;
        let layout = WindowLayout::new(3, &config).unwrap();
        let slots = |of: fn(&WindowLayout, usize, usize) -> usize| {
            (0..3 * 1024).map(move |index| of(&layout, index / 1024, index % 1024))
        };
        // The engine's rings have room for a message and a credit of every slot.
        let mut end = Loopback::reserved(3, 2 * 1024).checked().unwrap();
        for slot in slots(WindowLayout::receive_slot).chain(slots(WindowLayout::send_slot)) {
            assert_eq!(slot, end);
            end += 128;
        }
        assert_eq!(layout.bytes(), end);
    }

    #[test]
    fn messages_use_the_slots_in_turn_and_wait_for_credits() {
        let (streams, script) = streams();
        assert!(streams.others().eq([1, 2]));
        assert_eq!((streams.peer(2), streams.transport_name()), (Rank(2), "scripted"));
        for number in 0..5 {
            let slot = number % 2;
            assert_eq!(streams.claim_send(2, number), None, "below the end");
            assert!(streams.can_send(2));
            let claim = ClaimedSlot { domain: 2, slot: slot as usize };
            assert_eq!(streams.claim_send(2, 9), Some((number, claim)));
            assert_eq!(streams.position(2), (number + 1, 0));
            if number >= 1 {
                assert!(!streams.can_send(2));
                assert_eq!(streams.claim_send(2, 9), None, "no credit has arrived");
                // The credit of the message before.
                deliver(&streams, &script, Rank(2), CREDIT | (1 - slot as u32));
            }
        }
        assert_eq!(streams.position(1), (0, 0), "the streams are independent");
    }

    #[test]
    fn messages_are_received_in_order_and_once() {
        let (streams, script) = streams();
        for number in 0..5 {
            let slot = number % 2;
            assert!(!streams.can_receive(1));
            assert_eq!(streams.claim_receive(1, 9), None, "no message has arrived");
            deliver(&streams, &script, Rank(1), DATA | slot as u32);
            assert!(streams.can_receive(1) && !streams.can_receive(2));
            assert_eq!(streams.claim_receive(1, number), None, "below the end");
            let claim = ClaimedSlot { domain: 1, slot: slot as usize };
            assert_eq!(streams.claim_receive(1, 9), Some((number, claim)));
            assert_eq!(streams.position(1), (0, number + 1));
            let incoming = streams.window.at(streams.layout.receive_slot(1, claim.slot), 1);
            assert_eq!(streams.incoming(claim), incoming.cast_const());
            assert_eq!(unsafe { streams.release(claim) }, Ok(Posted::Yes));
            let credit = Put::new(Rank(1), Signal::new(CREDIT | slot as u32).unwrap());
            assert_eq!(lock(&script).puts.pop(), Some(credit));
        }
        assert_eq!(streams.sent(), (0, 0));
    }

    #[test]
    fn a_message_goes_from_its_send_slot_to_the_receive_slot_of_the_sender() {
        let (streams, script) = streams();
        streams.claim_send(2, 1).unwrap();
        let (_, claim) = streams.claim_send(2, 2).unwrap();
        assert_eq!(streams.outgoing(claim), streams.window.at(streams.layout.send_slot(2, 1), 1));
        lock(&script).full = true;
        assert_eq!(unsafe { streams.post(claim, 40) }, Ok(Posted::Full));
        assert_eq!(streams.sent(), (0, 0), "nothing was sent");
        lock(&script).full = false;
        assert_eq!(unsafe { streams.post(claim, 40) }, Ok(Posted::Yes));
        assert_eq!(streams.sent(), (40, 1));
        let (source, destination) = (streams.layout.send_slot(2, 1), streams.layout.receive_slot(0, 1));
        let put = Put::new(Rank(2), Signal::new(DATA | 1).unwrap()).bytes(source..source + 40, destination);
        assert_eq!(lock(&script).puts, [put]);
        let longest = config(2).slot_bytes;
        assert_eq!(streams.slot_bytes(), longest);
        assert_eq!(unsafe { streams.post(claim, longest) }, Ok(Posted::Yes));
        streams.drain(2, Instant::now()).unwrap();
        assert_eq!(lock(&script).drained, [Rank(2)]);
    }

    #[test]
    fn a_message_in_a_lent_slot_needs_only_its_signal() {
        let (mut streams, script) = streams();
        let (_, claim) = streams.claim_send(1, 1).unwrap();
        let lent = Segment::private(streams.layout.bytes()).unwrap();
        let slot = lent.at(streams.layout.receive_slot(0, 0), 1);
        lock(&script).lent = Some(lent);
        assert_eq!(streams.outgoing(claim), slot);
        assert_eq!(unsafe { streams.post(claim, 40) }, Ok(Posted::Yes));
        assert_eq!(lock(&script).puts, [Put::new(Rank(1), Signal::new(DATA).unwrap())]);
        assert_eq!(streams.sent(), (40, 1));
        // The setting that turns lending off.
        streams.lend = false;
        assert_eq!(streams.outgoing(claim), streams.window.at(streams.layout.send_slot(1, 0), 1));
    }

    #[test]
    fn a_data_signal_makes_a_message_receivable() {
        let (streams, script) = streams();
        let (_, claim) = streams.claim_send(1, 1).unwrap();
        lock(&script).signals = vec![(Rank(1), CREDIT | claim.slot as u32), (Rank(2), DATA)];
        streams.poll().unwrap();
        assert!(streams.can_receive(2) && !streams.can_receive(1));
    }

    #[test]
    fn signals_that_match_no_message_are_errors_that_name_the_peer() {
        for (peer, signal) in [
            (Rank(1), CREDIT),        // nothing was sent
            (Rank(1), DATA | 2),      // there is no such slot
            (Rank(1), DATA | 0xFFFF), // there is no such slot
            (Rank(0), DATA),          // this rank itself
            (Rank(9), DATA),          // no rank of the rail
            (Rank(2), DATA),          // the slot is still full
        ] {
            let (streams, script) = streams();
            lock(&script).signals = vec![(Rank(2), DATA), (peer, signal)];
            let Err(Error::Peer(error)) = streams.poll() else { panic!("{peer} {signal:#x}") };
            assert_eq!((error.peer, error.rank, error.fault), (peer, Rank(0), PeerFault::Broken));
        }
    }

    #[test]
    fn windows_longer_than_the_address_space_are_refused() {
        for slot_bytes in [usize::MAX, usize::MAX / 64, 1 << 61] {
            let mut config = config(16);
            config.slot_bytes = slot_bytes;
            let error = WindowLayout::new(2, &config).unwrap_err().to_string();
            assert!(error.contains("window"), "{error}");
        }
    }

    #[test]
    fn a_link_by_a_kernel_is_refused() {
        for domains in [1, 2] {
            let mut config = HostConfig::default();
            config.transport.engine = "paced:25GB/s,5us,kernel".into();
            let bytes = WindowLayout::new(domains, &config).unwrap().bytes();
            let window = |_| Segment::private(bytes).map(Arc::new);
            let opened =
                unsafe { open_streams(rail(domains as u32), &RankPlace::default(), &config, window) };
            let error = opened.map(drop).unwrap_err();
            assert!(matches!(error, Error::Caller(CallerError::Config { .. })), "{error}");
        }
    }
}
