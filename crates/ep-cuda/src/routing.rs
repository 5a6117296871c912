//! A rank's routing where routers leave it: on the GPU.

use ep::{CallerError, Result};

use crate::memory::CudaMemory;
use crate::params::PreprocessParams;

/// A routing in GPU memory.
#[derive(Debug, Clone, Copy)]
#[non_exhaustive]
pub enum DeviceRouting<'a> {
    /// `[tokens, k]`: expert indices, -1 for none, and their weights (f32).
    TopK {
        /// Number of tokens.
        tokens: usize,
        /// Experts per token, at most.
        k: usize,
        /// The indices.
        indices: Indices<'a>,
        /// The weights; `None` = zero.
        weights: Option<&'a CudaMemory>,
    },
    /// `[tokens, experts]`: bytes, non-zero where chosen, and probabilities (f32).
    Map {
        /// Number of tokens.
        tokens: usize,
        /// Experts of a token, at most: how much memory the handle takes.
        most: usize,
        /// The map.
        map: &'a CudaMemory,
        /// The probabilities; `None` = zero.
        probs: Option<&'a CudaMemory>,
    },
    /// Rows of different lengths: where each begins (`tokens + 1` u32), experts (u32), weights (f32).
    Rows {
        /// Number of tokens.
        tokens: usize,
        /// Entries of all rows.
        entries: usize,
        /// Where rows begin.
        begin: &'a CudaMemory,
        /// Their experts.
        experts: &'a CudaMemory,
        /// Their weights.
        weights: &'a CudaMemory,
    },
}

/// Where preprocessing writes what a caller on the GPU wants to know, beside the handle.
#[derive(Debug, Default)]
pub struct DeviceReport<'a> {
    /// i64 `[local experts]`: rows of each, padding included. Permuted mode only.
    pub tokens_per_expert: Option<&'a mut CudaMemory>,
    /// i64 `[local experts]`: rows of each, without padding. Permuted mode only.
    pub kept_per_expert: Option<&'a mut CudaMemory>,
    /// i32 `[1]`: 1 where rows were dropped for want of capacity, else 0.
    pub overflow: Option<&'a mut CudaMemory>,
}

impl DeviceReport<'_> {
    pub(crate) fn check(&self, local_experts: usize) -> Result<()> {
        let check = |what, memory: &Option<&mut CudaMemory>, bytes| {
            memory.as_ref().map_or(Ok(()), |memory| ep::call::check_len(what, bytes, memory.len()))
        };
        check("tokens_per_expert", &self.tokens_per_expert, 8 * local_experts)?;
        check("kept_per_expert", &self.kept_per_expert, 8 * local_experts)?;
        check("overflow", &self.overflow, 4)
    }

    pub(crate) fn fill(&self, params: &mut PreprocessParams) {
        let address = |memory: &Option<&mut CudaMemory>| memory.as_ref().map_or(0, |memory| memory.address());
        params.tokens_per_expert = address(&self.tokens_per_expert);
        params.kept_per_expert = address(&self.kept_per_expert);
        params.overflow = address(&self.overflow);
    }
}

/// Expert indices in one of the types that routers use.
#[derive(Debug, Clone, Copy)]
pub enum Indices<'a> {
    /// i32.
    Narrow(&'a CudaMemory),
    /// i64, as PyTorch's `topk` gives them.
    Wide(&'a CudaMemory),
}

impl DeviceRouting<'_> {
    pub(crate) fn tokens(&self) -> usize {
        match *self {
            Self::TopK { tokens, .. } | Self::Map { tokens, .. } | Self::Rows { tokens, .. } => tokens,
        }
    }

    /// (token, expert) pairs, at most.
    pub(crate) fn most_copies(&self, experts: usize) -> usize {
        match *self {
            Self::TopK { tokens, k, .. } => tokens * k.min(experts),
            Self::Map { tokens, most, .. } => tokens * most.min(experts),
            Self::Rows { entries, .. } => entries,
        }
    }

    pub(crate) fn check(&self, world_experts: usize) -> Result<()> {
        let check = ep::call::check_len;
        match *self {
            Self::TopK { tokens, k, indices, weights } => {
                match indices {
                    Indices::Narrow(memory) => check("topk_idx", 4 * tokens * k, memory.len())?,
                    Indices::Wide(memory) => check("topk_idx", 8 * tokens * k, memory.len())?,
                }
                weights.map_or(Ok(()), |weights| check("topk_weights", 4 * tokens * k, weights.len()))
            }
            Self::Map { tokens, map, probs, most } => {
                if most == 0 && tokens > 0 {
                    return Err(CallerError::Config {
                        key: "most",
                        value: "0".into(),
                        problem: "a token of a routing map has at least one expert at most".into(),
                    }
                    .into());
                }
                check("routing_map", tokens * world_experts, map.len())?;
                probs.map_or(Ok(()), |probs| check("probs", 4 * tokens * world_experts, probs.len()))
            }
            Self::Rows { tokens, entries, begin, experts, weights } => {
                check("row begins", 4 * (tokens + 1), begin.len())?;
                check("experts", 4 * entries, experts.len())?;
                check("weights", 4 * entries, weights.len())
            }
        }
    }

    pub(crate) fn fill(&self, params: &mut PreprocessParams) {
        let address = |memory: Option<&CudaMemory>| memory.map_or(0, CudaMemory::address);
        match *self {
            Self::TopK { k, indices, weights, .. } => {
                params.form = 0;
                params.topk = k as u32;
                match indices {
                    Indices::Narrow(memory) => params.topk_idx = memory.address(),
                    Indices::Wide(memory) => params.topk_idx_wide = memory.address(),
                }
                params.weights = address(weights);
            }
            Self::Map { map, probs, .. } => {
                params.form = 1;
                params.map = map.address();
                params.weights = address(probs);
            }
            Self::Rows { begin, experts, weights, .. } => {
                params.form = 2;
                params.row_begin = begin.address();
                params.row_experts = experts.address();
                params.weights = weights.address();
            }
        }
    }
}
