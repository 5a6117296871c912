//! Runs a case on one rank and compares the results with the oracle's.

use super::case::{Case, Form, ProbsKind};
use super::failure::{Expected, Failure, POISON, Problem, Unit};
use super::prepared::{Content, Prepared};
use crate::backend::{
    Backend, CombineInput, CombineOutput, DispatchInput, DispatchMode, DispatchOutput, HandleShape, Probs,
    TokenFormat,
};
use crate::error::Error;
use crate::layout::ReceiveShape;
use crate::oracle;
use crate::topology::Rank;
use crate::weight::WeightRows;

/// Bytes after an output that an operator must leave unchanged.
const GUARD: usize = 80;

impl Prepared {
    /// Runs the case on this rank: preprocess, then for each run a dispatch, a combine, a combine with probabilities, and
    /// [`WeightRows`] on the expert output rows. The case's seed determines whether the input of preprocess is a
    /// [`Routing`](crate::Routing) or a routing in the backend's memory.
    ///
    /// The first run waits after every operator; later runs queue their operators. The second run makes another handle
    /// between dispatch and combine. Memory in every second run has exactly the size that the operators need; in the
    /// other runs, guard bytes follow the outputs.
    ///
    /// Every rank of [`world`](Self::world) must call this, in the same order of cases.
    ///
    /// # Errors
    /// The first [`Failure`]. The caller should then drop the backend: if an error stopped this rank, its peers wait
    /// for it.
    pub fn check<B: WeightRows>(&self, backend: &mut B) -> Result<(), Failure> {
        self.check_on(backend, &mut None)
    }

    /// Like [`check`](Self::check), on the handle of an earlier check of the same routing. If `handle` is `None`, makes a
    /// handle and stores it in `handle`.
    pub(super) fn check_on<B: WeightRows>(
        &self,
        backend: &mut B,
        handle: &mut Option<B::Handle>,
    ) -> Result<(), Failure> {
        let mut check = Check::new(self, backend);
        if check.backend.world() != &self.world {
            return Err(check.failure("joining", Problem::World));
        }
        let ended = check.case(handle);
        match check.first {
            None => ended,
            Some(first) => Err(Failure { stopped: ended.is_err(), ..first }),
        }
    }
}

/// One rank in the middle of a case.
pub(super) struct Check<'a, B: Backend> {
    pub(super) prepared: &'a Prepared,
    pub(super) rank: Rank,
    pub(super) backend: &'a mut B,
    run: usize,
    /// The first difference. The rank continues after it, since its peers depend on this rank's operators.
    first: Option<Failure>,
}

/// Memory of one dispatch.
pub(super) struct DispatchMemory<M> {
    pub(super) tokens: M,
    pub(super) scales: Option<M>,
    pub(super) dense: Option<M>,
    pub(super) out_tokens: M,
    pub(super) out_scales: Option<M>,
    pub(super) out_probs: Option<M>,
    pub(super) out_local_experts: Option<M>,
}

/// Memory of one combine.
pub(super) struct CombineMemory<M> {
    pub(super) rows: M,
    pub(super) probs: Option<M>,
    pub(super) prob_stride: Option<usize>,
    pub(super) out_tokens: M,
    pub(super) out_probs: Option<M>,
}

impl<'a, B: WeightRows> Check<'a, B> {
    pub(super) fn new(prepared: &'a Prepared, backend: &'a mut B) -> Self {
        Self { prepared, rank: backend.rank(), backend, run: 0, first: None }
    }

    fn case(&mut self, handle: &mut Option<B::Handle>) -> Result<(), Failure> {
        let handle = match handle {
            Some(handle) => handle,
            none => none.insert(match Form::of(self.case_of().seed) {
                None => self.preprocess()?,
                Some(form) => self.preprocess_on_device(form)?,
            }),
        };
        for run in 0..self.prepared.runs() {
            self.run = run;
            self.run(handle)?;
        }
        let at = self.rank.index();
        self.shape_is(handle, self.prepared.routings[at].tokens(), &self.prepared.received[at].shape)
    }

