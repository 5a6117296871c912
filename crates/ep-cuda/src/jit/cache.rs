//! The cache of compiled kernels on disk: one file per program, published atomically.

use std::ffi::OsStr;
use std::fs;
use std::path::{Path, PathBuf};
use std::process;
use std::sync::atomic::{AtomicU64, Ordering};
use std::time::Duration;

use ep::CudaEnv;
use rustix::fs::Access;

use super::Arch;
use super::cache_dir::{CacheDir, Missing};
use super::entry::Entry;
use super::program::Key;

const EXTENSION: &str = "cubin";
const UNFINISHED: &str = "unfinished";

/// An unfinished file older than this was left by a process that died.
const ABANDONED: Duration = Duration::from_secs(3600);

/// Compiled kernels on disk. A file that cannot be read, trusted or written costs a compilation and is never an error.
///
/// Kernels are code, so an entry is used only if it is a regular file that belongs to this user or to root and that no
/// other user can write to, in a directory for which the same holds.
#[derive(Debug, Clone)]
pub struct Cache {
    dir: Option<PathBuf>,
}

/// The state of the cache.
#[derive(Debug, Clone, Default, PartialEq, Eq)]
pub struct CacheState {
    /// The cache's directory; `None` if the environment names none.
    pub dir: Option<PathBuf>,
    /// Number of compiled programs.
    pub entries: usize,
    /// Size of the compiled programs, in bytes.
    pub bytes: u64,
    /// Free space of the file system, in bytes; `None` if the system does not report it.
    pub free_bytes: Option<u64>,
    /// Why entries cannot be added; `None` if they can.
    pub problem: Option<String>,
}

/// The result of a search for an entry.
#[derive(Debug, PartialEq)]
pub(super) enum Found {
    Entry(Entry),
    Nothing,
    /// A damaged or unreadable file, and the reason.
    Unusable(String),
    /// A file or a cache that another user may have changed, and the reason.
    Refused(String),
}

impl Cache {
    /// The cache in the directory that the environment names.
    pub fn of(env: &CudaEnv) -> Self {
        Self { dir: env.cache_dir.clone() }
    }

    /// The state of the cache. Creates and changes nothing.
    pub fn state(&self) -> CacheState {
        let Some(dir) = &self.dir else {
            let problem = "neither HYBRID_EP_KERNEL_CACHE nor XDG_CACHE_HOME nor HOME is set";
            return CacheState { problem: Some(problem.into()), ..CacheState::default() };
        };
        let files = fs::read_dir(dir).into_iter().flatten().flatten();
        let sizes: Vec<u64> = files
            .filter(|file| file.path().extension() == Some(OsStr::new(EXTENSION)))
            .filter_map(|file| Some(file.metadata().ok()?.len()))
            .collect();
        let there = existing(dir);
        // Some file systems do not report their size: they report zero blocks.
        let room = rustix::fs::statvfs(there).ok().filter(|fs| fs.f_blocks > 0);
        let free_bytes = room.map(|fs| fs.f_bavail.saturating_mul(fs.f_frsize));
        CacheState {
            dir: Some(dir.clone()),
            entries: sizes.len(),
            bytes: sizes.iter().sum(),
            free_bytes,
            problem: refusal(there, there == dir)
                .or_else(|| (free_bytes == Some(0)).then(|| format!("{} is full", there.display()))),
        }
    }

    /// The entry of a key.
    pub(super) fn load(&self, name: &str, arch: Arch, key: Key) -> Found {
        let Some(dir) = &self.dir else { return Found::Nothing };
        let name = file_name(name, arch, key);
        match CacheDir::open(dir).and_then(|dir| dir.read(name.as_ref())) {
            Ok(bytes) => match Entry::from_bytes(&bytes, key) {
                Ok(entry) => Found::Entry(entry),
                Err(why) => Found::Unusable(format!("{}: {why}", dir.join(name).display())),
            },
            Err(Missing::Nothing) => Found::Nothing,
            Err(Missing::Unusable(why)) => Found::Unusable(why),
            Err(Missing::Refused(why)) => Found::Refused(why),
        }
    }

