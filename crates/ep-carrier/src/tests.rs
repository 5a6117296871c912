//! Messages between two ranks without slots, and hostile peers.

use std::collections::VecDeque;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering::Relaxed};
use std::time::Duration;

use ep::{Config, HostConfig, PeerError, PeerFault, Posted, Put, Rail, Rank, Result, Signal, Transport};
use ep_migrate::{Carrier as _, CarrierError, Lane, Receiving as _, Sending as _};
use ep_rail::{Segment, Streams, WindowLayout};
use proptest::prelude::*;

use crate::RailCarrier;
use crate::ends::ThreadEnds;
use crate::incoming::Incoming;
use crate::outgoing::{Letter, Next, Outgoing};
use crate::part::{COUNTS, HEAD, LANES, Part, counts_to_bytes};
use crate::transfer::Transfer;

/// What a test does with two ranks.
#[derive(Debug, Clone, Copy)]
enum Step {
    /// The first rank sends a message of this length.
    Send(usize, usize),
    /// The second rank posts a receive.
    Post(usize),
    /// A part moves from the first rank to the second, or numbers of receives back.
    Move,
}

fn steps() -> impl Strategy<Value = Vec<Step>> {
    let step = prop_oneof![
        (0..LANES, 0..300_usize).prop_map(|(lane, len)| Step::Send(lane, len)),
        (0..LANES).prop_map(Step::Post),
        Just(Step::Move),
        Just(Step::Move),
    ];
    prop::collection::vec(step, 0..200)
}

fn content(lane: usize, number: usize, len: usize) -> Vec<u8> {
    (0..len).map(|at| (lane * 50 + number * 7 + at) as u8).collect()
}

/// Moves what the two ranks would send next. Returns whether anything was.
fn pass(first: &mut Outgoing, second: &mut Outgoing, into: &mut Incoming, room: usize) -> bool {
    let told = match second.next(room) {
        Some(Next::Posted(counts)) => first.allow(counts).is_ok(),
        Some(Next::Message { .. }) => panic!("the second rank sends nothing"),
        None => false,
    };
    match first.next(room) {
        Some(Next::Message { lane, message, range, sent }) => {
            let length = message.len() as u64;
            into.take(lane, range.len(), length, |to| to.copy_from_slice(&message[range])).unwrap();
            sent.into_iter().for_each(|sent| sent.complete(Ok(())));
            true
        }
        Some(Next::Posted(_)) => panic!("the first rank receives nothing"),
        None => told,
    }
}

proptest! {
    #[test]
    fn the_kth_receive_of_a_lane_gets_its_kth_message(steps in steps(), room in 1..100_usize) {
        let (mut first, mut second, mut into) = (Outgoing::default(), Outgoing::default(), Incoming::default());
        let closed = Arc::new(AtomicBool::new(false));
        let (mut sends, mut receives) = (vec![VecDeque::new(); LANES], Vec::new());
        let mut waits = Vec::new();
        for step in steps {
            match step {
                Step::Send(lane, len) => {
                    let (sent, transfer) = Transfer::<()>::new(&closed);
                    let message = Arc::new(content(lane, sends[lane].len(), len));
                    sends[lane].push_back(len);
                    first.push(Lane::ALL[lane], Letter { message, sent });
                    waits.push((lane, sends[lane].len(), transfer));
                }
                Step::Post(lane) => {
                    let (received, transfer) = Transfer::<Vec<u8>>::new(&closed);
                    into.post(Lane::ALL[lane], 300, received);
                    second.count_receive(Lane::ALL[lane]);
                    receives.push((lane, transfer));
                }
                Step::Move => _ = pass(&mut first, &mut second, &mut into, room),
            }
        }
        while pass(&mut first, &mut second, &mut into, room) {}
        // What has no partner ends with the carrier.
        drop((first, into));
        let mut taken = [0; LANES];
        for (lane, receive) in receives {
            let number = taken[lane];
            taken[lane] += 1;
            let expected = match sends[lane].get(number) {
                Some(&len) => Ok(content(lane, number, len)),
                None => Err(CarrierError::Closed),
            };
            let len = sends[lane].get(number).copied().unwrap_or(0);
            prop_assert_eq!(Box::new(receive).wait(len), expected, "lane {}, message {}", lane, number);
        }
        for (lane, number, send) in waits {
            let expected = if number <= taken[lane] { Ok(()) } else { Err(CarrierError::Closed) };
            prop_assert_eq!(Box::new(send).wait(), expected);
        }
    }
}

