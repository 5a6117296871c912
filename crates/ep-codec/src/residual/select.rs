//! Selection of the residuals to keep: the k of largest magnitude, exactly or approximately.
//!
//! Magnitudes are compared as the bits of |residual| (*keys*), which have the same order as the numbers. A sample
//! suggests a lower bound (*floor*). One pass over the expert collects the candidates, the residuals at or above the
//! floor. A radix select among the candidates (a histogram by their upper 15 bits, then one bin of it) finds the k-th
//! largest. If there are fewer than k candidates, a histogram of all residuals gives a floor that yields enough, and
//! the pass runs again. In an exact selection the sample therefore affects the running time, never the result.

use super::entries::Entries;
use super::format::BLOCK;
use crate::error::{CallerError, Operand, Result};
use crate::parallel::{IndexedParallelIterator, Parallel, ParallelIterator};
use crate::weight::{Value, Weight};

/// How the encoder finds the k largest residuals. Of equal magnitudes, those of lower index are kept.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default, Hash)]
#[non_exhaustive]
pub enum Selection {
    /// Exactly the k largest.
    #[default]
    Exact,
    /// The j largest, where j is at most k and normally slightly smaller: all residuals at or above a threshold that is
    /// estimated from S = 262,144 of the P residuals, and of these the k largest if there are more.
    ///
    /// With `s = sqrt(P / (S k))`, the relative standard deviation of the count for a random sample, j / k is `1 - 2 s`
    /// with a standard deviation of `s`. The deviation is larger where large residuals are next to each other. The
    /// selection is the same as `Exact` when P <= S, or when fewer than 64 of the sample are expected to be kept.
    Approximate,
}

/// The candidates of each block, and the rule that says which of them are kept.
#[derive(Debug)]
pub(crate) struct Selected {
    pub(crate) blocks: Vec<Entries>,
    /// For each block, the number of residuals with exactly the threshold as key that are kept: the first ones.
    ties: Vec<usize>,
    /// The key of the k-th largest residual. Residuals with smaller keys are dropped.
    threshold: u32,
}

impl Selected {
    /// The kept entries of a block, ascending by position.
    pub(crate) fn kept(&self, block: usize) -> impl Iterator<Item = (u16, f32)> {
        let Entries { positions, values } = &self.blocks[block];
        let mut ties = self.ties[block];
        positions.iter().copied().zip(values.iter().copied()).filter(move |&(_, residual)| {
            let key = key(residual);
            let is_tie = key == self.threshold && ties > 0;
            ties -= usize::from(is_tie);
            key > self.threshold || is_tie
        })
    }
}

/// The bits of a magnitude. Keys have the order of the magnitudes, with infinity and then NaN above all numbers.
fn key(residual: f32) -> u32 {
    residual.to_bits() & 0x7FFF_FFFF
}

/// The key of infinity. Residuals with this key or a larger one are not finite.
const INFINITE: u32 = 0x7F80_0000;

/// Defines a residual: one f32 subtraction.
fn residual<E: Value, S: Value>(expert: E, shared: S) -> f32 {
    expert.value() - shared.value()
}

/// Selects the residuals to keep. Requires `k <= expert.len()` and `expert.len() == shared.len()`.
///
/// # Errors
/// [`CallerError::NotFinite`] for the first residual that is not finite, kept or not.
pub(crate) fn select<T: Weight>(
    expert: &[T],
    shared: &[T],
    k: usize,
    selection: Selection,
) -> Result<Selected> {
    let of = |index: usize| Ok(expert[index]);
    Selected::of(superset(expert, shared, k, selection), k, of)
}

/// Returns the residuals at or above a floor: those that the selection keeps, usually a few more, and all that are not
/// finite. Requires `k <= expert.len()` and `expert.len() == shared.len()`.
pub(crate) fn superset<E: Value, S: Value>(
    expert: &[E],
    shared: &[S],
    k: usize,
    selection: Selection,
) -> Vec<Entries> {
    let (floor, must_find) = sampled_floor(expert, shared, k, selection);
    let blocks = candidates(expert, shared, floor);
    if count(&blocks) < must_find {
        return candidates(expert, shared, dense_floor(expert, shared, k));
    }
    blocks
}

