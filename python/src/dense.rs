//! Conversion of a top-k routing to a map and dense probabilities, on the CPU or a GPU. It needs no buffer.

use std::ffi::c_void;

use ep::Indices;
use ep_cuda::{CudaMemory, TopK};
use pyo3::prelude::*;

use crate::call::Span;
use crate::errors::Failure;

/// The outputs of [`dense_routing`]; `None` = not wanted.
struct Outputs {
    /// `[tokens, experts]` bytes.
    map: Option<Span>,
    /// f32 `[tokens, experts]`.
    probs: Option<Span>,
}

/// Writes `map` and `probs`, `[tokens, experts]`, for `indices`, `[tokens, k]` i64 (`wide`) or i32. `size` is (tokens,
/// k, experts). `gpu` is the GPU of the tensors, `None` the CPU. An index below 0 names no expert. An index past the
/// last expert names none on a GPU, and is the caller's error on the CPU, as is a tensor of a different length.
#[pyfunction]
#[expect(clippy::too_many_arguments, reason = "numbers that Python passes by position: no call is cheaper")]
pub(crate) fn dense_routing(
    py: Python<'_>,
    gpu: Option<usize>,
    stream: usize,
    size: (usize, usize, usize),
    wide: bool,
    indices: Span,
    weights: Option<Span>,
    map: Option<Span>,
    probs: Option<Span>,
) -> Result<(), Failure> {
    let outputs = Outputs { map, probs };
    py.detach(|| match gpu {
        Some(gpu) => on_gpu(gpu, stream, size, wide, indices, weights, &outputs),
        // SAFETY: Python has checked the types and sizes of the tensors, and keeps them for this call.
        None if wide => on_host(size, unsafe { indices.elements::<i64>() }, weights, &outputs),
        // SAFETY: as above.
        None => on_host(size, unsafe { indices.elements::<i32>() }, weights, &outputs),
    })
}

fn on_gpu(
    gpu: usize,
    stream: usize,
    (tokens, k, experts): (usize, usize, usize),
    wide: bool,
    indices: Span,
    weights: Option<Span>,
    outputs: &Outputs,
) -> Result<(), Failure> {
    // SAFETY: Python has checked the tensors. PyTorch's allocator reuses their memory only after this launch in the
    // stream.
    let borrow = |span: Span| unsafe { CudaMemory::borrowed(span.0 as u64, span.1) };
    let (indices, weights) = (borrow(indices), weights.map(borrow));
    let (mut map, mut probs) = (outputs.map.map(borrow), outputs.probs.map(borrow));
    let indices = if wide { Indices::Wide(&indices) } else { Indices::Narrow(&indices) };
    let routing = TopK { tokens, k, experts, indices, weights: weights.as_ref() };
    // SAFETY: PyTorch's current stream of this GPU lives during this call; the memory is valid as above.
    Ok(unsafe { routing.spread(gpu, stream as *mut c_void, map.as_mut(), probs.as_mut()) }?)
}

fn on_host<I: Copy + Into<i64>>(
    (tokens, k, experts): (usize, usize, usize),
    indices: &[I],
    weights: Option<Span>,
    outputs: &Outputs,
) -> Result<(), Failure> {
    // SAFETY: as in `dense_routing`; the outputs are new tensors that nothing else accesses.
    let weights: Option<&[f32]> = weights.map(|span| unsafe { span.elements() });
    // SAFETY: as above.
    let mut map: Option<&mut [u8]> = outputs.map.map(|span| unsafe { span.elements_mut() });
    // SAFETY: as above.
    let mut probs: Option<&mut [f32]> = outputs.probs.map(|span| unsafe { span.elements_mut() });
    // Lengths are checked here once, so that no index below is out of range or overflows.
    let fits = |what: &str, columns: usize, found: usize| {
        if tokens.checked_mul(columns) == Some(found) {
            return Ok(());
        }
        Err(Failure::Caller(format!("{what}: expected {tokens} x {columns} elements, found {found}")))
    };
    fits("topk_idx", k, indices.len())?;
    weights.map_or(Ok(()), |weights| fits("topk_weights", k, weights.len()))?;
    map.as_deref().map_or(Ok(()), |map| fits("routing_map", experts, map.len()))?;
    probs.as_deref().map_or(Ok(()), |probs| fits("probs", experts, probs.len()))?;
    map.iter_mut().for_each(|map| map.fill(0));
    probs.iter_mut().for_each(|probs| probs.fill(0.0));
    for (at, &index) in indices.iter().enumerate() {
        // An index below 0 names no expert.
        let Ok(expert) = usize::try_from(index.into()) else { continue };
        let row = at / k;
        if expert >= experts {
            return Err(Failure::Caller(format!(
                "topk_idx: row {row} names an expert past the last of {experts}"
            )));
        }
        let place = row * experts + expert;
        if let Some(map) = map.as_deref_mut() {
            map[place] = 1;
        }
        if let (Some(probs), Some(weights)) = (probs.as_deref_mut(), weights) {
            probs[place] += weights[at];
        }
    }
    Ok(())
}
