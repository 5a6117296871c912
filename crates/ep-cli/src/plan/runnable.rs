//! What `--runnable` fixes, and the alternatives if a problem has no runnable plan.

use ep_plan::cluster::Cluster;
use ep_plan::planner::Replicas;
use ep_plan::step::{Fit, StepPlan, StepPrice, Strategy};

use super::planned;
use super::software::dispatch_ranks;
use crate::common::failure::Failure;
use crate::common::units;
use crate::planner::problem::Problem;

/// Fixes what `ExpertDomains.from_file` of the training runtime demands of a plan: no tensor parallelism, and no copies of experts in
/// an EP group. The number of stages is that of the problem, by default one, and so are the GPUs of an EP group, by default all of a
/// stage.
pub(super) fn restrict_to_runtime(problem: &mut Problem) -> Result<(), Failure> {
    let (gpus, experts) = (problem.cluster.gpus(), problem.model.experts);
    let stages = problem.options.pipeline_stages.unwrap_or(1).max(1);
    // If the number of stages does not divide the GPUs, the planner's error lists the possible numbers.
    let of_stage = if gpus.is_multiple_of(stages) { gpus / stages } else { 1 };
    let group = problem.options.expert_parallel.unwrap_or(of_stage);
    let parts = parts(problem)?;
    if !experts.is_multiple_of(parts.count) {
        return Err(Failure::request(indivisible(problem, &parts, stages)));
    }
    if group != of_stage && !experts.is_multiple_of(group.max(1)) {
        let divides = |gpus: &usize| experts.is_multiple_of(*gpus) && of_stage.is_multiple_of(*gpus);
        let common = (1..=of_stage).rev().find(divides).unwrap_or(1);
        return Err(Failure::request(format!(
            "--runnable: expert_parallel is {group}, and must divide the {experts} experts; possible: {}",
            divisors_up_to(common, common)
        )));
    }
    if !experts.is_multiple_of(group.max(1)) {
        let (of_a_stage, has) = match stages {
            1 => ("", format!("{gpus} GPUs")),
            _ => (" in each stage", format!("{gpus} GPUs in {stages} stages of {group}")),
        };
        let subgroup = group_that_runs(problem, of_stage).map_or(String::new(), |gpus| {
            let groups = units::counted(of_stage / gpus, "EP group");
            let each = if stages == 1 { "" } else { " in each stage" };
            format!("`--set expert_parallel={gpus}` ({groups}{each}), ")
        });
        let more = stages_that_run(problem).map_or(String::new(), |stages| {
            format!(
                "`--set pipeline_stages={stages}` in a program with a pipeline, or other numbers of GPUs: "
            )
        });
        return Err(Failure::request(format!(
            "--runnable: the number of GPUs{of_a_stage} must divide the {experts} experts, and the cluster has {has}; \
             possible: {subgroup}{more}{}; change --nodes, --gpus-per-node, `members` in the cluster's file, or pipeline_stages",
            divisors_up_to(experts, of_stage)
        )));
    }
    problem.options.pipeline_stages = Some(stages);
    problem.options.expert_parallel = Some(group);
    problem.options.tensor_parallel = Some(1);
    problem.options.replicas = Replicas::Keep;
    Ok(())
}

/// The members of the outermost level, or the equal parts of unequal ones. Each stage of a runnable plan has GPUs of all of
/// them.
struct Parts {
    count: usize,
    /// "3 datacenters", or "5 equal parts of the 3 datacenters".
    name: String,
}

fn parts(problem: &Problem) -> Result<Parts, Failure> {
    let cluster = Cluster::try_from(problem.cluster.clone()).map_err(Failure::request)?;
    let count = cluster.levels().first().map_or(1, |outermost| outermost.scaling_factor);
    let sites = cluster.sites().len();
    let members = match &problem.cluster.levels[..] {
        // Members of the outermost of two levels may be nodes.
        [_, _, _, ..] => "datacenters".to_owned(),
        _ => format!("members of level {}", cluster.level_name(0)),
    };
    let name = match cluster.is_unequal() {
        true => format!("{count} equal parts of the {sites} {members}"),
        false => format!("{count} {members}"),
    };
    Ok(Parts { count, name })
}

