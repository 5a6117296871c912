//! The backend of one rank with the buffers of its operators, and the timed calls.

use std::borrow::Cow;
use std::time::{Duration, SystemTime, UNIX_EPOCH};

use ep::join::Rendezvous;
use ep::{CombineInput, CombineOutput, DispatchInput, DispatchOutput, Probs, ReceiveShape, Routing};
use rayon::ThreadPool;
use rayon::prelude::*;

use crate::bench::check::{self, CheckedCounts, Expected, HeldRows, Token};
use crate::bench::clock::Timed;
use crate::bench::gpu::RankGpu;
use crate::bench::measure::{AllSamples, Operator};
use crate::bench::plan::BenchPlan;
use crate::bench::routed::{Routed, TopK};
use crate::bench::shared::Shared;
use crate::bench::tokens;
use crate::common::failure::Failure;
use crate::common::threads;

/// Time between the last rank's arrival at a barrier and the common start, so that all ranks can leave the barrier.
const LEAVING: Duration = Duration::from_micros(400);
/// Fills outputs before a check. Not 0: fresh memory and padding are zero, so a missing write would go unnoticed.
const POISON: u8 = 0xA5;

pub(super) struct Stage<'a, B: Timed> {
    backend: &'a mut B,
    meet: &'a mut dyn Rendezvous,
    shared: &'a Shared,
    operators: &'static [Operator],
    lists: TopK,
    routed: Routed<B::Memory>,
    shape: ReceiveShape,
    /// Capacity in rows of the non-blocking dispatch.
    capacity: usize,
    input: B::Memory,
    /// Scales of an FP8 input.
    input_scales: Option<B::Memory>,
    rows: B::Memory,
    scales: Option<B::Memory>,
    probs: B::Memory,
    /// The experts' bf16 outputs, if dispatch delivers FP8; else the dispatched rows are the outputs.
    outputs: Option<B::Memory>,
    combined: B::Memory,
    /// Probabilities that combine returns, if combine with probabilities is timed.
    gathered: Option<B::Memory>,
    /// Seed of the tokens that the input holds now.
    seed: u64,
    /// Makes tokens and checks outputs.
    pool: &'static ThreadPool,
    pub(super) timed: bool,
    pub(super) samples: AllSamples,
}

impl<'a, B: Timed> Stage<'a, B> {
    /// Allocates all buffers, so that the timed iterations allocate nothing.
    pub(super) fn new(
        backend: &'a mut B,
        meet: &'a mut dyn Rendezvous,
        shared: &'a Shared,
    ) -> Result<Self, Failure> {
        let plan = &shared.plan;
        // Start the pool before the measurement, which would be lost if the threads could not be started afterwards.
        let pool = threads::pool()?;
        let operators = Operator::all(plan.backend);
        let own = &shared.routings[backend.rank().index()];
        let lists = TopK::of(own, shared.scenario().source.topk);
        let routed = Routed::new(backend, plan.backend, &lists)?;
        let mode = shared.scenario().mode;
        let handle = routed.preprocess(backend, mode, None)?;
        let shape = backend.receive_shape(&handle)?;
        let capacity = (shape.rows + shape.rows / 2).next_multiple_of(mode.pad_multiple());
        let bounded = operators.contains(&Operator::Bounded);
        let rows = if bounded { capacity } else { shape.allocated_rows() };
        let format = plan.format();
        let scale_bytes = format.scale_row_bytes(plan.hidden);
        let dense = own.tokens() * own.experts() * size_of::<f32>();
        let given_scale_bytes = format.input_scale_row_bytes(plan.hidden);
        let gathers = operators.contains(&Operator::CombineProbs);
        let mut stage = Self {
            operators,
            lists,
            routed,
            input: backend.alloc(own.tokens() * format.input_row_bytes(plan.hidden))?,
            input_scales: if given_scale_bytes > 0 {
                Some(backend.alloc(own.tokens() * given_scale_bytes)?)
            } else {
                None
            },
            rows: backend.alloc(rows * format.output_row_bytes(plan.hidden))?,
            scales: if scale_bytes > 0 { Some(backend.alloc(rows * scale_bytes)?) } else { None },
            probs: backend.alloc(rows * prob_row_bytes(shared))?,
            // Experts give bf16, so FP8 rows cannot stand for their outputs.
            outputs: if scale_bytes > 0 { Some(backend.alloc(rows * plan.bf16_row_bytes())?) } else { None },
            combined: backend.alloc(own.tokens() * plan.bf16_row_bytes())?,
            gathered: if gathers { Some(backend.alloc(dense)?) } else { None },
            backend,
            meet,
            shared,
            shape,
            capacity,
            seed: plan.seed.wrapping_mul(4),
            pool,
            timed: false,
            samples: AllSamples::new(),
        };
        stage.poison()?;
        stage.load()?;
        Ok(stage)
    }

