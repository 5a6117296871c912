//! The inner loops of the host backend, one row per call: copies, the sum of a token's rows, quantisation, weights.
//! `dispatch`, `combine`, `weight_rows` and `workers` call them.
//!
//! Every operation takes the [`Level`] to run at, selects its code once per row, and returns the same bits as the
//! scalar definition in [`ep::numeric`], at every level and for every input.
//!
//! The element loops are written once, either as plain Rust that LLVM vectorises or with the vector operations in
//! `vector`, and are instantiated once per level.
//!
//! No level uses the processor's conversion from f32 to bf16 (`vcvtneps2bf16`), because it treats subnormal numbers as
//! zero. No GPU does, so sums would differ between backends. Rounding with integer operations costs no time here, since
//! memory bandwidth is the limit.

mod copy;
mod elements;
mod quantize;
mod reduce;
mod vector;
mod weight;

pub(crate) use copy::{copy_row, scatter_row, stream_fence, zero_row};
pub(crate) use quantize::quantize_row;
pub(crate) use reduce::{SumRow, flag, sum_rows};
pub(crate) use weight::{Backward, weight_row};

/// The instructions that an operation uses.
///
/// An operation at a level that the processor lacks runs at the best level that the processor has.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub(crate) enum Level {
    /// The baseline of the target; on x86-64, SSE2.
    Portable,
    /// AVX2, 32-byte vectors.
    Avx2,
    /// AVX-512 (F, BW, DQ and VL), 64-byte vectors.
    Avx512,
}

impl Level {
    /// The best level of this processor.
    #[inline]
    #[must_use]
    pub(crate) fn detect() -> Self {
        // The macro caches its results in an atomic, so this costs a few loads.
        #[cfg(target_arch = "x86_64")]
        {
            if is_x86_feature_detected!("avx512f")
                && is_x86_feature_detected!("avx512bw")
                && is_x86_feature_detected!("avx512dq")
                && is_x86_feature_detected!("avx512vl")
            {
                return Self::Avx512;
            }
            if is_x86_feature_detected!("avx2") {
                return Self::Avx2;
            }
        }
        Self::Portable
    }

    /// All levels of this processor, lowest first.
    #[cfg(test)]
    pub(crate) fn available() -> Vec<Self> {
        let mut levels = vec![Self::Portable, Self::Avx2, Self::Avx512];
        levels.retain(|&level| level <= Self::detect());
        levels
    }
}

/// Calls `$body` compiled for `$level`, or for the best level below it that the processor has.
///
/// `$body` is an `#[inline(always)]` function. With `<_>` before its arguments, its first generic parameter is a
/// [`vector::Vector`], and the macro passes the level's implementation.
macro_rules! dispatch {
    ($level:expr, unsafe $body:ident::<_>($($arg:ident: $type:ty),* $(,)?)) => {{
        #[cfg(target_arch = "x86_64")]
        {
            #[target_feature(enable = "avx2")]
            unsafe fn avx2($($arg: $type),*) {
                // SAFETY: AVX2 is enabled here; the rest is the caller's promise, passed on.
                unsafe { $body::<$crate::simd::vector::Avx2>($($arg),*) }
            }
            #[target_feature(enable = "avx512f,avx512bw,avx512dq,avx512vl")]
            unsafe fn avx512($($arg: $type),*) {
                // SAFETY: AVX-512 is enabled here; the rest is the caller's promise, passed on.
                unsafe { $body::<$crate::simd::vector::Avx512>($($arg),*) }
            }
            match $level.min($crate::simd::Level::detect()) {
                // SAFETY: the level was detected; the rest is the caller's promise, passed on.
                $crate::simd::Level::Avx512 => unsafe { avx512($($arg),*) },
                // SAFETY: as above.
                $crate::simd::Level::Avx2 => unsafe { avx2($($arg),*) },
                $crate::simd::Level::Portable => {
                    // SAFETY: needs no feature; the rest is the caller's promise, passed on.
                    unsafe { $body::<$crate::simd::vector::Portable>($($arg),*) }
                }
            }
        }
        #[cfg(not(target_arch = "x86_64"))]
        {
            let _: $crate::simd::Level = $level;
            // SAFETY: needs no feature; the rest is the caller's promise, passed on.
            unsafe { $body::<$crate::simd::vector::Portable>($($arg),*) }
        }
    }};
    ($level:expr, $body:ident($($arg:ident: $type:ty),* $(,)?)) => {{
        #[cfg(target_arch = "x86_64")]
        {
            #[target_feature(enable = "avx2")]
            fn avx2($($arg: $type),*) {
                $body($($arg),*);
            }
            #[target_feature(enable = "avx512f,avx512bw,avx512dq,avx512vl")]
            fn avx512($($arg: $type),*) {
                $body($($arg),*);
            }
            match $level.min($crate::simd::Level::detect()) {
                // SAFETY: the level was detected.
                $crate::simd::Level::Avx512 => unsafe { avx512($($arg),*) },
                // SAFETY: the level was detected.
                $crate::simd::Level::Avx2 => unsafe { avx2($($arg),*) },
                $crate::simd::Level::Portable => $body($($arg),*),
            }
        }
        #[cfg(not(target_arch = "x86_64"))]
        {
            let _: $crate::simd::Level = $level;
            $body($($arg),*);
        }
    }};
}
use dispatch;

