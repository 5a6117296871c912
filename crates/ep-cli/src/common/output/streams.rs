//! Writing to stdout and stderr.

use std::io::ErrorKind;

use super::visible::{one_line, visible};
use crate::common::failure::Failure;

/// Prints an error as one line, because scripts read lines. Lines of a longer message are joined.
pub(crate) fn error(program: &str, failure: &Failure) {
    let message = one_line(&failure.to_string());
    // One write for the whole line, because ranks that are processes share stderr. If stderr is closed, only the exit
    // code reports the error.
    let _ = to_stderr(&format!("{program}: error: {message}"));
}

/// Writes a text at once and ends its last line. A closed pipe (`| head`) is not an error.
pub(crate) fn to_stdout(text: &str) -> Result<(), Failure> {
    whole(std::io::stdout().lock(), text, "stdout")
}

/// Like [`to_stdout`], to stderr.
pub(crate) fn to_stderr(text: &str) -> Result<(), Failure> {
    whole(std::io::stderr().lock(), text, "stderr")
}

/// Escapes control characters, since names, paths and values in a text may come from outside, and writes the text.
fn whole(mut to: impl std::io::Write, text: &str, name: &str) -> Result<(), Failure> {
    let end = if text.ends_with('\n') { "" } else { "\n" };
    match to.write_all(format!("{}{end}", visible(text)).as_bytes()).and_then(|()| to.flush()) {
        Err(error) if error.kind() != ErrorKind::BrokenPipe => {
            Err(Failure::request(format!("writing to {name}: {error}")))
        }
        _ => Ok(()),
    }
}
