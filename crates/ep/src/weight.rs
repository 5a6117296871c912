//! Weights of experts' outputs: what a layer does between its experts and combine. No other rank takes part.

use crate::backend::{Backend, Element};
use crate::call::check_len;
use crate::error::{CallerError, Result};

/// Elements to a multiple of which rows are long.
const VECTOR: usize = 8;

/// Rows `[rows, hidden]` and their weights, f32 `[rows]`.
#[derive(Debug)]
pub struct WeightedRows<'a, M> {
    /// How many rows.
    pub rows: usize,
    /// Elements of a row, a multiple of 8.
    pub hidden: usize,
    /// The rows, or the gradients of weighted rows.
    pub values: &'a M,
    /// Type of the values.
    pub element: Element,
    /// Each row's weight.
    pub weights: &'a M,
}

/// What [`WeightRows::weight_rows`] needs to make gradients.
#[derive(Debug)]
pub struct WeightGradients<'a, M> {
    /// The rows that were weighted, of the output's type.
    pub rows: &'a M,
    /// Where the gradients of the weights go, f32 `[rows]`.
    pub weights: &'a mut M,
}

impl<M> WeightedRows<'_, M> {
    /// Checks sizes: of these, of the output of type `element`, and of what gradients need. `len` says how many bytes a
    /// memory has.
    ///
    /// # Errors
    /// [`CallerError`] that names what does not fit.
    pub fn check(
        &self,
        element: Element,
        out: &M,
        backward: Option<&WeightGradients<'_, M>>,
        len: impl Fn(&M) -> usize,
    ) -> Result<()> {
        let &Self { rows, hidden, .. } = self;
        if !hidden.is_multiple_of(VECTOR) {
            let problem = format!("must be a multiple of {VECTOR}");
            return Err(CallerError::Config { key: "hidden", value: hidden.to_string(), problem }.into());
        }
        let bytes = |element: Element| rows * hidden * element.bytes();
        check_len("rows to be weighted", bytes(self.element), len(self.values))?;
        check_len("weights", rows * size_of::<f32>(), len(self.weights))?;
        check_len("weighted rows", bytes(element), len(out))?;
        if let Some(backward) = backward {
            check_len("rows that were weighted", bytes(element), len(backward.rows))?;
            check_len("gradients of weights", rows * size_of::<f32>(), len(backward.weights))?;
        }
        Ok(())
    }
}

/// A backend that weighs rows, too.
pub trait WeightRows: Backend {
    /// Writes each row times its weight, multiplied in f32 and rounded to `element` once, NaN canonical in bf16.
    ///
    /// With `backward`, `values` are gradients of weighted rows: the output is then the gradients of the rows, and those
    /// of the weights are written, too. Their sums are the same in every run, in an order of the backend's own.
    ///
    /// # Errors
    /// [`CallerError`] where memory has not the size that the shape says; as [`Backend::dispatch`] where the buffer
    /// or its device fails.
    fn weight_rows(
        &mut self,
        input: &WeightedRows<'_, Self::Memory>,
        element: Element,
        out: &mut Self::Memory,
        backward: Option<WeightGradients<'_, Self::Memory>>,
    ) -> Result<()>;
}
