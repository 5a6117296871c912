//! [`CudaBuffer`]: one rank of a world, on a GPU.

use std::cell::{Cell, OnceCell};
use std::sync::Arc;
use std::time::Duration;

use ep::call::{HandleFacts, Maker, check_capacity};
use ep::{
    Backend as _, CallerError, Config, Counts, DeviceReport, DispatchMode, EnvironmentError, Error,
    Interrupt, Operator, PeerError, PeerFault, Rank, ReceiveShape, Result, ScaleFormat, TokenFormat, World,
};

use crate::arena::{Arena, Part};
use crate::call::Call;
use crate::device::KernelKey;
use crate::driver::{Device, DeviceAddress, Event, HostWords as _, Kernel, Mapped, Sharing, Stream};
use crate::fault::{Faults, Report};
use crate::handle::{CudaHandle, Sizes};
use crate::kernels::Kernels;
use crate::member::{Member, Parting, Stage, Tail};
use crate::memory::CudaMemory;
use crate::params::{
    CONTROL_BYTES, Common, HandleView, Handshake, NONE, PREPROCESS_RAIL_THREADS, PREPROCESS_THREADS,
    PreprocessParams, SHAPE_REMOTE, SHAPE_ROWS, SHAPE_WANTED, ScaleCode,
};
use crate::peers::Peers;
use crate::rails::{RailSettings, RankRails, blocks_of_copies};
use crate::reaper::Grace;
use crate::routing::{Lists, check_report, fill_report};
use crate::shared::{count_columns, shape_words};
use crate::tuning;

/// Maximum number of blocks of preprocess, which is too short to gain from more.
const PREPROCESS_BLOCKS: u32 = 64;

/// Minimum number of blocks of dispatch and combine.
const FEWEST_BLOCKS: u32 = 2;

/// One rank of a world, on a GPU.
///
/// Operators are launched in a stream and return at once. [`ep::Backend::synchronize`], [`ep::Backend::download`],
/// [`ep::Backend::receive_shape`] and a preprocess without capacity wait for the GPU; a call for which registered memory
/// grows waits until peers that are processes have mapped it. Ranks are threads of this process
/// ([`threads`](ep::Backend::threads), rank `r` on GPU `r % GPUs`) or processes ([`join`](ep::Backend::join), on GPU
/// `rank % GPUs`, or [`CudaBuffer::join_on`]). The ranks of one NVLink domain are on one machine, or on several whose GPUs
/// share memory by fabric handles (never run). Making a buffer
/// fails with [`CallerError::Topology`] for a world of too many ranks, and with [`ep::EnvironmentError`] without a GPU or a
/// driver, or without a compiler if a kernel is not in the cache.
pub struct CudaBuffer {
    pub(crate) rank: Rank,
    pub(crate) world: World,
    pub(crate) device: Arc<Device>,
    pub(crate) stream: Stream,
    pub(crate) arena: Arena,
    /// The control block.
    pub(crate) _control: Part,
    pub(crate) common: Common,
    /// Expert position by expert; `None` if the placement is in order.
    pub(crate) position_of: Option<Part>,
    pub(crate) member: Arc<Member>,
    /// The capture that operators are launched in, if any. Its graph keeps `member`.
    pub(crate) capture: Option<u64>,
    pub(crate) faults: Arc<Faults>,
    /// Host memory to which preprocess without capacity writes the shape.
    pub(crate) shape: Arc<Mapped>,
    /// Scratch of preprocess: `PreprocessParams::block_columns`.
    pub(crate) columns: Part,
    /// Scratch of combine, with its bytes.
    pub(crate) partials: Option<(Part, usize)>,
    pub(crate) prob_scratch: Option<(Part, usize)>,
    /// The same for foreign sets.
    pub(crate) set_partials: Option<(Part, usize)>,
    pub(crate) set_prob_scratch: Option<(Part, usize)>,
    /// `CombineParams::set_done`; `None` in a world of one domain, like `rails`.
    pub(crate) set_done: Option<Part>,
    /// Rails to the other NVLink domains.
    pub(crate) rails: Option<Arc<RankRails>>,
    /// Blocks of dispatch and combine.
    pub(crate) blocks: u32,
    /// Maximum number of blocks of preprocess.
    pub(crate) preprocess_blocks: u32,
    pub(crate) plain_copies: bool,
    /// Maximum number of tokens of a chunk.
    pub(crate) chunk_tokens: usize,
    /// Distinguishes handles and memory of this buffer from those of other buffers.
    pub(crate) id: Maker,
    /// Operators called so far.
    pub(crate) step: u64,
    /// The last operator.
    pub(crate) operator: Operator,
    pub(crate) interrupt: Interrupt,
    /// The error that made the buffer unusable.
    pub(crate) failed: Option<Error>,
    pub(crate) domain_bytes: u64,
    pub(crate) preprocess_bytes: u64,
    /// Dropped last.
    _grace: Grace,
}

