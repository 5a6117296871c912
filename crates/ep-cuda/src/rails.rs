//! A rank's rails to the other NVLink domains: the window that its GPU and its engine share, and the proxy that moves
//! bytes between the windows of a rail. `docs/cuda-rails.md` describes the memory and the order of accesses.

use std::net::IpAddr;
use std::ptr::NonNull;
use std::sync::Arc;
use std::time::Duration;

use bytemuck::Zeroable as _;
use ep::join::Setting;
use ep::{
    CallerError, Config, Copier, CudaConfig, EnvironmentError, GpuPart, Pace, Rank, Result, Size, Transport,
    Unconnected, Window, World,
};
use ep_rail::{Loopback, Paced, RankPlace, Segment, open_fabric_over, rail_of, registers_gpu_memory};

use crate::driver::{Device, DeviceAddress, GRANULE, GpuDirect, Pinned};
use crate::fault::Report;
use crate::lanes::{DeviceLanes, LaneCopies};
use crate::params::{MAX_CHUNKS, RAIL_SECTIONS, Rails};
use crate::rail::{Proxy, ProxyParts, RailLayout, SIGNALS, Show, limits};
use crate::shared;

/// How long dropping the proxy waits for its last puts. A rank that leaves has already waited for them, for up to the stall
/// bound ([`RankRails::drain`]).
const PATIENCE: Duration = Duration::from_secs(2);
/// The fewest rows of a chunk of a set, as in `handle::chunk_tokens`.
const FEWEST_CHUNK_ROWS: usize = 4;

/// A rank's settings that bound the sets that go along rails. Of those of all ranks, the largest ones apply.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) struct RailSettings {
    pub(crate) tokens: usize,
    pub(crate) choices: usize,
    pub(crate) lane_bytes: usize,
}

impl RailSettings {
    pub(crate) fn of(config: &Config) -> Self {
        let CudaConfig { rail_tokens: tokens, rail_choices: choices, lane_bytes, .. } = config.cuda;
        Self { tokens, choices, lane_bytes }
    }

    /// The largest of these settings, each by itself.
    pub(crate) fn largest(all: impl IntoIterator<Item = Self>) -> Self {
        let none = Self { tokens: 1, choices: 1, lane_bytes: 1 };
        all.into_iter().fold(none, |one, other| Self {
            tokens: one.tokens.max(other.tokens),
            choices: one.choices.max(other.choices),
            lane_bytes: one.lane_bytes.max(other.lane_bytes),
        })
    }

    pub(crate) fn applied_to(self, config: &Config) -> Config {
        let mut config = config.clone();
        config.cuda.rail_tokens = self.tokens;
        config.cuda.rail_choices = self.choices;
        config.cuda.lane_bytes = self.lane_bytes;
        config
    }

    /// Whether a rank can have these settings.
    pub(crate) fn is_valid(self) -> bool {
        self.applied_to(&Config::default()).check().is_ok()
    }
}

/// The settings of rails that must be equal on all ranks.
pub(crate) fn settings(world: &World, config: &Config) -> Vec<Setting> {
    if world.topology().domains() == 1 {
        return Vec::new();
    }
    let transport = &config.host.transport;
    vec![
        ("the transport", transport.engine.to_string()),
        ("the number of NICs of a rank", transport.nics_per_rank().to_string()),
    ]
}

/// The link that the engine emulates between the NVLink domains of a world, if it does.
fn emulated_link(world: &World, config: &Config) -> Result<Option<Pace>> {
    if world.topology().domains() == 1 { Ok(None) } else { config.host.transport.pace() }
}

/// Blocks that copy for a rank's emulated link while its operators run, and which need a multiprocessor of their own.
pub(crate) fn blocks_of_copies(world: &World, config: &Config) -> Result<usize> {
    let by_kernel = |pace: Pace| pace.copier() == Copier::Kernel;
    Ok(usize::from(emulated_link(world, config)?.is_some_and(by_kernel)))
}

/// Streams with the copies of a rank's emulated link.
pub(crate) fn streams_of_copies(world: &World, config: &Config) -> Result<usize> {
    Ok(usize::from(emulated_link(world, config)?.is_some()))
}

/// The bounds of the sets that go along rails. They are equal on all ranks, because a rank uses them to compute where the
/// lists and lanes of other ranks are.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) struct Bounds {
    domains: usize,
    ranks: usize,
    /// Maximum number of tokens of a rank, and so of rows of a set.
    tokens: usize,
    /// Maximum number of copies of a set.
    copies: usize,
    lane_bytes: usize,
}

