//! Errors, kept apart by whose fault they are: the caller's, the environment's, or a peer's.

use std::time::Duration;
use std::{fmt, io};

use crate::topology::Rank;

/// What every fallible function of the library returns.
pub type Result<T, E = Error> = std::result::Result<T, E>;

/// An error, by whose fault it is.
///
/// A [`Caller`](Error::Caller) error that is found before anything was sent leaves the buffer usable; one found in
/// the middle of a collective operator, and every [`Peer`](Error::Peer) error, leaves it refusing further use with
/// the same error, since its peers can no longer be brought to the same step.
#[derive(Debug, Clone, PartialEq, thiserror::Error)]
#[non_exhaustive]
pub enum Error {
    /// Arguments that cannot be served. Fix the call.
    #[error("{0}")]
    Caller(#[from] CallerError),
    /// The machine or its settings do not allow what was asked. Fix the environment.
    #[error("{0}")]
    Environment(#[from] EnvironmentError),
    /// Another rank died, left, failed or stalled.
    #[error("{0}")]
    Peer(#[from] PeerError),
}

/// Arguments that cannot be served.
#[derive(Debug, Clone, PartialEq, thiserror::Error)]
#[non_exhaustive]
pub enum CallerError {
    /// A topology that cannot exist: no rank, or uneven NVLink domains.
    #[error("topology: {0}")]
    Topology(String),
    /// A placement of experts on ranks that cannot be used.
    #[error("expert placement: {0}")]
    Placement(String),
    /// One row of a rank's routing is wrong.
    #[error("routing of rank {rank}, row {row}: {problem}")]
    Routing {
        /// The rank whose routing it is.
        rank: Rank,
        /// The token's index on that rank.
        row: usize,
        /// What is wrong with the row.
        problem: RoutingProblem,
    },
    /// A tensor's size does not fit what the other arguments say.
    #[error("{what}: expected {expected} {unit}, found {found}")]
    Shape {
        /// Which tensor.
        what: &'static str,
        /// The size that the other arguments ask for.
        expected: usize,
        /// The size that was given.
        found: usize,
        /// What the sizes count.
        unit: &'static str,
    },
    /// A row width that the links cannot carry.
    #[error(
        "hidden of {hidden} elements ({bytes} bytes a row): a row must be a multiple of 16 bytes, and not empty"
    )]
    Hidden {
        /// Width of a token, elements.
        hidden: usize,
        /// Width of a row, bytes.
        bytes: usize,
    },
    /// A row capacity that is not a whole number of padded segments.
    #[error("capacity of {capacity} rows is not a multiple of pad_multiple {pad_multiple}")]
    Capacity {
        /// Rows that the caller offers.
        capacity: usize,
        /// Rows to which every expert's segment is padded.
        pad_multiple: usize,
    },
    /// A setting outside its range, or not of its type.
    #[error("{key} = {value}: {problem}")]
    Config {
        /// The setting's name, or its environment variable.
        key: &'static str,
        /// What was given.
        value: String,
        /// What it must be.
        problem: String,
    },
    /// The ranks of one collective call did not pass the same arguments.
    #[error(
        "operator {operator}: {field} is {mine} on rank {rank} and {theirs} on rank {peer}; every rank must pass the same"
    )]
    Collective {
        /// The operator that this rank called.
        operator: Operator,
        /// The argument that differs.
        field: &'static str,
        /// This rank.
        rank: Rank,
        /// This rank's value.
        mine: String,
        /// The rank that disagrees.
        peer: Rank,
        /// Its value.
        theirs: String,
    },
    /// A handle that belongs to another buffer, or one used before it was dispatched.
    #[error("handle: {0}")]
    Handle(String),
    /// A routing trace that cannot be used.
    #[error("routing trace {path}: {problem}")]
    Trace {
        /// The file, as the caller named it.
        path: String,
        /// What is wrong, and where.
        problem: String,
    },
    /// More rows than a 32-bit row number can address.
    #[error("rank {rank} would receive {rows} rows; at most {} can be addressed", u32::MAX)]
    TooManyRows {
        /// The receiving rank.
        rank: Rank,
        /// Rows that the routing asks it to take.
        rows: u64,
    },
}

