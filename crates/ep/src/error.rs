//! Errors, grouped by whose fault they are: the caller's, the environment's, or a peer's.

use std::time::Duration;
use std::{fmt, io};

use crate::topology::Rank;

/// The result of the library's fallible functions.
pub type Result<T, E = Error> = std::result::Result<T, E>;

/// An error of the library. The variant says whose fault it is.
///
/// An operator that returns a [`Caller`](Error::Caller) error before it has sent anything leaves the buffer usable.
/// After any error in the middle of a collective operator, the ranks can no longer reach the same step: every later
/// operator and allocation of the buffer returns the same error.
#[derive(Debug, Clone, PartialEq, thiserror::Error)]
#[non_exhaustive]
pub enum Error {
    /// The arguments are invalid. Fix the call.
    #[error("{0}")]
    Caller(#[from] CallerError),
    /// The machine or its settings do not allow the call. Fix the environment.
    #[error("{0}")]
    Environment(#[from] EnvironmentError),
    /// Another rank died, left, failed, stalled or never joined. Look at that rank first.
    #[error("{0}")]
    Peer(#[from] PeerError),
}

impl Error {
    /// Sets the operator of an error about a peer to [`Operator::Share`], for a rank that shares new memory with its peers.
    /// Other errors do not change.
    #[must_use]
    pub fn while_sharing_memory(self) -> Self {
        match self {
            Self::Peer(error) => PeerError { operator: Operator::Share, step: 0, ..error }.into(),
            other => other,
        }
    }
}

/// Invalid arguments.
#[derive(Debug, Clone, PartialEq, thiserror::Error)]
#[non_exhaustive]
pub enum CallerError {
    /// An invalid topology: no ranks, too many ranks, or NVLink domains of different sizes.
    #[error("topology: {0}")]
    Topology(String),
    /// An invalid number of experts, or an invalid placement of experts on ranks.
    #[error("expert placement: {0}")]
    Placement(String),
    /// One row of a routing is invalid.
    #[error("routing of rank {rank}, row {row}: {problem}")]
    Routing {
        /// The rank of the routing.
        rank: Rank,
        /// The token's index on that rank.
        row: usize,
        /// What is wrong with the row.
        problem: RoutingProblem,
    },
    /// The size of an argument does not match the other arguments.
    #[error("{what}: expected {expected} {unit}, found {found}")]
    Shape {
        /// The argument.
        what: &'static str,
        /// The size that follows from the other arguments, in `unit`.
        expected: usize,
        /// The size that was passed, in `unit`.
        found: usize,
        /// The unit of both sizes, such as bytes.
        unit: &'static str,
    },
    /// A size computed from the arguments exceeds the largest possible object in memory.
    #[error("{what}: more than {} {unit}; pass smaller sizes", crate::Size::MAX)]
    TooLarge {
        /// The object that would be too large.
        what: &'static str,
        /// The unit of the size, such as bytes.
        unit: &'static str,
    },
    /// The program told a waiting operator to stop ([`Interrupt`](crate::Interrupt)).
    #[error(
        "{operator} on rank {rank} was interrupted (by Ctrl-C or by the program) while it waited for {waited_for}; to go on, make new \
         buffers on all ranks"
    )]
    Interrupted {
        /// The operator that was stopped.
        operator: Operator,
        /// The rank that was interrupted.
        rank: Rank,
        /// What the rank was waiting for.
        waited_for: String,
    },
    /// The operators do not support rows of this size.
    #[error(
        "hidden of {hidden} elements ({bytes} bytes a row): a row must be a multiple of 16 bytes, not empty, and at most {} bytes",
        crate::backend::MAX_ROW_BYTES
    )]
    Hidden {
        /// Width of a token, in elements.
        hidden: usize,
        /// Size of a row, in bytes.
        bytes: usize,
    },
    /// A capacity that is not a multiple of the pad multiple.
    #[error("capacity of {capacity} rows is not a multiple of pad_multiple {pad_multiple}")]
    Capacity {
        /// The capacity, in rows.
        capacity: usize,
        /// Each expert's rows are padded to a multiple of this many rows.
        pad_multiple: usize,
    },
    /// A setting that is outside its range or not of its type.
    #[error("{key} = {value}: {problem}")]
    Config {
        /// The setting's name, or its environment variable.
        key: &'static str,
        /// The value that was given.
        value: String,
        /// What the value must be.
        problem: String,
    },
    /// Two ranks passed different arguments to one collective operator.
    #[error(
        "operator {operator}: {field} is {mine} on rank {rank} and {theirs} on rank {peer}; it must be the same on every rank"
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
        /// The rank whose value differs.
        peer: Rank,
        /// The value of `peer`.
        theirs: String,
    },
    /// Registered memory of another buffer. Peers address registered memory by its place among the segments of this
    /// buffer, so they would access different memory.
    #[error(
        "{what}: the buffer of rank {maker} made this memory, but it was passed to another buffer, of rank {rank}; allocate it with the buffer that uses it, or pass unregistered memory"
    )]
    Memory {
        /// The argument.
        what: &'static str,
        /// The rank of the buffer that made the memory.
        maker: Rank,
        /// The rank of the buffer that the memory was passed to.
        rank: Rank,
    },
    /// A handle of another buffer, a handle that was never dispatched, or a routing or output that does not fit the
    /// buffer or the handle.
    #[error("handle: {0}")]
    Handle(String),
    /// A routing trace that cannot be used.
    #[error("routing trace {path}: {problem}")]
    Trace {
        /// The file, as the caller named it.
        path: String,
        /// What is wrong, and at which place in the file.
        problem: String,
    },
    /// The weights or gradients of an expert cannot be sent to another datacenter.
    #[error("{what} of layer {layer}, expert {expert} of this rank: {problem}")]
    Expert {
        /// Weights or gradients.
        what: &'static str,
        /// The layer.
        layer: usize,
        /// The expert's index among those of its owner.
        expert: usize,
        /// What is wrong with them.
        problem: String,
    },
    /// The gradients of dense parameters cannot be reduced between datacenters.
    #[error("dense gradients, bucket {bucket}: {problem}")]
    Dense {
        /// The bucket: gradients that are reduced together.
        bucket: usize,
        /// What is wrong with them.
        problem: String,
    },
    /// A call of a migration that does not fit the calls before it.
    #[error("{operator} of layer {layer}, step {step}: {problem}")]
    Order {
        /// The call.
        operator: Operator,
        /// The layer.
        layer: usize,
        /// The step.
        step: u64,
        /// What must be called first.
        problem: &'static str,
    },
    /// More rows, tokens or copies than 32 bits can number.
    #[error("rank {rank} would receive {rows} rows; at most {} can be numbered; use fewer tokens", u32::MAX)]
    TooManyRows {
        /// The receiving rank, or the rank of the routing.
        rank: Rank,
        /// The number of rows, tokens or copies.
        rows: u64,
    },
    /// More weights than 32 bits can number, in plain mode, where a row has a weight for each local expert.
    #[error(
        "rank {rank} would receive {rows} rows of {experts} weights each; at most {} weights can be numbered; use fewer \
         tokens, or the permuted mode",
        u32::MAX
    )]
    TooManyWeights {
        /// The receiving rank.
        rank: Rank,
        /// The number of rows.
        rows: u64,
        /// The weights of a row: the rank's experts.
        experts: u64,
    },
}

