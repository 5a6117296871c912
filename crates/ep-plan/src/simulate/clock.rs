//! Numbers as keys of a heap, and what counts as one point in time.

use std::cmp::Ordering;

/// Whether two points in time are one but for rounding. What happens at one time happens before anything is decided
/// that depends on it, so that the last digit of a sum decides nothing.
pub(crate) fn at_once(now: f64, later: f64) -> bool {
    later <= now * (1.0 + 1e-12)
}

/// A point in time (or of service received) that a heap can order; never NaN.
#[derive(Debug, Clone, Copy, PartialEq)]
pub(crate) struct Instant(pub(crate) f64);

impl Eq for Instant {}

impl PartialOrd for Instant {
    fn partial_cmp(&self, other: &Self) -> Option<Ordering> {
        Some(self.cmp(other))
    }
}

impl Ord for Instant {
    fn cmp(&self, other: &Self) -> Ordering {
        self.0.total_cmp(&other.0)
    }
}
