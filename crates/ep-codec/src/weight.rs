//! The element types of expert weights and gradients.

use std::fmt::Debug;

use ep::Element;
use ep::numeric::{bf16_to_f32, f32_to_bf16};

/// The type of a weight or gradient: `f32`, or `u16` that holds the bits of a bf16, as in [`ep::numeric`].
pub trait Weight: bytemuck::Pod + Debug + PartialEq + Send + Sync + sealed::Sealed {
    /// The element type that the Rust type represents.
    const ELEMENT: Element;
    /// The largest finite value.
    const LARGEST: f32;
    /// Converts to f32. The conversion is exact.
    fn to_f32(self) -> f32;
    /// Rounds an f32 to nearest, ties to even. For `f32` this is the identity.
    fn from_f32(value: f32) -> Self;
}

impl Weight for f32 {
    const ELEMENT: Element = Element::F32;
    const LARGEST: f32 = f32::MAX;
    #[inline]
    fn to_f32(self) -> f32 {
        self
    }
    #[inline]
    fn from_f32(value: f32) -> Self {
        value
    }
}

impl Weight for u16 {
    const ELEMENT: Element = Element::Bf16;
    const LARGEST: f32 = bf16_to_f32(0x7F7F);
    #[inline]
    fn to_f32(self) -> f32 {
        bf16_to_f32(self)
    }
    #[inline]
    fn from_f32(value: f32) -> Self {
        f32_to_bf16(value)
    }
}

/// A number that converts to f32 without rounding: a weight, or a zero that takes no memory.
pub(crate) trait Value: Copy + Send + Sync {
    /// Converts to f32. The conversion is exact.
    fn value(self) -> f32;
}

impl<T: Weight> Value for T {
    #[inline]
    fn value(self) -> f32 {
        self.to_f32()
    }
}

/// A base of zeros: residuals from it are the numbers themselves, as for gradients. A slice of any length takes no
/// memory.
#[derive(Debug, Clone, Copy)]
pub(crate) struct Zero;

impl Value for Zero {
    #[inline]
    fn value(self) -> f32 {
        0.0
    }
}

mod sealed {
    pub trait Sealed: Sized {
        /// Rounds a finite f32, as [`Weight::from_f32`](super::Weight::from_f32) does, but without the check for NaN:
        /// loops then have a fifth fewer instructions.
        fn from_finite(value: f32) -> Self;
        /// The bits of the largest magnitude as f32; 0 for no elements. NaNs are above infinity.
        fn absmax_bits(elements: &[Self]) -> u32;
    }

    // Magnitudes have the order of their bits. The integers are signed, because SSE2 does not compare unsigned ones.
    impl Sealed for f32 {
        #[inline(always)]
        fn from_finite(value: f32) -> Self {
            value
        }
        #[inline(always)]
        fn absmax_bits(elements: &[Self]) -> u32 {
            let magnitudes = elements.iter().map(|element| (element.to_bits() & 0x7FFF_FFFF) as i32);
            magnitudes.fold(0, i32::max) as u32
        }
    }

    impl Sealed for u16 {
        #[inline(always)]
        fn from_finite(value: f32) -> Self {
            let bits = value.to_bits();
            ((bits + 0x7FFF + (bits >> 16 & 1)) >> 16) as Self
        }
        #[inline(always)]
        fn absmax_bits(elements: &[Self]) -> u32 {
            let magnitudes = elements.iter().map(|element| (element & 0x7FFF) as i16);
            (magnitudes.fold(0, i16::max) as u32) << 16
        }
    }
}

#[cfg(test)]
mod tests {
    use super::sealed::Sealed;
    use super::*;

    #[test]
    fn finite_numbers_round_as_the_definition() {
        // Each upper half with the lower halves around a tie.
        for (high, low) in
            (0..=u16::MAX).flat_map(|high| [0, 1, 0x7FFF, 0x8000, 0x8001].map(|low| (high, low)))
        {
            let value = f32::from_bits(u32::from(high) << 16 | low);
            if value.is_finite() {
                assert_eq!(<u16 as Sealed>::from_finite(value), f32_to_bf16(value));
                assert_eq!(<f32 as Sealed>::from_finite(value).to_bits(), value.to_bits());
            }
        }
    }

    #[test]
    fn the_largest_magnitude_is_found_in_any_place() {
        for at in 0..130 {
            for (value, bits) in [(-3.5, 3.5_f32.to_bits()), (f32::NEG_INFINITY, 0x7F80_0000)] {
                let mut elements = vec![0.5_f32; 130];
                elements[at] = value;
                assert_eq!(<f32 as Sealed>::absmax_bits(&elements), bits);
                let halves: Vec<u16> = elements.iter().map(|&element| f32_to_bf16(element)).collect();
                assert_eq!(<u16 as Sealed>::absmax_bits(&halves), bits);
            }
        }
        assert!(<u16 as Sealed>::absmax_bits(&[0, 0xFFC0, 0x7F80]) > 0x7F80_0000);
        assert!(<f32 as Sealed>::absmax_bits(&[0.0, -f32::NAN, f32::INFINITY]) > 0x7F80_0000);
        assert_eq!(<f32 as Sealed>::absmax_bits(&[]), 0);
    }
}
