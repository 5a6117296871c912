//! Host memory through which encoded bytes pass between kernels and streams.

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

/// Memory of the pool.
pub(super) struct Staging<'a> {
    /// Where the memory returns after use; `None`: it is freed.
    pool: Option<&'a Pool>,
    /// `None` only while it is dropped.
    memory: Option<HostMemory>,
    bytes: usize,
}

impl Pool {
    /// Memory of `bytes` bytes.
    pub(super) fn take(&self, machine: &dyn Machine, bytes: usize) -> Result<Staging<'_>> {
        let kept = self.0.lock().unwrap_or_else(PoisonError::into_inner).pop();
        let memory = match kept.filter(|kept| kept.memory.bytes >= bytes) {
            Some(memory) => memory,
            None => machine.pin(bytes + bytes / 8)?,
        };
        Ok(Staging { pool: Some(self), memory: Some(memory), bytes })
    }
}

impl Staging<'_> {
    fn memory(&self) -> &HostMemory {
        self.memory.as_ref().expect("it is there until it is dropped")
    }

    /// The address for kernels.
    pub(super) fn address(&self) -> DeviceAddress {
        self.memory().memory.address
    }

    /// The memory. No kernel may be using it.
    pub(super) fn bytes(&mut self) -> &mut [u8] {
        // SAFETY: at least as many bytes were allocated, and nothing else has this memory of the pool.
        unsafe { slice::from_raw_parts_mut(self.memory().start.as_ptr(), self.bytes) }
    }

    /// Frees the memory after use: it is longer than later calls need.
    pub(super) fn free_after_use(&mut self) {
        self.pool = None;
    }
}

impl Drop for Staging<'_> {
    fn drop(&mut self) {
        if let (Some(pool), Some(memory)) = (self.pool, self.memory.take()) {
            pool.0.lock().unwrap_or_else(PoisonError::into_inner).push(memory);
        }
    }
}
