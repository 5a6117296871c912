//! The options of the planner.

use serde::{Deserialize, Serialize};

use ep_codec::GradientCodec;

use super::compression::Compression;
use super::dense;
use crate::error::{Result, count, number};
use crate::limits;
use crate::model::Model;
use crate::routing::Placement;

/// The options of the planner. The documentation of each field states its default.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
#[serde(default, deny_unknown_fields)]
pub struct Options {
    /// The model that prices a candidate. Default: [`Setting::Full`].
    pub setting: Setting,
    /// The passes of a step. Default: [`Work::Training`].
    pub work: Work,
    /// The codec of weights, which gives `CR_w`: bytes of an expert over bytes sent for it. Default:
    /// [`Compression::Int8`].
    pub weight_compression: Compression,
    /// The codec of gradients, which gives `CR_g`: bytes of an expert's gradients over bytes sent for them. Default:
    /// [`Compression::Int8`].
    pub gradient_compression: Compression,
    /// The codec of dense gradients between datacenters, which are exchanged as in the training runtime: every GPU
    /// sends its encoded share of the sum of its datacenter to every other datacenter. `topk` has a density of more
    /// than 0 and at most 1. Default: none, which exchanges exact gradients and then weights, with Adam state that is
    /// spread over all datacenters.
    #[serde(with = "dense::text::optional", skip_serializing_if = "Option::is_none")]
    pub dense_gradient_compression: Option<GradientCodec>,
    /// Memory for gathered experts, GB (10⁹ bytes). Default: none, which allows the memory that the device has left
    /// after the reserve and the GPU's own experts.
    pub memory_cap_gb: Option<f64>,
    /// Fraction of the device's memory that experts may not use, because dense weights, activations and buffers need
    /// it. Default: 0.3.
    pub reserved_memory: f64,
    /// Layers whose gathered experts are in memory at the same time when replicas are not kept. Default: 2, one layer
    /// that computes and one whose experts arrive.
    pub live_layers: usize,
    /// Whether gathered experts stay in memory for the whole step. Default: [`Replicas::Best`].
    pub replicas: Replicas,
    /// `m`: micro-batches per optimizer step. Default: 1.
    pub micro_batches: usize,
    /// What determines the tokens of a step. Default: [`Batch::Model`].
    pub batch: Batch,
    /// Pipeline stages over which the layers are spread. Default: none, which is 1 for [`Planner`](super::Planner), and
    /// lets [`StepPlanner`](crate::step::StepPlanner) choose.
    pub pipeline_stages: Option<usize>,
    /// GPUs of an EP group. Default: none, which lets [`StepPlanner`](crate::step::StepPlanner) choose.
    pub expert_parallel: Option<usize>,
    /// `t`: GPUs that split the dense parameters. Default: none, which lets [`StepPlanner`](crate::step::StepPlanner) take the
    /// fewest that fit into memory.
    pub tensor_parallel: Option<usize>,
    /// `H`: steps between two exchanges of weights under local steps. Default: 100.
    pub local_steps: usize,
    /// Optimizer steps between two refreshes of the codec's shared expert. Default: 100.
    pub shared_refresh_steps: usize,
    /// `c`: chunks in which token exchange and expert compute overlap. Default: 4.
    pub overlap_chunks: usize,
    /// The GPU of each expert. Default: [`Placement::InOrder`].
    pub placement: Placement,
}

impl Default for Options {
    fn default() -> Self {
        Self {
            setting: Setting::Full,
            work: Work::Training,
            weight_compression: Compression::Int8,
            gradient_compression: Compression::Int8,
            dense_gradient_compression: None,
            memory_cap_gb: None,
            reserved_memory: 0.3,
            live_layers: 2,
            replicas: Replicas::Best,
            micro_batches: 1,
            batch: Batch::Model,
            pipeline_stages: None,
            expert_parallel: None,
            tensor_parallel: None,
            local_steps: 100,
            shared_refresh_steps: 100,
            overlap_chunks: 4,
            placement: Placement::InOrder,
        }
    }
}

/// The model that prices a candidate.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default, Serialize, Deserialize)]
#[serde(rename_all = "kebab-case")]
pub enum Setting {
    /// The full model of this crate.
    #[default]
    Full,
    /// The paper's stream model (arXiv 2510.19470), applied level by level: bytes over bandwidth, one copy per (token,
    /// expert), forward only. It has no latency, expert compute, codec, gradients, uneven routing or memory limit. For
    /// one level it equals [`StreamModel`](crate::StreamModel).
    Paper,
}

