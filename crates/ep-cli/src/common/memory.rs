//! Measures memory bandwidth: the best of several methods to copy, read and write, on all cores at once.

use std::hint::black_box;
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Barrier, OnceLock};
use std::time::{Duration, Instant};

use ep_host::copies::{self, CopyWay};

use crate::common::{machine, threads};

/// Maximum number of bytes that all cores together read, and write, in one copy. With more than 8 cores,
/// [`MOST_PER_CORE`] applies instead.
const MOST: usize = 256 << 20;
/// Maximum number of bytes per core if there are many cores: well beyond the size of an L2 cache.
const MOST_PER_CORE: usize = 32 << 20;
/// Minimum number of bytes per core.
const LEAST_PER_CORE: usize = 4 << 10;
/// Minimum number of bytes that are timed together: the clock is too coarse for fewer.
const TIMED: usize = 1 << 20;
/// Maximum number of rounds through all methods.
const ROUNDS: usize = 7;

/// A method of moving bytes.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum Way {
    Copy(CopyWay),
    Read,
    Write,
    StreamZeros,
}

const WAYS: [Way; 7] = [
    Way::Copy(CopyWay::ALL[0]),
    Way::Copy(CopyWay::ALL[1]),
    Way::Copy(CopyWay::ALL[2]),
    Way::Copy(CopyWay::ALL[3]),
    Way::Read,
    Way::Write,
    Way::StreamZeros,
];

/// Bytes that an operator must read and must write.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq)]
pub(crate) struct Moved {
    pub(crate) read: u64,
    pub(crate) written: u64,
}

impl Moved {
    pub(crate) fn bytes(self) -> u64 {
        self.read + self.written
    }
}

/// Measured rates in bytes per second.
#[derive(Debug, Clone, Copy, PartialEq)]
pub(crate) struct MemoryBandwidth {
    /// Cores that ran the measurement.
    pub(crate) cores: usize,
    /// Bytes of one copy by all cores.
    pub(crate) size: usize,
    /// Bytes copied by the fastest method.
    pub(crate) copied: f64,
    pub(crate) copied_by: CopyWay,
    /// Bytes read when nothing is written.
    pub(crate) read: f64,
    /// Bytes written when nothing is read.
    pub(crate) written: f64,
}

impl MemoryBandwidth {
    /// Measures all methods in rounds until `patience` is over: at least one round, at most [`ROUNDS`]. A copy reads
    /// about half of `bytes` and writes as many. The best time of each method counts. `bytes` should be the number that
    /// an operator moves, so that caches help the measurement as much as the operator.
    ///
    /// Uses fewer cores if the system refuses threads.
    pub(crate) fn measure(bytes: u64, patience: Duration) -> Self {
        let wanted = machine::cores();
        let most = (MOST / wanted).max(MOST_PER_CORE);
        let each =
            usize::try_from(bytes / 2 / wanted as u64).unwrap_or(usize::MAX).clamp(LEAST_PER_CORE, most);
        // The barrier has the number of threads that were started, which is known only after the last one.
        let (barrier, over, end) = (OnceLock::new(), AtomicBool::new(false), Instant::now() + patience);
        let times = std::thread::scope(|scope| {
            let (barrier, over) = (&barrier, &over);
            let start = |_| {
                let work = move || thread(each, barrier.wait(), over, end);
                threads::spawn_scoped(scope, "a thread that measures the memory", work).ok()
            };
            let others: Vec<_> = (1..wanted).map_while(start).collect();
            let barrier = barrier.get_or_init(|| Barrier::new(1 + others.len()));
            let own = thread(each, barrier, over, end);
            let others = others.into_iter().filter_map(|thread| thread.join().ok());
            std::iter::once(own).chain(others).collect::<Vec<_>>()
        });
        let cores = times.len();
        // A round counts if every thread ran it.
        let rounds = times.iter().map(Vec::len).min().unwrap_or_default();
        let slowest =
            |round: usize, way: usize| times.iter().map(|times| times[round][way]).fold(0.0, f64::max);
        let rate = |way: usize| {
            let best = (0..rounds).map(|round| slowest(round, way)).fold(f64::INFINITY, f64::min);
            (cores * each) as f64 / best
        };
        let best_of = |wanted: &dyn Fn(Way) -> bool| {
            let rates =
                WAYS.iter().enumerate().filter(|(_, way)| wanted(**way)).map(|(at, way)| (rate(at), *way));
            rates.max_by(|a, b| a.0.total_cmp(&b.0)).unwrap_or((f64::NAN, Way::Read))
        };
        let (copied, way) = best_of(&|way| matches!(way, Way::Copy(_)));
        let copied_by = if let Way::Copy(way) = way { way } else { CopyWay::Memcpy };
        Self {
            cores,
            size: cores * each,
            copied,
            copied_by,
            read: best_of(&|way| way == Way::Read).0,
            written: best_of(&|way| matches!(way, Way::Write | Way::StreamZeros)).0,
        }
    }

    /// The larger of two measurements, for each rate.
    pub(crate) fn best(self, other: Self) -> Self {
        let (read, written) = (self.read.max(other.read), self.written.max(other.written));
        let by_copying = if other.copied > self.copied { other } else { self };
        Self { read, written, ..by_copying }
    }

