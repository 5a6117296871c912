//! `hybrid-ep simulate`: runs the schedule that the planner prices, event by event, and sets the two beside each
//! other.

mod stragglers;
mod text;

use std::path::PathBuf;

use clap::{Args, ValueEnum};
use ep_plan::planner::{BaselineKind, Candidate, Plan};
use ep_plan::simulate::{Outcome, Record, Scheme, Simulation, SimulationOptions, SvgOptions, Timeline};
use ep_plan::{Cluster, Planner};
use serde::Serialize;

use crate::failure::{Failure, Verdict};
use crate::output::{to_json, to_stderr, to_stdout};
use crate::plan::output::Target;
use crate::plan::{Problem, ProblemArgs};

/// Layers that a picture shows of a step that has more.
const DRAWN_LAYERS: f64 = 3.0;

/// `hybrid-ep simulate`
#[derive(Debug, Args)]
pub(crate) struct SimulateArgs {
    #[command(flatten)]
    problem: ProblemArgs,

    /// The schedule to run
    #[arg(long, help_heading = "Schedule", value_enum, default_value_t)]
    scheme: SchemeChoice,
    /// Domain sizes of the hybrid schedule, outermost level first
    #[arg(long, help_heading = "Schedule", value_name = "N[,N...]", value_delimiter = ',')]
    domains: Vec<usize>,
    /// Layers to simulate [default: all that one GPU has]
    #[arg(long, help_heading = "Schedule", value_name = "N")]
    layers: Option<usize>,
    /// Relative standard deviation of the duration of every computation
    #[arg(long, help_heading = "Schedule", value_name = "PART", default_value_t = 0.0)]
    jitter: f64,
    /// What is slower: gpu:3=1.5 or link:wan:0=2, several with commas; or random:0.05=1.3 for a part of all GPUs
    #[arg(long, help_heading = "Schedule", value_name = "WHAT=TIMES")]
    stragglers: Option<String>,
    /// What jitter and random stragglers are drawn from
    #[arg(long, help_heading = "Schedule", value_name = "N", default_value_t = 0)]
    seed: u64,

    /// Write the timeline of GPU 0 for a trace viewer (Chrome trace events)
    #[arg(long, value_name = "FILE", help_heading = "Output")]
    trace: Option<PathBuf>,
    /// Draw the timeline of GPU 0, the first layers of a long step
    #[arg(long, value_name = "FILE", help_heading = "Output")]
    svg: Option<PathBuf>,
    /// Write planned and simulated times as JSON; `-` = stdout, with the text on stderr
    #[arg(long, value_name = "FILE", help_heading = "Output")]
    json: Option<PathBuf>,
}

#[derive(Debug, Clone, Copy, Default, PartialEq, Eq, ValueEnum)]
enum SchemeChoice {
    /// Expert parallelism over all GPUs, one copy per token and expert
    Plain,
    /// Expert parallelism over all GPUs, one copy per token and member, level by level
    Hierarchical,
    /// The domains of --domains
    Hybrid,
    /// What the planner chooses, or --domains where they are given
    #[default]
    Best,
}

/// Planned beside simulated.
#[derive(Debug, Serialize)]
struct Report<'a> {
    hybrid_ep_version: &'static str,
    problem: &'a Problem,
    scheme: &'a Scheme,
    options: &'a SimulationOptions,
    planned: &'a Candidate,
    simulated: &'a Outcome,
    /// Simulated layer time over planned.
    simulated_over_planned: f64,
}

