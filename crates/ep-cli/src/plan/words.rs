//! Names of schemes, and how the times of two compare, in words.

use ep_plan::planner::BaselineKind;

/// The name of a scheme that needs no planner.
pub(super) fn baseline_name(kind: BaselineKind) -> &'static str {
    match kind {
        BaselineKind::PlainEp => "plain EP",
        BaselineKind::HierarchicalEp => "hierarchical EP, deduplicated",
        BaselineKind::EpInsideDatacenter => "EP inside a datacenter, sharded data parallelism across",
    }
}

/// What a scheme is compared with one that takes `ratio` times as long: "1.14x faster", "2.00x slower".
pub(super) fn relation(ratio: f64) -> String {
    match times(ratio) {
        equal if equal == times(1.0) => "as fast (1.00x)".to_owned(),
        faster if ratio > 1.0 => format!("{faster} faster"),
        _ => format!("{} slower", times(1.0 / ratio)),
    }
}

/// A ratio with three digits, or with all its digits from a thousand on.
pub(super) fn times(ratio: f64) -> String {
    let decimals = match ratio.abs() {
        large if large >= 99.95 => 0,
        middle if middle >= 9.995 => 1,
        _ => 2,
    };
    format!("{ratio:.decimals$}x")
}
