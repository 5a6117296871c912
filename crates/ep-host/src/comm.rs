//! The parts that all operators of a rank share: entering, the worker loop, finishing, and errors.
//!
//! `operators` makes one [`Op`] per operator call and runs its workers; `preprocess`, `dispatch` and `combine` do the
//! work through it. The shared words are in [`crate::control`]; waiting is in [`crate::wait`].

use std::any::Any;
use std::panic::{AssertUnwindSafe, catch_unwind, resume_unwind};
use std::sync::atomic::{
    AtomicBool, AtomicU64, AtomicUsize, Ordering::Acquire, Ordering::Relaxed, Ordering::Release, fence,
};
use std::sync::{Arc, Mutex, OnceLock, PoisonError};
use std::thread::ThreadId;
use std::time::{Duration, Instant};

use ep::join::Machines;
use ep::{
    CallerError, Config, EnvironmentError, Error, Interrupt, Operator, PeerError, PeerFault, Posted, Rank,
    Result, World,
};
use ep_rail::{ClaimedSlot, Segment, Streams};

use crate::control::{Control, Health, MEMORIES};
use crate::directory::Directory;
use crate::processes::Processes;
use crate::progress::{Idle, ProgressMonitor, Waiting};
use crate::published::PublishedMemory;
use crate::pulse::Pulse;
use crate::signature::{self, CollectiveArguments, SIGNATURE};
use crate::simd::{Level, stream_fence};

/// One rank's view of its world. `HostBuffer` and all workers of the rank share it.
pub(crate) struct Comm {
    pub(crate) rank: Rank,
    pub(crate) world: World,
    pub(crate) config: Config,
    pub(crate) level: Level,
    /// By rank.
    pub(crate) controls: Vec<Control>,
    pub(crate) directory: Directory,
    pub(crate) rails: Streams,
    pub(crate) processes: Processes,
    pub(crate) machines: Machines,
    pub(crate) pulse: Pulse,
    /// Bytes that this rank has read from or written to other ranks of its domain, for [`ep::Traffic`].
    pub(crate) domain_bytes: AtomicU64,
    /// Bytes of counts that this rank has read from other ranks.
    pub(crate) preprocess_bytes: AtomicU64,
    /// Time that workers have waited, summed over the workers, nanoseconds.
    pub(crate) waited_ns: AtomicU64,
}

impl Comm {
    /// This rank's NVLink domain.
    pub(crate) fn domain(&self) -> usize {
        self.world.topology().domain_of(self.rank)
    }

    /// This rank's control block.
    pub(crate) fn control(&self) -> &Control {
        &self.controls[self.rank.index()]
    }

    /// The name of the machine of `rank`, in a job of several machines.
    pub(crate) fn machine_of(&self, rank: Rank) -> Option<String> {
        self.machines.name_of(rank).map(String::from)
    }

    /// Publishes the state of this rank in its control block and to ranks of other machines.
    pub(crate) fn set_health(&self, health: Health) {
        self.control().set_health(health);
        self.processes.send_status(self.control(), true);
    }

    /// The ranks of this rank's domain and their control blocks, by local rank.
    pub(crate) fn domain_controls(&self) -> impl Iterator<Item = (Rank, &Control)> {
        self.world.topology().domain_ranks(self.domain()).map(|rank| (rank, &self.controls[rank.index()]))
    }
}

/// Memory that a rank of this domain published, mapped here: bytes of a segment that begin at a multiple of 4.
#[derive(Debug, Clone)]
pub(crate) struct PeerMemory {
    segment: Arc<Segment>,
    offset: usize,
    len: usize,
}

impl PeerMemory {
    /// The published memory; `None` when it is not inside the segment or not aligned for f32.
    fn new(segment: Arc<Segment>, published: PublishedMemory) -> Option<Self> {
        let PublishedMemory { offset, len, .. } = published;
        let inside = offset.checked_add(len).is_some_and(|end| end <= segment.len());
        (inside && offset.is_multiple_of(size_of::<f32>())).then_some(Self { segment, offset, len })
    }

