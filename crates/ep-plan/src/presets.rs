//! Preset models and clusters. Each function returns a description whose fields may be changed before it is checked.
//!
//! Sizes of models come from their published configuration files. Sizes and link rates of clusters come from the
//! vendors' datasheets. Datasheets do not state sustained throughput and latencies: these are assumptions, and the
//! sources mark them as assumed.

use crate::cluster::{ClusterDescription, GpuDescription, LevelDescription, Sharing};
use crate::model::{AttentionDescription, ElementType, ModelDescription, PrecisionDescription};
use crate::routing::Routing;

/// Names that [`model`] knows.
pub const MODELS: [&str; 8] = [
    "deepseek-v3",
    "qwen3-235b",
    "mixtral-8x7b",
    "mixtral-8x22b",
    "paper-llama-tiny",
    "paper-mistral-small",
    "paper-gpt-medium",
    "paper-gpt-large",
];

/// Names that [`cluster`] knows.
pub const CLUSTERS: [&str; 4] = ["dgx-h100", "dgx-h200", "gb200-nvl36", "gb200-nvl72"];

/// The model of this name. `None` for a name not in [`MODELS`]. Models have 4096 tokens per GPU in sequences of 4096
/// tokens, those of the paper 2048 tokens in sequences of 256.
pub fn model(name: &str) -> Option<ModelDescription> {
    match name {
        "deepseek-v3" => Some(deepseek_v3()),
        "qwen3-235b" => Some(qwen3_235b()),
        "mixtral-8x7b" => Some(mixtral_8x7b()),
        "mixtral-8x22b" => Some(mixtral_8x22b()),
        "paper-llama-tiny" => Some(of_the_paper("Llama-Tiny", 512, 12)),
        "paper-mistral-small" => Some(of_the_paper("Mistral-Small", 768, 12)),
        "paper-gpt-medium" => Some(of_the_paper("GPT-Medium", 1024, 12)),
        "paper-gpt-large" => Some(of_the_paper("GPT-Large", 1024, 16)),
        _ => None,
    }
}

/// One datacenter of this kind of cluster, with this many NVLink domains. `None` for a name not in [`CLUSTERS`].
pub fn cluster(name: &str, nvlink_domains: usize) -> Option<ClusterDescription> {
    match name {
        "dgx-h100" => Some(dgx_h100(nvlink_domains)),
        "dgx-h200" => Some(dgx_h200(nvlink_domains)),
        "gb200-nvl36" => Some(gb200_nvl36(nvlink_domains)),
        "gb200-nvl72" => Some(gb200_nvl72(nvlink_domains)),
        _ => None,
    }
}

/// DeepSeek-V3. Source: `config.json` of `deepseek-ai/DeepSeek-V3`. The first 3 of its 61 layers are dense and not
/// counted in `moe_layers`.
pub fn deepseek_v3() -> ModelDescription {
    let (hidden, heads) = (7168.0, 128.0);
    // Multi-head latent attention: query rank 1536, key-value rank 512, head widths 128 (plain), 64 (rotary), 128
    // (value).
    let queries = hidden * 1536.0 + 1536.0 * heads * (128.0 + 64.0);
    let keys_values = hidden * (512.0 + 64.0) + 512.0 * heads * (128.0 + 128.0);
    let output = heads * 128.0 * hidden;
    ModelDescription {
        shared_experts: 1,
        // Technical report (arXiv 2412.19437), section 4.2: batches of up to 15360 sequences of 4096 tokens.
        global_batch: Some(15_360 * 4096),
        // Input and output embeddings of 129280 tokens, and three dense layers of inner width 18432.
        other_parameters: 2.0 * 129_280.0 * hidden
            + 3.0 * (queries + keys_values + output + 3.0 * hidden * 18_432.0),
        attention: AttentionDescription {
            parameters: queries + keys_values + output,
            score_width: heads * (128.0 + 64.0 + 128.0),
        },
        ..routed("DeepSeek-V3", [7168, 2048, 256, 8, 58])
    }
}

/// Qwen3-235B-A22B. Source: `config.json` of `Qwen/Qwen3-235B-A22B`. Every layer has experts; none is shared.
pub fn qwen3_235b() -> ModelDescription {
    let attention = grouped_query_attention(4096.0, 64.0, 4.0, 128.0);
    let other_parameters = 2.0 * 151_936.0 * 4096.0; // input and output embeddings
    ModelDescription { attention, other_parameters, ..routed("Qwen3-235B-A22B", [4096, 1536, 128, 8, 94]) }
}

/// Mixtral 8x7B. Source: `config.json` of `mistralai/Mixtral-8x7B-v0.1`.
pub fn mixtral_8x7b() -> ModelDescription {
    let attention = grouped_query_attention(4096.0, 32.0, 8.0, 128.0);
    let other_parameters = 2.0 * 32_000.0 * 4096.0; // input and output embeddings
    ModelDescription { attention, other_parameters, ..routed("Mixtral 8x7B", [4096, 14336, 8, 2, 32]) }
}

