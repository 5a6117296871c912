//! The forms of rows: as the caller has them, and as they cross from rank to rank.

use crate::error::{CallerError, Result};
use crate::numeric::ScaleFormat;

/// Element type of expert outputs and combined tokens, or of sums that cross from rank to rank.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub enum Element {
    /// bfloat16.
    Bf16,
    /// IEEE single precision.
    F32,
}

impl Element {
    /// Bytes of one element.
    pub fn bytes(self) -> usize {
        match self {
            Self::Bf16 => 2,
            Self::F32 => 4,
        }
    }

    /// Bytes of a row of `hidden` elements. The product saturates at `usize::MAX`, which [`check_row_bytes`] rejects.
    pub fn row_bytes(self, hidden: usize) -> usize {
        hidden.saturating_mul(self.bytes())
    }
}

/// Element types of dispatch's input and output tokens.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub enum TokenFormat {
    /// bf16 in, bf16 out.
    Bf16,
    /// f32 in, f32 out.
    F32,
    /// FP8 e4m3 with scales in; the same codes and scales out.
    Fp8(ScaleFormat),
    /// bf16 in; FP8 e4m3 with scales out. The source rank quantises each token once, by
    /// [`quantize_row`](crate::numeric::quantize_row).
    QuantizeFp8(ScaleFormat),
}

impl TokenFormat {
    /// Bytes of one input row of `hidden` elements, without scales. Saturates at `usize::MAX`, which
    /// [`check_row_bytes`] rejects.
    pub fn input_row_bytes(self, hidden: usize) -> usize {
        match self {
            Self::Bf16 | Self::QuantizeFp8(_) => Element::Bf16.row_bytes(hidden),
            Self::F32 => Element::F32.row_bytes(hidden),
            Self::Fp8(_) => hidden,
        }
    }

    /// Bytes of one output row of `hidden` elements, without scales. Rows cross from rank to rank in this form.
    /// Saturates at `usize::MAX`, as [`input_row_bytes`](Self::input_row_bytes) does.
    pub fn output_row_bytes(self, hidden: usize) -> usize {
        match self {
            Self::Bf16 => Element::Bf16.row_bytes(hidden),
            Self::F32 => Element::F32.row_bytes(hidden),
            Self::Fp8(_) | Self::QuantizeFp8(_) => hidden,
        }
    }

    /// A number that is equal for formats whose rows and scales cross from rank to rank in the same form.
    ///
    /// Ranks of one dispatch may mix [`Fp8`](Self::Fp8) and [`QuantizeFp8`](Self::QuantizeFp8) of one scale format.
    pub fn link_code(self) -> u64 {
        LinkFormat::of(self) as u64
    }

    /// The name of a [`link_code`](Self::link_code), for messages. A peer may send any number, so unknown codes have a
    /// name too.
    pub fn link_name(code: u64) -> String {
        let known = LinkFormat::ALL.into_iter().find(|&format| format as u64 == code);
        known.map_or_else(|| format!("unknown ({code})"), |format| format.name().into())
    }

    /// Format of an output row's scales; `None` without scales.
    pub fn scales(self) -> Option<ScaleFormat> {
        match self {
            Self::Bf16 | Self::F32 => None,
            Self::Fp8(format) | Self::QuantizeFp8(format) => Some(format),
        }
    }

    /// Bytes of the scales of one input row of `hidden` elements; 0 unless the format is [`Fp8`](Self::Fp8).
    pub fn input_scale_row_bytes(self, hidden: usize) -> usize {
        match self {
            Self::Fp8(format) => format.bytes_per_row(hidden),
            Self::Bf16 | Self::F32 | Self::QuantizeFp8(_) => 0,
        }
    }

    /// Bytes of the scales of one output row of `hidden` elements; 0 without scales.
    pub fn scale_row_bytes(self, hidden: usize) -> usize {
        self.scales().map_or(0, |format| format.bytes_per_row(hidden))
    }
}

/// The forms in which rows cross from rank to rank. The number of a form is its [`TokenFormat::link_code`].
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum LinkFormat {
    Bf16,
    F32,
    Fp8F32Per128,
    Fp8Ue8m0Per128,
    Fp8Ue8m0Per32,
}

impl LinkFormat {
    const ALL: [Self; 5] =
        [Self::Bf16, Self::F32, Self::Fp8F32Per128, Self::Fp8Ue8m0Per128, Self::Fp8Ue8m0Per32];

