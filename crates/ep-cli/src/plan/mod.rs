//! `hybrid-ep plan`: which experts move, which tokens move, and what it costs.
//!
//! [`problem`] resolves what was asked; the planner of `ep-plan` answers; [`text`], [`html`] and JSON show it.

mod args;
pub(crate) mod chart;
mod html;
mod key;
pub(crate) mod output;
mod paper;
mod problem;
mod sweep;
pub(crate) mod text;

use ep_plan::input::{self, preset};
use ep_plan::planner::{Plan, Setting};
use serde::Serialize;

pub(crate) use self::args::{PlanArgs, ProblemArgs};
use self::output::Target;
pub(crate) use self::problem::Problem;
use self::sweep::{Request, Sweep};
use crate::failure::{Failure, Verdict};
use crate::output::{to_json, to_stderr, to_stdout};

/// Everything that JSON says.
#[derive(Debug, Serialize)]
struct Report<'a> {
    hybrid_ep_version: &'static str,
    problem: &'a Problem,
    plan: &'a Plan,
    #[serde(skip_serializing_if = "Option::is_none")]
    sweep: Option<&'a Sweep>,
    /// The stream model of each level, where it was asked for.
    #[serde(skip_serializing_if = "Option::is_none")]
    stream_model: Option<&'a [paper::Level]>,
}

pub(crate) fn main(args: &PlanArgs) -> Result<Verdict, Failure> {
    if args.list {
        to_stdout(&list())?;
    } else if let Some(case) = &args.stream {
        let json = Target::resolve("--json", args.json.as_deref())?;
        let level = paper::Level::of_case(case)?;
        let text = paper::render(std::slice::from_ref(&level));
        if json.is_stdout() {
            to_stderr(&text)?
        } else {
            to_stdout(&text)?
        }
        json.write(&to_json(&level)?)?;
    } else {
        let mut problem = Problem::resolve(&args.problem)?;
        if args.paper_model {
            problem.options.setting = Setting::Paper;
        }
        if args.print_toml {
            // A problem that no planner takes is no example.
            problem.planner()?;
            to_stdout(&input::to_toml(&problem.cluster, &problem.model, &problem.options))?;
        } else {
            plan(args, &problem)?;
        }
    }
    Ok(Verdict::Right)
}

fn plan(args: &PlanArgs, problem: &Problem) -> Result<(), Failure> {
    // Refusals come before the work.
    let targets = [
        Target::resolve("--json", args.json.as_deref())?,
        Target::resolve("--html", args.html.as_deref())?,
        Target::resolve("--groups", args.groups.as_deref())?,
    ];
    if targets.iter().filter(|target| target.is_stdout()).count() > 1 {
        return Err(Failure::request("only one of --json, --html and --groups can be `-`"));
    }
    let sweep = args
        .sweep
        .as_ref()
        .map(|text| {
            Request::parse(text, problem).map_err(|what| Failure::request(format!("--sweep {text}: {what}")))
        })
        .transpose()?;
    let planner = problem.planner()?;
    let plan = planner.plan();
    let sweep = sweep.map(|request| request.run(problem));
    let stream_model = match args.paper_model {
        true => Some(paper::Level::all(&planner, &plan.level_names)?),
        false => None,
    };
    let report = Report {
        hybrid_ep_version: env!("CARGO_PKG_VERSION"),
        problem,
        plan: &plan,
        sweep: sweep.as_ref(),
        stream_model: stream_model.as_deref(),
    };
    let text = text::render(problem, &plan, sweep.as_ref(), args.explain);
    let stream = stream_model.as_deref().map(paper::render).unwrap_or_default();
    let text = format!("{stream}{text}");
    if targets.iter().any(Target::is_stdout) {
        to_stderr(&text)?
    } else {
        to_stdout(&text)?
    }
    let [json, html, groups] = targets;
    json.write(&to_json(&report)?)?;
    if args.html.is_some() {
        html.write(&html::render(problem, &plan, sweep.as_ref())?)?;
    }
    if args.groups.is_some() {
        let partition = plan.partition().map_err(Failure::request)?;
        groups.write(&to_json(&partition.export())?)?;
    }
    Ok(())
}

fn list() -> String {
    let mut out = String::new();
    for (heading, presets) in [
        (
            "Clusters, for --cluster (those before the paper's with --datacenters, --nodes, --uplink ...):",
            &preset::CLUSTERS[..],
        ),
        ("Models, for --model:", &preset::MODELS),
        (
            "Cases of the paper's stream model, for --stream (sizes of the paper's models are not known here):",
            &preset::STREAMS,
        ),
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
