//! Formats numbers with decimal units and three significant digits.

use std::time::Duration;

/// A number with its unit, scaled by thousands.
fn scaled(mut value: f64, units: &[&str]) -> String {
    let mut unit = 0;
    // A value that would round to 1000 is shown in the next unit.
    while value.abs() >= 999.5 && unit + 1 < units.len() {
        value /= 1000.0;
        unit += 1;
    }
    let decimals = match value.abs() {
        v if v >= 99.95 => 0,
        v if v >= 9.995 => 1,
        _ => 2,
    };
    format!("{value:.decimals$} {}", units[unit])
}

pub(crate) fn bytes(bytes: u64) -> String {
    if bytes < 1000 {
        return format!("{bytes} B");
    }
    scaled(bytes as f64, &["B", "kB", "MB", "GB", "TB", "PB", "EB"])
}

pub(crate) fn time(time: Duration) -> String {
    scaled(time.as_secs_f64() * 1e9, &["ns", "µs", "ms", "s"])
}

/// A time in microseconds.
pub(crate) fn time_us(microseconds: f64) -> String {
    time(Duration::from_secs_f64(microseconds / 1e6))
}

/// A bandwidth, rounded up to three significant digits.
pub(crate) fn at_least_gbit_per_s(bandwidth: f64) -> String {
    let unit = 10f64.powi(bandwidth.log10().floor() as i32 - 2);
    let decimals = (-unit.log10().round()).max(0.0) as usize;
    // Rounding errors must not raise a bandwidth that is exact in three digits.
    let rounded = (bandwidth / unit - 1e-9).ceil() * unit;
    format!("{rounded:.decimals$} Gbit/s")
}

/// A whole number with separated thousands.
pub(crate) fn count(number: u64) -> String {
    let digits = number.to_string();
    let mut out = String::with_capacity(digits.len() + digits.len() / 3);
    for (at, digit) in digits.chars().enumerate() {
        if at > 0 && (digits.len() - at).is_multiple_of(3) {
            out.push(',');
        }
        out.push(digit);
    }
    out
}

/// A number with its noun, in the plural unless it is 1.
pub(crate) fn counted(number: usize, noun: &str) -> String {
    let ending = match noun {
        _ if number == 1 => "",
        noun if noun.ends_with("ch") => "es",
        _ => "s",
    };
    format!("{} {noun}{ending}", count(number as u64))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn numbers_have_three_digits_and_a_unit() {
        assert_eq!(
            [0, 999, 1000, 12_345, 999_600, 536_870_912].map(bytes),
            ["0 B", "999 B", "1.00 kB", "12.3 kB", "1.00 MB", "537 MB"]
        );
        let times = [90, 1_500, 99_960, 28_471_000, 3_000_000_000].map(|ns| time(Duration::from_nanos(ns)));
        assert_eq!(times, ["90.0 ns", "1.50 µs", "100 µs", "28.5 ms", "3.00 s"]);
        assert_eq!([0, 999, 1000, 1_234_567].map(count), ["0", "999", "1,000", "1,234,567"]);
        assert_eq!([counted(1, "rank"), counted(4, "rank")], ["1 rank", "4 ranks"]);
        assert_eq!(
            [22.7001, 1.0, 500.0, 1999.0, 0.01234].map(at_least_gbit_per_s),
            ["22.8 Gbit/s", "1.00 Gbit/s", "500 Gbit/s", "2000 Gbit/s", "0.0124 Gbit/s"]
        );
        assert_eq!([counted(1, "batch"), counted(4, "batch")], ["1 batch", "4 batches"]);
    }
}
