//! What all operators of a rank share: its peers, and how to wait for them without hanging.

use std::sync::atomic::{AtomicBool, AtomicU64, Ordering::Acquire, Ordering::Relaxed, Ordering::Release};
use std::sync::{Arc, Mutex, OnceLock, PoisonError};
use std::time::{Duration, Instant};

use ep::{CallerError, Config, Error, Operator, PeerError, PeerFault, Posted, Rank, Result, World};

use crate::control::{BUFFERS, Control, Health, SIGNATURE};
use crate::memory::Place;
use crate::processes::Processes;
use crate::rail::{Claim, Rails};
use crate::segment::{Directory, Segment};
use crate::simd::{Level, stream_fence};

/// One rank's view of its world, shared by its workers.
pub(crate) struct Comm {
    pub(crate) rank: Rank,
    pub(crate) world: World,
    pub(crate) config: Config,
    pub(crate) level: Level,
    /// By rank.
    pub(crate) controls: Vec<Control>,
    pub(crate) directory: Directory,
    pub(crate) rails: Rails,
    pub(crate) processes: Processes,
    pub(crate) domain_bytes: AtomicU64,
    pub(crate) preprocess_bytes: AtomicU64,
    pub(crate) waited_ns: AtomicU64,
}

impl Comm {
    /// This rank's NVLink domain.
    pub(crate) fn domain(&self) -> usize {
        self.world.topology.domain_of(self.rank)
    }

    /// This rank's control block.
    pub(crate) fn control(&self) -> &Control {
        &self.controls[self.rank.index()]
    }

    /// The control blocks of this rank's domain, by local rank.
    pub(crate) fn domain_controls(&self) -> impl Iterator<Item = (Rank, &Control)> {
        self.world.topology.domain_ranks(self.domain()).map(|rank| (rank, &self.controls[rank.index()]))
    }
}

/// What a worker waits for, for the report when it waits in vain.
#[derive(Debug)]
pub(crate) struct Waiting {
    pub(crate) peer: Rank,
    pub(crate) what: String,
}

/// How long a worker has been without work.
#[derive(Debug, Default)]
pub(crate) struct Idle {
    turns: u32,
    since: Option<Instant>,
}

/// Turns of busy waiting, then of yielding the core, before a waiting worker sleeps between looks.
const SPIN_TURNS: u32 = 64;
const YIELD_TURNS: u32 = 4096;
const NAP: Duration = Duration::from_micros(50);
/// How long after a rank has left the death of another may become known here.
const LATE_NEWS: Duration = Duration::from_millis(100);
/// Turns between two looks at clocks and peers' health.
const LOOK_EVERY: u32 = 32;
/// How often the system is asked whether peers' processes live.
const ASK_EVERY_NS: u64 = 2_000_000;

/// What this rank saw of the others while it waited.
#[derive(Debug)]
struct Observed {
    /// By rank: the heartbeat, and when it last changed.
    hearts: Vec<(u64, u64)>,
    asked_ns: u64,
}

/// A peer's published memory, mapped.
#[derive(Debug, Clone)]
pub(crate) struct PeerMemory {
    segment: Arc<Segment>,
    offset: usize,
    len: usize,
}

impl PeerMemory {
    /// The address of `len` bytes at `at`; `None` when the memory is shorter.
    pub(crate) fn at(&self, at: usize, len: usize) -> Option<*mut u8> {
        at.checked_add(len).filter(|&end| end <= self.len).map(|_| self.segment.at(self.offset + at, len))
    }
}

/// The memories that one peer published for the operator.
pub(crate) type PeerBuffers = [Option<PeerMemory>; BUFFERS];

/// One collective operator under way on this rank.
pub(crate) struct Op<'a> {
    pub(crate) comm: &'a Comm,
    pub(crate) operator: Operator,
    pub(crate) step: u64,
    pub(crate) signature: [u64; SIGNATURE],
    start: Instant,
    progressed_ns: AtomicU64,
    stopped: AtomicBool,
    error: Mutex<Option<Error>>,
    observed: Mutex<Observed>,
    peers: OnceLock<Vec<PeerBuffers>>,
}

