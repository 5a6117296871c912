//! The sum of one token's rows, in a fixed order.

use ep::Element;

use super::elements::{load_values, store_values};
use super::vector::{LINE, STEP, Vector, prefetch};
use super::{Level, dispatch};

/// One term of a token's sum.
#[derive(Clone, Copy, Debug)]
pub(crate) struct SumRow {
    /// The row: `hidden` elements of bf16, or of f32 where [`flag::F32`] is set.
    pub(crate) ptr: *const u8,
    /// A union of [`flag`]s.
    pub(crate) flags: u8,
}

/// What happens at a row of a sum; see [`sum_rows`].
pub(crate) mod flag {
    /// The row is the last of its rank.
    pub(crate) const CLOSES_RANK: u8 = 1;
    /// With [`CLOSES_RANK`]: the rank's sum is rounded to bf16.
    pub(crate) const ROUNDS_RANK: u8 = 2;
    /// The row is the last of its domain.
    pub(crate) const CLOSES_DOMAIN: u8 = 4;
    /// With [`CLOSES_DOMAIN`]: the domain's sum is rounded to bf16.
    pub(crate) const ROUNDS_DOMAIN: u8 = 8;
    /// The row's elements are f32.
    pub(crate) const F32: u8 = 16;
}

/// Sums one token's rows into `out`, `hidden` elements of `out_type`.
///
/// Each element is summed by itself, in f32, in the order of `rows`, and never fused or
/// reassociated: the order is part of the result. From `rank = domain = total = +0.0`, for each
/// row:
///
/// * `rank += element`;
/// * if the row [closes its rank](flag::CLOSES_RANK): `rank` is rounded to bf16 if the row
///   [says so](flag::ROUNDS_RANK), then `domain += rank` and `rank = +0.0`;
/// * if it [closes its domain](flag::CLOSES_DOMAIN): `domain` is rounded to bf16 if the row
///   [says so](flag::ROUNDS_DOMAIN), then `total += domain` and `domain = +0.0`.
///
/// `out` is `total`, rounded to bf16 or with its NaN made canonical; what was not closed is not in
/// it. No rows make zeros.
///
/// `streaming` is as in [`copy_row`](super::copy_row), and takes effect where `out` is 64-byte
/// aligned. Any alignment works.
///
/// Towards its end it also prefetches the starts of the rows `then`, those of the next token that this
/// thread is going to sum: rows lie anywhere in memory, and the processor's own prefetching starts anew
/// with each. Sums are 5 to 30 % faster when the next rows are known, the most where rows are short or
/// few. Nothing is read from `then`, whose pointers need not be valid; it may be empty, and is taken to
/// be as long as `rows` are.
///
/// # Safety
/// Each row must be valid for reads of `hidden` elements of its type, `out` for writes of `hidden`
/// of `out_type`, and `out` must not overlap a row.
pub(crate) unsafe fn sum_rows(
    level: Level,
    rows: &[SumRow],
    then: &[SumRow],
    hidden: usize,
    out: *mut u8,
    out_type: Element,
    streaming: bool,
) {
    let sum =
        Sum { rows, then, hidden, out, out_type, streaming: streaming && out.addr().is_multiple_of(LINE) };
    dispatch!(level, unsafe sum_row::<_>(sum: Sum));
}

/// The arguments of a sum; where `streaming` is set, `out` is 64-byte aligned.
#[derive(Clone, Copy)]
struct Sum<'a> {
    rows: &'a [SumRow],
    then: &'a [SumRow],
    hidden: usize,
    out: *mut u8,
    out_type: Element,
    streaming: bool,
}

impl Sum<'_> {
    /// How many elements ahead of the sum rows are prefetched.
    #[inline(always)]
    fn ahead(&self) -> usize {
        // Measured: about 16 KiB should be on their way, from 0.5 to 2 KiB of a row. Without the
        // next token's rows a long distance loses: it leaves more of each row's start behind.
        let most = if self.then.is_empty() { 256 } else { 1024 };
        let ahead = (8192 / self.rows.len().max(1)).clamp(256, most);
        ahead.min(self.hidden)
    }
}

/// # Safety
/// As [`sum_rows`], on a processor with `V`'s features.
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
/// As [`sum_rows`], on a processor with `V`'s features.
#[inline(always)]
unsafe fn sum_blocks<V: Vector, const LINES: usize>(sum: Sum<'_>) {
    let ahead = sum.ahead();
    let block = LINES * STEP;
    let mut column = 0;
    while column + block <= sum.hidden {
        let (rows, from) = if column + ahead < sum.hidden {
            (sum.rows, column + ahead)
        } else {
            (sum.then, column + ahead - sum.hidden)
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
    /// Prefetches `LINES` times [`STEP`] elements from element `from` on.
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

/// Stores totals as columns `column` and following of the output.
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
        // SAFETY: the caller's promise; where `streaming` is set, `out` and so each line of it is
        // aligned.
        unsafe {
            let dst = sum.out.add((column + i * STEP) * sum.out_type.bytes());
            store_values::<V>(dst, sum.out_type, total, sum.streaming);
        }
    }
}

/// The totals of `count` columns from `column` on: of `LINES` times [`STEP`] of them, or with
/// `PART` of fewer, the other lanes then being zero.
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
                // The one row of its rank, which is most of them where experts are many. Its sum is
                // the row, which is bf16 already: +0.0 plus it differs from it for -0.0 only, and
                // `domain` is never -0.0, so that adding either changes nothing.
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
/// As [`Vector::round`].
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

    /// The documented meaning, for one element.
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

    /// Sums `rows` (elements as f32, flags) at every level and compares with the meaning.
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
    fn sums_of_random_rows_equal_the_meaning() {
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

    /// Every bf16 as a sum of its own, so every NaN, infinity, subnormal and zero.
    #[test]
    fn every_bf16_alone() {
        let mut random = Random(4);
        let values: Vec<f32> = (0..=u16::MAX).map(bf16_to_f32).collect();
        for rounds in [0, flag::ROUNDS_RANK, flag::ROUNDS_DOMAIN, 15] {
            let flags = flag::CLOSES_RANK | flag::CLOSES_DOMAIN | rounds;
            check(&[(values.clone(), flags)], values.len(), &mut random);
            check(&[(values.clone(), flags | flag::F32)], values.len(), &mut random);
        }
    }

    /// f32 patterns of every kind through each place that rounds.
    #[test]
    fn any_f32_bits_round_alike() {
        let mut random = Random(5);
        for rounds in [0, flag::ROUNDS_RANK, flag::ROUNDS_DOMAIN] {
            let values: Vec<f32> = (0..100_000).map(|_| f32::from_bits(random.next() as u32)).collect();
            let flags = flag::F32 | flag::CLOSES_RANK | flag::CLOSES_DOMAIN | rounds;
            check(&[(values, flags)], 100_000, &mut random);
        }
    }
}
