//! Decoding of residuals, from a stream to weights.

use ep::numeric::bf16_to_f32;

use super::entries::{Entries, add_onto, overflow};
use super::format::{BLOCK, Format, IndexFormat, ValueFormat};
use super::rice;
use super::sections::{BlockBytes, blocks};
use crate::content::StreamCodec;
use crate::error::{CallerError, Corruption, Operand, Result};
use crate::parallel::{ParallelIterator, parallel};
use crate::place::{Host, Place};
use crate::shared::{SharedExpert, check_length};
use crate::stream::{StreamInfo, open};
use crate::weight::Weight;

/// Decodes exactly one stream onto its shared expert.
///
/// `out` has shape `[P]`. For each weight, `out = shared + residual` where the stream holds a residual (one f32
/// addition, rounded to `T`, to nearest, ties to even), and `out = shared` elsewhere. The function runs on the threads
/// of the current rayon pool.
///
/// # Errors
/// [`Corruption`] when `bytes` is not exactly one whole stream. [`CallerError`] when the stream is not of
/// [`StreamCodec::Shared`], or has another element type, length or shared expert than the arguments. After an error
/// `out` is unchanged.
pub fn decode_add<T: Weight>(bytes: &[u8], shared: &SharedExpert<T>, out: &mut [T]) -> Result<StreamInfo> {
    let (info, payload) = open(bytes)?;
    if info.bytes != bytes.len() {
        let (expected, found) = (info.bytes as u64, bytes.len() as u64);
        return Err(Corruption::TrailingBytes { expected, found }.into());
    }
    if info.codec != StreamCodec::Shared {
        return Err(CallerError::OtherCodec { found: info.codec }.into());
    }
    check_element::<T>(info)?;
    check_length(Operand::Shared, info.elements, shared.weights().len())?;
    check_length(Operand::Output, info.elements, out.len())?;
    let entries = read_onto_shared(info, payload, shared)?;
    add_onto(&entries, shared.weights(), out);
    Ok(info)
}

pub(crate) fn check_element<T: Weight>(info: StreamInfo) -> Result<()> {
    if info.element == T::ELEMENT {
        Ok(())
    } else {
        Err(CallerError::Element { stream: info.element, given: T::ELEMENT }.into())
    }
}

/// Reads the entries of a stream against this shared expert.
pub(crate) fn read_onto_shared<T: Weight>(
    info: StreamInfo,
    payload: &[u8],
    shared: &SharedExpert<T>,
) -> Result<Vec<Entries>> {
    check_length(Operand::Shared, info.elements, shared.weights().len())?;
    let stream = info.base.unwrap_or_default();
    if stream != shared.fingerprint() {
        return Err(CallerError::OtherShared { stream, given: shared.fingerprint() }.into());
    }
    read_onto(&Host, info, payload, shared.weights())
}

/// Reads the entries of a stream whose values are to be added to `base`, `[P]`.
///
/// # Errors
/// [`Corruption`] as in [`read`], and when a sum is not finite.
pub(crate) fn read_onto<P: Place, T: Weight>(
    place: &P,
    info: StreamInfo,
    payload: &[u8],
    base: P::Ref<'_, T>,
) -> Result<Vec<Entries>> {
    let entries = read(info, payload)?;
    match overflow(place, &entries, base)? {
        None => Ok(entries),
        Some(index) => Err(Corruption::Values { block: index / BLOCK }.into()),
    }
}

/// Reads the entries of each block. All positions are inside their block, and all values are finite.
///
/// # Errors
/// [`Corruption`] when the payload is not the residuals of `info.elements` elements.
pub(crate) fn read(info: StreamInfo, payload: &[u8]) -> Result<Vec<Entries>, Corruption> {
    let format = info.format.ok_or(Corruption::Sections)?;
    let read: Vec<Result<Entries, Corruption>> = parallel(blocks(info, format, payload)?)
        .map_init(Vec::new, |numbers, bytes| {
            let elements = (info.elements - bytes.block * BLOCK).min(BLOCK);
            read_block(bytes, format, elements, numbers)
        })
        .collect();
    // Collected in order, so that the error reported is that of the first block.
    read.into_iter().collect()
}

/// Reads the entries of one block of `elements` elements. `numbers` is memory that calls of one thread share.
fn read_block(
    bytes: BlockBytes<'_>,
    format: Format,
    elements: usize,
    numbers: &mut Vec<u16>,
) -> Result<Entries, Corruption> {
    let block = bytes.block;
    let positions = read_positions(bytes, format.index, numbers).ok_or(Corruption::Indices { block })?;
    // Positions ascend: if the last one is inside, all are.
    if positions.last().is_some_and(|&last| usize::from(last) >= elements) {
        return Err(Corruption::Indices { block });
    }
    let values = read_values(bytes, format.value, numbers).ok_or(Corruption::Values { block })?;
    Ok(Entries { positions, values })
}

/// Reads the positions of the entries. `None` when they are not strictly increasing inside the block.
fn read_positions(bytes: BlockBytes<'_>, format: IndexFormat, numbers: &mut Vec<u16>) -> Option<Vec<u16>> {
    match format {
        // Only the lower 16 bits matter here: `blocks` checked the order and found the block by all 32.
        IndexFormat::U32 => {
            let (indices, _) = bytes.indices.bytes.as_chunks::<4>();
            Some(indices.iter().map(|&[low, high, ..]| u16::from_le_bytes([low, high])).collect())
        }
        IndexFormat::U16 => {
            let (positions, _) = bytes.indices.bytes.as_chunks::<2>();
            let positions: Vec<u16> =
                positions.iter().map(|&position| u16::from_le_bytes(position)).collect();
            let pairs = positions.iter().zip(positions.get(1..).unwrap_or_default());
            pairs.fold(true, |all, (a, b)| all & (a < b)).then_some(positions)
        }
        IndexFormat::Rice => {
            numbers.resize(bytes.count, 0);
            rice::decode(bytes.indices.bytes, bytes.indices.parameter, numbers).ok()?;
            let mut next = 0_usize;
            let position = |&gap: &u16| {
                let position = next + usize::from(gap);
                next = position + 1;
                position as u16
            };
            let positions = numbers.iter().map(position).collect();
            // Positions increase: if the last one is inside the block, no conversion to u16 truncated.
            (next <= BLOCK).then_some(positions)
        }
    }
}

/// Reads one value per entry. `None` when the bytes are not a valid code or a value is not finite.
fn read_values(bytes: BlockBytes<'_>, format: ValueFormat, numbers: &mut Vec<u16>) -> Option<Vec<f32>> {
    let values: Vec<f32> = match format {
        ValueFormat::F32 => {
            let (words, _) = bytes.values.bytes.as_chunks();
            words.iter().map(|&word| f32::from_le_bytes(word)).collect()
        }
        ValueFormat::Bf16 => {
            let (halves, _) = bytes.values.bytes.as_chunks();
            halves.iter().map(|&half| bf16_to_f32(u16::from_le_bytes(half))).collect()
        }
        ValueFormat::Bf16Rice => {
            numbers.resize(bytes.count, 0);
            rice::decode(bytes.values.bytes, bytes.values.parameter, numbers).ok()?;
            let base = u32::from(bytes.base);
            let value = |&number: &u16| {
                let number = u32::from(number);
                // A magnitude of more than 15 bits becomes a NaN, which the check below refuses.
                let magnitude = (base + (number >> 1)).min(0x7FFF);
                f32::from_bits(magnitude << 16 | number << 31)
            };
            numbers.iter().map(value).collect()
        }
    };
    values.iter().fold(true, |all, value| all & value.is_finite()).then_some(values)
}
