//! The planner: the domain sizes that make a layer fastest on a given cluster, and the reasons.
//!
//! A candidate is a choice of one divisor per level. The planner prices it in four steps, each in a file of formulas:
//!
//! ```text
//!  domain sizes ──▶ volume.rs   bytes and messages per level: experts, tokens, gradients, shared expert
//!               ──▶ cost.rs     Transfer::new: alpha * messages + round trip + bytes / bandwidth
//!               ──▶ time.rs     fwd = max(PE + chain(2A, E + dec), AG + 2A)
//!                               bwd = max(2 PE + chain(2A, 2 E + dec + enc), AG + RS + AR + 2A)
//!               ──▶ memory.rs   2 (ΠS − 1) n P live <= cap
//! ```
//!
//! The symbols are those of [`PassTimes`], [`chain`] and [`gathered_bytes`]. The volumes and the overlap extend the
//! paper's model (arXiv 2510.19470, [`stream_model`](crate::stream_model)); `NOTES.md` beside the sources lists what
//! the planner adds to it and why.
//!
//! [`Planner::plan`] prices every candidate and takes the fastest one that fits into memory. The search is exact.
//! Hierarchical expert parallelism is the candidate of all ones, so a plan is never slower than that.
//!
//! ```
//! # fn main() -> ep_plan::Result<()> {
//! use ep_plan::{Options, Planner, presets};
//!
//! let cluster = presets::datacenters(2, 100.0, 0.005, presets::dgx_h200(8)).try_into()?;
//! let planner = Planner::new(cluster, presets::deepseek_v3().try_into()?, Options::default())?;
//! let plan = planner.plan();
//! // Any other choice of domain sizes is at most as fast.
//! assert!(planner.evaluate(&[2, 1, 1])?.layer_time >= plan.best.layer_time);
//! # Ok(())
//! # }
//! ```

mod baseline;
mod compression;
mod cost;
mod dense;
mod explain;
mod gains;
mod memory;
mod migration;
mod options;
mod site;
mod time;
mod volume;

use serde::{Deserialize, Serialize};

pub use baseline::{Baseline, BaselineKind};
pub use compression::Compression;
pub use cost::{Candidate, LevelTraffic};
pub(crate) use dense::{codec_time, element_bytes, text as codec_text};
pub use ep_codec::GradientCodec;
pub use explain::{Change, Component, Explanation, Limit, Quantity, domain_sizes_text};
pub use gains::{COMPRESSIONS, CompressionGain};
pub use memory::{Memory, gathered_bytes};
pub use migration::{ExpertTrade, GrowthTest, SelectiveMigration};
pub use options::{Batch, Options, Replicas, Setting, Work};
pub(crate) use site::{SiteShape, shapes, slowest};
pub use time::{Bound, PassTimes, chain, decode_time, encode_time};
pub use volume::{
    Choice, TokenPath, Transfer, gathered_experts, group_probability, refresh_bytes, token_messages,
    token_rows,
};

use crate::cluster::Cluster;
use crate::divisors::{divisor_product, divisors};
use crate::domain::Partition;
use crate::error::{PlanError, Result};
use crate::limits;
use crate::model::Model;
use crate::stream_model::{StreamInput, StreamModel, TIE};
use crate::units::Seconds;
use cost::{CostModel, UnpricedCandidate};

/// Alternatives that a plan lists in addition to the best candidate.
const ALTERNATIVES: usize = 5;

/// A cluster, a model and options that are valid together, ready to be planned.
#[derive(Debug, Clone)]
pub struct Planner {
    cluster: Cluster,
    model: Model,
    options: Options,
    experts_per_gpu: usize,
    memory: Memory,
    /// Every choice of divisors; the first is all ones.
    unpriced: Vec<UnpricedCandidate>,
    /// Part of a layer's time that gathers of experts must save to be chosen.
    least_saving: f64,
}

