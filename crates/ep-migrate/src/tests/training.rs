//! Steps of training: what replicas and sums of gradients hold.

use std::collections::BTreeMap;

use proptest::prelude::*;

use super::*;

/// What a rank saw in a step of a layer.
#[derive(Debug, Clone, PartialEq)]
struct Seen<T> {
    steps: Vec<u64>,
    replicas: Vec<T>,
    sum: Vec<f32>,
}

/// What a rank saw by (step, layer), and its state at the end.
type Outcome<T> = (BTreeMap<(u64, usize), Seen<T>>, Vec<u8>);

/// The weights of a rank's experts in a layer and step. They change a little in each step, as in training.
fn weights<T: Weight>(rank: Rank, layer: usize, step: u64) -> Vec<T> {
    let count = 2 * shape().expert_elements[layer];
    let base = numbers::<f32>([1, u64::from(rank.0), layer as u64, 0], count);
    let change = numbers::<f32>([2, u64::from(rank.0), layer as u64, step], count);
    base.iter().zip(change).map(|(base, change)| T::from_f32(base + 0.01 * change)).collect()
}

/// The gradients that `of` computes for the experts of `owner`.
fn gradients<T: Weight>(of: Rank, owner: Rank, layer: usize, step: u64) -> Vec<T> {
    let seed = [3 + u64::from(of.0), u64::from(owner.0), layer as u64, step];
    numbers(seed, 2 * shape().expert_elements[layer])
}

/// Trains some steps, from the state `saved` if there is one.
fn train<T: Weight>(
    network: &LocalNetwork,
    rank: Rank,
    ranks: &[Rank],
    settings: &Settings,
    steps: std::ops::Range<u64>,
    saved: Option<&[u8]>,
) -> Outcome<T> {
    let domain = Domain::new(rank, ranks).unwrap();
    let carrier = Box::new(network.carrier(rank));
    let migration: Migration<T> = match saved {
        None => Migration::new(domain, shape(), settings.clone(), carrier).unwrap(),
        Some(saved) => Migration::resume(domain, shape(), settings.clone(), carrier, saved).unwrap(),
    };
    let peers = migration.domain().peers();
    let layers = shape().expert_elements.len();
    let mut replicas: Vec<Vec<T>> = (0..layers)
        .map(|layer| vec![T::from_f32(9.0); peers.len() * 2 * shape().expert_elements[layer]])
        .collect();
    let mut seen = BTreeMap::new();
    for step in steps {
        for layer in 0..layers {
            migration.publish(layer, &weights(rank, layer, step)).unwrap();
        }
        for (layer, replicas) in replicas.iter_mut().enumerate() {
            let steps = migration.gather(layer, replicas).unwrap();
            seen.insert((step, layer), Seen { steps, replicas: replicas.clone(), sum: Vec::new() });
        }
        for layer in (0..layers).rev() {
            let sent: Vec<T> = peers.iter().flat_map(|&peer| gradients(rank, peer, layer, step)).collect();
            migration.send_gradients(layer, &sent).unwrap();
        }
        for layer in 0..layers {
            let own: Vec<T> = gradients(rank, rank, layer, step);
            let mut sum = vec![f32::NAN; own.len()];
            migration.reduce_gradients(layer, &own, &mut sum).unwrap();
            seen.get_mut(&(step, layer)).unwrap().sum = sum;
        }
    }
    let saved = migration.save().unwrap();
    migration.close();
    (seen, saved)
}

/// The result of lossless training: replicas equal their owners' weights, and sums run over the ranks in ascending
/// order.
fn expected<T: Weight>(rank: Rank, ranks: &[Rank], layer: usize, step: u64) -> Seen<T> {
    let peers: Vec<Rank> = ranks.iter().copied().filter(|&peer| peer != rank).collect();
    let mut sum = vec![0.0; 2 * shape().expert_elements[layer]];
    for &of in ranks {
        let part = gradients::<T>(of, rank, layer, step);
        sum.iter_mut().zip(part).for_each(|(sum, part)| *sum += part.to_f32());
    }
    Seen {
        steps: vec![step; peers.len()],
        replicas: peers.iter().flat_map(|&peer| weights(peer, layer, step)).collect(),
        sum,
    }
}

