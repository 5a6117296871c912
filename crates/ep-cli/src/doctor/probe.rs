//! The sources of facts: a file tree, an environment and the process itself.
//!
//! All facts are read through a [`Probe`], so that tests can provide a fake machine.

use std::{
    cmp::Ordering,
    collections::BTreeMap,
    fs::{self, File},
    io::{self, Read},
    net::IpAddr,
    path::{Path, PathBuf},
};

use super::fact::Fact;

/// Maximum number of bytes that are read from one file. The largest file, `/proc/cpuinfo`, has about 2 KiB per CPU.
const MAX_FILE_BYTES: u64 = 4 << 20;

/// The machine that is examined.
#[derive(Clone, Debug)]
pub(super) struct Probe {
    /// The directory that is used as `/`.
    pub(super) root: PathBuf,
    /// The environment variables.
    pub(super) env: BTreeMap<String, String>,
    /// Facts about the process that need no file.
    pub(super) process: Process,
}

/// Facts about this process and its machine that system calls give.
#[derive(Clone, Debug)]
pub(super) struct Process {
    /// The operating system, as in `std::env::consts::OS`.
    pub(super) os: &'static str,
    /// The architecture, as in `std::env::consts::ARCH`.
    pub(super) arch: &'static str,
    /// Number of cores that the process may use by its affinity mask and cgroup quota.
    pub(super) cores_usable: Fact<usize>,
    /// The vector extensions that the backends use, and whether CPU and operating system support them.
    pub(super) vector_extensions: Vec<(&'static str, bool)>,
    /// The addresses of the network interfaces; absent on an operating system on which they are not determined.
    pub(super) addresses: Fact<Vec<InterfaceAddress>>,
}

/// An address of a network interface.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(super) struct InterfaceAddress {
    /// The interface's name.
    pub(super) interface: String,
    /// Whether the interface is up and has a link.
    pub(super) up: bool,
    /// The address.
    pub(super) address: IpAddr,
}

impl Probe {
    /// The machine that this program runs on.
    pub(super) fn of_this_machine() -> Self {
        Probe {
            root: PathBuf::from("/"),
            env: std::env::vars_os()
                .map(|(name, value)| {
                    let name = name.to_string_lossy().into_owned();
                    (name, value.to_string_lossy().into_owned())
                })
                .collect(),
            process: Process::this_one(),
        }
    }

    /// An environment variable; an empty one counts as not set.
    pub(super) fn var(&self, name: &str) -> Option<&str> {
        self.env.get(name).map(String::as_str).filter(|value| !value.is_empty())
    }

    /// The path on this machine of an absolute path on the examined machine.
    pub(super) fn resolve(&self, path: &str) -> PathBuf {
        // `Path::join` with an absolute path would drop the root.
        self.root.join(path.trim_start_matches('/'))
    }

    /// Whether `path` exists.
    pub(super) fn exists(&self, path: &str) -> bool {
        self.resolve(path).exists()
    }

    /// The path that `path` leads to when all links are followed.
    pub(super) fn real_path(&self, path: &str) -> Fact<String> {
        let real = || {
            let (root, real) = (self.root.canonicalize()?, self.resolve(path).canonicalize()?);
            // A link of a fake machine may lead out of it.
            let inside = real.strip_prefix(root).map_err(io::Error::other)?;
            Ok(format!("/{}", inside.display()))
        };
        match real() {
            Ok(path) => Fact::Known(path),
            Err(err) => unreadable(path, &err),
        }
    }

    /// A file's text; bytes that are not UTF-8 are replaced.
    pub(super) fn text(&self, path: &str) -> Fact<String> {
        match read_start(&self.resolve(path)) {
            Ok(text) => Fact::Known(text),
            Err(err) => unreadable(path, &err),
        }
    }

    /// The result of `parse` on a file's text without surrounding white space.
    pub(super) fn value<T>(&self, path: &str, parse: impl FnOnce(&str) -> Option<T>) -> Fact<T> {
        self.text(path).and_then(|text| {
            let text = text.trim();
            match parse(text) {
                Some(value) => Fact::Known(value),
                None => Fact::Unknown(format!("{path} contains {:?}", excerpt(text))),
            }
        })
    }

    /// The first line of a file without surrounding white space.
    pub(super) fn line(&self, path: &str) -> Fact<String> {
        self.value(path, |text| {
            let line = text.lines().next()?.trim();
            (!line.is_empty()).then(|| line.to_owned())
        })
    }

    /// The names in a directory, `x2` before `x10`.
    pub(super) fn names(&self, path: &str) -> Fact<Vec<String>> {
        let entries = match fs::read_dir(self.resolve(path)) {
            Ok(entries) => entries,
            Err(err) => return unreadable(path, &err),
        };
        // An entry that vanishes meanwhile (an unplugged device) is skipped.
        let mut names: Vec<String> =
            entries.flatten().map(|entry| entry.file_name().to_string_lossy().into_owned()).collect();
        names.sort_by(|a, b| natural_order(a, b));
        Fact::Known(names)
    }

