//! What every rank does, the same on all: time the operators, check the outcome, and tell all others.

use std::sync::{Arc, OnceLock};

use ep::oracle::{self, ReceivedRows};
use ep::rendezvous::Rendezvous;
use ep::{Rank, Routing};
use indicatif::ProgressBar;
use serde::{Deserialize, Serialize};

use crate::bench::check::Checked;
use crate::bench::gpu::Gpu;
use crate::bench::inspect::Inspect;
use crate::bench::measure::{AllSamples, Operator};
use crate::bench::plan::{Plan, Scenario, WARM_UP};
use crate::bench::stage::Stage;
use crate::failure::Failure;

/// Rounds of layers that follow each other without a pause; each has as many layers as there are iterations.
pub(super) const ROUNDS: usize = 5;

/// What all ranks of a process share.
#[derive(Debug)]
pub(super) struct Shared {
    pub(super) plan: Arc<Plan>,
    scenario: usize,
    pub(super) routings: Arc<[Routing]>,
    /// Which token belongs in which row of every rank; made when it is first needed, after the timing.
    received: OnceLock<Vec<ReceivedRows>>,
}

impl Shared {
    pub(super) fn new(plan: Arc<Plan>, scenario: usize) -> Self {
        let routings = plan.scenarios[scenario].routings();
        Self { plan, scenario, routings, received: OnceLock::new() }
    }

    pub(super) fn scenario(&self) -> &Scenario {
        &self.plan.scenarios[self.scenario]
    }

    pub(super) fn received(&self, rank: Rank) -> &ReceivedRows {
        let all = self.received.get_or_init(|| {
            oracle::rows(&self.plan.world, &self.routings, self.plan.mode, &vec![None; self.plan.ranks()])
        });
        &all[rank.index()]
    }
}

/// What one rank tells all others at the end.
#[derive(Debug, Clone, Serialize, Deserialize)]
pub(super) struct RankReport {
    pub(super) samples: AllSamples,
    /// Rows received, padding included.
    pub(super) rows: u64,
    pub(super) gpu: Option<Gpu>,
    pub(super) checked: Result<Checked, String>,
}

/// One rank's part in one scenario; returns every rank's report. Collective.
pub(super) fn rank<B: Inspect>(
    backend: &mut B,
    meet: &mut dyn Rendezvous,
    shared: &Shared,
    bar: &ProgressBar,
) -> Result<Vec<RankReport>, Failure> {
    let plan = &shared.plan;
    let iterations = WARM_UP + plan.iterations;
    let mut stage = Stage::new(backend, meet, shared)?;
    let handle = stage.preprocess(None)?;
    let (pipelined, single): (Vec<Operator>, Vec<Operator>) =
        Operator::all(plan.backend).iter().partition(|&&operator| operator == Operator::Layers);
    for iteration in 1..=iterations {
        if iteration == iterations {
            stage.renew()?;
        }
        stage.timed = iteration > WARM_UP;
        for &operator in &single {
            stage.run(operator, &handle)?;
        }
        bar.inc(1);
    }
    let bounded = if single.contains(&Operator::Bounded) { stage.check_bounded()? } else { Ok(0) };
    if !pipelined.is_empty() {
        bar.set_message("measuring layers");
        layers(&mut stage)?;
    }
    bar.set_message("checking");
    let checked = stage.check()?;
    let report = RankReport {
        rows: stage.rows() as u64,
        checked: checked.and_then(|checked| Ok(Checked { bounded_rows: bounded?, ..checked })),
        gpu: stage.gpu()?,
        samples: stage.samples,
    };
    gather(meet, &report)
}

/// Rounds of layers; the first is for warming up, and the last one's tokens are its own.
fn layers<B: Inspect>(stage: &mut Stage<'_, B>) -> Result<(), Failure> {
    for round in 0..=ROUNDS {
        stage.timed = round > 0;
        if round == ROUNDS {
            stage.poison()?;
            stage.renew()?;
        }
        stage.layers()?;
    }
    Ok(())
}

/// Gives the report to all ranks, and takes theirs.
fn gather(meet: &mut dyn Rendezvous, report: &RankReport) -> Result<Vec<RankReport>, Failure> {
    let unreadable = |rank: usize, error| {
        Failure::request(format!(
            "the report of rank {rank} cannot be read ({error}); is it of another version?"
        ))
    };
    let blob = serde_json::to_vec(report).map_err(|error| unreadable(meet.rank().index(), error))?;
    let blobs = meet.all_gather(&blob)?;
    let read = |(rank, blob): (usize, Vec<u8>)| {
        serde_json::from_slice(&blob).map_err(|error| unreadable(rank, error))
    };
    blobs.into_iter().enumerate().map(read).collect()
}