impl Bounds {
    /// The bounds of a world of several domains; `None` for one domain, which has no rails.
    pub(crate) fn of(world: &World, config: &Config) -> Result<Option<Self>> {
        let domains = world.topology().domains();
        if domains == 1 {
            return Ok(None);
        }
        let tokens = config.cuda.rail_tokens;
        let copies = (Size::new(tokens) * config.cuda.rail_choices).get("a rail set", "copies")?;
        Ok(Some(Self { domains, ranks: world.ranks(), tokens, copies, lane_bytes: config.cuda.lane_bytes }))
    }

    /// Number of domains.
    pub(crate) fn domains(&self) -> usize {
        self.domains
    }

    /// Whether these bounds are at least those of `settings`.
    pub(crate) fn include(&self, settings: RailSettings) -> bool {
        let RailSettings { tokens, choices, lane_bytes } = settings;
        let copies = tokens.saturating_mul(choices);
        tokens <= self.tokens && copies <= self.copies && lane_bytes <= self.lane_bytes
    }

    fn chunk_rows(&self) -> usize {
        self.tokens.div_ceil(MAX_CHUNKS).max(FEWEST_CHUNK_ROWS)
    }

    /// Bytes of the lists of the foreign sets of a handle.
    pub(crate) fn list_bytes(&self) -> usize {
        let chunks = self.tokens.div_ceil(self.chunk_rows()).max(1);
        self.domains * shared::set_bytes(self.tokens, self.copies, chunks, self.ranks)
    }

    /// Maximum number of partial sums of all foreign sets.
    pub(crate) fn partials(&self) -> Size {
        (Size::new(self.copies) + self.tokens) * self.domains
    }

    /// Bytes of the probabilities of all foreign sets.
    pub(crate) fn prob_bytes(&self) -> usize {
        4 * self.domains * self.copies
    }

    /// Bytes of the counters of finished rows (`CombineParams::set_done`).
    pub(crate) fn done_bytes(&self) -> usize {
        4 * self.domains * MAX_CHUNKS
    }

    /// Checks the number of tokens of this rank.
    ///
    /// # Errors
    /// [`CallerError::Config`] that names the setting to raise.
    pub(crate) fn check_tokens(&self, tokens: usize) -> Result<()> {
        if tokens <= self.tokens {
            return Ok(());
        }
        let problem = format!(
            "this rank has {tokens} tokens; raise it on any rank (in Python: `Buffer(max_tokens=...)`, or \
             `Buffer.reserve`), or use fewer tokens"
        );
        let (key, value) = ("HYBRID_EP_CUDA_RAIL_TOKENS", self.tokens.to_string());
        Err(CallerError::Config { key, value, problem }.into())
    }

    /// Checks that a lane has room for `rows` rows, each of `row_bytes` bytes in all sections together, and for the weights
    /// of `copies` copies.
    ///
    /// # Errors
    /// [`CallerError::Config`] that names the setting to raise.
    pub(crate) fn check_lane(&self, rows: usize, row_bytes: usize, copies: usize) -> Result<()> {
        // Preprocess refuses a set of more copies than the bound. Each section begins at a multiple of 128.
        let copies = copies.min(self.copies);
        let needed = Size::new(rows) * row_bytes + Size::new(copies) * 4 + 128 * RAIL_SECTIONS;
        let needed = needed.bytes("the rows that a rank sends to another NVLink domain")?;
        if needed <= self.lane_bytes {
            return Ok(());
        }
        let problem = format!(
            "{rows} rows of {row_bytes} bytes may need {needed} bytes; raise it on any rank (in Python: \
             `Buffer(max_hidden=...)`, or `Buffer.reserve`), or send fewer or shorter rows"
        );
        let (key, value) = ("HYBRID_EP_CUDA_LANE_BYTES", self.lane_bytes.to_string());
        Err(CallerError::Config { key, value, problem }.into())
    }

    fn layout(&self, config: &Config) -> Result<RailLayout> {
        let reserved = match config.host.transport.maps_windows() {
            true => Loopback::reserved(self.domains, SIGNALS).bytes("the rings of a rail window")?,
            false => 0,
        };
        RailLayout::new(self.domains, self.lane_bytes, reserved)
    }
}

/// A rank's window, before the rank has met its rail peers.
#[derive(Debug)]
pub(crate) struct RankWindow {
    device: Arc<Device>,
    /// Pinned host memory: the whole window, or what lies before the lanes.
    segment: Arc<Segment>,
    pinned: Pinned,
    /// The lanes, if they are in GPU memory: with an emulated link, or with a NIC that accesses GPU memory.
    lanes: Option<Arc<DeviceLanes>>,
    layout: RailLayout,
    /// Whether kernels see what a NIC has written only after [`Device::flush_nic_writes`].
    flushes: bool,
}

