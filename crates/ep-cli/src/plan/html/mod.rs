//! The report as one HTML file, with light and dark colours. It has no scripts and loads nothing.

mod markup;
mod picture;
mod sections;

use ep_plan::input;
use ep_plan::planner::{Plan, Setting};

use self::markup::escape;
use super::steps::Shown;
use super::sweep::Sweep;
use super::text;
use crate::common::failure::Failure;
use crate::planner::problem::Problem;
use crate::planner::text::heading;

const STYLE: &str = include_str!("style.css");

/// The lines of a heading after the title, as sentences.
fn about(heading: &str) -> String {
    let lines = heading.lines().skip(1).filter(|line| !line.is_empty());
    lines.map(|line| line.trim_end_matches('.')).collect::<Vec<_>>().join(". ")
}

pub(super) fn render(
    problem: &Problem,
    step: Option<&Shown>,
    plan: &Plan,
    sweep: Option<&Sweep>,
) -> Result<String, Failure> {
    let title = format!("{} on {}", problem.model.name, problem.cluster.name);
    let mut body = format!(
        "<header><p class=\"kicker\">hybrid-ep plan</p><h1>{}</h1><p class=\"about\">{}</p></header>\n",
        escape(&title),
        escape(&about(&heading(problem, plan)))
    );
    match step {
        Some(shown) => body.push_str(&sections::step_answer(shown, problem)),
        None => body.push_str(&sections::answer(plan)),
    }
    for note in &problem.notes {
        body.push_str(&markup::note(note));
    }
    for line in text::assumed(problem) {
        body.push_str(&markup::note(&line));
    }
    if let Some(shown) = step {
        body.push_str(&sections::steps(&shown.plan, problem)?);
        body.push_str(&sections::larger(shown));
        body.push_str(&sections::layers_title(problem, shown, plan));
    }
    body.push_str(&sections::domains(plan)?);
    body.push_str(&sections::phases(problem, plan)?);
    body.push_str(&sections::compared(plan)?);
    if problem.options.setting == Setting::Full {
        body.push_str(&sections::compression(problem, step, plan));
    }
    if let Some(sweep) = sweep {
        body.push_str(&sections::swept(sweep)?);
    }
    body.push_str(&sections::links(plan)?);
    body.push_str(&sections::memory(problem, step, plan)?);
    body.push_str(&sections::why(plan));
    let toml = input::to_toml(&problem.cluster, &problem.model, &problem.options);
    body.push_str(&format!(
        "<section><h2>The problem</h2><details><summary>as TOML, for hybrid-ep plan --cluster FILE</summary>\
         <pre>{}</pre></details></section>\n<footer>hybrid-ep {}</footer>\n",
        escape(&toml),
        env!("CARGO_PKG_VERSION")
    ));
    Ok(format!(
        "<!DOCTYPE html>\n<html lang=\"en\">\n<head>\n<meta charset=\"utf-8\">\n\
         <meta name=\"viewport\" content=\"width=device-width, initial-scale=1\">\n\
         <meta name=\"color-scheme\" content=\"light dark\">\n<title>{}</title>\n<style>\n{STYLE}</style>\n</head>\n\
         <body>\n{body}</body>\n</html>",
        escape(&title)
    ))
}
