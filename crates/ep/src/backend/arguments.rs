//! The arguments of dispatch and combine.

use super::{Element, TokenFormat};

/// The source of the probabilities that dispatch sends with the tokens.
#[derive(Debug)]
pub enum Probs<'a, M> {
    /// Dispatch sends no probabilities.
    Skip,
    /// The weights of the routing that the handle was made from.
    Routing,
    /// A dense f32 matrix `[tokens, experts]`, used for gradients.
    Dense(&'a M),
}

/// The input of a rank to dispatch. `tokens` in the shapes is the number of tokens of the rank's routing.
///
/// # Examples
///
/// The `Vec`s stand for a backend's memory:
///
/// ```
/// use ep::{DispatchInput, Probs, ScaleFormat, TokenFormat};
///
/// let (codes, scales) = (vec![0u8; 4 * 128], vec![0u8; 4 * 4]);
/// // bf16 tokens of 64 elements, sent with the routing's weights:
/// let input = DispatchInput::new(&codes, 64);
/// assert_eq!(input.format, TokenFormat::Bf16);
/// // FP8 tokens of 128 elements with their scales, without probabilities:
/// let format = TokenFormat::Fp8(ScaleFormat::F32Per128);
/// let input = DispatchInput::new(&codes, 128).format(format).scales(&scales).probs(Probs::Skip);
/// assert!(input.scales.is_some());
/// ```
#[derive(Debug)]
#[non_exhaustive]
pub struct DispatchInput<'a, M> {
    /// Width of a token, elements.
    pub hidden: usize,
    /// Element types of input and output.
    pub format: TokenFormat,
    /// `[tokens, hidden]` in the input type of `format`.
    pub tokens: &'a M,
    /// `[tokens, scales per row]`; given exactly when `format` is [`TokenFormat::Fp8`].
    pub scales: Option<&'a M>,
    /// Probabilities that dispatch sends with the tokens.
    pub probs: Probs<'a, M>,
}

impl<'a, M> DispatchInput<'a, M> {
    /// bf16 tokens `[tokens, hidden]`, sent with the routing's weights.
    pub fn new(tokens: &'a M, hidden: usize) -> Self {
        Self { hidden, format: TokenFormat::Bf16, tokens, scales: None, probs: Probs::Routing }
    }

    /// Sets the element types of input and output. Default [`TokenFormat::Bf16`].
    #[must_use]
    pub fn format(self, format: TokenFormat) -> Self {
        Self { format, ..self }
    }

    /// Sets the scales `[tokens, scales per row]` of FP8 tokens. Default none.
    #[must_use]
    pub fn scales(self, scales: impl Into<Option<&'a M>>) -> Self {
        Self { scales: scales.into(), ..self }
    }

    /// Sets the probabilities that dispatch sends. Default [`Probs::Routing`].
    #[must_use]
    pub fn probs(self, probs: Probs<'a, M>) -> Self {
        Self { probs, ..self }
    }
}

/// The memory that dispatch writes. `rows` in the shapes is
/// [`ReceiveShape::allocated_rows`](crate::layout::ReceiveShape::allocated_rows).
///
/// With a capacity, dispatch leaves the rows after the last group of rows unchanged in every output.
#[derive(Debug)]
#[non_exhaustive]
pub struct DispatchOutput<'a, M> {
    /// `[rows, hidden]` in the output type of the format.
    pub tokens: &'a mut M,
    /// `[rows, scales per row]`; given exactly when the format is an FP8 format.
    pub scales: Option<&'a mut M>,
    /// f32 `[rows]` (permuted mode) or `[rows, local experts]` (plain mode); given unless the input says
    /// [`Probs::Skip`].
    pub probs: Option<&'a mut M>,
    /// `[rows, local experts]` bytes, 1 where the row's token chose the expert, else 0. Optional; plain mode only.
    pub local_experts: Option<&'a mut M>,
}

impl<'a, M> DispatchOutput<'a, M> {
    /// Memory for the tokens `[rows, hidden]`, without scales, probabilities and map of local experts.
    pub fn new(tokens: &'a mut M) -> Self {
        Self { tokens, scales: None, probs: None, local_experts: None }
    }