/// The best domain sizes with their cost, alternatives, baselines and explanation.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
pub struct Plan {
    /// Name of each level, outermost first.
    pub level_names: Vec<String>,
    /// `SF_l`: members of each level, outermost first.
    pub scaling_factors: Vec<usize>,
    /// `n`: routed experts of one GPU per layer, with copies.
    pub experts_per_gpu: usize,
    /// The model that priced the candidates.
    pub setting: Setting,
    /// The fastest candidate that fits into memory.
    pub best: Candidate,
    /// The paper's `p_l = (SF_l − S_l) / (SF_l − 1)` of each level: the proportion sent as tokens, from 0 to 1.
    pub data_proportions: Vec<f64>,
    /// Time of an optimizer step: `layer_time`, times the layers of a GPU, times the micro-batches. The optimizer and
    /// pipeline bubbles are not included.
    pub step_time: Seconds,
    /// Number of candidates that were priced.
    pub candidates: usize,
    /// Number of priced candidates that do not fit into memory.
    pub candidates_beyond_memory: usize,
    /// The next best candidates that fit, fastest first.
    pub alternatives: Vec<Alternative>,
    /// Common schemes without expert domains, priced by the same model.
    pub baselines: Vec<Baseline>,
    /// For each level, the bytes that would cross it if each expert were moved or left individually.
    pub selective: Vec<SelectiveMigration>,
    /// What limits the plan, and what would change it.
    pub explanation: Explanation,
    /// What domains gain at several compressions of the weights.
    pub compression_gains: Vec<CompressionGain>,
}

/// The model with copies of experts, so that its number of slots is a multiple of the cluster's number of GPUs.
pub(crate) fn spread(model: &Model, cluster: &Cluster) -> Result<Model> {
    model.spread(cluster.gpus())
}

/// What a search found besides the best candidate.
struct Searched {
    candidates: usize,
    beyond: usize,
    alternatives: Vec<Alternative>,
}

/// A candidate other than the best one.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
pub struct Alternative {
    /// `S_l`, outermost level first.
    pub domain_sizes: Vec<usize>,
    /// Whether gathered experts stay in memory for the whole step.
    pub replicas_kept: bool,
    /// Times of the forward pass of one layer and one micro-batch.
    pub forward: PassTimes,
    /// Times of the backward pass, when training.
    pub backward: Option<PassTimes>,
    /// Sum of the totals of both passes.
    pub layer_time: Seconds,
}

impl Plan {
    /// The partition of the plan, from which groups and rank lists follow.
    ///
    /// # Errors
    /// [`PlanError::Levels`] or [`PlanError::DomainSize`] when the plan was changed by hand so that its domain sizes do
    /// not fit its levels. A plan made by [`Planner::plan`] causes no error.
    pub fn partition(&self) -> Result<Partition> {
        Partition::new(&self.scaling_factors, &self.best.domain_sizes)
    }

    /// The fastest baseline that fits into memory and is faster than the best domain sizes, if there is one.
    pub fn faster_baseline(&self) -> Option<&Baseline> {
        let faster = |baseline: &&Baseline| baseline.fits && baseline.speedup < 1.0 - TIE;
        let by_time = |a: &&Baseline, b: &&Baseline| a.speedup.total_cmp(&b.speedup);
        self.baselines.iter().filter(faster).min_by(by_time)
    }
}

impl Planner {
    /// Checks that the cluster, the model and the options are valid together. If the number of experts is not a
    /// multiple of the number of GPUs, the plan has copies of experts ([`Model::spread`]).
    ///
    /// # Errors
    /// [`PlanError::Count`] when there are more GPUs than [`limits::EXPERTS`] allows. [`PlanError::OwnExperts`] when a
    /// GPU cannot hold even its own experts. [`PlanError::Quantity`] or [`PlanError::Count`] when an option is out of
    /// range. [`PlanError::TooMany`] when there are more candidates than [`limits::CANDIDATES`]. [`PlanError::Unequal`]
    /// when the paper's model is chosen for sites of unequal sizes.
    pub fn new(cluster: Cluster, model: Model, options: Options) -> Result<Self> {
        options.check()?;
        let experts_per_gpu = model.description().experts.div_ceil(cluster.gpus());
        let memory = memory::before_gathering(&cluster, &model, &options, experts_per_gpu)?;
        Self::with_memory(cluster, &model, options, memory)
    }

