//! Kernels, compiled and loaded once for each GPU.

use std::collections::HashMap;
use std::sync::atomic::{AtomicUsize, Ordering};
use std::sync::{Arc, Mutex, OnceLock, PoisonError};
use std::thread;

use ep::{CudaEnv, Error, Result};

use crate::device::KernelKey;
use crate::driver::{Device, Kernel};
use crate::jit::{Cubin, Jit};
use crate::probe;

/// Compilations at a time, at most. Each takes some hundred megabytes.
const MOST_THREADS: usize = 8;

/// All kernels of this process.
pub(crate) struct Kernels {
    jit: Jit,
    loaded: Mutex<HashMap<(usize, bool, KernelKey), Arc<Slot>>>,
}

/// A kernel's place: whoever comes first fills it, the others wait for that kernel and for no other.
type Slot = Mutex<Option<Arc<Kernel>>>;

impl std::fmt::Debug for Kernels {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("Kernels").finish_non_exhaustive()
    }
}

impl Kernels {
    /// The process's own.
    pub(crate) fn get() -> &'static Self {
        static KERNELS: OnceLock<Kernels> = OnceLock::new();
        KERNELS.get_or_init(|| Self { jit: jit(), loaded: Mutex::default() })
    }

    /// The kernel, ready to be launched.
    pub(crate) fn load(
        &self,
        device: &Arc<Device>,
        key: KernelKey,
        plain_copies: bool,
    ) -> Result<Arc<Kernel>> {
        let slot = {
            let mut loaded = self.loaded.lock().unwrap_or_else(|poison| poison.into_inner());
            Arc::clone(loaded.entry((device.ordinal, plain_copies, key)).or_default())
        };
        let mut slot = slot.lock().unwrap_or_else(|poison| poison.into_inner());
        if let Some(kernel) = &*slot {
            return Ok(Arc::clone(kernel));
        }
        let program = key.program(device.arch, plain_copies);
        let load = |cubin: &Cubin| Kernel::load(device, &cubin.bytes, key.name());
        let kernel = Arc::new(self.jit.load(&program, device.arch, load)?);
        *slot = Some(Arc::clone(&kernel));
        Ok(kernel)
    }

    /// Loads these kernels. What has to be compiled is compiled side by side.
    pub(crate) fn load_ahead(
        &self,
        device: &Arc<Device>,
        keys: &[KernelKey],
        plain_copies: bool,
    ) -> Result<()> {
        side_by_side(keys, |&key| self.load(device, key, plain_copies)).map(drop)
    }
}

/// Does what may compile a kernel for each of these, on several threads; the results, in no order, or the error of the
/// first that failed.
pub(crate) fn side_by_side<T: Sync, R: Send>(
    jobs: &[T],
    work: impl Fn(&T) -> Result<R> + Sync,
) -> Result<Vec<R>> {
    let next = AtomicUsize::new(0);
    let done = Mutex::new(Vec::with_capacity(jobs.len()));
    let failed: Mutex<Option<(usize, Error)>> = Mutex::default();
    let take_turns = || {
        loop {
            let at = next.fetch_add(1, Ordering::Relaxed);
            let Some(job) = jobs.get(at) else { break };
            match work(job) {
                Ok(result) => done.lock().unwrap_or_else(PoisonError::into_inner).push(result),
                Err(error) => {
                    // The others would fail of the same.
                    next.store(jobs.len(), Ordering::Relaxed);
                    let mut failed = failed.lock().unwrap_or_else(PoisonError::into_inner);
                    if failed.as_ref().is_none_or(|&(first, _)| at < first) {
                        *failed = Some((at, error));
                    }
                }
            }
        }
    };
    let threads = thread::available_parallelism().map_or(1, usize::from).min(MOST_THREADS).min(jobs.len());
    thread::scope(|scope| {
        for _ in 1..threads {
            scope.spawn(take_turns);
        }
        take_turns();
    });
    match failed.into_inner().unwrap_or_else(PoisonError::into_inner) {
        Some((_, error)) => Err(error),
        None => Ok(done.into_inner().unwrap_or_else(PoisonError::into_inner)),
    }
}

/// The environment's compiler, or the first that is not too new for the driver.
pub(crate) fn jit() -> Jit {
    let jit = Jit::new(CudaEnv::from_env());
    // A driver that does not tell has the last word when it loads a kernel.
    match probe::probe() {
        Ok(Some(driver)) => jit.for_driver(driver.cuda),
        _ => jit,
    }
}
