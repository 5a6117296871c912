//! The planner: which domain sizes make a layer fastest on a given cluster, and why.
//!
//! A candidate is one divisor per level. Its price follows in four steps, each in a file of formulas:
//!
//! ```text
//!  domain sizes ──▶ volume.rs   bytes and messages per level: experts, tokens, gradients, shared expert
//!               ──▶ cost.rs     Transfer::new: alpha messages + round trip + bytes / bandwidth
//!               ──▶ time.rs     fwd = max(PE + chain(2A, E + dec), AG + 2A)
//!                               bwd = max(2 PE + chain(2A, 2 E + dec + enc), AG + RS + AR + 2A)
//!               ──▶ memory.rs   2 (ΠS − 1) n P live <= cap
//! ```
//!
//! [`Planner::plan`] prices every candidate and takes the fastest that fits: an exact search. Plain and
//! hierarchical expert parallelism are the candidate of all ones, on two kinds of token path, so that a plan is
//! never slower.

mod baseline;
mod cost;
mod explain;
mod memory;
mod migration;
mod options;
mod time;
mod volume;

use serde::{Deserialize, Serialize};

pub use baseline::{Baseline, BaselineKind};
pub use cost::{Candidate, LevelTraffic};
pub use explain::{Change, Component, Explanation, Limit, Quantity};
pub use memory::{Memory, gathered_bytes};
pub use migration::{ExpertTrade, GrowthTest, SelectiveMigration};
pub use options::{Options, Replicas, Setting, Work};
pub use time::{Bound, PassTimes, chain, decode_time, encode_time};
pub use volume::{
    Choice, TokenPath, Transfer, gathered_experts, group_probability, refresh_bytes, token_messages,
    token_rows,
};

use crate::cluster::Cluster;
use crate::divisors::{divisor_product, divisors};
use crate::domain::Partition;
use crate::error::{PlanError, Result};
use crate::model::Model;
use crate::stream_model::{StreamInput, StreamModel, TIE};
use crate::units::Seconds;
use cost::{CostModel, Shape};

/// Alternatives that a plan lists beside the best.
const ALTERNATIVES: usize = 5;

/// A cluster, a model and options that fit together, ready to be planned.
#[derive(Debug, Clone)]
pub struct Planner {
    cluster: Cluster,
    model: Model,
    options: Options,
    experts_per_gpu: usize,
    memory: Memory,
    /// Every choice of divisors; the first is all ones.
    shapes: Vec<Shape>,
}

/// The best domain sizes, and everything that a reader may ask about them.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
pub struct Plan {
    /// Name of each level, outermost first.
    pub level_names: Vec<String>,
    /// `SF_l`: members of each level.
    pub scaling_factors: Vec<usize>,
    /// `n`: routed experts of one GPU per layer.
    pub experts_per_gpu: usize,
    /// Which model priced it.
    pub setting: Setting,
    /// The fastest candidate that fits.
    pub best: Candidate,
    /// The paper's `p` of each level: the proportion sent as tokens.
    pub data_proportions: Vec<f64>,
    /// All layers of a GPU and all micro-batches: a step, without the optimizer and pipeline bubbles.
    pub step_time: Seconds,
    /// Candidates priced.
    pub candidates: usize,
    /// Of these, candidates that memory cannot hold.
    pub candidates_beyond_memory: usize,
    /// The next best candidates that fit, fastest first.
    pub alternatives: Vec<Alternative>,
    /// What one would do without a planner.
    pub baselines: Vec<Baseline>,
    /// What each level would carry if experts were moved one by one.
    pub selective: Vec<SelectiveMigration>,
    /// What limits the plan, and what would change it.
    pub explanation: Explanation,
}

/// A candidate that is not the best.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
pub struct Alternative {
    /// `S_l`, outermost level first.
    pub domain_sizes: Vec<usize>,
    /// Whether gathered experts stay for the whole step.
    pub replicas_kept: bool,
    /// Forward and backward.
    pub layer_time: Seconds,
}

impl Plan {
    /// The groups and rank lists of the plan.
    ///
    /// # Errors
    /// None for a plan that a planner made; [`PlanError::DomainSize`] for one that was edited by hand.
    pub fn partition(&self) -> Result<Partition> {
        Partition::new(&self.scaling_factors, &self.best.domain_sizes)
    }
}

impl Planner {
    /// Checks that the three fit together.
    ///
    /// # Errors
    /// [`PlanError::Experts`] when the experts cannot be spread evenly over the GPUs, [`PlanError::OwnExperts`] when a
    /// GPU cannot hold even its own, [`PlanError::Quantity`] for an option out of range.
    pub fn new(cluster: Cluster, model: Model, options: Options) -> Result<Self> {
        options.check()?;
        let (experts, gpus) = (model.description().experts, cluster.gpus());
        if !experts.is_multiple_of(gpus) {
            return Err(PlanError::Experts { experts, gpus, possible: divisors(experts) });
        }
        let experts_per_gpu = experts / gpus;
        let memory = memory::before_gathering(&cluster, &model, &options, experts_per_gpu)?;
        let scaling_factors = cluster.scaling_factors();
        let shapes = divisor_product(&scaling_factors)
            .into_iter()
            .map(|domain_sizes| Shape::new(&scaling_factors, domain_sizes, &model, &options))
            .collect::<Result<_>>()?;
        Ok(Self { cluster, model, options, experts_per_gpu, memory, shapes })
    }

