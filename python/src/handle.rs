//! Handles, by their numbers: tensors carry the number, and the storage of the first such tensor owns the handle.

use std::collections::HashMap;
use std::sync::atomic::{AtomicI64, Ordering::Relaxed};
use std::sync::{Arc, Mutex, MutexGuard, OnceLock, PoisonError};

use ep::DispatchMode;
use ep_cuda::CudaHandle;
use ep_host::HostHandle;
use pyo3::prelude::*;
use pyo3::types::PyCapsule;

use crate::dlpack::{self, DataType, Device, Shape};
use crate::errors::Failure;

/// A handle of either backend, and what the caller's sizes follow from.
#[derive(Debug)]
pub(crate) struct Handle {
    pub(crate) of: Of,
    pub(crate) mode: DispatchMode,
    /// Tokens of this rank.
    pub(crate) tokens: usize,
    /// Rows that dispatch outputs have.
    pub(crate) rows: usize,
    pub(crate) has_capacity: bool,
}

/// Whose handle it is.
#[derive(Debug)]
pub(crate) enum Of {
    Host(HostHandle),
    /// Locked, since it has cells: the autograd engine uses and drops handles on threads of its own.
    Cuda(Mutex<CudaHandle>),
}

type Handles = HashMap<i64, Arc<Handle>>;

fn all() -> MutexGuard<'static, Handles> {
    static ALL: OnceLock<Mutex<Handles>> = OnceLock::new();
    ALL.get_or_init(Mutex::default).lock().unwrap_or_else(PoisonError::into_inner)
}

/// What a handle's tensor owns: its one element. With it goes the handle.
struct Number {
    number: i64,
    /// The number again, where the tensor's holder may overwrite it.
    element: Box<i64>,
}

impl Drop for Number {
    fn drop(&mut self) {
        // Freed after the lock is given back: that may take the lock of an arena.
        let handle = all().remove(&self.number);
        drop(handle);
    }
}

/// Registers a handle; returns the capsule of the tensor that owns it.
pub(crate) fn register(py: Python<'_>, handle: Handle) -> PyResult<Bound<'_, PyCapsule>> {
    static NEXT: AtomicI64 = AtomicI64::new(1);
    let number = NEXT.fetch_add(1, Relaxed);
    all().insert(number, Arc::new(handle));
    let mut number = Number { number, element: Box::new(number) };
    let data = std::ptr::from_mut(number.element.as_mut()).cast();
    // SAFETY: the box that `number` owns does not move with it.
    unsafe { dlpack::capsule(py, number, data, Device::CPU, DataType::I64, Shape { rows: 1, columns: None }) }
}

/// The handle of this number.
pub(crate) fn find(number: i64) -> Result<Arc<Handle>, Failure> {
    all().get(&number).cloned().ok_or_else(|| {
        Failure::Caller(format!(
            "handle: number {number} names none that is alive; keep the handle's own tensor, not a copy of the number"
        ))
    })
}
