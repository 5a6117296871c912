//! Kernel source to machine code: the compiler, found and loaded at run time, and the cache of its results.
//!
//! [`Jit`] is the way in. It looks for a program in memory, then on disk, and compiles it only if it is in neither;
//! the compiler (NVRTC) is looked for when something has to be compiled, so that a warm start needs none.
//!
//! | module | what is there |
//! |---|---|
//! | `arch`, `program` | what is compiled and for which GPUs; the key that names a compilation |
//! | `search`, `nvrtc`, `compiler` | where NVRTC may lie, its functions, compiling |
//! | `resources` | registers, spills and shared memory, from the assembler's log |
//! | `entry`, `cache` | compiled programs on disk |

mod arch;
mod cache;
mod compiler;
mod entry;
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

use cache::Found;
use entry::Entry;
use program::Key;

/// Compiled programs, each made once: from memory, from disk, or by the compiler. Threads may share it, and those that
/// ask for the same program at the same time wait for one compilation.
pub struct Jit {
    env: CudaEnv,
    driver: Option<Version>,
    cache: Cache,
    compiler: Mutex<Option<Arc<Compiler>>>,
    programs: Mutex<HashMap<Key, Arc<Mutex<Option<Kept>>>>>,
    warnings: Mutex<Vec<String>>,
}

/// A program's machine code.
#[derive(Debug, Clone)]
pub struct Cubin {
    /// What the driver loads.
    pub bytes: Arc<[u8]>,
    /// What each kernel in it takes of the hardware.
    pub resources: Arc<[Resources]>,
    /// The compiler that made it.
    pub nvrtc: Version,
    /// Where it came from.
    pub origin: Origin,
    /// How long it took to get, seconds; for a thread that waited for another's compilation, the wait.
    pub seconds: f64,
}

/// Where machine code came from.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub enum Origin {
    /// It had been asked for before.
    Memory,
    /// Another process had compiled it.
    Disk,
    /// It was compiled.
    Compiled,
}

/// A program in memory.
struct Kept {
    bytes: Arc<[u8]>,
    resources: Arc<[Resources]>,
    nvrtc: Version,
    /// Whether this process compiled it, so that doing it again would change nothing.
    fresh: bool,
}

impl Jit {
    /// Compiled programs under the settings of `env`. Nothing is looked for yet.
    pub fn new(env: CudaEnv) -> Self {
        Self {
            cache: Cache::of(&env),
            env,
            driver: None,
            compiler: Mutex::default(),
            programs: Mutex::default(),
            warnings: Mutex::default(),
        }
    }

    /// With the GPU driver's CUDA version known, what a compiler of a newer major version makes is not used: the driver
    /// would refuse it.
    #[must_use]
    pub fn for_driver(self, driver: Version) -> Self {
        Self { driver: Some(driver), ..self }
    }