    /// Sets the memory for the scales `[rows, scales per row]` of an FP8 format.
    #[must_use]
    pub fn scales(self, scales: impl Into<Option<&'a mut M>>) -> Self {
        Self { scales: scales.into(), ..self }
    }

    /// Sets the memory for the probabilities, f32 `[rows]` (permuted mode) or `[rows, local experts]` (plain mode).
    #[must_use]
    pub fn probs(self, probs: impl Into<Option<&'a mut M>>) -> Self {
        Self { probs: probs.into(), ..self }
    }

    /// Sets the memory for the map of local experts, bytes `[rows, local experts]`. Plain mode only.
    #[must_use]
    pub fn local_experts(self, local_experts: impl Into<Option<&'a mut M>>) -> Self {
        Self { local_experts: local_experts.into(), ..self }
    }
}

/// The input of a rank to combine.
#[derive(Debug)]
#[non_exhaustive]
pub struct CombineInput<'a, M> {
    /// Width of a token, elements.
    pub hidden: usize,
    /// Element type of `rows` and of the result.
    pub element: Element,
    /// Element type of partial sums and domain sums that cross from rank to rank, [`Element::Bf16`] by default.
    pub wire: Element,
    /// `[rows, hidden]`: the experts' outputs, each in the row where dispatch wrote the expert's input. `rows` is
    /// [`ReceiveShape::rows`](crate::layout::ReceiveShape::rows).
    pub rows: &'a M,
    /// f32 in the shape of [`DispatchOutput::probs`]. Combine gathers these values to `[tokens, experts]`, without
    /// summing.
    pub probs: Option<&'a M>,
    /// Elements from one row of `probs` to the next; `None` if the rows follow each other. Ranks may pass different values.
    pub prob_stride: Option<usize>,
}

impl<'a, M> CombineInput<'a, M> {
    /// bf16 rows `[rows, hidden]`, bf16 sums between ranks, no probabilities.
    pub fn new(rows: &'a M, hidden: usize) -> Self {
        Self { hidden, element: Element::Bf16, wire: Element::Bf16, rows, probs: None, prob_stride: None }
    }

    /// Sets the element type of the rows and of the result. Default [`Element::Bf16`].
    #[must_use]
    pub fn element(self, element: Element) -> Self {
        Self { element, ..self }
    }

    /// Sets the wire type. Default [`Element::Bf16`].
    #[must_use]
    pub fn wire(self, wire: Element) -> Self {
        Self { wire, ..self }
    }

    /// Sets the probabilities that combine gathers, f32 in the shape of [`DispatchOutput::probs`]. Default none.
    #[must_use]
    pub fn probs(self, probs: impl Into<Option<&'a M>>) -> Self {
        Self { probs: probs.into(), ..self }
    }

    /// Sets the elements from one row of the probabilities to the next, for probabilities that are some columns of a wider
    /// matrix. Default: the rows follow each other.
    #[must_use]
    pub fn prob_stride(self, stride: impl Into<Option<usize>>) -> Self {
        Self { prob_stride: stride.into(), ..self }
    }
}

/// The memory that combine writes. `tokens` in the shapes is the number of tokens of the rank's routing.
#[derive(Debug)]
#[non_exhaustive]
pub struct CombineOutput<'a, M> {
    /// `[tokens, hidden]` of [`CombineInput::element`].
    pub tokens: &'a mut M,
    /// f32 `[tokens, experts]`, zero where the token did not choose the expert; given exactly when
    /// [`CombineInput::probs`] is.
    pub probs: Option<&'a mut M>,
}

impl<'a, M> CombineOutput<'a, M> {
    /// Memory for the tokens `[tokens, hidden]`, without probabilities.
    pub fn new(tokens: &'a mut M) -> Self {
        Self { tokens, probs: None }
    }

    /// Sets the memory for the probabilities, f32 `[tokens, experts]`.
    #[must_use]
    pub fn probs(self, probs: impl Into<Option<&'a mut M>>) -> Self {
        Self { probs: probs.into(), ..self }
    }
}