impl std::fmt::Debug for CudaBuffer {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("CudaBuffer")
            .field("rank", &self.rank)
            .field("world", self.world.topology())
            .field("gpu", &self.device.ordinal)
            .field("blocks", &self.blocks)
            .field("step", &self.step)
            .field("failed", &self.failed)
            .finish_non_exhaustive()
    }
}

/// How long dropping a buffer waits for its work to finish, before a background thread takes over.
const GRACE: Duration = Duration::from_secs(2);

/// How long the work of a dropped buffer may take. Kernels that wait for a peer give up earlier (`bound_of` in
/// device/common/sync.cuh has the bounds of their waits).
fn patience(world: &World, config: &Config) -> Duration {
    let (entries, stalls) = if world.topology().domains() == 1 { (1, 1) } else { (2, 5) };
    let (entry, stall) =
        (config.timeout.saturating_mul(entries), config.stall_timeout.saturating_mul(stalls));
    entry.saturating_add(stall)
}

impl Drop for CudaBuffer {
    /// Waits up to 2 s for operators that have not finished. After that a background thread waits for them and frees
    /// the memory. CUDA graphs that captured operators keep the memory.
    fn drop(&mut self) {
        Grace::begin(GRACE);
        self.member.end_in(&self.stream);
    }
}

/// A rank's own memory, before it has met its peers.
pub(crate) struct Home {
    pub(crate) rank: Rank,
    pub(crate) device: Arc<Device>,
    pub(crate) stream: Stream,
    pub(crate) arena: Arena,
    pub(crate) control: Part,
    pub(crate) report: Arc<Report>,
}

/// Loads the kernels that nearly every program launches, so that no rank compiles in its first operators while its peers
/// wait. If ranks share the GPU (`shared`), loads all kernels: the driver loads a kernel only when no other kernel runs on
/// the GPU, so a running kernel that waits for a rank that is loading would wait forever.
pub(crate) fn load_kernels(world: &World, device: &Arc<Device>, shared: bool, config: &Config) -> Result<()> {
    let keys = match shared {
        true => KernelKey::of_world(views(world), has_rails(world), device.shared_bytes),
        false => {
            KernelKey::usual(views(world), has_rails(world), device.shared_bytes, wanted_sms(world, config))
        }
    };
    Kernels::get().load_ahead(device, &keys, config.cuda.plain_copies)
}

/// The number of SMs that dispatch and combine are to use.
fn wanted_sms(world: &World, config: &Config) -> u32 {
    if config.cuda.sms == 0 { tuning::default_sms(world) } else { config.cuda.sms as u32 }
}

impl Home {
    /// Allocates the memory. `devices`: GPUs of this process that may access it; `sharing`: which other processes map it.
    pub(crate) fn new(
        world: &World,
        rank: Rank,
        device: Arc<Device>,
        devices: Vec<usize>,
        sharing: Sharing,
        config: &Config,
    ) -> Result<Self> {
        let stream = Stream::new(&device)?;
        let arena = Arena::new(&device, devices, sharing, rank, patience(world, config))?;
        let counts = 2 * world.ranks() * Counts::words(world) * size_of::<u32>();
        let control = arena.alloc(CONTROL_BYTES + counts, false)?;
        stream.zero(control.address(), CONTROL_BYTES + counts)?;
        stream.synchronize()?;
        let report = Arc::new(Report::new(&device)?);
        Ok(Self { rank, device, stream, arena, control, report })
    }
}

