//! Loading libfabric, and its exported functions. All other functions are reached through the objects' tables.

use std::ffi::CStr;
use std::path::{Path, PathBuf};
use std::sync::{Arc, Mutex, PoisonError};

use ep::{EnvironmentError, Result};

use crate::signals::Actions;
use crate::sys;

/// The version whose interface [`sys`] declares. A later library behaves like this version if it is asked to.
const WRITTEN_FOR: u32 = sys::version(1, 17);

/// A loaded libfabric.
pub(crate) struct Library {
    pub(crate) getinfo: sys::GetInfo,
    pub(crate) freeinfo: sys::FreeInfo,
    pub(crate) dupinfo: sys::DupInfo,
    pub(crate) fabric: sys::OpenFabric,
    strerror: sys::StrError,
    /// The library's version.
    version: u32,
    /// Keeps the functions above loaded.
    _library: libloading::Library,
}

/// The libraries that are loaded, by the path that was asked for. They stay loaded: the provider `shm` installs signal
/// handlers, which must not point into unloaded memory, and loading takes a tenth of a second.
static LOADED: Mutex<Vec<(Option<PathBuf>, Arc<Library>)>> = Mutex::new(Vec::new());

impl Library {
    /// Loads the library at `path`, or the system's.
    ///
    /// # Errors
    /// [`EnvironmentError`] that says what to install.
    pub(crate) fn load(path: Option<&Path>) -> Result<Arc<Self>> {
        let mut loaded = LOADED.lock().unwrap_or_else(PoisonError::into_inner);
        if let Some((_, library)) = loaded.iter().find(|(of, _)| of.as_deref() == path) {
            return Ok(Arc::clone(library));
        }
        let library = Arc::new(Self::open(path)?);
        loaded.push((path.map(Path::to_path_buf), Arc::clone(&library)));
        Ok(library)
    }

    fn open(path: Option<&Path>) -> Result<Self> {
        const HINT: &str = "install libfabric 1.17 or later (Debian and Ubuntu: apt-get install libfabric1; Fedora: \
                            dnf install libfabric), or set HYBRID_EP_LIBFABRIC to the path of libfabric.so.1";
        let name = path.unwrap_or(Path::new("libfabric.so.1"));
        let failed = |error: libloading::Error| {
            EnvironmentError::new(format!("loading {}", name.display()), error, HINT)
        };
        let actions = Actions::of_this_process();
        // SAFETY: loading a library runs its constructors. The name is libfabric's, or the user's choice.
        let library = unsafe { libloading::Library::new(name) };
        actions.restore();
        let library = library.map_err(failed)?;
        macro_rules! symbol {
            ($name:literal, $type:ty) => {
                // SAFETY: this is the function's type in the headers of libfabric 1.17. Its ABI is stable.
                *unsafe { library.get::<$type>($name) }.map_err(failed)?
            };
        }
        let version = symbol!("fi_version", sys::Version);
        // SAFETY: takes nothing and returns a number.
        let version = unsafe { version() };
        if version < WRITTEN_FOR {
            let found = format!("its version is {}.{}", version >> 16, version & 0xFFFF);
            return Err(EnvironmentError::new(format!("loading {}", name.display()), found, HINT).into());
        }
        Ok(Self {
            getinfo: symbol!("fi_getinfo", sys::GetInfo),
            freeinfo: symbol!("fi_freeinfo", sys::FreeInfo),
            dupinfo: symbol!("fi_dupinfo", sys::DupInfo),
            fabric: symbol!("fi_fabric", sys::OpenFabric),
            strerror: symbol!("fi_strerror", sys::StrError),
            version,
            _library: library,
        })
    }

    /// The version as text, such as `1.17`.
    pub(crate) fn version(&self) -> String {
        format!("{}.{}", self.version >> 16, self.version & 0xFFFF)
    }

    /// The version of the interface to ask for.
    pub(crate) fn interface(&self) -> u32 {
        self.version.min(WRITTEN_FOR)
    }

    /// The text of an error number, and the number.
    pub(crate) fn text(&self, error: isize) -> String {
        let number = error.unsigned_abs() as i32;
        // SAFETY: takes a number and returns a static string, or null.
        let text = unsafe { (self.strerror)(number) };
        if text.is_null() {
            return format!("error {number}");
        }
        // SAFETY: not null, so a string of the library's.
        let text = unsafe { CStr::from_ptr(text) };
        format!("{} ({number})", text.to_string_lossy())
    }
}
