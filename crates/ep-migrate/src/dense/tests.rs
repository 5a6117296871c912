//! Whole reductions of several ranks on threads, compared with a plain computation of the sums.

use std::time::Instant;

use ep::Error;
use ep_codec::HEADER_BYTES as STREAM;

use super::*;
use crate::tests::{Panicking, numbers, on_threads};
use crate::threads::STARTS;
use crate::{LocalCarrier, LocalNetwork};

/// Datacenters of these sizes, with ranks numbered one after the other.
fn members(sizes: &[usize]) -> Vec<Vec<Rank>> {
    let mut next = 0..;
    sizes.iter().map(|&size| next.by_ref().take(size).map(Rank).collect()).collect()
}

fn settings(codec: &str) -> DenseSettings {
    let (codec, timeout) = (codec.parse().unwrap(), Duration::from_secs(60));
    // The last bucket is longer.
    DenseSettings { codec, regular_elements: 300, timeout, run: 0xE9, interrupt: Interrupt::default() }
}

fn start(
    network: &LocalNetwork,
    rank: Rank,
    members: &[Vec<Rank>],
    settings: &DenseSettings,
) -> DenseReduction {
    let datacenters = Datacenters::new(rank, members).unwrap();
    DenseReduction::new(datacenters, settings.clone(), Box::new(network.carrier(rank))).unwrap()
}

const BUCKETS: [Bucket; 3] = [
    Bucket { elements: 300, element: Element::F32 },
    Bucket { elements: 1, element: Element::F32 },
    Bucket { elements: 517, element: Element::Bf16 },
];

fn turn(bucket: usize, round: u64) -> Turn {
    Turn { plan: 0, bucket, round, step: 7 }
}

fn gradient<T: Weight>(rank: Rank, bucket: usize, round: u64) -> Vec<T> {
    numbers([u64::from(rank.0), bucket as u64, round, 5], BUCKETS[bucket].elements)
}

/// Begins all buckets, then finishes them. Returns the sums as f32.
fn round(reduction: &DenseReduction, rank: Rank, round: u64) -> Result<Vec<Vec<f32>>> {
    for (at, bucket) in BUCKETS.iter().enumerate() {
        match bucket.element {
            Element::F32 => reduction.begin(turn(at, round), &gradient::<f32>(rank, at, round))?,
            Element::Bf16 => reduction.begin(turn(at, round), &gradient::<u16>(rank, at, round))?,
        }
    }
    let finish = |(at, bucket): (usize, &Bucket)| match bucket.element {
        Element::F32 => {
            let mut sums = vec![9.0; bucket.elements];
            reduction.finish(turn(at, round), &mut sums).map(|()| sums)
        }
        Element::Bf16 => {
            let mut sums = vec![9_u16; bucket.elements];
            reduction.finish(turn(at, round), &mut sums)?;
            Ok(sums.into_iter().map(Weight::to_f32).collect())
        }
    };
    BUCKETS.iter().enumerate().map(finish).collect()
}

/// The atoms of a datacenter: their elements, and their encoders.
type Encoders = Vec<(std::ops::Range<usize>, GradientEncoder)>;

/// What each rank should get, round after round.
struct Expected {
    members: Vec<Vec<Rank>>,
    /// Indexed by bucket and datacenter.
    encoders: Vec<Vec<Encoders>>,
}

impl Expected {
    fn new(members: &[Vec<Rank>], codec: &str) -> Self {
        let codec: GradientCodec = codec.parse().unwrap();
        let of = |bucket: &Bucket, ranks: &Vec<Rank>| {
            let atoms = |&rank: &Rank| Datacenters::new(rank, members).unwrap().atoms(bucket.elements);
            let encoder = |atom: shares::Atom| {
                let encoder = GradientEncoder::new(codec, atom.elements.len()).unwrap();
                (atom.elements, encoder)
            };
            ranks.iter().flat_map(atoms).map(encoder).collect()
        };
        let encoders = BUCKETS.iter().map(|bucket| members.iter().map(|ranks| of(bucket, ranks)).collect());
        Self { members: members.to_vec(), encoders: encoders.collect() }
    }

