//! The results of one run: the measurements of all ranks in one scenario, combined. `--json` writes these structures.

use std::fmt::Write as _;
use std::time::Duration;

use ep::{DispatchMode, Routing};
use serde::Serialize;

use crate::bench::ceiling::{Ceiling, CeilingReport};
use crate::bench::check::CheckedCounts;
use crate::bench::floor::{Crossing, MustMove, WireReport};
use crate::bench::measure::{self, Operator, Samples, Spread};
use crate::bench::plan::BenchPlan;
use crate::bench::run::RankReport;
use crate::bench::scenario::{Scenario, mode_name};
use crate::common::backend::BackendKind;
use crate::common::memory::Moved;
use crate::common::units;

/// The results of one scenario.
#[derive(Debug, Serialize)]
pub(super) struct Run {
    pub(super) mode: &'static str,
    /// SMs of each GPU that dispatch and combine used; `None` on the host backend.
    pub(super) sms: Option<usize>,
    /// The layer of the recorded routing.
    pub(super) layer: Option<usize>,
    pub(super) tokens_per_rank: Vec<usize>,
    pub(super) topk: usize,
    #[serde(flatten)]
    pub(super) ceiling: CeilingReport,
    pub(super) operators: Vec<OperatorReport>,
    pub(super) preprocess: PreprocessReport,
    /// `None` on the host backend.
    pub(super) wire: Option<WireReport>,
    pub(super) load: Load,
    pub(super) verified: bool,
    /// Counts of what was compared, or the first difference of each rank.
    pub(super) verification: String,
}

#[derive(Debug, Serialize)]
pub(super) struct OperatorReport {
    pub(super) operator: &'static str,
    pub(super) median_us: f64,
    pub(super) p95_us: f64,
    /// Bytes of all ranks per call; `None` for the non-blocking call, which does not learn the number of rows.
    pub(super) bytes_inside_domains: Option<u64>,
    pub(super) bytes_between_domains: u64,
    /// Bytes of the floor, as in `floor_definition`; `None` for calls that move no tokens.
    pub(super) must_move_bytes: Option<u64>,
    /// `must_move_bytes` over the median time.
    pub(super) gb_per_s: Option<f64>,
    pub(super) floor_us: Option<f64>,
    pub(super) ratio_to_floor: Option<f64>,
    /// The time of the bytes between domains alone, as in `stream_definition`.
    pub(super) stream_us: Option<f64>,
    pub(super) ratio_to_stream: Option<f64>,
    /// The leg with the longer floor: `network`, or the leg inside domains, which is `memory` on CPUs and `NVLink` on
    /// GPUs. `None` without a stream.
    pub(super) binding_leg: Option<&'static str>,
}

#[derive(Debug, Serialize)]
pub(super) struct PreprocessReport {
    /// Bytes of counts that a rank received for one routing; the most of all ranks.
    pub(super) bytes_per_rank: u64,
    /// The counts of all ranks as a percentage of the bytes that one dispatch moves between ranks.
    pub(super) percent_of_dispatch_bytes: Option<f64>,
    /// The median time of preprocess as a percentage of that of dispatch.
    pub(super) percent_of_dispatch_time: Option<f64>,
}

/// The copies, which are (token, expert) pairs, by destination.
#[derive(Debug, Serialize)]
pub(super) struct Load {
    pub(super) tokens_per_rank: Vec<u64>,
    /// Rows of each rank's output, padding included.
    pub(super) rows_per_rank: Vec<u64>,
    pub(super) rank_max_over_mean: f64,
    pub(super) tokens_per_expert: Vec<u64>,
    pub(super) expert_max_over_mean: f64,
}

