//! `simulate --steps`: priced and simulated steps of every strategy.

use ep_plan::PlanError;
use ep_plan::step::{SimulatedStep, StepPlan, StepPrice};
use serde::Serialize;

use super::{SimulateArgs, options};
use crate::common::failure::{Failure, Verdict};
use crate::common::output::{Checked, Target, print_beside};
use crate::common::units;
use crate::plan::steps;
use crate::planner::problem::Problem;
use crate::planner::text::table;

/// The JSON output.
#[derive(Debug, Serialize)]
struct StepsReport<'a> {
    hybrid_ep_version: &'static str,
    problem: &'a Problem,
    global_batch: f64,
    steps: &'a [Row],
}

/// One strategy.
#[derive(Debug, Serialize)]
struct Row {
    priced: StepPrice,
    /// The simulated step, or why it is not simulated.
    simulated: Result<SimulatedStep, String>,
}

pub(super) fn main(args: &SimulateArgs) -> Result<Verdict, Failure> {
    let json = Target::resolve("--json", args.json.as_deref())?;
    let problem = Problem::resolve(&args.problem)?;
    let planner = problem.step_planner().map_err(Failure::request)?;
    let planner =
        planner.ok_or_else(|| Failure::request("--steps: forward passes have no step; use work=training"))?;
    let plan = planner.plan().map_err(Failure::request)?;
    let options = options(args, &problem)?;
    let simulate = |price: &StepPrice| {
        let simulated = match planner.simulate(price, options.clone()) {
            // A GPU or a link that the cluster lacks is an error for every strategy.
            Err(error @ PlanError::Index { .. }) => return Err(Failure::request(error)),
            simulated => simulated.map_err(|error| error.to_string()),
        };
        Ok(Row { simulated, priced: price.clone() })
    };
    let rows = plan.prices.iter().map(simulate).collect::<Result<Vec<Row>, Failure>>()?;
    let report = StepsReport {
        hybrid_ep_version: env!("CARGO_PKG_VERSION"),
        problem: &problem,
        global_batch: plan.global_batch,
        steps: &rows,
    };
    let figures = Checked::json(&report)?;
    let names = problem.names();
    let text = format!(
        "{} on {}, steps of {} tokens{}\n\n{}\n",
        problem.model.name,
        problem.cluster.name,
        units::count(plan.global_batch.round() as u64),
        steps::dense_gradients(&plan, &problem.options).map(|line| format!("\n{line}")).unwrap_or_default(),
        render(&plan, &rows)
    );
    print_beside(&Checked::text(text, &names)?, &[&json])?;
    json.write(&figures)?;
    Ok(Verdict::Right)
}

fn render(plan: &StepPlan, rows: &[Row]) -> String {
    let cells = rows.iter().map(|Row { priced, simulated }| {
        let mut cells = vec![
            steps::name(priced.strategy).to_owned(),
            units::count(priced.layout.stages() as u64),
            units::count(priced.micro_batches as u64),
            priced.step_time.to_string(),
        ];
        match simulated {
            Ok(step) => cells
                .extend([step.step_time.to_string(), format!("{:.3}", step.step_time / priced.step_time)]),
            Err(_) => cells.push("not simulated".into()),
        }
        cells
    });
    let header =
        ["between datacenters", "stages", "micro-batches", "planned step", "simulated", "simulated/planned"];
    let mut out = table(&header, cells, 1);
    // The reasons stand below the table, each once.
    let mut reasons: Vec<(&str, Vec<&str>)> = Vec::new();
    for Row { priced, simulated } in rows {
        let Err(why) = simulated else { continue };
        let name = steps::name(priced.strategy);
        match reasons.iter_mut().find(|(known, _)| known == why) {
            Some((_, names)) => names.push(name),
            None => reasons.push((why, vec![name])),
        }
    }
    for (why, names) in reasons {
        out.push_str(&format!("\nNot simulated: {}: {why}", names.join(", ")));
    }
    for (strategy, why) in steps::without_price(plan) {
        out.push_str(&format!("\nNot priced: {}: {why}", steps::name(strategy)));
    }
    out
}
