//! Parallel iterators on the threads of the current rayon pool, in place of `rayon::prelude`.
//!
//! If the threads of rayon's global pool cannot start, every use of that pool panics for as long as the process lives.
//! The functions of this module then make the calling thread a pool of one thread: a codec on one core is better than
//! the end of the job.

use std::error::Error;
use std::panic::catch_unwind;
use std::sync::OnceLock;

pub(crate) use rayon::iter::{IndexedParallelIterator, ParallelIterator};
use rayon::iter::{IntoParallelIterator, IntoParallelRefIterator};
use rayon::slice::{Chunks, ChunksMut, Iter, ParallelSlice, ParallelSliceMut};
use rayon::{ThreadPool, ThreadPoolBuildError, ThreadPoolBuilder};

/// The functions of `rayon::prelude` with these names.
pub(crate) trait Parallel<T> {
    fn par_iter(&self) -> Iter<'_, T>
    where
        T: Sync;

    fn par_chunks(&self, length: usize) -> Chunks<'_, T>
    where
        T: Sync;

    fn par_chunks_mut(&mut self, length: usize) -> ChunksMut<'_, T>
    where
        T: Send;
}

impl<T> Parallel<T> for [T] {
    fn par_iter(&self) -> Iter<'_, T>
    where
        T: Sync,
    {
        ensure_pool();
        IntoParallelRefIterator::par_iter(self)
    }

    fn par_chunks(&self, length: usize) -> Chunks<'_, T>
    where
        T: Sync,
    {
        ensure_pool();
        ParallelSlice::par_chunks(self, length)
    }

    fn par_chunks_mut(&mut self, length: usize) -> ChunksMut<'_, T>
    where
        T: Send,
    {
        ensure_pool();
        ParallelSliceMut::par_chunks_mut(self, length)
    }
}

/// Like `into_par_iter` of `rayon::prelude`.
pub(crate) fn parallel<I: IntoParallelIterator>(items: I) -> I::Iter {
    ensure_pool();
    items.into_par_iter()
}

thread_local! {
    /// A pool that consists of this thread only. Once the pool exists, rayon runs this thread's parallel work on it.
    static ALONE: ThreadPool = {
        let alone = ThreadPoolBuilder::new().num_threads(1).use_current_thread().build();
        alone.expect("a pool of the calling thread starts no thread, and `ensure_pool` finds the thread in no pool")
    };
}

/// Makes sure that the calling thread has a rayon pool: its current one, the global one, or itself.
fn ensure_pool() {
    static IS_GLOBAL: OnceLock<bool> = OnceLock::new();
    if rayon::current_thread_index().is_some() {
        return;
    }
    if !IS_GLOBAL.get_or_init(|| is_usable(ThreadPoolBuilder::new().build_global())) {
        ALONE.with(|_| ());
    }
}

/// Whether a global pool exists after this attempt to build it.
fn is_usable(built: Result<(), ThreadPoolBuildError>) -> bool {
    match built {
        Ok(()) => true,
        // The system refused a thread.
        Err(error) if error.source().is_some() => false,
        // The program has built the pool before, or has tried to and failed. Only a panic of rayon tells which.
        Err(_) => catch_unwind(rayon::current_num_threads).is_ok(),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_pool_is_unusable_if_the_system_refuses_a_thread() {
        let builder = ThreadPoolBuilder::new().num_threads(2);
        let refused = builder.spawn_handler(|_| Err(std::io::ErrorKind::WouldBlock.into())).build();
        assert!(!is_usable(refused.map(drop)));
        ensure_pool();
        // A second attempt to build the global pool finds the one that `ensure_pool` has built.
        assert!(is_usable(ThreadPoolBuilder::new().build_global()));
    }
}
