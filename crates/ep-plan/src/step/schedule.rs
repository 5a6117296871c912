//! A step, simulated: the layers of an EP group event by event, and the micro-batches of a pipeline one by one.

use serde::{Deserialize, Serialize};

use super::price::{Boundary, Pricing, StepPrice, link_load};
use super::stragglers::SlowLink;
use super::{StepPlanner, Strategy};
use crate::error::{PlanError, Result};
use crate::limits;
use crate::planner::{Options, Replicas};
use crate::simulate::{Scheme, Simulation, SimulationOptions, Stragglers};
use crate::units::Seconds;

/// A simulated step.
#[derive(Debug, Clone, Copy, PartialEq, Serialize, Deserialize)]
pub struct SimulatedStep {
    /// Time of a micro-batch in a stage, forward and backward, from the simulation of the EP group.
    pub stage_time: Seconds,
    /// Time of all passes of the step.
    pub passes: Seconds,
    /// Time of the step. For local steps, the mean over the steps from one exchange to the next.
    pub step_time: Seconds,
}

/// What a step exchanges outside of its EP groups.
struct Exchanges {
    /// [`StepPrice::tensor_exchange`].
    tensor: Seconds,
    boundaries: Vec<Boundary>,
    /// The exchanges at the end of the step.
    sync: Seconds,
}

/// The durations of a pipeline's parts for one micro-batch.
#[derive(Debug, Clone, Copy, PartialEq)]
pub struct PipelineWork<'a> {
    /// Forward pass of a stage.
    pub forward: Seconds,
    /// Backward pass of a stage.
    pub backward: Seconds,
    /// The boundaries of the stages. There is one more stage than boundaries.
    pub boundaries: &'a [Boundary],
    /// `m`: number of micro-batches.
    pub micro_batches: usize,
}

impl StepPlanner {
    /// Simulates the step of a price. `layers` are the options of the layers' simulation: stragglers, jitter and so on.
    ///
    /// Listed stragglers are GPUs and links of the whole cluster. If they are in several EP groups, each of these groups is
    /// simulated, and all stages take as long as the slowest. A slow link also lengthens the boundaries of stages and the
    /// exchanges at the end of the step that use it. Random stragglers are GPUs of one EP group.
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
        // If replicas are regathered, one micro-batch is simulated: all are alike, except that the last one encodes experts.
        let replicas = if candidate.replicas_kept { Replicas::Keep } else { Replicas::Regather };
        let micro_batches = if candidate.replicas_kept { price.micro_batches } else { 1 };
        let planner = Options { replicas, micro_batches, ..strategy.options(&self.options, stages) };
        let slow = self.slow(&layers, &price.layout)?;
        let cluster = self.cluster.group(&price.layout.group)?.alone()?;
        let model = self.model.with_tokens(price.tokens_per_gpu);
        let simulated = |stragglers: Stragglers| {
            let options = SimulationOptions { planner: planner.clone(), stragglers, ..layers.clone() };
            Ok(Simulation::new(&cluster, &model, options, scheme.clone())?.run().layer_seconds)
        };
        let layer_seconds = match slow.groups.is_empty() {
            true => simulated(Stragglers::None)?,
            false => {
                let times = slow.groups.iter().cloned().map(simulated).collect::<Result<Vec<Seconds>>>()?;
                times.into_iter().fold(Seconds::ZERO, Seconds::max)
            }
        };
        let exchanges = self.exchanges(price, &slow.links);
        let count = self.model.description().moe_layers.div_ceil(stages) as f64;
        let stage_time = (layer_seconds + exchanges.tensor * 2.0) * count;
        let part = (candidate.forward.total + price.tensor_exchange)
            / (candidate.layer_time + price.tensor_exchange * 2.0);
        let passes = simulate_pipeline(PipelineWork {
            forward: stage_time * part,
            backward: stage_time * (1.0 - part),
            boundaries: &exchanges.boundaries,
            micro_batches: price.micro_batches,
        })?;
        let step_time = passes + exchanges.sync;
        Ok(SimulatedStep { stage_time, passes, step_time })
    }

    /// What a step with slow links exchanges outside of its EP groups, priced by the formulas.
    fn exchanges(&self, price: &StepPrice, slow: &[SlowLink]) -> Exchanges {
        if slow.is_empty() {
            return Exchanges {
                tensor: price.tensor_exchange,
                boundaries: price.boundaries.clone(),
                sync: price.dense_sync + price.expert_sync,
            };
        }
        let (layout, tokens) = (&price.layout, price.tokens_per_gpu);
        let slower = slow.iter().map(|link| (link.level, link.sites.clone(), link.slowdown));
        let cluster = self.cluster.with_slower_links(slower);
        let slowed = Pricing { cluster: &cluster, ..self.pricing() };
        let options = price.strategy.options(&self.options, layout.stages());
        let (_, dense, experts) = slowed.syncs(price.strategy, &options, layout);
        Exchanges {
            tensor: slowed.tensor_exchange(layout, tokens),
            boundaries: self.pricing().boundaries(layout, tokens, slow),
            sync: dense + experts,
        }
    }
}

