//! How the ranks of a world find each other's memory.


use ep::{CallerError, Config, Result, World};

use crate::arena::Arena;
use crate::buffer::{CudaBuffer, Home};
use crate::driver::Device;
use crate::params::MAX_RANKS;
use crate::peers::Peers;

impl CudaBuffer {
    /// A world whose ranks are threads of this process: one buffer per rank, in order, each to be moved to its thread.
    /// Ranks are spread over the GPUs that the driver shows, several on one if they must.
    ///
    /// # Errors
    /// [`ep::EnvironmentError`] without a GPU, a driver or a compiler, or when memory is short;
    /// [`CallerError::Topology`] for a world of several NVLink domains.
    pub fn threads(world: &World, config: &Config) -> Result<Vec<Self>> {
        check_world(world)?;
        let gpus = Device::count()?.max(1);
        let ranks = world.ranks();
        let device_of = |rank: usize| rank % gpus;
        let devices: Vec<usize> = (0..ranks.min(gpus)).collect();
        let homes: Vec<Home> = world
            .topology
            .all_ranks()
            .map(|rank| Home::new(world, rank, Device::open(device_of(rank.index()))?, devices.clone()))
            .collect::<Result<_>>()?;
        let peers = Peers {
            control: homes.iter().map(|home| home.control.address()).collect(),
            delta: vec![0; ranks],
            _keep: homes.iter().map(|home| Arena::clone(&home.arena)).collect(),
        };
        homes
            .into_iter()
            .map(|home| {
                let here = (0..ranks).filter(|&rank| device_of(rank) == home.device.ordinal).count();
                Self::assemble(world.clone(), config, home, peers.clone(), here)
            })
            .collect()
    }
}

impl CudaBuffer {
    /// This process as one rank of a world of processes on this machine. Collective.
    ///
    /// # Errors
    /// As [`CudaBuffer::threads`]; [`ep::PeerError`] that names a rank which does not come.
    pub fn join(world: &World, _rendezvous: &mut dyn ep::rendezvous::Rendezvous, _config: &Config) -> Result<Self> {
        check_world(world)?;
        todo!("processes")
    }
}

/// Refuses worlds that this backend does not serve.
fn check_world(world: &World) -> Result<()> {
    let (ranks, domains) = (world.ranks(), world.topology.domains());
    if domains != 1 {
        return Err(CallerError::Topology(format!(
            "{domains} NVLink domains: the CUDA backend serves one; use the host backend, or one domain"
        ))
        .into());
    }
    if ranks > MAX_RANKS {
        return Err(CallerError::Topology(format!(
            "{ranks} ranks in an NVLink domain: the CUDA backend serves {MAX_RANKS}"
        ))
        .into());
    }
    let most = world.topology.all_ranks().map(|rank| world.placement.local_experts(rank)).max().unwrap_or(0);
    if most > 1 << 16 {
        return Err(CallerError::Placement(format!("{most} experts on one rank: at most 65,536")).into());
    }
    Ok(())
}
