//! The migration of experts: `ep_migrate`.

use ep::{CallerError, Rank};
use ep_codec::{Host, Place, Weight};
use ep_cuda::{GpuMut, GpuPlace, GpuRef};
use ep_migrate::{Carrier, Domain, Settings, Shape, Stats};
use pyo3::prelude::*;
use pyo3::types::{PyBytes, PyDict};

use crate::call::Span;
use crate::carrier::{carrier_of, seconds};
use crate::errors::Failure;
use crate::interrupt::Signals;

/// The settings of a migration, read from a Python dict.
#[derive(Debug, FromPyObject)]
#[pyo3(from_item_all)]
pub(crate) struct MigrationSettings {
    rank: u32,
    /// The ranks of the expert domain, ascending.
    domain: Vec<u32>,
    experts_per_rank: usize,
    /// Number of weights of an expert in each layer.
    expert_elements: Vec<usize>,
    /// Whether weights are f32 instead of bf16.
    wide: bool,
    /// The GPU whose memory the tensors are in; `None` if they are in main memory.
    gpu: Option<usize>,
    weights: String,
    gradients: String,
    depth: usize,
    staleness: u64,
    shared_refresh: u64,
    /// Seconds.
    timeout: f64,
    run: u64,
}

/// One rank's part in a migration.
///
/// Every method releases Python's lock before it calls the migration: the migration's threads take that lock inside their own.
#[pyclass(frozen)]
pub(crate) struct Migration {
    of: Box<dyn Typed>,
    signals: Signals,
}

/// A migration of either type of weights, at either place. The functions do what those of [`ep_migrate::Migration`] do.
///
/// # Safety
/// Of all functions that take spans: Python has checked types and devices of the tensors, keeps them for the call, and lets nothing
/// else use those that are written. `stream` is PyTorch's current stream of the GPU, or ignored.
trait Typed: Send + Sync {
    unsafe fn publish(&self, layer: usize, weights: Span, stream: usize) -> ep::Result<()>;
    fn start_over(&self);
    unsafe fn gather(&self, layer: usize, replicas: Span, stream: usize) -> ep::Result<Vec<u64>>;
    unsafe fn send_gradients(&self, layer: usize, gradients: Span, stream: usize) -> ep::Result<()>;
    unsafe fn reduce_gradients(&self, layer: usize, own: Span, sum: Span, stream: usize) -> ep::Result<()>;
    fn save(&self) -> ep::Result<Vec<u8>>;
    fn stats(&self) -> Stats;
    fn close(&self, at_once: bool);
}

/// A place whose elements tensors lend.
trait Lender: Place {
    /// Makes later calls wait for PyTorch's current stream.
    unsafe fn follow(&self, stream: usize) -> ep::Result<()>;
    unsafe fn lend<'a, T: Weight>(&self, span: Span) -> Self::Ref<'a, T>;
    unsafe fn lend_mut<'a, T: Weight>(&self, span: Span) -> Self::Mut<'a, T>;
}

impl Lender for Host {
    unsafe fn follow(&self, _: usize) -> ep::Result<()> {
        Ok(())
    }

    unsafe fn lend<'a, T: Weight>(&self, span: Span) -> &'a [T] {
        // SAFETY: as for the functions of `Typed`.
        unsafe { span.elements() }
    }

    unsafe fn lend_mut<'a, T: Weight>(&self, span: Span) -> &'a mut [T] {
        // SAFETY: as for the functions of `Typed`.
        unsafe { span.elements_mut() }
    }
}

impl Lender for GpuPlace {
    unsafe fn follow(&self, stream: usize) -> ep::Result<()> {
        // SAFETY: as for the functions of `Typed`.
        unsafe { self.follow(stream as *mut _) }
    }

    unsafe fn lend<'a, T: Weight>(&self, Span(address, bytes): Span) -> GpuRef<'a, T> {
        // SAFETY: as for the functions of `Typed`; `follow` was called.
        unsafe { GpuPlace::lend(self, address as u64, bytes / size_of::<T>()) }
    }

    unsafe fn lend_mut<'a, T: Weight>(&self, Span(address, bytes): Span) -> GpuMut<'a, T> {
        // SAFETY: as above.
        unsafe { GpuPlace::lend_mut(self, address as u64, bytes / size_of::<T>()) }
    }
}