impl CudaBuffer {
    pub(crate) fn assemble(
        world: World,
        config: &Config,
        home: Home,
        peers: Peers,
        rails: Option<RankRails>,
        ranks_here: usize,
    ) -> Result<Self> {
        let Home { rank, device, stream, arena, control, report } = home;
        let view = stream.view();
        let sms = wanted_sms(&world, config);
        let (machines, hearts) = (peers.machines.clone(), peers.hearts.clone());
        let faults = Arc::new(Faults::new(report, world.experts(), machines, config, hearts));
        let local_experts = world.placement().local_experts(rank);
        let shape = Arc::new(Mapped::new(&device, shape_words(local_experts))?);
        let position_of = if world.placement().is_in_order() {
            None
        } else {
            let positions: Vec<u32> =
                (0..world.experts() as u32).map(|expert| world.placement().position_of(expert)).collect();
            let part = arena.alloc(4 * positions.len(), false)?;
            stream.upload(bytemuck::cast_slice(&positions), part.address())?;
            Some(part)
        };
        let rails = rails.map(Arc::new);
        // With rails, foreign sets use the two halves of this memory in turn.
        let (domains, turns) = rails.as_ref().map_or((0, 1), |rails| (rails.bounds.domains(), 2));
        let columns = count_columns(world.experts(), world.ranks(), domains);
        let columns = arena.alloc(4 * turns * columns * PREPROCESS_BLOCKS as usize, false)?;
        let mut set_done = None;
        if let Some(rails) = &rails {
            let bytes = rails.bounds.done_bytes();
            let part = arena.alloc(bytes, false)?;
            stream.zero(part.address(), bytes)?;
            set_done = Some(part);
        }
        // Kernels of different ranks wait for each other, so the blocks of all ranks of a GPU must run at the same
        // time; with an emulated link, beside the copies of each rank.
        let of_rank = device.multiprocessors as usize / ranks_here;
        let most = of_rank.saturating_sub(blocks_of_copies(&world, config)?) as u32;
        if most < FEWEST_BLOCKS {
            return Err(EnvironmentError::new(
                format!("{ranks_here} ranks on GPU {}", device.ordinal),
                format!(
                    "it runs {} blocks at once, and each rank needs {FEWEST_BLOCKS}",
                    device.multiprocessors
                ),
                "start fewer ranks, or spread them over more GPUs",
            )
            .into());
        }
        let mut common = peers.common(&world, rank, config, faults.address());
        if let Some(rails) = &rails {
            common.rails = rails.params;
            arena.hold(Arc::clone(rails));
        }
        stream.synchronize()?;
        arena.hold((Arc::clone(&faults), Arc::clone(&shape), Arc::clone(&peers._keep)));
        let member = Member::new(Parting {
            rank,
            own: peers.control[rank.index()],
            control: peers.mapped_controls(),
            rails: rails.clone(),
            stall_bound: config.stall_bound(),
            arena: arena.clone(),
            faults: Arc::clone(&faults),
            tail: Tail::new(&device)?,
            said: Event::untimed(&device)?,
            stage: Stage::Working,
            patience: patience(&world, config),
            interrupted: false,
            stream,
        });
        Ok(Self {
            rank,
            world,
            stream: view,
            arena,
            _control: control,
            common,
            position_of,
            member,
            capture: None,
            faults,
            shape,
            columns,
            partials: None,
            prob_scratch: None,
            set_partials: None,
            set_prob_scratch: None,
            set_done,
            rails,
            blocks: sms.clamp(FEWEST_BLOCKS, most),
            preprocess_blocks: PREPROCESS_BLOCKS.min(most),
            plain_copies: config.cuda.plain_copies,
            chunk_tokens: config.chunk_tokens,
            device,
            id: Maker::new(rank),
            step: 0,
            operator: Operator::Join,
            interrupt: config.interrupt.clone(),
            failed: None,
            domain_bytes: 0,
            preprocess_bytes: 0,
            _grace: Grace::until_dropped(),
        })
    }

    /// The number of SMs that dispatch and combine use.
    pub fn sms(&self) -> u32 {
        self.blocks
    }

