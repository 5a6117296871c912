//! How much memory this process can still use.

use std::fs;
use std::path::{Path, PathBuf};

/// Bytes of main memory that this process can still use without swapping: what the machine has available, or less if a control
/// group of the process, such as a container or a Slurm job, leaves less. `None` where the system does not say.
pub fn available_memory() -> Option<u64> {
    available_below(Path::new("/"))
}

/// The same for a system whose files are below `root`.
fn available_below(root: &Path) -> Option<u64> {
    let info = fs::read_to_string(root.join("proc/meminfo")).ok()?;
    let kib: u64 = value(&info, "MemAvailable:")?.trim().strip_suffix("kB")?.trim().parse().ok()?;
    let groups = groups(root).into_iter().filter_map(|group| group.room());
    Some(groups.fold(kib.saturating_mul(1024), u64::min))
}

/// The rest of the first line that begins with `key`.
fn value<'a>(text: &'a str, key: &str) -> Option<&'a str> {
    text.lines().find_map(|line| line.strip_prefix(key))
}

/// The names of a control group's files.
struct Files {
    limit: &'static str,
    used: &'static str,
    /// The key in `memory.stat` for cached files. They count as used, but the system reclaims their memory when it needs it.
    cached: &'static str,
}

const VERSION_1: Files =
    Files { limit: "memory.limit_in_bytes", used: "memory.usage_in_bytes", cached: "total_inactive_file " };
const VERSION_2: Files = Files { limit: "memory.max", used: "memory.current", cached: "inactive_file " };

/// A control group.
struct Group {
    directory: PathBuf,
    files: &'static Files,
}

impl Group {
    /// Bytes that the group may still use; `None` if it has no limit.
    fn room(&self) -> Option<u64> {
        let read = |name: &str| fs::read_to_string(self.directory.join(name)).ok();
        let number = |text: &str| text.trim().parse::<u64>().ok();
        // Version 2 says "max" where there is no limit, version 1 a number that exceeds any memory.
        let limit = number(&read(self.files.limit)?)?;
        let used = number(&read(self.files.used)?)?;
        let cached =
            read("memory.stat").and_then(|stat| number(value(&stat, self.files.cached)?)).unwrap_or(0);
        Some(limit.saturating_sub(used.saturating_sub(cached)))
    }
}

/// The control groups that limit this process: the group of the process, and all ancestors of that group. Inside a container,
/// the path may be that of the host. The container then sees only the last directory of the path, as the root of its hierarchy.
fn groups(root: &Path) -> Vec<Group> {
    let mounted = root.join("sys/fs/cgroup");
    let membership = fs::read_to_string(root.join("proc/self/cgroup")).unwrap_or_default();
    let mut groups = Vec::new();
    for line in membership.lines() {
        let mut fields = line.splitn(3, ':').skip(1);
        let (Some(controllers), Some(path)) = (fields.next(), fields.next()) else { continue };
        let (hierarchy, files) = if controllers.is_empty() {
            (mounted.clone(), &VERSION_2)
        } else if controllers.split(',').any(|name| name == "memory") {
            (mounted.join("memory"), &VERSION_1)
        } else {
            continue;
        };
        let own = Path::new(path.trim_start_matches('/'));
        groups.extend(own.ancestors().map(|group| Group { directory: hierarchy.join(group), files }));
    }
    groups
}

#[cfg(test)]
mod tests {
    use super::*;

    /// A temporary directory with the files of a system. Dropping this value removes the directory.
    struct System(PathBuf);

    impl System {
        fn new(name: &str, files: &[(&str, &str)]) -> Self {
            let root = std::env::temp_dir().join(format!("hybrid-ep-{name}-{}", std::process::id()));
            for (path, text) in files {
                let path = root.join(path);
                fs::create_dir_all(path.parent().unwrap()).unwrap();
                fs::write(path, text).unwrap();
            }
            Self(root)
        }
    }

    impl Drop for System {
        fn drop(&mut self) {
            let _ = fs::remove_dir_all(&self.0);
        }
    }

    const INFO: (&str, &str) = ("proc/meminfo", "MemTotal:  100000 kB\nMemAvailable:   50000 kB\n");
    const AVAILABLE: u64 = 50_000 * 1024;

    #[test]
    #[cfg_attr(miri, ignore = "files")]
    fn this_machine_says_it() {
        assert!(available_memory().is_some_and(|bytes| bytes > 0));
    }

    #[test]
    #[cfg_attr(miri, ignore = "files")]
    fn without_limits_it_is_that_of_the_machine() {
        let system = System::new(
            "unlimited",
            &[
                INFO,
                ("proc/self/cgroup", "0::/user/job\n"),
                ("sys/fs/cgroup/user/job/memory.max", "max\n"),
                ("sys/fs/cgroup/user/job/memory.current", "4096\n"),
            ],
        );
        assert_eq!(available_below(&system.0), Some(AVAILABLE));
        let bare = System::new("bare", &[INFO]);
        assert_eq!(available_below(&bare.0), Some(AVAILABLE));
        assert_eq!(available_below(&bare.0.join("nowhere")), None);
    }

    #[test]
    #[cfg_attr(miri, ignore = "files")]
    fn the_tightest_group_counts_and_cached_files_give_way() {
        let system = System::new(
            "version-2",
            &[
                INFO,
                ("proc/self/cgroup", "0::/user/job\n"),
                ("sys/fs/cgroup/user/memory.max", "30000000\n"),
                ("sys/fs/cgroup/user/memory.current", "25000000\n"),
                ("sys/fs/cgroup/user/memory.stat", "anon 5\ninactive_file 4000000\nactive_file 7\n"),
                ("sys/fs/cgroup/user/job/memory.max", "20000000\n"),
                ("sys/fs/cgroup/user/job/memory.current", "1000000\n"),
            ],
        );
        assert_eq!(available_below(&system.0), Some(9_000_000));
        // The group uses more than its limit, because the limit was lowered.
        let full = System::new(
            "full",
            &[
                INFO,
                ("proc/self/cgroup", "0::/\n"),
                ("sys/fs/cgroup/memory.max", "1000\n"),
                ("sys/fs/cgroup/memory.current", "2000\n"),
            ],
        );
        assert_eq!(available_below(&full.0), Some(0));
    }

    #[test]
    #[cfg_attr(miri, ignore = "files")]
    fn version_1_and_paths_of_the_host_are_understood() {
        let system = System::new(
            "version-1",
            &[
                INFO,
                ("proc/self/cgroup", "5:cpu,memory:/docker/4f\n1:name=systemd:/\n0::/\n"),
                ("sys/fs/cgroup/memory/memory.limit_in_bytes", "8000000\n"),
                ("sys/fs/cgroup/memory/memory.usage_in_bytes", "3000000\n"),
                ("sys/fs/cgroup/memory/memory.stat", "total_inactive_file 1000000\n"),
            ],
        );
        assert_eq!(available_below(&system.0), Some(6_000_000));
        let none = System::new(
            "version-1-unlimited",
            &[
                INFO,
                ("proc/self/cgroup", "5:memory:/\n"),
                ("sys/fs/cgroup/memory/memory.limit_in_bytes", "9223372036854771712\n"),
                ("sys/fs/cgroup/memory/memory.usage_in_bytes", "3000000\n"),
            ],
        );
        assert_eq!(available_below(&none.0), Some(AVAILABLE));
    }
}
