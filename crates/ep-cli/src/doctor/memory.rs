//! Memory: sizes, page settings and limits.

use serde::{Serialize, Serializer};

use super::{
    cgroup,
    check::{Check, Section},
    fact::Fact,
    parse,
    probe::Probe,
};
use crate::common::machine;

const MEM_INFO: &str = "/proc/meminfo";
const LIMITS: &str = "/proc/self/limits";
const MOUNTS: &str = "/proc/mounts";
const THP_DIR: &str = "/sys/kernel/mm/transparent_hugepage";

/// With fewer open files than this, process ranks soon reach the limit: each has sockets and shared memory with all
/// others.
const FEW_OPEN_FILES: u64 = 256;

/// Main memory.
#[derive(Clone, Debug, Serialize)]
pub(crate) struct Memory {
    /// The machine's memory.
    pub(crate) total_bytes: Fact<u64>,
    /// Memory available without swapping.
    pub(crate) available_bytes: Fact<u64>,
    /// The control group's limit; absent if there is none.
    pub(crate) cgroup_limit_bytes: Fact<u64>,
    /// The file system at `/dev/shm`.
    pub(crate) dev_shm: Fact<DevShm>,
    /// The setting of transparent huge pages for private memory.
    pub(crate) transparent_huge_pages: Fact<String>,
    /// The setting of transparent huge pages for shared memory.
    pub(crate) transparent_huge_pages_shmem: Fact<String>,
    /// Reserved huge pages, by page size.
    pub(crate) reserved_huge_pages: Vec<HugePages>,
    /// Memory that this process may lock.
    pub(crate) memlock_bytes: Fact<Limit>,
    /// Files that this process may have open.
    pub(crate) open_files: Fact<Limit>,
}

/// The file system mounted at `/dev/shm`.
#[derive(Clone, Debug, PartialEq, Serialize)]
pub(crate) struct DevShm {
    /// The kind of file system.
    pub(crate) file_system: String,
    /// Its size; absent if the mount table names none (the default of a tmpfs is half of the memory).
    pub(crate) size_bytes: Fact<u64>,
}

/// Huge pages of one size.
#[derive(Clone, Debug, PartialEq, Serialize)]
pub(crate) struct HugePages {
    /// The size of one page.
    pub(crate) page_bytes: u64,
    /// Reserved pages; absent if the machine does not support this page size.
    pub(crate) reserved: Fact<u64>,
    /// Reserved pages that are free.
    pub(crate) free: Fact<u64>,
}

/// A resource limit; in JSON a number or `"unlimited"`.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Limit {
    /// No limit.
    Unlimited,
    /// This limit.
    At(u64),
}

impl Serialize for Limit {
    fn serialize<S: Serializer>(&self, serializer: S) -> Result<S::Ok, S::Error> {
        match self {
            Limit::Unlimited => serializer.serialize_str("unlimited"),
            Limit::At(n) => serializer.serialize_u64(*n),
        }
    }
}

impl Memory {
    pub(super) fn find(probe: &Probe, limits: &cgroup::Limits) -> Self {
        let info = probe.text(MEM_INFO).or_unknown(MEM_INFO);
        let limit_text = probe.text(LIMITS).or_unknown(LIMITS);
        let thp = |file: &str| probe.value(&format!("{THP_DIR}/{file}"), parse::bracketed);
        Memory {
            total_bytes: mem_info(&info, "MemTotal"),
            available_bytes: mem_info(&info, "MemAvailable"),
            cgroup_limit_bytes: limits.memory_bytes.clone(),
            dev_shm: dev_shm(probe),
            transparent_huge_pages: thp("enabled"),
            transparent_huge_pages_shmem: thp("shmem_enabled"),
            reserved_huge_pages: [2 << 20, 1 << 30].map(|page_bytes| huge_pages(probe, page_bytes)).to_vec(),
            memlock_bytes: soft_limit(&limit_text, "Max locked memory"),
            open_files: soft_limit(&limit_text, "Max open files"),
        }
    }

