//! What the proxy thread does in one round. Tests call it without a thread.

use std::mem::{self, offset_of};
use std::sync::Arc;
use std::thread;
use std::time::{Duration, Instant};

use ep::{
    CallerError, EnvironmentError, Error, Operator, PeerError, PeerFault, Rail, Rank, Result, Signal,
    Transport, Window,
};

use super::layout::RailLayout;
use super::losses::{Losses, OnLost};
use super::receive::{Broken, Receiving};
use super::send::{Link, Progress, SendError, Sending, Sent};
use super::window::RailWindow;
use crate::call;
use crate::params::RailPlan;

/// The pause between two attempts to post to a full queue before the proxy stops.
const FULL_PAUSE: Duration = Duration::from_micros(50);

/// Makes what the network has written visible to the kernels.
pub(crate) type Show = Box<dyn Fn() -> Result<()> + Send>;

/// What a proxy works with.
pub(crate) struct ProxyParts {
    /// This rank and its rail peers.
    pub(crate) rail: Rail,
    /// The engine, connected to all peers and opened with `window` and [`limits`](super::limits).
    pub(crate) transport: Box<dyn Transport>,
    /// This rank's rail window. Its words are zero until the first operator.
    pub(crate) window: Arc<dyn Window>,
    /// The layout of the windows of all ranks of the rail.
    pub(crate) layout: RailLayout,
    /// The proxy thread calls it after signals have arrived and before it tells the kernels, so that kernels see the bytes that
    /// the network has put into the window. `None` if they see them without it.
    pub(crate) show: Option<Show>,
    /// The proxy thread calls it once for each lost peer, after it has recorded the error. Kernels learn of the loss from the
    /// peer's link.
    pub(crate) on_lost: OnLost,
}

/// Moves the bytes between the rail windows of this rank and its peers.
pub(crate) struct Pump {
    rail: Rail,
    transport: Box<dyn Transport>,
    window: RailWindow,
    show: Option<Show>,
    peers: Vec<Peer>,
    sent: Arc<Sent>,
    losses: Losses,
    /// The signals of one poll; kept to reuse the memory.
    inbox: Vec<(Rank, Signal)>,
    /// The error after which no peer can be served.
    end: Option<Error>,
}

/// A rail peer.
struct Peer {
    rank: Rank,
    domain: usize,
    /// `None` once the peer is lost.
    sending: Option<Sending>,
    /// `None` once the peer has broken the protocol. A peer that the engine has lost may have signals that have arrived
    /// and that the engine has not passed on.
    receiving: Option<Receiving>,
    /// What the last round did towards the peer.
    progress: Progress,
}

impl Pump {
    /// # Errors
    /// [`CallerError`] when the layout is not for the domains of the rail, or the window does not fit the layout.
    pub(crate) fn new(parts: ProxyParts) -> Result<Self> {
        let ProxyParts { rail, transport, window, layout, show, on_lost } = parts;
        let (expected, found) = (rail.ranks().len(), layout.domains());
        if expected != found {
            let what = "the layout of a rail window";
            return Err(CallerError::Shape { what, expected, found, unit: "domains" }.into());
        }
        let window = RailWindow::new(window, layout)?;
        let peer = |(domain, &rank): (usize, &Rank)| Peer {
            rank,
            domain,
            sending: Some(Sending::new()),
            receiving: Some(Receiving::new(domain)),
            progress: Progress::Idle,
        };
        let own = rail.own_index();
        let peers = rail.ranks().iter().enumerate().filter(|&(domain, _)| domain != own).map(peer).collect();
        let losses = Losses::new(on_lost);
        let sent = Arc::default();
        Ok(Self { rail, transport, window, show, peers, sent, losses, inbox: Vec::new(), end: None })
    }

    /// The CPUs near the network card of the engine.
    pub(super) fn near_cpus(&self) -> &[usize] {
        self.transport.near_cpus()
    }

    pub(super) fn sent(&self) -> &Arc<Sent> {
        &self.sent
    }

    pub(super) fn losses(&self) -> &Losses {
        &self.losses
    }

    /// Handles the signals that have arrived, and posts what the kernels have completed. Returns whether it did anything;
    /// otherwise there was nothing to do, complete units wait for further units, or the engine's queue is full.
    ///
    /// The loss of a peer is recorded and reported; it is not an error of the step.
    ///
    /// # Errors
    /// An error after which no peer can be served. It is recorded and reported for every peer that was not lost before.
    pub(crate) fn step(&mut self) -> Result<bool> {
        match &self.end {
            Some(error) => Err(error.clone()),
            None => Ok(self.receive()? | self.send()?),
        }
    }

    /// Returns whether the engine had news.
    fn receive(&mut self) -> Result<bool> {
        let mut inbox = mem::take(&mut self.inbox);
        let polled = self.transport.poll(&mut |rank, signal| inbox.push((rank, signal)));
        let news = !inbox.is_empty();
        if let (true, Some(show)) = (news, &self.show)
            && let Err(error) = show()
        {
            return Err(self.lose_all(error));
        }
        // Signals first: what a peer sent before it was gone counts.
        for (rank, signal) in inbox.drain(..) {
            self.on_signal(rank, signal)?;
        }
        self.inbox = inbox;
        match polled {
            Ok(()) => Ok(news),
            Err(error) => {
                let at_fault = match &error {
                    Error::Peer(error) => self.peers.iter().position(|peer| peer.rank == error.peer),
                    _ => None,
                };
                let Some(index) = at_fault else { return Err(self.lose_all(error)) };
                self.lose(index, &error);
                Ok(true)
            }
        }
    }

