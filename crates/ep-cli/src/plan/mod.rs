//! `hybrid-ep plan`: decides which experts move and which tokens move, and predicts the cost.
//!
//! A [`Problem`] describes cluster, model and options, the planner of `ep-plan` solves it, and [`text`], [`html`] and JSON
//! show the plan.

mod args;
mod html;
mod paper;
mod remedy;
mod runnable;
mod software;
pub(crate) mod steps;
mod sweep;
#[cfg(test)]
mod tests;
mod text;
mod upgrades;
mod words;

use clap::ValueEnum as _;
use ep_plan::cluster::Cluster;
use ep_plan::input::{self, preset};
use ep_plan::planner::{Compression, Options, Plan, Setting};
use ep_plan::step::{Fewer, Layout, StepPlan, StepPrice, Strategy};
use ep_plan::{PartitionExport, PlanError};
use serde::Serialize;

pub(crate) use self::args::PlanArgs;
use self::args::StrategyChoice;
use self::runnable::{not_runnable, restrict_to_runtime, runnable_on, too_many_ranks};
use self::software::Instead;
use self::steps::Shown;
use self::sweep::{Request, Sweep};
use self::upgrades::{Upgrade, upgrades};
use crate::common::failure::{Failure, Verdict};
use crate::common::output::{Checked, Target, check_apart, print_beside, to_stderr, to_stdout};
use crate::planner::problem::Problem;

/// The JSON output.
#[derive(Debug, Serialize)]
struct PlanReport<'a> {
    hybrid_ep_version: &'static str,
    problem: &'a Problem,
    /// The assumptions behind the times, as lines of the report.
    assumed: Vec<String>,
    /// Steps of all strategies; absent for forward passes.
    #[serde(skip_serializing_if = "Option::is_none")]
    step: Option<&'a StepPlan>,
    /// The best plans on parts of the cluster, fastest first; absent for forward passes.
    #[serde(skip_serializing_if = "Option::is_none")]
    fewer: Option<&'a [Fewer]>,
    /// The step with twice of each resource; absent for forward passes.
    #[serde(skip_serializing_if = "Option::is_none")]
    upgrades: Option<&'a [Upgrade]>,
    /// Layers of one EP group of the strategy that is shown.
    plan: &'a Plan,
    #[serde(skip_serializing_if = "Option::is_none")]
    sweep: Option<&'a Sweep>,
    /// The stream model of each level, with `--paper-model`.
    #[serde(skip_serializing_if = "Option::is_none")]
    stream_model: Option<&'a [paper::Level]>,
}

pub(crate) fn main(args: &PlanArgs) -> Result<Verdict, Failure> {
    if args.list {
        to_stdout(&list())?;
    } else if let Some(case) = &args.stream {
        let json = Target::resolve("--json", args.json.as_deref())?;
        let level = paper::Level::of_case(case)?;
        let (text, figures) = (paper::render(std::slice::from_ref(&level)), Checked::json(&level)?);
        print_beside(&Checked::text(text, &[])?, &[&json])?;
        json.write(&figures)?;
    } else {
        let mut problem = Problem::resolve(&args.problem)?;
        if args.paper_model {
            problem.options.setting = Setting::Paper;
        }
        let unrestricted = args.runnable.then(|| problem.clone());
        if args.runnable {
            restrict_to_runtime(&mut problem)?;
        }
        let wanted = &Wanted { args, unrestricted };
        if args.print_toml {
            let unsolved = match solve(wanted, &problem) {
                Err(failure) if args.wanted().is_some() => return Err(failure),
                solved => solved.err(),
            };
            to_stdout(&input::to_toml(&problem.cluster, &problem.model, &problem.options))?;
            // The file is printed even without a plan: the user may need it to change what makes the problem impossible.
            if let Some(failure) = unsolved {
                to_stderr(&format!("note: this problem has no plan: {failure}"))?;
            }
        } else {
            plan(wanted, &problem)?;
        }
    }
    Ok(Verdict::Right)
}

