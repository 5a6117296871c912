//! The operators, once the arguments of a method are numbers.

use ep_cuda::CudaMemory;
use ep_host::HostMemory;
use pyo3::intern;
use pyo3::prelude::*;

use super::{Buffer, Either};
use crate::call::{self, CombineCall, Delivered, DispatchCall, Output, Span};
use crate::dlpack::{DataType, Device, Shape};
use crate::errors::Failure;
use crate::exchange::Exchange;
use crate::handle;
use crate::tensors::Reader;

impl Buffer {
    pub(super) fn dispatched(
        &self,
        py: Python<'_>,
        stream: usize,
        number: i64,
        call: &DispatchCall,
    ) -> Result<Either<Delivered<HostMemory>, Delivered<CudaMemory>>, Failure> {
        let handle = handle::find(number)?;
        self.operate(py, stream, |end| match end {
            Either::Host(end) => call::dispatch(&mut **end, &handle, call).map(Either::Host),
            Either::Cuda(end) => call::dispatch(&mut **end, &handle, call).map(Either::Cuda),
        })
    }

    pub(super) fn combined(
        &self,
        py: Python<'_>,
        stream: usize,
        number: i64,
        call: &CombineCall,
    ) -> Result<(), Failure> {
        let handle = handle::find(number)?;
        self.operate(py, stream, |end| with_end!(end, end => call::combine(&mut **end, &handle, call)))
    }

    /// Allocates registered memory.
    pub(super) fn allocated(
        &self,
        py: Python<'_>,
        stream: usize,
        dtype: DataType,
        shape: Shape,
    ) -> Result<Either<Output<HostMemory>, Output<CudaMemory>>, Failure> {
        self.operate(py, stream, |end| match end {
            Either::Host(end) => call::empty(&mut **end, dtype, shape).map(Either::Host),
            Either::Cuda(end) => call::empty(&mut **end, dtype, shape).map(Either::Cuda),
        })
    }

    pub(super) fn reader<'a>(&self, exchange: &'a Exchange) -> Reader<'a> {
        Reader {
            exchange,
            device: self.facts.device,
            experts: self.facts.world.experts(),
            local_experts: self.facts.local_experts().len(),
        }
    }

    /// Allocates an output of combine: on the CPU registered memory, on a GPU memory of PyTorch's allocator, whose rules
    /// for streams the caller may then rely on. `like`: a tensor of the same type.
    pub(super) fn output<'py>(
        &self,
        py: Python<'py>,
        exchange: &Exchange,
        stream: usize,
        like: &Bound<'py, PyAny>,
        dtype: DataType,
        shape: [usize; 2],
    ) -> Result<Option<(Bound<'py, PyAny>, Span)>, Failure> {
        let elements = shape[0].checked_mul(shape[1]);
        let Some(size) = elements.and_then(|elements| elements.checked_mul(dtype.bytes())) else {
            return Ok(None);
        };
        if self.facts.device != Device::CPU {
            let sizes = ((shape[0], shape[1]),);
            let made = like.call_method1(intern!(py, "new_empty"), sizes).map_err(Failure::Raised)?;
            let address = exchange.look_at_memory(&made).map(|seen| seen.address);
            return Ok(address.map(|address| (made, Span(address, size))));
        }
        let shape = Shape { rows: shape[0], columns: Some(shape[1]) };
        let output = self.allocated(py, stream, dtype, shape)?;
        let address = with_end!(&output, output => output.address);
        let made = with_end!(output, output => output.into_tensor(py, exchange, Device::CPU, &self.freed));
        Ok(Some((made.map_err(Failure::Raised)?, Span(address, size))))
    }
}
