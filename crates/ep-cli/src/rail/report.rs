//! The figures of `rail` as JSON and as a table.

use std::fmt::Write as _;
use std::time::Duration;

use comfy_table::{CellAlignment, LineStyle, Table, TableStyle};
use ep_host::RailProbe;
use serde::Serialize;

use crate::common::machine::Machine;
use crate::common::units;
use crate::rail::measure::{Figures, Pair};

#[derive(Debug, Serialize)]
pub(super) struct Report {
    version: &'static str,
    /// The machine of rank 0.
    machine: Machine,
    transport: String,
    messages_in_flight: usize,
    pairs: Vec<Pair>,
}

const DEFINITION: &str = "latency = half of the time of a message and its answer; one way, both ways = bytes per second in a \
     direction while one or both ranks send, until the last message is acknowledged; per message = time of a message while \
     rank 0 sends";

/// Horizontal lines above and below the table and below its header; no others.
const STYLE: TableStyle = {
    const LINE: LineStyle = LineStyle::none().fill('─').junction('─');
    TableStyle::new().top_border(LINE).header_separator(LINE).bottom_border(LINE)
};

impl Report {
    pub(super) fn new(probe: &RailProbe, pairs: Vec<Pair>) -> Self {
        Self {
            version: env!("CARGO_PKG_VERSION"),
            machine: Machine::here(),
            transport: probe.transport().to_string(),
            messages_in_flight: RailProbe::IN_FLIGHT,
            pairs,
        }
    }

    pub(super) fn render(&self) -> String {
        let mut out = String::new();
        for pair in &self.pairs {
            // Writing to a string cannot fail.
            let _ = writeln!(
                out,
                "rank 0 and rank {} over {}, {} messages in flight\n{}\n",
                pair.rank,
                self.transport,
                self.messages_in_flight,
                table(&pair.sizes).trim_fmt()
            );
        }
        let _ = writeln!(out, "{DEFINITION}");
        out
    }
}

fn table(sizes: &[Figures]) -> Table {
    let mut table = Table::new();
    table.load_style(STYLE).set_header(["message", "latency", "one way", "both ways", "per message"]);
    let time = |us: f64| units::time(Duration::from_secs_f64(us / 1e6));
    let rate = |rate: Option<f64>| {
        rate.map_or_else(|| "-".into(), |rate| format!("{}/s", units::bytes((rate * 1e9) as u64)))
    };
    for figures in sizes {
        table.add_row([
            units::bytes(figures.message_bytes as u64),
            time(figures.latency_us),
            rate(figures.one_way_gb_per_s),
            rate(figures.both_ways_gb_per_s),
            time(figures.per_message_us),
        ]);
    }
    for column in table.column_iter_mut() {
        column.set_cell_alignment(CellAlignment::Right);
    }
    table
}
