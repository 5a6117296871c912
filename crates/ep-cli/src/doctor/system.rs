//! The operating system: what process ranks need, and how packages are installed.

use serde::Serialize;

use super::{
    check::{Check, Section},
    fact::Fact,
    parse,
    probe::Probe,
};

const RELEASE: &str = "/proc/sys/kernel/osrelease";

/// The release that first had `memfd_create`.
const MEMFD_SINCE: (u32, u32) = (3, 17);
/// The release that first had `pidfd_open`.
const PIDFD_SINCE: (u32, u32) = (5, 3);

/// The fixed build date that gVisor reports.
const GVISOR_BUILD: &str = "#1 SMP Sun Jan 10 15:06:54 PST 2016";

/// The operating system.
#[derive(Clone, Debug, Serialize)]
pub(crate) struct System {
    /// Its kind, such as `linux`.
    pub(crate) os: &'static str,
    /// The processor architecture, such as `x86_64`.
    pub(crate) arch: &'static str,
    /// The distribution's name.
    pub(crate) distribution: Fact<String>,
    /// The kernel's release.
    pub(crate) kernel_release: Fact<String>,
    /// Whether memory can be shared by file descriptor (`memfd_create`).
    pub(crate) memfd: Fact<bool>,
    /// Whether a process can be watched by file descriptor (`pidfd_open`).
    pub(crate) pidfd: Fact<bool>,
    /// How this distribution installs packages.
    #[serde(skip)]
    pub(super) packages: Packages,
}

/// A package manager, for advice on how to get a library.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub(super) enum Packages {
    Apt,
    Dnf,
    Zypper,
    /// Another package manager, or unknown.
    #[default]
    Other,
}

impl System {
    pub(super) fn find(probe: &Probe) -> Self {
        let os_release = probe.text("/etc/os-release").or_else(|| probe.text("/usr/lib/os-release"));
        let kernel_release = probe.line(RELEASE).or_unknown(RELEASE);
        let feature = |since| {
            if probe.process.os != "linux" {
                return Fact::Absent;
            }
            kernel_has(probe, &kernel_release, since)
        };
        System {
            os: probe.process.os,
            arch: probe.process.arch,
            distribution: distribution(&os_release),
            memfd: feature(MEMFD_SINCE),
            pidfd: feature(PIDFD_SINCE),
            packages: os_release.known().map_or(Packages::Other, |text| Packages::of(text)),
            kernel_release,
        }
    }

    /// Whether process ranks can run; absent on an operating system that does not support them.
    pub(super) fn process_ranks(&self) -> Fact<bool> {
        match (&self.memfd, &self.pidfd) {
            (Fact::Known(false), _) | (_, Fact::Known(false)) => Fact::Known(false),
            (Fact::Known(true), Fact::Known(true)) => Fact::Known(true),
            (Fact::Unknown(why), _) | (_, Fact::Unknown(why)) => Fact::Unknown(why.clone()),
            (Fact::Absent, _) | (_, Fact::Absent) => Fact::Absent,
        }
    }

    pub(super) fn section(&self) -> Section {
        let mut checks = vec![
            Check::ok("system", format!("{} on {}", self.os, self.arch)),
            Check::of("distribution", &self.distribution, String::clone),
        ];
        if self.os == "linux" {
            checks.extend([
                Check::of("kernel", &self.kernel_release, String::clone),
                feature_check("memfd", &self.memfd, MEMFD_SINCE),
                feature_check("pidfd", &self.pidfd, PIDFD_SINCE),
            ]);
        } else {
            checks.push(Check::absent("process ranks", "need Linux; thread ranks work here").advice(
                "ranks that are processes",
                "run on Linux 5.3 or later (a container or virtual machine will do)",
            ));
        }
        Section { title: "System", checks }
    }
}

impl Packages {
    /// The package manager of the distribution that `/etc/os-release` describes.
    fn of(os_release: &str) -> Self {
        let ids = ["ID", "ID_LIKE"].into_iter().filter_map(|key| os_release_value(os_release, key));
        let ids: Vec<String> = ids
            .flat_map(|value| {
                let words = value.split_whitespace();
                words.map(str::to_ascii_lowercase).collect::<Vec<_>>()
            })
            .collect();
        for id in &ids {
            match id.as_str() {
                "debian" | "ubuntu" => return Packages::Apt,
                "fedora" | "rhel" | "centos" | "rocky" | "almalinux" | "ol" | "amzn" => {
                    return Packages::Dnf;
                }
                "suse" | "sles" | "opensuse" => return Packages::Zypper,
                _ => {}
            }
        }
        Packages::Other
    }