    /// The names in a directory that `keep` accepts; empty if there is no such directory.
    pub(super) fn names_where(&self, path: &str, keep: impl Fn(&str) -> bool) -> Vec<String> {
        match self.names(path) {
            Fact::Known(names) => names.into_iter().filter(|name| keep(name)).collect(),
            Fact::Absent | Fact::Unknown(_) => Vec::new(),
        }
    }
}

impl Process {
    fn this_one() -> Self {
        Process {
            os: std::env::consts::OS,
            arch: std::env::consts::ARCH,
            cores_usable: match std::thread::available_parallelism() {
                Ok(cores) => Fact::Known(cores.get()),
                Err(err) => Fact::Unknown(err.to_string()),
            },
            vector_extensions: vector_extensions(),
            addresses: addresses(),
        }
    }
}

#[cfg(any(target_arch = "x86_64", target_arch = "x86"))]
fn vector_extensions() -> Vec<(&'static str, bool)> {
    use std::arch::is_x86_feature_detected as has;
    vec![
        ("avx2", has!("avx2")),
        ("avx512f", has!("avx512f")),
        ("avx512bw", has!("avx512bw")),
        ("avx512_bf16", has!("avx512bf16")),
    ]
}

#[cfg(target_arch = "aarch64")]
fn vector_extensions() -> Vec<(&'static str, bool)> {
    use std::arch::is_aarch64_feature_detected as has;
    vec![("neon", has!("neon")), ("sve", has!("sve")), ("bf16", has!("bf16"))]
}

#[cfg(not(any(target_arch = "x86_64", target_arch = "x86", target_arch = "aarch64")))]
fn vector_extensions() -> Vec<(&'static str, bool)> {
    Vec::new()
}

/// The fact that results from an error at a path.
fn unreadable<T>(path: &str, err: &io::Error) -> Fact<T> {
    match err.kind() {
        io::ErrorKind::NotFound => Fact::Absent,
        _ => Fact::Unknown(format!("{path}: {err}")),
    }
}

/// The addresses of this machine's network interfaces.
#[cfg(target_os = "linux")]
fn addresses() -> Fact<Vec<InterfaceAddress>> {
    use nix::net::if_::InterfaceFlags;

    let all = match nix::ifaddrs::getifaddrs() {
        Ok(all) => all,
        Err(err) => return Fact::Unknown(format!("getifaddrs: {err}")),
    };
    Fact::Known(
        all.filter_map(|entry| {
            let address = entry.address.as_ref()?;
            let v4 = address.as_sockaddr_in().map(|v4| IpAddr::V4(v4.ip()));
            let address = v4.or_else(|| address.as_sockaddr_in6().map(|v6| IpAddr::V6(v6.ip())))?;
            let up = entry.flags.contains(InterfaceFlags::IFF_UP | InterfaceFlags::IFF_RUNNING);
            Some(InterfaceAddress { interface: entry.interface_name, up, address })
        })
        .collect(),
    )
}

#[cfg(not(target_os = "linux"))]
fn addresses() -> Fact<Vec<InterfaceAddress>> {
    Fact::Absent
}

/// Reads the first [`MAX_FILE_BYTES`] of a file: files in `/proc` and `/sys` have no usable size.
fn read_start(path: &Path) -> io::Result<String> {
    let mut bytes = Vec::new();
    File::open(path)?.take(MAX_FILE_BYTES).read_to_end(&mut bytes)?;
    Ok(String::from_utf8_lossy(&bytes).into_owned())
}

/// The beginning of a text, for messages.
fn excerpt(text: &str) -> String {
    const MAX_CHARS: usize = 40;
    let line = text.lines().next().unwrap_or_default();
    if line.chars().count() <= MAX_CHARS {
        return line.to_owned();
    }
    let start: String = line.chars().take(MAX_CHARS).collect();
    format!("{start}...")
}

/// Compares names; the numbers in them compare as numbers.
fn natural_order(a: &str, b: &str) -> Ordering {
    chunks(a).cmp(&chunks(b)).then_with(|| a.cmp(b))
}

/// Splits a name into runs of non-digits, each with the number that follows it.
fn chunks(name: &str) -> Vec<(&str, Option<u64>)> {
    let mut chunks = Vec::new();
    let mut rest = name;
    while !rest.is_empty() {
        let text_end = rest.find(|c: char| c.is_ascii_digit()).unwrap_or(rest.len());
        let (text, tail) = rest.split_at(text_end);
        let digits_end = tail.find(|c: char| !c.is_ascii_digit()).unwrap_or(tail.len());
        let (digits, tail) = tail.split_at(digits_end);
        chunks.push((text, digits.parse().ok()));
        rest = tail;
    }
    chunks
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn names_sort_by_their_numbers() {
        let mut names = ["mlx5_10", "mlx5_2", "eth0", "mlx5_2b", "7", "99999999999999999999"];
        names.sort_by(|a, b| natural_order(a, b));
        assert_eq!(names, ["99999999999999999999", "7", "eth0", "mlx5_2", "mlx5_2b", "mlx5_10"]);
    }

    #[test]
    fn an_excerpt_is_short_and_cuts_between_characters() {
        assert_eq!(excerpt("short\nsecond"), "short");
        assert_eq!(excerpt(&"é".repeat(50)), format!("{}...", "é".repeat(40)));
        assert_eq!(excerpt(""), "");
    }
}
