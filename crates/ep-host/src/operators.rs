//! [`Backend`] for [`HostBuffer`]. Each operator checks the caller's arguments, stages and publishes memory, enters,
//! runs the workers of `preprocess`, `dispatch` or `combine`, and finishes. A program calls this module through the
//! trait; this module calls nearly every other one.

use std::borrow::Cow;
use std::ops::Range;
use std::panic::{AssertUnwindSafe, catch_unwind, resume_unwind};
use std::sync::atomic::Ordering::Relaxed;
use std::sync::{Arc, OnceLock};
use std::time::Duration;

use ep::call::{check_maker, check_memory, check_routing, dispatched};
use ep::join::Rendezvous;
use ep::layout::{DispatchLayout, receive_shape};
use ep::{
    Backend, CombineInput, CombineOutput, Config, Counts, DispatchInput, DispatchMode, DispatchOutput, Error,
    HandleShape, Operator, Rank, ReceiveShape, Result, Routing, Size, Traffic, World,
};

use crate::buffer::HostBuffer;
use crate::call::{CheckedDispatch, facts};
use crate::combine::{self, Combine, OutPtr};
use crate::comm::{Op, Panic, panic_error};
use crate::control::MEMORIES;
use crate::dispatch::{self, Dispatch, LOCAL_EXPERTS, PROBS, ProbSource, SCALES, TOKENS};
use crate::handle::HostHandle;
use crate::memory::HostMemory;
use crate::message::Format;
use crate::preprocess;
use crate::published::PublishedMemory;
use crate::signature::CollectiveArguments;
use crate::workers;

impl Backend for HostBuffer {
    type Memory = HostMemory;
    type Handle = HostHandle;

    fn threads(world: &World, config: &Config) -> Result<Vec<Self>> {
        Self::make_threads(world, config)
    }

    fn join(world: &World, rendezvous: &mut dyn Rendezvous, config: &Config) -> Result<Self> {
        Self::make_process(world, rendezvous, config)
    }

    fn rank(&self) -> Rank {
        self.comm.rank
    }

    fn world(&self) -> &World {
        &self.comm.world
    }

    fn alloc(&mut self, bytes: usize) -> Result<HostMemory> {
        // After a failed operator, slow peers may still access published memory, which must therefore not be reused.
        self.check_usable()?;
        self.arena.alloc(bytes)
    }

    fn upload(&mut self, bytes: &[u8], memory: &mut HostMemory) -> Result<()> {
        check_memory(self.maker(), "memory to upload to", Size::new(bytes.len()), memory.facts())?;
        memory.as_bytes_mut()[..bytes.len()].copy_from_slice(bytes);
        Ok(())
    }

    fn download(&mut self, memory: &HostMemory, bytes: &mut [u8]) -> Result<()> {
        check_memory(self.maker(), "memory to download from", Size::new(bytes.len()), memory.facts())?;
        bytes.copy_from_slice(&memory.as_bytes()[..bytes.len()]);
        Ok(())
    }

