//! The options of the simulator.

use std::collections::HashMap;

use serde::{Deserialize, Serialize};

use crate::cluster::Cluster;
use crate::error::{PlanError, Result, count, number};
use crate::limits;
use crate::planner::Options;

/// The scheme to simulate.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "kebab-case", deny_unknown_fields)]
pub enum Scheme {
    /// Expert parallelism over all GPUs, with one copy per (token, expert), sent directly to the expert's GPU.
    Plain,
    /// Expert parallelism over all GPUs, with one row per (token, member) at each level, forwarded level by level.
    Hierarchical,
    /// Experts move inside domains, tokens between domains.
    Hybrid {
        /// `S_l` of each level, outermost first. Each must divide the members of its level.
        domain_sizes: Vec<usize>,
    },
}

/// The options of the simulator. By default nothing is slow, nothing is drawn at random and nothing is recorded.
#[derive(Debug, Clone, PartialEq, Default, Serialize, Deserialize)]
#[serde(default, deny_unknown_fields)]
pub struct SimulationOptions {
    /// The planner's options, which define the step: compression, micro-batches, chunks, live layers and so on.
    pub planner: Options,
    /// Jitter: relative standard deviation of the duration of a computation. Each computation of each GPU gets its own
    /// log-normal factor of mean 1. 0 means no jitter.
    pub jitter: f64,
    /// GPUs and links that are slower than the others.
    pub stragglers: Stragglers,
    /// Seed of jitter and of random stragglers.
    pub seed: u64,
    /// Layers to simulate. Default: all layers of one GPU.
    pub layers: Option<usize>,
    /// The order in which transfers use a link.
    pub link_order: LinkOrder,
    /// How often the start of a message (`alpha`) is paid.
    pub message_start: MessageStart,
    /// How flows are combined into bundles.
    pub flow_detail: FlowDetail,
    /// Whether equal GPUs are simulated once. Apart from rounding this option does not change results; tests use it.
    pub symmetry: Symmetry,
    /// What the timeline records.
    pub record: Record,
}

/// GPUs and links that are slower than the others.
#[derive(Debug, Clone, PartialEq, Default, Serialize, Deserialize)]
#[serde(rename_all = "kebab-case", deny_unknown_fields)]
pub enum Stragglers {
    /// All GPUs and links have normal speed.
    #[default]
    None,
    /// The listed GPUs and links are slow. The slowdowns of an entry that occurs several times are multiplied.
    Listed(Vec<Straggler>),
    /// GPUs chosen at random are slow.
    Random {
        /// Fraction of all GPUs, from 0 to 1. The number of slow GPUs is rounded to a whole number.
        fraction: f64,
        /// Duration of their computations over the normal duration, at least 1.
        slowdown: f64,
    },
}

/// A GPU or a link that is slower than the others.
#[derive(Debug, Clone, Copy, PartialEq, Serialize, Deserialize)]
#[serde(untagged, deny_unknown_fields)]
pub enum Straggler {
    /// A GPU.
    Gpu {
        /// Number of the GPU.
        gpu: usize,
        /// Duration of its computations over the normal duration, at least 1.
        slowdown: f64,
    },
    /// A link, in both directions.
    Link {
        /// Level of the link, numbered from 0, outermost first.
        level: usize,
        /// Number of the link on its level. Links are numbered in the order of their GPUs. If all links of the level have
        /// equally many GPUs, this is the number of the link's first GPU divided by the number of GPUs that share a link.
        link: usize,
        /// Normal bandwidth over the bandwidth of this link, at least 1.
        slowdown: f64,
    },
}

/// The order in which transfers use a link.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default, Serialize, Deserialize)]
#[serde(rename_all = "kebab-case")]
pub enum LinkOrder {
    /// Tokens have priority; experts, then gradients, use the remaining bandwidth. Experts of a layer may arrive while
    /// earlier layers compute, as far as live layers allow. This is the schedule that the planner prices.
    #[default]
    TokensFirst,
    /// Like `TokensFirst`, but all transfers share the link fairly, as independent connections do.
    Fair,
    /// A GPU performs one transfer at a time, in the order of the layer: experts, dispatch, combine, gradients. No
    /// experts are gathered ahead of their layer.
    InTurn,
}

/// How often the start of a message (`alpha`) is paid.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default, Serialize, Deserialize)]
#[serde(rename_all = "kebab-case")]
pub enum MessageStart {
    /// Once per peer and exchange, as in the planner: the chunks of an exchange are parts of one message.
    #[default]
    PerExchange,
    /// Once per peer and chunk: each chunk is a separate message.
    PerChunk,
}