impl Selected {
    /// Selects among residuals as [`Place::residuals`](crate::Place::residuals) returns them. `element` gives the element of the
    /// expert with an index.
    ///
    /// # Errors
    /// [`CallerError::NotFinite`] for the first residual that is not finite. The error of `element`.
    pub(crate) fn of<T: Weight>(
        blocks: Vec<Entries>,
        k: usize,
        element: impl FnOnce(usize) -> Result<T>,
    ) -> Result<Self> {
        let bad = blocks.par_iter().enumerate().find_map_first(|(block, entries)| {
            let bad = entries.values.iter().position(|residual| !residual.is_finite())?;
            Some(block * BLOCK + usize::from(entries.positions[bad]))
        });
        if let Some(index) = bad {
            let is_expert = !element(index)?.to_f32().is_finite();
            let what = if is_expert { Operand::Expert } else { Operand::Residual };
            return Err(CallerError::NotFinite { what, index }.into());
        }
        if count(&blocks) <= k {
            let ties = vec![usize::MAX; blocks.len()];
            return Ok(Self { blocks, ties, threshold: 0 });
        }
        let (threshold, above) =
            kth_largest(&blocks.iter().map(|block| &block.values[..]).collect::<Vec<_>>(), k);
        let ties_of = |block: &Entries| block.values.iter().filter(|&&r| key(r) == threshold).count();
        let mut ties_left = k - above;
        let mut ties: Vec<usize> = blocks.par_iter().map(ties_of).collect();
        for ties in &mut ties {
            *ties = (*ties).min(ties_left);
            ties_left -= *ties;
        }
        Ok(Self { blocks, ties, threshold })
    }
}

fn count(blocks: &[Entries]) -> usize {
    blocks.iter().map(|block| block.positions.len()).sum()
}

/// Residuals in the sample. An approximate selection has the larger sample because its result depends on the sample.
const EXACT_SAMPLE: usize = 1 << 16;
const APPROXIMATE_SAMPLE: usize = 1 << 18;

/// Estimates a floor from a sample. Also returns the number of candidates below which the floor is too high.
fn sampled_floor<E: Value, S: Value>(
    expert: &[E],
    shared: &[S],
    k: usize,
    selection: Selection,
) -> (u32, usize) {
    if k == 0 {
        return (INFINITE, 0);
    }
    let density = k as f64 / expert.len() as f64;
    let expected = APPROXIMATE_SAMPLE as f64 * density;
    let is_approximate =
        selection == Selection::Approximate && expert.len() > APPROXIMATE_SAMPLE && expected >= 64.0;
    let (sample, rank, must_find) = if is_approximate {
        // Aim two standard deviations below the expected count, so that more than k candidates are rare.
        (sample(expert, shared, APPROXIMATE_SAMPLE), expected - 2.0 * expected.sqrt(), 0)
    } else {
        // Aim four standard deviations above it, so that fewer than k candidates are rare. If the sample is the whole
        // expert, the floor is exactly the k-th largest.
        let sample = sample(expert, shared, EXACT_SAMPLE);
        let expected = sample.len() as f64 * density;
        let margin = if sample.len() == expert.len() { 0.0 } else { 4.0 * expected.sqrt() + 4.0 };
        (sample, expected + margin, k)
    };
    let rank = rank.round() as usize;
    let floor = if rank > sample.len() { 0 } else { kth_largest(&[&sample[..]], rank).0 };
    // Residuals that are not finite must be among the candidates, because only candidates are checked.
    (floor.min(INFINITE), must_find)
}

/// Length of a run of adjacent residuals that are sampled together.
const RUN: usize = 32;

