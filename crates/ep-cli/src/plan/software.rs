//! The software that can run a layout.

use ep_plan::planner::Options;
use ep_plan::step::StepPrice;

use super::plan_with;
use super::steps::described;
use super::words::relation;
use crate::planner::problem::Problem;

/// The part of this project that can run the layers of a layout. If there are several stages, the program must implement the
/// pipeline.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum Runtime {
    /// `MoELayer` in each EP group: no experts are gathered.
    Layers,
    /// `ExpertMigration`: experts are gathered, and replicas are kept for the whole step.
    Migration,
}

impl Runtime {
    /// `None` if no part of this project can: the layout has tensor parallelism or copies of experts, or it gathers experts in a
    /// way that `ExpertMigration` does not.
    pub(super) fn of(price: &StepPrice, problem: &Problem) -> Option<Self> {
        if price.layout.tensor_parallel > 1 || has_copies(price, problem) {
            return None;
        }
        match price.candidate.expert_domain_size() {
            1 => Some(Self::Layers),
            _ if price.candidate.replicas_kept => Some(Self::Migration),
            _ => None,
        }
    }
}

/// Whether some experts of an EP group are on several of its GPUs.
fn has_copies(price: &StepPrice, problem: &Problem) -> bool {
    price.layout.replicates_experts(problem.model.experts)
}

/// Number of GPUs of a dispatch group, in which the operators run.
pub(super) fn dispatch_ranks(price: &StepPrice) -> usize {
    price.layout.group_gpus() / price.candidate.expert_domain_size().max(1)
}

/// A plan that a part of this project can run, in place of one that none can.
#[derive(Debug, Clone, PartialEq)]
pub(super) struct Instead {
    /// The options that ask for it.
    options: String,
    price: StepPrice,
}

impl Instead {
    /// The plan without the copies or the gathers that keep `best` from being run. `None` if these are not the reason, or if there
    /// is no such plan.
    pub(super) fn of(best: &StepPrice, problem: &Problem) -> Option<Self> {
        if Runtime::of(best, problem).is_some() {
            return None;
        }
        let planned = |change: &dyn Fn(&mut Options)| Some(plan_with(problem, change)?.best().clone());
        if has_copies(best, problem) {
            let experts = problem.model.experts;
            let mut sizes = (1..best.layout.group_gpus()).rev().filter(|&gpus| experts.is_multiple_of(gpus));
            return sizes.find_map(|gpus| {
                let price = planned(&|options| options.expert_parallel = Some(gpus))?;
                Some(Self { options: format!("--set expert_parallel={gpus}"), price })
            });
        }
        if best.candidate.expert_domain_size() > 1 {
            let price = planned(&|options| options.memory_cap_gb = Some(0.0))?;
            return Some(Self { options: "--set memory_cap=0GB".into(), price });
        }
        None
    }

    /// A sentence about the plan, which has none of these things.
    fn without(&self, what: &str, best: &StepPrice) -> String {
        let tight = if self.price.fit > best.fit { " (tight on memory)" } else { "" };
        format!(
            " With `{}` the plan {what}: {}, {} a step, {}{tight}.",
            self.options,
            described(&self.price),
            self.price.step_time,
            relation(best.step_time / self.price.step_time)
        )
    }
}

/// What runs the plan that the report recommends, one sentence per line. `instead`: a plan that can be run, if this one cannot.
pub(super) fn lines(best: &StepPrice, problem: &Problem, instead: Option<&Instead>) -> Vec<String> {
    let mut lines: Vec<String> = between_machines(best, problem).into_iter().collect();
    let among = dispatch_ranks(best);
    if among > ep_cuda::MAX_RANKS {
        lines.push(format!(
            "hybrid-ep itself cannot run this layout: tokens move among {among} GPUs, and its GPU operators support at most \
             {}. `--set expert_parallel=N` plans for groups of N.",
            ep_cuda::MAX_RANKS
        ));
        return lines;
    }
    if has_copies(best, problem) {
        let (gpus, experts) = (best.layout.group_gpus(), problem.model.experts);
        lines.push(format!(
            "hybrid-ep itself cannot run this layout: the {gpus} GPUs of an EP group do not divide the {experts} experts, so some \
             experts have copies.{}",
            instead.map_or(String::new(), |instead| instead.without("has no copies", best))
        ));
        return lines;
    }
    match Runtime::of(best, problem) {
        Some(Runtime::Layers) => lines.push(layers(best)),
        Some(Runtime::Migration) => lines.extend(migration(best)),
        None => lines.push(
            "`ExpertMigration` cannot run this layout. A training program with its own pipeline, data or tensor parallelism \
             can, and calls hybrid-ep inside each EP group. `--runnable` plans what `ExpertMigration` can run."
                .into(),
        ),
    }
    match best.candidate.expert_domain_size() {
        1 => {}
        gathers if Runtime::of(best, problem).is_none() => lines.push(format!(
            "This plan also gathers experts among {gathers} GPUs of an EP group. hybrid-ep does that in `ExpertMigration` only, \
             so the program must do it itself.{}",
            instead.map_or(String::new(), |instead| instead.without("gathers none", best))
        )),
        _ => lines.extend(gathers_inside(best, problem)),
    }
    lines
}

