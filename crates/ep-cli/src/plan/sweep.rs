//! `--sweep`: plans for several values of one key, and compares the strategies at each value.

use std::fmt::Write as _;

use ep_plan::step::{Fit, StepPrice, Strategy};
use ep_plan::units::Seconds;
use serde::Serialize;

use super::steps;
use super::words::{baseline_name, relation};
use crate::common::units;
use crate::planner::key::Key;
use crate::planner::problem::Problem;
use crate::planner::text::{sizes, table};

/// Default number of values.
const POINTS: usize = 13;
/// Maximum number of values: more do not fit in a chart.
const MAX_POINTS: usize = 200;

/// The parsed option `KEY=FROM..TO[:POINTS]`.
#[derive(Debug, Clone, PartialEq)]
pub(crate) struct Request {
    key: Key,
    values: Vec<f64>,
    logarithmic: bool,
}

/// The result of a sweep.
#[derive(Debug, Clone, PartialEq, Serialize)]
pub(crate) struct Sweep {
    /// The key in words.
    pub(crate) key: String,
    /// Unit of the values; empty for counts and ratios.
    pub(crate) unit: &'static str,
    /// Whether the values are spaced logarithmically.
    pub(crate) logarithmic: bool,
    pub(crate) points: Vec<Point>,
}

impl Sweep {
    /// The schemes that have a time at any value, in the order of the first point that has them.
    pub(crate) fn schemes(&self) -> Vec<&'static str> {
        let mut names = Vec::new();
        for point in self.points.iter().filter_map(|point| point.outcome.as_ref().ok()) {
            for (name, _) in &point.others {
                if !names.contains(name) {
                    names.push(*name);
                }
            }
        }
        names
    }

    /// Whether any value has a plan.
    pub(super) fn has_plan(&self) -> bool {
        self.points.iter().any(|point| point.outcome.is_ok())
    }

    /// The sweep as a table for a terminal.
    pub(super) fn render(&self) -> String {
        let unit = if self.unit.is_empty() { String::new() } else { format!(" ({})", self.unit) };
        let name = format!("{}{unit}", self.key);
        let schemes = self.schemes();
        // Only steps are planned on parts of the cluster.
        let of_steps =
            self.points.iter().any(|point| point.outcome.as_ref().is_ok_and(|plan| plan.best.is_some()));
        let rows = self.points.iter().map(|Point { value, outcome }| match outcome {
            Ok(point) => [format!("{value}"), point.choice.clone(), Seconds(point.seconds).to_string()]
                .into_iter()
                .chain(schemes.iter().map(|scheme| match point.of(scheme) {
                    _ if point.best == Some(*scheme) => "best".into(),
                    Some(seconds) => relation(point.seconds / seconds),
                    None => "-".into(),
                }))
                .chain(of_steps.then(|| match &point.fewer {
                    Some(part) => format!("{} ({})", relation(part.gain), units::count(part.gpus as u64)),
                    None => "-".into(),
                }))
                .collect(),
            Err(_) => vec![format!("{value}"), "no plan".into()],
        });
        let header: Vec<&str> = [&*name, "best", "time"]
            .into_iter()
            .chain(schemes.iter().copied())
            .chain(of_steps.then_some("fewer GPUs"))
            .collect();
        let mut out = table(&header, rows, 0);
        // The reasons stand below the table, each once.
        let mut reasons: Vec<(&str, Vec<String>)> = Vec::new();
        for Point { value, outcome } in &self.points {
            let Err(why) = outcome else { continue };
            match reasons.iter_mut().find(|(known, _)| known == why) {
                Some((_, values)) => values.push(value.to_string()),
                None => reasons.push((why, vec![value.to_string()])),
            }
        }
        for (why, values) in reasons {
            let _ = write!(out, "\nNo plan at {}: {why}", values.join(", "));
        }
        out
    }
}

impl PointPlan {
    /// Seconds of a scheme.
    pub(crate) fn of(&self, scheme: &str) -> Option<f64> {
        self.others.iter().find(|(name, _)| *name == scheme).map(|(_, seconds)| *seconds)
    }
}

/// One value.
#[derive(Debug, Clone, PartialEq, Serialize)]
pub(crate) struct Point {
    pub(crate) value: f64,
    /// The plan at this value, or the reason why there is none.
    pub(crate) outcome: Result<PointPlan, String>,
}

