//! The operators over tensors, the same for both backends.

use std::ffi::c_void;

use ep::backend::check_row_bytes;
use ep::{
    Backend, CallerError, CombineInput, CombineOutput, DispatchInput, DispatchMode, DispatchOutput, Element,
    Probs, ReceiveShape, Result, ScaleFormat, TokenFormat, WeightGradients, WeightRows, WeightedRows,
};
use pyo3::prelude::*;
use pyo3::types::PyCapsule;

use crate::dlpack::{self, DataType, Device, Shape};
use crate::errors::Failure;
use crate::handle::{Handle, Of};

/// The bytes of a tensor.
#[derive(Debug, Clone, Copy, FromPyObject)]
pub(crate) struct Span(pub(crate) usize, pub(crate) usize);

impl Span {
    /// The elements.
    ///
    /// # Safety
    /// The tensor lives, is aligned for `T`, of which any bytes are valid, and nobody writes to it.
    pub(crate) unsafe fn elements<'a, T>(self) -> &'a [T] {
        if self.1 == 0 {
            return &[];
        }
        // SAFETY: the caller's promise.
        unsafe { std::slice::from_raw_parts(self.0 as *const T, self.1 / size_of::<T>()) }
    }
}

/// The type of elements that are `wide` or not.
pub(crate) fn element(wide: bool) -> Element {
    if wide { Element::F32 } else { Element::Bf16 }
}

/// A rank's routing, as routers leave it.
#[derive(Debug)]
pub(crate) struct RoutingTensors {
    pub(crate) form: Form,
    pub(crate) tokens: usize,
    /// Columns of the routing and of its weights.
    pub(crate) width: usize,
    pub(crate) routing: Span,
    /// f32; `None` = zero.
    pub(crate) weights: Option<Span>,
}

#[derive(Debug, Clone, Copy)]
pub(crate) enum Form {
    /// `[tokens, k]` i32.
    NarrowTopK,
    /// `[tokens, k]` i64.
    WideTopK,
    /// `[tokens, experts]` bytes, with this many set in a row at most.
    Map { most: usize },
}

/// Addresses where preprocessing says what it found; 0 = not wanted. The counts are on the host where preprocessing waits
/// for them, that is without a capacity, else on the tokens' device; the overflow always is there.
#[derive(Debug, Clone, Copy, FromPyObject)]
pub(crate) struct Report {
    /// i64 `[local experts]`, with padding.
    #[pyo3(item(0))]
    pub(crate) tokens_per_expert: usize,
    /// i64 `[local experts]`, without.
    #[pyo3(item(1))]
    pub(crate) kept_per_expert: usize,
    /// i32 `[1]`.
    #[pyo3(item(2))]
    pub(crate) overflow: usize,
}

impl Report {
    /// Writes the counts to the host.
    ///
    /// # Safety
    /// Their addresses are 0, or those of host tensors that have room for them and that nobody else touches.
    pub(crate) unsafe fn write_counts(self, shape: &ReceiveShape) {
        let counts = [&shape.tokens_per_expert, &shape.kept_per_expert];
        for (counts, address) in counts.into_iter().zip([self.tokens_per_expert, self.kept_per_expert]) {
            for (at, &count) in counts.iter().enumerate().filter(|_| address != 0) {
                // SAFETY: the caller's promise.
                unsafe { (address as *mut i64).add(at).write(count.into()) };
            }
        }
    }

    /// Writes the overflow to the host.
    ///
    /// # Safety
    /// As [`write_counts`](Self::write_counts).
    pub(crate) unsafe fn write_overflow(self, shape: &ReceiveShape) {
        if self.overflow != 0 {
            // SAFETY: the caller's promise.
            unsafe { (self.overflow as *mut i32).write(shape.overflow().into()) };
        }
    }
}

