//! Checks that nothing of a world's processes outlives them: memory, sockets, files and child processes.

use std::collections::BTreeSet;
use std::fs;
use std::os::unix::fs::MetadataExt as _;
use std::path::{Path, PathBuf};

/// The resources that the processes of one world held while they ran.
pub(crate) struct Held {
    /// Each process leads its own process group, so that its child processes are found.
    pids: Vec<u32>,
    /// Inodes of memory without a name (memfd), mapped or open.
    memory: BTreeSet<u64>,
    /// Inodes of sockets.
    sockets: BTreeSet<u64>,
    /// The directory in which the processes make files, if they make any.
    directory: PathBuf,
}

impl Held {
    /// The resources that these running processes hold now.
    ///
    /// # Panics
    /// When a process shares no memory: the later check would then check nothing.
    pub(crate) fn by(pids: &[u32], directory: &Path) -> Self {
        let mut memory = BTreeSet::new();
        for &pid in pids {
            let of_this_one = memory_of(pid);
            assert!(!of_this_one.is_empty(), "process {pid} shares no memory");
            memory.extend(of_this_one);
        }
        let sockets = pids.iter().flat_map(|&pid| sockets_of(pid)).collect();
        Self { pids: pids.to_vec(), memory, sockets, directory: directory.to_owned() }
    }

    /// Checks that no resource is left. Call it after all of the processes have ended.
    pub(crate) fn assert_gone(&self) {
        for pid in all_processes() {
            let memory = memory_of(pid);
            let left: Vec<_> = memory.intersection(&self.memory).collect();
            assert!(left.is_empty(), "process {pid} still has memory {left:?}");
            let group = group_of(pid);
            assert!(group.is_none_or(|group| !self.pids.contains(&group)), "process {pid} was left running");
        }
        for table in ["tcp", "tcp6", "unix"] {
            let left: Vec<_> = inodes_of(table).filter(|inode| self.sockets.contains(inode)).collect();
            assert!(left.is_empty(), "{table} sockets {left:?} are still open");
        }
        let files: Vec<_> =
            fs::read_dir(&self.directory).unwrap().flatten().map(|file| file.path()).collect();
        assert!(files.is_empty(), "files stayed behind: {files:?}");
    }
}

fn all_processes() -> impl Iterator<Item = u32> {
    fs::read_dir("/proc").unwrap().flatten().filter_map(|entry| entry.file_name().to_str()?.parse().ok())
}

/// Inodes of a process's memfds; none for a process that has ended.
fn memory_of(pid: u32) -> BTreeSet<u64> {
    let maps = fs::read_to_string(format!("/proc/{pid}/maps")).unwrap_or_default();
    // Addresses, permissions, offset, device, inode, name.
    let mapped = maps.lines().filter(|line| line.contains("/memfd:"));
    let mapped = mapped.filter_map(|line| line.split_whitespace().nth(4)?.parse().ok());
    mapped.chain(descriptors(pid, "/memfd:")).collect()
}

fn sockets_of(pid: u32) -> BTreeSet<u64> {
    descriptors(pid, "socket:").collect()
}

/// Inodes of those descriptors of a process whose link text begins with `start`.
fn descriptors(pid: u32, start: &'static str) -> impl Iterator<Item = u64> {
    let descriptors = fs::read_dir(format!("/proc/{pid}/fd")).into_iter().flatten().flatten();
    descriptors.filter_map(move |entry| {
        let link = fs::read_link(entry.path()).ok()?;
        link.to_str()?.starts_with(start).then(|| fs::metadata(entry.path()).ok())?.map(|found| found.ino())
    })
}

fn group_of(pid: u32) -> Option<u32> {
    let stat = fs::read_to_string(format!("/proc/{pid}/stat")).ok()?;
    // After the name, which may contain any characters, follow state, parent and group.
    stat.rsplit_once(')')?.1.split_whitespace().nth(2)?.parse().ok()
}

/// Inodes of the sockets in a table of the kernel.
fn inodes_of(table: &str) -> impl Iterator<Item = u64> {
    let column = if table == "unix" { 6 } else { 9 };
    let text = fs::read_to_string(format!("/proc/net/{table}")).unwrap_or_default();
    let lines: Vec<String> = text.lines().skip(1).map(str::to_owned).collect();
    lines.into_iter().filter_map(move |line| line.split_whitespace().nth(column)?.parse().ok())
}
