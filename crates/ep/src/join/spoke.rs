//! The rendezvous end of every rank except rank 0: its connection to rank 0's hub.

use std::net::IpAddr;
use std::time::{Duration, Instant};

use super::channel::{Channel, End, Incoming};
use super::handshake::{Claim, Outbound, Progress, Role};
use super::note::{Clock, Loss, SILENCE, kind, rank_of};
use super::reception::HANDSHAKE;
use super::store::Store;
use super::wire::{Socket, wait};
use super::{Member, Watch};
use crate::error::{EnvironmentError, Error, PeerFault, Result};
use crate::topology::Rank;

/// The grace period of a spoke: how much longer than its timeout a rank waits for rank 0 to report a lost rank. Longer
/// than the hub's grace period, so that the hub can decide first.
const HUB_GRACE: Duration = Duration::from_millis(500);
/// The first and the longest pause between attempts to connect.
const RETRY: Duration = Duration::from_millis(5);
const LONGEST_RETRY: Duration = Duration::from_millis(100);

/// A number of bytes that the buffers of every socket hold.
pub(super) const BUFFERED: usize = 16 << 10;

const ZERO: Rank = Rank(0);
const WHAT: &str = "its part of the rendezvous";
const WHERE: &str = "its connection at the rendezvous";

/// A rank's connection to rank 0.
#[derive(Debug)]
pub(super) struct Spoke {
    rank: Rank,
    ranks: usize,
    generation: u64,
    timeout: Duration,
    /// How long the machine of rank 0 may acknowledge nothing before rank 0 is unreachable.
    network_timeout: Duration,
    watch: Watch,
    channel: Option<Channel>,
    /// The rank that rank 0 waits for, according to its last message.
    waiting_for: Option<Rank>,
    /// When rank 0 last sent anything.
    heard: Instant,
    /// The loss that ended the job for this rank.
    over: Option<Loss>,
}

/// A message from rank 0.
enum FromHub {
    Blob(Vec<u8>),
    Met,
    /// A message that ends no wait, such as which rank is missing.
    Other,
}

/// Why this rank receives no more messages.
enum Stop {
    /// Rank 0 has reported a lost rank, or is lost itself.
    Lost(Loss),
    /// This rank's timeout is over, and rank 0 has not been told yet.
    GaveUp(Loss),
    Error(Error),
    /// Rank 0 closed the connection without a final message.
    Closed,
}

impl Spoke {
    /// Connects to rank 0, and waits until all ranks have joined.
    pub(super) fn open(store: &Store, member: Member) -> Result<Self> {
        let Member { rank, ranks, generation, timeout, network_timeout, interrupt, .. } = member;
        let mut spoke = Self {
            rank,
            ranks,
            generation,
            timeout,
            network_timeout,
            watch: Watch { rank, interrupt },
            channel: None,
            waiting_for: None,
            heard: Instant::now(),
            over: None,
        };
        let clock = Clock::new(spoke.timeout);
        let mut closed = 0;
        loop {
            spoke.channel = Some(spoke.connect(store, &clock, &mut closed)?);
            match spoke.meet(&clock) {
                Ok(()) => return Ok(spoke),
                Err(Stop::Lost(loss)) => return Err(spoke.lost(loss, WHERE, &clock)),
                Err(Stop::GaveUp(loss)) => return Err(spoke.give_up(loss, WHERE, &clock)),
                Err(Stop::Error(error)) => return Err(spoke.abandon(error)),
                // Rank 0 closed the connection before it admitted this rank, for example to make room. Try again.
                Err(Stop::Closed) if spoke.waiting_for.is_none() => closed += 1,
                Err(Stop::Closed) => {
                    let loss = Loss::new(ZERO, PeerFault::Died, "its connection closed");
                    return Err(spoke.lost(loss, "all ranks to join", &clock));
                }
            }
        }
    }

