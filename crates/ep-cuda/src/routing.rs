//! A rank's routing in GPU memory.

use ep::call::Maker;
use ep::{CallerError, Result, Size};

use crate::memory::CudaMemory;
use crate::params::{PreprocessParams, RoutingForm};

/// A routing in GPU memory.
#[derive(Debug, Clone, Copy)]
#[non_exhaustive]
pub enum DeviceRouting<'a> {
    /// `[tokens, k]`: expert indices, -1 for none, and their weights (f32).
    TopK {
        /// Number of tokens.
        tokens: usize,
        /// Choices per token.
        k: usize,
        /// The indices.
        indices: Indices<'a>,
        /// The weights; `None` = zero.
        weights: Option<&'a CudaMemory>,
    },
    /// `[tokens, experts]`: bytes, non-zero if the token chose the expert, and probabilities (f32).
    Map {
        /// Number of tokens.
        tokens: usize,
        /// Upper bound of the experts of a token. Determines the size of the handle.
        most: usize,
        /// The map.
        map: &'a CudaMemory,
        /// The probabilities; `None` = zero.
        probs: Option<&'a CudaMemory>,
    },
    /// Rows of different lengths, one per token.
    Rows {
        /// Number of tokens.
        tokens: usize,
        /// Number of entries of all rows.
        entries: usize,
        /// u32 `[tokens + 1]`: index of each row's first entry, then `entries`.
        begin: &'a CudaMemory,
        /// u32 `[entries]`: experts.
        experts: &'a CudaMemory,
        /// f32 `[entries]`: weights.
        weights: &'a CudaMemory,
    },
}

/// Optional outputs of preprocess in GPU memory.
#[derive(Debug, Default)]
pub struct DeviceReport<'a> {
    /// i64 `[local experts]`: rows per expert, padding included. Permuted mode only.
    pub tokens_per_expert: Option<&'a mut CudaMemory>,
    /// i64 `[local experts]`: rows per expert, without padding. Permuted mode only.
    pub kept_per_expert: Option<&'a mut CudaMemory>,
    /// i32 `[1]`: 1 if rows were dropped because of the capacity, else 0.
    pub overflow: Option<&'a mut CudaMemory>,
}

impl DeviceReport<'_> {
    pub(crate) fn check(&self, buffer: Maker, local_experts: usize) -> Result<()> {
        let check = |what, memory: &Option<&mut CudaMemory>, bytes| {
            memory.as_ref().map_or(Ok(()), |memory| memory.check(buffer, what, bytes))
        };
        let counts = Size::new(local_experts) * size_of::<i64>();
        check("tokens_per_expert", &self.tokens_per_expert, counts)?;
        check("kept_per_expert", &self.kept_per_expert, counts)?;
        check("overflow", &self.overflow, Size::new(size_of::<i32>()))
    }

    pub(crate) fn fill(&self, params: &mut PreprocessParams) {
        let address = |memory: &Option<&mut CudaMemory>| memory.as_ref().map_or(0, |memory| memory.address());
        params.tokens_per_expert = address(&self.tokens_per_expert);
        params.kept_per_expert = address(&self.kept_per_expert);
        params.overflow = address(&self.overflow);
    }
}

/// Expert indices, in one of the integer types that routers use.
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

    /// Upper bound of the number of copies.
    pub(crate) fn most_copies(&self, experts: usize) -> Size {
        match *self {
            Self::TopK { tokens, k, .. } => Size::new(tokens) * k.min(experts),
            Self::Map { tokens, most, .. } => Size::new(tokens) * most.min(experts),
            Self::Rows { entries, .. } => Size::new(entries),
        }
    }

    /// Checks that `buffer` may use the memory, and its sizes.
    pub(crate) fn check(&self, buffer: Maker, world_experts: usize) -> Result<()> {
        const WORD: usize = size_of::<u32>();
        let check = |what, needed, memory: &CudaMemory| memory.check(buffer, what, needed);
        match *self {
            Self::TopK { tokens, k, indices, weights } => {
                let entries = Size::new(tokens) * k;
                match indices {
                    Indices::Narrow(memory) => check("topk_idx", entries * size_of::<i32>(), memory)?,
                    Indices::Wide(memory) => check("topk_idx", entries * size_of::<i64>(), memory)?,
                }
                weights.map_or(Ok(()), |weights| check("topk_weights", entries * WORD, weights))
            }
            Self::Map { tokens, map, probs, most } => {
                if most == 0 && tokens > 0 {
                    return Err(CallerError::Config {
                        key: "most",
                        value: "0".into(),
                        problem: "the upper bound of the experts of a token must be at least 1".into(),
                    }
                    .into());
                }
                let cells = Size::new(tokens) * world_experts;
                check("routing_map", cells, map)?;
                probs.map_or(Ok(()), |probs| check("probs", cells * WORD, probs))
            }
            Self::Rows { tokens, entries, begin, experts, weights } => {
                check("row begins", (Size::new(tokens) + 1) * WORD, begin)?;
                check("experts", Size::new(entries) * WORD, experts)?;
                check("weights", Size::new(entries) * WORD, weights)
            }
        }
    }

    pub(crate) fn fill(&self, params: &mut PreprocessParams) {
        let address = |memory: Option<&CudaMemory>| memory.map_or(0, CudaMemory::address);
        match *self {
            Self::TopK { k, indices, weights, .. } => {
                params.form = RoutingForm::TopK as u32;
                params.topk = k as u32;
                match indices {
                    Indices::Narrow(memory) => params.topk_idx = memory.address(),
                    Indices::Wide(memory) => params.topk_idx_wide = memory.address(),
                }
                params.weights = address(weights);
            }
            Self::Map { map, probs, .. } => {
                params.form = RoutingForm::Map as u32;
                params.map = map.address();
                params.weights = address(probs);
            }
            Self::Rows { begin, experts, weights, .. } => {
                params.form = RoutingForm::Rows as u32;
                params.row_begin = begin.address();
                params.row_experts = experts.address();
                params.weights = weights.address();
            }
        }
    }
}
