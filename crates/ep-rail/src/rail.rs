//! The rail of a rank, and the error for a peer that breaks its protocol.

use ep::{Error, Operator, PeerError, Rail, Rank, Result, Transport, Unconnected, World};

/// The rail of `rank`: the ranks of `world` with its local rank, by domain.
///
/// # Errors
/// [`CallerError::Topology`](ep::CallerError::Topology) for a rank that is not in the world, and for a world of more
/// than [`Rail::MAX_RANKS`] domains.
pub fn rail_of(world: &World, rank: Rank) -> Result<Rail> {
    let topology = world.topology();
    let ranks = topology.rail_ranks(topology.local_rank_of(rank)).collect();
    Rail::new(ranks, topology.domain_of(rank))
}

/// Connects the engine of `rank` with its rail peers. `blobs` are those of the engines of all ranks of `world`, in rank
/// order; those of other rails are not used.
///
/// # Errors
/// Those of [`rail_of`] and [`Unconnected::connect`].
pub fn connect_rail(
    world: &World,
    rank: Rank,
    engine: Box<dyn Unconnected>,
    blobs: &[Vec<u8>],
) -> Result<Box<dyn Transport>> {
    let rail = rail_of(world, rank)?;
    let of_rail: Vec<Vec<u8>> = rail.ranks().iter().map(|peer| blobs[peer.index()].clone()).collect();
    engine.connect(&of_rail)
}

/// The error for a `peer` that violates the protocol of its rail: `rank` found that the peer sent or wrote `what`. An
/// engine does not know the current operator, so the error has [`Operator::Join`] and step 0, and the operator that
/// polls replaces both.
pub fn broken(rank: Rank, peer: Rank, what: impl Into<String>) -> Error {
    PeerError::broken(rank, peer, Operator::Join, 0, what).into()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_rail_has_the_ranks_of_one_local_rank() {
        let world = World::builder().ranks(6).domains(3).experts(6).build().unwrap();
        let rail = rail_of(&world, Rank(3)).unwrap();
        assert_eq!((rail.ranks(), rail.own_index()), (&[Rank(1), Rank(3), Rank(5)][..], 1));
        assert!(matches!(rail_of(&world, Rank(6)), Err(Error::Caller(_))));
    }
}