    /// Received rows, padding included.
    pub(super) fn rows(&self) -> usize {
        self.shape.rows
    }

    pub(super) fn gpu(&self) -> Result<Option<RankGpu>, Failure> {
        Ok(self.backend.gpu_report()?)
    }

    fn own(&self) -> &'a Routing {
        &self.shared.routings[self.backend.rank().index()]
    }

    /// Fills all outputs with [`POISON`].
    pub(super) fn poison(&mut self) -> Result<(), Failure> {
        let plan = &self.shared.plan;
        let (own, rows, format) = (self.own(), self.shape.rows, plan.format());
        let mut fill =
            |memory: &mut B::Memory, len| self.backend.fill(memory, len, &mut |bytes| bytes.fill(POISON));
        fill(&mut self.rows, rows * format.output_row_bytes(plan.hidden))?;
        if let Some(scales) = &mut self.scales {
            fill(scales, rows * format.scale_row_bytes(plan.hidden))?;
        }
        fill(&mut self.probs, rows * prob_row_bytes(self.shared))?;
        fill(&mut self.combined, own.tokens() * plan.bf16_row_bytes())?;
        if let Some(gathered) = &mut self.gathered {
            fill(gathered, own.tokens() * own.experts() * size_of::<f32>())?;
        }
        Ok(())
    }

    /// Loads new tokens, so that outputs of earlier iterations do not pass for results.
    pub(super) fn renew(&mut self) -> Result<(), Failure> {
        self.seed = self.seed.wrapping_add(1);
        self.load()
    }

    /// Fills the input, and the experts' outputs if they have a buffer of their own, with the tokens of the seed.
    fn load(&mut self) -> Result<(), Failure> {
        let plan = &self.shared.plan;
        let (row_bytes, seed) = (plan.bf16_row_bytes(), self.seed);
        let (rank, tokens) = (self.backend.rank(), self.own().tokens());
        if let Some(scales) = &mut self.input_scales {
            let (data, scale_rows) = self.pool.install(|| quantized(plan, rank, seed, tokens));
            self.backend.fill(&mut self.input, data.len(), &mut |bytes| bytes.copy_from_slice(&data))?;
            self.backend.fill(scales, scale_rows.len(), &mut |bytes| bytes.copy_from_slice(&scale_rows))?;
        } else {
            self.backend.fill(&mut self.input, tokens * row_bytes, &mut |bytes| {
                for (token, row) in bytes.chunks_exact_mut(row_bytes).enumerate() {
                    tokens::fill(seed, rank, token, row);
                }
            })?;
        }
        if let Some(outputs) = &mut self.outputs {
            let received = self.shared.received(rank);
            self.backend.fill(outputs, received.rows.len() * row_bytes, &mut |bytes| {
                for (row, source) in bytes.chunks_exact_mut(row_bytes).zip(&received.rows) {
                    match source {
                        Some(source) => tokens::fill(seed, source.rank, source.token, row),
                        None => row.fill(0),
                    }
                }
            })?;
        }
        Ok(())
    }

    /// Times one call of an operator.
    pub(super) fn run(&mut self, operator: Operator, handle: &B::Handle) -> Result<(), Failure> {
        match operator {
            Operator::Route => self.routed = self.time(operator, 1, Self::route)?,
            // The handle is dropped after the time is taken.
            Operator::Preprocess => drop(self.time(operator, 1, |stage| stage.preprocess(None))?),
            Operator::Dispatch => self.time(operator, 1, |stage| stage.dispatch(handle, true))?,
            Operator::Cold => drop(self.time(operator, 1, |stage| stage.first_dispatch(None))?),
            Operator::Bounded => {
                let capacity = Some(self.capacity);
                drop(self.time(operator, 1, |stage| stage.first_dispatch(capacity))?);
            }
            Operator::Combine => self.time(operator, 1, |stage| stage.combine(handle, false))?,
            Operator::CombineProbs => self.time(operator, 1, |stage| stage.combine(handle, true))?,
            Operator::Layer => self.time(operator, 1, Self::layer)?,
            Operator::Layers => self.layers()?,
        }
        Ok(())
    }

    /// Times one round: as many layers as the benchmark has iterations, without a pause between them.
    pub(super) fn layers(&mut self) -> Result<(), Failure> {
        let calls = u32::try_from(self.shared.plan.iterations).unwrap_or(u32::MAX);
        self.time(Operator::Layers, calls, |stage| (0..calls).try_for_each(|_| stage.layer()))
    }

    /// Runs `work`, which makes `calls` calls, after a barrier of all ranks, and times it until its effects are
    /// complete.
    fn time<T>(
        &mut self,
        operator: Operator,
        calls: u32,
        work: impl FnOnce(&mut Self) -> Result<T, Failure>,
    ) -> Result<T, Failure> {
        // A failed barrier is reported only after the operator: when a rank dies, the operator's error names that rank,
        // while the barrier may name a rank that left because of that death.
        let barrier = self.meet.all_gather(&stamp(SystemTime::now()));
        let together = together(barrier.as_deref().unwrap_or_default());
        let before = self.backend.traffic();
        let clock = self.backend.start(together)?;
        let value = work(self)?;
        let time = self.backend.stop(clock)?;
        barrier?;
        if self.timed {
            let after = self.backend.traffic();
            self.samples.entry(operator).or_default().add(calls, time, before, after);
        }
        Ok(value)
    }

    /// Hands the router's lists to the backend, as a caller does.
    fn route(&mut self) -> Result<Routed<B::Memory>, Failure> {
        Ok(Routed::new(self.backend, self.shared.plan.backend, &self.lists)?)
    }

    /// Preprocesses the routing; without a capacity, also waits for the receive shape.
    pub(super) fn preprocess(&mut self, capacity: Option<usize>) -> Result<B::Handle, Failure> {
        let handle = self.routed.preprocess(self.backend, self.shared.scenario().mode, capacity)?;
        if capacity.is_none() {
            self.backend.receive_shape(&handle)?;
        }
        Ok(handle)
    }

    /// Preprocesses and dispatches.
    fn first_dispatch(&mut self, capacity: Option<usize>) -> Result<B::Handle, Failure> {
        let handle = self.preprocess(capacity)?;
        self.dispatch(&handle, true)?;
        Ok(handle)
    }

    fn dispatch(&mut self, handle: &B::Handle, with_probs: bool) -> Result<(), Failure> {
        let plan = &self.shared.plan;
        let input = DispatchInput::new(&self.input, plan.hidden)
            .format(plan.format())
            .scales(self.input_scales.as_ref())
            .probs(if with_probs { Probs::Routing } else { Probs::Skip });
        let output = DispatchOutput::new(&mut self.rows)
            .scales(self.scales.as_mut())
            .probs(with_probs.then_some(&mut self.probs));
        Ok(self.backend.dispatch(handle, input, output)?)
    }

    /// Combines. The experts are the identity, so their outputs are the dispatched tokens.
    fn combine(&mut self, handle: &B::Handle, with_probs: bool) -> Result<(), Failure> {
        let gathered = self.gathered.as_mut().filter(|_| with_probs);
        let input = CombineInput::new(self.outputs.as_ref().unwrap_or(&self.rows), self.shared.plan.hidden)
            .probs(gathered.is_some().then_some(&self.probs));
        let output = CombineOutput::new(&mut self.combined).probs(gathered);
        Ok(self.backend.combine(handle, input, output)?)
    }

    /// The forward pass of a layer with a new routing, and its backward pass with the same handle. The forward dispatch
    /// carries probabilities. If combine with probabilities is timed, the backward combine returns their gradients;
    /// otherwise the backward dispatch carries probabilities too.
    fn layer(&mut self) -> Result<(), Failure> {
        if self.operators.contains(&Operator::Route) {
            self.routed = self.route()?;
        }
        let gathers = self.gathered.is_some();
        let handle = self.first_dispatch(None)?;
        self.combine(&handle, false)?;
        self.dispatch(&handle, !gathers)?;
        self.combine(&handle, gathers)
    }

    /// Dispatches new tokens with a capacity and checks the rows. The inner error is the first difference, the outer
    /// error comes from the backend. Collective.
    pub(super) fn check_bounded(&mut self) -> Result<Result<u64, String>, Failure> {
        self.poison()?;
        self.renew()?;
        let handle = self.first_dispatch(Some(self.capacity))?;
        self.backend.synchronize()?;
        let shape = self.backend.receive_shape(&handle)?;
        let checked = self.check_rows(&shape)?;
        Ok(checked
            .map(|(rows, padding)| rows + padding)
            .map_err(|what| format!("with a capacity of {} rows: {what}", self.capacity)))
    }

    /// Checks the outputs of the last iteration. The inner error is the first difference.
    pub(super) fn check(&mut self) -> Result<Result<CheckedCounts, String>, Failure> {
        let shape = self.shape.clone();
        let (rows, padding_rows) = match self.check_rows(&shape)? {
            Ok(rows) => rows,
            Err(difference) => return Ok(Err(difference)),
        };
        let (plan, own, rank) = (&self.shared.plan, self.own(), self.backend.rank());
        let combined = self.backend.read(&self.combined, own.tokens() * plan.bf16_row_bytes())?;
        let expected = expected(self.shared, rank, self.seed);
        let tokens = match self.pool.install(|| check::combined(&expected, &combined)) {
            Ok(tokens) => tokens,
            Err(difference) => return Ok(Err(difference)),
        };
        let probs = match &self.gathered {
            None => Ok(0),
            Some(gathered) => {
                let len = own.tokens() * own.experts() * size_of::<f32>();
                let gathered = self.backend.read(gathered, len)?;
                self.pool.install(|| check::gathered(&expected, &gathered))
            }
        };
        Ok(probs.map(|probs| CheckedCounts { rows, padding_rows, tokens, probs, bounded_rows: 0 }))
    }

    fn check_rows(&mut self, shape: &ReceiveShape) -> Result<Result<(u64, u64), String>, Failure> {
        let plan = &self.shared.plan;
        let (rows, format) = (self.shape.rows, plan.format());
        let scales = match &self.scales {
            Some(scales) => self.backend.read(scales, rows * format.scale_row_bytes(plan.hidden))?,
            None => Cow::default(),
        };
        let held = HeldRows {
            shape,
            rows: &self.backend.read(&self.rows, rows * format.output_row_bytes(plan.hidden))?,
            scales: &scales,
            probs: &self.backend.read(&self.probs, rows * prob_row_bytes(self.shared))?,
        };
        let expected = expected(self.shared, self.backend.rank(), self.seed);
        Ok(self.pool.install(|| check::dispatched(&expected, &held)))
    }
}

