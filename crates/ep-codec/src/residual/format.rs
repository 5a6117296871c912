//! The formats of indices and values, and their sizes in bytes.
//!
//! P weights are divided into blocks of 65,536. A stream holds k entries (kept residuals) in all, with `b_v` bytes per
//! value. It consists of a header of [`HEADER_BYTES`] and a payload:
//!
//! | format | payload, bytes |
//! |---|---|
//! | `U32` | `4 + k (4 + b_v)` |
//! | `U16` | `4 + 4 ceil(P / 65536) + k (2 + b_v)` |
//! | `Rice` | `4 + 6 ceil(P / 65536) + codes + k b_v`, with codes of about `P H(k/P) / 8` |
//! | any, with `Bf16Rice` values | 6 per block plus the codes, instead of `k b_v` |
//!
//! The leading 4 bytes are the number of entries. The usual formulas for `U32` and `U16` count no other header, so a
//! stream is [`HEADER_BYTES`] longer than they say. `H(d)` is the entropy of an event of probability d, in bits.
//!
//! Rice codes are smaller than the alternative, one byte per gap with an escape for long gaps: 8.1 against 8.6 bits per
//! entry at 1% density, 5.8 against 8.0 at 5%, 11.5 against 20 at 0.1%.

use ep::Element;

use super::rice::MAX_PARAMETER;
use crate::stream::HEADER_BYTES;

/// Weights of a block: the number of positions that 16 bits can address.
pub const BLOCK: usize = 1 << 16;

/// The encoding of the indices of kept residuals.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
#[non_exhaustive]
pub enum IndexFormat {
    /// The index in 32 bits per entry, ascending.
    U32,
    /// The position inside the block in 16 bits per entry, and a count per block.
    U16,
    /// The gap to the previous entry as a Rice code, with the best parameter of each block. This format is the
    /// smallest: 8.1 bits per entry at 1% density, where the entropy limit for uniformly random indices is 8.08.
    Rice,
}

/// The encoding of the values of kept residuals.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
#[non_exhaustive]
pub enum ValueFormat {
    /// f32, without rounding.
    F32,
    /// Rounded to bf16, to nearest, ties to even.
    Bf16,
    /// The values of `Bf16` in fewer bytes: the sign, and a Rice code of the magnitude's distance, in steps of bf16,
    /// from the smallest kept magnitude of the block. A value usually takes 7 to 8 bits, because the kept residuals of
    /// a block lie within a few octaves and most are near the smallest.
    Bf16Rice,
}

/// The encoding of kept residuals.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub struct Format {
    /// Encoding of the indices.
    pub index: IndexFormat,
    /// Encoding of the values.
    pub value: ValueFormat,
}

impl Format {
    /// The smallest format: Rice-coded indices and bf16 values.
    pub const SMALLEST: Self = Self { index: IndexFormat::Rice, value: ValueFormat::Bf16Rice };

    /// Whether the size of a stream depends on P and k alone, not on the weights.
    pub fn is_fixed_size(self) -> bool {
        self.index != IndexFormat::Rice && self.value != ValueFormat::Bf16Rice
    }

    /// The size in bytes, header included, of a stream with k of P residuals (`elements` is P). It is exact if the
    /// format [has a fixed size](Self::is_fixed_size), otherwise an upper bound. Receive buffers need this size. A size
    /// above `u64::MAX`, which no real expert has, is reported as `u64::MAX`.
    pub fn max_bytes(self, elements: usize, k: usize) -> u64 {
        self.bytes(elements, k).try_into().unwrap_or(u64::MAX)
    }

