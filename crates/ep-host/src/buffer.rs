//! [`HostBuffer`]: one rank's end of a communicator on the CPU. Programs make it with [`ep::Backend::threads`] or
//! [`ep::Backend::join`]; its operators are in `operators`.

use std::sync::Arc;
use std::sync::atomic::AtomicU64;
use std::time::{Duration, Instant};

use ep::call::Maker;
use ep::join::Rendezvous;
use ep::{CallerError, Config, EnvironmentError, Error, Operator, PeerFault, Rank, Result, Transport, World};
use ep_rail::{Streams, connect_rail, needs_blobs, rail_of};

use crate::comm::Comm;
use crate::control::{Control, Health};
use crate::engine;
use crate::join::{self, Connected, FIRST_ARENA_SEGMENT};
use crate::memory::Arena;
use crate::pulse::Pulse;
use crate::simd::Level;
use crate::wait::no_heartbeat;

/// How long a rank that leaves waits for its puts before it checks again whether the peer needs them.
const DRAIN_PART: Duration = Duration::from_millis(10);

/// One rank's end of a communicator on the CPU.
///
/// Ranks are threads of one process ([`threads`](ep::Backend::threads)), or processes of one or several machines
/// ([`join`](ep::Backend::join)).
/// NVLink domains are emulated: the ranks of one domain access each other's registered memory, and between domains only
/// the transport carries bytes.
///
/// After an operator has failed, every later operator and allocation returns the same error. Dropping a buffer that has
/// not failed tells the peers that the rank has left.
pub struct HostBuffer {
    pub(crate) comm: Arc<Comm>,
    pub(crate) arena: Arena,
    pub(crate) pool: Option<rayon::ThreadPool>,
    workers: usize,
    /// Identifies the handles and the memory of this buffer.
    maker: Maker,
    /// Number of operators called so far; equal on every rank.
    pub(crate) step: u64,
    /// The error of a failed operator; the buffer returns it from every later call.
    failed: Option<Error>,
}

impl std::fmt::Debug for HostBuffer {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("HostBuffer")
            .field("rank", &self.comm.rank)
            .field("world", self.comm.world.topology())
            .field("workers", &self.workers)
            .field("step", &self.step)
            .field("failed", &self.failed)
            .finish_non_exhaustive()
    }
}

impl HostBuffer {
    /// [`ep::Backend::threads`].
    pub(crate) fn make_threads(world: &World, config: &Config) -> Result<Vec<Self>> {
        join::check_config(world, config)?;
        let shared = Connected::of_threads(world, config)?;
        let ranks: Vec<Rank> = world.topology().all_ranks().collect();
        let opened = ranks
            .iter()
            .map(|&rank| engine::open(world, rank, config, &shared))
            .collect::<Result<Vec<_>>>()?;
        let blobs: Vec<Vec<u8>> = opened.iter().map(|engine| engine.blob()).collect();
        let transports = ranks
            .iter()
            .zip(opened)
            .map(|(&rank, opened)| connect_rail(world, rank, opened, &blobs))
            .collect::<Result<Vec<_>>>()?;
        ranks
            .iter()
            .zip(transports)
            .map(|(&rank, transport)| Self::assemble(rank, world.clone(), config, &shared, transport))
            .collect()
    }

    /// [`ep::Backend::join`].
    pub(crate) fn make_process(
        world: &World,
        rendezvous: &mut dyn Rendezvous,
        config: &Config,
    ) -> Result<Self> {
        join::check_config(world, config)?;
        Self::join_processes(world, rendezvous, config)
    }

    #[cfg(not(target_os = "linux"))]
    fn join_processes(_: &World, _: &mut dyn Rendezvous, _: &Config) -> Result<Self> {
        Err(crate::processes::unsupported())
    }

