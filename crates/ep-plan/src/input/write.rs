//! Writes descriptions as TOML to edit, with units, and with comments that name the alternatives.

use std::fmt::Write as _;

use super::quantity::Kind;
use crate::cluster::{ClusterDescription, Sharing};
use crate::limits;
use crate::model::{ElementType, ModelDescription};
use crate::planner::{Batch, Compression, Options, Replicas, Setting, Work};
use crate::routing::{Placement, Routing};

/// Writes a whole input file. [`parse`](super::parse) reads back exactly the same descriptions.
pub fn to_toml(cluster: &ClusterDescription, model: &ModelDescription, options: &Options) -> String {
    [cluster_to_toml(cluster), model_to_toml(model), options_to_toml(options)].join("\n")
}

/// Writes the table `[cluster]`.
pub fn cluster_to_toml(cluster: &ClusterDescription) -> String {
    // Writing into a string cannot fail.
    let mut out = String::new();
    let _ = writeln!(out, "[cluster]\nname = {}", quoted(&cluster.name));
    for (index, level) in cluster.levels.iter().enumerate() {
        let first = index == 0;
        let note = |note: &str| if first { format!("  # {note}") } else { String::new() };
        let _ = writeln!(out, "\n[[cluster.level]]{}", note("outermost level first"));
        let _ = writeln!(out, "name = {}", quoted(&level.name));
        let members = note("datacenters; then nodes of a datacenter; then GPUs of a node");
        let counts = level.site_members.iter().map(usize::to_string);
        let _ = writeln!(out, "members = {}{members}", one_or_list(level.scaling_factor.to_string(), counts));
        let bandwidth = note("of one link, in each direction; Gbit/s or GB/s");
        let rate = |rate: &f64| format!("\"{rate} Gbit/s\"");
        let rates =
            one_or_list(rate(&level.bandwidth_gbit_per_s), level.site_bandwidth_gbit_per_s.iter().map(rate));
        let _ = writeln!(out, "bandwidth = {rates}{bandwidth}");
        let sharing = match level.sharing {
            Sharing::PerGpu => "\"per-gpu\"".to_owned(),
            Sharing::PerMember => "\"per-member\"".to_owned(),
            Sharing::Gpus(gpus) => gpus.to_string(),
        };
        let sharers = note(
            "GPUs that share a link: \"per-gpu\" one, \"per-member\" all GPUs of a member, or a number of GPUs",
        );
        let _ = writeln!(out, "sharing = {sharing}{sharers}");
        let _ = writeln!(out, "alpha = {}{}", time(level.alpha_s), note("time to start a message"));
        let _ = writeln!(out, "round_trip = {}{}", time(level.round_trip_s), note("paid once per exchange"));
        let reach = note("part of the bandwidth that transfers reach");
        let _ = writeln!(out, "efficiency = {}{reach}", level.efficiency);
        let _ = writeln!(
            out,
            "loss = {}{}",
            level.loss,
            note("part of the packets that are lost; limits each flow (Mathis)")
        );
        let _ = writeln!(out, "flows = {}{}", level.flows, note("connections over one link, for `loss`"));
    }
    let gpu = &cluster.gpu;
    let _ = writeln!(
        out,
        "\n[cluster.gpu]\nname = {}\nthroughput = \"{} TFLOP/s\"  # sustained, not peak\n\
         memory = \"{} GB\"\nmemory_bandwidth = \"{} GB/s\"",
        quoted(&gpu.name),
        gpu.sustained_tflops,
        gpu.memory_gb,
        gpu.hbm_gb_per_s
    );
    out
}

/// Writes the table `[model]`.
pub fn model_to_toml(model: &ModelDescription) -> String {
    let mut out = String::new();
    let _ = writeln!(out, "[model]\nname = {}", quoted(&model.name));
    let counts = [
        ("hidden", model.hidden, "elements of a token"),
        ("expert_intermediate", model.expert_intermediate, "inner width of an expert"),
        ("expert_matrices", model.expert_matrices, "3 when gated (SwiGLU), else 2"),
        ("experts", model.experts, "routed experts of a layer"),
        ("topk", model.topk, "experts that a token chooses"),
        ("shared_experts", model.shared_experts, "experts that every token uses in addition"),
        ("moe_layers", model.moe_layers, "layers that have experts"),
        ("tokens_per_gpu", model.tokens_per_gpu, "of one micro-batch"),
        ("context", model.context, "sequence length, tokens"),
    ];
    for (key, count, note) in counts {
        let _ = writeln!(out, "{key} = {count}  # {note}");
    }
    if let Some(batch) = model.global_batch {
        let _ = writeln!(out, "global_batch = {batch}  # tokens of an optimizer step");
    }
    let _ = writeln!(out, "other_parameters = {}  # embeddings and dense layers", model.other_parameters);
    let attention = model.attention;
    let _ = writeln!(
        out,
        "attention = {{ parameters = {}, score_width = {} }}  # projections; heads x (query-key + value width)",
        attention.parameters, attention.score_width
    );
    let precision = model.precision;
    let [weights, dispatch, combine, gradients] =
        [precision.weights, precision.dispatch, precision.combine, precision.gradients].map(element);
    let _ = writeln!(
        out,
        "precision = {{ weights = {weights}, dispatch = {dispatch}, combine = {combine}, gradients = {gradients} }}  \
         # f32, bf16, fp8"
    );
    let routing = match &model.routing {
        Routing::Even => "\"even\"".to_owned(),
        Routing::Zipf { exponent, shuffle_seed } => {
            format!("{{ zipf = {exponent}, shuffle_seed = {shuffle_seed} }}")
        }
        Routing::Histogram(counts) => {
            let counts: Vec<String> = counts.iter().map(f64::to_string).collect();
            format!("{{ histogram = [{}] }}", counts.join(", "))
        }
    };
    let _ = writeln!(out, "routing = {routing}  # \"even\", {{ zipf = 1.0 }}, {{ histogram = [...] }}");
    out
}

