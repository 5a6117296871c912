//! Larger clusters that have a plan where memory does not suffice, found by planning.

use ep_plan::PlanError;
use ep_plan::cluster::LevelDescription;
use ep_plan::step::Fit;

use super::planned;
use super::runnable::{is_runnable, stages_that_run};
use crate::common::units;
use crate::planner::problem::Problem;

/// Maximum number of clusters of each kind that are tried.
const TRIES: usize = 16;

/// The remedies for an error about memory, as text: with `--runnable` a number of stages, otherwise or if no number of stages
/// suffices a cluster with more nodes, and GPUs with more memory. `None` for other errors, or if nothing that was tried has a
/// plan that leaves `reserved_memory` free. `unrestricted`: with `--runnable`, the problem before `restrict_to_runtime`.
pub(super) fn remedy(problem: &Problem, unrestricted: Option<&Problem>, error: &PlanError) -> Option<String> {
    let missing = match error {
        PlanError::TotalMemory { needed, available, .. } => needed.0 / available.0,
        PlanError::NoLayout { needed, device, .. } => needed.0 / device.0,
        _ => return None,
    };
    let more = match unrestricted {
        None => more_nodes(problem, missing),
        Some(given) => more_stages(given).or_else(|| more_nodes_and_stages(given, missing)),
    };
    let memory = match unrestricted {
        None => more_memory(problem, missing, has_plan),
        Some(given) => more_memory(given, missing, is_runnable),
    };
    let found: Vec<String> = [more, memory].into_iter().flatten().collect();
    if found.is_empty() {
        return None;
    }
    Some(format!("With {}, there is a plan that leaves `reserved_memory` free.", found.join(", or with ")))
}

fn has_plan(problem: &Problem) -> bool {
    planned(problem).is_some_and(|plan| plan.best().fit == Fit::Fits)
}

fn more_stages(unrestricted: &Problem) -> Option<String> {
    stages_that_run(unrestricted).map(|stages| format!("`--set pipeline_stages={stages}`"))
}

/// As `more_nodes`, with the number of stages that runs. The numbers of nodes are doubled, so that GPUs of a stage can divide
/// the experts.
fn more_nodes_and_stages(unrestricted: &Problem, missing: f64) -> Option<String> {
    const DOUBLINGS: u32 = 4;
    let level = unrestricted.cluster.levels.len().checked_sub(2)?;
    let now = unrestricted.cluster.levels[level].scaling_factor;
    let factors = (1..=DOUBLINGS).map(|doublings| 1usize << doublings);
    factors.filter(|&factor| factor as f64 >= missing).find_map(|factor| {
        let (larger, nodes) = with_nodes(unrestricted, level, now * factor);
        let stages = stages_that_run(&larger)?;
        let stages = match unrestricted.options.pipeline_stages.unwrap_or(1) == stages {
            true => String::new(),
            false => format!(" and `--set pipeline_stages={stages}`"),
        };
        Some(format!("{nodes}{stages}"))
    })
}

/// Sets the number of members of a level. Unequal datacenters keep their proportions.
pub(super) fn grow(level: &mut LevelDescription, members: usize) {
    let now = level.scaling_factor;
    let grown: Vec<usize> = level.site_members.iter().map(|&site| (site * members).div_ceil(now)).collect();
    match grown.is_empty() {
        true => level.scaling_factor = members,
        false => level.set_members(&grown),
    }
}

/// The problem with `members` at a level, and their text.
fn with_nodes(problem: &Problem, level: usize, members: usize) -> (Problem, String) {
    let mut larger = problem.clone();
    grow(&mut larger.cluster.levels[level], members);
    let gpus = units::count(larger.cluster.gpus() as u64);
    let sites = &larger.cluster.levels[level].site_members;
    let each = match (level, sites.is_empty()) {
        (0, _) => format!("{members} nodes"),
        (_, true) => format!("{members} nodes in each datacenter"),
        (_, false) => {
            let numbers: Vec<String> = sites.iter().map(usize::to_string).collect();
            format!("{} nodes in the datacenters", numbers.join(", "))
        }
    };
    (larger, format!("{each} ({gpus} GPUs)"))
}

/// More members of the level above the innermost one: its members are nodes. `missing`: the least factor to try.
fn more_nodes(problem: &Problem, missing: f64) -> Option<String> {
    let level = problem.cluster.levels.len().checked_sub(2)?;
    let now = problem.cluster.levels[level].scaling_factor;
    // The steps grow, so that few tries reach large clusters.
    let mut members = ((now as f64 * missing).ceil() as usize).max(now + 1);
    for _ in 0..TRIES {
        let (larger, nodes) = with_nodes(problem, level, members);
        if has_plan(&larger) {
            return Some(nodes);
        }
        members += (members - now).div_ceil(4).max(1);
    }
    None
}

/// The least memory of a GPU with which there is a plan, to 1 %. `missing`: the least factor to try.
fn more_memory(problem: &Problem, missing: f64, suffices: fn(&Problem) -> bool) -> Option<String> {
    let with = |gigabytes: f64| {
        let mut larger = problem.clone();
        larger.cluster.gpu.memory_gb = gigabytes;
        larger
    };
    let mut low = problem.cluster.gpu.memory_gb;
    let mut high = low * missing.max(1.01);
    let mut tries = 0;
    while !suffices(&with(high)) {
        (low, high) = (high, high * 1.25);
        tries += 1;
        if tries == TRIES {
            return None;
        }
    }
    while high > 1.01 * low {
        let middle = (low * high).sqrt();
        if suffices(&with(middle)) { high = middle } else { low = middle }
    }
    // Rounded up, to whole gigabytes if they are precise enough: more memory than needed does not rule out the plan.
    Some(format!("{} GB in each GPU", if high > 100.0 { high.ceil() } else { (10.0 * high).ceil() / 10.0 }))
}
