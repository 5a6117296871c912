//! Synthetic routings and activations, the same on every machine for the same seed.

use rand::RngExt as _;
use rand::SeedableRng as _;
use rand_chacha::ChaCha8Rng;

use crate::numeric::f32_to_bf16;
use crate::routing::Routing;
use crate::topology::Rank;

/// A random routing: each token chooses `topk` different experts, whose popularity is Zipf-distributed.
#[derive(Debug, Clone, Copy, PartialEq)]
pub struct Workload {
    /// Tokens of the rank.
    pub tokens: usize,
    /// Experts in the world.
    pub experts: usize,
    /// Experts per token; at most `experts`.
    pub topk: usize,
    /// Zipf exponent of the experts' popularity; 0 = uniform. The seed alone determines which experts are popular, so
    /// all ranks agree.
    pub skew: f64,
    /// Seed of the random numbers. The same seed gives the same routings.
    pub seed: u64,
}

impl Workload {
    /// The routing of one rank. The weights of each token sum to 1.
    ///
    /// # Panics
    /// When `topk` is more than `experts`, or there are 0 or too many experts.
    pub fn routing(&self, rank: Rank) -> Routing {
        let log_popularity = self.log_popularity();
        let mut rng = rng_for(self.seed, rank, 0);
        let mut scores: Vec<(f64, i32)> = Vec::with_capacity(self.experts);
        let mut topk_idx = Vec::with_capacity(self.tokens * self.topk);
        let mut topk_weights = Vec::with_capacity(self.tokens * self.topk);
        for _ in 0..self.tokens {
            // Gumbel top-k: the k largest values of log p + Gumbel noise are a sample without replacement.
            scores.clear();
            scores.extend(log_popularity.iter().zip(0..).map(|(&log_p, expert)| {
                let uniform: f64 = rng.random_range(f64::MIN_POSITIVE..1.0);
                (log_p - (-uniform.ln()).ln(), expert)
            }));
            if self.topk < self.experts {
                scores.select_nth_unstable_by(self.topk, |a, b| b.0.total_cmp(&a.0));
            }
            let weights: Vec<f32> = (0..self.topk).map(|_| rng.random_range(0.05f32..1.0)).collect();
            let sum: f32 = weights.iter().sum();
            topk_idx.extend(scores[..self.topk].iter().map(|&(_, expert)| expert));
            topk_weights.extend(weights.iter().map(|weight| weight / sum));
        }
        let routing = if self.topk > 0 {
            Routing::from_topk(rank, self.experts, self.topk, &topk_idx, &topk_weights)
        } else {
            // With k = 0 the length of a top-k list does not give the number of tokens; the length of a map does.
            let cells = self.tokens * self.experts;
            Routing::from_map(rank, self.experts, &vec![0; cells], &vec![0.0; cells])
        };
        routing.expect("experts are drawn in range and without repetition, weights are finite")
    }

    fn log_popularity(&self) -> Vec<f64> {
        let mut log_p: Vec<f64> = (1..=self.experts).map(|place| -self.skew * (place as f64).ln()).collect();
        let mut rng = ChaCha8Rng::seed_from_u64(self.seed);
        for last in (1..log_p.len()).rev() {
            log_p.swap(last, rng.random_range(0..=last));
        }
        log_p
    }
}

/// A random number generator, independent for each (seed, rank, purpose).
pub fn rng_for(seed: u64, rank: Rank, purpose: u64) -> ChaCha8Rng {
    let mut rng = ChaCha8Rng::seed_from_u64(seed);
    rng.set_stream(1 + (u64::from(rank.0) << 16) + purpose);
    rng
}

/// `len` random bf16 activations in -4..4, as bits.
pub fn activations(len: usize, rng: &mut ChaCha8Rng) -> Vec<u16> {
    (0..len).map(|_| f32_to_bf16(rng.random_range(-4.0f32..4.0))).collect()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn every_row_has_k_distinct_experts_and_weights_that_sum_to_one() {
        let workload = Workload { tokens: 200, experts: 16, topk: 4, skew: 1.0, seed: 3 };
        let routing = workload.routing(Rank(2));
        assert_eq!(routing.tokens(), 200);
        for token in 0..200 {
            assert_eq!(routing.experts_of(token).len(), 4);
            let sum: f32 = routing.weights_of(token).iter().sum();
            assert!((sum - 1.0).abs() < 1e-5);
        }
        assert_eq!(routing, workload.routing(Rank(2)));
        assert_ne!(routing.experts_of(0), workload.routing(Rank(1)).experts_of(0));
    }

    #[test]
    fn skew_makes_hot_experts() {
        let load = |skew: f64| {
            let routing = Workload { tokens: 2000, experts: 32, topk: 2, skew, seed: 9 }.routing(Rank(0));
            let mut load = vec![0u32; 32];
            (0..2000).flat_map(|t| routing.experts_of(t)).for_each(|&e| load[e as usize] += 1);
            load.into_iter().max().unwrap()
        };
        assert!(load(0.0) < 200 && load(1.2) > 800);
    }

    #[test]
    fn a_routing_without_copies_still_has_tokens() {
        let routing = Workload { tokens: 7, experts: 4, topk: 0, skew: 0.0, seed: 0 }.routing(Rank(0));
        assert_eq!((routing.tokens(), routing.copies()), (7, 0));
    }
}
