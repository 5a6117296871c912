//! Numbers with units: `"100 Gbit/s"`, `"5 ms"`, `"24 GB"`. `bit` and `b` are bits; `B` is bytes.

use super::error::Problem;
use crate::limits::{Number, Shown};

/// The kind of a quantity. Values are held in the unit named at each kind, which is that of the description's field.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
#[non_exhaustive]
pub enum Kind {
    /// Bandwidth of a link, Gbit/s.
    LinkRate,
    /// Bandwidth of a memory, GB/s.
    MemoryRate,
    /// An amount of memory, GB.
    Memory,
    /// A duration, seconds.
    Time,
    /// Throughput of arithmetic, TFLOP/s.
    Arithmetic,
}

/// The factor of a unit, held as a fraction so that `20 us` gives the double nearest to 0.00002.
#[derive(Debug, Clone, Copy)]
struct Scale {
    times: f64,
    over: f64,
}

impl Scale {
    const fn up(times: f64) -> Self {
        Self { times, over: 1.0 }
    }

    const fn down(over: f64) -> Self {
        Self { times: 1.0, over }
    }

    fn apply(self, value: f64) -> f64 {
        value * self.times / self.over
    }
}

impl Kind {
    /// The key suffixes that name a unit, each with its unit: `bandwidth_gbit_per_s = 100`.
    pub(super) fn suffixes(self) -> &'static [(&'static str, &'static str)] {
        match self {
            Self::LinkRate => &[("gbit_per_s", "Gbit/s"), ("gb_per_s", "GB/s")],
            Self::MemoryRate => &[("gb_per_s", "GB/s")],
            Self::Memory => &[("gb", "GB")],
            Self::Time => &[("s", "s"), ("ms", "ms"), ("us", "us")],
            Self::Arithmetic => &[("tflops", "TFLOP/s")],
        }
    }

    /// Examples of values, for messages.
    pub(super) fn examples(self) -> &'static str {
        match self {
            Self::LinkRate => "\"100 Gbit/s\" (bits) or \"12.5 GB/s\" (bytes)",
            Self::MemoryRate => "\"3350 GB/s\" or \"3.35 TB/s\"",
            Self::Memory => "\"24 GB\" or \"24 GiB\"",
            Self::Time => "\"5 ms\", \"20 us\" or \"0.005 s\"",
            Self::Arithmetic => "\"400 TFLOP/s\" or \"1 PFLOP/s\"",
        }
    }

    /// The unit in which values are held.
    pub fn unit(self) -> &'static str {
        match self {
            Self::LinkRate => "Gbit/s",
            Self::MemoryRate => "GB/s",
            Self::Memory => "GB",
            Self::Time => "s",
            Self::Arithmetic => "TFLOP/s",
        }
    }

    /// Parses a text such as `100 Gbit/s`. Returns the value in [`Kind::unit`].
    ///
    /// # Errors
    /// A message that says what is wrong and what would be possible: the text is not a number, the unit is missing or
    /// unknown, or the value is outside `range`.
    pub fn parse(self, text: &str, range: Number) -> Result<f64, String> {
        let value =
            self.read(text).map_err(|Problem { what, possible }| format!("{what}; possible: {possible}"))?;
        if range.allows(value) {
            return Ok(value);
        }
        let unit = self.unit();
        Err(format!("is {} {unit}; possible: {range} {unit}", Shown(value)))
    }

    pub(super) fn read(self, text: &str) -> Result<f64, Problem> {
        let (number, unit) = split(text).ok_or_else(|| {
            Problem::new(format!("\"{text}\" does not begin with a number"), self.examples())
        })?;
        if unit.is_empty() {
            return Err(Problem::new(format!("\"{text}\" has no unit"), self.examples()));
        }
        let scale = self.scale(unit).ok_or_else(|| {
            Problem::new(format!("\"{unit}\" is not a unit of {}", self.measures()), self.examples())
        })?;
        Ok(scale.apply(number))
    }

    fn measures(self) -> &'static str {
        match self {
            Self::LinkRate => "link bandwidth, where `bit` or `b` is a bit and `B` is a byte",
            Self::MemoryRate => "memory bandwidth, which is in bytes",
            Self::Memory => "memory, which is in bytes",
            Self::Time => "time",
            Self::Arithmetic => "throughput",
        }
    }

    fn scale(self, unit: &str) -> Option<Scale> {
        match self {
            Self::Time => match unit {
                "s" => Some(Scale::up(1.0)),
                "ms" => Some(Scale::down(1e3)),
                "us" | "µs" | "μs" => Some(Scale::down(1e6)),
                "ns" => Some(Scale::down(1e9)),
                _ => None,
            },
            Self::LinkRate => bits_per_second(unit).or_else(|| {
                let Scale { times, over } = bytes_per_second(unit)?;
                Some(Scale { times: times * 8.0, over })
            }),
            Self::MemoryRate => bytes_per_second(unit),
            Self::Memory => prefixed(unit, &["B", "Byte"], true),
            Self::Arithmetic => {
                let Scale { times, over } = prefixed(unit, &["FLOP/s", "FLOPS", "flop/s"], false)?;
                Some(Scale { times: times / 1e3, over })
            }
        }
    }
}

