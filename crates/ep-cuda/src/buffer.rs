//! [`CudaBuffer`]: one rank's end of a communicator on a GPU.

use std::cell::{Cell, OnceCell};
use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering::Relaxed};

use ep::call::{HandleFacts, check_capacity};
use ep::{
    Backend as _, CallerError, Config, Counts, DispatchMode, EnvironmentError, Error, Operator, Rank,
    ReceiveShape, Result, ScaleFormat, TokenFormat, World,
};

use crate::arena::{Arena, Part};
use crate::device::KernelKey;
use crate::driver::{Device, DeviceAddress, Kernel, Mapped, Stream};
use crate::fault;
use crate::handle::{CudaHandle, Sizes, shape_words};
use crate::kernels::Kernels;
use crate::links::LEFT;
use crate::memory::CudaMemory;
use crate::params::{CONTROL_BYTES, Common, FAULT_WORDS, LEFT_OFFSET, NONE, PreprocessParams};
use crate::peers::Peers;
use crate::routing::{DeviceReport, DeviceRouting};
use crate::tuning;

/// Blocks of preprocessing, at most: it is short, and leaves the GPU to others soon.
const PREPROCESS_BLOCKS: u32 = 64;

/// Blocks of dispatch, at least: one that sends, one that receives.
const FEWEST_BLOCKS: u32 = 2;
/// SMs of dispatch and combine where the caller does not say.
const DEFAULT_SMS: u32 = 32;

/// One rank's end of a communicator on a GPU.
///
/// Operators are put into a stream and return at once; [`ep::Backend::synchronize`], [`ep::Backend::download`] and a blocking
/// preprocess wait. All ranks are in one NVLink domain: threads of this process ([`CudaBuffer::threads`]) or processes
/// of this machine ([`CudaBuffer::join`]).
pub struct CudaBuffer {
    pub(crate) rank: Rank,
    pub(crate) world: World,
    pub(crate) device: Arc<Device>,
    pub(crate) stream: Stream,
    pub(crate) arena: Arena,
    /// The control block.
    pub(crate) _control: Part,
    pub(crate) peers: Peers,
    pub(crate) common: Common,
    /// Expert positions by expert, where a table shuffles them.
    pub(crate) position_of: Option<Part>,
    pub(crate) fault: Mapped,
    pub(crate) shape: Mapped,
    pub(crate) columns: Part,
    pub(crate) partials: Option<(Part, usize)>,
    pub(crate) prob_scratch: Option<(Part, usize)>,
    /// Blocks of a launch, and of preprocessing, at most.
    pub(crate) blocks: u32,
    pub(crate) preprocess_blocks: u32,
    pub(crate) plain_copies: bool,
    /// Tokens of a chunk, at most.
    pub(crate) chunk_tokens: usize,
    /// Tells handles of this buffer from others'.
    pub(crate) id: u64,
    pub(crate) step: u64,
    pub(crate) failed: Option<Error>,
    pub(crate) domain_bytes: u64,
    pub(crate) preprocess_bytes: u64,
}

impl std::fmt::Debug for CudaBuffer {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("CudaBuffer")
            .field("rank", &self.rank)
            .field("world", &self.world.topology)
            .field("gpu", &self.device.ordinal)
            .field("blocks", &self.blocks)
            .field("step", &self.step)
            .field("failed", &self.failed)
            .finish_non_exhaustive()
    }
}

/// A rank's own memory before it knows its peers.
pub(crate) struct Home {
    pub(crate) rank: Rank,
    pub(crate) device: Arc<Device>,
    pub(crate) stream: Stream,
    pub(crate) arena: Arena,
    pub(crate) control: Part,
}

