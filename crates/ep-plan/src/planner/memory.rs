//! The memory of a GPU that experts take.

use serde::{Deserialize, Serialize};

use super::options::{Options, Setting};
use crate::cluster::Cluster;
use crate::error::{PlanError, Result};
use crate::model::Model;
use crate::units::Bytes;

/// Bytes per parameter of an Adam optimizer in addition to weights and gradients: an f32 master copy and two f32
/// moments.
const OPTIMIZER_BYTES: f64 = 12.0;

/// The memory of one GPU that experts take.
#[derive(Debug, Clone, Copy, PartialEq, Default, Serialize, Deserialize)]
pub struct Memory {
    /// Own experts of all layers of the GPU with gradients and optimizer state, and the codec's shared experts.
    pub own_experts: Bytes,
    /// Experts gathered from other GPUs, with their second buffer ([`gathered_bytes`]).
    pub gathered_experts: Bytes,
    /// Memory that gathered experts may take. `None`, under the paper's model, means no limit.
    pub cap: Option<Bytes>,
}

impl Memory {
    /// Whether the gathered experts fit.
    pub fn fits(&self) -> bool {
        self.cap.is_none_or(|cap| self.gathered_experts.0 <= cap.0)
    }
}

/// Memory of gathered experts: `2 (ΠS − 1) n P live`, that is two buffers for `gathered_experts = (ΠS − 1) n` experts
/// of each live layer. `weights` and `second` are the bytes per expert of the two buffers, both `P` in the formula.
///
/// The second buffer receives the next gather while the first is in use. When training, it also receives the gradients
/// of the gathered experts, which may be wider than the weights.
pub fn gathered_bytes(weights: Bytes, second: Bytes, gathered_experts: f64, live_layers: usize) -> Bytes {
    (weights + second) * (gathered_experts * live_layers as f64)
}

/// Memory of the gathered experts of a candidate that gathers `gathered` experts per layer.
pub(crate) fn gathered_by(model: &Model, options: &Options, gathered: f64, replicas_kept: bool) -> Bytes {
    let weights = model.expert_bytes();
    let second = if options.trains() { weights.max(model.gradient_bytes()) } else { weights };
    let layers = options.layers_per_gpu(model.description().moe_layers);
    let live = if replicas_kept { layers } else { layers.min(options.live_layers) };
    gathered_bytes(weights, second, gathered, live)
}

/// Memory of the GPU's own experts in `layers` layers: weights; when training, also gradients and optimizer state; with
/// a codec that has a shared expert, also one expert per layer.
fn own_bytes(model: &Model, options: &Options, experts_per_gpu: usize, layers: usize) -> Bytes {
    let precision = model.description().precision;
    let state = if options.trains() { precision.gradients.bytes() + OPTIMIZER_BYTES } else { 0.0 };
    let per_expert = model.expert_bytes() + Bytes(model.expert_parameters() * state);
    let shared =
        if options.weight_compression.has_shared_expert() { model.expert_bytes() } else { Bytes::ZERO };
    (per_expert * experts_per_gpu as f64 + shared) * layers as f64
}

/// The memory of a GPU before any expert is gathered.
///
/// # Errors
/// [`PlanError::OwnExperts`] when the GPU's own experts do not fit and the options set no cap.
pub(crate) fn before_gathering(
    cluster: &Cluster,
    model: &Model,
    options: &Options,
    experts_per_gpu: usize,
) -> Result<Memory> {
    let layers = model.description().moe_layers;
    let own_experts = own_bytes(model, options, experts_per_gpu, options.layers_per_gpu(layers));
    let memory = |cap| Memory { own_experts, gathered_experts: Bytes::ZERO, cap };
    if options.setting == Setting::Paper {
        return Ok(memory(None));
    }
    if let Some(cap) = options.memory_cap_gb {
        return Ok(memory(Some(Bytes::from_gb(cap))));
    }
    let available = cluster.memory() * (1.0 - options.reserved_memory);
    if own_experts.0 > available.0 {
        let fits = |&stages: &usize| {
            own_bytes(model, options, experts_per_gpu, layers.div_ceil(stages)).0 <= available.0
        };
        return Err(PlanError::OwnExperts {
            available,
            needed: own_experts,
            pipeline_stages: (options.stages()..=layers).find(fits),
        });
    }
    Ok(memory(Some(available - own_experts)))
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::planner::{Compression, Work};
    use crate::presets;

    #[test]
    fn gathered_experts_take_twice_their_bytes_per_live_layer() {
        assert_eq!(gathered_bytes(Bytes(10.0), Bytes(10.0), 6.0, 2), Bytes(240.0));
        let model = Model::try_from(presets::deepseek_v3()).unwrap();
        let p = 88_080_384.0;
        let options = Options::paper_codec();
        assert_eq!(gathered_by(&model, &options, 62.0, false), Bytes(2.0 * 62.0 * p * 2.0));
        assert_eq!(gathered_by(&model, &options, 2.0, true), Bytes(2.0 * 2.0 * p * 58.0));
    }

    #[test]
    fn the_cap_is_the_memory_left_by_the_own_experts() {
        let cluster = Cluster::try_from(presets::datacenters(2, 100.0, 0.005, presets::dgx_h200(8))).unwrap();
        let model = Model::try_from(presets::deepseek_v3()).unwrap();
        let memory = before_gathering(&cluster, &model, &Options::paper_codec(), 2).unwrap();
        let own = 58.0 * 44_040_192.0 * (2.0 * 16.0 + 2.0);
        assert_eq!(memory.own_experts, Bytes(own));
        assert!((memory.cap.unwrap().0 - (141e9 * 0.7 - own)).abs() < 1.0);
        let forward =
            Options { work: Work::Forward, weight_compression: Compression::EXACT, ..Options::paper_codec() };
        let memory = before_gathering(&cluster, &model, &forward, 2).unwrap();
        assert_eq!(memory.own_experts, Bytes(58.0 * 2.0 * 88_080_384.0));
    }

    #[test]
    fn the_error_of_a_too_small_gpu_names_the_pipeline_stages_that_fit() {
        let cluster = Cluster::try_from(presets::dgx_h100(8)).unwrap();
        let model = Model::try_from(presets::deepseek_v3()).unwrap();
        let error = before_gathering(&cluster, &model, &Options::paper_codec(), 4).unwrap_err();
        assert!(matches!(error, PlanError::OwnExperts { pipeline_stages: Some(4), .. }), "{error}");
        assert!(error.to_string().contains("at least 4 pipeline stages"), "{error}");
        let staged = Options { pipeline_stages: Some(4), ..Options::paper_codec() };
        assert!(before_gathering(&cluster, &model, &staged, 4).is_ok());
    }
}
