//! State of one scenario that all ranks of a process share.

use std::sync::{Arc, OnceLock};

use ep::oracle::{self, ReceivedRows};
use ep::{Rank, Routing};

use crate::bench::plan::BenchPlan;
use crate::bench::scenario::Scenario;

/// State that all ranks of a process share.
#[derive(Debug)]
pub(super) struct Shared {
    pub(super) plan: Arc<BenchPlan>,
    scenario: usize,
    pub(super) routings: Arc<[Routing]>,
    /// The token of every output row, for all ranks. Computed on first use, after the timed iterations.
    received: OnceLock<Vec<ReceivedRows>>,
}

impl Shared {
    pub(super) fn new(plan: Arc<BenchPlan>, scenario: usize) -> Self {
        let routings = plan.scenarios[scenario].source.routings();
        Self { plan, scenario, routings, received: OnceLock::new() }
    }

    pub(super) fn scenario(&self) -> &Scenario {
        &self.plan.scenarios[self.scenario]
    }

    pub(super) fn received(&self, rank: Rank) -> &ReceivedRows {
        let all = self.received.get_or_init(|| {
            let unlimited = vec![None; self.plan.ranks()];
            oracle::rows(&self.plan.world, &self.routings, self.scenario().mode, &unlimited)
        });
        &all[rank.index()]
    }
}