    /// Connects to rank 0 and completes the handshake, with retries. Counts failed handshakes in `closed`.
    fn connect(&self, store: &Store, clock: &Clock, closed: &mut u32) -> Result<Channel> {
        let mut pause = RETRY;
        loop {
            self.watch.check()?;
            if clock.is_over() {
                let cause = match closed {
                    0 => "was it started, with this rendezvous? see its output".into(),
                    _ => format!("{closed} connections were closed without an answer: {}", store.hint()),
                };
                let loss = Loss::new(ZERO, PeerFault::Absent, cause);
                let what = format!("a listener at the rendezvous {}", store.name());
                return Err(loss.error(self.rank, None, &what, clock.waited()));
            }
            if let Some(socket) = store.connect(clock.deadline) {
                socket.watch(self.network_timeout);
                let (ranks, generation) = (self.ranks as u32, self.generation);
                let claim = Claim { from: self.rank, to: ZERO, ranks, generation };
                if let Some(outbound) = Outbound::new(socket, &store.key, Role::Rendezvous, claim)? {
                    match self.prove(outbound, store, clock)? {
                        Some(channel) => return Ok(channel),
                        None => *closed += 1,
                    }
                }
            }
            std::thread::sleep(pause.min(clock.deadline.saturating_duration_since(Instant::now())));
            pause = (2 * pause).min(LONGEST_RETRY);
        }
    }

    fn prove(&self, mut outbound: Outbound, store: &Store, clock: &Clock) -> Result<Option<Channel>> {
        loop {
            match outbound.advance(&store.key) {
                Progress::Done((), channel) => return Ok(Some(channel)),
                Progress::Unauthenticated => return Ok(None),
                Progress::Waiting => {}
            }
            self.watch.check()?;
            let until = clock.deadline.min(outbound.since + HANDSHAKE);
            if Instant::now() >= until {
                return Ok(None);
            }
            let mut fds: Vec<_> = outbound.wire().map(|wire| wire.interest()).into_iter().collect();
            wait(&mut fds, self.watch.until(until));
        }
    }

    fn meet(&mut self, clock: &Clock) -> Result<(), Stop> {
        loop {
            match self.next(clock)? {
                Some(FromHub::Met) => return Ok(()),
                Some(_) => {}
                None => {
                    return Err(Stop::GaveUp(self.missing(PeerFault::Absent)));
                }
            }
        }
    }

    /// The next message from rank 0; `None` after the deadline and the grace period.
    fn next(&mut self, clock: &Clock) -> Result<Option<FromHub>, Stop> {
        loop {
            let Some(channel) = &mut self.channel else { return Err(Stop::Closed) };
            channel.wire_mut().flush();
            match channel.receive() {
                Some(incoming) => return self.handle(incoming).map(Some),
                None => {
                    self.watch.check().map_err(Stop::Error)?;
                    // Rank 0 may be about to report which rank is lost.
                    let last = clock.deadline + HUB_GRACE;
                    if Instant::now() >= last {
                        return Ok(None);
                    }
                    wait(&mut [channel.wire().interest()], self.watch.until(last));
                }
            }
        }
    }

    /// The loss of the rank for which this rank has waited in vain: the rank that rank 0 waits for, or rank 0 itself if it has
    /// named no other rank or is stopped. A stopped rank 0 has stalled; otherwise the fault is `fault`.
    fn missing(&self, fault: PeerFault) -> Loss {
        let silence = self.heard.elapsed();
        match self.waiting_for.filter(|&rank| rank != self.rank) {
            None => Loss::new(ZERO, fault, ""),
            Some(_) if silence >= SILENCE => {
                let said = format!("it has sent nothing for {:.1} s", silence.as_secs_f64());
                Loss::new(ZERO, PeerFault::Stalled, said)
            }
            Some(rank) => Loss::new(rank, fault, ""),
        }
    }

