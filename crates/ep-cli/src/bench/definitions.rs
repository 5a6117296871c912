//! What the figures mean, in words.

use crate::backend::Chosen;
use crate::bench::plan::Plan;
use crate::bench::run::ROUNDS;
use crate::ceiling::{Ceiling, Wire};

/// For figures of ranks that have no GPU of their own.
pub(super) const SHARED: &str = "several ranks share a GPU: they share its SMs and its memory, and the figures are no measurement of a wire";

/// What a time is.
pub(super) fn time(plan: &Plan) -> String {
    match plan.backend {
        Chosen::Host => {
            "time = from when all ranks have come to the end of all that the call set off; the slowest rank's"
                .into()
        }
        Chosen::Cuda => format!(
            "time = between GPU events around the call, from a moment at which all GPUs start; the slowest rank's; \
             non-blocking = preprocess with a capacity of 1.5 times the rows, and dispatch, for which the host does \
             not wait; layer = preprocess, dispatch, combine, dispatch, combine: the mean of {} in a row, {ROUNDS} \
             times",
            plan.iterations
        ),
    }
}

/// What a floor is, or why there is none.
pub(super) fn floor(ceiling: Ceiling) -> String {
    let at = |gb_per_s: f64, origin: &str| {
        format!(
            "floor = what the busiest rank must receive from other ranks, or send to them if that is more: each \
             token once for every other rank with an expert of it (in dispatch with its scales, in combine a bf16 \
             sum), at {gb_per_s} GB/s{origin}"
        )
    };
    match ceiling {
        Ceiling::Memory(memcpy) => format!(
            "floor = every input token that has an expert, output row (padding, scales and probability included) and \
             output token read or written once, at the read + written {:.1} GB/s of a large memcpy on all {} cores",
            memcpy.traffic() / 1e9,
            memcpy.cores,
        ),
        Ceiling::Wire(Wire::Measured(gb_per_s)) => at(
            gb_per_s,
            ", which leave each H100 or H200 with 18 NVLinks when all push rows to all others by bulk copies",
        ),
        Ceiling::Wire(Wire::Given(gb_per_s)) => at(gb_per_s, " (--wire)"),
        Ceiling::Wire(Wire::Unknown) => {
            "no floor: the bandwidth between these GPUs has not been measured; with \
                                         --wire GB/s there is one"
                .into()
        }
        Ceiling::Wire(Wire::Shared) => "no floor: what goes between ranks of one GPU crosses no wire".into(),
    }
}
