//! The operators' interface ([`Backend`]) with its argument types.
//!
//! All matrices are row-major and contiguous, except that the probabilities of combine may have a stride
//! ([`CombineInput::prob_stride`]). Their sizes are checked in bytes: memory may be longer than needed.
//!
//! Arguments of operators are made by constructors and setters, and may get further fields. The enums [`DispatchMode`],
//! [`Element`], [`TokenFormat`] and [`Probs`] are exhaustive: a new variant needs code in every backend, and the
//! compiler names the places.

mod arguments;
mod format;

use std::borrow::Cow;
use std::num::NonZeroU32;
use std::ops::Range;
use std::time::Duration;

use serde::Serialize;

pub use arguments::{CombineInput, CombineOutput, DispatchInput, DispatchOutput, Probs};
pub use format::{Element, MAX_ROW_BYTES, TokenFormat, check_row_bytes};

use crate::config::Config;
use crate::device::{DeviceReport, DeviceRouting};
use crate::error::{CallerError, Result};
use crate::join::Rendezvous;
use crate::layout::ReceiveShape;
use crate::routing::Routing;
use crate::size::Size;
use crate::topology::{Rank, World};

/// How dispatch arranges the rows that a rank receives. Every rank of a world uses the same mode.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub enum DispatchMode {
    /// One row per distinct token that chose an expert of the rank. Rows are ordered by (source rank, token).
    Plain,
    /// One row per (token, local expert). Rows are grouped by local expert and ordered by (source rank, token) within
    /// a group. Zero rows pad each group.
    Permuted {
        /// Each group is padded to a multiple of this many rows.
        pad_multiple: NonZeroU32,
    },
}

impl DispatchMode {
    /// The permuted mode, with groups padded to a multiple of `pad_multiple` rows.
    ///
    /// # Errors
    /// [`CallerError::Config`] when `pad_multiple` is 0 or does not fit in 32 bits.
    pub fn permuted(pad_multiple: usize) -> Result<Self> {
        match u32::try_from(pad_multiple).ok().and_then(NonZeroU32::new) {
            Some(pad_multiple) => Ok(Self::Permuted { pad_multiple }),
            None => Err(CallerError::Config {
                key: "pad_multiple",
                value: pad_multiple.to_string(),
                problem: "must be at least 1 and fit 32 bits".into(),
            }
            .into()),
        }
    }

    /// Each group of rows is padded to a multiple of this many rows; 1 in plain mode.
    pub fn pad_multiple(self) -> usize {
        match self {
            Self::Plain => 1,
            Self::Permuted { pad_multiple } => pad_multiple.get() as usize,
        }
    }
}

/// Bytes moved and time waited by a rank's operators since its buffer was made. To measure one operator, subtract two
/// readings.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq, Serialize)]
#[non_exhaustive]
pub struct Traffic {
    /// Bytes that this rank wrote to or read from other ranks of its NVLink domain.
    pub domain_bytes: u64,
    /// Bytes that this rank handed to the transport, for ranks of other domains.
    pub transport_bytes: u64,
    /// Messages that this rank handed to the transport.
    pub transport_messages: u64,
    /// Bytes of counts that this rank received in preprocess.
    pub preprocess_bytes: u64,
    /// Time that a worker of this rank has waited inside operators: the mean over its workers.
    pub waited: Duration,
}

/// The sizes of a handle, which the arguments of dispatch and combine must fit. Always available without waiting.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct HandleShape {
    /// The dispatch mode.
    pub mode: DispatchMode,
    /// Tokens of this rank: rows of dispatch's input and of combine's output.
    pub tokens: usize,
    /// Rows of dispatch's output: the capacity if one was given, else the rows that this rank receives.
    pub rows: usize,
    /// The capacity that preprocess was given, rows.
    pub capacity: Option<usize>,
    /// Rows that this rank receives, at most `rows`; dispatch leaves the rows after them unchanged. `None` while
    /// only the device knows the number.
    pub received_rows: Option<usize>,
}