/// The arguments of a call that must be the same on every rank.
#[derive(Debug, Clone, Copy, Default)]
pub(crate) struct Call {
    /// The step of the handle's preprocessing.
    pub(crate) handle: u64,
    pub(crate) hidden: usize,
    /// A number that is the same for the same types of tokens.
    pub(crate) format: u64,
    /// Bytes of an element on the wire, in combine.
    pub(crate) wire: usize,
    pub(crate) probs: bool,
    /// Tokens per chunk: ranks with other settings cut otherwise.
    pub(crate) chunk: usize,
}

/// What the words of a signature are, for the error that says which one differs.
const SIGNATURE_FIELDS: [&str; SIGNATURE] = [
    "the operator",
    "the handle",
    "hidden",
    "the token format",
    "the wire format",
    "probs",
    "the chunk size",
];

/// The first word of a signature; every other is an argument.
const OPERATORS: [Operator; 3] = [Operator::Preprocess, Operator::Dispatch, Operator::Combine];

impl Call {
    fn signature(self, operator: Operator) -> [u64; SIGNATURE] {
        let operator = OPERATORS.iter().position(|&other| other == operator).map_or(0, |at| at as u64 + 1);
        let Self { handle, hidden, format, wire, probs, chunk } = self;
        [operator, handle, hidden as u64, format, wire as u64, probs.into(), chunk as u64]
    }
}

impl<'a> Op<'a> {
    /// Enters the operator: from here on peers may touch the published memory.
    pub(crate) fn enter(
        comm: &'a Comm,
        operator: Operator,
        step: u64,
        call: Call,
        buffers: [Option<Place>; BUFFERS],
    ) -> Self {
        let signature = call.signature(operator);
        comm.control().beat();
        comm.control().enter(step, signature, buffers);
        Self {
            comm,
            operator,
            step,
            signature,
            start: Instant::now(),
            progressed_ns: AtomicU64::new(0),
            stopped: AtomicBool::new(false),
            error: Mutex::new(None),
            observed: Mutex::new(Observed { hearts: vec![(0, 0); comm.controls.len()], asked_ns: 0 }),
            peers: OnceLock::new(),
        }
    }

    /// The memories of the ranks of this domain, by local rank, once all of them have entered.
    pub(crate) fn peers(&self) -> Result<Option<&[PeerBuffers]>> {
        if let Some(peers) = self.peers.get() {
            return Ok(Some(peers));
        }
        if self.comm.domain_controls().any(|(_, control)| control.entered() < self.step) {
            return Ok(None);
        }
        let mut all = Vec::new();
        for (rank, control) in self.comm.domain_controls() {
            self.check_signature(rank, &control.signature())?;
            let mut buffers = PeerBuffers::default();
            for (at, buffer) in buffers.iter_mut().enumerate() {
                if let Some(place) = control.buffer(at) {
                    let segment = self.comm.directory.find(rank, place.segment)?;
                    *buffer = Some(PeerMemory { segment, offset: place.offset, len: place.len });
                }
            }
            all.push(buffers);
        }
        Ok(Some(self.peers.get_or_init(|| all)))
    }

    /// Checks that a peer does the same as this rank.
    pub(crate) fn check_signature(&self, peer: Rank, theirs: &[u64; SIGNATURE]) -> Result<()> {
        let differs = (0..SIGNATURE).find(|&at| theirs[at] != self.signature[at]);
        let Some(at) = differs else { return Ok(()) };
        let text = |value: u64| match at {
            0 => {
                OPERATORS.get((value as usize).wrapping_sub(1)).map_or(value.to_string(), Operator::to_string)
            }
            1 => format!("the one of preprocess #{value}"),
            _ => value.to_string(),
        };
        Err(CallerError::Collective {
            operator: self.operator,
            field: SIGNATURE_FIELDS[at],
            rank: self.comm.rank,
            mine: text(self.signature[at]),
            peer,
            theirs: text(theirs[at]),
        }
        .into())
    }

