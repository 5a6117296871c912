//! Whole migrations of several ranks on threads, against a plain computation of what they should give.

mod faults;
mod training;

use std::time::Duration;

use ep::Rank;
use ep_codec::{GradientCodec, Weight, WeightCodec};
use rand::{RngExt as _, SeedableRng as _};
use rand_chacha::ChaCha8Rng;

use crate::{Domain, LocalNetwork, Migration, Settings, Shape};

/// Ranks of the tests' domain; the numbers have gaps, as those of an expert domain do.
fn ranks(count: usize) -> Vec<Rank> {
    (0..count).map(|rank| Rank(3 * rank as u32 + 1)).collect()
}

fn settings(weights: WeightCodec, gradients: GradientCodec) -> Settings {
    Settings { weights, gradients, timeout: Duration::from_secs(60), run: 0xE9, ..Settings::default() }
}

fn shape() -> Shape {
    Shape { experts_per_rank: 2, expert_elements: vec![300, 129, 300] }
}

fn start<T: Weight>(network: &LocalNetwork, rank: Rank, ranks: &[Rank], settings: &Settings) -> Migration<T> {
    let domain = Domain::new(rank, ranks).unwrap();
    Migration::new(domain, shape(), settings.clone(), Box::new(network.carrier(rank))).unwrap()
}

/// Runs `work` on a thread for each rank, and returns the results in their order.
pub(crate) fn on_threads<R: Send>(ranks: &[Rank], work: impl Fn(Rank) -> R + Sync) -> Vec<R> {
    std::thread::scope(|scope| {
        let threads: Vec<_> = ranks.iter().map(|&rank| (rank, &work)).collect();
        let threads: Vec<_> =
            threads.into_iter().map(|(rank, work)| scope.spawn(move || work(rank))).collect();
        threads.into_iter().map(|thread| thread.join().unwrap()).collect()
    })
}

/// Numbers that depend on the arguments only.
pub(crate) fn numbers<T: Weight>(seed: [u64; 4], count: usize) -> Vec<T> {
    let seed = seed
        .iter()
        .fold(7u64, |hash, &word| (hash ^ word).wrapping_mul(0x9E37_79B9_7F4A_7C15).rotate_left(23));
    let mut random = ChaCha8Rng::seed_from_u64(seed);
    (0..count).map(|_| T::from_f32(random.random_range(-1.0f32..1.0))).collect()
}
