//! The control blocks and addresses of all ranks, as this rank sees them.

use std::any::Any;
use std::sync::Arc;
use std::time::Duration;

use ep::join::Machines;
use ep::{Config, Rank, World};

use crate::beat::Hearts;
use crate::driver::DeviceAddress;
use crate::params::{CALL_WORDS, Common, MAX_RANKS};

/// Addresses of all ranks.
#[derive(Clone)]
pub(crate) struct Peers {
    /// Every rank's control block, in this rank's addresses; of a rank on another machine, its mirror.
    pub(crate) control: Vec<DeviceAddress>,
    /// `delta[rank]` is added to an address of that rank to get an address of this rank.
    pub(crate) delta: Vec<i64>,
    pub(crate) machines: Machines,
    /// Heartbeats of the other ranks; `None` if ranks are threads.
    pub(crate) hearts: Option<Arc<Hearts>>,
    /// Memory that must stay as long as a kernel of this rank may access it.
    pub(crate) _keep: Arc<dyn Any + Send + Sync>,
}

impl Peers {
    /// The control blocks of this machine's ranks.
    pub(crate) fn control_here(&self) -> Vec<DeviceAddress> {
        let all = (0..).map(Rank).zip(&self.control);
        all.filter(|&(rank, _)| !self.machines.is_remote(rank)).map(|(_, &control)| control).collect()
    }

    /// The part of the kernel parameters that is the same for all operators.
    pub(crate) fn common(&self, world: &World, rank: Rank, config: &Config, report: DeviceAddress) -> Common {
        let nanoseconds = |bound: Duration| bound.as_nanos().min(u128::from(u64::MAX)) as u64;
        let mut common = Common {
            rank: rank.0,
            ranks: world.ranks() as u32,
            experts: world.experts() as u32,
            signature: 0,
            timeout_ns: nanoseconds(config.timeout),
            stall_timeout_ns: nanoseconds(config.stall_bound()),
            own: self.control[rank.index()],
            report,
            call: [0; CALL_WORDS],
            control: [0; MAX_RANKS],
            delta: [0; MAX_RANKS],
            owner_begin: [0; MAX_RANKS + 1],
            operation: 0,
            rails: bytemuck::Zeroable::zeroed(),
        };
        common.control[..self.control.len()].copy_from_slice(&self.control);
        common.delta[..self.delta.len()].copy_from_slice(&self.delta);
        for peer in world.topology().all_ranks() {
            let positions = world.placement().positions_of(peer);
            common.owner_begin[peer.index()] = positions.start as u32;
            common.owner_begin[peer.index() + 1] = positions.end as u32;
        }
        common
    }
}
