//! [`Size`]: checked arithmetic on numbers that a caller, a file or a peer supplied.

use std::ops::{Add, Mul};

use crate::error::{CallerError, Result};

/// A size that is computed, with checked arithmetic, from untrusted numbers.
///
/// An intermediate result that is too large stays too large through the rest of the computation. A formula therefore
/// reads like one with plain integers, and the program checks it once, when it takes the result.
///
/// The largest size is `isize::MAX`, Rust's limit for an object in memory, so an offset within a checked size cannot
/// overflow.
///
/// ```
/// use ep::Size;
///
/// let bytes = Size::new(4096) * 7168 * 2 + 64;
/// assert_eq!(bytes.bytes("the tokens").unwrap(), 58_720_320);
/// let error = (Size::new(usize::MAX) * 2).bytes("the tokens").unwrap_err();
/// assert!(error.to_string().starts_with("the tokens: more than"));
/// ```
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Size(Option<usize>);

impl Size {
    /// The largest size.
    pub const MAX: usize = isize::MAX as usize;

    /// A size with this value; too large above [`MAX`](Self::MAX).
    pub fn new(value: usize) -> Self {
        Self(Some(value).filter(|&value| value <= Self::MAX))
    }

    /// The next multiple of `unit`.
    ///
    /// # Panics
    /// When `unit` is 0, which is a bug of the library: every unit is one of the library's constants.
    #[must_use]
    pub fn next_multiple_of(self, unit: usize) -> Self {
        assert!(unit > 0, "a unit is at least 1");
        self.then(|value| value.checked_next_multiple_of(unit))
    }

    /// The result as a number of bytes. `what` is the object of this size, for the error.
    ///
    /// # Errors
    /// [`CallerError::TooLarge`] that names `what`.
    pub fn bytes(self, what: &'static str) -> Result<usize> {
        self.get(what, "bytes")
    }

    /// The result, counted in `unit` ("rows", "elements"). `what` is the object of this size, for the error.
    ///
    /// # Errors
    /// [`CallerError::TooLarge`] that names `what` and `unit`.
    pub fn get(self, what: &'static str, unit: &'static str) -> Result<usize> {
        self.0.ok_or_else(|| CallerError::TooLarge { what, unit }.into())
    }

    /// The result, or `None` if it is too large.
    pub fn checked(self) -> Option<usize> {
        self.0
    }

    fn then(self, step: impl FnOnce(usize) -> Option<usize>) -> Self {
        Self(self.0.and_then(step).filter(|&value| value <= Self::MAX))
    }
}

impl Add<usize> for Size {
    type Output = Self;

    fn add(self, other: usize) -> Self {
        self.then(|value| value.checked_add(other))
    }
}

impl Add for Size {
    type Output = Self;

    fn add(self, other: Self) -> Self {
        other.0.map_or(Self(None), |other| self + other)
    }
}

impl Mul<usize> for Size {
    type Output = Self;

    fn mul(self, other: usize) -> Self {
        self.then(|value| value.checked_mul(other))
    }
}

impl Mul for Size {
    type Output = Self;

    fn mul(self, other: Self) -> Self {
        other.0.map_or(Self(None), |other| self * other)
    }
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::*;

    #[test]
    fn the_largest_object_fits_and_one_byte_more_does_not() {
        assert_eq!(Size::new(Size::MAX).checked(), Some(Size::MAX));
        assert_eq!(Size::new(Size::MAX + 1).checked(), None);
        assert_eq!((Size::new(Size::MAX - 1) + 1).checked(), Some(Size::MAX));
        assert_eq!((Size::new(Size::MAX) + 1).checked(), None);
        assert_eq!(Size::new(Size::MAX - 1).next_multiple_of(4096).checked(), None);
    }

    #[test]
    fn too_large_stays_too_large() {
        let lost = Size::new(usize::MAX);
        assert_eq!((lost + 1).checked(), None);
        assert_eq!((Size::new(0) * lost).checked(), None);
        assert_eq!((Size::new(0) + lost).checked(), None);
    }

    #[test]
    fn the_error_names_what_and_the_unit() {
        let error = Size::new(usize::MAX).get("a routing", "rows").unwrap_err().to_string();
        assert!(error.contains("a routing") && error.contains("rows"), "{error}");
    }

    proptest! {
        #[test]
        fn it_agrees_with_wide_integers(a: usize, b: usize, c: usize) {
            let wide = a as u128 * b as u128 + c as u128;
            let all_fit = [a, b, c].iter().all(|&value| value <= Size::MAX);
            let expected = (all_fit && wide <= Size::MAX as u128).then_some(wide as usize);
            prop_assert_eq!((Size::new(a) * Size::new(b) + Size::new(c)).checked(), expected);
        }

        #[test]
        fn small_numbers_are_computed_exactly(a in 0..1usize << 20, b in 0..1usize << 20, unit in 1..1usize << 12) {
            let size = (Size::new(a) * b).next_multiple_of(unit);
            prop_assert_eq!(size.checked(), Some((a * b).next_multiple_of(unit)));
        }
    }
}
