//! The options of `plan`.

use std::path::PathBuf;

use clap::{Args, ValueEnum};

use ep_plan::step::Strategy;

use crate::planner::args::ProblemArgs;

/// The strategies of [`Strategy`], for the command line.
#[derive(Debug, Clone, Copy, PartialEq, Eq, ValueEnum)]
pub(crate) enum StrategyChoice {
    /// Experts move inside domains, tokens between domains (HybridEP)
    ExpertDomains,
    /// Tokens move, one row per datacenter
    HierarchicalEp,
    /// Tokens move, one row per expert
    PlainEp,
    /// Gradients and weights move, once per step
    DataParallel,
    /// Activations move between pipeline stages
    Pipeline,
    /// Weights move once in several steps
    LocalSteps,
}

impl StrategyChoice {
    pub(crate) fn strategy(self) -> Strategy {
        match self {
            Self::ExpertDomains => Strategy::ExpertDomains,
            Self::HierarchicalEp => Strategy::HierarchicalEp,
            Self::PlainEp => Strategy::PlainEp,
            Self::DataParallel => Strategy::DataParallel,
            Self::Pipeline => Strategy::Pipeline,
            Self::LocalSteps => Strategy::LocalSteps,
        }
    }
}

/// `hybrid-ep plan`
#[derive(Debug, Args)]
pub(crate) struct PlanArgs {
    #[command(flatten)]
    pub(crate) problem: ProblemArgs,

    /// Plan for a range of values of one key: bandwidth=1Gbit/s..400Gbit/s, or with 20 values
    /// bandwidth=1Gbit/s..400Gbit/s:20
    #[arg(long, value_name = "KEY=FROM..TO", help_heading = "Questions")]
    pub(crate) sweep: Option<String>,
    /// Show the layers of this way to use the datacenters instead of the best one
    #[arg(long, value_enum, value_name = "NAME", help_heading = "Questions")]
    pub(crate) strategy: Option<StrategyChoice>,
    /// Plan a layout that the training runtime can run, and report it first: expert domains over all GPUs of a stage (`--set expert_parallel=N`: several EP groups), one stage
    /// unless pipeline_stages is set, no tensor parallelism, kept replicas
    #[arg(long, help_heading = "Questions", conflicts_with_all = ["strategy", "paper_model"])]
    pub(crate) runnable: bool,
    /// Explain what limits the plan, and at which values other domains would be best
    #[arg(long, help_heading = "Questions")]
    pub(crate) explain: bool,
    /// Use only the stream model of the HybridEP paper, and show it level by level
    #[arg(long, help_heading = "Questions")]
    pub(crate) paper_model: bool,
    /// Evaluate the stream model for a case of the paper's Table IV (see --list); needs no cluster and no model
    #[arg(long, value_name = "CASE", help_heading = "Questions", conflicts_with_all = ["sweep", "explain", "html", "groups", "print_toml", "list", "runnable"])]
    pub(crate) stream: Option<String>,

    /// Write problem, plan and sweep as JSON; `-` = stdout, and the text goes to stderr
    #[arg(long, value_name = "FILE", help_heading = "Output")]
    pub(crate) json: Option<PathBuf>,
    /// Write a report with charts as one HTML file, which loads nothing from the network
    #[arg(long, value_name = "FILE", help_heading = "Output")]
    pub(crate) html: Option<PathBuf>,
    /// Write the rank lists of the plan's groups as JSON
    #[arg(long, value_name = "FILE", help_heading = "Output")]
    pub(crate) groups: Option<PathBuf>,
    /// Print the problem as TOML, as a file to edit, and exit
    #[arg(long, help_heading = "Output", conflicts_with_all = ["sweep", "explain", "html", "groups", "json", "list"])]
    pub(crate) print_toml: bool,
    /// List the presets, and exit
    #[arg(long, help_heading = "Output")]
    pub(crate) list: bool,
}

impl PlanArgs {
    /// The strategy to show; `None` for the best.
    pub(super) fn wanted(&self) -> Option<StrategyChoice> {
        if self.runnable { Some(StrategyChoice::ExpertDomains) } else { self.strategy }
    }
}
