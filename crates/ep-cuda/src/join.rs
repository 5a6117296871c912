//! How the ranks of a world meet, and how each maps the memory of the ranks of its machine and of its NVLink domain.

use std::fmt;
use std::net::IpAddr;
use std::str::FromStr;
use std::sync::Arc;

use ep::join::{Introduction, Joining, Machines, Met, Rendezvous};
use ep::{CallerError, Config, EnvironmentError, Rank, Result, Transport, World};
use ep_rail::connect_rail;

use crate::arena::Announce as _;
use crate::buffer::{CudaBuffer, Home, load_kernels};
use crate::driver::{Chunk, Device, Sharing};
use crate::links;
use crate::params::MAX_RANKS;
use crate::peers::{Access, Peers, accesses};
use crate::rails::{self, Bounds, RailSettings, RankRails, RankWindow};

/// [`Introduction::backend`]. Change it with the format of [`Facts`], of messages over links, or of shared memory.
const BACKEND: &str = "cuda 5";
/// What to do about a rank that cannot share memory with other machines.
const CROSSING_REMEDY: &str = ", or, if NVLink connects the machines, run the service nvidia-imex on all of them and give the processes a \
     channel (/dev/nvidia-caps-imex-channels)";

impl CudaBuffer {
    /// [`ep::Backend::threads`].
    pub(crate) fn make_threads(world: &World, config: &Config) -> Result<Vec<Self>> {
        check_world(world)?;
        config.check()?;
        let gpus = Device::count()?.max(1);
        let ranks = world.ranks();
        let device_of = |rank: usize| rank % gpus;
        let devices: Vec<usize> = (0..ranks.min(gpus)).collect();
        let sharing = ranks.div_ceil(gpus);
        let streams = sharing * (1 + rails::streams_of_copies(world, config)?);
        if streams > config.cuda.device_connections {
            return Err(EnvironmentError::new(
                format!("{sharing} ranks of this process on one GPU, with {streams} streams"),
                format!(
                    "the driver runs {} streams at once, and ranks wait for each other",
                    config.cuda.device_connections
                ),
                "export CUDA_DEVICE_MAX_CONNECTIONS=32 before the program starts",
            )
            .into());
        }
        let bounds = Bounds::of(world, config)?;
        let homes: Vec<Home> = world
            .topology()
            .all_ranks()
            .map(|rank| {
                let device = Device::open(device_of(rank.index()))?;
                load_kernels(world, &device, sharing > 1, config)?;
                Home::new(world, rank, device, devices.clone(), Sharing::Machine, config)
            })
            .collect::<Result<_>>()?;
        let rails = match bounds {
            Some(bounds) => {
                rails_of_threads(world, &homes, bounds, &devices, config)?.into_iter().map(Some).collect()
            }
            None => homes.iter().map(|_| None).collect::<Vec<_>>(),
        };
        let peers = Peers {
            access: vec![Access::Own; ranks],
            control: homes.iter().map(|home| home.control.address()).collect(),
            delta: vec![0; ranks],
            machines: Machines::one(ranks),
            hearts: None,
            _keep: Arc::new(homes.iter().map(|home| home.arena.memory()).collect::<Vec<_>>()),
        };
        homes
            .into_iter()
            .zip(rails)
            .map(|(home, rails)| {
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

    /// Like [`join`](ep::Backend::join), on GPU number `gpu`. Collective.
    ///
    /// # Errors
    /// The errors of [`join`](ep::Backend::join).
    pub fn join_on(
        gpu: usize,
        world: &World,
        rendezvous: &mut dyn Rendezvous,
        config: &Config,
    ) -> Result<Self> {
        check_world(world)?;
        ep::join::join(world, rendezvous, config, |joining| Self::make_process(gpu, world, joining, config))
    }

    fn make_process(gpu: usize, world: &World, joining: &mut Joining<'_>, config: &Config) -> Result<Self> {
        config.check()?;
        let rank = joining.rank();
        let device = Device::open(gpu)?;
        load_kernels(world, &device, false, config)?;
        let own = Facts { gpu: Gpu(device.uuid()?), rails: RailSettings::of(config) };
        let settings = rails::settings(world, config);
        let introduction = Introduction { backend: BACKEND, settings, facts: own };
        let Met { machines, facts, links } = joining.meet(introduction, || crossing(&device))?;
        let config = &RailSettings::largest(facts.iter().map(|facts| facts.rails)).applied_to(config);
        let bounds = Bounds::of(world, config)?;
        let access = accesses(world, rank, |peer| machines.is_remote(peer));
        let spans = access.contains(&Access::Domain);
        let sharing = if spans { Sharing::Domain } else { Sharing::Machine };
        let home = Home::new(world, rank, device, vec![gpu], sharing, config)?;
        let (mut links, mapped) = links::serve_all(links, &home, &access, &machines, config)?;
        home.arena.with_chunks(|chunks| chunks.iter().try_for_each(|chunk| links.announce(chunk)))?;
        home.arena.announce_with(Box::new(links));
        // This gather is also a barrier: after it, every rank has mapped every control block.
        let own_places = Places { base: home.arena.base(), control: home.control.address() };
        let places = joining.all_gather(&own_places.to_bytes())?;
        let places = (0..).map(Rank).zip(places).map(|(peer, bytes)| Places::from_bytes(peer, &bytes));
        let places: Vec<Places> = places.collect::<Result<_>>()?;
        let connect = |bounds| connect_rails(world, &home, joining, bounds, config, machines.address());
        let rails = bounds.map(connect).transpose()?;

        let mut peers = Peers {
            access,
            control: Vec::new(),
            delta: Vec::new(),
            machines,
            hearts: Some(Arc::clone(&mapped.hearts)),
            _keep: Arc::new(()),
        };
        for ((theirs, memory), peer) in places.iter().zip(&mapped.peers).zip((0..).map(Rank)) {
            if let Some(mirror) = mapped.mirrors.address_of(peer) {
                peers.delta.push(0);
                peers.control.push(mirror);
                continue;
            }
            let here = memory.as_ref().map_or(theirs.base, |memory| {
                memory.lock().unwrap_or_else(|poison| poison.into_inner()).address
            });
            let delta = here.wrapping_sub(theirs.base) as i64;
            peers.delta.push(delta);
            peers.control.push(theirs.control.wrapping_add_signed(delta));
        }
        peers._keep = Arc::new(mapped);
        let here = facts.iter().filter(|theirs| theirs.gpu == own.gpu).count();
        Self::assemble(world.clone(), config, home, peers, rails, here)
    }
}

/// Makes the windows and the engines of all ranks, which are threads of this process, and starts their proxies.
fn rails_of_threads(
    world: &World,
    homes: &[Home],
    bounds: Bounds,
    devices: &[usize],
    config: &Config,
) -> Result<Vec<RankRails>> {
    let maps_windows = config.host.transport.maps_windows();
    let window = |home: &Home| match maps_windows {
        true => RankWindow::new(&bounds, &home.device, devices, config),
        false => RankWindow::for_network(&bounds, &home.device, world, home.rank, config, None),
    };
    let windows: Vec<RankWindow> = homes.iter().map(window).collect::<Result<_>>()?;
    let ends = || windows.iter().zip(homes);
    let engines: Vec<Box<dyn Transport>> = if maps_windows {
        ends()
            .map(|(window, home)| window.local_engine(world, home.rank, &windows, config))
            .collect::<Result<_>>()?
    } else {
        let open = |(window, home): (&RankWindow, &Home)| window.open(world, home.rank, config, None);
        let opened: Vec<_> = ends().map(open).collect::<Result<_>>()?;
        let blobs: Vec<Vec<u8>> = opened.iter().map(|engine| engine.blob()).collect();
        let connect = |(engine, home): (_, &Home)| connect_rail(world, home.rank, engine, &blobs);
        opened.into_iter().zip(homes).map(connect).collect::<Result<_>>()?
    };
    let ranks = homes.iter().zip(windows).zip(engines);
    ranks
        .map(|((home, window), engine)| {
            RankRails::start(world, home.rank, bounds, window, engine, &home.report)
        })
        .collect()
}

/// Opens the engine of a rank that is a process, exchanges the addresses of all engines, and starts the proxy. `address`:
/// the IP address of this machine, in a job of several machines. Collective.
fn connect_rails(
    world: &World,
    home: &Home,
    joining: &mut Joining<'_>,
    bounds: Bounds,
    config: &Config,
    address: Option<IpAddr>,
) -> Result<RankRails> {
    let window = RankWindow::for_network(&bounds, &home.device, world, home.rank, config, address)?;
    let engine = window.open(world, home.rank, config, address)?;
    let blobs = joining.all_gather(&engine.blob())?;
    let transport = connect_rail(world, home.rank, engine, &blobs)?;
    RankRails::start(world, home.rank, bounds, window, transport, &home.report)
}

/// Whether a rank on this GPU can share memory with other machines; if not, what to do about it.
fn crossing(device: &Device) -> std::result::Result<(), &'static str> {
    if Chunk::can_cross_machines(device) { Ok(()) } else { Err(CROSSING_REMEDY) }
}

/// UUID of a GPU.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) struct Gpu([u8; 16]);

/// What a rank tells the others when they meet.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) struct Facts {
    gpu: Gpu,
    rails: RailSettings,
}

/// The text form, from which [`FromStr`] makes an equal value: the UUID as a hexadecimal number, then three decimal numbers.
impl fmt::Display for Facts {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let RailSettings { tokens, choices, lane_bytes } = self.rails;
        write!(f, "{:x} {tokens} {choices} {lane_bytes}", u128::from_be_bytes(self.gpu.0))
    }
}

