//! Combines the measurements of all ranks into the report. `--json` writes this structure, so field names carry units.

use std::time::Duration;

use serde::Serialize;

use crate::bench::busy::Busy;
use crate::bench::ceiling::{Ceiling, CeilingReport, MemoryRates, Wire};
use crate::bench::definitions;
use crate::bench::gpu::{RankGpu, Sharing};
use crate::bench::plan::{BenchPlan, WARM_UP};
use crate::bench::run::RankReport;
use crate::bench::runs::{Run, inside};
use crate::common::backend::BackendKind;
use crate::common::machine::Machine;
use crate::common::role::ProcessRole;

#[derive(Debug, Serialize)]
pub(super) struct BenchReport {
    pub(super) version: &'static str,
    pub(super) verified: bool,
    pub(super) config: Setting,
    pub(super) machine: Machine,
    /// The ceiling of the run with the smallest operators, if runs have different ones; each run also has its own.
    #[serde(flatten)]
    pub(super) ceiling: CeilingReport,
    pub(super) time_definition: String,
    pub(super) floor_definition: String,
    /// `None` unless bytes between domains cross a network or an emulated link.
    pub(super) stream_definition: Option<String>,
    /// Shares of the cores' time that did not go to this job during the run; `None` where unknown.
    pub(super) busy: Option<Busy>,
    /// Circumstances that affect the results, such as ranks that share a GPU.
    pub(super) notes: Vec<String>,
    /// The GPU of each rank, as of the last run; empty on the host backend.
    pub(super) gpus: Vec<RankGpu>,
    pub(super) runs: Vec<Run>,
}

/// The options as resolved.
#[derive(Debug, Serialize)]
pub(super) struct Setting {
    pub(super) backend: &'static str,
    pub(super) ranks: usize,
    pub(super) domains: usize,
    pub(super) processes: bool,
    pub(super) hidden: usize,
    pub(super) experts: usize,
    pub(super) dtype: &'static str,
    /// The pad multiple of permuted mode; 1 if only plain mode was measured.
    pub(super) pad_multiple: usize,
    pub(super) skew: Option<f64>,
    pub(super) routing: Option<String>,
    pub(super) iterations: usize,
    pub(super) warm_up_iterations: usize,
    pub(super) seed: u64,
    pub(super) workers: usize,
    pub(super) timeout_ms: u64,
    pub(super) stall_timeout_ms: u64,
}

/// Measurements of the machine, beside those of the ranks.
#[derive(Debug, Clone, Default)]
pub(super) struct MachineState {
    /// Memory bandwidth before the run.
    pub(super) memory: MemoryRates,
    pub(super) busy: Option<Busy>,
}

impl BenchReport {
    pub(super) fn new(plan: &BenchPlan, scenarios: &[Vec<RankReport>], around: &MachineState) -> Self {
        let gpus: Vec<RankGpu> =
            scenarios.last().into_iter().flatten().filter_map(|rank| rank.gpu.clone()).collect();
        let sharing = Sharing::of(&gpus, plan.world.topology().domain_size());
        let ceilings: Vec<Ceiling> = match plan.backend {
            BackendKind::Host => {
                let memory = around.memory.clone().best(MemoryRates::measure(plan));
                plan.scenarios.iter().map(|scenario| Ceiling::Memory(memory.of(plan, scenario))).collect()
            }
            BackendKind::Cuda => {
                let names = gpus.iter().map(|gpu| gpu.name.as_str());
                let wire = Wire::resolve(plan.wire, names, sharing == Sharing::InsideDomains);
                vec![Ceiling::Wire(wire); plan.scenarios.len()]
            }
        };
        let runs: Vec<Run> = plan
            .scenarios
            .iter()
            .zip(scenarios)
            .zip(&ceilings)
            .map(|((scenario, ranks), &ceiling)| Run::new(plan, scenario, ranks, ceiling))
            .collect();
        let ceilings = Ceiling::distinct(ceilings);
        Self {
            version: env!("CARGO_PKG_VERSION"),
            verified: runs.iter().all(|run| run.verified),
            config: Setting::of(plan),
            machine: Machine::here(),
            ceiling: CeilingReport::of(ceilings[0]),
            time_definition: definitions::time(plan),
            floor_definition: definitions::floor(&ceilings),
            stream_definition: runs
                .iter()
                .flat_map(|run| &run.operators)
                .any(|operator| operator.stream_us.is_some())
                .then(|| definitions::stream(&plan.config.host.transport, inside(plan.backend))),
            busy: around.busy,
            notes: [
                definitions::sharing(sharing).map(Into::into),
                definitions::one_machine(plan),
                around.busy.and_then(Busy::note),
            ]
            .into_iter()
            .flatten()
            .collect(),
            gpus,
            runs,
        }
    }
}

impl BenchReport {
    /// Names from outside: a word such as `inf` in them is not a number.
    pub(super) fn names(&self) -> Vec<&str> {
        let gpus = self.gpus.iter().map(|gpu| &*gpu.name);
        gpus.chain([&*self.machine.cpu_model]).chain(self.config.routing.as_deref()).collect()
    }
}

impl Setting {
    fn of(plan: &BenchPlan) -> Self {
        Self {
            backend: plan.backend.name(),
            ranks: plan.ranks(),
            domains: plan.world.topology().domains(),
            processes: plan.role != ProcessRole::Threads,
            hidden: plan.hidden,
            experts: plan.world.experts(),
            dtype: plan.dtype.name(),
            pad_multiple: plan.scenarios.iter().map(|run| run.mode.pad_multiple()).max().unwrap_or(1),
            skew: plan.scenarios.first().and_then(|run| run.source.skew()),
            routing: plan.routing_file.as_ref().map(|path| path.display().to_string()),
            iterations: plan.iterations,
            warm_up_iterations: WARM_UP,
            seed: plan.seed,
            workers: plan.config.host.workers,
            timeout_ms: milliseconds(plan.config.timeout),
            stall_timeout_ms: milliseconds(plan.config.stall_timeout),
        }
    }
}

fn milliseconds(time: Duration) -> u64 {
    u64::try_from(time.as_millis()).unwrap_or(u64::MAX)
}