    /// How to install a library. `versioned` is the package name on distributions whose package names contain the
    /// library's version, `plain` on others.
    pub(super) fn install(self, versioned: &str, plain: &str) -> String {
        match self {
            Packages::Apt => format!("apt-get install {versioned}"),
            Packages::Dnf => format!("dnf install {plain}"),
            Packages::Zypper => format!("zypper install {versioned}"),
            Packages::Other => format!("install your distribution's package of {plain}"),
        }
    }

    /// How to install the drivers that libibverbs loads, one for each kind of device.
    pub(super) fn verbs_drivers(self) -> String {
        match self {
            Packages::Apt => self.install("ibverbs-providers", "libibverbs"),
            // They are in the library's package.
            Packages::Dnf | Packages::Zypper | Packages::Other => self.install("libibverbs", "libibverbs"),
        }
    }
}

/// A kernel feature that process ranks need.
fn feature_check(name: &str, there: &Fact<bool>, since: (u32, u32)) -> Check {
    let (major, minor) = since;
    let needs = format!("Linux {major}.{minor} or later");
    match there {
        Fact::Known(true) => Check::ok(name, format!("supported (since Linux {major}.{minor})")),
        Fact::Known(false) => Check::problem(name, "this kernel is too old").advice("process ranks", needs),
        Fact::Unknown(why) => Check::problem(name, format!("unknown: {why}")).advice("process ranks", needs),
        Fact::Absent => Check::absent(name, "not found").advice("process ranks", needs),
    }
}

/// Whether the kernel's release is at least `since`. This crate has no unsafe code, so it cannot try the system call. The
/// release number is reliable, except in sandboxes that report a fixed one.
fn kernel_has(probe: &Probe, release: &Fact<String>, since: (u32, u32)) -> Fact<bool> {
    if let Some(version) = probe.text("/proc/version").known()
        && version.contains(GVISOR_BUILD)
    {
        return Fact::Unknown("gVisor reports a fixed kernel release".into());
    }
    release.clone().and_then(|release| match parse::release(&release) {
        Some(release) => Fact::Known(release >= since),
        None => Fact::Unknown(format!("{RELEASE} contains {release:?}")),
    })
}

fn distribution(os_release: &Fact<String>) -> Fact<String> {
    os_release.clone().and_then(|text| {
        ["PRETTY_NAME", "NAME", "ID"]
            .into_iter()
            .find_map(|key| os_release_value(&text, key))
            .map_or_else(|| Fact::Unknown("/etc/os-release gives no name".to_owned()), Fact::Known)
    })
}

/// A value of `/etc/os-release` without quotes.
fn os_release_value(text: &str, key: &str) -> Option<String> {
    let value = text
        .lines()
        .filter_map(|line| line.split_once('='))
        .find(|(name, _)| name.trim() == key)
        .map(|(_, value)| value.trim().trim_matches(['"', '\'']))?;
    (!value.is_empty()).then(|| value.to_owned())
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn package_managers_are_recognised() {
        assert_eq!(Packages::of("ID=debian\n"), Packages::Apt);
        assert_eq!(Packages::of("ID=\"rocky\"\nID_LIKE=\"rhel centos fedora\"\n"), Packages::Dnf);
        assert_eq!(Packages::of("ID=linuxmint\nID_LIKE='ubuntu debian'"), Packages::Apt);
        assert_eq!(Packages::of("ID=opensuse-leap\nID_LIKE=\"suse opensuse\""), Packages::Zypper);
        assert_eq!(Packages::of("ID=alpine"), Packages::Other);
        assert_eq!(Packages::of("\0\0="), Packages::Other);
    }

    #[test]
    fn install_commands_fit_the_package_manager() {
        let line = |packages: Packages| packages.install("libfabric1", "libfabric");
        assert_eq!(line(Packages::Apt), "apt-get install libfabric1");
        assert_eq!(line(Packages::Dnf), "dnf install libfabric");
        assert_eq!(line(Packages::Zypper), "zypper install libfabric1");
    }
}