    /// Runs `work` on every worker and returns the first error of any.
    pub(crate) fn run(
        &self,
        pool: Option<&rayon::ThreadPool>,
        work: impl Fn(&mut Idle) -> Result<()> + Sync,
    ) -> Result<()> {
        let one = || {
            let mut idle = Idle::default();
            if let Err(error) = work(&mut idle) {
                self.error.lock().unwrap_or_else(PoisonError::into_inner).get_or_insert(error);
                self.stopped.store(true, Release);
            }
            self.end_wait(&mut idle);
        };
        match pool {
            None => one(),
            Some(pool) => {
                pool.broadcast(|_| one());
            }
        }
        self.error.lock().unwrap_or_else(PoisonError::into_inner).take().map_or(Ok(()), Err)
    }

    /// One worker's part: takes turns, once all ranks of the domain have entered, until there is nothing left to
    /// start. `turn` says whether it found something to do.
    pub(crate) fn take_turns(
        &self,
        idle: &mut Idle,
        mut turn: impl FnMut(&mut Idle, &[PeerBuffers]) -> Result<bool>,
        all_claimed: impl Fn() -> bool,
        waiting: impl Fn() -> Waiting,
    ) -> Result<()> {
        loop {
            self.comm.rails.poll()?;
            let progressed = match self.peers()? {
                Some(peers) => turn(idle, peers)?,
                None => false,
            };
            if progressed {
                self.progress(idle);
            } else if all_claimed() {
                // Before anyone learns that this rank is done.
                stream_fence();
                return Ok(());
            } else {
                self.idle(idle, &waiting)?;
            }
        }
    }

    /// A worker has done something: it waits no longer.
    pub(crate) fn progress(&self, idle: &mut Idle) {
        self.end_wait(idle);
        self.progressed_ns.store(self.now_ns(), Relaxed);
        self.comm.control().beat();
    }

    fn end_wait(&self, idle: &mut Idle) {
        if let Some(since) = idle.since.take() {
            self.comm.waited_ns.fetch_add(since.elapsed().as_nanos() as u64, Relaxed);
        }
        idle.turns = 0;
    }

    fn now_ns(&self) -> u64 {
        self.start.elapsed().as_nanos() as u64
    }

    /// A worker has nothing to do right now. Returns an error when waiting on makes no sense.
    pub(crate) fn idle(&self, idle: &mut Idle, waiting: impl Fn() -> Waiting) -> Result<()> {
        if self.stopped.load(Acquire) {
            // Another worker has the error to report; this one just ends.
            let error = self.error.lock().unwrap_or_else(PoisonError::into_inner);
            return error.clone().map_or(Ok(()), Err);
        }
        idle.since.get_or_insert_with(Instant::now);
        idle.turns += 1;
        if idle.turns < SPIN_TURNS {
            std::hint::spin_loop();
        } else if idle.turns < YIELD_TURNS {
            std::thread::yield_now();
        } else {
            std::thread::sleep(NAP);
        }
        if idle.turns.is_multiple_of(LOOK_EVERY) { self.look(&waiting) } else { Ok(()) }
    }

    /// Looks whether a peer has failed, and whether time is up.
    fn look(&self, waiting: &impl Fn() -> Waiting) -> Result<()> {
        let comm = self.comm;
        comm.control().beat();
        let now = self.now_ns();
        let needed = |rank: Rank| rank != comm.rank && comm.controls[rank.index()].finished() < self.step;
        for rank in comm.world.topology.all_ranks().filter(|&rank| needed(rank)) {
            match comm.controls[rank.index()].health() {
                Health::Alive => {}
                Health::Failed { culprit, fault, .. } if culprit != comm.rank => {
                    return Err(self.fault(culprit, fault, waiting(), Some(rank)));
                }
                Health::Failed { .. } => {
                    return Err(self.fault(rank, PeerFault::Failed, waiting(), Some(rank)));
                }
                Health::Left => return Err(self.left(rank, waiting())),
            }
        }
        let mut observed = self.observed.lock().unwrap_or_else(PoisonError::into_inner);
        if now.saturating_sub(observed.asked_ns) >= ASK_EVERY_NS {
            observed.asked_ns = now;
            for (control, heart) in comm.controls.iter().zip(&mut observed.hearts) {
                let beat = control.heartbeat();
                if heart.0 != beat {
                    *heart = (beat, now);
                }
            }
            if let Some(rank) = comm.processes.dead().find(|&rank| needed(rank)) {
                return Err(self.fault(rank, PeerFault::Died, waiting(), None));
            }
        }
        let timeout = comm.config.timeout.as_nanos() as u64;
        if now.saturating_sub(self.progressed_ns.load(Relaxed)) < timeout {
            return Ok(());
        }
        // The rank waited for may itself be waiting for the one that stands still: the latter is to be named.
        let still =
            |rank: &Rank| needed(*rank) && now.saturating_sub(observed.hearts[rank.index()].1) >= timeout / 2;
        let waiting = waiting();
        let culprit = Some(waiting.peer)
            .filter(still)
            .or_else(|| comm.world.topology.all_ranks().find(still))
            .unwrap_or(waiting.peer);
        Err(self.fault(culprit, PeerFault::Stalled, waiting, None))
    }

