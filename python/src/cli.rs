//! The program `hybrid-ep`, for `python -m hybrid_ep` and the script that pip installs.

use std::ffi::OsString;

use ep_cli::Invocation;
use pyo3::prelude::*;

/// Runs a command line to its end and returns the exit code. Output goes to the process's stdout and stderr, not
/// through Python's. `name` is the program's name in help and errors; `command` starts the program again, for ranks
/// that are processes.
#[pyfunction]
pub(crate) fn cli(py: Python<'_>, arguments: Vec<OsString>, name: String, command: Vec<OsString>) -> u8 {
    py.detach(|| ep_cli::run(&Invocation { name, command, arguments }))
}
