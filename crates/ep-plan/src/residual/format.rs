//! The formats of indices and values, and what they cost in bytes.
//!
//! P weights are cut into blocks of 65,536; k entries are kept in all, with `b_v` bytes of value each. A stream is
//! [`HEADER_BYTES`] of header and a payload:
//!
//! | format | payload, bytes |
//! |---|---|
//! | `U32` | `4 + k (4 + b_v)` |
//! | `U16` | `4 + 4 ceil(P / 65536) + k (2 + b_v)` |
//! | `Rice` | `4 + 6 ceil(P / 65536) + codes + k b_v`, codes about `P H(k/P) / 8` |
//! | any, `Bf16Rice` | 6 per block and the codes in the place of `k b_v` |
//!
//! The leading 4 bytes are the number of entries, which is all the header that the usual formulas for the first two
//! count: a stream is [`HEADER_BYTES`] longer. `H(d)` is the entropy of an event of probability d, in bits.
//!
//! Rice codes were chosen over one byte for each gap, with an escape for long ones, by their size: 8.1 against 8.6 bits
//! an entry at 1% density, 5.8 against 8.0 at 5%, 11.5 against 20 at 0.1%.

use ep::Element;

use super::rice::MAX_PARAMETER;

/// Bytes before the payload: magic, version, formats, lengths, the shared expert's fingerprint and the checksum.
pub const HEADER_BYTES: u64 = 40;

/// Weights of a block: as many as a 16-bit position can name.
pub const BLOCK: usize = 1 << 16;

/// How the indices of kept residuals are written.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
#[non_exhaustive]
pub enum IndexFormat {
    /// 32 bits each, ascending.
    U32,
    /// 16 bits each, the position in a block, and a count for each block.
    U16,
    /// The gap to the entry before it in a Rice code, with the best parameter for each block. The smallest: 8.1 bits
    /// an entry at 1% density, where the entropy limit for indices spread at random is 8.08.
    Rice,
}

/// How the values of kept residuals are written.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
#[non_exhaustive]
pub enum ValueFormat {
    /// As they are.
    F32,
    /// Rounded to bf16 (nearest even).
    Bf16,
    /// The same values as `Bf16` in fewer bytes: the sign, and the Rice code of the magnitude's distance, in bf16
    /// steps, from the smallest that is kept in the block. The largest residuals of a block lie within a few octaves,
    /// and most near the smallest of them: 7 to 8 bits are usual.
    Bf16Rice,
}

/// How kept residuals are written.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub struct Format {
    /// Their indices.
    pub index: IndexFormat,
    /// Their values.
    pub value: ValueFormat,
}

impl Format {
    /// The fewest bytes for bf16 values.
    pub const SMALLEST: Self = Self { index: IndexFormat::Rice, value: ValueFormat::Bf16Rice };

    /// Whether the number of bytes follows from P and k alone.
    pub fn is_fixed_size(self) -> bool {
        self.index != IndexFormat::Rice && self.value != ValueFormat::Bf16Rice
    }

    /// Bytes of a stream with k of P residuals, header included: exactly so many where the format
    /// [is of a fixed size](Self::is_fixed_size), else never more. What a receive buffer needs.
    pub fn max_bytes(self, elements: usize, k: usize) -> u64 {
        let (elements, k) = (elements as u64, k.min(elements) as u64);
        let blocks = elements.div_ceil(BLOCK as u64);
        // Each block's codes fill up a byte; a block without entries has none.
        let filling = blocks.min(k);
        let indices = match self.index {
            IndexFormat::U32 => 4 * k,
            IndexFormat::U16 => 4 * blocks + 2 * k,
            // The gaps of a block are at most the entries that are not kept; the best parameter of each block is at
            // least as good as any one for all of them.
            IndexFormat::Rice => 6 * blocks + filling + rice_bits(k, elements - k) / 8,
        };
        let values = match self.value {
            ValueFormat::F32 => 4 * k,
            ValueFormat::Bf16 => 2 * k,
            ValueFormat::Bf16Rice => 6 * blocks + filling + k * u64::from(MAX_PARAMETER + 1) / 8,
        };
        HEADER_BYTES + 4 + indices + values
    }

    /// The largest k for which a stream is at most so many bytes, whatever the weights; `None` if not even 0.
    pub fn largest_k(self, elements: usize, bytes: u64) -> Option<usize> {
        if self.max_bytes(elements, 0) > bytes {
            return None;
        }
        // By bisection: one more entry never needs fewer bytes.
        let (mut fits, mut over) = (0, elements + 1);
        while over - fits > 1 {
            let middle = fits.midpoint(over);
            if self.max_bytes(elements, middle) <= bytes { fits = middle } else { over = middle }
        }
        Some(fits)
    }

