//! The byte layout of a stream: its header, and the sections of its payload. All numbers are little-endian.
//!
//! | offset | bytes | header |
//! |---|---|---|
//! | 0 | 4 | `EPSR` |
//! | 4 | 1 | version, 1 |
//! | 5 | 3 | codes of the weights' type, the index format and the value format |
//! | 8 | 8 | P, the number of weights |
//! | 16 | 8 | bytes of the payload |
//! | 24 | 8 | fingerprint of the shared expert |
//! | 32 | 8 | checksum: XXH64 of bytes 0 .. 32, seeded with the payload's digest |
//!
//! The payload, for n blocks:
//!
//! | section | when | bytes |
//! |---|---|---|
//! | number of kept residuals (entries), u32 | always | 4 |
//! | entries of each block, u32; in `Rice` the upper 8 bits are the block's parameter | `U16`, `Rice` | 4 n |
//! | bytes of each block's indices, u16 | `Rice` | 2 n |
//! | smallest bf16 magnitude of each block, from which its values count, u16 | `Bf16Rice` | 2 n |
//! | bytes of each block's values, u32; the upper 8 bits are the block's parameter | `Bf16Rice` | 4 n |
//! | indices, block by block | always | |
//! | values, block by block | always | |

use ep::Element;

use super::error::{Corruption, Result};
use super::format::{BLOCK, Format, HEADER_BYTES, IndexFormat, ValueFormat};
use super::hash::{digest, xxh64};

const MAGIC: [u8; 4] = *b"EPSR";
const VERSION: u8 = 1;
const HEADER: usize = HEADER_BYTES as usize;
/// Offset of the checksum, which follows the part of the header that it covers.
const CHECKED: usize = HEADER - 8;

/// The contents of a stream's header.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct StreamInfo {
    /// The type of the weights.
    pub element: Element,
    /// How the kept residuals are written.
    pub format: Format,
    /// P: number of weights of the expert.
    pub elements: usize,
    /// Number of residuals in the stream.
    pub kept: usize,
    /// Bytes of the whole stream, header included. In a concatenation, the next stream starts here.
    pub bytes: usize,
    /// Fingerprint of the shared expert that the stream was encoded against.
    pub shared: u64,
}

/// Reads the header of the stream at the start of `bytes` and verifies the checksum. More bytes may follow the stream.
///
/// # Errors
/// [`Error::Corrupted`](super::Error::Corrupted) when the bytes are not a whole stream.
pub fn inspect(bytes: &[u8]) -> Result<StreamInfo> {
    Ok(open(bytes)?.0)
}

/// Like [`inspect`], and also returns the payload after its count of entries.
pub(super) fn open(bytes: &[u8]) -> Result<(StreamInfo, &[u8])> {
    let found = bytes.len() as u64;
    let truncated = |needed| Corruption::Truncated { needed, found };
    let (header, rest) = bytes.split_first_chunk::<HEADER>().ok_or(truncated(HEADER_BYTES))?;
    let word = |at: usize| header[at..].first_chunk().map_or(0, |word| u64::from_le_bytes(*word));
    if header[..4] != MAGIC {
        return Err(Corruption::Magic.into());
    }
    if header[4] != VERSION {
        return Err(Corruption::Version(header[4]).into());
    }
    let (elements, payload_bytes, shared, expected) = (word(8), word(16), word(24), word(32));
    let payload = usize::try_from(payload_bytes).ok().and_then(|length| rest.get(..length));
    let payload = payload.ok_or(truncated(payload_bytes.saturating_add(HEADER_BYTES)))?;
    let found = checksum(header, payload);
    if found != expected {
        return Err(Corruption::Checksum { expected, found }.into());
    }
    let (kept, payload) = payload.split_first_chunk().ok_or(Corruption::Sections)?;
    let kept = u32::from_le_bytes(*kept);
    if elements > u64::from(u32::MAX) || u64::from(kept) > elements {
        return Err(Corruption::Sections.into());
    }
    let info = StreamInfo {
        element: element(header[5])?,
        format: Format { index: index_format(header[6])?, value: value_format(header[7])? },
        elements: elements as usize,
        kept: kept as usize,
        bytes: HEADER + payload_bytes as usize,
        shared,
    };
    Ok((info, payload))
}

