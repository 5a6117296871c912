//! From weights to a stream.

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
    /// How they are found.
    pub selection: Selection,
    /// How they are written.
    pub format: Format,
}

/// What an encoding came to.
#[derive(Debug, Clone, Copy, PartialEq)]
pub struct Stats {
    /// Residuals in the stream: k, or a little less with [`Selection::Approximate`].
    pub kept: usize,
    /// Bytes of the stream, header included.
    pub bytes: usize,
    /// The smallest magnitude that was kept, before it was rounded to the value format; the same or smaller ones were
    /// dropped. `None` when nothing was kept.
    pub smallest: Option<f32>,
}

impl Encoder {
    /// Appends one stream to `out`: the k of the P residuals `expert - shared` that are largest by magnitude, of equal
    /// ones those of lower index.
    ///
    /// A residual is one f32 subtraction. Runs on the threads of the current rayon pool; the bytes do not depend on
    /// their number. `out` is unchanged after an error.
    ///
    /// # Errors
    /// [`CallerError::Length`] when the expert is not as long as the shared expert; [`CallerError::TooManyKept`];
    /// [`CallerError::NotFinite`], also for a residual or a decoded weight that would overflow: what was encoded
    /// decodes to finite weights.
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
        // In order, so that the error is that of the lowest index.
        blocks.into_iter().collect()
    }
}

/// A magnitude far below half the last place of the largest f32, which is 2^103: added to a finite f32 or bf16, less
/// than this does not overflow.
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
            // Most values cannot overflow a sum, and to read their places in the shared expert, far apart as they
            // are, would take longer than all the rest.
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
                    // Wraps after the last position of a full block only, where it is not used.
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

/// Appends a payload; its layout is that of [`stream`](super::stream).
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
