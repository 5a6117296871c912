//! The definition of every rounding in this library: bf16, FP8 E4M3 and its scales.
//!
//! Each function is the plain scalar form of an operation and is not meant to be fast. Vectorised code
//! on the host and kernels on an accelerator must give the same bits for every input, so that a result
//! does not depend on where it was computed.
//!
//! Two conventions hold throughout:
//!
//! * Rounding is to nearest, ties to even. Subnormal numbers are neither read nor written as zero.
//! * NaN payloads are not kept: every NaN becomes the canonical NaN of the destination type, `0x7FFF`
//!   in bf16, `0x7FFF_FFFF` in f32 and `0x7F` in E4M3.

/// The canonical bf16 NaN, as CUDA's `cvt.rn.bf16.f32` gives it.
pub const BF16_NAN: u16 = 0x7FFF;

/// The canonical f32 NaN, as bits.
pub const F32_NAN_BITS: u32 = 0x7FFF_FFFF;

/// The canonical E4M3 NaN (the format's other NaN is `0xFF`).
pub const E4M3_NAN: u8 = 0x7F;

/// The largest finite E4M3 value.
pub const E4M3_MAX: f32 = 448.0;

/// The lower bound of a block's `amax`, so that the scale of a block of zeros is not zero.
pub const AMAX_FLOOR: f32 = 1e-4;

/// Widens bf16 bits to f32. Exact. A NaN keeps its payload, as it does on a GPU, where widening is a shift.
#[inline]
#[must_use]
pub const fn bf16_to_f32(bits: u16) -> f32 {
    f32::from_bits((bits as u32) << 16)
}

/// Rounds to bf16 bits: nearest even, subnormals kept, overflow to infinity, every NaN to
/// [`BF16_NAN`].
#[inline]
#[must_use]
pub const fn f32_to_bf16(value: f32) -> u16 {
    if value.is_nan() {
        return BF16_NAN;
    }
    let bits = value.to_bits();
    // Add just under half a unit of the last kept place, plus that place's bit: a tie then carries
    // exactly when the kept part is odd. A carry into the exponent is correct, and a carry from the
    // largest finite exponent gives infinity. Infinity has no lower bits, so it does not change.
    let tie = (bits >> 16) & 1;
    ((bits + 0x7FFF + tie) >> 16) as u16
}

/// Every NaN becomes the NaN of [`F32_NAN_BITS`]; any other value is unchanged.
#[inline]
#[must_use]
pub const fn canonical_f32(value: f32) -> f32 {
    if value.is_nan() { f32::from_bits(F32_NAN_BITS) } else { value }
}

/// Rounds to OCP FP8 E4M3, as CUDA's `cvt.rn.satfinite.e4m3x2.f32` does: nearest even including
/// subnormals, values beyond ±448 (infinity too) saturate to ±448, every NaN becomes [`E4M3_NAN`].
#[inline]
#[must_use]
pub fn f32_to_e4m3(value: f32) -> u8 {
    if value.is_nan() {
        return E4M3_NAN;
    }
    let sign = if value.is_sign_negative() { 0x80 } else { 0 };
    let magnitude = value.abs().min(E4M3_MAX);
    let code = if magnitude < 1.0 / 64.0 {
        // Below 2^-6, codes count steps of 2^-9. The product is exact. A result of 8 is the code of
        // 2^-6, so rounding up to the smallest normal value is correct too.
        (magnitude * 512.0).round_ties_even() as u8
    } else {
        // Keep 3 of 23 mantissa bits as in `f32_to_bf16`, then change the exponent's bias from 127
        // to 7. The largest magnitude, 448, has a code, so no carry exceeds it.
        let bits = magnitude.to_bits();
        let tie = (bits >> 20) & 1;
        (((bits + 0x7_FFFF + tie) >> 20) - ((127 - 7) << 3)) as u8
    };
    sign | code
}

/// Widens an E4M3 code to f32. Exact; both NaN codes give the canonical f32 NaN.
#[inline]
#[must_use]
pub fn e4m3_to_f32(code: u8) -> f32 {
    let sign = if code & 0x80 == 0 { 1.0 } else { -1.0 };
    let exponent = u32::from(code >> 3) & 0xF;
    let mantissa = u32::from(code & 7);
    let magnitude = if code & 0x7F == 0x7F {
        return f32::from_bits(F32_NAN_BITS);
    } else if exponent == 0 {
        mantissa as f32 / 512.0
    } else {
        f32::from_bits((exponent + (127 - 7)) << 23 | mantissa << 20)
    };
    sign * magnitude
}

