//! [`HostBuffer`]: one rank's end of a communicator on the CPU.

use std::sync::atomic::{AtomicU64, Ordering::Relaxed};
use std::sync::{Arc, OnceLock};
use std::time::Duration;

use ep::call::{check_len, check_maker, check_routing, dispatched};
use ep::layout::{DispatchLayout, receive_shape};
use ep::rendezvous::Rendezvous;
use ep::{
    Backend, CallerError, CombineInput, CombineOutput, Config, Counts, DispatchInput, DispatchMode,
    DispatchOutput, EnvironmentError, Error, Operator, PeerFault, Rank, ReceiveShape, Result, Routing,
    Traffic, World,
};

use crate::call::{DispatchCall, facts, format_code};
use crate::combine::{self, Combine, OutPtr};
use crate::comm::{Call, Comm, Op};
use crate::control::{BUFFERS, Control, Health};
use crate::dispatch::{self, Dispatch, LOCAL_EXPERTS, PROBS, SCALES, TOKENS, Weights};
use crate::handle::HostHandle;
use crate::join::{self, FIRST_ARENA_SEGMENT, Home, Introduction};
use crate::loopback::Loopback;
use crate::memory::{Arena, HostMemory, Place};
use crate::message::Format;
use crate::preprocess;
use crate::processes::Processes;
use crate::rail::{Rails, WindowLayout};
use crate::segment::{Directory, Segment};
use crate::simd::Level;
use crate::workers;

/// One rank's end of a communicator on the CPU: the embedded default backend.
///
/// Ranks are threads of one process ([`HostBuffer::threads`]) or processes of one machine ([`HostBuffer::join`]).
/// NVLink domains are emulated: inside one, ranks touch each other's registered memory; between two, only the
/// transport carries bytes.
pub struct HostBuffer {
    comm: Arc<Comm>,
    arena: Arena,
    pool: Option<rayon::ThreadPool>,
    workers: usize,
    /// Tells handles of this buffer from others'.
    id: u64,
    /// Operators called so far; the same on every rank.
    step: u64,
    /// Why the buffer refuses further use.
    failed: Option<Error>,
}

impl std::fmt::Debug for HostBuffer {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("HostBuffer")
            .field("rank", &self.comm.rank)
            .field("world", &self.comm.world.topology)
            .field("workers", &self.workers)
            .field("step", &self.step)
            .field("failed", &self.failed)
            .finish_non_exhaustive()
    }
}

impl HostBuffer {
    /// A world whose ranks are threads of this process: one buffer per rank, in order, each to be moved to its thread.
    ///
    /// # Errors
    /// [`CallerError::Config`]; [`EnvironmentError`] when memory is short.
    pub fn threads(world: World, config: &Config) -> Result<Vec<Self>> {
        join::check_config(&world, config)?;
        let directory = Directory::of_threads();
        let ranks: Vec<Rank> = world.topology.all_ranks().collect();
        let homes: Vec<Home> = ranks
            .iter()
            .map(|&rank| Home::create(&directory, rank, &world, config))
            .collect::<Result<_>>()?;
        let find = |rank: Rank, window: bool| {
            let home = &homes[rank.index()];
            Ok(Arc::clone(if window { &home.window.1 } else { &home.control.1 }))
        };
        ranks
            .iter()
            .map(|&rank| {
                Self::assemble(rank, world.clone(), config, directory.clone(), Processes::default(), find)
            })
            .collect()
    }

