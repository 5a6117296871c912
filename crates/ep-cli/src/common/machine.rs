//! Facts about this machine that reports and limits need.

use serde::Serialize;

#[derive(Debug, Clone, Serialize)]
pub(crate) struct Machine {
    pub(crate) cpu_model: String,
    pub(crate) cores: usize,
}

impl Machine {
    pub(crate) fn here() -> Self {
        let info = std::fs::read_to_string("/proc/cpuinfo").unwrap_or_default();
        let cpu_model = field(&info, "model name").unwrap_or(std::env::consts::ARCH).to_owned();
        Self { cpu_model, cores: cores() }
    }
}

/// Cores that this process may use.
pub(crate) fn cores() -> usize {
    std::thread::available_parallelism().map_or(1, Into::into)
}

/// Bytes of memory of the machine; `None` where the system does not report them.
pub(crate) fn total_memory() -> Option<u64> {
    let info = std::fs::read_to_string("/proc/meminfo").ok()?;
    let kib: u64 = field(&info, "MemTotal")?.strip_suffix("kB")?.trim().parse().ok()?;
    Some(kib * 1024)
}

/// The value of the first `name : value` line.
pub(crate) fn field<'a>(info: &'a str, name: &str) -> Option<&'a str> {
    info.lines().find_map(|line| {
        let (key, value) = line.split_once(':')?;
        (key.trim() == name).then_some(value.trim())
    })
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_field_is_found_by_its_whole_name() {
        let info = "model\t\t: 143\nmodel name\t: Some CPU @ 2 GHz\nMemAvailable:   1024 kB\n";
        assert_eq!(field(info, "model name"), Some("Some CPU @ 2 GHz"));
        assert_eq!(field(info, "MemAvailable"), Some("1024 kB"));
        assert_eq!(field(info, "name"), None);
        assert_eq!(field("a\t: 1\nb: 2: 3\n", "b"), Some("2: 3"));
        assert_eq!(field("nothing here", "b"), None);
        assert!(cores() > 0);
        // No machine that runs tests has less.
        assert!(total_memory().is_none_or(|bytes| bytes >= 256 << 20));
    }
}
