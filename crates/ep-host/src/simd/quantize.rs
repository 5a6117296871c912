//! Quantisation of rows to E4M3, as loops without branches that LLVM vectorises at each level. `dispatch` calls
//! [`quantize_row`].

use ep::numeric::{self, E4M3_MAX, E4M3_NAN, ScaleFormat};

use super::{Level, dispatch};

const INFINITY_BF16: u16 = 0x7F80;
const INFINITY_F32: u32 = 0x7F80_0000;

/// [`ep::numeric::quantize_row`], bit for bit.
///
/// Shapes: `row` `[hidden]` bf16 bits, `out` `[hidden]` E4M3 codes, `scales`
/// [`format.bytes_per_row(hidden)`](ScaleFormat::bytes_per_row) bytes.
///
/// # Panics
/// When the lengths do not agree.
pub(crate) fn quantize_row(
    level: Level,
    row: &[u16],
    format: ScaleFormat,
    out: &mut [u8],
    scales: &mut [u8],
) {
    let hidden = row.len();
    assert_eq!(out.len(), hidden, "codes of a row of {hidden} values");
    assert_eq!(scales.len(), format.bytes_per_row(hidden), "bytes of scales of {hidden} values");
    // With the block size as a constant, the compiler unrolls the loops over a block completely.
    match format.block() {
        32 => dispatch!(level, blocks32(row: &[u16], format: ScaleFormat, out: &mut [u8], scales: &mut [u8])),
        128 => {
            dispatch!(level, blocks128(row: &[u16], format: ScaleFormat, out: &mut [u8], scales: &mut [u8]))
        }
        _ => numeric::quantize_row(row, format, out, scales),
    }
}

#[inline(always)]
fn blocks32(row: &[u16], format: ScaleFormat, out: &mut [u8], scales: &mut [u8]) {
    blocks::<32>(row, format, out, scales);
}

#[inline(always)]
fn blocks128(row: &[u16], format: ScaleFormat, out: &mut [u8], scales: &mut [u8]) {
    blocks::<128>(row, format, out, scales);
}

#[inline(always)]
fn blocks<const BLOCK: usize>(row: &[u16], format: ScaleFormat, out: &mut [u8], scales: &mut [u8]) {
    let (whole, rest) = row.as_chunks::<BLOCK>();
    let (out_whole, out_rest) = out.as_chunks_mut::<BLOCK>();
    let mut scales = scales.chunks_exact_mut(format.bytes_per_scale());
    for ((values, codes), scale) in whole.iter().zip(out_whole).zip(&mut scales) {
        block(values, format, codes, scale);
    }
    if let Some(scale) = scales.next() {
        block(rest, format, out_rest, scale);
    }
}

#[inline(always)]
fn block(values: &[u16], format: ScaleFormat, codes: &mut [u8], scale_bytes: &mut [u8]) {
    // Magnitudes have the order of their bits, and NaNs lie above infinity. `UP` moves infinity to the greatest i16, so
    // that every NaN becomes negative and drops out of a signed 16-bit maximum, which every processor has.
    const UP: u16 = 0x7FFF - INFINITY_BF16;
    let mut moved = UP as i16;
    for &bits in values {
        moved = moved.max((bits & 0x7FFF).wrapping_add(UP) as i16);
    }
    let amax = moved as u16 - UP;
    let scale = format.scale_for(numeric::bf16_to_f32(amax));
    format.store_scale(scale, scale_bytes);
    let inverse = 1.0 / scale;
    for (code, &bits) in codes.iter_mut().zip(values) {
        *code = e4m3(numeric::bf16_to_f32(bits) * inverse);
    }
}

