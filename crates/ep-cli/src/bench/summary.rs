//! The most important figures of several runs in one table.

use crate::bench::heading::tokens;
use crate::bench::measure::Operator;
use crate::bench::runs::{OperatorReport, Run};
use crate::common::table::{or_dash, table};
use crate::common::units::time_us;

/// One column: its header, and the text for a run.
type Column = (&'static str, fn(&Run) -> String);

const MODE: Column = ("mode", |run| run.mode.into());
const SMS: Column = ("SMs", |run| or_dash(run.sms.map(|sms| sms.to_string())));
const TRACE_LAYER: Column = ("trace layer", |run| or_dash(run.layer.map(|layer| layer.to_string())));
const TOKENS: Column = ("tokens", tokens);
const PREPROCESS: Column = ("preprocess", |run| median(run, Operator::Preprocess));
const DISPATCH: [Column; 2] =
    [("dispatch", |run| median(run, Operator::Dispatch)), ("ratio", |run| ratio(run, Operator::Dispatch))];
const BOUNDED: Column = ("non-blocking", |run| median(run, Operator::Bounded));
const COMBINE: [Column; 2] =
    [("combine", |run| median(run, Operator::Combine)), ("ratio", |run| ratio(run, Operator::Combine))];
const LAYER: Column = ("layer", |run| median(run, Operator::Layer));

/// One row per run: medians, and the ratios to the floor.
pub(super) fn render(runs: &[Run]) -> String {
    let on_gpus = runs.iter().any(|run| run.wire.is_some());
    let recorded = runs.iter().any(|run| run.layer.is_some());
    let only = |condition: bool, column| Some(column).filter(|_| condition);
    let columns: Vec<Column> = [Some(MODE), only(on_gpus, SMS), only(recorded, TRACE_LAYER), Some(TOKENS)]
        .into_iter()
        .flatten()
        .chain([PREPROCESS])
        .chain(DISPATCH)
        .chain(only(on_gpus, BOUNDED))
        .chain(COMBINE)
        .chain([LAYER])
        .collect();
    let header: Vec<&str> = columns.iter().map(|(header, _)| *header).collect();
    table(&header, runs.iter().map(|run| columns.iter().map(|(_, text)| text(run)).collect()), 1)
}

fn of(run: &Run, operator: Operator) -> Option<&OperatorReport> {
    run.operators.iter().find(|report| report.operator == operator.name())
}

fn median(run: &Run, operator: Operator) -> String {
    or_dash(of(run, operator).map(|report| time_us(report.median_us)))
}

fn ratio(run: &Run, operator: Operator) -> String {
    or_dash(of(run, operator).and_then(|report| report.ratio_to_floor).map(|ratio| format!("{ratio:.2}")))
}