/// The request.
struct Wanted<'a> {
    args: &'a PlanArgs,
    /// With `--runnable`, the problem before [`restrict_to_runtime`].
    unrestricted: Option<Problem>,
}

fn plan(wanted: &Wanted<'_>, problem: &Problem) -> Result<(), Failure> {
    let args = wanted.args;
    // Destinations are checked before the work.
    let json = Target::resolve("--json", args.json.as_deref())?;
    let html = Target::resolve("--html", args.html.as_deref())?;
    let groups = Target::resolve("--groups", args.groups.as_deref())?;
    check_apart(&[&json, &html, &groups])?;
    let sweep = args
        .sweep
        .as_ref()
        .map(|text| {
            Request::parse(text, problem).map_err(|what| Failure::request(format!("--sweep {text}: {what}")))
        })
        .transpose()?;
    let sweep = sweep.map(|request| request.run(problem));
    let (step, plan) = match (solve(wanted, problem), &sweep) {
        (Ok(solved), _) => solved,
        // A sweep may serve to find the values at which there is a plan.
        (Err(failure), Some(sweep))
            if sweep.has_plan() && !json.is_wanted() && !html.is_wanted() && !groups.is_wanted() =>
        {
            to_stdout(&format!("{}\n", sweep.render()))?;
            return to_stderr(&format!("note: the problem itself has no plan: {failure}"));
        }
        (Err(failure), _) => return Err(failure),
    };
    let stream_model = match args.paper_model {
        true => Some(paper::Level::all(&problem.planner()?, &plan.level_names)?),
        false => None,
    };
    let report = PlanReport {
        hybrid_ep_version: env!("CARGO_PKG_VERSION"),
        problem,
        assumed: text::assumed(problem),
        step: step.as_ref().map(|shown| &shown.plan),
        fewer: step.as_ref().map(|shown| &shown.fewer[..]),
        upgrades: step.as_ref().map(|shown| &shown.upgrades[..]),
        plan: &plan,
        sweep: sweep.as_ref(),
        stream_model: stream_model.as_deref(),
    };
    let names = problem.names();
    let stream = stream_model.as_deref().map(paper::render).unwrap_or_default();
    let text = text::render(problem, step.as_ref(), &plan, sweep.as_ref(), args.explain);
    // All outputs are checked before any is written.
    let figures = Checked::json(&report)?;
    let text = Checked::text(format!("{stream}{text}"), &names)?;
    let page = html
        .is_wanted()
        .then(|| Checked::text(html::render(problem, step.as_ref(), &plan, sweep.as_ref())?, &names));
    let lists = groups.is_wanted().then(|| {
        let partition = plan.partition().map_err(Failure::request)?;
        let cluster = Cluster::try_from(problem.cluster.clone()).map_err(Failure::request)?;
        let layout =
            step.as_ref().map(|shown| GroupsLayout::of(&shown.price().layout, &cluster)).transpose()?;
        let parts: Vec<usize> = cluster.sites().iter().map(|site| site.parts).collect();
        Checked::json(&Groups { layout, groups: &partition.export().in_sites(&parts) })
    });
    let (page, lists) = (page.transpose()?, lists.transpose()?);
    print_beside(&text, &[&json, &html, &groups])?;
    json.write(&figures)?;
    page.map_or(Ok(()), |page| html.write(&page))?;
    lists.map_or(Ok(()), |lists| groups.write(&lists))
}

/// The file of `--groups`.
#[derive(Serialize)]
struct Groups<'a> {
    /// `None` for forward passes.
    layout: Option<GroupsLayout>,
    #[serde(flatten)]
    groups: &'a PartitionExport,
}