    /// This process as one rank of a world of processes on this machine. Collective.
    ///
    /// # Errors
    /// [`ep::PeerError`] that names a rank which does not come; [`EnvironmentError`] when the ranks are not on one
    /// machine, or memory is short; [`CallerError`] when the ranks' worlds or settings differ.
    pub fn join(world: World, rendezvous: &mut dyn Rendezvous, config: &Config) -> Result<Self> {
        join::check_config(&world, config)?;
        let rank = rendezvous.rank();
        if rendezvous.ranks() != world.ranks() {
            return Err(CallerError::Topology(format!(
                "the world has {} ranks, the rendezvous {}",
                world.ranks(),
                rendezvous.ranks()
            ))
            .into());
        }
        // Peers open this process's segments by its number, so it must be known before they are made.
        let directory = Directory::of_processes(vec![std::process::id(); world.ranks()]);
        let home = Home::create(&directory, rank, &world, config)?;
        let mine = Introduction::new(&world, config, &home);
        let all: Vec<Introduction> = rendezvous
            .all_gather(&mine.to_bytes())?
            .iter()
            .zip(world.topology.all_ranks())
            .map(|(bytes, peer)| Introduction::from_bytes(bytes).ok_or_else(|| join::unintelligible(peer)))
            .collect::<Result<_>>()?;
        for (peer, theirs) in world.topology.all_ranks().zip(&all) {
            mine.check(rank, peer, theirs)?;
        }
        let pids: Vec<u32> = all.iter().map(|intro| intro.pid).collect();
        let directory = Directory::of_processes(pids.clone());
        directory.adopt(rank, home.control.0.id, &home.control.1);
        directory.adopt(rank, home.window.0.id, &home.window.1);
        let find = |peer: Rank, window: bool| {
            let intro = &all[peer.index()];
            directory.find(peer, if window { intro.window } else { intro.control })
        };
        let peers = world.topology.all_ranks().zip(pids).filter(|&(peer, _)| peer != rank);
        let buffer =
            Self::assemble(rank, world.clone(), config, directory.clone(), Processes::watch(peers)?, find)?;
        // Nobody may leave before everybody has opened its segments.
        rendezvous.all_gather(&[])?;
        Ok(buffer)
    }

    fn assemble(
        rank: Rank,
        world: World,
        config: &Config,
        directory: Directory,
        processes: Processes,
        find: impl Fn(Rank, bool) -> Result<Arc<Segment>>,
    ) -> Result<Self> {
        let topology = &world.topology;
        let controls = topology
            .all_ranks()
            .map(|peer| Ok(Control::new(find(peer, false)?, &world)))
            .collect::<Result<Vec<_>>>()?;
        let local = topology.local_rank_of(rank);
        let windows = (0..topology.domains())
            .map(|domain| topology.rank_at(domain, local))
            .map(|peer| Ok((peer, find(peer, true)?)))
            .collect::<Result<Vec<_>>>()?;
        let window = Arc::clone(&windows[topology.domain_of(rank)].1);
        let loopback = Loopback::new(topology.domain_of(rank), windows, WindowLayout::signals(config.slots));
        let rails = Rails::new(&world, rank, window, config, Box::new(loopback));

        let workers = match config.workers {
            0 => (std::thread::available_parallelism().map_or(1, usize::from) / world.ranks()).max(1),
            workers => workers,
        };
        let pool = (workers > 1).then(|| {
            rayon::ThreadPoolBuilder::new()
                .num_threads(workers)
                .thread_name(move |worker| format!("ep-{rank}-{worker}"))
                .build()
                .map_err(|error| {
                    EnvironmentError::new(
                        format!("starting {workers} worker threads"),
                        error,
                        "lower HYBRID_EP_WORKERS",
                    )
                })
        });
        let comm = Comm {
            rank,
            config: config.clone(),
            level: Level::detect(),
            controls,
            directory: directory.clone(),
            rails,
            processes,
            domain_bytes: AtomicU64::new(0),
            preprocess_bytes: AtomicU64::new(0),
            waited_ns: AtomicU64::new(0),
            world,
        };
        static NEXT_ID: AtomicU64 = AtomicU64::new(0);
        Ok(Self {
            comm: Arc::new(comm),
            arena: Arena::new(rank, directory, FIRST_ARENA_SEGMENT),
            pool: pool.transpose()?,
            workers,
            id: NEXT_ID.fetch_add(1, Relaxed),
            step: 0,
            failed: None,
        })
    }

    /// Worker threads that this rank's operators run on.
    pub fn workers(&self) -> usize {
        self.workers
    }

    /// Bytes of registered memory that this rank holds now.
    pub fn registered_bytes(&self) -> usize {
        self.arena.registered_bytes()
    }

    /// Name of the engine that carries bytes between domains.
    pub fn transport(&self) -> &'static str {
        self.comm.rails.transport_name()
    }

    pub(crate) fn comm(&self) -> &Comm {
        &self.comm
    }

    /// The workers, where there are several.
    pub(crate) fn pool(&self) -> Option<&rayon::ThreadPool> {
        self.pool.as_ref()
    }

    pub(crate) fn check_usable(&self) -> Result<()> {
        self.failed.clone().map_or(Ok(()), Err)
    }

    /// Remembers an error of a collective operator under way, and tells the peers.
    fn fail<T>(&mut self, operator: Operator, error: Error) -> Result<T> {
        let (culprit, fault) = match &error {
            Error::Peer(peer) => (peer.peer, peer.fault),
            _ => (self.comm.rank, PeerFault::Failed),
        };
        self.comm.control().set_health(Health::Failed { culprit, fault, operator, step: self.step });
        self.failed = Some(error.clone());
        Err(error)
    }
}

