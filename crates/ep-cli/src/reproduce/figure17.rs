//! Figure 17: speedups over expert parallelism on many datacenters of one GPU each.
//!
//! The paper gives two ranges and no parameters. [`ep_plan::paper`] has a parameter set for each range, fitted to it.

use ep_plan::paper::{SIMULATION_FIXED_DOMAIN, SIMULATION_GROWING_DOMAIN, SimulationCase};
use ep_plan::units::{Bytes, BytesPerSecond};
use ep_plan::{Seconds, StreamInput, StreamModel};

use super::section::{Conclusion, Finding, Grid, Section, agreement};
use crate::common::failure::Failure;
use crate::planner::chart::{self, Line};

const DATACENTERS: usize = 1000;
/// Relative tolerance for the ends of a range, which the paper gives with three digits.
const TOLERANCE: f64 = 0.01;
/// Number of values for each of the two ratios in the search for a single configuration.
const STEPS: usize = 160;

/// Speedups at several bandwidths for one domain size, with the results of an independent computation of the formula.
struct Series {
    case: SimulationCase,
    domain_size: usize,
    gbit_per_s: &'static [f64],
    reference: &'static [f64],
}

const FIXED: Series = Series {
    case: SIMULATION_FIXED_DOMAIN,
    domain_size: 500,
    gbit_per_s: &[1.25, 2.5, 5.0, 10.0, 20.0],
    reference: &[1.4568, 1.2961, 1.1739, 1.0952, 1.0500],
};

const GROWING: [Series; 3] = [
    growing(1000, &[3.7795, 2.5488, 1.6195, 1.3098]),
    growing(500, &[1.6067, 1.4358, 1.2362, 1.1340]),
    growing(250, &[1.2322, 1.1785, 1.1054, 1.0626]),
];

const fn growing(domain_size: usize, reference: &'static [f64]) -> Series {
    Series { case: SIMULATION_GROWING_DOMAIN, domain_size, gbit_per_s: &[1.0, 2.0, 5.0, 10.0], reference }
}

/// Speedups of domains of 250 at 1 Gbit/s, by number of datacenters, from the independent computation.
const DECLINE: [(usize, f64); 4] = [(250, 4.0884), (500, 1.6055), (750, 1.3356), (1000, 1.2322)];

/// The paper's ranges: lowest and highest speedup.
const FIXED_RANGE: [f64; 2] = [1.05, 1.45];
const GROWING_RANGE: [f64; 2] = [1.31, 3.76];

impl Series {
    fn speedups(&self) -> Result<Vec<f64>, Failure> {
        self.gbit_per_s
            .iter()
            .map(|&rate| speedup(&self.case.input(DATACENTERS, rate), self.domain_size))
            .collect()
    }

    fn grid(&self, range: Option<[f64; 2]>) -> Result<Grid, Failure> {
        let case = &self.case;
        let speedups = self.speedups()?;
        let rows =
            self.gbit_per_s.iter().zip(&speedups).zip(self.reference).map(|((rate, ours), reference)| {
                // The slowest links give the highest speedup.
                let paper = range.and_then(|[low, high]| match rate {
                    _ if rate == &self.gbit_per_s[0] => Some(high),
                    _ if rate == &self.gbit_per_s[self.gbit_per_s.len() - 1] => Some(low),
                    _ => None,
                });
                vec![
                    format!("{rate}"),
                    format!("{ours:.4}"),
                    format!("{reference:.4}"),
                    paper.map_or("not in the text".into(), |paper| format!("{paper:.2}")),
                    paper.map_or_else(|| "-".into(), |paper| agreement(near(*ours, paper))),
                ]
            });
        Ok(Grid {
            caption: format!(
                "S = {} of {DATACENTERS}: D {} MB, P_E {} B, L {} ms (fitted, not from the paper); agrees: within {} %",
                self.domain_size,
                case.token_mb,
                case.expert_bytes,
                case.pre_expert_ms,
                100.0 * TOLERANCE
            ),
            header: vec!["Gbit/s", "computed", "independent", "paper", "agrees"],
            rows: rows.collect(),
        })
    }

