//! `hybrid-ep simulate`: simulates a schedule event by event and compares it with the planner's prediction.

mod steps;
mod stragglers;
mod text;

use std::path::PathBuf;

use clap::{Args, ValueEnum};
use ep_plan::planner::{BaselineKind, Batch, Candidate, Plan};
use ep_plan::simulate::{Outcome, Record, Scheme, Simulation, SimulationOptions, SvgOptions, Timeline};
use ep_plan::{Cluster, Planner, limits};
use serde::Serialize;

use crate::common::failure::{Failure, Verdict};
use crate::common::numbers::{ANY, count, count64, number};
use crate::common::output::{Checked, Target, check_apart, finite, print_beside};
use crate::planner::args::ProblemArgs;
use crate::planner::problem::Problem;

/// Maximum number of layers in a picture.
const DRAWN_LAYERS: f64 = 3.0;

/// `hybrid-ep simulate`
#[derive(Debug, Args)]
pub(crate) struct SimulateArgs {
    #[command(flatten)]
    problem: ProblemArgs,

    /// Schedule to simulate
    #[arg(long, help_heading = "Schedule", value_enum, default_value_t)]
    scheme: SchemeChoice,
    /// Domain sizes of the hybrid schedule, one per level, outermost level first
    #[arg(long, help_heading = "Schedule", value_name = "N[,N...]", value_delimiter = ',', value_parser = count(limits::MEMBERS))]
    domains: Vec<usize>,
    /// Number of layers to simulate [default: all layers of a GPU]
    #[arg(long, help_heading = "Schedule", value_name = "N", value_parser = count(limits::LAYERS))]
    layers: Option<usize>,
    /// Simulate whole steps of every strategy of `plan`, in its fastest layout, instead of the layers of one scheme
    #[arg(long, help_heading = "Schedule", conflicts_with_all = ["scheme", "domains", "layers", "trace", "svg"])]
    steps: bool,
    /// Relative standard deviation of the duration of every computation; 0 = no jitter
    #[arg(long, help_heading = "Schedule", value_name = "PART", default_value_t = 0.0, value_parser = number(limits::JITTER))]
    jitter: f64,
    /// Slow GPUs and links: gpu:3=1.5 makes computations of GPU 3 take 1.5 times as long, link:wan:0=2 halves the bandwidth of
    /// link 0 of level wan; separate several by commas. GPUs and links are numbered from 0 in the whole cluster; an uplink that
    /// a datacenter's GPUs share has the number of the datacenter. random:0.05=1.3 slows 5 % of all GPUs or, with --steps, 5 %
    /// of the GPUs of one EP group
    #[arg(long, help_heading = "Schedule", value_name = "WHAT=TIMES")]
    stragglers: Option<String>,
    /// Seed of jitter and of random stragglers
    #[arg(long, help_heading = "Schedule", value_name = "N", default_value_t = 0, value_parser = count64(ANY))]
    seed: u64,

    /// Write the timeline of GPU 0 as Chrome trace events, for a trace viewer
    #[arg(long, value_name = "FILE", help_heading = "Output")]
    trace: Option<PathBuf>,
    /// Draw the timeline of GPU 0 as SVG; for a long step, only the first layers
    #[arg(long, value_name = "FILE", help_heading = "Output")]
    svg: Option<PathBuf>,
    /// Write planned and simulated times as JSON; `-` = stdout, and the text goes to stderr
    #[arg(long, value_name = "FILE", help_heading = "Output")]
    json: Option<PathBuf>,
}

#[derive(Debug, Clone, Copy, Default, PartialEq, Eq, ValueEnum)]
enum SchemeChoice {
    /// Expert parallelism over all GPUs; a token is sent once per expert
    Plain,
    /// Expert parallelism over all GPUs; at each level, a token is sent once per member
    Hierarchical,
    /// Expert domains with the sizes of --domains
    Hybrid,
    /// The planner's choice, or the sizes of --domains if given
    #[default]
    Best,
}

/// The JSON output.
#[derive(Debug, Serialize)]
struct SimulationReport<'a> {
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
    if args.steps {
        return steps::main(args);
    }
    let json = Target::resolve("--json", args.json.as_deref())?;
    let trace = Target::resolve("--trace", args.trace.as_deref())?;
    let svg = Target::resolve("--svg", args.svg.as_deref())?;
    check_apart(&[&json, &trace, &svg])?;
    let mut problem = Problem::resolve(&args.problem)?;
    // The layers of `micro_batches` micro-batches are simulated, whatever the global batch.
    problem.options.batch = Batch::MicroBatches;
    let planner = problem.planner()?;
    let plan = planner.plan();
    let (scheme, planned) = scheme(args, &planner, &plan)?;
    let options = options(args, &problem)?;
    let cluster = Cluster::try_from(problem.cluster.clone()).map_err(Failure::request)?;
    let model = problem.model.clone().try_into().map_err(Failure::request)?;
    let simulation =
        Simulation::new(&cluster, &model, options.clone(), scheme.clone()).map_err(Failure::request)?;
    let mut outcome = simulation.run();
    // The timeline goes to files of its own, not into the JSON.
    let timeline = outcome.timeline.take();
    let report = SimulationReport {
        hybrid_ep_version: env!("CARGO_PKG_VERSION"),
        problem: &problem,
        scheme: &scheme,
        options: &options,
        planned: &planned,
        simulated: &outcome,
        simulated_over_planned: outcome.layer_seconds / planned.layer_time,
    };
    let names = problem.names();
    // All outputs are checked before any is written.
    let figures = Checked::json(&report)?;
    let text = Checked::text(text::render(&problem, &plan, &scheme, &planned, &outcome), &names)?;
    let mut files = Vec::new();
    if let Some(timeline) = &timeline {
        finite(timeline)?;
        if trace.is_wanted() {
            files.push((&trace, Checked::text(chrome_trace(timeline)?, &names)?));
        }
        if svg.is_wanted() {
            files.push((&svg, Checked::text(picture(timeline, &problem, &planned, &outcome)?, &names)?));
        }
    }
    print_beside(&text, &[&json, &trace, &svg])?;
    json.write(&figures)?;
    files.iter().try_for_each(|(target, text)| target.write(text))?;
    Ok(Verdict::Right)
}

/// The schedule, and the planner's prediction for it.
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
                "--scheme hybrid: give --domains with {possible} sizes, or use --scheme best"
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
    let part = match long {
        true => {
            format!(", forward passes of the first {DRAWN_LAYERS} layers (--layers 2 shows whole passes)")
        }
        false => String::new(),
    };
    let options = SvgOptions {
        title: format!("{} on {}, GPU 0{part}", problem.model.name, problem.cluster.name),
        window: long.then_some((0.0, DRAWN_LAYERS * planned.forward.total.0)),
        ..SvgOptions::default()
    };
    timeline.to_svg(&mut out, &options).map_err(|error| Failure::request(format!("--svg: {error}")))?;
    Ok(out)
}