impl Drop for HostBuffer {
    fn drop(&mut self) {
        if self.failed.is_none() {
            self.comm.control().set_health(Health::Left);
        }
    }
}

impl Backend for HostBuffer {
    type Memory = HostMemory;
    type Handle = HostHandle;

    fn rank(&self) -> Rank {
        self.comm.rank
    }

    fn world(&self) -> &World {
        &self.comm.world
    }

    fn alloc(&mut self, bytes: usize) -> Result<HostMemory> {
        self.arena.alloc(bytes)
    }

    fn upload(&mut self, bytes: &[u8], memory: &mut HostMemory) -> Result<()> {
        check_len("memory to upload to", bytes.len(), memory.len())?;
        memory.as_bytes_mut()[..bytes.len()].copy_from_slice(bytes);
        Ok(())
    }

    fn download(&mut self, memory: &HostMemory, bytes: &mut [u8]) -> Result<()> {
        check_len("memory to download from", bytes.len(), memory.len())?;
        bytes.copy_from_slice(&memory.as_bytes()[..bytes.len()]);
        Ok(())
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
        let op = Op::enter(&comm, Operator::Preprocess, self.step, Call::default(), [None; BUFFERS]);
        let result = preprocess::exchange(&op, &own).and_then(|all| {
            let topology = &comm.world.topology;
            let local = topology.local_rank_of(comm.rank);
            let rail = (0..topology.domains()).map(|domain| topology.rank_at(domain, local));
            let handle = HostHandle {
                buffer: self.id,
                id: self.step,
                mode,
                layout: DispatchLayout::new(&comm.world, routing, &all)?,
                shape: receive_shape(&comm.world, comm.rank, &all)?,
                rail_tokens: rail.map(|rank| all[rank.index()].tokens as usize).collect(),
                forwarded: OnceLock::new(),
            };
            op.finish()?;
            Ok(handle)
        });
        result.or_else(|error| self.fail(Operator::Preprocess, error))
    }

    fn receive_shape(&mut self, handle: &HostHandle) -> Result<ReceiveShape> {
        check_maker(handle.buffer, self.id)?;
        Ok(handle.shape.clone())
    }

