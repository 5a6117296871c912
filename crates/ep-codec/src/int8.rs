//! 8 bits per element: the payload of `Int8` streams, and its arithmetic.
//!
//! P elements are divided into blocks of 128; the last one may be shorter. The payload is one scale per block (f32,
//! little-endian), then one code per element (i8). In f32, each operation rounded to nearest, ties to even:
//!
//! ```text
//!  scale = absmax of the block / 127; 0 if that is subnormal, 2.67938839e36 if it is more
//!  code  = round(x * (1 / scale)), an integer in -127 ..= 127; 0 where scale is 0
//!  value = code * scale
//! ```
//!
//! Zeros decode to zeros, and so do blocks whose absmax is below 1.5e-36, where 1 / scale could overflow. The upper
//! limit of a scale, one unit in the last place below f32::MAX / 127, keeps 127 * scale finite. A code of -128, which
//! no encoder writes, decodes to the largest finite number of the type if it would overflow.

use crate::error::Corruption;
use crate::parallel::{IndexedParallelIterator, Parallel, ParallelIterator};
use crate::weight::Weight;

/// Elements that share a scale.
pub(crate) const BLOCK: usize = 128;
/// Elements that one thread encodes or decodes at a time.
const PIECE: usize = 1 << 16;
const SCALE: usize = size_of::<f32>();
const PIECE_SCALES: usize = PIECE / BLOCK * SCALE;

/// Bytes of the payload of P elements.
pub(crate) fn payload_bytes(elements: usize) -> usize {
    scale_bytes(elements).saturating_add(elements)
}

fn scale_bytes(elements: usize) -> usize {
    SCALE * elements.div_ceil(BLOCK)
}

/// Encodes `[P]` elements into their payload. Returns the first index of an element that is not finite, if any; the
/// payload is then unspecified.
pub(crate) fn encode<T: Weight>(elements: &[T], payload: &mut [u8]) -> Option<usize> {
    let (scales, codes) = payload.split_at_mut(scale_bytes(elements.len()));
    let pieces = scales.par_chunks_mut(PIECE_SCALES).zip(codes.par_chunks_mut(PIECE));
    let bad = pieces.zip(elements.par_chunks(PIECE)).enumerate().filter_map(
        |(piece, ((scales, codes), elements))| {
            let mut absmax = 0;
            let blocks =
                scales.as_chunks_mut().0.iter_mut().zip(codes.chunks_mut(BLOCK)).zip(elements.chunks(BLOCK));
            for ((scale, codes), elements) in blocks {
                absmax = absmax.max(encode_block(elements, scale, codes));
            }
            let first = || elements.iter().position(|element| !element.to_f32().is_finite());
            if absmax < INFINITE { None } else { first().map(|at| piece * PIECE + at) }
        },
    );
    bad.min()
}

/// Encodes `gradient + carry` (one f32 addition) into a payload, and leaves in `carry` what decoding will lack: `carry
/// = (gradient + carry) - value`, one f32 subtraction. All sums must be finite.
pub(crate) fn encode_carrying<T: Weight>(gradient: &[T], carry: &mut [f32], payload: &mut [u8]) {
    let (scales, codes) = payload.split_at_mut(scale_bytes(gradient.len()));
    let pieces = scales.par_chunks_mut(PIECE_SCALES).zip(codes.par_chunks_mut(PIECE));
    let pieces = pieces.zip(gradient.par_chunks(PIECE)).zip(carry.par_chunks_mut(PIECE));
    pieces.for_each(|(((scales, codes), gradient), carry)| {
        let blocks = scales.as_chunks_mut().0.iter_mut().zip(codes.chunks_mut(BLOCK));
        for (((scale, codes), gradient), carry) in
            blocks.zip(gradient.chunks(BLOCK)).zip(carry.chunks_mut(BLOCK))
        {
            for (carry, &gradient) in carry.iter_mut().zip(gradient) {
                *carry += gradient.to_f32();
            }
            encode_block(carry, scale, codes);
            let scale = f32::from_le_bytes(*scale);
            for (carry, &code) in carry.iter_mut().zip(&*codes) {
                *carry -= value::<f32>(code, scale);
            }
        }
    });
}

/// Checks the scales of a payload, whose length [`open`](crate::stream::open) has checked. Afterwards all values decode
/// to finite numbers.
pub(crate) fn check<T: Weight>(payload: &[u8], elements: usize) -> Result<(), Corruption> {
    let (scales, _) = payload.split_at(scale_bytes(elements));
    let (scales, _) = scales.as_chunks::<SCALE>();
    let limit = (T::LARGEST / 127.0).min(LARGEST_SCALE);
    let is_right = |&scale: &[u8; SCALE]| (0.0..=limit).contains(&f32::from_le_bytes(scale));
    match scales.iter().position(|scale| !is_right(scale)) {
        None => Ok(()),
        Some(block) => Err(Corruption::Values { block }),
    }
}