    fn line(&self, label: String) -> Result<Line, Failure> {
        let points = self.gbit_per_s.iter().copied().zip(self.speedups()?).collect();
        Ok(Line { label, points, notes: Vec::new() })
    }
}

pub(super) fn section() -> Result<Section, Failure> {
    let decline: Vec<f64> = DECLINE
        .iter()
        .map(|&(all, _)| speedup(&SIMULATION_GROWING_DOMAIN.input(all, 1.0), 250))
        .collect::<Result<_, _>>()?;
    let mut grids = vec![FIXED.grid(Some(FIXED_RANGE))?];
    for (index, series) in GROWING.iter().enumerate() {
        grids.push(series.grid((index == 0).then_some(GROWING_RANGE))?);
    }
    grids.push(Grid {
        caption: "Domains of 250 at 1 Gbit/s, as the number of datacenters grows".into(),
        header: vec!["datacenters", "computed", "independent"],
        rows: DECLINE
            .iter()
            .zip(&decline)
            .map(|((all, reference), ours)| {
                vec![all.to_string(), format!("{ours:.4}"), format!("{reference:.4}")]
            })
            .collect(),
    });
    Ok(Section {
        title: "Figure 17: many datacenters of one GPU",
        about: "The paper's text gives two ranges of speedups over plain expert parallelism. Not in the text: the points, \
                the bandwidths, and every other parameter. The parameters \
                here are fitted to each range. They show that the model can give these ranges, not that the paper used \
                these parameters. The independent values are from another implementation of the same formula."
            .into(),
        grids,
        findings: findings(&decline)?,
        charts: pictures(&decline)?,
    })
}

fn findings(decline: &[f64]) -> Result<Vec<Finding>, Failure> {
    let mut four_digits = true;
    for series in std::iter::once(&FIXED).chain(&GROWING) {
        four_digits &= same_digits(&series.speedups()?, series.reference);
    }
    four_digits &= same_digits(decline, &DECLINE.map(|(_, reference)| reference));
    let (fixed, growing) = (FIXED.speedups()?, GROWING[0].speedups()?);
    let ends = |speedups: &[f64], [low, high]: [f64; 2]| {
        let (least, most) = speedups
            .iter()
            .fold((f64::INFINITY, 0.0f64), |(least, most), &speedup| (least.min(speedup), most.max(speedup)));
        (
            Conclusion::of(near(least, low) && near(most, high)),
            format!("computed {least:.4} to {most:.4}, with fitted parameters"),
        )
    };
    let (fixed_found, fixed_why) = ends(&fixed, FIXED_RANGE);
    let (growing_found, growing_why) = ends(&growing, GROWING_RANGE);
    let miss = closest_single_configuration()?;
    let finding = |claim: &str, found, expected, why| Finding { claim: claim.into(), found, expected, why };
    Ok(vec![
        finding("1.05x to 1.45x with fixed domains", fixed_found, Conclusion::Reproduces, fixed_why),
        finding("1.31x to 3.76x with growing domains", growing_found, Conclusion::Reproduces, growing_why),
        finding(
            "both ranges from one configuration",
            Conclusion::of(miss < TOLERANCE),
            Conclusion::Differs,
            format!(
                "among {STEPS} x {STEPS} ratios of D and P_E to L, with any domain sizes, the closest misses one end by \
                 {:.1} % at these bandwidths; those of the paper are not known",
                100.0 * miss
            ),
        ),
        finding(
            "the speedup declines as datacenters are added and domains keep their size",
            Conclusion::of(decline.windows(2).all(|pair| pair[0] > pair[1])),
            Conclusion::Reproduces,
            "the direction only; the paper's points are not recorded here".into(),
        ),
        finding(
            "the fitted parameter sets, computed independently",
            Conclusion::of(four_digits),
            Conclusion::Reproduces,
            "every speedup agrees to four decimals".into(),
        ),
    ])
}

