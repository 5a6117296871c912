//! Experts in few bytes: a shared expert, and the k largest residuals against it (SR compression).
//!
//! Experts that move between datacenters are sent as what sets them apart. Source: arXiv 2510.19470 ("HybridEP:
//! Scaling Expert Parallelism to Cross-Datacenter Scenario via Hybrid Expert/Data Transmission"), parameter-efficient
//! migration. For N experts of P weights each, with all arithmetic in f32:
//!
//! ```text
//!  shared   [P] = round((expert 0 + expert 1 + ... + expert N-1) / N)      once, held by every rank
//!  residual [P] = expert - shared
//!  kept         = the k of largest magnitude, of equal ones those of lower index
//!  decoded  [P] = round(shared + residual) where kept, shared elsewhere
//! ```
//!
//! `round` is to the weights' type, bf16 or f32, to nearest, ties to even (see [`ep::numeric`]). The square of the
//! error, `sum (expert - decoded)^2`, is that of the residuals that were not kept, but for the rounding of kept ones.
//!
//! ```
//! use ep_plan::residual::{Encoder, Format, Selection, SharedExpert, decode_add};
//!
//! let experts = [[1.0_f32, 2.0, 3.0, 4.0], [1.0, 2.5, 3.0, 0.0]];
//! let shared = SharedExpert::mean_of(&[&experts[0], &experts[1]])?;
//! assert_eq!(shared.weights(), [1.0, 2.25, 3.0, 2.0]);
//!
//! let encoder = Encoder { k: 1, selection: Selection::Exact, format: Format::SMALLEST };
//! let mut bytes = Vec::new();
//! let stats = encoder.encode(&experts[0], &shared, &mut bytes)?;
//! assert_eq!((stats.kept, stats.bytes, stats.smallest), (1, bytes.len(), Some(2.0)));
//!
//! let mut decoded = [0.0; 4];
//! decode_add(&bytes, &shared, &mut decoded)?;
//! assert_eq!(decoded, [1.0, 2.25, 3.0, 4.0]);
//! # Ok::<(), ep_plan::residual::Error>(())
//! ```
//!
//! [`Format`] says beforehand how many bytes a stream has, at most or exactly. A stream names its shared expert by a
//! fingerprint, so that one of another step is an error and not a wrong expert; it has a checksum, and no bytes at all
//! make [`decode_add`] panic. Streams can follow each other in one message: [`inspect`] says where the next one starts.
//!
//! Everything runs on the threads of the current rayon pool, and every result has the same bits for any number of them.

mod decode;
mod encode;
mod error;
mod format;
mod hash;
mod rice;
mod select;
mod shared;
mod stream;
#[cfg(test)]
mod tests;
mod weight;

pub use decode::decode_add;
pub use encode::{Encoder, Stats};
pub use error::{CallerError, Corruption, Error, Operand, Result};
pub use format::{BLOCK, Format, HEADER_BYTES, IndexFormat, ValueFormat};
pub use select::Selection;
pub use shared::SharedExpert;
pub use stream::{StreamInfo, inspect};
pub use weight::Weight;