struct At<T: Weight, P: Place> {
    place: P,
    migration: ep_migrate::Migration<T, P>,
}

impl<T: Weight, P: Lender> Typed for At<T, P> {
    unsafe fn publish(&self, layer: usize, weights: Span, stream: usize) -> ep::Result<()> {
        // SAFETY: the caller's promise.
        let weights = unsafe {
            self.place.follow(stream)?;
            self.place.lend::<T>(weights)
        };
        self.migration.publish(layer, weights)
    }

    fn start_over(&self) {
        self.migration.start_over();
    }

    unsafe fn gather(&self, layer: usize, replicas: Span, stream: usize) -> ep::Result<Vec<u64>> {
        // SAFETY: the caller's promise.
        let replicas = unsafe {
            self.place.follow(stream)?;
            self.place.lend_mut::<T>(replicas)
        };
        self.migration.gather(layer, replicas)
    }

    unsafe fn send_gradients(&self, layer: usize, gradients: Span, stream: usize) -> ep::Result<()> {
        // SAFETY: the caller's promise.
        let gradients = unsafe {
            self.place.follow(stream)?;
            self.place.lend::<T>(gradients)
        };
        self.migration.send_gradients(layer, gradients)
    }

    unsafe fn reduce_gradients(&self, layer: usize, own: Span, sum: Span, stream: usize) -> ep::Result<()> {
        // SAFETY: the caller's promise.
        let (own, sum) = unsafe {
            self.place.follow(stream)?;
            (self.place.lend::<T>(own), self.place.lend_mut::<f32>(sum))
        };
        self.migration.reduce_gradients(layer, own, sum)
    }

    fn save(&self) -> ep::Result<Vec<u8>> {
        self.migration.save()
    }

    fn stats(&self) -> Stats {
        self.migration.stats()
    }

    fn close(&self, at_once: bool) {
        if at_once { self.migration.close_at_once() } else { self.migration.close() }
    }
}

#[pymethods]
impl Migration {
    /// Starts a migration, or continues the saved one. Python keeps the carrier's connections until `close`.
    #[new]
    fn new(
        py: Python<'_>,
        settings: MigrationSettings,
        carrier: Py<PyAny>,
        saved: Option<&Bound<'_, PyBytes>>,
    ) -> Result<Self, Failure> {
        let signals = Signals::default();
        let carrier = carrier_of(py, carrier, &signals);
        let saved = saved.map(|bytes| bytes.as_bytes());
        let of = match (settings.wide, settings.gpu.map(GpuPlace::new).transpose()?) {
            (true, None) => settings.start::<f32, _>(Host, carrier, saved, &signals)?,
            (false, None) => settings.start::<u16, _>(Host, carrier, saved, &signals)?,
            (true, Some(gpu)) => settings.start::<f32, _>(gpu, carrier, saved, &signals)?,
            (false, Some(gpu)) => settings.start::<u16, _>(gpu, carrier, saved, &signals)?,
        };
        Ok(Self { of, signals })
    }

    /// `weights` is `[experts_per_rank, elements]`.
    fn publish(&self, py: Python<'_>, layer: usize, weights: Span, stream: usize) -> Result<(), Failure> {
        // SAFETY: Python's promise (`Engine` in hybrid_ep/migration/engine.py).
        let result = py.detach(|| unsafe { self.of.publish(layer, weights, stream) });
        self.signals.settle(result.map_err(Failure::from))
    }

    /// Makes the next messages of all layers complete.
    fn start_over(&self, py: Python<'_>) {
        py.detach(|| self.of.start_over());
    }

    /// `replicas` is `[peers, experts_per_rank, elements]`. Returns the step of each peer's weights.
    fn gather(
        &self,
        py: Python<'_>,
        layer: usize,
        replicas: Span,
        stream: usize,
    ) -> Result<Vec<u64>, Failure> {
        // SAFETY: Python's promise.
        let result = py.detach(|| unsafe { self.of.gather(layer, replicas, stream) });
        self.signals.settle(result.map_err(Failure::from))
    }

