//! The vector operations of each level, with which `copy`, `reduce` and `weight` are written.

#[cfg(target_arch = "x86_64")]
use std::arch::x86_64::*;

use ep::numeric::{BF16_NAN, F32_NAN_BITS};

/// Bytes of a [`Vector::Line`], a cache line.
pub(super) const LINE: usize = 64;

/// Elements of a [`Vector::Values`].
pub(super) const STEP: usize = 32;

/// The canonical f32 NaN; its upper half is the canonical bf16 NaN.
const NAN: u32 = F32_NAN_BITS;
const _: () = assert!(NAN >> 16 == BF16_NAN as u32);

/// Rounding to bf16 adds this, plus the last bit that is kept, and then drops the lower half. That rounds to nearest
/// even; see [`ep::numeric::f32_to_bf16`].
const HALF: u32 = 0x7FFF;

/// Mask of the odd element in a word of two bf16.
const ODD: u32 = 0xFFFF_0000;

/// Prefetches the line at `address` into the first-level cache. The address need not be valid.
#[inline(always)]
pub(super) fn prefetch(address: *const u8) {
    #[cfg(target_arch = "x86_64")]
    // SAFETY: SSE is in the baseline of x86-64, and a prefetch never faults.
    unsafe {
        _mm_prefetch::<_MM_HINT_T0>(address.cast());
    }
    #[cfg(not(target_arch = "x86_64"))]
    let _ = address;
}

/// The vectors of one level. All operations work on whole cache lines.
///
/// All methods are `#[inline(always)]`, because they must be compiled inside a function that enables the level's
/// features. They use no closures for the same reason: a closure is a function without those features, and would call
/// every intrinsic instead of inlining it.
///
/// # Safety
/// All methods need a processor with the level's features. A pointer must be valid for the 64
/// bytes that the method reads or writes; it need not be aligned unless the method says so.
pub(super) trait Vector {
    /// 64 bytes, in one or more registers.
    type Line: Copy;

    /// 32 f32 values, in an order that the level chooses.
    ///
    /// A bf16 is the upper half of an f32. With even and odd elements in separate registers, a shift and a mask split a
    /// word of two bf16 into values, and join them again, without moving data between lanes.
    type Values: Copy;

    /// Number of lines that a sum keeps in registers at once; each needs three sets of [`Values`](Self::Values).
    const SUM_LINES: usize;

    unsafe fn zero_line() -> Self::Line;
    unsafe fn load(src: *const u8) -> Self::Line;
    unsafe fn store(dst: *mut u8, line: Self::Line);
    /// Stores with a streaming store, which bypasses the caches; `dst` must be 64-byte aligned.
    unsafe fn stream(dst: *mut u8, line: Self::Line);

    unsafe fn zero() -> Self::Values;
    unsafe fn from_bf16(line: Self::Line) -> Self::Values;
    unsafe fn from_f32(lines: [Self::Line; 2]) -> Self::Values;
    unsafe fn splat(value: f32) -> Self::Values;
    unsafe fn add(a: Self::Values, b: Self::Values) -> Self::Values;
    unsafe fn mul(a: Self::Values, b: Self::Values) -> Self::Values;
    /// Rounds to bf16 and back. `values` must be results of an addition: a NaN among them is then quiet, so that its
    /// upper half alone is a NaN. The bits of that NaN are unspecified.
    unsafe fn round(values: Self::Values) -> Self::Values;
    /// Rounds to bf16; a NaN becomes the canonical bf16 NaN.
    unsafe fn to_bf16(values: Self::Values) -> Self::Line;
    /// Stores the values in their order in memory; a NaN becomes the canonical f32 NaN.
    unsafe fn to_f32(values: Self::Values) -> [Self::Line; 2];
}

/// Arrays of a line's size, which the compiler vectorises for the target's baseline.
pub(super) struct Portable;