    fn on_signal(&mut self, rank: Rank, signal: Signal) -> Result<()> {
        let Some(index) = self.peers.iter().position(|peer| peer.rank == rank) else {
            let what = format!("receiving along the rail of rank {}", self.rail.own());
            let problem = format!(
                "engine {} delivered a signal of rank {rank}, which is not a rail peer",
                self.transport.name()
            );
            let hint = "report this bug of the engine";
            return Err(self.lose_all(EnvironmentError::new(what, problem, hint).into()));
        };
        let peer = &mut self.peers[index];
        let Some(receiving) = &mut peer.receiving else { return Ok(()) };
        if let Err(Broken { epoch, found }) = receiving.on_signal(&self.window, signal) {
            peer.receiving = None;
            let operator = operator_of(&self.window, peer.domain, epoch);
            let error = PeerError::broken(self.rail.own(), rank, operator, epoch.into(), found);
            self.lose(index, &error.into());
        }
        Ok(())
    }

    /// Returns whether the engine accepted puts, the kernels have completed further units, or a peer was lost.
    fn send(&mut self) -> Result<bool> {
        let mut moved = false;
        for index in 0..self.peers.len() {
            let peer = &mut self.peers[index];
            let Some(sending) = &mut peer.sending else { continue };
            let link = Link {
                sent: &self.sent,
                window: &self.window,
                transport: self.transport.as_ref(),
                own_domain: self.rail.own_index(),
                domain: peer.domain,
                peer: peer.rank,
            };
            let stepped = sending.step(&link);
            match stepped {
                Ok(progress) => {
                    peer.progress = progress;
                    moved |= progress == Progress::Moved;
                }
                Err(SendError::Plan { epoch, problem }) => {
                    let (own, peer) = (self.rail.own(), peer.rank);
                    let what = format!("sending epoch {epoch} along the rail from rank {own} to rank {peer}");
                    let problem = format!("the kernels of rank {own} wrote an invalid plan: {problem}");
                    let hint = "report this bug of the kernels";
                    return Err(self.lose_all(EnvironmentError::new(what, problem, hint).into()));
                }
                Err(SendError::Engine(error @ Error::Environment(_))) => return Err(self.lose_all(error)),
                Err(SendError::Engine(error)) => {
                    moved = true;
                    self.lose(index, &error);
                }
            }
        }
        Ok(moved)
    }

    /// Stops sending to a peer, and reports it.
    fn lose(&mut self, index: usize, error: &Error) {
        let peer = &mut self.peers[index];
        peer.sending = None;
        self.losses.lose(peer.rank, error);
    }

    /// Stops serving all peers, reports them, and returns the error.
    pub(super) fn lose_all(&mut self, error: Error) -> Error {
        self.end.get_or_insert_with(|| error.clone());
        self.losses.lose_all(self.rail.peers(), &error);
        error
    }

    /// Posts what the kernels have completed, and waits until it has left this rank. The kernels must have ended: what
    /// they have not completed is not sent.
    ///
    /// # Errors
    /// An error of [`step`](Self::step); [`PeerError`] for the first peer to which not everything has left by the
    /// deadline. The puts to the other peers have left even then, if the network took them in time.
    pub(super) fn drain(&mut self, deadline: Instant) -> Result<()> {
        let began = Instant::now();
        let mut outcome = loop {
            // The engine needs polls to make room in its queue.
            self.receive()?;
            let moved = self.send()?;
            let Some(peer) = self.live().find(|peer| peer.progress != Progress::Idle) else { break Ok(()) };
            if Instant::now() >= deadline {
                let (fault, waited) = (PeerFault::Stalled, began.elapsed());
                let waited_for = "room in the queue of puts before leaving";
                break Err(PeerError::joining(self.rail.own(), peer.rank, fault, waited_for, waited).into());
            }
            if !moved {
                thread::sleep(FULL_PAUSE);
            }
        };
        for peer in self.live() {
            outcome = outcome.and(self.transport.drain(peer.rank, deadline));
        }
        outcome
    }

    /// The peers to which this rank sends.
    fn live(&self) -> impl Iterator<Item = &Peer> {
        self.peers.iter().filter(|peer| peer.sending.is_some())
    }
}

/// The operator of an epoch, from the plan that this rank's kernels have released to a domain; `Join` if they have not
/// released it yet. Both ranks call the same operator in an epoch.
fn operator_of(window: &RailWindow, domain: usize, epoch: u32) -> Operator {
    let parity = (epoch & 1) as usize;
    let call = window.out_plan(domain, parity) + offset_of!(RailPlan, call);
    if window.out_epoch(domain, parity) == epoch {
        call::operator(window.u64_at(call))
    } else {
        Operator::Join
    }
}
