//! The migration of experts between datacenters: weights travel from owners to replicas, gradients travel back.
//!
//! The ranks of an *expert domain* gather each other's experts, so that tokens need not leave the datacenter. Each expert
//! has one *owner*, which has its true weights and its optimizer state. The other ranks of the domain hold *replicas*. Source
//! of the method: arXiv 2510.19470 (HybridEP). `docs/migration.md` describes the design.
//!
//! ```text
//!  owner                                  other ranks of the domain
//!
//!  optimizer step
//!     │ publish ── encode ── message ──▶  gather ── decode ──▶ replica
//!     │                                                          │  forward, backward
//!     ▼                                                          ▼
//!  reduce_gradients ◀── add ◀── message ── encode ── send_gradients
//! ```
//!
//! ```
//! use ep::Rank;
//! use ep_codec::{GradientCodec, WeightCodec};
//! use ep_migrate::{Domain, LocalNetwork, Migration, Settings, Shape};
//!
//! # fn main() -> ep::Result<()> {
//! // Two ranks with one expert of four weights each, and one layer.
//! let network = LocalNetwork::new();
//! let start = |rank| {
//!     let shape = Shape { experts_per_rank: 1, expert_elements: vec![4] };
//!     let codecs = (WeightCodec::Exact, GradientCodec::Exact);
//!     let settings = Settings { weights: codecs.0, gradients: codecs.1, ..Settings::default() };
//!     let domain = Domain::new(rank, &[Rank(0), Rank(1)])?;
//!     Migration::<f32>::new(domain, shape, settings, Box::new(network.carrier(rank)))
//! };
//! let (zero, one) = (start(Rank(0))?, start(Rank(1))?);
//!
//! zero.publish(0, &[1.0, 2.0, 3.0, 4.0])?;
//! one.publish(0, &[5.0, 6.0, 7.0, 8.0])?;
//! let mut replica = [0.0; 4];
//! zero.gather(0, &mut replica)?;
//! assert_eq!(replica, [5.0, 6.0, 7.0, 8.0]);
//!
//! zero.send_gradients(0, &[0.5; 4])?; // of rank 1's expert
//! one.send_gradients(0, &[0.25; 4])?; // of rank 0's expert
//! let mut sum = [0.0; 4];
//! one.reduce_gradients(0, &[1.0; 4], &mut sum)?;
//! assert_eq!(sum, [1.5; 4]);
//! # std::thread::scope(|threads| { threads.spawn(|| zero.close()); one.close() });
//! # Ok(())
//! # }
//! ```
//!
//! - A [`Carrier`] moves messages. The crate has one between threads, [`LocalNetwork`]; the crate `ep-carrier` has one over
//!   the engines of rails, and the Python package one over `torch.distributed`.
//! - Codecs are those of [`ep_codec`].
//! - Errors name the rank at fault. Every wait ends within [`Settings::timeout`].

#![forbid(unsafe_code)]

mod bodies;
mod carrier;
#[cfg(any(test, feature = "conformance"))]
pub mod conformance;
mod dense;
#[cfg(feature = "fuzzing")]
#[doc(hidden)]
pub mod fuzzing;
mod header;
mod inbox;
mod local;
mod migration;
mod owned;
mod post;
mod question;
mod replicas;
mod settings;
mod state;
#[cfg(test)]
mod tests;
mod threads;

pub use carrier::{Carrier, CarrierError, Lane, Receiving, Sending};
pub use dense::{Bucket, Datacenters, DenseReduction, DenseSettings, DenseTraffic, Turn};
pub use header::HEADER_BYTES;
pub use inbox::Traffic;
pub use local::{LocalCarrier, LocalNetwork};
pub use migration::{Migration, Stats};
pub use settings::{Domain, Settings, Shape};