    /// The fastest candidate that fits, compared and explained.
    pub fn plan(&self) -> Plan {
        let cost = self.cost();
        let mut fitting = Vec::with_capacity(self.shapes.len());
        let mut beyond = 0;
        for candidate in self.candidates(&cost) {
            if candidate.memory.fits() {
                fitting.push(candidate);
            } else {
                beyond += 1;
            }
        }
        let candidates = fitting.len() + beyond;
        let best = self.best(&cost);
        fitting.retain(|other| {
            (&other.domain_sizes, other.replicas_kept) != (&best.domain_sizes, best.replicas_kept)
        });
        fitting.sort_by(|a, b| a.layer_time.0.total_cmp(&b.layer_time.0));
        let alternatives: Vec<Alternative> = fitting
            .into_iter()
            .take(ALTERNATIVES)
            .map(|other| Alternative {
                domain_sizes: other.domain_sizes,
                replicas_kept: other.replicas_kept,
                layer_time: other.layer_time,
            })
            .collect();
        let layers = self.options.layers_per_gpu(self.model.description().moe_layers);
        let scaling_factors = self.cluster.scaling_factors();
        Plan {
            level_names: (0..scaling_factors.len()).map(|level| self.cluster.level_name(level)).collect(),
            experts_per_gpu: self.experts_per_gpu,
            setting: self.options.setting,
            data_proportions: scaling_factors
                .iter()
                .zip(&best.domain_sizes)
                .map(|(&all, &size)| if all == 1 { 0.0 } else { (all - size) as f64 / (all - 1) as f64 })
                .collect(),
            step_time: best.layer_time * (layers * self.options.micro_batches) as f64,
            candidates,
            candidates_beyond_memory: beyond,
            baselines: self.baselines(&best),
            selective: cost.selective(&best.domain_sizes, best.replicas_kept),
            explanation: self.explain(&best, &alternatives, beyond),
            alternatives,
            scaling_factors,
            best,
        }
    }

    /// The price of domain sizes of your own.
    ///
    /// # Errors
    /// [`PlanError::Levels`] or [`PlanError::DomainSize`] for sizes that cannot be,
    /// [`PlanError::GatheredExperts`] for sizes that memory cannot hold.
    pub fn evaluate(&self, domain_sizes: &[usize]) -> Result<Candidate> {
        let scaling_factors = self.cluster.scaling_factors();
        let shape = Shape::new(&scaling_factors, domain_sizes.to_vec(), &self.model, &self.options)?;
        let cost = self.cost();
        let priced = self.retentions().iter().map(|&kept| cost.price(&shape, kept));
        let refused = cost.price(&shape, self.options.replicas == Replicas::Keep).memory;
        let fastest = |a: Candidate, b: Candidate| if b.layer_time < a.layer_time { b } else { a };
        priced.filter(|candidate| candidate.memory.fits()).reduce(fastest).ok_or_else(|| {
            let fitting = self.candidates(&cost).filter(|candidate| candidate.memory.fits());
            PlanError::GatheredExperts {
                domain_sizes: domain_sizes.to_vec(),
                needed: refused.gathered_experts,
                cap: refused.cap.unwrap_or_default(),
                largest: fitting.map(|candidate| candidate.expert_domain_size()).max().unwrap_or(1),
            }
        })
    }

    /// The paper's model of one level, alone: every other level has domains of one.
    ///
    /// # Errors
    /// [`PlanError::Index`] for a level that does not exist.
    pub fn stream_model(&self, level: usize) -> Result<StreamModel> {
        let levels = self.cluster.levels();
        let at =
            levels.get(level).ok_or(PlanError::Index { what: "level", index: level, count: levels.len() })?;
        // Dispatch and combine may differ in type; the model knows one D for both.
        let row = (self.model.dispatch_row_bytes() + self.model.combine_row_bytes()) / 2.0;
        let own = self.model.expert_bytes() * self.experts_per_gpu as f64;
        StreamModel::new(StreamInput {
            gpus: at.scaling_factor,
            token_bytes: row * (self.model.tokens() * self.model.description().topk as f64),
            expert_bytes: own / self.options.weight_compression,
            bandwidth: at.bandwidth_per_gpu(),
            pre_expert: self.cost().pre_expert_time(),
        })
    }

    /// The least time; ties to the smaller `ΠS`, then to dropping replicas.
    fn best(&self, cost: &CostModel<'_>) -> Candidate {
        let rank = |candidate: &Candidate| (candidate.expert_domain_size(), candidate.replicas_kept);
        let all_ones = cost.price(&self.shapes[0], self.retentions()[0]);
        self.candidates(cost).filter(|candidate| candidate.memory.fits()).fold(all_ones, |best, candidate| {
            let (least, time) = (best.layer_time.0, candidate.layer_time.0);
            let tied = (time - least).abs() <= TIE * least;
            let better = if tied { rank(&candidate) < rank(&best) } else { time < least };
            if better { candidate } else { best }
        })
    }

    fn candidates<'a>(&'a self, cost: &CostModel<'a>) -> impl Iterator<Item = Candidate> + use<'a> {
        let cost = *cost;
        let retentions = self.retentions();
        self.shapes.iter().flat_map(move |shape| retentions.iter().map(move |&kept| cost.price(shape, kept)))
    }

    fn retentions(&self) -> &'static [bool] {
        match self.options.replicas {
            Replicas::Regather => &[false],
            Replicas::Keep => &[true],
            Replicas::Best => &[false, true],
        }
    }

    fn cost(&self) -> CostModel<'_> {
        CostModel {
            cluster: &self.cluster,
            model: &self.model,
            options: &self.options,
            path: match self.options.setting {
                Setting::Full => TokenPath::Deduplicated,
                Setting::Paper => TokenPath::Forwarded,
            },
            experts_per_gpu: self.experts_per_gpu,
            memory: self.memory,
        }
    }
}

#[cfg(test)]
mod tests;
