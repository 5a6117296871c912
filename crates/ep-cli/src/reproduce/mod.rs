//! `hybrid-ep reproduce`: the paper's tables and figures (arXiv 2510.19470) beside what its own model gives.
//!
//! Every part computes its cells, compares them with those of the paper that are known, and draws a conclusion. A
//! conclusion that is not the one that is known to be right ends with exit code 1: this is a test of the model.

mod figure17;
mod render;
mod table4;
mod table7;
mod tables56;

use std::path::PathBuf;

use clap::{Args, ValueEnum};

use crate::failure::{Failure, Verdict};
use crate::output::{to_stderr, to_stdout};
use crate::plan::chart;
use crate::plan::output::Target;

/// `hybrid-ep reproduce`
#[derive(Debug, Args)]
pub(crate) struct ReproduceArgs {
    /// What to reproduce
    #[arg(value_enum, default_value = "all")]
    part: Vec<Part>,
    /// Write the same as Markdown; `-` = stdout, with the text on stderr
    #[arg(long, value_name = "FILE")]
    markdown: Option<PathBuf>,
    /// Draw what can be drawn into this directory, as SVG
    #[arg(long, value_name = "DIR")]
    charts: Option<PathBuf>,
}

#[derive(Debug, Clone, Copy, PartialEq, Eq, ValueEnum)]
enum Part {
    All,
    /// The best domain size of four layers
    Table4,
    /// Iteration times: one slope is known
    Table5,
    /// Iteration times: one slope is known
    Table6,
    /// Messages of all-to-all and all-gather
    Table7,
    /// Nothing of it is known here
    Fig16,
    /// Speedups on a thousand datacenters
    Fig17,
}

/// What became of a claim.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum Outcome {
    Reproduces,
    Differs,
    /// The paper's numbers, or its inputs, are not known here.
    CannotBeSaid,
}

impl Outcome {
    fn of(agrees: bool) -> Self {
        if agrees { Self::Reproduces } else { Self::Differs }
    }

    fn name(self) -> &'static str {
        match self {
            Self::Reproduces => "reproduces",
            Self::Differs => "does not reproduce",
            Self::CannotBeSaid => "cannot be said",
        }
    }
}

/// One claim of the paper, and what became of it.
#[derive(Debug, Clone, PartialEq)]
struct Finding {
    claim: String,
    found: Outcome,
    /// What is known to be right; anything else is a fault of this program.
    expected: Outcome,
    why: String,
}

/// Numbers beside each other.
#[derive(Debug, Clone, PartialEq, Default)]
struct Grid {
    caption: String,
    header: Vec<&'static str>,
    rows: Vec<Vec<String>>,
}

/// A part of the paper.
#[derive(Debug, Clone, PartialEq)]
struct Section {
    title: &'static str,
    about: String,
    grids: Vec<Grid>,
    findings: Vec<Finding>,
    /// File name and picture.
    charts: Vec<(&'static str, String)>,
}

pub(crate) fn main(args: &ReproduceArgs) -> Result<Verdict, Failure> {
    let markdown = Target::resolve("--markdown", args.markdown.as_deref())?;
    if let Some(directory) = &args.charts {
        std::fs::create_dir_all(directory)
            .map_err(|error| Failure::request(format!("--charts {}: {error}", directory.display())))?;
    }
    let sections = sections(&args.part)?;
    let text = render::text(&sections);
    if markdown.is_stdout() {
        to_stderr(&text)?
    } else {
        to_stdout(&text)?
    }
    for (name, svg) in sections.iter().flat_map(|section| &section.charts) {
        if let Some(directory) = &args.charts {
            Target::resolve("--charts", Some(&directory.join(name)))?.write(&chart::on_white(svg))?;
        }
    }
    if args.markdown.is_some() {
        markdown.write(&render::markdown(&sections, args.charts.as_deref()))?;
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

/// Whether every conclusion is the one that is known to be right.
fn as_expected(sections: &[Section]) -> bool {
    sections.iter().flat_map(|section| &section.findings).all(|finding| finding.found == finding.expected)
}

fn figure16() -> Section {
    Section {
        title: "Figure 16",
        about:
            "Neither its points nor the parameters behind them are recorded in this program, so that nothing \
         is set beside them."
                .into(),
        grids: Vec::new(),
        findings: vec![Finding {
            claim: "its points".into(),
            found: Outcome::CannotBeSaid,
            expected: Outcome::CannotBeSaid,
            why: "what the model says of many datacenters is under Figure 17; of a cluster of your own, \
             `hybrid-ep plan \
                  --paper-model`"
                .into(),
        }],
        charts: Vec::new(),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn every_conclusion_is_the_known_one() {
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
    fn an_unexpected_conclusion_is_wrong() {
        let mut sections = sections(&[Part::Table7]).unwrap();
        sections[0].findings[0].found = Outcome::Differs;
        assert!(!as_expected(&sections));
        assert!(render::text(&sections).contains("NOT AS EXPECTED"));
    }
}
