//! Which GPUs hold the same experts: the cluster as squares, a colour for each expert domain.

use ep_plan::planner::Plan;

use crate::failure::Failure;
use crate::plan::chart::{self, Frame, Square};

/// More squares than this are no picture.
const MOST: usize = 4096;
/// Space between members, and for the name of a member, in squares.
const GAP: f64 = 0.5;
const NAME: f64 = 0.9;
/// Width that all members together may have, in squares.
const WIDEST: f64 = 64.0;

/// Width from which there is room for more than a number, in squares.
const NAMED: f64 = 7.0;

/// One member of a level, laid out from the inside.
#[derive(Debug, Clone, Copy)]
struct Layout {
    columns: usize,
    width: f64,
    height: f64,
}

/// The picture; `None` where there are too many GPUs for one.
pub(super) fn draw(plan: &Plan) -> Result<Option<String>, Failure> {
    let partition = plan.partition().map_err(Failure::request)?;
    if partition.gpus() > MOST {
        return Ok(None);
    }
    let groups = partition.export();
    let layouts = layouts(&plan.scaling_factors);
    let mut picture = Picture { plan, layouts: &layouts, squares: Vec::new(), frames: Vec::new() };
    picture.place(0, 0, (0.0, 0.0));
    let group = |rank: usize| groups.rank_groups.get(rank).map_or(0, |at| at.expert_domain);
    let squares: Vec<Square> =
        picture.squares.iter().map(|square| Square { group: group(square.group), ..*square }).collect();
    let size = layouts.first().map_or([1.0, 1.0], |outermost| [outermost.width, outermost.height]);
    chart::squares(&squares, &picture.frames, groups.expert_domains.len(), size).map(Some)
}

/// How the members of each level are arranged, outermost level first; entry `l` is the block of all members of `l`.
fn layouts(members: &[usize]) -> Vec<Layout> {
    let mut inside = (1.0, 1.0);
    let mut layouts = Vec::with_capacity(members.len());
    for (level, &count) in members.iter().enumerate().rev() {
        let innermost = level + 1 == members.len();
        let gap = if innermost { 0.0 } else { GAP };
        let width = |columns: usize| columns as f64 * (inside.0 + gap) - gap;
        let height = |columns: usize| count.div_ceil(columns) as f64 * (inside.1 + gap) - gap;
        // Wider than high, as screens are; the innermost in one row where that is short.
        let wanted = if innermost && count <= 8 { 1e9 } else { 2.6 };
        let columns = (1..=count)
            .filter(|&columns| columns == 1 || width(columns) <= WIDEST)
            .min_by(|&a, &b| {
                let away = |columns: usize| (width(columns) / height(columns) / wanted).ln().abs();
                let holes = |columns: usize| (count.div_ceil(columns) * columns - count) as f64;
                (away(a) + holes(a)).total_cmp(&(away(b) + holes(b)))
            })
            .unwrap_or(1);
        layouts.push(Layout { columns, width: width(columns), height: height(columns) });
        let (frame, name) = if level == 0 { (0.0, 0.0) } else { (2.0 * GAP, NAME) };
        inside = (width(columns) + frame, height(columns) + frame + name);
    }
    layouts.reverse();
    layouts
}

struct Picture<'a> {
    plan: &'a Plan,
    layouts: &'a [Layout],
    /// The group of a square is its rank until all are placed.
    squares: Vec<Square>,
    frames: Vec<Frame>,
}

impl Picture<'_> {
    /// Places the members of a level; `first` is the rank of the first GPU in them.
    fn place(&mut self, level: usize, first: usize, (x, y): (f64, f64)) {
        let inside: usize = self.plan.scaling_factors[level + 1..].iter().product();
        let columns = self.layouts[level].columns;
        for member in 0..self.plan.scaling_factors[level] {
            let (column, row) = ((member % columns) as f64, (member / columns) as f64);
            let rank = first + member * inside;
            let Some(&Layout { width, height, .. }) = self.layouts.get(level + 1) else {
                self.squares.push(Square { x: x + column, y: y + row, group: rank });
                continue;
            };
            let (width, height) = (width + 2.0 * GAP, height + 2.0 * GAP + NAME);
            let (x, y) = (x + column * (width + GAP), y + row * (height + GAP));
            let name = match width {
                wide if wide >= NAMED => format!("member {member} of {}", self.plan.level_names[level]),
                _ => member.to_string(),
            };
            self.frames.push(Frame { x, y, width, height, name });
            self.place(level + 1, rank, (x + GAP, y + GAP + NAME));
        }
    }
}
