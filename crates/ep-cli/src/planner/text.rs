//! Text that the planner's commands share: tables, and the description of a problem.

pub(crate) use ep_plan::planner::domain_sizes_text as sizes;
use ep_plan::planner::{Batch, Compression, Plan, Work};

pub(crate) use crate::common::table::table;
use ep_plan::cluster::{Cluster, ClusterDescription};

use crate::common::units;
use crate::planner::problem::Problem;

/// A codec as the heading names it, after the word "as".
fn sent(compression: Compression) -> String {
    match compression {
        exact if exact.is_exact() => "they are".into(),
        Compression::Int8 => "int8".into(),
        Compression::By(ratio) => format!("{ratio}x compressed"),
    }
}

/// What the word "datacenter" stands for, how unequal sites divide into parts, and links of different bandwidth; empty if the
/// outermost level is `wan` and all sites and links are equal.
fn sites(cluster: &ClusterDescription) -> String {
    let mut out = String::new();
    if let Some(outermost) = cluster.levels.first().filter(|level| level.name != "wan") {
        out.push_str(&format!(
            "A datacenter below is a member of '{}', the outermost level.\n",
            outermost.name
        ));
    }
    let list = |items: Vec<String>| items.join(", ");
    let lists = cluster.levels.iter().filter(|level| !level.site_members.is_empty());
    for (level, checked) in lists.zip(Cluster::try_from(cluster.clone())) {
        let parts: Vec<String> = checked.sites().iter().map(|site| site.parts.to_string()).collect();
        out.push_str(&format!(
            "'{}' has {} members in the {} sites: the plan divides them into {} equal parts of {} ({} per site).\n",
            level.name,
            list(level.site_members.iter().map(usize::to_string).collect()),
            parts.len(),
            checked.levels()[0].scaling_factor,
            checked.levels()[1].scaling_factor,
            list(parts),
        ));
    }
    for level in cluster.levels.iter().filter(|level| !level.site_bandwidth_gbit_per_s.is_empty()) {
        let rates = level.site_bandwidth_gbit_per_s.iter().map(f64::to_string).collect();
        out.push_str(&format!("'{}' links of the sites: {} Gbit/s.\n", level.name, list(rates)));
    }
    out
}

/// The problem in two lines, and one more line for each remark on its sites.
pub(crate) fn heading(problem: &Problem, plan: &Plan) -> String {
    let Problem { cluster, model, options, .. } = problem;
    let gpus = cluster.gpus();
    let work = match options.work {
        Work::Training => "training",
        Work::Forward => "forward pass of training",
    };
    // A global batch is divided into equal micro-batches of at most this size.
    let (most, batch) = match (options.batch, model.global_batch, options.work) {
        (Batch::Model, Some(batch), Work::Training) => {
            ("at most ", format!("{} in a step", units::count(batch as u64)))
        }
        _ => ("", units::counted(options.micro_batches, "micro-batch")),
    };
    let weights = sent(options.weight_compression);
    let moved = match options.work {
        Work::Training => format!(
            "if experts move: weights as {weights}, gradients as {}",
            sent(options.gradient_compression)
        ),
        Work::Forward => format!("if experts move: weights as {weights}"),
    };
    let dense = match options.dense_gradient_compression {
        Some(codec) if options.work == Work::Training => {
            let sent = if codec.is_lossless() { "they are".to_owned() } else { codec.to_string() };
            format!(", dense gradients between datacenters as {sent}")
        }
        _ => String::new(),
    };
    // Smaller EP groups have a different number of experts on each GPU, which stands beside their layout.
    let experts = match plan.scaling_factors.iter().product::<usize>() == gpus {
        true => format!(", {} of a layer on each", units::counted(plan.experts_per_gpu, "expert")),
        false => String::new(),
    };
    format!(
        "{} on {}: {}{}\n{work}, {}{} tokens per GPU and micro-batch, {}, {moved}{}\n{}",
        model.name,
        cluster.name,
        units::counted(gpus, "GPU"),
        experts,
        most,
        units::count(model.tokens_per_gpu as u64),
        batch,
        dense,
        sites(cluster),
    )
}
