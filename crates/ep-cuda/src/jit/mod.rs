//! Compiles kernel sources to machine code at run time, and caches the results.
//!
//! [`Jit`] is the entry point. It searches for a program in memory, then on disk, and compiles the program only if it is in
//! neither. The compiler (NVRTC) is searched for only when something must be compiled, so a warm start needs no compiler.
//!
//! | module | contents |
//! |---|---|
//! | `arch`, `program` | GPU architectures, compilation units, and the key that identifies a compilation |
//! | `search`, `nvrtc`, `compiler` | the search for NVRTC, its functions, compiling |
//! | `resources` | registers, spills and shared memory, parsed from the assembler's log |
//! | `entry`, `cache`, `cache_dir` | compiled programs on disk, and the rules by which they are trusted |

mod arch;
mod cache;
mod cache_dir;
mod compiler;
mod entry;
#[cfg(feature = "fuzzing")]
#[doc(hidden)]
pub mod fuzzing;
mod nvrtc;
mod program;
mod resources;
#[cfg(test)]
mod scratch;
mod search;

use std::collections::HashMap;
use std::fmt;
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::time::Instant;

use ep::{CudaEnv, EnvironmentError, Result};

pub use arch::Arch;
pub use cache::{Cache, CacheState};
pub use compiler::{Compiled, Compiler, INSTALL_HINT, Version};
pub use program::Program;
pub use resources::Resources;

/// Why machine code was not loaded.
#[derive(Debug)]
pub enum LoadError {
    /// The driver refuses the code itself: code that another process has compiled is compiled again.
    Code(ep::Error),
    /// Anything else, such as a lack of memory: the code stays in the cache.
    Other(ep::Error),
}

impl From<ep::Error> for LoadError {
    fn from(error: ep::Error) -> Self {
        Self::Other(error)
    }
}

impl From<EnvironmentError> for LoadError {
    fn from(error: EnvironmentError) -> Self {
        Self::Other(error.into())
    }
}

impl From<LoadError> for ep::Error {
    fn from(error: LoadError) -> Self {
        match error {
            LoadError::Code(error) | LoadError::Other(error) => error,
        }
    }
}

use cache::Found;
use entry::Entry;
use program::Key;

/// Provides compiled programs: from memory, from disk, or by compiling. Threads may share a `Jit`; threads that request
/// the same program at the same time wait for one compilation.
pub struct Jit {
    env: CudaEnv,
    driver: Option<Version>,
    cache: Cache,
    compiler: Mutex<Option<Arc<Compiler>>>,
    programs: Mutex<HashMap<Key, Arc<Mutex<Option<Kept>>>>>,
    warnings: Mutex<Vec<String>>,
    /// Called with the reason when a cache entry, or the cache, is refused.
    tell: Option<fn(&str)>,
}

/// A program's machine code.
#[derive(Debug, Clone)]
pub struct Cubin {
    /// The ELF image that the driver loads.
    pub bytes: Arc<[u8]>,
    /// The resources of each kernel in the image.
    pub resources: Arc<[Resources]>,
    /// The version of the compiler that made the code.
    pub nvrtc: Version,
    /// Where this call found the code.
    pub origin: Origin,
    /// Seconds that this call took, including the wait for a compilation by another thread.
    pub seconds: f64,
}

/// The origin of machine code.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub enum Origin {
    /// This process had requested it before.
    Memory,
    /// The cache on disk had it.
    Disk,
    /// This call compiled it.
    Compiled,
}

/// A program in memory.
struct Kept {
    bytes: Arc<[u8]>,
    resources: Arc<[Resources]>,
    nvrtc: Version,
    /// Whether this process compiled it. Compiling again would give the same result.
    fresh: bool,
}

impl Jit {
    /// Makes a `Jit` with the settings of `env`. Does not search for the compiler yet.
    pub fn new(env: CudaEnv) -> Self {
        Self {
            cache: Cache::of(&env),
            env,
            driver: None,
            compiler: Mutex::default(),
            programs: Mutex::default(),
            warnings: Mutex::default(),
            tell: None,
        }
    }

    /// Calls `tell` with the reason whenever the cache, or an entry, is not trusted. That costs each process a
    /// compilation, and may be an attempt to inject code, so users should see it.
    #[must_use]
    pub fn telling(self, tell: fn(&str)) -> Self {
        Self { tell: Some(tell), ..self }
    }

    /// Sets the GPU driver's CUDA version. Compilers of a newer major version, and their machine code, are not used,
    /// because the driver would refuse the code.
    #[must_use]
    pub fn for_driver(self, driver: Version) -> Self {
        Self { driver: Some(driver), ..self }
    }

