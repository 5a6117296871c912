//! Messages between this rank and its peers: headers, bodies, failures, and the threads that wait for them.
//!
//! For each peer a rank has four threads, which mostly sleep:
//!
//! | thread | waits for |
//! |---|---|
//! | `headers` | the next header, always. It posts receives for bodies: for announced ones, and ahead for regular ones |
//! | `weights`, `gradients` | the first requested body |
//! | `sent` | the first message under way, so that errors are noticed and memory is freed |
//!
//! A panic of a thread is an error of this rank: calls would otherwise wait until the timeout for what the thread did, and
//! blame a peer.

mod calls;
mod check;
mod ending;
mod errors;
mod outbox;
mod receive;
mod wait;

use std::sync::{Arc, Condvar, Mutex, MutexGuard, PoisonError};
use std::thread::JoinHandle;
use std::time::Duration;

use ep::{Error, Interrupt, Operator, Rank, Result};

use crate::carrier::Carrier;
use crate::header::{Header, Kind};
use crate::inbox::{Call, GRADIENTS, Inbox, Peer, Traffic, WEIGHTS, Window, noun};
use crate::threads::{GRACE, join_within_grace, spawn};

/// What a [`Post`] needs to know.
#[derive(Debug)]
pub(crate) struct Setup {
    pub(crate) rank: Rank,
    /// The other ranks of the expert domain, ascending.
    pub(crate) peers: Vec<Rank>,
    /// A number that the ranks of a job agree on.
    pub(crate) run: u64,
    /// The step of the first messages.
    pub(crate) first_step: u64,
    /// Indexed by kind of body and layer: maximum number of bytes of a body.
    pub(crate) longest: [Vec<u64>; 2],
    /// Indexed by kind of body.
    pub(crate) windows: [Window; 2],
    /// Maximum number of parts of messages (headers and bodies) that are under way to one peer.
    pub(crate) most_sent: usize,
    pub(crate) timeout: Duration,
    /// Whether a rank asks a late peer what it waits for, before it calls that peer the rank at fault.
    pub(crate) asks: bool,
    pub(crate) interrupt: Interrupt,
}

/// Serves a request for complete weights: (peer's index, layer).
pub(crate) type Resend = Arc<dyn Fn(&Post, usize, usize) -> Result<()> + Send + Sync>;

pub(crate) struct Post {
    setup: Setup,
    carrier: Box<dyn Carrier>,
    state: Mutex<State>,
    changed: Condvar,
    /// One for each peer.
    orders: Vec<Orders>,
    /// The process that started the threads.
    process: u32,
}

/// Locks that keep transfers in order. The carrier is called under them and never under `state`: a carrier may run code of
/// the program, for example a handler of a signal, which may call this library.
#[derive(Default)]
struct Orders {
    /// Bodies are sent in the order of their headers.
    sends: Mutex<()>,
    /// Indexed by kind of body: receives are posted in the order of the headers.
    receives: [Mutex<()>; 2],
}

struct State {
    /// The first error. Every later call returns it.
    error: Option<Error>,
    /// Whether `close` was called.
    is_leaving: bool,
    /// Whether the carrier is closed, or about to be: its errors mean nothing then.
    is_closing: bool,
    /// The operator that this rank is in, or was in last.
    operator: (Operator, u64),
    peers: Vec<Peer>,
    /// For each wait in progress: the first of the peers that can end it.
    waits: Vec<usize>,
    /// Whether a peer has asked what this rank waits for. The waits then end early.
    is_asked: bool,
    traffic: Traffic,
}

impl State {
    fn check_error(&self) -> Result<()> {
        self.error.clone().map_or(Ok(()), Err)
    }
}

impl Post {
    /// Starts the threads. They end after [`close`](Self::close).
    ///
    /// # Errors
    /// [`EnvironmentError`](ep::EnvironmentError) if a thread cannot start. No thread is left then, and the carrier is closed.
    pub(crate) fn start(
        setup: Setup,
        carrier: Box<dyn Carrier>,
        resend: &Resend,
    ) -> Result<(Arc<Self>, Vec<JoinHandle<()>>)> {
        let inbox = |lane: usize| Inbox::new(setup.longest[lane].len(), setup.first_step);
        let peer = |_| Peer { lanes: [inbox(WEIGHTS), inbox(GRADIENTS)], ..Peer::default() };
        let state = State {
            error: None,
            is_leaving: false,
            is_closing: false,
            operator: (Operator::Gather, 0),
            peers: (0..setup.peers.len()).map(peer).collect(),
            waits: Vec::new(),
            is_asked: false,
            traffic: Traffic::default(),
        };
        let orders = setup.peers.iter().map(|_| Orders::default()).collect();
        let (state, changed, process) = (Mutex::new(state), Condvar::new(), std::process::id());
        let post = Arc::new(Self { setup, carrier, state, changed, orders, process });
        let mut threads = Vec::new();
        if let Err(error) = post.start_threads(resend, &mut threads) {
            let error = post.fail(error);
            post.close(GRACE);
            join_within_grace(threads.into_iter());
            return Err(error);
        }
        Ok((post, threads))
    }

    /// Starts the threads of all peers, and adds them to `threads` up to the first that cannot start.
    fn start_threads(self: &Arc<Self>, resend: &Resend, threads: &mut Vec<JoinHandle<()>>) -> Result<()> {
        for peer in 0..self.setup.peers.len() {
            let name = |what: &str| format!("ep-{what}-{}", self.peer(peer));
            let (own, resend) = (self.clone(), resend.clone());
            threads.push(self.spawn(name("headers"), move || own.listen(peer, &resend))?);
            for lane in [WEIGHTS, GRADIENTS] {
                let own = self.clone();
                threads.push(self.spawn(name(noun(lane)), move || own.collect(peer, lane))?);
            }
            let own = self.clone();
            threads.push(self.spawn(name("sent"), move || own.reap(peer))?);
        }
        Ok(())
    }

    /// Starts a thread whose panic is an error of this rank.
    pub(crate) fn spawn(
        self: &Arc<Self>,
        name: String,
        work: impl FnOnce() + Send + 'static,
    ) -> Result<JoinHandle<()>> {
        let own = self.clone();
        spawn(name, work, move |error| drop(own.fail(error)))
    }

    /// Whether this is the process that started the threads. A forked child has none of them, and must not use the
    /// connections that it shares with its parent.
    pub(crate) fn is_of_this_process(&self) -> bool {
        self.process == std::process::id()
    }

    fn lock(&self) -> MutexGuard<'_, State> {
        hold(&self.state)
    }

    fn peer(&self, peer: usize) -> Rank {
        self.setup.peers[peer]
    }

    /// A message of this rank without a body.
    fn bare(&self, kind: Kind) -> Header {
        Header::bare(kind, self.setup.rank, self.setup.run)
    }

    pub(crate) fn check_error(&self) -> Result<()> {
        self.lock().check_error()
    }

    pub(crate) fn traffic(&self) -> Traffic {
        self.lock().traffic
    }

    /// Records that a call begins.
    ///
    /// # Errors
    /// The error of an earlier call.
    pub(crate) fn enter(&self, call: Call) -> Result<()> {
        let mut state = self.lock();
        state.operator = (call.operator, call.step);
        state.check_error()
    }

    /// The longest wait for a peer.
    pub(crate) fn timeout(&self) -> Duration {
        self.setup.timeout
    }
}

fn hold<T>(lock: &Mutex<T>) -> MutexGuard<'_, T> {
    lock.lock().unwrap_or_else(PoisonError::into_inner)
}
