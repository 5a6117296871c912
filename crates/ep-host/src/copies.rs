//! Ways to copy and to zero memory. Benchmarks in `ep-cli` measure the copy bandwidth of a machine with them, as the
//! ceiling for the operators.
//!
//! Which way is fastest depends on the machine, on the number of bytes and on their location. An ordinary store first
//! reads the cache line that it writes to. A streaming store does not, and neither does `rep movsb` on most processors.

use crate::simd::{self, Level};

/// Bytes per call of memcpy with [`CopyWay::Chunks`]: fewer than the size from which memcpy uses streaming stores.
const CHUNK: usize = 16 << 10;

/// A way to copy.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum CopyWay {
    /// One call of memcpy, which chooses its own stores.
    Memcpy,
    /// Calls of memcpy for 16 KiB each, which use ordinary stores.
    Chunks,
    /// Streaming stores, which bypass the caches. The operators use them for large outputs.
    Streaming,
    /// The string copy instruction of x86-64; memcpy on other processors.
    RepMovsb,
}

impl CopyWay {
    /// Every way.
    pub const ALL: [Self; 4] = [Self::Memcpy, Self::Chunks, Self::Streaming, Self::RepMovsb];

    /// The name of the way, for reports.
    pub fn name(self) -> &'static str {
        match self {
            Self::Memcpy => "memcpy",
            Self::Chunks => "memcpy of 16 KiB at a time",
            Self::Streaming => "streaming stores",
            Self::RepMovsb => "rep movsb",
        }
    }

    /// Copies the first `n` bytes of `from` to `to`, where `n` is the length of the shorter slice.
    pub fn copy(self, from: &[u8], to: &mut [u8]) {
        let len = from.len().min(to.len());
        let (from, to) = (&from[..len], &mut to[..len]);
        match self {
            Self::Memcpy => to.copy_from_slice(from),
            Self::Chunks => {
                to.chunks_mut(CHUNK).zip(from.chunks(CHUNK)).for_each(|(to, from)| to.copy_from_slice(from));
            }
            Self::Streaming => {
                // SAFETY: both slices have `len` bytes, and a mutable slice overlaps no other.
                unsafe { simd::copy_row(Level::detect(), from.as_ptr(), to.as_mut_ptr(), len, true) };
                simd::stream_fence();
            }
            Self::RepMovsb => rep_movsb(from, to),
        }
    }
}

/// Fills `to` with zeros by streaming stores.
pub fn stream_zeros(to: &mut [u8]) {
    // SAFETY: a mutable slice is valid for writes of its length.
    unsafe { simd::zero_row(Level::detect(), to.as_mut_ptr(), to.len(), true) };
    simd::stream_fence();
}

/// Copies slices of the same length.
#[cfg(target_arch = "x86_64")]
fn rep_movsb(from: &[u8], to: &mut [u8]) {
    debug_assert_eq!(from.len(), to.len());
    // SAFETY: the instruction reads `rcx` bytes at `rsi` and writes them at `rdi`. Both slices have that length, and
    // one is mutable, so they do not overlap. The direction flag is clear between functions.
    unsafe {
        std::arch::asm!(
            "rep movsb",
            inout("rcx") to.len() => _,
            inout("rsi") from.as_ptr() => _,
            inout("rdi") to.as_mut_ptr() => _,
            options(nostack, preserves_flags)
        );
    }
}

#[cfg(not(target_arch = "x86_64"))]
fn rep_movsb(from: &[u8], to: &mut [u8]) {
    to.copy_from_slice(from);
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn every_way_copies_all_and_no_more() {
        for len in [0, 1, 63, 64, 1000, CHUNK + 1, 3 * CHUNK] {
            let from: Vec<u8> = (0..len).map(|at| (at * 7 + at / 251) as u8).collect();
            for way in CopyWay::ALL {
                let mut to = vec![0xEE; len + 8];
                way.copy(&from, &mut to[..len]);
                assert_eq!(to[..len], from, "{way:?} of {len}");
                assert_eq!(to[len..], [0xEE; 8], "{way:?} of {len}");
            }
            let mut to = vec![0xEE; len + 8];
            stream_zeros(&mut to[..len]);
            assert!(to[..len].iter().all(|&byte| byte == 0) && to[len..] == [0xEE; 8], "{len}");
        }
    }

    #[test]
    fn the_shorter_slice_decides_the_length() {
        let mut to = [0; 3];
        CopyWay::Streaming.copy(&[1, 2], &mut to);
        assert_eq!(to, [1, 2, 0]);
        CopyWay::RepMovsb.copy(&[7; 9], &mut to);
        assert_eq!(to, [7; 3]);
    }
}
