//! The figures of `rail` as JSON and as a table.

use std::fmt::Write as _;
use std::time::Duration;

use ep_host::RailProbe;
use serde::Serialize;

use crate::common::machine::Machine;
use crate::common::table::table;
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

const DEFINITION: &str = "latency = half of the time from a message to the arrival of its answer; one way = bytes per second \
     while only rank 0 sends; both ways = bytes per second in each direction while both ranks send; per message = time per \
     message while only rank 0 sends; sending ends when the last message is acknowledged";

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
                figures(&pair.sizes)
            );
        }
        let _ = writeln!(out, "{DEFINITION}");
        out
    }
}

fn figures(sizes: &[Figures]) -> String {
    let time = |us: f64| units::time(Duration::from_secs_f64(us / 1e6));
    let rate = |rate: Option<f64>| {
        rate.map_or_else(|| "-".into(), |rate| format!("{}/s", units::bytes((rate * 1e9) as u64)))
    };
    let row = |figures: &Figures| {
        vec![
            units::bytes(figures.message_bytes as u64),
            time(figures.latency_us),
            rate(figures.one_way_gb_per_s),
            rate(figures.both_ways_gb_per_s),
            time(figures.per_message_us),
        ]
    };
    table(&["message", "latency", "one way", "both ways", "per message"], sizes.iter().map(row), 0)
}
