//! The class `Buffer`. The calls of operators that its methods share are in `operators`.

use std::ops::Range;
use std::sync::atomic::{AtomicU64, Ordering::Relaxed};
use std::sync::{LockResult, Mutex, MutexGuard, PoisonError, TryLockError};
use std::thread::{self, ThreadId};
use std::time::Duration;

use ep::join::Rendezvous;
use ep::{Backend, Config, DispatchMode, Element, Rank, ScaleFormat, World};
use ep_cuda::CudaBuffer;
use ep_host::HostBuffer;
use pyo3::prelude::*;
use pyo3::types::PyCapsule;

use crate::call::{
    self, CombineCall, DispatchCall, Form, Given, Quadruple, Report, RoutingTensors, Span, Tensors, Tokens,
    WeightRowsCall,
};
use crate::delivered::Freed;
use crate::dlpack::{DataType, Device, Shape};
use crate::errors::{Failure, poisoned};
use crate::exchange::Exchange;
use crate::handle;
use crate::interrupt::Signals;
use crate::join::{self, Callback, Settings};
use crate::tensors;

const CLOSED: &str =
    "this buffer was closed: close it after its last operator, those of backward passes included";

/// One rank, on either backend.
#[pyclass(frozen, module = "hybrid_ep._native")]
pub(crate) struct Buffer {
    /// `None` once closed.
    end: Mutex<Option<AnyEnd>>,
    /// The thread that holds `end` during a call, which may run handlers of signals.
    caller: Mutex<Option<ThreadId>>,
    facts: Facts,
    signals: Signals,
    /// Of the memory of tensors that this buffer has delivered.
    freed: Freed,
}

/// Pause between two checks whether a call in another thread has ended.
const WAIT_FOR_A_CALL: Duration = Duration::from_micros(200);

/// The constant properties of a buffer.
struct Facts {
    id: u64,
    rank: usize,
    world: World,
    backend: &'static str,
    device: Device,
}

impl Facts {
    fn local_experts(&self) -> Range<usize> {
        self.world.placement().positions_of(Rank(self.rank as u32))
    }
}

/// A value of the host backend or of the CUDA backend.
enum Either<H, C> {
    Host(H),
    Cuda(C),
}

type AnyEnd = Either<Box<HostBuffer>, Box<CudaBuffer>>;

/// The tensors of a combine: tokens, and their probabilities.
type Summed<'py> = (Bound<'py, PyAny>, Option<Bound<'py, PyAny>>);

/// Evaluates `$call` with `$end` bound to the buffer, or another value, of either backend.
macro_rules! with_end {
    ($any:expr, $end:ident => $call:expr) => {
        match $any {
            Either::Host($end) => $call,
            Either::Cuda($end) => $call,
        }
    };
}

// After the macro, which it uses.
mod operators;

/// The backend of a world.
#[derive(Clone, Copy)]
enum Kind {
    Host,
    Cuda,
}

impl Kind {
    fn of(settings: &Settings) -> Result<Self, Failure> {
        match settings.backend.as_str() {
            "host" => Ok(Self::Host),
            "cuda" => Ok(Self::Cuda),
            other => Err(Failure::Caller(format!("backend: expected \"host\" or \"cuda\", found {other:?}"))),
        }
    }
}

impl Buffer {
    fn new(end: AnyEnd, device: Device, signals: &Signals) -> Self {
        static NEXT: AtomicU64 = AtomicU64::new(1);
        let backend = match end {
            Either::Host(_) => "host",
            Either::Cuda(_) => "cuda",
        };
        let facts = with_end!(&end, end => Facts {
            id: NEXT.fetch_add(1, Relaxed),
            rank: end.rank().index(),
            world: end.world().clone(),
            backend,
            device,
        });
        Self {
            end: Mutex::new(Some(end)),
            caller: Mutex::default(),
            facts,
            signals: signals.clone(),
            freed: Freed::default(),
        }
    }

    fn host(buffer: HostBuffer, signals: &Signals) -> Self {
        Self::new(Either::Host(Box::new(buffer)), Device::CPU, signals)
    }

    fn cuda(buffer: CudaBuffer, gpu: usize, signals: &Signals) -> Self {
        Self::new(Either::Cuda(Box::new(buffer)), Device::cuda(gpu), signals)
    }

