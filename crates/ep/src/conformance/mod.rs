//! The cases that every backend must pass, and the check of one rank against the oracle.
//!
//! A case runs SPMD: every rank - a thread or a process - calls [`Prepared::check`] with its own backend.
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
//! Inputs and expectations follow from the case alone, so processes need not exchange them: threads share one
//! [`Prepared`], each process makes its own. A difference from the oracle does not stop a rank, which would leave its
//! peers waiting; it goes through the whole case and then reports the first one. An error of the backend does stop
//! it; drop the backend then, and the peers are told.
//!
//! A case has a backend of its own. A [`Soak`] is a sequence of cases in one world for backends that live through all
//! of them, and for handles that are used again after others.
//!
//! [`check_misuse`] makes the calls that every backend must refuse, on all ranks alike.

mod case;
mod check;
mod failure;
mod inputs;
mod misuse;
mod prepared;
mod random;
mod soak;
mod suite;
#[cfg(test)]
mod tests;
mod weigh;

pub use case::{CapacityKind, Case, ProbsKind, RoutingKind};
pub use failure::{Difference, Failure, Place, Problem};
pub use misuse::check_misuse;
pub use prepared::Prepared;
pub use random::random_case;
pub use soak::{Iteration, Soak, Soaking};
pub use suite::suite;
