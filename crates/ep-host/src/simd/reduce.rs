//! The sum of one token's rows, in a fixed order. `combine` calls [`sum_rows`] for domain sums and for results.

use ep::Element;

use super::elements::{load_values, store_values};
use super::vector::{LINE, STEP, Vector, prefetch};
use super::{Level, dispatch};

/// One term of a token's sum.
#[derive(Clone, Copy, Debug)]
pub(crate) struct SumRow {
    /// The row: `hidden` elements of bf16, or of f32 where [`flag::F32`] is set.
    pub(crate) ptr: *const u8,
    /// Bitwise OR of [`flag`]s.
    pub(crate) flags: u8,
}

/// Flags of a row in a sum; see [`sum_rows`].
pub(crate) mod flag {
    /// The row is the last of its rank.
    pub(crate) const CLOSES_RANK: u8 = 1;
    /// With [`CLOSES_RANK`]: round the rank's sum to bf16.
    pub(crate) const ROUNDS_RANK: u8 = 2;
    /// The row is the last of its domain.
    pub(crate) const CLOSES_DOMAIN: u8 = 4;
    /// With [`CLOSES_DOMAIN`]: round the domain's sum to bf16.
    pub(crate) const ROUNDS_DOMAIN: u8 = 8;
    /// The row's elements are f32.
    pub(crate) const F32: u8 = 16;
}

/// Sums one token's rows into `out`, `hidden` elements of `out_type`.
///
/// Each element is summed in f32 in the order of `rows`, never fused or reassociated: the order is part of the result.
/// From `rank = domain = total = +0.0`, for each row:
///
/// * `rank += element`;
/// * with [`CLOSES_RANK`](flag::CLOSES_RANK): round `rank` to bf16 if [`ROUNDS_RANK`](flag::ROUNDS_RANK) is set, then
///   `domain += rank` and `rank = +0.0`;
/// * with [`CLOSES_DOMAIN`](flag::CLOSES_DOMAIN): round `domain` to bf16 if [`ROUNDS_DOMAIN`](flag::ROUNDS_DOMAIN) is
///   set, then `total += domain` and `domain = +0.0`.
///
/// `out` gets `total`, rounded to bf16, or as f32 with a canonical NaN. Rows after the last one that closes its domain
/// do not count. Without rows, `out` is zero.
///
/// `streaming` is as in [`copy_row`](super::copy_row) and takes effect where `out` is 64-byte aligned. Any alignment
/// works.
///
/// Near its end the sum prefetches the beginnings of `next_rows`, the rows of the token that this thread sums next.
/// Rows are scattered over memory, and the processor's own prefetcher starts anew with each. Sums are 5 to 30 % faster
/// with `next_rows`, most where rows are short or few. The rows are not read: `next_rows` may be empty, its pointers
/// need not be valid, and its rows are assumed to be as long as `rows`.
///
/// # Safety
/// Each row must be valid for reads of `hidden` elements of its type, and `out` for writes of `hidden` elements of
/// `out_type`. `out` must not overlap a row.
pub(crate) unsafe fn sum_rows(
    level: Level,
    rows: &[SumRow],
    next_rows: &[SumRow],
    hidden: usize,
    out: *mut u8,
    out_type: Element,
    streaming: bool,
) {
    let sum = Sum {
        rows,
        next_rows,
        hidden,
        out,
        out_type,
        streaming: streaming && out.addr().is_multiple_of(LINE),
    };
    dispatch!(level, unsafe sum_row::<_>(sum: Sum));
}

/// The arguments of a sum; where `streaming` is set, `out` is 64-byte aligned.
#[derive(Clone, Copy)]
struct Sum<'a> {
    rows: &'a [SumRow],
    next_rows: &'a [SumRow],
    hidden: usize,
    out: *mut u8,
    out_type: Element,
    streaming: bool,
}

