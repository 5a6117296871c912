//! The time of an optimizer step under each way to use several datacenters.
//!
//! [`Planner`](crate::Planner) prices a layer of one EP group. [`StepPlanner`] prices whole steps of a given global batch:
//! expert domains, expert parallelism without them, data parallelism, pipeline parallelism and local steps between datacenters,
//! each with the fastest layout inside. `docs/step-model.md` states the formulas and the assumptions.
//!
//! ```
//! # fn main() -> ep_plan::Result<()> {
//! use ep_plan::step::{StepPlanner, Strategy};
//! use ep_plan::{Options, presets};
//!
//! let cluster = presets::datacenters(2, 100.0, 0.005, presets::dgx_h200(8)).try_into()?;
//! let planner = StepPlanner::new(cluster, presets::deepseek_v3().try_into()?, Options::default())?;
//! let plan = planner.plan()?;
//! // One boundary of a pipeline costs less than the gradients of all experts.
//! assert_eq!(plan.best().strategy, Strategy::Pipeline);
//! # Ok(())
//! # }
//! ```

mod fewer;
mod fixed;
mod layout;
mod memory;
mod parts;
mod price;
mod schedule;
mod stragglers;
mod sync;

use serde::{Deserialize, Serialize};

pub use fewer::Fewer;
pub use layout::Layout;
pub use memory::{Fit, StepMemory};
pub use parts::StepParts;
pub use price::{Bottleneck, Boundary, StepPrice, pipeline_passes};
pub use schedule::{PipelineWork, SimulatedStep, simulate_pipeline};
pub use sync::DenseExchange;

use crate::cluster::Cluster;
use crate::divisors::divisors;
use crate::error::{PlanError, Result};
use crate::model::Model;
use crate::planner::{Batch, Compression, Options, Plan, TokenPath};
use fixed::{Fixed, Part};
use price::Pricing;

/// The search of a strategy prices no further layout once the slots times candidates that it has priced exceed this
/// number. So a search takes seconds at most.
const SEARCH: f64 = (1u64 << 22) as f64;

/// Gain up to which a simpler layout is preferred, because the model is not more precise. The first choice is a layout without
/// copies of experts; then one whose EP groups each lie in one member of the second innermost level, usually a node; then one with
/// fewer stages; then one with larger EP groups.
const SIMPLER: f64 = 0.01;

/// Part of the time that gathers of experts inside a datacenter must save to be chosen, of a layer and of a step. They are priced at the bandwidth of
/// NVLink or the rails, at which no runtime of this project sends experts, and only some layouts with gathers have a runtime.
const LEAST_SAVING: f64 = 0.05;

/// What the datacenters exchange in a step.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash, Serialize, Deserialize)]
#[serde(rename_all = "kebab-case")]
pub enum Strategy {
    /// Experts inside domains and tokens between domains; EP groups span datacenters.
    ExpertDomains,
    /// Tokens, one row per (token, datacenter); EP groups span datacenters.
    HierarchicalEp,
    /// Tokens, one row per (token, expert); EP groups span datacenters.
    PlainEp,
    /// Gradients and weights of all parameters once per step; EP groups inside a datacenter.
    DataParallel,
    /// Activations between pipeline stages; EP groups inside a datacenter.
    Pipeline,
    /// Weights of all parameters, once in several steps; EP groups inside a datacenter. The training differs from that
    /// of the other strategies.
    LocalSteps,
}

impl Strategy {
    /// All strategies. Of equally fast ones a plan takes the first.
    pub const ALL: [Self; 6] = [
        Self::Pipeline,
        Self::DataParallel,
        Self::HierarchicalEp,
        Self::PlainEp,
        Self::LocalSteps,
        Self::ExpertDomains,
    ];

    /// Whether EP groups span members of the outermost level.
    pub fn spans(self) -> bool {
        matches!(self, Self::ExpertDomains | Self::HierarchicalEp | Self::PlainEp)
    }

    /// The options that apply to a strategy: only expert domains compress experts, and local steps send no gradients between
    /// datacenters.
    fn options(self, options: &Options, stages: usize) -> Options {
        let options = Options { pipeline_stages: Some(stages), ..options.clone() };
        match self {
            Self::ExpertDomains => options,
            _ => Options {
                weight_compression: Compression::EXACT,
                gradient_compression: Compression::EXACT,
                dense_gradient_compression: options
                    .dense_gradient_compression
                    .filter(|_| self != Self::LocalSteps),
                ..options
            },
        }
    }

    /// The path of tokens if the strategy has no expert domains. `None`: the planner chooses the fastest domain sizes.
    fn path(self) -> Option<TokenPath> {
        match self {
            Self::HierarchicalEp => Some(TokenPath::Deduplicated),
            Self::PlainEp => Some(TokenPath::Direct),
            _ => None,
        }
    }
}