/// The error for a text that is not [`Facts`].
#[derive(Debug, PartialEq, Eq)]
pub(crate) struct NoFacts;

impl FromStr for Facts {
    type Err = NoFacts;

    fn from_str(text: &str) -> std::result::Result<Self, NoFacts> {
        let words: Vec<&str> = text.split(' ').collect();
        let &[gpu, tokens, choices, lane_bytes] = words.as_slice() else { return Err(NoFacts) };
        let gpu = u128::from_str_radix(gpu, 16).map_err(|_| NoFacts)?;
        let number = |word: &str| word.parse::<usize>().map_err(|_| NoFacts);
        let rails = RailSettings {
            tokens: number(tokens)?,
            choices: number(choices)?,
            lane_bytes: number(lane_bytes)?,
        };
        if !rails.is_valid() {
            return Err(NoFacts);
        }
        Ok(Self { gpu: Gpu(gpu.to_be_bytes()), rails })
    }
}

/// Where a rank's memory is, in its own address space.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) struct Places {
    /// First address of its registered memory.
    base: u64,
    /// Address of its control block.
    control: u64,
}

impl Places {
    pub(crate) fn to_bytes(self) -> [u8; 16] {
        bytemuck::cast([self.base.to_le(), self.control.to_le()])
    }

    /// The places of `peer`.
    pub(crate) fn from_bytes(peer: Rank, bytes: &[u8]) -> Result<Self> {
        let read = bytes.try_into().map(bytemuck::cast::<[u8; 16], [u64; 2]>);
        let [base, control] = read.map_err(|_| {
            let found = format!("it sent {} bytes where addresses were due", bytes.len());
            EnvironmentError::new(format!("joining rank {peer}"), found, "run the same version on all ranks")
        })?;
        Ok(Self { base: u64::from_le(base), control: u64::from_le(control) })
    }
}