/// How the GPUs of the cluster are divided. The rank lists of the file are those of one EP group.
#[derive(Serialize)]
struct GroupsLayout {
    pipeline_stages: usize,
    ep_groups_per_stage: usize,
    tensor_parallel: usize,
    /// The cluster's GPUs in each EP group of each stage.
    ep_groups: Vec<Vec<Vec<usize>>>,
    /// The cluster's GPUs in each datacenter.
    datacenters: Vec<Vec<usize>>,
}

impl GroupsLayout {
    fn of(layout: &Layout, cluster: &Cluster) -> Result<Self, Failure> {
        let parts: usize = cluster.sites().iter().map(|site| site.parts).sum();
        let (part, mut next) = (cluster.gpus() / parts.max(1), 0);
        let datacenters = cluster.sites().iter().map(|site| {
            let first = next;
            next += site.parts * part;
            (first..next).collect()
        });
        let datacenters = datacenters.collect();
        Ok(Self {
            datacenters,
            pipeline_stages: layout.stages(),
            ep_groups_per_stage: layout.groups_per_stage(),
            tensor_parallel: layout.tensor_parallel,
            ep_groups: layout.ep_groups(&cluster.scaling_factors()).map_err(Failure::request)?,
        })
    }
}

/// The steps of all strategies, and the layers of the strategy to show. Forward passes have only layers.
fn solve(wanted: &Wanted<'_>, problem: &Problem) -> Result<(Option<Shown>, Plan), Failure> {
    let args = wanted.args;
    let unsolvable = |error| Failure::request(unsolvable(wanted, problem, &error));
    let Some(planner) = problem.step_planner().map_err(unsolvable)? else {
        return match args.wanted() {
            Some(_) => {
                let option = if args.runnable { "--runnable" } else { "--strategy" };
                Err(Failure::request(format!(
                    "{option}: forward passes have no step to compare; use work=training"
                )))
            }
            None => Ok((None, problem.planner()?.plan())),
        };
    };
    let plan = planner.plan().map_err(unsolvable)?;
    let index = match args.wanted().map(StrategyChoice::strategy) {
        None => plan.prices.iter().position(|price| price == plan.best()),
        Some(wanted) => plan.prices.iter().position(|price| price.strategy == wanted),
    };
    let index = index.ok_or_else(|| {
        Failure::request(match args.runnable {
            true => not_runnable(problem, &plan),
            false => refused(args.wanted(), &plan),
        })
    })?;
    let layers = planner.layer_plan(&plan.prices[index]).map_err(Failure::request)?;
    let among = software::dispatch_ranks(&plan.prices[index]);
    if args.runnable && among > ep_cuda::MAX_RANKS {
        let given = wanted.unrestricted.as_ref().unwrap_or(problem);
        return Err(Failure::request(too_many_ranks(given, among)));
    }
    let one_site_refused = match planner.memory_of_one_site() {
        Err(PlanError::TotalMemory { needed, available, gpus }) => Some(format!(
            "weights, gradients and Adam state need {needed}, and its {gpus} GPUs have {available}"
        )),
        _ => None,
    };
    let roomy = domains_with_all_memory(problem, &plan);
    let unrestricted = wanted.unrestricted.as_ref();
    let unrestricted = unrestricted.and_then(|problem| Some(plan_with(problem, |_| ())?.best().clone()));
    let fewer = planner.on_fewer();
    let upgrades = match &wanted.unrestricted {
        Some(problem) => upgrades(problem, runnable_on),
        None => upgrades(problem, |larger| Some(planned(&larger)?.best().clone())),
    };
    let head = steps::head(&plan, index, args.runnable);
    let exact = exact_domains(problem, head);
    let instead = Instead::of(head, problem);
    let shown = Shown {
        plan,
        index,
        fewer,
        upgrades,
        one_site_refused,
        roomy,
        exact,
        instead,
        unrestricted,
        runnable: args.runnable,
    };
    Ok((Some(shown), layers))
}

