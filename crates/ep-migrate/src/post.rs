//! Messages between this rank and its peers: headers, bodies, failures, and the threads that wait for them.
//!
//! For each peer a rank has four threads, which mostly sleep:
//!
//! | thread | waits for |
//! |---|---|
//! | `headers` | the next header, always. It posts receives for bodies: those that headers announce, and regular ones ahead |
//! | `weights`, `gradients` | the body that was asked for first |
//! | `sent` | the message that was sent first, so that errors are noticed and memory is freed |
//!
//! A panic of a thread is an error of this rank: calls would otherwise wait until the timeout for what the thread did, and
//! blame a peer.

use std::collections::VecDeque;
use std::sync::{Arc, Condvar, Mutex, MutexGuard, PoisonError};
use std::thread::JoinHandle;
use std::time::{Duration, Instant};

use ep::{CallerError, EnvironmentError, Error, Interrupt, Operator, PeerError, PeerFault, Rank, Result};

use crate::carrier::{Carrier, CarrierError, Lane, Receiving};
use crate::header::{HEADER_BYTES, Header, Kind, Wait};
use crate::inbox::{Call, Due, GRADIENTS, Inbox, Message, Peer, Traffic, WEIGHTS, Window, lane_of, noun};
use crate::question::{Patience, Question};
use crate::threads::{join_within_grace, spawn};

/// How long a rank that closes waits for its peers to read why.
pub(crate) const GRACE: Duration = Duration::from_secs(1);
/// Receives of headers of one peer that are posted at a time. A carrier may send a message only after its receive is posted,
/// so with one receive every header would cost a round trip.
const HEADERS_AHEAD: usize = 16;
/// What to do about a rank that is late or stopped.
const REMEDY: &str =
    "look whether the rank's process is stopped or skipped a step, and raise the timeout if it is only slow";

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
    /// By kind of body, by layer: the most bytes of a body.
    pub(crate) longest: [Vec<u64>; 2],
    /// By kind of body.
    pub(crate) windows: [Window; 2],
    /// How many parts of messages, headers and bodies, to one peer may be under way.
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
    /// By peer.
    orders: Vec<Orders>,
    /// The process that started this.
    process: u32,
}

/// Locks that keep transfers in order. The carrier is called under them and never under `state`: a carrier may run code of
/// the program, for example a handler of a signal, which may call this library.
#[derive(Default)]
struct Orders {
    /// Bodies are sent in the order of their headers.
    sends: Mutex<()>,
    /// By kind of body: receives are posted in the order of the headers.
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
    /// By wait that goes on: the first peer that can end it.
    waits: Vec<usize>,
    /// Whether a peer has asked what this rank waits for. The waits then end early.
    is_asked: bool,
    traffic: Traffic,
}

impl Post {
    /// Starts the threads. They end after [`close`](Self::close).
    ///
    /// # Errors
    /// [`EnvironmentError`] if a thread cannot start. No thread is left then, and the carrier is closed.
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

    /// Whether this is the process that started. A forked child has none of the threads, and must not speak for the rank
    /// over the connections that it shares with its parent.
    pub(crate) fn is_of_this_process(&self) -> bool {
        self.process == std::process::id()
    }

