//! Arguments of a call, checked before anything is sent: the same way in every backend.

use crate::backend::{
    CombineInput, CombineOutput, DispatchInput, DispatchMode, DispatchOutput, Probs, TokenFormat,
    check_row_bytes,
};
use crate::error::{CallerError, Result};
use crate::layout::UNBOUNDED;
use crate::routing::Routing;
use crate::topology::{Rank, World};

/// What a call's sizes are checked against: the handle it is made with.
#[derive(Debug, Clone, Copy)]
pub struct HandleFacts<'a> {
    /// All ranks and experts.
    pub world: &'a World,
    /// The calling rank.
    pub rank: Rank,
    /// How the handle arranges rows.
    pub mode: DispatchMode,
    /// Tokens of the calling rank.
    pub tokens: usize,
    /// Rows that dispatch outputs must have.
    pub allocated_rows: usize,
    /// Rows that combine reads.
    pub rows: usize,
}

/// Bytes of one row of each output of a dispatch; 0 = not asked for.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct RowBytes {
    /// Of the tokens.
    pub tokens: usize,
    /// Of the scales.
    pub scales: usize,
    /// Of the probabilities.
    pub probs: usize,
    /// Of the local-expert map.
    pub local_experts: usize,
}

impl HandleFacts<'_> {
    /// Probabilities in one row of a dispatch output.
    pub fn probs_per_row(&self) -> usize {
        match self.mode {
            DispatchMode::Permuted { .. } => 1,
            DispatchMode::Plain => self.world.placement.local_experts(self.rank),
        }
    }

    /// Checks a dispatch; `len` gives the bytes of a memory.
    ///
    /// # Errors
    /// [`CallerError`] that names the argument.
    pub fn check_dispatch<M>(
        &self,
        input: &DispatchInput<'_, M>,
        output: &DispatchOutput<'_, M>,
        len: impl Fn(&M) -> usize,
    ) -> Result<RowBytes> {
        let DispatchInput { hidden, format, .. } = *input;
        let (input_bytes, output_bytes) = (format.input_row_bytes(hidden), format.output_row_bytes(hidden));
        check_row_bytes(hidden, output_bytes)?;
        let scale_bytes = format.scale_row_bytes(hidden);
        check_len("dispatch input tokens", self.tokens * input_bytes, len(input.tokens))?;
        let given = matches!(format, TokenFormat::Fp8(_));
        check_pair("scales given to dispatch", given, input.scales.is_some())?;
        if let Some(scales) = input.scales {
            check_len("dispatch input scales", self.tokens * scale_bytes, len(scales))?;
        }
        check_pair("scales out of dispatch", format.scales().is_some(), output.scales.is_some())?;
        if let Probs::Dense(dense) = input.probs {
            check_len("dispatch input probs", 4 * self.tokens * self.world.experts(), len(dense))?;
        }
        let with_probs = !matches!(input.probs, Probs::Skip);
        check_pair("probs out of dispatch", with_probs, output.probs.is_some())?;
        if output.local_experts.is_some() && self.mode != DispatchMode::Plain {
            let text = "local_experts is an output of the plain mode only".into();
            return Err(CallerError::Handle(text).into());
        }
        let experts = self.world.placement.local_experts(self.rank);
        let row = RowBytes {
            tokens: output_bytes,
            scales: scale_bytes,
            probs: if with_probs { 4 * self.probs_per_row() } else { 0 },
            local_experts: if output.local_experts.is_some() { experts } else { 0 },
        };
        let outputs = [
            ("dispatch output tokens", row.tokens, Some(&*output.tokens)),
            ("dispatch output scales", row.scales, output.scales.as_deref()),
            ("dispatch output probs", row.probs, output.probs.as_deref()),
            ("dispatch output local_experts", row.local_experts, output.local_experts.as_deref()),
        ];
        for (name, row_bytes, memory) in outputs {
            if let Some(memory) = memory {
                check_len(name, row_bytes * self.allocated_rows, len(memory))?;
            }
        }
        Ok(row)
    }

    /// Checks a combine; `len` gives the bytes of a memory.
    ///
    /// # Errors
    /// [`CallerError`] that names the argument.
    pub fn check_combine<M>(
        &self,
        input: &CombineInput<'_, M>,
        output: &CombineOutput<'_, M>,
        len: impl Fn(&M) -> usize,
    ) -> Result<()> {
        let row_bytes = input.hidden * input.element.bytes();
        check_row_bytes(input.hidden, row_bytes)?;
        check_row_bytes(input.hidden, input.hidden * input.wire.bytes())?;
        check_len("combine input rows", self.rows * row_bytes, len(input.rows))?;
        check_len("combine output", self.tokens * row_bytes, len(output.tokens))?;
        check_pair("probs of combine", input.probs.is_some(), output.probs.is_some())?;
        if let (Some(from), Some(to)) = (input.probs, output.probs.as_deref()) {
            check_len("combine input probs", 4 * self.rows * self.probs_per_row(), len(from))?;
            check_len("combine output probs", 4 * self.tokens * self.world.experts(), len(to))?;
        }
        Ok(())
    }
}