impl Home {
    pub(crate) fn new(
        world: &World,
        rank: Rank,
        device: Arc<Device>,
        devices: Vec<usize>,
        shared: bool,
        config: &Config,
    ) -> Result<Self> {
        config.check()?;
        // What nearly every program launches, so that no rank's first operators keep its peers waiting for a compiler.
        // Where ranks share a GPU, everything: the driver loads a kernel when no other runs there, and one that waits
        // for a rank that is loading would wait for ever.
        let keys = match shared {
            true => KernelKey::of_world(world.ranks(), device.shared_bytes),
            false => KernelKey::usual(world.ranks(), device.shared_bytes).to_vec(),
        };
        Kernels::get().load_ahead(&device, &keys, config.plain_copies)?;
        let stream = Stream::new(&device)?;
        let arena = Arena::new(&device, devices)?;
        let counts = 2 * world.ranks() * Counts::words(world) * size_of::<u32>();
        let control = arena.alloc(CONTROL_BYTES + counts, false)?;
        stream.zero(control.address(), CONTROL_BYTES + counts)?;
        stream.synchronize()?;
        Ok(Self { rank, device, stream, arena, control })
    }
}

impl CudaBuffer {
    pub(crate) fn assemble(
        world: World,
        config: &Config,
        home: Home,
        peers: Peers,
        ranks_here: usize,
    ) -> Result<Self> {
        let Home { rank, device, stream, arena, control } = home;
        let fault = Mapped::new(&device, FAULT_WORDS)?;
        let local_experts = world.placement.local_experts(rank);
        let shape = Mapped::new(&device, shape_words(local_experts))?;
        let position_of = if world.placement.is_in_order() {
            None
        } else {
            let positions: Vec<u32> =
                (0..world.experts() as u32).map(|expert| world.placement.position_of(expert)).collect();
            let part = arena.alloc(4 * positions.len(), false)?;
            stream.upload(bytemuck::cast_slice(&positions), part.address())?;
            Some(part)
        };
        let columns = world.experts() + 2 * world.ranks() + 2;
        let columns = arena.alloc(4 * columns * PREPROCESS_BLOCKS as usize, false)?;
        // Ranks wait for each other inside kernels, so the blocks of all ranks of a GPU must run at once.
        let most = (device.multiprocessors as usize / ranks_here) as u32;
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
        let wanted = if config.sms == 0 { DEFAULT_SMS } else { config.sms as u32 };
        let timeout_ns = config.timeout.as_nanos().min(u128::from(u64::MAX)) as u64;
        let common = peers.common(&world, rank, timeout_ns, fault.address());
        static NEXT_ID: AtomicU64 = AtomicU64::new(0);
        stream.synchronize()?;
        Ok(Self {
            rank,
            world,
            stream,
            arena,
            _control: control,
            peers,
            common,
            position_of,
            fault,
            shape,
            columns,
            partials: None,
            prob_scratch: None,
            blocks: wanted.clamp(FEWEST_BLOCKS, most),
            preprocess_blocks: PREPROCESS_BLOCKS.min(most),
            plain_copies: config.plain_copies,
            chunk_tokens: config.chunk_tokens,
            device,
            id: NEXT_ID.fetch_add(1, Relaxed),
            step: 0,
            failed: None,
            domain_bytes: 0,
            preprocess_bytes: 0,
        })
    }

    /// SMs that dispatch and combine run on.
    pub fn sms(&self) -> u32 {
        self.blocks
    }

    /// Bytes of registered memory that this rank holds now.
    pub fn registered_bytes(&self) -> usize {
        self.arena.registered_bytes()
    }

    /// Puts the operators that follow into the caller's stream, after all that was put into the one before. A stream
    /// that captures a CUDA graph is not made to wait: the capture's own rules order it.
    ///
    /// # Errors
    /// [`EnvironmentError`] when the driver refuses.
    ///
    /// # Safety
    /// `stream` is a `CUstream` of the buffer's GPU that lives until the buffer has another one.
    pub unsafe fn set_stream(&mut self, stream: *mut std::ffi::c_void) -> Result<()> {
        if self.stream.raw() == stream.cast() {
            return Ok(());
        }
        let next = Stream::borrowed(&self.device, stream.cast());
        if !next.is_capturing()? && !self.stream.is_capturing()? {
            next.wait(&self.mark()?)?;
        }
        self.stream = next;
        Ok(())
    }