    /// Like [`max_bytes`](Self::max_bytes), as a u128: no number of elements makes these sums overflow.
    fn bytes(self, elements: usize, k: usize) -> u128 {
        let (elements, k) = (elements as u128, k.min(elements) as u128);
        let blocks = elements.div_ceil(BLOCK as u128);
        // The codes of each block are padded to whole bytes; a block without entries has no codes.
        let filling = blocks.min(k);
        let indices = match self.index {
            IndexFormat::U32 => 4 * k,
            IndexFormat::U16 => 4 * blocks + 2 * k,
            // The gaps of a block add up to at most its dropped residuals. The best parameter of each block is at least
            // as good as any common parameter.
            IndexFormat::Rice => 6 * blocks + filling + rice_bits(k, elements - k) / 8,
        };
        let values = match self.value {
            ValueFormat::F32 => 4 * k,
            ValueFormat::Bf16 => 2 * k,
            ValueFormat::Bf16Rice => 6 * blocks + filling + k * u128::from(MAX_PARAMETER + 1) / 8,
        };
        u128::from(HEADER_BYTES) + 4 + indices + values
    }

    /// The largest k for which a stream of P residuals (`elements`) never exceeds `bytes`, for any weights. `None` if
    /// not even an empty stream fits.
    pub fn largest_k(self, elements: usize, bytes: u64) -> Option<usize> {
        let fits = |k| self.bytes(elements, k) <= u128::from(bytes);
        if !fits(0) || fits(elements) {
            return fits(0).then_some(elements);
        }
        // Bisection is valid because one more entry never takes fewer bytes.
        let (mut last, mut over) = (0, elements);
        while over - last > 1 {
            let middle = last.midpoint(over);
            if fits(middle) { last = middle } else { over = middle }
        }
        Some(last)
    }

    /// Bits per entry at density `d = k / P`, with 0 < d < 1, for uniformly random indices, without the bytes per block
    /// and per stream. `Bf16Rice` counts as the 16 bits of `Bf16`, because its size depends on the values.
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

    /// The density `d = k / P` that gives the compression ratio `ratio`. The ratio is bytes of the dense weights over
    /// bytes of the entries: `CR = bits of a weight / (d entry_bits(d))`. (P / k overstates CR by a factor of 2 to 3.)
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

/// Maximum number of bits of the Rice codes of `count` numbers with this sum, under the best common parameter.
fn rice_bits(count: u128, sum: u128) -> u128 {
    (0..=MAX_PARAMETER).map(|b| count * u128::from(b + 1) + (sum >> b)).min().unwrap_or_default()
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
    fn payload_sizes_follow_the_formulas() {
        let payload = |index, value, elements, k| format(index, value).max_bytes(elements, k) - HEADER_BYTES;
        assert_eq!(payload(U32, F32, 4_718_592, 47_185), 377_484);
        assert_eq!(payload(U32, Bf16, 44_040_192, 293_601), 1_761_610);
        assert_eq!(payload(U16, F32, 4_718_592, 47_185), 4 + 4 * 72 + 47_185 * 6);
        assert_eq!(payload(U16, Bf16, 65_537, 1), 4 + 4 * 2 + 4);
        assert_eq!(payload(U32, F32, 0, 0), 4);
    }

    #[test]
    fn formats_without_rice_codes_have_a_fixed_size() {
        for (index, value, fixed) in [
            (U32, F32, true),
            (U16, Bf16, true),
            (Rice, F32, false),
            (U16, Bf16Rice, false),
            (Rice, Bf16Rice, false),
        ] {
            assert_eq!(format(index, value).is_fixed_size(), fixed, "{index:?}, {value:?}");
        }
    }

    #[test]
    fn a_ratio_of_50_gives_the_expected_densities() {
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
    fn sizes_of_impossible_experts_saturate() {
        for index in [U32, U16, Rice] {
            for value in [F32, Bf16, Bf16Rice] {
                let format = format(index, value);
                assert_eq!(format.max_bytes(usize::MAX, usize::MAX), u64::MAX, "{format:?}");
                let k = format.largest_k(usize::MAX, 1 << 60).unwrap();
                assert!(format.max_bytes(usize::MAX, k) <= 1 << 60, "{format:?}");
                assert!(format.max_bytes(usize::MAX, k + 1) > 1 << 60, "{format:?}");
                // A size beyond u64 exceeds every bound.
                assert!(format.largest_k(usize::MAX, u64::MAX).is_some_and(|k| k < usize::MAX), "{format:?}");
            }
        }
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
