//! Errors of the codecs: wrong arguments of the caller, or damaged bytes.

use std::fmt;

use ep::Element;

use crate::content::{Content, StreamCodec};

/// The result type of the crate's fallible functions.
pub type Result<T, E = Error> = std::result::Result<T, E>;

/// An error of a codec.
#[derive(Debug, Clone, PartialEq, thiserror::Error)]
#[non_exhaustive]
pub enum Error {
    /// The caller's arguments are wrong. Fix the call, or the weights.
    #[error("{0}")]
    Caller(#[from] CallerError),
    /// No encoder wrote these bytes, or they changed in transit. Send them again.
    #[error("corrupted bytes: {0}")]
    Corrupted(#[from] Corruption),
    /// The place of the elements, such as a GPU, has failed.
    #[error("{0}")]
    Place(#[from] ep::Error),
}

/// The caller's arguments are wrong.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
#[non_exhaustive]
pub enum CallerError {
    /// The list of experts is empty.
    #[error("a shared expert is the mean of at least one expert")]
    NoExperts,
    /// Two arguments that must have equal lengths do not.
    #[error("{what}: expected {expected} elements, found {found}")]
    Length {
        /// Which argument.
        what: Operand,
        /// The length that the other arguments require, elements.
        expected: usize,
        /// The length that was given, elements.
        found: usize,
    },
    /// The expert has more elements than a 32-bit index can number.
    #[error("an expert of {0} elements: at most {max} can be indexed", max = u32::MAX)]
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
    /// The stream, or the saved state, and the arguments have different element types.
    #[error("the stream or state is of {stream:?} elements, but the caller gave {given:?} elements")]
    Element {
        /// The type of the stream or state.
        stream: Element,
        /// The type of the arguments.
        given: Element,
    },
    /// The stream was encoded against a different shared expert, for instance that of an earlier step.
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
    /// The codec or the stream has residuals against a shared expert, but the caller gave no shared expert.
    #[error("the codec `shared` needs a shared expert, but the caller gave none")]
    NoShared,
    /// The encoder keeps no mirror: its codec is not `delta`, or it has encoded nothing.
    #[error("this encoder has no mirror: only the codec `delta` keeps one, after its first stream")]
    NoMirror,
    /// The stream changes weights other than those that the replica holds: streams are missing, repeated or out of
    /// order.
    #[error(
        "the stream changes weights with fingerprint {stream:016x}, but the replica holds {held}; decode the streams of \
         an expert in order, or let the sender start over",
        held = held.map_or("none".to_owned(), |held| format!("{held:016x}"))
    )]
    OtherBase {
        /// Fingerprint in the stream.
        stream: u64,
        /// Fingerprint of what the replica holds. `None` before the first stream.
        held: Option<u64>,
    },
    /// A stream of weights was given where gradients are expected, or the reverse.
    #[error("expected a stream of {expected}, found one of {stream}")]
    Content {
        /// The content of the stream.
        stream: Content,
        /// The content that the function decodes.
        expected: Content,
    },
    /// The stream's codec is not the one that the function decodes.
    #[error("expected a stream of the codec `shared`, found {found:?}")]
    OtherCodec {
        /// The codec of the stream.
        found: StreamCodec,
    },
    /// The density of a codec is out of range.
    #[error("density {given}: it must be more than 0 and at most 1")]
    Density {
        /// The density that was given, as text.
        given: String,
    },
    /// The number of complete streams at the start is 0.
    #[error(
        "warm_up is 0: it must be at least 1, because no earlier stream exists that the first could change"
    )]
    NoWarmUp,
    /// The saved state is that of a different kind of encoder or decoder.
    #[error("the saved state is of {saved}, not of {expected}")]
    OtherState {
        /// What the bytes are the state of.
        saved: &'static str,
        /// What the caller restores.
        expected: &'static str,
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
    /// The residual, expert - shared or weight - mirror: the difference of finite weights overflowed.
    Residual,
    /// A kept residual in its value format, or its sum with the shared expert or mirror: rounding overflowed.
    Rounded,
    /// The slice for the decoded weights.
    Output,
    /// The replica that a stream is decoded into.
    Replica,
    /// The gradient to encode.
    Gradient,
    /// The gradient plus what earlier streams left out: the sum of finite numbers overflowed.
    Carried,
    /// The sum that a gradient is added to.
    Sum,
    /// The elements of a saved state.
    State,
}

impl fmt::Display for Operand {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::ExpertOfMean(place) => write!(f, "expert {place}"),
            Self::Mean => f.write_str("the mean of the experts"),
            Self::Shared => f.write_str("the shared expert"),
            Self::Expert => f.write_str("the expert"),
            Self::Residual => f.write_str("the residual (expert - shared, or weight - mirror)"),
            Self::Rounded => {
                f.write_str("the rounded residual, or its sum with the shared expert or mirror,")
            }
            Self::Output => f.write_str("the output"),
            Self::Replica => f.write_str("the replica"),
            Self::Gradient => f.write_str("the gradient"),
            Self::Carried => f.write_str("the gradient plus what earlier streams left out"),
            Self::Sum => f.write_str("the sum"),
            Self::State => f.write_str("the saved state"),
        }
    }
}

/// The defect of a damaged stream or saved state.
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
    /// The bytes do not start with the magic number of a stream, or of a saved state where one is expected.
    #[error("the bytes do not start with the expected magic number")]
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
    /// The parts of a saved state contradict each other, or have numbers that are not finite.
    #[error("the saved state contradicts itself")]
    State,
    /// The sections do not fill the payload exactly, or their counts do not add up.
    #[error("the sizes of the payload's sections do not agree")]
    Sections,
    /// The indices of a block are not strictly increasing, not inside the block, or not a valid code.
    #[error("the indices of block {block} are invalid")]
    Indices {
        /// Number of the block.
        block: usize,
    },
    /// The values of a block are not a valid code, or would decode to a number that is not finite.
    #[error("the values of block {block} are invalid")]
    Values {
        /// Number of the block.
        block: usize,
    },
}
