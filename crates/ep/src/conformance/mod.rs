//! The test cases that every backend must pass, and the comparison of one rank's results with the oracle.
//!
//! A case runs SPMD: every rank, a thread or a process, calls [`Prepared::check`] with its own backend.
//!
//! ```
//! use ep::conformance::{random_case, suite, Prepared};
//!
//! let prepared: Prepared = suite()[0].prepare()?;
//! // On every rank of `prepared.world()`: prepared.check(&mut backend)?
//! # assert!(random_case(7, 4, 2).prepare().is_ok());
//! # Ok::<(), ep::Error>(())
//! ```
//!
//! Inputs and expected results follow from the case alone, so ranks need not exchange them: threads share one
//! [`Prepared`], and each process makes its own. A difference from the oracle does not stop a rank, because its peers
//! would wait for it: the rank completes the case and then reports the first difference. An error of the backend stops
//! the rank. Drop the backend then, so that its peers learn of the failure.
//!
//! Each case uses a new backend. A [`Soak`] is a sequence of cases in one world for long-lived backends, with handles
//! that are reused in later cases.
//!
//! [`check_misuse`] makes, on all ranks, the invalid calls that every backend must reject.

mod case;
mod check;
mod failure;
mod inputs;
mod misuse;
mod on_device;
mod prepared;
mod random;
mod soak;
mod suite;
#[cfg(test)]
mod tests;
mod transport;
mod weigh;

pub use case::{CapacityKind, Case, ProbsKind, RoutingKind};
pub use failure::{Difference, Failure, Place, Problem};
pub use misuse::check_misuse;
pub use prepared::Prepared;
pub use random::random_case;
pub use soak::{Iteration, Soak, Soaking};
pub use suite::suite;
pub use transport::{
    End, Reordering, TRANSPORT_LIMITS, TransportFailure, WindowAccess, check_transport,
    transport_window_bytes,
};
