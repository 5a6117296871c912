//! The header of a stream. All numbers are little-endian.
//!
//! | offset | bytes | header |
//! |---|---|---|
//! | 0 | 4 | `EPST` |
//! | 4 | 1 | version, 1 |
//! | 5 | 1 | codec: 1 exact, 2 int8, 3 delta, 4 shared, 5 top-k, 6 mirror; plus 16 in a stream of gradients |
//! | 6 | 1 | element type: 1 bf16, 2 f32 |
//! | 7 | 1 | in a stream of residuals: 16 times the code of the index format, plus the code of the value format; else 0 |
//! | 8 | 8 | P, the number of elements |
//! | 16 | 8 | bytes of the payload |
//! | 24 | 8 | fingerprint of the weights that the stream changes (mirror or shared expert); in a mirror stream, its own; else 0 |
//! | 32 | 8 | checksum: XXH64 of bytes 0 .. 32, seeded with the payload's digest |
//!
//! The payload of a complete stream is P elements as they are in memory (`exact`), or P codes after their scales
//! (`int8`, see [`int8`](crate::int8)). The payload of a stream of residuals is described in `residual/sections.rs`.

use ep::Element;

use crate::content::{Content, StreamCodec};
use crate::error::{Corruption, Result};
use crate::hash::{digest, xxh64};
use crate::int8;
use crate::residual::{Format, IndexFormat, ValueFormat};

/// Bytes before the payload: magic, version, codes, lengths, the base's fingerprint and the checksum.
pub const HEADER_BYTES: u64 = 40;

const MAGIC: [u8; 4] = *b"EPST";
const VERSION: u8 = 1;
pub(crate) const HEADER: usize = HEADER_BYTES as usize;
/// Offset of the checksum, which follows the part of the header that it covers.
const CHECKED: usize = HEADER - 8;
/// Added to the codec's code in a stream of gradients.
const GRADIENT: u8 = 16;

/// The contents of a stream's header.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
#[non_exhaustive]
pub struct StreamInfo {
    /// Whether the stream has weights or gradients.
    pub content: Content,
    /// The codec of the stream.
    pub codec: StreamCodec,
    /// The type of the elements that were encoded.
    pub element: Element,
    /// P: number of elements of the expert.
    pub elements: usize,
    /// Number of values in the stream: all P, or the residuals that were kept.
    pub kept: usize,
    /// How the kept residuals are written. `None` in a complete stream.
    pub format: Option<Format>,
    /// Bytes of the whole stream, header included. In a concatenation, the next stream starts here.
    pub bytes: usize,
    /// Fingerprint of the weights that the stream changes: those of the last stream (`Delta`), or the shared expert
    /// (`Shared`). `None` for codecs that change none.
    pub base: Option<u64>,
    /// Fingerprint of what the stream decodes to: XXH64 of 16 bytes, the base's fingerprint (or 0) and the checksum.
    /// For `Mirror`, the fingerprint in the header.
    pub fingerprint: u64,
}

/// Reads the header of the stream at the start of `bytes` and verifies the checksum. More bytes may follow the stream.
///
/// # Errors
/// [`Error::Corrupted`](crate::Error::Corrupted) when the bytes are not a whole stream.
pub fn inspect(bytes: &[u8]) -> Result<StreamInfo> {
    Ok(open(bytes)?.0)
}