    fn meet(
        kind: Kind,
        settings: &Settings,
        config: &Config,
        signals: &Signals,
        meet: &mut dyn Rendezvous,
    ) -> Result<Self, Failure> {
        let world = settings.world(meet.ranks())?;
        let gpu = settings.gpu.unwrap_or(0);
        match kind {
            Kind::Host => Ok(Self::host(HostBuffer::join(&world, meet, config)?, signals)),
            Kind::Cuda => Ok(Self::cuda(CudaBuffer::join_on(gpu, &world, meet, config)?, gpu, signals)),
        }
    }

    fn caller(&self) -> MutexGuard<'_, Option<ThreadId>> {
        self.caller.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Refuses a call of a signal handler that runs inside a call of this buffer, which would wait for itself.
    fn check_not_inside(&self) -> Result<(), Failure> {
        if *self.caller() != Some(thread::current().id()) {
            return Ok(());
        }
        let text = "a signal handler called this buffer while an operator of the buffer waits on the same thread; raise an \
                    exception in the handler, which ends the operator";
        Err(Failure::Caller(text.into()))
    }

    /// Calls `call` with the backend's buffer, without the interpreter's lock: other ranks of this process may need the
    /// lock before they can reach the operator that this rank waits in.
    fn run<T: Send>(
        &self,
        py: Python<'_>,
        call: impl FnOnce(&mut AnyEnd) -> Result<T, Failure> + Send,
    ) -> Result<T, Failure> {
        self.check_not_inside()?;
        self.signals.settle(py.detach(|| {
            let mut end = self.end()?.map_err(|_| poisoned())?;
            let _inside = Inside::of(self);
            call(end.as_mut().ok_or_else(|| Failure::Caller(CLOSED.into()))?)
        }))
    }

    /// Calls an operator in `stream`.
    fn operate<T: Send>(
        &self,
        py: Python<'_>,
        stream: usize,
        call: impl FnOnce(&mut AnyEnd) -> Result<T, Failure> + Send,
    ) -> Result<T, Failure> {
        self.run(py, |end| {
            with_end!(end, end => end.use_stream(stream))?;
            call(end)
        })
    }

    /// Waits for the end of a call in another thread, or for the exception of a signal handler. Called without the
    /// interpreter's lock.
    fn end(&self) -> Result<LockResult<MutexGuard<'_, Option<AnyEnd>>>, Failure> {
        loop {
            match self.end.try_lock() {
                Ok(end) => return Ok(Ok(end)),
                Err(TryLockError::Poisoned(poison)) => return Ok(Err(poison)),
                Err(TryLockError::WouldBlock) => {}
            }
            if let Some(Err(raised)) = Python::try_attach(|py| py.check_signals()) {
                return Err(Failure::Raised(raised));
            }
            thread::sleep(WAIT_FOR_A_CALL);
        }
    }
}

/// Reads settings, and makes the waits of the buffer check for signals.
fn prepared(settings: &Settings) -> Result<(Kind, Config, Signals), Failure> {
    let (kind, signals) = (Kind::of(settings)?, Signals::default());
    let mut config = settings.config()?;
    config.interrupt = signals.interrupt();
    Ok((kind, config, signals))
}

/// While this exists, the current thread is inside a call of the buffer.
struct Inside<'a>(&'a Buffer);

impl<'a> Inside<'a> {
    fn of(buffer: &'a Buffer) -> Self {
        *buffer.caller() = Some(thread::current().id());
        Self(buffer)
    }
}

impl Drop for Inside<'_> {
    fn drop(&mut self) {
        *self.0.caller() = None;
    }
}

impl Drop for Buffer {
    fn drop(&mut self) {
        // Dropping the buffer waits for the GPU. Kernels there may wait for ranks on other threads, and these threads
        // may wait for the interpreter's lock: so release the lock. After the interpreter has ended no thread waits for
        // its lock; `try_attach` then drops the closure, and the buffer with it.
        let end = self.end.get_mut().unwrap_or_else(PoisonError::into_inner).take();
        let _: Option<()> = Python::try_attach(|py| py.detach(move || drop(end)));
    }
}

