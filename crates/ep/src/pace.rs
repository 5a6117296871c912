//! The bandwidth and the latency of an emulated link.

use std::str::FromStr;
use std::time::Duration;

/// A link that an engine emulates: how many bytes the link carries per second, and how long a byte takes to arrive.
///
/// The text form is `25GB/s,5us`: bandwidth in `GB/s`, `MB/s`, `Gbit/s` or `Mbit/s`, latency in `us` or `ms`. `25GB/s,5us,kernel`
/// has [`Copier::Kernel`].
#[derive(Debug, Clone, Copy, PartialEq)]
pub struct Pace {
    /// Bytes per second in each direction.
    bytes_per_second: f64,
    /// Time from the last byte's departure to its arrival.
    latency: Duration,
    copier: Copier,
}

/// What copies the bytes of an emulated link from the memory of one GPU to that of another, or inside one GPU.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
pub enum Copier {
    /// The CUDA driver, which is asked for each copy.
    #[default]
    Driver,
    /// A kernel of each rank, which needs an SM of its own while copies are asked for, and 5 ms longer.
    Kernel,
}

impl Pace {
    /// The least bandwidth, in bytes per second. With less, a put of the largest lane takes hours.
    const LEAST: f64 = 1e5;
    /// The greatest bandwidth, in bytes per second.
    const GREATEST: f64 = 1e13;
    /// The longest latency.
    const LONGEST: Duration = Duration::from_secs(1);

    /// The time that the link needs to take in `bytes` bytes.
    pub fn transmission(&self, bytes: u64) -> Duration {
        Duration::from_secs_f64(bytes as f64 / self.bytes_per_second)
    }

    /// The time from the departure of a byte to its arrival.
    pub fn latency(&self) -> Duration {
        self.latency
    }

    /// What copies bytes between lanes in GPU memory.
    pub fn copier(&self) -> Copier {
        self.copier
    }

    /// The time until `bytes` bytes have arrived at the other end of an idle link.
    pub fn delivery(&self, bytes: u64) -> Duration {
        self.transmission(bytes) + self.latency
    }
}

impl FromStr for Pace {
    type Err = String;

    /// The error says which texts are valid.
    fn from_str(text: &str) -> Result<Self, String> {
        let form = || {
            "an emulated link has a bandwidth and a latency, such as 25GB/s,5us, and may have `kernel` as its third part"
                .to_string()
        };
        let parts: Vec<&str> = text.split(',').collect();
        let (bandwidth, latency, copier) = match parts[..] {
            [bandwidth, latency] => (bandwidth, latency, Copier::Driver),
            [bandwidth, latency, copier] if copier.trim() == "kernel" => (bandwidth, latency, Copier::Kernel),
            _ => return Err(form()),
        };
        let bandwidths = [("GB/s", 1e9), ("MB/s", 1e6), ("Gbit/s", 1e9 / 8.0), ("Mbit/s", 1e6 / 8.0)];
        let bytes_per_second = with_unit(bandwidth, &bandwidths).ok_or_else(form)?;
        let seconds = with_unit(latency, &[("us", 1e-6), ("ms", 1e-3)]).ok_or_else(form)?;
        if !(Self::LEAST..=Self::GREATEST).contains(&bytes_per_second) {
            let (least, greatest) = (Self::LEAST / 1e6, Self::GREATEST / 1e9);
            return Err(format!("the bandwidth must be from {least} MB/s to {greatest} GB/s"));
        }
        if !(0.0..=Self::LONGEST.as_secs_f64()).contains(&seconds) {
            return Err(format!("the latency must be from 0 to {} ms", Self::LONGEST.as_millis()));
        }
        Ok(Self { bytes_per_second, latency: Duration::from_secs_f64(seconds), copier })
    }
}

/// Parses a number with one of these units. Returns the number times the unit's factor.
fn with_unit(text: &str, units: &[(&str, f64)]) -> Option<f64> {
    units.iter().find_map(|(unit, factor)| {
        let number: f64 = text.trim().strip_suffix(unit)?.trim().parse().ok()?;
        Some(number * factor)
    })
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_link_takes_in_bytes_at_its_bandwidth_and_delivers_them_after_its_latency() {
        let micros = Duration::from_micros;
        for (text, bytes, transmission, latency) in [
            ("25GB/s,5us", 25_000_000, micros(1000), micros(5)),
            ("200 Gbit/s, 5 us", 25_000_000, micros(1000), micros(5)),
            ("100MB/s,0us", 100, micros(1), micros(0)),
            ("100Mbit/s,20ms", 12_500, micros(1000), micros(20_000)),
            ("1.5GB/s,0.5us", 1500, micros(1), Duration::from_nanos(500)),
        ] {
            let pace: Pace = text.parse().unwrap();
            assert_eq!((pace.transmission(bytes), pace.latency()), (transmission, latency), "{text}");
            assert_eq!(pace.delivery(bytes), transmission + latency);
            assert_eq!(pace.copier(), Copier::Driver);
            let by_kernel: Pace = format!("{text}, kernel").parse().unwrap();
            assert_eq!(by_kernel, Pace { copier: Copier::Kernel, ..pace });
        }
    }

    #[test]
    fn other_texts_are_refused() {
        for (text, problem) in [
            ("", "such as 25GB/s,5us"),
            ("25GB/s", "such as 25GB/s,5us"),
            ("25,5us", "such as 25GB/s,5us"),
            ("GB/s,5us", "such as 25GB/s,5us"),
            ("25GB/s,5s", "such as 25GB/s,5us"),
            ("25GB/s,5us,1", "`kernel` as its third part"),
            ("25GB/s,5us,kernel,1", "`kernel` as its third part"),
            ("0GB/s,5us", "from 0.1 MB/s to 10000 GB/s"),
            ("-1GB/s,5us", "from 0.1 MB/s to 10000 GB/s"),
            ("NaNGB/s,5us", "from 0.1 MB/s to 10000 GB/s"),
            ("infGB/s,5us", "from 0.1 MB/s to 10000 GB/s"),
            ("25GB/s,-1us", "from 0 to 1000 ms"),
            ("25GB/s,1001ms", "from 0 to 1000 ms"),
            ("25GB/s,NaNus", "from 0 to 1000 ms"),
        ] {
            let found = text.parse::<Pace>().unwrap_err();
            assert!(found.contains(problem), "{text}: {found}");
        }
    }
}