/// A backend, as far as tensors go beyond [`Backend`].
pub(crate) trait Tensors: Backend<Memory: Send + Sync + 'static> + WeightRows {
    /// A tensor of the caller as memory.
    ///
    /// # Safety
    /// The tensor lives until the operators that are given this memory are over. Where they write to it, nobody else
    /// touches it; else nobody writes to it.
    unsafe fn borrow(tensor: Span) -> Self::Memory;

    /// Where memory lies.
    fn address(memory: &mut Self::Memory) -> usize;

    /// Bytes that are registered now.
    fn registered(&self) -> usize;

    /// The operators that follow go into this stream of the device; on the host there is none.
    fn use_stream(&mut self, stream: usize) -> Result<()>;

    /// Zeroes the rows that no dispatch with this handle writes to.
    fn clear_rest(
        &mut self,
        handle: &Self::Handle,
        memory: &mut Self::Memory,
        row_bytes: usize,
    ) -> Result<()>;

    /// Preprocesses, and reports. Returns the handle, and how many rows dispatch outputs have.
    fn preprocess_tensors(
        &mut self,
        routing: &RoutingTensors,
        mode: DispatchMode,
        capacity: Option<usize>,
        report: Report,
    ) -> Result<(Self::Handle, usize), Failure>;

    /// A handle of this backend for [`Handle`].
    fn wrap(handle: Self::Handle) -> Of;

    /// Calls `call` with the handle, which must be of this backend.
    fn with_handle<T>(
        handle: &Of,
        call: impl FnOnce(&Self::Handle) -> Result<T, Failure>,
    ) -> Result<T, Failure>;
}

/// What is dispatched.
#[derive(Debug)]
pub(crate) struct DispatchCall {
    pub(crate) rows: usize,
    pub(crate) hidden: usize,
    pub(crate) tokens: Tokens,
    pub(crate) data: Span,
    pub(crate) scales: Option<Span>,
    pub(crate) probs: Given,
    /// Whether the plain mode's map is wanted.
    pub(crate) local_experts: bool,
    /// Whether rows that a capacity leaves unused are zero in the tokens too.
    pub(crate) clear_tokens: bool,
}

/// Types of tokens in and out.
#[derive(Debug, Clone, Copy)]
pub(crate) enum Tokens {
    Bf16,
    /// Rows are moved, not computed with: one of f32 travels as one of bf16 that is twice as wide.
    F32,
    Fp8(ScaleFormat),
    QuantizeFp8(ScaleFormat),
}

impl Tokens {
    fn format(self) -> TokenFormat {
        match self {
            Self::Bf16 | Self::F32 => TokenFormat::Bf16,
            Self::Fp8(scales) => TokenFormat::Fp8(scales),
            Self::QuantizeFp8(scales) => TokenFormat::QuantizeFp8(scales),
        }
    }

    /// Width of a row as it travels.
    fn moved_hidden(self, hidden: usize) -> usize {
        if matches!(self, Self::F32) { 2 * hidden } else { hidden }
    }

    fn delivered(self) -> DataType {
        match self {
            Self::Bf16 => DataType::BF16,
            Self::F32 => DataType::F32,
            Self::Fp8(_) | Self::QuantizeFp8(_) => DataType::U8,
        }
    }
}

/// Probabilities that travel along.
#[derive(Debug, Clone, Copy)]
pub(crate) enum Given {
    Nothing,
    Routing,
    Dense(Span),
}

/// What a rank received: memory that is to become tensors.
pub(crate) struct Delivered<M> {
    tokens: Output<M>,
    scales: Option<Output<M>>,
    probs: Option<Output<M>>,
    local_experts: Option<Output<M>>,
}

pub(crate) struct Output<M> {
    memory: M,
    address: usize,
    row_bytes: usize,
    dtype: DataType,
    shape: Shape,
}

/// The tensors of a dispatch: tokens, scales, probs, local_experts.
pub(crate) type Capsules<'py> = (
    Bound<'py, PyCapsule>,
    Option<Bound<'py, PyCapsule>>,
    Option<Bound<'py, PyCapsule>>,
    Option<Bound<'py, PyCapsule>>,
);

impl<M: Send + 'static> Delivered<M> {
    pub(crate) fn into_capsules(self, py: Python<'_>, device: Device) -> PyResult<Capsules<'_>> {
        let optional = |output: Option<Output<M>>| output.map(|one| one.into_capsule(py, device)).transpose();
        Ok((
            self.tokens.into_capsule(py, device)?,
            optional(self.scales)?,
            optional(self.probs)?,
            optional(self.local_experts)?,
        ))
    }
}

