//! Ranks, NVLink domains, rails and datacenters, and which rank holds which expert.
//!
//! Ranks are numbered domain by domain: rank `r` is local rank `r % domain_size` of NVLink domain
//! `r / domain_size`. A rail is the set of ranks with the same local rank, one per domain.

use std::fmt;
use std::ops::Range;

use serde::{Deserialize, Serialize};

use crate::error::{CallerError, Result};

/// Maximum number of ranks of a world.
pub const MAX_RANKS: usize = 1 << 20;
/// Maximum number of experts of a world.
pub const MAX_EXPERTS: usize = 1 << 24;

/// The index of one participant (a process or a GPU) in its world.
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

/// Ranks grouped into NVLink domains of equal size, and domains grouped into datacenters. Part of a [`World`].
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub struct Topology {
    domains: u32,
    domain_size: u32,
    datacenters: u32,
}

impl Topology {
    /// The topology that a [`WorldBuilder`] describes.
    fn new(ranks: usize, domains: usize, datacenters: usize) -> Result<Self> {
        let refuse = |text: String| Err(CallerError::Topology(text).into());
        if ranks == 0 || domains == 0 {
            return refuse(format!("{ranks} ranks in {domains} domains: at least one of each is needed"));
        }
        if !ranks.is_multiple_of(domains) {
            return refuse(format!(
                "{ranks} ranks cannot be split into {domains} NVLink domains of equal size; \
                 choose a number of domains that divides {ranks}"
            ));
        }
        if ranks > MAX_RANKS {
            return refuse(format!("{ranks} ranks: at most {MAX_RANKS} are possible"));
        }
        if datacenters == 0 || !domains.is_multiple_of(datacenters) {
            return refuse(format!(
                "{domains} NVLink domains cannot be spread evenly over {datacenters} datacenters"
            ));
        }
        // No cast truncates: all numbers are at most `ranks`, which is at most MAX_RANKS.
        Ok(Self {
            domains: domains as u32,
            domain_size: (ranks / domains) as u32,
            datacenters: datacenters as u32,
        })
    }

    /// Number of ranks.
    pub fn ranks(&self) -> usize {
        self.domains() * self.domain_size()
    }

    /// Number of NVLink domains.
    pub fn domains(&self) -> usize {
        self.domains as usize
    }

    /// Ranks in each NVLink domain, which is also the number of rails.
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

    /// The rank's index in its domain, which is also the index of its rail.
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