/// Like [`inspect`], and also returns the payload: for residuals, what follows the count of entries; for a complete
/// stream, the whole payload, whose length is checked.
pub(crate) fn open(bytes: &[u8]) -> Result<(StreamInfo, &[u8]), Corruption> {
    let found = bytes.len() as u64;
    let truncated = |needed| Corruption::Truncated { needed, found };
    let (header, rest) = bytes.split_first_chunk::<HEADER>().ok_or(truncated(HEADER_BYTES))?;
    let word = |at: usize| header[at..].first_chunk().map_or(0, |word| u64::from_le_bytes(*word));
    if header[..4] != MAGIC {
        return Err(Corruption::Magic);
    }
    if header[4] != VERSION {
        return Err(Corruption::Version(header[4]));
    }
    let (elements, payload_bytes, base, expected) = (word(8), word(16), word(24), word(32));
    let payload = usize::try_from(payload_bytes).ok().and_then(|length| rest.get(..length));
    let payload = payload.ok_or(truncated(payload_bytes.saturating_add(HEADER_BYTES)))?;
    let found = checksum(header, payload);
    if found != expected {
        return Err(Corruption::Checksum { expected, found });
    }
    let (content, codec) = codec(header[5])?;
    let element = element(header[6])?;
    let format = if codec.is_sparse() { Some(format(header[7])?) } else { None };
    if format.is_none() && header[7] != 0 {
        return Err(Corruption::Code { field: "format", code: header[7] });
    }
    let elements = u32::try_from(elements).map_err(|_| Corruption::Sections)? as usize;
    let (kept, payload) = match codec {
        StreamCodec::Exact | StreamCodec::Mirror if payload.len() == elements * element.bytes() => {
            (elements, payload)
        }
        StreamCodec::Int8 if payload.len() == int8::payload_bytes(elements) => (elements, payload),
        StreamCodec::Exact | StreamCodec::Mirror | StreamCodec::Int8 => return Err(Corruption::Sections),
        StreamCodec::Delta | StreamCodec::Shared | StreamCodec::TopK => {
            let (kept, payload) = payload.split_first_chunk().ok_or(Corruption::Sections)?;
            (u32::from_le_bytes(*kept) as usize, payload)
        }
    };
    if kept > elements {
        return Err(Corruption::Sections);
    }
    let bytes = HEADER + payload_bytes as usize;
    let fingerprint = fingerprint(codec, base, found);
    let base = codec.has_base().then_some(base);
    Ok((StreamInfo { content, codec, element, elements, kept, format, bytes, base, fingerprint }, payload))
}

/// The fields of a header, except those that follow from the payload.
#[derive(Debug, Clone, Copy)]
pub(crate) struct Header {
    pub(crate) content: Content,
    pub(crate) codec: StreamCodec,
    pub(crate) element: Element,
    pub(crate) elements: usize,
    /// Number of residuals in the payload, and their format. `None` in a complete stream.
    pub(crate) kept: Option<(usize, Format)>,
    pub(crate) base: Option<u64>,
}

/// Writes the header into the first [`HEADER_BYTES`] bytes of a stream, which the payload follows.
pub(crate) fn seal(stream: &mut [u8], about: Header) -> StreamInfo {
    let bytes = stream.len();
    let base = about.base.unwrap_or_default();
    let checksum = match stream.split_first_chunk_mut::<HEADER>() {
        None => 0,
        Some((header, payload)) => {
            header[..4].copy_from_slice(&MAGIC);
            let format = about.kept.map_or(0, |(_, format)| format_code(format));
            let codec = codec_code(about.content, about.codec);
            header[4..8].copy_from_slice(&[VERSION, codec, element_code(about.element), format]);
            header[8..16].copy_from_slice(&(about.elements as u64).to_le_bytes());
            header[16..24].copy_from_slice(&(payload.len() as u64).to_le_bytes());
            header[24..32].copy_from_slice(&base.to_le_bytes());
            let checksum = checksum(header, payload);
            header[CHECKED..].copy_from_slice(&checksum.to_le_bytes());
            checksum
        }
    };
    StreamInfo {
        content: about.content,
        codec: about.codec,
        element: about.element,
        elements: about.elements,
        kept: about.kept.map_or(about.elements, |(kept, _)| kept),
        format: about.kept.map(|(_, format)| format),
        bytes,
        base: about.base.filter(|_| about.codec.has_base()),
        fingerprint: fingerprint(about.codec, base, checksum),
    }
}