/// How a program runs a layout with several stages or EP groups by `ExpertMigration`.
fn migration(price: &StepPrice) -> Option<String> {
    let what = match (price.layout.stages() > 1, price.layout.groups_per_stage() > 1) {
        (false, false) => return None,
        (true, false) => {
            "can run the layers of each stage: the training program brings the pipeline, and `--groups` writes the groups \
                          (docs/migration.md#in-a-pipeline)"
        }
        (false, true) => {
            "can run this layout, with the process group of a rank's EP group as `ep_group`: `--groups` writes the groups \
                          (docs/migration.md#several-ep-groups)"
        }
        (true, true) => {
            "can run the layers of each stage, with the process group of a rank's EP group as `ep_group`: the training program \
                         brings the pipeline, and `--groups` writes the groups (docs/migration.md#in-a-pipeline)"
        }
    };
    Some(format!("`ExpertMigration` {what}."))
}

/// How a program runs a layout that gathers no experts.
fn layers(price: &StepPrice) -> String {
    let (stages, groups) = (price.layout.stages(), price.layout.groups_per_stage());
    let program = if stages > 1 { "a training program with a pipeline" } else { "a training program" };
    let each = match (stages > 1, groups > 1) {
        (true, false) => " in the EP group of each stage",
        (_, true) => " in each EP group",
        (false, false) => "",
    };
    let reduces = match (stages > 1, groups > 1) {
        (true, true) => {
            " `reduce_gradients` takes all ranks of a stage as `group` and those with the same experts as `expert_group`."
        }
        (true, false) => " `reduce_gradients` takes the EP group as `group`.",
        (false, true) => " `reduce_gradients` takes the ranks with the same experts as `expert_group`.",
        (false, false) => "",
    };
    format!(
        "This layout gathers no experts: {program} can run it with `MoELayer`{each}. `--groups` lists the groups{}.{reduces}",
        if stages > 1 { " of all stages" } else { "" }
    )
}

/// The levels over which the tokens of an EP group travel, other than the innermost one.
fn between_machines(price: &StepPrice, problem: &Problem) -> Option<String> {
    // Over a level that a domain spans completely, experts travel instead of tokens.
    let domains = &price.candidate.domain_sizes;
    let crossed =
        price.layout.group_levels().filter(|&level| domains.get(level) < price.layout.group.get(level));
    let names: Vec<&str> =
        crossed.filter_map(|level| problem.cluster.levels.get(level)).map(|level| &*level.name).collect();
    (!names.is_empty()).then(|| {
        format!(
            "Inside an EP group, tokens cross {} {}. Between machines hybrid-ep sends over libfabric, which was run over TCP only, \
             never on a network card.",
            if names.len() == 1 { "level" } else { "levels" },
            names.join(" and ")
        )
    })
}

/// That experts which are gathered inside a datacenter travel faster in the plan than in the runtime.
fn gathers_inside(price: &StepPrice, problem: &Problem) -> Option<String> {
    let gathers = |level: &usize| price.candidate.domain_sizes.get(*level).is_some_and(|&size| size > 1);
    let levels: Vec<usize> = (1..problem.cluster.levels.len()).filter(gathers).collect();
    let names: Vec<&str> = levels.iter().map(|&level| &*problem.cluster.levels[level].name).collect();
    (!names.is_empty()).then(|| {
        format!(
            "The plan gathers experts over {} at the bandwidth of {}. `ExpertMigration` sends them by its carrier, by default gloo over TCP, so they take \
             longer there.",
            names.join(" and "),
            if names.len() == 1 { "this level" } else { "these levels" }
        )
    })
}