/// A rank's preprocess takes its own routing, for the experts of its world.
///
/// # Errors
/// [`CallerError::Handle`] for another rank's; [`CallerError::Shape`] for another number of experts.
pub fn check_routing(world: &World, rank: Rank, routing: &Routing) -> Result<()> {
    if routing.rank() != rank {
        let text = format!("the routing is that of rank {}, this is rank {rank}", routing.rank());
        return Err(CallerError::Handle(text).into());
    }
    check_experts(world, routing)
}

/// A routing must be for as many experts as there are.
pub(crate) fn check_experts(world: &World, routing: &Routing) -> Result<()> {
    let (expected, found) = (world.experts(), routing.experts());
    if expected == found {
        return Ok(());
    }
    Err(CallerError::Shape { what: "routing", expected, found, unit: "experts" }.into())
}

/// A capacity must be a whole number of padded segments, and below the number that stands for "unbounded" where
/// capacities are exchanged, `u32::MAX`.
///
/// # Errors
/// [`CallerError::Capacity`], [`CallerError::TooManyRows`].
pub fn check_capacity(rank: Rank, mode: DispatchMode, capacity: Option<usize>) -> Result<Option<u32>> {
    let Some(rows) = capacity else { return Ok(None) };
    let pad_multiple = mode.pad_multiple();
    if !rows.is_multiple_of(pad_multiple) {
        return Err(CallerError::Capacity { capacity: rows, pad_multiple }.into());
    }
    match u32::try_from(rows) {
        Ok(rows) if rows != UNBOUNDED => Ok(Some(rows)),
        _ => Err(CallerError::TooManyRows { rank, rows: rows as u64 }.into()),
    }
}

/// A handle is used with the buffer that made it; buffers are told apart by numbers of their own.
///
/// # Errors
/// [`CallerError::Handle`].
pub fn check_maker(maker: u64, buffer: u64) -> Result<()> {
    if maker == buffer {
        return Ok(());
    }
    Err(CallerError::Handle("it was made by another buffer".into()).into())
}

/// What the first dispatch with a handle has left in it, which combine needs.
///
/// # Errors
/// [`CallerError::Handle`] when there was none.
pub fn dispatched<T>(left: Option<T>) -> Result<T> {
    left.ok_or_else(|| {
        let text = "it was never dispatched; combine follows at least one dispatch with the same handle";
        CallerError::Handle(text.into()).into()
    })
}

/// A memory must be at least this long.
///
/// # Errors
/// [`CallerError::Shape`].
pub fn check_len(what: &'static str, expected: usize, found: usize) -> Result<()> {
    if found >= expected {
        Ok(())
    } else {
        Err(CallerError::Shape { what, expected, found, unit: "bytes" }.into())
    }
}

/// An optional argument must be there exactly when another one asks for it.
fn check_pair(what: &'static str, wanted: bool, given: bool) -> Result<()> {
    if wanted == given {
        return Ok(());
    }
    Err(CallerError::Shape { what, expected: wanted.into(), found: given.into(), unit: "tensors" }.into())
}