    /// Bytes read plus bytes written per second by copying: a copied byte counts twice.
    pub(crate) fn traffic(self) -> f64 {
        2.0 * self.copied
    }

    /// The least time to move these bytes: the smaller of (a) copying as much as possible and reading or writing the
    /// rest alone, and (b) moving all of it at the rate of copying.
    pub(crate) fn floor(self, moved: Moved) -> Duration {
        let paired = moved.read.min(moved.written);
        let (read, written) = (moved.read - paired, moved.written - paired);
        let apart = paired as f64 / self.copied + read as f64 / self.read + written as f64 / self.written;
        let together = moved.bytes() as f64 / self.traffic();
        Duration::try_from_secs_f64(apart.min(together)).unwrap_or(Duration::MAX)
    }
}

/// Returns the times in seconds that this thread takes to move `bytes` once, by round and method. A barrier before each
/// method makes all threads move bytes at the same time.
fn thread(bytes: usize, barrier: &Barrier, over: &AtomicBool, end: Instant) -> Vec<[f64; WAYS.len()]> {
    // Not zeros: untouched zero pages are not backed by memory of their own.
    let (source, mut destination) = (vec![1u8; bytes], vec![2u8; bytes]);
    let repeats = TIMED.div_ceil(bytes);
    let mut rounds = Vec::with_capacity(ROUNDS);
    for _ in 0..ROUNDS {
        let mut times = [0.0; WAYS.len()];
        for (way, time) in WAYS.iter().zip(&mut times) {
            barrier.wait();
            let start = Instant::now();
            for _ in 0..repeats {
                way.run(black_box(&source), black_box(&mut destination));
            }
            *time = start.elapsed().as_secs_f64() / repeats as f64;
        }
        rounds.push(times);
        // The barrier's leader decides for all threads whether another round follows.
        if barrier.wait().is_leader() {
            over.store(Instant::now() >= end, Ordering::Relaxed);
        }
        barrier.wait();
        if over.load(Ordering::Relaxed) {
            break;
        }
    }
    rounds
}

impl Way {
    fn run(self, from: &[u8], to: &mut [u8]) {
        match self {
            Self::Copy(way) => way.copy(from, to),
            Self::Read => {
                black_box(sum(from));
            }
            Self::Write => to.fill(3),
            Self::StreamZeros => copies::stream_zeros(to),
        }
    }
}

/// The sum of all words: reads every byte with little computation.
fn sum(bytes: &[u8]) -> u64 {
    let mut sums = [0u64; 8];
    for line in bytes.as_chunks::<64>().0 {
        for (sum, word) in sums.iter_mut().zip(line.as_chunks::<8>().0) {
            *sum = sum.wrapping_add(u64::from_le_bytes(*word));
        }
    }
    sums.into_iter().fold(0, u64::wrapping_add)
}

#[cfg(test)]
mod tests {
    use super::*;

    fn memory(copied: f64, read: f64, written: f64) -> MemoryBandwidth {
        MemoryBandwidth { cores: 2, size: 100, copied, copied_by: CopyWay::Memcpy, read, written }
    }

    #[test]
    fn a_floor_counts_reads_and_writes() {
        let floor =
            |memory: MemoryBandwidth, read, written| memory.floor(Moved { read, written }).as_secs_f64();
        // Reading alone is faster than copying: 2 bytes copied, 8 more read.
        assert_eq!(floor(memory(1.0, 4.0, 1.0), 10, 2), 2.0 + 8.0 / 4.0);
        assert_eq!(floor(memory(1.0, 1.0, 4.0), 2, 10), 2.0 + 8.0 / 4.0);
        // Reading alone is slower: all bytes at the rate of copying.
        assert_eq!(floor(memory(1.0, 1.0, 1.0), 10, 2), 12.0 / 2.0);
        assert_eq!(floor(memory(1.0, 1.0, 1.0), 5, 5), 5.0);
    }

    #[test]
    fn the_best_of_two_measurements_is_taken_for_each_rate() {
        let best = memory(1.0, 5.0, 2.0).best(memory(3.0, 4.0, 3.0));
        assert_eq!((best.copied, best.read, best.written), (3.0, 5.0, 3.0));
    }

    #[test]
    fn every_method_is_measured_with_any_amount() {
        for bytes in [0, 1, 100_000, 3 << 20] {
            let memory = MemoryBandwidth::measure(bytes, Duration::ZERO);
            for rate in [memory.copied, memory.read, memory.written] {
                assert!(rate.is_finite() && rate > 0.0, "{memory:?}");
            }
            assert!(memory.size >= LEAST_PER_CORE * memory.cores && memory.cores > 0, "{memory:?}");
        }
    }

    #[test]
    fn refused_threads_leave_fewer_cores() {
        for refused in 1..machine::cores() {
            let allowed = machine::cores() - 1 - refused;
            let memory = threads::quota::of(allowed, || MemoryBandwidth::measure(0, Duration::ZERO));
            assert_eq!(memory.cores, 1 + allowed);
            assert!(memory.copied.is_finite() && memory.copied > 0.0, "{memory:?}");
        }
    }

    #[test]
    fn every_word_is_summed() {
        let bytes: Vec<u8> = (0..64 * 3).map(|at| if at % 8 == 0 { 1 } else { 0 }).collect();
        assert_eq!(sum(&bytes), 24);
    }
}