/// The bits of `value` with its bf16 rounding in the upper half, or the canonical NaN.
#[inline(always)]
fn rounded(value: f32) -> u32 {
    let bits = value.to_bits();
    // Computed unconditionally, so that the compiler emits a select and no branch.
    let sum = bits.wrapping_add(HALF + (bits >> 16 & 1));
    if bits & 0x7FFF_FFFF > 0x7F80_0000 { NAN } else { sum }
}

/// The bits of `value`, its NaN canonical.
#[inline(always)]
fn canonical(value: f32) -> u32 {
    if value.is_nan() { NAN } else { value.to_bits() }
}

impl Vector for Portable {
    type Line = [u32; 16];
    /// Even elements, odd elements.
    type Values = [[f32; 16]; 2];

    const SUM_LINES: usize = 1;

    #[inline(always)]
    unsafe fn zero_line() -> Self::Line {
        [0; 16]
    }

    #[inline(always)]
    unsafe fn load(src: *const u8) -> Self::Line {
        // SAFETY: the caller's pointer is valid for 64 bytes.
        unsafe { src.cast::<Self::Line>().read_unaligned() }
    }

    #[inline(always)]
    unsafe fn store(dst: *mut u8, line: Self::Line) {
        // SAFETY: the caller's pointer is valid for 64 bytes.
        unsafe { dst.cast::<Self::Line>().write_unaligned(line) }
    }

    #[inline(always)]
    unsafe fn stream(dst: *mut u8, line: Self::Line) {
        #[cfg(target_arch = "x86_64")]
        for (i, part) in line.as_chunks::<4>().0.iter().enumerate() {
            // SAFETY: four parts of 16 bytes make the 64 that the caller's aligned pointer is
            // valid for; SSE2 is in the baseline of x86-64.
            unsafe {
                let part = _mm_loadu_si128(part.as_ptr().cast());
                _mm_stream_si128(dst.add(16 * i).cast(), part);
            }
        }
        #[cfg(not(target_arch = "x86_64"))]
        // SAFETY: the caller's promise is the same.
        unsafe {
            Self::store(dst, line);
        }
    }

    #[inline(always)]
    unsafe fn zero() -> Self::Values {
        [[0.0; 16]; 2]
    }

    #[inline(always)]
    unsafe fn from_bf16(line: Self::Line) -> Self::Values {
        let mut values = [[0.0; 16]; 2];
        for i in 0..16 {
            values[0][i] = f32::from_bits(line[i] << 16);
            values[1][i] = f32::from_bits(line[i] & ODD);
        }
        values
    }

    #[inline(always)]
    unsafe fn from_f32(lines: [Self::Line; 2]) -> Self::Values {
        let mut values = [[0.0; 16]; 2];
        for i in 0..16 {
            values[0][i] = f32::from_bits(lines[i / 8][i % 8 * 2]);
            values[1][i] = f32::from_bits(lines[i / 8][i % 8 * 2 + 1]);
        }
        values
    }

    #[inline(always)]
    unsafe fn add(mut a: Self::Values, b: Self::Values) -> Self::Values {
        for i in 0..16 {
            a[0][i] += b[0][i];
            a[1][i] += b[1][i];
        }
        a
    }

    #[inline(always)]
    unsafe fn mul(mut a: Self::Values, b: Self::Values) -> Self::Values {
        for i in 0..16 {
            a[0][i] *= b[0][i];
            a[1][i] *= b[1][i];
        }
        a
    }

    #[inline(always)]
    unsafe fn splat(value: f32) -> Self::Values {
        [[value; 16]; 2]
    }

    #[inline(always)]
    unsafe fn round(mut values: Self::Values) -> Self::Values {
        for half in &mut values {
            for value in half {
                *value = f32::from_bits(rounded(*value) & ODD);
            }
        }
        values
    }

    #[inline(always)]
    unsafe fn to_bf16(values: Self::Values) -> Self::Line {
        let mut line = [0; 16];
        for i in 0..16 {
            line[i] = rounded(values[0][i]) >> 16 | rounded(values[1][i]) & ODD;
        }
        line
    }

