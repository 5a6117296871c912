//! What an input file may say: clusters, models, options, and the paper's five numbers.

use super::Result;
use super::error::{InputError, Problem};
use super::preset;
use super::quantity::Kind;
use super::reader::{Item, Keys, Table};
use crate::cluster::{Cluster, ClusterDescription, GpuDescription, LevelDescription, Sharing};
use crate::error::PlanError;
use crate::model::{AttentionDescription, ElementType, Model, ModelDescription, PrecisionDescription};
use crate::planner::{Options, Replicas, Setting, Work};
use crate::routing::{Placement, Routing};

pub(super) const DOCUMENT: Keys = Keys { plain: &["cluster", "model", "options"], quantities: &[] };

const CLUSTER: Keys = Keys { plain: &["name", "level", "gpu"], quantities: &[] };

const LEVEL: Keys = Keys {
    plain: &["name", "members", "sharing"],
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
        "reserved_memory",
        "live_layers",
        "replicas",
        "gradient_accumulation",
        "pipeline_stages",
        "shared_refresh_steps",
        "overlap_chunks",
        "placement",
    ],
    quantities: &[("memory_cap", Kind::Memory)],
};

const NOT_NEGATIVE: &str = "a number, zero or more";

pub(super) fn cluster(item: &Item<'_, '_>) -> Result<ClusterDescription> {
    let table = item.table(CLUSTER)?;
    let Some(levels) = table.get("level") else { return table.missing("level", "[[cluster.level]] tables") };
    let levels = levels.list("[[cluster.level]] tables, outermost level first")?;
    let mut described: Vec<LevelDescription> = Vec::with_capacity(levels.len());
    for item in &levels {
        let read = level(item)?;
        if described.iter().any(|other| other.name == read.name) {
            let problem = format!("there is a level '{}' already", read.name);
            return item.table(LEVEL)?.fail_at("name", Problem::new(problem, "a name of its own"));
        }
        described.push(read);
    }
    let Some(gpu) = table.get("gpu") else { return table.missing("gpu", "a [cluster.gpu] table") };
    let description = ClusterDescription {
        name: table.text("name", Some("unnamed"))?,
        levels: described,
        gpu: self::gpu(&gpu.table(GPU)?)?,
    };
    match Cluster::try_from(description.clone()) {
        Ok(_) => Ok(description),
        Err(error) => table.fail_at("level", Problem::new(error.to_string(), "")),
    }
}

fn level(item: &Item<'_, '_>) -> Result<LevelDescription> {
    let table = item.table(LEVEL)?;
    Ok(LevelDescription {
        name: table.text("name", None)?,
        scaling_factor: table.count("members", None)?,
        alpha_s: table.quantity("alpha", Some(0.0), true)?,
        round_trip_s: table.quantity("round_trip", Some(0.0), true)?,
        bandwidth_gbit_per_s: table.quantity("bandwidth", None, false)?,
        sharing: table.get("sharing").map_or(Ok(Sharing::PerGpu), sharing)?,
    })
}

fn sharing(item: &Item<'_, '_>) -> Result<Sharing> {
    const NEEDED: &str = "\"per-gpu\", \"per-member\", or how many GPUs share a link";
    if let Ok(gpus) = item.count() {
        return Ok(Sharing::Gpus(gpus));
    }
    match item.value.as_str() {
        Some("per-gpu") => Ok(Sharing::PerGpu),
        Some("per-member") => Ok(Sharing::PerMember),
        _ => item.fail(Problem::new("is no way to share a link", NEEDED)),
    }
}

fn gpu(table: &Table<'_, '_>) -> Result<GpuDescription> {
    Ok(GpuDescription {
        name: table.text("name", Some("unnamed"))?,
        sustained_tflops: table.quantity("throughput", None, false)?,
        memory_gb: table.quantity("memory", None, false)?,
        hbm_gb_per_s: table.quantity("memory_bandwidth", None, false)?,
    })
}

