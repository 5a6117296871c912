//! Expert-parallel communication for mixture-of-experts models: the core.
//!
//! This crate defines what the operators mean; backends make them fast. It has no unsafe code and no native
//! dependency. The way of a token, for one source rank and two NVLink domains:
//!
//! ```text
//!  Routing ──▶ Counts ──exchange──▶ DispatchLayout: the final row of every copy, known to the sender
//!                                        │
//!            source rank (domain 0)      ▼                    rank on the same rail (domain 1)
//!   dispatch  token ──▶ row on every rank of domain 0
//!                 └──── one copy + row numbers ──Transport──▶ row on every rank of domain 1
//!
//!   combine   token ◀── sum over the ranks of domain 0
//!                 ◀──── one partial sum ─────────Transport─── sum over the ranks of domain 1
//! ```
//!
//! Start at [`layout`] for "where does a token go", at [`backend`] for the operators' interface, and at [`oracle`]
//! for their meaning to the last bit.

#![forbid(unsafe_code)]

pub mod backend;
pub mod call;
pub mod config;
#[cfg(feature = "conformance")]
pub mod conformance;
pub mod error;
pub mod layout;
pub mod numeric;
pub mod oracle;
pub mod rendezvous;
pub mod routing;
pub mod topology;
pub mod trace;
pub mod weight;
pub mod workload;

pub use backend::{
    Backend, BackendExt, CombineInput, CombineOutput, Combined, DispatchInput, DispatchMode, DispatchOutput,
    Element, Posted, Probs, Put, TokenFormat, Traffic, Transport,
};
pub use config::{Config, CudaEnv};
pub use error::{CallerError, EnvironmentError, Error, Operator, PeerError, PeerFault, Result};
pub use layout::{Counts, DispatchLayout, ReceiveShape};
pub use numeric::ScaleFormat;
pub use routing::Routing;
pub use topology::{ExpertPlacement, Rank, Topology, World};
pub use weight::{WeightGradients, WeightRows, WeightedRows};
