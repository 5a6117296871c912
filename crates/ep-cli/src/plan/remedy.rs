//! Larger clusters that have a plan where memory does not suffice, found by planning.

use ep_plan::PlanError;
use ep_plan::step::{Fit, Strategy};

use super::planned;
use super::software::dispatch_ranks;
use crate::common::units;
use crate::planner::problem::Problem;

/// Maximum number of clusters of each kind that are tried.
const TRIES: usize = 16;

/// The remedies for an error about memory, as text: a cluster with more nodes, and GPUs with more memory. `None` for other
/// errors, or if no cluster that was tried has a plan that leaves `reserved_memory` free. `runnable`: the plan must suit
/// `--runnable`.
pub(super) fn remedy(problem: &Problem, error: &PlanError, runnable: bool) -> Option<String> {
    let missing = match error {
        PlanError::TotalMemory { needed, available, .. } => needed.0 / available.0,
        PlanError::NoLayout { needed, device, .. } => needed.0 / device.0,
        _ => return None,
    };
    let found: Vec<String> =
        [more_nodes(problem, missing, runnable), more_memory(problem, missing, runnable)]
            .into_iter()
            .flatten()
            .collect();
    if found.is_empty() {
        return None;
    }
    Some(format!("With {}, there is a plan that leaves `reserved_memory` free.", found.join(", or with ")))
}

fn has_plan(problem: &Problem, runnable: bool) -> bool {
    let Some(plan) = planned(problem) else { return false };
    let price = if runnable { plan.price(Strategy::ExpertDomains) } else { Some(plan.best()) };
    price.is_some_and(|price| {
        price.fit == Fit::Fits && (!runnable || dispatch_ranks(price) <= ep_cuda::MAX_RANKS)
    })
}

/// More members of the level above the innermost one: its members are nodes. `missing`: the least factor to try.
fn more_nodes(problem: &Problem, missing: f64, runnable: bool) -> Option<String> {
    let level = problem.cluster.levels.len().checked_sub(2)?;
    let now = problem.cluster.levels[level].scaling_factor;
    let first = ((now as f64 * missing).ceil() as usize).max(now + 1);
    // The steps grow, so that few tries reach large clusters.
    let mut members = first;
    for _ in 0..TRIES {
        let mut larger = problem.clone();
        let nodes = &mut larger.cluster.levels[level];
        let grown: Vec<usize> =
            nodes.site_members.iter().map(|&site| (site * members).div_ceil(now)).collect();
        match grown.is_empty() {
            true => nodes.scaling_factor = members,
            false => nodes.set_members(&grown),
        }
        if has_plan(&larger, runnable) {
            let gpus = units::count(larger.cluster.gpus() as u64);
            let each = match (level, grown.is_empty()) {
                (0, _) => format!("{members} nodes"),
                (_, true) => format!("{members} nodes in each datacenter"),
                (_, false) => {
                    let numbers: Vec<String> = grown.iter().map(usize::to_string).collect();
                    format!("{} nodes in the datacenters", numbers.join(", "))
                }
            };
            return Some(format!("{each} ({gpus} GPUs)"));
        }
        members += (members - now).div_ceil(4).max(1);
    }
    None
}

/// The least memory of a GPU with which there is a plan, to 1 %. `missing`: the least factor to try.
fn more_memory(problem: &Problem, missing: f64, runnable: bool) -> Option<String> {
    let with = |gigabytes: f64| {
        let mut larger = problem.clone();
        larger.cluster.gpu.memory_gb = gigabytes;
        larger
    };
    let mut low = problem.cluster.gpu.memory_gb;
    let mut high = low * missing.max(1.01);
    let mut tries = 0;
    while !has_plan(&with(high), runnable) {
        (low, high) = (high, high * 1.25);
        tries += 1;
        if tries == TRIES {
            return None;
        }
    }
    while high > 1.01 * low {
        let middle = (low * high).sqrt();
        if has_plan(&with(middle), runnable) { high = middle } else { low = middle }
    }
    // Rounded up, to whole gigabytes if they are precise enough: more memory than needed does not rule out the plan.
    Some(format!("{} GB in each GPU", if high > 100.0 { high.ceil() } else { (10.0 * high).ceil() / 10.0 }))
}
