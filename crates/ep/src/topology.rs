//! Who is where: ranks, NVLink domains, rails, datacenters, and which rank holds which expert.
//!
//! Ranks are numbered domain by domain: rank `r` is local rank `r % domain_size` of NVLink domain
//! `r / domain_size`. A rail is the set of ranks with the same local rank.

use std::fmt;
use std::ops::Range;

use serde::{Deserialize, Serialize};

use crate::error::{CallerError, Result};

/// One process or GPU, by its index in the world.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash, Serialize, Deserialize)]
pub struct Rank(pub u32);

impl Rank {
    /// The rank as an index into per-rank tables.
    pub fn index(self) -> usize {
        self.0 as usize
    }
}

impl fmt::Display for Rank {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        self.0.fmt(f)
    }
}

/// Ranks, grouped into NVLink domains of equal size, and these into datacenters.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub struct Topology {
    domains: u32,
    domain_size: u32,
    datacenters: u32,
}

impl Topology {
    /// `ranks` ranks in `domains` NVLink domains of equal size, in one datacenter.
    ///
    /// # Errors
    /// [`CallerError::Topology`] when there is no rank or no domain, or when the domains would be uneven.
    pub fn new(ranks: usize, domains: usize) -> Result<Self> {
        if ranks == 0 || domains == 0 {
            return Err(CallerError::Topology(format!(
                "{ranks} ranks in {domains} domains: at least one of each is needed"
            ))
            .into());
        }
        if !ranks.is_multiple_of(domains) {
            return Err(CallerError::Topology(format!(
                "{ranks} ranks cannot be split into {domains} NVLink domains of equal size; \
                 choose a number of domains that divides {ranks}"
            ))
            .into());
        }
        let (Ok(domain_count), Ok(domain_size)) = (u32::try_from(domains), u32::try_from(ranks / domains))
        else {
            return Err(CallerError::Topology(format!("{ranks} ranks are more than can be numbered")).into());
        };
        Ok(Self { domains: domain_count, domain_size, datacenters: 1 })
    }

    /// The topology of domains with these sizes, as a launcher finds them.
    ///
    /// # Errors
    /// [`CallerError::Topology`] that names the first uneven domain: the rails need the same local ranks everywhere.
    pub fn from_domain_sizes(sizes: &[usize]) -> Result<Self> {
        let first = sizes.first().copied().unwrap_or(0);
        if let Some((domain, size)) = sizes.iter().enumerate().find(|&(_, &size)| size != first) {
            return Err(CallerError::Topology(format!(
                "NVLink domain {domain} has {size} ranks and domain 0 has {first}; rails need the same number in every domain"
            ))
            .into());
        }
        Self::new(first * sizes.len(), sizes.len())
    }

    /// The same ranks and domains, spread evenly over `datacenters` in order.
    ///
    /// # Errors
    /// [`CallerError::Topology`] when the domains cannot be spread evenly.
    pub fn with_datacenters(self, datacenters: usize) -> Result<Self> {
        match u32::try_from(datacenters) {
            Ok(count) if count > 0 && self.domains.is_multiple_of(count) => {
                Ok(Self { datacenters: count, ..self })
            }
            _ => Err(CallerError::Topology(format!(
                "{} NVLink domains cannot be spread evenly over {datacenters} datacenters",
                self.domains
            ))
            .into()),
        }
    }

    /// Number of ranks.
    pub fn ranks(&self) -> usize {
        self.domains() * self.domain_size()
    }

    /// Number of NVLink domains.
    pub fn domains(&self) -> usize {
        self.domains as usize
    }

    /// Ranks in each NVLink domain; the number of rails.
    pub fn domain_size(&self) -> usize {
        self.domain_size as usize
    }

    /// Number of datacenters.
    pub fn datacenters(&self) -> usize {
        self.datacenters as usize
    }

    /// The NVLink domain of a rank.
    pub fn domain_of(&self, rank: Rank) -> usize {
        (rank.0 / self.domain_size) as usize
    }

    /// The rank's index in its domain, which is also its rail.
    pub fn local_rank_of(&self, rank: Rank) -> usize {
        (rank.0 % self.domain_size) as usize
    }

    /// The rank with this local rank in this domain.
    ///
    /// # Panics
    /// When either is out of range.
    pub fn rank_at(&self, domain: usize, local_rank: usize) -> Rank {
        assert!(domain < self.domains() && local_rank < self.domain_size(), "no such place in {self:?}");
        Rank((domain * self.domain_size() + local_rank) as u32)
    }