    fn round(&mut self, round: u64) -> Vec<Vec<f32>> {
        let mut all = Vec::new();
        for (at, bucket) in BUCKETS.iter().enumerate() {
            let mut sum = vec![0.0; bucket.elements];
            for (ranks, encoders) in self.members.iter().zip(&mut self.encoders[at]) {
                let mut part = vec![0.0_f32; bucket.elements];
                for &rank in ranks {
                    let values: Vec<f32> = match bucket.element {
                        Element::F32 => gradient(rank, at, round),
                        Element::Bf16 => {
                            gradient::<u16>(rank, at, round).into_iter().map(Weight::to_f32).collect()
                        }
                    };
                    part.iter_mut().zip(values).for_each(|(sum, value)| *sum += value);
                }
                for (elements, encoder) in encoders {
                    let mut bytes = Vec::new();
                    encoder.encode(&part[elements.clone()], &mut bytes).unwrap();
                    // A single datacenter sends its sum to no other, so the sum is not encoded.
                    match self.members.len() {
                        1 => sum[elements.clone()].copy_from_slice(&part[elements.clone()]),
                        _ => drop(add_gradient(&bytes, &mut sum[elements.clone()]).unwrap()),
                    }
                }
            }
            if bucket.element == Element::Bf16 {
                sum.iter_mut().for_each(|sum| *sum = u16::from_f32(*sum).to_f32());
            }
            all.push(sum);
        }
        all
    }
}

fn all(members: &[Vec<Rank>]) -> Vec<Rank> {
    members.iter().flatten().copied().collect()
}

#[test]
fn sums_are_those_of_a_plain_computation_on_every_rank() {
    for sizes in [&[2, 2][..], &[1], &[3], &[1, 1, 1], &[1, 3], &[2, 3, 1]] {
        for codec in ["exact", "int8", "topk:0.1"] {
            let (members, network) = (members(sizes), LocalNetwork::new());
            let found = on_threads(&all(&members), |rank| {
                let reduction = start(&network, rank, &members, &settings(codec));
                reduction.add_plan(&BUCKETS, None).unwrap();
                (0..4).map(|at| round(&reduction, rank, at).unwrap()).collect::<Vec<_>>()
            });
            let mut expected = Expected::new(&members, codec);
            let expected: Vec<_> = (0..4).map(|at| expected.round(at)).collect();
            assert!(found.iter().all(|found| *found == expected), "{sizes:?}, {codec}");
        }
    }
}

#[test]
fn bytes_over_the_link_are_those_of_the_formula() {
    for (codec, per_element, per_block) in [("exact", 4, 0), ("int8", 1, 4)] {
        let (members, network) = (members(&[2, 2, 2]), LocalNetwork::new());
        let found = on_threads(&all(&members), |rank| {
            let reduction = start(&network, rank, &members, &settings(codec));
            reduction.add_plan(&BUCKETS, None).unwrap();
            (0..3).for_each(|at| drop(round(&reduction, rank, at).unwrap()));
            (Datacenters::new(rank, &members).unwrap(), reduction.traffic())
        });
        for (here, traffic) in found {
            let message = |bucket: &Bucket| {
                let elements = here.own_share(bucket.elements).len();
                let payload = per_element * elements + per_block * elements.div_ceil(128);
                if elements == 0 { 0 } else { HEADER_BYTES + STREAM as usize + payload }
            };
            // Three rounds, to two other datacenters.
            let expected = 3 * 2 * BUCKETS.iter().map(message).sum::<usize>() as u64;
            assert_eq!((traffic.link_sent, traffic.link_received), (expected, expected), "{codec}");
        }
    }
}

