//! Checks of an operator's arguments. Every backend runs the same checks before it sends anything.

use crate::backend::{
    CombineInput, CombineOutput, DispatchInput, DispatchMode, DispatchOutput, HandleShape, Probs,
    TokenFormat, check_row_bytes,
};
use std::sync::atomic::{AtomicU64, Ordering::Relaxed};

use crate::error::{CallerError, Result};
use crate::layout::UNBOUNDED;
use crate::routing::Routing;
use crate::size::Size;
use crate::topology::{Rank, World};

/// The identity of a buffer, recorded in its handles and its registered memory. Unique within a process.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Maker {
    id: u64,
    rank: Rank,
}

impl Maker {
    /// A new identity, for a buffer of `rank`.
    pub fn new(rank: Rank) -> Self {
        static NEXT: AtomicU64 = AtomicU64::new(0);
        Self { id: NEXT.fetch_add(1, Relaxed), rank }
    }

    /// The rank of the buffer.
    pub fn rank(self) -> Rank {
        self.rank
    }
}

/// The properties of a memory argument that the checks use.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct MemoryFacts {
    /// Length of the memory.
    pub bytes: usize,
    /// The buffer that the memory is registered with; `None` for unregistered memory, which every buffer accepts.
    pub maker: Option<Maker>,
}

/// The properties of a buffer and a handle that arguments are checked against.
#[derive(Debug, Clone, Copy)]
pub struct HandleFacts<'a> {
    /// The buffer.
    pub buffer: Maker,
    /// All ranks and experts.
    pub world: &'a World,
    /// The calling rank.
    pub rank: Rank,
    /// The sizes of the handle.
    pub shape: HandleShape,
}

/// Bytes of one row of each output of a dispatch; 0 = the call has no such output.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct RowBytes {
    /// Bytes of a row of the tokens.
    pub tokens: usize,
    /// Bytes of a row of the scales.
    pub scales: usize,
    /// Bytes of a row of the probabilities.
    pub probs: usize,
    /// Bytes of a row of the local-expert map.
    pub local_experts: usize,
}

impl HandleFacts<'_> {
    /// Number of rows that combine reads: the received rows, or their upper bound if only the device knows their number.
    pub fn combined_rows(&self) -> usize {
        self.shape.received_rows.unwrap_or(self.shape.rows)
    }

    /// Probabilities in one row of a dispatch output.
    pub fn probs_per_row(&self) -> usize {
        match self.shape.mode {
            DispatchMode::Permuted { .. } => 1,
            DispatchMode::Plain => self.world.placement().local_experts(self.rank),
        }
    }

    /// Checks the arguments of a dispatch: which are given, their sizes, and the buffer of each memory.
    ///
    /// # Errors
    /// [`CallerError`] that names the argument.
    pub fn check_dispatch<M>(
        &self,
        input: &DispatchInput<'_, M>,
        output: &DispatchOutput<'_, M>,
        facts: impl Fn(&M) -> MemoryFacts,
    ) -> Result<RowBytes> {
        let DispatchInput { hidden, format, .. } = *input;
        let (input_bytes, output_bytes) = (format.input_row_bytes(hidden), format.output_row_bytes(hidden));
        check_row_bytes(hidden, input_bytes)?;
        check_row_bytes(hidden, output_bytes)?;
        let scale_bytes = format.scale_row_bytes(hidden);
        let check = |what, rows: usize, row_bytes: usize, memory: &M| {
            check_memory(self.buffer, what, Size::new(rows) * row_bytes, facts(memory))
        };
        check("dispatch input tokens", self.shape.tokens, input_bytes, input.tokens)?;
        let given = matches!(format, TokenFormat::Fp8(_));
        check_pair("scales given to dispatch", given, input.scales.is_some())?;
        if let Some(scales) = input.scales {
            check("dispatch input scales", self.shape.tokens, scale_bytes, scales)?;
        }
        check_pair("scales out of dispatch", format.scales().is_some(), output.scales.is_some())?;
        if let Probs::Dense(dense) = input.probs {
            check("dispatch input probs", self.shape.tokens, 4 * self.world.experts(), dense)?;
        }
        let with_probs = !matches!(input.probs, Probs::Skip);
        check_pair("probs out of dispatch", with_probs, output.probs.is_some())?;
        if output.local_experts.is_some() && self.shape.mode != DispatchMode::Plain {
            let text = "local_experts is an output of the plain mode only; omit it in permuted mode".into();
            return Err(CallerError::Handle(text).into());
        }
        let experts = self.world.placement().local_experts(self.rank);
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
                check(name, self.shape.rows, row_bytes, memory)?;
            }
        }
        Ok(row)
    }

    /// Checks the arguments of a combine: which are given, their sizes, and the buffer of each memory.
    ///
    /// # Errors
    /// [`CallerError`] that names the argument.
    pub fn check_combine<M>(
        &self,
        input: &CombineInput<'_, M>,
        output: &CombineOutput<'_, M>,
        facts: impl Fn(&M) -> MemoryFacts,
    ) -> Result<()> {
        let row_bytes = input.element.row_bytes(input.hidden);
        check_row_bytes(input.hidden, row_bytes)?;
        check_row_bytes(input.hidden, input.wire.row_bytes(input.hidden))?;
        let check = |what, rows: usize, row_bytes: usize, memory: &M| {
            check_memory(self.buffer, what, Size::new(rows) * row_bytes, facts(memory))
        };
        check("combine input rows", self.combined_rows(), row_bytes, input.rows)?;
        check("combine output", self.shape.tokens, row_bytes, output.tokens)?;
        check_pair("probs of combine", input.probs.is_some(), output.probs.is_some())?;
        if let (Some(from), Some(to)) = (input.probs, output.probs.as_deref()) {
            check_memory(self.buffer, "combine input probs", self.prob_size(input)?, facts(from))?;
            check("combine output probs", self.shape.tokens, 4 * self.world.experts(), to)?;
        }
        Ok(())
    }

    /// Size of the probabilities of a combine, from the first value of the first row to the last value of the last row.
    fn prob_size<M>(&self, input: &CombineInput<'_, M>) -> Result<Size> {
        let (width, stride) = (self.probs_per_row(), self.prob_stride(input));
        if stride < width {
            let what = "stride of combine input probs, at least";
            return Err(CallerError::Shape { what, expected: width, found: stride, unit: "elements" }.into());
        }
        let before_last = self.combined_rows().checked_sub(1);
        let elements = before_last.map_or(Size::new(0), |rows| Size::new(rows) * stride + width);
        Ok(elements * 4)
    }

    /// Elements from one row of the probabilities of a combine to the next.
    pub fn prob_stride<M>(&self, input: &CombineInput<'_, M>) -> usize {
        input.prob_stride.unwrap_or(self.probs_per_row())
    }
}

