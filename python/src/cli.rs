//! The program `hybrid-ep`, for `python -m hybrid_ep`.

use std::ffi::OsString;

use ep_cli::Invocation;
use pyo3::prelude::*;

/// Runs a command line to its end, and returns its exit code. What it writes goes past Python to the process's stdout
/// and stderr. `name` is what help and errors call the program, `command` what starts it again for ranks that are
/// processes.
#[pyfunction]
pub(crate) fn cli(py: Python<'_>, arguments: Vec<OsString>, name: String, command: Vec<OsString>) -> u8 {
    py.detach(|| ep_cli::run(&Invocation { name, command, arguments }))
}