    #[inline(always)]
    unsafe fn to_f32(values: Self::Values) -> [Self::Line; 2] {
        let mut lines = [[0; 16]; 2];
        for i in 0..16 {
            lines[i / 8][i % 8 * 2] = canonical(values[0][i]);
            lines[i / 8][i % 8 * 2 + 1] = canonical(values[1][i]);
        }
        lines
    }
}

/// 32-byte vectors, two to a line.
#[cfg(target_arch = "x86_64")]
pub(super) struct Avx2;

#[cfg(target_arch = "x86_64")]
impl Avx2 {
    /// The bits of `value` with its bf16 rounding in the upper half; a NaN is unchanged.
    #[inline(always)]
    unsafe fn rounded(value: __m256) -> __m256i {
        // SAFETY: AVX2 is the caller's promise.
        unsafe {
            let bits = _mm256_castps_si256(value);
            let tie = _mm256_and_si256(_mm256_srli_epi32::<16>(bits), _mm256_set1_epi32(1));
            let half = _mm256_add_epi32(tie, _mm256_set1_epi32(HALF as i32));
            let ordered = _mm256_castps_si256(_mm256_cmp_ps::<_CMP_ORD_Q>(value, value));
            _mm256_add_epi32(bits, _mm256_and_si256(half, ordered))
        }
    }

    /// `bits` where `value` is not NaN, the canonical NaN where it is.
    #[inline(always)]
    unsafe fn canonical(value: __m256, bits: __m256i) -> __m256i {
        // SAFETY: AVX2 is the caller's promise.
        unsafe {
            let nan = _mm256_castps_si256(_mm256_cmp_ps::<_CMP_UNORD_Q>(value, value));
            _mm256_blendv_epi8(bits, _mm256_set1_epi32(NAN as i32), nan)
        }
    }

    /// The bf16 in the upper halves of `words`, as f32.
    #[inline(always)]
    unsafe fn upper(words: __m256i) -> __m256 {
        // SAFETY: AVX2 is the caller's promise.
        unsafe { _mm256_castsi256_ps(_mm256_and_si256(words, _mm256_set1_epi32(ODD as i32))) }
    }

    /// The bf16 in the lower halves of `words`, as f32.
    #[inline(always)]
    unsafe fn lower(words: __m256i) -> __m256 {
        // SAFETY: AVX2 is the caller's promise.
        unsafe { _mm256_castsi256_ps(_mm256_slli_epi32::<16>(words)) }
    }

    /// Words of two bf16, each from an even and an odd element.
    #[inline(always)]
    unsafe fn join(even: __m256, odd: __m256) -> __m256i {
        // SAFETY: AVX2 is the caller's promise.
        unsafe {
            let low = _mm256_srli_epi32::<16>(Self::canonical(even, Self::rounded(even)));
            _mm256_blend_epi16::<0b1010_1010>(low, Self::canonical(odd, Self::rounded(odd)))
        }
    }

    /// 16 consecutive f32 as their even and their odd elements.
    #[inline(always)]
    unsafe fn split_f32(line: [__m256i; 2]) -> [__m256; 2] {
        // SAFETY: AVX2 is the caller's promise.
        unsafe {
            // The shuffle works within halves of 16 bytes and leaves pieces of 8 bytes in the
            // order 0 2 1 3.
            let (low, high) = (_mm256_castsi256_ps(line[0]), _mm256_castsi256_ps(line[1]));
            let even = _mm256_castps_pd(_mm256_shuffle_ps::<0b10_00_10_00>(low, high));
            let odd = _mm256_castps_pd(_mm256_shuffle_ps::<0b11_01_11_01>(low, high));
            [
                _mm256_castpd_ps(_mm256_permute4x64_pd::<0b11_01_10_00>(even)),
                _mm256_castpd_ps(_mm256_permute4x64_pd::<0b11_01_10_00>(odd)),
            ]
        }
    }