/// Mixtral 8x22B. Source: `config.json` of `mistralai/Mixtral-8x22B-v0.1`.
pub fn mixtral_8x22b() -> ModelDescription {
    let attention = grouped_query_attention(6144.0, 48.0, 8.0, 128.0);
    let other_parameters = 2.0 * 32_000.0 * 6144.0; // input and output embeddings
    ModelDescription { attention, other_parameters, ..routed("Mixtral 8x22B", [6144, 16384, 8, 2, 56]) }
}

/// A model of the paper (arXiv 2510.19470, Table II): hidden size, 32 experts, layers, and parameters of an expert.
///
/// The table has `hidden`, `experts`, `moe_layers`, and 2.1, 4.7 or 8.4 million parameters of an expert, from which two
/// matrices of an inner width of 4 `hidden` are inferred. Top-2 and 8 sequences of 256 tokens are chosen from the ranges of
/// Table III. Attention of four square projections, f32, and no parameters outside the layers are assumed.
fn of_the_paper(name: &str, hidden: usize, layers: usize) -> ModelDescription {
    let width = hidden as f64;
    let f32 = ElementType::F32;
    ModelDescription {
        expert_matrices: 2,
        global_batch: None, // one micro-batch on every GPU
        tokens_per_gpu: 8 * 256,
        context: 256,
        attention: AttentionDescription { parameters: 4.0 * width * width, score_width: 2.0 * width },
        precision: PrecisionDescription { weights: f32, dispatch: f32, combine: f32, gradients: f32 },
        ..routed(&format!("{name} of the paper"), [hidden, 4 * hidden, 32, 2, layers])
    }
}

/// One datacenter of DGX H100 nodes with eight H100 SXM each.
///
/// NVLink: 900 GB/s for both directions together, so 450 GB/s in each. Network: one 400 Gbit/s card per GPU (NVIDIA DGX
/// H100 datasheet: 4 OSFP ports of 2 x 400 Gbit/s for compute). Memory: 80 GB at 3.35 TB/s (H100 SXM datasheet).
pub fn dgx_h100(nodes: usize) -> ClusterDescription {
    let gpu = GpuDescription {
        name: "H100 SXM".into(),
        sustained_tflops: 400.0, // assumed: 40% of the 989 TFLOP/s dense bf16 of the datasheet
        memory_gb: 80.0,
        hbm_gb_per_s: 3350.0,
    };
    one_datacenter("DGX H100", nodes, 8, 450.0, gpu)
}

/// One datacenter of DGX H200 nodes with eight H200 SXM each: like [`dgx_h100`], with 141 GB of memory at 4.8 TB/s
/// (H200 datasheet).
pub fn dgx_h200(nodes: usize) -> ClusterDescription {
    let gpu = GpuDescription {
        name: "H200 SXM".into(),
        sustained_tflops: 400.0, // assumed: 40% of the 989 TFLOP/s dense bf16 of the datasheet
        memory_gb: 141.0,
        hbm_gb_per_s: 4800.0,
    };
    one_datacenter("DGX H200", nodes, 8, 450.0, gpu)
}

/// One datacenter of GB200 NVL72 racks. The 72 GPUs of a rack form one NVLink domain.
///
/// NVLink: 1.8 TB/s per GPU for both directions together, so 900 GB/s in each. Network: one 400 Gbit/s card per GPU
/// (DGX GB200 datasheet: 72 single-port OSFP). Memory: 186 GB at 8 TB/s per GPU (13.4 TB and 576 TB/s per rack, NVIDIA
/// GB200 NVL72 page).
pub fn gb200_nvl72(racks: usize) -> ClusterDescription {
    one_datacenter("GB200 NVL72", racks, 72, 900.0, gb200())
}

/// Like [`gb200_nvl72`], with NVLink domains of 36 GPUs.
pub fn gb200_nvl36(racks: usize) -> ClusterDescription {
    one_datacenter("GB200 NVL36", racks, 36, 900.0, gb200())
}

/// Equal datacenters, each connected by one uplink that all of its GPUs share.
///
/// `count` is the number of datacenters, `uplink_gbit_per_s` the bandwidth of an uplink in each direction, and
/// `round_trip_s` the round-trip time between datacenters in seconds. `inside` describes one datacenter. The time to
/// start a message is assumed to be 20 us.
pub fn datacenters(
    count: usize,
    uplink_gbit_per_s: f64,
    round_trip_s: f64,
    inside: ClusterDescription,
) -> ClusterDescription {
    let wan = LevelDescription {
        name: "wan".into(),
        scaling_factor: count,
        alpha_s: 20e-6, // assumed
        round_trip_s,
        bandwidth_gbit_per_s: uplink_gbit_per_s,
        sharing: Sharing::PerMember,
        site_members: Vec::new(),
        site_bandwidth_gbit_per_s: Vec::new(),
        efficiency: 1.0,
        loss: 0.0,
        flows: 1,
    };
    ClusterDescription {
        name: format!("{count} x ({})", inside.name),
        levels: std::iter::once(wan).chain(inside.levels).collect(),
        gpu: inside.gpu,
    }
}