pub(crate) fn main(args: &SimulateArgs) -> Result<Verdict, Failure> {
    let targets = [
        Target::resolve("--json", args.json.as_deref())?,
        Target::resolve("--trace", args.trace.as_deref())?,
        Target::resolve("--svg", args.svg.as_deref())?,
    ];
    if targets.iter().filter(|target| target.is_stdout()).count() > 1 {
        return Err(Failure::request("only one of --json, --trace and --svg can be `-`"));
    }
    let problem = Problem::resolve(&args.problem)?;
    let planner = problem.planner()?;
    let plan = planner.plan();
    let (scheme, planned) = scheme(args, &planner, &plan)?;
    let options = options(args, &problem)?;
    let cluster = Cluster::try_from(problem.cluster.clone()).map_err(Failure::request)?;
    let model = problem.model.clone().try_into().map_err(Failure::request)?;
    let simulation =
        Simulation::new(&cluster, &model, options.clone(), scheme.clone()).map_err(Failure::request)?;
    let outcome = simulation.run();

    let text = text::render(&problem, &plan, &scheme, &planned, &outcome);
    if targets.iter().any(Target::is_stdout) {
        to_stderr(&text)?
    } else {
        to_stdout(&text)?
    }
    let [json, trace, svg] = targets;
    // The timeline has files of its own.
    let simulated = &Outcome { timeline: None, ..outcome.clone() };
    json.write(&to_json(&Report {
        hybrid_ep_version: env!("CARGO_PKG_VERSION"),
        problem: &problem,
        scheme: &scheme,
        options: &options,
        planned: &planned,
        simulated,
        simulated_over_planned: outcome.layer_seconds / planned.layer_time,
    })?)?;
    if let Some(timeline) = &outcome.timeline {
        if args.trace.is_some() {
            trace.write(&chrome_trace(timeline)?)?;
        }
        if args.svg.is_some() {
            svg.write(&picture(timeline, &problem, &planned, &outcome)?)?;
        }
    }
    Ok(Verdict::Right)
}

/// The schedule, and what the planner says of it.
fn scheme(args: &SimulateArgs, planner: &Planner, plan: &Plan) -> Result<(Scheme, Candidate), Failure> {
    let baseline = |scheme, kind| {
        let found = plan.baselines.iter().find(|baseline| baseline.kind == kind);
        let found = found.ok_or_else(|| Failure::request("the planner has no such baseline"))?;
        Ok((scheme, found.candidate.clone()))
    };
    let hybrid = |candidate: Candidate| {
        let domain_sizes = candidate.domain_sizes.clone();
        Ok((Scheme::Hybrid { domain_sizes }, candidate))
    };
    let given = !args.domains.is_empty();
    match args.scheme {
        SchemeChoice::Plain | SchemeChoice::Hierarchical if given => {
            Err(Failure::request("--domains: only the hybrid schedule has domains; leave out --scheme"))
        }
        SchemeChoice::Plain => baseline(Scheme::Plain, BaselineKind::PlainEp),
        SchemeChoice::Hierarchical => baseline(Scheme::Hierarchical, BaselineKind::HierarchicalEp),
        SchemeChoice::Hybrid if !given => {
            let possible = plan.scaling_factors.len();
            Err(Failure::request(format!(
                "--scheme hybrid: give --domains, {possible} sizes, or use --scheme best"
            )))
        }
        SchemeChoice::Hybrid | SchemeChoice::Best if given => {
            let refuse = |error| Failure::request(format!("--domains: {error}"));
            hybrid(planner.evaluate(&args.domains).map_err(refuse)?)
        }
        SchemeChoice::Hybrid | SchemeChoice::Best => hybrid(plan.best.clone()),
    }
}

fn options(args: &SimulateArgs, problem: &Problem) -> Result<SimulationOptions, Failure> {
    let stragglers = match &args.stragglers {
        None => Default::default(),
        Some(text) => stragglers::parse(text, &problem.cluster)
            .map_err(|what| Failure::request(format!("--stragglers {text}: {what}")))?,
    };
    let recorded = args.trace.is_some() || args.svg.is_some();
    Ok(SimulationOptions {
        planner: problem.options.clone(),
        jitter: args.jitter,
        stragglers,
        seed: args.seed,
        layers: args.layers,
        record: Record { gpus: if recorded { vec![0] } else { Vec::new() }, links: true },
        ..SimulationOptions::default()
    })
}

fn chrome_trace(timeline: &Timeline) -> Result<String, Failure> {
    let mut out = Vec::new();
    timeline.to_chrome_trace(&mut out).map_err(|error| Failure::request(format!("--trace: {error}")))?;
    String::from_utf8(out).map_err(|error| Failure::request(format!("--trace: {error}")))
}

fn picture(
    timeline: &Timeline,
    problem: &Problem,
    planned: &Candidate,
    outcome: &Outcome,
) -> Result<String, Failure> {
    let mut out = String::new();
    let long = outcome.layers as f64 > DRAWN_LAYERS;
    let options = SvgOptions {
        title: format!("{} on {}, GPU 0", problem.model.name, problem.cluster.name),
        window: long.then_some((0.0, DRAWN_LAYERS * planned.forward.total.0)),
        ..SvgOptions::default()
    };
    timeline.to_svg(&mut out, &options).map_err(|error| Failure::request(format!("--svg: {error}")))?;
    Ok(out)
}