#[cfg(test)]
pub(crate) mod testing {
    //! Helpers for the tests of the operations.

    /// Well-mixed 64-bit numbers (splitmix64), the same in every run.
    pub(crate) struct Random(pub(crate) u64);

    impl Random {
        pub(crate) fn next(&mut self) -> u64 {
            self.0 = self.0.wrapping_add(0x9E37_79B9_7F4A_7C15);
            let mut z = self.0;
            z = (z ^ (z >> 30)).wrapping_mul(0xBF58_476D_1CE4_E5B9);
            z = (z ^ (z >> 27)).wrapping_mul(0x94D0_49BB_1331_11EB);
            z ^ (z >> 31)
        }

        pub(crate) fn below(&mut self, bound: usize) -> usize {
            (self.next() % bound as u64) as usize
        }

        /// Random f32: mostly of ordinary magnitude, so that not all sums are NaN; otherwise any bits.
        pub(crate) fn f32(&mut self) -> f32 {
            let bits = self.next();
            let low = bits as u32;
            f32::from_bits(match (bits >> 32) % 64 {
                0 => low,
                1 => low & 0x807F_FFFF,                    // subnormal or zero
                2 => low & 0x8000_0000,                    // zero
                3 if bits >> 60 == 0 => low | 0x7F80_0000, // NaN or infinity
                4 if bits >> 60 == 0 => low & 0x8000_0000 | 0x7F80_0000,
                5 => low & 0x80FF_FFFF | 0x7F00_0000, // near overflow
                _ => low & 0x807F_FFFF | (120 + (low >> 23) % 16) << 23,
            })
        }

        pub(crate) fn bf16(&mut self) -> u16 {
            (self.f32().to_bits() >> 16) as u16
        }
    }

    /// Bytes at a chosen distance from a 64-byte boundary, with guard bytes on both sides.
    pub(crate) struct Guarded {
        memory: Vec<u8>,
        start: usize,
        len: usize,
    }

    impl Guarded {
        const FILL: u8 = 0xA5;
        const MARGIN: usize = 256;

        pub(crate) fn new(len: usize, offset: usize) -> Self {
            let memory = vec![Self::FILL; len + 2 * Self::MARGIN];
            let start = memory.as_ptr().align_offset(64) + 64 + offset;
            assert!(start + len <= memory.len());
            Self { memory, start, len }
        }

        pub(crate) fn with(bytes: &[u8], offset: usize) -> Self {
            let mut guarded = Self::new(bytes.len(), offset);
            guarded.memory[guarded.start..][..bytes.len()].copy_from_slice(bytes);
            guarded
        }

        pub(crate) fn as_ptr(&self) -> *const u8 {
            self.bytes().as_ptr()
        }

        pub(crate) fn as_mut_ptr(&mut self) -> *mut u8 {
            self.memory[self.start..][..self.len].as_mut_ptr()
        }

        pub(crate) fn bytes(&self) -> &[u8] {
            &self.memory[self.start..][..self.len]
        }

        /// Whether all guard bytes are unchanged.
        pub(crate) fn intact(&self) -> bool {
            let (before, rest) = self.memory.split_at(self.start);
            before.iter().chain(&rest[self.len..]).all(|&byte| byte == Self::FILL)
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn available_levels_end_at_the_detected_one() {
        let levels = Level::available();
        assert_eq!(levels.first(), Some(&Level::Portable));
        assert_eq!(levels.last(), Some(&Level::detect()));
        assert!(levels.is_sorted());
    }
}
