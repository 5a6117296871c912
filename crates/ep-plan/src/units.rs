//! Types for quantities that are easily confused by a factor of eight or a thousand: bytes, seconds, bytes per second,
//! floating-point operations. Every other quantity is a plain number whose name carries its unit.
//!
//! Each type wraps an `f64` in the base unit. Prefixes are decimal (1 MB = 10⁶ bytes), as for link rates and in the
//! paper.

use std::fmt;
use std::iter::Sum;
use std::ops::{Add, AddAssign, Div, Mul, Sub};

use serde::{Deserialize, Serialize};

macro_rules! quantity {
    ($(#[$doc:meta])* $name:ident, $symbol:literal) => {
        $(#[$doc])*
        #[derive(Debug, Clone, Copy, PartialEq, PartialOrd, Default, Serialize, Deserialize)]
        #[serde(transparent)]
        pub struct $name(pub f64);

        impl $name {
            /// Zero.
            pub const ZERO: Self = Self(0.0);

            /// The larger of two.
            #[must_use]
            pub fn max(self, other: Self) -> Self {
                Self(self.0.max(other.0))
            }

            /// The smaller of two.
            #[must_use]
            pub fn min(self, other: Self) -> Self {
                Self(self.0.min(other.0))
            }
        }

        impl Add for $name {
            type Output = Self;
            fn add(self, other: Self) -> Self {
                Self(self.0 + other.0)
            }
        }

        impl AddAssign for $name {
            fn add_assign(&mut self, other: Self) {
                self.0 += other.0;
            }
        }

        impl Sub for $name {
            type Output = Self;
            fn sub(self, other: Self) -> Self {
                Self(self.0 - other.0)
            }
        }

        impl Mul<f64> for $name {
            type Output = Self;
            fn mul(self, factor: f64) -> Self {
                Self(self.0 * factor)
            }
        }

        impl Div<f64> for $name {
            type Output = Self;
            fn div(self, divisor: f64) -> Self {
                Self(self.0 / divisor)
            }
        }

        impl Div for $name {
            type Output = f64;
            fn div(self, other: Self) -> f64 {
                self.0 / other.0
            }
        }

        impl Sum for $name {
            fn sum<I: Iterator<Item = Self>>(items: I) -> Self {
                Self(items.map(|item| item.0).sum())
            }
        }

        impl fmt::Display for $name {
            fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
                match $symbol {
                    "s" if self.0 >= 1000.0 => write_long_time(f, self.0),
                    symbol => write_with_prefix(f, self.0, symbol),
                }
            }
        }
    };
}

quantity! {
    /// An amount of data, bytes. Fractions are allowed: amounts are expectations over many tokens.
    Bytes, "B"
}
quantity! {
    /// A duration, seconds.
    Seconds, "s"
}
quantity! {
    /// The rate of a link or a memory in one direction, bytes per second.
    BytesPerSecond, "B/s"
}
quantity! {
    /// A number of floating-point operations. A multiply-add counts as two.
    Flop, "FLOP"
}
quantity! {
    /// A rate of arithmetic, floating-point operations per second.
    FlopPerSecond, "FLOP/s"
}

impl Bytes {
    /// From megabytes (10⁶ bytes).
    pub fn from_mb(megabytes: f64) -> Self {
        Self(megabytes * 1e6)
    }

    /// From gigabytes (10⁹ bytes).
    pub fn from_gb(gigabytes: f64) -> Self {
        Self(gigabytes * 1e9)
    }
}

impl Seconds {
    /// From milliseconds.
    pub fn from_ms(milliseconds: f64) -> Self {
        Self(milliseconds * 1e-3)
    }

    /// The duration in milliseconds.
    pub fn as_ms(self) -> f64 {
        self.0 * 1e3
    }
}

impl BytesPerSecond {
    /// From gigabits (10⁹ bits) per second, the usual unit of link rates.
    pub fn from_gbit_per_s(gigabits: f64) -> Self {
        Self(gigabits * 1e9 / 8.0)
    }

    /// From gigabytes (10⁹ bytes) per second, the usual unit of memory rates.
    pub fn from_gb_per_s(gigabytes: f64) -> Self {
        Self(gigabytes * 1e9)
    }

    /// The rate in gigabits per second.
    pub fn as_gbit_per_s(self) -> f64 {
        self.0 * 8.0 / 1e9
    }
}

impl FlopPerSecond {
    /// From TFLOP/s (10¹² operations per second).
    pub fn from_tflops(teraflops: f64) -> Self {
        Self(teraflops * 1e12)
    }
}

impl Div<BytesPerSecond> for Bytes {
    type Output = Seconds;
    fn div(self, rate: BytesPerSecond) -> Seconds {
        Seconds(self.0 / rate.0)
    }
}

impl Mul<Seconds> for BytesPerSecond {
    type Output = Bytes;
    fn mul(self, time: Seconds) -> Bytes {
        Bytes(self.0 * time.0)
    }
}

impl Div<FlopPerSecond> for Flop {
    type Output = Seconds;
    fn div(self, rate: FlopPerSecond) -> Seconds {
        Seconds(self.0 / rate.0)
    }
}

/// Writes a time of at least 1000 s in seconds, hours, days or years, with four significant digits.
fn write_long_time(f: &mut fmt::Formatter<'_>, seconds: f64) -> fmt::Result {
    match seconds {
        short if short < 9999.5 => write!(f, "{short:.0} s"),
        middle if middle < 360_000.0 => write_with_prefix(f, middle / 3600.0, "h"),
        long if long < 86_400_000.0 => write_with_prefix(f, long / 86_400.0, "days"),
        ages => write_with_prefix(f, ages / (365.25 * 86_400.0), "years"),
    }
}

/// Writes four significant digits with the prefix that keeps the number between 1 and 1000.
fn write_with_prefix(f: &mut fmt::Formatter<'_>, value: f64, symbol: &str) -> fmt::Result {
    const PREFIXES: [(f64, &str); 8] =
        [(1e15, "P"), (1e12, "T"), (1e9, "G"), (1e6, "M"), (1e3, "k"), (1.0, ""), (1e-3, "m"), (1e-6, "µ")];
    let magnitude = value.abs();
    let (scale, prefix) = PREFIXES
        .into_iter()
        .find(|&(scale, _)| magnitude >= scale)
        .unwrap_or(if magnitude == 0.0 { (1.0, "") } else { (1e-6, "µ") });
    let scaled = value / scale;
    let decimals = match scaled.abs() {
        large if large >= 1000.0 => 0,
        large if large >= 100.0 => 1,
        middle if middle >= 10.0 => 2,
        _ => 3,
    };
    write!(f, "{scaled:.decimals$} {prefix}{symbol}")
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn bits_become_bytes_once() {
        assert_eq!(BytesPerSecond::from_gbit_per_s(128.0), BytesPerSecond(16e9));
        assert_eq!(BytesPerSecond::from_gb_per_s(16.0).as_gbit_per_s(), 128.0);
        assert_eq!(Bytes::from_mb(32.0) / BytesPerSecond(16e9), Seconds::from_ms(2.0));
    }

    #[test]
    fn quantities_are_printed_with_four_digits_and_a_prefix() {
        assert_eq!(Seconds(0.1873).to_string(), "187.3 ms");
        assert_eq!(Seconds(0.000_02).to_string(), "20.00 µs");
        assert_eq!(Seconds(999.9).to_string(), "999.9 s");
        assert_eq!(Seconds(6806.0).to_string(), "6806 s");
        assert_eq!(Seconds(182_900.0).to_string(), "50.81 h");
        assert_eq!(Seconds(3.6e6).to_string(), "41.67 days");
        assert_eq!(Seconds(1.4e8).to_string(), "4.436 years");
        assert_eq!(Bytes(58_720_256.0).to_string(), "58.72 MB");
        assert_eq!(Bytes::ZERO.to_string(), "0.000 B");
        assert_eq!(BytesPerSecond::from_gbit_per_s(10.0).to_string(), "1.250 GB/s");
        assert_eq!(FlopPerSecond::from_tflops(400.0).to_string(), "400.0 TFLOP/s");
    }
}
