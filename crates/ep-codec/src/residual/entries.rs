//! Residuals at some positions of a block, and their application to weights and sums.

use super::format::BLOCK;
use crate::error::Result;
use crate::parallel::{IndexedParallelIterator, Parallel, ParallelIterator};
use crate::place::{Place, in_main_memory};
use crate::weight::Weight;

/// Some residuals of one [`BLOCK`] of elements.
#[derive(Debug, Clone, Default, PartialEq)]
pub struct Entries {
    /// Positions in the block, ascending.
    pub positions: Vec<u16>,
    /// The value at each position.
    pub values: Vec<f32>,
}

/// Adding a magnitude below this to a finite f32 or bf16 cannot overflow: it is far below 2^103, half a unit in the
/// last place of the largest f32.
const LARGE: f32 = 1e30;

impl Entries {
    pub(crate) fn collect(entries: impl Iterator<Item = (u16, f32)>) -> Self {
        let (positions, values) = entries.unzip();
        Self { positions, values }
    }

    pub(crate) fn push(&mut self, position: usize, value: f32) {
        self.positions.push(position as u16);
        self.values.push(value);
    }

    /// Returns the first position at which base + value is not finite. Positions must be inside the block; weights of
    /// the base that are not finite are ignored.
    fn overflow<T: Weight>(&self, base: &[T]) -> Option<usize> {
        // Most values cannot overflow a sum. Skipping the check for them avoids scattered reads of the base, which
        // would take longer than the rest of the encoding.
        let entries = self.positions.iter().zip(&self.values).filter(|(_, value)| value.abs() >= LARGE);
        entries.map(|(&position, &value)| (usize::from(position), value)).find_map(|(at, value)| {
            let sum = T::from_f32(base.get(at)?.to_f32() + value);
            (!sum.to_f32().is_finite()).then_some(at)
        })
    }

    /// Adds each value to the weight at its position: one f32 addition, rounded to `T`.
    fn add_to<T: Weight>(&self, weights: &mut [T]) {
        for (&position, &value) in self.positions.iter().zip(&self.values) {
            if let Some(weight) = weights.get_mut(usize::from(position)) {
                *weight = T::from_f32(weight.to_f32() + value);
            }
        }
    }
}

/// The first index at which the sum of `base` and an entry is not finite. Weights of the base that are not finite are ignored.
pub(crate) fn overflow<P: Place, T: Weight>(
    place: &P,
    entries: &[Entries],
    base: P::Ref<'_, T>,
) -> Result<Option<usize>> {
    let is_large = |entries: &Entries| entries.values.iter().any(|value| value.abs() >= LARGE);
    if !entries.par_iter().any(is_large) {
        return Ok(None);
    }
    in_main_memory(place, base, |base| {
        let blocks = entries.par_iter().zip(base.par_chunks(BLOCK)).enumerate();
        blocks.filter_map(|(block, (entries, base))| Some(block * BLOCK + entries.overflow(base)?)).min()
    })
}

/// Adds the entries of each block to `weights`: one f32 addition each, rounded to `T`.
pub(crate) fn add<T: Weight>(entries: &[Entries], weights: &mut [T]) {
    let blocks = entries.par_iter().zip(weights.par_chunks_mut(BLOCK));
    blocks.for_each(|(entries, weights)| entries.add_to(weights));
}

/// Writes `base` plus the entries of each block to `out`, as [`add`] does.
pub(crate) fn add_onto<T: Weight>(entries: &[Entries], base: &[T], out: &mut [T]) {
    let blocks = entries.par_iter().zip(base.par_chunks(BLOCK).zip(out.par_chunks_mut(BLOCK)));
    blocks.for_each(|(entries, (base, out))| {
        out.copy_from_slice(base);
        entries.add_to(out);
    });
}

/// Subtracts the entries of each block from `carry`: one f32 subtraction each.
pub(crate) fn subtract(entries: &[Entries], carry: &mut [f32]) {
    entries.par_iter().zip(carry.par_chunks_mut(BLOCK)).for_each(|(entries, carry)| {
        for (&position, &value) in entries.positions.iter().zip(&entries.values) {
            if let Some(carry) = carry.get_mut(usize::from(position)) {
                *carry -= value;
            }
        }
    });
}
