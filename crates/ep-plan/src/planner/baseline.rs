//! What one would do without expert domains, priced by the same model.

use serde::{Deserialize, Serialize};

use super::cost::{Candidate, CostModel, Shape};
use super::options::Options;
use super::volume::TokenPath;
use super::{Planner, Setting};

/// A way to run a mixture-of-experts layer over datacenters.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "kebab-case")]
pub enum BaselineKind {
    /// Expert parallelism over all GPUs, one copy per (token, expert), straight to the expert.
    PlainEp,
    /// Expert parallelism over all GPUs, one copy per (token, datacenter), then per (token, node), then per GPU.
    HierarchicalEp,
    /// Expert parallelism inside a datacenter, data parallelism across: every datacenter has all experts, their
    /// optimizer sharded over the datacenters. Weights and gradients cross once per step, uncompressed, where the
    /// replicas of all layers fit; otherwise in every pass.
    EpInsideDatacenter,
}

/// A baseline's price, and how much faster the plan is.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
pub struct Baseline {
    /// Which one.
    pub kind: BaselineKind,
    /// Its price.
    pub candidate: Candidate,
    /// Whether memory can hold it.
    pub fits: bool,
    /// Its layer time over that of the plan.
    pub speedup: f64,
}

impl Planner {
    pub(super) fn baselines(&self, best: &Candidate) -> Vec<Baseline> {
        let all_ones = &self.shapes[0];
        // Under the paper's model neither path is deduplicated: that is what the model is.
        let shared_path = match self.options.setting {
            Setting::Full => TokenPath::Deduplicated,
            Setting::Paper => TokenPath::Forwarded,
        };
        let on_path = |path| CostModel { path, ..self.cost() }.price(all_ones, false);
        let baselines = [
            (BaselineKind::PlainEp, on_path(TokenPath::Direct)),
            (BaselineKind::HierarchicalEp, on_path(shared_path)),
            (BaselineKind::EpInsideDatacenter, self.ep_inside_datacenter()),
        ];
        let compare = |(kind, candidate): (BaselineKind, Candidate)| Baseline {
            kind,
            fits: candidate.memory.fits(),
            speedup: candidate.layer_time / best.layer_time,
            candidate,
        };
        baselines.into_iter().map(compare).collect()
    }

    /// Domains of all datacenters and nothing inside them, without any compression.
    fn ep_inside_datacenter(&self) -> Candidate {
        let options = Options { weight_compression: 1.0, gradient_compression: 1.0, ..self.options.clone() };
        let cost = CostModel { options: &options, ..self.cost() };
        let wanted = |shape: &&Shape| {
            let sizes = &shape.domain_sizes;
            sizes[0] == self.cluster.levels()[0].scaling_factor && sizes[1..].iter().all(|&size| size == 1)
        };
        let shape = self.shapes.iter().find(wanted).unwrap_or(&self.shapes[0]);
        let kept = cost.price(shape, true);
        if kept.memory.fits() { kept } else { cost.price(shape, false) }
    }
}
