//! A step as a graph of operations (computations and exchanges) and their dependencies.
//!
//! Every GPU runs the same graph on four streams. A stream runs one operation at a time:
//!
//! ```text
//!  compute   PE ─────┬──▶ E0 ──▶ E1 ──▶ E2 ──▶ E3 ┬──▶ PE of the next layer
//!  tokens            └▶ D0 ▶ D1 ▶ D2 ▶ D3 ▶ C0 ▶ C1 ▶ C2 ▶ C3
//!  experts   AG ▶ AG of the next layer ...
//!  gradients        those of the layer before, and the shared expert's refresh
//! ```
//!
//! A chunk of tokens is dispatched (`D`), processed by the experts (`E`, including the codec's work) and combined
//! (`C`). In the backward pass, the computation before the experts (`PE`) comes after them.

use super::fair::Priority;
use super::options::LinkOrder;
use super::outcome::Phase;
use super::work::{Exchange, LayerWork, StepWork};

/// A queue of a GPU's operations. A stream runs one operation at a time.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum Stream {
    Compute,
    Tokens,
    Experts,
    Gradients,
}

impl Stream {
    pub(crate) const COUNT: usize = 4;

    /// Tokens have the highest priority, gradients the lowest.
    fn priority(self) -> Priority {
        match self {
            Self::Compute | Self::Tokens => 0,
            Self::Experts => 1,
            Self::Gradients => 2,
        }
    }
}

/// One computation or exchange of every GPU.
#[derive(Debug, Clone, PartialEq)]
pub(crate) struct Operation {
    pub(crate) stream: Stream,
    /// Order on the stream: of the operations that are ready, the one with the lowest rank starts.
    pub(crate) rank: u32,
    pub(crate) task: Task,
    /// Number of operations that must complete before this one.
    pub(crate) waits_for: u16,
    /// Operations that wait for this one.
    pub(crate) successors: Vec<u32>,
    /// Index of its pass in [`Program::passes`].
    pub(crate) pass: u32,
    /// Number of its chunk, in chunked phases.
    pub(crate) chunk: u16,
}

#[derive(Debug, Clone, PartialEq)]
pub(crate) enum Task {
    /// Consecutive computations: the seconds of each phase.
    Compute(Vec<(Phase, f64)>),
    /// An exchange, with its priority on links.
    Exchange(Phase, Exchange, Priority),
}

/// A pass through a layer.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) struct Pass {
    pub(crate) micro_batch: usize,
    pub(crate) layer: usize,
    pub(crate) backward: bool,
}

/// All operations of a step.
#[derive(Debug, Clone, Default, PartialEq)]
pub(crate) struct Program {
    pub(crate) operations: Vec<Operation>,
    pub(crate) passes: Vec<Pass>,
}

impl Program {
    pub(crate) fn new(work: &StepWork, link_order: LinkOrder) -> Self {
        let mut builder = Builder {
            work,
            link_order,
            program: Self::default(),
            front: Vec::new(),
            gathered: Vec::new(),
            served: Vec::new(),
            reduced: Vec::new(),
        };
        for micro_batch in 0..work.micro_batches {
            for layer in 0..work.layers {
                builder.forward(Pass { micro_batch, layer, backward: false });
            }
            if work.trains {
                for layer in (0..work.layers).rev() {
                    builder.backward(Pass { micro_batch, layer, backward: true });
                }
            }
        }
        builder.program
    }
}

struct Builder<'a> {
    work: &'a StepWork,
    link_order: LinkOrder,
    program: Program,
    /// Operations that the next pass waits for.
    front: Vec<u32>,
    /// Last operation of the previous gather. The next gather waits for it, so that the levels of two gathers do not
    /// interleave.
    gathered: Vec<u32>,
    /// For each pass that gathered, its last expert computation, which frees the buffer of gathered experts.
    served: Vec<u32>,
    /// For each pass that reduced gradients, its last reduction, which frees the buffer of gradients.
    reduced: Vec<u32>,
}

/// The expert computations of a pass.
struct ExpertPhase {
    /// Seconds of each phase, summed over all chunks.
    compute: Vec<(Phase, f64)>,
    /// Operations that every chunk waits for, in addition to its dispatch.
    after: Vec<u32>,
}

