//! Errors of the codec, by whose fault they are: the caller's, or that of damaged bytes.

use std::fmt;

use ep::Element;

/// What every fallible function of the codec returns.
pub type Result<T, E = Error> = std::result::Result<T, E>;

/// An error, by whose fault it is.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
#[non_exhaustive]
pub enum Error {
    /// Arguments that cannot be served. Fix the call, or the weights.
    #[error("{0}")]
    Caller(#[from] CallerError),
    /// Bytes that no encoder wrote, or that changed on their way. Send them again.
    #[error("corrupted residual: {0}")]
    Corrupted(#[from] Corruption),
}

/// Arguments that cannot be served.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
#[non_exhaustive]
pub enum CallerError {
    /// The mean of no experts.
    #[error("a shared expert is the mean of at least one expert")]
    NoExperts,
    /// Two arguments that must be of one length are not.
    #[error("{what}: expected {expected} weights, found {found}")]
    Length {
        /// Which argument.
        what: Operand,
        /// The length that the other arguments ask for, weights.
        expected: usize,
        /// The length that was given, weights.
        found: usize,
    },
    /// More weights than a 32-bit index can name.
    #[error("an expert of {0} weights: at most {max} can be indexed", max = u32::MAX)]
    TooLong(usize),
    /// More residuals to keep than there are.
    #[error("k = {k} of {elements} residuals cannot be kept")]
    TooManyKept {
        /// Residuals to keep.
        k: usize,
        /// Weights of an expert.
        elements: usize,
    },
    /// A NaN or an infinity; the index is the lowest at which there is one.
    #[error("{what} is not finite at index {index}")]
    NotFinite {
        /// Where it was found.
        what: Operand,
        /// Index of the weight.
        index: usize,
    },
    /// The stream is for weights of another type.
    #[error("a residual of {stream:?} weights cannot be added to {given:?} weights")]
    Element {
        /// The type that the stream was encoded from.
        stream: Element,
        /// The type of the arguments.
        given: Element,
    },
    /// The stream was encoded against another shared expert, for instance that of an earlier step.
    #[error("encoded against the shared expert {stream:016x}, but given {given:016x}")]
    OtherShared {
        /// Fingerprint that the stream names.
        stream: u64,
        /// Fingerprint of the shared expert that was given.
        given: u64,
    },
}

/// What an error is about.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
#[non_exhaustive]
pub enum Operand {
    /// The expert at this place of the list that the mean is taken of.
    ExpertOfMean(usize),
    /// The mean of the experts (their f32 sum overflowed).
    Mean,
    /// The shared expert.
    Shared,
    /// The expert to encode.
    Expert,
    /// Expert - shared, of finite operands (it overflowed).
    Residual,
    /// A kept residual in its value format, or its sum with the shared expert (it overflowed in rounding).
    Rounded,
    /// Where the decoded weights go.
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

/// What is wrong with the bytes of a stream.
#[derive(Debug, Clone, Copy, PartialEq, Eq, thiserror::Error)]
#[non_exhaustive]
pub enum Corruption {
    /// The stream ends early.
    #[error("{found} bytes of at least {needed}")]
    Truncated {
        /// Bytes that the part read so far asks for.
        needed: u64,
        /// Bytes that are there.
        found: u64,
    },
    /// Bytes follow the end of the stream.
    #[error("{found} bytes where the stream has {expected}")]
    TrailingBytes {
        /// Bytes of the stream, by its header.
        expected: u64,
        /// Bytes that are there.
        found: u64,
    },
    /// These bytes are not the start of a residual stream.
    #[error("no residual stream starts here")]
    Magic,
    /// Written by a version of the format that this library does not know.
    #[error("format version {0}")]
    Version(u8),
    /// A code of the header that has no meaning.
    #[error("{field} code {code}")]
    Code {
        /// The header's field.
        field: &'static str,
        /// Its value.
        code: u8,
    },
    /// The bytes are not those that were written.
    #[error("checksum {found:016x} where the header has {expected:016x}")]
    Checksum {
        /// What the header says.
        expected: u64,
        /// The checksum of the bytes.
        found: u64,
    },
    /// The sections do not fill the payload exactly, or the counts do not add up.
    #[error("the sections' sizes do not agree")]
    Sections,
    /// The indices of one block are not strictly increasing, not within it, or no code.
    #[error("the indices of block {block}")]
    Indices {
        /// Number of the block.
        block: usize,
    },
    /// The values of one block are no code, or not finite.
    #[error("the values of block {block}")]
    Values {
        /// Number of the block.
        block: usize,
    },
}
