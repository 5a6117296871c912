//! What to simulate, beside the cluster and the model.

use serde::{Deserialize, Serialize};

use crate::cluster::Cluster;
use crate::error::{PlanError, Result, at_least_one, not_negative};
use crate::planner::Options;

/// The schedule to run.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "kebab-case", deny_unknown_fields)]
pub enum Scheme {
    /// Expert parallelism over all GPUs: one copy per (token, expert), straight to the expert's GPU.
    Plain,
    /// Expert parallelism over all GPUs: one copy per (token, member) at each level, forwarded level by level.
    Hierarchical,
    /// Experts move inside domains, tokens between them.
    Hybrid {
        /// `S_l`, outermost level first; each divides its level.
        domain_sizes: Vec<usize>,
    },
}

/// Every setting of the simulator, with its default.
#[derive(Debug, Clone, PartialEq, Default, Serialize, Deserialize)]
#[serde(default, deny_unknown_fields)]
pub struct SimulationOptions {
    /// What a step consists of, as the planner is told: compression, micro-batches, chunks, live layers and so on.
    pub planner: Options,
    /// Relative standard deviation of the duration of every computation, drawn anew for each one on each GPU; 0
    /// is none. The factors have mean 1 and are log-normal.
    pub jitter: f64,
    /// GPUs and links that are slower than the others.
    pub stragglers: Stragglers,
    /// What jitter and random stragglers are drawn from.
    pub seed: u64,
    /// Layers to simulate; without it, all that one GPU has.
    pub layers: Option<usize>,
    /// Which of the transfers that want a link get it.
    pub link_order: LinkOrder,
    /// How often the start of a message (`alpha`) is paid.
    pub message_start: MessageStart,
    /// How flows are put together.
    pub flow_detail: FlowDetail,
    /// Whether GPUs that nothing tells apart are simulated once. It changes no result beyond rounding, and is
    /// there to show that.
    pub symmetry: Symmetry,
    /// What to put into the timeline.
    pub record: Record,
}

/// GPUs and links that are slower than the others.
#[derive(Debug, Clone, PartialEq, Default, Serialize, Deserialize)]
#[serde(rename_all = "kebab-case", deny_unknown_fields)]
pub enum Stragglers {
    /// Nobody.
    #[default]
    None,
    /// These.
    Listed(Vec<Straggler>),
    /// GPUs chosen at random.
    Random {
        /// Part of all GPUs, rounded to a whole number of them.
        fraction: f64,
        /// How many times longer their computations take.
        slowdown: f64,
    },
}

/// Something slower than the others.
#[derive(Debug, Clone, Copy, PartialEq, Serialize, Deserialize)]
#[serde(untagged, deny_unknown_fields)]
pub enum Straggler {
    /// A GPU.
    Gpu {
        /// Its number.
        gpu: usize,
        /// How many times longer its computations take, at least 1.
        slowdown: f64,
    },
    /// A link, in both directions.
    Link {
        /// Its level, counted from the outermost.
        level: usize,
        /// Its number on the level: that of its first GPU over the GPUs that share a link.
        link: usize,
        /// How many times less it carries, at least 1.
        slowdown: f64,
    },
}

/// Which of the transfers that want a link get it.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default, Serialize, Deserialize)]
#[serde(rename_all = "kebab-case")]
pub enum LinkOrder {
    /// Tokens go first; experts, then gradients, take what is left of the link. Experts of a layer may arrive
    /// while an earlier one computes, as far as live layers allow. This is the schedule that the planner prices.
    #[default]
    TokensFirst,
    /// As above, but all share the link fairly, as independent connections do.
    Fair,
    /// One transfer of a GPU at a time, in the order of the layer: experts, tokens there, tokens back, gradients.
    /// Nothing is fetched ahead.
    InTurn,
}

/// How often the start of a message (`alpha`) is paid.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default, Serialize, Deserialize)]
#[serde(rename_all = "kebab-case")]
pub enum MessageStart {
    /// Once per peer and exchange, as the planner has it: the chunks of an exchange are parts of one message.
    #[default]
    PerExchange,
    /// Once per peer and chunk: each chunk is a message of its own.
    PerChunk,
}

