//! Text that the planner's commands share: tables, and the description of a problem.

pub(crate) use ep_plan::planner::domain_sizes_text as sizes;
use ep_plan::planner::{Batch, Plan, Work};

pub(crate) use crate::common::table::table;
use crate::common::units;
use crate::planner::problem::Problem;

/// The problem in two lines.
pub(crate) fn heading(problem: &Problem, plan: &Plan) -> String {
    let Problem { cluster, model, options, .. } = problem;
    let gpus: usize = cluster.levels.iter().map(|level| level.scaling_factor).product();
    let work = match options.work {
        Work::Training => "training",
        Work::Forward => "forward pass of training",
    };
    let batch = match (options.batch, model.global_batch, options.work) {
        (Batch::Model, Some(batch), Work::Training) => format!("{} in a step", units::count(batch as u64)),
        _ => units::counted(options.micro_batches, "micro-batch").replace("batchs", "batches"),
    };
    format!(
        "{} on {}: {}, {} each\n{work}, {} tokens per GPU and micro-batch, {}, weights compressed {}x, gradients {}x\n",
        model.name,
        cluster.name,
        units::counted(gpus, "GPU"),
        units::counted(plan.experts_per_gpu, "expert"),
        units::count(model.tokens_per_gpu as u64),
        batch,
        options.weight_compression,
        options.gradient_compression,
    )
}
