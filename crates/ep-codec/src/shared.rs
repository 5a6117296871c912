//! The shared expert, which every rank holds and against which residuals are taken.

use crate::error::{CallerError, Operand, Result};
use crate::hash::digest;
use crate::parallel::{IndexedParallelIterator, Parallel, ParallelIterator};
use crate::place::{Host, Place};
use crate::weight::Weight;

/// Weights per tile of f32 sums. Each thread works on one tile at a time; a tile fits into the first-level cache.
const TILE: usize = 4096;

/// The shared expert: weights `[P]`, all finite, with a fingerprint that identifies them in a stream.
#[derive(Debug, Clone, PartialEq)]
pub struct SharedExpert<T> {
    weights: Vec<T>,
    fingerprint: u64,
}

impl<T: Weight> SharedExpert<T> {
    /// The mean of N experts of P weights each.
    ///
    /// For each index `i`, in f32: `sum = e[0][i]`, then `sum += e[n][i]` for n = 1 .. N in this order, then
    /// `sum / N`, rounded to `T` (to nearest, ties to even). The result has the same bits for any number of threads.
    /// The mean of one expert is that expert.
    ///
    /// # Errors
    /// [`CallerError::NoExperts`] when the list is empty. [`CallerError::Length`] when the experts differ in length.
    /// [`CallerError::TooLong`] when P exceeds `u32::MAX`. [`CallerError::NotFinite`] when a weight is NaN or infinite,
    /// or a sum overflows f32.
    pub fn mean_of(experts: &[&[T]]) -> Result<Self> {
        let [first, others @ ..] = experts else { return Err(CallerError::NoExperts.into()) };
        for (place, expert) in experts.iter().enumerate() {
            check_length(Operand::ExpertOfMean(place), first.len(), expert.len())?;
        }
        check_indexable(first.len())?;

        let count = experts.len() as f32;
        let mut weights: Vec<T> = first.to_vec();
        let bad = weights
            .par_chunks_mut(TILE)
            .enumerate()
            .filter_map(|(tile, means)| {
                let start = tile * TILE;
                let mut sums = [0.0; TILE];
                let sums = &mut sums[..means.len()];
                for (sum, &weight) in sums.iter_mut().zip(&*means) {
                    *sum = weight.to_f32();
                }
                for expert in others {
                    for (sum, &weight) in sums.iter_mut().zip(&expert[start..start + means.len()]) {
                        *sum += weight.to_f32();
                    }
                }
                for (mean, &sum) in means.iter_mut().zip(&*sums) {
                    *mean = T::from_f32(sum / count);
                }
                first_not_finite(means).map(|at| start + at)
            })
            .min();
        match bad {
            None => Ok(Self::fingerprinted(weights)),
            Some(index) => {
                let what = experts
                    .iter()
                    .position(|expert| !expert[index].to_f32().is_finite())
                    .map_or(Operand::Mean, Operand::ExpertOfMean);
                Err(CallerError::NotFinite { what, index }.into())
            }
        }
    }

    /// Makes a shared expert of existing weights `[P]`, received from another rank or read from a checkpoint.
    ///
    /// # Errors
    /// [`CallerError::TooLong`] when P exceeds `u32::MAX`. [`CallerError::NotFinite`] when a weight is NaN or infinite.
    pub fn from_weights(weights: Vec<T>) -> Result<Self> {
        check_indexable(weights.len())?;
        match Host.first_not_finite(&weights)? {
            None => Ok(Self::fingerprinted(weights)),
            Some(index) => Err(CallerError::NotFinite { what: Operand::Shared, index }.into()),
        }
    }

    /// The weights, `[P]`.
    pub fn weights(&self) -> &[T] {
        &self.weights
    }

    /// A hash of the bytes of the weights. A stream holds the fingerprint of the shared expert it was encoded against.
    pub fn fingerprint(&self) -> u64 {
        self.fingerprint
    }

    fn fingerprinted(weights: Vec<T>) -> Self {
        let fingerprint = digest(bytemuck::cast_slice(&weights));
        Self { weights, fingerprint }
    }
}

pub(crate) fn check_length(what: Operand, expected: usize, found: usize) -> Result<()> {
    if expected == found { Ok(()) } else { Err(CallerError::Length { what, expected, found }.into()) }
}