/// The tokens of a step.
#[derive(Debug, Clone, Copy, PartialEq)]
struct Tokens {
    /// `N`.
    batch: f64,
    /// `T`: maximum number of tokens of a GPU in a micro-batch.
    most: f64,
}

impl Tokens {
    /// `m = ⌈N / (R T)⌉`, for a stage of `R` GPUs.
    fn micro_batches(self, stage_gpus: usize) -> usize {
        (self.batch / (stage_gpus as f64 * self.most)).ceil().max(1.0) as usize
    }

    /// `T' = N / (R m)`.
    fn per_gpu(self, stage_gpus: usize) -> f64 {
        self.batch / (stage_gpus as f64 * self.micro_batches(stage_gpus) as f64)
    }
}

/// A cluster, a model and options whose steps can be compared.
#[derive(Debug, Clone)]
pub struct StepPlanner {
    cluster: Cluster,
    model: Model,
    options: Options,
    tokens: Tokens,
}

/// The fastest layout of every strategy.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
pub struct StepPlan {
    /// `N`: tokens of a step.
    pub global_batch: f64,
    /// One price per strategy that fits into memory, fastest first.
    pub prices: Vec<StepPrice>,
    /// Strategies that have layouts, of which none fits into memory.
    pub impossible: Vec<Strategy>,
    /// Strategies that have no layout, because the cluster has a single site, or because no layout has the pipeline
    /// stages, the GPUs of an EP group or the tensor parallelism that the options fix.
    #[serde(default)]
    pub without_layout: Vec<Strategy>,
    /// Whether the search left out layouts because there are too many.
    pub truncated: bool,
    best: usize,
}

impl StepPlan {
    /// The fastest strategy. Local steps come last, because they do not train as one datacenter would; of the others,
    /// those that fit come before those that are tight.
    pub fn best(&self) -> &StepPrice {
        &self.prices[self.best]
    }

    /// The price of a strategy, if one of its layouts fits.
    pub fn price(&self, strategy: Strategy) -> Option<&StepPrice> {
        self.prices.iter().find(|price| price.strategy == strategy)
    }
}

impl StepPlanner {
    /// Checks the options, and that the model fits into the memory of all GPUs together.
    ///
    /// # Errors
    /// [`PlanError::TotalMemory`] when weights, gradients and Adam state of the model exceed the memory of all GPUs.
    /// [`PlanError::Forward`] when the options plan forward passes only: they have no step. [`PlanError::Quantity`] or
    /// [`PlanError::Count`] when an option is out of range.
    pub fn new(cluster: Cluster, model: Model, options: Options) -> Result<Self> {
        options.check()?;
        if !options.trains() {
            return Err(PlanError::Forward);
        }
        let (needed, available) = (memory::whole_model(&model), cluster.memory() * cluster.gpus() as f64);
        if needed.0 > available.0 {
            return Err(PlanError::TotalMemory { needed, available, gpus: cluster.gpus() });
        }
        let most = model.tokens();
        let batch = match (options.batch, model.description().global_batch) {
            (Batch::Model, Some(batch)) => batch as f64,
            _ => options.micro_batches as f64 * most * cluster.gpus() as f64,
        };
        Ok(Self { cluster, model, options, tokens: Tokens { batch, most } })
    }

    /// Prices every strategy in its fastest layout.
    ///
    /// # Errors
    /// [`PlanError::Division`] when no layout has what the options fix of it; [`PlanError::NoLayout`] when no layout of any
    /// strategy fits into memory; [`PlanError::TooMany`] when an EP group has more candidates than
    /// [`limits::CANDIDATES`](crate::limits::CANDIDATES).
    pub fn plan(&self) -> Result<StepPlan> {
        let mut prices = Vec::new();
        let (mut impossible, mut without_layout) = (Vec::new(), Vec::new());
        let mut truncated = false;
        for strategy in Strategy::ALL {
            let (price, left_out) = self.fastest(strategy)?;
            truncated |= left_out;
            match price {
                Some(price) => prices.push(price),
                None if self.layouts(strategy).is_empty() => without_layout.push(strategy),
                None => impossible.push(strategy),
            }
        }
        prices.sort_by(|a, b| a.step_time.0.total_cmp(&b.step_time.0));
        // Prices are sorted by time, so the first of the least rank is the fastest.
        let rank = |index: &usize| {
            let price: &StepPrice = &prices[*index];
            (price.strategy == Strategy::LocalSteps, price.fit)
        };
        let best = (0..prices.len()).min_by_key(rank).ok_or_else(|| self.nothing_fits())?;
        Ok(StepPlan { global_batch: self.tokens.batch, prices, impossible, without_layout, truncated, best })
    }