#[test]
fn headers_go_before_bodies_and_bodies_take_turns() {
    let mut outgoing = Outgoing::default();
    let closed = Arc::new(AtomicBool::new(false));
    for lane in [Lane::Weights, Lane::Gradients] {
        let message = Arc::new(vec![0; 25]);
        outgoing.push(lane, Letter { message, sent: Transfer::new(&closed).0 });
    }
    assert!(!outgoing.has_next(), "the peer has posted no receive");
    outgoing.allow([1; LANES]).unwrap();
    let mut next = |with_header: bool| {
        if with_header {
            let message = Arc::new(vec![0; 5]);
            outgoing.push(Lane::Headers, Letter { message, sent: Transfer::new(&closed).0 });
        }
        match outgoing.next(10) {
            Some(Next::Message { lane, range, sent, .. }) => Some((lane, range, sent.is_some())),
            _ => None,
        }
    };
    assert_eq!(next(false), Some((Lane::Weights, 0..10, false)));
    assert_eq!(next(false), Some((Lane::Gradients, 0..10, false)));
    assert_eq!(next(true), Some((Lane::Headers, 0..5, true)));
    assert_eq!(next(false), Some((Lane::Weights, 10..20, false)));
    assert_eq!(next(false), Some((Lane::Gradients, 10..20, false)));
    assert_eq!(next(false), Some((Lane::Weights, 20..25, true)));
    assert_eq!(
        next(true),
        Some((Lane::Gradients, 20..25, true)),
        "the peer has posted one receive of headers"
    );
    assert_eq!(next(false), None);
}

#[test]
fn parts_that_no_correct_peer_sends_are_refused() {
    let posted = |capacity| {
        let mut incoming = Incoming::default();
        incoming.post(Lane::Weights, capacity, Transfer::new(&Arc::new(AtomicBool::new(false))).0);
        incoming
    };
    let take = |incoming: &mut Incoming, bytes, length| incoming.take(Lane::Weights, bytes, length, |_| {});
    for (parts, expected) in [
        (&[(3, 101)][..], "a message of 101 bytes for a receive of 100"),
        (&[(3, u64::MAX)], "for a receive of 100"),
        (&[(3, 9), (3, 10)], "a part of a message of 10 bytes inside one of 9"),
        (&[(3, 9), (7, 9)], "a part of 7 bytes after 3 of a message of 9"),
        (&[(3, 9), (0, 9)], "a part of 0 bytes after 3 of a message of 9"),
        (&[(9, 9), (1, 1)], "a message of 1 bytes without a receive"),
    ] {
        let mut incoming = posted(100);
        let (last, before) = parts.split_last().unwrap();
        before.iter().for_each(|&(bytes, length)| take(&mut incoming, bytes, length).unwrap());
        let found = take(&mut incoming, last.0, last.1).unwrap_err();
        assert!(found.contains(expected), "{found}");
    }
    let mut outgoing = Outgoing::default();
    outgoing.allow([3; LANES]).unwrap();
    assert_eq!(outgoing.allow([2; LANES]), Err("2 posted receives after 3".into()));
}

/// An engine whose peers are the test.
#[derive(Default)]
struct Played {
    /// Messages that rank 1 has sent: signals of its slots.
    filled: AtomicU64,
    passed: AtomicU64,
    /// Whether the engine has no room for puts to rank 1.
    is_full: AtomicBool,
    /// Whether it reports that rank 1 is gone.
    is_gone: AtomicBool,
    panics: AtomicBool,
    /// Puts by peer.
    puts: [AtomicU64; 3],
}