    #[cfg(target_os = "linux")]
    fn join_processes(world: &World, rendezvous: &mut dyn Rendezvous, config: &Config) -> Result<Self> {
        ep::join::join(world, rendezvous, config, |joining| {
            let rank = joining.rank();
            let connected = join::connect(world, joining, config)?;
            let opened = engine::open(world, rank, config, &connected)?;
            let blobs = match needs_blobs(world.topology().domains(), &config.host) {
                true => joining.all_gather(&opened.blob())?,
                false => vec![Vec::new(); world.ranks()],
            };
            let transport = connect_rail(world, rank, opened, &blobs)?;
            let buffer = Self::assemble(rank, world.clone(), config, &connected, transport)?;
            // Barrier: no rank may leave before all others have mapped its segments.
            joining.all_gather(&[])?;
            Ok(buffer)
        })
    }

    /// Assembles the buffer of `rank`.
    fn assemble(
        rank: Rank,
        world: World,
        config: &Config,
        connected: &Connected,
        transport: Box<dyn Transport>,
    ) -> Result<Self> {
        let Connected { directory, processes, machines, segments } = connected;
        let controls: Vec<Control> = segments.iter().map(|segments| segments.control.clone()).collect();
        let window = segments[rank.index()].window.clone().expect("a rank maps its own window");
        let rails = Streams::new(&rail_of(&world, rank)?, window, &config.host, transport)?;

        let workers = match config.host.workers {
            0 => (std::thread::available_parallelism().map_or(1, usize::from) / machines.ranks_here()).max(1),
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
        let pulse = Pulse::start(rank, &controls, processes, config.stall_bound())?;
        let comm = Comm {
            pulse,
            rank,
            config: config.clone(),
            level: Level::detect(),
            controls,
            directory: directory.clone(),
            rails,
            processes: processes.clone(),
            machines: machines.clone(),
            domain_bytes: AtomicU64::new(0),
            preprocess_bytes: AtomicU64::new(0),
            waited_ns: AtomicU64::new(0),
            world,
        };
        let maker = Maker::new(rank);
        Ok(Self {
            comm: Arc::new(comm),
            arena: Arena::new(maker, directory.clone(), FIRST_ARENA_SEGMENT),
            pool: pool.transpose()?,
            workers,
            maker,
            step: 0,
            failed: None,
        })
    }

    /// Waits until the puts to those rail peers that are still alive are complete, since these peers may need the puts
    /// to finish the last operator. Waits at most the stall bound.
    fn drain(&self) {
        let deadline = Instant::now() + self.comm.config.stall_bound();
        for domain in self.comm.rails.others() {
            let control = &self.comm.controls[self.comm.rails.peer(domain).index()];
            let needed = || control.health() == Health::Alive && Instant::now() < deadline;
            // Wait in short parts, because the peer may leave meanwhile.
            while needed() {
                match self.comm.rails.drain(domain, Instant::now() + DRAIN_PART) {
                    Err(Error::Peer(error)) if error.fault == PeerFault::Stalled => {}
                    // The puts are complete, or the peer is gone: this rank has finished, so it reports no error.
                    _ => break,
                }
            }
        }
    }

    /// Number of worker threads that run this rank's operators.
    pub fn workers(&self) -> usize {
        self.workers
    }

    /// Name of the [`ep::Transport`] that carries bytes between domains.
    pub fn transport(&self) -> &str {
        self.comm.rails.transport_name()
    }

    /// The identity of this buffer, which its handles and its memory carry.
    pub(crate) fn maker(&self) -> Maker {
        self.maker
    }

    pub(crate) fn comm(&self) -> &Comm {
        &self.comm
    }

    /// The worker threads; `None` when the calling thread is the only worker.
    pub(crate) fn pool(&self) -> Option<&rayon::ThreadPool> {
        self.pool.as_ref()
    }

    /// # Errors
    /// The error of an earlier operator, if one failed; a [`CallerError`](ep::CallerError) in a forked child, which shares the
    /// rank's memory and has none of its threads.
    pub(crate) fn check_usable(&self) -> Result<()> {
        if self.comm.pulse.is_forked() {
            let problem = "is a forked child of the process that made the buffer, whose memory it shares: make a buffer in \
                           the child, or start the child before the buffer is made";
            let value = std::process::id().to_string();
            return Err(CallerError::Config { key: "process", value, problem: problem.into() }.into());
        }
        self.failed.clone().map_or(Ok(()), Err)
    }

    /// Checks the other ranks during a wait outside of the operators: a collective of another library reduces
    /// gradients, and that library may not notice that a rank has stopped. `waited_for` and `waited` describe the wait.
    /// While a rank calls this method repeatedly, the errors of other ranks that name it as late say that it waits for
    /// gradients to be reduced.
    ///
    /// A rank whose collective has completed may leave before the collective of this rank completes. So an error with
    /// [`PeerFault::Left`] counts only if the wait does not end soon.
    ///
    /// # Errors
    /// - [`ep::PeerError`] that names a rank which died, failed, is unreachable, or has had no heartbeat for the stall
    ///   bound; if there is none, a rank that has left.
    /// - The error of an earlier operator, if one failed; a [`CallerError`](ep::CallerError) in a forked child.
    pub fn check_peers(&self, waited_for: &str, waited: Duration) -> Result<()> {
        self.check_usable()?;
        let comm = &self.comm;
        comm.control().wait_outside();
        let error = |ranks: [Rank; 2], fault: PeerFault, why: &str| {
            let call = (Operator::Reduce, self.step);
            Err(comm.peer_error(call, ranks, fault, format!("{waited_for}{why}"), waited))
        };
        if let Some((rank, fault)) = comm.processes.lost().next() {
            return error([rank; 2], fault, "");
        }
        let others = || comm.world.topology().all_ranks().filter(|&rank| rank != comm.rank);
        let health = |rank: Rank| comm.controls[rank.index()].health();
        for rank in others() {
            match comm.failure(rank, health(rank)) {
                // `rank` reports that `late` is late, but `late` waits as this rank does. So `rank` is at fault: it has
                // left out this wait.
                Some((late, PeerFault::Late)) if comm.controls[late.index()].waits_outside() => {
                    return error([rank; 2], PeerFault::Failed, "");
                }
                Some((at_fault, fault)) => return error([at_fault, rank], fault, ""),
                None => {}
            }
        }
        let has_left = |rank: Rank| health(rank) == Health::Left;
        let silence = |rank: Rank| comm.pulse.silence(rank);
        let mut running = others().filter(|&rank| !has_left(rank));
        if let Some(rank) = running.find(|&rank| silence(rank) >= comm.config.stall_bound()) {
            return error([rank; 2], PeerFault::Stalled, &format!("; {}", no_heartbeat(rank, silence(rank))));
        }
        // A rank may have left because another one has stopped, which is known for sure only after the stall bound.
        let is_quiet = |rank: Rank| !has_left(rank) && silence(rank) >= comm.pulse.quiet();
        match others().find(|&rank| has_left(rank)) {
            Some(rank) if !others().any(is_quiet) => error([rank; 2], PeerFault::Left, ""),
            _ => Ok(()),
        }
    }

    /// Like [`check_peers`](Self::check_peers), for a wait that has failed. An error counts as the error of an operator
    /// and is published, so that the other ranks name the same rank and not this one, which leaves because of the
    /// error.
    ///
    /// # Errors
    /// Those of [`check_peers`](Self::check_peers).
    pub fn fail_wait(&mut self, waited_for: &str, waited: Duration) -> Result<()> {
        match self.check_peers(waited_for, waited) {
            Err(error) if self.failed.is_none() => self.fail(Operator::Reduce, error),
            found => found,
        }
    }

    /// Stores the error of a collective operator, publishes it in the control block, and returns it.
    pub(crate) fn fail<T>(&mut self, operator: Operator, error: Error) -> Result<T> {
        let (at_fault, fault) = match &error {
            Error::Peer(peer) => (peer.peer, peer.fault),
            _ => (self.comm.rank, PeerFault::Failed),
        };
        self.comm.control().set_cause(&error.to_string());
        self.comm.set_health(Health::Failed { at_fault, fault, operator, step: self.step });
        self.failed = Some(error.clone());
        Err(error)
    }
}

impl Drop for HostBuffer {
    fn drop(&mut self) {
        if self.failed.is_none() && !self.comm.pulse.is_forked() {
            self.drain();
            self.comm.set_health(Health::Left);
        }
    }
}