impl Run {
    pub(super) fn new(plan: &BenchPlan, scenario: &Scenario, ranks: &[RankReport], ceiling: Ceiling) -> Self {
        let routings = scenario.source.routings();
        let rows_per_rank: Vec<u64> = ranks.iter().map(|rank| rank.rows).collect();
        let crossing = (plan.backend == BackendKind::Cuda).then(|| Crossing::of(&plan.world, &routings));
        let must_move = match &crossing {
            Some(crossing) => {
                // A rank that reports no GPU counts as the only rank on its GPU.
                let gpu = |(rank, report): (usize, &RankReport)| match &report.gpu {
                    Some(gpu) => gpu.pci_bus_id.clone(),
                    None => format!("rank {rank}"),
                };
                let gpus: Vec<String> = ranks.iter().enumerate().map(gpu).collect();
                MustMove::over_the_wire(plan, crossing, &gpus)
            }
            None => MustMove::through_memory(plan, scenario, &routings, rows_per_rank.iter().sum()),
        };
        let operators: Vec<OperatorReport> = Operator::all(plan.backend)
            .iter()
            .map(|&operator| {
                OperatorReport::new(operator, ranks, must_move.by(operator), ceiling, inside(plan.backend))
            })
            .collect();
        let (verified, verification) = verification(plan, scenario.mode, ranks);
        let sms = ranks.iter().filter_map(|rank| Some(rank.gpu.as_ref()?.sms as usize)).max();
        Self {
            mode: mode_name(scenario.mode),
            sms: sms.or(scenario.sms),
            layer: scenario.source.layer,
            tokens_per_rank: scenario.source.tokens(),
            topk: scenario.source.topk,
            ceiling: CeilingReport::of(ceiling),
            preprocess: PreprocessReport::new(ranks, &operators),
            wire: crossing.map(|crossing| WireReport::new(plan, &crossing)),
            operators,
            load: Load::of(plan, &routings, rows_per_rank),
            verified,
            verification,
        }
    }
}

impl Run {
    pub(super) fn is_plain(&self) -> bool {
        self.mode == mode_name(DispatchMode::Plain)
    }
}

impl OperatorReport {
    /// `inside`: the name of the leg inside domains.
    fn new(
        operator: Operator,
        ranks: &[RankReport],
        parts: Option<Vec<Moved>>,
        ceiling: Ceiling,
        inside: &'static str,
    ) -> Self {
        let samples = || ranks.iter().filter_map(|rank| rank.samples.get(&operator));
        let Spread { median, p95 } = Spread::of(measure::slowest(samples().map(|samples| &samples.times)));
        let streams = ranks.iter().filter_map(|rank| rank.streams.as_ref()?.get(&operator));
        let stream = Some(Spread::of(measure::slowest(streams)).median).filter(|time| !time.is_zero());
        let per_call =
            |bytes: fn(&Samples) -> u64| samples().map(|samples| samples.per_call(bytes(samples))).sum();
        let floor = parts.as_deref().and_then(|parts| ceiling.floor(parts));
        let must_move = parts.map(|parts| parts.into_iter().map(Moved::bytes).sum::<u64>());
        Self {
            operator: operator.name(),
            median_us: microseconds(median),
            p95_us: microseconds(p95),
            bytes_inside_domains: (operator != Operator::Bounded)
                .then(|| per_call(|samples| samples.inside_domains)),
            bytes_between_domains: per_call(|samples| samples.between_domains),
            must_move_bytes: must_move,
            gb_per_s: must_move.and_then(|bytes| ratio(bytes as f64 / 1e9, median.as_secs_f64())),
            floor_us: floor.map(microseconds),
            ratio_to_floor: floor.and_then(|floor| ratio(median.as_secs_f64(), floor.as_secs_f64())),
            stream_us: stream.map(microseconds),
            ratio_to_stream: stream.and_then(|stream| ratio(median.as_secs_f64(), stream.as_secs_f64())),
            binding_leg: stream
                .map(|stream| if floor.is_some_and(|floor| floor > stream) { inside } else { "network" }),
        }
    }
}

impl PreprocessReport {
    fn new(ranks: &[RankReport], operators: &[OperatorReport]) -> Self {
        let samples = ranks.iter().filter_map(|rank| rank.samples.get(&Operator::Preprocess));
        let bytes: Vec<u64> = samples.map(|samples| samples.per_call(samples.preprocess)).collect();
        let find = |operator: Operator| operators.iter().find(|report| report.operator == operator.name());
        let percent = |part: f64, whole: f64| ratio(part, whole).map(|ratio| 100.0 * ratio);
        let dispatch = find(Operator::Dispatch);
        let dispatch_bytes = dispatch
            .and_then(|dispatch| Some(dispatch.bytes_inside_domains? + dispatch.bytes_between_domains));
        let median = |operator: Operator| find(operator).map_or(0.0, |report| report.median_us);
        Self {
            bytes_per_rank: bytes.iter().copied().max().unwrap_or_default(),
            percent_of_dispatch_bytes: dispatch_bytes
                .and_then(|all| percent(bytes.iter().sum::<u64>() as f64, all as f64)),
            percent_of_dispatch_time: percent(median(Operator::Preprocess), median(Operator::Dispatch)),
        }
    }
}

