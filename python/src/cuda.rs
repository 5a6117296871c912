//! Tensors of a GPU.

use std::sync::{Mutex, PoisonError};

use ep::Result;
use ep_cuda::{CudaBuffer, CudaHandle, CudaMemory};
use pyo3::prelude::*;

use crate::call::{Span, Tensors};
use crate::errors::Failure;
use crate::handle::Of;

/// Checks that there is a driver, and that all GPUs are supported. The error says what is missing.
#[pyfunction]
pub(crate) fn check_cuda(py: Python<'_>) -> Result<(), Failure> {
    Ok(py.detach(ep_cuda::check_available)?)
}

impl Tensors for CudaBuffer {
    unsafe fn borrow(tensor: Span) -> CudaMemory {
        // SAFETY: the caller's promise. `hybrid_ep.ops` copies tensors that are not aligned.
        unsafe { CudaMemory::borrowed(tensor.0 as u64, tensor.1) }
    }

    fn address(memory: &mut CudaMemory) -> usize {
        memory.address() as usize
    }

    fn use_stream(&mut self, stream: usize) -> Result<()> {
        // SAFETY: the current stream of PyTorch; the caller of the operator keeps it alive during this call.
        unsafe { self.set_stream(stream as *mut _) }
    }

    fn wrap(handle: CudaHandle) -> Of {
        Of::Cuda(Mutex::new(handle))
    }

    fn with_handle<T>(
        handle: &Of,
        call: impl FnOnce(&CudaHandle) -> Result<T, Failure>,
    ) -> Result<T, Failure> {
        match handle {
            Of::Cuda(handle) => call(&handle.lock().unwrap_or_else(PoisonError::into_inner)),
            Of::Host(_) => Err(Failure::Caller("handle: it was made by a buffer of the host backend".into())),
        }
    }
}