/// One rank's end of a communicator, also called its *buffer*: the operators, and what their callers need.
///
/// [`preprocess`](Self::preprocess), [`dispatch`](Self::dispatch) and [`combine`](Self::combine) are collective: every
/// rank of the world calls the same operators in the same order, with the same `hidden`, element types and mode. The
/// number of tokens and the capacity may differ from rank to rank. The caller owns all memory. Operators run in the
/// order of the calls; the caller may read their results after [`synchronize`](Self::synchronize).
///
/// `docs/semantics.md` is the contract of the operators, and [`oracle`](crate::oracle) is the same contract as code.
///
/// The methods are in four groups:
///
/// - making the buffers of a world: [`threads`](Self::threads), [`join`](Self::join);
/// - memory: [`alloc`](Self::alloc), [`upload`](Self::upload), [`download`](Self::download), and [`read`](Self::read),
///   [`fill`](Self::fill), [`clear`](Self::clear) which a backend whose memory is host memory implements without a copy;
/// - the operators: [`preprocess`](Self::preprocess), [`preprocess_on_device`](Self::preprocess_on_device),
///   [`dispatch`](Self::dispatch), [`combine`](Self::combine), [`synchronize`](Self::synchronize);
/// - facts about the rank, a handle, and the bytes moved and registered.
///
/// Streams, events and memory that a caller has allocated are in the crates of the backends: their use needs unsafe
/// code.
///
/// # Examples
///
/// A program that runs on every backend:
///
/// ```
/// use ep::{Backend, BackendExt, CombineInput, Config, DispatchInput, DispatchMode, Result, Routing, World};
///
/// fn first_rank<B: Backend>(world: &World, config: &Config) -> Result<()> {
///     let mut buffer = B::threads(world, config)?.remove(0);
///     let routing = Routing::from_topk(buffer.rank(), world.experts(), 1, &[0], &[1.0])?;
///     let handle = buffer.preprocess(&routing, DispatchMode::Plain, None)?;
///     let mut tokens = buffer.alloc(2 * 64)?;
///     buffer.fill(&mut tokens, 2 * 64, &mut |bytes| bytes.fill(0))?;
///     let received = buffer.dispatch_new(&handle, DispatchInput::new(&tokens, 64))?;
///     let combined = buffer.combine_new(&handle, CombineInput::new(&received.tokens, 64))?;
///     assert!(buffer.read(&combined.tokens, 2 * 64)?.iter().all(|&byte| byte == 0));
///     Ok(())
/// }
/// ```
pub trait Backend {
    /// Memory that operators read and write: heap memory, shared memory, or a device allocation.
    type Memory;
    /// The result of [`preprocess`](Self::preprocess), reusable for any number of dispatches and combines.
    type Handle;

    /// Makes a world whose ranks are threads of this process. Returns one buffer per rank, by rank; move each one to
    /// its own thread.
    ///
    /// # Errors
    /// - [`CallerError::Config`], [`CallerError::TooLarge`] for settings that are out of range or do not fit the world;
    ///   [`CallerError::Topology`] for a world that the backend does not support.
    /// - [`EnvironmentError`](crate::EnvironmentError) when the system lacks memory, threads, or a usable device.
    fn threads(world: &World, config: &Config) -> Result<Vec<Self>>
    where
        Self: Sized;

    /// Makes this process one rank of a world whose ranks are processes: the rank of `rendezvous`. Collective.
    ///
    /// # Errors
    /// Those of [`threads`](Self::threads); also [`CallerError`] when the worlds or settings of the ranks differ, and
    /// [`PeerError`](crate::PeerError) that names a rank which does not join, dies or fails.
    fn join(world: &World, rendezvous: &mut dyn Rendezvous, config: &Config) -> Result<Self>
    where
        Self: Sized;

    /// This rank.
    fn rank(&self) -> Rank;

    /// All ranks and experts.
    fn world(&self) -> &World;

    /// Allocates at least `bytes` bytes, of the kind that operators use without a staging copy.
    ///
    /// Only this buffer accepts the memory. Every other buffer rejects it, including the buffers of other ranks.
    ///
    /// # Errors
    /// - [`CallerError::TooLarge`] for a size beyond the address space.
    /// - [`EnvironmentError`](crate::EnvironmentError) when there is not enough memory; the error says how much there is.
    /// - [`PeerError`](crate::PeerError) when a peer that is another process does not accept the memory.
    /// - The error that made the buffer unusable, if one did.
    fn alloc(&mut self, bytes: usize) -> Result<Self::Memory>;

    /// Copies bytes from the host to the start of `memory`.
    ///
    /// # Errors
    /// [`CallerError::Shape`] when `memory` is too small; [`CallerError::Memory`] when another buffer made it.
    fn upload(&mut self, bytes: &[u8], memory: &mut Self::Memory) -> Result<()>;

    /// Copies bytes from the start of `memory` to the host.
    ///
    /// # Errors
    /// [`CallerError::Shape`] when `memory` is too small; [`CallerError::Memory`] when another buffer made it.
    fn download(&mut self, memory: &Self::Memory, bytes: &mut [u8]) -> Result<()>;

