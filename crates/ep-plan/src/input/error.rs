//! The error of input files: a mistake, its place, and what would be possible there.

use std::fmt;
use std::ops::Range;

/// A mistake in an input file.
///
/// It is displayed as one line, `file:line:column: key: problem; possible: ...`. [`InputError::excerpt`] returns the
/// line of the file with the place marked.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
#[non_exhaustive]
pub struct InputError {
    /// The name of the text, as given to [`parse`](super::parse).
    pub file: Box<str>,
    /// Line number, from 1.
    pub line: usize,
    /// Column number in characters, from 1.
    pub column: usize,
    /// The dotted key, such as `cluster.level[1].bandwidth`; empty if the text is not TOML.
    pub key: Box<str>,
    /// What is wrong.
    pub problem: Box<str>,
    /// What would be possible; empty if `problem` already says it.
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
    /// The line of the file with the place marked:
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

/// A text and its name, from which errors are made.
#[derive(Debug, Clone, Copy)]
pub(super) struct Source<'i> {
    pub(super) file: &'i str,
    pub(super) text: &'i str,
}

/// A mistake without its place.
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
            // A tab would displace the caret.
            text: line.replace('\t', " ").into(),
            width: marked.trim_end().chars().count().max(1),
        }
    }
}
