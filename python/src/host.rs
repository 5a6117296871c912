//! Tensors of the CPU.

use std::borrow::Cow;

use ep::error::RoutingProblem;
use ep::{Backend, CallerError, DispatchMode, Rank, Result, Routing};
use ep_host::{HostBuffer, HostHandle, HostMemory};

use crate::call::{Form, Report, RoutingTensors, Span, Tensors};
use crate::errors::Failure;
use crate::handle::Of;

impl Tensors for HostBuffer {
    unsafe fn borrow(tensor: Span) -> HostMemory {
        // SAFETY: the caller's promise. `hybrid_ep.ops` copies tensors that are not aligned.
        unsafe { HostMemory::borrowed(tensor.0 as *mut u8, tensor.1) }
    }

    fn address(memory: &mut HostMemory) -> usize {
        memory.as_bytes_mut().as_mut_ptr().addr()
    }

    fn registered(&self) -> usize {
        self.registered_bytes()
    }

    fn use_stream(&mut self, _: usize) -> Result<()> {
        Ok(())
    }

    fn clear_rest(&mut self, handle: &HostHandle, memory: &mut HostMemory, row_bytes: usize) -> Result<()> {
        let used = handle.receive_shape().rows * row_bytes;
        memory.as_bytes_mut()[used..].fill(0);
        Ok(())
    }

    fn preprocess_tensors(
        &mut self,
        tensors: &RoutingTensors,
        mode: DispatchMode,
        capacity: Option<usize>,
        report: Report,
    ) -> Result<(HostHandle, usize), Failure> {
        // SAFETY: Python has checked the tensors and keeps them alive during this call.
        let routing = unsafe { routing(self.rank(), self.world().experts(), tensors) }?;
        let handle = self.preprocess(&routing, mode, capacity)?;
        let shape = handle.receive_shape();
        // SAFETY: Python made these tensors for this call.
        unsafe {
            report.write_counts(shape);
            report.write_overflow(shape);
        }
        let rows = shape.allocated_rows();
        Ok((handle, rows))
    }

    fn wrap(handle: HostHandle) -> Of {
        Of::Host(handle)
    }

    fn with_handle<T>(
        handle: &Of,
        call: impl FnOnce(&HostHandle) -> Result<T, Failure>,
    ) -> Result<T, Failure> {
        match handle {
            Of::Host(handle) => call(handle),
            Of::Cuda(_) => Err(Failure::Caller("handle: it was made by a buffer of the cuda backend".into())),
        }
    }
}

/// # Safety
/// As [`Span::elements`].
unsafe fn routing(rank: Rank, experts: usize, tensors: &RoutingTensors) -> Result<Routing> {
    let &RoutingTensors { form, tokens, width, routing, weights } = tensors;
    let no_weights = || vec![0.0; tokens * width];
    // SAFETY: the caller's promise.
    let weights =
        unsafe { weights.map_or_else(|| no_weights().into(), |weights| Cow::from(weights.elements())) };
    match form {
        // `Routing` derives the number of tokens from its indices, so tokens without indices get one index, -1.
        Form::NarrowTopK | Form::WideTopK if width == 0 => {
            Routing::from_topk(rank, experts, 1, &vec![-1; tokens], &vec![0.0; tokens])
        }
        // SAFETY: the caller's promise.
        Form::NarrowTopK => Routing::from_topk(rank, experts, width, unsafe { routing.elements() }, &weights),
        Form::WideTopK => {
            // SAFETY: the caller's promise.
            let wide: &[i64] = unsafe { routing.elements() };
            Routing::from_topk(rank, experts, width, &narrow(rank, experts, width, wide)?, &weights)
        }
        // SAFETY: the caller's promise.
        Form::Map { .. } => Routing::from_map(rank, experts, unsafe { routing.elements() }, &weights),
    }
}

/// Narrows expert indices to 32 bits; an index that does not fit is out of range.
fn narrow(rank: Rank, experts: usize, width: usize, wide: &[i64]) -> Result<Vec<i32>> {
    let one = |(at, &index): (usize, &i64)| {
        i32::try_from(index).map_err(|_| {
            let problem = RoutingProblem::IndexOutOfRange { index, experts };
            CallerError::Routing { rank, row: at / width, problem }.into()
        })
    };
    wide.iter().enumerate().map(one).collect()
}