/// Checks that `routing` is the routing of `rank`, for the experts of `world`.
///
/// # Errors
/// [`CallerError::Handle`] for a routing of another rank; [`CallerError::Shape`] for a different number of experts.
pub fn check_routing(world: &World, rank: Rank, routing: &Routing) -> Result<()> {
    if routing.rank() != rank {
        let text = format!("the routing is for rank {}, but this is rank {rank}", routing.rank());
        return Err(CallerError::Handle(text).into());
    }
    check_experts(world, routing)
}

/// Checks that `routing` is for as many experts as `world` has.
pub(crate) fn check_experts(world: &World, routing: &Routing) -> Result<()> {
    let (expected, found) = (world.experts(), routing.experts());
    if expected == found {
        return Ok(());
    }
    Err(CallerError::Shape { what: "routing", expected, found, unit: "experts" }.into())
}

/// Checks a capacity, in rows: a multiple of the pad multiple, and below `u32::MAX`, which the exchanged words reserve
/// for "no capacity".
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

/// Checks that a handle is used with the buffer that made it.
///
/// # Errors
/// [`CallerError::Handle`] when another buffer made the handle.
pub fn check_maker(maker: Maker, buffer: Maker) -> Result<()> {
    if maker == buffer {
        return Ok(());
    }
    let text = format!(
        "it was made by another buffer, of rank {}; use it with the buffer that made it, not with this one, of rank {}",
        maker.rank, buffer.rank
    );
    Err(CallerError::Handle(text).into())
}

/// Checks that a memory argument has at least `needed` bytes and is registered with `buffer` or with no buffer.
///
/// Peers address registered memory by segment and offset within `buffer`. If the memory belonged to another buffer, they
/// would read and write unrelated memory of `buffer`.
///
/// # Errors
/// [`CallerError::Memory`], [`CallerError::TooLarge`], [`CallerError::Shape`].
pub fn check_memory(buffer: Maker, what: &'static str, needed: Size, memory: MemoryFacts) -> Result<()> {
    if let Some(maker) = memory.maker.filter(|&maker| maker != buffer) {
        return Err(CallerError::Memory { what, maker: maker.rank, rank: buffer.rank }.into());
    }
    check_len(what, needed.bytes(what)?, memory.bytes)
}

