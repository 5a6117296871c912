//! [`CudaMemory`]: GPU memory that operators read and write.

use ep::call::{Maker, MemoryFacts, check_memory};
use ep::{Result, Size};

use crate::arena::Part;
use crate::driver::DeviceAddress;

/// Memory of one GPU: registered, from [`ep::Backend::alloc`], or the caller's own.
///
/// The ranks of the NVLink domain write into registered memory directly. Outputs of dispatch in other memory are staged,
/// which costs a copy. Registered memory belongs to the buffer that allocated it: other buffers refuse it, and it may
/// outlive its buffer.
#[derive(Debug)]
pub struct CudaMemory {
    address: DeviceAddress,
    len: usize,
    registered: Option<(Part, Maker)>,
}

impl CudaMemory {
    pub(crate) fn registered(part: Part, len: usize, maker: Maker) -> Self {
        Self { address: part.address(), len, registered: Some((part, maker)) }
    }

    /// The facts that calls check.
    pub(crate) fn facts(&self) -> MemoryFacts {
        MemoryFacts { bytes: self.len, maker: self.registered.as_ref().map(|&(_, maker)| maker) }
    }

    /// Checks that `buffer` may use the memory and that it has at least `needed` bytes.
    pub(crate) fn check(&self, buffer: Maker, what: &'static str, needed: Size) -> Result<()> {
        check_memory(buffer, what, needed, self.facts())
    }

    /// Memory that the caller has allocated, for example a tensor.
    ///
    /// # Safety
    /// `address` is a multiple of 16 and points to `len` bytes on the buffer's GPU, which stay allocated until all
    /// operators that use this memory have finished.
    pub unsafe fn borrowed(address: u64, len: usize) -> Self {
        Self { address, len, registered: None }
    }

    /// Number of bytes.
    pub fn len(&self) -> usize {
        self.len
    }

    /// Whether the length is 0.
    pub fn is_empty(&self) -> bool {
        self.len == 0
    }

    /// The address on the buffer's GPU.
    pub fn address(&self) -> u64 {
        self.address
    }

    /// Whether the memory is registered: other ranks can write to it.
    pub fn is_registered(&self) -> bool {
        self.registered.is_some()
    }
}
