//! What all ranks measured, made into the numbers that a reader wants. Field names carry their units: the JSON is
//! this structure.

use std::time::Duration;

use ep::Routing;
use serde::Serialize;

use crate::bench::check::Checked;
use crate::bench::measure::{self, Operator, Samples, Spread};
use crate::bench::plan::{Place, Plan, Scenario, WARM_UP};
use crate::bench::run::RankReport;
use crate::ceiling::Ceiling;
use crate::machine::Machine;
use crate::units;

#[derive(Debug, Serialize)]
pub(super) struct Report {
    pub(super) version: &'static str,
    pub(super) verified: bool,
    pub(super) config: Setting,
    pub(super) machine: Machine,
    /// Bytes copied per second by [`Ceiling::measure`].
    pub(super) ceiling_copy_gb_per_s: f64,
    /// Bytes read and written per second: twice the bytes copied.
    pub(super) ceiling_traffic_gb_per_s: f64,
    pub(super) ceiling_threads: usize,
    pub(super) floor_definition: String,
    pub(super) runs: Vec<Run>,
}

/// What was asked for, and what it was resolved to.
#[derive(Debug, Serialize)]
pub(super) struct Setting {
    pub(super) backend: &'static str,
    pub(super) ranks: usize,
    pub(super) domains: usize,
    pub(super) processes: bool,
    pub(super) hidden: usize,
    pub(super) experts: usize,
    pub(super) dtype: &'static str,
    pub(super) pad_multiple: usize,
    pub(super) skew: Option<f64>,
    pub(super) routing: Option<String>,
    pub(super) iterations: usize,
    pub(super) warm_up_iterations: usize,
    pub(super) seed: u64,
    pub(super) workers: usize,
    pub(super) timeout_ms: u64,
}

/// One routing: the drawn one, or a layer of the recorded one.
#[derive(Debug, Serialize)]
pub(super) struct Run {
    pub(super) layer: Option<usize>,
    pub(super) tokens_per_rank: Vec<usize>,
    pub(super) topk: usize,
    pub(super) operators: Vec<OperatorReport>,
    pub(super) preprocess: PreprocessReport,
    pub(super) load: Load,
    pub(super) verified: bool,
    /// What was compared, or the first differences.
    pub(super) verification: String,
}

#[derive(Debug, Serialize)]
pub(super) struct OperatorReport {
    pub(super) operator: &'static str,
    pub(super) median_us: f64,
    pub(super) p95_us: f64,
    /// Of all ranks, per call.
    pub(super) bytes_inside_domains: u64,
    pub(super) bytes_between_domains: u64,
    /// Bytes that must be read once and written once; none is defined for what moves no tokens.
    pub(super) must_move_bytes: Option<u64>,
    /// Those bytes over the median.
    pub(super) gb_per_s: Option<f64>,
    pub(super) floor_us: Option<f64>,
    pub(super) ratio_to_floor: Option<f64>,
}

#[derive(Debug, Serialize)]
pub(super) struct PreprocessReport {
    /// Bytes of counts that a rank received for one routing.
    pub(super) bytes_per_rank: u64,
    /// Of the bytes that one dispatch moves between ranks.
    pub(super) percent_of_dispatch_bytes: Option<f64>,
    /// Of dispatch's median.
    pub(super) percent_of_dispatch_time: Option<f64>,
}

/// How many (token, expert) pairs go where.
#[derive(Debug, Serialize)]
pub(super) struct Load {
    pub(super) tokens_per_rank: Vec<u64>,
    /// With padding: the rows that a rank's output has.
    pub(super) rows_per_rank: Vec<u64>,
    pub(super) rank_max_over_mean: f64,
    pub(super) tokens_per_expert: Vec<u64>,
    pub(super) expert_max_over_mean: f64,
}

impl Report {
    pub(super) fn new(plan: &Plan, scenarios: &[Vec<RankReport>], ceiling: Ceiling) -> Self {
        let runs: Vec<Run> = plan
            .scenarios
            .iter()
            .zip(scenarios)
            .map(|(scenario, ranks)| Run::new(plan, scenario, ranks, ceiling))
            .collect();
        Self {
            version: env!("CARGO_PKG_VERSION"),
            verified: runs.iter().all(|run| run.verified),
            config: Setting::of(plan),
            machine: Machine::here(),
            ceiling_copy_gb_per_s: ceiling.copied / 1e9,
            ceiling_traffic_gb_per_s: ceiling.traffic() / 1e9,
            ceiling_threads: ceiling.cores,
            floor_definition: floor_definition(ceiling),
            runs,
        }
    }
}

fn floor_definition(ceiling: Ceiling) -> String {
    format!(
        "floor = every input token that has an expert, output row (padding, scales and probability included) and \
         output token read or written once, at the read + written {:.1} GB/s of a large memcpy on all {} cores",
        ceiling.traffic() / 1e9,
        ceiling.cores,
    )
}

