//! The layout of a rail window.

use std::ops::Range;

use ep::{Limits, Result, Size};

use crate::params::{MAX_CHUNKS, RAIL_SECTIONS, RailEnd, RailPlan};

/// Lanes begin at a multiple of this many bytes, and their length is a multiple of it: a page, which the GPU maps and an
/// engine registers as a whole.
const PAGE: usize = 4096;
/// The words of rail peers begin at a multiple of this many bytes: a cache line of the GPU.
const LINE: usize = 128;

/// The offsets of a rail window, in bytes. They are equal on all ranks of a rail.
///
/// A window has the part that the engine reserves, then `RailEnd [domains][2]`, then an `out` lane and an `in` lane for
/// every domain and parity. The entries of a rank's own domain are not used.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) struct RailLayout {
    domains: usize,
    lane_bytes: usize,
    /// Offset of the first `RailEnd`.
    ends: usize,
    /// Offset of the first lane.
    lanes: usize,
    bytes: usize,
}

impl RailLayout {
    /// The layout for `domains` domains. A lane has `lane_bytes` bytes, rounded up to whole pages. The engine reserves
    /// the first `reserved` bytes of the window.
    ///
    /// # Errors
    /// [`ep::CallerError::TooLarge`] for a window that is longer than the address space.
    pub(crate) fn new(domains: usize, lane_bytes: usize, reserved: usize) -> Result<Self> {
        const WHAT: &str = "the rail window of a rank (HYBRID_EP_CUDA_LANE_BYTES)";
        let lane = Size::new(lane_bytes).next_multiple_of(PAGE);
        let ends = Size::new(reserved).next_multiple_of(LINE);
        let lanes = (Size::new(domains) * 2 * size_of::<RailEnd>() + ends).next_multiple_of(PAGE);
        let bytes = Size::new(domains) * 2 * 2 * lane + lanes;
        Ok(Self {
            domains,
            lane_bytes: lane.bytes(WHAT)?,
            ends: ends.bytes(WHAT)?,
            lanes: lanes.bytes(WHAT)?,
            bytes: bytes.bytes(WHAT)?,
        })
    }

    /// Length of the window, lanes included.
    pub(crate) fn bytes(&self) -> usize {
        self.bytes
    }

    /// Number of domains, including this rank's.
    pub(crate) fn domains(&self) -> usize {
        self.domains
    }

    /// Bytes of a lane.
    pub(crate) fn lane_bytes(&self) -> usize {
        self.lane_bytes
    }

    /// Offset of the array `RailEnd [domains][2]`.
    pub(crate) fn ends_offset(&self) -> usize {
        self.ends
    }

    /// Offset of the `RailEnd` of a domain for the epochs of a parity, 0 or 1.
    pub(crate) fn end(&self, domain: usize, parity: usize) -> usize {
        self.ends + self.index(domain, parity) * size_of::<RailEnd>()
    }

    /// The offsets of all lanes. What lies before them is always in host memory.
    pub(crate) fn lanes(&self) -> Range<usize> {
        self.lanes..self.bytes
    }

    /// Offset of the lane to a domain for the epochs of a parity.
    pub(crate) fn out_lane(&self, domain: usize, parity: usize) -> usize {
        self.lanes + 2 * self.index(domain, parity) * self.lane_bytes
    }

    /// Offset of the lane from a domain for the epochs of a parity.
    pub(crate) fn in_lane(&self, domain: usize, parity: usize) -> usize {
        self.out_lane(domain, parity) + self.lane_bytes
    }

    fn index(&self, domain: usize, parity: usize) -> usize {
        assert!(domain < self.domains && parity < 2, "domain {domain}, parity {parity}: {self:?}");
        2 * domain + parity
    }
}

/// Maximum number of signals in flight from one rank to another: the plan, and each section of each unit, of the two epochs
/// that may be in flight.
pub(crate) const SIGNALS: usize = 2 * (1 + RAIL_SECTIONS * MAX_CHUNKS);

/// The limits that the engine of a rail's proxies must support.
pub(crate) fn limits(layout: &RailLayout) -> Limits {
    let put_bytes = layout.lane_bytes.max(size_of::<RailPlan>());
    Limits { signals: SIGNALS, put_bytes, advice: "lower HYBRID_EP_CUDA_LANE_BYTES on all ranks" }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_parts_of_a_window_do_not_overlap_and_fill_it() {
        for (domains, lane_bytes, reserved) in
            [(2, 4096, 0), (3, 5000, 100), (1, 0, 8192), (5, 1 << 20, 4097)]
        {
            let layout = RailLayout::new(domains, lane_bytes, reserved).unwrap();
            assert!(layout.lane_bytes() >= lane_bytes && layout.lane_bytes() < lane_bytes + PAGE);
            assert_eq!((layout.domains(), layout.ends_offset()), (domains, layout.end(0, 0)));
            let mut parts = vec![(0, reserved)];
            for (domain, parity) in (0..domains).flat_map(|domain| [(domain, 0), (domain, 1)]) {
                parts.push((layout.end(domain, parity), size_of::<RailEnd>()));
                for lane in [layout.out_lane(domain, parity), layout.in_lane(domain, parity)] {
                    assert!(lane.is_multiple_of(PAGE));
                    parts.push((lane, layout.lane_bytes()));
                }
                assert!(layout.end(domain, parity) + size_of::<RailEnd>() <= layout.lanes().start);
                assert!(layout.end(domain, parity).is_multiple_of(LINE));
                assert_eq!(layout.end(domain, parity), layout.ends_offset() + (2 * domain + parity) * 33_152);
            }
            parts.sort_unstable();
            assert!(parts.windows(2).all(|pair| pair[0].0 + pair[0].1 <= pair[1].0), "{parts:?}");
            assert_eq!(parts.last().map(|(offset, len)| offset + len), Some(layout.bytes()));
            assert_eq!(layout.lanes(), layout.out_lane(0, 0)..layout.bytes());
        }
    }

    #[test]
    fn a_window_that_is_too_large_is_the_callers_error() {
        for (domains, lane_bytes, reserved) in
            [(2, usize::MAX / 2, 0), (usize::MAX / 8, 4096, 0), (2, 4096, usize::MAX), (2, usize::MAX, 0)]
        {
            let error = RailLayout::new(domains, lane_bytes, reserved).unwrap_err();
            assert!(matches!(error, ep::Error::Caller(ep::CallerError::TooLarge { .. })), "{error}");
            assert!(error.to_string().contains("HYBRID_EP_CUDA_LANE_BYTES"), "{error}");
        }
    }

    #[test]
    fn a_put_may_have_a_whole_lane_and_a_whole_plan() {
        let limits_of = |lane_bytes| limits(&RailLayout::new(2, lane_bytes, 0).unwrap());
        let Limits { signals, put_bytes, advice } = limits_of(1 << 20);
        assert_eq!((signals, put_bytes), (6146, 1 << 20));
        assert!(advice.contains("HYBRID_EP_CUDA_LANE_BYTES"));
        assert_eq!(limits_of(4096).put_bytes, size_of::<RailPlan>());
    }
}
