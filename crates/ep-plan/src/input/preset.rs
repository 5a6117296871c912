//! Presets by name, each with a sentence about the source of its numbers.
//!
//! The presets of the paper's clusters (arXiv 2510.19470) are partly assumed, because the paper does not describe them
//! completely. Their sentences say what is assumed.

use crate::cluster::{ClusterDescription, GpuDescription, LevelDescription, Sharing};
use crate::model::ModelDescription;
use crate::paper::{TABLE_IV, TableIvCase, TableIvReading};
use crate::presets;
use crate::stream_model::StreamInput;

/// The name and the description of a preset.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Preset {
    /// The name by which files and commands refer to the preset.
    pub name: &'static str,
    /// What the preset describes, and which of its numbers are assumed.
    pub about: &'static str,
}

const OF_THE_PAPER: &str = "32 experts; hidden size, layers and parameters of an expert from Table II; two matrices of width \
                            4 hidden are inferred; top-2, 8 x 256 tokens and f32 are assumed";

/// Preset models.
pub const MODELS: [Preset; 8] = [
    Preset { name: "deepseek-v3", about: "256 experts, top-8; sizes of the published configuration" },
    Preset { name: "qwen3-235b", about: "128 experts, top-8; sizes of the published configuration" },
    Preset { name: "mixtral-8x7b", about: "8 experts, top-2; sizes of the published configuration" },
    Preset { name: "mixtral-8x22b", about: "8 experts, top-2; sizes of the published configuration" },
    Preset { name: "paper-llama-tiny", about: OF_THE_PAPER },
    Preset { name: "paper-mistral-small", about: OF_THE_PAPER },
    Preset { name: "paper-gpt-medium", about: OF_THE_PAPER },
    Preset { name: "paper-gpt-large", about: OF_THE_PAPER },
];

/// Preset clusters. [`Joined`] applies to the first four.
pub const CLUSTERS: [Preset; 7] = [
    Preset { name: "dgx-h100", about: "nodes of 8 H100; 400 TFLOP/s and latencies are assumed" },
    Preset { name: "dgx-h200", about: "nodes of 8 H200; 400 TFLOP/s and latencies are assumed" },
    Preset {
        name: "gb200-nvl36",
        about: "NVLink domains of 36 GB200; 1000 TFLOP/s and latencies are assumed",
    },
    Preset {
        name: "gb200-nvl72",
        about: "NVLink domains of 72 GB200; 1000 TFLOP/s and latencies are assumed",
    },
    Preset {
        name: "paper-s",
        about: "the paper's cluster-S: 8 A800 in one node, 128 Gbit/s (PCIe 3 x16) inside; throughput and latencies are \
                assumed",
    },
    Preset {
        name: "paper-m",
        about: "the paper's cluster-M: 2 nodes like cluster-S, each treated as a datacenter, 10 Gbit/s between them; that the 8 \
                GPUs of a node share it is inferred from Tutel's slope in Table V; throughput and latencies are assumed",
    },
    Preset { name: "paper-l", about: "the paper's cluster-L: 4 nodes, otherwise like cluster-M" },
];

/// Preset inputs of the paper's stream model: the four columns of Table IV, at the printed bandwidth. The planner
/// cannot use them as models, because they have only the bytes and times of a layer.
pub const STREAMS: [Preset; 4] = [
    Preset {
        name: "paper-mix-1",
        about: "Table IV, Mix-1: D 8 MB, P_E 4.7 MB, L 0.049 ms, 8 GPUs at 128 Gbit/s",
    },
    Preset {
        name: "paper-mix-2",
        about: "Table IV, Mix-2: D 8 MB, P_E 2.35 MB, L 0.049 ms, 8 GPUs at 128 Gbit/s",
    },
    Preset {
        name: "paper-ag-only-1",
        about: "Table IV, AG-only-1: D 3 MB, P_E 0.094 MB, L 0.099 ms, 8 GPUs at 128 Gbit/s",
    },
    Preset {
        name: "paper-ag-only-2",
        about: "Table IV, AG-only-2: D 3 MB, P_E 0.047 MB, L 0.099 ms, 8 GPUs at 128 Gbit/s",
    },
];

/// The numbers of datacenters, nodes and GPUs of a preset cluster, and the links between its datacenters.
#[derive(Debug, Clone, Copy, PartialEq)]
pub struct Joined {
    /// Number of datacenters. With one datacenter the cluster has no level `wan`.
    pub datacenters: usize,
    /// NVLink domains per datacenter.
    pub nodes: usize,
    /// GPUs to use in each NVLink domain. Default: all.
    pub gpus_per_node: Option<usize>,
    /// Bandwidth of the uplink that the GPUs of a datacenter share, Gbit/s.
    pub uplink_gbit_per_s: f64,
    /// Round-trip time between datacenters, seconds.
    pub round_trip_s: f64,
}

