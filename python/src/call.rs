//! The operators over tensors, the same for both backends.

use std::ffi::c_void;

use ep::backend::check_row_bytes;
use ep::{
    Backend, CallerError, CombineInput, CombineOutput, DeviceReport, DeviceRouting, DispatchInput,
    DispatchMode, DispatchOutput, Element, Indices, Probs, ReceiveShape, Result, ScaleFormat, TokenFormat,
    WeightGradients, WeightRows, WeightedRows,
};
use pyo3::prelude::*;
use pyo3::types::PyCapsule;

use crate::delivered::{Freed, Owned};
use crate::dlpack::{self, DataType, Device, Shape};
use crate::errors::Failure;
use crate::exchange::Exchange;
use crate::handle::{Handle, Of};

/// The address and the size in bytes of a tensor.
#[derive(Debug, Clone, Copy, FromPyObject)]
pub(crate) struct Span(pub(crate) usize, pub(crate) usize);

impl Span {
    /// The elements.
    ///
    /// # Safety
    /// For the lifetime of the result, the tensor lives and nothing writes to it. It is aligned for `T`, and any bytes
    /// are a valid `T`.
    pub(crate) unsafe fn elements<'a, T>(self) -> &'a [T] {
        if self.1 == 0 {
            return &[];
        }
        // SAFETY: the caller's promise.
        unsafe { std::slice::from_raw_parts(self.0 as *const T, self.1 / size_of::<T>()) }
    }

    /// The elements, mutable.
    ///
    /// # Safety
    /// As for [`elements`](Self::elements), and nothing else reads or writes the tensor during the lifetime of the
    /// result.
    pub(crate) unsafe fn elements_mut<'a, T>(self) -> &'a mut [T] {
        if self.1 == 0 {
            return &mut [];
        }
        // SAFETY: the caller's promise.
        unsafe { std::slice::from_raw_parts_mut(self.0 as *mut T, self.1 / size_of::<T>()) }
    }
}

/// The element type: f32 if `wide`, else bf16.
pub(crate) fn element(wide: bool) -> Element {
    if wide { Element::F32 } else { Element::Bf16 }
}

/// A rank's routing as tensors.
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
    /// `[tokens, experts]` bytes, with at most this many set in a row.
    Map { most: usize },
}

/// Addresses that preprocess writes its results to; 0 = not wanted. Without a capacity preprocess waits for the counts,
/// and their tensors are on the host; with a capacity they are on the tokens' device. The overflow is always on that
/// device.
#[derive(Debug, Clone, Copy, FromPyObject)]
pub(crate) struct Report {
    /// i64 `[local experts]`, with padding.
    #[pyo3(item(0))]
    pub(crate) tokens_per_expert: usize,
    /// i64 `[local experts]`, without padding.
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
    /// Each address is 0, or that of a host tensor that is large enough and that nothing else accesses.
    pub(crate) unsafe fn write_counts(self, shape: &ReceiveShape) {
        let counts = [&shape.tokens_per_expert, &shape.kept_per_expert];
        for (counts, address) in counts.into_iter().zip([self.tokens_per_expert, self.kept_per_expert]) {
            for (at, &count) in counts.iter().enumerate().filter(|_| address != 0) {
                // SAFETY: the caller's promise.
                unsafe { (address as *mut i64).add(at).write(count.into()) };
            }
        }
    }
}

/// What tensors need of a backend beyond [`Backend`]: their memory, their stream, and handles of either backend.
pub(crate) trait Tensors: Backend<Memory: Send + Sync + 'static> + WeightRows {
    /// A tensor of the caller as memory.
    ///
    /// # Safety
    /// The tensor lives until all operators that use the memory are complete. If they write to it, nothing else
    /// accesses it until then; if they only read it, nothing writes to it until then.
    unsafe fn borrow(tensor: Span) -> Self::Memory;

    /// The address of memory.
    fn address(memory: &mut Self::Memory) -> usize;

    /// Puts later operators into this stream of the device; does nothing on the host.
    fn use_stream(&mut self, stream: usize) -> Result<()>;

    /// Wraps a handle of this backend for [`Handle`].
    fn wrap(handle: Self::Handle) -> Of;

    /// Calls `call` with the handle. An error if the handle is of the other backend.
    fn with_handle<T>(
        handle: &Of,
        call: impl FnOnce(&Self::Handle) -> Result<T, Failure>,
    ) -> Result<T, Failure>;
}