    /// The first `len` bytes of `memory`: borrowed if it is host memory, else a copy. Waits for earlier operators.
    ///
    /// # Errors
    /// Those of [`download`](Self::download).
    fn read<'m>(&mut self, memory: &'m Self::Memory, len: usize) -> Result<Cow<'m, [u8]>> {
        let mut bytes = vec![0; len];
        self.download(memory, &mut bytes)?;
        Ok(Cow::Owned(bytes))
    }

    /// Replaces the first `len` bytes of `memory`. `write` must set all bytes of its slice, whose initial content is
    /// unspecified. If `memory` is host memory, the slice is part of `memory` itself.
    ///
    /// # Errors
    /// Those of [`upload`](Self::upload).
    fn fill(
        &mut self,
        memory: &mut Self::Memory,
        len: usize,
        write: &mut dyn FnMut(&mut [u8]),
    ) -> Result<()> {
        let mut bytes = vec![0; len];
        write(&mut bytes);
        self.upload(&bytes, memory)
    }

    /// Zeroes these bytes of `memory`, after all earlier operators and before all later ones. Does not wait.
    ///
    /// # Errors
    /// Those of [`upload`](Self::upload).
    fn clear(&mut self, memory: &mut Self::Memory, bytes: Range<usize>) -> Result<()>;

    /// Bytes of registered memory that this rank holds, free parts included.
    fn registered_bytes(&self) -> usize;

    /// Turns this rank's routing into a handle. All ranks exchange the counts of their routings.
    ///
    /// `capacity` is the most rows that this rank receives, a multiple of the mode's pad multiple; rows at or beyond it
    /// are dropped. With `None` the rank receives all rows.
    ///
    /// # Errors
    /// [`CallerError`] for a routing or capacity that does not fit the world, or arguments that differ between ranks;
    /// [`PeerError`](crate::PeerError) when another rank died, left, failed or stalled.
    fn preprocess(
        &mut self,
        routing: &Routing,
        mode: DispatchMode,
        capacity: Option<usize>,
    ) -> Result<Self::Handle>;

    /// Like [`preprocess`](Self::preprocess), for a routing in this buffer's memory. Writes the outputs of `report`.
    ///
    /// On a GPU, a call with a capacity does not wait for the GPU: errors of the routing are returned by a later
    /// [`synchronize`](Self::synchronize). Without a capacity, the call waits for the counts; a CUDA graph
    /// cannot capture such a call.
    ///
    /// # Errors
    /// Those of [`preprocess`](Self::preprocess); also [`CallerError::Shape`] and [`CallerError::Memory`] for the memory of
    /// the routing and of the report.
    fn preprocess_on_device(
        &mut self,
        routing: &DeviceRouting<'_, Self::Memory>,
        mode: DispatchMode,
        capacity: Option<usize>,
        report: DeviceReport<'_, Self::Memory>,
    ) -> Result<Self::Handle> {
        let routing = routing.read(self)?;
        let handle = self.preprocess(&routing, mode, capacity)?;
        let shape = self.receive_shape(&handle)?;
        report.write(self, &shape)?;
        Ok(handle)
    }

    /// The sizes of a handle. Does not wait.
    fn handle_shape(&self, handle: &Self::Handle) -> HandleShape;

    /// The shape of the dispatch output of this rank. May wait for earlier operators.
    ///
    /// # Errors
    /// Returns the error of an earlier asynchronous operator, if one failed.
    fn receive_shape(&mut self, handle: &Self::Handle) -> Result<ReceiveShape>;

    /// Sends each token of this rank to the ranks that hold its experts, and receives the tokens for this rank's
    /// experts.
    ///
    /// # Errors
    /// [`CallerError`] for sizes that do not fit, memory or a handle of another buffer, or arguments that differ
    /// between ranks; [`EnvironmentError`](crate::EnvironmentError) when there is too little memory to stage arguments that
    /// are not registered; [`PeerError`](crate::PeerError) when another rank died, left, failed or stalled.
    fn dispatch(
        &mut self,
        handle: &Self::Handle,
        input: DispatchInput<'_, Self::Memory>,
        output: DispatchOutput<'_, Self::Memory>,
    ) -> Result<()>;

    /// Sums, for each token of this rank, the output rows of the token's experts.
    ///
    /// Order and rounding are part of the contract. Sums use f32 accumulators that start at +0 and run over local
    /// experts within a rank, over local ranks within a domain, then over domains. A sum that crosses from rank to rank
    /// is rounded to [`CombineInput::wire`], and the result to [`CombineInput::element`]. Dropped rows count as zero.
    ///
    /// # Errors
    /// Those of [`dispatch`](Self::dispatch); also [`CallerError::Handle`] when the handle was never dispatched.
    fn combine(
        &mut self,
        handle: &Self::Handle,
        input: CombineInput<'_, Self::Memory>,
        output: CombineOutput<'_, Self::Memory>,
    ) -> Result<()>;

    /// Waits until all operators called so far are complete.
    ///
    /// # Errors
    /// The first error of any of these operators.
    fn synchronize(&mut self) -> Result<()>;

    /// Bytes moved and time waited since the buffer was made.
    fn traffic(&self) -> Traffic;
}

