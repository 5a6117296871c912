//! Conversion between elements in memory (bf16 or f32) and f32 values in registers, for `reduce` and `weight`.

use ep::Element;

use super::vector::{LINE, Vector};

/// Loads `count` elements from `src` as values. `count` is [`STEP`](super::vector::STEP); with `PART` it may be less,
/// and the remaining values are zero.
///
/// # Safety
/// `src` must be valid for reads of `count` elements; the processor must have `V`'s features.
#[inline(always)]
pub(super) unsafe fn load_values<V: Vector, const PART: bool>(
    src: *const u8,
    element: Element,
    count: usize,
) -> V::Values {
    // SAFETY: the caller's promise.
    unsafe {
        match element {
            Element::Bf16 => V::from_bf16(load::<V, PART>(src, count * 2)),
            Element::F32 => {
                let low = load::<V, PART>(src, count * 4);
                let high = load::<V, PART>(src.wrapping_add(LINE), (count * 4).saturating_sub(LINE));
                V::from_f32([low, high])
            }
        }
    }
}

/// Stores [`STEP`](super::vector::STEP) values as elements, rounded to nearest even, NaN canonical.
///
/// # Safety
/// `dst` must be valid for writes of [`STEP`](super::vector::STEP) elements and, with `streaming`, aligned to a line;
/// the processor must have `V`'s features.
#[inline(always)]
pub(super) unsafe fn store_values<V: Vector>(
    dst: *mut u8,
    element: Element,
    values: V::Values,
    streaming: bool,
) {
    // SAFETY: the caller's promise.
    unsafe {
        match element {
            Element::Bf16 => store::<V>(dst, V::to_bf16(values), streaming),
            Element::F32 => {
                let [low, high] = V::to_f32(values);
                store::<V>(dst, low, streaming);
                store::<V>(dst.add(LINE), high, streaming);
            }
        }
    }
}

/// # Safety
/// The requirements of [`Vector::stream`] with `streaming`, else of [`Vector::store`].
#[inline(always)]
unsafe fn store<V: Vector>(dst: *mut u8, line: V::Line, streaming: bool) {
    // SAFETY: passed on.
    unsafe { if streaming { V::stream(dst, line) } else { V::store(dst, line) } }
}

/// Loads a line from `src`; with `PART`, its first `len` bytes and then zeros.
///
/// # Safety
/// `src` must be valid for reads of 64 bytes; with `PART`, of the smaller of `len` and 64. The processor must have
/// `V`'s features.
#[inline(always)]
unsafe fn load<V: Vector, const PART: bool>(src: *const u8, len: usize) -> V::Line {
    // SAFETY: the caller's promise.
    unsafe {
        if PART {
            let mut line = [0u8; LINE];
            src.copy_to_nonoverlapping(line.as_mut_ptr(), len.min(LINE));
            V::load(line.as_ptr())
        } else {
            V::load(src)
        }
    }
}
