//! Checks a routing in GPU memory and the outputs of preprocess, and passes them to the kernel.

use ep::call::Maker;
use ep::{CallerError, DeviceReport, DeviceRouting, Indices, Result, Size};

use crate::memory::CudaMemory;
use crate::params::{PreprocessParams, RoutingForm};

/// Maximum number of choices of a token in a top-k routing. For K choices per token, the kernel divides the index of a
/// choice in a tile of up to 256 tokens by K. It uses a multiplication, which is exact for indices below 2^32 / K
/// (`Divider` in `device/common/types.cuh`).
const MOST_TOPK: usize = 4096;

/// A routing in GPU memory.
#[derive(Debug, Clone, Copy)]
pub(crate) enum Lists<'a> {
    /// In a form that callers pass.
    Given(DeviceRouting<'a, CudaMemory>),
    /// Rows of different lengths, one per token: the form of [`ep::Routing`].
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

/// Checks that `buffer` may write the outputs, and checks their sizes.
pub(crate) fn check_report(
    report: &DeviceReport<'_, CudaMemory>,
    buffer: Maker,
    local_experts: usize,
) -> Result<()> {
    let check = |what, memory: &Option<&mut CudaMemory>, bytes| {
        memory.as_ref().map_or(Ok(()), |memory| memory.check(buffer, what, bytes))
    };
    let counts = Size::new(local_experts) * size_of::<i64>();
    check("tokens_per_expert", &report.tokens_per_expert, counts)?;
    check("kept_per_expert", &report.kept_per_expert, counts)?;
    check("overflow", &report.overflow, Size::new(size_of::<i32>()))
}

/// Passes the outputs to the kernel.
pub(crate) fn fill_report(report: &DeviceReport<'_, CudaMemory>, params: &mut PreprocessParams) {
    let address = |memory: &Option<&mut CudaMemory>| memory.as_ref().map_or(0, |memory| memory.address());
    params.tokens_per_expert = address(&report.tokens_per_expert);
    params.kept_per_expert = address(&report.kept_per_expert);
    params.overflow = address(&report.overflow);
}

impl Lists<'_> {
    pub(crate) fn tokens(&self) -> usize {
        match *self {
            Self::Given(DeviceRouting::TopK { tokens, .. })
            | Self::Given(DeviceRouting::Map { tokens, .. })
            | Self::Rows { tokens, .. } => tokens,
        }
    }

    /// Upper bound of the number of copies.
    pub(crate) fn most_copies(&self, experts: usize) -> Size {
        match *self {
            Self::Given(DeviceRouting::TopK { tokens, k, .. }) => Size::new(tokens) * k.min(experts),
            Self::Given(DeviceRouting::Map { tokens, most, .. }) => Size::new(tokens) * most.min(experts),
            Self::Rows { entries, .. } => Size::new(entries),
        }
    }

    /// Checks that `buffer` may use the memory, and checks its sizes.
    pub(crate) fn check(&self, buffer: Maker, world_experts: usize) -> Result<()> {
        const WORD: usize = size_of::<u32>();
        let check = |what, needed, memory: &CudaMemory| memory.check(buffer, what, needed);
        match *self {
            Self::Given(DeviceRouting::TopK { tokens, k, indices, weights }) => {
                if k > MOST_TOPK {
                    let (what, expected, unit) = ("topk_idx", MOST_TOPK, "choices per token at most");
                    return Err(CallerError::Shape { what, expected, found: k, unit }.into());
                }
                let entries = Size::new(tokens) * k;
                match indices {
                    Indices::Narrow(memory) => check("topk_idx", entries * size_of::<i32>(), memory)?,
                    Indices::Wide(memory) => check("topk_idx", entries * size_of::<i64>(), memory)?,
                }
                weights.map_or(Ok(()), |weights| check("topk_weights", entries * WORD, weights))
            }
            Self::Given(DeviceRouting::Map { tokens, map, probs, most }) => {
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
            Self::Given(DeviceRouting::TopK { k, indices, weights, .. }) => {
                params.form = RoutingForm::TopK as u32;
                params.topk = k as u32;
                match indices {
                    Indices::Narrow(memory) => params.topk_idx = memory.address(),
                    Indices::Wide(memory) => params.topk_idx_wide = memory.address(),
                }
                params.weights = address(weights);
            }
            Self::Given(DeviceRouting::Map { map, probs, .. }) => {
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
