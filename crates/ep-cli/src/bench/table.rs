//! The report as text for a terminal.

use std::fmt::Write as _;

use crate::bench::floor::WireReport;
use crate::bench::report::BenchReport;
use crate::bench::runs::{OperatorReport, Run};
use crate::bench::{chart, heading, summary};
use crate::common::backend::BackendKind;
use crate::common::table::{or_dash, table};
use crate::common::units::{self, time_us};

/// One column: its header, and the text for an operator.
type Column = (&'static str, fn(&OperatorReport) -> String);

const HOST_COLUMNS: &[Column] = &[
    ("operator", |o| o.operator.into()),
    ("median", |o| time_us(o.median_us)),
    ("p95", |o| time_us(o.p95_us)),
    ("inside domains", |o| or_dash(o.bytes_inside_domains.map(units::bytes))),
    ("between domains", |o| units::bytes(o.bytes_between_domains)),
    ("GB/s", |o| or_dash(o.gb_per_s.map(|rate| format!("{rate:.2}")))),
    ("floor", |o| or_dash(o.floor_us.map(time_us))),
    ("ratio", |o| or_dash(o.ratio_to_floor.map(|ratio| format!("{ratio:.2}")))),
];

/// Additional columns where bytes between domains cross a network or an emulated link.
const NETWORK_COLUMNS: &[Column] = &[
    ("stream", |o| or_dash(o.stream_us.map(time_us))),
    ("ratio", |o| or_dash(o.ratio_to_stream.map(|ratio| format!("{ratio:.2}")))),
    ("leg", |o| or_dash(o.binding_leg.map(Into::into))),
];

const GPU_COLUMNS: &[Column] = &[
    ("operator", |o| o.operator.into()),
    ("median", |o| time_us(o.median_us)),
    ("p95", |o| time_us(o.p95_us)),
    ("busiest rank", |o| or_dash(o.must_move_bytes.map(units::bytes))),
    ("GB/s", |o| or_dash(o.gb_per_s.map(|rate| format!("{rate:.0}")))),
    ("floor", |o| or_dash(o.floor_us.map(time_us))),
    ("ratio", |o| or_dash(o.ratio_to_floor.map(|ratio| format!("{ratio:.2}")))),
];

pub(super) fn render(report: &BenchReport) -> String {
    let mut out = heading::of(report) + "\n";
    match &*report.runs {
        [run] => single(&mut out, report, run),
        runs => several(&mut out, report, runs),
    }
    out
}

// Writing to a string cannot fail, so the functions below ignore the result.

fn single(out: &mut String, report: &BenchReport, run: &Run) {
    if let Some(layer) = run.layer {
        let _ = writeln!(out, "\nlayer {layer}");
    }
    let _ = writeln!(out, "{}{}", figures(report, run), definitions(report));
    let _ = writeln!(out, "{}\n{}", load(run), verdict(run.verified, &run.verification));
}

/// Writes each run with its own heading, then the definitions once, then the most important figures of all runs in one
/// table.
fn several(out: &mut String, report: &BenchReport, runs: &[Run]) {
    for (at, run) in runs.iter().enumerate() {
        let _ = write!(out, "\n{}\n{}", heading::of_run(report, run), figures(report, run));
        // The load of a layer is the same in all its runs.
        if run.layer.is_some() && runs[..at].iter().all(|earlier| earlier.layer != run.layer) {
            let _ = writeln!(out, "\n{}", load(run));
        }
        let _ = writeln!(out, "{}", verdict(run.verified, &run.verification));
    }
    let _ = writeln!(out, "\n{}\n{}", definitions(report), summary::render(runs));
    let (all, wrong) = (runs.len(), runs.iter().filter(|run| !run.verified).count());
    let what = match wrong {
        0 => format!("all {all} runs; the last line of each run gives the counts"),
        _ => format!("{wrong} of {all} runs; the last line of each run gives the first difference"),
    };
    let _ = writeln!(out, "{}", verdict(report.verified, &what));
}

/// The figures of a run, apart from the load.
fn figures(report: &BenchReport, run: &Run) -> String {
    let columns = if run.wire.is_some() { GPU_COLUMNS } else { HOST_COLUMNS };
    let network = if report.stream_definition.is_some() { NETWORK_COLUMNS } else { &[] };
    let moved = run.wire.as_ref().map_or_else(String::new, |wire| moved(wire) + "\n");
    format!("{}\n{}\n{moved}", operators(run, &[columns, network].concat()), preprocessing(report, run))
}

/// What the figures mean, and circumstances that affect them.
fn definitions(report: &BenchReport) -> String {
    let mut out = String::new();
    if report.runs.iter().any(|run| run.wire.is_some()) {
        let _ = writeln!(out, "{}", report.time_definition);
    }
    let _ = writeln!(out, "{}", report.floor_definition);
    if let Some(definition) = &report.stream_definition {
        let _ = writeln!(out, "{definition}");
    }
    for note in &report.notes {
        let _ = writeln!(out, "note: {note}");
    }
    out
}

fn load(run: &Run) -> String {
    // In plain mode the copies of a token for several experts of a rank are one row.
    chart::render(&run.load, if run.is_plain() { "copies" } else { "rows" })
}

fn operators(run: &Run, columns: &[Column]) -> String {
    let header: Vec<&str> = columns.iter().map(|(header, _)| *header).collect();
    let row = |operator: &OperatorReport| columns.iter().map(|(_, text)| text(operator)).collect();
    table(&header, run.operators.iter().map(row), 1)
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

fn preprocessing(report: &BenchReport, run: &Run) -> String {
    let percent = |percent: Option<f64>| match percent {
        None => "-".into(),
        Some(percent) if percent > 0.0 && percent < 0.01 => "below 0.01 %".into(),
        Some(percent) => format!("{percent:.2} %"),
    };
    // The host backend sends no masks: the first dispatch of a handle carries the experts of these tokens.
    let masks = match report.config.backend == BackendKind::Cuda.name() && report.config.domains > 1 {
        true => "; not counted: a mask of experts for each token that goes to another domain",
        false => "",
    };
    format!(
        "preprocessing exchanged {} bytes of counts per rank (independent of the number of tokens): {} of dispatch's bytes, {} of its time{masks}",
        units::count(run.preprocess.bytes_per_rank),
        percent(run.preprocess.percent_of_dispatch_bytes),
        percent(run.preprocess.percent_of_dispatch_time),
    )
}

fn verdict(verified: bool, what: &str) -> String {
    format!("{}: {what}", if verified { "verified" } else { "WRONG" })
}