/// The format of the scales of a row of E4M3 codes.
///
/// A row of `hidden` values consists of blocks of [`block`](Self::block) values; the last block may be
/// shorter. Each block has one scale, and a value is its code times the scale of its block.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
#[non_exhaustive]
pub enum ScaleFormat {
    /// One f32 (little-endian) for each 128 values.
    F32Per128,
    /// One power of two for each 128 values, as its biased f32 exponent in one byte (UE8M0).
    Ue8m0Per128,
    /// One power of two for each 32 values, as its biased f32 exponent in one byte (MXFP8).
    Ue8m0Per32,
}

impl ScaleFormat {
    /// Values that share a scale.
    #[inline]
    #[must_use]
    pub const fn block(self) -> usize {
        match self {
            Self::F32Per128 | Self::Ue8m0Per128 => 128,
            Self::Ue8m0Per32 => 32,
        }
    }

    /// Bytes of one stored scale.
    #[inline]
    #[must_use]
    pub const fn bytes_per_scale(self) -> usize {
        match self {
            Self::F32Per128 => 4,
            Self::Ue8m0Per128 | Self::Ue8m0Per32 => 1,
        }
    }

    /// Scales of a row of `hidden` values.
    #[inline]
    #[must_use]
    pub const fn scales_per_row(self, hidden: usize) -> usize {
        hidden.div_ceil(self.block())
    }

    /// Bytes of the scales of a row of `hidden` values.
    #[inline]
    #[must_use]
    pub const fn bytes_per_row(self, hidden: usize) -> usize {
        self.scales_per_row(hidden) * self.bytes_per_scale()
    }

    /// The scale of a block whose largest magnitude is `amax` (not NaN, not negative).
    ///
    /// It is `max(amax, 1e-4) / 448` in f32, the cast common in PyTorch code
    /// (`amax.clamp(1e-4) / 448`); the UE8M0 formats round that up to a power of two and keep it
    /// within `2^-126 ..= 2^127`.
    ///
    /// The formula holds for an infinite `amax` too. The f32 scale is then infinite: each finite value
    /// of the block becomes a zero code, each infinity a NaN code, and all of them dequantise to NaN.
    /// A UE8M0 scale stops at `2^127`: finite values stay meaningful and infinities saturate.
    #[inline]
    #[must_use]
    pub fn scale_for(self, amax: f32) -> f32 {
        let scale = amax.max(AMAX_FLOOR) / E4M3_MAX;
        match self {
            Self::F32Per128 => scale,
            Self::Ue8m0Per128 | Self::Ue8m0Per32 => {
                let bits = scale.to_bits();
                let above = u32::from(bits & 0x7F_FFFF != 0);
                f32::from_bits(((bits >> 23) + above).clamp(1, 254) << 23)
            }
        }
    }

    /// Stores a scale that [`scale_for`](Self::scale_for) gave.
    ///
    /// # Panics
    /// When `bytes` is not [`bytes_per_scale`](Self::bytes_per_scale) long.
    #[inline]
    pub fn store_scale(self, scale: f32, bytes: &mut [u8]) {
        match self {
            Self::F32Per128 => bytes.copy_from_slice(&scale.to_le_bytes()),
            Self::Ue8m0Per128 | Self::Ue8m0Per32 => {
                bytes.copy_from_slice(&[(scale.to_bits() >> 23) as u8]);
            }
        }
    }

    /// Loads a scale from its [`bytes_per_scale`](Self::bytes_per_scale) bytes.
    ///
    /// UE8M0 bytes that [`store_scale`](Self::store_scale) never writes have their OCP meaning: 0
    /// is `2^-127`, 255 is NaN.
    ///
    /// # Panics
    /// When `bytes` has another length.
    #[inline]
    #[must_use]
    pub fn load_scale(self, bytes: &[u8]) -> f32 {
        match (self, bytes) {
            (Self::F32Per128, &[a, b, c, d]) => f32::from_le_bytes([a, b, c, d]),
            (Self::Ue8m0Per128 | Self::Ue8m0Per32, &[exponent]) => match exponent {
                0 => f32::from_bits(1 << 22),
                255 => f32::from_bits(F32_NAN_BITS),
                _ => f32::from_bits(u32::from(exponent) << 23),
            },
            _ => panic!("{} bytes are not one scale of {self:?}", bytes.len()),
        }
    }
}

