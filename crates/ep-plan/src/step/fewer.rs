//! Plans on a part of the cluster: on fewer sites, or on fewer members of every site.
//!
//! A plan uses every GPU of its cluster. Leaving GPUs out can be faster: a site with a slow uplink delays the others, and sites
//! whose numbers of members have no common divisor divide into small parts. If a link between sites limits the step, fewer GPUs
//! can be as fast as all.

use serde::{Deserialize, Serialize};

use super::{StepPlanner, StepPrice};
use crate::cluster::{Cluster, ClusterDescription, gcd};
use crate::error::{PlanError, Result};

/// Maximum number of plans that use fewer members of every site ([`cuts`]).
const SIZES: usize = 4;

/// The best plan on a part of a cluster.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
pub struct Fewer {
    /// The sites of the part, ascending.
    pub sites: Vec<usize>,
    /// Members of the second level that the part has in each of these sites. Empty if the cluster has one level.
    pub members: Vec<usize>,
    /// The GPUs of the part.
    pub gpus: usize,
    /// The best strategy on the part.
    pub price: StepPrice,
}

impl StepPlanner {
    /// Plans the same step on parts of the cluster. Returns the plans, fastest first. The parts have
    /// - fewer sites: one, the other powers of two, and all but one. The largest sites are used; of equally large ones, those
    ///   with the fastest uplinks;
    /// - or fewer members of every site: a half to seven eighths if sites are equal, otherwise numbers with a larger common
    ///   divisor.
    ///
    /// Parts without a plan are left out. If the options fix one EP group of all GPUs of a stage, each part has one EP group of
    /// all GPUs of its stage. Such a part is left out if it needs copies of experts and the whole cluster does not.
    ///
    /// The search takes at most about as long as 20 plans.
    pub fn on_fewer(&self) -> Vec<Fewer> {
        let whole = self.cluster.description();
        let order = by_size(whole);
        let mut parts: Vec<Part> = counts(order.len())
            .map(|count| {
                let mut sites = order[..count].to_vec();
                sites.sort_unstable();
                Part::of_sites(whole, sites)
            })
            .collect();
        let all: Vec<usize> = (0..order.len()).collect();
        let members: Vec<usize> = all.iter().filter_map(|&site| members_of(whole, site)).collect();
        parts.extend(cuts(&members).into_iter().map(|members| Part { sites: all.clone(), members }));
        let mut found: Vec<Fewer> = parts.into_iter().filter_map(|part| self.on(part)).collect();
        found.sort_by(|a, b| b.price.tokens_per_second.total_cmp(&a.price.tokens_per_second));
        found
    }

    /// Checks that the model fits into the memory of the largest site of several.
    ///
    /// # Errors
    /// [`PlanError::TotalMemory`] if it does not.
    pub fn memory_of_one_site(&self) -> Result<()> {
        let whole = self.cluster.description();
        let sites = by_size(whole);
        let Some(&site) = sites.first().filter(|_| sites.len() > 1) else { return Ok(()) };
        let cluster = Cluster::try_from(Part::of_sites(whole, vec![site]).of(whole))?;
        match Self::new(cluster, self.model.clone(), self.options.clone()) {
            Err(error @ PlanError::TotalMemory { .. }) => Err(error),
            _ => Ok(()),
        }
    }

    /// The best plan on a part of the cluster. `None` if the part is left out ([`Self::on_fewer`]).
    fn on(&self, part: Part) -> Option<Fewer> {
        let description = part.of(self.cluster.description());
        let gpus = description.gpus();
        let cluster = Cluster::try_from(description).ok()?;
        let mut options = self.options.clone();
        // An EP group of all GPUs of a stage becomes one of all GPUs of the part's stage.
        let (all, stages) = (self.cluster.gpus(), options.pipeline_stages.unwrap_or(1));
        if options.expert_parallel == Some(all / stages) && all.is_multiple_of(stages) {
            let (experts, group) = (self.model.description().experts, gpus / stages);
            let misses = experts.is_multiple_of(all / stages) && !experts.is_multiple_of(group.max(1));
            if misses || !gpus.is_multiple_of(stages) {
                return None;
            }
            options.expert_parallel = Some(group);
        }
        let plan = Self::new(cluster, self.model.clone(), options).ok()?.plan().ok()?;
        Some(Fewer { sites: part.sites, members: part.members, gpus, price: plan.best().clone() })
    }
}