    /// The address of element `index` of `bytes` bytes each; `None` when the element is not inside the memory.
    pub(crate) fn element(&self, index: usize, bytes: usize) -> Option<*mut u8> {
        let at = index.checked_mul(bytes)?;
        let end = at.checked_add(bytes)?;
        // `new` checked that the memory is inside the segment.
        (end <= self.len).then(|| self.segment.at(self.offset + at, bytes))
    }
}

/// The memories that one rank published for the operator.
pub(crate) type PeerMemories = [Option<PeerMemory>; MEMORIES];

/// One collective operator in progress on this rank.
pub(crate) struct Op<'a> {
    pub(crate) comm: &'a Comm,
    pub(crate) operator: Operator,
    pub(crate) step: u64,
    pub(crate) signature: [u64; SIGNATURE],
    pub(crate) start: Instant,
    /// When a worker of this rank last made progress, nanoseconds since `start`.
    pub(crate) progressed_ns: AtomicU64,
    /// Whether a worker has failed; all workers then end.
    pub(crate) stopped: AtomicBool,
    /// The first error of any worker.
    pub(crate) error: Mutex<Option<Error>>,
    /// The thread that called the operator.
    pub(crate) caller: ThreadId,
    pub(crate) monitor: Mutex<ProgressMonitor>,
    /// By local rank, once all ranks of the domain have entered.
    peers: OnceLock<Vec<PeerMemories>>,
}

/// How long a rank whose engine has lost a peer on another machine waits for news of that peer on their link.
const NEWS_PERIOD: Duration = Duration::from_secs(1);

/// The payload of a panic.
pub(crate) type Panic = Box<dyn Any + Send>;

/// The error that stands for a panic inside an operator, in later calls on this rank and in its control block.
pub(crate) fn panic_error(operator: Operator, step: u64, rank: Rank, panic: &(dyn Any + Send)) -> Error {
    let text = panic.downcast_ref::<&str>().copied();
    let text =
        text.or_else(|| panic.downcast_ref::<String>().map(String::as_str)).unwrap_or("without a message");
    EnvironmentError::new(
        format!("{operator} #{step} on rank {rank}"),
        format!("it panicked: {text}"),
        "drop the buffer; it cannot complete the operator with its peers",
    )
    .into()
}

impl<'a> Op<'a> {
    /// Enters the operator. From now on peers may read and write the published memories.
    pub(crate) fn enter(
        comm: &'a Comm,
        operator: Operator,
        step: u64,
        arguments: CollectiveArguments,
        memories: [Option<PublishedMemory>; MEMORIES],
    ) -> Self {
        let signature = arguments.signature(operator);
        comm.control().turn();
        comm.control().enter(step, signature, memories);
        Self {
            comm,
            operator,
            step,
            signature,
            start: Instant::now(),
            progressed_ns: AtomicU64::new(0),
            stopped: AtomicBool::new(false),
            error: Mutex::new(None),
            monitor: Mutex::new(ProgressMonitor::new(&comm.controls)),
            caller: std::thread::current().id(),
            peers: OnceLock::new(),
        }
    }

    /// The memories that the ranks of this domain published, by local rank; `None` until all of them have entered.
    ///
    /// # Errors
    /// [`CallerError::Collective`] when a rank called something else; [`PeerError`] for memory outside its segment or a
    /// segment that does not arrive.
    pub(crate) fn peers(&self) -> Result<Option<&[PeerMemories]>> {
        if let Some(peers) = self.peers.get() {
            return Ok(Some(peers));
        }
        if self.comm.domain_controls().any(|(_, control)| control.entered() < self.step) {
            return Ok(None);
        }
        let mut all = Vec::new();
        for (rank, control) in self.comm.domain_controls() {
            self.check_signature(rank, &control.signature())?;
            let mut memories = PeerMemories::default();
            for (at, memory) in memories.iter_mut().enumerate() {
                if let Some(published) = control.memory(at) {
                    let segment =
                        self.comm.directory.find(rank, published.segment).map_err(|e| self.here(e))?;
                    let outside = || {
                        let (PublishedMemory { offset, len, .. }, segment) = (published, segment.len());
                        let found = format!(
                            "published memory of {len} bytes at offset {offset} of a segment of {segment} bytes"
                        );
                        self.broken(rank, found)
                    };
                    *memory = Some(PeerMemory::new(Arc::clone(&segment), published).ok_or_else(outside)?);
                }
            }
            all.push(memories);
        }
        Ok(Some(self.peers.get_or_init(|| all)))
    }