/// Why no plan is runnable if the parts do not divide the experts.
fn indivisible(problem: &Problem, parts: &Parts, stages: usize) -> String {
    let experts = problem.model.experts;
    let Parts { count, name } = parts;
    let mut possible = Vec::new();
    let sites = problem.cluster.levels.first().map_or(1, |outermost| outermost.scaling_factor);
    let has_datacenters = problem.cluster.levels.len() > 2;
    if sites == *count {
        let in_stage = problem.cluster.gpus() / sites.max(1) / stages.max(1);
        let divides = |members: &usize| experts.is_multiple_of(members * in_stage.max(1));
        let fewer = (2..sites).rev().find(divides);
        let more = (sites + 1..=experts).find(divides);
        let numbers: Vec<String> = fewer.iter().chain(&more).map(usize::to_string).collect();
        if let Some(first) = fewer.or(more) {
            let what = name.trim_start_matches(|digit: char| digit.is_ascii_digit() || digit == ' ');
            let preset = if has_datacenters { format!("`--datacenters {first}`, ") } else { String::new() };
            possible.push(format!("{} {what} ({preset}`--set members={first}`)", numbers.join(" or ")));
        }
    }
    let unequal = has_datacenters.then(|| unequal_nodes(problem, stages)).flatten();
    let level = problem.cluster.levels.get(1).map_or("", |level| level.name.as_str());
    possible.extend(unequal.map(|nodes| {
        format!("other numbers of nodes (`--nodes {nodes}`, or in a file `members = [{nodes}]` of level '{level}')")
    }));
    possible.push(WITHOUT_RUNNABLE.to_owned());
    format!(
        "--runnable: each stage spans all {name}, so its number of GPUs is a multiple of {count} and does not divide the {experts} \
         experts; possible: {}",
        possible.join(", or ")
    )
}

/// The end of an error of `--runnable`: what the user can do instead.
const WITHOUT_RUNNABLE: &str = "leave out --runnable for a pipeline with stages inside datacenters";

/// The numbers of nodes of unequal datacenters with the largest number of GPUs that divides the experts. Some datacenters keep
/// all their nodes, and the others use fewer.
fn unequal_nodes(problem: &Problem, stages: usize) -> Option<String> {
    let [outermost, second, inner @ ..] = &problem.cluster.levels[..] else { return None };
    let (sites, nodes) = (outermost.scaling_factor, second.scaling_factor);
    let inside: usize = inner.iter().map(|level| level.scaling_factor).product();
    let all = |(whole, less): &(usize, usize)| whole * nodes + (sites - whole) * less;
    let runs = |choice: &(usize, usize)| {
        let gpus = all(choice) * inside;
        // A part has `less` nodes, which the stages divide.
        gpus.is_multiple_of(stages)
            && problem.model.experts.is_multiple_of(gpus / stages)
            && nodes.is_multiple_of(choice.1)
            && choice.1.is_multiple_of(stages)
    };
    // Sites may have fewer nodes than the largest one. The largest sites keep their nodes.
    let members: Vec<usize> = match second.site_members.is_empty() {
        true => vec![nodes; sites],
        false => second.site_members.clone(),
    };
    let mut largest: Vec<usize> = (0..sites).collect();
    largest.sort_by_key(|&site| std::cmp::Reverse(members[site]));
    let of_sites = |&(whole, less): &(usize, usize)| {
        let mut all = vec![less; sites];
        largest[..whole].iter().for_each(|&site| all[site] = nodes);
        all
    };
    let exists =
        |choice: &(usize, usize)| of_sites(choice).iter().zip(&members).all(|(wanted, has)| wanted <= has);
    let choices = (1..sites).flat_map(|whole| (1..nodes).map(move |less| (whole, less)));
    let choice = choices.filter(exists).filter(runs).max_by_key(all)?;
    Some(of_sites(&choice).iter().map(usize::to_string).collect::<Vec<_>>().join(","))
}

/// Why `--runnable` has no expert domains although other strategies have a layout.
pub(super) fn not_runnable(problem: &Problem, plan: &StepPlan) -> String {
    if !plan.without_layout.contains(&Strategy::ExpertDomains) {
        return format!(
            "--runnable: no layout for `ExpertMigration` fits into memory; possible: GPUs with more memory, a smaller model, more \
             stages (`--set pipeline_stages=N`), or {WITHOUT_RUNNABLE}"
        );
    }
    let (stages, Ok(parts)) = (problem.options.pipeline_stages.unwrap_or(1), parts(problem)) else {
        return format!("--runnable: the cluster has no layout for `ExpertMigration`; {WITHOUT_RUNNABLE}");
    };
    if parts.count == 1 {
        return format!(
            "--runnable: expert domains need at least two members of the outermost level, and the cluster has {}",
            parts.name
        );
    }
    let possible: Vec<String> = spanning_stages(problem).iter().map(usize::to_string).collect();
    let possible = match possible.is_empty() {
        true => String::new(),
        false => format!("pipeline_stages {}, or ", possible.join(", ")),
    };
    format!(
        "--runnable: no division of the cluster has {} that each span all {}; possible: {possible}{WITHOUT_RUNNABLE}",
        units::counted(stages, "stage"),
        parts.name
    )
}