    /// The plan of a layer of one EP group, in the layout and under the strategy of a price. Its best candidate is that
    /// of the price.
    ///
    /// # Errors
    /// [`PlanError::TooMany`] when the EP group has more candidates than [`limits::CANDIDATES`](crate::limits::CANDIDATES).
    pub fn layer_plan(&self, price: &StepPrice) -> Result<Plan> {
        let planner = self.pricing().planner(price.strategy, &price.layout)?;
        let plan = price.strategy.path().and_then(|path| planner.plan_on(path));
        Ok(plan.unwrap_or_else(|| planner.plan()))
    }

    fn pricing(&self) -> Pricing<'_> {
        Pricing { cluster: &self.cluster, model: &self.model, options: &self.options, tokens: self.tokens }
    }

    /// The layouts of a strategy that have what the options fix.
    fn layouts(&self, strategy: Strategy) -> Vec<Layout> {
        self.layouts_with(strategy, &Fixed::by(&self.options))
    }

    fn layouts_with(&self, strategy: Strategy, fixed: &Fixed) -> Vec<Layout> {
        let experts = self.model.description().experts;
        let mut layouts = layout::layouts(strategy, &self.cluster, experts, fixed.stages());
        layouts
            .retain(|layout| layout.stages() <= self.model.description().moe_layers && fixed.allows(layout));
        layouts
    }

    /// The simplest layout that is within [`SIMPLER`] of the fastest without gathers that save less than [`LEAST_SAVING`], and whether layouts were left out.
    fn fastest(&self, strategy: Strategy) -> Result<(Option<StepPrice>, bool)> {
        let pricing = self.pricing();
        let mut prices: Vec<StepPrice> = Vec::new();
        let mut work = 0.0;
        let mut truncated = false;
        for layout in self.layouts(strategy) {
            if work > SEARCH && !prices.is_empty() {
                truncated = true;
                break;
            }
            let candidates: f64 = layout.group.iter().map(|&size| divisors(size).len() as f64).product();
            let Some(price) = pricing.price(strategy, &layout)? else { continue };
            work += candidates * self.model.description().experts.max(layout.group_gpus()) as f64;
            prices.push(price);
        }
        let fit = prices.iter().map(|price| price.fit).min();
        prices.retain(|price| Some(price.fit) == fit);
        let gathers = |price: &StepPrice| !strategy.spans() && price.candidate.expert_domain_size() > 1;
        let least = |prices: &[StepPrice], gathering: bool| {
            let of = prices.iter().filter(|price| gathering || !gathers(price));
            of.map(|price| price.step_time.0).fold(f64::INFINITY, f64::min)
        };
        if least(&prices, false) * (1.0 - LEAST_SAVING) <= least(&prices, true) {
            prices.retain(|price| !gathers(price));
        }
        let least = least(&prices, true);
        // Layouts are in order of stages, then of falling EP group size, and `min_by_key` takes the first of those with
        // equal keys.
        let near = prices.into_iter().filter(|price| price.step_time.0 <= least * (1.0 + SIMPLER));
        let experts = self.model.description().experts;
        let chosen = near.min_by_key(|price| {
            (price.layout.replicates_experts(experts), price.layout.group_levels().next().is_some())
        });
        Ok((chosen, truncated))
    }

    /// Why no strategy has a price.
    fn nothing_fits(&self) -> PlanError {
        let all = |fixed: &Fixed| -> Vec<Layout> {
            Strategy::ALL.into_iter().flat_map(|strategy| self.layouts_with(strategy, fixed)).collect()
        };
        let fixed = Fixed::by(&self.options);
        let mut before = Fixed::default();
        for part in Part::ALL {
            let Some(value) = fixed.get(part) else { continue };
            let with = before.with(part, value);
            if all(&with).is_empty() {
                let mut possible: Vec<usize> =
                    all(&before).iter().flat_map(|layout| part.values_of(layout)).collect();
                possible.sort_unstable();
                possible.dedup();
                return PlanError::Division { key: part.name(), value, possible };
            }
            before = with;
        }
        let (needed, device) = (self.least_memory(), self.cluster.memory());
        PlanError::NoLayout { needed, device, fixed: fixed.to_string() }
    }

    /// The least memory of a GPU that any layout needs.
    fn least_memory(&self) -> crate::units::Bytes {
        let layouts = Strategy::ALL
            .into_iter()
            .flat_map(|strategy| self.layouts(strategy).into_iter().map(move |layout| (strategy, layout)));
        let least = layouts
            .map(|(strategy, mut layout)| {
                layout.tensor_parallel =
                    self.options.tensor_parallel.unwrap_or_else(|| layout.most_tensor_parallel());
                let options = strategy.options(&self.options, layout.stages());
                let memory = StepMemory::of(&self.cluster, &self.model, &options, strategy, &layout);
                (memory.experts + memory.dense).0
            })
            .fold(f64::INFINITY, f64::min);
        crate::units::Bytes(least)
    }
}

#[cfg(test)]
mod tests;
