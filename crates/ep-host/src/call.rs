//! A dispatch call as this backend carries it out.

use ep::call::{HandleFacts, RowBytes};
use ep::{DispatchInput, DispatchOutput, Probs, Rank, Result, TokenFormat, World};

use crate::control::BUFFERS;
use crate::dispatch::Weights;
use crate::handle::HostHandle;
use crate::memory::HostMemory;

/// A dispatch call whose sizes are right.
pub(crate) struct DispatchCall<'a> {
    pub(crate) weights: Weights<'a>,
    /// Bytes of each output; 0 = not asked for.
    pub(crate) bytes: [usize; BUFFERS],
    /// Bytes of each output up to the last row that is written.
    pub(crate) kept_bytes: [usize; BUFFERS],
}

impl<'a> DispatchCall<'a> {
    pub(crate) fn check(
        world: &World,
        rank: Rank,
        handle: &HostHandle,
        input: &DispatchInput<'a, HostMemory>,
        output: &DispatchOutput<'_, HostMemory>,
    ) -> Result<Self> {
        let facts = facts(world, rank, handle);
        let RowBytes { tokens, scales, probs, local_experts } =
            facts.check_dispatch(input, output, HostMemory::len)?;
        let weights = match &input.probs {
            Probs::Skip => Weights::Skip,
            Probs::Routing => Weights::Routing,
            Probs::Dense(memory) => {
                let bytes = 4 * facts.tokens * world.experts();
                Weights::Dense(bytemuck::cast_slice(&memory.as_bytes()[..bytes]))
            }
        };
        let row = [tokens, scales, probs, local_experts];
        Ok(Self {
            weights,
            bytes: row.map(|row| row * handle.shape.allocated_rows()),
            kept_bytes: row.map(|row| row * handle.shape.rows),
        })
    }
}

/// What calls with this handle are checked against.
pub(crate) fn facts<'a>(world: &'a World, rank: Rank, handle: &HostHandle) -> HandleFacts<'a> {
    HandleFacts {
        world,
        rank,
        mode: handle.mode,
        tokens: handle.layout.tokens(),
        allocated_rows: handle.shape.allocated_rows(),
        rows: handle.shape.rows,
    }
}

pub(crate) fn format_code(format: TokenFormat) -> u64 {
    let scales = format.scales().map_or(0, |scales| (scales.block() * 8 + scales.bytes_per_scale()) as u64);
    // Given and quantised look the same on the wire, so ranks may differ in it.
    scales << 1 | u64::from(matches!(format, TokenFormat::Bf16))
}