    /// Whether a call that fits the bounds of `config` between NVLink domains fits this buffer. In one domain, calls have no
    /// such bounds.
    pub fn has_rail_room(&self, config: &Config) -> bool {
        self.rails.as_ref().is_none_or(|rails| rails.bounds.include(RailSettings::of(config)))
    }

    pub(crate) fn kernel(&self, key: KernelKey) -> Result<Arc<Kernel>> {
        Kernels::get().load(&self.device, key, self.plain_copies)
    }

    /// Returns the error of an earlier operator, if one failed.
    pub(crate) fn check_usable(&mut self) -> Result<()> {
        if self.failed.is_none() {
            self.failed = self.faults.read().map(|error| self.cause_of(error));
            if self.failed.is_some() {
                self.arena.tell_fault();
            }
        }
        self.failed.clone().map_or(Ok(()), Err)
    }

    /// `error` with the fault that the engine has found, if a kernel waited until its bound for a rank that the engine has
    /// lost. An engine that has failed as a whole is the cause itself.
    fn cause_of(&self, error: Error) -> Error {
        let Error::Peer(found) = &error else { return error };
        if !matches!(found.fault, PeerFault::Late | PeerFault::Stalled) {
            return error;
        }
        match self.rails.as_ref().and_then(|rails| rails.failure_of(found.peer)) {
            None => error,
            Some(Error::Peer(lost)) => {
                let waited_for = format!("{}; the engine: {}", found.waited_for, lost.waited_for);
                PeerError { fault: lost.fault, waited_for, ..found.clone() }.into()
            }
            Some(cause) => cause,
        }
    }