/// The passes of a step.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default, Serialize, Deserialize)]
#[serde(rename_all = "kebab-case")]
pub enum Work {
    /// Forward and backward passes, with the gradients of migrated experts.
    #[default]
    Training,
    /// The forward pass of a training step alone. Weights still change between steps, so each step gathers experts.
    Forward,
}

/// Whether gathered experts (replicas) stay in memory.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default, Serialize, Deserialize)]
#[serde(rename_all = "kebab-case")]
pub enum Replicas {
    /// Experts are gathered for every pass of every micro-batch and dropped after use.
    Regather,
    /// Experts are gathered once per step and kept. Their gradients are accumulated in place and reduced once. The
    /// gathered experts of all layers of the GPU are in memory.
    Keep,
    /// The faster of the two, among those that fit into memory.
    #[default]
    Best,
}

/// What determines the tokens of an optimizer step ([`StepPlanner`](crate::step::StepPlanner)). A
/// [`Planner`](super::Planner) prices [`Options::micro_batches`] in both cases.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default, Serialize, Deserialize)]
#[serde(rename_all = "kebab-case")]
pub enum Batch {
    /// The global batch of the model; without one, the micro-batches of the options.
    #[default]
    Model,
    /// The micro-batches of the options, on every GPU of the cluster.
    MicroBatches,
}

impl Options {
    /// Checks the range of every number.
    pub(crate) fn check(&self) -> Result<()> {
        self.weight_compression.check("weight_compression")?;
        self.gradient_compression.check("gradient_compression")?;
        if let Some(codec) = self.dense_gradient_compression {
            dense::check(codec, "dense_gradient_compression")?;
        }
        if let Some(cap) = self.memory_cap_gb {
            number("memory_cap_gb", cap, limits::MEMORY_CAP_GB)?;
        }
        number("reserved_memory", self.reserved_memory, limits::RESERVED_MEMORY)?;
        count("live_layers", self.live_layers, limits::LAYERS)?;
        count("micro_batches", self.micro_batches, limits::MICRO_BATCHES)?;
        count("pipeline_stages", self.stages(), limits::LAYERS)?;
        count("expert_parallel", self.expert_parallel.unwrap_or(1), limits::GPUS)?;
        count("tensor_parallel", self.tensor_parallel.unwrap_or(1), limits::GPUS)?;
        count("local_steps", self.local_steps, limits::LOCAL_STEPS)?;
        count("shared_refresh_steps", self.shared_refresh_steps, limits::REFRESH_STEPS)?;
        count("overlap_chunks", self.overlap_chunks, limits::CHUNKS)?;
        Ok(())
    }

    /// Layers of one GPU, for a model of `layers` layers.
    pub(crate) fn layers_per_gpu(&self, layers: usize) -> usize {
        layers.div_ceil(self.stages())
    }

    /// Pipeline stages, 1 if none are given.
    pub(crate) fn stages(&self) -> usize {
        self.pipeline_stages.unwrap_or(1)
    }

    /// The placement of the model's slots. Copies of experts are always balanced.
    pub(crate) fn placement_of(&self, model: &Model) -> Placement {
        if model.slots() > model.description().experts { Placement::Lpt } else { self.placement }
    }

    /// The default options with the compressions of the paper (arXiv 2510.19470): weights by 50, gradients exact.
    pub fn paper_codec() -> Self {
        let (weight_compression, gradient_compression) = (Compression::By(50.0), Compression::EXACT);
        Self { weight_compression, gradient_compression, ..Self::default() }
    }

    /// `CR_w`: bytes of an expert over bytes sent for it.
    pub fn weights_by(&self, model: &Model) -> f64 {
        self.weight_compression.ratio(model.description().precision.weights)
    }

    /// `CR_g`: bytes of an expert's gradients over bytes sent for them.
    pub fn gradients_by(&self, model: &Model) -> f64 {
        self.gradient_compression.ratio(model.description().precision.gradients)
    }

    /// Whether a codec changes weights or gradients of experts.
    pub fn lossy(&self) -> bool {
        !self.weight_compression.is_exact() || (self.trains() && !self.gradient_compression.is_exact())
    }

    /// Whether the step has a backward pass.
    pub fn trains(&self) -> bool {
        self.work == Work::Training && self.setting == Setting::Full
    }
}