    /// Adds an entry, replacing one of the same key.
    ///
    /// # Errors
    /// The reason why the entry could not be added.
    pub(super) fn store(&self, name: &str, arch: Arch, entry: &Entry) -> Result<(), String> {
        static NEXT: AtomicU64 = AtomicU64::new(0);
        let Some(dir) = &self.dir else { return Ok(()) };
        let name = PathBuf::from(file_name(name, arch, entry.key));
        let number = NEXT.fetch_add(1, Ordering::Relaxed);
        let unfinished = name.with_extension(format!("{}-{number}.{UNFINISHED}", process::id()));
        let added = CacheDir::make(dir).and_then(|dir| {
            dir.sweep(UNFINISHED, ABANDONED);
            dir.publish(unfinished.as_ref(), name.as_ref(), &entry.to_bytes())
                .map_err(|error| error.to_string())
        });
        added.map_err(|why| format!("compiled kernels are not kept in {}: {why}", dir.display()))
    }

    /// Removes the entry of a key, if there is one.
    pub(super) fn remove(&self, name: &str, arch: Arch, key: Key) {
        // A failure is ignored: the entry will be replaced, or found unusable again.
        if let Some(Ok(dir)) = self.dir.as_deref().map(CacheDir::open) {
            dir.remove(file_name(name, arch, key).as_ref());
        }
    }
}

/// Half of the key is enough to distinguish entries; the whole key is in the file.
fn file_name(name: &str, arch: Arch, key: Key) -> String {
    format!("{name}-{arch}-{}.{EXTENSION}", &key.to_string()[..32])
}

/// The directory, or its innermost existing ancestor.
fn existing(dir: &Path) -> &Path {
    let there = dir.ancestors().find(|dir| fs::exists(dir).unwrap_or(true));
    there.filter(|dir| !dir.as_os_str().is_empty()).unwrap_or(Path::new("."))
}

/// Why files cannot be created in or below an existing directory. `cache`: the directory is the cache itself.
fn refusal(dir: &Path, cache: bool) -> Option<String> {
    if !dir.is_dir() {
        return Some(format!("{} is not a directory", dir.display()));
    }
    if cache && let Err(Missing::Refused(why) | Missing::Unusable(why)) = CacheDir::open(dir) {
        return Some(why);
    }
    let access = rustix::fs::access(dir, Access::WRITE_OK | Access::EXEC_OK);
    access.err().map(|error| format!("{} cannot be written to: {error}", dir.display()))
}

#[cfg(test)]
mod tests {
    use std::os::unix::fs::PermissionsExt as _;

