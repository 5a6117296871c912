//! The price of a step: one layout of one strategy.

use std::ops::Range;

use serde::{Deserialize, Serialize};

use super::fixed::Part;
use super::layout::Layout;
use super::memory::{Fit, StepMemory, dense_codec, dense_parameters};
use super::stragglers::SlowLink;
use super::sync::{DENSE_GRADIENT_BYTES, DenseExchange, sync, sync_at};
use super::{LEAST_SAVING, Strategy, Tokens};
use crate::cluster::{Cluster, Level};
use crate::error::Result;
use crate::model::Model;
use crate::planner::{Candidate, Options, Planner, Transfer};
use crate::units::{Bytes, Seconds};

/// The predicted step of one strategy, in its fastest layout.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
pub struct StepPrice {
    /// The strategy.
    pub strategy: Strategy,
    /// The division of the GPUs.
    pub layout: Layout,
    /// Whether the layout fits into memory.
    pub fit: Fit,
    /// `m`: micro-batches of a step.
    pub micro_batches: usize,
    /// `T'`: mean number of tokens of a GPU in a micro-batch.
    pub tokens_per_gpu: f64,
    /// A layer of one EP group.
    pub candidate: Candidate,
    /// What tensor parallelism adds to each pass of a layer.
    pub tensor_exchange: Seconds,
    /// `τ`: time of a micro-batch in a stage, forward and backward.
    pub stage_time: Seconds,
    /// The boundaries of the pipeline, from the first stage to the last.
    pub boundaries: Vec<Boundary>,
    /// Time of all passes of the step, with the pipeline's start and end.
    pub passes: Seconds,
    /// Exchange of dense gradients and weights.
    pub dense_sync: Seconds,
    /// The part of `dense_sync` between datacenters. None unless the options name a codec of dense gradients and dense
    /// gradients cross between datacenters.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub dense_exchange: Option<DenseExchange>,
    /// Exchange of expert gradients and weights between EP groups.
    pub expert_sync: Seconds,
    /// Time of the step: passes and both exchanges.
    pub step_time: Seconds,
    /// Tokens of the global batch over the time of the step.
    pub tokens_per_second: f64,
    /// Fraction of the step in which a GPU does not compute, as the mean over all GPUs.
    pub idle_share: f64,
    /// Memory of one GPU; that of gathered experts is in `candidate`.
    pub memory: StepMemory,
}

/// The boundary of two pipeline stages.
#[derive(Debug, Clone, Copy, PartialEq, Serialize, Deserialize)]
pub struct Boundary {
    /// The level that it crosses.
    pub level: usize,
    /// `x`: time to send the activations of one micro-batch in one direction, over the slower of the links at its ends.
    pub transfer: Seconds,
    /// The part of `transfer` for which the link of the stage before the boundary, and that of the stage after it, would be
    /// busy at their own bandwidth. The slower link is busy for all of it.
    pub busy: [Seconds; 2],
    /// The sites of these links: the first site of the stage before the boundary, and of the stage after it.
    pub sites: [usize; 2],
    /// `r / 2`: additional time until they arrive.
    pub latency: Seconds,
    /// The earlier boundary whose gradients leave through the link that sends the activations of this one: an index into
    /// the boundaries. None if no gradients leave through that link.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub shares_link_with: Option<usize>,
}

/// A link that sends longer per micro-batch than a stage takes, so the stages of a pipeline wait for it.
#[derive(Debug, Clone, Copy, PartialEq)]
pub struct Bottleneck {
    /// The level of the link.
    pub level: usize,
    /// The site of the link.
    pub site: usize,
    /// `y`: the time for which the link sends or receives in one direction, per micro-batch.
    pub time: Seconds,
}