    /// The inverse of `split_f32`, NaN canonical.
    #[inline(always)]
    unsafe fn join_f32(halves: [__m256; 2]) -> [__m256i; 2] {
        // SAFETY: AVX2 is the caller's promise.
        unsafe {
            let even = Self::canonical(halves[0], _mm256_castps_si256(halves[0]));
            let odd = Self::canonical(halves[1], _mm256_castps_si256(halves[1]));
            // The unpacks work within halves of 16 bytes.
            let low = _mm256_unpacklo_epi32(even, odd);
            let high = _mm256_unpackhi_epi32(even, odd);
            [_mm256_permute2x128_si256::<0x20>(low, high), _mm256_permute2x128_si256::<0x31>(low, high)]
        }
    }
}

#[cfg(target_arch = "x86_64")]
impl Vector for Avx2 {
    type Line = [__m256i; 2];
    /// For each half line: even elements, odd elements.
    type Values = [[__m256; 2]; 2];

    const SUM_LINES: usize = 1;

    #[inline(always)]
    unsafe fn zero_line() -> Self::Line {
        // SAFETY: AVX2 is the caller's promise.
        unsafe { [_mm256_setzero_si256(); 2] }
    }

    #[inline(always)]
    unsafe fn load(src: *const u8) -> Self::Line {
        // SAFETY: AVX2 is the caller's promise, as are 64 valid bytes.
        unsafe { [_mm256_loadu_si256(src.cast()), _mm256_loadu_si256(src.add(32).cast())] }
    }

    #[inline(always)]
    unsafe fn store(dst: *mut u8, line: Self::Line) {
        // SAFETY: AVX2 is the caller's promise, as are 64 valid bytes.
        unsafe {
            _mm256_storeu_si256(dst.cast(), line[0]);
            _mm256_storeu_si256(dst.add(32).cast(), line[1]);
        }
    }

    #[inline(always)]
    unsafe fn stream(dst: *mut u8, line: Self::Line) {
        // SAFETY: AVX2 is the caller's promise, as are 64 valid and aligned bytes.
        unsafe {
            _mm256_stream_si256(dst.cast(), line[0]);
            _mm256_stream_si256(dst.add(32).cast(), line[1]);
        }
    }

    #[inline(always)]
    unsafe fn zero() -> Self::Values {
        // SAFETY: AVX2 is the caller's promise.
        unsafe { [[_mm256_setzero_ps(); 2]; 2] }
    }

    #[inline(always)]
    unsafe fn from_bf16(line: Self::Line) -> Self::Values {
        // SAFETY: AVX2 is the caller's promise.
        unsafe {
            let [first, second] = line;
            [[Self::lower(first), Self::upper(first)], [Self::lower(second), Self::upper(second)]]
        }
    }

    #[inline(always)]
    unsafe fn from_f32(lines: [Self::Line; 2]) -> Self::Values {
        // SAFETY: AVX2 is the caller's promise.
        unsafe { [Self::split_f32(lines[0]), Self::split_f32(lines[1])] }
    }

    #[inline(always)]
    unsafe fn add(a: Self::Values, b: Self::Values) -> Self::Values {
        // SAFETY: AVX2 is the caller's promise.
        unsafe {
            [
                [_mm256_add_ps(a[0][0], b[0][0]), _mm256_add_ps(a[0][1], b[0][1])],
                [_mm256_add_ps(a[1][0], b[1][0]), _mm256_add_ps(a[1][1], b[1][1])],
            ]
        }
    }

    #[inline(always)]
    unsafe fn mul(a: Self::Values, b: Self::Values) -> Self::Values {
        // SAFETY: AVX2 is the caller's promise.
        unsafe {
            [
                [_mm256_mul_ps(a[0][0], b[0][0]), _mm256_mul_ps(a[0][1], b[0][1])],
                [_mm256_mul_ps(a[1][0], b[1][0]), _mm256_mul_ps(a[1][1], b[1][1])],
            ]
        }
    }