    pub(crate) fn facts<'a>(world: &'a World, rank: Rank, handle: &CudaHandle) -> HandleFacts<'a> {
        HandleFacts { buffer: handle.buffer, world, rank, shape: handle.shape_so_far() }
    }

    /// The words of counts that a preprocess receives: from ranks of other domains, only the words that concern this
    /// domain.
    fn received_count_words(&self) -> usize {
        let (topology, placement) = (self.world.topology(), self.world.placement());
        let near = topology.domain_size();
        let ours = topology.domain_ranks(topology.domain_of(self.rank));
        let experts: usize = ours.map(|rank| placement.local_experts(rank)).sum();
        (near - 1) * Counts::words(&self.world) + (topology.ranks() - near) * (1 + experts + near)
    }

    /// Begins the next operator: counts the step, and returns the common kernel parameters. The addresses of outputs are not in
    /// their handshake yet.
    pub(crate) fn enter(&mut self, call: &Call, lists: &HandleView) -> Common {
        self.step += 1;
        self.operator = call.operator;
        self.arena.set_step(self.step);
        if let Some(rails) = &self.rails {
            rails.wake();
        }
        let handshake = Handshake {
            recv: lists.recv,
            recv_begin: lists.recv_begin,
            dst_copies: lists.dst_copies,
            dst_begin: lists.dst_begin,
            chunks: lists.chunks,
            signature: call.signature(),
            sets: lists.sets,
            call: call.words,
            ..Handshake::default()
        };
        Common { operation: call.operator as u32, handshake, ..self.common }
    }

    /// Stores the shape words that preprocess has computed in the handle.
    pub(crate) fn learn(&self, handle: &CudaHandle, words: &[u32]) {
        handle.remote_rows.set(words[3 * self.world.placement().local_experts(self.rank) + SHAPE_REMOTE]);
        handle.shape.get_or_init(|| self.shape_from(handle.mode, handle.capacity, words));
    }

    fn shape_from(&self, mode: DispatchMode, capacity: Option<usize>, words: &[u32]) -> ReceiveShape {
        let experts = self.world.placement().local_experts(self.rank);
        let column = |at: usize| match mode {
            DispatchMode::Plain => Vec::new(),
            DispatchMode::Permuted { .. } => words[at * experts..(at + 1) * experts].to_vec(),
        };
        ReceiveShape {
            mode,
            rows: words[3 * experts + SHAPE_ROWS] as usize,
            wanted_rows: words[3 * experts + SHAPE_WANTED] as usize,
            tokens_per_expert: column(2),
            kept_per_expert: column(1),
            first_row: column(0),
            capacity,
        }
    }

    /// Computes the handle of a routing in this rank's GPU memory. With a capacity, the call does not wait for the GPU,
    /// and a later [`ep::Backend::synchronize`] returns errors of the routing. The kernel writes the outputs of
    /// `report`.
    pub(crate) fn preprocess_lists(
        &mut self,
        routing: &Lists<'_>,
        mode: DispatchMode,
        capacity: Option<usize>,
        report: DeviceReport<'_, CudaMemory>,
    ) -> Result<CudaHandle> {
        self.check_usable()?;
        if self.notice_capture()? && capacity.is_none() {
            return Err(CallerError::Config {
                key: "capacity",
                value: "none".into(),
                problem:
                    "without a capacity, preprocess waits for the counts, and a CUDA graph cannot capture this wait: give a \
                     capacity"
                        .into(),
            }
            .into());
        }
        let bound = check_capacity(self.rank, mode, capacity)?.unwrap_or(NONE);
        routing.check(self.id, self.world.experts())?;
        let tokens = routing.tokens();
        let copies = routing.most_copies(self.world.experts()).get("the routing", "choices")?;
        if copies.saturating_add(tokens) >= 1 << 30
            || tokens.saturating_mul(self.world.experts()) > u32::MAX as usize
        {
            return Err(CallerError::TooManyRows { rank: self.rank, rows: copies as u64 }.into());
        }
        let ranks = self.world.ranks();
        let local_experts = self.world.placement().local_experts(self.rank);
        let bounds = self.rails.as_ref().map(|rails| rails.bounds);
        if let Some(bounds) = &bounds {
            bounds.check_tokens(tokens)?;
            // An upper bound: one bit per expert of the world for each token, and the counts, which take the room of
            // further rows.
            let words = self.world.experts().div_ceil(32) + 1;
            let counts = (self.world.experts() + ranks).div_ceil(words);
            bounds.check_lane(tokens + counts, 4 * words, 0)?;
        }
        let sizes = Sizes::new(tokens, copies, ranks, local_experts, self.chunk_tokens);
        check_report(&report, self.id, local_experts)?;
        let permuted = matches!(mode, DispatchMode::Permuted { .. });
        let kernel = self.kernel(KernelKey::Preprocess { rails: bounds.is_some() })?;
        let most_blocks = self.preprocess_blocks as usize;
        let (tile, shared_bytes) = tuning::preprocess_tile(
            tokens,
            most_blocks,
            self.world.experts(),
            ranks,
            bounds.map_or(0, |bounds| bounds.domains()),
            kernel.shared_bytes()?,
        )?;
        let (memory, view) = sizes.allocate(&self.arena, permuted, bounds.as_ref())?;

        let pad = if permuted { mode.pad_multiple() as u32 } else { 0 };
        let common = self.enter(&Call::preprocess(mode), &view);
        let mut params = PreprocessParams {
            common,
            handle: view,
            form: 0,
            topk: 0,
            pad_multiple: pad,
            capacity: bound,
            count_words: Counts::words(&self.world) as u32,
            tile,
            most_copies: copies as u32,
            reserved: 0,
            topk_idx: 0,
            topk_idx_wide: 0,
            weights: 0,
            map: 0,
            row_begin: 0,
            row_experts: 0,
            position_of: self.position_of.as_ref().map_or(0, Part::address),
            block_columns: self.columns.address(),
            host_shape: if capacity.is_none() { self.shape.address() } else { 0 },
            tokens_per_expert: 0,
            kept_per_expert: 0,
            overflow: 0,
        };
        routing.fill(&mut params);
        fill_report(&report, &mut params);
        let blocks = (tokens.div_ceil(tile as usize) as u32).clamp(1, self.preprocess_blocks);
        let threads = if bounds.is_some() { PREPROCESS_RAIL_THREADS } else { PREPROCESS_THREADS } as u32;
        // SAFETY: the parameters are this kernel's; the memory that they name is owned by the handle and the buffer, or
        // by the caller until the stream has executed the launch.
        unsafe { kernel.launch(&self.stream, blocks, threads, shared_bytes, &params) }?;
        self.notice_work()?;
        self.preprocess_bytes += 4 * self.received_count_words() as u64;

        let handle = CudaHandle {
            buffer: self.id,
            id: self.step,
            mode,
            capacity,
            sizes,
            view,
            shape: OnceCell::new(),
            dispatched: Cell::new(false),
            remote_rows: Cell::new(0),
            memory: Arc::new(memory),
            kept_by: Cell::new(None),
        };
        if capacity.is_none() {
            self.synchronize()?;
            let words: Vec<u32> = (0..sizes.shape_words()).map(|at| self.shape.read(at)).collect();
            self.learn(&handle, &words);
        }
        Ok(handle)
    }

    /// Allocates registered memory in place of an output that is not registered. `keep_rest`: copies the output's
    /// content first, because the operator does not write all rows.
    pub(crate) fn stage(
        &self,
        memory: Option<&CudaMemory>,
        bytes: usize,
        keep_rest: bool,
    ) -> Result<Option<Part>> {
        let Some(memory) = memory.filter(|memory| bytes > 0 && !memory.is_registered()) else {
            return Ok(None);
        };
        let part = self.arena.alloc(bytes, false)?;
        if keep_rest {
            // Rows after the last group of rows must keep their content.
            self.stream.copy(memory.address(), part.address(), bytes)?;
        }
        Ok(Some(part))
    }

    /// Scratch memory of at least `bytes` bytes, kept from call to call.
    pub(crate) fn scratch(
        arena: &Arena,
        slot: &mut Option<(Part, usize)>,
        bytes: usize,
    ) -> Result<DeviceAddress> {
        if let Some((part, len)) = slot
            && *len >= bytes
        {
            return Ok(part.address());
        }
        if let Some((part, _)) = slot.take() {
            part.retire();
        }
        let part = arena.alloc(bytes, false)?;
        let address = part.address();
        *slot = Some((part, bytes));
        Ok(address)
    }
}