/// The time of all passes: every stage computes one micro-batch at a time, backward passes first, and every link carries
/// one transfer at a time in each direction, activations and gradients in turn.
///
/// Stage `s` of `p` holds at most `p − s` micro-batches whose backward pass is missing, plus as many as it processes
/// while the links after it delay one.
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
    while let Some(work) = pipeline.next() {
        match work.what {
            What::Pass => pipeline.compute(work),
            What::Transfer => pipeline.transfer(work),
        }
    }
    Ok(Seconds(pipeline.end))
}

/// The kind of an operation. Of operations that can start at the same time, transfers go before passes, because they
/// can make passes ready.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord)]
enum What {
    /// A transfer over a boundary.
    Transfer,
    /// A pass of a stage.
    Pass,
}

/// An operation that can start.
#[derive(Debug, Clone, Copy, PartialEq)]
struct Operation {
    start: f64,
    what: What,
    /// The stage or the boundary.
    index: usize,
    backward: bool,
    /// Start of the previous operation of its queue.
    before: f64,
}

impl Operation {
    /// Of passes that can start at the same time, a backward one goes first. Of transfers, the one whose queue was served
    /// longer ago goes first, so links serve activations and gradients alternately.
    fn is_before(&self, other: &Self) -> bool {
        let rank = |it: &Self| (it.start, it.what, it.what == What::Pass && !it.backward, it.before);
        rank(self) < rank(other)
    }
}

/// Operations of one kind, in the order of micro-batches.
#[derive(Debug, Clone, Default)]
struct Queue {
    ready: Vec<f64>,
    done: usize,
    /// Start of the last operation.
    last: f64,
}

impl Queue {
    fn next(&self) -> Option<f64> {
        self.ready.get(self.done).copied()
    }

    fn start(&mut self, at: f64) {
        self.done += 1;
        self.last = at;
    }
}

/// The state of one stage.
#[derive(Debug, Clone, Default)]
struct Stage {
    free: f64,
    /// Maximum number of micro-batches whose backward pass is missing.
    most: usize,
    forward: Queue,
    backward: Queue,
}

/// The transfers over one boundary, and the links at its ends.
#[derive(Debug, Clone)]
struct Crossing {
    activations: Queue,
    gradients: Queue,
    /// The link of the stage before the boundary, and of the stage after it.
    links: [usize; 2],
}

/// The times at which a link is free, per direction.
#[derive(Debug, Clone, Copy, Default)]
struct Link {
    sends: f64,
    receives: f64,
}

struct Pipeline<'a> {
    work: &'a PipelineWork<'a>,
    stages: Vec<Stage>,
    crossings: Vec<Crossing>,
    links: Vec<Link>,
    end: f64,
}

