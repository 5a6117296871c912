//! The heading of the report, and of each run where there are several.

use crate::bench::gpu::RankGpu;
use crate::bench::report::BenchReport;
use crate::bench::runs::Run;
use crate::common::units;

/// What all runs have in common; with one run, all that determines it.
pub(super) fn of(report: &BenchReport) -> String {
    let config = &report.config;
    let origin = match (&config.routing, config.skew) {
        (Some(file), _) => format!("routing {file}"),
        (None, skew) => format!("skew {}", skew.unwrap_or_default()),
    };
    let (of_ranks, of_rows) = match &*report.runs {
        [run] => (format!("{} tokens a rank, ", tokens(run)), format!(", {}", mode(report, run))),
        _ => (String::new(), String::new()),
    };
    let gpus = gpus(report).map_or_else(String::new, |gpus| format!("{gpus}\n"));
    format!(
        "{} ({}) in {}, {} backend, {} ({})\n\
         {gpus}{of_ranks}hidden {}, {}, top-{}, {}{of_rows}, {origin}, seed {}, {}",
        units::counted(config.ranks, "rank"),
        if config.processes { "processes" } else { "threads" },
        units::counted(config.domains, "domain"),
        config.backend,
        units::counted(report.machine.cores, "core"),
        report.machine.cpu_model,
        config.hidden,
        units::counted(config.experts, "expert"),
        report.runs[0].topk,
        config.dtype,
        config.seed,
        units::counted(config.iterations, "iteration"),
    )
}

/// What distinguishes a run from the others.
pub(super) fn of_run(report: &BenchReport, run: &Run) -> String {
    let sms = run.sms.map(|sms| units::counted(sms, "SM"));
    let layer = run.layer.map(|layer| format!("layer {layer}"));
    let parts = [Some(mode(report, run)), sms, layer, Some(format!("{} tokens a rank", tokens(run)))];
    parts.into_iter().flatten().collect::<Vec<_>>().join(", ")
}

fn mode(report: &BenchReport, run: &Run) -> String {
    match run.is_plain() {
        true => "plain mode".into(),
        false => format!("permuted mode padded to {}", report.config.pad_multiple),
    }
}

/// The numbers of tokens of the ranks: a single number if all are equal, otherwise one per rank.
pub(super) fn tokens(run: &Run) -> String {
    match &*run.tokens_per_rank {
        [first, rest @ ..] if rest.iter().all(|tokens| tokens == first) => units::count(*first as u64),
        all => all.iter().map(|&tokens| units::count(tokens as u64)).collect::<Vec<_>>().join(" + "),
    }
}

/// The GPUs of the ranks; with one run, also the SMs and memory that the ranks use on them.
fn gpus(report: &BenchReport) -> Option<String> {
    let gpus = &report.gpus;
    let distinct = |text: fn(&RankGpu) -> String| {
        let mut all: Vec<String> = gpus.iter().map(text).collect();
        all.sort_unstable();
        all.dedup();
        all
    };
    let most = gpus.iter().map(|gpu| gpu.registered_bytes).max()?;
    let number = units::counted(distinct(|gpu| gpu.pci_bus_id.clone()).len(), "GPU");
    let names = distinct(|gpu| gpu.name.clone()).join(", ");
    Some(match &*report.runs {
        [_] => format!(
            "{number} ({names}), {} SMs and up to {} of registered memory a rank",
            distinct(|gpu| gpu.sms.to_string()).join(" or "),
            units::bytes(most),
        ),
        _ => format!("{number} ({names})"),
    })
}
