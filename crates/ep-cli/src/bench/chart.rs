//! The load as text charts: one bar per rank, and one column per expert or per group of experts.

use std::fmt::Write as _;

use crate::bench::runs::Load;
use crate::common::units;

/// Characters of the longest bar of a rank.
const BAR: usize = 40;
/// Maximum number of ranks that have a bar.
const LINES: usize = 32;
/// Columns of the experts' chart.
const COLUMNS: usize = 64;
/// Lines of the experts' chart.
const HEIGHT: usize = 3;
/// Blocks filled by eighths from the bottom and from the left.
const UPWARD: [char; 9] = [' ', '▁', '▂', '▃', '▄', '▅', '▆', '▇', '█'];
const RIGHTWARD: [char; 9] = [' ', '▏', '▎', '▍', '▌', '▋', '▊', '▉', '█'];

/// `unit`: what the load counts.
pub(super) fn render(load: &Load, unit: &str) -> String {
    // Writing to a string cannot fail.
    let mut out = String::new();
    let _ = writeln!(out, "load per rank, {unit} received (max/mean {:.2})", load.rank_max_over_mean);
    let most = load.tokens_per_rank.iter().copied().max().unwrap_or_default();
    for (rank, &rows) in load.tokens_per_rank.iter().enumerate().take(LINES) {
        let bar = bar(rows, most);
        let _ = writeln!(out, "  rank {rank:<4} {bar:<BAR$} {}", units::count(rows));
    }
    if let Some(others) = load.tokens_per_rank.len().checked_sub(LINES + 1) {
        let _ = writeln!(out, "  ... and {} more", others + 1);
    }
    let _ = writeln!(out, "\nload per expert, {unit} (max/mean {:.2})", load.expert_max_over_mean);
    out.push_str(&columns(&load.tokens_per_expert));
    out
}

fn eighths(part: u64, whole: u64, length: usize) -> usize {
    if whole == 0 {
        return 0;
    }
    let eighths = (part as f64 / whole as f64 * (8 * length) as f64).round() as usize;
    // A load that is not 0 must be visible.
    eighths.max(usize::from(part > 0))
}

fn bar(part: u64, whole: u64) -> String {
    let eighths = eighths(part, whole, BAR);
    let end = RIGHTWARD[eighths % 8];
    let mut bar = RIGHTWARD[8].to_string().repeat(eighths / 8);
    if end != ' ' {
        bar.push(end);
    }
    bar
}

/// One column per expert; with too many experts, one column per group, as high as its most loaded expert.
fn columns(loads: &[u64]) -> String {
    let per_column = loads.len().div_ceil(COLUMNS).max(1);
    let columns: Vec<u64> =
        loads.chunks(per_column).map(|loads| loads.iter().copied().max().unwrap_or_default()).collect();
    let most = columns.iter().copied().max().unwrap_or_default();
    let mut out = String::new();
    for line in (0..HEIGHT).rev() {
        let level = |&load: &u64| UPWARD[eighths(load, most, HEIGHT).saturating_sub(8 * line).min(8)];
        let columns: String = columns.iter().map(level).collect();
        let _ = match line + 1 {
            HEIGHT => writeln!(out, "  {columns} {}", units::count(most)),
            _ => writeln!(out, "  {columns}"),
        };
    }
    let last = format!("{}", loads.len().saturating_sub(1));
    let width = columns.len().saturating_sub(1);
    let _ = write!(out, "  0{last:>width$}");
    if per_column > 1 {
        let _ = write!(out, "  (each column shows the most loaded of {per_column} experts)");
    }
    out.push('\n');
    out
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn bars_are_in_proportion() {
        assert_eq!(bar(8, 8), "█".repeat(40));
        assert_eq!(bar(4, 8), "█".repeat(20));
        assert_eq!(bar(1, 1_000_000), "▏");
        assert_eq!((bar(0, 8), bar(0, 0)), (String::new(), String::new()));
    }

    #[test]
    fn few_experts_have_one_column_each() {
        #[rustfmt::skip]
        assert_eq!(columns(&[0, 8, 4, 2]), concat!(
            "   █   8\n",
            "   █▄ \n",
            "   ██▆\n",
            "  0  3\n",
        ));
    }

    #[test]
    fn many_experts_share_columns_and_the_most_loaded_one_shows() {
        let mut loads = vec![1; 256];
        loads[130] = 800;
        let chart = columns(&loads);
        let top = chart.lines().next().unwrap();
        assert_eq!(top.chars().position(|c| c == '█'), Some(2 + 130 / 4));
        assert!(top.ends_with(" 800") && chart.contains("most loaded of 4 experts"), "{chart}");
        assert_eq!(columns(&[]).lines().count(), HEIGHT + 1);
    }
}
