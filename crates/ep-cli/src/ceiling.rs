//! The memcpy ceiling: how fast all cores together can copy memory that no cache holds.

use std::hint::black_box;
use std::sync::Barrier;
use std::time::{Duration, Instant};

use crate::machine;

/// Bytes that one copy reads, and writes, on all cores together; more where many cores would get too little each.
const COPIED: usize = 256 << 20;
/// Bytes that each core reads, and writes, at least: well beyond its L2.
const COPIED_PER_CORE: usize = 32 << 20;
const REPETITIONS: usize = 7;

/// A measured ceiling.
#[derive(Debug, Clone, Copy, PartialEq)]
pub(crate) struct Ceiling {
    /// Cores that copied.
    pub(crate) cores: usize,
    /// Bytes copied per second.
    pub(crate) copied: f64,
}

impl Ceiling {
    /// Bytes read and written per second: a copied byte is both.
    pub(crate) fn traffic(self) -> f64 {
        2.0 * self.copied
    }

    /// The least time in which this many bytes, read and written ones together, can pass.
    pub(crate) fn floor(self, bytes: u64) -> Duration {
        Duration::from_secs_f64(bytes as f64 / self.traffic())
    }

    /// Copies on all cores, one thread each, several times; the best counts.
    pub(crate) fn measure() -> Self {
        let cores = machine::cores();
        let each = (COPIED / cores).max(COPIED_PER_CORE);
        let barrier = Barrier::new(cores);
        let times = std::thread::scope(|scope| {
            let threads: Vec<_> = (0..cores).map(|_| scope.spawn(|| copy_times(each, &barrier))).collect();
            threads.into_iter().filter_map(|thread| thread.join().ok()).collect::<Vec<_>>()
        });
        let slowest_of = |round| times.iter().map(|times| times[round]).max().unwrap_or_default();
        let best: Duration = (0..REPETITIONS).map(slowest_of).min().unwrap_or_default();
        Self { cores, copied: (cores * each) as f64 / best.as_secs_f64() }
    }
}

/// The times of one thread's copies. The barrier before each makes all threads copy at the same time.
fn copy_times(bytes: usize, barrier: &Barrier) -> [Duration; REPETITIONS] {
    // Written, not merely zeroed: an untouched page of zeros is not backed by memory of its own.
    let source = vec![1u8; bytes];
    let mut destination = vec![2u8; bytes];
    let mut times = [Duration::ZERO; REPETITIONS];
    for time in &mut times {
        barrier.wait();
        let start = Instant::now();
        black_box(&mut destination).copy_from_slice(black_box(&source));
        *time = start.elapsed();
    }
    times
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_floor_counts_reads_and_writes() {
        let ceiling = Ceiling { cores: 2, copied: 5e9 };
        assert_eq!(ceiling.floor(10_000_000_000), Duration::from_secs(1));
    }
}
