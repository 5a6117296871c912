//! What to plan for, beside the cluster and the model.

use serde::{Deserialize, Serialize};

use crate::error::{PlanError, Result, at_least_one, not_negative};
use crate::routing::Placement;

/// Every setting of the planner, with its default.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
#[serde(default, deny_unknown_fields)]
pub struct Options {
    /// Which model prices a candidate.
    pub setting: Setting,
    /// What a step consists of.
    pub work: Work,
    /// `CR_w`: bytes of an expert over bytes sent for it. 1 turns the codec off.
    pub weight_compression: f64,
    /// `CR_g`: bytes of an expert's gradients over bytes sent for them. 1 sends them as they are.
    pub gradient_compression: f64,
    /// Memory for gathered experts, GB (10⁹ bytes). Without it: what the device has left after the reserve and the
    /// GPU's own experts.
    pub memory_cap_gb: Option<f64>,
    /// Part of the device's memory that experts may not use: dense weights, activations, buffers.
    pub reserved_memory: f64,
    /// Layers whose gathered experts are resident at a time while replicas are gathered anew: one that computes,
    /// one whose experts arrive.
    pub live_layers: usize,
    /// Whether gathered experts stay for the whole step.
    pub replicas: Replicas,
    /// `m`: micro-batches per optimizer step.
    pub micro_batches: usize,
    /// Pipeline stages that the layers are spread over.
    pub pipeline_stages: usize,
    /// `N`: optimizer steps between two refreshes of the codec's shared expert.
    pub shared_refresh_steps: usize,
    /// Chunks in which token exchange and expert compute overlap.
    pub overlap_chunks: usize,
    /// Where experts live.
    pub placement: Placement,
}

impl Default for Options {
    fn default() -> Self {
        Self {
            setting: Setting::Full,
            work: Work::Training,
            weight_compression: 50.0,
            gradient_compression: 1.0,
            memory_cap_gb: None,
            reserved_memory: 0.3,
            live_layers: 2,
            replicas: Replicas::Regather,
            micro_batches: 1,
            pipeline_stages: 1,
            shared_refresh_steps: 100,
            overlap_chunks: 4,
            placement: Placement::InOrder,
        }
    }
}

/// Which model prices a candidate.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default, Serialize, Deserialize)]
#[serde(rename_all = "kebab-case")]
pub enum Setting {
    /// Everything that this crate knows to cost time.
    #[default]
    Full,
    /// The paper's stream model, level by level: bytes over bandwidth, one copy per (token, expert), forward only.
    /// No latency, expert compute, codec, gradients, uneven routing or memory limit. For one level it is
    /// [`StreamModel`](crate::StreamModel), exactly.
    Paper,
}

/// What a step consists of.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default, Serialize, Deserialize)]
#[serde(rename_all = "kebab-case")]
pub enum Work {
    /// Forward and backward, with the gradients of migrated experts.
    #[default]
    Training,
    /// The forward pass of a training step alone: weights still change from step to step.
    Forward,
}

/// Whether gathered experts stay in memory.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default, Serialize, Deserialize)]
#[serde(rename_all = "kebab-case")]
pub enum Replicas {
    /// Gathered for every pass of every micro-batch, dropped after use.
    #[default]
    Regather,
    /// Gathered once per step and kept, their gradients accumulated in place and reduced once. Every layer of the
    /// GPU is resident.
    Keep,
    /// Whichever of the two is faster and fits.
    Best,
}

impl Options {
    /// Checks every number.
    pub(crate) fn check(&self) -> Result<()> {
        for (what, ratio) in [
            ("weight_compression", self.weight_compression),
            ("gradient_compression", self.gradient_compression),
        ] {
            if !(ratio.is_finite() && ratio >= 1.0) {
                let needed = "at least 1, which sends everything";
                return Err(PlanError::Quantity { what: what.into(), value: ratio, needed });
            }
        }
        if let Some(cap) = self.memory_cap_gb {
            not_negative("memory_cap_gb", cap)?;
        }
        if !(0.0..1.0).contains(&self.reserved_memory) {
            let needed = "a part of the memory, at least 0 and below 1";
            let value = self.reserved_memory;
            return Err(PlanError::Quantity { what: "reserved_memory".into(), value, needed });
        }
        at_least_one("live_layers", self.live_layers)?;
        at_least_one("micro_batches", self.micro_batches)?;
        at_least_one("pipeline_stages", self.pipeline_stages)?;
        at_least_one("shared_refresh_steps", self.shared_refresh_steps)?;
        at_least_one("overlap_chunks", self.overlap_chunks)?;
        Ok(())
    }

    /// Layers of one GPU, of a model that has this many.
    pub(crate) fn layers_per_gpu(&self, layers: usize) -> usize {
        layers.div_ceil(self.pipeline_stages)
    }

    /// Whether experts travel compressed, and are encoded and decoded.
    pub(crate) fn codec(&self) -> bool {
        self.weight_compression > 1.0
    }

    /// Whether there is a backward pass to price.
    pub(crate) fn trains(&self) -> bool {
        self.work == Work::Training && self.setting == Setting::Full
    }
}