    fn dispatch(
        &mut self,
        handle: &HostHandle,
        input: DispatchInput<'_, HostMemory>,
        output: DispatchOutput<'_, HostMemory>,
    ) -> Result<()> {
        self.check_usable()?;
        check_maker(handle.buffer, self.id)?;
        let call = DispatchCall::check(&self.comm.world, self.comm.rank, handle, &input, &output)?;
        let message = Format {
            lists: handle.forwarded.get().is_none(),
            probs: !matches!(call.weights, Weights::Skip),
            row_bytes: input.format.output_row_bytes(input.hidden),
            scale_bytes: input.format.scale_row_bytes(input.hidden),
        };
        let chunk = message.chunk_tokens(&self.comm.world, &self.comm.config)?;

        let DispatchOutput { tokens, scales, probs, local_experts } = output;
        let mut outputs = [Some(tokens), scales, probs, local_experts];
        // Peers write into registered memory only; what is not is staged.
        let mut staged: [Option<HostMemory>; BUFFERS] = Default::default();
        for (at, stage) in staged.iter_mut().enumerate() {
            if let Some(memory) = outputs[at].as_deref()
                && call.bytes[at] > 0
                && memory.place().is_none()
            {
                *stage = Some(self.arena.alloc(call.bytes[at])?);
            }
        }
        if handle.mode == DispatchMode::Plain {
            // Writers set what is chosen; the rest of a row is zero. Before anybody may write.
            for at in [PROBS, LOCAL_EXPERTS] {
                if let Some(memory) = staged[at].as_mut().or(outputs[at].as_deref_mut()) {
                    memory.as_bytes_mut()[..call.kept_bytes[at]].fill(0);
                }
            }
        }
        let place = |at: usize| {
            (call.bytes[at] > 0)
                .then(|| staged[at].as_ref().or(outputs[at].as_deref()).and_then(HostMemory::place))
                .flatten()
        };
        let places = [TOKENS, SCALES, PROBS, LOCAL_EXPERTS].map(place);

        self.step += 1;
        let comm = Arc::clone(&self.comm);
        let same = Call {
            handle: handle.id,
            hidden: input.hidden,
            format: format_code(input.format),
            wire: 0,
            probs: message.probs,
            chunk,
        };
        let op = Op::enter(&comm, Operator::Dispatch, self.step, same, places);
        let job = Dispatch {
            op: &op,
            handle,
            format: input.format,
            hidden: input.hidden,
            tokens: input.tokens.as_bytes(),
            scales: input.scales.map_or(&[], HostMemory::as_bytes),
            weights: call.weights,
            message,
            state: dispatch::State::new(&op, handle, chunk),
        };
        let done = op.run(self.pool.as_ref(), |idle| job.work(idle)).and_then(|()| {
            let learnt = job.into_learnt();
            op.finish()?;
            Ok(learnt)
        });
        match done {
            Ok(learnt) => {
                handle.forwarded.get_or_init(|| learnt);
            }
            Err(error) => {
                for memory in outputs.into_iter().flatten().chain(staged.iter_mut().flatten()) {
                    memory.withdraw();
                }
                return self.fail(Operator::Dispatch, error);
            }
        }
        for (at, stage) in staged.iter().enumerate() {
            if let (Some(stage), Some(memory)) = (stage, outputs[at].as_deref_mut()) {
                let from = &stage.as_bytes()[..call.kept_bytes[at]];
                let streaming_bytes = comm.config.streaming_bytes;
                workers::copy(self.pool.as_ref(), comm.level, streaming_bytes, memory.as_bytes_mut(), from);
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
        check_maker(handle.buffer, self.id)?;
        dispatched(handle.forwarded.get())?;
        let world = &self.comm.world;
        let facts = facts(world, self.comm.rank, handle);
        facts.check_combine(&input, &output, HostMemory::len)?;
        let row_bytes = input.hidden * input.element.bytes();
        let rows = facts.rows;
        let prob_bytes = 4 * rows * facts.probs_per_row();
        let message = Format {
            lists: false,
            probs: input.probs.is_some(),
            row_bytes: input.hidden * input.wire.bytes(),
            scale_bytes: 0,
        };
        let chunk = message.chunk_tokens(world, &self.comm.config)?;

        // Peers read registered memory only; what is not is staged.
        let (arena, pool, level) = (&mut self.arena, self.pool.as_ref(), self.comm.level);
        let streaming_bytes = self.comm.config.streaming_bytes;
        let mut reachable =
            |memory: &HostMemory, bytes: usize| -> Result<(Option<HostMemory>, Option<Place>)> {
                let place = arena.readable_place(memory);
                if place.is_some() || bytes == 0 {
                    return Ok((None, place));
                }
                let mut staged = arena.alloc(bytes)?;
                let (to, from) = (staged.as_bytes_mut(), &memory.as_bytes()[..bytes]);
                workers::copy(pool, level, streaming_bytes, to, from);
                let place = staged.place();
                Ok((Some(staged), place))
            };
        let mut places = [None; BUFFERS];
        let (_staged_rows, rows_place) = reachable(input.rows, rows * row_bytes)?;
        places[TOKENS] = rows_place;
        let _staged_probs = match input.probs {
            Some(probs) => {
                let (staged, place) = reachable(probs, prob_bytes)?;
                places[PROBS] = place;
                staged
            }
            None => None,
        };

        let probs_out =
            output.probs.map_or(std::ptr::null_mut(), |memory| memory.as_bytes_mut().as_mut_ptr());
        self.step += 1;
        let comm = Arc::clone(&self.comm);
        let same = Call {
            handle: handle.id,
            hidden: input.hidden,
            format: input.element.bytes() as u64,
            wire: input.wire.bytes(),
            probs: message.probs,
            chunk,
        };
        let op = Op::enter(&comm, Operator::Combine, self.step, same, places);
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
        let done = op.run(self.pool.as_ref(), |idle| job.work(idle)).and_then(|()| op.finish());
        done.or_else(|error| self.fail(Operator::Combine, error))
    }

    fn synchronize(&mut self) -> Result<()> {
        // Operators return when they are done.
        self.check_usable()
    }

    fn traffic(&self) -> Traffic {
        let (transport_bytes, transport_messages) = self.comm.rails.sent();
        let waited = self.comm.waited_ns.load(Relaxed) / self.workers as u64;
        Traffic {
            domain_bytes: self.comm.domain_bytes.load(Relaxed),
            transport_bytes,
            transport_messages,
            preprocess_bytes: self.comm.preprocess_bytes.load(Relaxed),
            waited: Duration::from_nanos(waited),
        }
    }
}