/// The error of a runnable layout whose tokens move among more GPUs than an operator supports. `unrestricted`: the problem
/// before [`restrict_to_runtime`].
pub(super) fn too_many_ranks(unrestricted: &Problem, among: usize) -> String {
    let stages_now = unrestricted.options.pipeline_stages.unwrap_or(1);
    let runs = |stages: &usize| {
        let mut problem = unrestricted.clone();
        problem.options.pipeline_stages = Some(*stages);
        runnable_on(problem).is_some()
    };
    let more = spanning_stages(unrestricted).into_iter().filter(|&stages| stages > stages_now).find(runs);
    let more =
        more.map_or(String::new(), |stages| format!("more stages (`--set pipeline_stages={stages}`), "));
    format!(
        "--runnable: in the fastest layout, tokens move among {among} GPUs, and an operator of hybrid-ep supports at most {}; \
         possible: {more}fewer GPUs, or memory for gathering experts among more GPUs (`memory_cap`, `reserved_memory`)",
        ep_cuda::MAX_RANKS
    )
}

/// The runnable plan of a problem without the restrictions of [`restrict_to_runtime`], if there is one.
pub(super) fn runnable_on(mut unrestricted: Problem) -> Option<StepPrice> {
    restrict_to_runtime(&mut unrestricted).ok()?;
    let plan = planned(&unrestricted)?;
    plan.price(Strategy::ExpertDomains).filter(|price| dispatch_ranks(price) <= ep_cuda::MAX_RANKS).cloned()
}

/// Whether a problem without the restrictions of [`restrict_to_runtime`] has a runnable plan that leaves `reserved_memory` free.
pub(super) fn is_runnable(unrestricted: &Problem) -> bool {
    runnable_on(unrestricted.clone()).is_some_and(|price| price.fit == Fit::Fits)
}

/// The most GPUs of an EP group, fewer than the `of_stage` GPUs of a stage, with which a problem has a runnable plan.
fn group_that_runs(unrestricted: &Problem, of_stage: usize) -> Option<usize> {
    let experts = unrestricted.model.experts;
    let divides = |gpus: &usize| experts.is_multiple_of(*gpus) && of_stage.is_multiple_of(*gpus);
    (2..of_stage).rev().filter(divides).find(|&gpus| {
        let mut problem = unrestricted.clone();
        problem.options.expert_parallel = Some(gpus);
        is_runnable(&problem)
    })
}

/// The least number of stages, not below the present one, with which a problem has a runnable plan.
pub(super) fn stages_that_run(unrestricted: &Problem) -> Option<usize> {
    let now = unrestricted.options.pipeline_stages.unwrap_or(1);
    spanning_stages(unrestricted).into_iter().filter(|&stages| stages >= now).find(|&stages| {
        let mut problem = unrestricted.clone();
        problem.options.pipeline_stages = Some(stages);
        is_runnable(&problem)
    })
}

/// The numbers of stages that a runnable plan can have: each stage has the same members of every datacenter, and its number of
/// GPUs divides the experts.
fn spanning_stages(problem: &Problem) -> Vec<usize> {
    let Ok(cluster) = Cluster::try_from(problem.cluster.clone()) else { return Vec::new() };
    let (members, gpus) = (cluster.scaling_factors(), cluster.gpus());
    let mut found = vec![1];
    for level in 1..members.len() {
        let outer: usize = members[1..level].iter().product();
        let parts = (2..=members[level]).filter(|&parts| members[level].is_multiple_of(parts));
        found.extend(parts.map(|parts| outer * parts));
    }
    let (experts, layers) = (problem.model.experts, problem.model.moe_layers);
    found.retain(|&stages| stages <= layers && experts.is_multiple_of(gpus / stages));
    found
}

/// The largest divisors of a number that are at most `most`, descending, as text.
fn divisors_up_to(number: usize, most: usize) -> String {
    const SHOWN: usize = 3;
    let mut divisors = (1..=most.min(number)).rev().filter(|&divisor| number.is_multiple_of(divisor));
    let shown: Vec<String> = divisors.by_ref().take(SHOWN).map(|divisor| divisor.to_string()).collect();
    let more = if divisors.next().is_some() { ", ..." } else { "" };
    format!("{}{more}", shown.join(", "))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn divisors_are_listed_from_the_largest_that_is_possible() {
        assert_eq!(divisors_up_to(64, 128), "64, 32, 16, ...");
        assert_eq!(divisors_up_to(64, 48), "32, 16, 8, ...");
        assert_eq!(divisors_up_to(256, 3), "2, 1");
        assert_eq!(divisors_up_to(7, 6), "1");
    }
}
