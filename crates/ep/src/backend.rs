//! The two seams of the library: [`Backend`] moves tokens between the ranks of a world, [`Transport`] moves bytes
//! between NVLink domains for it.

use std::time::Duration;

use serde::Serialize;

use crate::error::{CallerError, Result};
use crate::layout::ReceiveShape;
use crate::numeric::ScaleFormat;
use crate::routing::Routing;
use crate::topology::{Rank, World};

/// How dispatch arranges the rows that a rank receives.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub enum DispatchMode {
    /// One row per distinct token that has an expert on the rank, ordered by (source rank, token).
    Plain,
    /// One row per (token, local expert): grouped by local expert, in a group by (source rank, token), each group
    /// padded with zero rows.
    Permuted {
        /// Rows to a multiple of which every group is padded; at least 1.
        pad_multiple: u32,
    },
}

impl DispatchMode {
    /// The permuted mode.
    ///
    /// # Errors
    /// [`CallerError::Config`] when `pad_multiple` is 0 or does not fit 32 bits.
    pub fn permuted(pad_multiple: usize) -> Result<Self> {
        match u32::try_from(pad_multiple) {
            Ok(pad_multiple) if pad_multiple > 0 => Ok(Self::Permuted { pad_multiple }),
            _ => Err(CallerError::Config {
                key: "pad_multiple",
                value: pad_multiple.to_string(),
                problem: "must be at least 1 and fit 32 bits".into(),
            }
            .into()),
        }
    }

    /// Rows to a multiple of which groups are padded; 1 in plain mode.
    pub fn pad_multiple(self) -> usize {
        match self {
            Self::Plain => 1,
            Self::Permuted { pad_multiple } => pad_multiple as usize,
        }
    }
}

/// Element type of expert outputs and combined tokens, or of partial sums on a link.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub enum Element {
    /// bfloat16.
    Bf16,
    /// IEEE single precision.
    F32,
}

impl Element {
    /// Bytes of one element.
    pub fn bytes(self) -> usize {
        match self {
            Self::Bf16 => 2,
            Self::F32 => 4,
        }
    }
}

/// What dispatch takes and delivers.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub enum TokenFormat {
    /// bf16 in, bf16 out.
    Bf16,
    /// FP8 e4m3 with scales in, the same out.
    Fp8(ScaleFormat),
    /// bf16 in; quantised once at the source; FP8 e4m3 with scales out.
    QuantizeFp8(ScaleFormat),
}

impl TokenFormat {
    /// Bytes of one input row.
    pub fn input_row_bytes(self, hidden: usize) -> usize {
        match self {
            Self::Bf16 | Self::QuantizeFp8(_) => 2 * hidden,
            Self::Fp8(_) => hidden,
        }
    }

    /// Bytes of one output row; what crosses the links, beside the scales.
    pub fn output_row_bytes(self, hidden: usize) -> usize {
        match self {
            Self::Bf16 => 2 * hidden,
            Self::Fp8(_) | Self::QuantizeFp8(_) => hidden,
        }
    }

    /// Format of the scales of an output row.
    pub fn scales(self) -> Option<ScaleFormat> {
        match self {
            Self::Bf16 => None,
            Self::Fp8(format) | Self::QuantizeFp8(format) => Some(format),
        }
    }

    /// Bytes of the scales that come with one input row; 0 without scales.
    pub fn input_scale_row_bytes(self, hidden: usize) -> usize {
        if let Self::Fp8(format) = self { format.bytes_per_row(hidden) } else { 0 }
    }

    /// Bytes of the scales of one row; 0 without scales.
    pub fn scale_row_bytes(self, hidden: usize) -> usize {
        self.scales().map_or(0, |format| format.bytes_per_row(hidden))
    }
}

/// Checks that rows of this width can be carried: a multiple of 16 bytes, and not empty.
///
/// # Errors
/// [`CallerError::Hidden`].
pub fn check_row_bytes(hidden: usize, bytes: usize) -> Result<()> {
    if bytes == 0 || !bytes.is_multiple_of(16) {
        return Err(CallerError::Hidden { hidden, bytes }.into());
    }
    Ok(())
}