impl Sum<'_> {
    /// The prefetch distance, in elements.
    #[inline(always)]
    fn ahead(&self) -> usize {
        // Measured: about 16 KiB in flight over all rows is best, 0.5 to 2 KiB of each. If the next token's rows are
        // not known, a long distance is slower, because the beginning of each row is then not prefetched at all.
        let most = if self.next_rows.is_empty() { 256 } else { 1024 };
        let ahead = (8192 / self.rows.len().max(1)).clamp(256, most);
        ahead.min(self.hidden)
    }
}

/// # Safety
/// The requirements of [`sum_rows`]; the processor must have `V`'s features.
#[inline(always)]
unsafe fn sum_row<V: Vector>(sum: Sum<'_>) {
    // SAFETY: passed on.
    unsafe {
        match V::SUM_LINES {
            1 => sum_blocks::<V, 1>(sum),
            _ => sum_blocks::<V, 2>(sum),
        }
    }
}

/// # Safety
/// The requirements of [`sum_rows`]; the processor must have `V`'s features.
#[inline(always)]
unsafe fn sum_blocks<V: Vector, const LINES: usize>(sum: Sum<'_>) {
    let ahead = sum.ahead();
    let block = LINES * STEP;
    let mut column = 0;
    while column + block <= sum.hidden {
        let (rows, from) = if column + ahead < sum.hidden {
            (sum.rows, column + ahead)
        } else {
            (sum.next_rows, column + ahead - sum.hidden)
        };
        for row in rows {
            row.prefetch::<LINES>(from);
        }
        // SAFETY: the columns are within `hidden`.
        unsafe {
            store_block::<V, LINES>(&sum, column, sum_columns::<V, LINES, false>(sum.rows, column, block))
        };
        column += block;
    }
    if LINES > 1 && column + STEP <= sum.hidden {
        // SAFETY: as above.
        unsafe { store_block::<V, 1>(&sum, column, sum_columns::<V, 1, false>(sum.rows, column, STEP)) };
        column += STEP;
    }
    if column < sum.hidden {
        let count = sum.hidden - column;
        let mut lines = [0u8; 2 * LINE];
        let part = Sum { out: lines.as_mut_ptr(), streaming: false, ..sum };
        let size = sum.out_type.bytes();
        // SAFETY: the columns are within `hidden`, and `lines` has room for STEP elements.
        unsafe {
            store_block::<V, 1>(&part, 0, sum_columns::<V, 1, true>(sum.rows, column, count));
            sum.out.add(column * size).copy_from_nonoverlapping(lines.as_ptr(), count * size);
        }
    }
}

impl SumRow {
    /// Prefetches `LINES` times [`STEP`] elements, beginning at element `from`.
    #[inline(always)]
    fn prefetch<const LINES: usize>(&self, from: usize) {
        if self.flags & flag::F32 == 0 {
            for i in 0..LINES {
                prefetch(self.ptr.wrapping_add(from * 2 + i * LINE));
            }
        } else {
            for i in 0..2 * LINES {
                prefetch(self.ptr.wrapping_add(from * 4 + i * LINE));
            }
        }
    }
}

/// Stores `totals` as output columns, beginning at `column`.
///
/// # Safety
/// Those columns must be within the output; the processor must have `V`'s features.
#[inline(always)]
unsafe fn store_block<V: Vector, const LINES: usize>(
    sum: &Sum<'_>,
    column: usize,
    totals: [V::Values; LINES],
) {
    for (i, &total) in totals.iter().enumerate() {
        // SAFETY: the caller's promise; where `streaming` is set, `out` is aligned, and so is each of its lines.
        unsafe {
            let dst = sum.out.add((column + i * STEP) * sum.out_type.bytes());
            store_values::<V>(dst, sum.out_type, total, sum.streaming);
        }
    }
}

