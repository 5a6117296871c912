//! How the ranks of a world find each other's memory.

use std::sync::Arc;

use ep::rendezvous::Rendezvous;
use ep::{CallerError, Config, EnvironmentError, Operator, Rank, Result, World};

use crate::arena::{Announce as _, Arena};
use crate::buffer::{CudaBuffer, Home};
use crate::driver::Device;
use crate::links::{self, Door};
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
        let sharing = ranks.div_ceil(gpus);
        if sharing > config.device_connections {
            return Err(EnvironmentError::new(
                format!("{sharing} ranks of this process on one GPU"),
                format!(
                    "the driver runs {} streams at once, and ranks wait for each other",
                    config.device_connections
                ),
                "export CUDA_DEVICE_MAX_CONNECTIONS=32 before the program starts",
            )
            .into());
        }
        let homes: Vec<Home> = world
            .topology
            .all_ranks()
            .map(|rank| {
                let device = Device::open(device_of(rank.index()))?;
                Home::new(world, rank, device, devices.clone(), sharing > 1, config)
            })
            .collect::<Result<_>>()?;
        let peers = Peers {
            control: homes.iter().map(|home| home.control.address()).collect(),
            delta: vec![0; ranks],
            _keep: Arc::new(homes.iter().map(|home| Arena::clone(&home.arena)).collect::<Vec<_>>()),
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
    /// This process as one rank of a world of processes on this machine, on GPU `rank % GPUs`. Collective.
    ///
    /// # Errors
    /// As [`CudaBuffer::threads`]; [`ep::PeerError`] that names a rank which does not come; [`CallerError`] when the
    /// ranks' worlds differ.
    pub fn join(world: &World, rendezvous: &mut dyn Rendezvous, config: &Config) -> Result<Self> {
        let gpus = Device::count()?.max(1);
        let gpu = rendezvous.rank().index() % gpus;
        Self::join_on(gpu, world, rendezvous, config)
    }

    /// As [`join`](Self::join), on the GPU of this number.
    ///
    /// # Errors
    /// As [`join`](Self::join).
    pub fn join_on(
        gpu: usize,
        world: &World,
        rendezvous: &mut dyn Rendezvous,
        config: &Config,
    ) -> Result<Self> {
        check_world(world)?;
        let rank = rendezvous.rank();
        if rendezvous.ranks() != world.ranks() {
            let (ranks, found) = (world.ranks(), rendezvous.ranks());
            return Err(CallerError::Topology(format!(
                "the world has {ranks} ranks, the rendezvous {found}"
            ))
            .into());
        }
        let device = Device::open(gpu)?;
        let home = Home::new(world, rank, Arc::clone(&device), vec![gpu], false, config)?;
        let door = Door::open(rank)?;
        let mine = Introduction {
            world: fingerprint(world),
            gpu: device.uuid()?,
            base: home.arena.base(),
            control: home.control.address(),
            door: door.name.clone(),
        };
        let blobs = rendezvous.all_gather(&mine.to_bytes())?;
        let all: Vec<Introduction> = blobs
            .iter()
            .zip(world.topology.all_ranks())
            .map(|(blob, peer)| Introduction::from_bytes(blob).ok_or_else(|| unintelligible(peer)))
            .collect::<Result<_>>()?;
        for (peer, theirs) in world.topology.all_ranks().zip(&all) {
            mine.check(rank, peer, theirs)?;
        }
        let doors: Vec<String> = all.iter().map(|introduction| introduction.door.clone()).collect();
        let (mut links, mapped) =
            links::connect(rank, door, &doors, &device, home.control.address(), config.timeout)?;
        home.arena.with_chunks(|chunks| chunks.iter().try_for_each(|chunk| links.announce(chunk)))?;
        home.arena.announce_with(Box::new(links));
        // Everybody has mapped everybody's control block.
        rendezvous.all_gather(&[])?;

        let mut peers = Peers { control: Vec::new(), delta: Vec::new(), _keep: Arc::new(()) };
        for (introduction, memory) in all.iter().zip(&mapped.peers) {
            let here = memory.as_ref().map_or(introduction.base, |memory| {
                memory.lock().unwrap_or_else(|poison| poison.into_inner()).address
            });
            let delta = here.wrapping_sub(introduction.base) as i64;
            peers.delta.push(delta);
            peers.control.push(introduction.control.wrapping_add_signed(delta));
        }
        peers._keep = Arc::new(mapped);
        let here = all.iter().filter(|introduction| introduction.gpu == mine.gpu).count();
        Self::assemble(world.clone(), config, home, peers, here)
    }
}

/// What a process tells the others about itself.
struct Introduction {
    world: u64,
    gpu: [u8; 16],
    base: u64,
    control: u64,
    door: String,
}

impl Introduction {
    const HEAD: usize = 8 + 16 + 8 + 8;

    fn to_bytes(&self) -> Vec<u8> {
        let mut bytes = Vec::with_capacity(Self::HEAD + self.door.len());
        bytes.extend(self.world.to_le_bytes());
        bytes.extend(self.gpu);
        bytes.extend(self.base.to_le_bytes());
        bytes.extend(self.control.to_le_bytes());
        bytes.extend(self.door.as_bytes());
        bytes
    }

    fn from_bytes(bytes: &[u8]) -> Option<Self> {
        let (head, door) = bytes.split_at_checked(Self::HEAD)?;
        let long = |at: usize| Some(u64::from_le_bytes(head.get(at..at + 8)?.try_into().ok()?));
        Some(Self {
            world: long(0)?,
            gpu: head.get(8..24)?.try_into().ok()?,
            base: long(24)?,
            control: long(32)?,
            door: String::from_utf8(door.to_vec()).ok()?,
        })
    }

    fn check(&self, rank: Rank, peer: Rank, theirs: &Self) -> Result<()> {
        if self.world == theirs.world {
            return Ok(());
        }
        Err(CallerError::Collective {
            operator: Operator::Join,
            field: "the world (ranks, experts and their placement)",
            rank,
            mine: format!("{:016x}", self.world),
            peer,
            theirs: format!("{:016x}", theirs.world),
        }
        .into())
    }
}

fn unintelligible(peer: Rank) -> ep::Error {
    EnvironmentError::new(
        "joining the world",
        format!("rank {peer} said what cannot be understood"),
        "do all ranks run the same version, and the same backend?",
    )
    .into()
}

/// A number that differs for different worlds.
fn fingerprint(world: &World) -> u64 {
    let experts = (0..world.experts() as u32).map(|expert| u64::from(world.placement.position_of(expert)));
    let ranks = world.topology.all_ranks().map(|rank| world.placement.positions_of(rank).end as u64);
    experts
        .chain(ranks)
        .flat_map(u64::to_le_bytes)
        .fold(0xCBF2_9CE4_8422_2325, |hash, byte| (hash ^ u64::from(byte)).wrapping_mul(0x0100_0000_01B3))
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