/// Bytes of the probabilities of a received row.
fn prob_row_bytes(shared: &Shared) -> usize {
    size_of::<f32>() * shared.scenario().probs_per_row(&shared.plan.world)
}

/// The tokens of a rank in FP8, and their scales.
fn quantized(plan: &BenchPlan, rank: ep::Rank, seed: u64, tokens: usize) -> (Vec<u8>, Vec<u8>) {
    let (format, hidden) = (plan.format(), plan.hidden);
    let (row, scale_row) = (format.input_row_bytes(hidden), format.input_scale_row_bytes(hidden));
    let (mut data, mut scales) = (vec![0; tokens * row], vec![0; tokens * scale_row]);
    let rows = data.par_chunks_exact_mut(row).zip(scales.par_chunks_exact_mut(scale_row)).enumerate();
    rows.for_each_init(
        || Token::new(hidden, format),
        |made, (token, (data, scales))| {
            made.make(seed, rank, token);
            data.copy_from_slice(made.data());
            scales.copy_from_slice(made.scales());
        },
    );
    (data, scales)
}

fn expected(shared: &Shared, rank: ep::Rank, seed: u64) -> Expected<'_> {
    let plan = &shared.plan;
    Expected {
        world: &plan.world,
        routings: &shared.routings,
        rank,
        received: shared.received(rank),
        format: plan.format(),
        hidden: plan.hidden,
        seed,
    }
}

