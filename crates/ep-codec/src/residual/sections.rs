//! The payload of a stream of residuals, divided into the sections of its blocks. All numbers are little-endian.
//!
//! For n blocks:
//!
//! | section | when | bytes |
//! |---|---|---|
//! | number of kept residuals (entries), u32 | always | 4 |
//! | entries of each block, u32; in `Rice` the upper 8 bits are the block's parameter | `U16`, `Rice` | 4 n |
//! | bytes of each block's indices, u16 | `Rice` | 2 n |
//! | smallest bf16 magnitude of each block, from which its values are measured, u16 | `Bf16Rice` | 2 n |
//! | bytes of each block's values, u32; the upper 8 bits are the block's parameter | `Bf16Rice` | 4 n |
//! | indices, block by block | always | |
//! | values, block by block | always | |

use super::format::{BLOCK, Format, IndexFormat, ValueFormat};
use crate::error::Corruption;
use crate::stream::StreamInfo;

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

/// Splits a payload, as [`open`](crate::stream::open) returns it, into its blocks.
///
/// # Errors
/// [`Corruption::Sections`] when the blocks do not fill the payload exactly, or when 32-bit indices are not ascending
/// or out of range.
pub(super) fn blocks(
    info: StreamInfo,
    format: Format,
    payload: &[u8],
) -> Result<Vec<BlockBytes<'_>>, Corruption> {
    let Format { index, value } = format;
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
