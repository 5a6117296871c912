//! Spreads pieces of work that need no peer over the workers of one rank. `operators` copies staged memory with it;
//! `weight_rows` computes with it.

use rayon::prelude::*;

use crate::simd::{self, Level};

/// Bytes that a worker copies per piece.
const PIECE: usize = 256 << 10;

/// Calls `work` with the number of each piece and the piece, on the pool's threads; without a pool, on this thread.
pub(crate) fn each<T: Send>(
    pool: Option<&rayon::ThreadPool>,
    pieces: Vec<T>,
    work: impl Fn(usize, T) + Sync,
) {
    let work = |(number, piece)| work(number, piece);
    match pool {
        None => pieces.into_iter().enumerate().for_each(work),
        Some(pool) => pool.install(|| pieces.into_par_iter().enumerate().for_each(work)),
    }
}

/// Copies `from` to the beginning of `to`, with streaming stores where `from` has more than `streaming_bytes` bytes.
///
/// # Panics
/// When `to` is shorter than `from`.
pub(crate) fn copy(
    pool: Option<&rayon::ThreadPool>,
    level: Level,
    streaming_bytes: usize,
    to: &mut [u8],
    from: &[u8],
) {
    let streaming = from.len() > streaming_bytes;
    let pieces = to[..from.len()].chunks_mut(PIECE).zip(from.chunks(PIECE)).collect();
    each(pool, pieces, |_, (to, from)| {
        // SAFETY: both slices have the same length, and `to` is mutable, so they do not overlap.
        unsafe { simd::copy_row(level, from.as_ptr(), to.as_mut_ptr(), from.len(), streaming) };
        simd::stream_fence();
    });
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn copy_writes_the_bytes_of_the_source_and_no_others() {
        let pool = rayon::ThreadPoolBuilder::new().num_threads(3).build().unwrap();
        // Miri is slow: two pieces are enough to test the division into pieces.
        let pieces = if cfg!(miri) { 1 } else { 5 };
        for bytes in [0, 1, PIECE, pieces * PIECE + 77] {
            let from: Vec<u8> = (0..bytes).map(|at| (at % 251) as u8).collect();
            for pool in [None, Some(&pool)] {
                for streaming_bytes in [0, usize::MAX] {
                    let mut to = vec![0xA5; bytes + 64];
                    copy(pool, Level::detect(), streaming_bytes, &mut to, &from);
                    assert!(to[..bytes] == from && to[bytes..].iter().all(|&byte| byte == 0xA5), "{bytes}");
                }
            }
        }
    }
}