fn lossless<T: Weight + std::fmt::Debug>(count: usize, depth: usize) {
    let (ranks, network) = (ranks(count), LocalNetwork::new());
    let settings = Settings { depth, ..settings(WeightCodec::Exact, GradientCodec::Exact) };
    let runs = on_threads(&ranks, |rank| train::<T>(&network, rank, &ranks, &settings, 0..4, None).0);
    for (&rank, run) in ranks.iter().zip(&runs) {
        for (&(step, layer), seen) in run {
            assert_eq!(seen, &expected(rank, &ranks, layer, step), "rank {rank}, layer {layer}, step {step}");
        }
    }
}

proptest! {
    #![proptest_config(ProptestConfig::with_cases(12))]
    #[test]
    fn without_loss_every_rank_has_what_one_rank_would_have(count in 1usize..5, depth in 1usize..6, wide: bool) {
        if wide { lossless::<f32>(count, depth) } else { lossless::<u16>(count, depth) }
    }
}

const LOSSY: [(WeightCodec, GradientCodec); 4] = [
    (WeightCodec::Int8, GradientCodec::Int8),
    (WeightCodec::Delta { density: 0.05, warm_up: 1 }, GradientCodec::Int8),
    (WeightCodec::Delta { density: 0.2, warm_up: 2 }, GradientCodec::TopK { density: 0.1 }),
    (WeightCodec::Shared { density: 0.1 }, GradientCodec::Exact),
];

#[test]
fn with_loss_all_replicas_of_an_expert_are_equal_and_near_it() {
    for (weights_codec, gradient_codec) in LOSSY {
        let (ranks, network) = (ranks(3), LocalNetwork::new());
        let settings = Settings { shared_refresh: 2, ..settings(weights_codec, gradient_codec) };
        let runs = on_threads(&ranks, |rank| train::<f32>(&network, rank, &ranks, &settings, 0..5, None).0);
        let of = |holder: usize, owner: usize, step, layer| {
            let place = owner - usize::from(owner > holder);
            let each = 2 * shape().expert_elements[layer];
            runs[holder][&(step, layer)].replicas[place * each..][..each].to_vec()
        };
        for (step, layer) in (0..5).flat_map(|step| (0..3).map(move |layer| (step, layer))) {
            for (owner, holders) in [(0, [1, 2]), (1, [0, 2]), (2, [0, 1])] {
                let replica = of(holders[0], owner, step, layer);
                assert_eq!(
                    replica,
                    of(holders[1], owner, step, layer),
                    "{weights_codec} step {step} layer {layer}"
                );
                let truth: Vec<f32> = weights(ranks[owner], layer, step);
                // A shared expert of random experts is far from each of them.
                let bound = if matches!(weights_codec, WeightCodec::Shared { .. }) { 2.0 } else { 0.05 };
                let worst = replica.iter().zip(&truth).map(|(a, b)| (a - b).abs()).fold(0.0, f32::max);
                assert!(worst < bound, "{weights_codec}, step {step}, layer {layer}: {worst}");
            }
        }
    }
}

#[test]
fn two_runs_give_the_same_bits() {
    for (weights_codec, gradient_codec) in LOSSY {
        let run = || {
            let (ranks, network) = (ranks(3), LocalNetwork::new());
            let settings = settings(weights_codec, gradient_codec);
            on_threads(&ranks, |rank| train::<u16>(&network, rank, &ranks, &settings, 0..3, None))
        };
        assert_eq!(run(), run());
    }
}