/// The arguments of a dispatch.
#[derive(Debug)]
pub(crate) struct DispatchCall {
    pub(crate) rows: usize,
    pub(crate) hidden: usize,
    pub(crate) tokens: Tokens,
    pub(crate) data: Span,
    pub(crate) scales: Option<Span>,
    pub(crate) probs: Given,
    /// Whether to deliver the map of local experts, in plain mode.
    pub(crate) local_experts: bool,
    /// Whether to zero the tokens of rows that a capacity leaves unused.
    pub(crate) clear_tokens: bool,
}

/// The type of tokens, in and out.
#[derive(Debug, Clone, Copy)]
pub(crate) enum Tokens {
    Bf16,
    F32,
    Fp8(ScaleFormat),
    QuantizeFp8(ScaleFormat),
}

impl Tokens {
    fn format(self) -> TokenFormat {
        match self {
            Self::Bf16 => TokenFormat::Bf16,
            Self::F32 => TokenFormat::F32,
            Self::Fp8(scales) => TokenFormat::Fp8(scales),
            Self::QuantizeFp8(scales) => TokenFormat::QuantizeFp8(scales),
        }
    }

    fn delivered(self) -> DataType {
        match self {
            Self::Bf16 => DataType::BF16,
            Self::F32 => DataType::F32,
            Self::Fp8(_) | Self::QuantizeFp8(_) => DataType::F8_E4M3,
        }
    }
}

/// Where the probabilities of a dispatch come from.
#[derive(Debug, Clone, Copy)]
pub(crate) enum Given {
    Nothing,
    Routing,
    Dense(Span),
}

/// What a rank received, as memory that becomes tensors.
pub(crate) struct Delivered<M> {
    tokens: Output<M>,
    scales: Option<Output<M>>,
    probs: Option<Output<M>>,
    local_experts: Option<Output<M>>,
}

pub(crate) struct Output<M> {
    memory: M,
    pub(crate) address: usize,
    row_bytes: usize,
    dtype: DataType,
    shape: Shape,
}

/// What a dispatch delivers: tokens, scales, probs, local_experts; as capsules or as tensors.
pub(crate) type Quadruple<T> = (T, Option<T>, Option<T>, Option<T>);

impl<M: Send + 'static> Delivered<M> {
    /// Converts each output.
    pub(crate) fn each<T>(self, convert: impl Fn(Output<M>) -> PyResult<T>) -> PyResult<Quadruple<T>> {
        let optional = |output: Option<Output<M>>| output.map(&convert).transpose();
        Ok((
            convert(self.tokens)?,
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

    /// Makes a capsule. Booleans and FP8 are bytes there.
    pub(crate) fn into_capsule<'py>(
        self,
        py: Python<'py>,
        device: Device,
        freed: &Freed,
    ) -> PyResult<Bound<'py, PyCapsule>> {
        let (data, owner) = (self.address as *mut c_void, Owned::new(self.memory, self.address, freed));
        // SAFETY: the memory was allocated for this shape, and the capsule owns it.
        unsafe { dlpack::capsule(py, owner, data, device, self.dtype, self.shape) }
    }

    pub(crate) fn into_tensor<'py>(
        self,
        py: Python<'py>,
        exchange: &Exchange,
        device: Device,
        freed: &Freed,
    ) -> PyResult<Bound<'py, PyAny>> {
        let (data, owner) = (self.address as *mut c_void, Owned::new(self.memory, self.address, freed));
        // SAFETY: the memory was allocated for this shape, and the tensor owns it.
        unsafe { exchange.tensor(py, owner, data, device, self.dtype, self.shape) }
    }
}

