//! The report as text for a terminal.

use std::fmt::Write as _;
use std::time::Duration;

use crate::bench::chart;
use crate::bench::floor::WireReport;
use crate::bench::gpu::RankGpu;
use crate::bench::report::{BenchReport, OperatorReport, Run};
use crate::common::table::table;
use crate::common::units;

/// One column: its header, and the text for an operator.
type Column = (&'static str, fn(&OperatorReport) -> String);

const HOST_COLUMNS: &[Column] = &[
    ("operator", |o| o.operator.into()),
    ("median", |o| time(o.median_us)),
    ("p95", |o| time(o.p95_us)),
    ("inside domains", |o| or_dash(o.bytes_inside_domains.map(units::bytes))),
    ("between domains", |o| units::bytes(o.bytes_between_domains)),
    ("GB/s", |o| or_dash(o.gb_per_s.map(|rate| format!("{rate:.2}")))),
    ("floor", |o| or_dash(o.floor_us.map(time))),
    ("ratio", |o| or_dash(o.ratio_to_floor.map(|ratio| format!("{ratio:.2}")))),
];

/// In addition, where bytes between domains cross a network or an emulated link.
const NETWORK_COLUMNS: &[Column] = &[
    ("stream", |o| or_dash(o.stream_us.map(time))),
    ("ratio", |o| or_dash(o.ratio_to_stream.map(|ratio| format!("{ratio:.2}")))),
    ("leg", |o| or_dash(o.binding_leg.map(Into::into))),
];

const GPU_COLUMNS: &[Column] = &[
    ("operator", |o| o.operator.into()),
    ("median", |o| time(o.median_us)),
    ("p95", |o| time(o.p95_us)),
    ("busiest rank", |o| or_dash(o.must_move_bytes.map(units::bytes))),
    ("GB/s", |o| or_dash(o.gb_per_s.map(|rate| format!("{rate:.0}")))),
    ("floor", |o| or_dash(o.floor_us.map(time))),
    ("ratio", |o| or_dash(o.ratio_to_floor.map(|ratio| format!("{ratio:.2}")))),
];

pub(super) fn render(report: &BenchReport) -> String {
    // Writing to a string cannot fail.
    let mut out = String::new();
    let _ = writeln!(out, "{}", heading(report));
    for run in &report.runs {
        if let Some(layer) = run.layer {
            let _ = writeln!(out, "\nlayer {layer}");
        }
        let columns = if run.wire.is_some() { GPU_COLUMNS } else { HOST_COLUMNS };
        let network = if report.stream_definition.is_some() { NETWORK_COLUMNS } else { &[] };
        let _ = writeln!(out, "{}\n{}", operators(run, &[columns, network].concat()), preprocessing(run));
        if let Some(wire) = &run.wire {
            let _ = writeln!(out, "{}\n{}", moved(wire), report.time_definition);
        }
        let _ = writeln!(out, "{}", report.floor_definition);
        if let Some(definition) = &report.stream_definition {
            let _ = writeln!(out, "{definition}");
        }
        for note in &report.notes {
            let _ = writeln!(out, "note: {note}");
        }
        out.push('\n');
        let _ = writeln!(out, "{}", chart::render(&run.load));
        if report.runs.len() > 1 {
            let _ = writeln!(out, "{}", verdict(run.verified, &run.verification));
        }
    }
    if let [run] = &*report.runs {
        let _ = writeln!(out, "{}", verdict(run.verified, &run.verification));
    } else {
        let wrong = report.runs.iter().filter(|run| !run.verified).count();
        let all = report.runs.len();
        let what = match wrong {
            0 => format!("all {all} layers; the line below each layer gives the counts"),
            _ => format!("{wrong} of {all} layers; the line below each layer gives the first difference"),
        };
        let _ = writeln!(out, "{}", verdict(report.verified, &what));
    }
    out
}

fn heading(report: &BenchReport) -> String {
    let config = &report.config;
    let tokens = match &*report.runs[0].tokens_per_rank {
        [first, rest @ ..] if rest.iter().all(|tokens| tokens == first) => units::count(*first as u64),
        all => all.iter().map(|&tokens| units::count(tokens as u64)).collect::<Vec<_>>().join(" + "),
    };
    let origin = match (&config.routing, config.skew) {
        (Some(file), _) => format!("routing {file}"),
        (None, skew) => format!("skew {}", skew.unwrap_or_default()),
    };
    let gpus = gpus(report).map_or_else(String::new, |gpus| format!("{gpus}\n"));
    format!(
        "{} ({}) in {}, {} backend, {} ({})\n\
         {gpus}{tokens} tokens a rank, hidden {}, {}, top-{}, {}, padded to {}, {origin}, seed {}, {}",
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
        config.pad_multiple,
        config.seed,
        units::counted(config.iterations, "iteration"),
    )
}

/// The GPUs of the ranks, and the SMs and memory that the ranks use on them.
fn gpus(report: &BenchReport) -> Option<String> {
    let gpus = &report.gpus;
    let distinct = |text: fn(&RankGpu) -> String| {
        let mut all: Vec<String> = gpus.iter().map(text).collect();
        all.sort_unstable();
        all.dedup();
        all
    };
    let most = gpus.iter().map(|gpu| gpu.registered_bytes).max()?;
    Some(format!(
        "{} ({}), {} SMs and up to {} of registered memory a rank",
        units::counted(distinct(|gpu| gpu.pci_bus_id.clone()).len(), "GPU"),
        distinct(|gpu| gpu.name.clone()).join(", "),
        distinct(|gpu| gpu.sms.to_string()).join(" or "),
        units::bytes(most),
    ))
}

fn operators(run: &Run, columns: &[Column]) -> String {
    let header: Vec<&str> = columns.iter().map(|(header, _)| *header).collect();
    let row = |operator: &OperatorReport| columns.iter().map(|(_, text)| text(operator)).collect();
    table(&header, run.operators.iter().map(row), 1)
}

fn or_dash(text: Option<String>) -> String {
    text.unwrap_or_else(|| "-".into())
}

/// Bytes between ranks in one dispatch.
fn moved(wire: &WireReport) -> String {
    let range = |bytes: &[u64]| {
        let [least, most] = [bytes.iter().min(), bytes.iter().max()].map(|bytes| bytes.copied().unwrap_or(0));
        format!("{} to {}", units::bytes(least), units::bytes(most))
    };
    format!(
        "in a dispatch a rank receives {} from other ranks of its domain and sends {}",
        range(&wire.dispatch_received_bytes_per_rank),
        range(&wire.dispatch_sent_bytes_per_rank),
    )
}

fn time(microseconds: f64) -> String {
    units::time(Duration::from_secs_f64(microseconds / 1e6))
}

fn preprocessing(run: &Run) -> String {
    let percent = |percent: Option<f64>| match percent {
        None => "-".into(),
        Some(percent) if percent > 0.0 && percent < 0.01 => "below 0.01 %".into(),
        Some(percent) => format!("{percent:.2} %"),
    };
    format!(
        "preprocessing exchanged {} bytes of counts per rank (independent of the number of tokens): {} of dispatch's bytes, {} of its time",
        units::count(run.preprocess.bytes_per_rank),
        percent(run.preprocess.percent_of_dispatch_bytes),
        percent(run.preprocess.percent_of_dispatch_time),
    )
}

fn verdict(verified: bool, what: &str) -> String {
    format!("{}: {what}", if verified { "verified" } else { "WRONG" })
}