/// What is wrong with one row of a routing.
#[derive(Debug, Clone, Copy, PartialEq)]
#[non_exhaustive]
pub enum RoutingProblem {
    /// The index is neither -1 nor the index of an expert.
    IndexOutOfRange {
        /// The index that was given.
        index: i64,
        /// Number of experts in the world.
        experts: usize,
    },
    /// The row has this expert twice.
    DuplicateExpert(u32),
    /// The weight of this expert is NaN.
    NanWeight(u32),
}

impl fmt::Display for RoutingProblem {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::IndexOutOfRange { index, experts } => {
                let last = experts.saturating_sub(1);
                write!(f, "expert index {index} is out of range: must be -1 (none) or 0 to {last}")
            }
            Self::DuplicateExpert(expert) => write!(f, "expert {expert} appears twice"),
            Self::NanWeight(expert) => write!(f, "the weight of expert {expert} is NaN"),
        }
    }
}

/// The machine or its settings do not allow the call.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
#[error("{what}: {problem}{}{hint}", if hint.is_empty() { "" } else { "; " })]
pub struct EnvironmentError {
    /// The action that failed.
    pub what: String,
    /// The reason, often the system's error.
    pub problem: String,
    /// What to do about it; may be empty.
    pub hint: String,
}

impl EnvironmentError {
    /// An error of action `what` for reason `problem`, with what to do about it.
    pub fn new(what: impl Into<String>, problem: impl fmt::Display, hint: impl Into<String>) -> Self {
        Self { what: what.into(), problem: problem.to_string(), hint: hint.into() }
    }
}

/// A collective operator: of a buffer, or of the migration of experts between datacenters.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
#[non_exhaustive]
pub enum Operator {
    /// Joining: the ranks of the job connect to each other, before any other operator.
    Join,
    /// Turns each rank's routing into a handle.
    Preprocess,
    /// Sends tokens to the ranks of their experts.
    Dispatch,
    /// Sends the experts' output rows back and sums them for each token.
    Combine,
    /// Sends the weights of experts to the ranks that hold replicas of them.
    Publish,
    /// Receives the weights of replicas.
    Gather,
    /// Sends the gradients of replicas to the owners of the experts, which add them.
    Reduce,
    /// Shares new memory with the other ranks of the machine, inside or outside another operator.
    Share,
}

