//! The carrier of a migration: one over the engines of rails, or one that Python code implements.

use std::sync::Arc;
use std::time::Duration;

use ep::{CallerError, Config, Rank};
use ep_migrate::{Carrier, CarrierError, Lane, Receiving, Sending};
use pyo3::exceptions::{PyConnectionError, PyException, PyTimeoutError};
use pyo3::prelude::*;
use pyo3::types::PyBytes;

use crate::errors::Failure;
use crate::interrupt::Signals;
use crate::join::Callback;

/// A carrier over an engine. Its messages do not pass through Python.
#[pyclass(frozen)]
pub(crate) struct RailCarrier {
    of: Arc<ep_carrier::RailCarrier>,
}

impl Drop for RailCarrier {
    /// Releases Python's lock, which is held while Python drops an object: closing waits for messages under way.
    fn drop(&mut self) {
        Python::try_attach(|py| py.detach(|| self.of.close()));
    }
}

#[pymethods]
impl RailCarrier {
    /// Makes this process rank `rank` of a carrier, whose ranks exchange bytes through `meeting`. `names` are the ranks in
    /// the numbering of the migration. `timeout` is in seconds. Collective.
    #[staticmethod]
    fn join(
        py: Python<'_>,
        rank: u32,
        names: Vec<u32>,
        engine: String,
        timeout: f64,
        meeting: Py<PyAny>,
    ) -> Result<Self, Failure> {
        let signals = Signals::default();
        let mut config = Config::from_env()?;
        config.host.transport.engine = engine;
        config.timeout = seconds(timeout)?;
        config.interrupt = signals.interrupt();
        let names: Vec<Rank> = names.into_iter().map(Rank).collect();
        let mut meet = Callback::new(Rank(rank), names.len(), meeting)?;
        let joined = py.detach(|| join(&mut meet, &names, &config));
        let joined = joined.map_err(|error| meet.cause(error.into()));
        signals.settle(joined.map(|carrier| Self { of: Arc::new(carrier) }))
    }

    /// Ends the carrier and its threads.
    fn close(&self, py: Python<'_>) {
        py.detach(|| self.of.close());
    }
}

#[cfg(target_os = "linux")]
fn join(meet: &mut Callback, names: &[Rank], config: &Config) -> ep::Result<ep_carrier::RailCarrier> {
    ep_carrier::RailCarrier::join(meet, names, config)
}

#[cfg(not(target_os = "linux"))]
fn join(_: &mut Callback, _: &[Rank], config: &Config) -> ep::Result<ep_carrier::RailCarrier> {
    let (key, value) = ("carrier", config.host.transport.engine.clone());
    Err(CallerError::Config { key, value, problem: "needs Linux; use \"gloo\"".into() }.into())
}

/// The setting `timeout`.
pub(crate) fn seconds(timeout: f64) -> Result<Duration, CallerError> {
    Duration::try_from_secs_f64(timeout).map_err(|error| CallerError::Config {
        key: "timeout",
        value: timeout.to_string(),
        problem: error.to_string(),
    })
}

/// The carrier that a Python object is.
pub(crate) fn carrier_of(py: Python<'_>, object: Py<PyAny>, signals: &Signals) -> Box<dyn Carrier> {
    match object.bind(py).cast::<RailCarrier>() {
        Ok(carrier) => Box::new(Arc::clone(&carrier.get().of)),
        Err(_) => Box::new(PythonCarrier { object, signals: signals.clone() }),
    }
}

/// A carrier whose methods are Python code: `send(rank, lane, bytes)` returns an object with `wait()`, `receive(rank, lane,
/// capacity)` one with `wait(length)`, which returns the bytes that arrived; `abort()` closes all connections.
#[derive(Debug)]
struct PythonCarrier {
    object: Py<PyAny>,
    signals: Signals,
}

#[derive(Debug)]
struct PythonTransfer {
    object: Py<PyAny>,
    signals: Signals,
}

/// Runs Python code. At the end of the process there may be no interpreter: the connections then count as closed.
fn attached<R>(signals: &Signals, work: impl FnOnce(Python<'_>) -> PyResult<R>) -> Result<R, CarrierError> {
    let attached = Python::try_attach(|py| work(py).map_err(|error| failed(py, signals, error)));
    attached.unwrap_or(Err(CarrierError::Closed))
}

fn failed(py: Python<'_>, signals: &Signals, error: PyErr) -> CarrierError {
    if !error.is_instance_of::<PyException>(py) {
        // Not a failure of the carrier: a handler of a signal that ran during the call has raised.
        let text = error.to_string();
        signals.keep(error);
        return CarrierError::Failed(text);
    }
    let is_closed =
        error.is_instance_of::<PyConnectionError>(py) && !error.is_instance_of::<PyTimeoutError>(py);
    if is_closed { CarrierError::Closed } else { CarrierError::Failed(error.to_string()) }
}

impl Carrier for PythonCarrier {
    fn send(&self, to: Rank, lane: Lane, message: Arc<Vec<u8>>) -> Result<Box<dyn Sending>, CarrierError> {
        attached(&self.signals, |py| {
            let bytes = PyBytes::new(py, &message);
            let object = self.object.call_method1(py, "send", (to.0, lane as u8, bytes))?;
            let signals = self.signals.clone();
            Ok(Box::new(PythonTransfer { object, signals }) as Box<dyn Sending>)
        })
    }

    fn receive(&self, from: Rank, lane: Lane, capacity: usize) -> Result<Box<dyn Receiving>, CarrierError> {
        attached(&self.signals, |py| {
            let object = self.object.call_method1(py, "receive", (from.0, lane as u8, capacity))?;
            let signals = self.signals.clone();
            Ok(Box::new(PythonTransfer { object, signals }) as Box<dyn Receiving>)
        })
    }

    fn abort(&self) {
        // If this fails, the carrier has already closed, or the process is ending.
        let _ = attached(&self.signals, |py| self.object.call_method0(py, "abort").map(drop));
    }
}

impl Sending for PythonTransfer {
    fn wait(self: Box<Self>) -> Result<(), CarrierError> {
        attached(&self.signals, |py| self.object.call_method0(py, "wait").map(drop))
    }
}

impl Receiving for PythonTransfer {
    fn wait(self: Box<Self>, bytes: usize) -> Result<Vec<u8>, CarrierError> {
        attached(&self.signals, |py| self.object.call_method1(py, "wait", (bytes,))?.extract(py))
    }
}
