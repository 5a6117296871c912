//! The engine: an endpoint under a lock, and a thread that makes progress.
//!
//! All calls of libfabric of one engine run under one lock. A put is posted by the worker that calls, and a poll reads
//! the completions itself: no queue and no switch of threads lies between a worker and the network, and the provider
//! needs no lock of its own (`FI_THREAD_DOMAIN`). Most providers move bytes only inside calls, even at the receiver. So
//! a thread of the engine also reads completions while no worker polls: a peer's put then arrives even while this rank
//! is outside of an operator. The thread naps between its turns, since spinning threads would take the cores of the
//! workers.

use std::collections::VecDeque;
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering::Relaxed};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError, TryLockError};
use std::thread::JoinHandle;
use std::time::{Duration, Instant};

use ep::{
    CallerError, EnvironmentError, Error, Limits, Operator, PeerError, PeerFault, Posted, Put, Rail, Rank,
    Result, Signal, Transport, Unconnected, Window,
};

use crate::Options;
use crate::blob::Blob;
use crate::endpoint::{Completion, Endpoint, Remote, is_shortage, place};
use crate::leftovers::{self, Marker};
use crate::library::Library;
use crate::{several, sys};

/// How long the thread naps after a turn that found nothing, and after many of them.
const NAP: Duration = Duration::from_micros(50);
const LONG_NAP: Duration = Duration::from_millis(1);
/// Turns without a completion before naps become long.
const SHORT_NAPS: u32 = 200;

/// How long a worker waits for a call of libfabric in another thread before it does something else.
const LONG_CALL: Duration = Duration::from_millis(1);
/// How long dropping an engine waits for its thread.
const THREAD_ENDS: Duration = Duration::from_secs(2);

/// The provider's name.
const SHM_PROVIDER: &str = "shm";

/// Endpoints of `shm` in this process. Those of one process write to each other's queues through plain pointers, even
/// to queues of endpoints that are closed (seen with 1.17). So an endpoint stays open until all of them can be closed.
static SHM: Mutex<ShmEndpoints> = Mutex::new(ShmEndpoints { engines: 0, dropped: Vec::new() });

struct ShmEndpoints {
    /// Engines that are not dropped.
    engines: usize,
    /// The endpoints of the engines that are dropped.
    dropped: Vec<Arc<Shared>>,
}

/// Opens an engine of libfabric with this rank's window.
///
/// # Safety
/// The memory that `window` describes must be mapped, with these addresses and lengths, until the window is dropped, and
/// must be valid for reads and writes from outside of the process.
///
/// # Errors
/// [`EnvironmentError`] that says what to install when the library cannot be loaded, or that lists the providers when
/// the one that was asked for is not offered; [`CallerError::Config`] for invalid options.
pub unsafe fn open(
    options: &Options,
    rail: Rail,
    window: Arc<dyn Window>,
    limits: Limits,
) -> Result<Box<dyn Unconnected>> {
    let library = Library::load(options.library.as_deref())?;
    let peers = rail.ranks().len() - 1;
    let marker = if options.provider == SHM_PROVIDER {
        leftovers::sweep();
        Marker::of_process()
    } else {
        None
    };
    let open_on = |nic: Option<&str>| {
        let (library, window) = (Arc::clone(&library), Arc::clone(&window));
        // SAFETY: guaranteed by the caller.
        let endpoint = unsafe { Endpoint::open(library, options, nic, window, peers, limits)? };
        let blob = endpoint.blob()?;
        let marker = marker.clone();
        if let Some(marker) = &marker {
            marker.add(&blob.address);
        }
        Ok(Box::new(Opened { rail: rail.clone(), endpoint, limits, blob, marker }) as Box<dyn Unconnected>)
    };
    match options.domains.as_slice() {
        [] => open_on(None),
        [nic] => open_on(Some(nic)),
        nics => {
            let engines = nics.iter().map(|nic| open_on(Some(nic))).collect::<Result<_>>()?;
            Ok(Box::new(several::Opened::new(rail, engines)))
        }
    }
}