/// How flows are put together.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default, Serialize, Deserialize)]
#[serde(rename_all = "kebab-case")]
pub enum FlowDetail {
    /// [`Aggregated`](Self::Aggregated) up to 512 GPUs, [`Decoupled`](Self::Decoupled) beyond: the cost grows no
    /// worse than `n log n` in flows, whatever differs.
    #[default]
    Auto,
    /// What one GPU sends in one exchange to destinations with equally fast links is one bundle of flows. Exact
    /// while all are alike; where links differ, bundles meet at uplinks and downlinks, and with jitter too an event
    /// costs as much as there are flows that it may slow down.
    Aggregated,
    /// The same bundles, but each link serves its part of them by itself, and an exchange has been sent when the
    /// last link is done with it. For many GPUs with both jitter and slow links: `O(n log n)` whatever differs, at
    /// most as slow as the coupled flows, and the same where links do not differ.
    Decoupled,
    /// One flow per pair of GPUs, through the links of both. The reference for small clusters: the number of flows
    /// grows with the square of the group.
    PerDestination,
}

impl FlowDetail {
    /// GPUs up to which coupled flows take no time to speak of.
    const COUPLED_GPUS: usize = 512;

    /// What is simulated for this many GPUs.
    pub(crate) fn resolve(self, gpus: usize) -> Self {
        match self {
            Self::Auto if gpus <= Self::COUPLED_GPUS => Self::Aggregated,
            Self::Auto => Self::Decoupled,
            chosen => chosen,
        }
    }
}

/// Whether GPUs that nothing tells apart are simulated once.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default, Serialize, Deserialize)]
#[serde(rename_all = "kebab-case")]
pub enum Symmetry {
    /// Once, wherever that is exact.
    #[default]
    Collapse,
    /// Each of them.
    Ignore,
}

/// What to put into the timeline. Nothing by default.
#[derive(Debug, Clone, PartialEq, Eq, Default, Serialize, Deserialize)]
#[serde(default, deny_unknown_fields)]
pub struct Record {
    /// GPUs whose streams to record.
    pub gpus: Vec<usize>,
    /// Whether to record the uplinks of these GPUs too, at every level.
    pub links: bool,
}

impl Scheme {
    /// `S_l` of every level: ones, where experts do not move.
    pub fn domain_sizes(&self, levels: usize) -> Vec<usize> {
        match self {
            Self::Plain | Self::Hierarchical => vec![1; levels],
            Self::Hybrid { domain_sizes } => domain_sizes.clone(),
        }
    }
}

impl SimulationOptions {
    pub(super) fn check(&self, cluster: &Cluster) -> Result<()> {
        self.planner.check()?;
        not_negative("jitter (relative standard deviation)", self.jitter)?;
        if let Some(layers) = self.layers {
            at_least_one("layers to simulate", layers)?;
        }
        let gpus = cluster.gpus();
        for &gpu in &self.record.gpus {
            check_index("recorded GPU", gpu, gpus)?;
        }
        match &self.stragglers {
            Stragglers::None => {}
            Stragglers::Listed(list) => list.iter().try_for_each(|straggler| straggler.check(cluster))?,
            Stragglers::Random { fraction, slowdown } => {
                if !(0.0..=1.0).contains(fraction) {
                    let needed = "a part of all GPUs, from 0 to 1";
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
    fn check(&self, cluster: &Cluster) -> Result<()> {
        match *self {
            Self::Gpu { gpu, slowdown } => {
                check_index("straggling GPU", gpu, cluster.gpus())?;
                check_slowdown(slowdown)
            }
            Self::Link { level, link, slowdown } => {
                check_index("level of a straggling link", level, cluster.levels().len())?;
                let sharing = cluster.levels()[level].gpus_per_link;
                check_index("straggling link", link, cluster.gpus().div_ceil(sharing))?;
                check_slowdown(slowdown)
            }
        }
    }
}

fn check_slowdown(slowdown: f64) -> Result<()> {
    if slowdown.is_finite() && slowdown >= 1.0 {
        return Ok(());
    }
    let needed = "finite and at least 1, which slows nothing down";
    Err(PlanError::Quantity { what: "slowdown of a straggler".into(), value: slowdown, needed })
}

fn check_index(what: &'static str, index: usize, count: usize) -> Result<()> {
    if index < count { Ok(()) } else { Err(PlanError::Index { what, index, count }) }
}
