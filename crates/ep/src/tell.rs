//! Messages for the user of a program that are not errors of a call.

use std::fmt::Display;
use std::io::{self, Write as _};

/// Writes a line to stderr. Without stderr the line is lost; `eprintln!` would panic.
pub fn tell(text: impl Display) {
    let _ = writeln!(io::stderr(), "hybrid-ep: {text}");
}