#[test]
fn a_resumed_reduction_continues_with_the_same_bits() {
    for codec in ["exact", "int8"] {
        let (members, network) = (members(&[1, 2]), LocalNetwork::new());
        let first = on_threads(&all(&members), |rank| {
            let reduction = start(&network, rank, &members, &settings(codec));
            reduction.add_plan(&BUCKETS, None).unwrap();
            (0..2).for_each(|at| drop(round(&reduction, rank, at).unwrap()));
            (reduction.save(0).unwrap(), round(&reduction, rank, 2).unwrap())
        });
        let network = LocalNetwork::new();
        let again = on_threads(&all(&members), |rank| {
            let reduction = start(&network, rank, &members, &settings(codec));
            let saved = &first[rank.0 as usize].0;
            let other = reduction.add_plan(&BUCKETS[..2], Some(saved)).unwrap_err().to_string();
            assert!(other.contains("dense gradients of rank"), "{other}");
            reduction.add_plan(&BUCKETS, Some(saved)).unwrap();
            round(&reduction, rank, 2).unwrap()
        });
        assert_eq!(again, first.into_iter().map(|(_, sums)| sums).collect::<Vec<_>>());
    }
}

#[test]
fn an_abandoned_round_leaves_nothing_behind() {
    let (members, network) = (members(&[2, 2]), LocalNetwork::new());
    let found = on_threads(&all(&members), |rank| {
        let reduction = start(&network, rank, &members, &settings("exact"));
        reduction.add_plan(&BUCKETS, None).unwrap();
        // Ranks begin different numbers of buckets of the first round.
        for bucket in 0..(rank.0 as usize).min(2) {
            reduction.begin(turn(bucket, 0), &gradient::<f32>(rank, bucket, 0)).unwrap();
        }
        reduction.abandon(1);
        assert!(reduction.begin(turn(0, 0), &gradient::<f32>(rank, 0, 0)).is_err(), "the round is over");
        round(&reduction, rank, 1).unwrap()
    });
    let expected = Expected::new(&members, "exact").round(1);
    assert!(found.iter().all(|found| *found == expected));
}

#[test]
fn a_rank_may_abandon_a_round_after_its_peers_have_begun_the_next() {
    let (members, network) = (members(&[1, 1]), LocalNetwork::new());
    let has_begun_next = std::sync::Barrier::new(2);
    let found = on_threads(&all(&members), |rank| {
        let reduction = start(&network, rank, &members, &settings("exact"));
        reduction.add_plan(&BUCKETS, None).unwrap();
        if rank == Rank(0) {
            reduction.begin(turn(0, 0), &gradient::<f32>(rank, 0, 0)).unwrap();
            has_begun_next.wait();
            // Gives the thread time to see the message of the next round.
            std::thread::sleep(Duration::from_millis(100));
            reduction.abandon(1);
            return round(&reduction, rank, 1).unwrap();
        }
        reduction.abandon(1);
        reduction.begin(turn(0, 1), &gradient::<f32>(rank, 0, 1)).unwrap();
        has_begun_next.wait();
        let mut sums = vec![vec![0.0; BUCKETS[0].elements]];
        reduction.begin(turn(1, 1), &gradient::<f32>(rank, 1, 1)).unwrap();
        reduction.begin(turn(2, 1), &gradient::<u16>(rank, 2, 1)).unwrap();
        reduction.finish(turn(0, 1), &mut sums[0]).unwrap();
        for (bucket, narrow) in [(1, false), (2, true)] {
            if narrow {
                let mut out = vec![0_u16; BUCKETS[bucket].elements];
                reduction.finish(turn(bucket, 1), &mut out).unwrap();
                sums.push(out.into_iter().map(Weight::to_f32).collect());
            } else {
                let mut out = vec![0.0; BUCKETS[bucket].elements];
                reduction.finish(turn(bucket, 1), &mut out).unwrap();
                sums.push(out);
            }
        }
        sums
    });
    let expected = Expected::new(&members, "exact").round(1);
    assert!(found.iter().all(|found| *found == expected));
}

// ---- faults

fn fault(error: Error) -> (u32, PeerFault) {
    match error {
        Error::Peer(peer) => (peer.peer.0, peer.fault),
        other => panic!("not a peer's fault: {other}"),
    }
}