#[pymethods]
impl Buffer {
    /// Makes all ranks of a world in this process, in rank order.
    #[staticmethod]
    fn threads(py: Python<'_>, ranks: usize, settings: Settings) -> Result<Vec<Self>, Failure> {
        let (kind, config, signals) = prepared(&settings)?;
        let world = settings.world(ranks)?;
        let made = py.detach(|| match kind {
            Kind::Host => {
                let buffers = HostBuffer::threads(&world, &config)?.into_iter();
                Ok(buffers.map(|buffer| Self::host(buffer, &signals)).collect())
            }
            Kind::Cuda => {
                let spread = (0..settings.gpus).cycle();
                let buffers = CudaBuffer::threads(&world, &config)?.into_iter().zip(spread);
                Ok(buffers.map(|(buffer, gpu)| Self::cuda(buffer, gpu, &signals)).collect())
            }
        });
        signals.settle(made)
    }

    /// Makes this process rank `rank` of `ranks`, which exchange bytes through `meeting`. Collective.
    #[staticmethod]
    fn join(
        py: Python<'_>,
        rank: u32,
        ranks: usize,
        settings: Settings,
        meeting: Py<PyAny>,
    ) -> Result<Self, Failure> {
        let (kind, config, signals) = prepared(&settings)?;
        let mut meet = Callback::new(Rank(rank), ranks, meeting)?;
        let joined = py.detach(|| Self::meet(kind, &settings, &config, &signals, &mut meet));
        signals.settle(joined.map_err(|failure| meet.cause(failure)))
    }

    /// Makes this process the rank that the launcher's environment describes, else a world of one rank. Collective.
    #[staticmethod]
    fn launched(py: Python<'_>, settings: Settings) -> Result<Self, Failure> {
        let (kind, config, signals) = prepared(&settings)?;
        signals.settle(
            py.detach(|| Self::meet(kind, &settings, &config, &signals, &mut *join::launched(&config)?)),
        )
    }

    #[getter]
    fn id(&self) -> u64 {
        self.facts.id
    }

    #[getter]
    fn rank(&self) -> usize {
        self.facts.rank
    }

    #[getter]
    fn ranks(&self) -> usize {
        self.facts.world.ranks()
    }

    #[getter]
    fn experts(&self) -> usize {
        self.facts.world.experts()
    }

    /// The half-open range of local experts.
    #[getter]
    fn local_experts(&self) -> (usize, usize) {
        let positions = self.facts.local_experts();
        (positions.start, positions.end)
    }

    #[getter]
    fn domains(&self) -> usize {
        self.facts.world.topology().domains()
    }