    pub(super) fn section(&self) -> Section {
        let bytes = |&bytes: &u64| parse::human_bytes(bytes);
        let mut checks = vec![
            Check::of("total", &self.total_bytes, bytes),
            Check::of("available", &self.available_bytes, bytes),
            self.cgroup_check(),
            self.dev_shm_check(),
            self.thp_check(),
            self.thp_shmem_check(),
        ];
        checks.extend(self.reserved_huge_pages.iter().map(HugePages::check));
        checks.extend([self.memlock_check(), self.open_files_check()]);
        Section { title: "Memory", checks }
    }

    fn cgroup_check(&self) -> Check {
        const NAME: &str = "cgroup limit";
        Check::of_optional(
            NAME,
            &self.cgroup_limit_bytes,
            |&limit| {
                let mut found = parse::human_bytes(limit);
                if self.total_bytes.known().is_some_and(|&total| limit > total) {
                    found.push_str(" (more than the machine has)");
                }
                Check::ok(NAME, found)
            },
            || Check::ok(NAME, "none"),
        )
    }

    fn dev_shm_check(&self) -> Check {
        const NAME: &str = "/dev/shm";
        Check::of_optional(
            NAME,
            &self.dev_shm,
            |shm| {
                let size = match &shm.size_bytes {
                    Fact::Known(bytes) => parse::human_bytes(*bytes),
                    Fact::Absent => "no size given (the default is half of the memory)".to_owned(),
                    Fact::Unknown(why) => format!("size unknown: {why}"),
                };
                Check::ok(NAME, format!("{}, {size}", shm.file_system))
            },
            || {
                Check::absent(NAME, "not mounted").advice(
                    "other programs' shared memory (process ranks use memfd)",
                    "mount -t tmpfs tmpfs /dev/shm",
                )
            },
        )
    }

    fn thp_check(&self) -> Check {
        const NAME: &str = "THP, private memory";
        huge_page_setting(
            NAME,
            &self.transparent_huge_pages,
            &["never"],
            "huge pages in large private buffers",
            "echo madvise > /sys/kernel/mm/transparent_hugepage/enabled",
        )
    }

    fn thp_shmem_check(&self) -> Check {
        const NAME: &str = "THP, shared memory";
        huge_page_setting(
            NAME,
            &self.transparent_huge_pages_shmem,
            &["never", "deny"],
            "huge pages in buffers that ranks share",
            "echo advise > /sys/kernel/mm/transparent_hugepage/shmem_enabled",
        )
    }

    fn memlock_check(&self) -> Check {
        const NAME: &str = "lockable memory";
        Check::of_optional(
            NAME,
            &self.memlock_bytes,
            |limit| match limit {
                Limit::Unlimited => Check::ok(NAME, "unlimited"),
                Limit::At(bytes) => Check::absent(NAME, parse::human_bytes(*bytes)).advice(
                    "buffers registered with RDMA cards",
                    "ulimit -l unlimited (in a container: --ulimit memlock=-1)",
                ),
            },
            || Check::absent(NAME, "not found"),
        )
    }

    fn open_files_check(&self) -> Check {
        const NAME: &str = "open files";
        Check::of_optional(
            NAME,
            &self.open_files,
            |limit| match limit {
                Limit::Unlimited => Check::ok(NAME, "unlimited"),
                Limit::At(n) if *n < FEW_OPEN_FILES => Check::problem(NAME, format!("at most {n}"))
                    .advice("process ranks, which open files for every other rank", "ulimit -n 4096"),
                Limit::At(n) => Check::ok(NAME, format!("at most {n}")),
            },
            || Check::absent(NAME, "not found"),
        )
    }
}