/// What all ranks but the last report when the last does `work` instead of the second round.
fn faults_of(
    timeout: Duration,
    work: impl Fn(&LocalCarrier, DenseReduction) + Sync,
) -> Vec<(u32, PeerFault)> {
    let (members, network) = (members(&[2, 2]), LocalNetwork::new());
    let settings = DenseSettings { timeout, ..settings("int8") };
    // News of the fault must not overtake the first round.
    let first_round_over = std::sync::Barrier::new(4);
    let found = on_threads(&all(&members), |rank| {
        let reduction = start(&network, rank, &members, &settings);
        reduction.add_plan(&BUCKETS, None).unwrap();
        round(&reduction, rank, 0).unwrap();
        first_round_over.wait();
        if rank == Rank(3) {
            work(&network.carrier(rank), reduction);
            return None;
        }
        let started = Instant::now();
        let error = round(&reduction, rank, 1).unwrap_err();
        assert!(started.elapsed() < timeout + Duration::from_secs(30), "it does not end");
        assert_eq!(reduction.check().unwrap_err(), error, "every later call returns the same error");
        Some(fault(error))
    });
    found.into_iter().flatten().collect()
}

#[test]
fn every_rank_names_a_dead_rank() {
    let faults = faults_of(Duration::from_secs(60), |carrier, reduction| {
        carrier.abort();
        reduction.close_at_once();
    });
    assert_eq!(faults, [(3, PeerFault::Died); 3]);
}

#[test]
fn every_rank_names_a_rank_that_lives_and_does_not_come() {
    let (done, wait) = (Mutex::new(false), Condvar::new());
    let faults = faults_of(Duration::from_millis(400), |_, reduction| {
        // The threads of rank 3 answer until the other ranks have failed.
        let mut is_done = lock(&done);
        while !*is_done {
            is_done = wait.wait_timeout(is_done, Duration::from_millis(10)).unwrap().0;
            *is_done = reduction.check().is_err();
        }
        assert!(reduction.check().unwrap_err().to_string().contains("late"));
    });
    assert_eq!(faults, [(3, PeerFault::Late); 3]);
}

#[test]
fn every_rank_names_a_silent_rank() {
    // Rank 3 has a carrier but no reduction: messages to it are never received, and its connections stay open.
    let (members, network) = (members(&[2, 2]), LocalNetwork::new());
    let settings = DenseSettings { timeout: Duration::from_millis(400), ..settings("exact") };
    let silent = network.carrier(Rank(3));
    let found = on_threads(&all(&members)[..3], |rank| {
        let reduction = start(&network, rank, &members, &settings);
        reduction.add_plan(&BUCKETS, None).unwrap();
        // Rank 0 starts first, so its timeout ends first, although it does not wait for rank 3 itself.
        std::thread::sleep(Duration::from_millis(100 * u64::from(rank.0)));
        fault(round(&reduction, rank, 0).unwrap_err())
    });
    assert_eq!(found, [(3, PeerFault::Stalled); 3]);
    silent.abort();
}

#[test]
fn a_fault_found_elsewhere_reaches_every_rank() {
    let faults = faults_of(Duration::from_secs(60), |_, reduction| {
        // Rank 9 is not in this job. The ranks pass its number on unchanged.
        reduction.blame(Rank(9), PeerFault::Stalled);
        assert_eq!(fault(reduction.check().unwrap_err()), (9, PeerFault::Stalled));
    });
    assert_eq!(faults, [(9, PeerFault::Stalled); 3]);
}

#[test]
fn a_panic_of_a_stage_is_an_error_at_once() {
    for thread in ["ep-inside", "ep-between"] {
        let (members, network) = (members(&[2, 1]), LocalNetwork::new());
        let found = on_threads(&all(&members), |rank| {
            let datacenters = Datacenters::new(rank, &members).unwrap();
            let thread = if rank == Rank(0) { thread } else { "no thread" };
            let carrier = Box::new(Panicking::new(network.carrier(rank), thread));
            let reduction = DenseReduction::new(datacenters, settings("exact"), carrier).unwrap();
            reduction.add_plan(&BUCKETS, None).unwrap();
            round(&reduction, rank, 0)
        });
        let error = found[0].clone().unwrap_err().to_string();
        let expected = format!("running the thread {thread}: it panicked: a bug of the carrier");
        assert!(error.starts_with(&expected), "{error}");
        // Rank 1 has the other share of the datacenter.
        assert_eq!(fault(found[1].clone().unwrap_err()), (0, PeerFault::Failed));
    }
}

