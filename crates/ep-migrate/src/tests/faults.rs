//! Misuse, lost ranks and hostile peers: every call ends, with an error that names the mistake or the rank at fault.

use std::sync::{Arc, Mutex};
use std::time::{Duration, Instant};

use ep::{Error, PeerFault};
use ep_codec::WeightEncoder;
use proptest::prelude::*;

use super::*;
use crate::header::{Header, Kind};
use crate::replicas::Replicas;
use crate::threads::STARTS;

fn exact() -> Settings {
    settings(WeightCodec::Exact, GradientCodec::Exact)
}

/// A migration of rank 1 whose only peer, rank 4, is played by the test.
fn alone(settings: &Settings) -> (Migration<f32>, LocalCarrier) {
    let (ranks, network) = (ranks(2), LocalNetwork::new());
    (start(&network, ranks[0], &ranks, settings), network.carrier(ranks[1]))
}

fn peer_error(error: Error) -> (u32, PeerFault, String) {
    match error {
        Error::Peer(peer) => (peer.peer.0, peer.fault, peer.to_string()),
        other => panic!("not a peer's fault: {other}"),
    }
}

fn weights_of(layer: usize) -> Vec<f32> {
    vec![0.5; 2 * shape().expert_elements[layer]]
}

/// A correct message of rank 4 with the weights of a layer.
fn message(layer: u32, step: u64) -> (Header, Vec<u8>) {
    let elements = shape().expert_elements[layer as usize];
    let mut body = Vec::new();
    for _ in 0..2 {
        let mut encoder = WeightEncoder::new(WeightCodec::Exact, elements).unwrap();
        encoder.encode(&vec![0.25; elements], None, &mut body).unwrap();
    }
    (header(Kind::Weights, layer, step, &body), body)
}

fn header(kind: Kind, layer: u32, step: u64, body: &[u8]) -> Header {
    let regular = if body.is_empty() { 0 } else { exact_regular() };
    Header { streams: 1, layer, step, bytes: body.len() as u64, regular, ..Header::bare(kind, Rank(4), 0xE9) }
}

/// Maximum number of bytes of a regular body of exact weights.
fn exact_regular() -> u64 {
    2 * WeightCodec::Exact.max_bytes(f32::ELEMENT, 300) as u64
}

fn send(carrier: &LocalCarrier, header: Vec<u8>, body: Vec<u8>) {
    carrier.send(Rank(1), Lane::Headers, Arc::new(header)).unwrap();
    carrier.send(Rank(1), Lane::Weights, Arc::new(body)).unwrap();
}

#[test]
fn a_message_as_the_tests_write_it_is_accepted() {
    let (migration, peer) = alone(&exact());
    migration.publish(1, &weights_of(1)).unwrap();
    let (header, body) = message(1, 0);
    send(&peer, header.to_bytes(), body);
    let mut replicas = weights_of(1);
    assert_eq!(migration.gather(1, &mut replicas).unwrap(), [0]);
    assert_eq!(replicas, vec![0.25; 258]);
    peer.abort();
}