/// The memory of a rank's window, which the engine keeps.
struct Memory {
    segment: Arc<Segment>,
    /// What follows the segment, in the memory of this GPU.
    lanes: Option<(usize, Arc<DeviceLanes>)>,
}

impl Window for Memory {
    fn start(&self) -> NonNull<u8> {
        self.segment.start()
    }

    fn len(&self) -> usize {
        self.segment.len()
    }

    fn gpu_part(&self) -> Option<GpuPart> {
        let part = |(ordinal, lanes): &(usize, Arc<DeviceLanes>)| GpuPart {
            gpu: *ordinal as i32,
            address: lanes.address(),
            len: lanes.bytes(),
        };
        self.lanes.as_ref().map(part)
    }
}

impl RankWindow {
    /// The window of a rank whose engine maps the windows of all ranks, which are threads of this process. `devices`: the GPUs of
    /// these ranks.
    pub(crate) fn new(
        bounds: &Bounds,
        device: &Arc<Device>,
        devices: &[usize],
        config: &Config,
    ) -> Result<Self> {
        let layout = bounds.layout(config)?;
        let lanes = match config.host.transport.pace()? {
            Some(_) => Some(Arc::new(DeviceLanes::new(device, devices, layout.lanes())?)),
            None => None,
        };
        Self::with_lanes(device, layout, lanes, false)
    }

    /// The window of a rank whose engine is one over libfabric. `address` is as for [`open`](Self::open).
    ///
    /// # Errors
    /// [`EnvironmentError`] if the setting demands lanes in GPU memory, and the provider or the GPU does not support that.
    pub(crate) fn for_network(
        bounds: &Bounds,
        device: &Arc<Device>,
        world: &World,
        rank: Rank,
        config: &Config,
        address: Option<IpAddr>,
    ) -> Result<Self> {
        let layout = bounds.layout(config)?;
        let direct = device.gpu_direct();
        let place = place_of(device, world, rank, address);
        let lanes = match nics_reach_gpu_memory(device, direct, &place, config)? {
            true => Some(Arc::new(DeviceLanes::for_nics(device, layout.lanes())?)),
            false => None,
        };
        let flushes = lanes.is_some() && direct == GpuDirect::Flushed;
        Self::with_lanes(device, layout, lanes, flushes)
    }

    fn with_lanes(
        device: &Arc<Device>,
        layout: RailLayout,
        lanes: Option<Arc<DeviceLanes>>,
        flushes: bool,
    ) -> Result<Self> {
        let in_host_memory = if lanes.is_some() { layout.lanes().start } else { layout.bytes() };
        let segment = Arc::new(Segment::private(in_host_memory)?);
        let pinned = Pinned::new(device, segment.start(), segment.len())?;
        Ok(Self { device: Arc::clone(device), segment, pinned, lanes, layout, flushes })
    }

    /// The address of the first lane, for kernels.
    fn lanes_address(&self) -> DeviceAddress {
        match &self.lanes {
            Some(lanes) => lanes.address(),
            None => self.pinned.address() + self.layout.lanes().start as DeviceAddress,
        }
    }

    /// The engine of `rank`: `loopback`, or an emulated link. `windows` are those of all ranks, which are threads of this
    /// process.
    pub(crate) fn local_engine(
        &self,
        world: &World,
        rank: Rank,
        windows: &[Self],
        config: &Config,
    ) -> Result<Box<dyn Transport>> {
        let rail = rail_of(world, rank)?;
        let of_rail = || rail.ranks().iter().map(|peer| &windows[peer.index()]);
        let segments = of_rail().map(|window| Arc::clone(&window.segment)).collect();
        let lanes: Option<Vec<_>> = of_rail().map(|window| window.lanes.clone()).collect();
        // SAFETY: only the proxies of these ranks use the engines. A proxy puts bytes whose flags the kernels have set, to
        // lanes that the peer's kernels do not read before the peer's proxy has told them of the bytes; no lane is used
        // again before the peer's kernels have read it (docs/cuda-rails.md).
        let loopback = unsafe { Loopback::new(rail.clone(), segments, SIGNALS) }?;
        let (Some(pace), Some(lanes)) = (config.host.transport.pace()?, lanes) else {
            return Ok(Box::new(loopback));
        };
        let loopback = Arc::new(loopback);
        let copies = LaneCopies::new(&self.device, rail, Arc::clone(&loopback), lanes, pace.copier())?;
        Ok(Box::new(Paced::with(loopback, copies, pace, SIGNALS)?))
    }