impl<'a> Pipeline<'a> {
    fn new(work: &'a PipelineWork<'a>) -> Self {
        let count = work.boundaries.len() + 1;
        let stage_time = (work.forward + work.backward).0;
        let stage = |index: usize| {
            let delay: f64 = work.boundaries[index..]
                .iter()
                .map(|at| 2.0 * (link_load(work.boundaries, at) + at.latency).0)
                .sum();
            let covered =
                if stage_time > 0.0 { (delay / stage_time).ceil() as usize } else { usize::MAX / 2 };
            Stage { most: count - index + covered, ..Stage::default() }
        };
        let mut stages: Vec<Stage> = (0..count).map(stage).collect();
        stages[0].forward.ready = vec![0.0; work.micro_batches];
        let mut crossings: Vec<Crossing> = Vec::new();
        let mut links = 0;
        for boundary in work.boundaries {
            let other = boundary.shares_link_with.and_then(|other| crossings.get(other));
            let before = other.map_or(links, |other| other.links[1]);
            links += 2;
            let links = [before, links - 1];
            crossings.push(Crossing { activations: Queue::default(), gradients: Queue::default(), links });
        }
        Self { work, stages, crossings, links: vec![Link::default(); links], end: 0.0 }
    }

    /// The operation that can start first.
    fn next(&self) -> Option<Operation> {
        let mut first: Option<Operation> = None;
        let mut offer = |what: What, index: usize, backward: bool, queue: &Queue, free: f64| {
            let Some(ready) = queue.next() else { return };
            let operation = Operation { start: free.max(ready), what, index, backward, before: queue.last };
            if first.is_none_or(|first| operation.is_before(&first)) {
                first = Some(operation);
            }
        };
        for (index, stage) in self.stages.iter().enumerate() {
            offer(What::Pass, index, true, &stage.backward, stage.free);
            if stage.forward.done - stage.backward.done < stage.most {
                offer(What::Pass, index, false, &stage.forward, stage.free);
            }
        }
        for (index, crossing) in self.crossings.iter().enumerate() {
            let [before, after] = crossing.links.map(|link| self.links[link]);
            offer(What::Transfer, index, false, &crossing.activations, before.sends.max(after.receives));
            offer(What::Transfer, index, true, &crossing.gradients, after.sends.max(before.receives));
        }
        first
    }

    fn compute(&mut self, operation: Operation) {
        let Operation { start, index, backward, .. } = operation;
        let time = if backward { self.work.backward } else { self.work.forward };
        let done = start + time.0;
        self.end = self.end.max(done);
        let last = self.stages.len() - 1;
        let stage = &mut self.stages[index];
        stage.free = done;
        if backward {
            stage.backward.start(start);
            if index > 0 {
                self.crossings[index - 1].gradients.ready.push(done);
            }
        } else {
            stage.forward.start(start);
            if index < last {
                self.crossings[index].activations.ready.push(done);
            } else {
                stage.backward.ready.push(done);
            }
        }
    }

    fn transfer(&mut self, operation: Operation) {
        let Operation { start, index, backward, .. } = operation;
        let at = &self.work.boundaries[index];
        let done = start + at.transfer.0;
        // The faster of two links has bandwidth left for other transfers.
        let busy = at.busy.map(|busy| start + busy.0);
        let crossing = &mut self.crossings[index];
        let [before, after] = crossing.links;
        if backward {
            crossing.gradients.start(start);
            (self.links[before].receives, self.links[after].sends) = busy.into();
            self.stages[index].backward.ready.push(done + at.latency.0);
        } else {
            crossing.activations.start(start);
            (self.links[before].sends, self.links[after].receives) = busy.into();
            self.stages[index + 1].forward.ready.push(done + at.latency.0);
        }
    }
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::*;
    use crate::step::pipeline_passes;

    fn boundary(transfer: f64, latency: f64) -> Boundary {
        let transfer = Seconds(transfer);
        let latency = Seconds(latency);
        Boundary { level: 0, transfer, busy: [transfer; 2], sites: [0, 1], latency, shares_link_with: None }
    }