    /// A planner with the given memory of a GPU before any expert is gathered.
    pub(crate) fn with_memory(
        cluster: Cluster,
        model: &Model,
        options: Options,
        memory: Memory,
    ) -> Result<Self> {
        let model = spread(model, &cluster)?;
        let experts_per_gpu = model.slots() / cluster.gpus();
        let scaling_factors = cluster.scaling_factors();
        if cluster.is_unequal() && options.setting == Setting::Paper {
            return Err(cluster.unequal(
                "the paper's model",
                "equal sites, or the full model (without --paper-model, or with `Setting::Full`)",
            ));
        }
        let outermost = cluster.outermost_choices(scaling_factors[0]);
        let inner = scaling_factors[1..].iter().map(|&factor| divisors(factor).len() as f64);
        let candidates = outermost.len() as f64 * inner.product::<f64>();
        if candidates > limits::CANDIDATES.most as f64 {
            return Err(PlanError::TooMany {
                what: "choices of domain sizes (a divisor of each level's members)".into(),
                count: candidates,
                most: limits::CANDIDATES.most,
                hint: "join levels, or use numbers of members with fewer divisors",
            });
        }
        let unpriced = divisor_product(&scaling_factors)
            .into_iter()
            .filter(|sizes| outermost.contains(&sizes[0]))
            .map(|domain_sizes| UnpricedCandidate::new(&scaling_factors, domain_sizes, &model, &options))
            .collect::<Result<_>>()?;
        Ok(Self { cluster, model, options, experts_per_gpu, memory, unpriced, least_saving: 0.0 })
    }

    /// The planner, with gathers of experts chosen only if they save more than this part of a layer's time.
    pub(crate) fn with_least_saving(self, least_saving: f64) -> Self {
        Self { least_saving, ..self }
    }