impl Setting {
    fn of(plan: &Plan) -> Self {
        Self {
            backend: "host",
            ranks: plan.ranks(),
            domains: plan.world.topology.domains(),
            processes: plan.place != Place::Threads,
            hidden: plan.hidden,
            experts: plan.world.experts(),
            dtype: plan.dtype.name(),
            pad_multiple: plan.mode.pad_multiple(),
            skew: plan.scenarios.first().and_then(Scenario::skew),
            routing: plan.routing_file.as_ref().map(|path| path.display().to_string()),
            iterations: plan.iterations,
            warm_up_iterations: WARM_UP,
            seed: plan.seed,
            workers: plan.config.workers,
            timeout_ms: u64::try_from(plan.config.timeout.as_millis()).unwrap_or(u64::MAX),
        }
    }
}

impl Run {
    fn new(plan: &Plan, scenario: &Scenario, ranks: &[RankReport], ceiling: Ceiling) -> Self {
        let routings = scenario.routings();
        let rows_per_rank: Vec<u64> = ranks.iter().map(|rank| rank.rows).collect();
        let must_move = MustMove::of(plan, &routings, rows_per_rank.iter().sum());
        let operators: Vec<OperatorReport> = Operator::ALL
            .map(|operator| {
                OperatorReport::new(operator, ranks, must_move.by(operator), plan.iterations, ceiling)
            })
            .into();
        let (verified, verification) = verification(plan, ranks);
        Self {
            layer: scenario.layer,
            tokens_per_rank: scenario.tokens(),
            topk: scenario.topk,
            preprocess: PreprocessReport::new(ranks, &operators, plan.iterations),
            operators,
            load: Load::of(plan, &routings, rows_per_rank),
            verified,
            verification,
        }
    }
}

impl OperatorReport {
    fn new(
        operator: Operator,
        ranks: &[RankReport],
        must_move: Option<u64>,
        iterations: usize,
        ceiling: Ceiling,
    ) -> Self {
        let samples = || ranks.iter().map(|rank| &rank.samples[operator as usize]);
        let Spread { median, p95 } = Spread::of(measure::slowest(samples()));
        let per_call = |bytes: fn(&Samples) -> u64| samples().map(bytes).sum::<u64>() / iterations as u64;
        let floor = must_move.map(|bytes| ceiling.floor(bytes));
        Self {
            operator: operator.name(),
            median_us: microseconds(median),
            p95_us: microseconds(p95),
            bytes_inside_domains: per_call(|samples| samples.inside_domains),
            bytes_between_domains: per_call(|samples| samples.between_domains),
            must_move_bytes: must_move,
            gb_per_s: must_move.and_then(|bytes| ratio(bytes as f64 / 1e9, median.as_secs_f64())),
            floor_us: floor.map(microseconds),
            ratio_to_floor: floor.and_then(|floor| ratio(median.as_secs_f64(), floor.as_secs_f64())),
        }
    }
}

impl PreprocessReport {
    fn new(ranks: &[RankReport], operators: &[OperatorReport], iterations: usize) -> Self {
        let of =
            |rank: &RankReport| rank.samples[Operator::Preprocess as usize].preprocess / iterations as u64;
        let all: u64 = ranks.iter().map(of).sum();
        let [preprocess, dispatch] =
            [Operator::Preprocess, Operator::Dispatch].map(|o| &operators[o as usize]);
        let dispatch_bytes = dispatch.bytes_inside_domains + dispatch.bytes_between_domains;
        let percent = |part, whole| ratio(part, whole).map(|ratio| 100.0 * ratio);
        Self {
            bytes_per_rank: ranks.iter().map(of).max().unwrap_or_default(),
            percent_of_dispatch_bytes: percent(all as f64, dispatch_bytes as f64),
            percent_of_dispatch_time: percent(preprocess.median_us, dispatch.median_us),
        }
    }
}

/// Bytes that the operators' definition makes them read once and write once, of all ranks together.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
struct MustMove {
    dispatch: u64,
    combine: u64,
}

impl MustMove {
    fn of(plan: &Plan, routings: &[Routing], rows: u64) -> Self {
        let format = plan.format();
        let sent = |routing: &Routing| {
            (0..routing.tokens()).filter(|&token| !routing.experts_of(token).is_empty()).count()
        };
        let sent: usize = routings.iter().map(sent).sum();
        let tokens: usize = routings.iter().map(Routing::tokens).sum();
        let copies: usize = routings.iter().map(Routing::copies).sum();
        let row =
            format.output_row_bytes(plan.hidden) + format.scale_row_bytes(plan.hidden) + size_of::<f32>();
        Self {
            dispatch: (sent * format.input_row_bytes(plan.hidden)) as u64 + rows * row as u64,
            combine: ((copies + tokens) * plan.bf16_row_bytes()) as u64,
        }
    }

