//! A routing in a backend's own memory, and the outputs of preprocess there
//! ([`Backend::preprocess_on_device`]).

use std::borrow::Cow;

use bytemuck::AnyBitPattern;

use crate::backend::Backend;
use crate::error::{CallerError, Result, RoutingProblem};
use crate::layout::ReceiveShape;
use crate::routing::Routing;
use crate::size::Size;
use crate::topology::Rank;

/// A rank's routing in the memory `M` of a backend: on its GPU, or on the host.
#[derive(Debug)]
pub enum DeviceRouting<'a, M> {
    /// `[tokens, k]`: expert indices, -1 for none, and their weights (f32).
    TopK {
        /// Number of tokens.
        tokens: usize,
        /// Choices per token.
        k: usize,
        /// The indices.
        indices: Indices<'a, M>,
        /// The weights; `None` = zero.
        weights: Option<&'a M>,
    },
    /// `[tokens, experts]`: bytes, non-zero if the token chose the expert, and probabilities (f32).
    Map {
        /// Number of tokens.
        tokens: usize,
        /// Upper bound on the number of experts of a token. Determines the size of a handle on a GPU.
        most: usize,
        /// The map.
        map: &'a M,
        /// The probabilities; `None` = zero.
        probs: Option<&'a M>,
    },
}

/// Expert indices, in one of the integer types that routers use.
#[derive(Debug)]
pub enum Indices<'a, M> {
    /// i32.
    Narrow(&'a M),
    /// i64, as PyTorch's `topk` returns.
    Wide(&'a M),
}

impl<M> Copy for DeviceRouting<'_, M> {}

impl<M> Clone for DeviceRouting<'_, M> {
    fn clone(&self) -> Self {
        *self
    }
}

impl<M> Copy for Indices<'_, M> {}

impl<M> Clone for Indices<'_, M> {
    fn clone(&self) -> Self {
        *self
    }
}

/// Optional outputs of preprocess in the memory `M` of a backend.
#[derive(Debug)]
#[non_exhaustive]
pub struct DeviceReport<'a, M> {
    /// i64 `[local experts]`: rows per expert, padding included. Permuted mode only.
    pub tokens_per_expert: Option<&'a mut M>,
    /// i64 `[local experts]`: rows per expert, without padding. Permuted mode only.
    pub kept_per_expert: Option<&'a mut M>,
    /// i32 `[1]`: 1 if rows were dropped because of the capacity, else 0.
    pub overflow: Option<&'a mut M>,
}

impl<M> Default for DeviceReport<'_, M> {
    /// No outputs.
    fn default() -> Self {
        Self { tokens_per_expert: None, kept_per_expert: None, overflow: None }
    }
}

impl<'a, M> DeviceReport<'a, M> {
    /// Sets the memory for the rows per expert, padding included: i64 `[local experts]`.
    #[must_use]
    pub fn tokens_per_expert(self, counts: impl Into<Option<&'a mut M>>) -> Self {
        Self { tokens_per_expert: counts.into(), ..self }
    }

    /// Sets the memory for the rows per expert, without padding: i64 `[local experts]`.
    #[must_use]
    pub fn kept_per_expert(self, counts: impl Into<Option<&'a mut M>>) -> Self {
        Self { kept_per_expert: counts.into(), ..self }
    }

    /// Sets the memory for the overflow: i32 `[1]`.
    #[must_use]
    pub fn overflow(self, overflow: impl Into<Option<&'a mut M>>) -> Self {
        Self { overflow: overflow.into(), ..self }
    }

    /// Uploads the outputs that follow from `shape`.
    pub(crate) fn write<B>(self, backend: &mut B, shape: &ReceiveShape) -> Result<()>
    where
        B: Backend<Memory = M> + ?Sized,
    {
        let counts = [
            (self.tokens_per_expert, &shape.tokens_per_expert),
            (self.kept_per_expert, &shape.kept_per_expert),
        ];
        for (memory, counts) in counts {
            if let Some(memory) = memory {
                let counts: Vec<i64> = counts.iter().map(|&count| count.into()).collect();
                backend.upload(bytemuck::cast_slice(&counts), memory)?;
            }
        }
        if let Some(memory) = self.overflow {
            backend.upload(&i32::from(shape.overflow()).to_ne_bytes(), memory)?;
        }
        Ok(())
    }
}

impl<M> DeviceRouting<'_, M> {
    /// Reads the routing to the host, and validates it.
    pub(crate) fn read<B>(&self, backend: &mut B) -> Result<Routing>
    where
        B: Backend<Memory = M> + ?Sized,
    {
        let (rank, experts) = (backend.rank(), backend.world().experts());
        match *self {
            Self::TopK { tokens, k: 0, .. } => Routing::without_copies(rank, experts, tokens),
            // Read the indices first: this fails if `tokens` exceeds their memory, which limits the zeros for absent weights.
            Self::TopK { tokens, k, indices, weights } => {
                let cells = Size::new(tokens) * k;
                let indices = match indices {
                    Indices::Narrow(memory) => values(backend, "topk_idx", memory, cells)?,
                    Indices::Wide(memory) => {
                        let wide = values(backend, "topk_idx", memory, cells)?;
                        narrow(rank, experts, k, &wide)?.into()
                    }
                };
                let weights = floats(backend, "topk_weights", weights, cells)?;
                Routing::from_topk(rank, experts, k, &indices, &weights)
            }
            Self::Map { tokens, map, probs, .. } => {
                let cells = Size::new(tokens) * experts;
                let map = values(backend, "routing_map", map, cells)?;
                let probs = floats(backend, "probs", probs, cells)?;
                Routing::from_map(rank, experts, &map, &probs)
            }
        }
    }
}

/// The first `count` values of `memory`.
fn values<'m, B, T>(
    backend: &mut B,
    what: &'static str,
    memory: &'m B::Memory,
    count: Size,
) -> Result<Cow<'m, [T]>>
where
    B: Backend + ?Sized,
    T: AnyBitPattern + bytemuck::NoUninit,
{
    let bytes = backend.read(memory, (count * size_of::<T>()).bytes(what)?)?;
    if let Cow::Borrowed(bytes) = bytes
        && let Ok(values) = bytemuck::try_cast_slice(bytes)
    {
        return Ok(Cow::Borrowed(values));
    }
    Ok(Cow::Owned(bytemuck::pod_collect_to_vec(&bytes)))
}

/// The first `count` values of `memory`, or `count` zeros without memory.
fn floats<'m, B>(
    backend: &mut B,
    what: &'static str,
    memory: Option<&'m B::Memory>,
    count: Size,
) -> Result<Cow<'m, [f32]>>
where
    B: Backend + ?Sized,
{
    match memory {
        Some(memory) => values(backend, what, memory, count),
        None => Ok(vec![0.0; (count * size_of::<f32>()).bytes(what)? / size_of::<f32>()].into()),
    }
}

/// Narrows expert indices to 32 bits; an index that does not fit is out of range.
fn narrow(rank: Rank, experts: usize, k: usize, wide: &[i64]) -> Result<Vec<i32>> {
    let one = |(at, &index): (usize, &i64)| {
        i32::try_from(index).map_err(|_| {
            let problem = RoutingProblem::IndexOutOfRange { index, experts };
            CallerError::Routing { rank, row: at / k, problem }.into()
        })
    };
    wide.iter().enumerate().map(one).collect()
}
