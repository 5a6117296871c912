//! Escapes control characters in text from outside.

use std::borrow::Cow;
use std::fmt::Write as _;

/// Maximum number of characters of an error line: a name or a value in it may be megabytes long.
const LONGEST_LINE: usize = 2000;

/// Replaces every character that a terminal would act on by its escape, `\u{1b}` for ESC. Line ends and tabs stay.
pub(crate) fn visible(text: &str) -> Cow<'_, str> {
    if !text.chars().any(obeyed) {
        return Cow::Borrowed(text);
    }
    let mut out = String::with_capacity(text.len() + 16);
    for letter in text.chars() {
        if obeyed(letter) {
            out.extend(letter.escape_unicode());
        } else {
            out.push(letter);
        }
    }
    Cow::Owned(out)
}

/// Joins a text to one line, escapes it, and limits its length.
pub(crate) fn one_line(text: &str) -> String {
    let joined = text.split_whitespace().collect::<Vec<_>>().join(" ");
    let shown = visible(&joined);
    match shown.char_indices().nth(LONGEST_LINE) {
        None => shown.into_owned(),
        Some((end, _)) => {
            format!("{} ... ({} characters in all)", &shown[..end], shown.chars().count())
        }
    }
}

/// Escapes the characters that a terminal would act on in JSON, for example ESC as `\u001b`. serde_json writes such
/// characters only inside strings.
pub(super) fn json(text: String) -> String {
    if !text.chars().any(obeyed) {
        return text;
    }
    let mut out = String::with_capacity(text.len() + 16);
    for letter in text.chars() {
        if obeyed(letter) {
            // Writing to a string cannot fail. All of these characters have at most four hexadecimal digits.
            let _ = write!(out, "\\u{:04x}", u32::from(letter));
        } else {
            out.push(letter);
        }
    }
    out
}

/// Whether a terminal acts on the character instead of showing it: C0 and C1 controls, line and paragraph separators,
/// and characters that change the direction of writing.
fn obeyed(letter: char) -> bool {
    match letter {
        '\n' | '\t' => false,
        '\u{61c}' | '\u{200e}' | '\u{200f}' => true,
        '\u{2028}'..='\u{202e}' | '\u{2066}'..='\u{2069}' => true,
        other => other.is_control(),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn control_characters_are_escaped() {
        assert_eq!(visible("a\tb\nÄ→日"), "a\tb\nÄ→日");
        assert_eq!(visible("\u{1b}[2J\r\u{7f}"), "\\u{1b}[2J\\u{d}\\u{7f}");
        assert_eq!(visible("\u{9b}31m \u{202e}gnp\u{2066}"), "\\u{9b}31m \\u{202e}gnp\\u{2066}");
        assert_eq!(one_line("a\n b\t\u{7}"), "a b \\u{7}");
    }

    #[test]
    fn escaped_json_has_the_same_value() {
        let value = serde_json::json!({"na\u{9b}me": "\u{1b}[31m\u{202e}x\u{7f}"});
        let text = json(serde_json::to_string_pretty(&value).unwrap());
        assert!(!text.chars().any(obeyed), "{text:?}");
        assert_eq!(serde_json::from_str::<serde_json::Value>(&text).unwrap(), value);
    }

    #[test]
    fn a_long_line_is_cut() {
        let line = one_line(&"x".repeat(1 << 20));
        assert!(line.len() < 2100 && line.ends_with("... (1048576 characters in all)"), "{}", line.len());
    }
}