/// The totals of `count` columns, beginning at `column`. `count` is `LINES` times [`STEP`]; with `PART` it may be less,
/// and the remaining lanes are zero.
///
/// # Safety
/// Those columns must be within the rows; the processor must have `V`'s features.
#[inline(always)]
unsafe fn sum_columns<V: Vector, const LINES: usize, const PART: bool>(
    rows: &[SumRow],
    column: usize,
    count: usize,
) -> [V::Values; LINES] {
    // SAFETY: the columns are within the rows, by the caller's promise, as are the features.
    unsafe {
        let mut rank = [V::zero(); LINES];
        let mut domain = [V::zero(); LINES];
        let mut total = [V::zero(); LINES];
        let mut rank_is_empty = true;
        for row in rows {
            let mut values = [V::zero(); LINES];
            let wide = row.flags & flag::F32 != 0;
            for (i, values) in values.iter_mut().enumerate() {
                let at = column + i * STEP;
                let element = if wide { Element::F32 } else { Element::Bf16 };
                *values = load_values::<V, PART>(row.ptr.add(at * element.bytes()), element, count);
            }
            let closes = row.flags & flag::CLOSES_RANK != 0;
            if rank_is_empty && closes && !wide {
                // The only row of its rank: the common case when experts are many. The rank's sum would be +0.0 plus
                // the row, which is bf16, so rounding would not change it. The sum differs from the row only for -0.0,
                // and adding +0.0 or -0.0 to `domain`, which is never -0.0, gives the same result.
                add::<V, LINES>(&mut domain, &values);
            } else {
                add::<V, LINES>(&mut rank, &values);
                rank_is_empty = closes;
                if closes {
                    if row.flags & flag::ROUNDS_RANK != 0 {
                        round::<V, LINES>(&mut rank);
                    }
                    add::<V, LINES>(&mut domain, &rank);
                    rank = [V::zero(); LINES];
                }
            }
            if row.flags & flag::CLOSES_DOMAIN != 0 {
                if row.flags & flag::ROUNDS_DOMAIN != 0 {
                    round::<V, LINES>(&mut domain);
                }
                add::<V, LINES>(&mut total, &domain);
                domain = [V::zero(); LINES];
            }
        }
        total
    }
}

/// # Safety
/// The processor must have `V`'s features.
#[inline(always)]
unsafe fn add<V: Vector, const LINES: usize>(sums: &mut [V::Values; LINES], values: &[V::Values; LINES]) {
    for (sum, &value) in sums.iter_mut().zip(values) {
        // SAFETY: passed on.
        *sum = unsafe { V::add(*sum, value) };
    }
}

