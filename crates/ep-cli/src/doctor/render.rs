//! The report as plain text for a terminal.

use std::fmt::Write as _;

use super::{check::Check, report::DoctorReport};

/// Longest value in text, such as a list of nodes; JSON has the whole value.
const MAX_VALUE_CHARS: usize = 160;

/// The report as aligned plain text. Each fact has a line with a mark (`ok`, `--` for absent but not required, `!!` for a
/// problem), a name and the finding. The last line is the verdict.
pub(super) fn render(report: &DoctorReport) -> String {
    let checks = report.sections.iter().flat_map(|section| &section.checks);
    let width = checks.map(|check| printable(&check.name).chars().count()).max().unwrap_or(0);
    let mut text = format!("hybrid-ep {}\n", report.hybrid_ep_version);
    for section in &report.sections {
        text.push('\n');
        text.push_str(section.title);
        text.push('\n');
        for check in &section.checks {
            push_check(&mut text, check, width);
        }
    }
    text.push('\n');
    // The verdict is never cut.
    text.push_str(&on_one_line(&report.verdict.text));
    text.push('\n');
    text
}

fn push_check(text: &mut String, check: &Check, width: usize) {
    let (name, found) = (printable(&check.name), printable(&check.found));
    let mark = check.mark.symbol();
    // Writing to a string does not fail.
    let _ = writeln!(text, "  {mark}  {name:<width$}  {found}");
    if let (Some(enables), Some(how)) = (&check.enables, &check.how) {
        let (enables, how) = (on_one_line(enables), on_one_line(how));
        let _ = writeln!(text, "      {:width$}  for {enables}: {how}", "");
    }
}

/// A value on one line, cut to a maximum length.
fn printable(value: &str) -> String {
    let mut text = on_one_line(value);
    if let Some((end, _)) = text.char_indices().nth(MAX_VALUE_CHARS) {
        text.truncate(end);
        text.push_str("...");
    }
    text
}

/// Replaces control characters, which a terminal could act on: values come from files and variables with any content.
fn on_one_line(value: &str) -> String {
    let chars = value.chars();
    chars.map(|c| if c.is_control() { '?' } else { c }).collect()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn values_stay_on_one_line_and_short() {
        assert_eq!(printable("a\x1b[31m\nb"), "a?[31m?b");
        assert_eq!(printable(&"x".repeat(MAX_VALUE_CHARS)).len(), MAX_VALUE_CHARS);
        let long = printable(&"x".repeat(MAX_VALUE_CHARS + 1));
        assert_eq!(long.len(), MAX_VALUE_CHARS + 3);
    }
}
