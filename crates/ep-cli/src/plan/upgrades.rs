//! What more of each resource brings: the same step on larger clusters.

use ep_plan::cluster::ClusterDescription;
use ep_plan::step::StepPrice;
use serde::Serialize;

use super::remedy::grow;
use super::steps::described;
use super::words::relation;
use crate::common::units;
use crate::planner::problem::Problem;

/// The same step on a larger cluster.
#[derive(Debug, Clone, PartialEq, Serialize)]
pub(super) struct Upgrade {
    /// What the cluster has twice: "bandwidth of wan".
    twice: String,
    gpus: usize,
    /// The best strategy there. `None` if there is none.
    price: Option<StepPrice>,
}

/// Plans the step with twice the bandwidth of each level between nodes, of each site's uplink if the uplinks differ, twice the
/// nodes, and twice both. `best_on` is the plan to compare on a changed problem, if there is one.
pub(super) fn upgrades(problem: &Problem, best_on: impl Fn(Problem) -> Option<StepPrice>) -> Vec<Upgrade> {
    let levels = &problem.cluster.levels;
    // The links of the innermost level are part of a node.
    let between_nodes = 0..levels.len().saturating_sub(1);
    let used: Vec<usize> = between_nodes.filter(|&level| levels[level].scaling_factor > 1).collect();
    let bandwidth = |level: usize| format!("bandwidth of {}", levels[level].name);
    let mut wanted: Vec<(String, Vec<Resource>)> =
        used.iter().map(|&level| (bandwidth(level), vec![Resource::Bandwidth(level)])).collect();
    if let Some(&outermost) = used.first() {
        let unequal = levels[outermost].site_bandwidth_gbit_per_s.len();
        wanted.extend((0..unequal).map(|site| {
            let twice = format!("{} at datacenter {}", bandwidth(outermost), site + 1);
            (twice, vec![Resource::BandwidthOf { level: outermost, site }])
        }));
    }
    wanted.push(("nodes".into(), vec![Resource::Nodes]));
    if let Some(&outermost) = used.first() {
        let both = vec![Resource::Nodes, Resource::Bandwidth(outermost)];
        wanted.push((format!("nodes and {}", bandwidth(outermost)), both));
    }
    let upgrade = |(twice, resources): (String, Vec<Resource>)| {
        let mut larger = problem.clone();
        resources.iter().for_each(|resource| resource.double(&mut larger.cluster));
        Upgrade { twice, gpus: larger.cluster.gpus(), price: best_on(larger) }
    };
    wanted.into_iter().map(upgrade).collect()
}

#[derive(Debug, Clone, Copy)]
enum Resource {
    /// The bandwidth of a level's links.
    Bandwidth(usize),
    /// The bandwidth of one site's links of a level.
    BandwidthOf { level: usize, site: usize },
    /// The members of the level above the innermost one.
    Nodes,
}

impl Resource {
    fn double(self, cluster: &mut ClusterDescription) {
        match self {
            Self::Bandwidth(level) => {
                let level = &mut cluster.levels[level];
                level.bandwidth_gbit_per_s *= 2.0;
                level.site_bandwidth_gbit_per_s.iter_mut().for_each(|rate| *rate *= 2.0);
            }
            Self::BandwidthOf { level, site } => {
                let level = &mut cluster.levels[level];
                let mut rates = level.site_bandwidth_gbit_per_s.clone();
                rates[site] *= 2.0;
                level.set_bandwidths(&rates);
            }
            Self::Nodes => {
                let level = cluster.levels.len().saturating_sub(2);
                let level = &mut cluster.levels[level];
                grow(level, 2 * level.scaling_factor);
            }
        }
    }
}

/// The columns of [`rows`].
pub(super) const HEADER: [&str; 6] =
    ["with twice the", "GPUs", "step", "tokens/s", "than this cluster", "best strategy"];

/// The steps on larger clusters as rows of a table. `now`: the step on the given cluster.
pub(super) fn rows(upgrades: &[Upgrade], now: &StepPrice) -> Vec<Vec<String>> {
    let row = |Upgrade { twice, gpus, price }: &Upgrade| {
        let mut row = vec![twice.clone(), units::count(*gpus as u64)];
        match price {
            Some(price) => row.extend([
                price.step_time.to_string(),
                units::count(price.tokens_per_second.round() as u64),
                relation(price.tokens_per_second / now.tokens_per_second),
                described(price),
            ]),
            None => row.extend(["no plan", "", "", ""].map(str::to_owned)),
        }
        row
    };
    upgrades.iter().map(row).collect()
}
