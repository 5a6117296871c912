//! Planning expert parallelism across datacenters: which experts move, which tokens move, and what it costs.
//!
//! Inside a datacenter tokens travel to experts. Between datacenters the links are a hundred times slower, and it
//! can be cheaper to send an expert once, compressed, than every token that needs it. This crate decides, for
//! every level of a cluster, among how many members experts rather than tokens move (arXiv 2510.19470, HybridEP),
//! and says what a layer then takes:
//!
//! ```text
//!  Cluster, Model, Options ──▶ Planner ──▶ Plan: domain sizes, times by phase, bytes per link, memory,
//!     (what there is)             │              baselines, what limits it and what would change it
//!                                 │                       │
//!                    StreamModel ◀┘                       ▼
//!            (the paper's, one level)         Partition ──▶ PartitionExport: groups and rank lists
//! ```
//!
//! - [`stream_model`] is the paper's model, exactly; [`paper`] has its tables, and says where they do not follow
//!   from it.
//! - [`domain`] is the partition: who gathers experts from whom, who exchanges tokens with whom, at any number of
//!   levels.
//! - [`planner`] is the richer model and the default: latency, deduplicated tokens, hot experts, gradients, codec,
//!   memory.
//! - [`simulate`] runs the schedule that the planner prices, event by event, with stragglers and jitter.
//! - [`residual`] is the codec for experts on the move: a shared expert, and the largest differences from it.
//! - [`cluster`], [`model`] and [`routing`] describe the problem; [`presets`] has some to start from.
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
//! Everything here is arithmetic: no I/O, no unsafe code. Levels count from the outermost. Amounts are those of
//! one GPU, one layer and one micro-batch unless their names say otherwise.

#![forbid(unsafe_code)]

pub mod cluster;
pub mod divisors;
pub mod domain;
pub mod error;
pub mod input;
pub mod model;
pub mod paper;
pub mod planner;
pub mod presets;
pub mod residual;
pub mod routing;
pub mod simulate;
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
