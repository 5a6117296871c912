//! The ceilings that floors are computed from: how fast all cores together can copy memory that no cache holds, and
//! how fast a GPU's wire is.

use std::hint::black_box;
use std::sync::Barrier;
use std::time::{Duration, Instant};

use crate::machine;

/// Bytes that one copy reads, and writes, on all cores together; more where many cores would get too little each.
const COPIED: usize = 256 << 20;
/// Bytes that each core reads, and writes, at least: well beyond its L2.
const COPIED_PER_CORE: usize = 32 << 20;
const REPETITIONS: usize = 7;

/// GB/s that leave each of four to eight H100 or H200 (NVLink 4, 18 links) when all of them push rows to all others by
/// bulk copies, on as many SMs as it takes.
const NVLINK_4_GB_PER_S: f64 = 340.0;

/// What bounds the operators.
#[derive(Debug, Clone, Copy, PartialEq)]
pub(crate) enum Ceiling {
    /// The memory of this machine, through which all ranks go.
    Memory(Memcpy),
    /// Each GPU's way to the others.
    Wire(Wire),
}

impl Ceiling {
    /// The least time in which these bytes can pass; `None` where the ceiling is not known.
    pub(crate) fn floor(self, bytes: u64) -> Option<Duration> {
        let per_second = match self {
            Self::Memory(memcpy) => memcpy.traffic(),
            Self::Wire(wire) => 1e9 * wire.gb_per_s()?,
        };
        Some(Duration::from_secs_f64(bytes as f64 / per_second))
    }
}

/// What is known of the wire.
#[derive(Debug, Clone, Copy, PartialEq)]
pub(crate) enum Wire {
    /// The user knows it: GB/s.
    Given(f64),
    /// It was measured on GPUs like these: GB/s.
    Measured(f64),
    /// It was not measured on GPUs like these.
    Unknown,
    /// Ranks share a GPU: what goes between them crosses no wire.
    Shared,
}

impl Wire {
    /// `names` of the ranks' GPUs; `shared`: several ranks on one.
    pub(crate) fn resolve<'a>(
        given: Option<f64>,
        mut names: impl Iterator<Item = &'a str>,
        shared: bool,
    ) -> Self {
        match given {
            Some(gb_per_s) => Self::Given(gb_per_s),
            None if shared => Self::Shared,
            None if names.all(has_nvlink_4) => Self::Measured(NVLINK_4_GB_PER_S),
            None => Self::Unknown,
        }
    }

    pub(crate) fn gb_per_s(self) -> Option<f64> {
        match self {
            Self::Given(gb_per_s) | Self::Measured(gb_per_s) => Some(gb_per_s),
            Self::Unknown | Self::Shared => None,
        }
    }
}

/// Whether the model of this name has all 18 links. Cards for PCI Express are called H100 too, and so are slices.
fn has_nvlink_4(name: &str) -> bool {
    let has = |word: &str| name.split_whitespace().any(|part| part == word);
    (has("H100") || has("H200")) && !["PCIe", "NVL", "MIG"].into_iter().any(has)
}

/// A measured copy rate.
#[derive(Debug, Clone, Copy, PartialEq)]
pub(crate) struct Memcpy {
    /// Cores that copied.
    pub(crate) cores: usize,
    /// Bytes copied per second.
    pub(crate) copied: f64,
}

impl Memcpy {
    /// Bytes read and written per second: a copied byte is both.
    pub(crate) fn traffic(self) -> f64 {
        2.0 * self.copied
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
        let ceiling = Ceiling::Memory(Memcpy { cores: 2, copied: 5e9 });
        assert_eq!(ceiling.floor(10_000_000_000), Some(Duration::from_secs(1)));
    }

    #[test]
    fn only_wires_that_were_measured_have_a_ceiling() {
        let wire = |names: &[&str], shared| Wire::resolve(None, names.iter().copied(), shared);
        let (h100, h200) = ("NVIDIA H100 80GB HBM3", "NVIDIA H200");
        assert_eq!(wire(&[h100, h200], false), Wire::Measured(340.0));
        assert_eq!(wire(&[h200, h200], true), Wire::Shared);
        for other in ["NVIDIA A100-SXM4-80GB", "NVIDIA H100 PCIe", "NVIDIA H200 NVL", "NVIDIA GH200 480GB"] {
            assert_eq!(wire(&[h200, other], false), Wire::Unknown, "{other}");
            assert_eq!(Ceiling::Wire(wire(&[other], false)).floor(1), None);
        }
        let given = Wire::resolve(Some(100.0), ["NVIDIA A100-SXM4-80GB"].into_iter(), true);
        assert_eq!(Ceiling::Wire(given).floor(200_000_000_000), Some(Duration::from_secs(2)));
    }
}
