//! Times and bytes of operators: one rank's samples, and what they say about the job.

use std::collections::BTreeMap;
use std::time::Duration;

use ep::Traffic;
use serde::{Deserialize, Serialize};

use crate::backend::Chosen;

/// What is timed.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Serialize, Deserialize)]
pub(super) enum Operator {
    /// The router's lists checked and sorted: a routing.
    Route,
    /// From the routing to a handle and the receive shape.
    Preprocess,
    /// Dispatch with permute, with a handle at hand.
    Dispatch,
    /// Preprocess, wait for the receive shape, dispatch: what the first call with a routing costs.
    Cold,
    /// Preprocess into a bounded output and dispatch: nothing waits.
    Bounded,
    /// Combine, with a handle at hand.
    Combine,
    /// Combine that brings the probabilities back too.
    CombineProbs,
    /// Route, preprocess, dispatch and combine; then, for the backward pass, dispatch and combine with the same handle.
    Layer,
    /// Many layers, one right after the other; the lists are on the GPU already.
    Layers,
}

impl Operator {
    /// What is timed on a backend, in this order.
    pub(super) fn all(backend: Chosen) -> &'static [Self] {
        match backend {
            Chosen::Host => &[Self::Route, Self::Preprocess, Self::Dispatch, Self::Combine, Self::Layer],
            Chosen::Cuda => &[
                Self::Preprocess,
                Self::Dispatch,
                Self::Cold,
                Self::Bounded,
                Self::Combine,
                Self::CombineProbs,
                Self::Layers,
            ],
        }
    }

    pub(super) fn name(self) -> &'static str {
        match self {
            Self::Route => "check routing",
            Self::Preprocess => "preprocess",
            Self::Dispatch => "dispatch",
            Self::Cold => "preprocess + dispatch",
            Self::Bounded => "non-blocking",
            Self::Combine => "combine",
            Self::CombineProbs => "combine + probs",
            Self::Layer | Self::Layers => "layer",
        }
    }
}

/// What one rank measured, by operator.
pub(super) type AllSamples = BTreeMap<Operator, Samples>;

/// What one rank measured of one operator.
#[derive(Debug, Clone, Default, Serialize, Deserialize)]
pub(super) struct Samples {
    /// One time per timed iteration: that of a call, or the mean of several.
    pub(super) times: Vec<Duration>,
    /// Calls of all timed iterations together, and their bytes.
    pub(super) calls: u64,
    pub(super) inside_domains: u64,
    pub(super) between_domains: u64,
    pub(super) preprocess: u64,
}

impl Samples {
    /// Adds an iteration of so many calls.
    pub(super) fn add(&mut self, calls: u32, time: Duration, before: Traffic, after: Traffic) {
        self.times.push(time / calls);
        self.calls += u64::from(calls);
        self.inside_domains += after.domain_bytes - before.domain_bytes;
        self.between_domains += after.transport_bytes - before.transport_bytes;
        self.preprocess += after.preprocess_bytes - before.preprocess_bytes;
    }

    /// Of bytes of all calls, those of one.
    pub(super) fn per_call(&self, bytes: u64) -> u64 {
        bytes.checked_div(self.calls).unwrap_or_default()
    }
}

/// Iteration by iteration the slowest rank's time: what the job waits for.
pub(super) fn slowest<'a>(ranks: impl Iterator<Item = &'a Samples>) -> Vec<Duration> {
    ranks
        .map(|samples| samples.times.clone())
        .reduce(|slowest, times| slowest.into_iter().zip(times).map(|(a, b)| a.max(b)).collect())
        .unwrap_or_default()
}

/// Where half, and where all but a twentieth, of some times lie.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq)]
pub(super) struct Spread {
    pub(super) median: Duration,
    /// The nearest rank's: of 12 times the largest.
    pub(super) p95: Duration,
}

impl Spread {
    pub(super) fn of(mut times: Vec<Duration>) -> Self {
        times.sort_unstable();
        let count = times.len();
        if count == 0 {
            return Self::default();
        }
        let median = (times[(count - 1) / 2] + times[count / 2]) / 2;
        Self { median, p95: times[(count * 95).div_ceil(100) - 1] }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn ms(times: &[u64]) -> Vec<Duration> {
        times.iter().map(|&time| Duration::from_millis(time)).collect()
    }

    #[test]
    fn the_slowest_rank_counts() {
        let ranks = [&[1, 5, 3], &[2, 4, 9]].map(|times| Samples { times: ms(times), ..Samples::default() });
        assert_eq!(slowest(ranks.iter()), ms(&[2, 5, 9]));
        assert!(slowest(std::iter::empty()).is_empty());
    }

    #[test]
    fn an_iteration_of_several_calls_counts_as_their_mean() {
        let mut samples = Samples::default();
        let traffic = |domain_bytes| Traffic { domain_bytes, ..Traffic::default() };
        samples.add(1, Duration::from_millis(9), traffic(5), traffic(10));
        samples.add(4, Duration::from_millis(8), traffic(10), traffic(30));
        assert_eq!(samples.times, ms(&[9, 2]));
        assert_eq!(samples.per_call(samples.inside_domains), 5);
    }

    #[test]
    fn spread_of_few_and_many() {
        let spread = |times: &[u64]| {
            let Spread { median, p95 } = Spread::of(ms(times));
            (median.as_millis(), p95.as_millis())
        };
        assert_eq!(spread(&[]), (0, 0));
        assert_eq!(spread(&[7]), (7, 7));
        assert_eq!(spread(&[4, 2]), (3, 4));
        assert_eq!(spread(&[9, 1, 5]), (5, 9));
        let hundred: Vec<u64> = (1..=100).rev().collect();
        assert_eq!(spread(&hundred), (50, 95));
    }
}
