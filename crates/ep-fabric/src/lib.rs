//! An engine for rails between NVLink domains over [libfabric](https://ofiwg.github.io/libfabric/).
//!
//! The library is loaded at run time and never linked. [`open`] returns an engine that is not connected yet;
//! [`ep::Unconnected::connect`] connects it. [`providers`] lists what the library offers on this machine.
//!
//! Tested with the providers `tcp` (called `net` in libfabric 1.17) and `shm`. Others, such as `efa` and
//! `verbs;ofi_rxm`, can be named and have never been run: what only they demand (`FI_MR_LOCAL`, `FI_MR_PROV_KEY`, posted
//! receives for immediates) is tested with a fake libfabric. `docs/rails.md` has the rules of engines.
//!
//! | module | contents |
//! |---|---|
//! | `engine` | the [`ep::Transport`]: queues, the lock, the thread that makes progress |
//! | `endpoint` | the objects of libfabric, and the calls that move bytes |
//! | `info` | the choice of a provider and a NIC |
//! | `nearest` | which NIC is nearest to which GPU, by their places on the PCI bus |
//! | `nics` | the NICs of a rank that has a GPU and no setting; the CPUs near a NIC |
//! | `several` | one engine over several NICs |
//! | `blob` | the bytes by which peers reach a window |
//! | `library` | loading, versions, texts of errors |
//! | `signals` | keeps libfabric from changing what the process does on signals when it is loaded |
//! | `sys` | declarations of the C interface |
//! | `testing` | for tests: whether the library is installed |

mod blob;
mod endpoint;
mod engine;
#[cfg(feature = "fuzzing")]
#[doc(hidden)]
pub mod fuzzing;
mod info;
mod leftovers;
mod library;
mod nearest;
mod nics;
mod several;
mod signals;
#[allow(unreachable_pub, missing_docs)]
mod sys;
#[cfg(feature = "testing")]
pub mod testing;

use std::path::{Path, PathBuf};

use ep::{GpuPart, Result, TrafficClass};

pub use engine::open;
pub use nearest::{DeviceLocation, Nearest, Nic, Relation, nearest};
pub use nics::{SYSFS, is_nvidia_gpu, nearest_nics};

/// Which provider of which library an engine uses.
#[derive(Debug, Clone, Default, PartialEq, Eq)]
pub struct Options {
    /// The provider, such as `tcp`, `shm` or `efa`. All ranks of a rail use the same one.
    pub provider: String,
    /// This rank's address, which selects its interface. With `tcp`, `None` means 127.0.0.1, which other machines cannot
    /// reach; with other providers, `None` leaves the choice to the provider.
    pub address: Option<String>,
    /// The NICs, by the names of their domains as in [`Provider::domains`]. Puts go through several NICs in turn, and
    /// all ranks of a rail must have the same number of NICs. Empty means the first NIC that fits. With `tcp`, a named
    /// NIC takes the place of 127.0.0.1.
    pub domains: Vec<String>,
    /// The traffic class of this rank's puts; `None` means the provider's.
    pub traffic_class: Option<TrafficClass>,
    /// The path of `libfabric.so.1`; `None` means the system's.
    pub library: Option<PathBuf>,
}

/// A provider that an engine can use.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Provider {
    /// Its name.
    pub name: String,
    /// Its domains: interfaces or devices.
    pub domains: Vec<String>,
    /// Whether it offers to register memory of GPUs (`FI_HMEM`) on any of them.
    pub gpu_memory: bool,
}

/// Whether the provider registers this memory of a GPU on every NIC of the options, or on the first that fits if they name none: it
/// tries. Otherwise, the reason. Some providers offer this (`FI_HMEM`) in a library that was built without it.
///
/// # Safety
/// The memory must stay mapped during the call.
///
/// # Errors
/// [`ep::EnvironmentError`] when the library cannot be loaded; [`ep::CallerError::Config`] for options that are no text for C.
pub unsafe fn registers_gpu_memory(
    options: &Options,
    part: GpuPart,
) -> Result<std::result::Result<(), String>> {
    let library = library::Library::load(options.library.as_deref())?;
    // SAFETY: guaranteed by the caller.
    let attempt = |nic| unsafe { endpoint::try_gpu_memory(&library, options, nic, part) };
    if options.domains.is_empty() {
        return attempt(None);
    }
    for nic in &options.domains {
        if let Err(why) = attempt(Some(nic))? {
            return Ok(Err(why));
        }
    }
    Ok(Ok(()))
}

/// The version of libfabric, and the providers that an engine can use on this machine. `library` is as in [`Options`].
///
/// # Errors
/// [`ep::EnvironmentError`] that says what to install when the library cannot be loaded.
pub fn providers(library: Option<&Path>) -> Result<(String, Vec<Provider>)> {
    let library = library::Library::load(library)?;
    Ok((library.version(), info::InfoList::all(&library)?))
}