/// Preprocesses a routing, and writes the report.
pub(crate) fn preprocess<B: Tensors>(
    backend: &mut B,
    routing: &RoutingTensors,
    mode: DispatchMode,
    capacity: Option<usize>,
    report: Report,
) -> Result<Handle, Failure> {
    let &RoutingTensors { form, tokens, width, routing, weights } = routing;
    // SAFETY: the tensors were checked in Python, and live until the stream has passed this call.
    let borrow = |span: Span| unsafe { B::borrow(span) };
    let (routing, weights) = (borrow(routing), weights.map(borrow));
    let topk = |indices| DeviceRouting::TopK { tokens, k: width, indices, weights: weights.as_ref() };
    let routing = match form {
        Form::NarrowTopK => topk(Indices::Narrow(&routing)),
        Form::WideTopK => topk(Indices::Wide(&routing)),
        Form::Map { most } => DeviceRouting::Map { tokens, most, map: &routing, probs: weights.as_ref() },
    };
    let counts_bytes = size_of::<i64>() * backend.world().placement().local_experts(backend.rank());
    let cell = |address: usize, bytes: usize| (address != 0).then(|| borrow(Span(address, bytes)));
    let mut overflow = cell(report.overflow, size_of::<i32>());
    let on_device = DeviceReport::default().overflow(overflow.as_mut());
    let handle = if capacity.is_some() {
        let mut tokens_per_expert = cell(report.tokens_per_expert, counts_bytes);
        let mut kept_per_expert = cell(report.kept_per_expert, counts_bytes);
        let on_device =
            on_device.tokens_per_expert(tokens_per_expert.as_mut()).kept_per_expert(kept_per_expert.as_mut());
        backend.preprocess_on_device(&routing, mode, capacity, on_device)?
    } else {
        let handle = backend.preprocess_on_device(&routing, mode, None, on_device)?;
        let shape = backend.receive_shape(&handle)?;
        // SAFETY: Python made these tensors for this call, in host memory since there is no capacity.
        unsafe { report.write_counts(&shape) };
        handle
    };
    let shape = backend.handle_shape(&handle);
    Ok(Handle { of: B::wrap(handle), shape })
}

/// Dispatches into new memory.
pub(crate) fn dispatch<B: Tensors>(
    backend: &mut B,
    handle: &Handle,
    call: &DispatchCall,
) -> Result<Delivered<B::Memory>, Failure> {
    check_rows("tokens", handle.shape.tokens, call.rows)?;
    check_row(call.hidden, call.tokens)?;
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
    let (hidden, format) = (call.hidden, call.tokens.format());
    let input = DispatchInput::new(&data, hidden).format(format).scales(scales.as_ref()).probs(probs);
    let mut outputs = outputs(backend, handle, call)?;
    B::with_handle(&handle.of, |own| {
        if handle.shape.capacity.is_some() {
            clear_rest(backend, own, call.clear_tokens, &mut outputs)?;
        }
        let output = DispatchOutput::new(&mut outputs.tokens.memory)
            .scales(outputs.scales.as_mut().map(|output| &mut output.memory))
            .probs(outputs.probs.as_mut().map(|output| &mut output.memory))
            .local_experts(outputs.local_experts.as_mut().map(|output| &mut output.memory));
        Ok(backend.dispatch(own, input, output)?)
    })?;
    Ok(outputs)
}

/// Checks the caller's row length: the backend may count f32 rows as bf16 rows of twice the length.
pub(crate) fn check_row(hidden: usize, tokens: Tokens) -> Result<(), Failure> {
    Ok(check_row_bytes(hidden, tokens.format().output_row_bytes(hidden))?)
}

/// Checks a number of rows against the handle. Operators would silently ignore further rows.
fn check_rows(what: &'static str, expected: usize, found: usize) -> Result<(), Failure> {
    if expected == found {
        return Ok(());
    }
    Err(CallerError::Shape { what, expected, found, unit: "rows, as the handle says" }.into())
}

/// Allocates the outputs of a dispatch.
fn outputs<B: Tensors>(
    backend: &mut B,
    handle: &Handle,
    call: &DispatchCall,
) -> Result<Delivered<B::Memory>, Failure> {
    let experts = backend.world().placement().local_experts(backend.rank());
    let vector = Shape { rows: handle.shape.rows, columns: None };
    let matrix = |columns: usize| Shape { columns: Some(columns), ..vector };
    let plain = handle.shape.mode == DispatchMode::Plain;
    let format = call.tokens.format();

    let row_bytes = format.output_row_bytes(call.hidden);
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
        true => Some(Output::new(backend, experts, DataType::BOOL, matrix(experts))?),
    };
    Ok(Delivered { tokens, scales, probs, local_experts })
}

