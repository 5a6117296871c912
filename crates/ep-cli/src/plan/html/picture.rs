//! Picture of the expert domains: one square per GPU, one colour per domain.

use ep_plan::planner::Plan;

use crate::common::failure::Failure;
use crate::planner::chart::{self, Frame, Square};

/// Maximum number of squares in a picture.
const MOST: usize = 4096;
/// Space between members, in squares.
const GAP: f64 = 0.5;
/// Height of a member's name, in squares.
const NAME: f64 = 0.9;
/// Largest width of all members together, in squares.
const WIDEST: f64 = 64.0;

/// Least width, in squares, in which a member's full name fits; narrower members show only their number.
const NAMED: f64 = 7.0;

/// The arrangement of the members of one level.
#[derive(Debug, Clone, Copy)]
struct Layout {
    columns: usize,
    width: f64,
    height: f64,
}

/// Draws the picture; `None` if there are too many GPUs.
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

/// The arrangement of the members of each level, outermost level first. Entry `l` is the block of all members of level
/// `l`.
fn layouts(members: &[usize]) -> Vec<Layout> {
    let mut inside = (1.0, 1.0);
    let mut layouts = Vec::with_capacity(members.len());
    for (level, &count) in members.iter().enumerate().rev() {
        let innermost = level + 1 == members.len();
        let gap = if innermost { 0.0 } else { GAP };
        let width = |columns: usize| columns as f64 * (inside.0 + gap) - gap;
        let height = |columns: usize| count.div_ceil(columns) as f64 * (inside.1 + gap) - gap;
        // Blocks are wider than high, like screens. A short innermost level is one row.
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
    /// Until all squares are placed, `group` holds the rank of the square.
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
