//! Destinations of results. They are checked before the run. A file is written completely or not at all.

use std::fs::{self, File, OpenOptions};
use std::io::{self, ErrorKind, Write as _};
use std::os::unix::fs::{
    FileTypeExt as _, MetadataExt as _, OpenOptionsExt as _, PermissionsExt as _, fchown,
};
use std::path::{Path, PathBuf};

use super::finite::Checked;
use super::streams::{to_stderr, to_stdout};
use crate::common::failure::Failure;

/// Maximum number of links in a chain, the same as in Linux.
const MOST_LINKS: usize = 40;

/// The destination that an option names.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(crate) struct Target {
    option: &'static str,
    to: To,
}

#[derive(Debug, Clone, PartialEq, Eq)]
enum To {
    Nowhere,
    Stdout,
    Stderr,
    /// A new file, or a regular file, which is replaced as a whole.
    File(PathBuf),
    /// A pipe, a device, or an open file of this process: appended to.
    Stream(PathBuf),
}

impl Target {
    /// Resolves a path and checks that it can be written, so that a long run does not fail at its end.
    pub(crate) fn resolve(option: &'static str, path: Option<&Path>) -> Result<Self, Failure> {
        let to = match path {
            None => To::Nowhere,
            Some(path) => To::resolve(path).map_err(|problem| refused(option, path, problem))?,
        };
        Ok(Self { option, to })
    }

    /// Whether the result goes to stdout; the text then goes to stderr.
    pub(crate) fn is_stdout(&self) -> bool {
        self.to == To::Stdout
    }

    /// Whether the option was given.
    pub(crate) fn is_wanted(&self) -> bool {
        self.to != To::Nowhere
    }

    pub(crate) fn write(&self, text: &Checked) -> Result<(), Failure> {
        let line = format!("{}\n", text.as_str().trim_end_matches('\n'));
        match &self.to {
            To::Nowhere => Ok(()),
            To::Stdout => to_stdout(text.as_str()),
            To::Stderr => to_stderr(text.as_str()),
            To::Stream(path) => OpenOptions::new()
                .append(true)
                .open(path)
                .and_then(|mut stream| stream.write_all(line.as_bytes()))
                .map_err(|error| refused(self.option, path, error)),
            To::File(path) => {
                replace(path, line.as_bytes()).map_err(|error| refused(self.option, path, error))
            }
        }
    }
}

/// Refuses two options with the same destination: one result would overwrite the other or be mixed with it.
pub(crate) fn check_apart(targets: &[&Target]) -> Result<(), Failure> {
    for (index, one) in targets.iter().enumerate().filter(|(_, target)| target.is_wanted()) {
        if let Some(other) = targets[..index].iter().find(|other| other.to == one.to) {
            let place = match &one.to {
                To::File(path) | To::Stream(path) => path.display().to_string(),
                _ => "the same stream (`-` is stdout)".into(),
            };
            return Err(Failure::request(format!(
                "{} and {} both write to {place}; give each a destination of its own",
                other.option, one.option
            )));
        }
    }
    Ok(())
}

fn refused(option: &str, path: &Path, problem: impl std::fmt::Display) -> Failure {
    Failure::request(format!("{option} {}: {problem}", path.display()))
}

impl To {
    fn resolve(path: &Path) -> Result<Self, String> {
        if path == Path::new("-") {
            return Ok(Self::Stdout);
        }
        let path = behind_links(path)?;
        if let Some(stream) = Self::open_file(&path) {
            return Ok(stream);
        }
        match fs::symlink_metadata(&path) {
            Ok(found) if found.is_dir() => Err("is a directory; give the name of a file".into()),
            Ok(found) if found.file_type().is_block_device() => {
                Err("is a block device; give the name of a file".into())
            }
            Ok(found) if !found.is_file() => Ok(Self::Stream(path)),
            Ok(_) => {
                // Opened for appending, to check that its mode allows writing; nothing is changed.
                OpenOptions::new().append(true).open(&path).map_err(|error| error.to_string())?;
                Self::file(path)
            }
            Err(error) if error.kind() == ErrorKind::NotFound => Self::file(path),
            Err(error) => Err(error.to_string()),
        }
    }

    /// Resolves an entry of `/proc/PID/fd`, to which `/dev/stdout` also leads. The file behind such an entry is open
    /// already, perhaps for appending, so it must not be replaced.
    fn open_file(path: &Path) -> Option<Self> {
        let directory = path.parent()?.canonicalize().ok()?;
        if !directory.starts_with("/proc") || directory.file_name()? != "fd" {
            return None;
        }
        let own = Path::new("/proc/self/fd").canonicalize().is_ok_and(|own| own == directory);
        Some(match path.file_name()?.to_str()? {
            "1" if own => Self::Stdout,
            "2" if own => Self::Stderr,
            _ => Self::Stream(path.to_owned()),
        })
    }