impl Load {
    fn of(plan: &BenchPlan, routings: &[Routing], rows_per_rank: Vec<u64>) -> Self {
        let placement = plan.world.placement();
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

/// The name of the leg inside domains.
pub(super) fn inside(backend: BackendKind) -> &'static str {
    match backend {
        BackendKind::Host => "memory",
        BackendKind::Cuda => "NVLink",
    }
}

/// The largest load over the mean load; 1 where there is no load.
fn max_over_mean(loads: &[u64]) -> f64 {
    let sum: u64 = loads.iter().sum();
    let max = loads.iter().copied().max().unwrap_or_default();
    ratio(max as f64 * loads.len() as f64, sum as f64).unwrap_or(1.0)
}

fn verification(plan: &BenchPlan, mode: DispatchMode, ranks: &[RankReport]) -> (bool, String) {
    let wrong: Vec<String> = ranks
        .iter()
        .enumerate()
        .filter_map(|(rank, report)| Some(format!("rank {rank}: {}", report.checked.as_ref().err()?)))
        .collect();
    if !wrong.is_empty() {
        return (false, wrong.join("; "));
    }
    let sum = |part: fn(&CheckedCounts) -> u64| {
        units::count(ranks.iter().filter_map(|report| report.checked.as_ref().ok()).map(part).sum())
    };
    let data = match plan.format().scales() {
        None => "token",
        Some(_) => "FP8 token, scales",
    };
    let (probs, padding) = match mode {
        DispatchMode::Plain => ("a probability per local expert", String::new()),
        DispatchMode::Permuted { .. } => {
            ("probability", format!(", {} padding rows (zero)", sum(|checked| checked.padding_rows)))
        }
    };
    let mut what = format!(
        "all {} dispatched rows ({data} and {probs}){padding} and {} combined tokens of {} equal the operators' \
         definition byte by byte",
        sum(|checked| checked.rows),
        sum(|checked| checked.tokens),
        units::counted(ranks.len(), "rank"),
    );
    if Operator::all(plan.backend).contains(&Operator::Bounded) {
        // Writing to a string cannot fail.
        let _ = write!(
            what,
            "; so do the {} rows of a non-blocking dispatch, and the probabilities of {} combined tokens",
            sum(|checked| checked.bounded_rows),
            sum(|checked| checked.probs),
        );
    }
    (true, what)
}

fn microseconds(time: Duration) -> f64 {
    // Divide whole nanoseconds, because dividing seconds would add digits of rounding errors.
    time.as_nanos() as f64 / 1e3
}

fn ratio(part: f64, whole: f64) -> Option<f64> {
    (whole > 0.0).then(|| part / whole)
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::bench::plan::tests::plan;

    #[test]
    fn a_difference_on_any_rank_fails_the_verification() {
        let rank = |checked| RankReport {
            samples: Default::default(),
            rows: 0,
            gpu: None,
            process: None,
            streams: None,
            checked,
        };
        let right =
            rank(Ok(CheckedCounts { rows: 1000, padding_rows: 5, tokens: 9, ..CheckedCounts::default() }));
        let plan = plan("");
        let [plain, permuted] = [DispatchMode::Plain, plan.scenarios[0].mode];
        let (verified, what) = verification(&plan, plain, &[right.clone(), right.clone()]);
        assert!(
            verified && what.contains("rows (token and a probability per local expert) and 18"),
            "{what}"
        );
        let (verified, what) = verification(&plan, permuted, &[right.clone(), right.clone()]);
        assert!(verified && what.contains("10 padding rows (zero) and 18"), "{what}");
        assert!(verified && what.contains("2,000 dispatched rows") && what.contains("18 combined"), "{what}");
        let (verified, what) =
            verification(&plan, permuted, &[right, rank(Err("combine, token 3: ...".into()))]);
        assert_eq!((verified, what.as_str()), (false, "rank 1: combine, token 3: ..."));
    }

    #[test]
    fn load_is_relative_to_the_mean() {
        assert_eq!(max_over_mean(&[1, 2, 3]), 1.5);
        assert_eq!(max_over_mean(&[0, 0]), 1.0);
    }
}
