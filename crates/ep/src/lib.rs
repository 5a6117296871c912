//! Expert-parallel communication for mixture-of-experts models: the core crate.
//!
//! In expert parallelism the experts of a layer are spread over many ranks (processes or GPUs). A communicator has
//! three collective operators:
//!
//! * *preprocess* turns each rank's [`Routing`] (which token goes to which experts) into a handle;
//! * *dispatch* sends each token to the ranks that hold its experts;
//! * *combine* sends the experts' output rows back and sums them for each token.
//!
//! This crate defines the interface of the operators ([`Backend`]), their results bit for bit ([`oracle`],
//! [`numeric`]), and how the ranks of a job find and authenticate each other ([`join`]). Other crates implement
//! [`Backend`] on CPUs and GPUs. This crate has no unsafe code and no native dependency.
//!
//! The path of a token, for one source rank and two NVLink domains:
//!
//! ```text
//!  Routing ──▶ Counts ──exchange──▶ DispatchLayout: the final row of every copy, known to the sender
//!                                        │
//!            source rank (domain 0)      ▼                    rank on the same rail (domain 1)
//!   dispatch  token ──▶ row on every rank of domain 0
//!                 └──── one copy + row numbers ──Transport──▶ row on every rank of domain 1
//!
//!   combine   token ◀── sum over the ranks of domain 0
//!                 ◀──── one domain sum ──────────Transport─── sum over the ranks of domain 1
//! ```
//!
//! Where to start reading:
//!
//! * [`topology`]: ranks, NVLink domains, rails, and which rank holds which expert;
//! * [`layout`]: how the final row of each copy follows from the routing;
//! * [`backend`]: the operators and their arguments;
//! * [`oracle`]: the operators written from their definition.
//!
//! # Examples
//!
//! The rows that two ranks with two experts each receive:
//!
//! ```
//! use ep::layout::receive_shape;
//! use ep::{Counts, DispatchMode, Rank, Routing, World};
//!
//! // Rank 0 holds experts 0 and 1, rank 1 holds experts 2 and 3.
//! let world = World::builder().ranks(2).experts(4).build()?;
//! let mode = DispatchMode::permuted(4)?;
//! // Rank 0 has two tokens and rank 1 has one. Each token chooses two experts.
//! let routings = [
//!     Routing::from_topk(Rank(0), 4, 2, &[0, 2, 2, 3], &[0.5; 4])?,
//!     Routing::from_topk(Rank(1), 4, 2, &[1, 2], &[0.5; 2])?,
//! ];
//! let counts: Vec<Counts> =
//!     routings.iter().map(|routing| Counts::of(&world, routing, mode, None)).collect::<ep::Result<_>>()?;
//!
//! let shape = receive_shape(&world, Rank(1), &counts)?;
//! assert_eq!(shape.kept_per_expert, [3, 1]);
//! // Each group is padded to a multiple of 4 rows.
//! assert_eq!((shape.first_row, shape.rows), (vec![0, 4], 8));
//! # Ok::<(), ep::Error>(())
//! ```

#![forbid(unsafe_code)]

pub mod affinity;
mod available;
pub mod backend;
pub mod call;
pub mod config;
#[cfg(feature = "conformance")]
pub mod conformance;
pub mod device;
pub mod error;
pub mod interrupt;
pub mod join;
pub mod layout;
pub mod numeric;
pub mod oracle;
mod pace;
pub mod routing;
mod settings;
pub mod size;
mod tell;
pub mod topology;
pub mod trace;
pub mod transport;
pub mod weight;
pub mod workload;

pub use available::available_memory;
pub use backend::{
    Backend, BackendExt, CombineInput, CombineOutput, Combined, DispatchInput, DispatchMode, DispatchOutput,
    Dispatched, Element, HandleShape, Probs, TokenFormat, Traffic,
};
pub use config::{Config, CudaConfig, CudaEnv, HostConfig};
pub use device::{DeviceReport, DeviceRouting, Indices};
pub use error::{CallerError, EnvironmentError, Error, Operator, PeerError, PeerFault, Result};
pub use interrupt::Interrupt;
pub use layout::{Counts, DispatchLayout, ReceiveShape};
pub use numeric::ScaleFormat;
pub use pace::{Copier, Pace};
pub use routing::Routing;
pub use size::Size;
pub use tell::tell;
pub use topology::{ExpertPlacement, Rank, Topology, World};
pub use transport::{
    GpuPart, Limits, Posted, Put, Rail, Signal, TrafficClass, Transport, TransportOptions, Unconnected,
    Window,
};
pub use weight::{WeightGradients, WeightRows, WeightedRows};
