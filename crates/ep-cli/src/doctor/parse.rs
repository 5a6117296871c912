//! Parsers for the notations of `/proc` and `/sys`, and formatting of sizes.
//!
//! The crates `procfs` and `sysinfo` do not replace these parsers: they read only the files of the running machine, while
//! the tests of doctor read files of fake machines; and most of the files are in `/sys`, for which these crates have no
//! parsers.

/// The number of items in a kernel list such as `0-3,8,10-11`.
pub(super) fn list_len(text: &str) -> Option<usize> {
    text.split(',').try_fold(0usize, |total, item| {
        let (first, last) = item.split_once('-').unwrap_or((item, item));
        let first: usize = first.trim().parse().ok()?;
        let last: usize = last.trim().parse().ok()?;
        let len = last.checked_sub(first)?.checked_add(1)?;
        total.checked_add(len)
    })
}

/// A size such as `2048K`, `32M`, `64m` or `4096`, in bytes.
pub(super) fn size_bytes(text: &str) -> Option<u64> {
    let (digits, shift) = match text.char_indices().next_back()? {
        (at, 'k' | 'K') => (&text[..at], 10),
        (at, 'm' | 'M') => (&text[..at], 20),
        (at, 'g' | 'G') => (&text[..at], 30),
        _ => (text, 0),
    };
    let count: u64 = digits.parse().ok()?;
    count.checked_mul(1 << shift)
}

/// The first two numbers of a kernel release such as `6.8.0-31-generic`.
pub(super) fn release(text: &str) -> Option<(u32, u32)> {
    let mut numbers = text.split(|c: char| !c.is_ascii_digit());
    Some((numbers.next()?.parse().ok()?, numbers.next()?.parse().ok()?))
}

/// The selected word of a setting such as `always [madvise] never`.
pub(super) fn bracketed(text: &str) -> Option<String> {
    let (_, rest) = text.split_once('[')?;
    let (word, _) = rest.split_once(']')?;
    Some(word.to_owned())
}

/// A sysfs number in hexadecimal, such as `0x10de`.
pub(super) fn hex(text: &str) -> Option<u32> {
    u32::from_str_radix(text.strip_prefix("0x")?, 16).ok()
}

/// A size in the largest binary unit that it fills, with one decimal unless that is 0.
pub(super) fn human_bytes(bytes: u64) -> String {
    const UNITS: [&str; 5] = ["bytes", "KiB", "MiB", "GiB", "TiB"];
    let mut unit = 0;
    while unit + 1 < UNITS.len() && bytes >> (10 * (unit + 1)) > 0 {
        unit += 1;
    }
    let (whole, name) = (bytes >> (10 * unit), UNITS[unit]);
    let rest = bytes & ((1 << (10 * unit)) - 1);
    // Truncated, not rounded, so that the text never exceeds the actual size.
    let tenths = if unit == 0 { 0 } else { (rest >> (10 * (unit - 1))) * 10 / 1024 };
    match tenths {
        0 => format!("{whole} {name}"),
        _ => format!("{whole}.{tenths} {name}"),
    }
}

/// A count with its noun, in the plural unless it is 1.
pub(super) fn count(n: usize, noun: &str) -> String {
    match n {
        1 => format!("1 {noun}"),
        _ => format!("{n} {noun}s"),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn kernel_lists_are_counted() {
        assert_eq!(list_len("0"), Some(1));
        assert_eq!(list_len("0-3,8,10-11"), Some(7));
        assert_eq!(list_len(""), None);
        assert_eq!(list_len("3-1"), None);
        assert_eq!(list_len("a-b"), None);
        assert_eq!(list_len("0-18446744073709551615"), None);
    }

    #[test]
    fn sizes_are_parsed() {
        assert_eq!(size_bytes("2048K"), Some(2 << 20));
        assert_eq!(size_bytes("64m"), Some(64 << 20));
        assert_eq!(size_bytes("4096"), Some(4096));
        assert_eq!(size_bytes("50%"), None);
        assert_eq!(size_bytes("K"), None);
        assert_eq!(size_bytes("é"), None);
        assert_eq!(size_bytes("99999999999999999999G"), None);
        assert_eq!(size_bytes("18446744073709551615G"), None);
    }

    #[test]
    fn releases_are_parsed() {
        assert_eq!(release("6.8.0-31-generic"), Some((6, 8)));
        assert_eq!(release("5.15"), Some((5, 15)));
        assert_eq!(release("6"), None);
        assert_eq!(release("linux-6.8"), None);
    }

    #[test]
    fn settings_and_hexadecimal_numbers_are_parsed() {
        assert_eq!(bracketed("always [madvise] never").as_deref(), Some("madvise"));
        assert_eq!(bracketed("always"), None);
        assert_eq!(hex("0x10de"), Some(0x10de));
        assert_eq!(hex("10de"), None);
    }

    #[test]
    fn sizes_are_formatted_with_binary_units() {
        assert_eq!(human_bytes(0), "0 bytes");
        assert_eq!(human_bytes(1023), "1023 bytes");
        assert_eq!(human_bytes(1536), "1.5 KiB");
        assert_eq!(human_bytes((2 << 30) - 1), "1.9 GiB");
        assert_eq!(human_bytes(64 << 20), "64 MiB");
        assert_eq!(human_bytes(u64::MAX), "16777215.9 TiB");
    }
}
