//! Codecs for the expert weights and gradients that travel between datacenters.
//!
//! A sender encodes each expert as one *stream* of bytes per step, and receivers decode the stream into their replica
//! of the expert, or add it to a sum of gradients. P is the number of elements of an expert, `d` the density; `absmax`
//! is the largest magnitude. All arithmetic is in f32; `round` rounds to the type of the elements, bf16 or f32, to
//! nearest, ties to even.
//!
//! | codec | of | bytes per element | what receivers hold |
//! |---|---|---|---|
//! | `exact` | weights, gradients | 4 (f32), 2 (bf16) | the sender's bits |
//! | `int8` | weights, gradients | 1.03 | `code * scale`, with 255 codes and `scale = absmax / 127` for each block of 128 |
//! | `delta:d` | weights | 0.019 at d = 1 %, 0.16 at 10 % | the *mirror*: `mirror = round(mirror + bf16(w - mirror))` at the `d P` largest differences |
//! | `shared:d` | weights | 0.019 at d = 1 %, 0.16 at 10 % | `round(shared + bf16(w - shared))` at the `d P` largest differences, the shared expert elsewhere |
//! | `topk:d` | gradients | 0.016 at d = 1 %, 0.15 at 10 % | `bf16(x)` for the `d P` largest x, 0 elsewhere |
//!
//! Sizes of `delta`, `shared` and `topk` are those of Gaussian data. Every stream has 40 bytes more.
//!
//! - [`WeightEncoder`] and [`WeightDecoder`] handle weights. With [`WeightCodec::Delta`] the encoder keeps the mirror,
//!   which has the same bits as every replica, so what one stream leaves out can be in a later one. The first streams
//!   are `int8`.
//! - [`GradientEncoder`] and [`add_gradient`] handle gradients. `int8` and `topk` have *error feedback*: `x = gradient
//!   + carry`, and afterwards `carry = x - value`.
//! - A stream has a checksum, and a *fingerprint* of what it decodes to. A stream of changes names the fingerprint of
//!   the weights that it changes, and the decoder refuses it for other weights.
//! - Damaged bytes give a [`Corruption`], never a panic, and an error leaves replicas and sums unchanged.
//! - NaN and infinity are refused, with their index, by all codecs but `exact`.
//! - Functions run on the threads of the current rayon pool. Results have the same bits for any number of threads. If
//!   rayon cannot start the threads of its global pool, functions run on the calling thread alone.
//! - [`residual`] has the parts of `shared` with all formats.
//!
//! ```
//! use ep_codec::{GradientEncoder, WeightDecoder, WeightEncoder, add_gradient};
//!
//! // The owner of an expert sends its weights, the holder of a replica decodes them.
//! let mut encoder = WeightEncoder::new("delta:0.25".parse()?, 4)?;
//! let mut decoder = WeightDecoder::new(4);
//! let mut replica = [0.0_f32; 4];
//! for weights in [[127.0, 2.0, 3.0, -1.0], [127.0, 9.5, 3.0, -1.5], [127.0, 9.5, 3.0, -1.5]] {
//!     let mut bytes = Vec::new();
//!     encoder.encode(&weights, None, &mut bytes)?;
//!     decoder.decode(&bytes, None, &mut replica)?;
//!     assert_eq!(encoder.mirror(), Some(&replica[..]));
//! }
//! // The second stream changed 2 to 9.5, the third -1 to -1.5.
//! assert_eq!(replica, [127.0, 9.5, 3.0, -1.5]);
//!
//! // The holder returns a gradient. What the stream leaves out is added to the next one.
//! let mut gradients = GradientEncoder::new("topk:0.25".parse()?, 4)?;
//! let (mut bytes, mut sum) = (Vec::new(), [1.0; 4]);
//! gradients.encode(&[0.5_f32, -4.0, 0.0, 0.0], &mut bytes)?;
//! add_gradient(&bytes, &mut sum)?;
//! assert_eq!((sum, gradients.carry()), ([1.0, -3.0, 1.0, 1.0], &[0.5, 0.0, 0.0, 0.0][..]));
//! # Ok::<(), Box<dyn std::error::Error>>(())
//! ```

#![forbid(unsafe_code)]

#[cfg(target_endian = "big")]
compile_error!("streams are little-endian and are written by copying memory");

mod codec;
mod content;
#[cfg(test)]
mod damage_tests;
mod error;
mod gradient;
mod hash;
mod int8;
mod parallel;
mod place;
pub mod residual;
mod shared;
mod state;
mod stream;
#[cfg(test)]
mod tests;
mod weight;
mod weight_decoder;
mod weight_encoder;

pub use codec::{CodecParseError, GradientCodec, WeightCodec};
pub use content::{Content, StreamCodec};
pub use error::{CallerError, Corruption, Error, Operand, Result};
pub use gradient::{GradientEncoder, add_gradient, add_gradient_in};
pub use hash::xxh64;
pub use place::{Host, Place, copy_bytes, in_main_memory};
pub use shared::SharedExpert;
#[cfg(feature = "fuzzing")]
#[doc(hidden)]
pub use state::reseal_state;
#[cfg(any(test, feature = "fuzzing"))]
#[doc(hidden)]
pub use stream::reseal;
pub use stream::{HEADER_BYTES, StreamInfo, inspect};
pub use weight::Weight;
pub use weight_decoder::WeightDecoder;
pub use weight_encoder::WeightEncoder;