/// Makes damaged bytes pass the checks of the header: magic, version, lengths, fingerprint and checksum. Without it,
/// the checksum would reject random bytes before they reach the code that is to be fuzzed. Bytes shorter than a header
/// are left unchanged.
#[cfg(any(test, feature = "fuzzing"))]
#[doc(hidden)]
pub fn reseal(stream: &mut [u8], base: u64) {
    let Some((header, payload)) = stream.split_first_chunk_mut::<HEADER>() else { return };
    header[..4].copy_from_slice(&MAGIC);
    header[4] = VERSION;
    header[16..24].copy_from_slice(&(payload.len() as u64).to_le_bytes());
    header[24..32].copy_from_slice(&base.to_le_bytes());
    let checksum = checksum(header, payload);
    header[CHECKED..].copy_from_slice(&checksum.to_le_bytes());
}

fn checksum(header: &[u8; HEADER], payload: &[u8]) -> u64 {
    xxh64(&header[..CHECKED], digest(payload))
}

/// The fingerprint of what a stream decodes to: a hash of two hashes, so that neither side has to hash the weights. A
/// mirror states its own fingerprint.
fn fingerprint(codec: StreamCodec, base: u64, checksum: u64) -> u64 {
    if codec == StreamCodec::Mirror {
        return base;
    }
    xxh64([base.to_le_bytes(), checksum.to_le_bytes()].as_flattened(), 0)
}

fn codec(code: u8) -> Result<(Content, StreamCodec), Corruption> {
    let content = if code & GRADIENT == 0 { Content::Weights } else { Content::Gradients };
    let codec = match (content, code & !GRADIENT) {
        (_, 1) => StreamCodec::Exact,
        (_, 2) => StreamCodec::Int8,
        (Content::Weights, 3) => StreamCodec::Delta,
        (Content::Weights, 4) => StreamCodec::Shared,
        (Content::Gradients, 5) => StreamCodec::TopK,
        (Content::Weights, 6) => StreamCodec::Mirror,
        _ => return Err(Corruption::Code { field: "codec", code }),
    };
    Ok((content, codec))
}

fn codec_code(content: Content, codec: StreamCodec) -> u8 {
    let code = match codec {
        StreamCodec::Exact => 1,
        StreamCodec::Int8 => 2,
        StreamCodec::Delta => 3,
        StreamCodec::Shared => 4,
        StreamCodec::TopK => 5,
        StreamCodec::Mirror => 6,
    };
    match content {
        Content::Weights => code,
        Content::Gradients => code + GRADIENT,
    }
}

pub(crate) fn element(code: u8) -> Result<Element, Corruption> {
    match code {
        1 => Ok(Element::Bf16),
        2 => Ok(Element::F32),
        _ => Err(Corruption::Code { field: "element type", code }),
    }
}

pub(crate) fn element_code(element: Element) -> u8 {
    match element {
        Element::Bf16 => 1,
        Element::F32 => 2,
    }
}

fn format(code: u8) -> Result<Format, Corruption> {
    let index = match code >> 4 {
        1 => IndexFormat::U32,
        2 => IndexFormat::U16,
        3 => IndexFormat::Rice,
        code => return Err(Corruption::Code { field: "index format", code }),
    };
    let value = match code & 15 {
        1 => ValueFormat::F32,
        2 => ValueFormat::Bf16,
        3 => ValueFormat::Bf16Rice,
        code => return Err(Corruption::Code { field: "value format", code }),
    };
    Ok(Format { index, value })
}

fn format_code(format: Format) -> u8 {
    let index = match format.index {
        IndexFormat::U32 => 1,
        IndexFormat::U16 => 2,
        IndexFormat::Rice => 3,
    };
    let value = match format.value {
        ValueFormat::F32 => 1,
        ValueFormat::Bf16 => 2,
        ValueFormat::Bf16Rice => 3,
    };
    index << 4 | value
}
