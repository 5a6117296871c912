//! A step, simulated: the layers of an EP group event by event, and the micro-batches of a pipeline one by one.

use serde::{Deserialize, Serialize};

use super::price::{Boundary, StepPrice};
use super::{StepPlanner, Strategy};
use crate::error::{PlanError, Result};
use crate::limits;
use crate::planner::{Options, Replicas};
use crate::simulate::{Scheme, Simulation, SimulationOptions};
use crate::units::Seconds;

/// A simulated step.
#[derive(Debug, Clone, Copy, PartialEq, Serialize, Deserialize)]
pub struct SimulatedStep {
    /// A micro-batch in a stage, forward and backward, from the simulation of the EP group.
    pub stage_time: Seconds,
    /// All passes of the step.
    pub passes: Seconds,
    /// The step. For local steps, the mean of the steps from one exchange to the next.
    pub step_time: Seconds,
}

/// The durations of a pipeline's parts for one micro-batch.
#[derive(Debug, Clone, Copy, PartialEq)]
pub struct PipelineWork<'a> {
    /// Forward pass of a stage.
    pub forward: Seconds,
    /// Backward pass of a stage.
    pub backward: Seconds,
    /// The boundaries of the stages; one stage more than boundaries exists.
    pub boundaries: &'a [Boundary],
    /// `m`.
    pub micro_batches: usize,
}

impl StepPlanner {
    /// Simulates the step of a price. `layers` are the options of the layers' simulation: stragglers, jitter and so on.
    ///
    /// # Errors
    /// Those of [`Simulation::new`], and [`PlanError::TooMany`] when stages times micro-batches exceed
    /// [`limits::OPERATIONS`].
    pub fn simulate(&self, price: &StepPrice, layers: SimulationOptions) -> Result<SimulatedStep> {
        let (strategy, candidate) = (price.strategy, &price.candidate);
        let scheme = match strategy {
            Strategy::PlainEp => Scheme::Plain,
            Strategy::HierarchicalEp => Scheme::Hierarchical,
            _ => Scheme::Hybrid { domain_sizes: candidate.domain_sizes.clone() },
        };
        let stages = price.layout.stages();
        // Replicas that are regathered make all micro-batches alike, except for the codec of the last.
        let replicas = if candidate.replicas_kept { Replicas::Keep } else { Replicas::Regather };
        let micro_batches = if candidate.replicas_kept { price.micro_batches } else { 1 };
        let planner = Options { replicas, micro_batches, ..strategy.options(&self.options, stages) };
        let cluster = self.cluster.group(&price.layout.group)?.alone()?;
        let model = self.model.with_tokens(price.tokens_per_gpu);
        let outcome =
            Simulation::new(&cluster, &model, SimulationOptions { planner, ..layers }, scheme)?.run();
        let count = self.model.description().moe_layers.div_ceil(stages) as f64;
        let stage_time = (outcome.layer_seconds + price.tensor_exchange * 2.0) * count;
        let part = (candidate.forward.total + price.tensor_exchange)
            / (candidate.layer_time + price.tensor_exchange * 2.0);
        let passes = simulate_pipeline(PipelineWork {
            forward: stage_time * part,
            backward: stage_time * (1.0 - part),
            boundaries: &price.boundaries,
            micro_batches: price.micro_batches,
        })?;
        let step_time = passes + price.dense_sync + price.expert_sync;
        Ok(SimulatedStep { stage_time, passes, step_time })
    }
}

/// The time of all passes: every stage computes one micro-batch at a time, backward passes first, and every link carries
/// one transfer at a time in each direction.
///
/// Stage `s` of `p` holds at most `p − s` micro-batches whose backward pass is missing, plus as many as the links
/// after it delay.
///
/// # Errors
/// [`PlanError::TooMany`] when stages times micro-batches exceed [`limits::OPERATIONS`].
pub fn simulate_pipeline(work: PipelineWork<'_>) -> Result<Seconds> {
    let stages = work.boundaries.len() + 1;
    let operations = stages as f64 * work.micro_batches as f64;
    if operations > limits::OPERATIONS.most as f64 {
        return Err(PlanError::TooMany {
            what: "micro-batches times stages".into(),
            count: operations,
            most: limits::OPERATIONS.most,
            hint: "simulate a smaller global batch",
        });
    }
    let mut pipeline = Pipeline::new(&work);
    while let Some((start, stage, backward)) = pipeline.next() {
        pipeline.run(start, stage, backward);
    }
    Ok(Seconds(pipeline.end))
}

/// The state of one stage.
#[derive(Debug, Clone, Default)]
struct Stage {
    free: f64,
    /// Most micro-batches whose backward pass is missing.
    most: usize,
    forward_done: usize,
    backward_done: usize,
    /// Arrival times of the inputs of forward and of backward passes, in the order of micro-batches.
    forward_ready: Vec<f64>,
    backward_ready: Vec<f64>,
    /// Times at which the links to the next and to the previous stage are free.
    link_forward: f64,
    link_backward: f64,
}

struct Pipeline<'a> {
    work: &'a PipelineWork<'a>,
    stages: Vec<Stage>,
    end: f64,
}

