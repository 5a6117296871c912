//! The cache's directory and the rules by which its files are trusted: they contain code that runs on the GPU.

use std::ffi::OsStr;
use std::fmt;
use std::fs::{DirBuilder, File};
use std::io::{self, Read as _, Write as _};
use std::os::fd::OwnedFd;
use std::os::unix::ffi::OsStrExt as _;
use std::os::unix::fs::DirBuilderExt as _;
use std::path::{Path, PathBuf};
use std::time::Duration;

use rustix::fs::{AtFlags, FileType, Mode, OFlags, Stat};
use rustix::io::Errno;

/// Maximum size of an entry, in bytes. Kernels have some 100 KiB.
const MOST_BYTES: u64 = 64 << 20;
/// The permission bits that a trusted file or directory must not have: write permission for group and others.
const WRITING: u32 = 0o022;

/// A directory that only this user, or root, can change.
#[derive(Debug)]
pub(super) struct CacheDir {
    dir: OwnedFd,
    path: PathBuf,
}

/// Why a directory or a file cannot be used.
#[derive(Debug, PartialEq)]
pub(super) enum Missing {
    /// It does not exist.
    Nothing,
    /// It cannot be trusted.
    Refused(String),
    /// The system cannot read it.
    Unusable(String),
}

impl CacheDir {
    /// Opens the directory, if it exists and can be trusted.
    pub(super) fn open(path: &Path) -> Result<Self, Missing> {
        let flags = OFlags::PATH | OFlags::DIRECTORY | OFlags::CLOEXEC;
        let dir = match rustix::fs::open(path, flags, Mode::empty()) {
            Ok(dir) => dir,
            // For a file in place of the directory, `make` returns an error.
            Err(Errno::NOENT | Errno::NOTDIR) => return Err(Missing::Nothing),
            Err(error) => return Err(unusable(path, error)),
        };
        let stat = rustix::fs::fstat(&dir).map_err(|error| unusable(path, error))?;
        refuse(&stat).map_or(Ok(()), |why| Err(refused(path, why)))?;
        Ok(Self { dir, path: path.to_owned() })
    }

    /// Like [`open`](Self::open), but creates a missing directory with mode 0700.
    pub(super) fn make(path: &Path) -> Result<Self, String> {
        let not_made = |error: &dyn fmt::Display| format!("{}: {error}", path.display());
        DirBuilder::new().recursive(true).mode(0o700).create(path).map_err(|error| not_made(&error))?;
        Self::open(path).map_err(|missing| match missing {
            Missing::Nothing => not_made(&"it is not a directory"),
            Missing::Refused(why) | Missing::Unusable(why) => why,
        })
    }

    /// The bytes of a file.
    pub(super) fn read(&self, name: &OsStr) -> Result<Vec<u8>, Missing> {
        let path = self.path.join(name);
        // NONBLOCK: opening a FIFO or a device must not block.
        let flags = OFlags::RDONLY | OFlags::NOFOLLOW | OFlags::NONBLOCK | OFlags::CLOEXEC;
        let file = match rustix::fs::openat(&self.dir, name, flags, Mode::empty()) {
            Ok(file) => file,
            Err(Errno::NOENT) => return Err(Missing::Nothing),
            Err(Errno::LOOP) => return Err(refused(&path, "it is a symbolic link".into())),
            Err(error) => return Err(unusable(&path, error)),
        };
        let stat = rustix::fs::fstat(&file).map_err(|error| unusable(&path, error))?;
        if FileType::from_raw_mode(stat.st_mode) != FileType::RegularFile {
            return Err(refused(&path, "it is not a regular file".into()));
        }
        refuse(&stat).map_or(Ok(()), |why| Err(refused(&path, why)))?;
        let too_long = || refused(&path, format!("it has more than {MOST_BYTES} bytes"));
        if stat.st_size as u64 > MOST_BYTES {
            return Err(too_long());
        }
        let mut bytes = Vec::with_capacity(stat.st_size as usize);
        // The file may grow meanwhile.
        let read = File::from(file).take(MOST_BYTES + 1).read_to_end(&mut bytes);
        read.map_err(|error| unusable(&path, error))?;
        if bytes.len() as u64 > MOST_BYTES { Err(too_long()) } else { Ok(bytes) }
    }

