//! The partition as groups and rank lists. `hybrid_ep.migration` opens its communicators from them.

use serde::{Deserialize, Serialize};

use super::{Exchange, Partition};
use crate::error::{PlanError, Result};

/// Every group of a partition, as rank lists. A rank's position in the list of its group is its rank in the group's
/// communicator.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct PartitionExport {
    /// Number of ranks.
    pub ranks: usize,
    /// For each datacenter, its ranks, ascending. A datacenter is a member of the outermost level;
    /// [`in_sites`](Self::in_sites) joins the parts of unequal sites.
    pub datacenters: Vec<Vec<usize>>,
    /// The groups of each level, outermost first.
    pub levels: Vec<LevelGroups>,
    /// For each expert domain, its ranks, which hold the same experts after the gathers.
    pub expert_domains: Vec<Vec<usize>>,
    /// For each dispatch group, the ranks among which dispatch and combine run. The rank at position `d` belongs to
    /// expert domain `d`.
    pub dispatch_groups: Vec<Vec<usize>>,
    /// For each rank, its location and its groups.
    pub rank_groups: Vec<RankGroups>,
}

/// The groups of one level. Each rank is in exactly one group of each kind.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct LevelGroups {
    /// Members of the level.
    pub scaling_factor: usize,
    /// Members of one domain of the level.
    pub domain_size: usize,
    /// Groups of ranks that gather experts from each other: same domain, equal digits at every other level.
    pub all_gather: Vec<Vec<usize>>,
    /// Groups of ranks that exchange tokens: same offset, equal digits at every other level.
    pub all_to_all: Vec<Vec<usize>>,
}

/// The location and the groups of one rank.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct RankGroups {
    /// The rank's digits, outermost level first.
    pub location: Vec<usize>,
    /// Index of the rank's expert domain, and the rank's position in its dispatch group.
    pub expert_domain: usize,
    /// Index of the rank's dispatch group, and the rank's position in its expert domain.
    pub dispatch_group: usize,
    /// Index of the rank's all-gather group at each level.
    pub all_gather_group: Vec<usize>,
    /// Index of the rank's all-to-all group at each level.
    pub all_to_all_group: Vec<usize>,
}

impl PartitionExport {
    /// Joins the parts of unequal sites ([`Site::parts`](crate::cluster::Site::parts)): each site has the next
    /// `parts[site]` members of the outermost level. `datacenters` become the sites, and the location of a rank becomes
    /// its site and its place in the site. The groups do not change.
    ///
    /// The partition must contain all parts or lie inside one. If it lies inside one, or if all sites are equal,
    /// nothing changes.
    #[must_use]
    pub fn in_sites(mut self, parts: &[usize]) -> Self {
        let inside = self.levels.get(1).map_or(1, |second| second.scaling_factor);
        // For each part, its site and its index in the site.
        let of_parts: Vec<(usize, usize)> = parts
            .iter()
            .enumerate()
            .flat_map(|(site, &count)| (0..count).map(move |part| (site, part)))
            .collect();
        for rank in &mut self.rank_groups {
            let Some((site, part)) = rank.location.first().and_then(|&part| of_parts.get(part)).copied()
            else {
                continue;
            };
            rank.location[0] = site;
            if let Some(second) = rank.location.get_mut(1) {
                *second += part * inside;
            }
        }
        self.datacenters = by_datacenter(&self.rank_groups);
        self
    }
}

/// Groups the ranks by the first digit of their location, which ascends with the rank.
fn by_datacenter(ranks: &[RankGroups]) -> Vec<Vec<usize>> {
    let mut found: Vec<Vec<usize>> = Vec::new();
    for (rank, at) in ranks.iter().enumerate() {
        let datacenter = at.location.first().copied().unwrap_or(0);
        found.resize_with(found.len().max(datacenter + 1), Vec::new);
        found[datacenter].push(rank);
    }
    found
}

impl Partition {
    /// Lists every group of the partition.
    pub fn export(&self) -> PartitionExport {
        let levels: Vec<LevelGroups> = (0..self.depth())
            .map(|level| LevelGroups {
                scaling_factor: self.levels[level].scaling_factor,
                domain_size: self.levels[level].domain_size,
                all_gather: self.level_groups(level, Exchange::AllGather),
                all_to_all: self.level_groups(level, Exchange::AllToAll),
            })
            .collect();
        let group_of = |groups: &dyn Fn(&LevelGroups) -> &Vec<Vec<usize>>| -> Vec<Vec<usize>> {
            let mut index = vec![Vec::with_capacity(levels.len()); self.gpus];
            for level in &levels {
                for (group, ranks) in groups(level).iter().enumerate() {
                    ranks.iter().for_each(|&rank| index[rank].push(group));
                }
            }
            index
        };
        let all_gather_group = group_of(&|level| &level.all_gather);
        let all_to_all_group = group_of(&|level| &level.all_to_all);

        let mut expert_domains = vec![Vec::new(); self.gpus / self.expert_domain_size()];
        let mut dispatch_groups = vec![Vec::new(); self.expert_domain_size()];
        let mut rank_groups = Vec::with_capacity(self.gpus);
        for (rank, (all_gather_group, all_to_all_group)) in
            all_gather_group.into_iter().zip(all_to_all_group).enumerate()
        {
            let (domain, offset) = self.domain_and_offset(rank);
            expert_domains[domain].push(rank);
            dispatch_groups[offset].push(rank);
            rank_groups.push(RankGroups {
                location: self.levels.iter().map(|level| level.digit(rank)).collect(),
                expert_domain: domain,
                dispatch_group: offset,
                all_gather_group,
                all_to_all_group,
            });
        }
        let datacenters = by_datacenter(&rank_groups);
        PartitionExport {
            ranks: self.gpus,
            datacenters,
            levels,
            expert_domains,
            dispatch_groups,
            rank_groups,
        }
    }

    /// The expert domain of every expert of a layer, with the experts spread over the ranks in order. This list is the
    /// placement for dispatch: entry `e` is the position, in every dispatch group, of the rank that serves expert `e`.
    ///
    /// # Errors
    /// [`PlanError::Experts`] when the number of experts is not a positive multiple of the number of ranks.
    pub fn expert_domain_of_experts(&self, experts: usize) -> Result<Vec<usize>> {
        if experts == 0 || !experts.is_multiple_of(self.gpus) {
            let possible = crate::divisors::divisors(experts);
            return Err(PlanError::Experts { experts, gpus: self.gpus, possible });
        }
        let per_gpu = experts / self.gpus;
        Ok((0..experts).map(|expert| self.domain_and_offset(expert / per_gpu).0).collect())
    }

    /// The groups of one exchange at one level, ordered by their first rank.
    fn level_groups(&self, index: usize, exchange: Exchange) -> Vec<Vec<usize>> {
        let level = self.levels[index];
        let leads = |rank: &usize| match exchange {
            Exchange::AllGather => level.digit(*rank).is_multiple_of(level.domain_size),
            Exchange::AllToAll => level.digit(*rank) < level.domain_size,
        };
        let (members, step) = match exchange {
            Exchange::AllGather => (level.domain_size, level.stride),
            Exchange::AllToAll => (level.domains(), level.stride * level.domain_size),
        };
        (0..self.gpus)
            .filter(leads)
            .map(|first| (0..members).map(|member| first + member * step).collect())
            .collect()
    }
}