    /// The form of a format's rows. No wildcard: a new format must not share the code of another one by accident.
    fn of(format: TokenFormat) -> Self {
        match format {
            TokenFormat::Bf16 => Self::Bf16,
            TokenFormat::F32 => Self::F32,
            TokenFormat::Fp8(scales) | TokenFormat::QuantizeFp8(scales) => match scales {
                ScaleFormat::F32Per128 => Self::Fp8F32Per128,
                ScaleFormat::Ue8m0Per128 => Self::Fp8Ue8m0Per128,
                ScaleFormat::Ue8m0Per32 => Self::Fp8Ue8m0Per32,
            },
        }
    }

    fn name(self) -> &'static str {
        match self {
            Self::Bf16 => "bf16",
            Self::F32 => "f32",
            Self::Fp8F32Per128 => "FP8 with an f32 scale per 128 elements",
            Self::Fp8Ue8m0Per128 => "FP8 with a ue8m0 scale per 128 elements",
            Self::Fp8Ue8m0Per32 => "FP8 with a ue8m0 scale per 32 elements",
        }
    }
}

/// Maximum size of a row, in bytes. 2^32 rows of this size (row numbers have 32 bits) still fit in a 64-bit address space.
pub const MAX_ROW_BYTES: usize = 1 << 30;

/// Checks the size of a row: a multiple of 16 bytes, not 0, at most [`MAX_ROW_BYTES`]. `hidden`, the row's number of
/// elements, appears in the error only.
///
/// # Errors
/// [`CallerError::Hidden`] when the size is not allowed.
pub fn check_row_bytes(hidden: usize, bytes: usize) -> Result<()> {
    if bytes == 0 || bytes > MAX_ROW_BYTES || !bytes.is_multiple_of(16) {
        return Err(CallerError::Hidden { hidden, bytes }.into());
    }
    Ok(())
}

#[cfg(test)]
mod tests {
    use std::collections::BTreeSet;
    use std::iter::successors;

    use super::*;

    #[test]
    fn rows_are_positive_multiples_of_16_bytes_up_to_the_limit() {
        for bytes in [16, 32, MAX_ROW_BYTES] {
            assert_eq!(check_row_bytes(8, bytes), Ok(()), "{bytes}");
        }
        for bytes in [0, 8, 24, MAX_ROW_BYTES + 16] {
            let error = CallerError::Hidden { hidden: 8, bytes };
            assert_eq!(check_row_bytes(8, bytes), Err(error.into()), "{bytes}");
        }
    }

    /// Every format. The matches have no wildcard, so a new format must be added here.
    fn formats() -> impl Iterator<Item = TokenFormat> {
        let next_scales = |scales| match scales {
            ScaleFormat::F32Per128 => Some(ScaleFormat::Ue8m0Per128),
            ScaleFormat::Ue8m0Per128 => Some(ScaleFormat::Ue8m0Per32),
            ScaleFormat::Ue8m0Per32 => None,
        };
        let first = ScaleFormat::F32Per128;
        successors(Some(TokenFormat::Bf16), move |&format| match format {
            TokenFormat::Bf16 => Some(TokenFormat::F32),
            TokenFormat::F32 => Some(TokenFormat::Fp8(first)),
            TokenFormat::Fp8(scales) => {
                next_scales(scales).map(TokenFormat::Fp8).or(Some(TokenFormat::QuantizeFp8(first)))
            }
            TokenFormat::QuantizeFp8(scales) => next_scales(scales).map(TokenFormat::QuantizeFp8),
        })
    }

    #[test]
    fn formats_have_one_link_code_exactly_if_their_rows_cross_in_the_same_form() {
        for one in formats() {
            for other in formats() {
                let quantised = |format| match format {
                    TokenFormat::Fp8(scales) => TokenFormat::QuantizeFp8(scales),
                    format => format,
                };
                let same_form = quantised(one) == quantised(other);
                assert_eq!(one.link_code() == other.link_code(), same_form, "{one:?}, {other:?}");
            }
        }
    }

    #[test]
    fn every_link_code_has_its_own_name() {
        let codes: BTreeSet<u64> = formats().map(TokenFormat::link_code).collect();
        assert_eq!(codes, (0..LinkFormat::ALL.len() as u64).collect());
        let names: BTreeSet<String> = codes.iter().map(|&code| TokenFormat::link_name(code)).collect();
        assert_eq!(names.len(), codes.len(), "{names:?}");
        assert!(!names.iter().any(|name| name.starts_with("unknown")), "{names:?}");
        assert_eq!(TokenFormat::link_name(u64::MAX), format!("unknown ({})", u64::MAX));
    }
}
