//! Arguments of a call, checked before anything is sent.

use ep::backend::check_row_bytes;
use ep::{CallerError, DispatchInput, DispatchMode, DispatchOutput, Probs, Rank, Result, TokenFormat, World};

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
        let DispatchInput { hidden, format, .. } = *input;
        let (input_bytes, output_bytes) = (format.input_row_bytes(hidden), format.output_row_bytes(hidden));
        check_row_bytes(hidden, output_bytes)?;
        let scale_bytes = format.scale_row_bytes(hidden);
        let tokens = handle.layout.tokens();
        check_len("dispatch input tokens", tokens * input_bytes, input.tokens.len())?;
        check_pair(
            "scales given to dispatch",
            matches!(format, TokenFormat::Fp8(_)),
            input.scales.is_some(),
        )?;
        if let Some(scales) = input.scales {
            check_len("dispatch input scales", tokens * scale_bytes, scales.len())?;
        }
        check_pair("scales out of dispatch", format.scales().is_some(), output.scales.is_some())?;
        let weights = match &input.probs {
            Probs::Skip => Weights::Skip,
            Probs::Routing => Weights::Routing,
            Probs::Dense(memory) => {
                let bytes = 4 * tokens * world.experts();
                check_len("dispatch input probs", bytes, memory.len())?;
                Weights::Dense(bytemuck::cast_slice(&memory.as_bytes()[..bytes]))
            }
        };
        let with_probs = !matches!(weights, Weights::Skip);
        check_pair("probs out of dispatch", with_probs, output.probs.is_some())?;
        if output.local_experts.is_some() && handle.mode != DispatchMode::Plain {
            return Err(
                CallerError::Handle("local_experts is an output of the plain mode only".into()).into()
            );
        }
        let row = [
            output_bytes,
            scale_bytes,
            if with_probs { 4 * row_probs(world, rank, handle) } else { 0 },
            if output.local_experts.is_some() { world.placement.local_experts(rank) } else { 0 },
        ];
        let bytes = row.map(|row| row * handle.shape.allocated_rows());
        let kept_bytes = row.map(|row| row * handle.shape.rows);
        let lens = [
            Some(output.tokens.len()),
            output.scales.as_deref().map(HostMemory::len),
            output.probs.as_deref().map(HostMemory::len),
            output.local_experts.as_deref().map(HostMemory::len),
        ];
        let names = [
            "dispatch output tokens",
            "dispatch output scales",
            "dispatch output probs",
            "dispatch output local_experts",
        ];
        for ((name, bytes), len) in names.into_iter().zip(bytes).zip(lens) {
            if let Some(len) = len {
                check_len(name, bytes, len)?;
            }
        }
        Ok(Self { weights, bytes, kept_bytes })
    }
}

/// Probabilities in one row of a dispatch output.
pub(crate) fn row_probs(world: &World, rank: Rank, handle: &HostHandle) -> usize {
    match handle.mode {
        DispatchMode::Permuted { .. } => 1,
        DispatchMode::Plain => world.placement.local_experts(rank),
    }
}

pub(crate) fn format_code(format: TokenFormat) -> u64 {
    let scales = format.scales().map_or(0, |scales| (scales.block() * 8 + scales.bytes_per_scale()) as u64);
    // Given and quantised look the same on the wire, so ranks may differ in it.
    scales << 1 | u64::from(matches!(format, TokenFormat::Bf16))
}

pub(crate) fn check_len(what: &'static str, expected: usize, found: usize) -> Result<()> {
    if found >= expected {
        Ok(())
    } else {
        Err(CallerError::Shape { what, expected, found, unit: "bytes" }.into())
    }
}

/// An optional argument must be there exactly when another one asks for it.
pub(crate) fn check_pair(what: &'static str, wanted: bool, given: bool) -> Result<()> {
    if wanted == given {
        return Ok(());
    }
    Err(CallerError::Shape { what, expected: wanted.into(), found: given.into(), unit: "tensors" }.into())
}