/// # Safety
/// The requirements of [`Vector::round`].
#[inline(always)]
unsafe fn round<V: Vector, const LINES: usize>(sums: &mut [V::Values; LINES]) {
    for sum in sums {
        // SAFETY: passed on.
        *sum = unsafe { V::round(*sum) };
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::simd::testing::{Guarded, Random};
    use ep::numeric::{bf16_to_f32, canonical_f32, f32_to_bf16};

    /// The documented definition, for one element.
    fn sum_element(terms: &[(f32, u8)]) -> f32 {
        let round = |value| bf16_to_f32(f32_to_bf16(value));
        let (mut rank, mut domain, mut total) = (0.0f32, 0.0f32, 0.0f32);
        for &(value, flags) in terms {
            rank += value;
            if flags & flag::CLOSES_RANK != 0 {
                domain += if flags & flag::ROUNDS_RANK != 0 { round(rank) } else { rank };
                rank = 0.0;
            }
            if flags & flag::CLOSES_DOMAIN != 0 {
                total += if flags & flag::ROUNDS_DOMAIN != 0 { round(domain) } else { domain };
                domain = 0.0;
            }
        }
        total
    }

    /// Sums `rows` (elements as f32, flags) at every level and compares with the definition.
    fn check(rows: &[(Vec<f32>, u8)], hidden: usize, random: &mut Random) {
        let stored: Vec<(Guarded, u8)> = rows
            .iter()
            .map(|(values, flags)| {
                let bytes: Vec<u8> = if flags & flag::F32 != 0 {
                    values.iter().flat_map(|value| value.to_bits().to_le_bytes()).collect()
                } else {
                    values.iter().flat_map(|value| ((value.to_bits() >> 16) as u16).to_le_bytes()).collect()
                };
                (Guarded::with(&bytes, 16 * random.below(4)), *flags)
            })
            .collect();
        let sum_rows_in: Vec<SumRow> =
            stored.iter().map(|(row, flags)| SumRow { ptr: row.as_ptr(), flags: *flags }).collect();
        for out_type in [Element::Bf16, Element::F32] {
            let expected: Vec<u8> = (0..hidden)
                .flat_map(|i| {
                    let terms: Vec<(f32, u8)> =
                        rows.iter().map(|(values, flags)| (values[i], *flags)).collect();
                    let total = sum_element(&terms);
                    match out_type {
                        Element::Bf16 => f32_to_bf16(total).to_le_bytes().to_vec(),
                        Element::F32 => canonical_f32(total).to_bits().to_le_bytes().to_vec(),
                    }
                })
                .collect();
            for level in Level::available() {
                for (offset, streaming) in [(0, true), (0, false), (16, true), (48, false)] {
                    let mut out = Guarded::new(hidden * out_type.bytes(), offset);
                    // SAFETY: every row and `out` have `hidden` elements.
                    unsafe {
                        sum_rows(level, &sum_rows_in, &[], hidden, out.as_mut_ptr(), out_type, streaming);
                    }
                    crate::simd::stream_fence();
                    assert!(out.bytes() == expected, "{level:?} {out_type:?} {hidden} {streaming}");
                    assert!(out.intact());
                }
            }
        }
    }

    /// A bf16 or an f32, as a value of f32.
    fn value(flags: u8, random: &mut Random) -> f32 {
        if flags & flag::F32 != 0 { random.f32() } else { bf16_to_f32(random.bf16()) }
    }

    #[test]
    fn sums_of_random_rows_equal_the_definition() {
        let mut random = Random(3);
        for hidden in [0, 8, 16, 24, 32, 40, 56, 64, 104, 128, 136, 320] {
            for count in [0, 1, 2, 3, 8, 9, 65] {
                // All bf16, all f32, a mixture; any flags, every row closed, the last closed.
                for types in 0..3 {
                    for closes in 0..3 {
                        let rows: Vec<(Vec<f32>, u8)> = (0..count)
                            .map(|row| {
                                let mut flags = random.next() as u8 & 15;
                                if closes == 1 || closes == 2 && row + 1 == count {
                                    flags |= flag::CLOSES_RANK | flag::CLOSES_DOMAIN;
                                }
                                if types == 1 || types == 2 && random.below(2) == 0 {
                                    flags |= flag::F32;
                                }
                                ((0..hidden).map(|_| value(flags, &mut random)).collect(), flags)
                            })
                            .collect();
                        check(&rows, hidden, &mut random);
                    }
                }
            }
        }
    }

    /// Sums of one row that contains every bf16, and so every NaN, infinity, subnormal and zero.
    #[test]
    fn every_bf16_is_summed_as_defined() {
        let mut random = Random(4);
        let values: Vec<f32> = (0..=u16::MAX).map(bf16_to_f32).collect();
        for rounds in [0, flag::ROUNDS_RANK, flag::ROUNDS_DOMAIN, 15] {
            let flags = flag::CLOSES_RANK | flag::CLOSES_DOMAIN | rounds;
            check(&[(values.clone(), flags)], values.len(), &mut random);
            check(&[(values.clone(), flags | flag::F32)], values.len(), &mut random);
        }
    }

    /// Random f32 bits through each step that rounds.
    #[test]
    fn random_f32_bits_round_as_defined() {
        let mut random = Random(5);
        for rounds in [0, flag::ROUNDS_RANK, flag::ROUNDS_DOMAIN] {
            let values: Vec<f32> = (0..100_000).map(|_| f32::from_bits(random.next() as u32)).collect();
            let flags = flag::F32 | flag::CLOSES_RANK | flag::CLOSES_DOMAIN | rounds;
            check(&[(values, flags)], 100_000, &mut random);
        }
    }
}