    /// Makes the handle of the case's routing.
    pub(super) fn preprocess(&mut self) -> Result<B::Handle, Failure> {
        let Prepared { case, routings, capacity, received, .. } = self.prepared;
        let at = self.rank.index();
        let handle = self.backend.preprocess(&routings[at], case.mode, capacity[at]);
        let handle = handle.map_err(|error| self.error("preprocess", error))?;
        self.shape_is(&handle, routings[at].tokens(), &received[at].shape)?;
        Ok(handle)
    }

    /// Makes a handle of another routing, which the caller keeps while the first handle is in use.
    fn decoy(&mut self) -> Result<B::Handle, Failure> {
        let Prepared { case, decoys, decoys_received, .. } = self.prepared;
        let at = self.rank.index();
        let handle = self.backend.preprocess(&decoys[at], case.mode, None);
        let handle = handle.map_err(|error| self.error("preprocess (of a second handle)", error))?;
        self.shape_is(&handle, decoys[at].tokens(), &decoys_received[at].shape)?;
        Ok(handle)
    }

    /// Checks the receive shape and the handle shape of a handle whose routing has `tokens` tokens.
    pub(super) fn shape_is(
        &mut self,
        handle: &B::Handle,
        tokens: usize,
        expected: &ReceiveShape,
    ) -> Result<(), Failure> {
        const OPERATOR: &str = "receive_shape";
        let found = self.backend.receive_shape(handle).map_err(|error| self.error(OPERATOR, error))?;
        if &found != expected {
            self.note(OPERATOR, Problem::Shape { expected: expected.clone(), found });
        }
        let &ReceiveShape { mode, rows, capacity, .. } = expected;
        let expected = HandleShape {
            mode,
            tokens,
            rows: expected.allocated_rows(),
            capacity,
            // `receive_shape` has waited for this number.
            received_rows: Some(rows),
        };
        let found = self.backend.handle_shape(handle);
        if found != expected {
            self.note("handle_shape", Problem::HandleShape { expected, found });
        }
        Ok(())
    }

    fn run(&mut self, handle: &B::Handle) -> Result<(), Failure> {
        let mut dispatch = self.dispatch_memory()?;
        let mut combine = self.combine_memory(false)?;
        let mut gather = self.combine_memory(true)?;

        self.dispatch(handle, &mut dispatch)?;
        self.wait_in_first_run("dispatch")?;
        let decoy = if self.run == 1 { Some(self.decoy()?) } else { None };
        self.combine(handle, &mut combine)?;
        self.wait_in_first_run("combine")?;
        self.combine(handle, &mut gather)?;
        self.synchronize("combine with probs")?;
        drop(decoy);

        self.check_dispatch(&dispatch)?;
        self.check_combine("combine", &combine)?;
        self.check_combine("combine with probs", &gather)?;
        self.weigh()
    }

    fn wait_in_first_run(&mut self, operator: &'static str) -> Result<(), Failure> {
        if self.run == 0 { self.synchronize(operator) } else { Ok(()) }
    }

    pub(super) fn synchronize(&mut self, operator: &'static str) -> Result<(), Failure> {
        self.backend.synchronize().map_err(|error| self.error(operator, error))
    }

    pub(super) fn dispatch_memory(&mut self) -> Result<DispatchMemory<B::Memory>, Failure> {
        let Outputs { tokens, scales, probs, local_experts } = self.dispatched();
        let Content { input, .. } = self.content();
        let case = self.case_of();
        let dense = case.probs == ProbsKind::Dense;
        Ok(DispatchMemory {
            tokens: self.input(&input.data)?,
            scales: given_scales(case).then(|| self.input(&input.scales)).transpose()?,
            dense: dense.then(|| self.input(bytemuck::cast_slice(&input.probs))).transpose()?,
            out_tokens: self.output(tokens)?,
            out_scales: scales.map(|scales| self.output(scales)).transpose()?,
            out_probs: probs.map(|probs| self.output(probs)).transpose()?,
            out_local_experts: local_experts.map(|experts| self.output(experts)).transpose()?,
        })
    }