#[test]
fn a_resumed_run_equals_an_uninterrupted_one() {
    for (weights_codec, gradient_codec) in LOSSY {
        let ranks = ranks(3);
        let settings = Settings { shared_refresh: 2, ..settings(weights_codec, gradient_codec) };
        let network = LocalNetwork::new();
        let whole = on_threads(&ranks, |rank| train::<f32>(&network, rank, &ranks, &settings, 0..7, None));
        let network = LocalNetwork::new();
        let first = on_threads(&ranks, |rank| train::<f32>(&network, rank, &ranks, &settings, 0..4, None));
        let network = LocalNetwork::new();
        let second = on_threads(&ranks, |rank| {
            let place = ranks.iter().position(|&other| other == rank).unwrap();
            train::<f32>(&network, rank, &ranks, &settings, 4..7, Some(&first[place].1))
        });
        for ((whole, first), second) in whole.iter().zip(&first).zip(&second) {
            for (key, seen) in first.0.iter().chain(&second.0) {
                assert_eq!(seen, &whole.0[key], "{weights_codec}, {gradient_codec}, (step, layer) {key:?}");
            }
            assert_eq!(whole.1, second.1, "{weights_codec}, {gradient_codec}: the state at the end");
        }
    }
}

#[test]
fn a_rank_that_starts_over_sends_complete_weights_once() {
    let (ranks, network) = (ranks(2), LocalNetwork::new());
    let settings = settings(WeightCodec::Delta { density: 0.01, warm_up: 1 }, GradientCodec::Exact);
    let far = on_threads(&ranks, |rank| {
        let migration = start::<f32>(&network, rank, &ranks, &settings);
        let peer = migration.domain().peers()[0];
        let mut replicas = vec![0.0; 600];
        let far = (0..4u64).map(|step| {
            if step == 2 && rank == ranks[0] {
                migration.start_over();
            }
            // New weights in every step, of which a hundredth travels.
            let own = |rank: Rank| numbers::<f32>([u64::from(rank.0), step, 0, 0], 600);
            migration.publish(0, &own(rank)).unwrap();
            migration.gather(0, &mut replicas).unwrap();
            replicas.iter().zip(own(peer)).map(|(a, b)| (a - b).abs()).fold(0.0, f32::max)
        });
        let far: Vec<f32> = far.collect();
        migration.close();
        far
    });
    let is_near: Vec<Vec<bool>> = far.iter().map(|far| far.iter().map(|&far| far < 0.01).collect()).collect();
    assert_eq!(is_near[0], [true, false, false, false], "replicas of rank 4");
    assert_eq!(is_near[1], [true, false, true, false], "replicas of rank 1");
}

#[test]
fn layers_that_are_not_gathered_do_not_hold_up_others() {
    let ranks = ranks(2);
    for depth in 1..4 {
        let network = LocalNetwork::new();
        let settings = Settings { depth, ..settings(WeightCodec::Int8, GradientCodec::Exact) };
        on_threads(&ranks, |rank| {
            let migration = start::<f32>(&network, rank, &ranks, &settings);
            for step in 0..3 {
                for layer in 0..3 {
                    migration.publish(layer, &weights(rank, layer, step)).unwrap();
                }
                // Only the last layer is used, and in the first step no layer.
                let mut replicas = vec![0.0; 600];
                if step > 0 {
                    assert_eq!(migration.gather(2, &mut replicas).unwrap(), [step], "depth {depth}");
                }
            }
            migration.close();
        });
    }
}

#[test]
fn publishing_without_end_is_refused_before_it_waits() {
    let ranks = ranks(2);
    for staleness in [0, 1] {
        let network = LocalNetwork::new();
        let settings = Settings { staleness, depth: 1, ..settings(WeightCodec::Exact, GradientCodec::Exact) };
        on_threads(&ranks, |rank| {
            let migration = start::<f32>(&network, rank, &ranks, &settings);
            let mut layers = (0..).flat_map(|step| (0..3).map(move |layer| (step, layer)));
            let (step, error) = layers
                .find_map(|(step, layer)| {
                    let published = migration.publish(layer, &weights(rank, layer, step));
                    published.err().map(|error| (step, error))
                })
                .unwrap();
            assert_eq!(step, 2 * (2 + staleness));
            assert!(error.to_string().contains("without a forward pass"), "{error}");
            // The refused step has not begun.
            migration.gather(0, &mut [0.0; 600]).unwrap();
            migration.publish(0, &weights(rank, 0, step)).unwrap();
            migration.close();
        });
    }
}

