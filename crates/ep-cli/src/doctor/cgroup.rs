//! The CPU and memory limits of this process's control groups, versions 1 and 2.

use super::{fact::Fact, probe::Probe};

const MEMBERSHIP: &str = "/proc/self/cgroup";
const MOUNTS: &str = "/proc/self/mountinfo";

/// Version 1 represents "no limit" by the largest signed number rounded down to a page. Page sizes differ, so any limit
/// of at least this value counts as none.
const V1_UNLIMITED_BYTES: u64 = 1 << 62;

/// The lowest limits of this process's group and all groups above it.
#[derive(Clone, Debug, PartialEq)]
pub(super) struct Limits {
    /// CPU time per unit of time, in cores; absent if there is no limit.
    pub(super) cpu_cores: Fact<f64>,
    /// Memory; absent if there is no limit.
    pub(super) memory_bytes: Fact<u64>,
}

impl Limits {
    pub(super) fn find(probe: &Probe) -> Self {
        let groups = match Groups::find(probe) {
            Fact::Known(groups) => groups,
            Fact::Absent => Groups::default(),
            Fact::Unknown(why) => {
                return Limits { cpu_cores: Fact::Unknown(why.clone()), memory_bytes: Fact::Unknown(why) };
            }
        };
        Limits {
            cpu_cores: groups.dirs("cpu").tightest(|version, dir| cpu_cores(probe, version, dir)),
            memory_bytes: groups.dirs("memory").tightest(|version, dir| memory_bytes(probe, version, dir)),
        }
    }
}

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Version {
    V1,
    V2,
}

/// A mounted hierarchy of control groups.
#[derive(Debug)]
struct Mount {
    version: Version,
    /// The group at the mount point.
    root: String,
    /// The mount point.
    point: String,
    /// Version 1: the controllers of this hierarchy.
    controllers: Vec<String>,
}

/// This process's place in the hierarchies.
#[derive(Debug, Default)]
struct Groups {
    /// Controllers (empty for version 2) and the path of the group.
    membership: Vec<(Vec<String>, String)>,
    mounts: Vec<Mount>,
}

/// The directories, innermost first, that may hold a limit.
#[derive(Debug, Default)]
struct Dirs(Option<(Version, Vec<String>)>);

impl Groups {
    fn find(probe: &Probe) -> Fact<Self> {
        let membership = probe.text(MEMBERSHIP).or_unknown(MEMBERSHIP);
        membership.and_then(|membership| {
            let mounts = probe.text(MOUNTS).or_unknown(MOUNTS);
            mounts.map(|mounts| Groups {
                membership: membership.lines().filter_map(parse_membership).collect(),
                mounts: mounts.lines().filter_map(parse_mount).collect(),
            })
        })
    }

    /// The directories with the limits of a controller. If both versions are mounted, a controller belongs to one of
    /// them: version 1 if any of its hierarchies has the controller.
    fn dirs(&self, controller: &str) -> Dirs {
        let v1 = self
            .membership
            .iter()
            .find(|(names, _)| names.iter().any(|name| name == controller))
            .and_then(|(_, path)| {
                let mount = self.mounts.iter().find(|mount| {
                    mount.version == Version::V1 && mount.controllers.iter().any(|name| name == controller)
                })?;
                Some((mount, path))
            });
        let v2 = || {
            let (_, path) = self.membership.iter().find(|(names, _)| names.is_empty())?;
            let mut mounts = self.mounts.iter();
            let mount = mounts.find(|mount| mount.version == Version::V2)?;
            Some((mount, path))
        };
        Dirs(v1.or_else(v2).map(|(mount, path)| (mount.version, mount.levels(path))))
    }
}

impl Mount {
    /// The directories of a group and of the groups above it, innermost first.
    fn levels(&self, group: &str) -> Vec<String> {
        // In a container without a cgroup namespace, the group's path and the mount's root are both paths of the host:
        // what lies below the root lies below the mount point.
        let below = match group.strip_prefix(self.root.trim_end_matches('/')) {
            Some(below) if below.is_empty() || below.starts_with('/') => below,
            _ => "",
        };
        let mut names: Vec<&str> = below.split('/').filter(|name| !name.is_empty()).collect();
        if names.contains(&"..") {
            // A group outside the namespace's root cannot be seen from inside.
            names.clear();
        }
        let mut levels = Vec::with_capacity(names.len() + 1);
        loop {
            let mut dir = self.point.trim_end_matches('/').to_owned();
            for name in &names {
                dir.push('/');
                dir.push_str(name);
            }
            levels.push(dir);
            if names.pop().is_none() {
                return levels;
            }
        }
    }
}

impl Dirs {
    /// The lowest limit of all levels. A level that cannot be read matters only if no other level has a limit.
    fn tightest<T: PartialOrd>(&self, limit: impl Fn(Version, &str) -> Fact<T>) -> Fact<T> {
        let Some((version, dirs)) = &self.0 else {
            return Fact::Absent;
        };
        let mut tightest = Fact::Absent;
        for dir in dirs {
            tightest = match (tightest, limit(*version, dir)) {
                (Fact::Known(a), Fact::Known(b)) => Fact::Known(if b < a { b } else { a }),
                (Fact::Known(a), _) | (_, Fact::Known(a)) => Fact::Known(a),
                (Fact::Unknown(why), _) | (Fact::Absent, Fact::Unknown(why)) => Fact::Unknown(why),
                (Fact::Absent, Fact::Absent) => Fact::Absent,
            };
        }
        tightest
    }
}

