//! The schema of input files: clusters, models and options.

use ep_codec::CodecParseError;
use toml::de::DeValue;

use super::Result;
use super::error::{InputError, Problem};
use super::preset;
use super::quantity::Kind;
use super::reader::{Item, Keys, Table};
use crate::cluster::{Cluster, ClusterDescription, GpuDescription, LevelDescription, Sharing};
use crate::error::PlanError;
use crate::limits::{self, Count};
use crate::model::{AttentionDescription, ElementType, Model, ModelDescription, PrecisionDescription};
use crate::planner::{Batch, Compression, GradientCodec, Options, Replicas, Setting, Work};
use crate::routing::{Placement, Routing};

pub(super) const DOCUMENT: Keys = Keys { plain: &["cluster", "model", "options"], quantities: &[] };

const CLUSTER: Keys = Keys { plain: &["name", "level", "gpu"], quantities: &[] };

const LEVEL: Keys = Keys {
    plain: &["name", "members", "sharing", "efficiency", "loss", "flows"],
    quantities: &[("alpha", Kind::Time), ("round_trip", Kind::Time), ("bandwidth", Kind::LinkRate)],
};

const GPU: Keys = Keys {
    plain: &["name"],
    quantities: &[
        ("throughput", Kind::Arithmetic),
        ("memory", Kind::Memory),
        ("memory_bandwidth", Kind::MemoryRate),
    ],
};

const MODEL: Keys = Keys {
    plain: &[
        "preset",
        "name",
        "hidden",
        "expert_intermediate",
        "expert_matrices",
        "experts",
        "topk",
        "shared_experts",
        "moe_layers",
        "tokens_per_gpu",
        "context",
        "global_batch",
        "other_parameters",
        "attention",
        "precision",
        "routing",
    ],
    quantities: &[],
};

const ATTENTION: Keys = Keys { plain: &["parameters", "score_width"], quantities: &[] };
const PRECISION: Keys = Keys { plain: &["weights", "dispatch", "combine", "gradients"], quantities: &[] };
const ROUTING: Keys = Keys { plain: &["zipf", "shuffle_seed", "histogram"], quantities: &[] };

const OPTIONS: Keys = Keys {
    plain: &[
        "setting",
        "work",
        "weight_compression",
        "gradient_compression",
        "dense_gradient_compression",
        "reserved_memory",
        "live_layers",
        "replicas",
        "gradient_accumulation",
        "pipeline_stages",
        "expert_parallel",
        "tensor_parallel",
        "local_steps",
        "shared_refresh_steps",
        "overlap_chunks",
        "placement",
    ],
    quantities: &[("memory_cap", Kind::Memory)],
};

/// Seeds: the non-negative integers of TOML.
const SEED: Count = Count::new(0, i64::MAX as usize);

pub(super) fn cluster(item: &Item<'_, '_>) -> Result<ClusterDescription> {
    let table = item.table(CLUSTER)?;
    let name = table.text("name", Some("unnamed"))?;
    let Some(levels) = table.get("level") else { return table.missing("level", "[[cluster.level]] tables") };
    let levels = levels.list("[[cluster.level]] tables, outermost level first")?;
    let mut described: Vec<LevelDescription> = Vec::with_capacity(levels.len());
    for item in &levels {
        let read = level(item, described.len(), described.first().map(|first| first.scaling_factor))?;
        if described.iter().any(|other| other.name == read.name) {
            let problem = Problem::new(
                format!("another level is already named '{}'", read.name),
                "a name that no other level has",
            );
            return item.table(LEVEL)?.fail_at("name", problem);
        }
        described.push(read);
    }
    let Some(gpu) = table.get("gpu") else { return table.missing("gpu", "a [cluster.gpu] table") };
    let description = ClusterDescription { name, levels: described, gpu: self::gpu(&gpu.table(GPU)?)? };
    match Cluster::try_from(description.clone()) {
        Ok(_) => Ok(description),
        Err(error) => table.fail_at("level", Problem::new(error.to_string(), "")),
    }
}

/// `sites` is the number of members of the outermost level, and `None` if the level is the outermost one.
fn level(item: &Item<'_, '_>, index: usize, sites: Option<usize>) -> Result<LevelDescription> {
    let table = item.table(LEVEL)?;
    let members = match index {
        1 => table.counts("members", sites, limits::MEMBERS)?,
        _ => {
            if let Some(item) = table.get("members").filter(|item| item.value.is_array()) {
                let what = "is a list, which only the second level may have";
                return item.fail(Problem::new(what.to_owned(), limits::MEMBERS.to_string()));
            }
            vec![table.count("members", None, limits::MEMBERS)?]
        }
    };
    let sites = sites.or_else(|| members.first().copied());
    let bandwidths = table.quantities("bandwidth", sites, limits::LINK_GBIT_PER_S)?;
    let mut level = LevelDescription {
        name: table.text("name", None)?,
        scaling_factor: 1,
        site_members: Vec::new(),
        alpha_s: table.quantity("alpha", Some(0.0), limits::SECONDS)?,
        round_trip_s: table.quantity("round_trip", Some(0.0), limits::SECONDS)?,
        bandwidth_gbit_per_s: 1.0,
        site_bandwidth_gbit_per_s: Vec::new(),
        sharing: table.get("sharing").map_or(Ok(Sharing::PerGpu), sharing)?,
        efficiency: table.number("efficiency", 1.0, limits::EFFICIENCY)?,
        loss: table.number("loss", 0.0, limits::LOSS)?,
        flows: table.count("flows", Some(1), limits::FLOWS)?,
    };
    level.set_members(&members);
    level.set_bandwidths(&bandwidths);
    Ok(level)
}