    /// Checks that a peer called the same operator with the same collective arguments.
    ///
    /// # Errors
    /// [`CallerError::Collective`] that names the first argument that differs.
    pub(crate) fn check_signature(&self, peer: Rank, theirs: &[u64; SIGNATURE]) -> Result<()> {
        let differs = (0..SIGNATURE).find(|&at| theirs[at] != self.signature[at]);
        let Some(at) = differs else { return Ok(()) };
        let text = |word| signature::value(self.operator, at, word);
        Err(CallerError::Collective {
            operator: self.operator,
            field: signature::field(self.operator, at),
            rank: self.comm.rank,
            mine: text(self.signature[at]),
            peer,
            theirs: text(theirs[at]),
        }
        .into())
    }

    /// Runs `work` on every worker and returns the first error of any worker.
    ///
    /// # Panics
    /// With the payload of a worker that panicked, after all workers have ended.
    pub(crate) fn run(
        &self,
        pool: Option<&rayon::ThreadPool>,
        work: impl Fn(&mut Idle) -> Result<()> + Sync,
    ) -> Result<()> {
        let panicked = Mutex::new(None);
        let worker = || {
            let mut idle = Idle::default();
            self.run_contained(&panicked, || work(&mut idle));
            self.end_wait(&mut idle);
        };
        match pool {
            None => worker(),
            Some(pool) if self.comm.config.interrupt.is_set() || self.comm.world.topology().domains() > 1 => {
                self.run_on(pool, worker, &panicked);
            }
            // The program has set no interrupt, and there is no engine whose calls may never return.
            Some(pool) => {
                pool.broadcast(|_| worker());
            }
        }
        if let Some(panic) = panicked.into_inner().unwrap_or_else(PoisonError::into_inner) {
            resume_unwind(panic);
        }
        self.error.lock().unwrap_or_else(PoisonError::into_inner).take().map_or(Ok(()), Err)
    }

    /// Runs `worker` on every thread of the pool. Meanwhile this thread asks the program whether to stop, and checks
    /// that the workers end after the operator has failed.
    fn run_on(&self, pool: &rayon::ThreadPool, worker: impl Fn() + Sync, panicked: &Mutex<Option<Panic>>) {
        let working = AtomicUsize::new(pool.current_num_threads());
        let caller = std::thread::current();
        pool.in_place_scope(|scope| {
            scope.spawn_broadcast(|_, _| {
                worker();
                if working.fetch_sub(1, Release) == 1 {
                    caller.unpark();
                }
            });
            let (mut stopped_at, mut told) = (None, false);
            while working.load(Acquire) > 0 {
                std::thread::park_timeout(Interrupt::EVERY);
                // Ask even after the operator has failed: a second signal may end the process.
                self.run_contained(panicked, || self.check_interrupt(|| "its workers".into()));
                if self.stopped.load(Acquire) && !told {
                    let since = *stopped_at.get_or_insert_with(Instant::now);
                    told = since.elapsed() >= self.comm.config.stall_timeout && working.load(Acquire) > 0;
                    if told {
                        self.tell_that_workers_do_not_end();
                    }
                }
            }
        });
    }

    /// Publishes that this rank has failed, before its operator returns. The operator cannot return while a worker uses
    /// its arguments. Without this report, peers would wait for this rank, or name a different one.
    fn tell_that_workers_do_not_end(&self) {
        let Self { comm, operator, step, .. } = self;
        let error = EnvironmentError::new(
            format!("{operator} #{step} on rank {}", comm.rank),
            format!(
                "it has failed, and a worker has not ended within the stall bound of {:?}: a call of the engine between \
                 NVLink domains may not return",
                comm.config.stall_timeout
            ),
            "end the process",
        );
        comm.control().set_cause(&error.to_string());
        comm.set_health(Health::Failed {
            at_fault: comm.rank,
            fault: PeerFault::Failed,
            operator: *operator,
            step: *step,
        });
        ep::tell(error);
    }