    /// The machine code of a program.
    ///
    /// # Errors
    /// An [`EnvironmentError`] if the program must be compiled and no compiler is found, or the compilation fails.
    pub fn cubin(&self, program: &Program, arch: Arch) -> Result<Cubin> {
        let started = Instant::now();
        let key = Key::of(program, arch);
        let slot = Arc::clone(lock(&self.programs).entry(key).or_default());
        // Held while compiling: other threads that request the same program wait here.
        let mut slot = lock(&slot);
        let (kept, origin) = match &mut *slot {
            Some(kept) => (kept, Origin::Memory),
            empty => {
                let (entry, origin) = self.obtain(program, arch, key)?;
                (&mut *empty.insert(Kept::of(entry, origin)), origin)
            }
        };
        Ok(Cubin {
            bytes: Arc::clone(&kept.bytes),
            resources: Arc::clone(&kept.resources),
            nvrtc: kept.nvrtc,
            origin,
            seconds: started.elapsed().as_secs_f64(),
        })
    }

    /// Calls `load` with a program's machine code and returns its result. If `load` refuses code from disk, which may
    /// have been compiled for another driver, the program is compiled again, once.
    ///
    /// # Errors
    /// The errors of [`cubin`](Self::cubin). The error of `load` if it does not concern the code, or if this process has
    /// compiled the code.
    pub fn load<T>(
        &self,
        program: &Program,
        arch: Arch,
        mut load: impl FnMut(&Cubin) -> std::result::Result<T, LoadError>,
    ) -> Result<T> {
        let cubin = self.cubin(program, arch)?;
        let refusal = match load(&cubin) {
            Err(LoadError::Code(refusal)) if self.invalidate(program, arch, &cubin) => refusal,
            result => return Ok(result?),
        };
        let anew = self.cubin(program, arch).map_err(|error| {
            let what = format!("{} for {arch}", program.file_name());
            let problem = format!("the cached code was refused ({refusal}), and compiling failed: {error}");
            EnvironmentError::new(what, problem, "")
        })?;
        Ok(load(&anew)?)
    }

    /// Removes refused machine code from memory and disk, so that the next request compiles the program. Returns
    /// `false`, and removes nothing, if this process has compiled the code: compiling again would give the same result.
    pub fn invalidate(&self, program: &Program, arch: Arch, refused: &Cubin) -> bool {
        let key = Key::of(program, arch);
        let Some(slot) = lock(&self.programs).get(&key).cloned() else { return true };
        let mut slot = lock(&slot);
        match &*slot {
            // Another thread has already replaced the refused code.
            Some(kept) if !Arc::ptr_eq(&kept.bytes, &refused.bytes) => {}
            Some(kept) if kept.fresh => return false,
            _ => {
                *slot = None;
                self.cache.remove(program.name, arch, key);
            }
        }
        true
    }

    /// The compiler. Each call searches for it until one call has found it.
    ///
    /// # Errors
    /// The errors of [`Compiler::find`].
    pub fn compiler(&self) -> Result<Arc<Compiler>> {
        let mut compiler = lock(&self.compiler);
        if let Some(compiler) = &*compiler {
            return Ok(Arc::clone(compiler));
        }
        let found = Arc::new(Compiler::find_for(&self.env, self.driver)?);
        Ok(Arc::clone(compiler.insert(found)))
    }

    /// Whether the cache on disk has the complete machine code of the program.
    pub fn is_kept(&self, program: &Program, arch: Arch) -> bool {
        matches!(self.cache.load(program.name, arch, Key::of(program, arch)), Found::Entry(_))
    }

    /// The state of the cache on disk.
    pub fn cache_state(&self) -> CacheState {
        self.cache.state()
    }

    /// The problems of the cache so far, without duplicates. None of them is an error.
    pub fn warnings(&self) -> Vec<String> {
        lock(&self.warnings).clone()
    }

    /// Gets a program that is not in memory.
    fn obtain(&self, program: &Program, arch: Arch, key: Key) -> Result<(Entry, Origin)> {
        match self.cache.load(program.name, arch, key) {
            Found::Entry(entry) if self.outdated(&entry) => {
                // Without a suitable compiler, use the entry; the driver may refuse it.
                return self.compile(program, arch, key).or_else(|error| {
                    self.warn(format!("a kernel compiled by NVRTC {} is used: {error}", entry.nvrtc));
                    Ok((entry, Origin::Disk))
                });
            }
            Found::Entry(entry) => return Ok((entry, Origin::Disk)),
            Found::Nothing => {}
            Found::Unusable(why) => drop(self.warn(format!("compiled anew: {why}"))),
            Found::Refused(why) => {
                let warning = format!("a kernel of the cache is not used, but compiled anew: {why}");
                if self.warn(warning.clone())
                    && let Some(tell) = self.tell
                {
                    tell(&warning);
                }
            }
        }
        self.compile(program, arch, key)
    }