    /// The datacenter of a rank.
    pub fn datacenter_of(&self, rank: Rank) -> usize {
        self.domain_of(rank) * self.datacenters() / self.domains()
    }

    /// Every rank, in order.
    pub fn all_ranks(&self) -> impl ExactSizeIterator<Item = Rank> + use<> {
        (0..self.domains * self.domain_size).map(Rank)
    }

    /// The ranks of one domain, in order of local rank.
    pub fn domain_ranks(&self, domain: usize) -> impl ExactSizeIterator<Item = Rank> + use<> {
        let first = domain as u32 * self.domain_size;
        (first..first + self.domain_size).map(Rank)
    }
}

/// Which rank holds which expert.
///
/// Experts are also numbered by *position*: rank by rank, and on one rank by expert index. Everything that is
/// ordered "by rank, then local expert" is ordered by position; with the contiguous placement a position is the
/// expert's own index.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct ExpertPlacement {
    /// Position of each expert.
    position: Vec<u32>,
    /// Expert at each position.
    expert: Vec<u32>,
    /// First position of each rank, and one past the last.
    first: Vec<u32>,
    /// Rank at each position.
    owner: Vec<Rank>,
    /// NVLink domain of the rank at each position.
    domain: Vec<u32>,
}

impl ExpertPlacement {
    /// Expert `e` on rank `e / (experts / ranks)`.
    ///
    /// # Errors
    /// [`CallerError::Placement`] when the experts do not divide evenly.
    pub fn contiguous(experts: usize, topology: &Topology) -> Result<Self> {
        let ranks = topology.ranks();
        if experts == 0 || !experts.is_multiple_of(ranks) {
            return Err(CallerError::Placement(format!(
                "{experts} experts cannot be placed evenly on {ranks} ranks; use a multiple of {ranks}, or a placement table"
            ))
            .into());
        }
        let per_rank = experts / ranks;
        let owners: Vec<Rank> = (0..experts).map(|expert| Rank((expert / per_rank) as u32)).collect();
        Self::table(&owners, topology)
    }

    /// Expert `e` on rank `owners[e]`; ranks may hold different numbers of experts, none included.
    ///
    /// # Errors
    /// [`CallerError::Placement`] when there is no expert, or one is on a rank that does not exist.
    pub fn table(owners: &[Rank], topology: &Topology) -> Result<Self> {
        let ranks = topology.ranks();
        if owners.is_empty() || owners.len() >= u32::MAX as usize {
            return Err(
                CallerError::Placement(format!("{} experts: at least one is needed", owners.len())).into()
            );
        }
        if let Some((expert, rank)) = owners.iter().enumerate().find(|(_, rank)| rank.index() >= ranks) {
            return Err(CallerError::Placement(format!(
                "expert {expert} is placed on rank {rank}, but there are only {ranks} ranks"
            ))
            .into());
        }
        let mut expert: Vec<u32> = (0..owners.len() as u32).collect();
        expert.sort_by_key(|&e| (owners[e as usize], e));
        let mut position = vec![0; owners.len()];
        let mut first = vec![0; ranks + 1];
        for (p, &e) in expert.iter().enumerate() {
            position[e as usize] = p as u32;
            first[owners[e as usize].index() + 1] = p as u32 + 1;
        }
        for rank in 0..ranks {
            first[rank + 1] = first[rank + 1].max(first[rank]);
        }
        let owner: Vec<Rank> = expert.iter().map(|&e| owners[e as usize]).collect();
        let domain = owner.iter().map(|&rank| topology.domain_of(rank) as u32).collect();
        Ok(Self { position, expert, first, owner, domain })
    }

    /// Number of experts in the world.
    pub fn experts(&self) -> usize {
        self.expert.len()
    }

    /// Whether every expert's position is its own index, as with the contiguous placement.
    pub fn is_in_order(&self) -> bool {
        self.expert.is_sorted()
    }

    /// The expert's position: its place when ordered by rank, then local expert.
    pub fn position_of(&self, expert: u32) -> u32 {
        self.position[expert as usize]
    }

    /// The expert at a position.
    pub fn expert_at(&self, position: u32) -> u32 {
        self.expert[position as usize]
    }