    /// Runs `work` of one worker. An error or a panic stops the other workers too. They still use the operator's
    /// arguments until they end, so the panic is stored here and resumed after all workers have ended.
    fn run_contained(&self, panicked: &Mutex<Option<Panic>>, work: impl FnOnce() -> Result<()>) {
        match catch_unwind(AssertUnwindSafe(work)) {
            Ok(Ok(())) => {}
            Ok(Err(error)) => self.stop(error),
            Err(panic) => {
                self.stop(panic_error(self.operator, self.step, self.comm.rank, &*panic));
                panicked.lock().unwrap_or_else(PoisonError::into_inner).get_or_insert(panic);
            }
        }
    }

    /// Stops all workers. Only the first error is kept.
    fn stop(&self, error: Error) {
        self.error.lock().unwrap_or_else(PoisonError::into_inner).get_or_insert(error);
        self.stopped.store(true, Release);
    }

    /// The loop of one worker: calls `turn`, once all ranks of the domain have entered, until `all_claimed` says that
    /// no work is left to claim. `turn` returns whether it found work; `waiting` names the event that is missing.
    pub(crate) fn take_turns(
        &self,
        idle: &mut Idle,
        mut turn: impl FnMut(&mut Idle, &[PeerMemories]) -> Result<bool>,
        all_claimed: impl Fn() -> bool,
        waiting: impl Fn() -> Waiting,
    ) -> Result<()> {
        loop {
            self.check_stopped()?;
            self.poll()?;
            let progressed = match self.peers()? {
                Some(peers) => turn(idle, peers)?,
                None => false,
            };
            if progressed {
                self.progress(idle);
            } else if all_claimed() {
                // Orders this worker's streaming stores before the store to `finished`, which publishes them.
                stream_fence();
                return Ok(());
            } else {
                self.idle(idle, &waiting)?;
            }
        }
    }

    /// Records that a worker has made progress, which ends its wait.
    pub(crate) fn progress(&self, idle: &mut Idle) {
        self.end_wait(idle);
        self.progressed_ns.store(self.now_ns(), Relaxed);
        self.comm.control().advance();
    }

    fn end_wait(&self, idle: &mut Idle) {
        if let Some(waited) = idle.end() {
            self.comm.waited_ns.fetch_add(waited.as_nanos() as u64, Relaxed);
        }
    }

    pub(crate) fn now_ns(&self) -> u64 {
        self.start.elapsed().as_nanos() as u64
    }

    /// Sends the message in a claimed slot; polls and retries while the transport's queue is full.
    pub(crate) fn post(&self, idle: &mut Idle, claim: ClaimedSlot, len: usize) -> Result<()> {
        // SAFETY: the worker that has claimed and filled the slot calls this once, and repeats only what was not taken.
        self.retry_while_full(idle, claim, || unsafe { self.comm.rails.post(claim, len) })
    }

    /// Returns a slot that was read to its sender; polls and retries while the transport's queue is full.
    pub(crate) fn release(&self, idle: &mut Idle, claim: ClaimedSlot) -> Result<()> {
        // SAFETY: the worker that has claimed and read the slot calls this once, and repeats only what was not taken.
        self.retry_while_full(idle, claim, || unsafe { self.comm.rails.release(claim) })
    }

    fn retry_while_full(
        &self,
        idle: &mut Idle,
        claim: ClaimedSlot,
        attempt: impl Fn() -> Result<Posted>,
    ) -> Result<()> {
        while attempt().or_else(|error| self.judge(error).map(|()| Posted::Yes))? == Posted::Full {
            self.poll()?;
            let peer = self.comm.rails.peer(claim.domain);
            let control = &self.comm.controls[peer.index()];
            // The engine's queue to a rank that has left may stay full for ever. A rank that left after it had finished
            // does not need the credit.
            if control.health() != Health::Alive && control.finished() >= self.step {
                return Ok(());
            }
            self.idle(idle, || Waiting {
                peer,
                what: format!("room in the transport's queue to rank {peer}"),
            })?;
        }
        Ok(())
    }

    /// Handles the signals that have arrived on the rails.
    pub(crate) fn poll(&self) -> Result<()> {
        self.comm.rails.poll().or_else(|error| self.judge(error))
    }

    /// The error, with this operator and step if it names a peer.
    fn here(&self, error: Error) -> Error {
        let Error::Peer(error) = error else { return error };
        let (machine, operator, step) = (self.comm.machine_of(error.peer), self.operator, self.step);
        PeerError { machine, operator, step, ..error }.into()
    }