    #[getter]
    fn backend(&self) -> &'static str {
        self.facts.backend
    }

    /// The number of the GPU; 0 for the host backend.
    #[getter]
    fn ordinal(&self) -> i32 {
        self.facts.device.ordinal()
    }

    /// The bytes that the addresses of tensors must be a multiple of.
    #[getter]
    fn alignment(&self) -> usize {
        self.facts.device.alignment()
    }

    /// Bytes of registered memory.
    fn registered_bytes(&self, py: Python<'_>) -> Result<usize, Failure> {
        self.run(py, |end| Ok(with_end!(end, end => end.registered_bytes())))
    }

    /// Whether calls as large as the settings allow fit into the memory between NVLink domains.
    fn has_room(&self, py: Python<'_>, settings: Settings) -> Result<bool, Failure> {
        let config = settings.config()?;
        self.run(py, |end| {
            Ok(match end {
                Either::Host(_) => true,
                Either::Cuda(end) => end.has_rail_room(&config),
            })
        })
    }

    /// Preprocesses a routing: `form` 0 = i32 top-k, 1 = i64 top-k, 2 = map. Returns the handle's capsule and the
    /// number of rows of dispatch outputs.
    #[expect(
        clippy::too_many_arguments,
        reason = "numbers that Python passes by position: no call is cheaper"
    )]
    fn preprocess<'py>(
        &self,
        py: Python<'py>,
        stream: usize,
        form: u8,
        routing: Span,
        weights: Option<Span>,
        size: (usize, usize),
        most: usize,
        pad_multiple: Option<usize>,
        capacity: Option<usize>,
        report: Report,
    ) -> Result<(Bound<'py, PyCapsule>, usize), Failure> {
        let form = match form {
            0 => Form::NarrowTopK,
            1 => Form::WideTopK,
            2 => Form::Map { most },
            other => return Err(unknown("form of a routing", other)),
        };
        let mode = pad_multiple.map_or(Ok(DispatchMode::Plain), DispatchMode::permuted)?;
        let routing = RoutingTensors { form, tokens: size.0, width: size.1, routing, weights };
        let handle = self.operate(
            py,
            stream,
            |end| with_end!(end, end => call::preprocess(&mut **end, &routing, mode, capacity, report)),
        )?;
        let rows = handle.shape.rows;
        Ok((handle::register(py, handle).map_err(Failure::Raised)?, rows))
    }

    /// Dispatches tokens.
    ///
    /// - `size`: rows and their length in elements.
    /// - `format`: see [`tokens_of`].
    /// - `probs_from`: 0 = none, 1 = the routing, 2 = `probs`.
    #[expect(
        clippy::too_many_arguments,
        reason = "numbers that Python passes by position: no call is cheaper"
    )]
    fn dispatch<'py>(
        &self,
        py: Python<'py>,
        stream: usize,
        number: i64,
        size: (usize, usize),
        format: (u8, u8),
        tokens: Span,
        scales: Option<Span>,
        probs_from: u8,
        probs: Option<Span>,
        local_experts: bool,
        clear_tokens: bool,
    ) -> Result<Quadruple<Bound<'py, PyCapsule>>, Failure> {
        let call = DispatchCall {
            rows: size.0,
            hidden: size.1,
            tokens: tokens_of(format)?,
            data: tokens,
            scales,
            probs: match (probs_from, probs) {
                (0, None) => Given::Nothing,
                (1, None) => Given::Routing,
                (2, Some(dense)) => Given::Dense(dense),
                (0..=2, _) => {
                    let text = "dispatch: probs are given exactly if they come from `probs` (code 2)";
                    return Err(Failure::Caller(text.into()));
                }
                (other, _) => return Err(unknown("origin of probs", other)),
            },
            local_experts,
            clear_tokens,
        };
        let (device, freed) = (self.facts.device, &self.freed);
        let delivered = self.dispatched(py, stream, number, &call)?;
        with_end!(delivered, all => all.each(|output| output.into_capsule(py, device, freed)))
            .map_err(Failure::Raised)
    }

    /// Dispatches tensors that need no copy. Returns `None`, and has done nothing, if there is anything unusual about
    /// the arguments, or PyTorch cannot exchange tensors. The arguments are those of `hybrid_ep.ops.dispatch`; `scales_of`
    /// is the number of the format that `fp8` names.
    #[expect(clippy::too_many_arguments, reason = "passed by position: no call is cheaper")]
    fn dispatch_tensors<'py>(
        &self,
        py: Python<'py>,
        tokens: &Bound<'py, PyAny>,
        scales: Option<&Bound<'py, PyAny>>,
        weights: Option<&Bound<'py, PyAny>>,
        handle: &Bound<'py, PyAny>,
        from_routing: bool,
        scales_of: Option<u8>,
        clear_tokens: bool,
        local_experts: bool,
    ) -> Result<Option<Quadruple<Bound<'py, PyAny>>>, Failure> {
        let Some(exchange) = Exchange::get(py) else { return Ok(None) };
        let (device, freed) = (self.facts.device, &self.freed);
        let reader = self.reader(exchange);
        let quantise = scales_of.map(|format| tokens_of((3, format))).transpose()?;
        let given = tensors::Dispatch {
            tokens,
            scales,
            weights,
            from_routing,
            quantise,
            local_experts,
            clear_tokens,
        };
        let (Some(number), Some(call)) = (reader.number(handle), reader.dispatch(&given)) else {
            return Ok(None);
        };
        let stream = exchange.stream(py, device).map_err(Failure::Raised)?;
        let delivered = self.dispatched(py, stream, number, &call)?;
        with_end!(delivered, all => all.each(|output| output.into_tensor(py, exchange, device, freed)))
            .map(Some)
            .map_err(Failure::Raised)
    }

    /// Combines rows into `out`, and probabilities into `out_probs`. `size`: rows, tokens, and the length of a row.
    /// `probs`: the probabilities, and the number of elements from the start of one of their rows to the next. `wide`:
    /// whether rows, and sums between ranks, are f32 instead of bf16.
    #[expect(
        clippy::too_many_arguments,
        reason = "numbers that Python passes by position: no call is cheaper"
    )]
    fn combine(
        &self,
        py: Python<'_>,
        stream: usize,
        number: i64,
        size: (usize, usize, usize),
        wide: (bool, bool),
        data: Span,
        probs: Option<(Span, usize)>,
        out: Span,
        out_probs: Option<Span>,
    ) -> Result<(), Failure> {
        let (element, wire) = (call::element(wide.0), call::element(wide.1));
        let (rows, tokens, hidden) = size;
        self.combined(
            py,
            stream,
            number,
            &CombineCall { rows, tokens, hidden, element, wire, data, probs, out, out_probs },
        )
    }

    /// Combines tensors that need no copy, like [`dispatch_tensors`](Self::dispatch_tensors). The arguments are those of
    /// `hybrid_ep.ops.combine`.
    #[expect(clippy::too_many_arguments, reason = "passed by position: no call is cheaper")]
    fn combine_tensors<'py>(
        &self,
        py: Python<'py>,
        rows: &Bound<'py, PyAny>,
        probs: Option<&Bound<'py, PyAny>>,
        handle: &Bound<'py, PyAny>,
        tokens: usize,
        permuted: bool,
        wire: Option<&Bound<'py, PyAny>>,
        first_column: Option<usize>,
    ) -> Result<Option<Summed<'py>>, Failure> {
        let Some(exchange) = Exchange::get(py) else { return Ok(None) };
        let reader = self.reader(exchange);
        let given = tensors::Combine { rows, probs, tokens, permuted, wire, first_column };
        let (Some(number), Some(mut call)) = (reader.number(handle), reader.combine(&given)) else {
            return Ok(None);
        };
        let stream = exchange.stream(py, self.facts.device).map_err(Failure::Raised)?;
        let dtype = if call.element == Element::F32 { DataType::F32 } else { DataType::BF16 };
        let Some((out, span)) = self.output(py, exchange, stream, rows, dtype, [tokens, call.hidden])? else {
            return Ok(None);
        };
        call.out = span;
        let mut out_probs = None;
        if let Some(probs) = probs {
            let shape = [tokens, self.facts.world.experts()];
            let Some((out, span)) = self.output(py, exchange, stream, probs, DataType::F32, shape)? else {
                return Ok(None);
            };
            (out_probs, call.out_probs) = (Some(out), Some(span));
        }
        self.combined(py, stream, number, &call)?;
        Ok(Some((out, out_probs)))
    }

    /// Multiplies rows by their weights. `wide`: whether `values` and `out` are f32 instead of bf16. `backward` holds
    /// the rows and an output for the gradients of the weights; then `values` are gradients of the weighted rows.
    #[expect(
        clippy::too_many_arguments,
        reason = "numbers that Python passes by position: no call is cheaper"
    )]
    fn weight_rows(
        &self,
        py: Python<'_>,
        stream: usize,
        size: (usize, usize),
        wide: (bool, bool),
        values: Span,
        weights: Span,
        out: Span,
        backward: Option<(Span, Span)>,
    ) -> Result<(), Failure> {
        let (element, out_element) = (call::element(wide.0), call::element(wide.1));
        let call = WeightRowsCall { size, values, element, weights, out, out_element, backward };
        self.operate(py, stream, |end| with_end!(end, end => call::weight_rows(&mut **end, &call)))
    }

    /// Allocates registered memory of this many bytes. Returns the capsule of a `uint8` vector.
    fn empty<'py>(
        &self,
        py: Python<'py>,
        stream: usize,
        bytes: usize,
    ) -> Result<Bound<'py, PyCapsule>, Failure> {
        let (device, freed) = (self.facts.device, &self.freed);
        let output = self.allocated(py, stream, DataType::U8, Shape { rows: bytes, columns: None })?;
        with_end!(output, output => output.into_capsule(py, device, freed)).map_err(Failure::Raised)
    }

    /// Whether memory that this buffer delivered was freed since the last [`forget_freed`](Self::forget_freed).
    fn has_freed(&self) -> bool {
        self.freed.get()
    }

    fn forget_freed(&self) {
        self.freed.forget();
    }

    /// Waits until all operators called so far are complete.
    fn synchronize(&self, py: Python<'_>) -> Result<(), Failure> {
        self.run(py, |end| Ok(with_end!(end, end => end.synchronize())?))
    }

    /// Checks the other ranks during a wait outside of the operators; see `ep_host::HostBuffer::check_peers`, and
    /// `fail_wait` if the wait `has_failed`. With ranks on GPUs it checks nothing: kernels watch these ranks.
    fn check_peers(
        &self,
        py: Python<'_>,
        waited_for: &str,
        waited: f64,
        has_failed: bool,
    ) -> Result<(), Failure> {
        let waited = Duration::try_from_secs_f64(waited).unwrap_or(Duration::MAX);
        self.run(py, |end| match end {
            Either::Host(buffer) if has_failed => Ok(buffer.fail_wait(waited_for, waited)?),
            Either::Host(buffer) => Ok(buffer.check_peers(waited_for, waited)?),
            Either::Cuda(_) => Ok(()),
        })
    }

    /// Counters since the buffer was made: domain bytes, transport bytes, transport messages, preprocess bytes, and
    /// seconds waited inside operators (mean over the workers).
    fn traffic(&self, py: Python<'_>) -> Result<(u64, u64, u64, u64, f64), Failure> {
        let traffic = self.run(py, |end| Ok(with_end!(end, end => end.traffic())))?;
        Ok((
            traffic.domain_bytes,
            traffic.transport_bytes,
            traffic.transport_messages,
            traffic.preprocess_bytes,
            traffic.waited.as_secs_f64(),
        ))
    }

    /// Leaves the communicator, and tells the peers.
    fn close(&self, py: Python<'_>) -> Result<(), Failure> {
        self.check_not_inside()?;
        py.detach(|| {
            let mut guard = self.end()?.unwrap_or_else(PoisonError::into_inner);
            let end = guard.take();
            drop(guard);
            drop(end);
            Ok(())
        })
    }
}

