//! Compiled kernels on disk: one file each, published whole or not at all.

use std::ffi::OsStr;
use std::fs::{self, DirBuilder, File};
use std::io::{self, Write as _};
use std::os::unix::fs::DirBuilderExt as _;
use std::path::{Path, PathBuf};
use std::process;
use std::sync::atomic::{AtomicU64, Ordering};
use std::time::Duration;

use ep::CudaEnv;
use rustix::fs::Access;

use super::Arch;
use super::entry::Entry;
use super::program::Key;

const EXTENSION: &str = "cubin";
const UNFINISHED: &str = "unfinished";

/// A file that is still being written after this long was left by a process that died.
const ABANDONED: Duration = Duration::from_secs(3600);

/// Compiled kernels on disk. What cannot be read or written costs a compilation, never an error.
#[derive(Debug, Clone)]
pub struct Cache {
    dir: Option<PathBuf>,
}

/// How the cache stands.
#[derive(Debug, Clone, Default, PartialEq, Eq)]
pub struct CacheState {
    /// Where it is; `None` where the environment names no place.
    pub dir: Option<PathBuf>,
    /// Compiled programs in it.
    pub entries: usize,
    /// Their size, bytes.
    pub bytes: u64,
    /// Room left on its file system, bytes, where the system tells.
    pub free_bytes: Option<u64>,
    /// Why nothing can be added to it.
    pub problem: Option<String>,
}

/// What a look for an entry found.
#[derive(Debug, PartialEq)]
pub(super) enum Found {
    Entry(Entry),
    Nothing,
    /// A file that is no good, and why.
    Unusable(String),
}

impl Cache {
    /// The cache in the place that the environment names.
    pub fn of(env: &CudaEnv) -> Self {
        Self { dir: env.cache_dir.clone() }
    }

    /// How it stands. Nothing is created or changed.
    pub fn state(&self) -> CacheState {
        let Some(dir) = &self.dir else {
            let problem = "neither HYBRID_EP_CACHE_DIR nor XDG_CACHE_HOME nor HOME is set";
            return CacheState { problem: Some(problem.into()), ..CacheState::default() };
        };
        let files = fs::read_dir(dir).into_iter().flatten().flatten();
        let sizes: Vec<u64> = files
            .filter(|file| file.path().extension() == Some(OsStr::new(EXTENSION)))
            .filter_map(|file| Some(file.metadata().ok()?.len()))
            .collect();
        let there = existing(dir);
        // Some file systems do not tell their size: no blocks at all.
        let room = rustix::fs::statvfs(there).ok().filter(|fs| fs.f_blocks > 0);
        let free_bytes = room.map(|fs| fs.f_bavail.saturating_mul(fs.f_frsize));
        CacheState {
            dir: Some(dir.clone()),
            entries: sizes.len(),
            bytes: sizes.iter().sum(),
            free_bytes,
            problem: refusal(there)
                .or_else(|| (free_bytes == Some(0)).then(|| format!("{} is full", there.display()))),
        }
    }

    /// The entry of a key.
    pub(super) fn load(&self, name: &str, arch: Arch, key: Key) -> Found {
        let Some(path) = self.path(name, arch, key) else { return Found::Nothing };
        let unusable = |why: &dyn std::fmt::Display| Found::Unusable(format!("{}: {why}", path.display()));
        match fs::read(&path) {
            Ok(bytes) => match Entry::from_bytes(&bytes, key) {
                Ok(entry) => Found::Entry(entry),
                Err(why) => unusable(&why),
            },
            // A file where the directory should be: adding to it will tell.
            Err(error) if matches!(error.kind(), io::ErrorKind::NotFound | io::ErrorKind::NotADirectory) => {
                Found::Nothing
            }
            Err(error) => unusable(&error),
        }
    }

    /// Adds an entry, in place of one of the same key. The reason why it could not be added, if so.
    pub(super) fn store(&self, name: &str, arch: Arch, entry: &Entry) -> Result<(), String> {
        let Some(path) = self.path(name, arch, entry.key) else { return Ok(()) };
        let dir = path.parent().unwrap_or(Path::new("."));
        publish(dir, &path, &entry.to_bytes())
            .map_err(|error| format!("compiled kernels are not kept in {}: {error}", dir.display()))
    }

    /// Removes the entry of a key, if there is one.
    pub(super) fn remove(&self, name: &str, arch: Arch, key: Key) {
        if let Some(path) = self.path(name, arch, key) {
            // One that cannot be removed will be replaced, or found unusable again.
            let _ = fs::remove_file(path);
        }
    }

    fn path(&self, name: &str, arch: Arch, key: Key) -> Option<PathBuf> {
        // Half the key tells entries apart; the whole one is inside.
        let key = key.to_string();
        Some(self.dir.as_ref()?.join(format!("{name}-{arch}-{}.{EXTENSION}", &key[..32])))
    }
}