    /// The ranks of one rail, in order of domain.
    ///
    /// # Panics
    /// When `local_rank` is out of range.
    pub fn rail_ranks(&self, local_rank: usize) -> impl ExactSizeIterator<Item = Rank> + use<> {
        let topology = *self;
        (0..topology.domains()).map(move |domain| topology.rank_at(domain, local_rank))
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

/// Checks the number of experts. The bound keeps expert numbers within 32 bits, and bounds the memory for counts.
pub(crate) fn check_number(experts: usize) -> Result<()> {
    if (1..=MAX_EXPERTS).contains(&experts) {
        return Ok(());
    }
    let text = format!("{experts} experts: at least 1 and at most {MAX_EXPERTS} are possible");
    Err(CallerError::Placement(text).into())
}

/// Which rank holds which expert.
///
/// Each expert has a *position*: its index when the experts are ordered by (rank, expert index). The *local experts*
/// of a rank are its experts in this order. With the contiguous placement the position of an expert is its index.
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
    /// Places expert `e` on rank `e / (experts / ranks)`.
    fn contiguous(experts: usize, topology: &Topology) -> Result<Self> {
        let ranks = topology.ranks();
        check_number(experts)?;
        if !experts.is_multiple_of(ranks) {
            return Err(CallerError::Placement(format!(
                "{experts} experts cannot be placed evenly on {ranks} ranks; use a multiple of {ranks}"
            ))
            .into());
        }
        let per_rank = experts / ranks;
        let owners: Vec<Rank> = (0..experts).map(|expert| Rank((expert / per_rank) as u32)).collect();
        Self::table(&owners, topology)
    }

    /// Places expert `e` on rank `owners[e]`.
    fn table(owners: &[Rank], topology: &Topology) -> Result<Self> {
        let ranks = topology.ranks();
        check_number(owners.len())?;
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

    /// Whether the position of every expert is its index, as with the contiguous placement.
    pub fn is_in_order(&self) -> bool {
        self.expert.is_sorted()
    }

    /// The position of an expert.
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

/// The ranks of one communicator and the placement of experts on them. Every rank must use the same world.
///
/// # Examples
///
/// 8 ranks in 2 NVLink domains, 32 experts:
///
/// ```
/// use ep::{Rank, World};
///
/// let world = World::builder().ranks(8).domains(2).experts(32).build()?;
/// // Rank 5 is local rank 1 of domain 1: it is on a rail with rank 1.
/// assert_eq!(world.topology().domain_of(Rank(5)), 1);
/// assert_eq!(world.topology().local_rank_of(Rank(5)), world.topology().local_rank_of(Rank(1)));
/// // Each rank holds 4 consecutive experts.
/// assert_eq!(world.placement().positions_of(Rank(5)), 20..24);
///
/// let error = World::builder().ranks(8).domains(3).experts(32).build().unwrap_err();
/// assert!(error.to_string().starts_with("topology: 8 ranks cannot be split into 3 NVLink domains"));
/// # Ok::<(), ep::Error>(())
/// ```
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct World {
    topology: Topology,
    placement: ExpertPlacement,
}

impl World {
    /// Describes a new world. See [`WorldBuilder`].
    pub fn builder() -> WorldBuilder {
        WorldBuilder::default()
    }

    /// Ranks, NVLink domains and datacenters.
    pub fn topology(&self) -> &Topology {
        &self.topology
    }

    /// The rank of each expert.
    pub fn placement(&self) -> &ExpertPlacement {
        &self.placement
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

/// Describes a [`World`]: [`ranks`](Self::ranks), and either [`experts`](Self::experts) or
/// [`placement`](Self::placement), are required.
///
/// # Examples
///
/// Three experts on two ranks:
///
/// ```
/// use ep::{Rank, World};
///
/// let world = World::builder().ranks(2).placement(&[1, 0, 1].map(Rank)).build()?;
/// assert_eq!(world.experts(), 3);
/// assert_eq!(world.placement().local_experts(Rank(1)), 2);
///
/// let error = World::builder().ranks(2).build().unwrap_err();
/// assert_eq!(error.to_string(), "expert placement: no experts are given; call `.experts(n)` or `.placement(owners)`");
/// # Ok::<(), ep::Error>(())
/// ```
#[derive(Debug, Clone, Default)]
#[must_use = "a world is made by `build`"]
pub struct WorldBuilder {
    ranks: Option<usize>,
    domains: Option<usize>,
    datacenters: Option<usize>,
    experts: Option<usize>,
    owners: Option<Vec<Rank>>,
}

impl WorldBuilder {
    /// Number of ranks, 1 to [`MAX_RANKS`]. Required.
    pub fn ranks(mut self, ranks: usize) -> Self {
        self.ranks = Some(ranks);
        self
    }

    /// Number of NVLink domains, which divides the number of ranks. Default 1. Rank `r` is in domain
    /// `r / (ranks / domains)`.
    pub fn domains(mut self, domains: usize) -> Self {
        self.domains = Some(domains);
        self
    }

    /// Number of datacenters, which divides the number of domains. Default 1. Each datacenter has the same
    /// number of consecutive domains.
    pub fn datacenters(mut self, datacenters: usize) -> Self {
        self.datacenters = Some(datacenters);
        self
    }

    /// Number of experts, a multiple of the number of ranks, at most [`MAX_EXPERTS`]. Expert `e` is on rank
    /// `e / (experts / ranks)`.
    pub fn experts(mut self, experts: usize) -> Self {
        self.experts = Some(experts);
        self
    }

    /// The rank of each expert: expert `e` is on rank `owners[e]`. Ranks may hold different numbers of experts, or
    /// none. Replaces [`experts`](Self::experts).
    pub fn placement(mut self, owners: &[Rank]) -> Self {
        self.owners = Some(owners.to_vec());
        self
    }

    /// The world.
    ///
    /// # Errors
    /// - [`CallerError::Topology`] when [`ranks`](Self::ranks) was not called, a number is 0, there are more than
    ///   [`MAX_RANKS`] ranks, or the ranks or domains cannot be divided evenly.
    /// - [`CallerError::Placement`] when neither or both of [`experts`](Self::experts) and
    ///   [`placement`](Self::placement) were called, there are no experts or more than [`MAX_EXPERTS`], the number of
    ///   experts is not a multiple of the number of ranks, or an owner is not a rank of the world.
    pub fn build(self) -> Result<World> {
        let Self { ranks, domains, datacenters, experts, owners } = self;
        let ranks = ranks.ok_or_else(|| {
            CallerError::Topology("the number of ranks is not given; call `.ranks(n)`".into())
        })?;
        let topology = Topology::new(ranks, domains.unwrap_or(1), datacenters.unwrap_or(1))?;
        let placement = match (experts, owners) {
            (Some(experts), None) => ExpertPlacement::contiguous(experts, &topology)?,
            (None, Some(owners)) => ExpertPlacement::table(&owners, &topology)?,
            (None, None) => {
                let text = "no experts are given; call `.experts(n)` or `.placement(owners)`";
                return Err(CallerError::Placement(text.into()).into());
            }
            (Some(experts), Some(owners)) => {
                return Err(CallerError::Placement(format!(
                    "both `.experts({experts})` and `.placement(..)` of {} experts are given; call one of them",
                    owners.len()
                ))
                .into());
            }
        };
        Ok(World { topology, placement })
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn message(builder: WorldBuilder) -> String {
        builder.build().unwrap_err().to_string()
    }

    /// One expert per rank.
    fn world(ranks: usize, domains: usize) -> WorldBuilder {
        World::builder().ranks(ranks).domains(domains).experts(ranks)
    }

    #[test]
    fn rank_at_inverts_domain_and_local_rank() {
        let world = world(12, 3).datacenters(3).build().unwrap();
        let topology = world.topology();
        for rank in topology.all_ranks() {
            let (domain, local) = (topology.domain_of(rank), topology.local_rank_of(rank));
            assert_eq!(topology.rank_at(domain, local), rank);
            assert_eq!(topology.datacenter_of(rank), domain);
        }
        assert_eq!(topology.domain_ranks(1).collect::<Vec<_>>(), [4, 5, 6, 7].map(Rank));
        assert_eq!(topology.rail_ranks(1).collect::<Vec<_>>(), [1, 5, 9].map(Rank));
    }

    #[test]
    fn a_world_may_have_one_rank() {
        let world = World::builder().ranks(1).experts(1).build().unwrap();
        let topology = world.topology();
        assert_eq!((topology.ranks(), topology.domains(), topology.domain_size()), (1, 1, 1));
        assert_eq!(topology.datacenters(), 1);
    }

    #[test]
    fn impossible_topologies_say_why() {
        assert!(message(world(0, 1)).contains("at least one"));
        assert!(message(world(4, 0)).contains("at least one"));
        assert!(message(world(6, 4)).contains("equal size"));
        assert!(message(world(4, 2).datacenters(3)).contains("3 datacenters"));
        assert!(message(world(4, 2).datacenters(0)).contains("0 datacenters"));
    }

    #[test]
    fn a_missing_or_ambiguous_number_names_the_method_to_call() {
        assert!(message(World::builder().experts(4)).contains("call `.ranks(n)`"));
        assert!(message(World::builder().ranks(4)).contains("call `.experts(n)` or `.placement(owners)`"));
        let both = World::builder().ranks(1).experts(4).placement(&[Rank(0)]);
        assert!(message(both).contains("both `.experts(4)` and `.placement(..)` of 1 experts"));
    }

    #[test]
    fn numbers_that_would_wrap_around_are_refused() {
        // Without a placement, whose tables for so many ranks would take Miri hours.
        assert_eq!(Topology::new(MAX_RANKS, 1 << 10, 1).unwrap().all_ranks().len(), MAX_RANKS);
        for (ranks, domains) in
            [(MAX_RANKS + 1, 1), (1 << 40, 1 << 20), (usize::MAX, usize::MAX), (1 << 33, 2)]
        {
            let error = message(world(ranks, domains));
            assert!(error.contains("at most 1048576 are possible"), "{error}");
        }
        for experts in [0, MAX_EXPERTS + 1, usize::MAX] {
            assert!(World::builder().ranks(1).experts(experts).build().is_err(), "{experts}");
        }
        assert!(World::builder().ranks(1).placement(&[]).build().is_err());
    }

    #[test]
    fn contiguous_positions_are_the_experts() {
        let world = World::builder().ranks(4).domains(2).experts(8).build().unwrap();
        let placement = world.placement();
        for expert in 0..8 {
            assert_eq!(placement.position_of(expert), expert);
            assert_eq!(placement.owner_at(expert), Rank(expert / 2));
        }
        assert!(message(World::builder().ranks(4).experts(6)).contains("multiple of 4"));
    }

    #[test]
    fn a_table_orders_by_rank_then_expert() {
        let world = World::builder().ranks(3).placement(&[2, 0, 2, 0, 0].map(Rank)).build().unwrap();
        let placement = world.placement();
        let experts: Vec<u32> = (0..5).map(|p| placement.expert_at(p)).collect();
        assert_eq!(experts, [1, 3, 4, 0, 2]);
        assert_eq!(placement.positions_of(Rank(0)), 0..3);
        assert_eq!(placement.positions_of(Rank(1)), 3..3);
        assert_eq!(placement.positions_of(Rank(2)), 3..5);
        let error = message(World::builder().ranks(3).placement(&[Rank(0), Rank(3)]));
        assert!(error.contains("expert 1 is placed on rank 3"));
    }
}