/// One group's CPU limit in cores.
fn cpu_cores(probe: &Probe, version: Version, dir: &str) -> Fact<f64> {
    match version {
        Version::V2 => probe.value(&format!("{dir}/cpu.max"), parse_cpu_max).and_then(limited),
        Version::V1 => {
            let quota = probe.value(&format!("{dir}/cpu.cfs_quota_us"), |text| text.parse::<i64>().ok());
            quota.and_then(|quota_us| {
                // A negative quota means no limit.
                let Ok(quota_us) = u32::try_from(quota_us) else {
                    return Fact::Absent;
                };
                probe
                    .value(&format!("{dir}/cpu.cfs_period_us"), parse_period_us)
                    .map(|period_us| f64::from(quota_us) / f64::from(period_us))
            })
        }
    }
}

/// One group's memory limit.
fn memory_bytes(probe: &Probe, version: Version, dir: &str) -> Fact<u64> {
    match version {
        Version::V2 => probe
            .value(&format!("{dir}/memory.max"), |text| match text {
                "max" => Some(None),
                _ => text.parse().ok().map(Some),
            })
            .and_then(limited),
        Version::V1 => probe
            .value(&format!("{dir}/memory.limit_in_bytes"), |text| text.parse::<u64>().ok())
            .and_then(|bytes| limited(Some(bytes).filter(|&bytes| bytes < V1_UNLIMITED_BYTES))),
    }
}

/// A limit that may be absent.
fn limited<T>(limit: Option<T>) -> Fact<T> {
    limit.map_or(Fact::Absent, Fact::Known)
}

/// Parses `QUOTA PERIOD`: `max 100000` is no limit, `150000 100000` is 1.5 cores.
fn parse_cpu_max(text: &str) -> Option<Option<f64>> {
    let (quota, period) = text.split_once(' ')?;
    let period_us = parse_period_us(period)?;
    if quota == "max" {
        return Some(None);
    }
    let quota_us: u32 = quota.parse().ok()?;
    Some(Some(f64::from(quota_us) / f64::from(period_us)))
}

fn parse_period_us(text: &str) -> Option<u32> {
    text.parse().ok().filter(|&period_us| period_us > 0)
}

/// Parses a line `4:cpu,cpuacct:/some/group` (version 1) or `0::/some/group` (version 2).
fn parse_membership(line: &str) -> Option<(Vec<String>, String)> {
    let mut parts = line.splitn(3, ':').skip(1);
    let controllers = parts.next()?;
    let path = parts.next()?;
    Some((split_names(controllers), path.to_owned()))
}

/// Parses a line `31 23 0:28 /root /mount/point rw shared:4 - cgroup source rw,cpu`. The number of fields before the
/// dash varies.
fn parse_mount(line: &str) -> Option<Mount> {
    let (place, kind) = line.split_once(" - ")?;
    let mut kind = kind.split(' ');
    let version = match kind.next()? {
        "cgroup" => Version::V1,
        "cgroup2" => Version::V2,
        _ => return None,
    };
    let mut place = place.split(' ').skip(3);
    Some(Mount {
        version,
        root: unescape(place.next()?),
        point: unescape(place.next()?),
        controllers: split_names(kind.nth(1).unwrap_or_default()),
    })
}

fn split_names(text: &str) -> Vec<String> {
    let names = text.split(',').filter(|name| !name.is_empty());
    names.map(str::to_owned).collect()
}

/// Replaces the kernel's escape sequences in mount tables.
pub(super) fn unescape(text: &str) -> String {
    text.replace("\\040", " ").replace("\\011", "\t").replace("\\012", "\n").replace("\\134", "\\")
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn cpu_max_is_parsed() {
        assert_eq!(parse_cpu_max("max 100000"), Some(None));
        assert_eq!(parse_cpu_max("150000 100000"), Some(Some(1.5)));
        assert_eq!(parse_cpu_max("150000 0"), None);
        assert_eq!(parse_cpu_max("150000"), None);
        assert_eq!(parse_cpu_max("-1 100000"), None);
    }

    #[test]
    fn the_levels_of_a_group_are_listed() {
        let mount = |root: &str| Mount {
            version: Version::V2,
            root: root.to_owned(),
            point: "/cg".to_owned(),
            controllers: Vec::new(),
        };
        assert_eq!(mount("/").levels("/"), ["/cg"]);
        assert_eq!(mount("/").levels("/a/b"), ["/cg/a/b", "/cg/a", "/cg"]);
        assert_eq!(mount("/box/1").levels("/box/1/x"), ["/cg/x", "/cg"]);
        assert_eq!(mount("/box/1").levels("/box/12"), ["/cg"]);
        assert_eq!(mount("/").levels("/../other"), ["/cg"]);
    }

    #[test]
    fn mounts_are_parsed() {
        let mount = parse_mount("35 31 0:32 / /sys/fs/cg\\040x rw shared:9 - cgroup cg rw,memory").unwrap();
        assert_eq!(mount.point, "/sys/fs/cg x");
        assert_eq!(mount.version, Version::V1);
        assert_eq!(mount.controllers, ["rw", "memory"]);
        assert!(parse_mount("1 2 0:3 / / rw - ext4 /dev/sda rw").is_none());
        assert!(parse_mount("1 2 - cgroup").is_none());
    }
}
