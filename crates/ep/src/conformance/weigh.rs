//! The check of [`WeightRows`], which multiplies expert output rows by their weights.

use super::check::Check;
use super::failure::{Expected, Failure, Problem, Unit};
use super::prepared::Content;
use crate::backend::{DispatchMode, Element};
use crate::oracle::{stored, value};
use crate::weight::{WeightGradients, WeightRows, WeightedRows};

const FORWARD: &str = "weight_rows";
const BACKWARD: &str = "weight_rows with gradients";

impl<B: WeightRows> Check<'_, B> {
    /// Multiplies the expert output rows by the rows' probabilities, then runs the backward pass with the same rows as
    /// gradients. Every second run converts to the other element type. A local operation of this rank.
    pub(super) fn weigh(&mut self) -> Result<(), Failure> {
        let case = self.case_of();
        let Content { expert_rows, row_probs, .. } = self.content();
        let (rows, hidden, element) = (row_probs.len(), case.hidden, case.element);
        // A row of the plain mode has a probability for each local expert, not one weight.
        if case.mode == DispatchMode::Plain || rows == 0 {
            return Ok(());
        }
        let other = if element == Element::Bf16 { Element::F32 } else { Element::Bf16 };
        let to = if self.is_guarded() { element } else { other };
        let given = floats(expert_rows, element);
        let products: Vec<f32> =
            given.iter().enumerate().map(|(at, value)| value * row_probs[at / hidden]).collect();
        let weighted = stored(to, &products);
        let expected = self.all_rows("weighted rows", to, hidden, &weighted);

        let values = self.input(expert_rows)?;
        let weights = self.input(bytemuck::cast_slice(row_probs))?;
        let input = WeightedRows::new(&values, [rows, hidden], &weights).element(element);
        let mut out = self.output(expected)?;
        self.backend.weight_rows(&input, to, &mut out, None).map_err(|error| self.error(FORWARD, error))?;
        self.synchronize(FORWARD)?;
        self.is_weighted(FORWARD, expected, to, &out)?;

        let other_bytes = stored(to, &partners(&given));
        let rows_given = self.input(&other_bytes)?;
        let mut gradients = self.output(expected)?;
        let unknown = vec![0; rows * size_of::<f32>()];
        let mut dots = self.output(self.all_rows("gradients of weights", Element::F32, 1, &unknown))?;
        let backward = WeightGradients::new(&rows_given, &mut dots);
        self.backend
            .weight_rows(&input, to, &mut gradients, Some(backward))
            .map_err(|error| self.error(BACKWARD, error))?;
        self.synchronize(BACKWARD)?;
        self.is_weighted(BACKWARD, expected, to, &gradients)?;
        self.check_dots(&dots, &given, &floats(&other_bytes, to))
    }

    /// The expectation for an output in which every row is written.
    fn all_rows<'a>(
        &self,
        what: &'static str,
        element: Element,
        columns: usize,
        rows: &'a [u8],
    ) -> Expected<'a> {
        let row_bytes = columns * element.bytes();
        Expected {
            what,
            unit: Unit::of(element),
            row_bytes,
            rows,
            allocated_rows: rows.len() / row_bytes,
            guard: self.guard(),
        }
    }

    /// Compares weighted rows. The bits of a NaN in an f32 product are not defined, so NaNs are made canonical first.
    fn is_weighted(
        &mut self,
        operator: &'static str,
        expected: Expected<'_>,
        to: Element,
        memory: &B::Memory,
    ) -> Result<(), Failure> {
        let mut found = self.read(expected.bytes(), memory)?;
        if to == Element::F32 {
            let (rows, _) = found.split_at_mut(expected.rows.len());
            let canonical = stored(to, &floats(rows, to));
            rows.copy_from_slice(&canonical);
        }
        if let Some(difference) = expected.difference(&found) {
            self.note(operator, Problem::Differs(difference));
        }
        Ok(())
    }

    /// Compares the gradients of the weights, the dot products of `values` and `rows`, with sums in double precision.
    /// Each backend sums in its own order, so the check allows the largest error of f32 roundings in any order. It
    /// skips sums that may exceed the range of f32.
    fn check_dots(&mut self, memory: &B::Memory, values: &[f32], rows: &[f32]) -> Result<(), Failure> {
        const ROUNDING: f64 = 1.0 / (1 << 24) as f64;
        let hidden = self.case_of().hidden;
        let count = values.len() / hidden;
        let found = self.read(count * size_of::<f32>() + self.guard(), memory)?;
        let dots = floats(&found[..count * size_of::<f32>()], Element::F32);
        for (row, ((values, rows), dot)) in
            values.chunks_exact(hidden).zip(rows.chunks_exact(hidden)).zip(dots).enumerate()
        {
            let products = || values.iter().zip(rows).map(|(&value, &row)| f64::from(value) * f64::from(row));
            let (exact, size): (f64, f64) = (products().sum(), products().map(f64::abs).sum());
            if !size.is_finite() || size > f64::from(f32::MAX) / 2.0 {
                continue;
            }
            // The product and each sum that contains it are rounded. Each rounding may also lose up to the smallest
            // subnormal f32.
            let bound = (hidden + 1) as f64 * (ROUNDING * size + f64::from(f32::from_bits(1)));
            let found = f64::from(dot);
            let error = (found - exact).abs();
            if error.is_nan() || error > bound {
                let what = "gradients of weights";
                self.note(BACKWARD, Problem::Rounding { what, row, column: 0, found, exact, bound });
                return Ok(());
            }
        }
        let untouched = self.all_rows("gradients of weights", Element::F32, 1, &found[..count * 4]);
        if let Some(difference) = untouched.difference(&found) {
            self.note(BACKWARD, Problem::Differs(difference));
        }
        Ok(())
    }
}

/// For each value, a factor whose product with the value is between 1 and 2, so that every product affects the sum. Without
/// the factors, large values of expert rows would absorb the others. The factor of an extremely small or large value is 0.
fn partners(values: &[f32]) -> Vec<f32> {
    let partner = |(at, &value): (usize, &f32)| {
        let size = value.abs();
        if size > 1e-20 && size < 1e20 { (1.0 + (at % 7) as f32 / 8.0) / value } else { 0.0 }
    };
    values.iter().enumerate().map(partner).collect()
}

fn floats(bytes: &[u8], element: Element) -> Vec<f32> {
    (0..bytes.len() / element.bytes()).map(|at| value(element, bytes, at)).collect()
}