    #[inline(always)]
    unsafe fn splat(value: f32) -> Self::Values {
        // SAFETY: AVX2 is the caller's promise.
        unsafe { [[_mm256_set1_ps(value); 2]; 2] }
    }

    #[inline(always)]
    unsafe fn round(values: Self::Values) -> Self::Values {
        // SAFETY: AVX2 is the caller's promise.
        unsafe {
            let [[a, b], [c, d]] = values;
            [
                [Self::upper(Self::rounded(a)), Self::upper(Self::rounded(b))],
                [Self::upper(Self::rounded(c)), Self::upper(Self::rounded(d))],
            ]
        }
    }

    #[inline(always)]
    unsafe fn to_bf16(values: Self::Values) -> Self::Line {
        // SAFETY: AVX2 is the caller's promise.
        unsafe { [Self::join(values[0][0], values[0][1]), Self::join(values[1][0], values[1][1])] }
    }

    #[inline(always)]
    unsafe fn to_f32(values: Self::Values) -> [Self::Line; 2] {
        // SAFETY: AVX2 is the caller's promise.
        unsafe { [Self::join_f32(values[0]), Self::join_f32(values[1])] }
    }
}

/// 64-byte vectors, one to a line.
#[cfg(target_arch = "x86_64")]
pub(super) struct Avx512;

#[cfg(target_arch = "x86_64")]
impl Avx512 {
    /// The bits of `value` with its bf16 rounding in the upper half; a NaN is unchanged.
    #[inline(always)]
    unsafe fn rounded(value: __m512) -> __m512i {
        // SAFETY: AVX-512 is the caller's promise.
        unsafe {
            let bits = _mm512_castps_si512(value);
            let tie = _mm512_test_epi32_mask(bits, _mm512_set1_epi32(1 << 16));
            let half = _mm512_set1_epi32(HALF as i32);
            let half = _mm512_mask_mov_epi32(half, tie, _mm512_set1_epi32(HALF as i32 + 1));
            let ordered = _mm512_cmp_ps_mask::<_CMP_ORD_Q>(value, value);
            _mm512_mask_add_epi32(bits, ordered, bits, half)
        }
    }

    /// `bits` where `value` is not NaN, the canonical NaN where it is.
    #[inline(always)]
    unsafe fn canonical(value: __m512, bits: __m512i) -> __m512i {
        // SAFETY: AVX-512 is the caller's promise.
        unsafe {
            let nan = _mm512_cmp_ps_mask::<_CMP_UNORD_Q>(value, value);
            _mm512_mask_mov_epi32(bits, nan, _mm512_set1_epi32(NAN as i32))
        }
    }

    /// The bf16 in the upper halves of `words`, as f32.
    #[inline(always)]
    unsafe fn upper(words: __m512i) -> __m512 {
        // SAFETY: AVX-512 is the caller's promise.
        unsafe { _mm512_castsi512_ps(_mm512_and_si512(words, _mm512_set1_epi32(ODD as i32))) }
    }
}

#[cfg(target_arch = "x86_64")]
impl Vector for Avx512 {
    type Line = __m512i;
    /// Even elements, odd elements.
    type Values = [__m512; 2];

    const SUM_LINES: usize = 2;

    #[inline(always)]
    unsafe fn zero_line() -> Self::Line {
        // SAFETY: AVX-512 is the caller's promise.
        unsafe { _mm512_setzero_si512() }
    }

    #[inline(always)]
    unsafe fn load(src: *const u8) -> Self::Line {
        // SAFETY: AVX-512 is the caller's promise, as are 64 valid bytes.
        unsafe { _mm512_loadu_si512(src.cast()) }
    }