    fn compile(&self, program: &Program, arch: Arch, key: Key) -> Result<(Entry, Origin)> {
        let compiler = self.compiler()?;
        let Compiled { cubin, resources, .. } = compiler.compile(program, arch)?;
        let entry = Entry { key, nvrtc: compiler.version(), resources, cubin };
        if let Err(why) = self.cache.store(program.name, arch, &entry) {
            self.warn(why);
        }
        Ok((entry, Origin::Compiled))
    }

    /// Whether an entry was made by a compiler that is too new for the driver or, if the user names a compiler, by a
    /// compiler of a different version.
    fn outdated(&self, entry: &Entry) -> bool {
        match self.driver {
            _ if self.env.nvrtc.is_some() => {
                self.compiler().is_ok_and(|compiler| compiler.version() != entry.nvrtc)
            }
            Some(driver) => entry.nvrtc.major > driver.major,
            None => false,
        }
    }

    /// Records a warning. Returns whether it is new.
    fn warn(&self, warning: String) -> bool {
        let mut warnings = lock(&self.warnings);
        let new = !warnings.contains(&warning);
        if new {
            warnings.push(warning);
        }
        new
    }
}

impl Kept {
    fn of(entry: Entry, origin: Origin) -> Self {
        Self {
            bytes: entry.cubin.into(),
            resources: entry.resources.into(),
            nvrtc: entry.nvrtc,
            fresh: origin == Origin::Compiled,
        }
    }
}

impl fmt::Debug for Jit {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Jit").field("env", &self.env).field("driver", &self.driver).finish_non_exhaustive()
    }
}

/// Ignores poisoning: every change under these mutexes is one assignment, so a panic leaves the value consistent.
fn lock<T>(mutex: &Mutex<T>) -> MutexGuard<'_, T> {
    mutex.lock().unwrap_or_else(PoisonError::into_inner)
}

#[cfg(test)]
mod tests {
    use std::path::PathBuf;

    use super::entry::tests::{PROGRAM, entry};
    use super::scratch::Scratch;
    use super::*;

    fn of_version(major: u32) -> Entry {
        Entry { nvrtc: Version { major, minor: 0 }, ..entry() }
    }

    /// A `Jit` without a compiler, whose cache has one entry.
    fn without_compiler(dir: &Scratch, entry: &Entry) -> Jit {
        let env = CudaEnv {
            nvrtc: Some("/nowhere/libnvrtc.so".into()),
            cache_dir: Some(dir.path(".")),
            ..CudaEnv::default()
        };
        Cache::of(&env).store(PROGRAM.name, Arch::Sm90a, entry).unwrap();
        Jit::new(env)
    }

    #[test]
    fn an_entry_that_cannot_be_replaced_is_used() {
        let dir = Scratch::new();
        let jit = without_compiler(&dir, &of_version(13));
        let cubin = jit.cubin(&PROGRAM, Arch::Sm90a).unwrap();
        assert_eq!((cubin.origin, cubin.nvrtc.major, &*cubin.bytes), (Origin::Disk, 13, &*entry().cubin));
        assert_eq!(&*cubin.resources, entry().resources);
        assert_eq!(jit.warnings(), [""; 0]);
    }

    #[test]
    fn entries_too_new_for_the_driver_are_outdated() {
        let jit = |driver| Jit::new(CudaEnv::default()).for_driver(Version { major: driver, minor: 4 });
        assert!(jit(12).outdated(&of_version(13)));
        assert!(!jit(13).outdated(&of_version(13)));
        assert!(!jit(13).outdated(&of_version(12)));
        assert!(!Jit::new(CudaEnv::default()).outdated(&of_version(99)));

        // If no compiler is suitable, the entry is used.
        let dir = Scratch::new();
        let env = CudaEnv {
            cache_dir: Some(dir.path(".")),
            python_roots: vec![PathBuf::from("/nowhere")],
            ..CudaEnv::default()
        };
        Cache::of(&env).store(PROGRAM.name, Arch::Sm90a, &of_version(13)).unwrap();
        // No compiler is that old.
        let jit = Jit::new(env).for_driver(Version { major: 1, minor: 0 });
        assert_eq!(jit.cubin(&PROGRAM, Arch::Sm90a).unwrap().origin, Origin::Disk);
        assert!(
            jit.warnings()[0].contains("a kernel compiled by NVRTC 13.0 is used"),
            "{:?}",
            jit.warnings()
        );
    }

    #[test]
    fn entries_of_another_compiler_than_the_user_names_are_outdated() {
        let dir = Scratch::new();
        assert!(!without_compiler(&dir, &entry()).outdated(&of_version(99)));
        // The rest of the test needs a compiler; `tests/jit.rs` fails if one is required and missing.
        let Ok(compiler) = Compiler::find(&CudaEnv::from_env()) else { return };
        let jit = Jit::new(CudaEnv { nvrtc: Some(compiler.path().to_owned()), ..CudaEnv::default() });
        assert!(jit.outdated(&of_version(99)));
        assert!(!jit.outdated(&Entry { nvrtc: compiler.version(), ..entry() }));
    }
}