/// Samples `size` residuals, or all if there are no more. The expert is divided into `size / RUN` equal parts, and one
/// run is taken at a pseudo-random place of each part. The places depend on the length of the expert alone.
fn sample<E: Value, S: Value>(expert: &[E], shared: &[S], size: usize) -> Vec<f32> {
    let residuals = |start: usize, end: usize| {
        expert[start..end].iter().zip(&shared[start..end]).map(|(&e, &s)| residual(e, s))
    };
    if expert.len() <= size {
        return residuals(0, expert.len()).collect();
    }
    let part = expert.len() / (size / RUN);
    let mut sampled = Vec::with_capacity(size);
    for number in 0..size / RUN {
        // Fibonacci hashing: the upper bits of number * 2^64 / golden ratio, scaled to the places of a part.
        let hash = (number as u64).wrapping_mul(0x9E37_79B9_7F4A_7C15) >> 32;
        let offset = ((hash * (part - RUN + 1) as u64) >> 32) as usize;
        let start = number * part + offset;
        sampled.extend(residuals(start, start + RUN));
    }
    sampled
}

/// Collects the residuals at or above the floor, by block. No floor is above infinity, so every residual that is not finite
/// is among them.
fn candidates<E: Value, S: Value>(expert: &[E], shared: &[S], floor: u32) -> Vec<Entries> {
    let blocks = expert.par_chunks(BLOCK).zip(shared.par_chunks(BLOCK));
    blocks.map(|(expert, shared)| scan_block(expert, shared, floor)).collect()
}

/// Residuals of a chunk, which are compared with the floor together.
const CHUNK: usize = 32;

/// The residuals of one block at or above the floor.
fn scan_block<E: Value, S: Value>(expert: &[E], shared: &[S], floor: u32) -> Entries {
    // The first loop finds the chunks with a candidate, with a few vector instructions and no branch. The second loop
    // finds the candidates in these chunks.
    let (expert_chunks, expert_tail) = expert.as_chunks::<CHUNK>();
    let (shared_chunks, shared_tail) = shared.as_chunks::<CHUNK>();
    let mut hits = [0_u16; BLOCK / CHUNK];
    let mut count = 0;
    for (number, (expert, shared)) in expert_chunks.iter().zip(shared_chunks).enumerate() {
        let mut any = 0;
        for (&e, &s) in expert.iter().zip(shared) {
            any |= u32::from(key(residual(e, s)) >= floor);
        }
        hits[count % hits.len()] = number as u16;
        count += any as usize;
    }
    let mut entries = Entries::default();
    for &number in &hits[..count] {
        let number = usize::from(number);
        let (expert, shared) = (&expert_chunks[number], &shared_chunks[number]);
        let mut mask = mask_of(expert, shared, floor);
        while mask != 0 {
            let at = mask.trailing_zeros() as usize;
            entries.push(number * CHUNK + at, residual(expert[at], shared[at]));
            mask &= mask - 1;
        }
    }
    for (at, (&e, &s)) in expert_tail.iter().zip(shared_tail).enumerate() {
        let residual = residual(e, s);
        if key(residual) >= floor {
            entries.push(expert.len() - expert_tail.len() + at, residual);
        }
    }
    entries
}

/// Returns one bit per residual of a chunk: whether the residual is at or above the floor.
fn mask_of<E: Value, S: Value>(expert: &[E; CHUNK], shared: &[S; CHUNK], floor: u32) -> u32 {
    let mut flags = [0_u8; CHUNK];
    for (flag, (&e, &s)) in flags.iter_mut().zip(expert.iter().zip(shared)) {
        *flag = u8::from(key(residual(e, s)) >= floor);
    }
    // The product moves bit 8 i (the lowest bit of byte i) to bit 56 + i. No two terms of the product overlap.
    let bits = |flags: &[u8; 8]| (u64::from_le_bytes(*flags).wrapping_mul(0x0102_0408_1020_4080) >> 56) as u8;
    let (groups, _) = flags.as_chunks::<8>();
    let mut mask = [0; CHUNK / 8];
    for (mask, flags) in mask.iter_mut().zip(groups) {
        *mask = bits(flags);
    }
    u32::from_le_bytes(mask)
}

