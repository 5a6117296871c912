//! The control blocks and addresses of all ranks, as this rank sees them.

use std::any::Any;
use std::sync::Arc;
use std::time::Duration;

use ep::join::Machines;
use ep::{Config, Rank, World};

use crate::beat::Hearts;
use crate::driver::DeviceAddress;
use crate::params::{Common, Handshake, MAX_RANKS};

/// How a rank's kernels access the control block and the other registered memory of a rank.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum Access {
    /// It is a rank of this process.
    Own,
    /// Mapped, from a descriptor: a process of this machine.
    Machine,
    /// Mapped, from a fabric handle: a rank of the same NVLink domain on another machine.
    Domain,
    /// Not mapped: kernels use a mirror of some words of the control block (`remote.rs`).
    Mirror,
}

/// How `rank`, which is a process, accesses every rank, in rank order.
pub(crate) fn accesses(world: &World, rank: Rank, is_remote: impl Fn(Rank) -> bool) -> Vec<Access> {
    let topology = world.topology();
    let of = |peer| match is_remote(peer) {
        _ if peer == rank => Access::Own,
        false => Access::Machine,
        true if topology.domain_of(peer) == topology.domain_of(rank) => Access::Domain,
        true => Access::Mirror,
    };
    topology.all_ranks().map(of).collect()
}

/// Addresses of all ranks.
#[derive(Clone)]
pub(crate) struct Peers {
    /// By rank.
    pub(crate) access: Vec<Access>,
    /// The address of every rank's control block in this rank's address space; for a rank whose memory is not mapped, the
    /// address of its mirror.
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
    /// The control blocks that are mapped.
    pub(crate) fn mapped_controls(&self) -> Vec<DeviceAddress> {
        let all = self.access.iter().zip(&self.control);
        all.filter(|&(&access, _)| access != Access::Mirror).map(|(_, &control)| control).collect()
    }

    /// The part of the kernel parameters that is the same for all operators.
    pub(crate) fn common(&self, world: &World, rank: Rank, config: &Config, report: DeviceAddress) -> Common {
        let nanoseconds = |bound: Duration| bound.as_nanos().min(u128::from(u64::MAX)) as u64;
        let mut common = Common {
            rank: rank.0,
            ranks: world.ranks() as u32,
            experts: world.experts() as u32,
            operation: 0,
            timeout_ns: nanoseconds(config.timeout),
            stall_timeout_ns: nanoseconds(config.stall_bound()),
            own: self.control[rank.index()],
            report,
            handshake: Handshake::default(),
            control: [0; MAX_RANKS],
            delta: [0; MAX_RANKS],
            owner_begin: [0; MAX_RANKS + 1],
            reserved: 0,
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

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn memory_of_the_own_domain_is_mapped_wherever_it_is() {
        use Access::{Domain, Machine, Mirror, Own};
        let world = World::builder().ranks(4).domains(2).experts(4).build().unwrap();
        let of = |rank, remote: [bool; 4]| accesses(&world, Rank(rank), |peer| remote[peer.index()]);
        assert_eq!(of(1, [false; 4]), [Machine, Own, Machine, Machine]);
        assert_eq!(of(0, [false, false, true, true]), [Own, Machine, Mirror, Mirror]);
        assert_eq!(of(3, [true, false, true, false]), [Mirror, Machine, Domain, Own]);
    }
}