    /// Looks whether the stream captures a CUDA graph: memory that is handed out then stays with the buffer for good,
    /// since replays write to it.
    pub(crate) fn notice_capture(&self) -> Result<bool> {
        let captured = self.stream.is_capturing()?;
        self.arena.set_captured(captured);
        Ok(captured)
    }

    /// Fills memory with zeros, in the stream's order.
    ///
    /// # Errors
    /// [`EnvironmentError`] when the driver refuses.
    pub fn clear(&mut self, memory: &mut CudaMemory) -> Result<()> {
        self.stream.zero(memory.address(), memory.len())
    }

    /// The stream that operators go into.
    pub fn stream(&self) -> &Stream {
        &self.stream
    }

    /// An event after everything that was put into the stream so far.
    ///
    /// # Errors
    /// [`EnvironmentError`] when the driver refuses.
    pub fn mark(&self) -> Result<crate::Event> {
        let event = crate::Event::new(&self.device)?;
        event.record(&self.stream)?;
        Ok(event)
    }

    pub(crate) fn kernel(&self, key: KernelKey) -> Result<Arc<Kernel>> {
        Kernels::get().load(&self.device, key, self.plain_copies)
    }

    /// The error that a kernel has reported, or an earlier one.
    pub(crate) fn check_usable(&mut self) -> Result<()> {
        if self.failed.is_none() {
            self.failed = fault::read(&self.fault, self.rank, self.world.experts());
        }
        self.failed.clone().map_or(Ok(()), Err)
    }