/// The bin of a key is its upper 15 bits: the exponent and 7 bits of the mantissa.
const BIN_SHIFT: u32 = 16;
const BINS: usize = 1 << 15;

/// Up to this number of residuals, one thread selects among their keys sooner than several count them by bin.
const FEW: usize = 1 << 17;

/// Returns the k-th largest key and the number of larger keys. Requires `1 <= k <=` the number of residuals.
fn kth_largest(parts: &[&[f32]], k: usize) -> (u32, usize) {
    if parts.iter().map(|part| part.len()).sum::<usize>() <= FEW {
        let keys = parts.iter().flat_map(|part| part.iter().copied().map(key));
        return kth_of_keys(keys.collect(), k);
    }
    let counts = histogram(parts.par_iter().map(|part| part.iter().copied()));
    let (bin, above) = bin_of_rank(&counts, k);
    let keys = parts
        .par_iter()
        .flat_map_iter(|part| {
            part.iter().map(|&residual| key(residual)).filter(|key| key >> BIN_SHIFT == bin)
        })
        .collect();
    let (kth, larger) = kth_of_keys(keys, k - above);
    (kth, above + larger)
}

/// Returns the k-th largest of some keys and the number of larger ones.
fn kth_of_keys(mut keys: Vec<u32>, k: usize) -> (u32, usize) {
    // `select_nth_unstable` counts from the smallest key.
    let rank = keys.len() - k;
    let (_, &mut kth, larger) = keys.select_nth_unstable(rank);
    (kth, larger.iter().filter(|&&key| key > kth).count())
}

/// Returns the lower border of the highest bin at or above which there are at least k of all residuals.
fn dense_floor<E: Value, S: Value>(expert: &[E], shared: &[S], k: usize) -> u32 {
    let blocks = expert.par_chunks(BLOCK).zip(shared.par_chunks(BLOCK));
    let residuals = blocks.map(|(expert, shared)| expert.iter().zip(shared).map(|(&e, &s)| residual(e, s)));
    bin_of_rank(&histogram(residuals), k).0 << BIN_SHIFT
}

/// Counts the keys of each bin.
fn histogram<I: Iterator<Item = f32>>(parts: impl ParallelIterator<Item = I>) -> Vec<u32> {
    let empty = || vec![0_u32; BINS];
    let count = |mut counts: Vec<u32>, part: I| {
        part.for_each(|residual| counts[(key(residual) >> BIN_SHIFT) as usize % BINS] += 1);
        counts
    };
    let add = |mut sum: Vec<u32>, counts: Vec<u32>| {
        sum.iter_mut().zip(counts).for_each(|(sum, count)| *sum += count);
        sum
    };
    parts.fold(empty, count).reduce(empty, add)
}

/// Returns the highest bin at or above which there are at least `rank` keys, and the number of keys in the bins above
/// it.
fn bin_of_rank(counts: &[u32], rank: usize) -> (u32, usize) {
    let mut above = 0;
    for (bin, &count) in counts.iter().enumerate().rev() {
        if above + count as usize >= rank {
            return (bin as u32, above);
        }
        above += count as usize;
    }
    (0, above)
}

#[cfg(test)]
mod tests {
    use super::*;

    /// The kept indices, and the number of candidates they were selected from.
    fn kept(expert: &[f32], k: usize, selection: Selection) -> (Vec<usize>, usize) {
        let selected = select(expert, &vec![0.0; expert.len()], k, selection).unwrap();
        let kept = (0..selected.blocks.len())
            .flat_map(|block| selected.kept(block).map(move |(at, _)| block * BLOCK + usize::from(at)));
        (kept.collect(), count(&selected.blocks))
    }

    fn by_sorting(expert: &[f32], k: usize) -> Vec<usize> {
        let mut order: Vec<usize> = (0..expert.len()).collect();
        order.sort_by(|&a, &b| expert[b].abs().total_cmp(&expert[a].abs()).then(a.cmp(&b)));
        order.truncate(k);
        order.sort_unstable();
        order
    }

