//! Table IV: the best domain size of four layers over eight GPUs.

use ep_plan::StreamModel;
use ep_plan::paper::{TABLE_IV, TableIvCase, TableIvReading};

use super::section::{Conclusion, Finding, Grid, Section, agreement};
use crate::common::failure::Failure;
use crate::planner::chart::{self, Line};

const SIZES: [usize; 4] = [1, 2, 4, 8];

/// An interpretation of the table's inputs.
struct Reading {
    name: &'static str,
    bandwidth: TableIvReading,
    /// Factor for `L`.
    compute: f64,
}

const READINGS: [Reading; 3] = [
    Reading { name: "as printed, 128 Gbps = 16 GB/s", bandwidth: TableIvReading::AsPrinted, compute: 1.0 },
    Reading { name: "128 GB/s", bandwidth: TableIvReading::GigabytesPerSecond, compute: 1.0 },
    Reading {
        name: "as printed, with ten times the compute",
        bandwidth: TableIvReading::AsPrinted,
        compute: 10.0,
    },
];

impl Reading {
    fn model(&self, case: &TableIvCase) -> Result<StreamModel, Failure> {
        let case = TableIvCase { pre_expert_ms: case.pre_expert_ms * self.compute, ..*case };
        StreamModel::new(case.input(self.bandwidth)).map_err(Failure::request)
    }

    fn grid(&self) -> Result<Grid, Failure> {
        let rows = TABLE_IV.iter().map(|case| {
            let model = self.model(case)?;
            let best = model.best_domain_size();
            let mut row = vec![case.name.to_owned()];
            for size in SIZES {
                row.push(format!("{:.4}", latency(&model, size)?));
            }
            row.extend([
                best.to_string(),
                case.reported_domain_size.to_string(),
                agreement(best == case.reported_domain_size),
            ]);
            Ok(row)
        });
        Ok(Grid {
            caption: format!("Latency in ms for domains of 1, 2, 4, 8; {}", self.name),
            header: vec!["case", "S=1", "S=2", "S=4", "S=8", "best S, computed", "paper", "agrees"],
            rows: rows.collect::<Result<_, Failure>>()?,
        })
    }

    /// Whether the best size of each of these cases is the reported one.
    fn agrees(&self, cases: &[TableIvCase]) -> Result<Vec<bool>, Failure> {
        let agrees =
            |case: &TableIvCase| Ok(self.model(case)?.best_domain_size() == case.reported_domain_size);
        cases.iter().map(agrees).collect()
    }
}

pub(super) fn section() -> Result<Section, Failure> {
    let (mix, gather) = TABLE_IV.split_at(2);
    let [printed, bytes, compute] = &READINGS;
    let all = |agrees: Vec<bool>| Conclusion::of(agrees.into_iter().all(|agrees| agrees));
    // Both cases must differ; if either agrees, the conclusion is "reproduces".
    let none =
        |agrees: Vec<bool>| if agrees.contains(&true) { Conclusion::Reproduces } else { Conclusion::Differs };
    let finding = |claim: &str, found, expected, why: &str| Finding {
        claim: claim.into(),
        found,
        expected,
        why: why.into(),
    };
    Ok(Section {
        title: "Table IV: best domain size of four layers",
        about:
            "lat(S) = max(L, P_E (S - 1) / B) + 2 D (G - S) / (G B) with D, P_E and L of the table and G = 8. Of the \
             paper's cells, this program records the reported best sizes."
                .into(),
        grids: READINGS.iter().map(Reading::grid).collect::<Result<_, _>>()?,
        findings: vec![
            finding(
                "AG-only-1 and AG-only-2, as printed",
                all(printed.agrees(gather)?),
                Conclusion::Reproduces,
                "the all-gather is so small that every interpretation gathers all experts",
            ),
            finding(
                "Mix-1 and Mix-2, as printed",
                none(printed.agrees(mix)?),
                Conclusion::Differs,
                "at 128 Gbps the all-gather of a second expert takes longer than L, so the model gives S = 1 and 2; the \
                 paper has 2 and 4",
            ),
            finding(
                "all four at 128 GB/s",
                all(bytes.agrees(&TABLE_IV)?),
                Conclusion::Reproduces,
                "if the printed 128 gigabits are read as 128 gigabytes",
            ),
            finding(
                "all four with ten times the compute",
                all(compute.agrees(&TABLE_IV)?),
                Conclusion::Reproduces,
                "more compute also hides the all-gather",
            ),
        ],
        charts: vec![("table4.svg", picture()?)],
    })
}

fn latency(model: &StreamModel, size: usize) -> Result<f64, Failure> {
    Ok(model.latency(size).map_err(Failure::request)?.as_ms())
}

fn picture() -> Result<String, Failure> {
    let mut lines = Vec::new();
    for reading in &READINGS[..2] {
        let unit = if reading.bandwidth == TableIvReading::AsPrinted { "128 Gbps" } else { "128 GB/s" };
        for case in &TABLE_IV[..2] {
            let model = reading.model(case)?;
            let best = model.best_domain_size();
            let points: Vec<(f64, f64)> = SIZES
                .iter()
                .map(|&size| Ok((size as f64, latency(&model, size)?)))
                .collect::<Result<_, Failure>>()?;
            let at = SIZES.iter().position(|&size| size == best).unwrap_or(0);
            let note = format!("best {best}, paper {}", case.reported_domain_size);
            lines.push(Line { label: format!("{}, {unit}", case.name), points, notes: vec![(at, note)] });
        }
    }
    // A linear axis has ticks at the sizes; a logarithmic one would have a single tick, at 1.
    chart::lines(&lines, ["domain size S", "latency, ms"], false)
}
