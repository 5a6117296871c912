//! The ceilings from which floors are computed: memory bandwidth of all cores together, or bandwidth of a GPU's links.

use std::collections::BTreeMap;
use std::time::Duration;

use serde::Serialize;

use crate::bench::floor::MustMove;
use crate::bench::plan::BenchPlan;
use crate::bench::scenario::Scenario;
use crate::common::memory::{MemoryBandwidth, Moved};

/// How long the memory bandwidth is measured for one size before the run, and again after it.
const PATIENCE: Duration = Duration::from_secs(2);

/// Measured rate in GB/s at which each of four to eight H100 or H200 (NVLink 4, 18 links) sends when each pushes rows to
/// all others by bulk copies, on enough SMs to reach the maximum.
const NVLINK_4_GB_PER_S: f64 = 340.0;

/// The bandwidth that bounds the operators.
#[derive(Debug, Clone, Copy, PartialEq)]
pub(crate) enum Ceiling {
    /// The memory of this machine, which all ranks share.
    Memory(MemoryBandwidth),
    /// The links from each GPU to the others.
    Wire(Wire),
}

impl Ceiling {
    /// The least time to move these parts one after the other; `None` where the bandwidth is unknown.
    pub(crate) fn floor(self, parts: &[Moved]) -> Option<Duration> {
        let one = |moved: Moved| match self {
            Self::Memory(memory) => Some(memory.floor(moved)),
            Self::Wire(wire) => {
                Duration::try_from_secs_f64(moved.bytes() as f64 / (1e9 * wire.gb_per_s()?)).ok()
            }
        };
        parts.iter().map(|&moved| one(moved)).sum()
    }

    /// Returns each ceiling once, in ascending order of the size that was measured.
    pub(crate) fn distinct(mut ceilings: Vec<Self>) -> Vec<Self> {
        let size = |ceiling: &Self| match ceiling {
            Self::Memory(memory) => memory.size,
            Self::Wire(_) => 0,
        };
        ceilings.sort_by_key(size);
        ceilings.dedup();
        ceilings
    }
}

/// Memory bandwidth by the bytes that an operator moves. The data of small operators stays in caches, so sizes are
/// measured separately by powers of two.
#[derive(Debug, Clone, Default)]
pub(crate) struct MemoryRates(BTreeMap<u32, MemoryBandwidth>);

impl MemoryRates {
    /// Measures with about as many bytes as the operators of the runs move. Takes at most an eighth of the entry bound,
    /// because other ranks may be waiting.
    pub(crate) fn measure(plan: &BenchPlan) -> Self {
        let mut sizes: BTreeMap<u32, u64> = BTreeMap::new();
        for scenario in &plan.scenarios {
            let bytes = MustMove::about(plan, scenario);
            let least = sizes.entry(power(bytes)).or_insert(bytes);
            *least = bytes.min(*least);
        }
        let share = plan.config.timeout / 8 / u32::try_from(sizes.len().max(1)).unwrap_or(u32::MAX);
        let measured = |(power, bytes)| (power, MemoryBandwidth::measure(bytes, PATIENCE.min(share)));
        Self(sizes.into_iter().map(measured).collect())
    }

    /// The larger of two measurements, for each size and rate.
    pub(crate) fn best(mut self, other: Self) -> Self {
        for (power, rates) in other.0 {
            self.0.entry(power).and_modify(|own| *own = own.best(rates)).or_insert(rates);
        }
        self
    }

    /// The rates for a scenario of the plan that was measured.
    pub(crate) fn of(&self, plan: &BenchPlan, scenario: &Scenario) -> MemoryBandwidth {
        self.0[&power(MustMove::about(plan, scenario))]
    }
}

/// The number of bits of a size: the exponent of the smallest power of two that exceeds it.
fn power(bytes: u64) -> u32 {
    u64::BITS - bytes.leading_zeros()
}

/// Bandwidth from each GPU to the others.
#[derive(Debug, Clone, Copy, PartialEq)]
pub(crate) enum Wire {
    /// Given by `--wire`, in GB/s.
    Given(f64),
    /// Measured on GPUs of this model, in GB/s.
    Measured(f64),
    /// Not measured on GPUs of this model.
    Unknown,
    /// Several ranks of a domain share a GPU: bytes between them cross no link.
    Shared,
}

impl Wire {
    /// `names`: the GPU models of the ranks. `shared`: whether several ranks of a domain use one GPU.
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

/// Whether the GPU model with this name has all 18 links. PCI Express cards and MIG slices are also named H100.
fn has_nvlink_4(name: &str) -> bool {
    let has = |word: &str| name.split_whitespace().any(|part| part == word);
    (has("H100") || has("H200")) && !["PCIe", "NVL", "MIG"].into_iter().any(has)
}

/// The ceiling from which floors are computed, in the report.
#[derive(Debug, Serialize)]
#[serde(untagged)]
pub(super) enum CeilingReport {
    Memory {
        /// Bytes copied per second by the fastest method, before or after the run.
        ceiling_copy_gb_per_s: f64,
        /// The fastest method.
        ceiling_copied_by: &'static str,
        /// Bytes read and written per second: twice the bytes copied.
        ceiling_traffic_gb_per_s: f64,
        /// Bytes read per second when nothing is written.
        ceiling_read_gb_per_s: f64,
        /// Bytes written per second when nothing is read.
        ceiling_write_gb_per_s: f64,
        /// Bytes of one copy by all cores.
        ceiling_size_bytes: usize,
        ceiling_threads: usize,
    },
    Wire {
        /// Bandwidth in one direction; `None` where unknown.
        ceiling_wire_gb_per_s: Option<f64>,
    },
}

impl CeilingReport {
    pub(super) fn of(ceiling: Ceiling) -> Self {
        match ceiling {
            Ceiling::Memory(memory) => Self::Memory {
                ceiling_copy_gb_per_s: memory.copied / 1e9,
                ceiling_copied_by: memory.copied_by.name(),
                ceiling_traffic_gb_per_s: memory.traffic() / 1e9,
                ceiling_read_gb_per_s: memory.read / 1e9,
                ceiling_write_gb_per_s: memory.written / 1e9,
                ceiling_size_bytes: memory.size,
                ceiling_threads: memory.cores,
            },
            Ceiling::Wire(wire) => Self::Wire { ceiling_wire_gb_per_s: wire.gb_per_s() },
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn only_measured_or_given_links_have_a_ceiling() {
        let wire = |names: &[&str], shared| Wire::resolve(None, names.iter().copied(), shared);
        let (h100, h200) = ("NVIDIA H100 80GB HBM3", "NVIDIA H200");
        assert_eq!(wire(&[h100, h200], false), Wire::Measured(340.0));
        assert_eq!(wire(&[h200, h200], true), Wire::Shared);
        for other in ["NVIDIA A100-SXM4-80GB", "NVIDIA H100 PCIe", "NVIDIA H200 NVL", "NVIDIA GH200 480GB"] {
            assert_eq!(wire(&[h200, other], false), Wire::Unknown, "{other}");
            assert_eq!(Ceiling::Wire(wire(&[other], false)).floor(&[Moved { read: 1, written: 0 }]), None);
        }
        let given = Wire::resolve(Some(100.0), ["NVIDIA A100-SXM4-80GB"].into_iter(), true);
        let moved = Moved { read: 100_000_000_000, written: 0 };
        assert_eq!(Ceiling::Wire(given).floor(&[moved, moved]), Some(Duration::from_secs(2)));
    }
}