impl HugePages {
    fn check(&self) -> Check {
        let size = parse::human_bytes(self.page_bytes);
        let name = format!("reserved {size} pages");
        let none = |found: &str| {
            Check::absent(&name, found).advice(
                "memory that is guaranteed to use huge pages",
                format!(
                    "echo N > /sys/kernel/mm/hugepages/hugepages-{}kB/nr_hugepages",
                    self.page_bytes >> 10
                ),
            )
        };
        Check::of_optional(
            &name,
            &self.reserved,
            |&reserved| match (reserved, &self.free) {
                (0, _) => none("0"),
                (_, Fact::Known(free)) => Check::ok(&name, format!("{reserved} ({free} free)")),
                _ => Check::ok(&name, reserved.to_string()),
            },
            || Check::absent(&name, "this machine does not support this page size"),
        )
    }
}

/// The finding on a setting of transparent huge pages. The words in `off` turn them off.
fn huge_page_setting(name: &str, setting: &Fact<String>, off: &[&str], enables: &str, how: &str) -> Check {
    Check::of_optional(
        name,
        setting,
        |word| {
            if off.contains(&word.as_str()) {
                Check::absent(name, word).advice(enables, how)
            } else {
                Check::ok(name, word)
            }
        },
        || {
            Check::absent(name, "not in this kernel")
                .advice(enables, "use a kernel built with CONFIG_TRANSPARENT_HUGEPAGE")
        },
    )
}

/// Parses a line such as `MemTotal:       49368224 kB` of `/proc/meminfo`.
fn mem_info(info: &Fact<String>, key: &str) -> Fact<u64> {
    info.clone().and_then(|text| {
        let bytes = machine::field(&text, key).and_then(|value| {
            let kib: u64 = value.strip_suffix("kB")?.trim().parse().ok()?;
            kib.checked_mul(1024)
        });
        match bytes {
            Some(bytes) => Fact::Known(bytes),
            None => Fact::Unknown(format!("{MEM_INFO} contains no {key}")),
        }
    })
}

/// The soft limit, which is the one that applies, on a line of `/proc/self/limits`.
fn soft_limit(limits: &Fact<String>, name: &str) -> Fact<Limit> {
    limits.clone().and_then(|text| {
        let word = text
            .lines()
            .find_map(|line| line.strip_prefix(name))
            .and_then(|rest| rest.split_whitespace().next());
        let limit = match word {
            Some("unlimited") => Some(Limit::Unlimited),
            Some(word) => word.parse().ok().map(Limit::At),
            None => None,
        };
        match limit {
            Some(limit) => Fact::Known(limit),
            None => Fact::Unknown(format!("{LIMITS} contains no {name:?}")),
        }
    })
}

fn dev_shm(probe: &Probe) -> Fact<DevShm> {
    probe.text(MOUNTS).or_unknown(MOUNTS).and_then(|text| {
        // Of several mounts at one place, the last hides the others.
        text.lines().filter_map(parse_dev_shm).next_back().map_or(Fact::Absent, Fact::Known)
    })
}

/// Parses a line `tmpfs /dev/shm tmpfs rw,size=65536k 0 0`.
fn parse_dev_shm(line: &str) -> Option<DevShm> {
    let mut words = line.split(' ').skip(1);
    if cgroup::unescape(words.next()?) != "/dev/shm" {
        return None;
    }
    let file_system = words.next()?.to_owned();
    let options = words.next().unwrap_or_default();
    let size = options.split(',').find_map(|o| o.strip_prefix("size="));
    let size_bytes = match size {
        None => Fact::Absent,
        Some(size) => match parse::size_bytes(size) {
            Some(bytes) => Fact::Known(bytes),
            None => Fact::Unknown(format!("{MOUNTS} contains the size {size:?}")),
        },
    };
    Some(DevShm { file_system, size_bytes })
}

fn huge_pages(probe: &Probe, page_bytes: u64) -> HugePages {
    let dir = format!("/sys/kernel/mm/hugepages/hugepages-{}kB", page_bytes >> 10);
    let count = |file: &str| probe.value(&format!("{dir}/{file}"), |text| text.parse().ok());
    HugePages { page_bytes, reserved: count("nr_hugepages"), free: count("free_hugepages") }
}