fn bits_per_second(unit: &str) -> Option<Scale> {
    prefixed(unit, &["bit/s", "b/s", "bps"], false)
}

fn bytes_per_second(unit: &str) -> Option<Scale> {
    prefixed(unit, &["B/s", "Byte/s"], true)
}

/// The factor from a prefixed unit to 10⁹ of the unit. `binary` also allows `Ki`, `Mi`, `Gi` and `Ti`.
fn prefixed(unit: &str, units: &[&str], binary: bool) -> Option<Scale> {
    let prefix = units.iter().find_map(|name| unit.strip_suffix(name))?;
    match prefix {
        "" => Some(Scale::down(1e9)),
        "k" => Some(Scale::down(1e6)),
        "M" => Some(Scale::down(1e3)),
        "G" => Some(Scale::up(1.0)),
        "T" => Some(Scale::up(1e3)),
        "P" => Some(Scale::up(1e6)),
        "Ki" if binary => Some(Scale { times: 1024.0, over: 1e9 }),
        "Mi" if binary => Some(Scale { times: 1_048_576.0, over: 1e9 }),
        "Gi" if binary => Some(Scale { times: 1_073_741_824.0, over: 1e9 }),
        "Ti" if binary => Some(Scale { times: 1_099_511_627_776.0, over: 1e9 }),
        _ => None,
    }
}

/// Splits a text into the longest prefix that is a number, and the rest. A number that is too large is infinite.
fn split(text: &str) -> Option<(f64, &str)> {
    let text = text.trim();
    let end = number_end(text.as_bytes())?;
    Some((text[..end].parse().ok()?, text[end..].trim_start()))
}