/// How flows are combined into bundles.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default, Serialize, Deserialize)]
#[serde(rename_all = "kebab-case")]
pub enum FlowDetail {
    /// [`Aggregated`](Self::Aggregated) up to 512 GPUs, [`Decoupled`](Self::Decoupled) for more. For large clusters the
    /// simulation therefore always takes `O(n log n)` time in the number of flows.
    #[default]
    Auto,
    /// The flows of one GPU and exchange to destinations with equally fast links form one bundle. This is exact while
    /// all GPUs and links are equal. Where links differ, bundles cross both uplinks and downlinks; with jitter in
    /// addition, an event takes time proportional to the number of flows whose rates it may change.
    Aggregated,
    /// The same bundles, but each link serves its part of a bundle independently. An exchange is sent when the last
    /// link has finished. This detail is meant for many GPUs with both jitter and slow links: it takes `O(n log n)`
    /// time in every case. The simulated step is about as long as with `Aggregated`, and equal where links do not
    /// differ.
    Decoupled,
    /// One flow per pair of GPUs, through the uplink of one and the downlink of the other. This is the reference for
    /// small clusters: the number of flows grows with the square of the group size.
    PerDestination,
}

impl FlowDetail {
    /// Largest number of GPUs for which the running time of coupled flows is negligible.
    const COUPLED_GPUS: usize = 512;

    /// The detail to use for this many GPUs, which replaces [`FlowDetail::Auto`].
    pub(crate) fn resolve(self, gpus: usize) -> Self {
        match self {
            Self::Auto if gpus <= Self::COUPLED_GPUS => Self::Aggregated,
            Self::Auto => Self::Decoupled,
            chosen => chosen,
        }
    }
}

/// Whether equal GPUs are simulated once.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default, Serialize, Deserialize)]
#[serde(rename_all = "kebab-case")]
pub enum Symmetry {
    /// Equal GPUs are simulated once, wherever that is exact.
    #[default]
    Collapse,
    /// Every GPU is simulated separately.
    Ignore,
}

/// What the timeline records. By default it records nothing.
#[derive(Debug, Clone, PartialEq, Eq, Default, Serialize, Deserialize)]
#[serde(default, deny_unknown_fields)]
pub struct Record {
    /// Numbers of the GPUs whose streams are recorded.
    pub gpus: Vec<usize>,
    /// Whether the uplinks of these GPUs are recorded too, at every level.
    pub links: bool,
}

impl Scheme {
    /// `S_l` of every level, outermost first; all ones for schemes in which experts do not move.
    pub fn domain_sizes(&self, levels: usize) -> Vec<usize> {
        match self {
            Self::Plain | Self::Hierarchical => vec![1; levels],
            Self::Hybrid { domain_sizes } => domain_sizes.clone(),
        }
    }
}

impl SimulationOptions {
    pub(crate) fn check(&self, cluster: &Cluster) -> Result<()> {
        self.planner.check()?;
        number("jitter (relative standard deviation)", self.jitter, limits::JITTER)?;
        if let Some(layers) = self.layers {
            count("layers to simulate", layers, limits::LAYERS)?;
        }
        let gpus = cluster.gpus();
        for &gpu in &self.record.gpus {
            check_index("recorded GPU", gpu, gpus)?;
        }
        match &self.stragglers {
            Stragglers::None => {}
            Stragglers::Listed(list) => {
                let mut slowed = HashMap::new();
                for straggler in list {
                    straggler.check(cluster)?;
                    // The slowdowns of repeated entries are multiplied, so the product must be in range too.
                    let (key, slowdown) = straggler.target();
                    let together = slowed.entry(key).or_insert(1.0);
                    *together *= slowdown;
                    check_slowdown(*together)?;
                }
            }
            Stragglers::Random { fraction, slowdown } => {
                if !(0.0..=1.0).contains(fraction) {
                    let needed = "a fraction of all GPUs, from 0 to 1".into();
                    let what = "fraction of stragglers".into();
                    return Err(PlanError::Quantity { what, value: *fraction, needed });
                }
                check_slowdown(*slowdown)?;
            }
        }
        Ok(())
    }
}

impl Straggler {
    /// The slow GPU (without a level) or link (with its level), and its slowdown.
    fn target(&self) -> ((Option<usize>, usize), f64) {
        match *self {
            Self::Gpu { gpu, slowdown } => ((None, gpu), slowdown),
            Self::Link { level, link, slowdown } => ((Some(level), link), slowdown),
        }
    }

    fn check(&self, cluster: &Cluster) -> Result<()> {
        match *self {
            Self::Gpu { gpu, slowdown } => {
                check_index("straggling GPU", gpu, cluster.gpus())?;
                check_slowdown(slowdown)
            }
            Self::Link { level, link, slowdown } => {
                check_index("level of a straggling link", level, cluster.levels().len())?;
                check_index("straggling link", link, cluster.links(level))?;
                check_slowdown(slowdown)
            }
        }
    }
}

fn check_slowdown(slowdown: f64) -> Result<()> {
    if limits::SLOWDOWN.allows(slowdown) {
        return Ok(());
    }
    let needed = format!("{}; 1 means normal speed", limits::SLOWDOWN);
    Err(PlanError::Quantity { what: "slowdown of a straggler".into(), value: slowdown, needed })
}

fn check_index(what: &'static str, index: usize, count: usize) -> Result<()> {
    if index < count { Ok(()) } else { Err(PlanError::Index { what, index, count }) }
}