/// Zeroes the rows of a capacity that no token takes. Callers read the map and the probabilities of all rows; only
/// gradients sum the tokens of all rows.
fn clear_rest<B: Tensors>(
    backend: &mut B,
    handle: &B::Handle,
    tokens_too: bool,
    outputs: &mut Delivered<B::Memory>,
) -> Result<(), Failure> {
    let Delivered { tokens, scales, probs, local_experts } = outputs;
    let all = [Some(tokens).filter(|_| tokens_too), scales.as_mut(), probs.as_mut(), local_experts.as_mut()];
    let shape = backend.handle_shape(handle);
    for output in all.into_iter().flatten() {
        // Clears all rows if only the GPU has the number of rows that dispatch writes.
        let written = shape.received_rows.unwrap_or(0) * output.row_bytes;
        backend.clear(&mut output.memory, written..shape.rows * output.row_bytes)?;
    }
    Ok(())
}

/// The arguments of a combine.
#[derive(Debug)]
pub(crate) struct CombineCall {
    /// Rows in, and tokens out.
    pub(crate) rows: usize,
    pub(crate) tokens: usize,
    pub(crate) hidden: usize,
    pub(crate) element: Element,
    pub(crate) wire: Element,
    pub(crate) data: Span,
    /// The probabilities, and the number of elements from the start of one of their rows to the next.
    pub(crate) probs: Option<(Span, usize)>,
    pub(crate) out: Span,
    pub(crate) out_probs: Option<Span>,
}

/// Combines into memory of the caller.
pub(crate) fn combine<B: Tensors>(
    backend: &mut B,
    handle: &Handle,
    call: &CombineCall,
) -> Result<(), Failure> {
    check_rows("tokens", handle.shape.rows, call.rows)?;
    check_rows("combined tokens", handle.shape.tokens, call.tokens)?;
    // SAFETY: the tensors were checked in Python, and live until the stream has passed this call. The outputs are new.
    let borrow = |span: Span| unsafe { B::borrow(span) };
    let (rows, probs) = (borrow(call.data), call.probs.map(|(span, _)| borrow(span)));
    let (mut tokens, mut out_probs) = (borrow(call.out), call.out_probs.map(borrow));
    let CombineCall { hidden, element, wire, .. } = *call;
    let input = CombineInput::new(&rows, hidden)
        .element(element)
        .wire(wire)
        .probs(probs.as_ref())
        .prob_stride(call.probs.map(|(_, stride)| stride));
    let output = CombineOutput::new(&mut tokens).probs(out_probs.as_mut());
    B::with_handle(&handle.of, |own| Ok(backend.combine(own, input, output)?))
}

/// Allocates registered memory for a tensor.
pub(crate) fn empty<B: Tensors>(
    backend: &mut B,
    dtype: DataType,
    shape: Shape,
) -> Result<Output<B::Memory>, Failure> {
    let row_bytes = shape.columns.unwrap_or(1).saturating_mul(dtype.bytes());
    Output::new(backend, row_bytes, dtype, shape)
}

/// The arguments of a multiplication of rows by weights.
#[derive(Debug)]
pub(crate) struct WeightRowsCall {
    /// The number of rows, and their length in elements.
    pub(crate) size: (usize, usize),
    pub(crate) values: Span,
    pub(crate) element: Element,
    pub(crate) weights: Span,
    pub(crate) out: Span,
    pub(crate) out_element: Element,
    /// Backward pass only: the rows that were weighted, and an output for the gradients of their weights. `values` are
    /// then gradients of the weighted rows.
    pub(crate) backward: Option<(Span, Span)>,
}

/// Multiplies rows by their weights, or computes the gradients of both.
pub(crate) fn weight_rows<B: Tensors>(backend: &mut B, call: &WeightRowsCall) -> Result<(), Failure> {
    // SAFETY: the tensors were checked in Python, and live until the stream has passed this call.
    let borrow = |span: Span| unsafe { B::borrow(span) };
    let (values, weights, mut out) = (borrow(call.values), borrow(call.weights), borrow(call.out));
    let &WeightRowsCall { size: (rows, hidden), element, out_element, .. } = call;
    let input = WeightedRows::new(&values, [rows, hidden], &weights).element(element);
    let mut backward = call.backward.map(|(rows, dots)| (borrow(rows), borrow(dots)));
    let backward = backward.as_mut().map(|(rows, weights)| WeightGradients::new(rows, weights));
    Ok(backend.weight_rows(&input, out_element, &mut out, backward)?)
}