impl StepPrice {
    /// The links for which the stages of the pipeline wait, the busiest first: of each level and site, the busiest one. Empty if
    /// the step has one micro-batch.
    pub fn bottlenecks(&self) -> Vec<Bottleneck> {
        let mut busiest: Vec<Bottleneck> = Vec::new();
        let loads = self.boundaries.iter().flat_map(|at| link_loads(&self.boundaries, at));
        for link in loads.filter(|link| self.micro_batches > 1 && link.time > self.stage_time) {
            match busiest.iter_mut().find(|other| (other.level, other.site) == (link.level, link.site)) {
                Some(other) => other.time = other.time.max(link.time),
                None => busiest.push(link),
            }
        }
        busiest.sort_by(|a, b| b.time.0.total_cmp(&a.time.0));
        busiest
    }
}

/// The times per micro-batch for which the links at the ends of a boundary are busy in one direction. The link of the stage before
/// it sends the activations of this boundary, and the gradients of an earlier one if both leave through it.
fn link_loads(boundaries: &[Boundary], boundary: &Boundary) -> [Bottleneck; 2] {
    let Boundary { level, busy: [before, after], sites, shares_link_with, .. } = *boundary;
    let earlier = shares_link_with.and_then(|earlier| boundaries.get(earlier));
    let gradients = earlier.map_or(Seconds::ZERO, |earlier| earlier.busy[1]);
    [(sites[0], before + gradients), (sites[1], after)].map(|(site, time)| Bottleneck { level, site, time })
}

/// `y`: the time of the busiest link at the ends of a boundary.
pub(super) fn link_load(boundaries: &[Boundary], boundary: &Boundary) -> Seconds {
    link_loads(boundaries, boundary).iter().fold(Seconds::ZERO, |load, link| load.max(link.time))
}

/// `p τ + (m − 1) max(τ, y_max) + Σ 2 (x + latency)`: the passes of `m` micro-batches through a pipeline whose stages take `τ`.
///
/// The first micro-batch crosses every boundary forward and backward. Each further micro-batch follows after the time
/// of the slowest stage or link. `y` is the time for which a link sends per micro-batch: activations to the next stage,
/// and gradients to the previous one if they take the same link.
pub fn pipeline_passes(
    stage: Seconds,
    stages: usize,
    boundaries: &[Boundary],
    micro_batches: usize,
) -> Seconds {
    let slowest = boundaries.iter().fold(stage, |slowest, at| slowest.max(link_load(boundaries, at)));
    let crossed: Seconds =
        boundaries.iter().map(|boundary| (boundary.transfer + boundary.latency) * 2.0).sum();
    stage * stages as f64 + slowest * (micro_batches - 1) as f64 + crossed
}

/// What the price of a layout depends on, besides the layout.
#[derive(Debug, Clone, Copy)]
pub(super) struct Pricing<'a> {
    pub(super) cluster: &'a Cluster,
    pub(super) model: &'a Model,
    pub(super) options: &'a Options,
    pub(super) tokens: Tokens,
}

