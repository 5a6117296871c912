//! The report as text for a terminal.

use std::fmt::Write as _;
use std::time::Duration;

use comfy_table::{CellAlignment, LineStyle, Table, TableStyle};

use crate::bench::chart;
use crate::bench::report::{OperatorReport, Report, Run};
use crate::units;

const COLUMNS: [&str; 8] =
    ["operator", "median", "p95", "inside domains", "between domains", "GB/s", "floor", "ratio"];

/// Three lines, and no others.
const STYLE: TableStyle = {
    const LINE: LineStyle = LineStyle::none().fill('─').junction('─');
    TableStyle::new().top_border(LINE).header_separator(LINE).bottom_border(LINE)
};

pub(super) fn render(report: &Report) -> String {
    // Writing to a string cannot fail.
    let mut out = String::new();
    let _ = writeln!(out, "{}", heading(report));
    for run in &report.runs {
        if let Some(layer) = run.layer {
            let _ = writeln!(out, "\nlayer {layer}");
        }
        let _ = writeln!(out, "{}\n{}", table(run).trim_fmt(), preprocessing(run));
        let _ =
            writeln!(out, "{} ({:.1} GB/s copied)\n", report.floor_definition, report.ceiling_copy_gb_per_s);
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
            0 => format!("all {all} layers, as said under each"),
            _ => format!("{wrong} of {all} layers are wrong, as said under each"),
        };
        let _ = writeln!(out, "{}", verdict(report.verified, &what));
    }
    out
}

fn heading(report: &Report) -> String {
    let config = &report.config;
    let tokens = match &*report.runs[0].tokens_per_rank {
        [first, rest @ ..] if rest.iter().all(|tokens| tokens == first) => units::count(*first as u64),
        all => all.iter().map(|&tokens| units::count(tokens as u64)).collect::<Vec<_>>().join(" + "),
    };
    let origin = match (&config.routing, config.skew) {
        (Some(file), _) => format!("routing {file}"),
        (None, skew) => format!("skew {}", skew.unwrap_or_default()),
    };
    format!(
        "{} ({}) in {}, {} backend, {} ({})\n\
         {tokens} tokens a rank, hidden {}, {}, top-{}, {}, padded to {}, {origin}, seed {}, {}",
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

fn table(run: &Run) -> Table {
    let mut table = Table::new();
    table.load_style(STYLE).set_header(COLUMNS);
    for operator in &run.operators {
        table.add_row(row(operator));
    }
    for column in table.column_iter_mut().skip(1) {
        column.set_cell_alignment(CellAlignment::Right);
    }
    table
}

fn row(operator: &OperatorReport) -> [String; 8] {
    let or_dash = |text: Option<String>| text.unwrap_or_else(|| "-".into());
    [
        operator.operator.into(),
        time(operator.median_us),
        time(operator.p95_us),
        units::bytes(operator.bytes_inside_domains),
        units::bytes(operator.bytes_between_domains),
        or_dash(operator.gb_per_s.map(|rate| format!("{rate:.2}"))),
        or_dash(operator.floor_us.map(time)),
        or_dash(operator.ratio_to_floor.map(|ratio| format!("{ratio:.2}"))),
    ]
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
        "preprocessing exchanged {} bytes per rank (independent of the number of tokens): {} of dispatch's bytes, {} of its time",
        units::count(run.preprocess.bytes_per_rank),
        percent(run.preprocess.percent_of_dispatch_bytes),
        percent(run.preprocess.percent_of_dispatch_time),
    )
}

fn verdict(verified: bool, what: &str) -> String {
    format!("{}: {what}", if verified { "verified" } else { "WRONG" })
}