    fn file(path: PathBuf) -> Result<Self, String> {
        let directory = directory_of(&path);
        if !directory.is_dir() {
            return Err(format!("there is no directory {}", directory.display()));
        }
        // Only an attempt shows whether a file can be created there.
        let probe = temporary(&path, 0o600).and_then(|(_, probe)| fs::remove_file(probe));
        probe.map_err(|error| format!("cannot write in {}: {error}", directory.display()))?;
        Ok(Self::File(path))
    }
}

/// Follows all links to the file behind them, so that links are not replaced. Entries of `/proc/PID/fd` look like links
/// but are not followed.
fn behind_links(path: &Path) -> Result<PathBuf, String> {
    let mut path = path.to_owned();
    for _ in 0..MOST_LINKS {
        let is_link = fs::symlink_metadata(&path).is_ok_and(|found| found.is_symlink());
        if !is_link || To::open_file(&path).is_some() {
            return Ok(path);
        }
        let target = fs::read_link(&path).map_err(|error| error.to_string())?;
        let target = directory_of(&path).join(target);
        if !target.exists() {
            return Err(format!(
                "is a link to {}, which does not exist; create that file first, or remove the link",
                target.display()
            ));
        }
        path = target;
    }
    Err("is a chain of too many links".into())
}

/// Writes a file under a temporary name and renames it, so that a reader finds the complete old or the complete new
/// content. Keeps mode and group of a replaced file, and its owner if the system allows that.
fn replace(path: &Path, bytes: &[u8]) -> io::Result<()> {
    let before = match fs::symlink_metadata(path) {
        Ok(found) if !found.is_file() => {
            return Err(io::Error::other("was a regular file when the run began, but is not one any more"));
        }
        Ok(found) => Some(found),
        Err(error) if error.kind() == ErrorKind::NotFound => None,
        Err(error) => return Err(error),
    };
    // The replacement of an existing file starts out private, because the old file may be. A new file follows the
    // umask.
    let (mut file, name) = temporary(path, if before.is_some() { 0o600 } else { 0o666 })?;
    let written = before
        .map_or(Ok(()), |before| take_after(&file, &before))
        .and_then(|()| file.write_all(bytes))
        .and_then(|()| file.sync_all())
        .and_then(|()| fs::rename(&name, path));
    if written.is_err() {
        let _ = fs::remove_file(&name);
        return written;
    }
    // Makes the rename durable. Some file systems cannot sync a directory; the file is complete anyway.
    let _ = File::open(directory_of(path)).and_then(|directory| directory.sync_all());
    Ok(())
}

/// Gives the new file the owner, group and mode of the file that it replaces.
fn take_after(file: &File, before: &fs::Metadata) -> io::Result<()> {
    let (uid, gid) = (before.uid(), before.gid());
    let group_kept = fchown(file, Some(uid), Some(gid)).or_else(|_| fchown(file, None, Some(gid))).is_ok();
    // If the group could not be kept, the new group gets none of the old group's rights.
    let mode = before.mode() & if group_kept { 0o777 } else { 0o707 };
    file.set_permissions(fs::Permissions::from_mode(mode))
}

fn directory_of(path: &Path) -> &Path {
    match path.parent() {
        Some(directory) if directory != Path::new("") => directory,
        _ => Path::new("."),
    }
}

/// Creates a file with an unused name in the directory of `path`.
fn temporary(path: &Path, mode: u32) -> io::Result<(File, PathBuf)> {
    let mut number = 0;
    loop {
        let name = directory_of(path).join(format!(".hybrid-ep.{}.{number}.tmp", std::process::id()));
        match OpenOptions::new().write(true).create_new(true).mode(mode).open(&name) {
            // The name is taken, for example by a file that an earlier process with the same ID left behind: try the next
            // one.
            Err(error) if error.kind() == ErrorKind::AlreadyExists && number < 100 => number += 1,
            opened => return Ok((opened?, name)),
        }
    }
}

#[cfg(test)]
mod tests {
    use std::os::unix::fs::symlink;

    use super::*;

    struct TestDirectory(PathBuf);

    impl TestDirectory {
        fn new(test: &str) -> Self {
            let directory = std::env::temp_dir().join(format!("hybrid-ep-{test}-{}", std::process::id()));
            fs::create_dir_all(&directory).unwrap();
            Self(directory)
        }
    }