    /// Opens the engine over libfabric. `address`: the IP address of this machine, in a job of several machines.
    ///
    /// # Errors
    /// [`CallerError::Config`] for `loopback` and emulated links, which serve ranks of one process.
    pub(crate) fn open(
        &self,
        world: &World,
        rank: Rank,
        config: &Config,
        address: Option<IpAddr>,
    ) -> Result<Box<dyn Unconnected>> {
        let options = &config.host.transport;
        if options.maps_windows() {
            let problem = "on GPUs, this engine connects NVLink domains of one process; for processes choose `shm` or `tcp`";
            let (key, value) = ("HYBRID_EP_TRANSPORT", options.engine.clone());
            return Err(CallerError::Config { key, value, problem: problem.into() }.into());
        }
        let place = place_of(&self.device, world, rank, address);
        let lanes = self.lanes.as_ref().map(|lanes| (self.device.ordinal, Arc::clone(lanes)));
        let window = Arc::new(Memory { segment: Arc::clone(&self.segment), lanes });
        // SAFETY: the segment and the lanes are mapped, with unchanging lengths, until the window drops them. Other ranks may
        // write to them at any time: this process accesses them through pointers and atomics, and kernels as
        // docs/cuda-rails.md says.
        unsafe { open_fabric_over(rail_of(world, rank)?, &place, window, options, limits(&self.layout)) }
    }

    /// What makes the bytes that a NIC has written visible to kernels; `None` if they are.
    fn show(&self) -> Option<Show> {
        let device = Arc::clone(&self.device);
        self.flushes.then(|| Box::new(move || device.flush_nic_writes()) as Show)
    }
}

fn place_of(device: &Device, world: &World, rank: Rank, address: Option<IpAddr>) -> RankPlace {
    RankPlace { local_rank: world.topology().local_rank_of(rank), gpu: device.pci_address(), address }
}

/// Whether the lanes of a rank are in the memory of its GPU, where the NIC accesses them.
fn nics_reach_gpu_memory(
    device: &Arc<Device>,
    direct: GpuDirect,
    place: &RankPlace,
    config: &Config,
) -> Result<bool> {
    let options = &config.host.transport;
    if options.maps_windows() || options.gpu_memory == Some(false) {
        return Ok(false);
    }
    let problem = if direct == GpuDirect::Unsupported {
        "its driver does not let NICs access it, or kernels cannot be shown what they write (GPUDirect RDMA)"
            .into()
    } else {
        let sample = DeviceLanes::for_nics(device, 0..GRANULE)?;
        let part = GpuPart { gpu: device.ordinal as i32, address: sample.address(), len: sample.bytes() };
        // SAFETY: `sample` keeps the memory mapped.
        match unsafe { registers_gpu_memory(place, options, part) }? {
            Ok(()) => return Ok(true),
            Err(why) => why,
        }
    };
    match options.gpu_memory {
        Some(true) => {
            let engine = &options.engine;
            let what = format!("sending from the memory of GPU {} over {engine}", device.ordinal);
            Err(EnvironmentError::new(what, problem, GpuPart::HINT).into())
        }
        _ => Ok(false),
    }
}

/// A rank's rails in operation.
#[derive(Debug)]
pub(crate) struct RankRails {
    /// Dropped first: it uses the window.
    proxy: Proxy,
    _window: RankWindow,
    report: Arc<Report>,
    pub(crate) bounds: Bounds,
    /// The part of the kernel parameters that concerns rails.
    pub(crate) params: Rails,
}

impl RankRails {
    /// Starts the proxy of `rank` over an engine that is connected to the rail peers. `report` is the fault report of the
    /// rank's kernels.
    pub(crate) fn start(
        world: &World,
        rank: Rank,
        bounds: Bounds,
        window: RankWindow,
        transport: Box<dyn Transport>,
        report: &Arc<Report>,
    ) -> Result<Self> {
        let topology = world.topology();
        let (domain, local_ranks) = (topology.domain_of(rank), topology.domain_size());
        let layout = window.layout;
        let params = Rails {
            ends: window.pinned.address() + layout.ends_offset() as u64,
            lanes: window.lanes_address(),
            lane_bytes: layout.lane_bytes() as u64,
            domains: bounds.domains as u32,
            domain: domain as u32,
            first: (domain * local_ranks) as u32,
            local_ranks: local_ranks as u32,
            chunk_rows: bounds.chunk_rows() as u32,
            most_rows: bounds.tokens as u32,
            most_copies: bounds.copies as u32,
            ..Rails::zeroed()
        };
        let show = window.show();
        let proxy = Proxy::start(
            ProxyParts {
                rail: rail_of(world, rank)?,
                transport,
                window: Arc::clone(&window.segment) as Arc<dyn ep::Window>,
                layout,
                show,
                // The links write the words that end waits for a rank. They notice every rank that ends. `failures` has the
                // errors that only the engine has noticed.
                on_lost: Box::new(|_, _| {}),
            },
            PATIENCE,
        )?;
        Ok(Self { proxy, _window: window, report: Arc::clone(report), bounds, params })
    }