    /// Writes a file atomically: under the name `unfinished` first, and under `name` when it is complete and on disk.
    pub(super) fn publish(&self, unfinished: &OsStr, name: &OsStr, bytes: &[u8]) -> io::Result<()> {
        let flags = OFlags::WRONLY | OFlags::CREATE | OFlags::EXCL | OFlags::NOFOLLOW | OFlags::CLOEXEC;
        // EXCL: containers that share a directory may have equal process ids; never write to another process's file.
        let file = rustix::fs::openat(&self.dir, unfinished, flags, Mode::RUSR | Mode::WUSR)?;
        let written = (|| {
            let mut file = File::from(file);
            file.write_all(bytes)?;
            file.sync_all()?;
            rustix::fs::renameat(&self.dir, unfinished, &self.dir, name)?;
            Ok(())
        })();
        match &written {
            // A failed fsync is ignored: an entry that is lost is compiled again.
            Ok(()) => drop(self.listing().map(|dir| rustix::fs::fsync(&dir))),
            Err(_) => self.remove(unfinished),
        }
        written
    }

    /// Removes a file, if it exists and can be removed.
    pub(super) fn remove(&self, name: &OsStr) {
        let _ = rustix::fs::unlinkat(&self.dir, name, AtFlags::empty());
    }

    /// Removes files with this extension whose last change is older than `age`.
    pub(super) fn sweep(&self, extension: &str, age: Duration) {
        let Ok(names) = self.listing().and_then(|dir| Ok(rustix::fs::Dir::new(dir)?)) else { return };
        for name in names.flatten() {
            let name = OsStr::from_bytes(name.file_name().to_bytes());
            let changed = || {
                let stat = rustix::fs::statat(&self.dir, name, AtFlags::SYMLINK_NOFOLLOW).ok()?;
                let since = Duration::from_secs(stat.st_mtime.try_into().ok()?);
                std::time::SystemTime::UNIX_EPOCH.checked_add(since)?.elapsed().ok()
            };
            if Path::new(name).extension() == Some(OsStr::new(extension))
                && changed().is_some_and(|since| since > age)
            {
                self.remove(name);
            }
        }
    }

    fn listing(&self) -> io::Result<OwnedFd> {
        let flags = OFlags::RDONLY | OFlags::DIRECTORY | OFlags::CLOEXEC;
        Ok(rustix::fs::openat(&self.dir, ".", flags, Mode::empty())?)
    }
}

fn refused(path: &Path, why: String) -> Missing {
    Missing::Refused(format!("{}: {why}", path.display()))
}

fn unusable(path: &Path, error: impl fmt::Display) -> Missing {
    Missing::Unusable(format!("{}: {error}", path.display()))
}

/// Why a file or directory cannot be trusted.
fn refuse(stat: &Stat) -> Option<String> {
    refuse_of(stat.st_uid, stat.st_mode, rustix::process::geteuid().as_raw())
}

fn refuse_of(owner: u32, mode: u32, user: u32) -> Option<String> {
    if owner != user && owner != 0 {
        return Some(format!(
            "it belongs to user {owner}, and this is user {user}: only files of this user and of root are used"
        ));
    }
    (mode & WRITING != 0).then(|| {
        format!(
            "users other than its owner can write to it (mode {:04o}): `chmod go-w` fixes that",
            mode & 0o7777
        )
    })
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn only_files_that_no_other_user_can_change_are_trusted() {
        let why = |owner, mode, user| refuse_of(owner, mode, user).unwrap_or_default();
        for (owner, mode, user) in
            [(7, 0o100_600, 7), (7, 0o040_755, 7), (0, 0o100_644, 7), (0, 0o100_600, 0)]
        {
            assert_eq!(why(owner, mode, user), "");
        }
        assert!(why(8, 0o100_600, 7).contains("belongs to user 8"));
        // The rule holds for root, too: otherwise root would run code that another user has planted.
        assert!(why(8, 0o100_600, 0).contains("belongs to user 8"));
        for mode in [0o100_620, 0o100_602, 0o040_775, 0o041_777] {
            assert!(why(7, mode, 7).contains("can write to it"), "{mode:o}");
            assert!(why(0, mode, 7).contains("can write to it"), "{mode:o}");
        }
    }
}