fn sharing(item: &Item<'_, '_>) -> Result<Sharing> {
    const NEEDED: &str = "\"per-gpu\", \"per-member\", or the number of GPUs that share a link";
    if let DeValue::Integer(_) = item.value {
        return item.count(limits::GPUS).map(Sharing::Gpus);
    }
    match item.value.as_str() {
        Some("per-gpu") => Ok(Sharing::PerGpu),
        Some("per-member") => Ok(Sharing::PerMember),
        _ => item.fail(Problem::new("is not a way to share a link", NEEDED)),
    }
}

fn gpu(table: &Table<'_, '_>) -> Result<GpuDescription> {
    Ok(GpuDescription {
        name: table.text("name", Some("unnamed"))?,
        sustained_tflops: table.quantity("throughput", None, limits::TFLOPS)?,
        memory_gb: table.quantity("memory", None, limits::MEMORY_GB)?,
        hbm_gb_per_s: table.quantity("memory_bandwidth", None, limits::MEMORY_GB_PER_S)?,
    })
}

pub(super) fn model(item: &Item<'_, '_>) -> Result<ModelDescription> {
    let table = item.table(MODEL)?;
    let base = table.get("preset").map(preset_model).transpose()?;
    let base = base.as_ref();
    let count =
        |key, range, default: fn(&ModelDescription) -> usize| table.count(key, base.map(default), range);
    let description = ModelDescription {
        name: table.text("name", Some(base.map_or("unnamed", |model| &model.name)))?,
        hidden: count("hidden", limits::WIDTH, |model| model.hidden)?,
        expert_intermediate: count("expert_intermediate", limits::WIDTH, |model| model.expert_intermediate)?,
        expert_matrices: {
            let default = base.map_or(3, |base| base.expert_matrices);
            table.count("expert_matrices", Some(default), limits::MATRICES)?
        },
        experts: count("experts", limits::EXPERTS, |model| model.experts)?,
        topk: count("topk", limits::TOPK, |model| model.topk)?,
        shared_experts: {
            let default = base.map_or(0, |base| base.shared_experts);
            table.count("shared_experts", Some(default), limits::SHARED_EXPERTS)?
        },
        moe_layers: count("moe_layers", limits::LAYERS, |model| model.moe_layers)?,
        tokens_per_gpu: count("tokens_per_gpu", limits::TOKENS, |model| model.tokens_per_gpu)?,
        context: count("context", limits::TOKENS, |model| model.context)?,
        global_batch: {
            let given = table.optional_count("global_batch", limits::GLOBAL_BATCH)?;
            given.or(base.and_then(|base| base.global_batch))
        },
        other_parameters: {
            let default = base.map_or(0.0, |base| base.other_parameters);
            table.number("other_parameters", default, limits::OTHER_PARAMETERS)?
        },
        attention: attention(&table, base.map(|model| model.attention).unwrap_or_default())?,
        precision: precision(&table, base.map(|model| model.precision).unwrap_or_default())?,
        routing: match (table.get("routing"), base) {
            (Some(item), _) => routing(item)?,
            (None, base) => base.map(|model| model.routing.clone()).unwrap_or_default(),
        },
    };
    match Model::try_from(description.clone()) {
        Ok(_) => Ok(description),
        Err(error) => {
            let key = match error {
                PlanError::Topk { .. } => "topk",
                PlanError::Histogram(_) => "routing",
                _ => "name",
            };
            table.fail_at(key, Problem::new(error.to_string(), ""))
        }
    }
}

fn preset_model(item: &Item<'_, '_>) -> Result<ModelDescription> {
    let needed = preset::model_names().join(", ");
    let name = item.text(&needed)?;
    preset::model(name)
        .map_or_else(|| item.fail(Problem::new(format!("\"{name}\" is not a preset"), needed)), Ok)
}

fn attention(table: &Table<'_, '_>, default: AttentionDescription) -> Result<AttentionDescription> {
    let Some(item) = table.get("attention") else { return Ok(default) };
    let table = item.table(ATTENTION)?;
    Ok(AttentionDescription {
        parameters: table.number("parameters", default.parameters, limits::ATTENTION_PARAMETERS)?,
        score_width: table.number("score_width", default.score_width, limits::SCORE_WIDTH)?,
    })
}

