//! Decoding of a stream onto its shared expert.

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
/// `out` has shape `[P]`. For each weight, `out = shared + residual` where the stream holds a residual (one f32
/// addition, rounded to `T`, to nearest, ties to even), and `out = shared` elsewhere. The function runs on the threads
/// of the current rayon pool.
///
/// # Errors
/// [`Corruption`] when `bytes` is not exactly one whole stream. [`CallerError`] when the stream has another weight
/// type, length or shared expert than the arguments. After an error `out` is unchanged, with two exceptions:
/// [`Corruption::Indices`] and [`Corruption::Values`] leave it unspecified. Only a stream with a matching checksum can
/// cause these two.
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

/// The decoded entries of one block. Each thread reuses one.
#[derive(Debug, Default)]
struct Scratch {
    positions: Vec<u16>,
    values: Vec<f32>,
    /// Numbers decoded from a Rice code.
    numbers: Vec<u16>,
}

impl Scratch {
    fn read(&mut self, bytes: BlockBytes<'_>, format: Format) -> Result<(), Corruption> {
        let block = bytes.block;
        self.read_positions(bytes, format.index).ok_or(Corruption::Indices { block })?;
        self.read_values(bytes, format.value).ok_or(Corruption::Values { block })
    }

    /// Reads the positions of the entries. `None` when they are not strictly increasing inside the block.
    fn read_positions(&mut self, bytes: BlockBytes<'_>, format: IndexFormat) -> Option<()> {
        self.positions.clear();
        match format {
            // Only the lower 16 bits matter here: `blocks` checked the order and found the block by all 32.
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
                // Positions increase: if the last one is inside the block, no conversion to u16 truncated.
                (next <= BLOCK).then_some(())
            }
        }
    }

    /// Reads one value per entry. `None` when the bytes are not a valid code or a value is not finite.
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
                    // A magnitude of more than 15 bits becomes a NaN, which the check below refuses.
                    let magnitude = (base + (number >> 1)).min(0x7FFF);
                    f32::from_bits(magnitude << 16 | number << 31)
                }));
            }
        }
        values.iter().fold(true, |all, value| all & value.is_finite()).then_some(())
    }

    /// Writes shared + value at each position of the block. `None` when a position is outside the block.
    fn add<T: Weight>(&self, shared: &[T], out: &mut [T]) -> Option<()> {
        for (&position, &value) in self.positions.iter().zip(&self.values) {
            let at = usize::from(position);
            *out.get_mut(at)? = T::from_f32(shared.get(at)?.to_f32() + value);
        }
        Some(())
    }
}
