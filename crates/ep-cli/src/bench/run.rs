//! The part of one rank, the same on all ranks: time the operators, check the results, and exchange reports.

use ep::join::Rendezvous;
use indicatif::ProgressBar;
use serde::{Deserialize, Serialize};

use crate::bench::busy::ProcessTime;
use crate::bench::check::CheckedCounts;
use crate::bench::clock::Timed;
use crate::bench::gpu::RankGpu;
use crate::bench::measure::{AllSamples, Operator};
use crate::bench::plan::WARM_UP;
use crate::bench::shared::Shared;
use crate::bench::stage::Stage;
use crate::bench::stream::{self, StreamTimes};
use crate::common::failure::Failure;

/// Timed rounds of layers. The layers of a round follow each other without a pause; a round has as many layers as the
/// benchmark has iterations.
pub(super) const ROUNDS: usize = 5;

/// The results of one rank, sent to all others at the end.
#[derive(Debug, Clone, Serialize, Deserialize)]
pub(super) struct RankReport {
    pub(super) samples: AllSamples,
    /// Received rows, padding included.
    pub(super) rows: u64,
    pub(super) gpu: Option<RankGpu>,
    /// CPU time that the rank's process has used so far.
    pub(super) process: Option<ProcessTime>,
    /// Times that the bytes between domains take alone; `None` unless they cross a network or an emulated link.
    pub(super) streams: Option<StreamTimes>,
    pub(super) checked: Result<CheckedCounts, String>,
}

/// Runs one scenario on this rank. Returns the reports of all ranks. Collective.
pub(super) fn rank<B: Timed>(
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
    let (rows, gpu, samples) = (stage.rows() as u64, stage.gpu()?, stage.samples);
    bar.set_message("measuring the network");
    let streams = stream::measure(meet, plan, &samples)?;
    let report = RankReport {
        rows,
        checked: checked.and_then(|checked| Ok(CheckedCounts { bounded_rows: bounded?, ..checked })),
        gpu,
        process: ProcessTime::here(),
        streams,
        samples,
    };
    gather(meet, &report)
}

/// Runs the rounds of layers. The first is a warm-up; the last has new tokens, so that stale outputs fail the check.
fn layers<B: Timed>(stage: &mut Stage<'_, B>) -> Result<(), Failure> {
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

/// Exchanges reports with all ranks.
fn gather(meet: &mut dyn Rendezvous, report: &RankReport) -> Result<Vec<RankReport>, Failure> {
    let unreadable = |rank: usize, error| {
        Failure::request(format!(
            "the report of rank {rank} cannot be read ({error}); every rank must run the same version of this program"
        ))
    };
    let blob = serde_json::to_vec(report).map_err(|error| unreadable(meet.rank().index(), error))?;
    let blobs = meet.all_gather(&blob)?;
    let read = |(rank, blob): (usize, Vec<u8>)| {
        serde_json::from_slice(&blob).map_err(|error| unreadable(rank, error))
    };
    blobs.into_iter().enumerate().map(read).collect()
}
