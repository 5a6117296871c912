//! A row times its weight, and the gradient of the weight. `weight_rows` calls [`weight_row`].

use ep::Element;

use super::elements::{load_values, store_values};
use super::vector::{LINE, STEP, Vector};
use super::{Level, dispatch};

/// Additional arguments of [`weight_row`] for the backward pass.
#[derive(Debug)]
pub(crate) struct Backward<'a> {
    /// The row that the forward pass weighted, of the output's type.
    pub(crate) row: &'a [u8],
    /// Receives the gradient of the weight.
    pub(crate) dot: &'a mut f32,
}

/// Writes `values` times `weight`, multiplied in f32 and rounded once, NaN canonical.
///
/// With `backward`, `values` are the gradients of a weighted row, and their dot product with the row is computed too.
/// Products are f32; sum `i` of 32 adds the products of elements `i`, `i + 32`, and so on, and the 32 sums are then
/// added in order. So the result is equal at every level.
///
/// `streaming` is as in [`copy_row`](super::copy_row), and takes effect where `out` is 64-byte aligned.
///
/// # Panics
/// When the lengths do not agree.
pub(crate) fn weight_row(
    level: Level,
    values: (&[u8], Element),
    weight: f32,
    out: (&mut [u8], Element),
    streaming: bool,
    backward: Option<Backward<'_>>,
) {
    let hidden = out.0.len() / out.1.bytes();
    assert_eq!(values.0.len(), hidden * values.1.bytes(), "bytes of a row of {hidden} elements");
    if let Some(backward) = &backward {
        assert_eq!(backward.row.len(), out.0.len(), "bytes of a row of {hidden} elements");
    }
    let streaming = streaming && out.0.as_ptr().addr().is_multiple_of(LINE);
    let row = Row { values, weight, out, hidden, streaming, backward };
    // SAFETY: the lengths are those of the slices.
    dispatch!(level, unsafe weight_values::<_>(row: Row<'_>));
}

/// The arguments of a row; where `streaming` is set, `out` is 64-byte aligned.
struct Row<'a> {
    values: (&'a [u8], Element),
    weight: f32,
    out: (&'a mut [u8], Element),
    hidden: usize,
    streaming: bool,
    backward: Option<Backward<'a>>,
}

/// # Safety
/// All of a row's slices must be of `hidden` elements, and the processor must have `V`'s features.
#[inline(always)]
unsafe fn weight_values<V: Vector>(row: Row<'_>) {
    let Row { values, weight, out: (out, to), hidden, streaming, backward } = row;
    let other = backward.as_ref().map(|backward| (backward.row, to));
    // SAFETY: columns are within `hidden`, by the caller's promise, as are the features.
    unsafe {
        let factor = V::splat(weight);
        let mut sums = V::zero();
        let mut column = 0;
        while column + STEP <= hidden {
            let weighted = step::<V, false>(values, other, factor, column, STEP, &mut sums);
            store_values::<V>(out.as_mut_ptr().add(column * to.bytes()), to, weighted, streaming);
            column += STEP;
        }
        if column < hidden {
            let weighted = step::<V, true>(values, other, factor, column, hidden - column, &mut sums);
            let mut lines = [0u8; 2 * LINE];
            store_values::<V>(lines.as_mut_ptr(), to, weighted, false);
            let rest = &mut out[column * to.bytes()..];
            rest.copy_from_slice(&lines[..rest.len()]);
        }
        if let Some(backward) = backward {
            let mut lanes = [0.0f32; STEP];
            store_values::<V>(lanes.as_mut_ptr().cast(), Element::F32, sums, false);
            *backward.dot = lanes.into_iter().fold(0.0, |sum, lane| sum + lane);
        }
    }
}

/// The weighted values of `count` columns, beginning at `column`. `count` is [`STEP`]; with `PART` it may be less. Adds
/// the products with `other` to `sums`.
///
/// # Safety
/// Those columns must be within the rows; the processor must have `V`'s features.
#[inline(always)]
unsafe fn step<V: Vector, const PART: bool>(
    (values, from): (&[u8], Element),
    other: Option<(&[u8], Element)>,
    factor: V::Values,
    column: usize,
    count: usize,
    sums: &mut V::Values,
) -> V::Values {
    // SAFETY: the caller's promise.
    unsafe {
        let value = load_values::<V, PART>(values.as_ptr().add(column * from.bytes()), from, count);
        if let Some((other, of)) = other {
            let other = load_values::<V, PART>(other.as_ptr().add(column * of.bytes()), of, count);
            *sums = V::add(*sums, V::mul(value, other));
        }
        V::mul(value, factor)
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::simd::testing::{Guarded, Random};
    use ep::numeric::{bf16_to_f32, canonical_f32, f32_to_bf16};

    fn stored(values: &[f32], element: Element) -> Vec<u8> {
        match element {
            Element::Bf16 => values.iter().flat_map(|&value| f32_to_bf16(value).to_le_bytes()).collect(),
            Element::F32 => values.iter().flat_map(|&value| canonical_f32(value).to_le_bytes()).collect(),
        }
    }

    /// Random values, rounded to `element`.
    fn random_values(random: &mut Random, hidden: usize, element: Element) -> Vec<f32> {
        let value = |random: &mut Random| match element {
            Element::Bf16 => bf16_to_f32(f32_to_bf16(random.f32())),
            Element::F32 => canonical_f32(random.f32()),
        };
        (0..hidden).map(|_| value(random)).collect()
    }

    #[test]
    fn rows_and_gradients_are_as_defined_at_every_level() {
        let mut random = Random(1);
        for hidden in [0, 1, 8, 31, 32, 33, 64, 100, 1000] {
            for (from, to) in [
                (Element::Bf16, Element::Bf16),
                (Element::Bf16, Element::F32),
                (Element::F32, Element::Bf16),
                (Element::F32, Element::F32),
            ] {
                let values = random_values(&mut random, hidden, from);
                let other = random_values(&mut random, hidden, to);
                let weight = random.f32();
                let expected = stored(&values.iter().map(|value| value * weight).collect::<Vec<_>>(), to);
                let mut lanes = [0.0f32; STEP];
                for (at, (value, other)) in values.iter().zip(&other).enumerate() {
                    lanes[at % STEP] += value * other;
                }
                let expected_dot = lanes.into_iter().fold(0.0, |sum, lane| sum + lane);
                let (values, other) = (stored(&values, from), stored(&other, to));
                for level in Level::available() {
                    for (offset, streaming) in [(0, true), (0, false), (4, true)] {
                        let values = Guarded::with(&values, offset);
                        let row = Guarded::with(&other, offset);
                        for backward in [false, true] {
                            let mut out = Guarded::new(expected.len(), offset);
                            let mut dot = f32::NAN;
                            // SAFETY: the bytes of `out`, which nothing else uses while the slice exists.
                            let bytes =
                                unsafe { std::slice::from_raw_parts_mut(out.as_mut_ptr(), expected.len()) };
                            let gradients = backward.then(|| Backward { row: row.bytes(), dot: &mut dot });
                            weight_row(
                                level,
                                (values.bytes(), from),
                                weight,
                                (bytes, to),
                                streaming,
                                gradients,
                            );
                            let case = format!("{hidden} {from:?} {to:?} {level:?} {offset} {backward}");
                            assert!(out.bytes() == expected && out.intact(), "{case}");
                            if backward {
                                let found = canonical_f32(dot).to_bits();
                                assert_eq!(found, canonical_f32(expected_dot).to_bits(), "{case}");
                            }
                        }
                    }
                }
            }
        }
    }
}