/// An engine that does not know its peers yet.
struct Opened {
    rail: Rail,
    endpoint: Endpoint,
    limits: Limits,
    blob: Blob,
    /// See [`Engine::marker`].
    marker: Option<Arc<Marker>>,
}

impl Unconnected for Opened {
    fn blob(&self) -> Vec<u8> {
        self.blob.to_bytes()
    }

    fn connect(self: Box<Self>, blobs: &[Vec<u8>]) -> Result<Box<dyn Transport>> {
        let Self { rail, mut endpoint, limits, blob: own, marker } = *self;
        let ranks = rail.ranks().len();
        if blobs.len() != ranks {
            let (what, unit) = ("the blobs of a rail", "blobs");
            return Err(CallerError::Shape { what, expected: ranks, found: blobs.len(), unit }.into());
        }
        let mut peers = Vec::new();
        for (index, bytes) in blobs.iter().enumerate() {
            let unusable =
                |found: String| PeerError::broken(rail.own(), rail.ranks()[index], Operator::Join, 0, found);
            let remote = if index == rail.own_index() {
                None
            } else {
                let blob = Blob::from_bytes(bytes).ok_or_else(|| match several::count_in(bytes) {
                    Some(nics) => unusable(several::different_numbers(nics, 1)),
                    None => unusable("a malformed address of its window".into()),
                })?;
                if blob.provider != own.provider {
                    let (theirs, mine) = (&blob.provider, &own.provider);
                    return Err(unusable(format!("provider {theirs}, but this rank uses {mine}")).into());
                }
                let refused = || unusable(format!("an address that provider {} refuses", own.provider));
                let remote = endpoint.insert(&blob).ok_or_else(refused)?;
                Some(remote)
            };
            peers.push(Peer { remote, in_flight: 0, unread: 0, lost: None });
        }
        let puts = endpoint.puts();
        let name = endpoint.provider().to_string();
        let near_cpus = endpoint.near_cpus();
        let core = Core {
            rail: rail.clone(),
            limits,
            peers,
            free: (0..puts).rev().collect(),
            flying: vec![None; puts],
            arrived: VecDeque::new(),
            reports: VecDeque::new(),
            broken: None,
            endpoint,
        };
        let shared = Arc::new(Shared {
            core: Mutex::new(core),
            stop: AtomicBool::new(false),
            polls: AtomicU64::new(0),
        });
        let (of_thread, cpus) = (Arc::clone(&shared), near_cpus.clone());
        let is_shm = name == SHM_PROVIDER;
        let thread = std::thread::Builder::new()
            .name(format!("ep-rail-{}", rail.own()))
            .spawn(move || {
                ep::affinity::stay_near(&cpus);
                of_thread.keep_moving();
            })
            .map_err(|error| {
                let hint = "raise the limit of threads (ulimit -u)";
                EnvironmentError::new("starting the thread of an engine", error, hint)
            })?;
        if is_shm {
            lock(&SHM).engines += 1;
        }
        Ok(Box::new(Engine {
            name,
            near_cpus,
            is_shm,
            rail,
            shared: Some(shared),
            thread: Some(thread),
            reading: Mutex::new(VecDeque::new()),
            process: std::process::id(),
            marker,
        }))
    }
}

/// The state of a peer.
struct Peer {
    /// `None` for this rank itself.
    remote: Option<Remote>,
    /// Puts that are not complete.
    in_flight: usize,
    /// Signals that have arrived and were not passed on.
    unread: usize,
    /// Why puts to the peer fail.
    lost: Option<String>,
}

