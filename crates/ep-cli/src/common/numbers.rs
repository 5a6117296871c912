//! Parsers for numbers on the command line. Each option has a range, which the error names.

pub(crate) use ep_plan::limits::{Count, Number};

/// Any whole number; for options whose limit depends on other options.
pub(crate) const ANY: Count = Count::new(0, usize::MAX);

/// Reads a whole number in the range.
pub(crate) fn count(range: Count) -> impl Fn(&str) -> Result<usize, String> + Clone + Send + Sync + 'static {
    move |text| {
        let number = text.parse().ok().filter(|&number| range.allows(number));
        number.ok_or_else(|| format!("must be {range}"))
    }
}

/// Like [`count`], for a number of 64 bits.
pub(crate) fn count64(range: Count) -> impl Fn(&str) -> Result<u64, String> + Clone + Send + Sync + 'static {
    move |text| count(range)(text).map(|number| number as u64)
}

/// Reads a number in the range.
pub(crate) fn number(range: Number) -> impl Fn(&str) -> Result<f64, String> + Clone + Send + Sync + 'static {
    move |text| {
        let number = text.parse().ok().filter(|&number| range.allows(number));
        number.ok_or_else(|| format!("must be a number {range}"))
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn an_error_names_the_range() {
        let few = count(Count::new(1, 10));
        assert_eq!(few("10"), Ok(10));
        for wrong in ["0", "11", "-1", "1.5", "NaN", "", "99999999999999999999999"] {
            assert_eq!(few(wrong), Err("must be a whole number from 1 to 10".into()), "{wrong}");
        }
        let part = number(Number::new(0.0, 1.0));
        assert_eq!(part("0.5"), Ok(0.5));
        for wrong in ["-0.1", "1.1", "nan", "inf", "-inf", "x"] {
            assert_eq!(part(wrong), Err("must be a number from 0 to 1".into()), "{wrong}");
        }
        assert_eq!(count64(ANY)("18446744073709551615"), Ok(u64::MAX));
    }
}