    fn handle(&mut self, incoming: Incoming) -> Result<FromHub, Stop> {
        self.heard = Instant::now();
        let message = match incoming {
            Incoming::Message(message) => message,
            Incoming::End(end) => {
                self.channel = None;
                return Err(match end {
                    End::Closed => Stop::Closed,
                    End::Malformed => {
                        Stop::Lost(Loss::new(ZERO, PeerFault::Failed, "it sent a malformed message"))
                    }
                    End::Unreachable => Stop::Lost(Loss::new(ZERO, PeerFault::Unreachable, "")),
                });
            }
        };
        let (kind, body) = (message[0], &message[1..]);
        let (rank, ranks) = (self.rank, self.ranks);
        let refused = |problem: String, hint: &str| {
            let what = format!("joining as rank {rank} of {ranks}");
            Stop::Error(EnvironmentError::new(what, problem, hint).into())
        };
        match kind {
            kind::BLOB => Ok(FromHub::Blob(body.to_vec())),
            kind::MET => Ok(FromHub::Met),
            kind::WAITING => {
                self.waiting_for = rank_of(body);
                Ok(FromHub::Other)
            }
            kind::LOST => Err(Stop::Lost(match Loss::from_bytes(body) {
                Some(loss) => loss,
                None => Loss::new(ZERO, PeerFault::Failed, "it sent a malformed loss message"),
            })),
            kind::LEFT => Err(Stop::Lost(Loss::new(ZERO, PeerFault::Left, ""))),
            kind::OTHER_WORLD => {
                let ranks = rank_of(body).map_or(0, |ranks| ranks.0);
                Err(refused(
                    format!("the job at this store has {ranks} ranks"),
                    "start every rank with the same WORLD_SIZE and its own RANK",
                ))
            }
            kind::OTHER_GENERATION => {
                let theirs = body.try_into().map_or(0, u64::from_le_bytes);
                Err(refused(
                    format!(
                        "the job at this store is generation {theirs}, but this process is of generation {}",
                        self.generation
                    ),
                    "this process or rank 0 is left over from another start of the job; otherwise set HYBRID_EP_GENERATION to the same number on all ranks",
                ))
            }
            kind::TAKEN => Err(refused(
                format!("rank {} has already joined this job", self.rank),
                "start every rank with its own RANK, and every job with its own MASTER_PORT or HYBRID_EP_STORE",
            )),
            _ => Err(Stop::Lost(Loss::new(
                ZERO,
                PeerFault::Failed,
                "it sent an unexpected message; do all ranks run the same version?",
            ))),
        }
    }

    /// This rank's part of an exchange.
    pub(super) fn exchange(&mut self, blob: &[u8]) -> Result<Vec<Vec<u8>>> {
        let clock = Clock::new(self.timeout);
        if let Some(loss) = self.over.clone() {
            return Err(self.error(&loss, WHAT, &clock));
        }
        self.waiting_for = None;
        if let Some(channel) = &mut self.channel {
            // Rank 0 may not read before its own exchange. A socket that stays full for the network timeout ends, even
            // if the other machine still acknowledges. The exchange must time out before the socket ends: otherwise a late
            // rank 0 would be reported as unreachable.
            if blob.len() > BUFFERED {
                channel.wire().socket().watch(self.timeout.saturating_mul(2));
            }
            channel.send(kind::BLOB, blob);
        }
        let mut all = Vec::with_capacity(self.ranks);
        while all.len() < self.ranks {
            match self.next(&clock) {
                Ok(Some(FromHub::Blob(blob))) => all.push(blob),
                Ok(Some(_)) => {}
                Ok(None) => {
                    let loss = self.missing(PeerFault::Late);
                    return Err(self.give_up(loss, WHAT, &clock));
                }
                Err(Stop::Lost(loss)) => return Err(self.lost(loss, WHAT, &clock)),
                Err(Stop::GaveUp(loss)) => return Err(self.give_up(loss, WHAT, &clock)),
                Err(Stop::Error(error)) => return Err(self.abandon(error)),
                Err(Stop::Closed) => {
                    let loss = Loss::new(ZERO, PeerFault::Died, "its connection closed");
                    return Err(self.lost(loss, WHAT, &clock));
                }
            }
        }
        if let Some(channel) = self.channel.as_ref().filter(|_| blob.len() > BUFFERED) {
            channel.wire().socket().watch(self.network_timeout);
        }
        Ok(all)
    }