fn gb200() -> GpuDescription {
    GpuDescription {
        name: "GB200 (one GPU)".into(),
        sustained_tflops: 1000.0, // assumed: 40% of 2.5 PFLOP/s dense bf16 (360 PFLOP/s sparse per rack of 72)
        memory_gb: 186.0,
        hbm_gb_per_s: 8000.0,
    }
}

/// NVLink domains connected by one 400 Gbit/s rail per GPU.
fn one_datacenter(
    name: &str,
    nvlink_domains: usize,
    gpus: usize,
    nvlink_gb_per_s: f64,
    gpu: GpuDescription,
) -> ClusterDescription {
    let rail = LevelDescription {
        name: "rail".into(),
        scaling_factor: nvlink_domains,
        alpha_s: 5e-6,       // assumed
        round_trip_s: 10e-6, // assumed
        bandwidth_gbit_per_s: 400.0,
        sharing: Sharing::PerGpu,
        site_members: Vec::new(),
        site_bandwidth_gbit_per_s: Vec::new(),
        efficiency: 1.0,
        loss: 0.0,
        flows: 1,
    };
    let nvlink = LevelDescription {
        name: "nvlink".into(),
        scaling_factor: gpus,
        alpha_s: 1e-6,      // assumed
        round_trip_s: 2e-6, // assumed
        bandwidth_gbit_per_s: 8.0 * nvlink_gb_per_s,
        sharing: Sharing::PerGpu,
        site_members: Vec::new(),
        site_bandwidth_gbit_per_s: Vec::new(),
        efficiency: 1.0,
        loss: 0.0,
        flows: 1,
    };
    ClusterDescription { name: format!("{nvlink_domains} x {name}"), levels: vec![rail, nvlink], gpu }
}

/// A model of `[hidden, expert_intermediate, experts, topk, moe_layers]` with defaults for everything else.
fn routed(
    name: &str,
    [hidden, expert_intermediate, experts, topk, moe_layers]: [usize; 5],
) -> ModelDescription {
    ModelDescription {
        name: name.into(),
        hidden,
        expert_intermediate,
        expert_matrices: 3,
        experts,
        topk,
        shared_experts: 0,
        moe_layers,
        tokens_per_gpu: 4096,
        context: 4096,
        // Not published for most models. Assumed: 1024 sequences, a common size of pre-training runs.
        global_batch: Some(1024 * 4096),
        other_parameters: 0.0,
        attention: AttentionDescription::default(),
        precision: PrecisionDescription::default(),
        routing: Routing::Even,
    }
}

/// Grouped-query attention: the parameters of the four projections, and the score width of all heads.
fn grouped_query_attention(
    hidden: f64,
    heads: f64,
    key_value_heads: f64,
    width: f64,
) -> AttentionDescription {
    AttentionDescription {
        parameters: 2.0 * hidden * width * (heads + key_value_heads),
        score_width: heads * 2.0 * width,
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::cluster::Cluster;
    use crate::model::Model;

    #[test]
    fn every_preset_is_valid_and_found_by_name() {
        for name in MODELS {
            Model::try_from(model(name).unwrap()).unwrap();
        }
        for name in CLUSTERS {
            let inside = cluster(name, 4).unwrap();
            Cluster::try_from(inside.clone()).unwrap();
            let joined = Cluster::try_from(datacenters(3, 100.0, 0.01, inside)).unwrap();
            assert_eq!(joined.levels().len(), 3);
        }
        assert!(model("gpt-2").is_none() && cluster("abacus", 1).is_none());
    }

    /// The tolerance covers the parameters of norms and the rounding of the published numbers.
    #[test]
    fn models_have_the_published_numbers_of_parameters() {
        let billions =
            |description: ModelDescription| Model::try_from(description).unwrap().parameters() / 1e9;
        assert!((billions(deepseek_v3()) / 671.0 - 1.0).abs() < 0.005);
        assert!((billions(qwen3_235b()) / 235.0 - 1.0).abs() < 0.005);
        assert!((billions(mixtral_8x7b()) / 46.7 - 1.0).abs() < 0.005);
        assert!((billions(mixtral_8x22b()) / 141.0 - 1.0).abs() < 0.005);
    }

    /// The parameters of an expert, as Table II of the paper prints them.
    #[test]
    fn experts_of_the_paper_have_the_printed_sizes() {
        let millions = |name| {
            let model = Model::try_from(model(name).unwrap()).unwrap();
            format!("{:.1}", model.expert_parameters() / 1e6)
        };
        let names = ["paper-llama-tiny", "paper-mistral-small", "paper-gpt-medium", "paper-gpt-large"];
        assert_eq!(names.map(millions), ["2.1", "4.7", "8.4", "8.4"]);
    }
}
