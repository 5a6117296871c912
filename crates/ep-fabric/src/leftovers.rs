//! Files that the provider `shm` leaves in `/dev/shm` when a process is killed. Any later process of this user that
//! opens or drops an engine over `shm` removes them.
//!
//! A process with endpoints of `shm` keeps a *marker*: a file that lists the files of these endpoints by name and
//! inode, and that is locked while the process lives. A process ID does not suffice: in another PID namespace it does
//! not tell whether the process lives, and once it belongs to another process it does not tell whose file it is.

use std::fs::{File, OpenOptions};
use std::io::{Read as _, Write as _};
use std::os::unix::fs::{MetadataExt as _, OpenOptionsExt as _};
use std::path::{Path, PathBuf};
use std::sync::{Arc, Mutex, PoisonError, Weak};

/// Where `shm` keeps its files.
const DIRECTORY: &str = "/dev/shm";
/// The beginning of a marker's name.
const MARKER: &str = "hybrid-ep-shm-";
/// The longest marker that is read, in bytes.
const LONGEST: u64 = 1 << 20;

/// The marker of this process, while it lives.
#[derive(Debug)]
pub(crate) struct Marker {
    file: File,
    path: PathBuf,
    process: u32,
}

impl Marker {
    /// The marker of this process, for as long as any engine keeps it. `None` if the file cannot be made: then the files
    /// of this process stay if it is killed.
    pub(crate) fn of_process() -> Option<Arc<Self>> {
        static OWN: Mutex<Weak<Marker>> = Mutex::new(Weak::new());
        let mut own = OWN.lock().unwrap_or_else(PoisonError::into_inner);
        // A forked child makes a marker of its own.
        if let Some(marker) = own.upgrade().filter(|marker| marker.process == std::process::id()) {
            return Some(marker);
        }
        let marker = Arc::new(Self::make()?);
        *own = Arc::downgrade(&marker);
        Some(marker)
    }

    fn make() -> Option<Self> {
        const ATTEMPTS: u32 = 100;
        let process = std::process::id();
        (0..ATTEMPTS).find_map(|attempt| {
            let path = Path::new(DIRECTORY).join(format!("{MARKER}{process}-{attempt}"));
            let file =
                OpenOptions::new().read(true).write(true).create_new(true).mode(0o600).open(&path).ok()?;
            file.try_lock().ok()?;
            // Between creation and lock, another process may have removed the file as a leftover.
            (inode(&path) == file.metadata().ok().map(|made| made.ino())).then_some(Self {
                file,
                path,
                process,
            })
        })
    }

    /// Adds the file of the endpoint with this address, such as `fi_shm://4711:0:0`.
    pub(crate) fn add(&self, address: &[u8]) {
        let named = std::str::from_utf8(address)
            .ok()
            .and_then(|text| text.trim_end_matches('\0').strip_prefix("fi_shm://"));
        let Some(name) = named.filter(|name| is_endpoint(name)) else { return };
        if let Some(inode) = inode(&Path::new(DIRECTORY).join(name)) {
            // Without the line, the file may stay if this process is killed.
            let _ = (&self.file).write_all(format!("{name} {inode}\n").as_bytes());
        }
    }
}

impl Drop for Marker {
    fn drop(&mut self) {
        // A forked child has a copy of its parent's marker.
        if self.process == std::process::id() {
            remove(&self.path);
        }
    }
}

/// Removes the files of processes that have ended and left a marker.
pub(crate) fn sweep() {
    let Ok(entries) = std::fs::read_dir(DIRECTORY) else { return };
    for entry in entries.flatten() {
        if entry.file_name().as_encoded_bytes().starts_with(MARKER.as_bytes()) {
            sweep_marker(&entry.path());
        }
    }
}

fn sweep_marker(path: &Path) {
    if !is_own(path) {
        return;
    }
    // No FIFO, which would block, and no link, which would lead elsewhere: `is_own` has seen a regular file.
    let Ok(mut file) = File::open(path) else { return };
    // The process lives, or another process removes its files.
    if file.try_lock().is_err() {
        return;
    }
    let mut text = String::new();
    let _ = (&mut file).take(LONGEST).read_to_string(&mut text);
    for line in text.lines() {
        let Some((name, number)) = line.split_once(' ') else { continue };
        let file = Path::new(DIRECTORY).join(name);
        // A process with the same number may have a file of that name by now.
        if is_endpoint(name) && is_own(&file) && inode(&file) == number.parse().ok() {
            remove(&file);
        }
    }
    remove(path);
}

/// Whether this can be the name of an endpoint's file: three numbers, such as `4711:0:0`.
fn is_endpoint(name: &str) -> bool {
    let is_number = |part: &str| !part.is_empty() && part.bytes().all(|byte| byte.is_ascii_digit());
    name.split(':').count() == 3 && name.split(':').all(is_number)
}

fn inode(file: &Path) -> Option<u64> {
    std::fs::symlink_metadata(file).ok().map(|found| found.ino())
}

/// Whether this is a regular file of this user.
fn is_own(file: &Path) -> bool {
    let Ok(own) = std::fs::metadata("/proc/self") else { return false };
    std::fs::symlink_metadata(file).is_ok_and(|found| found.is_file() && found.uid() == own.uid())
}

fn remove(file: &Path) {
    // A file that another process has removed is gone, as it should be.
    let _ = std::fs::remove_file(file);
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn only_some_names_are_of_endpoints() {
        assert!(is_endpoint("4711:1000:2"));
        for other in ["1:2", "1:2:3:4", "1::2", ":1:2", "a:1:2", "1:2:b", "", "../1:2:3"] {
            assert!(!is_endpoint(other), "{other}");
        }
    }

    #[test]
    #[cfg_attr(miri, ignore = "files")]
    fn only_files_of_a_process_that_has_ended_are_removed_and_only_the_very_files() {
        let at = |number: u32| Path::new(DIRECTORY).join(format!("{}:0:{number}", std::process::id()));
        let files = [at(71), at(72), at(73)];
        let write = |file: &Path| std::fs::write(file, "a file of a test").unwrap();
        files.iter().for_each(|file| write(file));
        let exist = || files.each_ref().map(|file| file.exists());
        let marker = Marker::make().unwrap();
        for number in [71, 72] {
            marker.add(format!("fi_shm://{}:0:{number}\0", std::process::id()).as_bytes());
        }
        marker.add(b"fi_shm://../etc/passwd");
        sweep();
        assert_eq!(exist(), [true; 3], "the process lives");
        // A file of the same name and process ID, which another process has made.
        let old = Path::new(DIRECTORY).join(format!("hybrid-ep-test-{}", std::process::id()));
        std::fs::rename(&files[1], &old).unwrap();
        write(&files[1]);
        // A killed process does not drop its marker, and its lock ends.
        let path = marker.path.clone();
        marker.file.unlock().unwrap();
        std::mem::forget(marker);
        sweep();
        assert_eq!(exist(), [false, true, true]);
        assert!(!path.exists());
        for file in [&files[1], &files[2], &old] {
            std::fs::remove_file(file).unwrap();
        }
    }

    #[test]
    #[cfg_attr(miri, ignore = "files")]
    fn a_marker_lives_as_long_as_an_engine_keeps_it() {
        let (first, second) = (Marker::of_process().unwrap(), Marker::of_process().unwrap());
        let path = first.path.clone();
        assert!(Arc::ptr_eq(&first, &second) && path.exists());
        drop(first);
        assert!(path.exists());
        drop(second);
        assert!(!path.exists());
    }
}