#[test]
fn a_reduction_that_cannot_start_all_threads_keeps_none() {
    // The post starts four threads for the only peer, and the reduction two more.
    for starts in [3, 4, 5] {
        let (members, network) = (members(&[2]), LocalNetwork::new());
        let datacenters = Datacenters::new(Rank(0), &members).unwrap();
        let carrier = Panicking::new(network.carrier(Rank(0)), "no thread");
        let held = carrier.held();
        STARTS.set(starts);
        let started = DenseReduction::new(datacenters, settings("exact"), Box::new(carrier));
        STARTS.set(usize::MAX);
        let error = started.err().unwrap().to_string();
        assert!(error.starts_with("starting a thread: "), "{error}");
        assert_eq!(held.strong_count(), 0, "a thread still holds the carrier");
    }
}

#[test]
fn mistakes_are_named() {
    let (members, network) = (members(&[1]), LocalNetwork::new());
    let zero = DenseSettings { timeout: Duration::ZERO, ..settings("exact") };
    let here = Datacenters::new(Rank(0), &members).unwrap();
    let refused = DenseReduction::new(here, zero, Box::new(network.carrier(Rank(0))));
    assert_eq!(refused.err().unwrap().to_string(), "timeout = 0: must be positive");

    let reduction = start(&network, Rank(0), &members, &settings("int8"));
    let text = |error: Result<()>| error.unwrap_err().to_string();
    assert!(text(reduction.begin(turn(0, 0), &[0.0_f32])).contains("plans"));
    reduction.add_plan(&BUCKETS, None).unwrap();
    assert!(text(reduction.begin(turn(3, 0), &[0.0_f32])).contains("the plan has 3 buckets"));
    assert!(
        text(reduction.begin(turn(1, 0), &[0_u16])).contains("1 elements of F32 expected, found 1 of Bf16")
    );
    assert!(reduction.save(usize::MAX).unwrap_err().to_string().contains("plans"));
    // A round past the last has no sequence number. It must not be mistaken for an early round.
    for round in [LAST_ROUND + 1, u64::MAX] {
        let expected = format!("dense gradients, bucket 1: round {round}: at most 1099511627775 is possible");
        assert_eq!(text(reduction.begin(turn(1, round), &[0.0_f32])), expected);
        assert_eq!(text(reduction.finish(turn(1, round), &mut [0.0_f32])), expected);
    }
    let nan = text(reduction.begin(turn(1, 0), &[f32::NAN]));
    assert_eq!(nan, "dense gradients, bucket 1: element 0 is not finite; nothing was sent");
    reduction.begin(turn(1, 0), &[2.0_f32]).unwrap();
    let mut sum = [0.0];
    reduction.finish(turn(1, 0), &mut sum).unwrap();
    assert_eq!(sum, [2.0]);
    reduction.begin(turn(1, LAST_ROUND), &[3.0_f32]).unwrap();
    reduction.abandon(LAST_ROUND + 1);
    assert!(text(reduction.finish(turn(1, LAST_ROUND), &mut sum)).contains("the round was abandoned"));
}

#[test]
fn a_sum_that_overflows_ends_the_reduction_with_an_error_of_its_rank() {
    let (members, network) = (members(&[2, 1]), LocalNetwork::new());
    let bucket = [Bucket { elements: 1, element: Element::F32 }];
    let found = on_threads(&all(&members), |rank| {
        let reduction = start(&network, rank, &members, &settings("int8"));
        reduction.add_plan(&bucket, None).unwrap();
        // Rank 1 may fail before another rank begins. `begin` then returns the error on that rank.
        let begun = reduction.begin(turn(0, 0), &[f32::MAX]);
        begun.and_then(|()| reduction.finish(turn(0, 0), &mut [0.0_f32])).unwrap_err()
    });
    // Rank 1 sums the only element for datacenter 0.
    assert!(found[1].to_string().contains("the sum of this datacenter, from element 0"), "{}", found[1]);
    assert_eq!([fault(found[0].clone()), fault(found[2].clone())], [(1, PeerFault::Failed); 2]);
}