    pub(super) fn combine_memory(&mut self, with_probs: bool) -> Result<CombineMemory<B::Memory>, Failure> {
        let (tokens, probs) = self.combined();
        let Content { expert_rows, row_probs, .. } = self.content();
        // With dense probabilities, a gap of 1 to 3 elements, depending on the rank, follows each row. NaN in a gap must not
        // reach a token.
        let width = self.prepared.probs_per_row(self.rank);
        let gap = if self.case_of().probs == ProbsKind::Dense { 1 + self.rank.index() % 3 } else { 0 };
        let with_gaps = |row: &[f32]| [row, &[f32::NAN; 3][..gap]].concat();
        let row_probs: Vec<f32> = row_probs.chunks(width.max(1)).flat_map(with_gaps).collect();
        Ok(CombineMemory {
            rows: self.input(expert_rows)?,
            probs: with_probs.then(|| self.input(bytemuck::cast_slice(&row_probs))).transpose()?,
            prob_stride: (gap > 0).then_some(width + gap),
            out_tokens: self.output(tokens)?,
            out_probs: with_probs.then(|| self.output(probs)).transpose()?,
        })
    }

    pub(super) fn dispatch(
        &mut self,
        handle: &B::Handle,
        memory: &mut DispatchMemory<B::Memory>,
    ) -> Result<(), Failure> {
        let (input, output) = memory.arguments(self.case_of());
        self.backend.dispatch(handle, input, output).map_err(|error| self.error("dispatch", error))
    }

    fn combine(&mut self, handle: &B::Handle, memory: &mut CombineMemory<B::Memory>) -> Result<(), Failure> {
        let operator = if memory.probs.is_some() { "combine with probs" } else { "combine" };
        let (input, output) = memory.arguments(self.case_of());
        self.backend.combine(handle, input, output).map_err(|error| self.error(operator, error))
    }

    fn check_dispatch(&mut self, memory: &DispatchMemory<B::Memory>) -> Result<(), Failure> {
        const OPERATOR: &str = "dispatch";
        let Outputs { tokens, scales, probs, local_experts } = self.dispatched();
        self.verify(OPERATOR, tokens, &memory.out_tokens)?;
        for (expected, memory) in [
            (scales, &memory.out_scales),
            (probs, &memory.out_probs),
            (local_experts, &memory.out_local_experts),
        ] {
            if let (Some(expected), Some(memory)) = (expected, memory) {
                self.verify(OPERATOR, expected, memory)?;
            }
        }
        let case = self.case_of();
        let (unit, row_bytes) = (input_unit(case.format), case.format.input_row_bytes(case.hidden));
        let unchanged = given("the tokens given", unit, row_bytes, &self.content().input.data);
        self.verify(OPERATOR, unchanged, &memory.tokens)?;
        Ok(())
    }

    fn check_combine(
        &mut self,
        operator: &'static str,
        memory: &CombineMemory<B::Memory>,
    ) -> Result<(), Failure> {
        let (tokens, probs) = self.combined();
        let found = self.verify(operator, tokens, &memory.out_tokens)?;
        self.check_rounding(operator, &found);
        if let Some(memory) = &memory.out_probs {
            self.verify(operator, probs, memory)?;
        }
        let Expected { unit, row_bytes, .. } = tokens;
        let unchanged = given("the expert rows given", unit, row_bytes, &self.content().expert_rows);
        self.verify(operator, unchanged, &memory.rows)?;
        Ok(())
    }

