//! From the tensors of a call to its numbers. A tensor that an operator cannot use as it is makes a [`Reader`] return
//! `None`: `hybrid_ep.ops` then says what is wrong with it, or makes a copy that the operator can use.

use ep::ScaleFormat;
use pyo3::prelude::*;

use crate::call::{CombineCall, DispatchCall, Given, Span, Tokens, element};
use crate::dlpack::{DataType, Device};
use crate::exchange::{Exchange, Seen};

/// Reads tensors for operators of one buffer.
#[derive(Debug, Clone, Copy)]
pub(crate) struct Reader<'a> {
    pub(crate) exchange: &'a Exchange,
    pub(crate) device: Device,
    pub(crate) experts: usize,
    pub(crate) local_experts: usize,
}

/// The tensors of a dispatch, and what they mean.
#[derive(Debug)]
pub(crate) struct Dispatch<'a, 'py> {
    pub(crate) tokens: &'a Bound<'py, PyAny>,
    pub(crate) scales: Option<&'a Bound<'py, PyAny>>,
    pub(crate) weights: Option<&'a Bound<'py, PyAny>>,
    /// Whether `weights` are those of the routing, which the handle has.
    pub(crate) from_routing: bool,
    /// The format that the operator quantises bf16 tokens to.
    pub(crate) quantise: Option<Tokens>,
    /// As in [`DispatchCall`].
    pub(crate) local_experts: bool,
    /// As in [`DispatchCall`].
    pub(crate) clear_tokens: bool,
}

/// The tensors of a combine, and what they mean.
#[derive(Debug)]
pub(crate) struct Combine<'a, 'py> {
    pub(crate) rows: &'a Bound<'py, PyAny>,
    pub(crate) probs: Option<&'a Bound<'py, PyAny>>,
    pub(crate) tokens: usize,
    pub(crate) permuted: bool,
    /// The `torch.dtype` of sums between ranks.
    pub(crate) wire: Option<&'a Bound<'py, PyAny>>,
    /// The first of the columns of `probs` that belong to the local experts, if `probs` has others, too.
    pub(crate) first_column: Option<usize>,
}

impl Reader<'_> {
    /// The number of a handle, which its tensor holds.
    pub(crate) fn number(&self, handle: &Bound<'_, PyAny>) -> Option<i64> {
        let seen = self.exchange.look_at_memory(handle)?;
        let fits = seen.dtype == DataType::I64 && seen.device == Device::CPU && !seen.is_matrix();
        // SAFETY: the tensor has one element of this type in host memory, and `handle` keeps it.
        (fits && seen.rows == 1 && seen.is_dense(8)).then(|| unsafe { *(seen.address as *const i64) })
    }

    pub(crate) fn dispatch(&self, given: &Dispatch<'_, '_>) -> Option<DispatchCall> {
        let data = self.matrix(given.tokens)?;
        let (rows, hidden) = (data.rows, data.width());
        let mut scales = None;
        let tokens = match (data.dtype, given.quantise, given.scales) {
            (DataType::BF16, Some(quantise), None) => quantise,
            (DataType::BF16, None, None) => Tokens::Bf16,
            (DataType::F32, None, None) => Tokens::F32,
            (DataType::F8_E4M3, None, Some(given)) => {
                let given = self.matrix(given)?;
                let format = scale_format(given.dtype, given.width(), hidden)?;
                if given.rows != rows {
                    return None;
                }
                scales = Some(span(&given));
                Tokens::Fp8(format)
            }
            _ => return None,
        };
        let probs = match given.weights {
            None => Given::Nothing,
            Some(_) if given.from_routing => Given::Routing,
            Some(weights) => {
                let dense = self.matrix(weights)?;
                let fits =
                    dense.dtype == DataType::F32 && dense.rows == rows && dense.width() == self.experts;
                Given::Dense(fits.then(|| span(&dense))?)
            }
        };
        let data = span(&data);
        Some(DispatchCall {
            rows,
            hidden,
            tokens,
            data,
            scales,
            probs,
            local_experts: given.local_experts,
            clear_tokens: given.clear_tokens,
        })
    }

    /// The call without its outputs.
    pub(crate) fn combine(&self, given: &Combine<'_, '_>) -> Option<CombineCall> {
        let data = self.matrix(given.rows)?;
        if !data.dtype.is_float() {
            return None;
        }
        let wide = data.dtype == DataType::F32;
        let wire = given.wire.map_or(Some(wide), |wire| self.exchange.is_wide(wire))?;
        let probs = match given.probs {
            None => None,
            Some(probs) => Some(self.probs(probs, data.rows, given.permuted, given.first_column)?),
        };
        Some(CombineCall {
            rows: data.rows,
            tokens: given.tokens,
            hidden: data.width(),
            element: element(wide),
            wire: element(wire),
            data: span(&data),
            probs,
            out: Span(0, 0),
            out_probs: None,
        })
    }

    /// The probabilities of `rows` rows, and the elements from one of their rows to the next: a vector in permuted mode,
    /// else a column for each local expert, from `first_column` on.
    fn probs(
        &self,
        probs: &Bound<'_, PyAny>,
        rows: usize,
        permuted: bool,
        first_column: Option<usize>,
    ) -> Option<(Span, usize)> {
        let seen = self.exchange.look(probs)?;
        if seen.device != self.device || seen.dtype != DataType::F32 || seen.rows != rows {
            return None;
        }
        if permuted {
            return (!seen.is_matrix() && seen.is_dense(self.device.alignment())).then(|| (span(&seen), 1));
        }
        let (stride, first) = (seen.row_stride()?, first_column.unwrap_or(0));
        let fits = match first_column {
            None => seen.width() == self.local_experts,
            Some(first) => first.checked_add(self.local_experts).is_some_and(|end| end <= seen.width()),
        };
        let elements = (rows - 1) * stride + self.local_experts;
        let bytes = seen.dtype.bytes();
        fits.then(|| (Span(seen.address + first * bytes, elements * bytes), stride))
    }

    /// A dense matrix on the device of the buffer.
    fn matrix(&self, tensor: &Bound<'_, PyAny>) -> Option<Seen> {
        let seen = self.exchange.look(tensor)?;
        let fits = seen.is_matrix() && seen.device == self.device && seen.rows > 0 && seen.width() > 0;
        (fits && seen.is_dense(self.device.alignment())).then_some(seen)
    }
}

fn span(dense: &Seen) -> Span {
    Span(dense.address, dense.bytes())
}

/// The format of scales of this type and number per row. A row that both block lengths fit has those of 32 elements.
fn scale_format(dtype: DataType, columns: usize, hidden: usize) -> Option<ScaleFormat> {
    let formats = match dtype {
        DataType::F32 => &[ScaleFormat::F32Per128][..],
        DataType::U8 | DataType::F8_E8M0 => &[ScaleFormat::Ue8m0Per32, ScaleFormat::Ue8m0Per128],
        _ => return None,
    };
    formats.iter().copied().find(|format| format.scales_per_row(hidden) == columns)
}