impl Operator {
    /// The name of the operator, with the calls of a program that run the operator under a different name. For errors that say
    /// that ranks made different calls.
    pub fn with_its_calls(self) -> String {
        let calls = match self {
            Self::Preprocess => " (the first step of a dispatch without a handle)",
            Self::Dispatch => " (or the backward pass of a combine)",
            Self::Combine => " (or the backward pass of a dispatch)",
            _ => "",
        };
        format!("{self}{calls}")
    }
}

impl fmt::Display for Operator {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(match self {
            Self::Join => "join",
            Self::Preprocess => "preprocess",
            Self::Dispatch => "dispatch",
            Self::Combine => "combine",
            Self::Publish => "publish",
            Self::Gather => "gather",
            Self::Reduce => "reduce",
            Self::Share => "sharing memory",
        })
    }
}

/// Another rank died, left, failed, stalled or never joined.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
#[error("{} {fault} ({}): rank {rank} {}{}", self.named(), self.call(), self.seen(), self.why())]
pub struct PeerError {
    /// The rank at fault.
    pub peer: Rank,
    /// The name of the machine of the rank at fault, in a job of several machines.
    pub machine: Option<String>,
    /// Why the rank at fault is unusable.
    pub fault: PeerFault,
    /// The operator that the reporting rank could not complete.
    pub operator: Operator,
    /// The number of the operator's call on the buffer; equal on every rank. 0 for sharing memory and for
    /// joining, except in a [`ThreadRendezvous`](crate::join::ThreadRendezvous): there, the number of the exchange.
    pub step: u64,
    /// The reporting rank.
    pub rank: Rank,
    /// What the reporting rank was waiting for, from which rank, and what it saw instead. With [`PeerFault::Broken`],
    /// what it found.
    pub waited_for: String,
    /// How long the reporting rank waited.
    pub waited: Duration,
    /// The error that the rank at fault itself reported, if it still could.
    pub cause: Option<String>,
}

impl PeerError {
    /// The part of a message that names the rank at fault, such as `rank 3 on node-b`.
    fn named(&self) -> String {
        let on = self.machine.as_ref().map_or(String::new(), |machine| format!(" on {machine}"));
        format!("rank {}{on}", self.peer)
    }

    /// The part of a message that names the call.
    fn call(&self) -> String {
        match self.operator {
            operator @ (Operator::Join | Operator::Share) => operator.to_string(),
            operator => format!("{operator} #{}", self.step),
        }
    }

    /// The part of a message that says what the reporting rank was doing.
    fn seen(&self) -> String {
        let Self { waited_for, waited, .. } = self;
        match self.fault {
            PeerFault::Broken => format!("found {waited_for}"),
            // The reporting rank received the loss from another rank, or found the peer lost at once.
            _ if *waited < Duration::from_millis(1) => format!("was waiting for {waited_for}"),
            _ => format!("waited {:.3} s for {waited_for}", waited.as_secs_f64()),
        }
    }

    /// The part of a message that quotes the error of the rank at fault itself, or says where to look for the reason.
    fn why(&self) -> String {
        match (&self.cause, self.fault) {
            (Some(cause), _) => format!("; its error: {cause}"),
            (None, PeerFault::Left) => {
                "; its program ended or closed the buffer, after an error of its own or because it made fewer calls than the \
                 others: see its output"
                    .into()
            }
            (None, PeerFault::Died) => {
                let aborts = match self.operator {
                    Operator::Reduce => " (gloo aborts a process whose collective call differs from the other ranks')",
                    _ => "",
                };
                format!("; its process crashed or was killed{aborts}: see its output and the system's log")
            }
            _ => String::new(),
        }
    }

    /// Rank `peer` broke the protocol: `rank` found `found`, which no correct peer sends or writes to shared memory.
    pub fn broken(rank: Rank, peer: Rank, operator: Operator, step: u64, found: impl Into<String>) -> Self {
        let (fault, waited_for, waited) = (PeerFault::Broken, found.into(), Duration::ZERO);
        Self { peer, machine: None, fault, operator, step, rank, waited_for, waited, cause: None }
    }

    /// Rank `peer` is unusable for reason `fault` while `rank` joins or exchanges messages outside operators.
    pub fn joining(
        rank: Rank,
        peer: Rank,
        fault: PeerFault,
        waited_for: impl Into<String>,
        waited: Duration,
    ) -> Self {
        let (operator, waited_for) = (Operator::Join, waited_for.into());
        Self { peer, machine: None, fault, operator, step: 0, rank, waited_for, waited, cause: None }
    }
}