/// The time of day in nanoseconds; ranks on one machine share this clock.
fn stamp(now: SystemTime) -> [u8; 8] {
    let since = now.duration_since(UNIX_EPOCH).unwrap_or_default();
    u64::try_from(since.as_nanos()).unwrap_or_default().to_le_bytes()
}

/// The common start of ranks that reached a barrier with these stamps: the same on every rank.
fn together(stamps: &[Vec<u8>]) -> SystemTime {
    let nanoseconds =
        |stamp: &Vec<u8>| stamp.as_slice().try_into().map(u64::from_le_bytes).unwrap_or_default();
    let last = stamps.iter().map(nanoseconds).max().unwrap_or_default();
    UNIX_EPOCH + Duration::from_nanos(last) + LEAVING
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn all_ranks_start_after_the_last_arrival() {
        let at = |nanoseconds| UNIX_EPOCH + Duration::from_nanos(nanoseconds);
        let now = SystemTime::now();
        let [early, late] = [now, now + Duration::from_nanos(4_321)].map(|time| stamp(time).to_vec());
        let start = together(&[early.clone(), late.clone(), early.clone()]);
        assert_eq!(start, now + Duration::from_nanos(4_321) + LEAVING);
        assert_eq!(together(&[late, early]), start);
        // No stamps, or an unreadable stamp: a moment in the past, so that no rank waits.
        assert_eq!(together(&[vec![1]]), at(0) + LEAVING);
        assert_eq!(together(&[]), at(0) + LEAVING);
    }
}
