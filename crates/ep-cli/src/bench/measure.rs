//! Times and bytes of operators: the samples of one rank, and the statistics over all ranks.

use std::collections::BTreeMap;
use std::time::Duration;

use ep::Traffic;
use serde::{Deserialize, Serialize};

use crate::common::backend::BackendKind;

/// A timed call.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Serialize, Deserialize)]
pub(super) enum Operator {
    /// Check and sort the router's lists into a routing.
    Route,
    /// Preprocess, and wait for the receive shape.
    Preprocess,
    /// Dispatch with an existing handle.
    Dispatch,
    /// Preprocess, wait for the receive shape, dispatch: the first call with a routing.
    Cold,
    /// Preprocess with a capacity, then dispatch: the host does not wait.
    Bounded,
    /// Combine with an existing handle.
    Combine,
    /// Combine that also returns the probabilities.
    CombineProbs,
    /// Route, preprocess, dispatch and combine; then, for the backward pass, dispatch and combine with the same handle.
    Layer,
    /// Many layers without a pause between them; the router's lists are in GPU memory from the start.
    Layers,
}

impl Operator {
    /// The timed calls of a backend, in order.
    pub(super) fn all(backend: BackendKind) -> &'static [Self] {
        match backend {
            BackendKind::Host => &[Self::Route, Self::Preprocess, Self::Dispatch, Self::Combine, Self::Layer],
            BackendKind::Cuda => &[
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

/// The samples of one rank, by operator.
pub(super) type AllSamples = BTreeMap<Operator, Samples>;

/// The samples of one rank for one operator.
#[derive(Debug, Clone, Default, Serialize, Deserialize)]
pub(super) struct Samples {
    /// One time per timed iteration: of its call, or the mean of its calls.
    pub(super) times: Vec<Duration>,
    /// Calls of all timed iterations.
    pub(super) calls: u64,
    /// Bytes of all calls inside domains.
    pub(super) inside_domains: u64,
    /// Bytes of all calls between domains.
    pub(super) between_domains: u64,
    /// Bytes of counts that all calls received in preprocessing.
    pub(super) preprocess: u64,
}

impl Samples {
    /// Adds an iteration that made `calls` calls.
    pub(super) fn add(&mut self, calls: u32, time: Duration, before: Traffic, after: Traffic) {
        self.times.push(time / calls);
        self.calls += u64::from(calls);
        self.inside_domains += after.domain_bytes - before.domain_bytes;
        self.between_domains += after.transport_bytes - before.transport_bytes;
        self.preprocess += after.preprocess_bytes - before.preprocess_bytes;
    }

    /// Bytes per call, from the bytes of all calls.
    pub(super) fn per_call(&self, bytes: u64) -> u64 {
        bytes.checked_div(self.calls).unwrap_or_default()
    }
}

/// For each iteration the time of the slowest rank, which the whole job waits for.
pub(super) fn slowest<'a>(ranks: impl Iterator<Item = &'a Vec<Duration>>) -> Vec<Duration> {
    ranks
        .cloned()
        .reduce(|slowest, times| slowest.into_iter().zip(times).map(|(a, b)| a.max(b)).collect())
        .unwrap_or_default()
}

/// Median and 95th percentile of some times.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq)]
pub(super) struct Spread {
    pub(super) median: Duration,
    /// 95th percentile by the nearest-rank method: the largest of 12 times.
    pub(super) p95: Duration,
}

impl Spread {
    pub(super) fn of(mut times: Vec<Duration>) -> Self {
        times.sort_unstable();
        let count = times.len();
        if count == 0 {
            return Self::default();
        }
        let (below, above) = (times[(count - 1) / 2], times[count / 2]);
        // The sum of two times that peers report may overflow; the difference cannot.
        let median = below + (above - below) / 2;
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
    fn an_iteration_takes_the_time_of_its_slowest_rank() {
        let ranks = [&[1, 5, 3], &[2, 4, 9]].map(|times| ms(times));
        assert_eq!(slowest(ranks.iter()), ms(&[2, 5, 9]));
        assert!(slowest(std::iter::empty()).is_empty());
    }

    #[test]
    fn an_iteration_of_several_calls_counts_as_their_mean() {
        let mut samples = Samples::default();
        let traffic = |domain_bytes| {
            let mut traffic = Traffic::default();
            traffic.domain_bytes = domain_bytes;
            traffic
        };
        samples.add(1, Duration::from_millis(9), traffic(5), traffic(10));
        samples.add(4, Duration::from_millis(8), traffic(10), traffic(30));
        assert_eq!(samples.times, ms(&[9, 2]));
        assert_eq!(samples.per_call(samples.inside_domains), 5);
    }

    #[test]
    fn median_and_percentile_of_few_and_many_times() {
        let spread = |times: &[u64]| {
            let Spread { median, p95 } = Spread::of(ms(times));
            (median.as_millis(), p95.as_millis())
        };
        assert_eq!(spread(&[]), (0, 0));
        assert_eq!(spread(&[7]), (7, 7));
        assert_eq!(spread(&[4, 2]), (3, 4));
        assert_eq!(spread(&[9, 1, 5]), (5, 9));
        assert_eq!(Spread::of(vec![Duration::MAX; 2]).median, Duration::MAX);
        let hundred: Vec<u64> = (1..=100).rev().collect();
        assert_eq!(spread(&hundred), (50, 95));
    }
}
