//! Names of schemes, and comparisons of two times, in words.

use ep_plan::planner::BaselineKind;

/// The name of a scheme that needs no planner.
pub(super) fn baseline_name(kind: BaselineKind) -> &'static str {
    match kind {
        BaselineKind::PlainEp => "plain EP",
        BaselineKind::HierarchicalEp => "hierarchical EP, deduplicated",
        BaselineKind::EpInsideDatacenter => "EP inside a datacenter, sharded data parallelism across",
    }
}

/// Compares a scheme with one that takes `ratio` times as long: "1.14x faster", "2.00x slower".
pub(super) fn relation(ratio: f64) -> String {
    match times(ratio) {
        equal if equal == times(1.0) => "as fast (1.00x)".to_owned(),
        faster if ratio > 1.0 => format!("{faster} faster"),
        _ => format!("{} slower", times(1.0 / ratio)),
    }
}

/// A ratio with three significant digits; a ratio of 1000 or more as a whole number.
pub(super) fn times(ratio: f64) -> String {
    let decimals = match ratio.abs() {
        large if large >= 99.95 => 0,
        middle if middle >= 9.995 => 1,
        _ => 2,
    };
    format!("{ratio:.decimals$}x")
}