impl Default for Joined {
    /// Two datacenters of eight nodes, with uplinks of 100 Gbit/s and a round trip of 5 ms.
    fn default() -> Self {
        Self { datacenters: 2, nodes: 8, gpus_per_node: None, uplink_gbit_per_s: 100.0, round_trip_s: 0.005 }
    }
}

/// Names of all preset models.
pub fn model_names() -> Vec<&'static str> {
    MODELS.iter().map(|preset| preset.name).collect()
}

/// Names of all preset clusters.
pub fn cluster_names() -> Vec<&'static str> {
    CLUSTERS.iter().map(|preset| preset.name).collect()
}

/// Whether [`Joined`] applies to the cluster of this name. The paper's clusters have fixed sizes.
pub fn is_joinable(name: &str) -> bool {
    presets::CLUSTERS.contains(&name)
}

/// The preset model of this name, if there is one.
pub fn model(name: &str) -> Option<ModelDescription> {
    presets::model(name)
}

/// The preset cluster of this name, unchecked, if there is one.
pub fn cluster(name: &str, joined: &Joined) -> Option<ClusterDescription> {
    match name {
        "paper-s" => Some(paper_cluster("paper's cluster-S", None)),
        "paper-m" => Some(paper_cluster("paper's cluster-M", Some(2))),
        "paper-l" => Some(paper_cluster("paper's cluster-L", Some(4))),
        _ => {
            let mut inside = presets::cluster(name, joined.nodes)?;
            if let (Some(gpus), Some(nvlink)) = (joined.gpus_per_node, inside.levels.last_mut()) {
                nvlink.scaling_factor = gpus.min(nvlink.scaling_factor);
                inside.name = format!("{} with {} GPUs of each", inside.name, nvlink.scaling_factor);
            }
            Some(match joined.datacenters {
                1 => inside,
                count => presets::datacenters(count, joined.uplink_gbit_per_s, joined.round_trip_s, inside),
            })
        }
    }
}

/// The preset input of the stream model of this name, if there is one.
pub fn stream(name: &str) -> Option<StreamInput> {
    let case = name.strip_prefix("paper-")?;
    let named = |known: &&TableIvCase| known.name.eq_ignore_ascii_case(case);
    Some(TABLE_IV.iter().find(named)?.input(TableIvReading::AsPrinted))
}

/// Datacenters of eight GPUs that share an uplink of 10 Gbit/s. Inside a datacenter, links have the 128 Gbit/s of
/// Table IV.
fn paper_cluster(name: &str, datacenters: Option<usize>) -> ClusterDescription {
    let uplink = datacenters.map(|count| LevelDescription {
        name: "wan".into(),
        scaling_factor: count,
        alpha_s: 0.0,
        round_trip_s: 0.0,
        bandwidth_gbit_per_s: 10.0,
        sharing: Sharing::PerMember,
        site_members: Vec::new(),
        site_bandwidth_gbit_per_s: Vec::new(),
        efficiency: 1.0,
        loss: 0.0,
        flows: 1,
    });
    let inside = LevelDescription {
        name: "inside".into(),
        scaling_factor: 8,
        alpha_s: 0.0,
        round_trip_s: 0.0,
        bandwidth_gbit_per_s: 128.0,
        sharing: Sharing::PerGpu,
        site_members: Vec::new(),
        site_bandwidth_gbit_per_s: Vec::new(),
        efficiency: 1.0,
        loss: 0.0,
        flows: 1,
    };
    ClusterDescription {
        name: name.into(),
        levels: uplink.into_iter().chain([inside]).collect(),
        // A800: memory of the datasheet, rounded; the throughput is assumed.
        gpu: GpuDescription {
            name: "A800".into(),
            sustained_tflops: 100.0,
            memory_gb: 80.0,
            hbm_gb_per_s: 2000.0,
        },
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::cluster::Cluster;
    use crate::model::Model;
    use crate::stream_model::StreamModel;

    #[test]
    fn every_named_preset_is_valid() {
        for name in model_names() {
            Model::try_from(model(name).unwrap()).unwrap();
        }
        for name in cluster_names() {
            for datacenters in [1, 3] {
                let joined = Joined { datacenters, gpus_per_node: Some(4), ..Joined::default() };
                let cluster = Cluster::try_from(cluster(name, &joined).unwrap()).unwrap();
                if is_joinable(name) {
                    assert_eq!(cluster.gpus(), datacenters * 8 * 4, "{name}");
                }
            }
        }
        for preset in STREAMS {
            StreamModel::new(stream(preset.name).unwrap()).unwrap();
        }
        assert!(cluster("abacus", &Joined::default()).is_none());
        assert!(stream("paper-mix-3").is_none() && stream("mix-1").is_none());
    }
}
