//! What leaves the program: text on stdout and stderr, and files that are whole or not there.

use std::fs::{File, OpenOptions};
use std::io::{ErrorKind, Write as _};
use std::path::{Path, PathBuf};

use indicatif::{ProgressBar, ProgressStyle};
use serde::Serialize;

use crate::failure::Failure;

/// The one line of an error. A message of several lines is joined: scripts read a line.
pub(crate) fn error(program: &str, failure: &Failure) {
    let message = failure.to_string().split_whitespace().collect::<Vec<_>>().join(" ");
    // Where stderr is gone too, nobody listens. Written as a whole: ranks that are processes share it.
    let _ = to_stderr(&format!("{program}: error: {message}"));
}

/// Writes a text as a whole, ending its line. A reader that has gone (`| head`) is no error.
pub(crate) fn to_stdout(text: &str) -> Result<(), Failure> {
    whole(std::io::stdout().lock(), text, "stdout")
}

/// As [`to_stdout`], to stderr.
pub(crate) fn to_stderr(text: &str) -> Result<(), Failure> {
    whole(std::io::stderr().lock(), text, "stderr")
}

fn whole(mut to: impl std::io::Write, text: &str, name: &str) -> Result<(), Failure> {
    let end = if text.ends_with('\n') { "" } else { "\n" };
    match to.write_all(format!("{text}{end}").as_bytes()).and_then(|()| to.flush()) {
        Err(error) if error.kind() != ErrorKind::BrokenPipe => {
            Err(Failure::request(format!("writing to {name}: {error}")))
        }
        _ => Ok(()),
    }
}

pub(crate) fn to_json(value: &impl Serialize) -> Result<String, Failure> {
    serde_json::to_string_pretty(value).map_err(|error| Failure::request(format!("writing JSON: {error}")))
}

/// Where JSON goes.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(crate) enum JsonTarget {
    Nowhere,
    Stdout,
    /// A name that is free, or a file to replace.
    File(PathBuf),
    /// A device or a pipe: nothing that could be replaced.
    Stream(PathBuf),
}

impl JsonTarget {
    /// Checks before a long run that there is a place for its result.
    pub(crate) fn resolve(path: Option<&Path>) -> Result<Self, Failure> {
        let Some(path) = path else { return Ok(Self::Nowhere) };
        if path == Path::new("-") {
            return Ok(Self::Stdout);
        }
        let refuse = |problem: &str| Err(Failure::request(format!("--json {}: {problem}", path.display())));
        // Behind a link is what it stands for: the link itself stays.
        let behind = path.canonicalize();
        let path = behind.as_deref().unwrap_or(path);
        match std::fs::metadata(path) {
            Ok(found) if found.is_dir() => return refuse("is a directory; give the name of a file"),
            Ok(found) if !found.is_file() => return Ok(Self::Stream(path.to_owned())),
            _ => {}
        }
        let directory = directory_of(path);
        if !directory.is_dir() {
            return refuse(&format!("there is no directory {}", directory.display()));
        }
        // Only an attempt tells whether a file can be made there.
        let probe = temporary_name(path);
        if let Err(error) = File::create_new(&probe).and_then(|_| std::fs::remove_file(&probe)) {
            return refuse(&format!("cannot write in {}: {error}", directory.display()));
        }
        Ok(Self::File(path.to_owned()))
    }

    /// Writes the text, a file under another name first: a name that exists holds a whole result.
    pub(crate) fn write(&self, text: &str) -> Result<(), Failure> {
        match self {
            Self::Nowhere => Ok(()),
            Self::Stdout => to_stdout(text),
            Self::Stream(path) => OpenOptions::new()
                .write(true)
                .open(path)
                .and_then(|mut stream| stream.write_all(format!("{text}\n").as_bytes()))
                .map_err(|error| Failure::request(format!("--json {}: {error}", path.display()))),
            Self::File(path) => {
                let temporary = temporary_name(path);
                let written = File::create_new(&temporary)
                    .and_then(|mut file| {
                        file.write_all(format!("{text}\n").as_bytes())?;
                        file.sync_all()
                    })
                    .and_then(|()| std::fs::rename(&temporary, path));
                written.map_err(|error| {
                    let _ = std::fs::remove_file(&temporary);
                    Failure::request(format!("--json {}: {error}", path.display()))
                })
            }
        }
    }
}

fn directory_of(path: &Path) -> &Path {
    match path.parent() {
        Some(directory) if directory != Path::new("") => directory,
        _ => Path::new("."),
    }
}

/// A name beside `path` that no other process uses.
fn temporary_name(path: &Path) -> PathBuf {
    let mut name = std::ffi::OsString::from(".");
    name.push(path.file_name().unwrap_or_default());
    name.push(format!(".{}.tmp", std::process::id()));
    directory_of(path).join(name)
}

/// A bar on stderr over `steps` steps; hidden where stderr is no terminal.
pub(crate) fn progress(steps: u64) -> ProgressBar {
    let style = ProgressStyle::with_template("{msg:<22} [{bar:40}] {pos}/{len}  {elapsed} (left {eta})");
    let bar = ProgressBar::new(steps);
    match style {
        Ok(style) => bar.with_style(style.progress_chars("=> ")),
        Err(_) => bar,
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_file_is_whole_and_alone() {
        let directory = std::env::temp_dir().join(format!("hybrid-ep-output-{}", std::process::id()));
        std::fs::create_dir_all(&directory).unwrap();
        let path = directory.join("result.json");
        let target = JsonTarget::resolve(Some(&path)).unwrap();
        assert!(!path.exists());
        target.write("{}").unwrap();
        target.write("{\"again\": true}").unwrap();
        assert_eq!(std::fs::read_to_string(&path).unwrap(), "{\"again\": true}\n");
        assert_eq!(std::fs::read_dir(&directory).unwrap().count(), 1);
        let message = |path: &Path| JsonTarget::resolve(Some(path)).unwrap_err().to_string();
        assert!(message(&directory.join("no/x.json")).contains("there is no directory"));
        assert!(message(&directory).contains("is a directory"));
        std::fs::remove_dir_all(&directory).unwrap();
    }

    #[test]
    #[cfg(unix)]
    fn devices_and_links_stay() {
        let device = JsonTarget::resolve(Some(Path::new("/dev/null"))).unwrap();
        assert_eq!(device, JsonTarget::Stream("/dev/null".into()));
        device.write("{}").unwrap();
        assert!(!std::fs::metadata("/dev/null").unwrap().is_file());

        let directory = std::env::temp_dir().join(format!("hybrid-ep-link-{}", std::process::id()));
        std::fs::create_dir_all(&directory).unwrap();
        let [file, link] = ["result.json", "link.json"].map(|name| directory.join(name));
        std::fs::write(&file, "old").unwrap();
        std::os::unix::fs::symlink(&file, &link).unwrap();
        JsonTarget::resolve(Some(&link)).unwrap().write("new").unwrap();
        assert!(std::fs::symlink_metadata(&link).unwrap().is_symlink());
        assert_eq!(std::fs::read_to_string(&file).unwrap(), "new\n");
        std::fs::remove_dir_all(&directory).unwrap();
    }

    #[test]
    fn a_bare_name_is_in_this_directory() {
        assert_eq!(directory_of(Path::new("x.json")), Path::new("."));
        assert_eq!(directory_of(Path::new("/x.json")), Path::new("/"));
    }
}
