//! Top-k residuals: the entropy-coded streams of `Delta`, `Shared` and `TopK`, and SR compression with any format.
//!
//! Every rank holds the shared expert. An expert that moves between datacenters is sent as its largest differences from
//! the shared expert. Source: arXiv 2510.19470 ("HybridEP: Scaling Expert Parallelism to Cross-Datacenter Scenario via
//! Hybrid Expert/Data Transmission"), parameter-efficient migration. For N experts of P weights each, with all
//! arithmetic in f32:
//!
//! ```text
//!  shared   [P] = round((expert 0 + expert 1 + ... + expert N-1) / N)      computed once, held by every rank
//!  residual [P] = expert - shared
//!  kept         = the k residuals of largest magnitude; of equal magnitudes, those of lower index
//!  decoded  [P] = round(shared + residual) where kept, shared elsewhere
//! ```
//!
//! `round` rounds to the type of the weights, bf16 or f32, to nearest, ties to even (see [`ep::numeric`]). The squared
//! error, `sum (expert - decoded)^2`, is the sum of the squares of the dropped residuals, apart from the rounding of
//! the kept ones.
//!
//! ```
//! use ep_codec::SharedExpert;
//! use ep_codec::residual::{Encoder, Format, Selection, decode_add};
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
//! # Ok::<(), ep_codec::Error>(())
//! ```
//!
//! - [`Format::max_bytes`] gives the size of a stream before it is encoded: an upper bound, or the exact size.
//! - A stream holds the fingerprint of its shared expert. Decoding against another shared expert, for instance that of
//!   a different step, returns an error, not a wrong expert.
//! - A stream has a checksum. [`decode_add`] panics for no input bytes.
//! - Several streams may follow each other in one message. [`inspect`](crate::inspect) says where the next stream starts.
//! - Functions run on the threads of the current rayon pool. Their results have the same bits for any number of
//!   threads.

mod decode;
mod encode;
mod entries;
mod format;
mod rice;
mod sections;
mod select;
#[cfg(test)]
mod tests;

pub use decode::decode_add;
pub(crate) use decode::{check_element, read, read_onto, read_onto_shared};
pub use encode::{Encoder, Stats};
pub(crate) use encode::{append, round_onto, round_saturating};
pub use entries::Entries;
pub(crate) use entries::{add, add_onto, subtract};
pub use format::{BLOCK, Format, IndexFormat, ValueFormat};
pub use select::Selection;
pub(crate) use select::{Selected, select, superset};
