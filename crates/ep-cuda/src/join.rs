//! How the ranks of a world meet, and map the memory of those of their machine.

use std::net::IpAddr;
use std::sync::Arc;

use ep::call::check_same_world;
use ep::join::{Door, Introduced, Invitation, Machine, Machines, Member, Rendezvous};
use ep::{CallerError, Config, EnvironmentError, Rank, Result, World};
use ep_rail::rail_of;

use crate::arena::Announce as _;
use crate::buffer::{CudaBuffer, Home};
use crate::driver::Device;
use crate::links;
use crate::params::MAX_RANKS;
use crate::peers::Peers;
use crate::rails::{Bounds, PinnedWindow, RankRails};

impl CudaBuffer {
    /// [`ep::Backend::threads`].
    pub(crate) fn make_threads(world: &World, config: &Config) -> Result<Vec<Self>> {
        check_world(world)?;
        let gpus = Device::count()?.max(1);
        let ranks = world.ranks();
        let device_of = |rank: usize| rank % gpus;
        let devices: Vec<usize> = (0..ranks.min(gpus)).collect();
        let sharing = ranks.div_ceil(gpus);
        if sharing > config.cuda.device_connections {
            return Err(EnvironmentError::new(
                format!("{sharing} ranks of this process on one GPU"),
                format!(
                    "the driver runs {} streams at once, and ranks wait for each other",
                    config.cuda.device_connections
                ),
                "export CUDA_DEVICE_MAX_CONNECTIONS=32 before the program starts",
            )
            .into());
        }
        let bounds = Bounds::of(world, config)?;
        if bounds.is_some() && !config.host.transport.is_loopback() {
            return Err(only_loopback(config));
        }
        let homes: Vec<Home> = world
            .topology()
            .all_ranks()
            .map(|rank| {
                let device = Device::open(device_of(rank.index()))?;
                Home::new(world, rank, device, devices.clone(), sharing > 1, config)
            })
            .collect::<Result<_>>()?;
        let windows: Vec<Option<PinnedWindow>> = homes
            .iter()
            .map(|home| bounds.map(|bounds| PinnedWindow::new(&bounds, &home.device, config)).transpose())
            .collect::<Result<_>>()?;
        let segments: Vec<_> = windows.iter().flatten().map(|window| Arc::clone(&window.segment)).collect();
        let peers = Peers {
            control: homes.iter().map(|home| home.control.address()).collect(),
            delta: vec![0; ranks],
            machines: Machines::one(ranks),
            hearts: None,
            _keep: Arc::new(homes.iter().map(|home| home.arena.memory()).collect::<Vec<_>>()),
        };
        homes
            .into_iter()
            .zip(windows)
            .map(|(home, window)| {
                let rails = window.zip(bounds).map(|(window, bounds)| {
                    let engine = window.loopback(world, home.rank, &segments)?;
                    RankRails::start(world, home.rank, bounds, window, engine, &home.report)
                });
                let rails = rails.transpose()?;
                let here = (0..ranks).filter(|&rank| device_of(rank) == home.device.ordinal).count();
                Self::assemble(world.clone(), config, home, peers.clone(), rails, here)
            })
            .collect()
    }
}

impl CudaBuffer {
    /// The GPU of a rank that is a process: `rank % GPUs`.
    pub(crate) fn default_gpu(rank: Rank) -> Result<usize> {
        Ok(rank.index() % Device::count()?.max(1))
    }

    /// As [`join`](ep::Backend::join), on GPU number `gpu`. Collective.
    ///
    /// # Errors
    /// As [`join`](ep::Backend::join).
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
        let bounds = Bounds::of(world, config)?;
        let mut joining = Joining { world, config, home: &home, bounds, links: None };
        let met = joining.meet(rendezvous);
        let mut links = joining.links;
        let Met { all, machines, mapped, gpu: own_gpu, rails } = met.map_err(|error| {
            // Report the error before this rank's links close: otherwise the others would report this rank as lost.
            let error = rendezvous.abandon(error);
            drop(links.take());
            error
        })?;
        home.arena.announce_with(Box::new(links.expect("a rank that has met the others has links")));

        let mut peers = Peers {
            control: Vec::new(),
            delta: Vec::new(),
            machines,
            hearts: Some(Arc::clone(&mapped.hearts)),
            _keep: Arc::new(()),
        };
        for ((introduction, memory), peer) in all.iter().zip(&mapped.peers).zip((0..).map(Rank)) {
            if let Some(mirror) = mapped.mirrors.address_of(peer) {
                peers.delta.push(0);
                peers.control.push(mirror);
                continue;
            }
            let here = memory.as_ref().map_or(introduction.base, |memory| {
                memory.lock().unwrap_or_else(|poison| poison.into_inner()).address
            });
            let delta = here.wrapping_sub(introduction.base) as i64;
            peers.delta.push(delta);
            peers.control.push(introduction.control.wrapping_add_signed(delta));
        }
        peers._keep = Arc::new(mapped);
        let here = all.iter().filter(|introduction| introduction.gpu == own_gpu).count();
        Self::assemble(world.clone(), config, home, peers, rails, here)
    }
}

