//! Planning expert parallelism across datacenters: which experts move, which tokens move, and what it costs.
//!
//! Inside a datacenter, tokens travel to experts. Between datacenters the links are a hundred times slower, and
//! sending an expert once, compressed, can be cheaper than sending every token that needs it. This crate chooses,
//! for every level of a cluster, the *domain size*: the number of members that gather each other's experts, so that
//! tokens travel only between domains (arXiv 2510.19470, HybridEP). It also estimates the time of a layer under that
//! choice:
//!
//! ```text
//!  Cluster, Model, Options ──▶ Planner ──▶ Plan: domain sizes, times by phase, bytes per link, memory,
//!     (the problem)               │              baselines, what limits the plan, what would change it
//!                                 │                       │
//!                    StreamModel ◀┘                       ▼
//!        (the paper's model of one level)     Partition ──▶ PartitionExport: groups and rank lists
//! ```
//!
//! - [`stream_model`] is the paper's cost model of one level. [`paper`] holds the paper's tables and states where
//!   they do not follow from that model.
//! - [`domain`] is the partition: which GPUs gather experts from each other and which exchange tokens, for any number
//!   of levels.
//! - [`planner`] is the default model. It adds latency, deduplicated tokens, hot experts, gradients, the codec and
//!   memory to the paper's model.
//! - [`step`] compares whole steps: expert domains, data and pipeline parallelism, local steps.
//! - [`simulate`] executes, event by event, the schedule that the planner prices, with stragglers and jitter.
//! - [`cluster`], [`model`] and [`routing`] describe the problem. [`presets`] has descriptions to start from, [`input`]
//!   reads and writes them as TOML, and [`limits`] holds the bounds of every number.
//!
//! ```
//! # fn main() -> ep_plan::Result<()> {
//! use ep_plan::{Options, Planner, presets};
//!
//! // Two datacenters of eight nodes, 100 Gbit/s and 5 ms apart.
//! let cluster = presets::datacenters(2, 100.0, 0.005, presets::dgx_h200(8)).try_into()?;
//! let plan = Planner::new(cluster, presets::deepseek_v3().try_into()?, Options::default())?.plan();
//! println!("{}", plan.explanation.text.join("\n"));
//!
//! let groups = plan.partition()?.export();
//! assert_eq!(groups.expert_domains[0].len(), plan.best.domain_sizes.iter().product::<usize>());
//! # Ok(())
//! # }
//! ```
//!
//! The crate does no I/O and has no unsafe code. Levels are numbered from 0, outermost first. Bytes, seconds and
//! operations are those of one GPU, one layer and one micro-batch unless a name says otherwise.

#![forbid(unsafe_code)]

pub mod cluster;
pub mod divisors;
pub mod domain;
pub mod error;
pub mod input;
pub mod limits;
pub mod model;
pub mod paper;
pub mod planner;
pub mod presets;
pub mod routing;
pub mod simulate;
pub mod step;
pub mod stream_model;
pub mod units;

pub use cluster::{Cluster, ClusterDescription};
pub use domain::{Partition, PartitionExport, TopologyRule};
pub use error::{PlanError, Result};
pub use model::{Model, ModelDescription};
pub use planner::{Options, Plan, Planner};
pub use routing::{Placement, Routing};
pub use simulate::{Scheme, Simulation, SimulationOptions};
pub use stream_model::{StreamInput, StreamModel};
pub use units::{Bytes, BytesPerSecond, Flop, FlopPerSecond, Seconds};