impl<'a> Pipeline<'a> {
    fn new(work: &'a PipelineWork<'a>) -> Self {
        let count = work.boundaries.len() + 1;
        let stage_time = (work.forward + work.backward).0;
        let stage = |index: usize| {
            let delay: f64 =
                work.boundaries[index..].iter().map(|at| 2.0 * (at.transfer + at.latency).0).sum();
            let covered =
                if stage_time > 0.0 { (delay / stage_time).ceil() as usize } else { usize::MAX / 2 };
            Stage { most: count - index + covered, ..Stage::default() }
        };
        let mut stages: Vec<Stage> = (0..count).map(stage).collect();
        stages[0].forward_ready = vec![0.0; work.micro_batches];
        Self { work, stages, end: 0.0 }
    }

    /// The operation that can start first: its start, its stage, and whether it is a backward pass.
    fn next(&self) -> Option<(f64, usize, bool)> {
        let mut first: Option<(f64, usize, bool)> = None;
        for (index, stage) in self.stages.iter().enumerate() {
            let backward = stage.backward_ready.get(stage.backward_done);
            let room = stage.forward_done - stage.backward_done < stage.most;
            let forward = stage.forward_ready.get(stage.forward_done).filter(|_| room);
            for (ready, is_backward) in [(backward, true), (forward, false)] {
                let Some(ready) = ready else { continue };
                let start = stage.free.max(*ready);
                if first.is_none_or(|(earliest, ..)| start < earliest) {
                    first = Some((start, index, is_backward));
                }
            }
        }
        first
    }

    fn run(&mut self, start: f64, index: usize, backward: bool) {
        let time = if backward { self.work.backward } else { self.work.forward };
        let done = start + time.0;
        self.end = self.end.max(done);
        let last = self.stages.len() - 1;
        let stage = &mut self.stages[index];
        stage.free = done;
        if backward {
            stage.backward_done += 1;
            if index > 0 {
                let at = &self.work.boundaries[index - 1];
                stage.link_backward = stage.link_backward.max(done) + at.transfer.0;
                let ready = stage.link_backward + at.latency.0;
                self.stages[index - 1].backward_ready.push(ready);
            }
        } else {
            stage.forward_done += 1;
            if index < last {
                let at = &self.work.boundaries[index];
                stage.link_forward = stage.link_forward.max(done) + at.transfer.0;
                let ready = stage.link_forward + at.latency.0;
                self.stages[index + 1].forward_ready.push(ready);
            } else {
                stage.backward_ready.push(done);
            }
        }
    }
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::*;
    use crate::step::pipeline_passes;

    fn boundary(transfer: f64, latency: f64) -> Boundary {
        Boundary { level: 0, transfer: Seconds(transfer), latency: Seconds(latency) }
    }

    fn simulated(forward: f64, backward: f64, boundaries: &[Boundary], micro_batches: usize) -> f64 {
        let (forward, backward) = (Seconds(forward), Seconds(backward));
        simulate_pipeline(PipelineWork { forward, backward, boundaries, micro_batches }).unwrap().0
    }

    #[test]
    fn a_pipeline_without_delays_has_the_known_bubble() {
        // (m + p - 1) (forward + backward) for one micro-batch after the other.
        let none = boundary(0.0, 0.0);
        assert_eq!(simulated(1.0, 2.0, &[none; 3], 8), (8.0 + 3.0) * 3.0);
        assert_eq!(simulated(1.0, 2.0, &[], 8), 24.0);
        // One micro-batch crosses two boundaries twice.
        assert_eq!(simulated(1.0, 2.0, &[boundary(0.5, 10.0); 2], 1), 9.0 + 4.0 * 10.5);
    }

    #[test]
    fn too_many_operations_are_refused() {
        let work = PipelineWork {
            forward: Seconds(1.0),
            backward: Seconds(1.0),
            boundaries: &[boundary(1.0, 0.0); 4],
            micro_batches: 1 << 20,
        };
        assert!(matches!(simulate_pipeline(work), Err(PlanError::TooMany { .. })));
    }

    proptest! {
        #[test]
        fn simulated_pipelines_agree_with_the_formula(
            backward in 0.5..3.0f64,
            transfers in prop::collection::vec((0.0..4.0f64, 0.0..20.0f64), 0..8),
            rounds in 1..12usize,
        ) {
            let boundaries: Vec<Boundary> =
                transfers.iter().map(|&(transfer, latency)| boundary(transfer, latency)).collect();
            let stages = boundaries.len() + 1;
            let micro_batches = stages * rounds;
            let found = simulated(1.0, backward, &boundaries, micro_batches);
            let formula = pipeline_passes(Seconds(1.0 + backward), stages, &boundaries, micro_batches).0;
            let stage = 1.0 + backward;
            // The first and the last micro-batches meet others on the way.
            let slack = stages as f64 * (stage + boundaries.iter().map(|at| at.transfer.0).fold(0.0, f64::max));
            prop_assert!((found - formula).abs() <= 0.05 * formula + slack, "{found} {formula}");
        }
    }
}
