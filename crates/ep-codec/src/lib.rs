//! Codecs: what travels instead of expert weights and gradients between datacenters.

#![forbid(unsafe_code)]

#[cfg(target_endian = "big")]
compile_error!("streams are little-endian and are written by copying memory");

mod codec;
mod error;
mod gradient;
mod hash;
mod int8;
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
pub use error::{CallerError, Corruption, Error, Operand, Result};
pub use gradient::{GradientEncoder, add_gradient};
pub use hash::xxh64;
pub use shared::SharedExpert;
#[cfg(feature = "fuzzing")]
#[doc(hidden)]
pub use state::reseal_state;
#[cfg(feature = "fuzzing")]
#[doc(hidden)]
pub use stream::reseal;
pub use stream::{Content, HEADER_BYTES, StreamCodec, StreamInfo, inspect};
pub use weight::Weight;
pub use weight_decoder::WeightDecoder;
pub use weight_encoder::WeightEncoder;
