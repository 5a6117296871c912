//! What the 17 bits of a signal mean.

use std::ops::Range;

use ep::Signal;

use crate::params::{MAX_CHUNKS, RAIL_SECTIONS};

/// Bits for the number of units less one.
const COUNT_BITS: u32 = 4;
/// The last unit lies above the number of units.
const LAST_SHIFT: u32 = COUNT_BITS;
/// The section lies above the last unit. 0 stands for the plan.
const SECTION_SHIFT: u32 = 14;
/// The parity of the epoch is the highest bit.
const PARITY_SHIFT: u32 = 16;

/// The most units of one put.
pub(super) const MOST_UNITS: usize = 1 << COUNT_BITS;

// A signal has room for every unit and every section.
const _: () = assert!(MAX_CHUNKS == 1 << (SECTION_SHIFT - LAST_SHIFT));
const _: () = assert!(RAIL_SECTIONS < 1 << (PARITY_SHIFT - SECTION_SHIFT));
const _: () = assert!(PARITY_SHIFT + 1 == Signal::BITS);

/// What has arrived with a signal.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(super) struct Arrival {
    /// The epoch's parity, 0 or 1.
    pub(super) parity: usize,
    pub(super) what: What,
}

#[derive(Debug, Clone, PartialEq, Eq)]
pub(super) enum What {
    /// The plan.
    Plan,
    /// The parts of a section that belong to these units.
    Part(Part),
}

/// A section's part of consecutive units.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(super) struct Part {
    /// Index of the section.
    pub(super) section: usize,
    /// From 1 to [`MOST_UNITS`] units below [`MAX_CHUNKS`].
    pub(super) units: Range<usize>,
}

impl Arrival {
    /// The signal of this arrival.
    pub(super) fn signal(&self) -> Signal {
        let below = match &self.what {
            What::Plan => 0,
            What::Part(Part { section, units }) => {
                (section + 1) << SECTION_SHIFT | (units.end - 1) << LAST_SHIFT | (units.len() - 1)
            }
        };
        Signal::new((self.parity << PARITY_SHIFT | below) as u32).expect("17 bits")
    }

    /// The arrival that a signal stands for; `None` for a signal that no proxy sends.
    pub(super) fn of(signal: Signal) -> Option<Self> {
        let bits = |shift: u32, end: u32| (signal.word() as usize >> shift) & ((1 << (end - shift)) - 1);
        let (count, last) = (bits(0, COUNT_BITS) + 1, bits(LAST_SHIFT, SECTION_SHIFT));
        let what = match bits(SECTION_SHIFT, PARITY_SHIFT) {
            0 if (last, count) == (0, 1) => What::Plan,
            0 => return None,
            section => {
                let first = (last + 1).checked_sub(count)?;
                What::Part(Part { section: section - 1, units: first..last + 1 })
            }
        };
        Some(Self { parity: bits(PARITY_SHIFT, Signal::BITS), what })
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn every_arrival_has_a_signal_of_its_own() {
        let mut valid = 0;
        for word in 0..=Signal::MAX.word() {
            let signal = Signal::new(word).unwrap();
            let Some(arrival) = Arrival::of(signal) else { continue };
            assert_eq!(arrival.signal(), signal);
            if let What::Part(Part { section, units }) = &arrival.what {
                assert!(*section < RAIL_SECTIONS && units.end <= MAX_CHUNKS);
                assert!((1..=MOST_UNITS).contains(&units.len()));
            }
            valid += 1;
        }
        // Fewer units end at each of the first 15.
        assert_eq!(valid, 2 * (1 + RAIL_SECTIONS * (MAX_CHUNKS * MOST_UNITS - 15 * 16 / 2)));
    }

    #[test]
    fn the_bits_are_those_of_the_design() {
        let part = What::Part(Part { section: 1, units: 3..8 });
        assert_eq!(Arrival { parity: 1, what: part }.signal().word(), 1 << 16 | 2 << 14 | 7 << 4 | 4);
        assert_eq!(Arrival { parity: 1, what: What::Plan }.signal().word(), 1 << 16);
    }
}
