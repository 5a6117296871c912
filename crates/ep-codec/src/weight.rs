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

/// The base of residuals that are numbers themselves. A slice of any length takes no memory.
#[derive(Debug, Clone, Copy)]
pub(crate) struct Zero;

impl Value for Zero {
    #[inline]
    fn value(self) -> f32 {
        0.0
    }
}

mod sealed {
    pub trait Sealed {}
    impl Sealed for f32 {}
    impl Sealed for u16 {}
}