    fn read<'m>(&mut self, memory: &'m HostMemory, len: usize) -> Result<Cow<'m, [u8]>> {
        check_memory(self.maker(), "memory to read", Size::new(len), memory.facts())?;
        Ok(Cow::Borrowed(&memory.as_bytes()[..len]))
    }

    fn fill(&mut self, memory: &mut HostMemory, len: usize, write: &mut dyn FnMut(&mut [u8])) -> Result<()> {
        check_memory(self.maker(), "memory to fill", Size::new(len), memory.facts())?;
        write(&mut memory.as_bytes_mut()[..len]);
        Ok(())
    }

    fn clear(&mut self, memory: &mut HostMemory, bytes: Range<usize>) -> Result<()> {
        check_memory(self.maker(), "memory to clear", Size::new(bytes.end), memory.facts())?;
        if !bytes.is_empty() {
            memory.as_bytes_mut()[bytes].fill(0);
        }
        Ok(())
    }

    fn registered_bytes(&self) -> usize {
        self.arena.registered_bytes()
    }

    fn preprocess(
        &mut self,
        routing: &Routing,
        mode: DispatchMode,
        capacity: Option<usize>,
    ) -> Result<HostHandle> {
        self.check_usable()?;
        check_routing(&self.comm.world, self.comm.rank, routing)?;
        let own = Counts::of(&self.comm.world, routing, mode, capacity)?;

        self.step += 1;
        let comm = Arc::clone(&self.comm);
        let (maker, step) = (self.maker(), self.step);
        let done = catch_panic(|| {
            let arguments = CollectiveArguments::default();
            let op = Op::enter(&comm, Operator::Preprocess, step, arguments, [None; MEMORIES]);
            let all = preprocess::exchange(&op, &own)?;
            let topology = comm.world.topology();
            let rail = topology.rail_ranks(topology.local_rank_of(comm.rank));
            let handle = HostHandle {
                buffer: maker,
                id: step,
                mode,
                layout: DispatchLayout::new(&comm.world, routing, &all)?,
                shape: receive_shape(&comm.world, comm.rank, &all)?,
                rail_tokens: rail.map(|rank| all[rank.index()].tokens as usize).collect(),
                forward_lists: OnceLock::new(),
            };
            op.finish()?;
            Ok(handle)
        });
        done.or_else(|failure| self.fail_operator(Operator::Preprocess, failure))
    }

    fn handle_shape(&self, handle: &HostHandle) -> HandleShape {
        handle.sizes()
    }

    fn receive_shape(&mut self, handle: &HostHandle) -> Result<ReceiveShape> {
        check_maker(handle.buffer, self.maker())?;
        Ok(handle.shape.clone())
    }

    fn dispatch(
        &mut self,
        handle: &HostHandle,
        input: DispatchInput<'_, HostMemory>,
        output: DispatchOutput<'_, HostMemory>,
    ) -> Result<()> {
        self.check_usable()?;
        check_maker(handle.buffer, self.maker())?;
        let call = CheckedDispatch::check(&self.comm.world, self.comm.rank, handle, &input, &output)?;
        let message = Format {
            lists: handle.forward_lists.get().is_none(),
            probs: !matches!(call.probs, ProbSource::Skip),
            row_bytes: input.format.output_row_bytes(input.hidden),
            scale_bytes: input.format.scale_row_bytes(input.hidden),
        };
        let chunk = message.chunk_tokens(&self.comm.world, &self.comm.config)?;

        let DispatchOutput { tokens, scales, probs, local_experts, .. } = output;
        let mut outputs = [Some(tokens), scales, probs, local_experts];
        // Peers write to blocks of the arena only; other outputs are staged.
        let mut staged: [Option<HostMemory>; MEMORIES] = Default::default();
        for (at, stage) in staged.iter_mut().enumerate() {
            if let Some(memory) = outputs[at].as_deref()
                && call.bytes[at] > 0
                && memory.published_for_writing().is_none()
            {
                *stage = Some(self.arena.alloc(call.bytes[at])?);
            }
        }
        if handle.mode == DispatchMode::Plain {
            // Peers write only the cells of chosen experts; all other cells must be zero. This must happen before the
            // rank enters, since peers may write from then on.
            for at in [PROBS, LOCAL_EXPERTS] {
                if let Some(memory) = staged[at].as_mut().or(outputs[at].as_deref_mut()) {
                    memory.as_bytes_mut()[..call.kept_bytes[at]].fill(0);
                }
            }
        }
        let publish = |at: usize| {
            (call.bytes[at] > 0)
                .then(|| {
                    staged[at].as_ref().or(outputs[at].as_deref()).and_then(HostMemory::published_for_writing)
                })
                .flatten()
        };
        let published = [TOKENS, SCALES, PROBS, LOCAL_EXPERTS].map(publish);

        self.step += 1;
        let comm = Arc::clone(&self.comm);
        let arguments = CollectiveArguments {
            handle: handle.id,
            hidden: input.hidden,
            format: input.format.link_code(),
            wire: 0,
            probs: message.probs,
            chunk,
        };
        let done = catch_panic(|| {
            let op = Op::enter(&comm, Operator::Dispatch, self.step, arguments, published);
            let job = Dispatch {
                op: &op,
                handle,
                format: input.format,
                hidden: input.hidden,
                tokens: input.tokens.as_bytes(),
                scales: input.scales.map_or(&[], HostMemory::as_bytes),
                probs: call.probs,
                message,
                state: dispatch::State::new(&op, handle, chunk),
            };
            op.run(self.pool(), |idle| job.work(idle))?;
            let lists = job.into_forward_lists();
            op.finish()?;
            Ok(lists)
        });
        match done {
            Ok(lists) => {
                handle.forward_lists.get_or_init(|| lists);
            }
            Err(failure) => {
                // A slow peer may still write to these memories: neither the caller nor the arena may use them again.
                for memory in outputs.into_iter().flatten().chain(staged.iter_mut().flatten()) {
                    memory.withdraw();
                }
                return self.fail_operator(Operator::Dispatch, failure);
            }
        }
        for (at, stage) in staged.iter().enumerate() {
            if let (Some(stage), Some(memory)) = (stage, outputs[at].as_deref_mut()) {
                let from = &stage.as_bytes()[..call.kept_bytes[at]];
                let streaming_bytes = comm.config.host.streaming_bytes;
                workers::copy(self.pool(), comm.level, streaming_bytes, memory.as_bytes_mut(), from);
            }
        }
        Ok(())
    }

    fn combine(
        &mut self,
        handle: &HostHandle,
        input: CombineInput<'_, HostMemory>,
        output: CombineOutput<'_, HostMemory>,
    ) -> Result<()> {
        self.check_usable()?;
        check_maker(handle.buffer, self.maker())?;
        dispatched(handle.forward_lists.get())?;
        let world = &self.comm.world;
        let facts = facts(world, self.comm.rank, handle);
        facts.check_combine(&input, &output, HostMemory::facts)?;
        let row_bytes = input.element.row_bytes(input.hidden);
        let rows = facts.combined_rows();
        let prob_stride_bytes = facts.prob_stride(&input).saturating_mul(4);
        let prob_row_bytes = 4 * facts.probs_per_row();
        let prob_bytes = rows * prob_row_bytes;
        let message = Format {
            lists: false,
            probs: input.probs.is_some(),
            row_bytes: input.wire.row_bytes(input.hidden),
            scale_bytes: 0,
        };
        let chunk = message.chunk_tokens(world, &self.comm.config)?;

        // Peers read registered memory only; other inputs are staged.
        let (arena, pool, level) = (&mut self.arena, self.pool.as_ref(), self.comm.level);
        let streaming_bytes = self.comm.config.host.streaming_bytes;
        let mut reachable =
            |memory: &HostMemory, bytes: usize| -> Result<(Option<HostMemory>, Option<PublishedMemory>)> {
                let published = arena.published_for_reading(memory);
                if published.is_some() || bytes == 0 {
                    return Ok((None, published));
                }
                let mut staged = arena.alloc(bytes)?;
                let (to, from) = (staged.as_bytes_mut(), &memory.as_bytes()[..bytes]);
                workers::copy(pool, level, streaming_bytes, to, from);
                let published = staged.published_for_writing();
                Ok((Some(staged), published))
            };
        let mut published = [None; MEMORIES];
        // Staged inputs must stay allocated until the operator has ended.
        let (_staged_rows, published_rows) = reachable(input.rows, rows * row_bytes)?;
        published[TOKENS] = published_rows;
        let _staged_probs = match input.probs {
            // Peers read rows without gaps.
            Some(probs) if prob_stride_bytes != prob_row_bytes && prob_bytes > 0 => {
                let mut staged = arena.alloc(prob_bytes)?;
                let to = staged.as_bytes_mut().chunks_mut(prob_row_bytes);
                for (to, from) in to.zip(probs.as_bytes().chunks(prob_stride_bytes)) {
                    to.copy_from_slice(&from[..prob_row_bytes]);
                }
                published[PROBS] = staged.published_for_writing();
                Some(staged)
            }
            Some(probs) => {
                let (staged, published_probs) = reachable(probs, prob_bytes)?;
                published[PROBS] = published_probs;
                staged
            }
            None => None,
        };

        let probs_out =
            output.probs.map_or(std::ptr::null_mut(), |memory| memory.as_bytes_mut().as_mut_ptr());
        self.step += 1;
        let comm = Arc::clone(&self.comm);
        let arguments = CollectiveArguments {
            handle: handle.id,
            hidden: input.hidden,
            format: input.element.bytes() as u64,
            wire: input.wire.bytes(),
            probs: message.probs,
            chunk,
        };
        let done = catch_panic(|| {
            let op = Op::enter(&comm, Operator::Combine, self.step, arguments, published);
            let job = Combine {
                op: &op,
                handle,
                hidden: input.hidden,
                element: input.element,
                wire: input.wire,
                out: OutPtr(output.tokens.as_bytes_mut().as_mut_ptr()),
                probs_out: OutPtr(probs_out),
                message,
                schedule: combine::schedule(&op, handle, chunk),
            };
            op.run(self.pool(), |idle| job.work(idle))?;
            op.finish()
        });
        done.or_else(|failure| {
            for memory in [Some(input.rows), input.probs].into_iter().flatten() {
                memory.mark_readable_by_late_peers();
            }
            self.fail_operator(Operator::Combine, failure)
        })
    }

    fn synchronize(&mut self) -> Result<()> {
        // Operators are synchronous: each has completed when it returns.
        self.check_usable()
    }

    fn traffic(&self) -> Traffic {
        let (transport_bytes, transport_messages) = self.comm.rails.sent();
        let waited = self.comm.waited_ns.load(Relaxed) / self.workers() as u64;
        let mut traffic = Traffic::default();
        traffic.domain_bytes = self.comm.domain_bytes.load(Relaxed);
        traffic.transport_bytes = transport_bytes;
        traffic.transport_messages = transport_messages;
        traffic.preprocess_bytes = self.comm.preprocess_bytes.load(Relaxed);
        traffic.waited = Duration::from_nanos(waited);
        traffic
    }
}

/// Why an operator did not complete.
enum Failure {
    Error(Error),
    Panic(Panic),
}

/// Runs the part of an operator in which peers may access this rank's memory. A panic is caught, because published
/// memory must be withdrawn before the panic reaches the caller, who could free or reuse that memory.
fn catch_panic<T>(run: impl FnOnce() -> Result<T>) -> Result<T, Failure> {
    match catch_unwind(AssertUnwindSafe(run)) {
        Ok(done) => done.map_err(Failure::Error),
        Err(panic) => Err(Failure::Panic(panic)),
    }
}

impl HostBuffer {
    /// Ends a failed operator after its published memory was withdrawn: publishes the failure to the peers, makes the
    /// buffer refuse further use, and resumes a panic.
    fn fail_operator<T>(&mut self, operator: Operator, failure: Failure) -> Result<T> {
        let panic = match failure {
            Failure::Error(error) => return self.fail(operator, error),
            Failure::Panic(panic) => panic,
        };
        let error = panic_error(operator, self.step, self.rank(), &*panic);
        let _: Result<()> = self.fail(operator, error);
        resume_unwind(panic)
    }
}
