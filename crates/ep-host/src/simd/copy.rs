//! Copies of whole rows, to one destination or to several, and zero rows. `dispatch` and `workers` call them.

use super::vector::{LINE, Vector};
use super::{Level, dispatch};

/// Copies one row.
///
/// With `streaming`, the copy uses streaming stores where the target has them. They bypass the caches and save the read
/// of the destination that an ordinary store costs, so they suit rows that are not read soon. Only [`stream_fence`]
/// orders them before later stores: the caller must issue it before it publishes the rows that it copied.
///
/// Any alignment and length work. A `dst` that is 64-byte aligned and a `len` that is a multiple of 64 are the fastest.
///
/// # Safety
/// `src` must be valid for reads of `len` bytes and `dst` for writes of `len` bytes. The two must not overlap.
pub(crate) unsafe fn copy_row(level: Level, src: *const u8, dst: *mut u8, len: usize, streaming: bool) {
    // SAFETY: passed on.
    unsafe { scatter_row(level, src, len, &[dst], streaming) }
}

/// Copies one row to several destinations and reads it from memory only once.
///
/// See [`copy_row`] for `streaming` and alignment.
///
/// # Safety
/// `src` must be valid for reads of `len` bytes and every one of `dsts` for writes of `len` bytes. No destination may
/// overlap `src`. Bytes that destinations have in common are written once for each of them.
pub(crate) unsafe fn scatter_row(
    level: Level,
    src: *const u8,
    len: usize,
    dsts: &[*mut u8],
    streaming: bool,
) {
    if streaming {
        dispatch!(level, unsafe stream_rows::<_>(src: *const u8, len: usize, dsts: &[*mut u8]));
    } else {
        for &dst in dsts {
            // SAFETY: both are valid for `len` bytes and do not overlap.
            unsafe { src.copy_to_nonoverlapping(dst, len) };
        }
    }
}

/// Fills one row with zeros. See [`copy_row`] for `streaming` and alignment.
///
/// # Safety
/// `dst` must be valid for writes of `len` bytes.
pub(crate) unsafe fn zero_row(level: Level, dst: *mut u8, len: usize, streaming: bool) {
    if streaming {
        dispatch!(level, unsafe stream_zeros::<_>(dst: *mut u8, len: usize));
    } else {
        // SAFETY: valid for `len` bytes.
        unsafe { dst.write_bytes(0, len) };
    }
}

/// Makes every earlier streaming store of this thread visible before any later store.
#[inline]
pub(crate) fn stream_fence() {
    #[cfg(target_arch = "x86_64")]
    // SAFETY: SSE is in the baseline of x86-64.
    unsafe {
        std::arch::x86_64::_mm_sfence();
    }
}

/// Bytes of a row that are copied to every destination before the next ones. The stores to each destination then form
/// runs long enough for the memory, while the source stays in the first-level cache: a tenth faster than copying the
/// whole row to one destination after the other.
const PIECE: usize = 1024;

/// # Safety
/// The requirements of [`scatter_row`]; the processor must have `V`'s features.
#[inline(always)]
unsafe fn stream_rows<V: Vector>(src: *const u8, len: usize, dsts: &[*mut u8]) {
    let whole = len - len % LINE;
    // SAFETY: everything is within `len` bytes, and lines are streamed to the start of lines.
    unsafe {
        for at in (0..whole).step_by(PIECE) {
            let piece = PIECE.min(whole - at);
            for &dst in dsts {
                if dst.addr().is_multiple_of(LINE) {
                    stream_lines::<V>(src.add(at), dst.add(at), piece);
                }
            }
        }
        for &dst in dsts {
            // Ordinary stores for parts of lines: a streaming store of part of a line is slower than an ordinary store.
            let head = (dst.addr().wrapping_neg() % LINE).min(len);
            if head > 0 {
                let lines = (len - head) / LINE * LINE;
                src.copy_to_nonoverlapping(dst, head);
                stream_lines::<V>(src.add(head), dst.add(head), lines);
                let tail = head + lines;
                src.add(tail).copy_to_nonoverlapping(dst.add(tail), len - tail);
            } else if whole < len {
                src.add(whole).copy_to_nonoverlapping(dst.add(whole), len - whole);
            }
        }
    }
}

