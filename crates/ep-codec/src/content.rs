//! The content of a stream, weights or gradients, and the codec that wrote it.

use std::fmt;

/// What the elements of a stream are.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
#[non_exhaustive]
pub enum Content {
    /// Weights of an expert.
    Weights,
    /// Gradients of an expert's weights.
    Gradients,
}

impl fmt::Display for Content {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(match self {
            Self::Weights => "weights",
            Self::Gradients => "gradients",
        })
    }
}

/// The codec of one stream. A sender with [`WeightCodec::Delta`](crate::WeightCodec::Delta) writes `Int8` streams
/// while it warms up, and `Delta` streams afterwards.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
#[non_exhaustive]
pub enum StreamCodec {
    /// The elements as they are.
    Exact,
    /// 8 bits per element, and a scale per block.
    Int8,
    /// The largest changes to the weights that receivers hold after earlier streams.
    Delta,
    /// The largest differences from a shared expert.
    Shared,
    /// The largest gradients.
    TopK,
    /// The weights that receivers hold after earlier streams, as they are in memory: for a receiver that does not hold
    /// them.
    Mirror,
}

impl StreamCodec {
    /// Whether the stream consists of residuals at some of the indices.
    pub fn is_sparse(self) -> bool {
        matches!(self, Self::Delta | Self::Shared | Self::TopK)
    }

    /// Whether the stream changes weights that the receiver must hold.
    pub fn has_base(self) -> bool {
        matches!(self, Self::Delta | Self::Shared)
    }
}