/// Writes a file that is seen by others only when it is whole and on the disk.
fn publish(dir: &Path, path: &Path, bytes: &[u8]) -> io::Result<()> {
    static NEXT: AtomicU64 = AtomicU64::new(0);
    // What lies in here is run as code: it is for its owner's hands alone.
    DirBuilder::new().recursive(true).mode(0o700).create(dir)?;
    sweep(dir);
    let number = NEXT.fetch_add(1, Ordering::Relaxed);
    let unfinished = path.with_extension(format!("{}-{number}.{UNFINISHED}", process::id()));
    let written = (|| {
        // Process ids repeat where containers share a directory: never into another's file.
        let mut file = File::create_new(&unfinished)?;
        file.write_all(bytes)?;
        file.sync_all()?;
        fs::rename(&unfinished, path)
    })();
    match &written {
        // An entry that is lost with the machine's power is compiled again.
        Ok(()) => drop(File::open(dir).and_then(|dir| dir.sync_all())),
        Err(error) if error.kind() == io::ErrorKind::AlreadyExists => {}
        Err(_) => drop(fs::remove_file(&unfinished)),
    }
    written
}

/// Removes what processes that died left unfinished.
fn sweep(dir: &Path) {
    for file in fs::read_dir(dir).into_iter().flatten().flatten() {
        let age = || file.metadata().ok()?.modified().ok()?.elapsed().ok();
        if file.path().extension() == Some(OsStr::new(UNFINISHED)) && age().is_some_and(|age| age > ABANDONED)
        {
            let _ = fs::remove_file(file.path());
        }
    }
}

/// The directory, or the innermost one around it that is there.
fn existing(dir: &Path) -> &Path {
    let there = dir.ancestors().find(|dir| fs::exists(dir).unwrap_or(true));
    there.filter(|dir| !dir.as_os_str().is_empty()).unwrap_or(Path::new("."))
}

/// Why files cannot be created in or below a directory that is there.
fn refusal(dir: &Path) -> Option<String> {
    if !dir.is_dir() {
        return Some(format!("{} is no directory", dir.display()));
    }
    let access = rustix::fs::access(dir, Access::WRITE_OK | Access::EXEC_OK);
    access.err().map(|error| format!("{} cannot be written to: {error}", dir.display()))
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::jit::entry::tests::{PROGRAM, entry};
    use crate::jit::scratch::Scratch;

    fn cache(dir: PathBuf) -> Cache {
        Cache { dir: Some(dir) }
    }

    fn load(cache: &Cache) -> Found {
        cache.load("copy", Arch::Sm90a, entry().key)
    }

    #[test]
    fn what_is_stored_is_found_until_it_is_removed() {
        let dir = Scratch::new();
        let cache = cache(dir.path("a/b"));
        assert_eq!(load(&cache), Found::Nothing);
        let before = cache.state();
        assert_eq!((before.entries, before.bytes, before.problem), (0, 0, None));
        assert!(!dir.path("a").exists(), "a look must not create anything");

        cache.store("copy", Arch::Sm90a, &entry()).unwrap();
        cache.store("copy", Arch::Sm90a, &entry()).unwrap();
        assert_eq!(load(&cache), Found::Entry(entry()));
        assert_eq!(cache.load("copy", Arch::Sm80, Key::of(&PROGRAM, Arch::Sm80)), Found::Nothing);
        let state = cache.state();
        assert_eq!((state.entries, state.bytes), (1, entry().to_bytes().len() as u64));
        assert!(state.free_bytes.unwrap() > 0);
        assert_eq!(fs::read_dir(dir.path("a/b")).unwrap().count(), 1);

        cache.remove("copy", Arch::Sm90a, entry().key);
        assert_eq!(load(&cache), Found::Nothing);
    }

    #[test]
    fn a_damaged_entry_is_told_and_can_be_replaced() {
        let dir = Scratch::new();
        let cache = cache(dir.path("."));
        cache.store("copy", Arch::Sm90a, &entry()).unwrap();
        let path = cache.path("copy", Arch::Sm90a, entry().key).unwrap();
        let bytes = fs::read(&path).unwrap();
        fs::write(&path, &bytes[..bytes.len() - 1]).unwrap();
        assert!(matches!(load(&cache), Found::Unusable(why) if why.ends_with("damaged")));
        cache.store("copy", Arch::Sm90a, &entry()).unwrap();
        assert_eq!(load(&cache), Found::Entry(entry()));
    }

    #[test]
    fn a_place_that_cannot_be_written_is_told() {
        let dir = Scratch::new();
        dir.write("file", "");
        for place in ["file", "file/below"] {
            let cache = cache(dir.path(place));
            assert_eq!(load(&cache), Found::Nothing);
            let refusal = cache.store("copy", Arch::Sm90a, &entry()).unwrap_err();
            assert!(refusal.contains(place), "{refusal}");
            assert!(cache.state().problem.unwrap().contains("no directory"));
        }
        let nowhere = Cache { dir: None };
        assert_eq!(nowhere.store("copy", Arch::Sm90a, &entry()), Ok(()));
        assert_eq!(load(&nowhere), Found::Nothing);
        assert!(nowhere.state().problem.is_some());
    }

    #[test]
    fn only_abandoned_files_are_swept() {
        let dir = Scratch::new();
        for name in ["old.unfinished", "new.unfinished", "old.cubin"] {
            dir.write(name, "");
        }
        let long_ago = std::time::SystemTime::now() - 2 * ABANDONED;
        for name in ["old.unfinished", "old.cubin"] {
            File::options().write(true).open(dir.path(name)).unwrap().set_modified(long_ago).unwrap();
        }
        sweep(&dir.path("."));
        let left = ["old.unfinished", "new.unfinished", "old.cubin"].map(|name| dir.path(name).exists());
        assert_eq!(left, [false, true, true]);
    }
}