/// Sites of a cluster, and the number of members of the second level that each site keeps.
struct Part {
    sites: Vec<usize>,
    members: Vec<usize>,
}

impl Part {
    /// These sites with all of their members.
    fn of_sites(whole: &ClusterDescription, sites: Vec<usize>) -> Self {
        Self { members: sites.iter().filter_map(|&site| members_of(whole, site)).collect(), sites }
    }

    fn of(&self, whole: &ClusterDescription) -> ClusterDescription {
        let mut description = whole.clone();
        for level in &mut description.levels {
            let rates = std::mem::take(&mut level.site_bandwidth_gbit_per_s);
            let used: Vec<f64> = self.sites.iter().filter_map(|&site| rates.get(site).copied()).collect();
            if !used.is_empty() {
                level.set_bandwidths(&used);
            }
        }
        if let Some(outermost) = description.levels.first_mut() {
            outermost.scaling_factor = self.sites.len();
        }
        if let Some(second) = description.levels.get_mut(1).filter(|_| !self.members.is_empty()) {
            second.set_members(&self.members);
        }
        description
    }
}

/// Number of members of the second level in a site.
fn members_of(whole: &ClusterDescription, site: usize) -> Option<usize> {
    let level = whole.levels.get(1)?;
    Some(level.site_members.get(site).copied().unwrap_or(level.scaling_factor))
}

/// The sites, largest first. Equally large sites are ordered by the bandwidth of their uplinks, fastest first.
fn by_size(whole: &ClusterDescription) -> Vec<usize> {
    let Some(outermost) = whole.levels.first() else { return Vec::new() };
    let rate = |site: usize| {
        let rates = &outermost.site_bandwidth_gbit_per_s;
        rates.get(site).copied().unwrap_or(outermost.bandwidth_gbit_per_s)
    };
    let mut order: Vec<usize> = (0..outermost.scaling_factor).collect();
    order.sort_by(|&a, &b| {
        members_of(whole, b).cmp(&members_of(whole, a)).then_with(|| rate(b).total_cmp(&rate(a)))
    });
    order
}

/// The numbers of sites to try: powers of two, and all but one.
fn counts(sites: usize) -> impl Iterator<Item = usize> {
    let powers = std::iter::successors(Some(1usize), |&count| count.checked_mul(2));
    let mut counts: Vec<usize> = powers.take_while(|&count| count < sites).collect();
    counts.extend(sites.checked_sub(1).filter(|&count| count > 0));
    counts.dedup();
    counts.into_iter()
}