    /// `gradients` has the shape of the replicas.
    fn send_gradients(
        &self,
        py: Python<'_>,
        layer: usize,
        gradients: Span,
        stream: usize,
    ) -> Result<(), Failure> {
        // SAFETY: Python's promise.
        let result = py.detach(|| unsafe { self.of.send_gradients(layer, gradients, stream) });
        self.signals.settle(result.map_err(Failure::from))
    }

    /// `own` is `[experts_per_rank, elements]`, and `sum` f32 of that shape.
    fn reduce_gradients(
        &self,
        py: Python<'_>,
        layer: usize,
        own: Span,
        sum: Span,
        stream: usize,
    ) -> Result<(), Failure> {
        // SAFETY: Python's promise.
        let result = py.detach(|| unsafe { self.of.reduce_gradients(layer, own, sum, stream) });
        self.signals.settle(result.map_err(Failure::from))
    }

    fn save<'py>(&self, py: Python<'py>) -> Result<Bound<'py, PyBytes>, Failure> {
        let saved = py.detach(|| self.of.save())?;
        Ok(PyBytes::new(py, &saved))
    }

    /// Bytes and seconds by name.
    fn stats<'py>(&self, py: Python<'py>) -> PyResult<Bound<'py, PyDict>> {
        let stats: Stats = py.detach(|| self.of.stats());
        let dict = PyDict::new(py);
        dict.set_item("weights_sent", stats.traffic.weights_sent)?;
        dict.set_item("weights_received", stats.traffic.weights_received)?;
        dict.set_item("gradients_sent", stats.traffic.gradients_sent)?;
        dict.set_item("gradients_received", stats.traffic.gradients_received)?;
        dict.set_item("encoding", stats.encoding.as_secs_f64())?;
        dict.set_item("decoding", stats.decoding.as_secs_f64())?;
        dict.set_item("gather_waits", stats.gather_waits.as_secs_f64())?;
        dict.set_item("reduce_waits", stats.reduce_waits.as_secs_f64())?;
        Ok(dict)
    }

    /// With `at_once`, waits at most a second for the peers.
    fn close(&self, py: Python<'_>, at_once: bool) {
        py.detach(|| self.of.close(at_once));
    }
}

impl Drop for Migration {
    /// Releases Python's lock, which is held while Python drops an object: the threads that `close` waits for need it.
    fn drop(&mut self) {
        Python::try_attach(|py| py.detach(|| self.of.close(true)));
    }
}

impl MigrationSettings {
    fn start<T: Weight, P: Lender>(
        &self,
        place: P,
        carrier: Box<dyn Carrier>,
        saved: Option<&[u8]>,
        signals: &Signals,
    ) -> Result<Box<dyn Typed>, Failure> {
        let (domain, shape, settings) = self.parse(signals)?;
        let at = place.clone();
        let migration = match saved {
            None => ep_migrate::Migration::<T, P>::new_in(at, domain, shape, settings, carrier)?,
            Some(saved) => {
                ep_migrate::Migration::<T, P>::resume_in(at, domain, shape, settings, carrier, saved)?
            }
        };
        Ok(Box::new(At { place, migration }))
    }

    fn parse(&self, signals: &Signals) -> Result<(Domain, Shape, Settings), Failure> {
        let ranks: Vec<Rank> = self.domain.iter().copied().map(Rank).collect();
        let domain = Domain::new(Rank(self.rank), &ranks)?;
        let shape =
            Shape { experts_per_rank: self.experts_per_rank, expert_elements: self.expert_elements.clone() };
        let wrong = |key, value: String, problem: String| CallerError::Config { key, value, problem };
        let timeout = seconds(self.timeout)?;
        let settings = Settings {
            weights: self
                .weights
                .parse()
                .map_err(|error| wrong("weights", self.weights.clone(), format!("{error}")))?,
            gradients: self
                .gradients
                .parse()
                .map_err(|error| wrong("gradients", self.gradients.clone(), format!("{error}")))?,
            depth: self.depth,
            staleness: self.staleness,
            shared_refresh: self.shared_refresh,
            timeout,
            run: self.run,
            interrupt: signals.interrupt(),
        };
        Ok((domain, shape, settings))
    }
}