    /// Bits of one entry at density `d = k / P`, 0 < d < 1, without what is per block or stream, for indices that are
    /// spread evenly at random. `Bf16Rice`, whose bits depend on the values, counts as the 16 of `Bf16`.
    pub fn entry_bits(self, density: f64) -> f64 {
        let index = match self.index {
            IndexFormat::U32 => 32.0,
            IndexFormat::U16 => 16.0,
            // A geometric gap g with parameter b: b + 1 + E[g >> b], where P(g >= 2^b) = (1 - d)^(2^b).
            IndexFormat::Rice => (0..=MAX_PARAMETER)
                .map(|b| f64::from(b) + 1.0 / (1.0 - (1.0 - density).powi(1 << b)))
                .fold(f64::INFINITY, f64::min),
        };
        let value = match self.value {
            ValueFormat::F32 => 32.0,
            ValueFormat::Bf16 | ValueFormat::Bf16Rice => 16.0,
        };
        index + value
    }

    /// The density at which the dense weights have `ratio` times the bits of the entries: the compression ratio CR is
    /// bytes over bytes, `CR = bits of a weight / (d entry_bits(d))`. (P / k overstates it by 2 to 3 times.)
    pub fn density_for_ratio(self, element: Element, ratio: f64) -> f64 {
        let weight_bits = 8.0 * element.bytes() as f64;
        // Bits per weight grow with the density.
        let (mut low, mut high) = (0.0, 1.0);
        for _ in 0..60 {
            let density = f64::midpoint(low, high);
            if density * self.entry_bits(density) * ratio <= weight_bits {
                low = density
            } else {
                high = density
            }
        }
        low
    }
}

/// The most bits that `count` numbers of a given sum can have with one parameter, the best.
fn rice_bits(count: u64, sum: u64) -> u64 {
    (0..=MAX_PARAMETER).map(|b| count * u64::from(b + 1) + (sum >> b)).min().unwrap_or_default()
}

#[cfg(test)]
mod tests {
    use super::*;
    use IndexFormat::{Rice, U16, U32};
    use ValueFormat::{Bf16, Bf16Rice, F32};

    fn format(index: IndexFormat, value: ValueFormat) -> Format {
        Format { index, value }
    }

    #[test]
    fn payloads_by_the_formulas() {
        let payload = |index, value, elements, k| format(index, value).max_bytes(elements, k) - HEADER_BYTES;
        assert_eq!(payload(U32, F32, 4_718_592, 47_185), 377_484);
        assert_eq!(payload(U32, Bf16, 44_040_192, 293_601), 1_761_610);
        assert_eq!(payload(U16, F32, 4_718_592, 47_185), 4 + 4 * 72 + 47_185 * 6);
        assert_eq!(payload(U16, Bf16, 65_537, 1), 4 + 4 * 2 + 4);
        assert_eq!(payload(U32, F32, 0, 0), 4);
    }

    #[test]
    fn density_for_a_ratio_of_50() {
        for (element, index, value, percent) in [
            (Element::F32, U32, F32, 1.000),
            (Element::F32, U16, F32, 1.333),
            (Element::Bf16, U32, Bf16, 0.667),
            (Element::Bf16, U16, Bf16, 1.000),
            (Element::Bf16, Rice, Bf16, 1.349),
        ] {
            let density = 100.0 * format(index, value).density_for_ratio(element, 50.0);
            assert!((density - percent).abs() < 0.0006, "{element:?} {index:?} {value:?}: {density}%");
        }
        let rice_bits = format(Rice, Bf16).entry_bits(0.01349) - 16.0;
        assert!((rice_bits - 7.72).abs() < 0.005, "{rice_bits}");
    }

    #[test]
    fn largest_k_is_the_last_that_fits() {
        for index in [U32, U16, Rice] {
            for value in [F32, Bf16, Bf16Rice] {
                let format = format(index, value);
                for elements in [0, 1, 1000, 200_000] {
                    for bytes in [0, 43, 44, 60, 1000, 30_000, 10_000_000] {
                        let Some(k) = format.largest_k(elements, bytes) else {
                            assert!(format.max_bytes(elements, 0) > bytes);
                            continue;
                        };
                        assert!(format.max_bytes(elements, k) <= bytes);
                        assert!(k == elements || format.max_bytes(elements, k + 1) > bytes, "{format:?} {k}");
                    }
                }
            }
        }
    }
}
