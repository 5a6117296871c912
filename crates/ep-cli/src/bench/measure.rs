//! Times and bytes of operators: one rank's samples, and what they say about the job.

use std::time::Duration;

use ep::Traffic;
use serde::{Deserialize, Serialize};

/// What is timed.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum Operator {
    /// The router's lists checked and sorted: a routing.
    Route,
    /// From the routing to a handle and the receive shape.
    Preprocess,
    /// Dispatch with permute, with a handle at hand.
    Dispatch,
    /// Combine, with a handle at hand.
    Combine,
    /// Route, preprocess, dispatch and combine; then, for the backward pass, dispatch and combine with the same handle.
    Layer,
}

impl Operator {
    pub(super) const ALL: [Self; 5] =
        [Self::Route, Self::Preprocess, Self::Dispatch, Self::Combine, Self::Layer];

    pub(super) fn name(self) -> &'static str {
        match self {
            Self::Route => "check routing",
            Self::Preprocess => "preprocess",
            Self::Dispatch => "dispatch",
            Self::Combine => "combine",
            Self::Layer => "layer",
        }
    }
}

/// What one rank measured of one operator.
#[derive(Debug, Clone, Default, Serialize, Deserialize)]
pub(super) struct Samples {
    /// One time per timed iteration.
    pub(super) times: Vec<Duration>,
    /// Bytes of all timed iterations together.
    pub(super) inside_domains: u64,
    pub(super) between_domains: u64,
    pub(super) preprocess: u64,
}

impl Samples {
    pub(super) fn add(&mut self, time: Duration, before: Traffic, after: Traffic) {
        self.times.push(time);
        self.inside_domains += after.domain_bytes - before.domain_bytes;
        self.between_domains += after.transport_bytes - before.transport_bytes;
        self.preprocess += after.preprocess_bytes - before.preprocess_bytes;
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
