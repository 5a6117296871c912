//! Host memory through which encoded bytes pass between kernels and streams.

use std::ptr::NonNull;
use std::slice;
use std::sync::{Mutex, PoisonError};

use ep::Result;

use super::machine::{HostMemory, Machine};
use crate::driver::DeviceAddress;

/// Pinned host memory that calls use one after the other. Pinning takes longer than encoding.
///
/// The pool is locked only while memory is taken or given back: copies run on threads of rayon, which may begin another call on
/// the same thread.
#[derive(Debug, Default)]
pub(super) struct Pool(Mutex<Vec<HostMemory>>);

/// Memory of the pool, to which it returns.
pub(super) struct Staging<'a> {
    pool: &'a Pool,
    /// `None` once it is back.
    memory: Option<HostMemory>,
    start: NonNull<u8>,
    address: DeviceAddress,
    bytes: usize,
    returns: bool,
}

impl Pool {
    /// Memory of `bytes` bytes.
    pub(super) fn take(&self, machine: &dyn Machine, bytes: usize) -> Result<Staging<'_>> {
        let kept = self.0.lock().unwrap_or_else(PoisonError::into_inner).pop();
        let memory = match kept.filter(|kept| kept.memory.bytes >= bytes) {
            Some(memory) => memory,
            None => machine.pin(bytes + bytes / 8)?,
        };
        let (start, address) = (memory.start, memory.memory.address);
        Ok(Staging { pool: self, memory: Some(memory), start, address, bytes, returns: true })
    }
}

impl Staging<'_> {
    /// The address for kernels.
    pub(super) fn address(&self) -> DeviceAddress {
        self.address
    }

    /// The memory. No kernel may be using it.
    pub(super) fn bytes(&mut self) -> &mut [u8] {
        // SAFETY: at least as many bytes were allocated, and nothing else has this memory of the pool.
        unsafe { slice::from_raw_parts_mut(self.start.as_ptr(), self.bytes) }
    }

    /// Frees the memory after use: it is longer than later calls need.
    pub(super) fn give_back(&mut self) {
        self.returns = false;
    }
}

impl Drop for Staging<'_> {
    fn drop(&mut self) {
        if let Some(memory) = self.memory.take().filter(|_| self.returns) {
            self.pool.0.lock().unwrap_or_else(PoisonError::into_inner).push(memory);
        }
    }
}