/// What is wrong with one row of a routing.
#[derive(Debug, Clone, Copy, PartialEq)]
#[non_exhaustive]
pub enum RoutingProblem {
    /// The index is neither -1 nor an expert.
    IndexOutOfRange {
        /// The index that was given.
        index: i64,
        /// Number of experts.
        experts: usize,
    },
    /// The same expert twice.
    DuplicateExpert(u32),
    /// The weight of this expert is not a number.
    NanWeight(u32),
}

impl fmt::Display for RoutingProblem {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::IndexOutOfRange { index, experts } => {
                write!(f, "expert index {index} is out of range: must be -1 (none) or 0..{experts}")
            }
            Self::DuplicateExpert(expert) => write!(f, "expert {expert} appears twice"),
            Self::NanWeight(expert) => write!(f, "the weight of expert {expert} is NaN"),
        }
    }
}

/// The machine or its settings do not allow what was asked.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
#[error("{what}: {problem}{}{hint}", if hint.is_empty() { "" } else { "; " })]
pub struct EnvironmentError {
    /// What was attempted.
    pub what: String,
    /// What the system answered.
    pub problem: String,
    /// What to do about it; may be empty.
    pub hint: String,
}

impl EnvironmentError {
    /// An error of the environment, with what to do about it.
    pub fn new(what: impl Into<String>, problem: impl fmt::Display, hint: impl Into<String>) -> Self {
        Self { what: what.into(), problem: problem.to_string(), hint: hint.into() }
    }
}

/// A collective operator.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
#[non_exhaustive]
pub enum Operator {
    /// Meeting the other ranks, before any operator.
    Join,
    /// Routing to layout and counts.
    Preprocess,
    /// Tokens to expert ranks.
    Dispatch,
    /// Expert outputs back, reduced.
    Combine,
}

impl fmt::Display for Operator {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(match self {
            Self::Join => "join",
            Self::Preprocess => "preprocess",
            Self::Dispatch => "dispatch",
            Self::Combine => "combine",
        })
    }
}

/// Another rank died, left, failed or stalled.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
#[error("rank {peer} {fault} ({operator} #{step}): rank {rank} waited {:.3} s for {waited_for}", waited.as_secs_f64())]
pub struct PeerError {
    /// The rank at fault.
    pub peer: Rank,
    /// What became of it.
    pub fault: PeerFault,
    /// The operator that could not be completed.
    pub operator: Operator,
    /// The operator's number since the buffer was made; the same on every rank.
    pub step: u64,
    /// The rank that reports it.
    pub rank: Rank,
    /// What the reporting rank was waiting for, from whom, and what it saw instead.
    pub waited_for: String,
    /// How long it had waited.
    pub waited: Duration,
}

impl PeerError {
    /// A peer that did not do its part in meeting the others, or in what they arrange beside their operators.
    pub fn joining(
        rank: Rank,
        peer: Rank,
        fault: PeerFault,
        waited_for: impl Into<String>,
        waited: Duration,
    ) -> Self {
        Self { peer, fault, operator: Operator::Join, step: 0, rank, waited_for: waited_for.into(), waited }
    }
}

/// What became of a peer.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
#[non_exhaustive]
pub enum PeerFault {
    /// Its process is gone.
    Died,
    /// It dropped its buffer while others still needed it.
    Left,
    /// It is there but made no progress within the timeout.
    Stalled,
    /// It met an error of its own in a collective operator.
    Failed,
    /// It never came to the rendezvous.
    Absent,
}

impl PeerFault {
    /// What became of a peer whose socket, which has a timeout, gives this error.
    pub fn of_socket(error: &io::Error) -> Self {
        match error.kind() {
            io::ErrorKind::WouldBlock | io::ErrorKind::TimedOut => Self::Stalled,
            _ => Self::Died,
        }
    }
}

impl fmt::Display for PeerFault {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(match self {
            Self::Died => "died",
            Self::Left => "left",
            Self::Stalled => "stalled",
            Self::Failed => "failed",
            Self::Absent => "never joined",
        })
    }
}

#[cfg(test)]
mod tests {
    use std::io::ErrorKind;

    use super::*;

    #[test]
    fn a_socket_says_whether_its_peer_is_gone_or_late() {
        assert_eq!(PeerFault::of_socket(&ErrorKind::UnexpectedEof.into()), PeerFault::Died);
        assert_eq!(PeerFault::of_socket(&ErrorKind::BrokenPipe.into()), PeerFault::Died);
        assert_eq!(PeerFault::of_socket(&ErrorKind::WouldBlock.into()), PeerFault::Stalled);
    }
}