    /// Checks that the error of each sum is within the bound of its roundings. This checks the oracle too.
    fn check_rounding(&mut self, operator: &'static str, found: &[u8]) {
        let Case { hidden, element, .. } = *self.case_of();
        for (at, (exact, bytes)) in
            self.content().exact.iter().zip(found.chunks_exact(element.bytes())).enumerate()
        {
            let found = f64::from(oracle::value(element, bytes, 0));
            let error = (found - exact.sum).abs();
            if error.is_nan() || error > exact.bound {
                let (row, column) = (at / hidden, at % hidden);
                let what = "combined tokens";
                let problem =
                    Problem::Rounding { what, row, column, found, exact: exact.sum, bound: exact.bound };
                return self.note(operator, problem);
            }
        }
    }

    /// Compares the content of a memory with the expected content, and returns the former.
    pub(super) fn verify(
        &mut self,
        operator: &'static str,
        expected: Expected<'_>,
        memory: &B::Memory,
    ) -> Result<Vec<u8>, Failure> {
        let found = self.read(expected.bytes(), memory)?;
        if let Some(difference) = expected.difference(&found) {
            self.note(operator, Problem::Differs(difference));
        }
        Ok(found)
    }

    /// The first `bytes` bytes of a memory.
    pub(super) fn read(&mut self, bytes: usize, memory: &B::Memory) -> Result<Vec<u8>, Failure> {
        let mut found = vec![0; bytes];
        self.backend.download(memory, &mut found).map_err(|error| self.error("download", error))?;
        Ok(found)
    }

    /// The expected outputs of a dispatch.
    pub(super) fn dispatched(&self) -> Outputs<'a> {
        let case = self.case_of();
        let Content { dispatched, .. } = self.content();
        let allocated_rows = self.prepared.received[self.rank.index()].shape.allocated_rows();
        let guard = self.guard();
        let rows = |what, unit, row_bytes, rows: &'a [u8]| Expected {
            what,
            unit,
            row_bytes,
            rows,
            allocated_rows,
            guard,
        };
        let token_unit = match case.format {
            TokenFormat::Bf16 => Unit::Bf16,
            TokenFormat::F32 => Unit::F32,
            TokenFormat::Fp8(_) | TokenFormat::QuantizeFp8(_) => Unit::E4m3,
        };
        let token_bytes = case.format.output_row_bytes(case.hidden);
        let scale_bytes = case.format.scale_row_bytes(case.hidden);
        let scale_unit = match case.format.scales() {
            Some(format) if format.bytes_per_scale() == 4 => Unit::F32,
            _ => Unit::Byte,
        };
        let prob_bytes = 4 * self.prepared.probs_per_row(self.rank);
        let probs = bytemuck::cast_slice(&dispatched.probs);
        let local_experts = self.prepared.world.placement().local_experts(self.rank);
        // This output is optional in plain mode; the second run omits it.
        let wants_local_experts = case.mode == DispatchMode::Plain && self.run != 1;
        Outputs {
            tokens: rows("received tokens", token_unit, token_bytes, &dispatched.tokens),
            scales: (scale_bytes > 0)
                .then(|| rows("received scales", scale_unit, scale_bytes, &dispatched.scales)),
            probs: (case.probs != ProbsKind::Skip)
                .then(|| rows("received probs", Unit::F32, prob_bytes, probs)),
            local_experts: wants_local_experts
                .then(|| rows("local experts", Unit::Byte, local_experts, &dispatched.local_experts)),
        }
    }

    /// The expected outputs of a combine: tokens and probabilities.
    pub(super) fn combined(&self) -> (Expected<'a>, Expected<'a>) {
        let case = self.case_of();
        let Content { combined, combined_probs, .. } = self.content();
        let unit = Unit::of(case.element);
        let rows = |what, unit, row_bytes, rows: &'a [u8]| Expected {
            what,
            unit,
            row_bytes,
            rows,
            allocated_rows: case.tokens[self.rank.index()],
            guard: self.guard(),
        };
        let probs = bytemuck::cast_slice(combined_probs);
        (
            rows("combined tokens", unit, case.hidden * case.element.bytes(), combined),
            rows("gathered probs", Unit::F32, 4 * case.experts, probs),
        )
    }

    /// Whether memory has guard bytes in this run.
    pub(super) fn is_guarded(&self) -> bool {
        self.run.is_multiple_of(2)
    }

    pub(super) fn guard(&self) -> usize {
        if self.is_guarded() { GUARD } else { 0 }
    }

    pub(super) fn content(&self) -> &'a Content {
        self.prepared.content(self.run, self.rank)
    }

    pub(super) fn case_of(&self) -> &'a Case {
        &self.prepared.case
    }

    /// New memory that holds `bytes`.
    pub(super) fn input(&mut self, bytes: &[u8]) -> Result<B::Memory, Failure> {
        let mut memory = self.backend.alloc(bytes.len()).map_err(|error| self.error("alloc", error))?;
        self.backend.upload(bytes, &mut memory).map_err(|error| self.error("upload", error))?;
        Ok(memory)
    }

    /// New memory for an output, filled with [`POISON`].
    pub(super) fn output(&mut self, expected: Expected<'_>) -> Result<B::Memory, Failure> {
        self.input(&vec![POISON; expected.bytes()])
    }

    pub(super) fn note(&mut self, operator: &'static str, problem: Problem) {
        if self.first.is_none() {
            self.first = Some(self.failure(operator, problem));
        }
    }

    pub(super) fn error(&self, operator: &'static str, error: Error) -> Failure {
        self.failure(operator, Problem::Error(error))
    }

    pub(super) fn failure(&self, operator: &'static str, problem: Problem) -> Failure {
        let case = self.prepared.case.to_string();
        let stopped = matches!(problem, Problem::Error(_));
        Failure { case, rank: self.rank, operator, run: self.run, problem: Box::new(problem), stopped }
    }
}