    /// Finds the fastest candidate that fits into memory, compares it with the baselines and explains it.
    pub fn plan(&self) -> Plan {
        let cost = self.cost();
        let mut fitting = Vec::with_capacity(self.unpriced.len());
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
                forward: other.forward,
                backward: other.backward,
                layer_time: other.layer_time,
            })
            .collect();
        let explanation = self.explain(&cost, &best, &alternatives, beyond, self.changes(&best));
        self.described(&cost, best, explanation, Searched { candidates, beyond, alternatives })
    }

    /// The plan of one scheme without expert domains: tokens take this path, and no other candidate is priced. `None` if
    /// nothing fits into memory.
    pub(crate) fn plan_on(&self, path: TokenPath) -> Option<Plan> {
        let best = self.scheme(Some(path))?;
        let cost = CostModel { path, ..self.cost() };
        let explanation = self.explain(&cost, &best, &[], 0, Vec::new());
        let alone = Searched { candidates: 1, beyond: 0, alternatives: Vec::new() };
        Some(self.described(&cost, best, explanation, alone))
    }

    /// The plan with this best candidate.
    fn described(
        &self,
        cost: &CostModel<'_>,
        best: Candidate,
        explanation: Explanation,
        searched: Searched,
    ) -> Plan {
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
            candidates: searched.candidates,
            candidates_beyond_memory: searched.beyond,
            baselines: self.baselines(&best),
            selective: cost.selective(&best.domain_sizes, best.replicas_kept),
            explanation,
            // `compression_gains` causes no error for a planner that exists, so the list is not empty.
            compression_gains: self.compression_gains().unwrap_or_default(),
            alternatives: searched.alternatives,
            scaling_factors,
            best,
        }
    }

    /// Prices the given domain sizes, outermost level first.
    ///
    /// # Errors
    /// [`PlanError::Levels`] when there is not one size per level, [`PlanError::DomainSize`] when a size does not
    /// divide its level, [`PlanError::Unequal`] when a domain spans some but not all parts of unequal sites,
    /// [`PlanError::GatheredExperts`] when the gathered experts do not fit into memory.
    pub fn evaluate(&self, domain_sizes: &[usize]) -> Result<Candidate> {
        let scaling_factors = self.cluster.scaling_factors();
        let unpriced =
            UnpricedCandidate::new(&scaling_factors, domain_sizes.to_vec(), &self.model, &self.options)?;
        if !self.cluster.outermost_choices(scaling_factors[0]).contains(&domain_sizes[0]) {
            return Err(self.cluster.unequal(
                "a domain of some of the sites",
                "domain sizes of 1 (inside a part) or of all parts",
            ));
        }
        let cost = self.cost();
        let priced = self.replica_choices().iter().map(|&replicas_kept| cost.price(&unpriced, replicas_kept));
        let refused = cost.price(&unpriced, self.options.replicas == Replicas::Keep).memory;
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

    /// The paper's model of one level, in which every other level has domains of one member.
    ///
    /// # Errors
    /// [`PlanError::Index`] when the level does not exist.
    pub fn stream_model(&self, level: usize) -> Result<StreamModel> {
        let levels = self.cluster.levels();
        let at =
            levels.get(level).ok_or(PlanError::Index { what: "level", index: level, count: levels.len() })?;
        // Dispatch and combine may have different element types; the paper's model has one D, so the code takes the mean.
        let row = (self.model.dispatch_row_bytes() + self.model.combine_row_bytes()) / 2.0;
        let own = self.model.expert_bytes() * self.experts_per_gpu as f64;
        StreamModel::new(StreamInput {
            gpus: at.scaling_factor,
            token_bytes: row * (self.model.tokens() * self.model.description().topk as f64),
            expert_bytes: own / self.options.weights_by(&self.model),
            bandwidth: at.bandwidth_per_gpu(),
            pre_expert: self.cost().pre_expert_time(),
        })
    }

    /// The candidate with the least time. Of candidates with equal times, the one with the smallest `ΠS` is chosen,
    /// then the one without kept replicas. The candidate of all ones gathers nothing, so it always fits; it is also chosen
    /// if the others save no more than `least_saving`.
    fn best(&self, cost: &CostModel<'_>) -> Candidate {
        let rank = |candidate: &Candidate| (candidate.expert_domain_size(), candidate.replicas_kept);
        let all_ones = cost.price(&self.unpriced[0], self.replica_choices()[0]);
        let fitting = self.candidates(cost).filter(|candidate| candidate.memory.fits());
        let best = fitting.fold(all_ones.clone(), |best, candidate| {
            let (least, time) = (best.layer_time.0, candidate.layer_time.0);
            let tied = (time - least).abs() <= TIE * least;
            let better = if tied { rank(&candidate) < rank(&best) } else { time < least };
            if better { candidate } else { best }
        });
        let saves = best.layer_time.0 < all_ones.layer_time.0 * (1.0 - self.least_saving);
        if saves || best.expert_domain_size() == 1 { best } else { all_ones }
    }

    /// A layer without expert domains whose tokens take this path; if no path is given, a layer with the fastest domain
    /// sizes. `None` if nothing fits into memory.
    pub(crate) fn scheme(&self, path: Option<TokenPath>) -> Option<Candidate> {
        let cost = self.cost();
        let candidate = match path {
            Some(path) => CostModel { path, ..cost }.price(&self.unpriced[0], false),
            None => self.best(&cost),
        };
        candidate.memory.fits().then_some(candidate)
    }

    fn candidates<'a>(&'a self, cost: &CostModel<'a>) -> impl Iterator<Item = Candidate> + use<'a> {
        let cost = *cost;
        let replica_choices = self.replica_choices();
        self.unpriced.iter().flat_map(move |unpriced| {
            replica_choices.iter().map(move |&replicas_kept| cost.price(unpriced, replicas_kept))
        })
    }

    /// The values of `replicas_kept` that the options allow.
    fn replica_choices(&self) -> &'static [bool] {
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