    /// The error about a rank that was lost since the last exchange, if rank 0 has reported one or is lost itself. If rank 0
    /// has left the rendezvous, it is not lost: it has joined, and may need no further exchange.
    pub(super) fn learn(&mut self) -> Option<Error> {
        let clock = Clock::new(Duration::ZERO);
        loop {
            let channel = self.channel.as_mut()?;
            channel.wire_mut().flush();
            let incoming = channel.receive_unless(kind::LEFT)?;
            let loss = match self.handle(incoming) {
                Ok(_) => continue,
                Err(Stop::Lost(loss) | Stop::GaveUp(loss)) => loss,
                Err(Stop::Error(error)) => return Some(error),
                Err(Stop::Closed) => Loss::new(ZERO, PeerFault::Died, "its connection closed"),
            };
            return Some(self.lost(loss, WHAT, &clock));
        }
    }

    /// The address of this machine on the connection to rank 0; `None` on a local socket.
    pub(super) fn network_address(&self) -> Option<IpAddr> {
        match self.channel.as_ref()?.wire().socket() {
            Socket::Tcp(stream) => stream.local_addr().ok().map(|at| at.ip()),
            #[cfg(target_os = "linux")]
            Socket::Unix(_) => None,
        }
    }

    fn error(&self, loss: &Loss, what: &str, clock: &Clock) -> Error {
        if loss.peer == self.rank {
            let cause = format!("it reported that rank {} {}", self.rank, loss.fault);
            let loss = Loss::new(ZERO, PeerFault::Failed, cause);
            return loss.error(self.rank, None, what, clock.waited());
        }
        loss.error(self.rank, Some(ZERO), what, clock.waited())
    }

    /// Ends the rendezvous because rank 0 has reported a lost rank, or is lost itself.
    fn lost(&mut self, loss: Loss, what: &str, clock: &Clock) -> Error {
        let error = self.error(&loss, what, clock);
        self.over = Some(loss);
        self.channel = None;
        error
    }

    /// Ends the rendezvous because this rank's timeout is over, and tells rank 0.
    fn give_up(&mut self, loss: Loss, what: &str, clock: &Clock) -> Error {
        let error = loss.error(self.rank, None, what, clock.waited());
        self.send_and_finish(kind::LOST, &loss.to_bytes());
        self.over = Some(loss);
        error
    }

    /// Leaves because of `error`. Returns the error to report: `error`, or one about a rank that was lost earlier,
    /// according to rank 0.
    pub(super) fn abandon(&mut self, error: Error) -> Error {
        if self.over.is_some() {
            return error;
        }
        let own = Loss::of(&error, self.rank);
        if let Some(channel) = &mut self.channel {
            channel.send(kind::LOST, &own.to_bytes());
        }
        let clock = Clock::new(HUB_GRACE);
        self.over = Some(own);
        let Error::Peer(peer) = &error else {
            if let Some(channel) = self.channel.take() {
                channel.finish();
            }
            return error;
        };
        // Rank 0 learns of every loss, and answers with the first one.
        loop {
            let Some(channel) = &mut self.channel else { return error };
            channel.wire_mut().flush();
            match channel.receive() {
                Some(Incoming::Message(message)) if message[0] == kind::LOST => {
                    let told = Loss::from_bytes(&message[1..]);
                    // Rank 0's message says why rank 0 failed, while this rank has only seen the connection close.
                    let is_better = |loss: &Loss| loss.is_better_than(peer) || peer.fault == PeerFault::Died;
                    let better = told.filter(|loss| loss.peer != self.rank && is_better(loss));
                    return match better {
                        Some(loss) => self.error(&loss, &peer.waited_for, &clock),
                        None => error,
                    };
                }
                Some(Incoming::Message(_)) => {}
                Some(Incoming::End(_)) => return error,
                None if clock.is_over() => return error,
                None => wait(&mut [channel.wire().interest()], clock.deadline),
            }
        }
    }

    fn send_and_finish(&mut self, kind: u8, body: &[u8]) {
        if let Some(mut channel) = self.channel.take() {
            channel.send(kind, body);
            channel.finish();
        }
    }
}

impl Drop for Spoke {
    fn drop(&mut self) {
        if self.over.is_none() {
            self.send_and_finish(kind::LEFT, &[]);
        }
    }
}