/// Writes the header into the first [`HEADER_BYTES`] bytes of a stream, which the payload follows.
pub(super) fn seal(stream: &mut [u8], element: Element, format: Format, elements: usize, shared: u64) {
    let Some((header, payload)) = stream.split_first_chunk_mut::<HEADER>() else { return };
    header[..4].copy_from_slice(&MAGIC);
    let element = match element {
        Element::Bf16 => 1,
        Element::F32 => 2,
    };
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
    header[4..8].copy_from_slice(&[VERSION, element, index, value]);
    header[8..16].copy_from_slice(&(elements as u64).to_le_bytes());
    header[16..24].copy_from_slice(&(payload.len() as u64).to_le_bytes());
    header[24..32].copy_from_slice(&shared.to_le_bytes());
    let checksum = checksum(header, payload);
    header[CHECKED..].copy_from_slice(&checksum.to_le_bytes());
}

/// Makes damaged bytes pass the checks of the header: magic, version, lengths, fingerprint and checksum. Without it,
/// the checksum would reject random bytes before the code that fuzzing shall reach. Bytes shorter than a header are
/// left unchanged.
#[cfg(feature = "fuzzing")]
#[doc(hidden)]
pub fn reseal(stream: &mut [u8], shared: u64) {
    let Some((header, payload)) = stream.split_first_chunk_mut::<HEADER>() else { return };
    header[..4].copy_from_slice(&MAGIC);
    header[4] = VERSION;
    header[16..24].copy_from_slice(&(payload.len() as u64).to_le_bytes());
    header[24..32].copy_from_slice(&shared.to_le_bytes());
    let checksum = checksum(header, payload);
    header[CHECKED..].copy_from_slice(&checksum.to_le_bytes());
}

fn checksum(header: &[u8; HEADER], payload: &[u8]) -> u64 {
    xxh64(&header[..CHECKED], digest(payload))
}

fn element(code: u8) -> Result<Element, Corruption> {
    match code {
        1 => Ok(Element::Bf16),
        2 => Ok(Element::F32),
        _ => Err(Corruption::Code { field: "weight type", code }),
    }
}

fn index_format(code: u8) -> Result<IndexFormat, Corruption> {
    match code {
        1 => Ok(IndexFormat::U32),
        2 => Ok(IndexFormat::U16),
        3 => Ok(IndexFormat::Rice),
        _ => Err(Corruption::Code { field: "index format", code }),
    }
}

fn value_format(code: u8) -> Result<ValueFormat, Corruption> {
    match code {
        1 => Ok(ValueFormat::F32),
        2 => Ok(ValueFormat::Bf16),
        3 => Ok(ValueFormat::Bf16Rice),
        _ => Err(Corruption::Code { field: "value format", code }),
    }
}

/// Bytes of a block's indices or values, and their Rice parameter (0 in formats without a Rice code).
#[derive(Debug, Clone, Copy, Default)]
pub(super) struct Coded<'a> {
    pub(super) bytes: &'a [u8],
    pub(super) parameter: u32,
}

/// The part of a payload that belongs to one block, not yet decoded.
#[derive(Debug, Clone, Copy)]
pub(super) struct BlockBytes<'a> {
    /// Number of the block.
    pub(super) block: usize,
    /// Entries of the block, at most [`BLOCK`].
    pub(super) count: usize,
    pub(super) indices: Coded<'a>,
    pub(super) values: Coded<'a>,
    /// The smallest bf16 magnitude of the block: in `Bf16Rice`, values are distances from it.
    pub(super) base: u16,
}