/// Quantises one row of `hidden` bf16 values to `hidden` E4M3 codes and their scales.
///
/// Shapes: `row` `[hidden]` bf16 bits, `out` `[hidden]` codes, `scales`
/// [`format.bytes_per_row(hidden)`](ScaleFormat::bytes_per_row) bytes. For each block:
///
/// 1. `amax` is the largest magnitude among the block's values that are not NaN, 0 if there is
///    none;
/// 2. `scale` is [`format.scale_for(amax)`](ScaleFormat::scale_for), and `inverse` is
///    `1.0 / scale`;
/// 3. a code is [`f32_to_e4m3`]`(value * inverse)`.
///
/// # Panics
/// When the lengths do not agree.
pub fn quantize_row(row: &[u16], format: ScaleFormat, out: &mut [u8], scales: &mut [u8]) {
    check_lengths(format, row.len(), out.len(), scales.len());
    let blocks = row.chunks(format.block()).zip(out.chunks_mut(format.block()));
    for ((values, codes), scale_bytes) in blocks.zip(scales.chunks_exact_mut(format.bytes_per_scale())) {
        let amax = values
            .iter()
            .map(|&bits| bf16_to_f32(bits).abs())
            .filter(|magnitude| !magnitude.is_nan())
            .fold(0.0, f32::max);
        let scale = format.scale_for(amax);
        let inverse = 1.0 / scale;
        for (code, &bits) in codes.iter_mut().zip(values) {
            *code = f32_to_e4m3(bf16_to_f32(bits) * inverse);
        }
        format.store_scale(scale, scale_bytes);
    }
}

/// Dequantises one row: writes to `out` `[hidden]` the f32 product of each of `codes` `[hidden]` and
/// its scale, with canonical NaN. `scales` has
/// [`format.bytes_per_row(hidden)`](ScaleFormat::bytes_per_row) bytes.
///
/// # Panics
/// When the lengths do not agree.
pub fn dequantize_row(codes: &[u8], scales: &[u8], format: ScaleFormat, out: &mut [f32]) {
    check_lengths(format, out.len(), codes.len(), scales.len());
    let blocks = codes.chunks(format.block()).zip(out.chunks_mut(format.block()));
    for ((codes, values), scale_bytes) in blocks.zip(scales.chunks_exact(format.bytes_per_scale())) {
        let scale = format.load_scale(scale_bytes);
        for (value, &code) in values.iter_mut().zip(codes) {
            *value = canonical_f32(e4m3_to_f32(code) * scale);
        }
    }
}

fn check_lengths(format: ScaleFormat, hidden: usize, codes: usize, scale_bytes: usize) {
    assert_eq!(codes, hidden, "a row of {hidden} values has {codes} codes");
    assert_eq!(
        scale_bytes,
        format.bytes_per_row(hidden),
        "bytes of scales for a row of {hidden} values in {format:?}"
    );
}

#[cfg(test)]
mod tests {
    use super::*;

    /// Pseudorandom 64-bit numbers (splitmix64), the same in every run.
    fn random(seed: u64) -> impl Iterator<Item = u64> {
        let mut state = seed;
        std::iter::repeat_with(move || {
            state = state.wrapping_add(0x9E37_79B9_7F4A_7C15);
            let mut z = state;
            z = (z ^ (z >> 30)).wrapping_mul(0xBF58_476D_1CE4_E5B9);
            z = (z ^ (z >> 27)).wrapping_mul(0x94D0_49BB_1331_11EB);
            z ^ (z >> 31)
        })
    }

    /// The nearest of `candidates` (code, value) by distance in f64, ties to the even code; both
    /// `value` and the candidates are finite and not negative.
    fn nearest(value: f64, candidates: impl Iterator<Item = (u32, f64)>) -> u32 {
        candidates
            .map(|(code, candidate)| ((candidate - value).abs(), code & 1, code))
            .min_by(|a, b| a.partial_cmp(b).expect("finite"))
            .expect("there are candidates")
            .2
    }

    /// E4M3's value from the format's definition, in f64.
    fn e4m3_oracle(code: u8) -> f64 {
        let (exponent, mantissa) = (i32::from(code >> 3 & 15), f64::from(code & 7));
        match exponent {
            0 => mantissa / 8.0 * 2f64.powi(-6),
            _ => (1.0 + mantissa / 8.0) * 2f64.powi(exponent - 7),
        }
    }

