//! How the program was started.

use std::ffi::OsString;

/// A command line, and how to start it again, which a launcher does once per rank.
#[derive(Debug, Clone)]
pub struct Invocation {
    /// The name that users type before the arguments; shown in help, errors and commands to repeat.
    pub name: String,
    /// The program to execute, with arguments that come before [`arguments`](Self::arguments). If empty, the executable
    /// of this process.
    pub command: Vec<OsString>,
    /// The arguments, without the program's name.
    pub arguments: Vec<OsString>,
}