    fn by(self, operator: Operator) -> Option<u64> {
        match operator {
            Operator::Route | Operator::Preprocess => None,
            Operator::Dispatch => Some(self.dispatch),
            Operator::Combine => Some(self.combine),
            Operator::Layer => Some(2 * (self.dispatch + self.combine)),
        }
    }
}

impl Load {
    fn of(plan: &Plan, routings: &[Routing], rows_per_rank: Vec<u64>) -> Self {
        let placement = &plan.world.placement;
        let mut tokens_per_expert = vec![0; plan.world.experts()];
        let mut tokens_per_rank = vec![0; plan.ranks()];
        for routing in routings {
            for &expert in (0..routing.tokens()).flat_map(|token| routing.experts_of(token)) {
                tokens_per_expert[expert as usize] += 1;
                tokens_per_rank[placement.owner_at(placement.position_of(expert)).index()] += 1;
            }
        }
        Self {
            rank_max_over_mean: max_over_mean(&tokens_per_rank),
            expert_max_over_mean: max_over_mean(&tokens_per_expert),
            tokens_per_rank,
            rows_per_rank,
            tokens_per_expert,
        }
    }
}

/// How much more than its share the most loaded one has; 1 where there is no load.
fn max_over_mean(loads: &[u64]) -> f64 {
    let sum: u64 = loads.iter().sum();
    let max = loads.iter().copied().max().unwrap_or_default();
    ratio(max as f64 * loads.len() as f64, sum as f64).unwrap_or(1.0)
}

fn verification(plan: &Plan, ranks: &[RankReport]) -> (bool, String) {
    let wrong: Vec<String> = ranks
        .iter()
        .enumerate()
        .filter_map(|(rank, report)| Some(format!("rank {rank}: {}", report.checked.as_ref().err()?)))
        .collect();
    if !wrong.is_empty() {
        return (false, wrong.join("; "));
    }
    let sum = |part: fn(&Checked) -> u64| {
        units::count(ranks.iter().filter_map(|report| report.checked.as_ref().ok()).map(part).sum())
    };
    let row = match plan.format().scales() {
        None => "token and probability",
        Some(_) => "FP8 token, scales and probability",
    };
    let what = format!(
        "all {} dispatched rows ({row}), {} padding rows (zero) and {} combined tokens of {} equal the operators' \
         definition byte by byte",
        sum(|checked| checked.rows),
        sum(|checked| checked.padding_rows),
        sum(|checked| checked.tokens),
        units::counted(ranks.len(), "rank"),
    );
    (true, what)
}

fn microseconds(time: Duration) -> f64 {
    // Whole nanoseconds, so that no digits of rounding are shown.
    time.as_nanos() as f64 / 1e3
}

fn ratio(part: f64, whole: f64) -> Option<f64> {
    (whole > 0.0).then(|| part / whole)
}

#[cfg(test)]
mod tests {
    use clap::Parser as _;

    use super::*;
    use crate::args::{Command, CommandLine};

    fn plan(options: &str) -> Plan {
        let line = format!("hybrid-ep bench {options}");
        let Command::Bench(args) = CommandLine::parse_from(line.split_whitespace()).command else {
            panic!("not a benchmark: {line}")
        };
        Plan::resolve(&args).unwrap()
    }

    #[test]
    fn bytes_that_must_move_are_counted_once() {
        let bytes = |options: &str| {
            let plan = plan(&format!(
                "--ranks 2 --domains 1 --experts 4 --topk 2 --hidden 128 --tokens 10 {options}"
            ));
            MustMove::of(&plan, &plan.scenarios[0].routings(), 48)
        };
        // 20 tokens and 48 rows of 256 bytes; 40 rows of real copies and 20 tokens.
        assert_eq!(bytes(""), MustMove { dispatch: 20 * 256 + 48 * (256 + 4), combine: 60 * 256 });
        assert_eq!(bytes("--dtype fp8").dispatch, 20 * 256 + 48 * (128 + 4 + 4));
        assert_eq!(bytes("").by(Operator::Layer), Some(2 * (17_600 + 15_360)));
    }

    #[test]
    fn a_difference_on_any_rank_is_reported() {
        let rank = |checked| RankReport { samples: Default::default(), rows: 0, checked };
        let right = rank(Ok(Checked { rows: 1000, padding_rows: 5, tokens: 9 }));
        let plan = plan("");
        let (verified, what) = verification(&plan, &[right.clone(), right.clone()]);
        assert!(verified && what.contains("2,000 dispatched rows") && what.contains("18 combined"), "{what}");
        let (verified, what) = verification(&plan, &[right, rank(Err("combine, token 3: ...".into()))]);
        assert_eq!((verified, what.as_str()), (false, "rank 1: combine, token 3: ..."));
    }

    #[test]
    fn load_is_relative_to_the_mean() {
        assert_eq!(max_over_mean(&[1, 2, 3]), 1.5);
        assert_eq!(max_over_mean(&[0, 0]), 1.0);
    }
}
