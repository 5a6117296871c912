//! `--paper-model` and `--stream`: the paper's stream model without additions, level by level.

use std::fmt::Write as _;

use ep_plan::input::preset;
use ep_plan::stream_model::Regime;
use ep_plan::{Planner, StreamModel};
use serde::Serialize;

use crate::common::failure::Failure;
use crate::planner::text::table;

/// The model of one level, for every domain size.
#[derive(Debug, Clone, PartialEq, Serialize)]
pub(crate) struct Level {
    pub(crate) name: String,
    /// The inputs `G`, `D`, `P_E`, `B` and `L`.
    pub(crate) input: StreamModel,
    pub(crate) sizes: Vec<Size>,
    pub(crate) best_domain_size: usize,
    /// `S*`: the best size among all real numbers.
    pub(crate) continuous_optimum: f64,
    pub(crate) regime: Regime,
}

/// One domain size.
#[derive(Debug, Clone, Copy, PartialEq, Serialize)]
pub(crate) struct Size {
    pub(crate) domain_size: usize,
    pub(crate) data_proportion: f64,
    pub(crate) latency_ms: f64,
    pub(crate) speedup: f64,
}

impl Level {
    fn new(name: String, model: StreamModel) -> Result<Self, Failure> {
        let sizes = model.domain_sizes().into_iter().map(|domain_size| {
            Ok(Size {
                domain_size,
                data_proportion: model.data_proportion(domain_size)?,
                latency_ms: model.latency(domain_size)?.as_ms(),
                speedup: model.speedup(domain_size)?,
            })
        });
        let optimum = model.continuous_optimum();
        Ok(Self {
            name,
            input: model,
            sizes: sizes.collect::<ep_plan::Result<_>>().map_err(Failure::request)?,
            best_domain_size: model.best_domain_size(),
            continuous_optimum: optimum.domain_size,
            regime: optimum.regime,
        })
    }

    /// The models of all levels of a cluster, independent of each other.
    pub(crate) fn all(planner: &Planner, names: &[String]) -> Result<Vec<Self>, Failure> {
        let level = |(index, name): (usize, &String)| {
            Self::new(name.clone(), planner.stream_model(index).map_err(Failure::request)?)
        };
        names.iter().enumerate().map(level).collect()
    }

    /// The model of a case of Table IV.
    pub(crate) fn of_case(name: &str) -> Result<Self, Failure> {
        let input = preset::stream(name).ok_or_else(|| {
            let all: Vec<_> = preset::STREAMS.iter().map(|known| known.name).collect();
            Failure::request(format!("--stream {name}: no such case; possible: {}", all.join(", ")))
        })?;
        Self::new(name.to_owned(), StreamModel::new(input).map_err(Failure::request)?)
    }
}

pub(super) fn render(levels: &[Level]) -> String {
    let mut out = String::new();
    for level in levels {
        let input = level.input.input();
        let why = match level.regime {
            Regime::ExpertsAreLighter => "2 D >= G P_E: another member saves more than it costs",
            Regime::GatherHides => "B L >= P_E (G - 1): compute hides even the all-gather of all experts",
            Regime::Interior => "the all-gather takes as long as the compute before the experts",
        };
        // Writing to a string cannot fail.
        let _ = writeln!(
            out,
            "Stream model of '{}': G {}, D {}, P_E {}, B {}, L {}\n  S* {:.3} ({why}); best divisor {}",
            level.name,
            input.gpus,
            input.token_bytes,
            input.expert_bytes,
            input.bandwidth,
            input.pre_expert,
            level.continuous_optimum,
            level.best_domain_size,
        );
        let rows = level.sizes.iter().map(|size| {
            vec![
                size.domain_size.to_string(),
                format!("{:.4}", size.data_proportion),
                format!("{:.4} ms", size.latency_ms),
                format!("{:.4}x", size.speedup),
                if size.domain_size == level.best_domain_size { "best" } else { "" }.to_owned(),
            ]
        });
        let rendered = table(&["S", "p", "latency", "speedup over plain EP", ""], rows, 0);
        let _ = writeln!(out, "{rendered}\n");
    }
    out
}