    #[inline(always)]
    unsafe fn store(dst: *mut u8, line: Self::Line) {
        // SAFETY: AVX-512 is the caller's promise, as are 64 valid bytes.
        unsafe { _mm512_storeu_si512(dst.cast(), line) }
    }

    #[inline(always)]
    unsafe fn stream(dst: *mut u8, line: Self::Line) {
        // SAFETY: AVX-512 is the caller's promise, as are 64 valid and aligned bytes.
        unsafe { _mm512_stream_si512(dst.cast(), line) }
    }

    #[inline(always)]
    unsafe fn zero() -> Self::Values {
        // SAFETY: AVX-512 is the caller's promise.
        unsafe { [_mm512_setzero_ps(); 2] }
    }

    #[inline(always)]
    unsafe fn from_bf16(line: Self::Line) -> Self::Values {
        // SAFETY: AVX-512 is the caller's promise.
        unsafe { [_mm512_castsi512_ps(_mm512_slli_epi32::<16>(line)), Self::upper(line)] }
    }

    #[inline(always)]
    unsafe fn from_f32(lines: [Self::Line; 2]) -> Self::Values {
        // SAFETY: AVX-512 is the caller's promise.
        unsafe {
            let even = _mm512_setr_epi32(0, 2, 4, 6, 8, 10, 12, 14, 16, 18, 20, 22, 24, 26, 28, 30);
            let odd = _mm512_add_epi32(even, _mm512_set1_epi32(1));
            [
                _mm512_castsi512_ps(_mm512_permutex2var_epi32(lines[0], even, lines[1])),
                _mm512_castsi512_ps(_mm512_permutex2var_epi32(lines[0], odd, lines[1])),
            ]
        }
    }

    #[inline(always)]
    unsafe fn add(a: Self::Values, b: Self::Values) -> Self::Values {
        // SAFETY: AVX-512 is the caller's promise.
        unsafe { [_mm512_add_ps(a[0], b[0]), _mm512_add_ps(a[1], b[1])] }
    }

    #[inline(always)]
    unsafe fn mul(a: Self::Values, b: Self::Values) -> Self::Values {
        // SAFETY: AVX-512 is the caller's promise.
        unsafe { [_mm512_mul_ps(a[0], b[0]), _mm512_mul_ps(a[1], b[1])] }
    }

    #[inline(always)]
    unsafe fn splat(value: f32) -> Self::Values {
        // SAFETY: AVX-512 is the caller's promise.
        unsafe { [_mm512_set1_ps(value); 2] }
    }

    #[inline(always)]
    unsafe fn round(values: Self::Values) -> Self::Values {
        // SAFETY: AVX-512 is the caller's promise.
        unsafe { [Self::upper(Self::rounded(values[0])), Self::upper(Self::rounded(values[1]))] }
    }

    #[inline(always)]
    unsafe fn to_bf16(values: Self::Values) -> Self::Line {
        // SAFETY: AVX-512 is the caller's promise.
        unsafe {
            let even = Self::canonical(values[0], Self::rounded(values[0]));
            let odd = Self::canonical(values[1], Self::rounded(values[1]));
            _mm512_mask_mov_epi16(_mm512_srli_epi32::<16>(even), 0xAAAA_AAAA, odd)
        }
    }

    #[inline(always)]
    unsafe fn to_f32(values: Self::Values) -> [Self::Line; 2] {
        // SAFETY: AVX-512 is the caller's promise.
        unsafe {
            let [even, odd] = values;
            let even = Self::canonical(even, _mm512_castps_si512(even));
            let odd = Self::canonical(odd, _mm512_castps_si512(odd));
            let low = _mm512_setr_epi32(0, 16, 1, 17, 2, 18, 3, 19, 4, 20, 5, 21, 6, 22, 7, 23);
            let high = _mm512_add_epi32(low, _mm512_set1_epi32(8));
            [_mm512_permutex2var_epi32(even, low, odd), _mm512_permutex2var_epi32(even, high, odd)]
        }
    }
}