/// # Safety
/// `src` must be valid for reads of `len` bytes and `dst` for writes of `len` bytes; `dst` must be 64-byte aligned and
/// `len` a multiple of 64; the processor must have `V`'s features.
#[inline(always)]
unsafe fn stream_lines<V: Vector>(src: *const u8, dst: *mut u8, len: usize) {
    for at in (0..len).step_by(LINE) {
        // SAFETY: the line is within `len` bytes.
        unsafe { V::stream(dst.add(at), V::load(src.add(at))) };
    }
}

/// # Safety
/// The requirements of [`zero_row`]; the processor must have `V`'s features.
#[inline(always)]
unsafe fn stream_zeros<V: Vector>(dst: *mut u8, len: usize) {
    let head = (dst.addr().wrapping_neg() % LINE).min(len);
    let lines = (len - head) / LINE * LINE;
    let tail = head + lines;
    // SAFETY: everything is within `len` bytes; the loop starts at a line of `dst`.
    unsafe {
        dst.write_bytes(0, head);
        for at in (head..tail).step_by(LINE) {
            V::stream(dst.add(at), V::zero_line());
        }
        dst.add(tail).write_bytes(0, len - tail);
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::simd::testing::{Guarded, Random};

    const LENGTHS: [usize; 9] = [0, 16, 48, 64, 80, 240, 1024, 4096 + 16, 14336];

    #[test]
    fn copies_are_exact_and_write_no_other_bytes() {
        let mut random = Random(1);
        for level in Level::available() {
            for len in LENGTHS {
                for (from, to) in [(0, 0), (16, 0), (0, 16), (48, 32), (1, 3)] {
                    for streaming in [false, true] {
                        let bytes: Vec<u8> = (0..len).map(|_| random.next() as u8).collect();
                        let src = Guarded::with(&bytes, from);
                        let mut dst = Guarded::new(len, to);
                        // SAFETY: both have `len` bytes of their own.
                        unsafe { copy_row(level, src.as_ptr(), dst.as_mut_ptr(), len, streaming) };
                        stream_fence();
                        assert_eq!(dst.bytes(), bytes, "{level:?} {len} {from} {to} {streaming}");
                        assert!(dst.intact());
                    }
                }
            }
        }
    }

    #[test]
    fn scatters_reach_every_destination() {
        let mut random = Random(2);
        for level in Level::available() {
            for len in LENGTHS {
                for (count, aligned) in [(0, true), (1, true), (2, false), (3, true), (8, true), (9, false)] {
                    for streaming in [false, true] {
                        let bytes: Vec<u8> = (0..len).map(|_| random.next() as u8).collect();
                        let src = Guarded::with(&bytes, 16);
                        let mut dsts: Vec<Guarded> = (0..count)
                            .map(|i| Guarded::new(len, if aligned { 0 } else { 16 * (i % 4) }))
                            .collect();
                        let pointers: Vec<*mut u8> = dsts.iter_mut().map(Guarded::as_mut_ptr).collect();
                        // SAFETY: all have `len` bytes of their own.
                        unsafe { scatter_row(level, src.as_ptr(), len, &pointers, streaming) };
                        stream_fence();
                        for dst in &dsts {
                            assert_eq!(dst.bytes(), bytes, "{level:?} {len} {count} {streaming}");
                            assert!(dst.intact());
                        }
                    }
                }
            }
        }
    }

    #[test]
    fn zeroing_writes_no_other_bytes() {
        for level in Level::available() {
            for len in LENGTHS {
                for offset in [0, 16, 48] {
                    for streaming in [false, true] {
                        let mut dst = Guarded::new(len, offset);
                        // SAFETY: it has `len` bytes.
                        unsafe { zero_row(level, dst.as_mut_ptr(), len, streaming) };
                        stream_fence();
                        assert!(dst.bytes().iter().all(|&byte| byte == 0) && dst.intact());
                    }
                }
            }
        }
    }
}
