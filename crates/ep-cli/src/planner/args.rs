//! The options that describe a problem.

use std::path::PathBuf;

use clap::Args;
use ep_plan::limits;

use crate::common::numbers::{ANY, count};

/// The problem to plan: cluster, model and assumptions.
#[derive(Debug, Clone, Args)]
#[command(next_help_heading = "Problem")]
pub(crate) struct ProblemArgs {
    /// Cluster: a preset (`plan --list` lists them), or a TOML file with a [cluster] table
    #[arg(long, value_name = "FILE|PRESET", default_value = "dgx-h200")]
    pub(crate) cluster: String,
    /// Model: a preset, or a TOML file with a [model] table [default: the model in the cluster's file, else
    /// deepseek-v3]
    #[arg(long, value_name = "FILE|PRESET")]
    pub(crate) model: Option<String>,
    /// Preset clusters only: number of datacenters [default: the number of entries of --nodes or --uplink, else 2]
    #[arg(long, value_name = "N", value_parser = count(limits::MEMBERS))]
    pub(crate) datacenters: Option<usize>,
    /// Preset clusters only: NVLink domains per datacenter, or a list with one number per datacenter [default: 8]
    #[arg(long, value_name = "N[,N...]", value_delimiter = ',', value_parser = count(limits::MEMBERS))]
    pub(crate) nodes: Vec<usize>,
    /// Preset clusters only: GPUs to use in each NVLink domain [default: all]
    #[arg(long, value_name = "N", value_parser = count(limits::MEMBERS))]
    pub(crate) gpus_per_node: Option<usize>,
    /// Preset clusters only: bandwidth of each datacenter's uplink, which its GPUs share, or a list with one rate per
    /// datacenter [default: 100Gbit/s]
    #[arg(long, value_name = "RATE[,RATE...]", value_delimiter = ',')]
    pub(crate) uplink: Vec<String>,
    /// Preset clusters only: round-trip time between datacenters [default: 5ms]
    #[arg(long, value_name = "TIME")]
    pub(crate) round_trip: Option<String>,
    /// Take the experts' popularity from a recorded routing (.safetensors)
    #[arg(long, value_name = "FILE")]
    pub(crate) routing: Option<PathBuf>,
    /// Layer of the recorded routing, counted from 0 [default: the layer with the most popular expert]
    #[arg(long, value_name = "N", requires = "routing", value_parser = count(ANY))]
    pub(crate) layer: Option<usize>,
    /// Change one value, such as bandwidth=10Gbit/s, bandwidth.rail=200Gbit/s or work=forward; may be given several
    /// times (the error for an unknown key lists all keys)
    #[arg(long, value_name = "KEY=VALUE")]
    pub(crate) set: Vec<String>,
}