#[test]
fn weights_of_later_steps_wait_for_their_step() {
    let (ranks, network) = (ranks(2), LocalNetwork::new());
    let settings = settings(WeightCodec::Exact, GradientCodec::Exact);
    let slow = start::<f32>(&network, ranks[0], &ranks, &settings);
    let fast = start::<f32>(&network, ranks[1], &ranks, &settings);
    let mut replicas = vec![0.0; 258];
    for step in 0..2 {
        fast.publish(1, &weights(ranks[1], 1, step)).unwrap();
    }
    for step in 0..2 {
        slow.publish(1, &weights(ranks[0], 1, step)).unwrap();
        assert_eq!(slow.gather(1, &mut replicas).unwrap(), [step]);
        assert_eq!(replicas, weights::<f32>(ranks[1], 1, step));
    }
    std::thread::scope(|scope| {
        scope.spawn(|| slow.close());
        fast.close();
    });
}

#[test]
fn stale_replicas_lag_at_most_the_staleness() {
    let (ranks, network) = (ranks(2), LocalNetwork::new());
    let settings = Settings { staleness: 2, ..settings(WeightCodec::Exact, GradientCodec::Exact) };
    let slow = start::<f32>(&network, ranks[0], &ranks, &settings);
    let fast = start::<f32>(&network, ranks[1], &ranks, &settings);
    let publish = |migration: &Migration<f32>, step| {
        migration.publish(1, &weights(migration.domain().rank(), 1, step)).unwrap();
    };
    let mut replicas = vec![0.0; 258];
    publish(&slow, 0);
    publish(&fast, 0);
    assert_eq!(fast.gather(1, &mut replicas).unwrap(), [0]);
    // Two steps ahead of the slow rank nothing waits; three steps ahead a rank waits for step 1.
    for step in 1..3 {
        publish(&fast, step);
        assert_eq!(fast.gather(1, &mut replicas).unwrap(), [0]);
        assert_eq!(replicas, weights::<f32>(ranks[0], 1, 0));
    }
    publish(&fast, 3);
    std::thread::scope(|scope| {
        let waiting = scope.spawn(|| (fast.gather(1, &mut replicas), replicas));
        publish(&slow, 1);
        let (steps, replicas) = waiting.join().unwrap();
        assert_eq!(steps.unwrap(), [1]);
        assert_eq!(replicas, weights::<f32>(ranks[0], 1, 1));
        scope.spawn(|| slow.close());
        fast.close();
    });
}

#[test]
fn bytes_of_messages_are_counted() {
    let (ranks, network) = (ranks(2), LocalNetwork::new());
    let settings = settings(WeightCodec::Exact, GradientCodec::Int8);
    let stats = on_threads(&ranks, |rank| {
        let migration = start::<f32>(&network, rank, &ranks, &settings);
        migration.publish(0, &[0.5; 600]).unwrap();
        migration.gather(0, &mut [0.0; 600]).unwrap();
        migration.send_gradients(0, &[0.5; 600]).unwrap();
        migration.reduce_gradients(0, &[0.0; 600], &mut [0.0; 600]).unwrap();
        let stats = migration.stats();
        migration.close();
        stats.traffic
    });
    let stream = |codec: WeightCodec| 2 * codec.max_bytes(ep::Element::F32, 300) as u64 + 64;
    assert_eq!(stats[0].weights_sent, stream(WeightCodec::Exact));
    assert_eq!(stats[0].gradients_sent, 2 * GradientCodec::Int8.max_bytes(ep::Element::F32, 300) as u64 + 64);
    assert_eq!(stats[1].weights_received, stats[0].weights_sent);
    assert_eq!(stats[1].gradients_received, stats[0].gradients_sent);
}