/// Everything under the lock.
struct Core {
    rail: Rail,
    limits: Limits,
    /// By index on the rail.
    peers: Vec<Peer>,
    /// Contexts that no put uses.
    free: Vec<usize>,
    /// By context: the peer of the put in flight.
    flying: Vec<Option<usize>>,
    arrived: VecDeque<(Rank, Signal)>,
    /// Errors that `poll` has not returned yet.
    reports: VecDeque<Error>,
    /// An error of the endpoint, after which it is not used any more.
    broken: Option<Error>,
    endpoint: Endpoint,
}

struct Shared {
    core: Mutex<Core>,
    stop: AtomicBool,
    /// Number of polls, which make progress so that the thread need not.
    polls: AtomicU64,
}

/// A connected engine of libfabric.
struct Engine {
    name: String,
    /// The CPUs near the NIC. The engine's thread stays on them.
    near_cpus: Vec<usize>,
    is_shm: bool,
    rail: Rail,
    /// `None` only while the engine is dropped.
    shared: Option<Arc<Shared>>,
    thread: Option<JoinHandle<()>>,
    /// Signals on their way to `on_signal`. The lock admits one reader at a time.
    reading: Mutex<VecDeque<(Rank, Signal)>>,
    /// The process that made the engine. A forked child has neither the thread nor the connections.
    process: u32,
    /// `None` unless the provider is `shm`.
    marker: Option<Arc<Marker>>,
}

fn lock<T>(mutex: &Mutex<T>) -> MutexGuard<'_, T> {
    mutex.lock().unwrap_or_else(PoisonError::into_inner)
}

impl Core {
    /// The error for a peer that is gone. The layer above fills in its operator.
    fn gone(&self, index: usize, why: &str) -> Error {
        let (own, peer) = (self.rail.own(), self.rail.ranks()[index]);
        let what = format!("a put to rank {peer} over {}: {why}", self.endpoint.provider());
        PeerError::joining(own, peer, PeerFault::Died, what, Duration::ZERO).into()
    }

    fn lose(&mut self, index: usize, why: String) {
        if self.peers[index].lost.is_none() {
            let error = self.gone(index, &why);
            self.reports.push_back(error);
            self.peers[index].lost = Some(why);
        }
    }

    /// Reads completions. Returns their number.
    fn progress(&mut self) -> Result<usize> {
        if let Some(error) = &self.broken {
            return Err(error.clone());
        }
        let mut completions = Vec::new();
        let read = self.endpoint.progress(&mut |completion| completions.push(completion));
        for completion in completions {
            match completion {
                Completion::Put(context) => {
                    self.landed(context);
                }
                Completion::Failed(context, why) => {
                    if let Some(index) = self.landed(context) {
                        self.lose(index, why);
                    }
                }
                Completion::Arrived(immediate) => self.arrive(immediate),
            }
        }
        read.inspect_err(|error| self.broken = Some(error.clone()))
    }

    /// Frees the context of a put. Returns the put's peer.
    fn landed(&mut self, context: usize) -> Option<usize> {
        // A provider that completes an operation twice must not free the context twice.
        let index = self.flying[context].take()?;
        self.free.push(context);
        self.peers[index].in_flight -= 1;
        Some(index)
    }

    fn arrive(&mut self, immediate: u32) {
        let Some((rank, signal)) = self.rail.open_immediate(immediate) else {
            let problem = format!("an immediate ({immediate:#x}) that names no peer of the rail");
            let what = format!("receiving over {}", self.endpoint.provider());
            self.reports.push_back(
                EnvironmentError::new(what, problem, "let no other program reach the port").into(),
            );
            return;
        };
        let index = self
            .rail
            .peer_index(rank)
            .expect("an immediate names a peer of this rail, or is refused when it is opened");
        if self.peers[index].unread >= self.limits.signals {
            // A correct peer waits for credits, so the queue has a bound.
            let found = format!("more than {} signals in flight", self.limits.signals);
            let error = PeerError::broken(self.rail.own(), rank, Operator::Join, 0, found);
            if self.peers[index].lost.is_none() {
                self.peers[index].lost = Some("it broke the protocol".into());
                self.reports.push_back(error.into());
            }
            return;
        }
        self.peers[index].unread += 1;
        self.arrived.push_back((rank, signal));
    }

