//! What every rank does, the same on all: time the operators, check the outcome, and tell all others.

use std::borrow::Cow;
use std::sync::{Arc, OnceLock};
use std::time::Instant;

use ep::oracle::{self, ReceivedRows};
use ep::rendezvous::Rendezvous;
use ep::{
    Backend, CombineInput, CombineOutput, DispatchInput, DispatchOutput, Element, Probs, Rank, ReceiveShape,
    Routing,
};
use ep_host::{HostBuffer, HostMemory};
use indicatif::ProgressBar;
use serde::{Deserialize, Serialize};

use crate::bench::check::{self, Checked, Expected, Held};
use crate::bench::measure::{Operator, Samples};
use crate::bench::plan::{Plan, Scenario, WARM_UP};
use crate::bench::tokens;
use crate::failure::Failure;

/// A backend whose memory a benchmark can fill and read in place, without a second copy of all outputs.
pub(super) trait Inspect: Backend {
    /// The first `len` bytes.
    fn view<'m>(&mut self, memory: &'m Self::Memory, len: usize) -> ep::Result<Cow<'m, [u8]>>;

    /// Lets `write` write the first `len` bytes.
    fn fill(
        &mut self,
        memory: &mut Self::Memory,
        len: usize,
        write: impl FnOnce(&mut [u8]),
    ) -> ep::Result<()>;
}

impl Inspect for HostBuffer {
    fn view<'m>(&mut self, memory: &'m HostMemory, len: usize) -> ep::Result<Cow<'m, [u8]>> {
        Ok(Cow::Borrowed(&memory.as_bytes()[..len]))
    }

    fn fill(&mut self, memory: &mut HostMemory, len: usize, write: impl FnOnce(&mut [u8])) -> ep::Result<()> {
        write(&mut memory.as_bytes_mut()[..len]);
        Ok(())
    }
}

/// What all ranks of a process share.
#[derive(Debug)]
pub(super) struct Shared {
    pub(super) plan: Arc<Plan>,
    scenario: usize,
    routings: Arc<[Routing]>,
    /// Which token belongs in which row of every rank; made when it is first needed, after the timing.
    received: OnceLock<Vec<ReceivedRows>>,
}

impl Shared {
    pub(super) fn new(plan: Arc<Plan>, scenario: usize) -> Self {
        let routings = plan.scenarios[scenario].routings();
        Self { plan, scenario, routings, received: OnceLock::new() }
    }

    fn scenario(&self) -> &Scenario {
        &self.plan.scenarios[self.scenario]
    }

    fn received(&self, rank: Rank) -> &ReceivedRows {
        let all = self.received.get_or_init(|| {
            oracle::rows(&self.plan.world, &self.routings, self.plan.mode, &vec![None; self.plan.ranks()])
        });
        &all[rank.index()]
    }

    /// Seed of the tokens that the iteration carries. The last iteration's are its own, so that what an earlier one
    /// left behind does not pass for its result.
    fn token_seed(&self, last: bool) -> u64 {
        self.plan.seed.wrapping_mul(2).wrapping_add(last.into())
    }
}

/// What one rank tells all others at the end.
#[derive(Debug, Clone, Serialize, Deserialize)]
pub(super) struct RankReport {
    /// By [`Operator`].
    pub(super) samples: [Samples; 5],
    /// Rows received, padding included.
    pub(super) rows: u64,
    pub(super) checked: Result<Checked, String>,
}

/// One rank's part in one scenario; returns every rank's report. Collective.
pub(super) fn rank<B: Inspect>(
    backend: &mut B,
    meet: &mut dyn Rendezvous,
    shared: &Shared,
    bar: &ProgressBar,
) -> Result<Vec<RankReport>, Failure> {
    let iterations = WARM_UP + shared.plan.iterations;
    let mut stage = Stage::new(backend, meet, shared)?;
    let routing = stage.route()?;
    let handle = stage.preprocess(&routing)?.0;
    for iteration in 1..=iterations {
        if iteration == iterations {
            stage.load(shared.token_seed(true))?;
        }
        stage.timed = iteration > WARM_UP;
        let routing = stage.time(Operator::Route, Stage::route)?;
        drop(stage.time(Operator::Preprocess, |stage| stage.preprocess(&routing))?);
        stage.time(Operator::Dispatch, |stage| stage.dispatch(&handle))?;
        stage.time(Operator::Combine, |stage| stage.combine(&handle))?;
        stage.time(Operator::Layer, Stage::layer)?;
        bar.inc(1);
    }
    bar.set_message("checking");
    let report =
        RankReport { rows: stage.shape.rows as u64, checked: stage.check()?, samples: stage.samples };
    gather(meet, &report)
}