    fn lock(&self) -> MutexGuard<'_, State> {
        hold(&self.state)
    }

    fn peer(&self, peer: usize) -> Rank {
        self.setup.peers[peer]
    }

    pub(crate) fn check_error(&self) -> Result<()> {
        self.lock().error.clone().map_or(Ok(()), Err)
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
        state.error.clone().map_or(Ok(()), Err)
    }

    // ---- sending

    /// Sends a message. Waits while too many are under way to this peer.
    pub(crate) fn send(
        &self,
        peer: usize,
        call: Call,
        kind: Kind,
        streams: u16,
        body: Arc<Vec<u8>>,
    ) -> Result<()> {
        let lane = if kind == Kind::Gradients { GRADIENTS } else { WEIGHTS };
        let regular = self.setup.windows[lane].regular;
        let header = Header {
            kind,
            streams,
            sender: self.setup.rank,
            layer: call.layer as u32,
            step: call.step,
            bytes: body.len() as u64,
            run: self.setup.run,
            regular,
        };
        let what = || format!("a message to be taken, one of {} under way", self.setup.most_sent);
        let room = |state: &mut State| {
            let peer = &state.peers[peer];
            (peer.sent.len() + peer.awaited < self.setup.most_sent).then_some(())
        };
        self.wait(call, what, &[peer], room)?;
        let bytes = (body.len() + HEADER_BYTES) as u64;
        let header = Arc::new(header.to_bytes());
        let body_lane = lane_of(lane, body.len() as u64 <= regular);
        self.post(peer, [(Lane::Headers, header), (body_lane, body)])?;
        *self.lock().traffic.sent(lane) += bytes;
        Ok(())
    }

    /// Asks a peer for complete weights of a layer.
    pub(crate) fn request(&self, peer: usize, call: Call) -> Result<()> {
        let header = Header::bare(Kind::Request, self.setup.rank, self.setup.run);
        let header = Header { layer: call.layer as u32, step: call.step, ..header };
        self.lock().peers[peer].lanes[WEIGHTS].recovers[call.layer] = true;
        self.post(peer, [(Lane::Headers, Arc::new(header.to_bytes()))])
    }

    /// Hands the parts of a message to the carrier.
    fn post(&self, peer: usize, parts: impl IntoIterator<Item = (Lane, Arc<Vec<u8>>)>) -> Result<()> {
        let order = hold(&self.orders[peer].sends);
        for (lane, part) in parts {
            match self.carrier.send(self.peer(peer), lane, part) {
                Ok(transfer) => self.lock().peers[peer].sent.push_back(transfer),
                Err(error) => {
                    drop(order);
                    return Err(self.fail(self.lost(peer, &error, "a message to be sent")));
                }
            }
        }
        self.changed.notify_all();
        Ok(())
    }

    // ---- waiting

    /// Waits until `ready` returns a value, at most for the timeout. `peers` are those that can make it ready.
    fn wait<R>(
        &self,
        call: Call,
        waited_for: impl Fn() -> String,
        peers: &[usize],
        ready: impl FnMut(&mut State) -> Option<R>,
    ) -> Result<R> {
        self.lock().waits.push(peers[0]);
        let ended = self.wait_until(call, waited_for, peers, ready);
        let mut state = self.lock();
        if let Some(at) = state.waits.iter().position(|&peer| peer == peers[0]) {
            state.waits.swap_remove(at);
        }
        if ended.is_ok() {
            // What was asked was about a wait that is over.
            state.peers[peers[0]].question = Question::default();
            state.is_asked = false;
        }
        ended
    }

    fn wait_until<R>(
        &self,
        call: Call,
        waited_for: impl Fn() -> String,
        peers: &[usize],
        mut ready: impl FnMut(&mut State) -> Option<R>,
    ) -> Result<R> {
        let started = Instant::now();
        let mut state = self.lock();
        loop {
            if let Some(error) = &state.error {
                return Err(error.clone());
            }
            if let Some(found) = ready(&mut state) {
                return Ok(found);
            }
            let waited = started.elapsed();
            // A peer that has left sends nothing more, so there is no reason to wait for the timeout.
            let gone = peers.iter().find_map(|&peer| Some((peer, state.peers[peer].is_exhausted()?)));
            let left = self.setup.timeout.saturating_sub(waited);
            let is_late = left.is_zero() || state.is_asked;
            let patience = match is_late {
                false => Patience::For(left),
                true if !self.setup.asks => Patience::Over(PeerFault::Late),
                true => state.peers[peers[0]].question.patience(),
            };
            let late = match patience {
                Patience::Over(fault) => Some((peers[0], fault)),
                Patience::For(_) | Patience::Ask => None,
            };
            if let Some((peer, fault)) = gone.or(late) {
                drop(state);
                return Err(self.fail(self.fault(peer, fault, waited_for(), waited)));
            }
            let mut slice = match patience {
                Patience::For(time) => time,
                Patience::Ask | Patience::Over(_) => {
                    state.peers[peers[0]].question = Question::ask();
                    drop(state);
                    let ask = Header::bare(Kind::Ask, self.setup.rank, self.setup.run);
                    self.post(peers[0], [(Lane::Headers, Arc::new(ask.to_bytes()))])?;
                    state = self.lock();
                    continue;
                }
            };
            let asks = self.setup.interrupt.is_set();
            if asks {
                slice = slice.min(Interrupt::EVERY);
            }
            (state, _) = self.changed.wait_timeout(state, slice).unwrap_or_else(PoisonError::into_inner);
            if asks {
                // The question runs code of the program, which may call this library.
                drop(state);
                if self.setup.interrupt.asked() {
                    let (operator, rank) = (call.operator, self.setup.rank);
                    let waited_for = waited_for();
                    return Err(self.fail(CallerError::Interrupted { operator, rank, waited_for }));
                }
                state = self.lock();
            }
        }
    }

    /// Takes the next message of a layer from any of these peers, of weights at most those of the call's step. Waits until
    /// there is one.
    pub(crate) fn next(&self, call: Call, lane: usize, peers: &[usize]) -> Result<(usize, Message)> {
        let what = || {
            let from = peers.iter().map(|&peer| self.peer(peer).to_string()).collect::<Vec<_>>().join(", ");
            format!("{} of layer {} from rank {from}", noun(lane), call.layer)
        };
        let want = |wanted| {
            let mut state = self.lock();
            peers.iter().for_each(|&peer| state.peers[peer].lanes[lane].wanted = wanted);
        };
        want(Some(call.layer as u32));
        peers.iter().try_for_each(|&peer| self.request_bodies(peer, lane))?;
        let taken = |state: &mut State| {
            peers.iter().find_map(|&peer| Some((peer, state.peers[peer].lanes[lane].take(call, lane)?)))
        };
        let found = self.wait(call, what, peers, taken);
        want(None);
        let found = found?;
        self.request_bodies(found.0, lane)?;
        Ok(found)
    }

    /// Takes the next message of gradients of a layer from a peer, or nothing once `is_wanted` returns false, which it may after
    /// [`wake`](Self::wake). Waits until there is one whose step `is_due`.
    pub(crate) fn next_while(
        &self,
        call: Call,
        peer: usize,
        waited_for: impl Fn() -> String,
        is_wanted: impl Fn() -> bool,
        is_due: impl Fn(u64) -> bool,
    ) -> Result<Option<Message>> {
        let taken = |state: &mut State| {
            if !is_wanted() {
                return Some(None);
            }
            let inbox = &mut state.peers[peer].lanes[GRADIENTS];
            inbox.arrived[call.layer].front().filter(|message| is_due(message.header.step))?;
            inbox.take(call, GRADIENTS).map(Some)
        };
        let found = self.wait(call, waited_for, &[peer], taken)?;
        self.request_bodies(peer, GRADIENTS)?;
        Ok(found)
    }

    /// Makes every wait look again whether it is over.
    pub(crate) fn wake(&self) {
        // A wait that has looked, and does not sleep yet, holds the lock.
        drop(self.lock());
        self.changed.notify_all();
    }

    /// Takes the next message of a layer from a peer, if it has arrived; of weights at most those of the call's step.
    pub(crate) fn try_next(&self, call: Call, lane: usize, peer: usize) -> Result<Option<Message>> {
        let message = self.lock().peers[peer].lanes[lane].take(call, lane);
        self.request_bodies(peer, lane)?;
        Ok(message)
    }

    /// Posts receives for bodies that were announced, and for regular ones ahead, as far as the window allows.
    fn request_bodies(&self, peer: usize, lane: usize) -> Result<()> {
        let order = hold(&self.orders[peer].receives[lane]);
        let window = self.setup.windows[lane];
        loop {
            // A header stays announced until its body is requested, so that a peer that has left is not taken for exhausted.
            let due = {
                let mut state = self.lock();
                let sends_more = state.peers[peer].ended.is_none() && !state.is_closing;
                let inbox = &mut state.peers[peer].lanes[lane];
                if inbox.pair(window) {
                    self.changed.notify_all();
                }
                match inbox.due(window) {
                    Some(Due::Ahead) if !sends_more => return Ok(()),
                    Some(due) => due,
                    None => return Ok(()),
                }
            };
            let bytes = match due {
                Due::Announced(header) => header.bytes,
                Due::Ahead => window.regular,
            };
            let body_lane = lane_of(lane, bytes <= window.regular);
            match (self.carrier.receive(self.peer(peer), body_lane, bytes as usize), due) {
                (Ok(receive), Due::Announced(header)) => {
                    let inbox = &mut self.lock().peers[peer].lanes[lane];
                    inbox.announced.pop_front();
                    inbox.requested.push_back((header, receive));
                    self.changed.notify_all();
                }
                (Ok(receive), Due::Ahead) => self.lock().peers[peer].lanes[lane].posted.push_back(receive),
                // Nothing may be lost: the thread `headers` reads what the peer sent last, and decides.
                (Err(CarrierError::Closed), Due::Ahead) => return Ok(()),
                (Err(error), _) => {
                    drop(order);
                    return Err(self.fail(self.lost(peer, &error, "a body to be asked for")));
                }
            }
        }
    }

    // ---- the threads

    /// Receives headers until the peer sends its last one.
    fn listen(&self, peer: usize, resend: &Resend) {
        let mut posted = VecDeque::new();
        loop {
            let header = match self.next_header(peer, &mut posted) {
                Ok(bytes) => Header::parse(&bytes).map_err(|what| self.broken(peer, what)),
                Err(error) => Err(self.lost(peer, &error, "its next message")),
            };
            let heard = header.and_then(|header| {
                self.check(peer, &header)?;
                self.hear(peer, header, resend)
            });
            match heard {
                Ok(true) => {}
                Ok(false) => return,
                Err(error) => {
                    // The error comes first: a call that sees that the peer has ended must not give a reason of its own.
                    if !self.lock().is_closing {
                        self.fail(error);
                    }
                    self.end(peer, PeerFault::Died);
                    return;
                }
            }
        }
    }

    /// Waits for the next header. Keeps receives of those that follow posted.
    fn next_header(
        &self,
        peer: usize,
        posted: &mut VecDeque<Box<dyn Receiving>>,
    ) -> Result<Vec<u8>, CarrierError> {
        while posted.len() < HEADERS_AHEAD {
            match self.carrier.receive(self.peer(peer), Lane::Headers, HEADER_BYTES) {
                Ok(receive) => posted.push_back(receive),
                Err(error) if posted.is_empty() => return Err(error),
                // What the peer sent before its connection closed still arrives.
                Err(_) => break,
            }
        }
        let first = posted.pop_front().expect("the loop ends early only if a receive is posted");
        first.wait(HEADER_BYTES)
    }

    /// Processes a header. Returns whether another follows.
    fn hear(&self, peer: usize, header: Header, resend: &Resend) -> Result<bool> {
        let lane = match header.kind {
            Kind::Weights | Kind::Resent => WEIGHTS,
            Kind::Gradients => GRADIENTS,
            Kind::Request => {
                resend(self, peer, header.layer as usize)?;
                return Ok(true);
            }
            Kind::Left => {
                self.end(peer, PeerFault::Left);
                return Ok(false);
            }
            Kind::Ask => {
                let wait = {
                    let mut state = self.lock();
                    state.is_asked = !state.waits.is_empty();
                    if state.is_asked { Wait::Blocked } else { Wait::Free }
                };
                self.changed.notify_all();
                let answer = Header::bare(Kind::Alive(wait), self.setup.rank, self.setup.run);
                self.post(peer, [(Lane::Headers, Arc::new(answer.to_bytes()))])?;
                return Ok(true);
            }
            Kind::Alive(wait) => {
                self.lock().peers[peer].question.answer(wait);
                self.changed.notify_all();
                return Ok(true);
            }
            Kind::Failure(culprit, fault) => {
                let error = self.told(peer, culprit, fault);
                self.fail_for(error, (culprit, fault));
                self.end(peer, PeerFault::Failed);
                return Ok(false);
            }
        };
        self.lock().peers[peer].lanes[lane].announced.push_back(header);
        self.request_bodies(peer, lane)?;
        Ok(true)
    }

    /// Records that no further message comes from a peer.
    fn end(&self, peer: usize, fault: PeerFault) {
        self.lock().peers[peer].ended.get_or_insert(fault);
        self.changed.notify_all();
    }

    /// The error of this rank when a peer gives up because of `culprit`, which may be this rank.
    fn told(&self, peer: usize, culprit: Rank, fault: PeerFault) -> PeerError {
        let teller = self.peer(peer);
        let told = format!("messages and was told by rank {teller}");
        if culprit == self.setup.rank {
            let cause = Some(format!("rank {culprit} {fault}"));
            return PeerError { cause, ..self.peer_error(teller, PeerFault::Failed, told, Duration::ZERO) };
        }
        // The teller's bound has passed, which this rank does not know.
        let told = match fault {
            PeerFault::Late | PeerFault::Stalled => format!("{told}; {REMEDY}"),
            _ => told,
        };
        self.peer_error(culprit, fault, told, Duration::ZERO)
    }

    /// Checks that a correct peer could have sent this header.
    fn check(&self, peer: usize, header: &Header) -> Result<()> {
        let broken = |what: String| Err(self.broken(peer, what));
        if header.sender != self.peer(peer) {
            return broken(format!("a message of rank {} from it", header.sender));
        }
        if header.run != self.setup.run {
            return broken(format!("a message of run {:#x}; this run is {:#x}", header.run, self.setup.run));
        }
        let layer = header.layer as usize;
        let lane = match header.kind {
            Kind::Weights | Kind::Resent => WEIGHTS,
            Kind::Gradients => GRADIENTS,
            Kind::Request | Kind::Left | Kind::Failure(..) | Kind::Ask | Kind::Alive(_)
                if header.bytes != 0 =>
            {
                return broken("a body where none belongs".into());
            }
            Kind::Request if layer >= self.setup.longest[WEIGHTS].len() => {
                return broken(format!("a request for layer {layer}"));
            }
            Kind::Request | Kind::Left | Kind::Failure(..) | Kind::Ask | Kind::Alive(_) => return Ok(()),
        };
        let regular = self.setup.windows[lane].regular;
        if header.regular != regular {
            return broken(format!(
                "{} of which a regular body has at most {} bytes there and {regular} here: the ranks have different models \
                 or settings",
                noun(lane),
                header.regular
            ));
        }
        let layers = self.setup.longest[lane].len();
        let Some(&longest) = self.setup.longest[lane].get(layer) else {
            return broken(format!("{} of layer {layer}; there are {layers} layers", noun(lane)));
        };
        if header.bytes == 0 || header.bytes > longest {
            let what = noun(lane);
            return broken(format!(
                "{what} of {} bytes for layer {layer}; at most {longest} are possible",
                header.bytes
            ));
        }
        // A message has the streams of a codec, and before them the weights that they change if it is the first of a restart.
        let most = if header.kind == Kind::Weights { 2 } else { 1 };
        if !(1..=most).contains(&header.streams) {
            return broken(format!("{} streams of each expert; {most} at most are possible", header.streams));
        }
        let mut state = self.lock();
        let next = &mut state.peers[peer].lanes[lane].next_step[layer];
        // Gradients may skip steps without a backward pass; weights are sent in every step.
        let is_next = match header.kind {
            Kind::Resent => header.step < *next,
            Kind::Gradients => header.step >= *next,
            _ => header.step == *next,
        };
        if !is_next {
            let text =
                format!("{} of layer {layer}, step {}, where step {next} was due", noun(lane), header.step);
            drop(state);
            return broken(text);
        }
        if header.kind != Kind::Resent {
            let Some(after) = header.step.checked_add(1) else {
                drop(state);
                let what = noun(lane);
                return broken(format!(
                    "{what} of layer {layer}, step {}, after which no step is possible",
                    header.step
                ));
            };
            *next = after;
        }
        state.peers[peer].lanes[lane].agrees = true;
        Ok(())
    }

    /// Waits for the bodies of a lane.
    fn collect(&self, peer: usize, lane: usize) {
        loop {
            let (header, receive) = {
                let mut state = self.lock();
                loop {
                    if state.is_closing {
                        return;
                    }
                    let inbox = &mut state.peers[peer].lanes[lane];
                    if let Some(first) = inbox.requested.pop_front() {
                        inbox.awaited = Some(first.0.layer);
                        break first;
                    }
                    state = self.changed.wait(state).unwrap_or_else(PoisonError::into_inner);
                }
            };
            let received =
                receive.wait(header.bytes as usize).map_err(|error| self.lost(peer, &error, noun(lane)));
            let mut state = self.lock();
            let inbox = &mut state.peers[peer].lanes[lane];
            inbox.awaited = None;
            match received {
                Ok(body) => {
                    inbox.arrived[header.layer as usize].push_back(Message { header, body });
                    *state.traffic.received(lane) += header.bytes + HEADER_BYTES as u64;
                    self.changed.notify_all();
                }
                Err(_) if state.is_closing => return,
                Err(error) => {
                    drop(state);
                    self.fail(error);
                    return;
                }
            }
        }
    }

    /// Waits for messages that were sent.
    fn reap(&self, peer: usize) {
        loop {
            let transfer = {
                let mut state = self.lock();
                loop {
                    let sent = &mut state.peers[peer];
                    if let Some(first) = sent.sent.pop_front() {
                        sent.awaited = 1;
                        break first;
                    }
                    if state.is_closing {
                        return;
                    }
                    state = self.changed.wait(state).unwrap_or_else(PoisonError::into_inner);
                }
            };
            let sent = transfer.wait();
            let mut state = self.lock();
            state.peers[peer].awaited = 0;
            self.changed.notify_all();
            if let Err(error) = sent {
                // The peer may have closed after it had all that it needed. If not, the thread `headers` notices as well.
                let is_over = state.is_closing || state.peers[peer].ended.is_some();
                drop(state);
                if !is_over {
                    self.fail(self.lost(peer, &error, "a message to be taken"));
                }
                return;
            }
        }
    }

    // ---- failing and closing

    /// The error of this rank's call about `peer`.
    fn peer_error(&self, peer: Rank, fault: PeerFault, waited_for: String, waited: Duration) -> PeerError {
        let (operator, step) = self.lock().operator;
        let rank = self.setup.rank;
        PeerError { peer, machine: None, fault, operator, step, rank, waited_for, waited, cause: None }
    }

    fn fault(&self, peer: usize, fault: PeerFault, waited_for: String, waited: Duration) -> PeerError {
        let waited_for = match fault {
            PeerFault::Late | PeerFault::Stalled => {
                format!("{waited_for}; timeout = {} s; {REMEDY}", self.setup.timeout.as_secs_f64())
            }
            _ => waited_for,
        };
        self.peer_error(self.peer(peer), fault, waited_for, waited)
    }

    fn broken(&self, peer: usize, found: impl Into<String>) -> Error {
        self.fault(peer, PeerFault::Broken, found.into(), Duration::ZERO).into()
    }

    /// What a decoder found wrong in a message of a peer.
    pub(crate) fn undecodable(&self, peer: usize, found: impl Into<String>) -> Error {
        self.fail(self.broken(peer, found))
    }

    fn lost(&self, peer: usize, error: &CarrierError, waited_for: &str) -> Error {
        match error {
            CarrierError::Closed => {
                let fault = self.lock().peers[peer].ended.unwrap_or(PeerFault::Died);
                self.fault(peer, fault, waited_for.into(), Duration::ZERO).into()
            }
            other => EnvironmentError::new(
                format!("exchanging messages with rank {}", self.peer(peer)),
                other,
                "the carrier between the ranks failed; look at its error and at that rank's output",
            )
            .into(),
        }
    }

    /// Records an error, wakes every call, and tells the peers who is at fault. Returns the first error of this rank.
    pub(crate) fn fail(&self, error: impl Into<Error>) -> Error {
        let error = error.into();
        let culprit = match &error {
            Error::Peer(peer) => (peer.peer, peer.fault),
            _ => (self.setup.rank, PeerFault::Failed),
        };
        self.fail_for(error, culprit)
    }

    /// Records that a rank, perhaps none of the peers, is at fault for what another part of the program found.
    pub(crate) fn blame(&self, peer: Rank, fault: PeerFault) {
        let waited_for = "messages of another part of the step".into();
        self.fail_for(self.peer_error(peer, fault, waited_for, Duration::ZERO), (peer, fault));
    }

    /// As [`fail`](Self::fail), with the rank at fault that the peers shall be told.
    fn fail_for(&self, error: impl Into<Error>, culprit: (Rank, PeerFault)) -> Error {
        let error = {
            let mut state = self.lock();
            if let Some(first) = &state.error {
                return first.clone();
            }
            state.error.insert(error.into()).clone()
        };
        self.changed.notify_all();
        // Also to the rank at fault, which may be alive and waiting.
        self.say(Kind::Failure(culprit.0, culprit.1));
        error
    }

    /// Sends a last message to all peers. A peer that cannot be told finds out by itself: its connection closes.
    fn say(&self, kind: Kind) {
        let header = Arc::new(Header::bare(kind, self.setup.rank, self.setup.run).to_bytes());
        for (peer, &rank) in self.setup.peers.iter().enumerate() {
            let _order = hold(&self.orders[peer].sends);
            if let Ok(transfer) = self.carrier.send(rank, Lane::Headers, header.clone()) {
                self.lock().peers[peer].sent.push_back(transfer);
            }
        }
        self.changed.notify_all();
    }

    /// Sends `Left`, unless there is an error, waits until the peers no longer need this rank, and closes the carrier. The
    /// wait is at most `patience`, and short after an error.
    pub(crate) fn close(&self, patience: Duration) {
        let started = Instant::now();
        {
            let mut state = self.lock();
            if std::mem::replace(&mut state.is_leaving, true) {
                return;
            }
            if state.error.is_none() {
                drop(state);
                self.say(Kind::Left);
            }
        }
        let mut state = self.lock();
        while state.peers.iter().any(|peer| peer.ended.is_none()) {
            let bound = if state.error.is_some() { patience.min(GRACE) } else { patience };
            let Some(left) = bound.checked_sub(started.elapsed()) else { break };
            (state, _) = self.changed.wait_timeout(state, left).unwrap_or_else(PoisonError::into_inner);
        }
        state.is_closing = true;
        self.changed.notify_all();
        drop(state);
        self.carrier.abort();
    }

    /// The longest wait for a peer.
    pub(crate) fn timeout(&self) -> Duration {
        self.setup.timeout
    }
}

fn hold<T>(lock: &Mutex<T>) -> MutexGuard<'_, T> {
    lock.lock().unwrap_or_else(PoisonError::into_inner)
}
