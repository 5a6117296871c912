//! The checked arguments of a dispatch. `operators` makes a [`CheckedDispatch`] before a dispatch enters.

use ep::call::{HandleFacts, RowBytes};
use ep::{DispatchInput, DispatchOutput, Probs, Rank, Result, World};

use crate::control::MEMORIES;
use crate::dispatch::ProbSource;
use crate::handle::HostHandle;
use crate::memory::HostMemory;

/// The arguments of a dispatch whose sizes and owners have been checked.
pub(crate) struct CheckedDispatch<'a> {
    pub(crate) probs: ProbSource<'a>,
    /// Bytes of each output; 0 = not requested.
    pub(crate) bytes: [usize; MEMORIES],
    /// Bytes of the rows that each output receives, padding rows included. Dispatch leaves the bytes after them unchanged.
    pub(crate) kept_bytes: [usize; MEMORIES],
}

impl<'a> CheckedDispatch<'a> {
    /// # Errors
    /// [`ep::CallerError`] that names the argument.
    pub(crate) fn check(
        world: &World,
        rank: Rank,
        handle: &HostHandle,
        input: &DispatchInput<'a, HostMemory>,
        output: &DispatchOutput<'_, HostMemory>,
    ) -> Result<Self> {
        let facts = facts(world, rank, handle);
        let RowBytes { tokens, scales, probs, local_experts } =
            facts.check_dispatch(input, output, HostMemory::facts)?;
        let row_bytes = [tokens, scales, probs, local_experts];
        let probs = match &input.probs {
            Probs::Skip => ProbSource::Skip,
            Probs::Routing => ProbSource::Routing,
            Probs::Dense(memory) => {
                let bytes = 4 * facts.shape.tokens * world.experts();
                ProbSource::Dense(bytemuck::cast_slice(&memory.as_bytes()[..bytes]))
            }
        };
        Ok(Self {
            probs,
            bytes: row_bytes.map(|row| row * handle.shape.allocated_rows()),
            kept_bytes: row_bytes.map(|row| row * handle.shape.rows),
        })
    }
}

/// The facts that calls with this handle are checked against.
pub(crate) fn facts<'a>(world: &'a World, rank: Rank, handle: &HostHandle) -> HandleFacts<'a> {
    HandleFacts { buffer: handle.buffer, world, rank, shape: handle.sizes() }
}