/// A rank that is joining.
struct Joining<'a> {
    world: &'a World,
    config: &'a Config,
    home: &'a Home,
    bounds: Option<Bounds>,
    /// The links, as soon as there are any, also if a later step fails.
    links: Option<links::Links>,
}

impl Joining<'_> {
    /// Meets the other processes and maps the memory of those of this machine. Collective, as the functions below.
    fn meet(&mut self, rendezvous: &mut dyn Rendezvous) -> Result<Met> {
        let &mut Self { world, config, home, bounds, .. } = self;
        let rank = rendezvous.rank();
        let mut door = Door::open()?;
        let mine = Introduction {
            agreed: agreed(world) + &bounds.map_or_else(String::new, |bounds| bounds.agreed(config)),
            gpu: home.device.uuid()?,
            base: home.arena.base(),
            control: home.control.address(),
            machine: Machine::this(config.machine.as_deref()),
            invitation: door.invitation().clone(),
        };
        let blobs = rendezvous.all_gather(&mine.to_bytes())?;
        let all: Vec<Introduction> = blobs
            .iter()
            .zip(world.topology().all_ranks())
            .map(|(blob, peer)| Introduction::from_bytes(blob).ok_or_else(|| unintelligible(peer)))
            .collect::<Result<_>>()?;
        for (peer, theirs) in world.topology().all_ranks().zip(&all) {
            check_same_world((rank, &mine.agreed), (peer, &theirs.agreed))?;
        }
        let introduced = all.iter().map(|theirs| {
            let (machine, invitation) = (theirs.machine.clone(), theirs.invitation.clone());
            Introduced { machine, invitation }
        });
        let (machines, invitations) =
            Machines::meet(world, rendezvous, config, &mut door, introduced.collect())?;
        let linked = self.link(rendezvous, door, &invitations, &machines);
        let (mapped, rails) = linked.map_err(|error| machines.locate(error))?;
        Ok(Met { all, machines, mapped, gpu: mine.gpu, rails })
    }

    /// Links the ranks, maps the memory of those of this machine, and connects the rails.
    fn link(
        &mut self,
        rendezvous: &mut dyn Rendezvous,
        door: Door,
        invitations: &[Invitation],
        machines: &Machines,
    ) -> Result<(links::Mapped, Option<RankRails>)> {
        let &mut Self { world, config, home, bounds, .. } = self;
        let member = Member::of(rendezvous, config);
        let met = ep::join::Links::connect(door, &member, invitations, || rendezvous.lost())?;
        let (served, mapped) = links::serve_all(met, home, machines, world.ranks(), config)?;
        let links = self.links.insert(served);
        home.arena.with_chunks(|chunks| chunks.iter().try_for_each(|chunk| links.announce(chunk)))?;
        // A barrier: after it, every rank has mapped every control block.
        rendezvous.all_gather(&[])?;
        let connect = |bounds| self.connect_rails(rendezvous, bounds, machines.address());
        Ok((mapped, bounds.map(connect).transpose()?))
    }

    /// Opens this rank's engine, exchanges the addresses of all engines, and starts the proxy. `address`: that of this
    /// machine, in a job of several machines.
    fn connect_rails(
        &self,
        rendezvous: &mut dyn Rendezvous,
        bounds: Bounds,
        address: Option<IpAddr>,
    ) -> Result<RankRails> {
        let &Self { world, config, home, .. } = self;
        let window = PinnedWindow::new(&bounds, &home.device, config)?;
        let engine = window.open(world, home.rank, config, address)?;
        let blobs = rendezvous.all_gather(&engine.blob())?;
        let blobs: Vec<_> =
            rail_of(world, home.rank)?.ranks().iter().map(|peer| blobs[peer.index()].clone()).collect();
        RankRails::start(world, home.rank, bounds, window, engine.connect(&blobs)?, &home.report)
    }
}

/// What a rank has once it has met the others.
struct Met {
    /// The introductions of all ranks.
    all: Vec<Introduction>,
    machines: Machines,
    mapped: links::Mapped,
    /// The UUID of this rank's GPU.
    gpu: [u8; 16],
    rails: Option<RankRails>,
}

/// The error for ranks that are threads, with an engine for processes.
fn only_loopback(config: &Config) -> ep::Error {
    let problem =
        "on GPUs, ranks that are threads of one process use `loopback`; start the ranks as processes";
    let (key, value) = ("HYBRID_EP_TRANSPORT", config.host.transport.engine.clone());
    CallerError::Config { key, value, problem: problem.into() }.into()
}