/// Gives the report to all ranks, and takes theirs.
fn gather(meet: &mut dyn Rendezvous, report: &RankReport) -> Result<Vec<RankReport>, Failure> {
    let unreadable = |rank: usize, error| {
        Failure::request(format!(
            "the report of rank {rank} cannot be read ({error}); is it of another version?"
        ))
    };
    let blob = serde_json::to_vec(report).map_err(|error| unreadable(meet.rank().index(), error))?;
    let blobs = meet.all_gather(&blob)?;
    let read = |(rank, blob): (usize, Vec<u8>)| {
        serde_json::from_slice(&blob).map_err(|error| unreadable(rank, error))
    };
    blobs.into_iter().enumerate().map(read).collect()
}

/// A router's choice as it hands it over.
struct TopK {
    k: usize,
    indices: Vec<i32>,
    weights: Vec<f32>,
}

impl TopK {
    /// The lists that make this routing; rows with the largest weight first, as routers give them.
    fn of(routing: &Routing, k: usize) -> Self {
        let cells = routing.tokens() * k;
        let (mut indices, mut weights) = (vec![-1; cells], vec![0.0; cells]);
        let mut row: Vec<(f32, u32)> = Vec::with_capacity(k);
        for token in 0..routing.tokens() {
            row.clear();
            row.extend(
                routing.weights_of(token).iter().copied().zip(routing.experts_of(token).iter().copied()),
            );
            row.sort_unstable_by(|a, b| b.0.total_cmp(&a.0).then(a.1.cmp(&b.1)));
            for (at, &(weight, expert)) in (token * k..).zip(&row) {
                indices[at] = expert as i32;
                weights[at] = weight;
            }
        }
        Self { k, indices, weights }
    }
}

/// One rank's backend with all that the operators read and write.
struct Stage<'a, B: Inspect> {
    backend: &'a mut B,
    meet: &'a mut dyn Rendezvous,
    shared: &'a Shared,
    topk: TopK,
    shape: ReceiveShape,
    input: B::Memory,
    rows: B::Memory,
    scales: Option<B::Memory>,
    probs: B::Memory,
    /// The experts' outputs, where they are not the dispatched rows themselves.
    outputs: Option<B::Memory>,
    combined: B::Memory,
    timed: bool,
    samples: [Samples; 5],
}

impl<'a, B: Inspect> Stage<'a, B> {
    /// Allocates everything once: iterations are the steady state.
    fn new(backend: &'a mut B, meet: &'a mut dyn Rendezvous, shared: &'a Shared) -> Result<Self, Failure> {
        let plan = &shared.plan;
        let own = &shared.routings[backend.rank().index()];
        let handle = backend.preprocess(own, plan.mode, None)?;
        let shape = backend.receive_shape(&handle)?;
        let rows = shape.allocated_rows();
        let format = plan.format();
        let scale_bytes = format.scale_row_bytes(plan.hidden);
        let input = backend.alloc(own.tokens() * format.input_row_bytes(plan.hidden))?;
        let mut stage = Self {
            topk: TopK::of(own, shared.scenario().topk),
            input,
            rows: backend.alloc(rows * format.output_row_bytes(plan.hidden))?,
            scales: if scale_bytes > 0 { Some(backend.alloc(rows * scale_bytes)?) } else { None },
            probs: backend.alloc(rows * size_of::<f32>())?,
            // FP8 rows are no expert's output: those are bf16 and stand beside them.
            outputs: if scale_bytes > 0 { Some(backend.alloc(rows * plan.bf16_row_bytes())?) } else { None },
            combined: backend.alloc(own.tokens() * plan.bf16_row_bytes())?,
            backend,
            meet,
            shared,
            shape,
            timed: false,
            samples: Default::default(),
        };
        stage.poison()?;
        stage.load(shared.token_seed(false))?;
        Ok(stage)
    }

    /// Fills all outputs with what no operator writes: fresh memory is zero, and so is padding.
    fn poison(&mut self) -> Result<(), Failure> {
        let plan = &self.shared.plan;
        let (rows, format) = (self.shape.rows, plan.format());
        let mut fill = |memory: &mut B::Memory, len| self.backend.fill(memory, len, |bytes| bytes.fill(0xA5));
        fill(&mut self.rows, rows * format.output_row_bytes(plan.hidden))?;
        if let Some(scales) = &mut self.scales {
            fill(scales, rows * format.scale_row_bytes(plan.hidden))?;
        }
        fill(&mut self.probs, rows * size_of::<f32>())?;
        let own = &self.shared.routings[self.backend.rank().index()];
        Ok(self
            .backend
            .fill(&mut self.combined, own.tokens() * plan.bf16_row_bytes(), |bytes| bytes.fill(0xA5))?)
    }

