//! The ranks of the world as this one reaches them.

use std::any::Any;
use std::sync::Arc;

use ep::{Rank, World};

use crate::driver::DeviceAddress;
use crate::params::{Common, MAX_RANKS};

/// Every rank's control block, and how its addresses become this rank's.
#[derive(Clone)]
pub(crate) struct Peers {
    pub(crate) control: Vec<DeviceAddress>,
    pub(crate) delta: Vec<i64>,
    /// Memory that must stay as long as a kernel of this rank may touch it.
    pub(crate) _keep: Arc<dyn Any + Send + Sync>,
}

impl Peers {
    /// The part of all kernels' parameters that never changes.
    pub(crate) fn common(&self, world: &World, rank: Rank, timeout_ns: u64, fault: DeviceAddress) -> Common {
        let mut common = Common {
            rank: rank.0,
            ranks: world.ranks() as u32,
            experts: world.experts() as u32,
            signature: 0,
            timeout_ns,
            own: self.control[rank.index()],
            fault,
            control: [0; MAX_RANKS],
            delta: [0; MAX_RANKS],
            owner_begin: [0; MAX_RANKS + 1],
            operation: 0,
        };
        common.control[..self.control.len()].copy_from_slice(&self.control);
        common.delta[..self.delta.len()].copy_from_slice(&self.delta);
        for peer in world.topology.all_ranks() {
            let positions = world.placement.positions_of(peer);
            common.owner_begin[peer.index()] = positions.start as u32;
            common.owner_begin[peer.index() + 1] = positions.end as u32;
        }
        common
    }
}
