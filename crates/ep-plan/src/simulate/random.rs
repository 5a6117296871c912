//! Random numbers of the simulator. They depend on the seed alone, not on the order of events.

use rand::{RngExt, SeedableRng};
use rand_chacha::ChaCha8Rng;

/// The ChaCha stream that selects stragglers. The jitter of GPU `g` uses stream `g`.
const CHOICE: u64 = u64::MAX;

/// Draws `wanted` different numbers below `count`, by the first steps of a Fisher-Yates shuffle.
pub(crate) fn choose(count: usize, wanted: usize, seed: u64) -> impl Iterator<Item = usize> {
    let mut rng = ChaCha8Rng::seed_from_u64(seed);
    rng.set_stream(CHOICE);
    let mut all: Vec<usize> = (0..count).collect();
    (0..wanted.min(count)).map(move |next| {
        let other = rng.random_range(next..count);
        all.swap(next, other);
        all[next]
    })
}

/// Log-normal factors of mean 1 for the durations of computations.
#[derive(Debug, Clone)]
pub(crate) struct Jitter {
    rng: ChaCha8Rng,
    /// Standard deviation of the logarithm, which is normally distributed.
    deviation: f64,
}

impl Jitter {
    /// `None` for a deviation of 0.
    pub(crate) fn new(relative_deviation: f64, seed: u64) -> Option<Self> {
        let deviation = (1.0 + relative_deviation * relative_deviation).ln().sqrt();
        (relative_deviation > 0.0).then(|| Self { rng: ChaCha8Rng::seed_from_u64(seed), deviation })
    }

    /// The factor of one computation of one GPU. It depends only on the GPU, the computation and the seed.
    pub(crate) fn factor(&mut self, gpu: u32, computation: u32) -> f64 {
        self.rng.set_stream(u64::from(gpu));
        self.rng.set_word_pos(u128::from(computation) * 16);
        // Box-Muller transform, which draws two numbers. `rand_distr` may draw more than the 16 words of a factor, and then
        // factors would depend on each other. The logarithm is finite because 1 - x is above 0.
        let radius = (-2.0 * (1.0 - self.rng.random::<f64>()).ln()).sqrt();
        let normal = radius * (std::f64::consts::TAU * self.rng.random::<f64>()).cos();
        (self.deviation * normal - self.deviation * self.deviation / 2.0).exp()
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn factors_have_mean_one_and_the_deviation_asked_for() {
        let mut jitter = Jitter::new(0.2, 5).unwrap();
        let factors: Vec<f64> = (0..200)
            .flat_map(|gpu| (0..200).map(move |step| (gpu, step)))
            .map(|(g, s)| jitter.factor(g, s))
            .collect();
        let mean = factors.iter().sum::<f64>() / factors.len() as f64;
        let variance =
            factors.iter().map(|factor| (factor - mean).powi(2)).sum::<f64>() / factors.len() as f64;
        assert!((mean - 1.0).abs() < 0.005, "{mean}");
        assert!((variance.sqrt() - 0.2).abs() < 0.005, "{}", variance.sqrt());
        assert!(factors.iter().all(|&factor| factor > 0.0));
        assert!(Jitter::new(0.0, 5).is_none());
    }

    #[test]
    fn a_factor_depends_on_seed_gpu_and_computation_only() {
        let (mut one, mut other) = (Jitter::new(0.1, 5).unwrap(), Jitter::new(0.1, 5).unwrap());
        other.factor(9, 9);
        assert_eq!(one.factor(3, 4), other.factor(3, 4));
        assert_ne!(one.factor(3, 4), one.factor(4, 3));
        assert_ne!(one.factor(3, 4), Jitter::new(0.1, 6).unwrap().factor(3, 4));
    }

    #[test]
    fn choices_are_different_and_as_many_as_wanted() {
        let mut chosen: Vec<usize> = choose(100, 30, 1).collect();
        chosen.sort_unstable();
        chosen.dedup();
        assert_eq!((chosen.len(), chosen.last().unwrap() < &100), (30, true));
        assert_eq!(choose(10, 20, 1).count(), 10);
    }
}
