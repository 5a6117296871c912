//! What the 17 bits of a signal mean.

use std::ops::Range;

use ep::Signal;

use crate::params::{MAX_CHUNKS, RAIL_SECTIONS};

/// Bits for the number of units, as an index in [`COUNTS`].
const COUNT_BITS: u32 = 4;
/// The numbers of units that a put may have. If a rank has few tokens, each unit is one token, so a put of 1 MiB has many
/// units.
const COUNTS: [usize; 1 << COUNT_BITS] = [1, 2, 3, 4, 6, 8, 12, 16, 24, 32, 48, 64, 96, 128, 192, 256];
/// The last unit lies above the number of units.
const LAST_SHIFT: u32 = COUNT_BITS;
/// The section lies above the last unit. 0 stands for the plan.
const SECTION_SHIFT: u32 = 14;
/// The parity of the epoch is the highest bit.
const PARITY_SHIFT: u32 = 16;

/// Maximum number of units of one put.
pub(super) const MOST_UNITS: usize = COUNTS[COUNTS.len() - 1];

/// The largest number of units that a put may have, at most `units`, which is not 0.
pub(super) fn units_of_a_put(units: usize) -> usize {
    COUNTS[COUNTS.partition_point(|&count| count <= units) - 1]
}

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
    /// Indices of the units, below [`MAX_CHUNKS`]. Their number is one of [`COUNTS`].
    pub(super) units: Range<usize>,
}

impl Arrival {
    /// The signal of this arrival.
    pub(super) fn signal(&self) -> Signal {
        let below = match &self.what {
            What::Plan => 0,
            What::Part(Part { section, units }) => {
                let count = COUNTS
                    .binary_search(&units.len())
                    .expect("the sender cuts a `Part` to a length in `COUNTS`");
                (section + 1) << SECTION_SHIFT | (units.end - 1) << LAST_SHIFT | count
            }
        };
        Signal::new((self.parity << PARITY_SHIFT | below) as u32)
            .expect("parity, section, unit and count fill 17 bits")
    }

    /// The arrival that a signal stands for; `None` for a signal that no proxy sends.
    pub(super) fn of(signal: Signal) -> Option<Self> {
        let bits = |shift: u32, end: u32| (signal.word() as usize >> shift) & ((1 << (end - shift)) - 1);
        let (count, last) = (COUNTS[bits(0, COUNT_BITS)], bits(LAST_SHIFT, SECTION_SHIFT));
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
                assert_eq!(units_of_a_put(units.len()), units.len());
            }
            valid += 1;
        }
        let parts: usize = COUNTS.iter().map(|count| MAX_CHUNKS - (count - 1)).sum();
        assert_eq!(valid, 2 * (1 + RAIL_SECTIONS * parts));
    }

    #[test]
    fn a_put_has_at_least_two_thirds_of_the_units_up_to_the_most() {
        for units in 1..2 * MOST_UNITS {
            let count = units_of_a_put(units);
            assert!(count <= units && 3 * count > 2 * units.min(MOST_UNITS), "{units}: {count}");
        }
    }

    #[test]
    fn the_bits_are_those_of_the_design() {
        let part = What::Part(Part { section: 1, units: 3..9 });
        assert_eq!(Arrival { parity: 1, what: part }.signal().word(), 1 << 16 | 2 << 14 | 8 << 4 | 4);
        assert_eq!(Arrival { parity: 1, what: What::Plan }.signal().word(), 1 << 16);
    }
}