/// The minimum, over configurations and pairs of domain sizes, of the largest relative distance to the four ends of the ranges.
///
/// Only the ratios of the model's inputs matter, so L = 1 s, and D and P_E are multiples of the bytes that 1 Gbit/s
/// carries in that time.
fn closest_single_configuration() -> Result<f64, Failure> {
    let unit = BytesPerSecond::from_gbit_per_s(1.0) * Seconds(1.0);
    let spread = |low: f64, high: f64, step: usize| low * (high / low).powf(step as f64 / (STEPS - 1) as f64);
    let sizes = ep_plan::divisors::divisors(DATACENTERS);
    let mut closest = f64::INFINITY;
    for tokens in 0..STEPS {
        for experts in 0..STEPS {
            let input = |gbit_per_s: f64| StreamInput {
                gpus: DATACENTERS,
                token_bytes: unit * spread(0.05, 100.0, tokens),
                // The smallest value is 0: nothing to gather.
                expert_bytes: if experts == 0 { Bytes::ZERO } else { unit * spread(1e-6, 10.0, experts) },
                bandwidth: BytesPerSecond::from_gbit_per_s(gbit_per_s),
                pre_expert: Seconds(1.0),
            };
            let misses = |series: &Series, [low, high]: [f64; 2]| {
                let (slowest, fastest) =
                    (series.gbit_per_s[0], series.gbit_per_s[series.gbit_per_s.len() - 1]);
                let mut least = f64::INFINITY;
                for &size in &sizes {
                    let at_slowest = (speedup(&input(slowest), size)? / high - 1.0).abs();
                    // The second end is computed only if the first is not already worse than the best so far.
                    if at_slowest < least {
                        least =
                            least.min(at_slowest.max((speedup(&input(fastest), size)? / low - 1.0).abs()));
                    }
                }
                Ok::<_, Failure>(least)
            };
            let fixed = misses(&FIXED, FIXED_RANGE)?;
            if fixed < closest {
                closest = closest.min(fixed.max(misses(&GROWING[0], GROWING_RANGE)?));
            }
        }
    }
    Ok(closest)
}

fn speedup(input: &StreamInput, domain_size: usize) -> Result<f64, Failure> {
    StreamModel::new(*input).and_then(|model| model.speedup(domain_size)).map_err(Failure::request)
}

fn near(found: f64, paper: f64) -> bool {
    (found / paper - 1.0).abs() < TOLERANCE
}

fn same_digits(found: &[f64], reference: &[f64]) -> bool {
    found.len() == reference.len()
        && found.iter().zip(reference).all(|(a, b)| format!("{a:.4}") == format!("{b:.4}"))
}

fn pictures(decline: &[f64]) -> Result<Vec<(&'static str, String)>, Failure> {
    const AXES: [&str; 2] = ["bandwidth, Gbit/s", "speedup over plain EP"];
    let fixed = FIXED.line("domains of 500, first parameter set".into())?;
    let growing: Vec<Line> = GROWING
        .iter()
        .map(|series| series.line(format!("domains of {}", series.domain_size)))
        .collect::<Result<_, _>>()?;
    let points = DECLINE.iter().zip(decline).map(|((all, _), speedup)| (*all as f64, *speedup)).collect();
    let decline = Line { label: "domains of 250, 1 Gbit/s".into(), points, notes: Vec::new() };
    Ok(vec![
        ("fig17-fixed.svg", chart::lines(&[fixed], AXES, true)?),
        ("fig17-growing.svg", chart::lines(&growing, AXES, true)?),
        ("fig17-decline.svg", chart::lines(&[decline], ["datacenters", AXES[1]], false)?),
    ])
}

#[cfg(test)]
mod tests {
    #![allow(clippy::unwrap_used)]

    use super::*;

    #[test]
    fn the_paper_has_a_figure_for_the_slowest_and_the_fastest_links() {
        let rows = FIXED.grid(Some(FIXED_RANGE)).unwrap().rows;
        let paper: Vec<&str> = rows.iter().map(|row| row[3].as_str()).collect();
        let [first, between @ .., last] = &paper[..] else { panic!("{paper:?}") };
        assert_eq!((*first, *last), ("1.45", "1.05"));
        assert!(between.iter().all(|text| *text == "not in the text"), "{paper:?}");
        assert!(FIXED.grid(None).unwrap().rows.iter().all(|row| row[3] == "not in the text"));
    }
}