/// Why a peer is unusable.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
#[non_exhaustive]
pub enum PeerFault {
    /// The peer's process ended without a message.
    Died = 0,
    /// The peer dropped its buffer while other ranks still needed it.
    Left = 1,
    /// The peer is inside an operator and made no progress within
    /// [`Config::stall_timeout`](crate::Config::stall_timeout), or its heartbeat was silent for as long.
    Stalled = 2,
    /// The peer is alive but did not enter the operator within [`Config::timeout`](crate::Config::timeout).
    Late = 5,
    /// The peer's own operator failed.
    Failed = 3,
    /// The peer sent, or wrote to shared memory, what no correct peer sends or writes: the peer runs a different version of the
    /// library, or its memory was damaged.
    Broken = 6,
    /// The peer never joined the rendezvous.
    Absent = 4,
    /// The network does not reach the peer's machine, or that machine is down.
    Unreachable = 7,
}

impl PeerFault {
    /// All faults.
    pub const ALL: [Self; 8] = [
        Self::Died,
        Self::Left,
        Self::Stalled,
        Self::Failed,
        Self::Absent,
        Self::Late,
        Self::Broken,
        Self::Unreachable,
    ];

    /// The number that represents the fault in messages and in shared memory.
    pub fn code(self) -> u8 {
        self as u8
    }

    /// The fault with this [`code`](Self::code). Any other number is treated as [`Failed`](Self::Failed): a later version
    /// may have further faults.
    pub fn from_code(code: u32) -> Self {
        Self::ALL.into_iter().find(|fault| u32::from(fault.code()) == code).unwrap_or(Self::Failed)
    }

    /// The fault of a peer whose socket returned `error`. A timeout of the socket means that the peer stalled.
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
            Self::Late => "is late",
            Self::Failed => "failed",
            Self::Broken => "broke the protocol",
            Self::Absent => "never joined",
            Self::Unreachable => "is unreachable",
        })
    }
}

#[cfg(test)]
mod tests {
    use std::io::ErrorKind;

    use super::*;

    #[test]
    fn the_error_of_a_broken_protocol_says_what_was_found() {
        let error = PeerError::broken(Rank(0), Rank(1), Operator::Dispatch, 7, "an invalid ring");
        let text = "rank 1 broke the protocol (dispatch #7): rank 0 found an invalid ring";
        assert_eq!(error.to_string(), text);
    }

    #[test]
    fn the_error_of_a_lost_peer_says_where_its_reason_may_be_found() {
        let error = PeerError::joining(Rank(0), Rank(1), PeerFault::Left, "a reply", Duration::ZERO);
        assert!(error.to_string().ends_with("made fewer calls than the others: see its output"), "{error}");
        let died = PeerError { fault: PeerFault::Died, ..error.clone() };
        assert!(died.to_string().ends_with("see its output and the system's log"), "{died}");
        let reducing = PeerError { operator: Operator::Reduce, ..died };
        assert!(
            reducing.to_string().contains("was killed (gloo aborts a process whose collective call differs"),
            "{reducing}"
        );
        let told = PeerError { cause: Some("no memory".into()), ..error };
        assert!(told.to_string().ends_with("was waiting for a reply; its error: no memory"), "{told}");
    }

    #[test]
    fn what_is_no_call_has_no_number() {
        let joining = PeerError::joining(Rank(0), Rank(1), PeerFault::Stalled, "a reply", Duration::ZERO);
        assert!(joining.to_string().starts_with("rank 1 stalled (join): rank 0 was waiting"), "{joining}");
        let sharing = Error::from(joining).while_sharing_memory();
        assert!(
            sharing.to_string().starts_with("rank 1 stalled (sharing memory): rank 0 was waiting"),
            "{sharing}"
        );
        let other = Error::from(CallerError::Topology("no ranks".into()));
        assert_eq!(other.clone().while_sharing_memory(), other);
    }

    #[test]
    fn the_error_of_a_peer_on_another_machine_names_the_machine() {
        let error = PeerError::broken(Rank(0), Rank(1), Operator::Dispatch, 7, "an invalid ring");
        let error = PeerError { machine: Some("node-b".into()), fault: PeerFault::Unreachable, ..error };
        assert!(error.to_string().starts_with("rank 1 on node-b is unreachable (dispatch #7)"), "{error}");
    }

    #[test]
    fn the_error_of_a_socket_gives_the_fault_of_its_peer() {
        assert_eq!(PeerFault::of_socket(&ErrorKind::UnexpectedEof.into()), PeerFault::Died);
        assert_eq!(PeerFault::of_socket(&ErrorKind::BrokenPipe.into()), PeerFault::Died);
        assert_eq!(PeerFault::of_socket(&ErrorKind::WouldBlock.into()), PeerFault::Stalled);
    }
}