    /// The boundaries of stages that each have one link for activations and gradients.
    fn one_link_per_stage(transfers: &[(f64, f64)]) -> Vec<Boundary> {
        let at = |(index, &(transfer, latency)): (usize, &(f64, f64))| Boundary {
            shares_link_with: index.checked_sub(1),
            ..boundary(transfer, latency)
        };
        transfers.iter().enumerate().map(at).collect()
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

    /// Links that take longer than the stages: the link in the middle of three stages sends activations and gradients, so a
    /// micro-batch takes twice as long as with separate links for the two.
    #[test]
    fn a_link_in_the_middle_carries_both_directions() {
        let links = one_link_per_stage(&[(10.0, 0.0); 2]);
        let micro_batches = 100;
        for (boundaries, period) in
            [(&links[..1], 10.0), (&links[..], 20.0), (&[boundary(10.0, 0.0); 2], 10.0)]
        {
            let formula = pipeline_passes(Seconds(3.0), boundaries.len() + 1, boundaries, micro_batches).0;
            let (stages, crossed) = (boundaries.len() as f64 + 1.0, 20.0 * boundaries.len() as f64);
            assert_eq!(formula, 3.0 * stages + 99.0 * period + crossed);
            let found = simulated(1.0, 2.0, boundaries, micro_batches);
            assert!((found / formula - 1.0).abs() < 0.03, "{found} {formula}");
        }
    }

    /// Of three sites the last one has a slow link. The link in the middle carries both transfers at its own bandwidth, so the
    /// period is that of the last one.
    #[test]
    fn a_fast_link_in_the_middle_does_not_wait_for_a_slow_neighbour() {
        let mut links = one_link_per_stage(&[(4.0, 0.0), (10.0, 0.0)]);
        links[1].busy = [Seconds(4.0), Seconds(10.0)];
        let (stage, micro_batches) = (Seconds(3.0), 100);
        let formula = pipeline_passes(stage, 3, &links, micro_batches).0;
        assert_eq!(formula, 3.0 * 3.0 + 99.0 * 10.0 + 2.0 * 14.0);
        // Simulated, a transfer to the slow link waits while the link in the middle sends another.
        let found = simulated(1.0, 2.0, &links, micro_batches);
        assert!((0.97..1.15).contains(&(found / formula)), "{found} {formula}");
        // The link in the middle is the busiest if the last one is nearly as fast.
        links[1].transfer = Seconds(6.0);
        links[1].busy = [Seconds(4.0), Seconds(6.0)];
        assert_eq!(link_load(&links, &links[1]), Seconds(8.0));
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
            faster in prop::collection::vec((0.2..1.0f64, any::<bool>()), 8),
            rounds in 1..12usize,
            shared in any::<bool>(),
        ) {
            let mut boundaries: Vec<Boundary> = match shared {
                true => one_link_per_stage(&transfers),
                false => transfers.iter().map(|&(transfer, latency)| boundary(transfer, latency)).collect(),
            };
            for (at, &(part, before)) in boundaries.iter_mut().zip(&faster) {
                at.busy[usize::from(before)] = at.transfer * part;
            }
            let stages = boundaries.len() + 1;
            let micro_batches = stages * rounds;
            let found = simulated(1.0, backward, &boundaries, micro_batches);
            let priced = |micro_batches| {
                pipeline_passes(Seconds(1.0 + backward), stages, &boundaries, micro_batches).0
            };
            // The slack is one pass through the pipeline: the first and the last micro-batches wait for others, and
            // links that will carry the gradients of the first one already carry activations of others before these
            // gradients exist.
            let (formula, slack) = (priced(micro_batches), priced(1));
            prop_assert!(found >= 0.95 * formula - slack, "{found} {formula}");
            // The formula ignores that activations and gradients wait for each other on a link that is busy most of the time.
            let busiest = boundaries.iter().map(|at| link_load(&boundaries, at).0).fold(0.0, f64::max);
            let waits = shared && busiest > 0.7 * (1.0 + backward);
            let most = if waits { 2.0 } else { 1.05 };
            prop_assert!(found <= most * formula + slack, "{found} {formula}");
        }
    }
}