/// Whether the world has several NVLink domains.
pub(crate) fn has_rails(world: &World) -> bool {
    world.topology().domains() > 1
}

/// The peers that a block of dispatch and combine has views of: all ranks and, with rails, all domains.
pub(crate) fn views(world: &World) -> usize {
    world.ranks() + if has_rails(world) { world.topology().domains() } else { 0 }
}

pub(crate) fn scale_code(format: TokenFormat) -> u32 {
    match format.scales() {
        None => ScaleCode::None as u32,
        Some(ScaleFormat::F32Per128) => ScaleCode::F32Per128 as u32,
        Some(ScaleFormat::Ue8m0Per128) => ScaleCode::Ue8m0Per128 as u32,
        Some(ScaleFormat::Ue8m0Per32) => ScaleCode::Ue8m0Per32 as u32,
        Some(other) => unreachable!("{other:?} has no code: add it to `ScaleCode`"),
    }
}

pub(crate) fn address(memory: Option<&CudaMemory>) -> DeviceAddress {
    memory.map_or(0, CudaMemory::address)
}

/// Like [`address`], but never 0 if `memory` is given: memory without bytes may be at address 0, which means no memory to
/// kernels. They do not access memory without bytes, so `other` replaces its address.
pub(crate) fn address_or(memory: Option<&CudaMemory>, other: DeviceAddress) -> DeviceAddress {
    memory.map_or(0, |memory| if memory.address() == 0 { other } else { memory.address() })
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn memory_without_bytes_is_not_taken_for_none() {
        // SAFETY: no byte is accessed.
        let [empty, full] = [0, 4096].map(|at| unsafe { CudaMemory::borrowed(at, 0) });
        assert_eq!([None, Some(&empty), Some(&full)].map(|memory| address_or(memory, 256)), [0, 256, 4096]);
    }

    #[test]
    fn dropped_work_may_take_longer_than_every_wait_of_a_kernel() {
        let mut config = Config::default();
        config.timeout = Duration::from_secs(100);
        config.stall_timeout = Duration::from_secs(1);
        let of = |domains| {
            let world = World::builder().ranks(4).domains(domains).experts(4).build().unwrap();
            patience(&world, &config).as_secs()
        };
        // The longest wait, and one for a chunk after it.
        assert_eq!(of(1), 100 + 1);
        assert_eq!(of(2), 2 * 100 + 4 + 1);
    }
}