    pub(crate) fn facts<'a>(world: &'a World, rank: Rank, handle: &CudaHandle) -> HandleFacts<'a> {
        let known = handle.shape.get();
        let bound = handle.capacity.unwrap_or(0);
        HandleFacts {
            world,
            rank,
            mode: handle.mode,
            tokens: handle.sizes.tokens,
            allocated_rows: known.map_or(bound, ReceiveShape::allocated_rows),
            rows: known.map_or(bound, |shape| shape.rows),
        }
    }

    /// What all parameters of the next operator share. Its `signature` is equal on all ranks that call the same.
    pub(crate) fn enter(&mut self, operator: Operator, same: &[u64]) -> Common {
        self.step += 1;
        self.arena.set_step(self.step);
        let words = std::iter::once(operator as u64).chain(same.iter().copied());
        Common { signature: signature(words), operation: operator as u32, ..self.common }
    }

    /// Takes over what the kernel has found out about a handle.
    pub(crate) fn learn(&self, handle: &CudaHandle, words: &[u32]) {
        handle.remote_rows.set(words[3 * self.world.placement.local_experts(self.rank) + 2]);
        handle.shape.get_or_init(|| self.shape_from(handle.mode, handle.capacity, words));
    }

    fn shape_from(&self, mode: DispatchMode, capacity: Option<usize>, words: &[u32]) -> ReceiveShape {
        let experts = self.world.placement.local_experts(self.rank);
        let column = |at: usize| match mode {
            DispatchMode::Plain => Vec::new(),
            DispatchMode::Permuted { .. } => words[at * experts..(at + 1) * experts].to_vec(),
        };
        ReceiveShape {
            mode,
            rows: words[3 * experts] as usize,
            wanted_rows: words[3 * experts + 1] as usize,
            tokens_per_expert: column(2),
            kept_per_expert: column(1),
            first_row: column(0),
            capacity,
        }
    }

    /// Preprocessing of a routing that lies on this rank's GPU: one launch. With a capacity nothing waits, and errors
    /// of the routing come out of a later [`ep::Backend::synchronize`]. The kernel itself writes what `report` asks for.
    ///
    /// # Errors
    /// As [`ep::Backend::preprocess`].
    pub fn preprocess_on_device(
        &mut self,
        routing: &DeviceRouting<'_>,
        mode: DispatchMode,
        capacity: Option<usize>,
        report: DeviceReport<'_>,
    ) -> Result<CudaHandle> {
        self.check_usable()?;
        if self.notice_capture()? && capacity.is_none() {
            return Err(CallerError::Config {
                key: "capacity",
                value: "none".into(),
                problem:
                    "preprocess waits for the counts then, which cannot be captured in a CUDA graph: give one"
                        .into(),
            }
            .into());
        }
        let bound = check_capacity(self.rank, mode, capacity)?.unwrap_or(NONE);
        routing.check(self.world.experts())?;
        let (tokens, copies) = (routing.tokens(), routing.most_copies(self.world.experts()));
        if copies + tokens >= 1 << 30 || tokens.saturating_mul(self.world.experts()) > u32::MAX as usize {
            return Err(CallerError::TooManyRows { rank: self.rank, rows: copies as u64 }.into());
        }
        let ranks = self.world.ranks();
        let local_experts = self.world.placement.local_experts(self.rank);
        let sizes = Sizes::new(tokens, copies, ranks, local_experts, self.chunk_tokens);
        report.check(local_experts)?;
        let permuted = matches!(mode, DispatchMode::Permuted { .. });
        let kernel = self.kernel(KernelKey::Preprocess)?;
        let most_blocks = self.preprocess_blocks as usize;
        let (tile, shared_bytes) = tuning::preprocess_tile(
            tokens,
            most_blocks,
            self.world.experts(),
            ranks,
            kernel.shared_bytes()?,
        )?;
        let (memory, view) = sizes.allocate(&self.arena, permuted)?;

        let pad = if permuted { mode.pad_multiple() as u32 } else { 0 };
        let common = self.enter(Operator::Preprocess, &[u64::from(pad)]);
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
        report.fill(&mut params);
        let blocks = (tokens.div_ceil(tile as usize) as u32).clamp(1, self.preprocess_blocks);
        // SAFETY: the kernel's own parameters; what they name is owned by the handle and the buffer, or by the caller
        // until the stream has passed.
        unsafe { kernel.launch(&self.stream, blocks, 1024, shared_bytes, &params) }?;
        self.preprocess_bytes += ((ranks - 1) * Counts::words(&self.world) * 4) as u64;

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
            _memory: memory,
        };
        if capacity.is_none() {
            self.synchronize()?;
            let words: Vec<u32> = (0..sizes.shape_words()).map(|at| self.shape.read(at)).collect();
            self.learn(&handle, &words);
        }
        Ok(handle)
    }

    /// Tells all peers that this rank takes part in no further operator.
    pub(crate) fn say_left(&self) {
        let word = LEFT_OFFSET + 4 * self.rank.index();
        for &control in &self.peers.control {
            // A peer that is gone too need not know.
            let _ = self.stream.upload(&LEFT.to_le_bytes(), control + word as DeviceAddress);
        }
        let _ = self.stream.synchronize();
    }

    /// Registered memory in place of an output that peers cannot reach.
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
            // Rows past the last segment stay as they were.
            self.stream.copy(memory.address(), part.address(), bytes)?;
        }
        Ok(Some(part))
    }

    /// Scratch memory of at least this size, kept from call to call.
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

/// A number that is equal for equal words (FNV-1a).
fn signature(words: impl Iterator<Item = u64>) -> u32 {
    words
        .flat_map(u64::to_le_bytes)
        .fold(0x811C_9DC5, |hash, byte| (hash ^ u32::from(byte)).wrapping_mul(0x0100_0193))
}

pub(crate) fn scale_code(format: TokenFormat) -> u32 {
    match format.scales() {
        None => 0,
        Some(ScaleFormat::F32Per128) => 1,
        Some(ScaleFormat::Ue8m0Per128) => 2,
        Some(ScaleFormat::Ue8m0Per32) => 3,
        Some(_) => unreachable!("all formats are above"),
    }
}

pub(crate) fn address(memory: Option<&CudaMemory>) -> DeviceAddress {
    memory.map_or(0, CudaMemory::address)
}