/// Writes the table `[options]`, with all options.
pub fn options_to_toml(options: &Options) -> String {
    let mut out = String::new();
    let setting = match options.setting {
        Setting::Full => "full",
        Setting::Paper => "paper",
    };
    let work = match options.work {
        Work::Training => "training",
        Work::Forward => "forward",
    };
    let replicas = match options.replicas {
        Replicas::Regather => "regather",
        Replicas::Keep => "keep",
        Replicas::Best => "best",
    };
    let placement = match options.placement {
        Placement::InOrder => "in-order",
        Placement::Lpt => "lpt",
    };
    let _ = writeln!(
        out,
        "[options]\n\
         setting = \"{setting}\"  # full, or the paper's stream model alone\n\
         work = \"{work}\"  # training, forward\n\
         weight_compression = {}  # \"int8\", or bytes of an expert over bytes sent; 1 turns the codec off\n\
         gradient_compression = {}",
        compression(options.weight_compression),
        compression(options.gradient_compression)
    );
    let dense = "of dense gradients between datacenters, as in the training runtime: \"exact\", \"int8\", \"topk:0.01\"";
    let _ = match options.dense_gradient_compression {
        Some(codec) => writeln!(out, "dense_gradient_compression = \"{codec}\"  # {dense}"),
        None => writeln!(
            out,
            "# dense_gradient_compression = \"int8\"  # {dense}; default: exact gradients, then weights"
        ),
    };
    let _ = match options.memory_cap_gb {
        Some(cap) => writeln!(out, "memory_cap = \"{cap} GB\"  # for gathered experts"),
        None => {
            writeln!(
                out,
                "# memory_cap = \"24 GB\"  # for gathered experts; default: what the device has left"
            )
        }
    };
    let chosen = |key, value, example| match value {
        Some(value) => format!("{key} = {value}\n"),
        None => format!("# {key} = {example}  # default: chosen by the planner\n"),
    };
    let layout = [
        chosen("pipeline_stages", options.pipeline_stages, 2),
        chosen("expert_parallel", options.expert_parallel, 64),
        chosen("tensor_parallel", options.tensor_parallel, 8),
    ]
    .concat();
    let accumulation = match options.batch {
        Batch::MicroBatches => format!("gradient_accumulation = {}  # micro-batches per optimizer step\n", options.micro_batches),
        Batch::Model => "# gradient_accumulation = 1  # micro-batches per optimizer step; default: the model's global_batch\n".to_owned(),
    };
    let _ = writeln!(
        out,
        "{layout}{accumulation}reserved_memory = {}  # fraction of the device's memory that experts may not use\n\
         live_layers = {}  # layers whose gathered experts are in memory at a time\n\
         replicas = \"{replicas}\"  # regather, keep, best\n\
         local_steps = {}  # steps between two exchanges of weights under local steps\n\
         shared_refresh_steps = {}  # steps between two refreshes of the codec's shared expert\n\
         overlap_chunks = {}  # chunks in which token exchange and expert compute overlap\n\
         placement = \"{placement}\"  # of experts: in-order, lpt (balanced)",
        options.reserved_memory,
        options.live_layers,
        options.local_steps,
        options.shared_refresh_steps,
        options.overlap_chunks
    );
    out
}

/// A value that all sites share, or the list with one entry per site.
fn one_or_list(one: String, list: impl ExactSizeIterator<Item = String>) -> String {
    if list.len() == 0 { one } else { format!("[{}]", list.collect::<Vec<_>>().join(", ")) }
}

fn compression(compression: Compression) -> String {
    match compression {
        Compression::Int8 => "\"int8\"".into(),
        Compression::By(ratio) => ratio.to_string(),
    }
}

fn element(element: ElementType) -> &'static str {
    match element {
        ElementType::F32 => "\"f32\"",
        ElementType::Bf16 => "\"bf16\"",
        ElementType::Fp8 => "\"fp8\"",
    }
}

/// Writes a time in the unit that makes the number short, or in seconds if that text would not be read back as the same number.
fn time(seconds: f64) -> String {
    let exact = |factor: f64, unit: &str| {
        let text = format!("{} {unit}", seconds * factor);
        (Kind::Time.parse(&text, limits::SECONDS) == Ok(seconds)).then_some(text)
    };
    let (factor, unit) = if seconds.abs() >= 1.0 || seconds == 0.0 {
        (1.0, "s")
    } else if seconds.abs() >= 1e-3 {
        (1e3, "ms")
    } else {
        (1e6, "us")
    };
    format!("\"{}\"", exact(factor, unit).unwrap_or_else(|| format!("{seconds} s")))
}

/// A TOML basic string.
fn quoted(text: &str) -> String {
    let mut out = String::from("\"");
    for letter in text.chars() {
        match letter {
            '"' | '\\' => out.extend(['\\', letter]),
            control if control.is_control() => {
                let _ = write!(out, "\\u{:04X}", u32::from(control));
            }
            other => out.push(other),
        }
    }
    out.push('"');
    out
}
