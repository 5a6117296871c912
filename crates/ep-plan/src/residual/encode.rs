//! Encoding of an expert into a stream.

use ep::numeric::{bf16_to_f32, f32_to_bf16};
use rayon::prelude::*;

use super::error::{CallerError, Operand, Result};
use super::format::{BLOCK, Format, HEADER_BYTES, IndexFormat, ValueFormat};
use super::rice;
use super::select::{Selected, Selection, select};
use super::shared::{SharedExpert, check_length};
use super::stream::{join_word, seal};
use super::weight::Weight;

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
    /// rayon pool; the bytes do not depend on their number. After an error `out` is unchanged.
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
        let blocks = self.encode_blocks(&selected, shared.weights())?;

        let start = out.len();
        let kept = blocks.iter().map(|block| block.count).sum();
        out.resize(start + HEADER_BYTES as usize, 0);
        write_payload(&blocks, self.format, kept, out);
        seal(&mut out[start..], T::ELEMENT, self.format, elements, shared.fingerprint());
        let smallest = blocks.iter().filter_map(|block| block.smallest).reduce(f32::min);
        Ok(Stats { kept, bytes: out.len() - start, smallest })
    }

    fn encode_blocks<T: Weight>(&self, selected: &Selected, shared: &[T]) -> Result<Vec<EncodedBlock>> {
        let blocks: Vec<_> = shared
            .par_chunks(BLOCK)
            .enumerate()
            .map(|(block, shared)| EncodedBlock::new(selected, block, shared, self.format))
            .collect();
        // Collected in order, so that the error reported is that of the lowest index.
        blocks.into_iter().collect()
    }
}

/// Adding a magnitude below this to a finite f32 or bf16 cannot overflow: it is far below 2^103, half a unit in the
/// last place of the largest f32.
const LARGE: f32 = 1e30;

/// The part of a stream that belongs to one block.
#[derive(Debug, Default)]
struct EncodedBlock {
    count: usize,
    indices: Vec<u8>,
    index_parameter: u32,
    values: Vec<u8>,
    value_parameter: u32,
    base: u16,
    smallest: Option<f32>,
}

impl EncodedBlock {
    fn new<T: Weight>(selected: &Selected, block: usize, shared: &[T], format: Format) -> Result<Self> {
        let mut positions = Vec::new();
        let mut values = Vec::new();
        let mut smallest = f32::INFINITY;
        for (position, residual) in selected.kept(block) {
            let value = match format.value {
                ValueFormat::F32 => residual,
                ValueFormat::Bf16 | ValueFormat::Bf16Rice => bf16_to_f32(f32_to_bf16(residual)),
            };
            let at = usize::from(position);
            // Most values cannot overflow a sum. Skipping the check for them avoids scattered reads of the shared
            // expert, which would take longer than the rest of the encoding.
            let is_large = value.abs() >= LARGE;
            if is_large && !T::from_f32(shared[at].to_f32() + value).to_f32().is_finite() {
                let index = block * BLOCK + at;
                return Err(CallerError::NotFinite { what: Operand::Rounded, index }.into());
            }
            smallest = smallest.min(residual.abs());
            positions.push(position);
            values.push(value);
        }
        let smallest = if positions.is_empty() { None } else { Some(smallest) };
        let mut encoded = Self { count: positions.len(), smallest, ..Self::default() };
        encoded.write_indices(&positions, block, format.index);
        encoded.write_values(&values, format.value);
        Ok(encoded)
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

/// Appends a payload in the layout that [`stream`](super::stream) documents.
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
