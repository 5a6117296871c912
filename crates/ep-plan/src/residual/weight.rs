//! The element types of experts' weights.

use ep::Element;
use ep::numeric::{bf16_to_f32, f32_to_bf16};

/// A weight: `f32`, or `u16` as the bits of a bf16 (as everywhere in [`ep::numeric`]).
pub trait Weight: bytemuck::Pod + Send + Sync + sealed::Sealed {
    /// What the type stands for.
    const ELEMENT: Element;
    /// Widens to f32; exact.
    fn to_f32(self) -> f32;
    /// Rounds to nearest, ties to even; exact for f32.
    fn from_f32(value: f32) -> Self;
}

impl Weight for f32 {
    const ELEMENT: Element = Element::F32;
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
    #[inline]
    fn to_f32(self) -> f32 {
        bf16_to_f32(self)
    }
    #[inline]
    fn from_f32(value: f32) -> Self {
        f32_to_bf16(value)
    }
}

mod sealed {
    pub trait Sealed {}
    impl Sealed for f32 {}
    impl Sealed for u16 {}
}