    fn to_e4m3_oracle(value: f32) -> u8 {
        if value.is_nan() {
            return 0x7F;
        }
        let magnitude = f64::from(value).abs().min(448.0);
        let code = nearest(magnitude, (0..0x7F).map(|c| (c, e4m3_oracle(c as u8))));
        code as u8 | if value.is_sign_negative() { 0x80 } else { 0 }
    }

    /// bf16's value from the format's definition, in f64. 0x7F80, the code of infinity, counts as 2^128:
    /// values that are nearest to it round to infinity.
    fn bf16_oracle(code: u32) -> f64 {
        let (exponent, mantissa) = ((code >> 7) as i32, f64::from(code & 127));
        match exponent {
            0 => mantissa / 128.0 * 2f64.powi(-126),
            _ => (1.0 + mantissa / 128.0) * 2f64.powi(exponent - 127),
        }
    }

    fn to_bf16_oracle(value: f32) -> u16 {
        if value.is_nan() {
            return 0x7FFF;
        }
        let magnitude = f64::from(value).abs().min(2f64.powi(128));
        // The neighbours of the truncated code are enough, and a search of them all is slow.
        let near = (value.to_bits() & 0x7FFF_FFFF) >> 16;
        let low = near.saturating_sub(2);
        let high = (near + 2).min(0x7F80);
        let code = nearest(magnitude, (low..=high).map(|c| (c, bf16_oracle(c))));
        code as u16 | if value.is_sign_negative() { 0x8000 } else { 0 }
    }

    #[test]
    fn bf16_survives_the_round_trip() {
        for bits in 0..=u16::MAX {
            let value = bf16_to_f32(bits);
            let expected = if value.is_nan() { BF16_NAN } else { bits };
            assert_eq!(f32_to_bf16(value), expected, "{bits:#06x}");
        }
    }

    #[test]
    fn bf16_rounds_as_the_oracle() {
        // Each bf16 with every interesting lower half: exact, around the tie, and the last.
        for high in 0..=u16::MAX {
            for low in [0u32, 1, 0x7FFF, 0x8000, 0x8001, 0xFFFF] {
                let value = f32::from_bits(u32::from(high) << 16 | low);
                assert_eq!(f32_to_bf16(value), to_bf16_oracle(value), "{:#010x}", value.to_bits());
            }
        }
        for bits in random(1).take(1_000_000) {
            let value = f32::from_bits(bits as u32);
            assert_eq!(f32_to_bf16(value), to_bf16_oracle(value), "{:#010x}", value.to_bits());
        }
    }

    #[test]
    fn bf16_by_hand() {
        for (value, bits) in [
            (0x3F80_0000, 0x3F80),
            (0x3F80_8000, 0x3F80), // a tie, down to even
            (0x3F81_8000, 0x3F82), // a tie, up to even
            (0x3F80_8001, 0x3F81),
            (0x7F7F_7FFF, 0x7F7F), // just below the last tie
            (0x7F7F_8000, 0x7F80), // overflow
            (0x7F80_0000, 0x7F80),
            (0xFF80_0000, 0xFF80),
            (0x7F80_0001, 0x7FFF), // a NaN that truncation would make infinite
            (0xFFFF_FFFF, 0x7FFF), // a NaN whose carry would overflow
            (0x8000_0000, 0x8000),
            (0x0000_8000, 0x0000), // half the smallest subnormal
            (0x0000_8001, 0x0001),
            (0x007F_FFFF, 0x0080), // the largest subnormal to the smallest normal
        ] {
            assert_eq!(f32_to_bf16(f32::from_bits(value)), bits, "{value:#010x}");
        }
    }

    #[test]
    fn canonical_f32_changes_nan_only() {
        for bits in [0x7F80_0001, 0x7FC0_0000, 0xFFC0_0000, 0xFF80_0001, 0x7FFF_FFFF] {
            assert_eq!(canonical_f32(f32::from_bits(bits)).to_bits(), F32_NAN_BITS);
        }
        for bits in [0, 0x8000_0000, 1, 0x7F80_0000, 0xFF80_0000, 0x3F80_0000] {
            assert_eq!(canonical_f32(f32::from_bits(bits)).to_bits(), bits);
        }
    }

