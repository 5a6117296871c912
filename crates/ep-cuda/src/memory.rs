//! [`CudaMemory`]: what operators read and write.

use crate::arena::Part;
use crate::driver::DeviceAddress;

/// Memory of one GPU: registered, from [`ep::Backend::alloc`], or the caller's own.
///
/// Operators write into registered memory directly, from all ranks; into other memory through a copy.
#[derive(Debug)]
pub struct CudaMemory {
    address: DeviceAddress,
    len: usize,
    part: Option<Part>,
}

impl CudaMemory {
    pub(crate) fn registered(part: Part, len: usize) -> Self {
        Self { address: part.address(), len, part: Some(part) }
    }

    /// Memory that the caller has allocated, a tensor for example.
    ///
    /// # Safety
    /// `address` is that of `len` bytes on the buffer's GPU that stay until all operators that were given this
    /// memory are over. It is a multiple of 16.
    pub unsafe fn borrowed(address: u64, len: usize) -> Self {
        Self { address, len, part: None }
    }

    /// Number of bytes.
    pub fn len(&self) -> usize {
        self.len
    }

    /// Whether there is no byte.
    pub fn is_empty(&self) -> bool {
        self.len == 0
    }

    /// Its address on the buffer's GPU.
    pub fn address(&self) -> u64 {
        self.address
    }

    /// Whether other ranks can write to it.
    pub fn is_registered(&self) -> bool {
        self.part.is_some()
    }
}