/// The carrier's end of a [`Played`].
struct PlayedEnd(Arc<Played>);

impl Transport for PlayedEnd {
    fn name(&self) -> &str {
        "played"
    }

    fn put(&self, put: Put) -> Result<Posted> {
        if put.peer == Rank(1) && self.0.is_full.load(Relaxed) {
            return Ok(Posted::Full);
        }
        self.0.puts[put.peer.index()].fetch_add(1, Relaxed);
        Ok(Posted::Yes)
    }

    fn poll(&self, on_signal: &mut dyn FnMut(Rank, Signal)) -> Result<()> {
        assert!(!self.0.panics.load(Relaxed), "a bug of the engine");
        while self.0.passed.load(Relaxed) < self.0.filled.load(Relaxed) {
            let slot = self.0.passed.fetch_add(1, Relaxed);
            on_signal(Rank(1), Signal::new(slot as u32).unwrap());
        }
        if self.0.is_gone.swap(false, Relaxed) {
            let (fault, what) = (PeerFault::Died, "a put: connection refused");
            return Err(PeerError::joining(Rank(0), Rank(1), fault, what, Duration::ZERO).into());
        }
        Ok(())
    }

    fn drain(&self, _: Rank, _: std::time::Instant) -> Result<()> {
        Ok(())
    }
}

/// A carrier of the ranks 3, 8 and 9. The test plays the others; `slots` are messages of rank 8.
fn played(slots: &[Vec<u8>]) -> (RailCarrier, Arc<Played>) {
    let mut config = HostConfig::default();
    (config.slots, config.slot_bytes) = (16, 4096);
    config.transport.engine = "tcp".into();
    let rail = Rail::new((0..3).map(Rank).collect(), 0).unwrap();
    let window = Arc::new(Segment::private(WindowLayout::new(3, &config).unwrap().bytes()).unwrap());
    for (number, bytes) in slots.iter().enumerate() {
        // The receive slots from rank 1 follow those from rank 0.
        let slot = window.at((16 + number) * 4096, 4096);
        // SAFETY: no thread uses the window yet.
        unsafe { slot.copy_from_nonoverlapping(bytes.as_ptr(), bytes.len()) };
    }
    let engine = Arc::new(Played::default());
    let streams = Streams::new(&rail, window, &config, Box::new(PlayedEnd(Arc::clone(&engine)))).unwrap();
    let ends = Arc::new(ThreadEnds::of(3).remove(0));
    let names = [Rank(3), Rank(8), Rank(9)];
    (RailCarrier::start(&names, 0, streams, "played".into(), ends).unwrap(), engine)
}

#[test]
fn a_peer_that_breaks_the_protocol_ends_every_transfer_with_it() {
    let part = |head: [u8; HEAD]| [&head[..], &[7; 50]].concat();
    let message = |bytes, length| part(Part::Message { lane: Lane::Headers, bytes, length }.to_head());
    let counts = [&Part::Posted.to_head()[..], &counts_to_bytes([5; LANES])].concat();
    let fewer = [&Part::Posted.to_head()[..], &counts_to_bytes([4; LANES])].concat();
    let mut long = message(50, 50);
    long[4..8].copy_from_slice(&4081u32.to_le_bytes());
    let hostile = [
        (vec![message(50, 51)], "a message of 51 bytes for a receive of 50"),
        (vec![message(50, 50), message(50, 50)], "without a receive"),
        (vec![vec![0xAB; 64]], "a part of 2880154539 bytes"),
        (vec![long], "a part of 4081 bytes in a slot with room for 4080"),
        (vec![counts, fewer], "4 posted receives after 5"),
    ];
    for (slots, expected) in hostile {
        let (carrier, engine) = played(&slots);
        let receive = carrier.receive(Rank(8), Lane::Headers, 50).unwrap();
        let send = carrier.send(Rank(8), Lane::Weights, Arc::new(vec![0; 9])).unwrap();
        let other = carrier.receive(Rank(8), Lane::Gradients, 50).unwrap();
        // The orders come before the parts.
        while !carrier.has_taken_orders() {
            std::thread::yield_now();
        }
        engine.filled.store(slots.len() as u64, Relaxed);
        let Err(CarrierError::Broken(found)) = other.wait(50) else { panic!("{expected}") };
        assert!(found.contains(expected), "{found}");
        assert!(matches!(send.wait(), Err(CarrierError::Broken(_))));
        drop(receive);
        let later = carrier.receive(Rank(8), Lane::Headers, 1).unwrap_err();
        assert_eq!(later, CarrierError::Broken(found));
    }
}