fn precision(table: &Table<'_, '_>, default: PrecisionDescription) -> Result<PrecisionDescription> {
    let Some(item) = table.get("precision") else { return Ok(default) };
    let table = item.table(PRECISION)?;
    let element = |key, default| {
        let types = [("f32", ElementType::F32), ("bf16", ElementType::Bf16), ("fp8", ElementType::Fp8)];
        table.word(key, default, &types)
    };
    Ok(PrecisionDescription {
        weights: element("weights", default.weights)?,
        dispatch: element("dispatch", default.dispatch)?,
        combine: element("combine", default.combine)?,
        gradients: element("gradients", default.gradients)?,
    })
}

fn routing(item: &Item<'_, '_>) -> Result<Routing> {
    const NEEDED: &str = "\"even\", { zipf = 1.0 } or { histogram = [a count per expert] }";
    match item.value.as_str() {
        Some("even") => return Ok(Routing::Even),
        Some(other) => return item.fail(Problem::new(format!("\"{other}\" is unknown"), NEEDED)),
        None if !item.value.is_table() => {
            return item.fail(Problem::new("is neither a string nor a table", NEEDED));
        }
        None => {}
    }
    let table = item.table(ROUTING)?;
    match (table.get("zipf"), table.get("histogram")) {
        (Some(_), None) => Ok(Routing::Zipf {
            exponent: table.number("zipf", 0.0, limits::ZIPF)?,
            shuffle_seed: table.count("shuffle_seed", Some(0), SEED)? as u64,
        }),
        (None, Some(counts)) => {
            let counts = counts.list("an array of counts, one per expert")?;
            Ok(Routing::Histogram(
                counts.iter().map(|count| count.number_in(limits::SELECTIONS)).collect::<Result<_>>()?,
            ))
        }
        _ => item.fail(Problem::new("needs exactly one of `zipf` and `histogram`", NEEDED)),
    }
}

pub(super) fn options(item: &Item<'_, '_>) -> Result<Options> {
    let table = item.table(OPTIONS)?;
    let default = Options::default();
    let count = |key, range, default| table.count(key, Some(default), range);
    Ok(Options {
        setting: table.word(
            "setting",
            default.setting,
            &[("full", Setting::Full), ("paper", Setting::Paper)],
        )?,
        work: table.word(
            "work",
            default.work,
            &[("training", Work::Training), ("forward", Work::Forward)],
        )?,
        weight_compression: compression(&table, "weight_compression", default.weight_compression)?,
        gradient_compression: compression(&table, "gradient_compression", default.gradient_compression)?,
        dense_gradient_compression: table.get("dense_gradient_compression").map(codec).transpose()?,
        memory_cap_gb: table.optional_quantity("memory_cap", limits::MEMORY_CAP_GB)?,
        reserved_memory: table.number("reserved_memory", default.reserved_memory, limits::RESERVED_MEMORY)?,
        live_layers: count("live_layers", limits::LAYERS, default.live_layers)?,
        replicas: table.word(
            "replicas",
            default.replicas,
            &[("regather", Replicas::Regather), ("keep", Replicas::Keep), ("best", Replicas::Best)],
        )?,
        batch: if table.get("gradient_accumulation").is_some() { Batch::MicroBatches } else { Batch::Model },
        micro_batches: count("gradient_accumulation", limits::MICRO_BATCHES, default.micro_batches)?,
        pipeline_stages: table.optional_count("pipeline_stages", limits::LAYERS)?,
        expert_parallel: table.optional_count("expert_parallel", limits::GPUS)?,
        tensor_parallel: table.optional_count("tensor_parallel", limits::GPUS)?,
        local_steps: count("local_steps", limits::LOCAL_STEPS, default.local_steps)?,
        shared_refresh_steps: count(
            "shared_refresh_steps",
            limits::REFRESH_STEPS,
            default.shared_refresh_steps,
        )?,
        overlap_chunks: count("overlap_chunks", limits::CHUNKS, default.overlap_chunks)?,
        placement: table.word(
            "placement",
            default.placement,
            &[("in-order", Placement::InOrder), ("lpt", Placement::Lpt)],
        )?,
    })
}

/// `"exact"`, `"int8"`, or a ratio.
fn compression(table: &Table<'_, '_>, key: &str, default: Compression) -> Result<Compression> {
    match table.get(key) {
        None => Ok(default),
        Some(item) if item.value.is_str() => {
            item.word(&[("exact", Compression::EXACT), ("int8", Compression::Int8)])
        }
        Some(item) => item.number_in(limits::COMPRESSION).map(Compression::By),
    }
}

/// The codec of dense gradients, as the training runtime writes it.
fn codec(item: &Item<'_, '_>) -> Result<GradientCodec> {
    const NEEDED: &str = "\"exact\", \"int8\" or \"topk:DENSITY\"";
    let refuse = |error: CodecParseError| item.fail(Problem::new(error.to_string(), ""));
    item.text(NEEDED)?.parse().or_else(refuse)
}

/// The error for a text that is not TOML.
pub(super) fn syntax(source: super::error::Source<'_>, error: &toml::de::Error) -> InputError {
    let span = error.span().unwrap_or(0..0);
    let message = error.message().split_whitespace().collect::<Vec<_>>().join(" ");
    source.error(&span, "", Problem::new(format!("not TOML: {message}"), ""))
}