    /// The rank that holds the expert at a position.
    pub fn owner_at(&self, position: u32) -> Rank {
        self.owner[position as usize]
    }

    /// The NVLink domain of the rank that holds the expert at a position.
    pub fn domain_at(&self, position: u32) -> usize {
        self.domain[position as usize] as usize
    }

    /// The positions of a rank's experts, in order of local expert.
    pub fn positions_of(&self, rank: Rank) -> Range<usize> {
        self.first[rank.index()] as usize..self.first[rank.index() + 1] as usize
    }

    /// Number of experts on a rank.
    pub fn local_experts(&self, rank: Rank) -> usize {
        self.positions_of(rank).len()
    }
}

/// What every rank of one communicator agrees on: who there is, and who holds which expert.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct World {
    /// Ranks and NVLink domains.
    pub topology: Topology,
    /// Experts on ranks.
    pub placement: ExpertPlacement,
}

impl World {
    /// `ranks` ranks in `domains` NVLink domains, `experts` experts placed contiguously.
    ///
    /// # Errors
    /// As [`Topology::new`] and [`ExpertPlacement::contiguous`].
    pub fn new(ranks: usize, domains: usize, experts: usize) -> Result<Self> {
        let topology = Topology::new(ranks, domains)?;
        let placement = ExpertPlacement::contiguous(experts, &topology)?;
        Ok(Self { topology, placement })
    }

    /// Number of ranks.
    pub fn ranks(&self) -> usize {
        self.topology.ranks()
    }

    /// Number of experts.
    pub fn experts(&self) -> usize {
        self.placement.experts()
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn ranks_have_places() {
        let topology = Topology::new(12, 3).unwrap().with_datacenters(3).unwrap();
        for rank in topology.all_ranks() {
            let (domain, local) = (topology.domain_of(rank), topology.local_rank_of(rank));
            assert_eq!(topology.rank_at(domain, local), rank);
            assert_eq!(topology.datacenter_of(rank), domain);
        }
        assert_eq!(topology.domain_ranks(1).collect::<Vec<_>>(), [4, 5, 6, 7].map(Rank));
    }

    #[test]
    fn one_rank_is_a_world() {
        let topology = Topology::new(1, 1).unwrap();
        assert_eq!((topology.ranks(), topology.domains(), topology.domain_size()), (1, 1, 1));
    }

    #[test]
    fn impossible_topologies_say_why() {
        let message = |result: Result<Topology>| result.unwrap_err().to_string();
        assert!(message(Topology::new(0, 1)).contains("at least one"));
        assert!(message(Topology::new(4, 0)).contains("at least one"));
        assert!(message(Topology::new(6, 4)).contains("equal size"));
        assert!(message(Topology::from_domain_sizes(&[8, 8, 6])).contains("domain 2 has 6 ranks"));
        assert!(message(Topology::from_domain_sizes(&[])).contains("at least one"));
        assert!(message(Topology::new(4, 2).unwrap().with_datacenters(3)).contains("3 datacenters"));
        assert!(Topology::from_domain_sizes(&[4, 4]).is_ok());
    }

    #[test]
    fn contiguous_positions_are_the_experts() {
        let topology = Topology::new(4, 2).unwrap();
        let placement = ExpertPlacement::contiguous(8, &topology).unwrap();
        for expert in 0..8 {
            assert_eq!(placement.position_of(expert), expert);
            assert_eq!(placement.owner_at(expert), Rank(expert / 2));
        }
        assert!(ExpertPlacement::contiguous(6, &topology).unwrap_err().to_string().contains("multiple of 4"));
    }

    #[test]
    fn a_table_orders_by_rank_then_expert() {
        let topology = Topology::new(3, 1).unwrap();
        let placement = ExpertPlacement::table(&[2, 0, 2, 0, 0].map(Rank), &topology).unwrap();
        let experts: Vec<u32> = (0..5).map(|p| placement.expert_at(p)).collect();
        assert_eq!(experts, [1, 3, 4, 0, 2]);
        assert_eq!(placement.positions_of(Rank(0)), 0..3);
        assert_eq!(placement.positions_of(Rank(1)), 3..3);
        assert_eq!(placement.positions_of(Rank(2)), 3..5);
        let error = ExpertPlacement::table(&[Rank(0), Rank(3)], &topology).unwrap_err();
        assert!(error.to_string().contains("expert 1 is placed on rank 3"));
    }
}