    impl Drop for TestDirectory {
        fn drop(&mut self) {
            let _ = fs::remove_dir_all(&self.0);
        }
    }

    fn target(path: &Path) -> Target {
        Target::resolve("--json", Some(path)).unwrap()
    }

    fn write(path: &Path, text: &str) {
        target(path).write(&Checked::text(text.into(), &[]).unwrap()).unwrap();
    }

    #[test]
    fn a_file_is_replaced_and_no_temporary_file_remains() {
        let directory = TestDirectory::new("output");
        let path = directory.0.join("result.json");
        target(&path);
        assert!(!path.exists());
        write(&path, "{}");
        write(&path, "{\"again\": true}\n");
        assert_eq!(fs::read_to_string(&path).unwrap(), "{\"again\": true}\n");
        assert_eq!(fs::read_dir(&directory.0).unwrap().count(), 1);
        let message = |path: &Path| Target::resolve("--json", Some(path)).unwrap_err().to_string();
        assert!(message(&directory.0.join("no/x.json")).contains("there is no directory"));
        assert!(message(&directory.0).contains("is a directory"));
    }

    #[test]
    fn a_file_keeps_its_mode() {
        let directory = TestDirectory::new("mode");
        for mode in [0o600, 0o640, 0o664] {
            let path = directory.0.join(format!("{mode:o}"));
            fs::write(&path, "old").unwrap();
            fs::set_permissions(&path, fs::Permissions::from_mode(mode)).unwrap();
            write(&path, "new");
            assert_eq!(fs::metadata(&path).unwrap().mode() & 0o7777, mode);
        }
    }

    #[test]
    fn devices_pipes_and_links_are_not_replaced() {
        let null = target(Path::new("/dev/null"));
        assert_eq!(null.to, To::Stream("/dev/null".into()));
        write(Path::new("/dev/null"), "{}");
        assert!(!fs::metadata("/dev/null").unwrap().is_file());

        let directory = TestDirectory::new("link");
        let [file, link, far, lost] = ["file", "link", "far", "lost"].map(|name| directory.0.join(name));
        fs::write(&file, "old").unwrap();
        symlink("file", &link).unwrap();
        symlink("link", &far).unwrap();
        write(&far, "new");
        assert!([&link, &far].iter().all(|link| fs::symlink_metadata(link).unwrap().is_symlink()));
        assert_eq!(fs::read_to_string(&file).unwrap(), "new\n");

        symlink("nowhere", &lost).unwrap();
        let message = Target::resolve("--svg", Some(&lost)).unwrap_err().to_string();
        assert!(message.starts_with("--svg ") && message.contains("does not exist"), "{message}");
        assert!(fs::symlink_metadata(&lost).unwrap().is_symlink() && !directory.0.join("nowhere").exists());
        symlink("circle", directory.0.join("circle")).unwrap();
        assert!(Target::resolve("--svg", Some(&directory.0.join("circle"))).is_err());
    }

    #[test]
    fn names_of_standard_streams_are_recognised() {
        for name in ["-", "/dev/stdout", "/dev/fd/1", "/proc/self/fd/1"] {
            assert!(target(Path::new(name)).is_stdout(), "{name}");
        }
        assert_eq!(target(Path::new("/dev/stderr")).to, To::Stderr);
    }

    #[test]
    fn an_open_file_is_appended_to() {
        use std::os::fd::AsRawFd as _;
        let directory = TestDirectory::new("descriptor");
        let path = directory.0.join("log");
        fs::write(&path, "before\n").unwrap();
        let log = OpenOptions::new().append(true).open(&path).unwrap();
        write(Path::new(&format!("/dev/fd/{}", log.as_raw_fd())), "{}");
        assert_eq!(fs::read_to_string(&path).unwrap(), "before\n{}\n");
    }

    #[test]
    fn two_options_with_one_destination_are_refused() {
        let one = Target::resolve("--json", Some(Path::new("-"))).unwrap();
        let other = Target::resolve("--html", Some(Path::new("/dev/stdout"))).unwrap();
        let nowhere = Target::resolve("--svg", None).unwrap();
        assert!(check_apart(&[&one, &nowhere, &nowhere]).is_ok());
        let message = check_apart(&[&one, &other]).unwrap_err().to_string();
        assert!(message.starts_with("--json and --html both write to "), "{message}");
    }

    #[test]
    fn a_bare_name_is_in_the_current_directory() {
        assert_eq!(directory_of(Path::new("x.json")), Path::new("."));
        assert_eq!(directory_of(Path::new("/x.json")), Path::new("/"));
    }
}