    /// Decides what an error of the rail means for this operator. An error that names a rank which has finished the
    /// step is ignored: such a rank may leave while credits to it are in flight.
    ///
    /// # Errors
    /// The error, with this operator; for a peer that is gone, what its control block states about the reason.
    fn judge(&self, error: Error) -> Result<()> {
        let Error::Peer(error) = error else { return Err(error) };
        let comm = self.comm;
        let control = &comm.controls[error.peer.index()];
        if error.fault != PeerFault::Broken {
            let news = || control.health() != Health::Alive || control.finished() >= self.step;
            if comm.processes.is_remote(error.peer) {
                // The engine's connection can end before the status of the same rank arrives on its link.
                comm.processes.await_news(error.peer, NEWS_PERIOD, news);
            }
            // A rank leaves after it has finished, so its health is read first.
            let health = control.health();
            if control.finished() >= self.step {
                return Ok(());
            }
            if health != Health::Alive {
                let waiting = Waiting { peer: error.peer, what: error.waited_for };
                return Err(self.unhealthy(error.peer, health, waiting));
            }
        }
        let lost = comm.processes.lost().find(|&(rank, _)| rank == error.peer);
        let fault = match lost {
            Some((_, fault)) if error.fault != PeerFault::Broken => fault,
            _ => error.fault,
        };
        let (machine, operator, step) = (comm.machine_of(error.peer), self.operator, self.step);
        Err(PeerError { fault, machine, operator, step, ..error }.into())
    }

    /// The error for a peer whose messages or shared words violate the protocol. `found` says what was found.
    pub(crate) fn broken(&self, peer: Rank, found: impl Into<String>) -> Error {
        PeerError::broken(self.comm.rank, peer, self.operator, self.step, found).into()
    }

    /// The first rank of this domain that has not entered, as the event that a worker waits for; `None` when all have.
    pub(crate) fn waiting_for_entry(&self) -> Option<Waiting> {
        let (peer, control) =
            self.comm.domain_controls().find(|(_, control)| control.entered() < self.step)?;
        let seen = control.entered();
        Some(Waiting {
            peer,
            what: format!("rank {peer} to enter {} (expected #{}, seen #{seen})", self.operator, self.step),
        })
    }

    /// Finishes the operator: publishes that this rank does not access memory of its peers any more, and waits until
    /// all ranks of the domain have done the same.
    pub(crate) fn finish(&self) -> Result<()> {
        self.comm.control().finish(self.step);
        let mut idle = Idle::default();
        loop {
            let late = self.comm.domain_controls().find(|(_, control)| control.finished() < self.step);
            let Some((peer, control)) = late else { break };
            self.poll()?;
            self.idle(&mut idle, || Waiting {
                peer,
                what: format!(
                    "rank {peer} to finish {} (expected #{}, seen #{})",
                    self.operator,
                    self.step,
                    control.finished()
                ),
            })?;
        }
        self.end_wait(&mut idle);
        self.check_inputs_unchanged()
    }

    /// Checks that the rows of this domain that a combine has read so far have not changed meanwhile. A peer whose
    /// combine failed returns to its caller early, and the caller may have written to borrowed memory that the peer had
    /// published. A rank calls this at the end of the combine, and before it sends domain sums to a rank of another
    /// domain, which cannot check the rows.
    pub(crate) fn check_inputs_unchanged(&self) -> Result<()> {
        if self.operator != Operator::Combine {
            return Ok(());
        }
        // Orders the reads of the peers' rows before the reads of their health.
        fence(Acquire);
        let failed = |(peer, control): (Rank, &Control)| match control.health() {
            health @ Health::Failed { step, .. } if step <= self.step => Some((peer, health)),
            _ => None,
        };
        let mut others = self.comm.domain_controls().filter(|(rank, _)| *rank != self.comm.rank);
        let Some((peer, health)) = others.find_map(failed) else { return Ok(()) };
        let what = format!("rank {peer} to leave its expert rows unchanged until {} ends", self.operator);
        // The peer may itself have failed because of another rank.
        Err(self.unhealthy(peer, health, Waiting { peer, what }))
    }
}
