//! Registered memory that Python code holds as tensors: which addresses those are, and whether a buffer has got some back.

use std::collections::HashMap;
use std::sync::atomic::{AtomicBool, Ordering::SeqCst};
use std::sync::{Arc, Mutex, MutexGuard, OnceLock, PoisonError};

use pyo3::prelude::*;

/// Whether registered memory that a buffer delivered has been freed since the last [`forget`](Freed::forget).
#[derive(Debug, Clone, Default)]
pub(crate) struct Freed(Arc<AtomicBool>);

impl Freed {
    pub(crate) fn get(&self) -> bool {
        self.0.load(SeqCst)
    }

    pub(crate) fn forget(&self) {
        self.0.store(false, SeqCst);
    }
}

/// Memory that a tensor owns. Dropped with the last tensor that uses it.
pub(crate) struct Owned<M> {
    address: usize,
    memory: Option<M>,
    freed: Freed,
}

impl<M> Owned<M> {
    pub(crate) fn new(memory: M, address: usize, freed: &Freed) -> Self {
        *addresses().entry(address).or_default() += 1;
        Self { address, memory: Some(memory), freed: freed.clone() }
    }
}

impl<M> Drop for Owned<M> {
    fn drop(&mut self) {
        {
            let mut addresses = addresses();
            if let Some(count) = addresses.get_mut(&self.address) {
                *count -= 1;
                if *count == 0 {
                    addresses.remove(&self.address);
                }
            }
        }
        // Before the buffer can use the memory again, and after it: an operator on another thread may look, and forget
        // what it has seen, in between.
        self.freed.0.store(true, SeqCst);
        drop(self.memory.take());
        self.freed.0.store(true, SeqCst);
    }
}

/// How many tensors own memory at an address. Memory without bytes may share one.
fn addresses() -> MutexGuard<'static, HashMap<usize, usize>> {
    static ADDRESSES: OnceLock<Mutex<HashMap<usize, usize>>> = OnceLock::new();
    ADDRESSES.get_or_init(Mutex::default).lock().unwrap_or_else(PoisonError::into_inner)
}

/// Whether the storage of a tensor that begins at this address is registered memory of any buffer.
#[pyfunction]
pub(crate) fn is_registered(address: usize) -> bool {
    addresses().contains_key(&address)
}