impl<M: Send + 'static> Output<M> {
    fn new<B: Tensors<Memory = M>>(
        backend: &mut B,
        row_bytes: usize,
        dtype: DataType,
        shape: Shape,
    ) -> Result<Self, Failure> {
        let bytes = shape.rows.checked_mul(row_bytes).ok_or_else(|| {
            Failure::Caller(format!(
                "{} rows of {row_bytes} bytes are more than can be addressed",
                shape.rows
            ))
        })?;
        let mut memory = backend.alloc(bytes)?;
        let address = B::address(&mut memory);
        Ok(Self { memory, address, row_bytes, dtype, shape })
    }

    pub(crate) fn into_capsule(self, py: Python<'_>, device: Device) -> PyResult<Bound<'_, PyCapsule>> {
        let data = self.address as *mut c_void;
        // SAFETY: the memory was allocated for this shape, and is this tensor's from now on.
        unsafe { dlpack::capsule(py, self.memory, data, device, self.dtype, self.shape) }
    }
}

/// Preprocesses a routing.
pub(crate) fn preprocess<B: Tensors>(
    backend: &mut B,
    routing: &RoutingTensors,
    mode: DispatchMode,
    capacity: Option<usize>,
    report: Report,
) -> Result<Handle, Failure> {
    let (handle, rows) = backend.preprocess_tensors(routing, mode, capacity, report)?;
    let (tokens, has_capacity) = (routing.tokens, capacity.is_some());
    Ok(Handle { of: B::wrap(handle), mode, tokens, rows, has_capacity })
}

/// Dispatches into new memory.
pub(crate) fn dispatch<B: Tensors>(
    backend: &mut B,
    handle: &Handle,
    call: &DispatchCall,
) -> Result<Delivered<B::Memory>, Failure> {
    check_rows("tokens", handle.tokens, call.rows)?;
    // Here and not where rows that count as bf16 are twice as wide.
    check_row_bytes(
        call.hidden,
        call.tokens.format().output_row_bytes(call.tokens.moved_hidden(call.hidden)),
    )?;
    // SAFETY: the tensors were checked in Python, and live until the stream has passed this call.
    let borrow = |span: Span| unsafe { B::borrow(span) };
    let (data, scales) = (borrow(call.data), call.scales.map(borrow));
    let dense = match call.probs {
        Given::Dense(span) => Some(borrow(span)),
        Given::Nothing | Given::Routing => None,
    };
    let probs = match (&dense, call.probs) {
        (Some(dense), _) => Probs::Dense(dense),
        (None, Given::Routing) => Probs::Routing,
        (None, _) => Probs::Skip,
    };
    let (hidden, format) = (call.tokens.moved_hidden(call.hidden), call.tokens.format());
    let input = DispatchInput { hidden, format, tokens: &data, scales: scales.as_ref(), probs };
    let mut outputs = outputs(backend, handle, call)?;
    B::with_handle(&handle.of, |own| {
        if handle.has_capacity {
            clear_rest(backend, own, call.clear_tokens, &mut outputs)?;
        }
        let output = DispatchOutput {
            tokens: &mut outputs.tokens.memory,
            scales: outputs.scales.as_mut().map(|output| &mut output.memory),
            probs: outputs.probs.as_mut().map(|output| &mut output.memory),
            local_experts: outputs.local_experts.as_mut().map(|output| &mut output.memory),
        };
        Ok(backend.dispatch(own, input, output)?)
    })?;
    Ok(outputs)
}

/// Rows beyond those of the handle would be left out without a word.
fn check_rows(what: &'static str, expected: usize, found: usize) -> Result<(), Failure> {
    if expected == found {
        return Ok(());
    }
    Err(CallerError::Shape { what, expected, found, unit: "rows, as the handle says" }.into())
}

/// Memory for what a dispatch delivers.
fn outputs<B: Tensors>(
    backend: &mut B,
    handle: &Handle,
    call: &DispatchCall,
) -> Result<Delivered<B::Memory>, Failure> {
    let experts = backend.world().placement.local_experts(backend.rank());
    let vector = Shape { rows: handle.rows, columns: None };
    let matrix = |columns: usize| Shape { columns: Some(columns), ..vector };
    let plain = handle.mode == DispatchMode::Plain;
    let format = call.tokens.format();

    let row_bytes = format.output_row_bytes(call.tokens.moved_hidden(call.hidden));
    let tokens = Output::new(backend, row_bytes, call.tokens.delivered(), matrix(call.hidden))?;
    let scales = match format.scales() {
        None => None,
        Some(scales) => {
            let dtype = if scales.bytes_per_scale() == 4 { DataType::F32 } else { DataType::U8 };
            let shape = matrix(scales.scales_per_row(call.hidden));
            Some(Output::new(backend, scales.bytes_per_row(call.hidden), dtype, shape)?)
        }
    };
    let probs = match call.probs {
        Given::Nothing => None,
        _ if plain => Some(Output::new(backend, 4 * experts, DataType::F32, matrix(experts))?),
        _ => Some(Output::new(backend, 4, DataType::F32, vector)?),
    };
    let local_experts = match plain && call.local_experts {
        false => None,
        true => Some(Output::new(backend, experts, DataType::U8, matrix(experts))?),
    };
    Ok(Delivered { tokens, scales, probs, local_experts })
}

