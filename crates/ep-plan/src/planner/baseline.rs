//! Common schemes without expert domains, priced by the same model as the plan.

use serde::{Deserialize, Serialize};

use super::compression::Compression;
use super::cost::{Candidate, CostModel, UnpricedCandidate};
use super::options::Options;
use super::volume::TokenPath;
use super::{Planner, Setting};

/// A common way to run a mixture-of-experts layer over datacenters.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "kebab-case")]
pub enum BaselineKind {
    /// Expert parallelism over all GPUs, with one copy per (token, expert), sent directly to the expert's GPU.
    PlainEp,
    /// Expert parallelism over all GPUs, with one row per (token, datacenter), then per (token, node), then per (token,
    /// GPU).
    HierarchicalEp,
    /// Expert parallelism inside a datacenter, data parallelism across datacenters. Every datacenter has all experts;
    /// their optimizer state is sharded over the datacenters. Weights and gradients cross uncompressed: once per step
    /// if the replicas of all layers fit into memory, otherwise in every pass.
    EpInsideDatacenter,
}

/// The price of a baseline, and the plan's speedup over it.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
pub struct Baseline {
    /// The scheme.
    pub kind: BaselineKind,
    /// Domain sizes and cost of the scheme.
    pub candidate: Candidate,
    /// Whether the scheme fits into memory.
    pub fits: bool,
    /// Layer time of the scheme over layer time of the plan.
    pub speedup: f64,
}

impl Planner {
    pub(super) fn baselines(&self, best: &Candidate) -> Vec<Baseline> {
        let all_ones = &self.unpriced[0];
        // The paper's model has no deduplicated path.
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

    /// Domains that span all datacenters and one GPU of each, without compression.
    fn ep_inside_datacenter(&self) -> Candidate {
        let options = Options {
            weight_compression: Compression::EXACT,
            gradient_compression: Compression::EXACT,
            ..self.options.clone()
        };
        let cost = CostModel { options: &options, ..self.cost() };
        let wanted = |unpriced: &&UnpricedCandidate| {
            let sizes = &unpriced.domain_sizes;
            sizes[0] == self.cluster.levels()[0].scaling_factor && sizes[1..].iter().all(|&size| size == 1)
        };
        let unpriced = self.unpriced.iter().find(wanted).unwrap_or(&self.unpriced[0]);
        let kept = cost.price(unpriced, true);
        if kept.memory.fits() { kept } else { cost.price(unpriced, false) }
    }
}