    fn put(&mut self, put: &Put, index: usize) -> Result<Posted> {
        let peer = &self.peers[index];
        let remote = peer.remote.expect("only this rank's own entry has no remote");
        if put.len > 0 {
            let outside = |what: &'static str, offset: usize, expected: usize| {
                let (found, unit) = (offset.saturating_add(put.len), "bytes");
                CallerError::Shape { what, expected, found, unit }
            };
            place(self.endpoint.lens(), put.source, put.len)
                .map_err(|end| outside("source of a put", put.source, end))?;
            place(remote.lens(), put.destination, put.len)
                .map_err(|end| outside("destination of a put", put.destination, end))?;
            if put.len > self.limits.put_bytes {
                let (what, expected, unit) = ("a put", self.limits.put_bytes, "bytes");
                return Err(CallerError::Shape { what, expected, found: put.len, unit }.into());
            }
        }
        if let Some(why) = &peer.lost {
            return Err(self.gone(index, why));
        }
        if self.free.is_empty() {
            self.progress()?;
        }
        let Some(&context) = self.free.last() else { return Ok(Posted::Full) };
        // A put without bytes may name any offset; the provider gets one inside the windows.
        let (source, destination) = if put.len == 0 { (0, 0) } else { (put.source, put.destination) };
        let immediate = self.rail.immediate(put.signal);
        match self.endpoint.write(remote, source, destination, put.len, immediate, context) {
            Ok(true) => {
                self.free.pop();
                self.flying[context] = Some(index);
                self.peers[index].in_flight += 1;
                Ok(Posted::Yes)
            }
            Ok(false) => {
                // Many providers free their queue only inside of reads.
                self.progress()?;
                Ok(Posted::Full)
            }
            Err(answer) => {
                let why = self.endpoint.text(answer);
                // Errors of the call itself are not the fault of a peer.
                if [sys::EINVAL, sys::EACCES, sys::ENOSYS, sys::EMSGSIZE, sys::EOPNOTSUPP].contains(&-answer)
                    || is_shortage(-answer)
                {
                    return Err(self.endpoint.error("fi_writedata", answer));
                }
                self.lose(index, why.clone());
                Err(self.gone(index, &why))
            }
        }
    }
}

impl Shared {
    /// The loop of the engine's thread.
    fn keep_moving(&self) {
        let (mut polls, mut idle) = (0, 0u32);
        while !self.stop.load(Relaxed) {
            let seen = self.polls.load(Relaxed);
            let found = if seen != polls {
                // Workers poll, and will soon poll again.
                polls = seen;
                0
            } else {
                // The error stays in the core, and `poll` returns it.
                lock(&self.core).progress().unwrap_or(0)
            };
            idle = if found > 0 { 0 } else { idle.saturating_add(1) };
            match idle {
                0 => std::thread::yield_now(),
                1..SHORT_NAPS => std::thread::park_timeout(NAP),
                _ => std::thread::park_timeout(LONG_NAP),
            }
        }
    }

    /// The core, unless another thread has been inside a call of libfabric for a while, from which it may never return.
    fn core(&self) -> Option<MutexGuard<'_, Core>> {
        let start = Instant::now();
        loop {
            match self.core.try_lock() {
                Ok(core) => return Some(core),
                Err(TryLockError::Poisoned(core)) => return Some(core.into_inner()),
                Err(TryLockError::WouldBlock) if start.elapsed() >= LONG_CALL => return None,
                Err(TryLockError::WouldBlock) => std::thread::yield_now(),
            }
        }
    }
}

impl Engine {
    fn shared(&self) -> &Shared {
        self.shared.as_ref().expect("only `drop` takes it")
    }
}

impl Transport for Engine {
    fn name(&self) -> &str {
        &self.name
    }

    fn near_cpus(&self) -> &[usize] {
        &self.near_cpus
    }

