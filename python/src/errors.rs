//! Conversion of errors to the exceptions of `hybrid_ep.errors`.

use ep::{EnvironmentError, Error};
use pyo3::prelude::*;
use pyo3::sync::PyOnceLock;
use pyo3::types::{PyDict, PyType};

/// Why a call of this module failed.
#[derive(Debug)]
pub(crate) enum Failure {
    /// An error of the library.
    Library(Error),
    /// The call does not fit the state of the buffer or the handle.
    Caller(String),
    /// An exception of Python code that this module called.
    Raised(PyErr),
}

impl<E: Into<Error>> From<E> for Failure {
    fn from(error: E) -> Self {
        Self::Library(error.into())
    }
}

impl From<Failure> for PyErr {
    fn from(failure: Failure) -> Self {
        match failure {
            Failure::Raised(error) => error,
            Failure::Caller(text) => Python::attach(|py| caller(py, text)),
            Failure::Library(error) => Python::attach(|py| library(py, &error)),
        }
    }
}

/// The error for a lock whose holder panicked: the state behind the lock may be inconsistent.
pub(crate) fn poisoned() -> Failure {
    EnvironmentError::new(
        "using this buffer",
        "an earlier call of it ended in a panic, whose text is on stderr",
        "make new buffers on all ranks",
    )
    .into()
}

fn caller(py: Python<'_>, text: String) -> PyErr {
    class(py, "CallerError").map_or_else(|error| error, |class| PyErr::from_type(class, text))
}

fn library(py: Python<'_>, error: &Error) -> PyErr {
    let raised = match error {
        Error::Caller(_) => return caller(py, error.to_string()),
        Error::Environment(_) => {
            class(py, "SetupError").map(|class| PyErr::from_type(class, error.to_string()))
        }
        Error::Peer(peer) => peer_error(py, peer),
        _ => class(py, "HybridEPError").map(|class| PyErr::from_type(class, error.to_string())),
    };
    raised.unwrap_or_else(|error| error)
}

fn peer_error(py: Python<'_>, error: &ep::PeerError) -> PyResult<PyErr> {
    let known = PyDict::new(py);
    known.set_item("peer", error.peer.0)?;
    known.set_item("rank", error.rank.0)?;
    known.set_item("operator", error.operator.to_string())?;
    known.set_item("fault", error.fault.to_string())?;
    known.set_item("step", error.step)?;
    known.set_item("machine", error.machine.as_deref())?;
    let value = class(py, "PeerError")?.call((error.to_string(),), Some(&known))?;
    Ok(PyErr::from_value(value))
}

/// Finds a class of `hybrid_ep.errors`.
fn class<'py>(py: Python<'py>, name: &str) -> PyResult<Bound<'py, PyType>> {
    static MODULE: PyOnceLock<Py<PyModule>> = PyOnceLock::new();
    let module = MODULE.get_or_try_init(py, || py.import("hybrid_ep.errors").map(Bound::unbind))?;
    Ok(module.bind(py).getattr(name)?.cast_into()?)
}