/// What a process tells the others about itself.
struct Introduction {
    /// UUID of its GPU.
    gpu: [u8; 16],
    /// First address of its registered memory, and the address of its control block, in its own address space.
    base: u64,
    control: u64,
    machine: Machine,
    invitation: Invitation,
    /// Text of the settings that must be equal on all ranks.
    agreed: String,
}

impl Introduction {
    const HEAD: usize = 16 + 8 + 8;

    fn to_bytes(&self) -> Vec<u8> {
        let Self { gpu, base, control, machine, invitation, agreed } = self;
        let text = format!("{machine}\n{invitation}\n{agreed}");
        [&gpu[..], &base.to_le_bytes(), &control.to_le_bytes(), text.as_bytes()].concat()
    }

    fn from_bytes(bytes: &[u8]) -> Option<Self> {
        let (head, text) = bytes.split_at_checked(Self::HEAD)?;
        let long = |at: usize| Some(u64::from_le_bytes(head.get(at..at + 8)?.try_into().ok()?));
        let mut lines = std::str::from_utf8(text).ok()?.splitn(3, '\n');
        Some(Self {
            gpu: head.get(..16)?.try_into().ok()?,
            base: long(16)?,
            control: long(24)?,
            machine: lines.next()?.parse().ok()?,
            invitation: lines.next()?.parse().ok()?,
            agreed: lines.next()?.into(),
        })
    }
}

fn unintelligible(peer: Rank) -> ep::Error {
    EnvironmentError::new(
        "joining the world",
        format!("the introduction of rank {peer} cannot be parsed"),
        "run the same version and the same backend on all ranks",
    )
    .into()
}

/// The world as text: the number of ranks, and the runs of experts with their rank.
fn agreed(world: &World) -> String {
    let experts = world.experts() as u32;
    let owner = |expert| world.placement().owner_at(world.placement().position_of(expert));
    let mut runs: Vec<(u32, Rank)> = Vec::new();
    for expert in 0..experts {
        match runs.last_mut() {
            Some((count, rank)) if *rank == owner(expert) => *count += 1,
            _ => runs.push((1, owner(expert))),
        }
    }
    let runs: Vec<String> = runs.iter().map(|(count, rank)| format!("{count} of {rank}")).collect();
    format!("({} ranks; experts by rank: {})", world.ranks(), runs.join(", "))
}

/// Refuses worlds that this backend does not support.
fn check_world(world: &World) -> Result<()> {
    let ranks = world.ranks();
    if ranks > MAX_RANKS {
        return Err(CallerError::Topology(format!(
            "{ranks} ranks: the CUDA backend serves {MAX_RANKS}, in all NVLink domains together"
        ))
        .into());
    }
    let most =
        world.topology().all_ranks().map(|rank| world.placement().local_experts(rank)).max().unwrap_or(0);
    if most > 1 << 16 {
        return Err(CallerError::Placement(format!("{most} experts on one rank: at most 65,536")).into());
    }
    Ok(())
}

#[cfg(test)]
mod tests {
    use super::*;

    fn introduction(world: &World) -> Introduction {
        let invitation = Door::open().unwrap().invitation().clone();
        let machine = Machine::this(Some("node-a"));
        Introduction { gpu: [7; 16], base: 1 << 40, control: 3, machine, invitation, agreed: agreed(world) }
    }

    #[test]
    fn ranks_with_different_worlds_say_what_differs() {
        let mine = introduction(&World::builder().ranks(2).experts(4).build().unwrap());
        let other = World::builder().ranks(2).placement(&[0, 1, 1, 0].map(Rank)).build().unwrap();
        let sent = introduction(&other);
        let theirs = Introduction::from_bytes(&sent.to_bytes()).unwrap();
        assert_eq!((theirs.gpu, theirs.base, theirs.control), ([7; 16], 1 << 40, 3));
        assert_eq!((theirs.invitation, theirs.machine), (sent.invitation.clone(), sent.machine.clone()));
        assert_eq!(check_same_world((Rank(0), &mine.agreed), (Rank(1), &mine.agreed)), Ok(()));
        assert_eq!(
            check_same_world((Rank(0), &mine.agreed), (Rank(1), &theirs.agreed)).unwrap_err().to_string(),
            "operator join: the world is (2 ranks; experts by rank: 2 of 0, 2 of 1) on rank 0 and \
             (2 ranks; experts by rank: 1 of 0, 2 of 1, 1 of 0) on rank 1; every rank must pass the same"
        );
        assert!(Introduction::from_bytes(&[0; 31]).is_none());
        assert!(Introduction::from_bytes(&[0; 40]).is_none());
    }
}
