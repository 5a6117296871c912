//! `hybrid-ep reproduce`: recomputes tables and figures of the HybridEP paper (arXiv 2510.19470) with the paper's
//! model.
//!
//! Each part computes its values, compares them with the paper's values that this program records, and draws
//! conclusions. The expected conclusions are recorded too; if one differs, the exit code is 1. So the command tests the
//! model.

mod figure17;
mod render;
mod section;
mod table4;
mod table7;
mod tables56;

use std::path::PathBuf;

use clap::{Args, ValueEnum};

use self::section::{Conclusion, Finding, Section, as_expected};
use crate::common::failure::{Failure, Verdict};
use crate::common::output::{Checked, Target, one_line, print_beside};
use crate::planner::chart;

/// `hybrid-ep reproduce`
#[derive(Debug, Args)]
pub(crate) struct ReproduceArgs {
    /// Parts of the paper to recompute
    #[arg(value_enum, default_value = "all")]
    part: Vec<Part>,
    /// Write the comparison as Markdown; `-` = stdout, and the text goes to stderr
    #[arg(long, value_name = "FILE")]
    markdown: Option<PathBuf>,
    /// Write charts as SVG files into this directory
    #[arg(long, value_name = "DIR")]
    charts: Option<PathBuf>,
}

#[derive(Debug, Clone, Copy, PartialEq, Eq, ValueEnum)]
enum Part {
    /// All parts
    All,
    /// Best domain size of four layers
    Table4,
    /// Iteration times of four systems, with Table VI
    Table5,
    /// Iteration times without and with migration, with Table V
    Table6,
    /// Number of messages of all-to-all and all-gather
    Table7,
    /// Figure 16, which cannot be checked: its points and parameters are not in the paper's text
    Fig16,
    /// Speedups on up to 1000 datacenters
    Fig17,
}

pub(crate) fn main(args: &ReproduceArgs) -> Result<Verdict, Failure> {
    let markdown = Target::resolve("--markdown", args.markdown.as_deref())?;
    if let Some(directory) = &args.charts {
        std::fs::create_dir_all(directory)
            .map_err(|error| Failure::request(format!("--charts {}: {error}", directory.display())))?;
    }
    let sections = sections(&args.part)?;
    print_beside(&Checked::text(render::text(&sections), &[])?, &[&markdown])?;
    for (name, svg) in sections.iter().flat_map(|section| &section.charts) {
        if let Some(directory) = &args.charts {
            let chart = Checked::text(chart::on_white(svg), &[])?;
            Target::resolve("--charts", Some(&directory.join(name)))?.write(&chart)?;
        }
    }
    if markdown.is_wanted() {
        let charts = args.charts.as_ref().map(|directory| one_line(&directory.display().to_string()));
        let names: Vec<&str> = charts.iter().map(String::as_str).collect();
        let text = render::markdown(&sections, args.charts.as_deref());
        markdown.write(&Checked::text(text, &names)?)?;
    }
    Ok(Verdict::of(as_expected(&sections)))
}

fn sections(parts: &[Part]) -> Result<Vec<Section>, Failure> {
    let wanted = |part| parts.contains(&Part::All) || parts.contains(&part);
    let mut sections = Vec::new();
    if wanted(Part::Table4) {
        sections.push(table4::section()?);
    }
    if wanted(Part::Table5) || wanted(Part::Table6) {
        sections.push(tables56::section()?);
    }
    if wanted(Part::Table7) {
        sections.push(table7::section()?);
    }
    if wanted(Part::Fig16) {
        sections.push(figure16());
    }
    if wanted(Part::Fig17) {
        sections.push(figure17::section()?);
    }
    Ok(sections)
}

fn figure16() -> Section {
    Section {
        title: "Figure 16",
        about:
            "The paper's text gives neither the points of the figure nor their parameters, so there is no comparison."
                .into(),
        grids: Vec::new(),
        findings: vec![Finding {
            claim: "its points".into(),
            found: Conclusion::CannotBeChecked,
            expected: Conclusion::CannotBeChecked,
            why: "Figure 17 below has the model's speedups for many datacenters; `hybrid-ep plan --paper-model` has \
                  those of your own cluster"
                .into(),
        }],
        charts: Vec::new(),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn every_conclusion_is_as_expected() {
        let sections = sections(&[Part::All]).unwrap();
        assert_eq!(sections.len(), 5);
        for section in &sections {
            for finding in &section.findings {
                assert_eq!(finding.found, finding.expected, "{}: {}", section.title, finding.claim);
            }
        }
        assert!(as_expected(&sections));
    }

    #[test]
    fn an_unexpected_conclusion_is_reported() {
        let mut sections = sections(&[Part::Table7]).unwrap();
        sections[0].findings[0].found = Conclusion::Differs;
        assert!(!as_expected(&sections));
        assert!(render::text(&sections).contains("NOT AS EXPECTED"));
    }
}