/// Decodes a payload whose scales are [checked](check).
pub(crate) fn decode<T: Weight>(payload: &[u8], out: &mut [T]) {
    for_each_block(payload, out, |out: &mut [T], scale, codes| {
        for (out, &code) in out.iter_mut().zip(codes) {
            *out = T::from_finite(value::<T>(code, scale));
        }
    });
}

/// Adds the values of a payload whose scales are [checked](check) for f32: one f32 addition each.
pub(crate) fn add(payload: &[u8], sum: &mut [f32]) {
    for_each_block(payload, sum, |sum: &mut [f32], scale, codes| {
        for (sum, &code) in sum.iter_mut().zip(codes) {
            *sum += value::<f32>(code, scale);
        }
    });
}

/// Calls a function with the elements of each block, its scale and its codes.
fn for_each_block<T: Weight>(payload: &[u8], elements: &mut [T], work: impl Fn(&mut [T], f32, &[u8]) + Sync) {
    let (scales, codes) = payload.split_at(scale_bytes(elements.len()));
    let pieces = scales.par_chunks(PIECE_SCALES).zip(codes.par_chunks(PIECE));
    pieces.zip(elements.par_chunks_mut(PIECE)).for_each(|((scales, codes), elements)| {
        let (scales, _) = scales.as_chunks::<SCALE>();
        let mut scales = scales.iter().map(|&scale| f32::from_le_bytes(scale));
        let (full, rest) = elements.as_chunks_mut::<BLOCK>();
        let (full_codes, rest_codes) = codes.as_chunks::<BLOCK>();
        // Loops of a constant length are vectorised without a remainder.
        for ((elements, codes), scale) in full.iter_mut().zip(full_codes).zip(&mut scales) {
            work(elements, scale, codes);
        }
        if let Some(scale) = scales.next() {
            work(rest, scale, rest_codes);
        }
    });
}

/// The bits of infinity. Magnitudes with these or larger bits are not finite.
const INFINITE: u32 = 0x7F80_0000;

/// Encodes one block. Returns the bits of its largest magnitude; with [`INFINITE`] or more the codes are meaningless.
#[inline(always)]
fn encode_block<T: Weight>(elements: &[T], scale: &mut [u8; SCALE], codes: &mut [u8]) -> u32 {
    match (<&[T; BLOCK]>::try_from(elements), <&mut [u8; BLOCK]>::try_from(&mut *codes)) {
        (Ok(elements), Ok(codes)) => encode_elements(elements, scale, codes),
        _ => encode_elements(elements, scale, codes),
    }
}

#[inline(always)]
fn encode_elements<T: Weight>(elements: &[T], scale: &mut [u8; SCALE], codes: &mut [u8]) -> u32 {
    let absmax = T::absmax_bits(elements);
    let unit = (f32::from_bits(absmax) / 127.0).min(LARGEST_SCALE);
    let (unit, inverse) = if unit >= f32::MIN_POSITIVE { (unit, 1.0 / unit) } else { (0.0, 0.0) };
    *scale = unit.to_le_bytes();
    // A product exceeds 127 by less than 0.001, so no code exceeds 127.
    for (code, &element) in codes.iter_mut().zip(elements) {
        *code = round(element.to_f32() * inverse) as u8;
    }
    absmax
}

/// The largest scale. 127 times this number is finite.
const LARGEST_SCALE: f32 = (f32::MAX / 127.0).next_down();

/// Rounds to nearest, ties to even. Requires a magnitude below 2^22.
#[inline(always)]
fn round(number: f32) -> i8 {
    // Near 1.5 * 2^23, the f32 numbers are exactly the integers, so the addition rounds. The lowest bits of the sum are
    // the result in two's complement. `round_ties_even` would be a function call per element on x86-64 without SSE 4.1.
    const INTEGERS: f32 = 12_582_912.0;
    (number + INTEGERS).to_bits() as i8
}

#[inline(always)]
fn value<T: Weight>(code: u8, scale: f32) -> f32 {
    (f32::from(code as i8) * scale).clamp(-T::LARGEST, T::LARGEST)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_largest_scale_depends_on_the_element_type() {
        let payload = |scale: f32| [&scale.to_le_bytes()[..], &[127]].concat();
        let refused = Err(Corruption::Values { block: 0 });
        let largest = <u16 as Weight>::LARGEST / 127.0;
        assert_eq!(check::<u16>(&payload(largest), 1), Ok(()));
        assert_eq!(check::<u16>(&payload(largest.next_up()), 1), refused);
        assert_eq!(check::<f32>(&payload(LARGEST_SCALE), 1), Ok(()));
        assert_eq!(check::<f32>(&payload(LARGEST_SCALE.next_up()), 1), refused);
    }
}