/// The type of tokens that two numbers stand for.
///
/// - The first: 0 = bf16, 1 = f32, 2 = FP8 with scales, 3 = bf16 to be quantized.
/// - The second, the scales: 0 = f32 per 128 elements, 1 = ue8m0 per 128, 2 = ue8m0 per 32.
fn tokens_of(format: (u8, u8)) -> Result<Tokens, Failure> {
    let scales = match format.1 {
        0 => ScaleFormat::F32Per128,
        1 => ScaleFormat::Ue8m0Per128,
        2 => ScaleFormat::Ue8m0Per32,
        other => return Err(unknown("format of scales", other)),
    };
    match format.0 {
        0 => Ok(Tokens::Bf16),
        1 => Ok(Tokens::F32),
        2 => Ok(Tokens::Fp8(scales)),
        3 => Ok(Tokens::QuantizeFp8(scales)),
        other => Err(unknown("format of tokens", other)),
    }
}

/// Checks the length of a row before a dispatch sends anything. `format`: see [`tokens_of`].
#[pyfunction]
pub(crate) fn check_row(hidden: usize, format: (u8, u8)) -> Result<(), Failure> {
    call::check_row(hidden, tokens_of(format)?)
}

/// The error for a number that stands for no value.
fn unknown(what: &str, code: u8) -> Failure {
    Failure::Caller(format!(
        "{what}: unknown code {code}; the Python code and the native module of hybrid_ep are of different versions, so \
         reinstall the package"
    ))
}

/// Ends the use of GPUs at the end of the program, after all buffers are closed: waits for replays of CUDA graphs, at
/// most for the stall bound, and tells peers that the ranks of this process have left.
#[pyfunction]
pub(crate) fn finish(py: Python<'_>) {
    let limit = Config::from_env().unwrap_or_default().stall_timeout;
    py.detach(|| ep_cuda::finish(limit));
}