/// Why there is no plan, and which larger clusters have one. `--runnable` has its own text, because the planner's error would
/// name options that the user did not set.
fn unsolvable(wanted: &Wanted<'_>, problem: &Problem, error: &PlanError) -> String {
    let why = match error {
        PlanError::NoLayout { needed, device, .. } if wanted.args.runnable => format!(
            "--runnable: a GPU has {device}, and needs at least {needed} for weights, gradients and Adam state, because a layout \
             for `ExpertMigration` has one EP group in a stage and no tensor parallelism; possible: GPUs with more memory, a smaller \
             model, or, in a program with a pipeline, more stages (`pipeline_stages`)"
        ),
        error => error.to_string(),
    };
    match remedy::remedy(problem, wanted.unrestricted.as_ref(), error) {
        Some(remedy) => format!("{why}. {remedy}"),
        None => why,
    }
}

/// The fastest expert domains that send weights and gradients exactly. `None` unless `best` is lossy expert domains and the
/// exact ones have the same `fit`.
fn exact_domains(problem: &Problem, best: &StepPrice) -> Option<StepPrice> {
    if best.strategy != Strategy::ExpertDomains || !steps::is_lossy(best, &problem.options) {
        return None;
    }
    let plan = plan_with(problem, |options| {
        options.weight_compression = Compression::EXACT;
        options.gradient_compression = Compression::EXACT;
        options.dense_gradient_compression = None;
    })?;
    plan.price(Strategy::ExpertDomains).filter(|price| price.fit == best.fit).cloned()
}

/// The fastest expert domains if no memory is kept free. `None` unless memory decides: the expert domains of `plan` move no
/// experts over the outermost level, and these do and are faster.
fn domains_with_all_memory(problem: &Problem, plan: &StepPlan) -> Option<StepPrice> {
    let moves_none = |price: &&StepPrice| price.candidate.domain_sizes.first() == Some(&1);
    let domains = plan.price(Strategy::ExpertDomains).filter(moves_none)?;
    let plan = plan_with(problem, |options| options.reserved_memory = 0.0)?;
    let roomy = plan.price(Strategy::ExpertDomains).filter(|price| !moves_none(price))?;
    (roomy.step_time < domains.step_time).then(|| roomy.clone())
}

/// The plan with changed options; `None` if there is none.
fn plan_with(problem: &Problem, change: impl FnOnce(&mut Options)) -> Option<StepPlan> {
    let mut other = problem.clone();
    change(&mut other.options);
    planned(&other)
}

/// The plan of a step; `None` if there is none.
fn planned(problem: &Problem) -> Option<StepPlan> {
    problem.step_planner().ok()??.plan().ok()
}

/// Why the requested strategy has no price.
fn refused(wanted: Option<StrategyChoice>, plan: &StepPlan) -> String {
    let value = |choice: &StrategyChoice| choice.to_possible_value().map(|value| value.get_name().to_owned());
    let why = match wanted.is_some_and(|wanted| plan.without_layout.contains(&wanted.strategy())) {
        true => "it has no layout on this cluster with these options",
        false => "no layout of it fits into memory",
    };
    let possible = StrategyChoice::value_variants()
        .iter()
        .filter(|choice| plan.price(choice.strategy()).is_some())
        .filter_map(value);
    format!(
        "--strategy {}: {why}; possible: {}",
        wanted.as_ref().and_then(value).unwrap_or_default(),
        possible.collect::<Vec<_>>().join(", ")
    )
}

fn list() -> String {
    let mut out = String::new();
    for (heading, presets) in [
        (
            "Clusters for --cluster (all but those of the paper take --datacenters, --nodes, --uplink ...):",
            &preset::CLUSTERS[..],
        ),
        ("Models for --model:", &preset::MODELS),
        ("Cases of the paper's stream model for --stream:", &preset::STREAMS),
    ] {
        out.push_str(heading);
        out.push('\n');
        for preset in presets {
            out.push_str(&format!("  {:<16} {}\n", preset.name, preset.about));
        }
        out.push('\n');
    }
    out
}
