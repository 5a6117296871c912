//! What is wrong in an input file, and where.

use std::fmt;
use std::ops::Range;

/// A text that describes no plan: where it fails, at which key, and what would be possible there.
///
/// Displayed it is one line, `file:line:column: key: problem; possible: ...`; [`InputError::excerpt`] is the line of
/// the file with a caret under the place.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
#[non_exhaustive]
pub struct InputError {
    /// The name of the text, as it was given.
    pub file: Box<str>,
    /// Line, from 1.
    pub line: usize,
    /// Column in characters, from 1.
    pub column: usize,
    /// The dotted key, as `cluster.level[1].bandwidth`; empty where the text is no TOML at all.
    pub key: Box<str>,
    /// What is wrong.
    pub problem: Box<str>,
    /// What would be possible; empty where nothing more can be said.
    pub possible: Box<str>,
    text: Box<str>,
    width: usize,
}

impl fmt::Display for InputError {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{}:{}:{}: ", self.file, self.line, self.column)?;
        if !self.key.is_empty() {
            write!(f, "{}: ", self.key)?;
        }
        f.write_str(&self.problem)?;
        if !self.possible.is_empty() {
            write!(f, "; possible: {}", self.possible)?;
        }
        Ok(())
    }
}

impl InputError {
    /// The line with the place marked:
    ///
    /// ```text
    ///    |
    /// 12 | bandwidth = "100 gb/s"
    ///    |             ^^^^^^^^^^
    /// ```
    pub fn excerpt(&self) -> String {
        let number = self.line.to_string();
        let margin = " ".repeat(number.len());
        let indent = " ".repeat(self.column - 1);
        let caret = "^".repeat(self.width);
        format!("{margin} |\n{number} | {}\n{margin} | {indent}{caret}", self.text)
    }
}

/// A text with its name, to make errors that point into it.
#[derive(Debug, Clone, Copy)]
pub(super) struct Source<'i> {
    pub(super) file: &'i str,
    pub(super) text: &'i str,
}

/// What is wrong, without its place.
#[derive(Debug, Clone, Default)]
pub(super) struct Problem {
    pub(super) what: String,
    pub(super) possible: String,
}

impl Problem {
    pub(super) fn new(what: impl Into<String>, possible: impl Into<String>) -> Self {
        Self { what: what.into(), possible: possible.into() }
    }
}

impl Source<'_> {
    pub(super) fn error(
        &self,
        span: &Range<usize>,
        key: impl Into<Box<str>>,
        problem: Problem,
    ) -> InputError {
        let mut start = span.start.min(self.text.len());
        while !self.text.is_char_boundary(start) {
            start -= 1;
        }
        let before = &self.text[..start];
        let line_start = before.rfind('\n').map_or(0, |at| at + 1);
        let line = self.text[line_start..].lines().next().unwrap_or_default();
        let column = self.text[line_start..start].chars().count() + 1;
        let marked = self.text.get(start..span.end).and_then(|text| text.lines().next()).unwrap_or_default();
        InputError {
            file: self.file.into(),
            line: before.matches('\n').count() + 1,
            column,
            key: key.into(),
            problem: problem.what.into(),
            possible: problem.possible.into(),
            // A tab would move the caret.
            text: line.replace('\t', " ").into(),
            width: marked.trim_end().chars().count().max(1),
        }
    }
}