    /// A program's machine code.
    ///
    /// # Errors
    /// An [`EnvironmentError`] when it has to be compiled and no compiler is found, or the compiler refuses it.
    pub fn cubin(&self, program: &Program, arch: Arch) -> Result<Cubin> {
        let started = Instant::now();
        let key = Key::of(program, arch);
        let slot = Arc::clone(lock(&self.programs).entry(key).or_default());
        // Held while compiling: who asks for the same program meanwhile waits here.
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

    /// What `load` makes of a program's machine code. Code that was kept on disk and that `load` refuses - another
    /// driver may have been there when it was compiled - is compiled anew, once.
    ///
    /// # Errors
    /// As [`cubin`](Self::cubin), or what `load` says about code that was just compiled.
    pub fn load<T>(
        &self,
        program: &Program,
        arch: Arch,
        mut load: impl FnMut(&Cubin) -> Result<T>,
    ) -> Result<T> {
        let cubin = self.cubin(program, arch)?;
        let refusal = match load(&cubin) {
            Err(refusal) if self.invalidate(program, arch, &cubin) => refusal,
            result => return result,
        };
        let anew = self.cubin(program, arch).map_err(|error| {
            let what = format!("{} for {arch}", program.file_name());
            let problem = format!("what the cache keeps was refused ({refusal}); compiled anew: {error}");
            EnvironmentError::new(what, problem, "")
        })?;
        load(&anew)
    }

    /// Drops machine code that was refused, from memory and disk, so that it is compiled when it is asked for again.
    /// `false` if this process had compiled it, for then the same would come of it.
    pub fn invalidate(&self, program: &Program, arch: Arch, refused: &Cubin) -> bool {
        let key = Key::of(program, arch);
        let Some(slot) = lock(&self.programs).get(&key).cloned() else { return true };
        let mut slot = lock(&slot);
        match &*slot {
            // Another thread was refused the same code, and has replaced it.
            Some(kept) if !Arc::ptr_eq(&kept.bytes, &refused.bytes) => {}
            Some(kept) if kept.fresh => return false,
            _ => {
                *slot = None;
                self.cache.remove(program.name, arch, key);
            }
        }
        true
    }

    /// The compiler, looked for on the first call that finds one.
    ///
    /// # Errors
    /// As [`Compiler::find`].
    pub fn compiler(&self) -> Result<Arc<Compiler>> {
        let mut compiler = lock(&self.compiler);
        if let Some(compiler) = &*compiler {
            return Ok(Arc::clone(compiler));
        }
        let found = Arc::new(Compiler::find_for(&self.env, self.driver)?);
        Ok(Arc::clone(compiler.insert(found)))
    }

    /// Whether another process would find the program's machine code on disk, whole.
    pub fn is_kept(&self, program: &Program, arch: Arch) -> bool {
        matches!(self.cache.load(program.name, arch, Key::of(program, arch)), Found::Entry(_))
    }

    /// How the cache on disk stands.
    pub fn cache_state(&self) -> CacheState {
        self.cache.state()
    }

    /// What went wrong with the cache so far, each thing once. None of it stops anything.
    pub fn warnings(&self) -> Vec<String> {
        lock(&self.warnings).clone()
    }

    /// A program that is not in memory.
    fn obtain(&self, program: &Program, arch: Arch, key: Key) -> Result<(Entry, Origin)> {
        match self.cache.load(program.name, arch, key) {
            Found::Entry(entry) if self.outdated(&entry) => {
                // Without a compiler that suits, it is for the driver to refuse what there is.
                return self.compile(program, arch, key).or_else(|error| {
                    self.warn(format!("a kernel compiled by NVRTC {} is used: {error}", entry.nvrtc));
                    Ok((entry, Origin::Disk))
                });
            }
            Found::Entry(entry) => return Ok((entry, Origin::Disk)),
            Found::Nothing => {}
            Found::Unusable(why) => self.warn(format!("compiled anew: {why}")),
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

    /// Whether an entry was made by another compiler than the user names, or by one too new for the driver.
    fn outdated(&self, entry: &Entry) -> bool {
        match self.driver {
            _ if self.env.nvrtc.is_some() => {
                self.compiler().is_ok_and(|compiler| compiler.version() != entry.nvrtc)
            }
            Some(driver) => entry.nvrtc.major > driver.major,
            None => false,
        }
    }

    fn warn(&self, warning: String) {
        let mut warnings = lock(&self.warnings);
        if !warnings.contains(&warning) {
            warnings.push(warning);
        }
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

/// What a thread that panicked left is as good as before: every change here is one assignment.
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

    /// A cache with an entry of that compiler, and no compiler.
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

        // Where no compiler would do, the driver has the last word.
        let dir = Scratch::new();
        let env = CudaEnv {
            cache_dir: Some(dir.path(".")),
            python_roots: vec![PathBuf::from("/nowhere")],
            ..CudaEnv::default()
        };
        Cache::of(&env).store(PROGRAM.name, Arch::Sm90a, &of_version(13)).unwrap();
        // No compiler is as old as this.
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
        // The other half needs a compiler; `tests/jit.rs` says so where there must be one.
        let Ok(compiler) = Compiler::find(&CudaEnv::from_env()) else { return };
        let jit = Jit::new(CudaEnv { nvrtc: Some(compiler.path().to_owned()), ..CudaEnv::default() });
        assert!(jit.outdated(&of_version(99)));
        assert!(!jit.outdated(&Entry { nvrtc: compiler.version(), ..entry() }));
    }
}