#[test]
fn what_no_correct_peer_sends_is_refused_and_the_peer_is_named() {
    type Damage = (&'static str, fn(&mut Header, &mut Vec<u8>));
    let damages: [Damage; 15] = [
        ("the ranks have different models or settings", |header, _| header.regular += 1),
        ("a message with rank 7 as its sender", |header, _| header.sender = Rank(7)),
        ("a message of run 0x1", |header, _| header.run = 1),
        ("weights of layer 3; there are 3 layers", |header, _| header.layer = 3),
        ("step 1, where step 0 was due", |header, _| header.step = 1),
        ("step 18446744073709551615, after which no step is possible", |header, _| {
            header.kind = Kind::Gradients;
            header.step = u64::MAX;
        }),
        ("weights of 0 bytes", |header, _| header.bytes = 0),
        ("at most", |header, _| header.bytes = u64::MAX),
        ("step 0: ", |_, body| body[100] ^= 1),
        ("step 0: ", |header, body| {
            body.truncate(body.len() - 9);
            header.bytes = body.len() as u64;
        }),
        ("step 0: ", |header, _| header.streams = 2),
        ("3 streams of each expert", |header, _| header.streams = 3),
        ("0 streams of each expert", |header, _| header.streams = 0),
        ("40 bytes too many", |header, body| {
            body.extend([0; 40]);
            header.bytes += 40;
        }),
        ("step 0: ", |header, body| {
            // The streams of another layer, which has longer experts.
            *body = message(0, 0).1;
            header.bytes = body.len() as u64;
        }),
    ];
    for (expected, damage) in damages {
        let (migration, peer) = alone(&exact());
        migration.publish(1, &weights_of(1)).unwrap();
        let (mut header, mut body) = message(1, 0);
        damage(&mut header, &mut body);
        send(&peer, header.to_bytes(), body);
        let error = migration.gather(1, &mut weights_of(1)).unwrap_err();
        let (rank, fault, text) = peer_error(error.clone());
        assert_eq!((rank, fault), (4, PeerFault::Broken), "{text}");
        assert!(text.contains(expected), "{expected}: {text}");
        // Every later call returns the same error.
        assert_eq!(migration.publish(1, &weights_of(1)).unwrap_err(), error);
        peer.abort();
    }
}

proptest! {
    #![proptest_config(ProptestConfig::with_cases(300))]
    /// Any change of a correct message is refused, or has the effect of a correct one.
    #[test]
    fn a_message_with_any_damage_gives_an_error_or_weights(
        fields in prop::collection::vec((0..8_usize, any::<u64>()), 0..3),
        bytes in prop::collection::vec((any::<prop::sample::Index>(), any::<u8>()), 0..4),
        cut in prop::option::of(any::<prop::sample::Index>()),
        exact_length: bool,
    ) {
        let codec = WeightCodec::Delta { density: 0.1, warm_up: 1 };
        let (migration, peer) = alone(&settings(codec, GradientCodec::Exact));
        migration.publish(1, &weights_of(1)).unwrap();
        let (mut header, mut body) = message(1, 0);
        for (at, byte) in bytes {
            *at.get_mut(&mut body) ^= byte;
        }
        if let Some(cut) = cut {
            body.truncate(cut.index(body.len()));
        }
        header.bytes = body.len() as u64;
        let kinds = [Kind::Weights, Kind::Resent, Kind::Gradients, Kind::Request, Kind::Left];
        for (field, value) in fields {
            let small = (value % 4) as u32;
            match field {
                0 => header.kind = kinds[value as usize % kinds.len()],
                1 => header.kind = Kind::Failure(Rank(small), PeerFault::from_code((value >> 8) as u32 % 9)),
                2 => header.streams = value as u16,
                3 => header.sender = Rank(small),
                4 => header.layer = small,
                5 => header.step = value % 3,
                6 => header.run = value,
                _ if exact_length => {}
                // The body does not have the announced length. The carrier refuses it.
                _ => header.bytes = value % 4096,
            }
        }
        send(&peer, header.to_bytes(), body);
        // Nothing follows, so a wait ends at once.
        peer.abort();
        let mut replicas = weights_of(1);
        if let Err(error) = migration.gather(1, &mut replicas) {
            let is_named = matches!(error, Error::Peer(_) | Error::Environment(_));
            prop_assert!(is_named, "{}", error);
            prop_assert!(replicas.iter().all(|weight| weight.is_finite()));
        }
    }
}

#[test]
fn noise_instead_of_a_header_is_refused() {
    for noise in [vec![0; 64], vec![0xFF; 64], b"GET / HTTP/1.1\r\n".repeat(4)] {
        let (migration, peer) = alone(&exact());
        migration.publish(0, &weights_of(0)).unwrap();
        send(&peer, noise, vec![]);
        let (rank, fault, _) = peer_error(migration.gather(0, &mut weights_of(0)).unwrap_err());
        assert_eq!((rank, fault), (4, PeerFault::Broken));
        peer.abort();
    }
}

#[test]
fn a_peer_that_sends_nothing_is_late() {
    let (migration, peer) = alone(&Settings { timeout: Duration::from_millis(100), ..exact() });
    migration.publish(2, &weights_of(2)).unwrap();
    let (rank, fault, text) = peer_error(migration.gather(2, &mut weights_of(2)).unwrap_err());
    assert_eq!((rank, fault), (4, PeerFault::Late));
    assert!(text.contains("(gather #0)") && text.contains("weights of layer 2 from rank 4"), "{text}");
    peer.abort();
}

#[test]
fn a_body_that_does_not_follow_its_header_makes_the_peer_late() {
    let (migration, peer) = alone(&Settings { timeout: Duration::from_millis(100), ..exact() });
    migration.publish(2, &weights_of(2)).unwrap();
    peer.send(Rank(1), Lane::Headers, Arc::new(message(2, 0).0.to_bytes())).unwrap();
    let (rank, fault, _) = peer_error(migration.gather(2, &mut weights_of(2)).unwrap_err());
    assert_eq!((rank, fault), (4, PeerFault::Late));
    peer.abort();
}

/// Number of states in which a rank may be lost: after 0 to 4 completed calls.
const CALLS: usize = 5;

/// Makes the first `calls` calls of a step of one layer.
fn make_calls(migration: &Migration<f32>, calls: usize) -> Result<(), Error> {
    let peers = migration.domain().peers().len();
    let (own, all) = (vec![0.5; 600], vec![0.5; 600 * peers]);
    for call in 0..calls {
        match call {
            0 => migration.publish(0, &own)?,
            1 => drop(migration.gather(0, &mut all.clone())?),
            2 => migration.send_gradients(0, &all)?,
            3 => migration.reduce_gradients(0, &own, &mut own.clone())?,
            _ => migration.publish(0, &own)?,
        }
    }
    Ok(())
}

#[test]
fn a_rank_that_dies_in_any_state_is_named_by_all_others() {
    for calls in 0..CALLS {
        let (ranks, network) = (ranks(3), LocalNetwork::new());
        let errors = on_threads(&ranks, |rank| {
            let migration = start::<f32>(&network, rank, &ranks, &exact());
            if rank == ranks[1] {
                make_calls(&migration, calls).unwrap();
                // Does what the end of a process does. Nothing that the migration sends afterwards arrives.
                network.carrier(rank).abort();
                return None;
            }
            // The others go on until they need the lost rank.
            let error = (0..2).find_map(|_| make_calls(&migration, CALLS - 1).err());
            Some(peer_error(error.unwrap()))
        });
        for (rank, fault, text) in errors.into_iter().flatten() {
            assert_eq!((rank, fault), (ranks[1].0, PeerFault::Died), "after {calls} calls: {text}");
        }
    }
}

#[test]
fn a_rank_that_leaves_in_any_state_is_named_by_all_others() {
    for calls in 0..CALLS - 1 {
        let (ranks, network) = (ranks(3), LocalNetwork::new());
        let errors = on_threads(&ranks, |rank| {
            let migration = start::<f32>(&network, rank, &ranks, &exact());
            if rank == ranks[1] {
                make_calls(&migration, calls).unwrap();
                return None;
            }
            let error = (0..2).find_map(|_| make_calls(&migration, CALLS - 1).err());
            Some(peer_error(error.unwrap()))
        });
        for (rank, fault, text) in errors.into_iter().flatten() {
            assert_eq!((rank, fault), (ranks[1].0, PeerFault::Left), "after {calls} calls: {text}");
        }
    }
}

#[test]
fn a_rank_that_fails_tells_the_others_who_is_at_fault() {
    // Rank 4 publishes nothing. Rank 7 has a short timeout and names rank 4. Rank 1 has a long one and is told by rank
    // 7.
    let (ranks, network) = (ranks(3), LocalNetwork::new());
    let errors = on_threads(&ranks, |rank| {
        let timeout = Duration::from_millis(if rank == ranks[2] { 100 } else { 60_000 });
        let migration = start::<f32>(&network, rank, &ranks, &Settings { timeout, ..exact() });
        if rank == ranks[1] {
            // Takes part, and publishes nothing.
            return peer_error(until_given_up(&migration));
        }
        migration.publish(0, &weights_of(0)).unwrap();
        peer_error(migration.gather(0, &mut [0.0; 1200]).unwrap_err())
    });
    assert_eq!((errors[2].0, errors[2].1), (4, PeerFault::Late));
    assert_eq!((errors[0].0, errors[0].1), (4, PeerFault::Late), "{}", errors[0].2);
    assert!(errors[0].2.contains("and was told by rank"), "{}", errors[0].2);
    // The rank at fault learns that the others gave up on it, from the first message that arrives.
    assert!([1, 7].contains(&errors[1].0) && errors[1].1 == PeerFault::Failed, "{}", errors[1].2);
    assert!(errors[1].2.contains("rank 4 is late"), "{}", errors[1].2);
    // Only the rank whose bound has passed quotes it.
    assert!(
        errors[2].2.contains("timeout = 0.1 s") && errors[2].2.contains("raise the timeout"),
        "{}",
        errors[2].2
    );
    assert!(
        !errors[0].2.contains("timeout = ") && errors[0].2.contains("raise the timeout"),
        "{}",
        errors[0].2
    );
}

/// Waits until another rank gives up on this one.
fn until_given_up(migration: &Migration<f32>) -> Error {
    loop {
        if let Err(error) = migration.check() {
            return error;
        }
        std::thread::sleep(Duration::from_millis(5));
    }
}

#[test]
fn replicas_without_a_base_get_complete_weights() {
    let (ranks, network) = (ranks(2), LocalNetwork::new());
    let codec = WeightCodec::Delta { density: 0.1, warm_up: 1 };
    let settings = settings(codec, GradientCodec::Exact);
    on_threads(&ranks, |rank| {
        let migration = start::<f32>(&network, rank, &ranks, &settings);
        let own = |step: u64| numbers::<f32>([u64::from(rank.0), step, 0, 0], 600);
        let mut replicas = vec![0.0; 600];
        let mut untouched = vec![0.0; 600];
        for step in 0..4 {
            migration.publish(0, &own(step)).unwrap();
            if rank == ranks[0] && step == 2 {
                // This rank loses its replicas and the state of their decoders.
                migration.forget_replicas(0);
                replicas.fill(f32::NAN);
            }
            migration.gather(0, &mut replicas).unwrap();
            // Compared below with the mirrors of the owner.
            untouched.copy_from_slice(&replicas);
        }
        let mirror = migration.mirrors(0);
        migration.close();
        (untouched, mirror)
    })
    .windows(2)
    .for_each(|pair| {
        assert_eq!(pair[0].0, pair[1].1);
        assert_eq!(pair[1].0, pair[0].1);
    });
}

#[test]
fn a_request_that_no_codec_can_serve_is_refused() {
    let (migration, peer) = alone(&exact());
    migration.publish(0, &weights_of(0)).unwrap();
    peer.send(Rank(1), Lane::Headers, Arc::new(header(Kind::Request, 0, 0, &[]).to_bytes())).unwrap();
    let (rank, fault, text) = peer_error(migration.gather(0, &mut weights_of(0)).unwrap_err());
    assert_eq!((rank, fault), (4, PeerFault::Broken));
    assert!(text.contains("a request for complete weights of layer 0"), "{text}");
    peer.abort();
}

#[test]
fn misuse_is_the_callers_error_and_changes_nothing() {
    let (ranks, network) = (ranks(1), LocalNetwork::new());
    let settings = settings(WeightCodec::Int8, GradientCodec::Int8);
    let migration = start::<f32>(&network, ranks[0], &ranks, &settings);
    let text = |error: Error| {
        assert!(matches!(error, Error::Caller(_)), "{error}");
        error.to_string()
    };
    let wrong = text(migration.publish(3, &[0.0; 600]).unwrap_err());
    assert_eq!(wrong, "layer: expected 2 at most, found 3");
    let wrong = text(migration.publish(0, &[0.0; 599]).unwrap_err());
    assert_eq!(wrong, "weights of this rank's experts: expected 600 elements, found 599");
    let wrong = text(migration.gather(0, &mut []).unwrap_err());
    assert_eq!(wrong, "gather of layer 0, step 0: publish the layer first");
    let mut bad = vec![0.5; 600];
    bad[417] = f32::NAN;
    let wrong = text(migration.publish(0, &bad).unwrap_err());
    assert!(wrong.starts_with("weights of layer 0, expert 1 of this rank: "), "{wrong}");
    assert!(wrong.contains("117"), "{wrong}");

    migration.publish(0, &[0.5; 600]).unwrap();
    let mut sum = vec![0.0; 600];
    let wrong = text(migration.reduce_gradients(0, &[0.5; 600], &mut sum).unwrap_err());
    assert_eq!(wrong, "reduce of layer 0, step 0: call send_gradients first");
    migration.send_gradients(0, &[]).unwrap();
    assert!(text(migration.send_gradients(0, &[]).unwrap_err()).contains("publish first"));
    migration.reduce_gradients(0, &[0.5; 600], &mut sum).unwrap();
    assert_eq!(sum, [0.5; 600]);
    assert!(
        text(migration.reduce_gradients(0, &[0.5; 600], &mut sum).unwrap_err()).contains("publish first")
    );
    let wrong = text(migration.save().unwrap_err());
    assert!(wrong.contains("save when all layers are in the same step"), "{wrong}");
}

#[test]
fn a_failed_encoding_does_not_desert_the_replicas() {
    let (ranks, network) = (ranks(2), LocalNetwork::new());
    let settings = settings(WeightCodec::Delta { density: 0.1, warm_up: 1 }, GradientCodec::Exact);
    let results = on_threads(&ranks, |rank| {
        let migration = start::<f32>(&network, rank, &ranks, &settings);
        let own = |step: u64| numbers::<f32>([u64::from(rank.0), step, 0, 0], 600);
        let mut replicas = vec![0.0; 600];
        for step in 0..3 {
            if step == 1 {
                let mut bad = own(9);
                bad[599] = f32::INFINITY;
                assert!(matches!(migration.publish(0, &bad), Err(Error::Caller(_))));
            }
            migration.publish(0, &own(step)).unwrap();
            migration.gather(0, &mut replicas).unwrap();
        }
        let mirrors = migration.mirrors(0);
        migration.close();
        (replicas, mirrors)
    });
    assert_eq!(results[0].0, results[1].1);
    assert_eq!(results[1].0, results[0].1);
}

/// A carrier that never ends the wait for a body, not even after `abort`.
#[derive(Debug)]
struct Stuck(LocalCarrier);

#[derive(Debug)]
struct Endless;

impl Carrier for Stuck {
    fn send(&self, to: Rank, lane: Lane, message: Arc<Vec<u8>>) -> Result<Box<dyn Sending>, CarrierError> {
        self.0.send(to, lane, message)
    }

    fn receive(&self, from: Rank, lane: Lane, bytes: usize) -> Result<Box<dyn Receiving>, CarrierError> {
        if lane == Lane::Headers { self.0.receive(from, lane, bytes) } else { Ok(Box::new(Endless)) }
    }

    fn abort(&self) {
        self.0.abort();
    }
}

impl Receiving for Endless {
    fn wait(self: Box<Self>, _: usize) -> Result<Vec<u8>, CarrierError> {
        loop {
            std::thread::park();
        }
    }
}

#[test]
fn closing_ends_although_a_wait_of_the_carrier_does_not() {
    let (ranks, network) = (ranks(2), LocalNetwork::new());
    let settings = Settings { timeout: Duration::from_millis(100), ..exact() };
    let domain = Domain::new(ranks[0], &ranks).unwrap();
    let carrier = Box::new(Stuck(network.carrier(ranks[0])));
    let migration = Migration::<f32>::new(domain, shape(), settings, carrier).unwrap();
    migration.publish(1, &weights_of(1)).unwrap();
    let (header, body) = message(1, 0);
    send(&network.carrier(ranks[1]), header.to_bytes(), body);
    let (rank, fault, _) = peer_error(migration.gather(1, &mut weights_of(1)).unwrap_err());
    assert_eq!((rank, fault), (4, PeerFault::Late));
    migration.close();
}

/// Waits until a rank tells this peer that it cannot go on, and returns the rank at fault with its fault.
fn told_to(peer: &LocalCarrier) -> (Rank, PeerFault) {
    loop {
        let bytes = peer.receive(Rank(1), Lane::Headers, 64).unwrap().wait(64).unwrap();
        if let Kind::Failure(culprit, fault) = Header::parse(&bytes).unwrap().kind {
            return (culprit, fault);
        }
    }
}

#[test]
fn a_panic_of_a_thread_is_an_error_at_once() {
    for thread in ["ep-headers", "ep-weights", "ep-gradients", "ep-sent"] {
        let (ranks, network) = (ranks(2), LocalNetwork::new());
        let carrier = Panicking::new(network.carrier(ranks[0]), thread);
        let domain = Domain::new(ranks[0], &ranks).unwrap();
        let migration = Migration::<f32>::new(domain, shape(), exact(), Box::new(carrier)).unwrap();
        let peer = network.carrier(ranks[1]);
        let (header, body) = message(0, 0);
        send(&peer, header.to_bytes(), body.clone());
        if thread == "ep-gradients" {
            let header = Header { kind: Kind::Gradients, ..header };
            peer.send(Rank(1), Lane::Headers, Arc::new(header.to_bytes())).unwrap();
            peer.send(Rank(1), Lane::Gradients, Arc::new(body)).unwrap();
        }
        // Without an error the last call would wait until the timeout.
        let error = make_calls(&migration, CALLS - 1).unwrap_err();
        assert!(matches!(error, Error::Environment(_)), "{error}");
        let expected = format!("running the thread {thread}-4: it panicked: a bug of the carrier");
        assert!(error.to_string().starts_with(&expected), "{error}");
        assert_eq!(told_to(&peer), (Rank(1), PeerFault::Failed));
        peer.abort();
    }
}

#[test]
fn a_rank_that_cannot_start_all_threads_keeps_none() {
    // A rank has four threads for each of its two peers.
    for starts in [0, 1, 6] {
        let (ranks, network) = (ranks(3), LocalNetwork::new());
        let carrier = Panicking::new(network.carrier(ranks[0]), "no thread");
        let held = carrier.held();
        let domain = Domain::new(ranks[0], &ranks).unwrap();
        STARTS.set(starts);
        let started = Migration::<f32>::new(domain, shape(), exact(), Box::new(carrier));
        STARTS.set(usize::MAX);
        let error = started.err().unwrap();
        assert!(error.to_string().starts_with("starting a thread: "), "{error}");
        assert_eq!(told_to(&network.carrier(ranks[1])), (Rank(1), PeerFault::Failed));
        assert_eq!(held.strong_count(), 0, "a thread still holds the carrier");
    }
}

#[test]
fn a_damaged_state_is_refused() {
    let (ranks, network) = (ranks(1), LocalNetwork::new());
    let settings = settings(WeightCodec::Delta { density: 0.1, warm_up: 1 }, GradientCodec::Int8);
    let migration = start::<f32>(&network, ranks[0], &ranks, &settings);
    for layer in 0..3 {
        migration.publish(layer, &weights_of(layer)).unwrap();
    }
    let saved = migration.save().unwrap();
    let resume = |saved: &[u8], settings: &Settings| {
        let domain = Domain::new(ranks[0], &ranks).unwrap();
        Migration::<f32>::resume(
            domain,
            shape(),
            settings.clone(),
            Box::new(network.carrier(ranks[0])),
            saved,
        )
        .map(drop)
        .map_err(|error| error.to_string())
    };
    assert_eq!(resume(&saved, &settings), Ok(()));
    for length in [0, 3, 40, saved.len() - 1] {
        assert!(resume(&saved[..length], &settings).is_err());
    }
    for at in (0..saved.len()).step_by(97) {
        let mut damaged = saved.clone();
        damaged[at] ^= 0x10;
        assert!(resume(&damaged, &settings).is_err(), "byte {at}");
    }
    // A correct checksum, and a step that would overflow.
    let mut absurd = saved.clone();
    absurd[8..16].fill(0xFF);
    let end = absurd.len() - 8;
    let check = ep_codec::xxh64(&absurd[..end], 0).to_le_bytes();
    absurd[end..].copy_from_slice(&check);
    let error = resume(&absurd, &settings).unwrap_err();
    assert!(error.contains("it is of step 18446744073709551615"), "{error}");
    let other = Settings { gradients: GradientCodec::Exact, ..settings };
    let error = resume(&saved, &other).unwrap_err();
    assert!(error.contains("gradients int8") && error.contains("gradients exact"), "{error}");
}

impl Migration<f32> {
    /// What peers hold of this rank's experts, according to its encoders.
    fn mirrors(&self, layer: usize) -> Vec<f32> {
        self.own_mirrors(layer)
    }

    fn forget_replicas(&self, layer: usize) {
        self.replace_replicas(layer, Replicas::new(2, shape().expert_elements[layer]));
    }
}

/// A carrier that records the capacities of receives of bodies.
#[derive(Debug)]
struct Recording(LocalCarrier, Arc<Mutex<Vec<(Lane, usize)>>>);

impl Carrier for Recording {
    fn send(&self, to: Rank, lane: Lane, message: Arc<Vec<u8>>) -> Result<Box<dyn Sending>, CarrierError> {
        self.0.send(to, lane, message)
    }

    fn receive(&self, from: Rank, lane: Lane, capacity: usize) -> Result<Box<dyn Receiving>, CarrierError> {
        if lane != Lane::Headers {
            self.1.lock().unwrap().push((lane, capacity));
        }
        self.0.receive(from, lane, capacity)
    }

    fn abort(&self) {
        self.0.abort();
    }
}

#[test]
fn regular_bodies_get_receives_ahead_once_the_peer_has_agreed_and_longer_ones_do_not() {
    let (ranks, network) = (ranks(2), LocalNetwork::new());
    let codec = WeightCodec::Delta { density: 0.1, warm_up: 1 };
    let settings = Settings { depth: 2, ..settings(codec, GradientCodec::Exact) };
    let (domain, receives) = (Domain::new(ranks[0], &ranks).unwrap(), Arc::new(Mutex::new(Vec::new())));
    let carrier = Box::new(Recording(network.carrier(ranks[0]), receives.clone()));
    let migration = Migration::<f32>::new(domain, shape(), settings, carrier).unwrap();
    let peer = network.carrier(ranks[1]);
    let regular = 2 * codec.regular_bytes(f32::ELEMENT, 300);
    let mut encoders: Vec<_> = (0..2).map(|_| WeightEncoder::new(codec, 300).unwrap()).collect();
    let mut publish_and_gather = |step: u64| {
        let mut body = Vec::new();
        for encoder in &mut encoders {
            encoder.encode(&numbers::<f32>([step, 0, 0, 0], 300), None, &mut body).unwrap();
        }
        let bytes = body.len();
        let header = Header { regular: regular as u64, ..header(Kind::Weights, 0, step, &body) };
        peer.send(Rank(1), Lane::Headers, Arc::new(header.to_bytes())).unwrap();
        let lane = if bytes > regular { Lane::LongWeights } else { Lane::Weights };
        peer.send(Rank(1), lane, Arc::new(body)).unwrap();
        migration.publish(0, &weights_of(0)).unwrap();
        migration.gather(0, &mut weights_of(0)).unwrap();
        (lane, bytes)
    };

    assert_eq!(*receives.lock().unwrap(), [], "nothing is known of the peer yet");
    // The body of the warm-up step is longer than the bound.
    let (lane, first) = publish_and_gather(0);
    assert_eq!(lane, Lane::LongWeights);
    let mut expected = vec![(Lane::LongWeights, first), (Lane::Weights, regular), (Lane::Weights, regular)];
    // The receives of the two lanes are posted by different threads, in any order and perhaps a little later.
    let posted = |expected: &[(Lane, usize)]| {
        let sorted = |of: &[(Lane, usize)]| {
            let mut of = of.to_vec();
            of.sort_by_key(|&(lane, bytes)| (lane as u8, bytes));
            of
        };
        let deadline = Instant::now() + Duration::from_secs(30);
        while receives.lock().unwrap().len() < expected.len() && Instant::now() < deadline {
            std::thread::sleep(Duration::from_millis(1));
        }
        assert_eq!(sorted(&receives.lock().unwrap()), sorted(expected));
    };
    posted(&expected);
    // The next body takes one of these receives, and another is posted in its place.
    let (lane, second) = publish_and_gather(1);
    assert!(lane == Lane::Weights && second < regular);
    expected.push((Lane::Weights, regular));
    posted(&expected);
    peer.abort();
}