/// The plan at one value.
#[derive(Debug, Clone, PartialEq, Serialize)]
pub(crate) struct PointPlan {
    /// The choice in a few words: the strategy or, for forward passes, the domain sizes.
    pub(crate) choice: String,
    /// Seconds of the choice: of a step or, for forward passes, of a layer.
    pub(crate) seconds: f64,
    /// Seconds of the schemes to compare with, by name. A scheme that does not fit is left out.
    pub(crate) others: Vec<(&'static str, f64)>,
    /// The fastest part of the cluster, if it is faster than all GPUs.
    pub(crate) fewer: Option<Part>,
    /// The name in `others` of the choice; `None` for forward passes, whose choice is none of the schemes.
    #[serde(skip)]
    pub(crate) best: Option<&'static str>,
}

/// A part of the cluster that is faster than all of it.
#[derive(Debug, Clone, PartialEq, Serialize)]
pub(crate) struct Part {
    pub(crate) sites: Vec<usize>,
    pub(crate) members: Vec<usize>,
    pub(crate) gpus: usize,
    /// Its tokens per second over those of the best strategy on all GPUs.
    pub(crate) gain: f64,
}

impl Request {
    pub(crate) fn parse(text: &str, problem: &Problem) -> Result<Self, String> {
        const FORM: &str = "write KEY=FROM..TO, as in bandwidth=1Gbit/s..400Gbit/s";
        let (name, range) = text.split_once('=').ok_or(FORM)?;
        let key = Key::find(name, &problem.cluster)?;
        if !key.is_number() {
            return Err(format!("`{name}` is not a number; use --set"));
        }
        let (from, rest) = range.split_once("..").ok_or(FORM)?;
        let (to, points) = rest.split_once(':').map_or((rest, None), |(to, points)| (to, Some(points)));
        let points = match points.map(str::parse) {
            None => POINTS,
            Some(Ok(points)) if (2..=MAX_POINTS).contains(&points) => points,
            Some(_) => return Err(format!("the number of points must be from 2 to {MAX_POINTS}")),
        };
        let (from, to) = (key.parse(from)?, key.parse(to)?);
        if !(from < to && from >= 0.0) {
            return Err("the first value must be below the second, and neither below zero".into());
        }
        let logarithmic = from > 0.0 && to / from >= 8.0;
        let mut values: Vec<f64> = (0..points)
            .map(|index| {
                let part = index as f64 / (points - 1) as f64;
                match (index == 0, index + 1 == points) {
                    (true, _) => from,
                    (_, true) => to,
                    _ if logarithmic => rounded(from * (to / from).powf(part)),
                    _ => rounded(from + (to - from) * part),
                }
            })
            .map(|value| if key.is_count() { value.round() } else { value })
            .collect();
        values.dedup();
        Ok(Self { key, values, logarithmic })
    }

    pub(crate) fn run(&self, problem: &Problem) -> Sweep {
        let point = |&value: &f64| {
            let mut changed = problem.clone();
            changed.apply(&self.key, value);
            Point { value, outcome: outcome(&changed) }
        };
        Sweep {
            key: self.key.label.clone(),
            unit: self.key.unit(),
            logarithmic: self.logarithmic,
            points: self.values.iter().map(point).collect(),
        }
    }
}

fn outcome(problem: &Problem) -> Result<PointPlan, String> {
    let said = |error: ep_plan::PlanError| error.to_string();
    // A plan that leaves memory free replaces a faster one that does not, so a time may grow with the memory.
    let tight = |price: &StepPrice| if price.fit == Fit::Fits { "" } else { " (tight)" };
    if let Some(planner) = problem.step_planner().map_err(said)? {
        let plan = planner.plan().map_err(said)?;
        let best = plan.best();
        let choice = match best.strategy {
            Strategy::ExpertDomains => {
                format!(
                    "{} {}{}",
                    steps::name(best.strategy),
                    sizes(&best.candidate.domain_sizes),
                    tight(best)
                )
            }
            other => format!("{}{}", steps::name(other), tight(best)),
        };
        let others = Strategy::ALL
            .into_iter()
            .filter_map(|strategy| Some((steps::name(strategy), plan.price(strategy)?.step_time.0)));
        let parts = planner.on_fewer();
        let fewer = steps::faster_part(plan.best(), &parts).map(|part| Part {
            sites: part.sites.clone(),
            members: part.members.clone(),
            gpus: part.gpus,
            gain: steps::gain(part, plan.best()),
        });
        return Ok(PointPlan {
            choice,
            seconds: best.step_time.0,
            others: others.collect(),
            fewer,
            best: Some(steps::name(best.strategy)),
        });
    }
    let plan = problem.try_planner().map_err(said)?.plan();
    let others = plan.baselines.iter().filter(|baseline| baseline.fits);
    Ok(PointPlan {
        choice: sizes(&plan.best.domain_sizes),
        seconds: plan.best.layer_time.0,
        others: others
            .map(|baseline| (baseline_name(baseline.kind), baseline.candidate.layer_time.0))
            .collect(),
        fewer: None,
        best: None,
    })
}

/// Rounds to three significant digits.
fn rounded(value: f64) -> f64 {
    format!("{value:.2e}").parse().unwrap_or(value)
}
