//! Files that the provider `shm` leaves in `/dev/shm` when a process is killed. The surviving ranks of its rail remove them.

use std::io::ErrorKind;
use std::os::unix::fs::MetadataExt as _;
use std::path::{Path, PathBuf};

/// Where `shm` keeps its files.
const DIRECTORY: &str = "/dev/shm";

/// The file of the endpoint with this address, such as `fi_shm://4711:0:0` of process 4711, and the process. `None` for
/// any other address: a peer must not choose the file that this rank removes.
fn file_of(address: &[u8]) -> Option<(PathBuf, u32)> {
    let text = std::str::from_utf8(address).ok()?.trim_end_matches('\0');
    let name = text.strip_prefix("fi_shm://")?;
    let is_number = |part: &str| !part.is_empty() && part.bytes().all(|byte| byte.is_ascii_digit());
    if name.split(':').count() != 3 || !name.split(':').all(is_number) {
        return None;
    }
    Some((Path::new(DIRECTORY).join(name), name.split(':').next()?.parse().ok()?))
}

/// Removes the file of the endpoint with this address, if its process has ended and the file belongs to this user.
pub(crate) fn sweep(address: &[u8]) {
    let Some((file, process)) = file_of(address) else { return };
    let Ok(own) = std::fs::metadata("/proc/self") else { return };
    let Ok(found) = std::fs::symlink_metadata(&file) else { return };
    if found.is_file() && found.uid() == own.uid() && has_ended(process) {
        // A file that another survivor has removed is gone, as it should be.
        let _ = std::fs::remove_file(&file);
    }
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
    use super::*;

    #[test]
    fn only_names_of_endpoints_lead_to_a_file() {
        let (file, process) = file_of(b"fi_shm://4711:1000:2\0").unwrap();
        assert_eq!((file.to_str(), process), (Some("/dev/shm/4711:1000:2"), 4711));
        for wrong in
            ["fi_sockaddr://1:2:3", "fi_shm://../x:1:2", "fi_shm://1:2", "fi_shm://1:2:3:4", "fi_shm://1::2"]
        {
            assert_eq!(file_of(wrong.as_bytes()), None, "{wrong}");
        }
    }

    #[test]
    #[cfg_attr(miri, ignore = "processes and files")]
    fn the_file_of_a_process_that_has_ended_is_removed_and_no_other() {
        let start = || std::process::Command::new("true").spawn().unwrap();
        let (mut ended, mut unreaped) = (start(), start());
        let (gone, zombie, alive) = (ended.id(), unreaped.id(), std::process::id());
        ended.wait().unwrap();
        while !has_ended(zombie) {
            std::thread::yield_now();
        }
        for (process, stays) in [(gone, false), (zombie, false), (alive, true)] {
            let file = PathBuf::from(format!("{DIRECTORY}/{process}:0:77"));
            std::fs::write(&file, "a file of a test").unwrap();
            sweep(format!("fi_shm://{process}:0:77").as_bytes());
            assert_eq!(file.exists(), stays);
            if stays {
                std::fs::remove_file(&file).unwrap();
            }
        }
        unreaped.wait().unwrap();
    }
}