/// Zeroes the rows of a capacity that no token takes. Whoever reads the map or the probabilities must not find chance
/// there; of the tokens only gradients sum over all rows.
fn clear_rest<B: Tensors>(
    backend: &mut B,
    handle: &B::Handle,
    tokens_too: bool,
    outputs: &mut Delivered<B::Memory>,
) -> Result<(), Failure> {
    let Delivered { tokens, scales, probs, local_experts } = outputs;
    let all = [Some(tokens).filter(|_| tokens_too), scales.as_mut(), probs.as_mut(), local_experts.as_mut()];
    for output in all.into_iter().flatten() {
        backend.clear_rest(handle, &mut output.memory, output.row_bytes)?;
    }
    Ok(())
}

/// What is combined, and where to.
#[derive(Debug)]
pub(crate) struct CombineCall {
    /// Rows in, and tokens out.
    pub(crate) rows: usize,
    pub(crate) tokens: usize,
    pub(crate) hidden: usize,
    pub(crate) element: Element,
    pub(crate) wire: Element,
    pub(crate) data: Span,
    pub(crate) probs: Option<Span>,
    pub(crate) out: Span,
    pub(crate) out_probs: Option<Span>,
}

/// Combines into memory of the caller.
pub(crate) fn combine<B: Tensors>(
    backend: &mut B,
    handle: &Handle,
    call: &CombineCall,
) -> Result<(), Failure> {
    check_rows("tokens", handle.rows, call.rows)?;
    check_rows("combined tokens", handle.tokens, call.tokens)?;
    // SAFETY: the tensors were checked in Python, and live until the stream has passed this call. The outputs are new.
    let borrow = |span: Span| unsafe { B::borrow(span) };
    let (rows, probs) = (borrow(call.data), call.probs.map(borrow));
    let (mut tokens, mut out_probs) = (borrow(call.out), call.out_probs.map(borrow));
    let CombineCall { hidden, element, wire, .. } = *call;
    let input = CombineInput { hidden, element, wire, rows: &rows, probs: probs.as_ref() };
    let output = CombineOutput { tokens: &mut tokens, probs: out_probs.as_mut() };
    B::with_handle(&handle.of, |own| Ok(backend.combine(own, input, output)?))
}

/// Registered memory for a tensor of bytes.
pub(crate) fn empty<B: Tensors>(backend: &mut B, bytes: usize) -> Result<Output<B::Memory>, Failure> {
    Output::new(backend, 1, DataType::U8, Shape { rows: bytes, columns: None })
}

/// Rows and their weights.
#[derive(Debug)]
pub(crate) struct WeightRowsCall {
    /// Rows, and elements of each.
    pub(crate) size: (usize, usize),
    pub(crate) values: Span,
    pub(crate) element: Element,
    pub(crate) weights: Span,
    pub(crate) out: Span,
    pub(crate) out_element: Element,
    /// The rows that were weighted, and a place for the gradients of their weights: `values` are gradients then.
    pub(crate) backward: Option<(Span, Span)>,
}

/// Multiplies rows by their weights, or makes the gradients of both.
pub(crate) fn weight_rows<B: Tensors>(backend: &mut B, call: &WeightRowsCall) -> Result<(), Failure> {
    // SAFETY: the tensors were checked in Python, and live until the stream has passed this call.
    let borrow = |span: Span| unsafe { B::borrow(span) };
    let (values, weights, mut out) = (borrow(call.values), borrow(call.weights), borrow(call.out));
    let &WeightRowsCall { size: (rows, hidden), element, out_element, .. } = call;
    let input = WeightedRows { rows, hidden, values: &values, element, weights: &weights };
    let mut backward = call.backward.map(|(rows, dots)| (borrow(rows), borrow(dots)));
    let backward = backward.as_mut().map(|(rows, weights)| WeightGradients { rows, weights });
    Ok(backend.weight_rows(&input, out_element, &mut out, backward)?)
}
