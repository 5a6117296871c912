//! What one run of a benchmark measures: a mode, a number of SMs, and a routing.

use std::hash::{Hash as _, Hasher};
use std::sync::Arc;

use ep::workload::Workload;
use ep::{DispatchMode, Rank, Routing, World};

/// One run: the operators in one mode, on one number of SMs, with one routing.
#[derive(Debug, Clone)]
pub(crate) struct Scenario {
    pub(crate) mode: DispatchMode,
    /// SMs of each GPU as configured, where 0 lets the backend choose; `None` on the host backend.
    pub(crate) sms: Option<usize>,
    pub(crate) source: Source,
}

impl Scenario {
    /// All combinations: for each mode, for each number of SMs, each routing.
    pub(crate) fn all(modes: &[DispatchMode], sms: &[Option<usize>], sources: &[Source]) -> Vec<Self> {
        let with = |&mode| {
            sms.iter().flat_map(move |&sms| {
                sources.iter().map(move |source| Self { mode, sms, source: source.clone() })
            })
        };
        modes.iter().flat_map(with).collect()
    }

    /// The most rows that all ranks together receive, without padding; `None` if 64 bits cannot count them. In plain mode
    /// a token has one row on each rank that holds any of its experts.
    pub(crate) fn most_rows(&self, world: &World) -> Option<u64> {
        let copies = self.source.copies()?;
        match self.mode {
            DispatchMode::Permuted { .. } => Some(copies),
            DispatchMode::Plain => {
                let ranks = self.source.topk.min(world.ranks()) as u64;
                Some(copies.min(self.source.all_tokens()?.saturating_mul(ranks)))
            }
        }
    }

    /// Probabilities of a received row: one in permuted mode, one for each local expert in plain mode. The experts are
    /// placed evenly, so that the number is the same on all ranks.
    pub(crate) fn probs_per_row(&self, world: &World) -> usize {
        match self.mode {
            DispatchMode::Permuted { .. } => 1,
            DispatchMode::Plain => world.experts() / world.ranks(),
        }
    }
}

/// The name of a mode, as in `--mode`.
pub(crate) fn mode_name(mode: DispatchMode) -> &'static str {
    match mode {
        DispatchMode::Plain => "plain",
        DispatchMode::Permuted { .. } => "permuted",
    }
}

/// Where the routings of all ranks come from.
#[derive(Debug, Clone)]
pub(crate) struct Source {
    /// The layer of the recorded routing; `None` for a drawn routing.
    pub(crate) layer: Option<usize>,
    /// Maximum number of experts of a token.
    pub(crate) topk: usize,
    pub(crate) origin: Origin,
}

/// The workloads or routings of all ranks, by rank.
#[derive(Debug, Clone)]
pub(crate) enum Origin {
    Drawn(Arc<[Workload]>),
    Recorded(Arc<[Routing]>),
}

impl Source {
    /// Tokens of each rank.
    pub(crate) fn tokens(&self) -> Vec<usize> {
        match &self.origin {
            Origin::Drawn(workloads) => workloads.iter().map(|workload| workload.tokens).collect(),
            Origin::Recorded(routings) => routings.iter().map(Routing::tokens).collect(),
        }
    }

    /// Tokens of all ranks; `None` if 64 bits cannot count them.
    pub(crate) fn all_tokens(&self) -> Option<u64> {
        self.tokens().into_iter().try_fold(0u64, |sum, tokens| sum.checked_add(u64::try_from(tokens).ok()?))
    }

    /// Copies, which are (token, expert) pairs, of all ranks; `None` if 64 bits cannot count them.
    pub(crate) fn copies(&self) -> Option<u64> {
        match &self.origin {
            Origin::Drawn(workloads) => workloads.iter().try_fold(0u64, |sum, workload| {
                sum.checked_add(u64::try_from(workload.tokens.checked_mul(workload.topk)?).ok()?)
            }),
            Origin::Recorded(routings) => Some(routings.iter().map(|routing| routing.copies() as u64).sum()),
        }
    }

    /// Zipf exponent; `None` for a recorded routing.
    pub(crate) fn skew(&self) -> Option<f64> {
        match &self.origin {
            Origin::Drawn(workloads) => workloads.first().map(|workload| workload.skew),
            Origin::Recorded(_) => None,
        }
    }

    /// The routings of all ranks.
    pub(crate) fn routings(&self) -> Arc<[Routing]> {
        match &self.origin {
            Origin::Drawn(workloads) => {
                workloads.iter().zip(0..).map(|(workload, rank)| workload.routing(Rank(rank))).collect()
            }
            Origin::Recorded(routings) => Arc::clone(routings),
        }
    }

    /// Feeds the routings of all ranks to a hasher.
    pub(crate) fn hash_routings(&self, hasher: &mut impl Hasher) {
        for routing in self.routings().iter() {
            for (experts, weights) in routing.rows() {
                experts.hash(hasher);
                weights.iter().for_each(|weight| weight.to_bits().hash(hasher));
            }
        }
    }
}