    /// A rank left while it was needed. If another rank's process died, that is why, and that one is to be named: the
    /// one that left may have learnt of it elsewhere, and a little before the system says so here.
    fn left(&self, rank: Rank, waiting: Waiting) -> Error {
        let comm = self.comm;
        let died = || {
            let mut dead = comm.processes.dead();
            dead.find(|dead| matches!(comm.controls[dead.index()].health(), Health::Alive))
        };
        let deadline = Instant::now() + LATE_NEWS;
        while !comm.processes.is_empty() && Instant::now() < deadline {
            if let Some(dead) = died() {
                return self.fault(dead, PeerFault::Died, waiting, None);
            }
            std::thread::sleep(NAP);
        }
        self.fault(rank, PeerFault::Left, waiting, None)
    }

    fn fault(&self, peer: Rank, fault: PeerFault, waiting: Waiting, reporter: Option<Rank>) -> Error {
        let told = reporter
            .filter(|&rank| rank != peer)
            .map_or(String::new(), |rank| format!(" (rank {rank} says so)"));
        PeerError {
            peer,
            fault,
            operator: self.operator,
            step: self.step,
            rank: self.comm.rank,
            waited_for: format!("{}{told}", waiting.what),
            waited: Duration::from_nanos(self.now_ns().saturating_sub(self.progressed_ns.load(Relaxed))),
        }
        .into()
    }

    /// Sends a claimed slot, making progress while the engine is full.
    pub(crate) fn post(&self, idle: &mut Idle, claim: Claim, len: usize) -> Result<()> {
        self.insist(idle, claim, || self.comm.rails.post(claim, len))
    }

    /// Gives a read slot back, making progress while the engine is full.
    pub(crate) fn release(&self, idle: &mut Idle, claim: Claim) -> Result<()> {
        self.insist(idle, claim, || self.comm.rails.release(claim))
    }

    fn insist(&self, idle: &mut Idle, claim: Claim, attempt: impl Fn() -> Result<Posted>) -> Result<()> {
        while attempt()? == Posted::Full {
            self.comm.rails.poll()?;
            let peer = self.comm.rails.peer(claim.domain);
            self.idle(idle, || Waiting {
                peer,
                what: format!("room in the transport's queue to rank {peer}"),
            })?;
        }
        Ok(())
    }

    /// The first rank of this domain that has not entered, as what a worker waits for.
    pub(crate) fn waiting_for_entry(&self) -> Option<Waiting> {
        let (peer, control) =
            self.comm.domain_controls().find(|(_, control)| control.entered() < self.step)?;
        let seen = control.entered();
        Some(Waiting {
            peer,
            what: format!("rank {peer} to enter {} (expected step {}, saw {seen})", self.operator, self.step),
        })
    }

    /// Leaves the operator: says that this rank touches no peer's memory any more, and waits until nobody touches
    /// its own.
    pub(crate) fn finish(&self) -> Result<()> {
        self.comm.control().finish(self.step);
        let mut idle = Idle::default();
        loop {
            let late = self.comm.domain_controls().find(|(_, control)| control.finished() < self.step);
            let Some((peer, control)) = late else { break };
            self.comm.rails.poll()?;
            self.idle(&mut idle, || Waiting {
                peer,
                what: format!(
                    "rank {peer} to finish {} (expected step {}, saw {})",
                    self.operator,
                    self.step,
                    control.finished()
                ),
            })?;
        }
        self.end_wait(&mut idle);
        Ok(())
    }
}
