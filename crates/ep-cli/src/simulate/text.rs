//! The comparison of planned and simulated times as text.

use std::fmt::Write as _;

use ep_plan::planner::{Candidate, PassTimes, Plan};
use ep_plan::simulate::{Outcome, Phase, Scheme};
use ep_plan::units::Seconds;

use crate::common::units;
use crate::planner::problem::Problem;
use crate::planner::text::{heading, sizes, table};

/// A phase's name, its parts in the simulator, and the planner's time for it.
type Row = (&'static str, &'static [Phase], fn(&PassTimes) -> Seconds);

const ROWS: [Row; 8] = [
    ("pre-expert", &[Phase::PreExpert], |pass| pass.pre_expert),
    ("all-gather", &[Phase::AllGather], |pass| pass.all_gather),
    ("all-to-all", &[Phase::Dispatch, Phase::Combine], |pass| pass.all_to_all),
    ("expert", &[Phase::Expert], |pass| pass.expert),
    ("decode", &[Phase::Decode], |pass| pass.decode),
    ("encode", &[Phase::Encode], |pass| pass.encode),
    ("gradients", &[Phase::Gradients], |pass| pass.gradients),
    ("shared refresh", &[Phase::SharedRefresh], |pass| pass.shared_refresh),
];

pub(super) fn render(
    problem: &Problem,
    plan: &Plan,
    scheme: &Scheme,
    planned: &Candidate,
    outcome: &Outcome,
) -> String {
    let mut out = heading(problem, plan);
    for note in &problem.notes {
        let _ = writeln!(out, "{note}");
    }
    let name = match scheme {
        Scheme::Plain => "plain EP".to_owned(),
        Scheme::Hierarchical => "hierarchical EP, deduplicated".to_owned(),
        Scheme::Hybrid { domain_sizes } => format!("expert domains {}", sizes(domain_sizes)),
    };
    // Writing to a string cannot fail.
    let _ = writeln!(
        out,
        "{name}: {}, {}; a step takes {}\n\n{}\n\n{}",
        units::counted(outcome.layers, "layer"),
        units::counted(outcome.micro_batches, "micro-batch"),
        outcome.step_seconds,
        phases(planned, outcome),
        links(outcome),
    );
    out.push_str(
        "\nA simulated time is the time in which a stream is busy; a planned transfer time includes the wait for the last \
         reply.\n",
    );
    let all: usize = plan.scaling_factors.iter().product();
    if problem.options.work == ep_plan::planner::Work::Training {
        let _ = writeln!(
            out,
            "This is one EP group over all {all} GPUs, without pipeline stages and dense gradients; `--steps` simulates whole \
             steps."
        );
    }
    let alike = if outcome.simulated_gpus < all { " (the others behave like one of these)" } else { "" };
    let _ = writeln!(
        out,
        "Simulated {} of {all} GPUs{alike}: {} events, {} flows for {:.3e} messages.",
        outcome.simulated_gpus,
        units::count(outcome.events),
        units::count(outcome.flows),
        outcome.messages,
    );
    out
}

/// Times per layer and micro-batch, forward and backward together.
fn phases(planned: &Candidate, outcome: &Outcome) -> String {
    let passes = (outcome.layers * outcome.micro_batches) as f64;
    let mut rows: Vec<Vec<String>> = ROWS
        .iter()
        .map(|(name, parts, of)| {
            let planned = of(&planned.forward) + planned.backward.as_ref().map_or(Seconds::ZERO, of);
            let sum = |time: fn(&Outcome, Phase) -> Seconds| -> Seconds {
                parts.iter().map(|&part| time(outcome, part)).sum::<Seconds>() / passes
            };
            let mean = sum(|outcome, part| outcome.phase(part).mean_seconds);
            let longest = sum(|outcome, part| outcome.phase(part).longest_seconds);
            row(name, planned, mean, Some(longest))
        })
        .collect();
    rows.push(row("layer, with overlap", planned.layer_time, outcome.layer_seconds, None));
    rows.push(vec![
        "  of which a GPU is idle".into(),
        String::new(),
        (outcome.compute_idle_seconds / passes).to_string(),
        String::new(),
        String::new(),
    ]);
    table(&["forward and backward", "planned", "simulated", "slowest GPU", "simulated/planned"], rows, 1)
}

fn row(name: &str, planned: Seconds, simulated: Seconds, longest: Option<Seconds>) -> Vec<String> {
    let or_dash = |time: Seconds| if time.0 > 0.0 { time.to_string() } else { "-".into() };
    vec![
        name.into(),
        or_dash(planned),
        or_dash(simulated),
        longest.map_or_else(String::new, or_dash),
        if planned.0 > 0.0 { format!("{:.3}", simulated / planned) } else { "-".into() },
    ]
}

fn links(outcome: &Outcome) -> String {
    let rows = outcome.levels.iter().map(|level| {
        vec![
            level.name.clone(),
            units::count(level.links as u64),
            level.bytes.to_string(),
            format!("{:.1} %", 100.0 * level.mean_utilisation),
            format!("{:.1} %", 100.0 * level.peak_utilisation),
        ]
    });
    table(&["links", "number", "bytes in all", "mean use", "use of the busiest"], rows, 1)
}