/// The expected outputs of one dispatch.
pub(super) struct Outputs<'a> {
    pub(super) tokens: Expected<'a>,
    pub(super) scales: Option<Expected<'a>>,
    pub(super) probs: Option<Expected<'a>>,
    pub(super) local_experts: Option<Expected<'a>>,
}

impl<M> DispatchMemory<M> {
    pub(super) fn arguments(&mut self, case: &Case) -> (DispatchInput<'_, M>, DispatchOutput<'_, M>) {
        let probs = match (case.probs, &self.dense) {
            (ProbsKind::Dense, Some(dense)) => Probs::Dense(dense),
            (ProbsKind::Skip, _) => Probs::Skip,
            _ => Probs::Routing,
        };
        let input = DispatchInput::new(&self.tokens, case.hidden)
            .format(case.format)
            .scales(self.scales.as_ref())
            .probs(probs);
        let output = DispatchOutput::new(&mut self.out_tokens)
            .scales(self.out_scales.as_mut())
            .probs(self.out_probs.as_mut())
            .local_experts(self.out_local_experts.as_mut());
        (input, output)
    }
}

impl<M> CombineMemory<M> {
    pub(super) fn arguments(&mut self, case: &Case) -> (CombineInput<'_, M>, CombineOutput<'_, M>) {
        let input = CombineInput::new(&self.rows, case.hidden)
            .element(case.element)
            .wire(case.wire)
            .probs(self.probs.as_ref())
            .prob_stride(self.prob_stride);
        let output = CombineOutput::new(&mut self.out_tokens).probs(self.out_probs.as_mut());
        (input, output)
    }
}

fn given_scales(case: &Case) -> bool {
    matches!(case.format, TokenFormat::Fp8(_))
}

/// The expectation for an input, which an operator must leave unchanged.
pub(super) fn given<'a>(what: &'static str, unit: Unit, row_bytes: usize, rows: &'a [u8]) -> Expected<'a> {
    Expected { what, unit, row_bytes, rows, allocated_rows: rows.len() / row_bytes, guard: 0 }
}

fn input_unit(format: TokenFormat) -> Unit {
    match format {
        TokenFormat::Bf16 | TokenFormat::QuantizeFp8(_) => Unit::Bf16,
        TokenFormat::F32 => Unit::F32,
        TokenFormat::Fp8(_) => Unit::E4m3,
    }
}
