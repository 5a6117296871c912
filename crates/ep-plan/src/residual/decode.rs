//! From a stream, and the shared expert, to weights.

use ep::numeric::bf16_to_f32;
use rayon::prelude::*;

use super::error::{CallerError, Corruption, Operand, Result};
use super::format::{BLOCK, Format, IndexFormat, ValueFormat};
use super::rice;
use super::shared::{SharedExpert, check_length};
use super::stream::{BlockBytes, StreamInfo, blocks, open};
use super::weight::Weight;

/// Decodes exactly one stream onto its shared expert.
///
/// For each of the P weights, `out = shared` where no residual was kept, and elsewhere `out = shared + residual`: one
/// f32 addition, rounded to `T` (nearest even). Runs on the threads of the current rayon pool.
///
/// # Errors
/// [`Corruption`] for bytes that are not one whole stream, whatever they are; [`CallerError`] for a stream of another
/// weight type, length or shared expert. `out` is unchanged unless it is one of [`Corruption::Indices`] and
/// [`Corruption::Values`], which only a stream with a matching checksum can give; then its contents are unspecified.
pub fn decode_add<T: Weight>(bytes: &[u8], shared: &SharedExpert<T>, out: &mut [T]) -> Result<StreamInfo> {
    let (info, payload) = open(bytes)?;
    if info.bytes != bytes.len() {
        let (expected, found) = (info.bytes as u64, bytes.len() as u64);
        return Err(Corruption::TrailingBytes { expected, found }.into());
    }
    if info.element != T::ELEMENT {
        return Err(CallerError::Element { stream: info.element, given: T::ELEMENT }.into());
    }
    check_length(Operand::Shared, info.elements, shared.weights().len())?;
    check_length(Operand::Output, info.elements, out.len())?;
    if info.shared != shared.fingerprint() {
        return Err(CallerError::OtherShared { stream: info.shared, given: shared.fingerprint() }.into());
    }
    let problem = blocks(info, payload)?
        .into_par_iter()
        .zip(shared.weights().par_chunks(BLOCK).zip(out.par_chunks_mut(BLOCK)))
        .map_init(Scratch::default, |scratch, (bytes, (shared, out))| {
            out.copy_from_slice(shared);
            scratch.read(bytes, info.format)?;
            scratch.add(shared, out).ok_or(Corruption::Indices { block: bytes.block })
        })
        .find_map_first(Result::err);
    match problem {
        None => Ok(info),
        Some(corruption) => Err(corruption.into()),
    }
}

/// The entries of one block.
#[derive(Debug, Default)]
struct Scratch {
    positions: Vec<u16>,
    values: Vec<f32>,
    /// What a Rice code gave.
    numbers: Vec<u16>,
}

impl Scratch {
    fn read(&mut self, bytes: BlockBytes<'_>, format: Format) -> Result<(), Corruption> {
        let block = bytes.block;
        self.read_positions(bytes, format.index).ok_or(Corruption::Indices { block })?;
        self.read_values(bytes, format.value).ok_or(Corruption::Values { block })
    }

    /// Positions, strictly increasing; `None` if they are not.
    fn read_positions(&mut self, bytes: BlockBytes<'_>, format: IndexFormat) -> Option<()> {
        self.positions.clear();
        match format {
            // Its lower 16 bits; the order was checked, and the block found, by all 32.
            IndexFormat::U32 => {
                let (indices, _) = bytes.indices.bytes.as_chunks::<4>();
                self.positions.extend(indices.iter().map(|&[low, high, ..]| u16::from_le_bytes([low, high])));
                Some(())
            }
            IndexFormat::U16 => {
                let (positions, _) = bytes.indices.bytes.as_chunks::<2>();
                self.positions.extend(positions.iter().map(|&position| u16::from_le_bytes(position)));
                let pairs = self.positions.iter().zip(self.positions.get(1..).unwrap_or_default());
                pairs.fold(true, |all, (a, b)| all & (a < b)).then_some(())
            }
            IndexFormat::Rice => {
                self.numbers.resize(bytes.count, 0);
                rice::decode(bytes.indices.bytes, bytes.indices.parameter, &mut self.numbers).ok()?;
                let mut next = 0_usize;
                self.positions.extend(self.numbers.iter().map(|&gap| {
                    let position = next + usize::from(gap);
                    next = position + 1;
                    position as u16
                }));
                // Positions grow, so that if the last one is in the block, none was cut short.
                (next <= BLOCK).then_some(())
            }
        }
    }

    /// Values, one for each entry; `None` if they are not, or not finite.
    fn read_values(&mut self, bytes: BlockBytes<'_>, format: ValueFormat) -> Option<()> {
        self.values.clear();
        let Self { values, numbers, .. } = self;
        match format {
            ValueFormat::F32 => {
                values
                    .extend(bytes.values.bytes.as_chunks().0.iter().map(|&value| f32::from_le_bytes(value)));
            }
            ValueFormat::Bf16 => {
                let (halves, _) = bytes.values.bytes.as_chunks();
                values.extend(halves.iter().map(|&half| bf16_to_f32(u16::from_le_bytes(half))));
            }
            ValueFormat::Bf16Rice => {
                numbers.resize(bytes.count, 0);
                rice::decode(bytes.values.bytes, bytes.values.parameter, numbers).ok()?;
                let base = u32::from(bytes.base);
                values.extend(numbers.iter().map(|&number| {
                    let number = u32::from(number);
                    // What does not fit 15 bits becomes a NaN.
                    let magnitude = (base + (number >> 1)).min(0x7FFF);
                    f32::from_bits(magnitude << 16 | number << 31)
                }));
            }
        }
        values.iter().fold(true, |all, value| all & value.is_finite()).then_some(())
    }

    /// Adds the values onto a copy of the block; `None` if a position is not in it.
    fn add<T: Weight>(&self, shared: &[T], out: &mut [T]) -> Option<()> {
        for (&position, &value) in self.positions.iter().zip(&self.values) {
            let at = usize::from(position);
            *out.get_mut(at)? = T::from_f32(shared.get(at)?.to_f32() + value);
        }
        Some(())
    }
}
