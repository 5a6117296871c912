//! The memory of a GPU in a training step.

use serde::{Deserialize, Serialize};

use super::Strategy;
use super::layout::Layout;
use crate::cluster::Cluster;
use crate::model::Model;
use crate::planner::{GradientCodec, Memory, Options};
use crate::units::Bytes;

/// Bytes per parameter of Adam's f32 state: a master copy and two moments.
const OPTIMIZER_BYTES: f64 = 12.0;

/// Bytes per parameter of the f32 carry of a lossy codec with error feedback.
const CARRY_BYTES: f64 = 4.0;

/// Whether a layout fits into the memory of a GPU.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Serialize, Deserialize)]
#[serde(rename_all = "kebab-case")]
pub enum Fit {
    /// Experts leave the reserve free, and dense parameters fit into it.
    Fits,
    /// The parameters fit into the device, but cut into the reserve: little is left for activations.
    Tight,
}

/// The memory of one GPU.
#[derive(Debug, Clone, Copy, PartialEq, Serialize, Deserialize)]
pub struct StepMemory {
    /// Own experts with gradients and optimizer state, and the codec's shared experts.
    pub experts: Bytes,
    /// Dense parameters with gradients and optimizer state, and the carry of a lossy codec of dense gradients.
    pub dense: Bytes,
    /// Memory of the device.
    pub device: Bytes,
}

impl StepMemory {
    /// Experts take `⌈M/p⌉ n P (b_w + b_g + 12 / Π c_l)`, and the codec's shared expert per layer. Dense parameters take
    /// `(⌈M/p⌉ a + o/p) / t (b_w + b_g + 12 t / R)`. With a codec of dense gradients between datacenters every datacenter
    /// updates all dense parameters, so their Adam state, and the carry of a lossy codec, are sharded over the replicas in one
    /// datacenter instead of all `R / t`. A GPU of the smallest site has the largest shard. Under local steps the datacenters
    /// hold different weights, so each shards all Adam state over its own replicas.
    pub(super) fn of(
        cluster: &Cluster,
        model: &Model,
        options: &Options,
        strategy: Strategy,
        layout: &Layout,
    ) -> Self {
        let description = model.description();
        let precision = description.precision;
        let state = precision.weights.bytes() + precision.gradients.bytes();
        let layers = description.moe_layers.div_ceil(layout.stages()) as f64;
        let slots = description.experts.div_ceil(layout.group_gpus()) as f64;
        let apart = strategy == Strategy::LocalSteps;
        let parts = cluster.sites().iter().map(|site| site.parts).min().unwrap_or(1);
        let in_smallest_site = |replicas: &[usize]| (parts * replicas[1..].iter().product::<usize>()) as f64;
        let copies = match apart {
            true => in_smallest_site(&layout.copies()),
            false => layout.groups_per_stage() as f64,
        };
        let shared =
            if options.weight_compression.has_shared_expert() { model.expert_bytes() } else { Bytes::ZERO };
        let experts = layers * slots * model.expert_parameters() * (state + OPTIMIZER_BYTES / copies);
        let dense_state = match dense_codec(options, layout) {
            _ if apart => OPTIMIZER_BYTES / in_smallest_site(&layout.dense_copies()),
            None => OPTIMIZER_BYTES / (layout.stage_gpus() as f64 / layout.tensor_parallel as f64),
            Some(codec) => {
                let carry = if codec.is_lossless() { 0.0 } else { CARRY_BYTES };
                (OPTIMIZER_BYTES + carry) / in_smallest_site(&layout.dense_copies())
            }
        };
        let dense = dense_parameters(model, layout) * (state + dense_state);
        Self { experts: Bytes(experts) + shared * layers, dense: Bytes(dense), device: cluster.memory() }
    }

    /// Whether the layout fits, and the memory of a GPU before it gathers experts. `None` if the device is too small.
    pub(super) fn fit(&self, options: &Options) -> Option<(Fit, Memory)> {
        // A stated cap replaces what the device has left for gathered experts.
        let before = |left: Bytes| Memory {
            own_experts: self.experts,
            gathered_experts: Bytes::ZERO,
            cap: Some(options.memory_cap_gb.map_or(left, Bytes::from_gb)),
        };
        let available = self.device * (1.0 - options.reserved_memory);
        if self.experts.0 <= available.0 && self.dense.0 <= (self.device - available).0 {
            return Some((Fit::Fits, before(available - self.experts)));
        }
        let left = self.device - self.experts - self.dense;
        (left.0 >= 0.0).then(|| (Fit::Tight, before(left)))
    }
}

/// The codec of dense gradients between datacenters, if the options name one and the gradients cross between datacenters.
pub(super) fn dense_codec(options: &Options, layout: &Layout) -> Option<GradientCodec> {
    options.dense_gradient_compression.filter(|_| layout.dense_copies()[0] > 1)
}

/// `(⌈M/p⌉ a + o/p) / t`: dense parameters of one GPU.
pub(super) fn dense_parameters(model: &Model, layout: &Layout) -> f64 {
    let description = model.description();
    let layers = description.moe_layers.div_ceil(layout.stages()) as f64;
    let others = description.other_parameters / layout.stages() as f64;
    (layers * model.dense_parameters() + others) / layout.tensor_parallel as f64
}

/// Bytes of the weights, gradients and Adam state of the whole model, each held once.
pub(super) fn whole_model(model: &Model) -> Bytes {
    let precision = model.description().precision;
    let state = precision.weights.bytes() + precision.gradients.bytes() + OPTIMIZER_BYTES;
    Bytes(model.parameters() * state)
}
