//! Definitions of the reported times and floors, in words.

use ep::TransportOptions;

use crate::bench::ceiling::{Ceiling, Wire};
use crate::bench::gpu::Sharing;
use crate::bench::plan::BenchPlan;
use crate::bench::run::ROUNDS;
use crate::common::backend::BackendKind;
use crate::common::units;

/// Note for runs in which several ranks use one GPU.
pub(super) fn sharing(sharing: Sharing) -> Option<&'static str> {
    match sharing {
        Sharing::None => None,
        Sharing::BetweenDomains => {
            Some("ranks of different domains share a GPU, its SMs, its memory and its NVLinks")
        }
        Sharing::InsideDomains => Some(
            "several ranks share a GPU, its SMs and its memory: the times do not measure a link between GPUs",
        ),
    }
}

/// Note for domains on one machine: the engine copies bytes from memory to memory, not over a network.
pub(super) fn one_machine(plan: &BenchPlan) -> Option<String> {
    let transport = &plan.config.host.transport;
    (plan.world.topology().domains() > 1 && transport.maps_windows()).then(|| {
        format!(
            "the engine between domains ({}) copies inside this machine; no network card is involved",
            transport.engine
        )
    })
}

/// Defines the stream of an operator over this engine. `inside`: the name of the leg inside domains.
pub(super) fn stream(transport: &TransportOptions, inside: &str) -> String {
    let what = match transport.maps_windows() {
        true => format!(
            "the time in which the emulated link ({}) takes in the bytes that a rank sends to other domains, plus its \
             latency, on the slowest rank",
            transport.engine
        ),
        false => {
            "the time in which plain TCP streams between the ranks of each rail carry the operator's bytes \
                  between domains in both directions, on the slowest rank"
                .into()
        }
    };
    format!("stream = {what}; leg = the leg with the longer floor: {inside} (floor) or network (stream)")
}

/// How a time is measured.
pub(super) fn time(plan: &BenchPlan) -> String {
    match plan.backend {
        BackendKind::Host => {
            "time = from the moment all ranks are ready until the work of the call is complete, on the slowest rank"
                .into()
        }
        BackendKind::Cuda => format!(
            "time = between GPU events around the call, on the slowest rank; all GPUs start at the same moment; \
             non-blocking = preprocess with a capacity of 1.5 times the rows, then dispatch, without a wait of the \
             host; layer = preprocess, dispatch, combine, dispatch, combine: the mean of {} layers in a row, \
             measured {ROUNDS} times",
            plan.iterations
        ),
    }
}

/// How the floor is computed, or why there is none. `ceilings` has each ceiling once; only for memory can it have several.
pub(super) fn floor(ceilings: &[Ceiling]) -> String {
    let at = |gb_per_s: f64, origin: &str| {
        format!(
            "floor = the bytes that the busiest GPU must receive from other GPUs, or send to them if that is more \
             (each token once per other rank of a domain that has an expert of it: in dispatch with its scales, in \
             combine one bf16 sum), at {gb_per_s} GB/s{origin}"
        )
    };
    match ceilings[0] {
        Ceiling::Memory(memory) => format!(
            "floor = the time to read or write once every input token that has an expert, every output row (padding, \
             scales and probabilities included) and every output token, at the best rates that all {} cores reached before \
             or after the run: {}",
            memory.cores,
            ceilings.iter().filter_map(rates).collect::<Vec<_>>().join("; "),
        ),
        Ceiling::Wire(Wire::Measured(gb_per_s)) => at(
            gb_per_s,
            ", the measured rate at which an H100 or H200 with 18 NVLinks pushes rows to all others by bulk copies",
        ),
        Ceiling::Wire(Wire::Given(gb_per_s)) => at(gb_per_s, " (--wire)"),
        Ceiling::Wire(Wire::Unknown) => {
            "no floor: the bandwidth between these GPUs has not been measured; set it with --wire GB/s".into()
        }
        Ceiling::Wire(Wire::Shared) => {
            "no floor: several ranks of a domain share a GPU, so bytes between them cross no link".into()
        }
    }
}

/// The rates of memory, and the size that they were measured on.
fn rates(ceiling: &Ceiling) -> Option<String> {
    let Ceiling::Memory(memory) = ceiling else { return None };
    Some(format!(
        "on {} {:.1} GB/s read + written by copying ({}), {:.1} GB/s by reading alone, {:.1} GB/s by writing alone",
        units::bytes(memory.size as u64),
        memory.traffic() / 1e9,
        memory.copied_by.name(),
        memory.read / 1e9,
        memory.written / 1e9,
    ))
}