    /// Indices of a sample's residuals.
    fn places(length: usize, size: usize) -> Vec<usize> {
        let indices: Vec<f32> = (0..length).map(|index| index as f32).collect();
        sample(&indices, &vec![0.0; length], size).into_iter().map(|index| index as usize).collect()
    }

    #[test]
    fn samples_are_spread_over_the_whole_expert() {
        for length in [EXACT_SAMPLE + 1, 300_000, 1 << 20] {
            let places = places(length, EXACT_SAMPLE);
            assert_eq!(places.len(), EXACT_SAMPLE);
            assert!(places.is_sorted_by(|a, b| a < b));
            let part = length / (EXACT_SAMPLE / RUN);
            assert!(places.iter().step_by(RUN).enumerate().all(|(run, place)| place / part == run));
        }
        assert_eq!(places(1000, EXACT_SAMPLE), (0..1000).collect::<Vec<_>>());
    }

    #[test]
    fn an_unrepresentative_sample_does_not_change_the_selection() {
        let length = 1 << 20;
        let places = places(length, EXACT_SAMPLE);
        let ordinary = |index: usize| (index as u32).wrapping_mul(2_654_435_761) as f32 / u32::MAX as f32;
        let k = length / 10;
        // Floor far too high: half of the sample is larger than all other residuals.
        let mut expert: Vec<f32> = (0..length).map(ordinary).collect();
        places.iter().step_by(2).for_each(|&place| expert[place] += 8.0);
        assert_eq!(kept(&expert, k, Selection::Exact).0, by_sorting(&expert, k));
        // Floor far too low: the sample contains no large residual.
        let mut expert: Vec<f32> = (0..length).map(|index| ordinary(index) + 8.0).collect();
        places.iter().for_each(|&place| expert[place] -= 8.0);
        let (indices, candidates) = kept(&expert, k, Selection::Exact);
        assert_eq!(indices, by_sorting(&expert, k));
        assert!(candidates > 9 * k);
    }

    #[test]
    fn a_representative_sample_leaves_few_candidates() {
        let mixed = |index: usize| (index as u32).wrapping_mul(2_654_435_761) as f32 - 2e9;
        let expert: Vec<f32> = (0..2 * BLOCK + 5000).map(mixed).collect();
        let k = expert.len() / 50;
        let (indices, candidates) = kept(&expert, k, Selection::Exact);
        assert_eq!(indices, by_sorting(&expert, k));
        assert!(candidates < k + k / 2, "{candidates} candidates for {k}");
        // The floor aims at four standard deviations above k, here 11 %. Below k, a second pass would be needed.
        assert!(candidates > k + k / 14, "{candidates} candidates for {k}");
    }

    #[test]
    fn kth_largest_agrees_with_sorting() {
        let values: Vec<f32> = (0..5000).map(|i| ((i * 7919) % 1000) as f32 * 0.01 - 5.0).collect();
        let mut keys: Vec<u32> = values.iter().map(|&value| key(value)).collect();
        keys.sort_unstable_by(|a, b| b.cmp(a));
        let parts: Vec<&[f32]> = values.chunks(777).collect();
        for k in [1, 2, 9, 10, 11, 777, 2500, 4999, 5000] {
            let above = keys.iter().filter(|&&key| key > keys[k - 1]).count();
            assert_eq!(kth_largest(&parts, k), (keys[k - 1], above), "k = {k}");
        }
    }

    #[test]
    fn masks_have_one_bit_per_residual() {
        let mut expert = [0.0_f32; CHUNK];
        for at in 0..CHUNK {
            expert[at] = -2.0;
            assert_eq!(mask_of(&expert, &[0.0; CHUNK], key(2.0)), 1 << at);
            assert_eq!(mask_of(&expert, &[0.0; CHUNK], key(2.0) + 1), 0);
            expert[at] = 0.0;
        }
        assert_eq!(mask_of(&[f32::NAN; CHUNK], &[0.0; CHUNK], INFINITE), u32::MAX);
    }
}
