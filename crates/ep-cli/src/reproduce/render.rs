//! Sections as text and as Markdown.

use std::fmt::Write as _;
use std::path::Path;

use super::section::{Finding, Grid, Section, as_expected};
use crate::planner::text::table;

const SOURCE: &str =
    "HybridEP, arXiv 2510.19470: the paper's values beside values computed by the paper's own model";

pub(super) fn text(sections: &[Section]) -> String {
    // Writing to a string cannot fail.
    let mut out = format!("{SOURCE}\n");
    for section in sections {
        let _ = write!(out, "\n== {} ==\n{}\n", section.title, section.about);
        for Grid { caption, header, rows } in &section.grids {
            let _ = write!(out, "\n{caption}\n{}\n", table(header, rows.clone(), 1));
        }
        out.push('\n');
        for finding in &section.findings {
            let _ = writeln!(out, "{}", sentence(finding));
        }
    }
    let _ = write!(out, "\n{}\n", verdict(sections));
    out
}

pub(super) fn markdown(sections: &[Section], charts: Option<&Path>) -> String {
    let mut out = format!("# Reproduction\n\n{SOURCE}. Made by `hybrid-ep reproduce --markdown`.\n");
    for section in sections {
        let _ = write!(out, "\n## {}\n\n{}\n", section.title, section.about);
        for Grid { caption, header, rows } in &section.grids {
            let line = |cells: Vec<&str>| format!("| {} |\n", cells.join(" | "));
            let _ = write!(out, "\n{caption}:\n\n{}|{}\n", line(header.clone()), "---|".repeat(header.len()));
            for row in rows {
                out.push_str(&line(row.iter().map(String::as_str).collect()));
            }
        }
        if let Some(directory) = charts {
            for (name, _) in &section.charts {
                let _ = write!(out, "\n![{name}]({})\n", directory.join(name).display());
            }
        }
        out.push('\n');
        for finding in &section.findings {
            let _ = writeln!(out, "- {}", sentence(finding));
        }
    }
    let _ = write!(out, "\n{}\n", verdict(sections));
    out
}

fn sentence(finding: &Finding) -> String {
    let Finding { claim, found, expected, why } = finding;
    let news = match found == expected {
        true => String::new(),
        false => format!(" NOT AS EXPECTED: the expected conclusion is: {}.", expected.name()),
    };
    format!("{}: {claim} ({why}).{news}", found.name())
}

fn verdict(sections: &[Section]) -> &'static str {
    match as_expected(sections) {
        true => "Every conclusion is as expected.",
        false => "NOT AS EXPECTED: at least one conclusion above differs from the expected one.",
    }
}
