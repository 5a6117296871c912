//! Encoding of residuals into a stream.

use ep::numeric::{bf16_to_f32, f32_to_bf16};

use super::entries::{Entries, overflow};
use super::format::{BLOCK, Format, IndexFormat, ValueFormat};
use super::rice;
use super::sections::join_word;
use super::select::{Selected, Selection, select};
use crate::content::{Content, StreamCodec};
use crate::error::{CallerError, Operand, Result};
use crate::parallel::{IndexedParallelIterator, Parallel, ParallelIterator, parallel};
use crate::place::{Host, Place};
use crate::shared::{SharedExpert, check_length};
use crate::stream::{HEADER, Header, StreamInfo, seal};
use crate::weight::Weight;

/// Encodes experts as their k largest residuals.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Encoder {
    /// Residuals to keep of each expert.
    pub k: usize,
    /// How the encoder selects the residuals.
    pub selection: Selection,
    /// How the encoder writes the residuals.
    pub format: Format,
}

/// Statistics of one encoded stream.
#[derive(Debug, Clone, Copy, PartialEq)]
pub struct Stats {
    /// Residuals in the stream: k, or slightly fewer with [`Selection::Approximate`].
    pub kept: usize,
    /// Bytes of the stream, header included.
    pub bytes: usize,
    /// The smallest kept magnitude, before rounding to the value format. No dropped residual is larger. `None` when the
    /// stream has no residuals.
    pub smallest: Option<f32>,
}

impl Encoder {
    /// Appends one stream to `out`: of the P residuals `expert - shared`, the k of largest magnitude; of equal
    /// magnitudes, those of lower index.
    ///
    /// `expert` has shape `[P]`. A residual is one f32 subtraction. The function runs on the threads of the current
    /// rayon pool; the bytes do not depend on the number of threads. After an error `out` is unchanged.
    ///
    /// # Errors
    /// [`CallerError::Length`] when the expert and the shared expert differ in length. [`CallerError::TooManyKept`]
    /// when `k` exceeds P. [`CallerError::NotFinite`] when a weight is NaN or infinite, or when a residual or a decoded
    /// weight would overflow: every encoded stream decodes to finite weights.
    pub fn encode<T: Weight>(
        &self,
        expert: &[T],
        shared: &SharedExpert<T>,
        out: &mut Vec<u8>,
    ) -> Result<Stats> {
        let elements = shared.weights().len();
        check_length(Operand::Expert, elements, expert.len())?;
        if self.k > elements {
            return Err(CallerError::TooManyKept { k: self.k, elements }.into());
        }
        let selected = select(expert, shared.weights(), self.k, self.selection)?;
        let kept = round_onto(&Host, &selected, shared.weights(), self.format)?;
        let header = Header {
            content: Content::Weights,
            codec: StreamCodec::Shared,
            element: T::ELEMENT,
            elements,
            kept: None,
            base: Some(shared.fingerprint()),
        };
        let info = append(&kept, self.format, header, out);
        Ok(Stats { kept: info.kept, bytes: info.bytes, smallest: smallest(&selected) })
    }
}

/// Appends a stream of entries to `out`. `header.kept` is computed from the entries.
pub(crate) fn append(entries: &[Entries], format: Format, header: Header, out: &mut Vec<u8>) -> StreamInfo {
    let blocks: Vec<EncodedBlock> = entries
        .par_iter()
        .enumerate()
        .map(|(block, entries)| EncodedBlock::new(entries, block, format))
        .collect();
    let start = out.len();
    let kept = blocks.iter().map(|block| block.count).sum();
    out.resize(start + HEADER, 0);
    write_payload(&blocks, format, kept, out);
    seal(&mut out[start..], Header { kept: Some((kept, format)), ..header })
}

/// Rounds the kept residuals to the value format.
///
/// # Errors
/// [`CallerError::NotFinite`] when a sum of a weight of the base and its rounded residual overflows.
pub(crate) fn round_onto<P: Place, T: Weight>(
    place: &P,
    selected: &Selected,
    base: P::Ref<'_, T>,
    format: Format,
) -> Result<Vec<Entries>> {
    let blocks = parallel(0..selected.blocks.len());
    let rounded = |block| {
        Entries::collect(selected.kept(block).map(|(at, residual)| (at, round(residual, format.value))))
    };
    let entries: Vec<Entries> = blocks.map(rounded).collect();
    match overflow(place, &entries, base)? {
        None => Ok(entries),
        Some(index) => Err(CallerError::NotFinite { what: Operand::Rounded, index }.into()),
    }
}