/// Where the probabilities come from that travel with dispatched tokens.
#[derive(Debug)]
pub enum Probs<'a, M> {
    /// None travel.
    Skip,
    /// The weights of the routing that the handle was made from.
    Routing,
    /// A dense f32 matrix `[tokens, experts]`: the gradient path.
    Dense(&'a M),
}

/// What a rank gives to dispatch.
#[derive(Debug)]
pub struct DispatchInput<'a, M> {
    /// Width of a token, elements.
    pub hidden: usize,
    /// Types of input and output.
    pub format: TokenFormat,
    /// `[tokens, hidden]`, row-major.
    pub tokens: &'a M,
    /// `[tokens, scales per row]`; with [`TokenFormat::Fp8`] only.
    pub scales: Option<&'a M>,
    /// Probabilities that travel along.
    pub probs: Probs<'a, M>,
}

impl<'a, M> DispatchInput<'a, M> {
    /// bf16 tokens with the routing's weights.
    pub fn bf16(hidden: usize, tokens: &'a M) -> Self {
        Self { hidden, format: TokenFormat::Bf16, tokens, scales: None, probs: Probs::Routing }
    }
}

/// Where dispatch writes what a rank receives. Rows as [`ReceiveShape::allocated_rows`] says.
#[derive(Debug)]
pub struct DispatchOutput<'a, M> {
    /// `[rows, hidden]`, row-major. Rows after the last segment of a capacity-bound output stay as they were.
    pub tokens: &'a mut M,
    /// `[rows, scales per row]`; with the FP8 formats.
    pub scales: Option<&'a mut M>,
    /// f32: `[rows]` (permuted) or `[rows, local experts]` (plain); needed unless [`Probs::Skip`].
    pub probs: Option<&'a mut M>,
    /// `[rows, local experts]` bytes, 1 where the row's token chose the expert; plain mode only, optional.
    pub local_experts: Option<&'a mut M>,
}

/// What a rank gives to combine.
#[derive(Debug)]
pub struct CombineInput<'a, M> {
    /// Width of a token, elements.
    pub hidden: usize,
    /// Type of `rows` and of the result.
    pub element: Element,
    /// Type of partial sums where they cross from rank to rank. The contract's default is [`Element::Bf16`].
    pub wire: Element,
    /// The experts' outputs in the rows where dispatch put their inputs: `[rows, hidden]`.
    pub rows: &'a M,
    /// f32 per dispatched probability, laid out as dispatch delivers them: gathered back to `[tokens, experts]`.
    pub probs: Option<&'a M>,
}

impl<'a, M> CombineInput<'a, M> {
    /// bf16 rows, bf16 on the wire, no probabilities.
    pub fn bf16(hidden: usize, rows: &'a M) -> Self {
        Self { hidden, element: Element::Bf16, wire: Element::Bf16, rows, probs: None }
    }
}

/// Where combine writes.
#[derive(Debug)]
pub struct CombineOutput<'a, M> {
    /// `[tokens, hidden]` of [`CombineInput::element`].
    pub tokens: &'a mut M,
    /// f32 `[tokens, experts]`, zero where not chosen; with [`CombineInput::probs`].
    pub probs: Option<&'a mut M>,
}

/// Bytes and times of a rank's operators so far; differences of two readings belong to what ran between them.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq, Serialize)]
pub struct Traffic {
    /// Bytes that this rank wrote to, or read from, other ranks of its NVLink domain.
    pub domain_bytes: u64,
    /// Bytes that this rank handed to the transport for other domains.
    pub transport_bytes: u64,
    /// Messages that this rank handed to the transport.
    pub transport_messages: u64,
    /// Bytes of counts that this rank received in preprocessing.
    pub preprocess_bytes: u64,
    /// Time in which no worker of this rank could make progress.
    pub waited: Duration,
}

/// One rank's end of a communicator: the operators.
///
/// All operators are collective: every rank of the world calls the same ones in the same order with the same
/// `hidden`, types and mode; token counts and capacities may differ. Memory belongs to the caller. Operators are
/// ordered as called; their results may be read after [`synchronize`](Self::synchronize).
pub trait Backend {
    /// Memory that operators read and write: heap or shared memory, or a device allocation.
    type Memory;
    /// What [`preprocess`](Self::preprocess) found out; good for any number of dispatches and combines.
    type Handle;