    fn put(&self, put: Put) -> Result<Posted> {
        let index = self.rail.peer_index(put.peer)?;
        // While another thread's call of libfabric does not return, the queue counts as full: the caller checks the
        // health of its peers, and tries again.
        self.shared().core().map_or(Ok(Posted::Full), |mut core| core.put(&put, index))
    }

    fn poll(&self, on_signal: &mut dyn FnMut(Rank, Signal)) -> Result<()> {
        let mut reading = match self.reading.try_lock() {
            Ok(reading) => reading,
            Err(TryLockError::Poisoned(reading)) => reading.into_inner(),
            // Another worker of this rank is polling.
            Err(TryLockError::WouldBlock) => return Ok(()),
        };
        let shared = self.shared();
        shared.polls.fetch_add(1, Relaxed);
        let report = {
            let Some(mut core) = shared.core() else { return Ok(()) };
            let failed = core.progress().err();
            reading.append(&mut core.arrived);
            core.peers.iter_mut().for_each(|peer| peer.unread = 0);
            core.reports.pop_front().or(failed)
        };
        while let Some((rank, signal)) = reading.pop_front() {
            on_signal(rank, signal);
        }
        report.map_or(Ok(()), Err)
    }

    fn drain(&self, peer: Rank, deadline: Instant) -> Result<()> {
        let index = self.rail.peer_index(peer)?;
        let start = Instant::now();
        loop {
            let in_flight = match self.shared().core() {
                Some(core) => {
                    // The engine's thread makes progress. If this thread called libfabric, a call that does not return
                    // would hold it beyond the deadline.
                    if let Some(error) = &core.broken {
                        return Err(error.clone());
                    }
                    if let Some(why) = &core.peers[index].lost {
                        return Err(core.gone(index, why));
                    }
                    Some(core.peers[index].in_flight)
                }
                None => None,
            };
            if in_flight == Some(0) {
                return Ok(());
            }
            if Instant::now() >= deadline {
                let what = match in_flight {
                    Some(puts) => format!("{puts} puts to rank {peer} over {}", self.name),
                    None => format!("a call of libfabric ({}) to return", self.name),
                };
                let own = self.rail.own();
                return Err(PeerError::joining(own, peer, PeerFault::Stalled, what, start.elapsed()).into());
            }
            if let Some(thread) = &self.thread {
                thread.thread().unpark();
            }
            std::thread::sleep(NAP);
        }
    }
}

impl Drop for Engine {
    fn drop(&mut self) {
        if std::process::id() != self.process {
            // The parent's engine. Closing it here would end connections that the parent uses.
            std::mem::forget((self.shared.take(), self.thread.take()));
            return;
        }
        self.shared().stop.store(true, Relaxed);
        if let Some(thread) = self.thread.take() {
            thread.thread().unpark();
            let deadline = Instant::now() + THREAD_ENDS;
            while !thread.is_finished() && Instant::now() < deadline {
                std::thread::sleep(NAP);
            }
            if thread.is_finished() {
                let _ = thread.join();
            } else {
                // The provider `shm` guards queues by spin locks in memory that processes share. If a process is killed
                // while it holds such a lock, calls on that queue never return. The engine still counts as not dropped,
                // so the endpoints of this process that write to its queue stay open, too.
                ep::tell(format_args!(
                    "a call of libfabric ({}) has not returned for {} s, so the engine's objects and window are not \
                     freed before the process ends; a killed process may hold a lock of the provider",
                    self.name,
                    THREAD_ENDS.as_secs()
                ));
                std::mem::forget((self.shared.take(), self.marker.take()));
            }
        }
        if self.is_shm {
            if let Some(shared) = self.shared.take() {
                let mut shm = lock(&SHM);
                shm.engines -= 1;
                shm.dropped.push(shared);
                if shm.engines == 0 {
                    shm.dropped.clear();
                }
            }
            leftovers::sweep();
        }
    }
}