/// Splits a payload, as [`open`] returns it, into its blocks.
///
/// # Errors
/// [`Corruption::Sections`] when the blocks do not fill the payload exactly, or when 32-bit indices are not ascending
/// or out of range.
pub(super) fn blocks(info: StreamInfo, payload: &[u8]) -> Result<Vec<BlockBytes<'_>>, Corruption> {
    let Format { index, value } = info.format;
    let n = info.elements.div_ceil(BLOCK);
    let mut rest = payload;
    let entries_if = |present: bool| if present { n } else { 0 };
    let counts = take_words(&mut rest, entries_if(index != IndexFormat::U32))?;
    let index_lengths = take_halves(&mut rest, entries_if(index == IndexFormat::Rice))?;
    let bases = take_halves(&mut rest, entries_if(value == ValueFormat::Bf16Rice))?;
    let value_lengths = take_words(&mut rest, entries_if(value == ValueFormat::Bf16Rice))?;

    let mut borders = match index {
        IndexFormat::U32 => Borders::of(take_words(&mut &*rest, info.kept)?)?,
        IndexFormat::U16 | IndexFormat::Rice => Borders::default(),
    };
    let mut blocks: Vec<BlockBytes> = Vec::with_capacity(n);
    let mut kept = 0;
    for block in 0..n {
        let (count, parameter) = match index {
            IndexFormat::U32 => (borders.entries_of(block), 0),
            IndexFormat::U16 => (u32::from_le_bytes(counts[block]) as usize, 0),
            IndexFormat::Rice => split_word(counts[block]),
        };
        if count > BLOCK {
            return Err(Corruption::Sections);
        }
        let length = match index {
            IndexFormat::U32 => 4 * count,
            IndexFormat::U16 => 2 * count,
            IndexFormat::Rice => usize::from(u16::from_le_bytes(index_lengths[block])),
        };
        let indices = Coded { bytes: take(&mut rest, length)?, parameter };
        blocks.push(BlockBytes { block, count, indices, base: 0, values: Coded::default() });
        kept += count;
    }
    for block in &mut blocks {
        let (length, parameter) = match value {
            ValueFormat::F32 => (4 * block.count, 0),
            ValueFormat::Bf16 => (2 * block.count, 0),
            ValueFormat::Bf16Rice => {
                block.base = u16::from_le_bytes(bases[block.block]);
                split_word(value_lengths[block.block])
            }
        };
        block.values = Coded { bytes: take(&mut rest, length)?, parameter };
    }
    if rest.is_empty() && kept == info.kept { Ok(blocks) } else { Err(Corruption::Sections) }
}

/// Finds the borders of the blocks in a list of ascending 32-bit indices.
#[derive(Debug, Default)]
struct Borders<'a> {
    rest: &'a [[u8; 4]],
}

impl<'a> Borders<'a> {
    fn of(indices: &'a [[u8; 4]]) -> Result<Self, Corruption> {
        let later = indices.get(1..).unwrap_or_default();
        // No early exit, so that the loop is vectorised: only damaged streams are out of order.
        let pairs = indices.iter().zip(later);
        let ascending =
            pairs.fold(true, |all, (&a, &b)| all & (u32::from_le_bytes(a) < u32::from_le_bytes(b)));
        if ascending { Ok(Self { rest: indices }) } else { Err(Corruption::Sections) }
    }

    /// Takes the indices below the end of this block off the list and counts them. Blocks must come in order.
    fn entries_of(&mut self, block: usize) -> usize {
        let count = self.rest.partition_point(|&index| u32::from_le_bytes(index) as usize / BLOCK <= block);
        self.rest = &self.rest[count..];
        count
    }
}

/// Packs a 24-bit number and a Rice parameter into one word of the payload's directory.
pub(super) fn join_word(number: usize, parameter: u32) -> [u8; 4] {
    (number as u32 | parameter << 24).to_le_bytes()
}

fn split_word(word: [u8; 4]) -> (usize, u32) {
    let word = u32::from_le_bytes(word);
    ((word & 0xFF_FFFF) as usize, word >> 24)
}

fn take<'a>(rest: &mut &'a [u8], length: usize) -> Result<&'a [u8], Corruption> {
    rest.split_off(..length).ok_or(Corruption::Sections)
}

fn take_words<'a>(rest: &mut &'a [u8], count: usize) -> Result<&'a [[u8; 4]], Corruption> {
    Ok(take(rest, 4 * count)?.as_chunks().0)
}

fn take_halves<'a>(rest: &mut &'a [u8], count: usize) -> Result<&'a [[u8; 2]], Corruption> {
    Ok(take(rest, 2 * count)?.as_chunks().0)
}
