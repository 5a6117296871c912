//! Errors of the codec: wrong arguments of the caller, or damaged bytes.

use std::fmt;

use ep::Element;

/// The result type of the codec's fallible functions.
pub type Result<T, E = Error> = std::result::Result<T, E>;

/// An error of the codec.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
#[non_exhaustive]
pub enum Error {
    /// The caller's arguments are wrong. Fix the call, or the weights.
    #[error("{0}")]
    Caller(#[from] CallerError),
    /// No encoder wrote these bytes, or they changed in transit. Send them again.
    #[error("corrupted residual: {0}")]
    Corrupted(#[from] Corruption),
}

/// The caller's arguments are wrong.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
#[non_exhaustive]
pub enum CallerError {
    /// The list of experts is empty.
    #[error("a shared expert is the mean of at least one expert")]
    NoExperts,
    /// Two arguments that must have equal lengths do not.
    #[error("{what}: expected {expected} weights, found {found}")]
    Length {
        /// Which argument.
        what: Operand,
        /// The length that the other arguments require, weights.
        expected: usize,
        /// The length that was given, weights.
        found: usize,
    },
    /// The expert has more weights than a 32-bit index can number.
    #[error("an expert of {0} weights: at most {max} can be indexed", max = u32::MAX)]
    TooLong(usize),
    /// `k` exceeds the number of residuals.
    #[error("k = {k} of {elements} residuals cannot be kept; k must be at most {elements}")]
    TooManyKept {
        /// Residuals to keep.
        k: usize,
        /// Weights of an expert, and thus residuals.
        elements: usize,
    },
    /// A value is NaN or infinite. The index is the lowest index of such a value.
    #[error("{what} is not finite at index {index}")]
    NotFinite {
        /// The values that were checked.
        what: Operand,
        /// Index of the weight.
        index: usize,
    },
    /// The stream and the arguments have different weight types.
    #[error("a residual of {stream:?} weights cannot be added to {given:?} weights")]
    Element {
        /// The type that the stream was encoded from.
        stream: Element,
        /// The type of the arguments.
        given: Element,
    },
    /// The stream was encoded against another shared expert, for instance that of an earlier step.
    #[error(
        "the stream was encoded against the shared expert {stream:016x}, but the caller gave {given:016x}; decode with \
         the shared expert of the same step"
    )]
    OtherShared {
        /// Fingerprint in the stream.
        stream: u64,
        /// Fingerprint of the shared expert that was given.
        given: u64,
    },
}

/// The argument or intermediate value that an error is about.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
#[non_exhaustive]
pub enum Operand {
    /// The expert with this index in the list that the mean is taken of.
    ExpertOfMean(usize),
    /// The mean of the experts: their f32 sum overflowed.
    Mean,
    /// The shared expert.
    Shared,
    /// The expert to encode.
    Expert,
    /// The residual expert - shared: the difference of finite weights overflowed.
    Residual,
    /// A kept residual in its value format, or its sum with the shared expert: rounding overflowed.
    Rounded,
    /// The slice for the decoded weights.
    Output,
}

impl fmt::Display for Operand {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::ExpertOfMean(place) => write!(f, "expert {place}"),
            Self::Mean => f.write_str("the mean of the experts"),
            Self::Shared => f.write_str("the shared expert"),
            Self::Expert => f.write_str("the expert"),
            Self::Residual => f.write_str("expert - shared"),
            Self::Rounded => f.write_str("the rounded residual, or its sum with the shared expert,"),
            Self::Output => f.write_str("the output"),
        }
    }
}

/// The defect of a damaged stream.
#[derive(Debug, Clone, Copy, PartialEq, Eq, thiserror::Error)]
#[non_exhaustive]
pub enum Corruption {
    /// The stream ends early.
    #[error("the stream ends after {found} bytes, but needs at least {needed}")]
    Truncated {
        /// Bytes that the part read so far requires.
        needed: u64,
        /// Bytes that were given.
        found: u64,
    },
    /// Bytes follow the end of the stream.
    #[error("{found} bytes were given, but the stream has {expected}")]
    TrailingBytes {
        /// Bytes of the stream, by its header.
        expected: u64,
        /// Bytes that were given.
        found: u64,
    },
    /// The bytes do not start with the magic number of a residual stream.
    #[error("the bytes do not start with a residual stream")]
    Magic,
    /// The stream has a version of the format that this library does not know.
    #[error("unknown format version {0}")]
    Version(u8),
    /// A code in the header has no meaning.
    #[error("unknown {field} code {code}")]
    Code {
        /// The header's field.
        field: &'static str,
        /// The value of the field.
        code: u8,
    },
    /// The bytes are not those that the encoder wrote.
    #[error("checksum {found:016x} does not match the header's {expected:016x}")]
    Checksum {
        /// The checksum in the header.
        expected: u64,
        /// The checksum of the bytes.
        found: u64,
    },
    /// The sections do not fill the payload exactly, or their counts do not add up.
    #[error("the sizes of the payload's sections do not agree")]
    Sections,
    /// The indices of a block are not strictly increasing, not inside the block, or not a valid code.
    #[error("the indices of block {block} are invalid")]
    Indices {
        /// Number of the block.
        block: usize,
    },
    /// The values of a block are not a valid code, or not finite.
    #[error("the values of block {block} are invalid")]
    Values {
        /// Number of the block.
        block: usize,
    },
}