impl Builder<'_> {
    fn forward(&mut self, pass: Pass) {
        let work = self.work;
        let layer = &work.layer;
        let gathers = !work.replicas_kept || pass.micro_batch == 0;
        let pass = self.begin(pass);
        let gathered = if gathers { self.gather(pass) } else { Vec::new() };
        let before = self.compute(pass, vec![(Phase::PreExpert, layer.pre_expert)], 0, &self.front.clone());
        self.front = vec![before];
        let decode = if gathers { layer.decode } else { 0.0 };
        let compute = vec![(Phase::Decode, decode), (Phase::Expert, layer.expert)];
        self.experts(pass, layer, ExpertPhase { compute, after: gathered }, gathers);
    }

    fn backward(&mut self, pass: Pass) {
        let work = self.work;
        let layer = &work.layer;
        let last = pass.micro_batch + 1 == work.micro_batches;
        let (gathers, reduces) = (!work.replicas_kept, !work.replicas_kept || last);
        let pass = self.begin(pass);
        let mut after = if gathers { self.gather(pass) } else { Vec::new() };
        if reduces && let Some(&free) = self.reduced.iter().rev().nth(work.live_layers - 1) {
            after.push(free);
        }
        let mut decode = if gathers { layer.decode } else { 0.0 };
        let mut encode = if last { layer.encode } else { 0.0 };
        if reduces {
            decode += layer.gradient_decode;
            encode += layer.gradient_encode;
        }
        let compute =
            vec![(Phase::Decode, decode), (Phase::Expert, 2.0 * layer.expert), (Phase::Encode, encode)];
        let served = self.experts(pass, layer, ExpertPhase { compute, after }, gathers);
        if reduces {
            let mut after =
                if self.link_order == LinkOrder::InTurn { self.front.clone() } else { vec![served] };
            after.extend(self.reduced.last());
            if !layer.gradients.is_empty() {
                let end = self.chain(pass, Phase::Gradients, &layer.gradients, &after, 0);
                self.reduced.extend(end);
            }
        }
        if last {
            self.chain(pass, Phase::SharedRefresh, &layer.refresh, &[served], 0);
        }
        let front = self.front.clone();
        self.front = vec![self.compute(pass, vec![(Phase::PreExpert, 2.0 * layer.pre_expert)], 0, &front)];
    }

    fn begin(&mut self, pass: Pass) -> u32 {
        self.program.passes.push(pass);
        (self.program.passes.len() - 1) as u32
    }

    /// Adds the gather of a pass. It waits for the previous gather and for a free buffer; under [`LinkOrder::InTurn`]
    /// it waits for the end of the previous pass instead of a buffer.
    fn gather(&mut self, pass: u32) -> Vec<u32> {
        let mut after = self.gathered.clone();
        match self.link_order {
            LinkOrder::InTurn => after.extend(&self.front),
            LinkOrder::TokensFirst | LinkOrder::Fair if self.work.replicas_kept => {}
            LinkOrder::TokensFirst | LinkOrder::Fair => {
                after.extend(self.served.iter().rev().nth(self.work.live_layers - 1));
            }
        }
        if !self.work.layer.gather.is_empty() {
            self.gathered = self.chain(pass, Phase::AllGather, &self.work.layer.gather, &after, 0);
        }
        self.gathered.clone()
    }

    /// Adds dispatch, expert compute and combine of every chunk. Returns the last expert computation.
    fn experts(&mut self, pass: u32, layer: &LayerWork, phase: ExpertPhase, gathers: bool) -> u32 {
        let chunks = self.work.chunks;
        let from = std::mem::take(&mut self.front);
        let mut served = Vec::with_capacity(chunks);
        for chunk in 0..chunks {
            let mut after = self.chain(pass, Phase::Dispatch, &layer.dispatch, &from, chunk);
            after.extend(&phase.after);
            let compute = phase.compute.iter().map(|&(phase, time)| (phase, time / chunks as f64)).collect();
            served.push(self.compute(pass, compute, chunk, &after));
        }
        for (chunk, &computed) in served.iter().enumerate() {
            let end = self.chain(pass, Phase::Combine, &layer.combine, &[computed], chunk);
            self.front.extend(end);
        }
        let last = served[chunks - 1];
        if gathers {
            self.served.push(last);
        }
        last
    }

    /// Adds consecutive exchanges. Returns the operations that mark their end.
    fn chain(&mut self, pass: u32, phase: Phase, list: &[Exchange], after: &[u32], chunk: usize) -> Vec<u32> {
        let mut after = after.to_vec();
        let tokens = matches!(phase, Phase::Dispatch | Phase::Combine);
        let parts = if tokens { self.work.chunks as f64 } else { 1.0 };
        for exchange in list {
            let part = Exchange {
                messages: exchange.messages / parts,
                bytes: exchange.bytes / parts,
                start: exchange.start / parts,
                ..*exchange
            };
            let own = match phase {
                Phase::AllGather => Stream::Experts,
                Phase::Gradients | Phase::SharedRefresh => Stream::Gradients,
                _ => Stream::Tokens,
            };
            let (stream, priority) = match self.link_order {
                LinkOrder::TokensFirst => (own, own.priority()),
                LinkOrder::Fair => (own, 0),
                LinkOrder::InTurn => (Stream::Tokens, 0),
            };
            after = vec![self.add(pass, stream, Task::Exchange(phase, part, priority), chunk, &after)];
        }
        after
    }

    fn compute(&mut self, pass: u32, mut parts: Vec<(Phase, f64)>, chunk: usize, after: &[u32]) -> u32 {
        parts.retain(|&(_, time)| time > 0.0);
        self.add(pass, Stream::Compute, Task::Compute(parts), chunk, after)
    }

    fn add(&mut self, pass: u32, stream: Stream, task: Task, chunk: usize, after: &[u32]) -> u32 {
        let number = self.program.operations.len() as u32;
        for &earlier in after {
            self.program.operations[earlier as usize].successors.push(number);
        }
        // Only the end of the step waits for a refresh, so its rank is above those of all other operations: it starts last.
        let last = matches!(task, Task::Exchange(Phase::SharedRefresh, ..)) && stream == Stream::Gradients;
        let rank = if last { number | 1 << 31 } else { number };
        let (waits_for, chunk) = (after.len() as u16, chunk as u16);
        let successors = Vec::new();
        self.program.operations.push(Operation { stream, rank, task, waits_for, successors, pass, chunk });
        number
    }
}