/// The output of [`BackendExt::dispatch_new`]. `rows` in the shapes is [`ReceiveShape::allocated_rows`].
#[derive(Debug)]
#[non_exhaustive]
pub struct Dispatched<M> {
    /// `[rows, hidden]`.
    pub tokens: M,
    /// `[rows, scales per row]`; with the FP8 formats.
    pub scales: Option<M>,
    /// f32 `[rows]` (permuted mode) or `[rows, local experts]` (plain mode); `None` with [`Probs::Skip`].
    pub probs: Option<M>,
    /// `[rows, local experts]` bytes, 1 where the row's token chose the expert; in plain mode.
    pub local_experts: Option<M>,
}

/// The output of [`BackendExt::combine_new`].
#[derive(Debug)]
#[non_exhaustive]
pub struct Combined<M> {
    /// `[tokens, hidden]`.
    pub tokens: M,
    /// f32 `[tokens, experts]`; when [`CombineInput::probs`] was given.
    pub probs: Option<M>,
}

/// Operators that allocate their outputs. Allocation is slow: a training loop should keep its memory and call the
/// operators of [`Backend`].
pub trait BackendExt: Backend {
    /// Calls [`Backend::dispatch`] with new memory of the right size.
    ///
    /// # Errors
    /// Those of [`Backend::alloc`] and [`Backend::dispatch`].
    fn dispatch_new(
        &mut self,
        handle: &Self::Handle,
        input: DispatchInput<'_, Self::Memory>,
    ) -> Result<Dispatched<Self::Memory>> {
        let shape = self.handle_shape(handle);
        let experts = self.world().placement().local_experts(self.rank());
        let rows = Size::new(shape.rows);
        let (plain, cells) = match shape.mode {
            DispatchMode::Plain => (true, rows * experts),
            DispatchMode::Permuted { .. } => (false, rows),
        };
        let DispatchInput { hidden, format, .. } = input;
        check_row_bytes(hidden, format.output_row_bytes(hidden))?;
        let scale_bytes = format.scale_row_bytes(hidden);
        let mut alloc = |what, size: Size| self.alloc(size.bytes(what)?);
        let mut dispatched = Dispatched {
            tokens: alloc("dispatch output tokens", rows * format.output_row_bytes(hidden))?,
            scales: match scale_bytes {
                0 => None,
                _ => Some(alloc("dispatch output scales", rows * scale_bytes)?),
            },
            probs: match input.probs {
                Probs::Skip => None,
                _ => Some(alloc("dispatch output probs", cells * 4)?),
            },
            local_experts: if plain { Some(alloc("dispatch output local_experts", cells)?) } else { None },
        };
        let output = DispatchOutput::new(&mut dispatched.tokens)
            .scales(dispatched.scales.as_mut())
            .probs(dispatched.probs.as_mut())
            .local_experts(dispatched.local_experts.as_mut());
        self.dispatch(handle, input, output)?;
        Ok(dispatched)
    }

    /// Calls [`Backend::combine`] with new memory of the right size.
    ///
    /// # Errors
    /// Those of [`Backend::alloc`] and [`Backend::combine`].
    fn combine_new(
        &mut self,
        handle: &Self::Handle,
        input: CombineInput<'_, Self::Memory>,
    ) -> Result<Combined<Self::Memory>> {
        let (experts, tokens) = (self.world().experts(), self.handle_shape(handle).tokens);
        let row_bytes = input.element.row_bytes(input.hidden);
        check_row_bytes(input.hidden, row_bytes)?;
        let mut alloc = |what, row_bytes: usize| self.alloc((Size::new(tokens) * row_bytes).bytes(what)?);
        let mut combined = Combined {
            tokens: alloc("combine output", row_bytes)?,
            probs: match input.probs {
                Some(_) => Some(alloc("combine output probs", 4 * experts)?),
                None => None,
            },
        };
        let output = CombineOutput::new(&mut combined.tokens).probs(combined.probs.as_mut());
        self.combine(handle, input, output)?;
        Ok(combined)
    }
}

impl<B: Backend> BackendExt for B {}
