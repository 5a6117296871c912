//! Handles as tensors: a tensor holds the number of its handle, and the storage of the tensor owns the handle.

use std::collections::HashMap;
use std::sync::atomic::{AtomicI64, Ordering::Relaxed};
use std::sync::{Arc, Mutex, MutexGuard, OnceLock, PoisonError};

use ep::HandleShape;
use ep_cuda::CudaHandle;
use ep_host::HostHandle;
use pyo3::prelude::*;
use pyo3::types::PyCapsule;

use crate::dlpack::{self, DataType, Device, Shape};
use crate::errors::Failure;

/// A handle of either backend, with the sizes that a caller's tensors must have.
#[derive(Debug)]
pub(crate) struct Handle {
    pub(crate) of: Of,
    pub(crate) shape: HandleShape,
}

/// The backend's handle.
#[derive(Debug)]
pub(crate) enum Of {
    Host(HostHandle),
    /// Behind a lock because it has cells, and the autograd engine uses and drops handles on its own threads.
    Cuda(Mutex<CudaHandle>),
}

type Handles = HashMap<i64, Arc<Handle>>;

fn all() -> MutexGuard<'static, Handles> {
    static ALL: OnceLock<Mutex<Handles>> = OnceLock::new();
    ALL.get_or_init(Mutex::default).lock().unwrap_or_else(PoisonError::into_inner)
}

/// The owner of a handle's tensor. Dropping it removes the handle.
struct Number {
    number: i64,
    /// The tensor's element. Python code may overwrite it, so `number` is kept apart.
    element: Box<i64>,
}

impl Drop for Number {
    fn drop(&mut self) {
        // Drop the handle after the lock is released: dropping it may take the lock of an arena.
        let handle = all().remove(&self.number);
        drop(handle);
    }
}

/// Registers a handle. Returns the capsule of the tensor that owns it.
pub(crate) fn register(py: Python<'_>, handle: Handle) -> PyResult<Bound<'_, PyCapsule>> {
    static NEXT: AtomicI64 = AtomicI64::new(1);
    let number = NEXT.fetch_add(1, Relaxed);
    all().insert(number, Arc::new(handle));
    let mut number = Number { number, element: Box::new(number) };
    let data = std::ptr::from_mut(number.element.as_mut()).cast();
    // SAFETY: `data` points into a box, which stays in place when `number` moves, and lives as long as `number`.
    unsafe { dlpack::capsule(py, number, data, Device::CPU, DataType::I64, Shape { rows: 1, columns: None }) }
}

/// Finds the handle with this number.
pub(crate) fn find(number: i64) -> Result<Arc<Handle>, Failure> {
    all().get(&number).cloned().ok_or_else(|| {
        Failure::Caller(format!(
            "handle: number {number} names no live handle; keep the handle's own tensor, not a copy of the number"
        ))
    })
}
