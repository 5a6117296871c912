//! The element types of expert weights.

use ep::Element;
use ep::numeric::{bf16_to_f32, f32_to_bf16};

/// The type of a weight: `f32`, or `u16` that holds the bits of a bf16, as in [`ep::numeric`].
pub trait Weight: bytemuck::Pod + Send + Sync + sealed::Sealed {
    /// The element type that the Rust type represents.
    const ELEMENT: Element;
    /// Converts to f32. The conversion is exact.
    fn to_f32(self) -> f32;
    /// Rounds an f32 to nearest, ties to even. For `f32` this is the identity.
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
