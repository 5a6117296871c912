//! Loads each kernel once per GPU and process.

use std::collections::HashMap;
use std::sync::atomic::{AtomicUsize, Ordering};
use std::sync::{Arc, Mutex, OnceLock, PoisonError};
use std::thread;

use ep::{CudaEnv, Error, Result};

use crate::device::KernelKey;
use crate::driver::{Device, Kernel};
use crate::jit::{Cubin, Jit};
use crate::probe;

/// Maximum number of concurrent compilations. Each takes some hundred megabytes.
const MOST_THREADS: usize = 8;

/// All kernels of this process.
pub(crate) struct Kernels {
    jit: Jit,
    loaded: Mutex<HashMap<(usize, bool, KernelKey), Arc<Slot>>>,
}

/// A kernel's place. The first thread that needs the kernel fills it; others wait for that kernel only.
type Slot = Mutex<Option<Arc<Kernel>>>;

impl std::fmt::Debug for Kernels {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("Kernels").finish_non_exhaustive()
    }
}

impl Kernels {
    /// The instance of this process.
    pub(crate) fn get() -> &'static Self {
        static KERNELS: OnceLock<Kernels> = OnceLock::new();
        let tell = |warning: &str| ep::tell(format_args!("warning: {warning}"));
        KERNELS.get_or_init(|| Self { jit: jit().telling(tell), loaded: Mutex::default() })
    }

    /// Returns the kernel, loading it first if needed.
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

    /// Loads these kernels, compiling on several threads.
    pub(crate) fn load_ahead(
        &self,
        device: &Arc<Device>,
        keys: &[KernelKey],
        plain_copies: bool,
    ) -> Result<()> {
        side_by_side(keys, |&key| self.load(device, key, plain_copies)).map(drop)
    }
}

/// Calls `work` for each job, on several threads. Returns the results in any order or, if jobs failed, the error of the
/// first of them in the order of `jobs`.
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
                    // Start no further job: it would fail for the same reason.
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
            // If the system starts no further thread, the existing ones do all jobs.
            if thread::Builder::new().spawn_scoped(scope, take_turns).is_err() {
                break;
            }
        }
        take_turns();
    });
    match failed.into_inner().unwrap_or_else(PoisonError::into_inner) {
        Some((_, error)) => Err(error),
        None => Ok(done.into_inner().unwrap_or_else(PoisonError::into_inner)),
    }
}

/// A [`Jit`] with the settings of the environment, and with a compiler that is not too new for the driver.
pub(crate) fn jit() -> Jit {
    let jit = Jit::new(CudaEnv::from_env());
    // If the driver does not report its version, it refuses unsuitable kernels when it loads them.
    match probe::probe() {
        Ok(Some(driver)) => jit.for_driver(driver.cuda),
        _ => jit,
    }
}
