//! What `plan` can be asked, and what `simulate` shares with it.

use std::path::PathBuf;

use clap::Args;

/// The problem: where it runs, what is trained, and what to assume.
#[derive(Debug, Clone, Args)]
#[command(next_help_heading = "Problem")]
pub(crate) struct ProblemArgs {
    /// Where it runs: a TOML file with a table "cluster", or a preset (see --list)
    #[arg(long, value_name = "FILE|PRESET", default_value = "dgx-h200")]
    pub(crate) cluster: String,
    /// What is trained: a TOML file with a table "model", or a preset [default: deepseek-v3, or the model in the
    /// cluster's file]
    #[arg(long, value_name = "FILE|PRESET")]
    pub(crate) model: Option<String>,
    /// Datacenters of a preset cluster [default: 2]
    #[arg(long, value_name = "N")]
    pub(crate) datacenters: Option<usize>,
    /// NVLink domains in each datacenter of a preset cluster [default: 8]
    #[arg(long, value_name = "N")]
    pub(crate) nodes: Option<usize>,
    /// GPUs to use of each NVLink domain of a preset cluster [default: all]
    #[arg(long, value_name = "N")]
    pub(crate) gpus_per_node: Option<usize>,
    /// Uplink of each datacenter of a preset cluster, shared by its GPUs [default: 100Gbit/s]
    #[arg(long, value_name = "RATE")]
    pub(crate) uplink: Option<String>,
    /// There and back between datacenters of a preset cluster [default: 5ms]
    #[arg(long, value_name = "TIME")]
    pub(crate) round_trip: Option<String>,
    /// Take the experts' popularity from a recorded routing (.safetensors)
    #[arg(long, value_name = "FILE")]
    pub(crate) routing: Option<PathBuf>,
    /// The layer of the recorded routing [default: the one with the hottest expert]
    #[arg(long, value_name = "N", requires = "routing")]
    pub(crate) layer: Option<usize>,
    /// Change one number: bandwidth=10Gbit/s, bandwidth.rail=200Gbit/s, work=forward, ... (an unknown key lists all)
    #[arg(long, value_name = "KEY=VALUE")]
    pub(crate) set: Vec<String>,
}

/// `hybrid-ep plan`
#[derive(Debug, Args)]
pub(crate) struct PlanArgs {
    #[command(flatten)]
    pub(crate) problem: ProblemArgs,

    /// Plan again for values of a key: bandwidth=1Gbit/s..400Gbit/s, or with 20 points
    /// bandwidth=1Gbit/s..400Gbit/s:20
    #[arg(long, value_name = "KEY=FROM..TO", help_heading = "Questions")]
    pub(crate) sweep: Option<String>,
    /// Say what limits the plan, and at which values another would be best
    #[arg(long, help_heading = "Questions")]
    pub(crate) explain: bool,
    /// Price with the paper's stream model alone, and show it level by level
    #[arg(long, help_heading = "Questions")]
    pub(crate) paper_model: bool,
    /// The stream model of a case of the paper's Table IV (see --list), without cluster and model
    #[arg(long, value_name = "CASE", help_heading = "Questions", conflicts_with_all = ["sweep", "explain", "html", "groups", "print_toml", "list"])]
    pub(crate) stream: Option<String>,

    /// Write everything as JSON; `-` = stdout, with the text on stderr
    #[arg(long, value_name = "FILE", help_heading = "Output")]
    pub(crate) json: Option<PathBuf>,
    /// Write a report with charts: one file that needs no network
    #[arg(long, value_name = "FILE", help_heading = "Output")]
    pub(crate) html: Option<PathBuf>,
    /// Write the groups and rank lists of the plan as JSON, for a runtime to open its communicators
    #[arg(long, value_name = "FILE", help_heading = "Output")]
    pub(crate) groups: Option<PathBuf>,
    /// Write the problem as TOML to stdout, to start from, and do nothing else
    #[arg(long, help_heading = "Output", conflicts_with_all = ["sweep", "explain", "html", "groups", "json", "list"])]
    pub(crate) print_toml: bool,
    /// List the presets, and do nothing else
    #[arg(long, help_heading = "Output")]
    pub(crate) list: bool,
}
