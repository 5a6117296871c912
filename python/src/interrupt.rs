//! Ctrl-C while an operator waits for other ranks.

use std::collections::HashMap;
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::thread::ThreadId;

use ep::Interrupt;
use pyo3::prelude::*;

use crate::errors::Failure;

/// The exceptions that Python signal handlers raised while operators waited, by the thread that called the operator:
/// ranks that are threads of one process share this value.
#[derive(Debug, Clone, Default)]
pub(crate) struct Signals(Arc<Mutex<HashMap<ThreadId, PyErr>>>);

impl Signals {
    /// Returns the check that a waiting operator calls: it runs Python's signal handlers and stops the operator if one
    /// of them raises. Handlers run on the main thread only; on other threads the check never stops the operator.
    pub(crate) fn interrupt(&self) -> Interrupt {
        let signals = self.clone();
        // At the end of the process there may be no interpreter, and so no handler.
        Interrupt::new(move || Python::try_attach(|py| signals.raise(py)).unwrap_or(false))
    }

    /// Runs the handlers. Returns whether one has raised, now or in an earlier check during the same wait.
    fn raise(&self, py: Python<'_>) -> bool {
        let checked = py.check_signals();
        let mut raised = self.raised();
        let thread = std::thread::current().id();
        if let Err(error) = checked {
            raised.insert(thread, error);
        }
        raised.contains_key(&thread)
    }

    fn raised(&self) -> MutexGuard<'_, HashMap<ThreadId, PyErr>> {
        self.0.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Keeps an exception that a handler raised while other Python code ran during a call.
    pub(crate) fn keep(&self, error: PyErr) {
        self.raised().insert(std::thread::current().id(), error);
    }

    /// Returns the result of a call, or the exception of a handler that raised during the call.
    pub(crate) fn settle<T>(&self, result: Result<T, Failure>) -> Result<T, Failure> {
        match self.raised().remove(&std::thread::current().id()) {
            Some(error) => Err(Failure::Raised(error)),
            None => result,
        }
    }
}
