//! Tensors of a GPU.

use std::sync::{Mutex, PoisonError};

use ep::{Backend, DispatchMode, Result};
use ep_cuda::{CudaBuffer, CudaHandle, CudaMemory, DeviceReport, DeviceRouting, Indices};
use pyo3::prelude::*;

use crate::call::{Form, Report, RoutingTensors, Span, Tensors};
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

    fn registered(&self) -> usize {
        self.registered_bytes()
    }

    fn use_stream(&mut self, stream: usize) -> Result<()> {
        // SAFETY: the current stream of PyTorch; the caller of the operator keeps it alive during this call.
        unsafe { self.set_stream(stream as *mut _) }
    }

    /// Clears all rows, since only the GPU knows how many rows dispatch writes.
    fn clear_rest(&mut self, _: &CudaHandle, memory: &mut CudaMemory, _: usize) -> Result<()> {
        self.clear(memory)
    }

    fn preprocess_tensors(
        &mut self,
        tensors: &RoutingTensors,
        mode: DispatchMode,
        capacity: Option<usize>,
        report: Report,
    ) -> Result<(CudaHandle, usize), Failure> {
        let &RoutingTensors { form, tokens, width, routing, weights } = tensors;
        // SAFETY: the tensors were checked in Python, and live until the stream has passed this call.
        let borrow = |span: Span| unsafe { Self::borrow(span) };
        let (routing, weights) = (borrow(routing), weights.map(borrow));
        let topk = |indices| DeviceRouting::TopK { tokens, k: width, indices, weights: weights.as_ref() };
        let routing = match form {
            Form::NarrowTopK => topk(Indices::Narrow(&routing)),
            Form::WideTopK => topk(Indices::Wide(&routing)),
            Form::Map { most } => DeviceRouting::Map { tokens, most, map: &routing, probs: weights.as_ref() },
        };
        let counts_bytes = size_of::<i64>() * self.world().placement().local_experts(self.rank());
        let cell = |address: usize, bytes: usize| (address != 0).then(|| borrow(Span(address, bytes)));
        let mut overflow = cell(report.overflow, size_of::<i32>());
        let Some(capacity) = capacity else {
            let told = DeviceReport { overflow: overflow.as_mut(), ..DeviceReport::default() };
            let handle = self.preprocess_on_device(&routing, mode, None, told)?;
            let shape = self.receive_shape(&handle)?;
            // SAFETY: Python made these tensors for this call, in host memory since there is no capacity.
            unsafe { report.write_counts(&shape) };
            return Ok((handle, shape.allocated_rows()));
        };
        let mut tokens_per_expert = cell(report.tokens_per_expert, counts_bytes);
        let mut kept_per_expert = cell(report.kept_per_expert, counts_bytes);
        let told = DeviceReport {
            tokens_per_expert: tokens_per_expert.as_mut(),
            kept_per_expert: kept_per_expert.as_mut(),
            overflow: overflow.as_mut(),
        };
        Ok((self.preprocess_on_device(&routing, mode, Some(capacity), told)?, capacity))
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