    fn own(&self) -> &'a Routing {
        &self.shared.routings[self.backend.rank().index()]
    }

    /// Fills the input with the tokens of this seed, and the experts' outputs where they are a tensor of their own.
    fn load(&mut self, seed: u64) -> Result<(), Failure> {
        let row_bytes = self.shared.plan.bf16_row_bytes();
        let rank = self.backend.rank();
        let len = self.own().tokens() * row_bytes;
        self.backend.fill(&mut self.input, len, |bytes| {
            for (token, row) in bytes.chunks_exact_mut(row_bytes).enumerate() {
                tokens::fill(seed, rank, token, row);
            }
        })?;
        if let Some(outputs) = &mut self.outputs {
            let received = self.shared.received(rank);
            self.backend.fill(outputs, received.rows.len() * row_bytes, |bytes| {
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

    /// Does `work` once all ranks are there, and times it to the end of all that it set off.
    fn time<T>(
        &mut self,
        operator: Operator,
        work: impl FnOnce(&mut Self) -> Result<T, Failure>,
    ) -> Result<T, Failure> {
        // When a rank is lost, the library names it on all others; the barrier may only see who left because of it.
        let met = self.meet.all_gather(&[]);
        let before = self.backend.traffic();
        let start = Instant::now();
        let value = work(self)?;
        self.backend.synchronize()?;
        let time = start.elapsed();
        met?;
        if self.timed {
            self.samples[operator as usize].add(time, before, self.backend.traffic());
        }
        Ok(value)
    }

    /// The router's lists, handed over as a caller does.
    fn route(&mut self) -> Result<Routing, Failure> {
        let TopK { k, indices, weights } = &self.topk;
        let experts = self.shared.plan.world.experts();
        Ok(Routing::from_topk(self.backend.rank(), experts, *k, indices, weights)?)
    }

    /// Preprocess, and learn the sizes.
    fn preprocess(&mut self, routing: &Routing) -> Result<(B::Handle, ReceiveShape), Failure> {
        let handle = self.backend.preprocess(routing, self.shared.plan.mode, None)?;
        let shape = self.backend.receive_shape(&handle)?;
        Ok((handle, shape))
    }

    fn dispatch(&mut self, handle: &B::Handle) -> Result<(), Failure> {
        let plan = &self.shared.plan;
        let input = DispatchInput {
            hidden: plan.hidden,
            format: plan.format(),
            tokens: &self.input,
            scales: None,
            probs: Probs::Routing,
        };
        let output = DispatchOutput {
            tokens: &mut self.rows,
            scales: self.scales.as_mut(),
            probs: Some(&mut self.probs),
            local_experts: None,
        };
        Ok(self.backend.dispatch(handle, input, output)?)
    }

    /// The experts are the identity: their outputs are the dispatched tokens.
    fn combine(&mut self, handle: &B::Handle) -> Result<(), Failure> {
        let input = CombineInput {
            hidden: self.shared.plan.hidden,
            element: Element::Bf16,
            wire: Element::Bf16,
            rows: self.outputs.as_ref().unwrap_or(&self.rows),
            probs: None,
        };
        let output = CombineOutput { tokens: &mut self.combined, probs: None };
        Ok(self.backend.combine(handle, input, output)?)
    }

    /// A layer's forward pass with a new routing, and its backward pass with the same handle.
    fn layer(&mut self) -> Result<(), Failure> {
        let routing = self.route()?;
        let (handle, _) = self.preprocess(&routing)?;
        for _ in ["forward", "backward"] {
            self.dispatch(&handle)?;
            self.combine(&handle)?;
        }
        Ok(())
    }

    /// Compares what the last iteration left; the inner error is a difference, the outer one the backend's.
    fn check(&mut self) -> Result<Result<Checked, String>, Failure> {
        let plan = &self.shared.plan;
        let rank = self.backend.rank();
        let format = plan.format();
        let rows = self.shape.rows;
        let scales = match &self.scales {
            Some(scales) => self.backend.view(scales, rows * format.scale_row_bytes(plan.hidden))?,
            None => Cow::default(),
        };
        let held = Held {
            rank,
            shape: &self.shape,
            rows: &self.backend.view(&self.rows, rows * format.output_row_bytes(plan.hidden))?,
            scales: &scales,
            probs: &self.backend.view(&self.probs, rows * size_of::<f32>())?,
            combined: &self.backend.view(&self.combined, self.own().tokens() * plan.bf16_row_bytes())?,
        };
        let expected = Expected {
            world: &plan.world,
            routings: &self.shared.routings,
            received: self.shared.received(rank),
            format,
            hidden: plan.hidden,
            seed: self.shared.token_seed(true),
        };
        Ok(check::check(&expected, &held))
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn lists_make_the_routing_they_came_from() {
        let weights = [0.1, 0.7, 0.0, 0.2, 0.5, 0.5];
        let routing = Routing::from_topk(Rank(0), 8, 3, &[7, 1, -1, 0, 3, 2], &weights).unwrap();
        let lists = TopK::of(&routing, 3);
        assert_eq!(lists.indices, [1, 7, -1, 2, 3, 0]);
        let again = Routing::from_topk(Rank(0), 8, lists.k, &lists.indices, &lists.weights).unwrap();
        assert_eq!(again, routing);
    }
}
