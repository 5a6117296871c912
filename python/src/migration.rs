//! The migration of experts: `ep_migrate`.

use ep::{CallerError, Rank};
use ep_migrate::{Domain, Settings, Shape, Stats};
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
    of: Typed,
    signals: Signals,
}

/// A migration of either type of weights.
enum Typed {
    F32(ep_migrate::Migration<f32>),
    Bf16(ep_migrate::Migration<u16>),
}

/// Runs `$call` on the migration of either type, with the type of its weights as `$weight`.
macro_rules! with_type {
    ($typed:expr, $migration:ident, $weight:ident, $call:expr) => {
        match $typed {
            Typed::F32($migration) => {
                type $weight = f32;
                $call
            }
            Typed::Bf16($migration) => {
                type $weight = u16;
                $call
            }
        }
    };
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
        let (domain, shape, parsed) = settings.parse(&signals)?;
        let carrier = || carrier_of(py, carrier.clone_ref(py), &signals);
        let saved = saved.map(|bytes| bytes.as_bytes());
        let of = match (settings.wide, saved) {
            (true, None) => Typed::F32(ep_migrate::Migration::new(domain, shape, parsed, carrier())?),
            (true, Some(saved)) => {
                Typed::F32(ep_migrate::Migration::resume(domain, shape, parsed, carrier(), saved)?)
            }
            (false, None) => Typed::Bf16(ep_migrate::Migration::new(domain, shape, parsed, carrier())?),
            (false, Some(saved)) => {
                Typed::Bf16(ep_migrate::Migration::resume(domain, shape, parsed, carrier(), saved)?)
            }
        };
        Ok(Self { of, signals })
    }

    /// `weights` is `[experts_per_rank, elements]`.
    fn publish(&self, py: Python<'_>, layer: usize, weights: Span) -> Result<(), Failure> {
        let result = py.detach(|| {
            with_type!(&self.of, migration, W, {
                // SAFETY: Python has checked the type of the tensor, and keeps it for this call.
                migration.publish(layer, unsafe { weights.elements::<W>() })
            })
        });
        self.signals.settle(result.map_err(Failure::from))
    }

    /// Makes the next messages of all layers complete.
    fn start_over(&self, py: Python<'_>) {
        py.detach(|| match &self.of {
            Typed::F32(migration) => migration.start_over(),
            Typed::Bf16(migration) => migration.start_over(),
        });
    }

    /// `replicas` is `[peers, experts_per_rank, elements]`. Returns the step of each peer's weights.
    fn gather(&self, py: Python<'_>, layer: usize, replicas: Span) -> Result<Vec<u64>, Failure> {
        let result = py.detach(|| {
            with_type!(&self.of, migration, W, {
                // SAFETY: Python has checked the type of the tensor, keeps it for this call, and lets nothing else use it.
                migration.gather(layer, unsafe { replicas.elements_mut::<W>() })
            })
        });
        self.signals.settle(result.map_err(Failure::from))
    }

    /// `gradients` has the shape of the replicas.
    fn send_gradients(&self, py: Python<'_>, layer: usize, gradients: Span) -> Result<(), Failure> {
        let result = py.detach(|| {
            with_type!(&self.of, migration, W, {
                // SAFETY: Python has checked the type of the tensor, and keeps it for this call.
                migration.send_gradients(layer, unsafe { gradients.elements::<W>() })
            })
        });
        self.signals.settle(result.map_err(Failure::from))
    }

    /// `own` is `[experts_per_rank, elements]`, and `sum` f32 of that shape.
    fn reduce_gradients(&self, py: Python<'_>, layer: usize, own: Span, sum: Span) -> Result<(), Failure> {
        let result = py.detach(|| {
            with_type!(&self.of, migration, W, {
                // SAFETY: Python has checked the types of the tensors, keeps them for this call, and lets nothing else use
                // the sum.
                let (own, sum) = unsafe { (own.elements::<W>(), sum.elements_mut::<f32>()) };
                migration.reduce_gradients(layer, own, sum)
            })
        });
        self.signals.settle(result.map_err(Failure::from))
    }

    fn save<'py>(&self, py: Python<'py>) -> Result<Bound<'py, PyBytes>, Failure> {
        let saved = py.detach(|| match &self.of {
            Typed::F32(migration) => migration.save(),
            Typed::Bf16(migration) => migration.save(),
        })?;
        Ok(PyBytes::new(py, &saved))
    }

    /// Bytes and seconds by name.
    fn stats<'py>(&self, py: Python<'py>) -> PyResult<Bound<'py, PyDict>> {
        let stats: Stats = py.detach(|| match &self.of {
            Typed::F32(migration) => migration.stats(),
            Typed::Bf16(migration) => migration.stats(),
        });
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

impl Typed {
    fn close(&self, at_once: bool) {
        match (self, at_once) {
            (Self::F32(migration), false) => migration.close(),
            (Self::F32(migration), true) => migration.close_at_once(),
            (Self::Bf16(migration), false) => migration.close(),
            (Self::Bf16(migration), true) => migration.close_at_once(),
        }
    }
}

impl Drop for Migration {
    /// Releases Python's lock, which is held while Python drops an object: the threads that `close` waits for need it.
    fn drop(&mut self) {
        Python::try_attach(|py| py.detach(|| self.of.close(true)));
    }
}

impl MigrationSettings {
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