/// Rounds the kept values to bf16. Values that would round to infinity become the largest finite bf16.
pub(crate) fn round_saturating(selected: &Selected) -> Vec<Entries> {
    let round = |value: f32| {
        let rounded = round(value, ValueFormat::Bf16);
        if rounded.is_finite() { rounded } else { <u16 as Weight>::LARGEST.copysign(value) }
    };
    let blocks = parallel(0..selected.blocks.len());
    blocks.map(|block| Entries::collect(selected.kept(block).map(|(at, value)| (at, round(value))))).collect()
}

fn round(residual: f32, format: ValueFormat) -> f32 {
    match format {
        ValueFormat::F32 => residual,
        ValueFormat::Bf16 | ValueFormat::Bf16Rice => bf16_to_f32(f32_to_bf16(residual)),
    }
}

fn smallest(selected: &Selected) -> Option<f32> {
    let blocks = parallel(0..selected.blocks.len());
    let of_block = |block| selected.kept(block).map(|(_, residual)| residual.abs()).reduce(f32::min);
    blocks.filter_map(of_block).reduce_with(f32::min)
}

/// The part of a stream that belongs to one block.
#[derive(Debug, Default)]
struct EncodedBlock {
    count: usize,
    indices: Vec<u8>,
    index_parameter: u32,
    values: Vec<u8>,
    value_parameter: u32,
    base: u16,
}

impl EncodedBlock {
    fn new(entries: &Entries, block: usize, format: Format) -> Self {
        let mut encoded = Self { count: entries.positions.len(), ..Self::default() };
        encoded.write_indices(&entries.positions, block, format.index);
        encoded.write_values(&entries.values, format.value);
        encoded
    }

    fn write_indices(&mut self, positions: &[u16], block: usize, format: IndexFormat) {
        self.indices = match format {
            IndexFormat::U32 => {
                let start = block * BLOCK;
                let index = |&position: &u16| (start as u32 + u32::from(position)).to_le_bytes();
                positions.iter().flat_map(index).collect()
            }
            IndexFormat::U16 => positions.iter().flat_map(|position| position.to_le_bytes()).collect(),
            IndexFormat::Rice => {
                let mut next = 0;
                let gap = |&position: &u16| {
                    let gap = position - next;
                    // Wraps only after the last position of a full block, where `next` is no longer used.
                    next = position.wrapping_add(1);
                    gap
                };
                let gaps: Vec<u16> = positions.iter().map(gap).collect();
                let codes;
                (codes, self.index_parameter) = rice::encode_best(&gaps);
                codes
            }
        };
    }

    fn write_values(&mut self, values: &[f32], format: ValueFormat) {
        self.values = match format {
            ValueFormat::F32 => values.iter().flat_map(|value| value.to_le_bytes()).collect(),
            ValueFormat::Bf16 => values.iter().flat_map(|&value| f32_to_bf16(value).to_le_bytes()).collect(),
            ValueFormat::Bf16Rice => {
                let magnitude = |value: f32| f32_to_bf16(value.abs());
                self.base = values.iter().map(|&value| magnitude(value)).min().unwrap_or_default();
                let number =
                    |&value: &f32| (magnitude(value) - self.base) << 1 | u16::from(value.is_sign_negative());
                let numbers: Vec<u16> = values.iter().map(number).collect();
                let codes;
                (codes, self.value_parameter) = rice::encode_best(&numbers);
                codes
            }
        };
    }
}

/// Appends a payload in the layout that [`sections`](super::sections) documents.
fn write_payload(blocks: &[EncodedBlock], format: Format, kept: usize, out: &mut Vec<u8>) {
    let bytes: usize = blocks.iter().map(|block| block.indices.len() + block.values.len()).sum();
    out.reserve(4 + 12 * blocks.len() + bytes);
    out.extend_from_slice(&(kept as u32).to_le_bytes());
    if format.index != IndexFormat::U32 {
        out.extend(blocks.iter().flat_map(|block| join_word(block.count, block.index_parameter)));
    }
    if format.index == IndexFormat::Rice {
        // At most 8192 bytes: with parameter 0 a block has one bit for each of its weights.
        out.extend(blocks.iter().flat_map(|block| (block.indices.len() as u16).to_le_bytes()));
    }
    if format.value == ValueFormat::Bf16Rice {
        out.extend(blocks.iter().flat_map(|block| block.base.to_le_bytes()));
        out.extend(blocks.iter().flat_map(|block| join_word(block.values.len(), block.value_parameter)));
    }
    blocks.iter().for_each(|block| out.extend_from_slice(&block.indices));
    blocks.iter().for_each(|block| out.extend_from_slice(&block.values));
}