#[test]
fn a_signal_that_matches_no_message_ends_the_connection() {
    let (carrier, engine) = played(&[]);
    let receive = carrier.receive(Rank(8), Lane::Headers, 50).unwrap();
    // There are 16 slots.
    engine.passed.store(16, Relaxed);
    engine.filled.store(17, Relaxed);
    assert!(matches!(receive.wait(1), Err(CarrierError::Broken(_))));
}

#[test]
fn ranks_that_are_not_of_the_carrier_are_refused() {
    let carriers = RailCarrier::threads(&[Rank(3), Rank(8)], &Config::default()).unwrap();
    for wrong in [Rank(0), Rank(3), Rank(9)] {
        let error = carriers[0].receive(wrong, Lane::Headers, 1).unwrap_err();
        assert!(error.to_string().contains(&format!("rank {wrong} is not another rank")), "{error}");
    }
    assert!(RailCarrier::threads(&[Rank(3), Rank(3)], &Config::default()).is_err());
    assert_eq!(COUNTS, 40);
}

#[test]
fn a_peer_for_which_the_engine_has_no_room_does_not_delay_the_others() {
    let (carrier, engine) = played(&[]);
    engine.is_full.store(true, Relaxed);
    // Each rank is told of the posted receive.
    let _to_8 = carrier.receive(Rank(8), Lane::Headers, 1).unwrap();
    while !carrier.has_taken_orders() {
        std::thread::yield_now();
    }
    let _to_9 = carrier.receive(Rank(9), Lane::Headers, 1).unwrap();
    while engine.puts[2].load(Relaxed) == 0 {
        std::thread::yield_now();
    }
    assert_eq!(engine.puts[1].load(Relaxed), 0);
}

#[test]
fn a_peer_that_only_the_engine_does_not_reach_has_not_died() {
    let (carrier, engine) = played(&[]);
    let receive = carrier.receive(Rank(8), Lane::Headers, 1).unwrap();
    engine.is_gone.store(true, Relaxed);
    let Err(CarrierError::Failed(text)) = receive.wait(1) else {
        panic!("the links know nothing of a death")
    };
    assert!(text.contains("connection refused") && text.contains("firewall"), "{text}");
    carrier.receive(Rank(9), Lane::Headers, 1).expect("another peer is reached");
}

#[test]
fn a_panic_of_the_thread_is_no_fault_of_a_peer() {
    let (carrier, engine) = played(&[]);
    let receive = carrier.receive(Rank(8), Lane::Headers, 1).unwrap();
    engine.panics.store(true, Relaxed);
    let Err(CarrierError::Failed(text)) = receive.wait(1) else { panic!("the connection is not closed") };
    assert!(text.contains("panicked"), "{text}");
    assert!(matches!(carrier.receive(Rank(9), Lane::Headers, 1), Err(CarrierError::Failed(_))));
}

#[test]
fn a_message_that_was_received_counts_as_sent_even_if_the_receiver_closes_at_once() {
    // Miri starts threads slowly.
    for _ in 0..if cfg!(miri) { 2 } else { 50 } {
        let [one, two] =
            RailCarrier::threads(&[Rank(1), Rank(2)], &Config::default()).unwrap().try_into().unwrap();
        let receive = two.receive(Rank(1), Lane::Headers, 5).unwrap();
        let send = one.send(Rank(2), Lane::Headers, Arc::new(vec![7; 5])).unwrap();
        assert_eq!(receive.wait(5), Ok(vec![7; 5]));
        two.abort();
        assert_eq!(send.wait(), Ok(()));
    }
}