/// Lists of fewer members of every site, one number per site. If sites are equal, a list has a half to seven eighths of all
/// members. If sites are unequal, the numbers of a list are multiples of a number above the greatest common divisor of
/// `members`; the lists that leave out the fewest members are returned.
fn cuts(members: &[usize]) -> Vec<Vec<usize>> {
    let (Some(common), Some(&least)) = (members.iter().copied().reduce(gcd), members.iter().min()) else {
        return Vec::new();
    };
    if members.len() > 1 && members.iter().all(|&count| count == least) {
        let mut parts: Vec<usize> = (SIZES..2 * SIZES).rev().map(|part| least * part / (2 * SIZES)).collect();
        parts.retain(|&part| part > 0);
        parts.dedup();
        return parts.into_iter().map(|part| vec![part; members.len()]).collect();
    }
    let mut cuts: Vec<Vec<usize>> = (common + 1..=least)
        .map(|part| members.iter().map(|&count| count / part * part).collect())
        .filter(|cut: &Vec<usize>| cut != members)
        .collect();
    let left_out = |cut: &[usize]| members.iter().sum::<usize>() - cut.iter().sum::<usize>();
    // The sort is stable: of cuts that leave out equally many members, the one with the largest parts comes first.
    cuts.reverse();
    cuts.sort_by_key(|cut| left_out(cut));
    cuts.dedup();
    cuts.truncate(SIZES);
    cuts
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::{Options, presets};

    fn planner(cluster: ClusterDescription) -> StepPlanner {
        let model = presets::deepseek_v3().try_into().unwrap();
        StepPlanner::new(cluster.try_into().unwrap(), model, Options::default()).unwrap()
    }

    /// Datacenters with these numbers of nodes of 8 GPUs, and with these uplinks.
    fn sites(nodes: &[usize], gbit_per_s: &[f64]) -> ClusterDescription {
        let most = nodes.iter().copied().max().unwrap();
        let mut cluster = presets::datacenters(nodes.len(), 100.0, 0.02, presets::dgx_h200(most));
        cluster.levels[0].set_bandwidths(gbit_per_s);
        cluster.levels[1].set_members(nodes);
        cluster
    }

    #[test]
    fn a_part_is_planned_as_a_cluster_of_its_own() {
        let whole = sites(&[64, 64, 32, 64], &[10.0, 40.0, 100.0, 20.0]);
        let found = planner(whole).on_fewer();
        for (used, nodes, rates) in [
            (vec![1], vec![64], vec![40.0]),
            (vec![1, 3], vec![64, 64], vec![40.0, 20.0]),
            (vec![0, 1, 3], vec![64, 64, 64], vec![10.0, 40.0, 20.0]),
        ] {
            let part = found.iter().find(|part| part.sites == used).unwrap();
            let alone = planner(sites(&nodes, &rates)).plan().unwrap();
            assert_eq!((&part.members, part.gpus), (&nodes, 8 * nodes.iter().sum::<usize>()));
            assert_eq!(&part.price, alone.best());
        }
        assert!(
            found.windows(2).all(|pair| pair[0].price.tokens_per_second >= pair[1].price.tokens_per_second)
        );
    }

    #[test]
    fn sites_without_a_common_part_are_cut() {
        let whole = planner(sites(&[64, 63], &[100.0, 100.0]));
        let plan = whole.plan().unwrap();
        let found = whole.on_fewer();
        let cut = found.iter().find(|part| part.members == [63, 63]).unwrap();
        assert_eq!((&cut.sites[..], cut.gpus), (&[0, 1][..], 1008));
        assert!(cut.price.tokens_per_second > 10.0 * plan.best().tokens_per_second);
    }

    /// A fixed EP group of fewer than all GPUs keeps its size: one site of 16 GPUs has no group of 32.
    #[test]
    fn an_ep_group_of_all_gpus_is_one_of_all_gpus_of_a_part() {
        let parts = |expert_parallel| {
            let mut cluster = sites(&[2, 2, 2], &[100.0; 3]);
            cluster.gpu.memory_gb = 4000.0;
            let options = Options { expert_parallel: Some(expert_parallel), ..Options::default() };
            let model = presets::deepseek_v3().try_into().unwrap();
            let planner = StepPlanner::new(cluster.try_into().unwrap(), model, options).unwrap();
            let mut found: Vec<_> =
                planner.on_fewer().iter().map(|part| (part.gpus, part.price.layout.group_gpus())).collect();
            found.sort_unstable();
            found
        };
        assert_eq!(parts(48), [(16, 16), (24, 24), (32, 32)]);
        assert_eq!(parts(32), [(32, 32)]);
    }

    #[test]
    fn one_site_has_no_part() {
        assert_eq!(planner(sites(&[64], &[100.0])).on_fewer(), []);
    }

    #[test]
    fn numbers_of_sites() {
        let of = |sites| counts(sites).collect::<Vec<_>>();
        assert_eq!([of(0), of(1), of(2), of(3)], [vec![], vec![], vec![1], vec![1, 2]]);
        assert_eq!([of(4), of(8), of(9)], [vec![1, 2, 3], vec![1, 2, 4, 7], vec![1, 2, 4, 8]]);
    }

    #[test]
    fn cuts_leave_out_few_members() {
        assert_eq!(cuts(&[64, 63]), [[63, 63], [64, 62], [62, 62], [64, 60]]);
        assert_eq!(cuts(&[8, 8, 4]), [[0; 3]; 0]);
        assert_eq!(cuts(&[7, 7]), [[6; 2], [5; 2], [4; 2], [3; 2]]);
        assert_eq!(cuts(&[16, 16, 16])[2..], [[10; 3], [8; 3]]);
        assert_eq!(cuts(&[2, 2]), [[1; 2]]);
        assert_eq!([cuts(&[1, 1]), cuts(&[16])], [[[0; 2]; 0], [[0; 2]; 0]]);
        assert!(cuts(&[]).is_empty());
        assert_eq!(cuts(&[7, 8])[0], [7, 7]);
        assert_eq!(cuts(&[127, 64])[..2], [[126, 64], [126, 63]]);
    }
}
