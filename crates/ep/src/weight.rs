//! [`WeightRows`]: multiplies expert output rows by their weights, before combine. A local operation of each rank.

use crate::backend::{Backend, Element};
use crate::call::{Maker, MemoryFacts, check_memory};
use crate::error::{CallerError, Result};
use crate::size::Size;

/// Row length must be a multiple of this many elements.
const VECTOR: usize = 8;

/// The input of [`WeightRows::weight_rows`]: rows and their weights.
#[derive(Debug)]
#[non_exhaustive]
pub struct WeightedRows<'a, M> {
    /// Number of rows.
    pub rows: usize,
    /// Row length in elements, a multiple of 8.
    pub hidden: usize,
    /// `[rows, hidden]`: the rows. In the backward pass, the gradients of the weighted rows.
    pub values: &'a M,
    /// Element type of `values`.
    pub element: Element,
    /// f32 `[rows]`: the weight of each row.
    pub weights: &'a M,
}

/// The additional arguments of [`WeightRows::weight_rows`] in the backward pass.
#[derive(Debug)]
#[non_exhaustive]
pub struct WeightGradients<'a, M> {
    /// `[rows, hidden]` of the output's element type: the rows that the forward pass multiplied.
    pub rows: &'a M,
    /// f32 `[rows]`: output, the gradients of the weights.
    pub weights: &'a mut M,
}

impl<'a, M> WeightGradients<'a, M> {
    /// The rows that the forward pass multiplied, and memory for the gradients of the weights.
    pub fn new(rows: &'a M, weights: &'a mut M) -> Self {
        Self { rows, weights }
    }
}

impl<'a, M> WeightedRows<'a, M> {
    /// bf16 rows of this shape (`[rows, hidden]`), and f32 weights `[rows]`.
    pub fn new(values: &'a M, shape: [usize; 2], weights: &'a M) -> Self {
        let [rows, hidden] = shape;
        Self { rows, hidden, values, element: Element::Bf16, weights }
    }

    /// Sets the element type of the rows. Default [`Element::Bf16`].
    #[must_use]
    pub fn element(self, element: Element) -> Self {
        Self { element, ..self }
    }

    /// Checks the sizes and the buffer of all memory arguments: the input, the output of type `element`, and the arguments of
    /// the backward pass.
    ///
    /// # Errors
    /// [`CallerError`] that names the argument.
    pub fn check(
        &self,
        buffer: Maker,
        element: Element,
        out: &M,
        backward: Option<&WeightGradients<'_, M>>,
        facts: impl Fn(&M) -> MemoryFacts,
    ) -> Result<()> {
        let &Self { rows, hidden, .. } = self;
        if !hidden.is_multiple_of(VECTOR) {
            let problem = format!("must be a multiple of {VECTOR}");
            return Err(CallerError::Config { key: "hidden", value: hidden.to_string(), problem }.into());
        }
        let check = |what, needed, memory| check_memory(buffer, what, needed, facts(memory));
        let bytes = |element: Element| Size::new(rows) * hidden * element.bytes();
        let of_weights = Size::new(rows) * size_of::<f32>();
        check("rows to be weighted", bytes(self.element), self.values)?;
        check("weights", of_weights, self.weights)?;
        check("weighted rows", bytes(element), out)?;
        if let Some(backward) = backward {
            check("rows that were weighted", bytes(element), backward.rows)?;
            check("gradients of weights", of_weights, backward.weights)?;
        }
        Ok(())
    }
}

/// A backend that can multiply rows by their weights.
pub trait WeightRows: Backend {
    /// Writes each row times its weight to `out` `[rows, hidden]` of type `element`. Products are computed in f32 and
    /// rounded once; NaN is canonical in bf16.
    ///
    /// With `backward`, `values` are the gradients of the weighted rows, `out` receives the gradients of the rows, and
    /// [`WeightGradients::weights`] the gradients of the weights: the dot product of each row with its gradient. Each
    /// backend sums in its own order, which is the same in every run.
    ///
    /// # Errors
    /// [`CallerError`] when a memory argument is too small or belongs to another buffer; those of [`Backend::dispatch`]
    /// when the buffer or its device fails.
    fn weight_rows(
        &mut self,
        input: &WeightedRows<'_, Self::Memory>,
        element: Element,
        out: &mut Self::Memory,
        backward: Option<WeightGradients<'_, Self::Memory>>,
    ) -> Result<()>;
}