    /// This rank.
    fn rank(&self) -> Rank;

    /// All ranks and experts.
    fn world(&self) -> &World;

    /// Memory of at least `bytes` bytes in the kind that needs no staging copy.
    ///
    /// # Errors
    /// [`crate::EnvironmentError`] when there is not enough, with what there is.
    fn alloc(&mut self, bytes: usize) -> Result<Self::Memory>;

    /// Copies bytes from the host to the start of `memory`.
    ///
    /// # Errors
    /// [`CallerError::Shape`] when it is too small.
    fn upload(&mut self, bytes: &[u8], memory: &mut Self::Memory) -> Result<()>;

    /// Copies bytes from the start of `memory` to the host.
    ///
    /// # Errors
    /// [`CallerError::Shape`] when it is too small.
    fn download(&mut self, memory: &Self::Memory, bytes: &mut [u8]) -> Result<()>;

    /// Turns this rank's routing into a handle, exchanging counts with all ranks. `capacity` bounds the rows that
    /// this rank receives; `None` sizes them exactly.
    ///
    /// # Errors
    /// [`CallerError`] for a routing or capacity that does not fit the world; [`crate::PeerError`].
    fn preprocess(
        &mut self,
        routing: &Routing,
        mode: DispatchMode,
        capacity: Option<usize>,
    ) -> Result<Self::Handle>;

    /// The shape of what this rank receives. May synchronise.
    ///
    /// # Errors
    /// As of an earlier asynchronous operator.
    fn receive_shape(&mut self, handle: &Self::Handle) -> Result<ReceiveShape>;

    /// Sends this rank's tokens to their experts' ranks, and receives those for its own.
    ///
    /// # Errors
    /// [`CallerError`] for sizes that do not fit; [`crate::PeerError`].
    fn dispatch(
        &mut self,
        handle: &Self::Handle,
        input: DispatchInput<'_, Self::Memory>,
        output: DispatchOutput<'_, Self::Memory>,
    ) -> Result<()>;

    /// Sums, for each of this rank's tokens, its experts' output rows.
    ///
    /// The order is part of the contract: inside a rank by local expert, inside a domain by local rank, then by
    /// domain; f32 accumulators that start at +0; what crosses from rank to rank is rounded to `wire`; the result is
    /// rounded once more. Dropped rows count as zero.
    ///
    /// # Errors
    /// As [`dispatch`](Self::dispatch).
    fn combine(
        &mut self,
        handle: &Self::Handle,
        input: CombineInput<'_, Self::Memory>,
        output: CombineOutput<'_, Self::Memory>,
    ) -> Result<()>;

    /// Waits until all operators called so far are done.
    ///
    /// # Errors
    /// The first error of any of them.
    fn synchronize(&mut self) -> Result<()>;

    /// Bytes and times so far.
    fn traffic(&self) -> Traffic;
}

/// What a rank received, in memory made for it.
#[derive(Debug)]
pub struct Received<M> {
    /// `[rows, hidden]`.
    pub tokens: M,
    /// `[rows, scales per row]`, with the FP8 formats.
    pub scales: Option<M>,
    /// f32: `[rows]` (permuted) or `[rows, local experts]` (plain), unless skipped.
    pub probs: Option<M>,
    /// `[rows, local experts]` bytes, in plain mode.
    pub local_experts: Option<M>,
}

/// A rank's combined tokens, in memory made for them.
#[derive(Debug)]
pub struct Combined<M> {
    /// `[tokens, hidden]`.
    pub tokens: M,
    /// f32 `[tokens, experts]`, when probabilities were given.
    pub probs: Option<M>,
}