/// Refuses worlds that this backend does not support.
fn check_world(world: &World) -> Result<()> {
    let ranks = world.ranks();
    if ranks > MAX_RANKS {
        return Err(CallerError::Topology(format!(
            "{ranks} ranks: the CUDA backend supports at most {MAX_RANKS}, in all NVLink domains together"
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

    #[test]
    fn what_ranks_tell_each_other_survives_the_round_trip() {
        let rails = RailSettings { tokens: 64, choices: 1, lane_bytes: 8192 };
        let facts = Facts { gpu: Gpu([0xA7; 16]), rails };
        let text = facts.to_string();
        assert_eq!(text.parse(), Ok(facts));
        for wrong in [
            "",
            "x",
            "a7 64 1",
            "a7 64 1 8192 1",
            "a7 64 1 -1",
            "a7 0 1 8192",
            "a7 64 1 18446744073709551615",
        ]
        .into_iter()
        .chain([&*format!("{text} 1"), &*format!("1{text}")])
        {
            assert_eq!(wrong.parse::<Facts>(), Err(NoFacts), "{wrong}");
        }
        let places = Places { base: 1 << 40, control: 3 };
        assert_eq!(Places::from_bytes(Rank(1), &places.to_bytes()).unwrap(), places);
        let refused = Places::from_bytes(Rank(1), &[0; 15]).unwrap_err().to_string();
        assert!(refused.starts_with("joining rank 1: it sent 15 bytes"), "{refused}");
    }
}
