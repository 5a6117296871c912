//! Errors of commands, and their exit codes.

use std::fmt;

/// Exit codes; the help lists them.
pub(crate) mod code {
    pub(crate) const RIGHT: u8 = 0;
    pub(crate) const WRONG: u8 = 1;
    pub(crate) const CALLER: u8 = 2;
    pub(crate) const PEER: u8 = 3;
}

/// An error that ends a command; printed as one line.
#[derive(Debug)]
pub(crate) enum Failure {
    /// The request is invalid, or this machine cannot run it.
    Request(String),
    /// An error of the library.
    Library(ep::Error),
    /// How the ranks of a job ended, and the exit code of the job.
    Ranks { what: String, code: u8 },
}

impl Failure {
    pub(crate) fn request(what: impl fmt::Display) -> Self {
        Self::Request(what.to_string())
    }

    pub(crate) fn code(&self) -> u8 {
        match self {
            Self::Request(_) => code::CALLER,
            Self::Library(ep::Error::Peer(_)) => code::PEER,
            Self::Library(_) => code::CALLER,
            Self::Ranks { code, .. } => *code,
        }
    }
}

impl fmt::Display for Failure {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::Request(what) | Self::Ranks { what, .. } => f.write_str(what),
            Self::Library(error) => error.fmt(f),
        }
    }
}

impl<E: Into<ep::Error>> From<E> for Failure {
    fn from(error: E) -> Self {
        Self::Library(error.into())
    }
}

/// Whether the checked results are correct.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum Verdict {
    Right,
    Wrong,
}

impl Verdict {
    pub(crate) fn of(right: bool) -> Self {
        if right { Self::Right } else { Self::Wrong }
    }

    pub(crate) fn code(self) -> u8 {
        match self {
            Self::Right => code::RIGHT,
            Self::Wrong => code::WRONG,
        }
    }
}