pub(crate) fn check_indexable(elements: usize) -> Result<()> {
    if u32::try_from(elements).is_ok() { Ok(()) } else { Err(CallerError::TooLong(elements).into()) }
}

pub(crate) fn first_not_finite<T: Weight>(weights: &[T]) -> Option<usize> {
    // The fold has no early exit, so that it is vectorised. The search runs at most once.
    let all_finite = weights.iter().fold(true, |all, weight| all & weight.to_f32().is_finite());
    if all_finite { None } else { weights.iter().position(|weight| !weight.to_f32().is_finite()) }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::Error;
    use ep::numeric::{bf16_to_f32, f32_to_bf16};

    #[test]
    fn sums_in_the_order_of_the_experts() {
        // Adding 4 to 1e8 leaves 1e8 unchanged in f32; adding 1e8 to the sum 4 + 4 does not.
        let mean = |values: [f32; 4]| {
            let experts = values.map(|value| [value]);
            let experts: Vec<&[f32]> = experts.iter().map(|expert| &expert[..]).collect();
            SharedExpert::mean_of(&experts).unwrap().weights()[0]
        };
        assert_eq!(mean([4.0, 4.0, 1e8, 0.0]), 100_000_008.0 / 4.0);
        assert_eq!(mean([1e8, 4.0, 4.0, 0.0]), 1e8 / 4.0);
        assert_eq!(mean([1e8, 4.0, 4.0, -1e8]), 0.0);
    }

    #[test]
    fn mean_equals_the_scalar_formula_for_any_number_of_tiles() {
        for length in [0, 1, TILE - 1, TILE, 2 * TILE + 77] {
            let experts: Vec<Vec<u16>> = (0..3_u32)
                .map(|n| (0..length).map(|i| f32_to_bf16((i as f32 * 0.37 + n as f32).sin())).collect())
                .collect();
            let slices: Vec<&[u16]> = experts.iter().map(Vec::as_slice).collect();
            let shared = SharedExpert::mean_of(&slices).unwrap();
            for (i, &mean) in shared.weights().iter().enumerate() {
                let [a, b, c] = [0, 1, 2].map(|n| bf16_to_f32(experts[n][i]));
                assert_eq!(mean, f32_to_bf16((a + b + c) / 3.0));
            }
            assert_eq!(shared, SharedExpert::from_weights(shared.weights().to_vec()).unwrap());
        }
    }

    #[test]
    fn mean_of_one_expert_is_that_expert() {
        let bits = [0x8000_0000_u32, 0, 1, 0x807F_FFFF, 0x3F80_0001, 0x7F7F_FFFF];
        let expert = bits.map(f32::from_bits);
        let shared = SharedExpert::mean_of(&[&expert]).unwrap();
        assert_eq!(shared.weights().iter().map(|weight| weight.to_bits()).collect::<Vec<_>>(), bits);
    }

    #[test]
    fn an_error_has_the_index_of_the_first_weight_that_is_not_finite() {
        let mut experts = [vec![1.0_f32; 10_000], vec![2.0; 10_000]];
        experts[1][9_000] = f32::NAN;
        experts[0][9_001] = f32::INFINITY;
        let mean = |experts: &[Vec<f32>; 2]| SharedExpert::mean_of(&[&experts[0], &experts[1]]);
        let error = |what, index| Err(Error::Caller(CallerError::NotFinite { what, index }));
        assert_eq!(mean(&experts), error(Operand::ExpertOfMean(1), 9_000));
        experts[1][9_000] = 0.0;
        assert_eq!(mean(&experts), error(Operand::ExpertOfMean(0), 9_001));
        assert_eq!(SharedExpert::from_weights(experts[0].clone()), error(Operand::Shared, 9_001));
        experts[0] = vec![f32::MAX; 10_000];
        experts[1] = experts[0].clone();
        assert_eq!(mean(&experts), error(Operand::Mean, 0));
    }

    #[test]
    fn an_empty_list_and_experts_of_different_lengths_are_refused() {
        assert_eq!(SharedExpert::<f32>::mean_of(&[]), Err(Error::Caller(CallerError::NoExperts)));
        let what = Operand::ExpertOfMean(1);
        assert_eq!(
            SharedExpert::mean_of(&[&[1.0_f32, 2.0][..], &[1.0]]),
            Err(Error::Caller(CallerError::Length { what, expected: 2, found: 1 }))
        );
    }
}