pub(super) fn model(item: &Item<'_, '_>) -> Result<ModelDescription> {
    let table = item.table(MODEL)?;
    let base = table.get("preset").map(preset_model).transpose()?;
    let base = base.as_ref();
    let count = |key, default: fn(&ModelDescription) -> usize| table.count(key, base.map(default));
    let description = ModelDescription {
        name: table.text("name", Some(base.map_or("unnamed", |model| &model.name)))?,
        hidden: count("hidden", |model| model.hidden)?,
        expert_intermediate: count("expert_intermediate", |model| model.expert_intermediate)?,
        expert_matrices: table.count("expert_matrices", Some(base.map_or(3, |base| base.expert_matrices)))?,
        experts: count("experts", |model| model.experts)?,
        topk: count("topk", |model| model.topk)?,
        shared_experts: shared_experts(&table, base)?,
        moe_layers: count("moe_layers", |model| model.moe_layers)?,
        tokens_per_gpu: count("tokens_per_gpu", |model| model.tokens_per_gpu)?,
        context: count("context", |model| model.context)?,
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
        .map_or_else(|| item.fail(Problem::new(format!("\"{name}\" is no preset"), needed)), Ok)
}

/// The one count that may be zero.
fn shared_experts(table: &Table<'_, '_>, base: Option<&ModelDescription>) -> Result<usize> {
    const NEEDED: &str = "a whole number, zero or more";
    let Some(item) = table.get("shared_experts") else {
        return Ok(base.map_or(0, |model| model.shared_experts));
    };
    let number = item.number(NEEDED)?;
    if number == 0.0 {
        Ok(0)
    } else {
        item.count().or_else(|_| item.fail(Problem::new(format!("is {number}"), NEEDED)))
    }
}

fn attention(table: &Table<'_, '_>, default: AttentionDescription) -> Result<AttentionDescription> {
    let Some(item) = table.get("attention") else { return Ok(default) };
    let table = item.table(ATTENTION)?;
    let number = |key, default| table.number(key, default, 0.0..f64::INFINITY, NOT_NEGATIVE);
    Ok(AttentionDescription {
        parameters: number("parameters", default.parameters)?,
        score_width: number("score_width", default.score_width)?,
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
    if item.value.is_str() {
        return item
            .word(&[("even", ())])
            .map(|()| Routing::Even)
            .or_else(|_| item.fail(Problem::new("is unknown", NEEDED)));
    }
    if !item.value.is_table() {
        return item.fail(Problem::new("is neither a text nor a table", NEEDED));
    }
    let table = item.table(ROUTING)?;
    match (table.get("zipf"), table.get("histogram")) {
        (Some(_), None) => Ok(Routing::Zipf {
            exponent: table.number("zipf", 0.0, 0.0..f64::INFINITY, NOT_NEGATIVE)?,
            shuffle_seed: table.number("shuffle_seed", 0.0, 0.0..9e15, "a whole number")? as u64,
        }),
        (None, Some(counts)) => {
            let counts = counts.list("a list of counts")?;
            Ok(Routing::Histogram(
                counts.iter().map(|count| count.number(NOT_NEGATIVE)).collect::<Result<_>>()?,
            ))
        }
        _ => item.fail(Problem::new("needs exactly one of `zipf` and `histogram`", NEEDED)),
    }
}

pub(super) fn options(item: &Item<'_, '_>) -> Result<Options> {
    let table = item.table(OPTIONS)?;
    let default = Options::default();
    let count = |key, default| table.count(key, Some(default));
    let ratio = |key, default| {
        table.number(key, default, 1.0..f64::INFINITY, "a ratio of at least 1, which sends everything")
    };
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
        weight_compression: ratio("weight_compression", default.weight_compression)?,
        gradient_compression: ratio("gradient_compression", default.gradient_compression)?,
        memory_cap_gb: table.optional_quantity("memory_cap", true)?,
        reserved_memory: table.number(
            "reserved_memory",
            default.reserved_memory,
            0.0..1.0,
            "a part of the memory, at least 0 and below 1",
        )?,
        live_layers: count("live_layers", default.live_layers)?,
        replicas: table.word(
            "replicas",
            default.replicas,
            &[("regather", Replicas::Regather), ("keep", Replicas::Keep), ("best", Replicas::Best)],
        )?,
        micro_batches: count("gradient_accumulation", default.micro_batches)?,
        pipeline_stages: count("pipeline_stages", default.pipeline_stages)?,
        shared_refresh_steps: count("shared_refresh_steps", default.shared_refresh_steps)?,
        overlap_chunks: count("overlap_chunks", default.overlap_chunks)?,
        placement: table.word(
            "placement",
            default.placement,
            &[("in-order", Placement::InOrder), ("lpt", Placement::Lpt)],
        )?,
    })
}

/// The text is no TOML.
pub(super) fn syntax(source: super::error::Source<'_>, error: &toml::de::Error) -> InputError {
    let span = error.span().unwrap_or(0..0);
    let message = error.message().split_whitespace().collect::<Vec<_>>().join(" ");
    source.error(&span, "", Problem::new(format!("not TOML: {message}"), ""))
}