/// The end of the longest prefix that is a decimal number, which [`f64`] can parse: `-1`, `.5`, `1.`, `2.5e-3`.
///
/// The text is scanned once: it may have as many bytes as a file, so parsing each of its prefixes would take minutes.
fn number_end(text: &[u8]) -> Option<usize> {
    let sign = |at: usize| at + usize::from(matches!(text.get(at), Some(b'+' | b'-')));
    let digits = |at: usize| at + text[at..].iter().take_while(|byte| byte.is_ascii_digit()).count();
    let whole = sign(0);
    let point = digits(whole);
    let (end, count) = match text.get(point) {
        Some(b'.') => (digits(point + 1), digits(point + 1) - 1 - whole),
        _ => (point, point - whole),
    };
    if count == 0 {
        return None;
    }
    // An `e` without digits is a part of the unit.
    if let Some(b'e' | b'E') = text.get(end) {
        let power = sign(end + 1);
        if digits(power) > power {
            return Some(digits(power));
        }
    }
    Some(end)
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::limits;

    const ANY: Number = Number::new(f64::MIN, f64::MAX);

    #[test]
    fn bits_and_bytes_are_a_factor_of_eight_apart() {
        let rate = |text: &str| Kind::LinkRate.parse(text, ANY).unwrap();
        assert_eq!([rate("100 Gbit/s"), rate("100Gb/s"), rate("100 Gbps")], [100.0; 3]);
        assert_eq!([rate("12.5 GB/s"), rate("12500 MB/s"), rate("0.0125TB/s")], [100.0; 3]);
        assert_eq!(rate("1 Tbit/s"), 1000.0);
        for wrong in ["100 gb/s", "100 GBIT/S", "100 Gb", "100", "fast", "inf Gbit/s", "1 Gibit/s"] {
            let error = Kind::LinkRate.parse(wrong, ANY).unwrap_err();
            assert!(error.contains("Gbit/s\" (bits)") && error.contains("GB/s\" (bytes)"), "{error}");
        }
        assert!(Kind::Memory.parse("24 Gbit", ANY).unwrap_err().contains("in bytes"));
        assert!(Kind::MemoryRate.parse("3350 Gbit/s", ANY).is_err());
    }

    /// The longest prefix that `f64` parses, found by trying all.
    fn split_slowly(text: &str) -> Option<(f64, &str)> {
        (1..=text.len()).rev().find_map(|end| {
            let number: f64 = text[..end].parse().ok()?;
            Some((number, text[end..].trim_start()))
        })
    }

    #[test]
    fn the_longest_number_is_split_off() {
        let alphabet = ["1", "0", ".", "e", "E", "+", "-", "x", " B"];
        let mut texts = vec![String::new()];
        for _ in 0..5 {
            let longer = texts.iter().flat_map(|text| alphabet.map(|part| format!("{text}{part}")));
            texts = longer.collect();
            for text in texts.iter().map(|text| text.trim()) {
                assert_eq!(split(text), split_slowly(text), "{text}");
            }
        }
        for none in ["", "inf s", "nan", "+inf", "µs", ".", "-", "e5"] {
            assert_eq!(split(none), None, "{none}");
        }
    }

    #[test]
    fn a_number_as_long_as_a_file_is_read_at_once() {
        let start = std::time::Instant::now();
        let digits = "9".repeat(limits::FILE_BYTES);
        for (text, part) in [
            (format!("{digits} Gbit/s"), "is inf Gbit/s; possible: from 1e-6 to 1e9 Gbit/s"),
            (format!("1{}", "x".repeat(limits::FILE_BYTES)), "is not a unit of link bandwidth"),
            (format!("1e999{digits} Gbit/s"), "is inf Gbit/s"),
        ] {
            let error = Kind::LinkRate.parse(&text, limits::LINK_GBIT_PER_S).unwrap_err();
            assert!(error.contains(part), "{}", &error[..200.min(error.len())]);
        }
        let small = format!("0.{digits} Gbit/s");
        assert_eq!(Kind::LinkRate.parse(&small, limits::LINK_GBIT_PER_S).unwrap(), 1.0);
        assert!(start.elapsed() < std::time::Duration::from_secs(10), "{:?}", start.elapsed());
    }

    #[test]
    fn decimal_numbers_are_converted_without_rounding_errors() {
        assert_eq!(Kind::Time.parse("20 us", ANY).unwrap(), 0.000_02);
        assert_eq!(Kind::Time.parse("20 µs", ANY).unwrap(), 0.000_02);
        assert_eq!(Kind::Time.parse("5ms", ANY).unwrap(), 0.005);
        assert_eq!(Kind::Time.parse("5e-3 s", ANY).unwrap(), 0.005);
        assert_eq!(Kind::Memory.parse("24 GiB", ANY).unwrap(), 25.769_803_776);
        assert_eq!(Kind::MemoryRate.parse("4.8 TB/s", ANY).unwrap(), 4800.0);
        assert_eq!(Kind::Arithmetic.parse("1 PFLOP/s", ANY).unwrap(), 1000.0);
        assert_eq!(Kind::Arithmetic.parse("400 TFLOPS", ANY).unwrap(), 400.0);
    }
}