impl Pricing<'_> {
    /// Prices a layout. `None` if it does not fit into memory.
    pub(super) fn price(&self, strategy: Strategy, layout: &Layout) -> Result<Option<StepPrice>> {
        let options = strategy.options(self.options, layout.stages());
        let Some((layout, fit)) = self.with_tensor_parallelism(strategy, &options, layout) else {
            return Ok(None);
        };
        let planner = self.planner(strategy, &layout)?;
        let Some(candidate) = planner.scheme(strategy.path()) else { return Ok(None) };
        let micro_batches = self.tokens.micro_batches(layout.stage_gpus());
        let tokens_per_gpu = self.tokens.per_gpu(layout.stage_gpus());
        let tensor_exchange = self.tensor_exchange(&layout, tokens_per_gpu);
        let layers = self.model.description().moe_layers.div_ceil(layout.stages());
        let stage_time = (candidate.layer_time + tensor_exchange * 2.0) * layers as f64;
        let boundaries = self.boundaries(&layout, tokens_per_gpu, &[]);
        let passes = pipeline_passes(stage_time, layout.stages(), &boundaries, micro_batches);
        let (dense_exchange, dense_sync, expert_sync) = self.syncs(strategy, &options, &layout);
        let step_time = passes + dense_sync + expert_sync;
        Ok(Some(StepPrice {
            strategy,
            memory: StepMemory::of(self.cluster, self.model, &options, strategy, &layout),
            fit,
            micro_batches,
            tokens_per_gpu,
            candidate,
            tensor_exchange,
            stage_time,
            boundaries,
            passes,
            dense_sync,
            dense_exchange,
            expert_sync,
            step_time,
            tokens_per_second: self.tokens.batch / step_time.0,
            idle_share: (1.0 - self.compute() / step_time).clamp(0.0, 1.0),
            layout,
        }))
    }

    /// The planner of one EP group.
    pub(super) fn planner(&self, strategy: Strategy, layout: &Layout) -> Result<Planner> {
        let micro_batches = self.tokens.micro_batches(layout.stage_gpus());
        let options = Options { micro_batches, ..strategy.options(self.options, layout.stages()) };
        let memory = StepMemory::of(self.cluster, self.model, &options, strategy, layout);
        let memory = memory.fit(&options).map(|(_, before)| before).unwrap_or_default();
        let model = self.model.with_tokens(self.tokens.per_gpu(layout.stage_gpus()));
        let planner = Planner::with_memory(self.cluster.group(&layout.group)?, &model, options, memory)?;
        // Between datacenters, gathers are what expert domains are for.
        Ok(planner.with_least_saving(if strategy.spans() { 0.0 } else { LEAST_SAVING }))
    }

    /// The layout with the least tensor parallelism that fits, or with the tensor parallelism of the options. A layout that
    /// leaves the reserve free is preferred to a tight one.
    fn with_tensor_parallelism(
        &self,
        strategy: Strategy,
        options: &Options,
        layout: &Layout,
    ) -> Option<(Layout, Fit)> {
        let wanted = self.options.tensor_parallel;
        let possible = Part::TensorParallel
            .values_of(layout)
            .into_iter()
            .filter(|&gpus| wanted.is_none_or(|wanted| gpus == wanted));
        let fitting = possible.filter_map(|tensor_parallel| {
            let layout = Layout { tensor_parallel, ..layout.clone() };
            let (fit, _) =
                StepMemory::of(self.cluster, self.model, options, strategy, &layout).fit(options)?;
            Some((layout, fit))
        });
        fitting.min_by_key(|(layout, fit)| (*fit, layout.tensor_parallel))
    }

    /// Two exchanges of activations per pass: every GPU receives those of the other `t − 1`, and sends partial sums back.
    pub(super) fn tensor_exchange(&self, layout: &Layout, tokens: f64) -> Seconds {
        let others = layout.tensor_parallel - 1;
        let levels = self.cluster.levels();
        let bytes = self.model.combine_row_bytes() * (tokens * others as f64);
        Transfer::new(&levels[levels.len() - 1], others, bytes, 1).time * 2.0
    }

    /// The boundaries of the stages. The links in `slow` are slower than the cluster says.
    pub(super) fn boundaries(&self, layout: &Layout, tokens: f64, slow: &[SlowLink]) -> Vec<Boundary> {
        let bytes = self.model.combine_row_bytes() * tokens;
        // The GPUs of one stage in one member send; the other stages of the member do not use the link for this.
        let senders = layout.stage_gpus() / layout.stage[0];
        let mut boundaries: Vec<Boundary> = Vec::new();
        for stage in 1..layout.stages() {
            let across = stage % layout.stages_inside == 0;
            let ends = [stage - 1, stage].map(|stage| self.sites_of_stage(layout, stage));
            // Parts of one site are neighbours at the second level.
            let level = usize::from(!across || ends[0] == ends[1]).min(self.cluster.levels().len() - 1);
            let transfer =
                |at: &Level| at.alpha + bytes * at.gpus_per_link.min(senders) as f64 / at.link_bandwidth;
            let at_site = |site: usize| {
                let used = slow.iter().filter(|link| link.is_used(level, site, [stage - 1, stage]));
                let slowdown = used.map(|link| link.slowdown).fold(1.0, f64::max);
                let at = &self.cluster.sites()[site].levels[level];
                transfer(&Level { link_bandwidth: at.link_bandwidth / slowdown, ..*at })
            };
            // A link sends gradients over the boundary before its first stage, and activations over the boundary after
            // its last.
            let [before, after] = [stage - 1, stage].map(|stage| self.stages_of_link(layout, stage, level));
            let shares_link_with = (before != after)
                .then(|| before.start.checked_sub(1))
                .flatten()
                .filter(|&before| boundaries[before].level == level);
            let sites = [ends[0].start, ends[1].start];
            let busy = ends.map(|sites| sites.map(at_site).fold(Seconds::ZERO, Seconds::max));
            boundaries.push(Boundary {
                level,
                transfer: busy[0].max(busy[1]),
                busy,
                sites,
                latency: self.cluster.levels()[level].round_trip / 2.0,
                shares_link_with,
            });
        }
        boundaries
    }

    /// The stages that share a link of a level with this stage, including this stage.
    fn stages_of_link(&self, layout: &Layout, stage: usize, level: usize) -> Range<usize> {
        if layout.stage[0] > 1 {
            return stage..stage + 1;
        }
        let site = self.cluster.site_of_part(stage / layout.stages_inside);
        let parts_before: usize = self.cluster.sites()[..site].iter().map(|site| site.parts).sum();
        let at = &self.cluster.sites()[site];
        let first = parts_before * layout.stages_inside;
        let end = first + at.parts * layout.stages_inside;
        let sharing = (at.levels[level].gpus_per_link / layout.stage_gpus()).max(1);
        let start = first + (stage - first) / sharing * sharing;
        start..(start + sharing).min(end)
    }

    /// The sites on which a stage runs.
    fn sites_of_stage(&self, layout: &Layout, stage: usize) -> Range<usize> {
        let first = stage / layout.stages_inside * layout.stage[0];
        let last = first + layout.stage[0] - 1;
        self.cluster.site_of_part(first)..self.cluster.site_of_part(last) + 1
    }

    /// The exchange of dense gradients between datacenters, if they have a codec; the time to exchange all dense
    /// parameters; and the time to exchange expert parameters.
    pub(super) fn syncs(
        &self,
        strategy: Strategy,
        options: &Options,
        layout: &Layout,
    ) -> (Option<DenseExchange>, Seconds, Seconds) {
        let description = self.model.description();
        let layers = description.moe_layers.div_ceil(layout.stages()) as f64;
        let slots = description.experts.div_ceil(layout.group_gpus()) as f64;
        let weight = description.precision.weights.bytes();
        let gradient = description.precision.gradients.bytes();
        let dense = dense_parameters(self.model, layout);
        let experts = layers * slots * self.model.expert_parameters();
        let exchange = |parameters: f64, gradient: f64, copies: &[usize]| match strategy {
            Strategy::LocalSteps => {
                let rare = sync_at(self.cluster, 0, Bytes(parameters * 2.0 * weight), copies);
                sync(self.cluster, 1, Bytes(parameters * (gradient + weight)), copies)
                    + rare / self.options.local_steps as f64
            }
            _ => sync(self.cluster, 0, Bytes(parameters * (gradient + weight)), copies),
        };
        let dense_copies = layout.dense_copies();
        let codec = dense_codec(options, layout);
        let between = codec.map(|codec| DenseExchange::between(self.cluster, codec, dense, &dense_copies));
        let dense_sync = match &between {
            Some(between) => {
                let inside = Bytes(dense * (DENSE_GRADIENT_BYTES + weight));
                between.time() + sync(self.cluster, 1, inside, &dense_copies)
            }
            None => exchange(dense, DENSE_GRADIENT_BYTES, &dense_copies),
        };
        (between, dense_sync, exchange(experts, gradient, &layout.copies()))
    }

    /// Seconds that a GPU computes in a step: `3 C N / (G throughput)`, with `C` the operations of a forward pass per token.
    fn compute(&self) -> Seconds {
        let one = self.model.with_tokens(1.0);
        let layers = self.model.description().moe_layers as f64;
        let per_token = (one.pre_expert_flop() + one.expert_flop()) * (3.0 * layers);
        per_token * (self.tokens.batch / self.cluster.gpus() as f64) / self.cluster.sustained()
    }
}