/// [`ep::numeric::f32_to_e4m3`] without branches.
#[inline(always)]
fn e4m3(value: f32) -> u8 {
    // 2^-6, the smallest normal number, whose exponent subnormal numbers share.
    const NORMAL: u32 = (127 - 6) << 23;
    // Adding 2^20 times a number's power of two rounds its mantissa to 3 bits. These bits and the leading one are then
    // the lowest bits of the sum.
    const KEEP_3: u32 = 20 << 23;
    // The code is those bits plus 8 for each exponent above the first. This constant corrects for the bias of the
    // exponents; all other terms are multiples of 256.
    const BIAS: u32 = (NORMAL >> 20).wrapping_neg() & 0xFF;

    let bits = value.to_bits();
    let magnitude = bits & 0x7FFF_FFFF;
    let clamped = magnitude.min(E4M3_MAX.to_bits());
    let exponent = clamped.max(NORMAL) & 0x7F80_0000;
    let rounded = f32::from_bits(clamped) + f32::from_bits(exponent + (KEEP_3 | BIAS));
    let code = rounded.to_bits().wrapping_add(exponent >> 20);
    let signed = bits >> 24 & 0x80 | code & 0x7F;
    (if magnitude > INFINITY_F32 { u32::from(E4M3_NAN) } else { signed }) as u8
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::simd::testing::Random;

    const FORMATS: [ScaleFormat; 3] =
        [ScaleFormat::F32Per128, ScaleFormat::Ue8m0Per128, ScaleFormat::Ue8m0Per32];

    /// Quantises `row` at every level, next to guard bytes, and compares with the definition.
    fn check(row: &[u16]) {
        for format in FORMATS {
            let (hidden, bytes) = (row.len(), format.bytes_per_row(row.len()));
            let (mut codes, mut scales) = (vec![0; hidden], vec![0; bytes]);
            numeric::quantize_row(row, format, &mut codes, &mut scales);
            for level in Level::available() {
                let (mut out, mut out_scales) = (vec![0xA5; hidden + 64], vec![0xA5; bytes + 64]);
                quantize_row(level, row, format, &mut out[..hidden], &mut out_scales[..bytes]);
                assert!(out[..hidden] == codes, "{level:?} {format:?} {hidden}");
                assert!(out_scales[..bytes] == scales, "{level:?} {format:?} {hidden}");
                assert!(out[hidden..].iter().chain(&out_scales[bytes..]).all(|&byte| byte == 0xA5));
            }
        }
    }

    #[test]
    fn random_rows_quantise_as_defined() {
        let mut random = Random(6);
        for hidden in [0, 1, 7, 8, 31, 32, 33, 120, 128, 129, 136, 1000, 2880, 7168] {
            for _ in 0..20 {
                check(&(0..hidden).map(|_| random.bf16()).collect::<Vec<_>>());
                check(&(0..hidden).map(|_| random.next() as u16).collect::<Vec<_>>());
                // Magnitudes within a few binades of each other, which use most codes.
                let like = |bits: u64| (bits as u16 & 0x83FF) | 0x3C00;
                check(&(0..hidden).map(|_| like(random.next())).collect::<Vec<_>>());
            }
        }
    }

    #[test]
    fn every_bf16_quantises_as_defined_below_every_amax_exponent() {
        let all: Vec<u16> = (0..=u16::MAX).collect();
        check(&all);
        // Blocks that begin with an amax of each exponent, followed by random patterns below it.
        let mut random = Random(7);
        for exponent in 0..256u16 {
            let mut row = Vec::new();
            for _ in 0..16 {
                let amax = exponent << 7 | random.next() as u16 & 0x7F;
                row.push(amax);
                row.extend((1..128).map(|_| {
                    let bits = random.next();
                    let below = (bits as u16 & 0x7FFF) % (amax.max(1));
                    below | (bits >> 32) as u16 & 0x8000
                }));
            }
            check(&row);
        }
    }

    #[test]
    fn codes_round_as_defined() {
        let mut random = Random(8);
        for _ in 0..2_000_000 {
            let bits = random.next();
            let near = bits as u32 & 0x807F_FFFF | (112 + (bits >> 40) as u32 % 28) << 23;
            for bits in [bits as u32, near, near & 0xFFF0_0000, near & 0xFFF8_0000] {
                let value = f32::from_bits(bits);
                assert_eq!(e4m3(value), numeric::f32_to_e4m3(value), "{bits:#010x}");
            }
        }
    }

    #[test]
    #[ignore = "all 2^32 values: a minute"]
    fn every_f32_converts_as_defined() {
        for high in 0..=u16::MAX {
            let values: Vec<f32> =
                (0..=u16::MAX).map(|low| f32::from_bits(u32::from(high) << 16 | u32::from(low))).collect();
            for &value in &values {
                assert_eq!(e4m3(value), numeric::f32_to_e4m3(value), "{:#010x}", value.to_bits());
            }
        }
    }

    #[test]
    #[should_panic(expected = "bytes of scales")]
    fn wrong_scale_length_panics() {
        quantize_row(Level::detect(), &[0; 8], ScaleFormat::F32Per128, &mut [0; 8], &mut [0; 1]);
    }
}
