//! Why a command ends without success, and the exit code that says so.

use std::fmt;

/// Exit codes, as the help lists them.
pub(crate) mod code {
    pub(crate) const RIGHT: u8 = 0;
    pub(crate) const WRONG: u8 = 1;
    pub(crate) const CALLER: u8 = 2;
    pub(crate) const PEER: u8 = 3;
}

/// What is printed as the one line of an error.
#[derive(Debug)]
pub(crate) enum Failure {
    /// The request cannot be served, or the machine does not allow it.
    Request(String),
    /// The library's error, which knows whose fault it is.
    Library(ep::Error),
    /// What became of the ranks of a job, and the code that follows from it.
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

/// Whether what was checked is right.
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
