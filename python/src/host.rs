//! Tensors of the CPU.

use ep::Result;
use ep_host::{HostBuffer, HostHandle, HostMemory};

use crate::call::{Span, Tensors};
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

    fn use_stream(&mut self, _: usize) -> Result<()> {
        Ok(())
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
