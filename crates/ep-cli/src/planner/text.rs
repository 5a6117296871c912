//! Text that the planner's commands share: tables, and the description of a problem.

use comfy_table::{CellAlignment, LineStyle, Table, TableStyle};
pub(crate) use ep_plan::planner::domain_sizes_text as sizes;
use ep_plan::planner::{Batch, Plan, Work};

use crate::common::units;
use crate::planner::problem::Problem;

/// Horizontal lines above and below the table and below its header; no others.
const STYLE: TableStyle = {
    const LINE: LineStyle = LineStyle::none().fill('─').junction('─');
    TableStyle::new().top_border(LINE).header_separator(LINE).bottom_border(LINE)
};

/// Formats a table. The first `left` columns are aligned left, the others right.
pub(crate) fn table(header: &[&str], rows: Vec<Vec<String>>, left: usize) -> String {
    let mut table = Table::new();
    table.load_style(STYLE).set_header(header.to_vec());
    for row in rows {
        table.add_row(row);
    }
    for column in table.column_iter_mut().skip(left) {
        column.set_cell_alignment(CellAlignment::Right);
    }
    table.trim_fmt()
}

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
