//! Points in time: ordering for heaps, and equality up to rounding.

use std::cmp::Ordering;

/// Whether two points in time are equal up to rounding. The engine processes all events of one time before it starts
/// anything new, so that rounding does not affect the order of decisions.
pub(crate) fn at_once(now: f64, later: f64) -> bool {
    later <= now * (1.0 + 1e-12)
}

/// A point in time, or an amount of service, that a heap can order. It is never NaN.
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