    use rustix::fs::{FileType, Mode};

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
    fn a_stored_entry_is_found_until_it_is_removed() {
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
    fn a_damaged_entry_is_reported_and_can_be_replaced() {
        let dir = Scratch::new();
        let cache = cache(dir.path("."));
        cache.store("copy", Arch::Sm90a, &entry()).unwrap();
        let path = path(&dir);
        let bytes = fs::read(&path).unwrap();
        fs::write(&path, &bytes[..bytes.len() - 1]).unwrap();
        assert!(matches!(load(&cache), Found::Unusable(why) if why.ends_with("damaged")));
        cache.store("copy", Arch::Sm90a, &entry()).unwrap();
        assert_eq!(load(&cache), Found::Entry(entry()));
    }

    #[test]
    fn a_directory_that_cannot_be_written_is_reported() {
        let dir = Scratch::new();
        dir.write("file", "");
        for place in ["file", "file/below"] {
            let cache = cache(dir.path(place));
            assert_eq!(load(&cache), Found::Nothing);
            let refusal = cache.store("copy", Arch::Sm90a, &entry()).unwrap_err();
            assert!(refusal.contains(place), "{refusal}");
            assert!(cache.state().problem.unwrap().contains("not a directory"));
        }
        let nowhere = Cache { dir: None };
        assert_eq!(nowhere.store("copy", Arch::Sm90a, &entry()), Ok(()));
        assert_eq!(load(&nowhere), Found::Nothing);
        assert!(nowhere.state().problem.is_some());
    }

    #[test]
    fn only_abandoned_unfinished_files_are_removed() {
        let dir = Scratch::new();
        for name in ["old.unfinished", "new.unfinished", "old.cubin"] {
            dir.write(name, "");
        }
        let long_ago = std::time::SystemTime::now() - 2 * ABANDONED;
        for name in ["old.unfinished", "old.cubin"] {
            fs::File::options().write(true).open(dir.path(name)).unwrap().set_modified(long_ago).unwrap();
        }
        CacheDir::open(&dir.path(".")).unwrap().sweep(UNFINISHED, ABANDONED);
        let left = ["old.unfinished", "new.unfinished", "old.cubin"].map(|name| dir.path(name).exists());
        assert_eq!(left, [false, true, true]);
    }

    fn path(dir: &Scratch) -> PathBuf {
        dir.path(&file_name("copy", Arch::Sm90a, entry().key))
    }

    fn allow(path: &Path, mode: u32) {
        fs::set_permissions(path, fs::Permissions::from_mode(mode)).unwrap();
    }

    /// Loads the entry, and fails if that blocks.
    #[track_caller]
    fn look(dir: &Scratch) -> Found {
        let (said, found) = std::sync::mpsc::channel();
        let cache = cache(dir.path("."));
        std::thread::spawn(move || said.send(load(&cache)));
        found.recv_timeout(std::time::Duration::from_secs(20)).expect("a look waits for a file")
    }

    #[track_caller]
    fn refused(found: Found, why: &str) {
        assert!(matches!(&found, Found::Refused(said) if said.contains(why)), "{found:?}");
    }

    #[test]
    fn entries_that_others_may_have_planted_are_refused() {
        let dir = Scratch::new();
        let good = cache(dir.path("."));
        good.store("copy", Arch::Sm90a, &entry()).unwrap();
        let path = path(&dir);
        assert_eq!(fs::metadata(&path).unwrap().permissions().mode() & 0o7777, 0o600, "whatever the umask");
        assert_eq!(look(&dir), Found::Entry(entry()));
        for mode in [0o620, 0o602, 0o666] {
            allow(&path, mode);
            refused(look(&dir), "users other than its owner can write to it");
        }
        allow(&path, 0o644);
        assert_eq!(look(&dir), Found::Entry(entry()));

        // Complete entries, but not regular files of the cache.
        let elsewhere = Scratch::new();
        fs::rename(&path, elsewhere.path("entry")).unwrap();
        std::os::unix::fs::symlink(elsewhere.path("entry"), &path).unwrap();
        refused(look(&dir), "symbolic link");
        fs::remove_file(&path).unwrap();
        rustix::fs::mknodat(rustix::fs::CWD, &path, FileType::Fifo, Mode::RUSR | Mode::WUSR, 0).unwrap();
        refused(look(&dir), "not a regular file");
        fs::remove_file(&path).unwrap();
        fs::create_dir(&path).unwrap();
        refused(look(&dir), "not a regular file");
        fs::remove_dir(&path).unwrap();
        // A sparse file that is larger than memory.
        let file = fs::File::create(&path).unwrap();
        file.set_len(1 << 40).unwrap();
        allow(&path, 0o600);
        refused(look(&dir), "more than 67108864 bytes");
        // A refused entry is replaced if the directory is trusted.
        good.store("copy", Arch::Sm90a, &entry()).unwrap();
        assert_eq!(look(&dir), Found::Entry(entry()));

        // Only root can change the owner of a file; a test in `cache_dir.rs` checks the rule without root.
        if rustix::process::geteuid().is_root() {
            std::os::unix::fs::chown(&path, Some(12_345), None).unwrap();
            refused(look(&dir), "belongs to user 12345");
        }
    }

    #[test]
    fn a_directory_that_others_can_write_to_is_neither_read_nor_added_to() {
        let dir = Scratch::new();
        let shared = cache(dir.path("."));
        shared.store("copy", Arch::Sm90a, &entry()).unwrap();
        let files = || fs::read_dir(dir.path(".")).unwrap().count();
        for mode in [0o775, 0o777, 0o1777] {
            allow(&dir.path("."), mode);
            refused(look(&dir), "users other than its owner can write to it");
            let not_added = shared.store("copy", Arch::Sm80, &entry()).unwrap_err();
            assert!(not_added.contains("can write to it"), "{not_added}");
            shared.remove("copy", Arch::Sm90a, entry().key);
            assert_eq!(files(), 1);
            assert!(shared.state().problem.unwrap().contains("can write to it"));
        }
        allow(&dir.path("."), 0o755);
        assert_eq!(look(&dir), Found::Entry(entry()));
        assert_eq!(shared.state().problem, None);
        if rustix::process::geteuid().is_root() {
            std::os::unix::fs::chown(dir.path("."), Some(12_345), None).unwrap();
            refused(look(&dir), "belongs to user 12345");
        }
    }

    #[test]
    fn directories_are_made_for_their_owner_alone() {
        let dir = Scratch::new();
        cache(dir.path("a/b")).store("copy", Arch::Sm90a, &entry()).unwrap();
        for made in ["a", "a/b"] {
            assert_eq!(fs::metadata(dir.path(made)).unwrap().permissions().mode() & 0o7777, 0o700);
        }
    }
}
