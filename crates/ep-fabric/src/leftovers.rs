//! Files that the provider `shm` leaves in `/dev/shm` when a process is killed. Surviving ranks of the process remove them, and
//! so does the next process of this user that opens an engine over `shm`.
//!
//! A marker says which files are of an engine: by its name alone, a file could be of any program, and of a process of another
//! PID namespace.

use std::fs::OpenOptions;
use std::io::ErrorKind;
use std::os::unix::fs::{MetadataExt as _, OpenOptionsExt as _};
use std::path::{Path, PathBuf};
use std::sync::{Arc, Mutex, PoisonError, Weak};

/// Where `shm` keeps its files.
const DIRECTORY: &str = "/dev/shm";
/// The beginning of a marker's name.
const MARKER: &str = "hybrid-ep-shm-";

/// Says, while it lives, that this process has endpoints of `shm`: an empty file in `/dev/shm`, whose name has the PID
/// namespace and the process.
#[derive(Debug)]
pub(crate) struct Marker {
    path: PathBuf,
    process: u32,
}

impl Marker {
    /// The marker of this process, for as long as any engine keeps it. `None` if the file cannot be made: then the files of this
    /// process stay if it is killed.
    pub(crate) fn of_process() -> Option<Arc<Self>> {
        static OWN: Mutex<Weak<Marker>> = Mutex::new(Weak::new());
        let mut own = OWN.lock().unwrap_or_else(PoisonError::into_inner);
        if let Some(marker) = own.upgrade() {
            return Some(marker);
        }
        let marker = Arc::new(Self::make(&pid_namespace()?, std::process::id())?);
        *own = Arc::downgrade(&marker);
        Some(marker)
    }

    fn make(namespace: &str, process: u32) -> Option<Self> {
        let path = Path::new(DIRECTORY).join(format!("{MARKER}{namespace}-{process}"));
        let made = OpenOptions::new().write(true).create_new(true).mode(0o600).open(&path);
        // A process that had the same number may have left one.
        (made.is_ok() || is_own(&path)).then_some(Self { path, process })
    }
}

impl Drop for Marker {
    fn drop(&mut self) {
        // A forked child has a copy of its parent's.
        if self.process == std::process::id() {
            remove(&self.path);
        }
    }
}

/// Removes the files of all processes that have left a marker and have ended.
pub(crate) fn sweep() {
    if let Some(namespace) = pid_namespace() {
        sweep_namespace(&namespace);
    }
}

/// As [`sweep`], of the processes of one PID namespace.
fn sweep_namespace(namespace: &str) {
    let Ok(entries) = std::fs::read_dir(DIRECTORY) else { return };
    let names: Vec<String> =
        entries.flatten().filter_map(|entry| entry.file_name().into_string().ok()).collect();
    let prefix = format!("{MARKER}{namespace}-");
    for marker in &names {
        let Some(process) = marker.strip_prefix(&prefix).and_then(|process| process.parse().ok()) else {
            continue;
        };
        let marker = Path::new(DIRECTORY).join(marker);
        if !is_own(&marker) || !has_ended(process) {
            continue;
        }
        for name in names.iter().filter(|name| process_of(name) == Some(process)) {
            let file = Path::new(DIRECTORY).join(name);
            if is_own(&file) {
                remove(&file);
            }
        }
        remove(&marker);
    }
}

/// The process of the endpoint whose file has this name, such as `4711:0:0` of process 4711. `None` for other files.
fn process_of(name: &str) -> Option<u32> {
    let is_number = |part: &str| !part.is_empty() && part.bytes().all(|byte| byte.is_ascii_digit());
    let mut parts = name.split(':');
    let process = parts.next().filter(|part| is_number(part))?;
    (parts.clone().count() == 2 && parts.all(is_number)).then(|| process.parse().ok())?
}

/// The number of this process's PID namespace.
fn pid_namespace() -> Option<String> {
    let link = std::fs::read_link("/proc/self/ns/pid").ok()?;
    let number: String = link.to_str()?.chars().filter(char::is_ascii_digit).collect();
    (!number.is_empty()).then_some(number)
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

/// Whether a process is gone, or has ended and waits for its parent.
fn has_ended(process: u32) -> bool {
    let stat = std::fs::read_to_string(format!("/proc/{process}/stat"));
    // The state follows the name, which is in parentheses and may contain any character.
    let state = stat.as_ref().map(|stat| stat.rsplit(") ").next().unwrap_or_default());
    state.map_or_else(|error| error.kind() == ErrorKind::NotFound, |state| state.starts_with(['Z', 'X']))
}

#[cfg(test)]
mod tests {
    use std::process::Command;

    use super::*;

    #[test]
    fn only_some_names_are_of_endpoints() {
        assert_eq!(process_of("4711:1000:2"), Some(4711));
        for other in ["1:2", "1:2:3:4", "1::2", ":1:2", "a:1:2", "1:2:b", "", "99999999999:1:2"] {
            assert_eq!(process_of(other), None, "{other}");
        }
    }

    #[test]
    #[cfg_attr(miri, ignore = "processes and files")]
    fn files_of_processes_that_have_ended_and_left_a_marker_are_removed_and_no_others() {
        // Not the namespace of this process, in which other tests open engines.
        const NAMESPACE: &str = "11";
        let start = || Command::new("true").spawn().unwrap();
        let (mut ended, mut unreaped) = (start(), start());
        ended.wait().unwrap();
        let processes = [ended.id(), unreaped.id(), std::process::id()];
        while !has_ended(processes[1]) {
            std::thread::yield_now();
        }
        let at = |name: String| Path::new(DIRECTORY).join(name);
        let endpoints = processes.map(|process| [71, 72].map(|number| at(format!("{process}:0:{number}"))));
        let foreign = at(format!("{MARKER}12-{}", processes[0]));
        let exist = || endpoints.each_ref().map(|files| files.each_ref().map(|file| file.exists()));
        for file in endpoints.as_flattened().iter().chain([&foreign]) {
            std::fs::write(file, "a file of a test").unwrap();
        }
        sweep_namespace(NAMESPACE);
        assert_eq!(exist(), [[true; 2]; 3], "without a marker, they may be of another program");
        let markers = processes.map(|process| Marker::make(NAMESPACE, process).unwrap());
        let paths = markers.each_ref().map(|marker| marker.path.clone());
        // A killed process does not drop its marker.
        std::mem::forget(markers);
        sweep_namespace(NAMESPACE);
        assert_eq!(exist(), [[false; 2], [false; 2], [true; 2]]);
        assert_eq!(paths.each_ref().map(|file| file.exists()), [false, false, true]);
        assert!(foreign.exists(), "the number of a process of another namespace");
        for file in endpoints[2].iter().chain([&paths[2], &foreign]) {
            std::fs::remove_file(file).unwrap();
        }
        unreaped.wait().unwrap();
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