    #[test]
    fn e4m3_codes_survive_the_round_trip() {
        for code in 0..=u8::MAX {
            let value = e4m3_to_f32(code);
            if code & 0x7F == 0x7F {
                assert_eq!(value.to_bits(), F32_NAN_BITS);
                assert_eq!(f32_to_e4m3(value), E4M3_NAN);
            } else {
                assert_eq!(f64::from(value.abs()), e4m3_oracle(code), "{code:#04x}");
                assert_eq!(value.is_sign_negative(), code & 0x80 != 0);
                assert_eq!(f32_to_e4m3(value), code);
            }
        }
    }

    #[test]
    fn e4m3_rounds_as_the_oracle() {
        let check = |value: f32| {
            assert_eq!(f32_to_e4m3(value), to_e4m3_oracle(value), "{:#010x}", value.to_bits());
        };
        // Around every border between two codes.
        for code in 0..0x7E {
            let tie = f32::midpoint(e4m3_to_f32(code), e4m3_to_f32(code + 1));
            for value in [tie.next_down(), tie, tie.next_up()] {
                check(value);
                check(-value);
            }
        }
        for bits in random(2).take(200_000) {
            // Any bits, and then bits whose exponent is in or near E4M3's range.
            check(f32::from_bits(bits as u32));
            let exponent = 112 + ((bits >> 40) as u32) % 28;
            check(f32::from_bits(bits as u32 & 0x807F_FFFF | exponent << 23));
        }
    }

    #[test]
    fn e4m3_by_hand() {
        for (value, code) in [
            (0.0, 0x00),
            (-0.0, 0x80),
            (1.0, 0x38),
            (-1.0, 0xB8),
            (448.0, 0x7E),
            (464.0, 0x7E), // where a format with a next exponent would round up
            (1e30, 0x7E),
            (f32::INFINITY, 0x7E),
            (f32::NEG_INFINITY, 0xFE),
            (f32::NAN, 0x7F),
            (-f32::NAN, 0x7F),
            (0.015_625, 0x08),        // the smallest normal
            (0.001_953_125, 0x01),    // the smallest subnormal
            (0.000_976_562_5, 0x00),  // half of it, to even
            (-0.000_976_562_5, 0x80), // the sign stays
            (0.002_929_687_5, 0x02),  // 1.5 steps, to even
            (1.0625, 0x38),           // a tie, down to even
            (1.1875, 0x3A),           // a tie, up to even
            (f32::from_bits(1), 0x00),
        ] {
            assert_eq!(f32_to_e4m3(value), code, "{value:e}");
        }
    }

    #[test]
    fn scale_formats_count_their_bytes() {
        for (format, hidden, scales, bytes) in [
            (ScaleFormat::F32Per128, 7168, 56, 224),
            (ScaleFormat::F32Per128, 129, 2, 8),
            (ScaleFormat::Ue8m0Per128, 7168, 56, 56),
            (ScaleFormat::Ue8m0Per32, 7168, 224, 224),
            (ScaleFormat::Ue8m0Per32, 8, 1, 1),
            (ScaleFormat::F32Per128, 0, 0, 0),
            // The largest number that a caller can pass does not overflow.
            (ScaleFormat::F32Per128, usize::MAX, 1 << 57, 1 << 59),
            (ScaleFormat::Ue8m0Per32, usize::MAX, 1 << 59, 1 << 59),
        ] {
            assert_eq!(format.scales_per_row(hidden), scales);
            assert_eq!(format.bytes_per_row(hidden), bytes);
        }
    }

    #[test]
    fn scales_by_hand() {
        use ScaleFormat::{F32Per128, Ue8m0Per32, Ue8m0Per128};
        assert_eq!(F32Per128.scale_for(448.0), 1.0);
        assert_eq!(F32Per128.scale_for(0.0), 1e-4 / 448.0);
        assert_eq!(F32Per128.scale_for(f32::INFINITY), f32::INFINITY);
        for format in [Ue8m0Per128, Ue8m0Per32] {
            assert_eq!(format.scale_for(448.0), 1.0); // an exact power of two stays
            assert_eq!(format.scale_for(448.0f32.next_up()), 2.0); // the next f32 rounds up
            assert_eq!(format.scale_for(3.0), 2f32.powi(-7));
            assert_eq!(format.scale_for(0.0), 2f32.powi(-22));
            assert_eq!(format.scale_for(f32::INFINITY), 2f32.powi(127));
            let mut byte = [0];
            format.store_scale(1.0, &mut byte);
            assert_eq!(byte, [127]);
            assert_eq!(format.load_scale(&[254]), 2f32.powi(127));
            assert_eq!(format.load_scale(&[0]), 2f32.powi(-127));
            assert!(format.load_scale(&[255]).is_nan());
        }
    }