    /// Makes the proxy send what the kernels, which have ended, have stored. Does not wait.
    pub(crate) fn drain(&self, patience: Duration) {
        self.proxy.drain(patience);
    }

    /// Whether everything has left this rank, after [`drain`](Self::drain); `None` until this is known.
    pub(crate) fn is_drained(&self) -> Option<bool> {
        self.proxy.is_drained()
    }

    /// Prepares the proxy for an operator that the host is about to launch.
    pub(crate) fn wake(&self) {
        self.proxy.wake();
    }

    /// Bytes and puts that the engine has accepted.
    pub(crate) fn sent(&self) -> (u64, u64) {
        self.proxy.sent()
    }

    /// The error of the engine for a rail peer, if there is one.
    pub(crate) fn failure_of(&self, peer: Rank) -> Option<ep::Error> {
        self.proxy.failures().remove(&peer)
    }
}

impl Drop for RankRails {
    fn drop(&mut self) {
        if self.report.read().is_some() {
            self.proxy.give_up();
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn raised_bounds_have_room_for_what_they_were_raised_for() {
        let world = World::builder().ranks(4).domains(2).experts(256).build().unwrap();
        for (tokens, hidden) in [(8192, 7168), (4096, 8192), (4096, 7168), (100_000, 1024), (1, 4)] {
            let mut config = Config::default();
            config.cuda.raise_rails(Some(tokens), Some(hidden));
            config.check().unwrap();
            let bounds = Bounds::of(&world, &config).unwrap().unwrap();
            let row = (2 * hidden).next_multiple_of(16);
            bounds.check_tokens(tokens).unwrap();
            bounds.check_lane(tokens, row, 8 * tokens).unwrap();
            // A routing map without a bound counts every expert as a choice.
            bounds.check_lane(tokens, row, 256 * tokens).unwrap();
            assert!(bounds.check_tokens(config.cuda.rail_tokens + 1).is_err());
        }
        let bounds = Bounds::of(&world, &Config::default()).unwrap().unwrap();
        assert!(bounds.check_lane(4096, 2 * 8192, 0).is_err());
    }

    #[test]
    fn of_the_settings_of_all_ranks_the_largest_apply() {
        let of = |tokens, choices, lane_bytes| RailSettings { tokens, choices, lane_bytes };
        let largest = RailSettings::largest([of(64, 8, 8192), of(32, 9, 4096)]);
        assert_eq!(largest, of(64, 9, 8192));
        assert_eq!(RailSettings::of(&largest.applied_to(&Config::default())), largest);
        assert!(largest.is_valid() && !of(0, 8, 8192).is_valid());
    }

    #[test]
    fn bounds_include_settings_that_are_no_larger() {
        let world = World::builder().ranks(4).domains(2).experts(8).build().unwrap();
        let of = |tokens, choices, lane_bytes| RailSettings { tokens, choices, lane_bytes };
        let config = of(64, 8, 8192).applied_to(&Config::default());
        let bounds = Bounds::of(&world, &config).unwrap().unwrap();
        for (settings, fits) in [
            (of(64, 8, 8192), true),
            (of(32, 16, 4096), true),
            (of(65, 7, 8192), false),
            (of(64, 9, 8192), false),
            (of(64, 8, 8193), false),
        ] {
            assert_eq!(bounds.include(settings), fits, "{settings:?}");
        }
    }

    #[test]
    fn only_a_kernel_that_copies_needs_a_multiprocessor_of_its_own() {
        for (domains, engine, expected) in [
            (2, "loopback", (0, 0)),
            (2, "paced:25GB/s,5us", (0, 1)),
            (2, "paced:25GB/s,5us,kernel", (1, 1)),
            (1, "paced:25GB/s,5us,kernel", (0, 0)),
        ] {
            let world = World::builder().ranks(2).domains(domains).experts(2).build().unwrap();
            let mut config = Config::default();
            config.host.transport.engine = engine.into();
            let found =
                (blocks_of_copies(&world, &config).unwrap(), streams_of_copies(&world, &config).unwrap());
            assert_eq!(found, expected, "{domains} {engine}");
        }
    }
}