/// Operators that allocate their outputs; in a steady state, keep the memory and use those of [`Backend`].
pub trait BackendExt: Backend {
    /// [`Backend::dispatch`] into new memory of the right size.
    ///
    /// # Errors
    /// As [`Backend::alloc`] and [`Backend::dispatch`].
    fn dispatch_new(
        &mut self,
        handle: &Self::Handle,
        input: DispatchInput<'_, Self::Memory>,
    ) -> Result<Received<Self::Memory>> {
        let shape = self.receive_shape(handle)?;
        let rows = shape.allocated_rows();
        let experts = self.world().placement.local_experts(self.rank());
        let (plain, cells) = match shape.mode {
            DispatchMode::Plain => (true, rows * experts),
            DispatchMode::Permuted { .. } => (false, rows),
        };
        let DispatchInput { hidden, format, .. } = input;
        let scale_bytes = format.scale_row_bytes(hidden);
        let mut received = Received {
            tokens: self.alloc(rows * format.output_row_bytes(hidden))?,
            scales: if scale_bytes > 0 { Some(self.alloc(rows * scale_bytes)?) } else { None },
            probs: if matches!(input.probs, Probs::Skip) { None } else { Some(self.alloc(4 * cells)?) },
            local_experts: if plain { Some(self.alloc(cells)?) } else { None },
        };
        let output = DispatchOutput {
            tokens: &mut received.tokens,
            scales: received.scales.as_mut(),
            probs: received.probs.as_mut(),
            local_experts: received.local_experts.as_mut(),
        };
        self.dispatch(handle, input, output)?;
        Ok(received)
    }

    /// [`Backend::combine`] into new memory for this rank's `tokens` tokens.
    ///
    /// # Errors
    /// As [`Backend::alloc`] and [`Backend::combine`].
    fn combine_new(
        &mut self,
        handle: &Self::Handle,
        tokens: usize,
        input: CombineInput<'_, Self::Memory>,
    ) -> Result<Combined<Self::Memory>> {
        let experts = self.world().experts();
        let mut combined = Combined {
            tokens: self.alloc(tokens * input.hidden * input.element.bytes())?,
            probs: if input.probs.is_some() { Some(self.alloc(4 * tokens * experts)?) } else { None },
        };
        let output = CombineOutput { tokens: &mut combined.tokens, probs: combined.probs.as_mut() };
        self.combine(handle, input, output)?;
        Ok(combined)
    }
}

impl<B: Backend> BackendExt for B {}

/// Whether a put was accepted.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Posted {
    /// It is on its way.
    Yes,
    /// The engine's queue is full: make progress with [`Transport::poll`], then post it again.
    Full,
}

/// A put: bytes of this rank's window to a place in the peer's window.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Put {
    /// Receiving rank; on the same rail.
    pub peer: Rank,
    /// First byte in this rank's window.
    pub source: usize,
    /// First byte in the peer's window.
    pub destination: usize,
    /// Number of bytes; zero sends the signal alone.
    pub len: usize,
    /// Delivered to the peer once the bytes are in its window.
    pub signal: u32,
}

/// Moves bytes along a rail between NVLink domains.
///
/// Every rank registers one window of memory when it makes its engine; puts address windows by offset. The only
/// ordering promised is that a put's signal arrives after its bytes. The source bytes must stay unchanged until
/// the peer is known to have received them, which the layer above learns from the peer's own signals.
pub trait Transport: Send + Sync {
    /// The engine's name, for reports.
    fn name(&self) -> &'static str;

    /// Posts a put.
    ///
    /// # Errors
    /// [`CallerError`] when the put lies outside a window; an environment or peer error from the engine.
    fn put(&self, put: Put) -> Result<Posted>;

    /// The address of `len` bytes at `offset` of a peer's window, where the engine lets this rank write them itself
    /// (both windows are mapped here); a put of length 0 then brings the signal. `None` where the engine carries the
    /// bytes, as a network card does.
    fn lend(&self, peer: Rank, offset: usize, len: usize) -> Option<std::ptr::NonNull<u8>> {
        let _ = (peer, offset, len);
        None
    }

    /// Makes progress, and hands over every signal that has arrived, with its sender.
    ///
    /// # Errors
    /// An environment or peer error from the engine.
    fn poll(&self, on_signal: &mut dyn FnMut(Rank, u32)) -> Result<()>;
}