    const FORMATS: [ScaleFormat; 3] =
        [ScaleFormat::F32Per128, ScaleFormat::Ue8m0Per128, ScaleFormat::Ue8m0Per32];

    fn quantized(row: &[u16], format: ScaleFormat) -> (Vec<u8>, Vec<u8>) {
        let mut codes = vec![0xAA; row.len()];
        let mut scales = vec![0xAA; format.bytes_per_row(row.len())];
        quantize_row(row, format, &mut codes, &mut scales);
        (codes, scales)
    }

    #[test]
    fn rows_of_ordinary_values_come_back_near() {
        for format in FORMATS {
            for hidden in [1, 31, 32, 128, 130, 1000] {
                let row: Vec<u16> = random(3)
                    .take(hidden)
                    .map(|bits| f32_to_bf16((bits as u32 as f32 / u32::MAX as f32 - 0.5) * 20.0))
                    .collect();
                let (codes, scales) = quantized(&row, format);
                let mut back = vec![0.0; hidden];
                dequantize_row(&codes, &scales, format, &mut back);
                for (block, (values, back)) in
                    row.chunks(format.block()).zip(back.chunks(format.block())).enumerate()
                {
                    let size = format.bytes_per_scale();
                    let scale = format.load_scale(&scales[block * size..][..size]);
                    for (&bits, &back) in values.iter().zip(back) {
                        let value = bf16_to_f32(bits);
                        // Half a step: 2^-4 relative, or half of 2^-9 scales among subnormals.
                        let bound = (value.abs() / 16.0).max(scale / 1024.0) * 1.001;
                        assert!((value - back).abs() <= bound, "{value} {back} {format:?}");
                    }
                }
            }
        }
    }

    #[test]
    fn blocks_with_zeros_nans_and_infinities() {
        let inf = f32_to_bf16(f32::INFINITY);
        let one = f32_to_bf16(1.0);
        for format in FORMATS {
            // A block of zeros and NaNs has the scale of `AMAX_FLOOR`.
            let (codes, scales) = quantized(&[0, 0x8000, 0x7FC0, 0xFFFF], format);
            assert_eq!(codes, [0, 0x80, 0x7F, 0x7F]);
            let mut floor = vec![0; format.bytes_per_scale()];
            format.store_scale(format.scale_for(0.0), &mut floor);
            assert_eq!(scales, floor);

            // A NaN does not change the codes of the other values.
            let (codes, scales) = quantized(&[one, 0x7F81, 0xC000], format);
            let (codes_without, scales_without) = quantized(&[one, 0, 0xC000], format);
            assert_eq!(scales, scales_without);
            assert_eq!([codes[0], codes[2]], [codes_without[0], codes_without[2]]);
            assert_eq!(codes[1], E4M3_NAN);
        }
        // The documented meaning of an infinite amax.
        let row = [inf, inf | 0x8000, one, 0x7F7F];
        let (codes, scales) = quantized(&row, ScaleFormat::F32Per128);
        assert_eq!(codes, [0x7F, 0x7F, 0, 0]);
        assert_eq!(scales, f32::INFINITY.to_le_bytes());
        let (codes, scales) = quantized(&row, ScaleFormat::Ue8m0Per32);
        assert_eq!(codes, [0x7E, 0xFE, 0, 0x40]);
        assert_eq!(scales, [254]);
    }

    #[test]
    fn a_short_last_block_has_its_own_scale() {
        let mut row = vec![f32_to_bf16(448.0); 128];
        row.extend([f32_to_bf16(896.0); 8]);
        let (codes, scales) = quantized(&row, ScaleFormat::Ue8m0Per128);
        assert_eq!(scales, [127, 128]);
        assert!(codes.iter().all(|&code| code == 0x7E));
    }

    #[test]
    #[should_panic(expected = "bytes of scales")]
    fn wrong_scale_length_panics() {
        quantize_row(&[0; 8], ScaleFormat::F32Per128, &mut [0; 8], &mut [0; 1]);
    }
}
