//! Kernels, compiled and loaded once for each GPU.

use std::collections::HashMap;
use std::sync::{Arc, Mutex, OnceLock};
use std::{panic, thread};

use ep::{CudaEnv, Result};

use crate::device::KernelKey;
use crate::driver::{Device, Kernel};
use crate::jit::{Cubin, Jit};
use crate::probe;

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

    /// Loads these kernels. What has to be compiled is compiled at the same time.
    pub(crate) fn load_ahead(
        &self,
        device: &Arc<Device>,
        keys: &[KernelKey],
        plain_copies: bool,
    ) -> Result<()> {
        thread::scope(|scope| {
            let load = |&key| scope.spawn(move || self.load(device, key, plain_copies).map(drop));
            let loading: Vec<_> = keys.iter().map(load).collect();
            loading
                .into_iter()
                .try_for_each(|load| load.join().unwrap_or_else(|panic| panic::resume_unwind(panic)))
        })
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