/// Unwraps the state that combine needs, which the first dispatch with a handle stores in the handle.
///
/// # Errors
/// [`CallerError::Handle`] when the handle was never dispatched.
pub fn dispatched<T>(state: Option<T>) -> Result<T> {
    state.ok_or_else(|| {
        let text = "it was never dispatched; combine follows at least one dispatch with the same handle";
        CallerError::Handle(text.into()).into()
    })
}

/// Checks that a memory argument has at least `expected` bytes.
///
/// # Errors
/// [`CallerError::Shape`] when it has fewer.
pub fn check_len(what: &'static str, expected: usize, found: usize) -> Result<()> {
    if found >= expected {
        Ok(())
    } else {
        Err(CallerError::Shape { what, expected, found, unit: "bytes" }.into())
    }
}

/// Checks that an optional argument is given exactly when the other arguments require it.
fn check_pair(what: &'static str, wanted: bool, given: bool) -> Result<()> {
    if wanted == given {
        return Ok(());
    }
    Err(CallerError::Shape { what, expected: wanted.into(), found: given.into(), unit: "tensors" }.into())
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::backend::Element;
    use crate::error::Error;

    #[test]
    fn a_handle_of_another_buffer_is_refused() {
        let (one, other) = (Maker::new(Rank(3)), Maker::new(Rank(3)));
        assert_ne!(one, other);
        assert_eq!(check_maker(one, one), Ok(()));
        let error = check_maker(one, other).unwrap_err().to_string();
        assert!(error.starts_with("handle: it was made by another buffer, of rank 3"), "{error}");
    }

    #[test]
    fn memory_of_another_buffer_is_refused() {
        let (own, foreign) = (Maker::new(Rank(0)), Maker::new(Rank(1)));
        let check = |maker, needed| {
            check_memory(own, "dispatch output tokens", Size::new(needed), MemoryFacts { bytes: 8, maker })
        };
        assert_eq!(check(Some(own), 8), Ok(()));
        assert_eq!(check(None, 8), Ok(()));
        let Err(Error::Caller(error)) = check(Some(foreign), 0) else { panic!("foreign memory is taken") };
        let expected = CallerError::Memory { what: "dispatch output tokens", maker: Rank(1), rank: Rank(0) };
        assert_eq!(error, expected);
        let text = error.to_string();
        assert!(text.contains("dispatch output tokens") && text.contains("rank 1"), "{text}");
        assert!(matches!(check(None, 9), Err(Error::Caller(CallerError::Shape { .. }))));
        assert!(matches!(check(None, usize::MAX), Err(Error::Caller(CallerError::TooLarge { .. }))));
    }

    /// Sizes whose products exceed 64 bits, and would wrap around to small numbers if unchecked.
    #[test]
    fn widths_whose_sizes_overflow_are_refused() {
        let world = World::builder().ranks(1).experts(4).build().unwrap();
        let facts = |tokens, rows| HandleFacts {
            buffer: Maker::new(Rank(0)),
            world: &world,
            rank: Rank(0),
            shape: HandleShape {
                mode: DispatchMode::Plain,
                tokens,
                rows,
                capacity: None,
                received_rows: Some(rows),
            },
        };
        let bytes = |memory: &usize| MemoryFacts { bytes: *memory, maker: None };
        let widths = [1 << 62, 1 << 63, (1 << 63) + 8, usize::MAX - 15, usize::MAX];
        for hidden in widths.into_iter().chain((30..62).map(|bit| 1 << bit)) {
            for (tokens, rows) in [(0, 0), (1, 0), (0, 1), (u32::MAX as usize, 1 << 40)] {
                for (element, wire) in [
                    (Element::Bf16, Element::Bf16),
                    (Element::F32, Element::Bf16),
                    (Element::Bf16, Element::F32),
                ] {
                    let input = CombineInput::new(&(1 << 20), hidden).element(element).wire(wire);
                    let mut out = 1 << 20;
                    let output = CombineOutput::new(&mut out);
                    let found = facts(tokens, rows).check_combine(&input, &output, bytes);
                    assert!(matches!(found, Err(Error::Caller(_))), "{hidden} {tokens} {rows}: {found:?}");
                }
                let input = DispatchInput::new(&(1 << 20), hidden).probs(Probs::Skip);
                let mut out = 1 << 20;
                let output = DispatchOutput::new(&mut out);
                let found = facts(tokens, rows).check_dispatch(&input, &output, bytes);
                assert!(matches!(found, Err(Error::Caller(_))), "{hidden} {tokens} {rows}: {found:?}");
            }
        }
    }
}
