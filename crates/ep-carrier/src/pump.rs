//! The thread of a carrier: it takes orders, moves parts between messages and slots, and completes transfers.

use std::collections::VecDeque;
use std::panic::{AssertUnwindSafe, catch_unwind};
use std::sync::Arc;
use std::sync::atomic::Ordering::Acquire;
use std::time::{Duration, Instant};

use ep::affinity::stay_near;
use ep::{Error, PeerFault, Posted};
use ep_migrate::CarrierError;
use ep_rail::{ClaimedSlot, Streams};

use crate::carrier::{Order, Shared};
use crate::ends::Ends;
use crate::incoming::Incoming;
use crate::outgoing::{Next, Outgoing};
use crate::part::{COUNTS, HEAD, Part, counts_of, counts_to_bytes};
use crate::transfer::Promise;

/// The pause after a turn in which nothing happened. It doubles with each such turn, up to the longest one, so a pause is
/// about as long as the wait before it: short on a fast link, and rare on a slow one, where parts come milliseconds apart.
const SHORTEST_NAP: Duration = Duration::from_micros(20);
const LONGEST_NAP: Duration = Duration::from_millis(2);
/// How long a rank that closes waits until its last messages and credits have left.
const DRAIN: Duration = Duration::from_millis(500);
/// How long after an error of the engine about a peer the links may say why. The engine itself cannot tell a process that
/// has died from a port that a firewall closes.
const VERDICT: Duration = Duration::from_secs(1);

pub(crate) struct Pump {
    shared: Arc<Shared>,
    streams: Streams,
    ends: Arc<dyn Ends>,
    /// By position; the entry of this rank is not used.
    peers: Vec<Peer>,
    /// Maximum number of parts that are taken from one peer before the others have their turn.
    turn_parts: usize,
}

/// What is exchanged with one peer.
#[derive(Default)]
struct Peer {
    outgoing: Outgoing,
    incoming: Incoming,
    /// Slots that the peer has not read, in order. The slot of a message's last part has the message's promise.
    in_flight: VecDeque<(ClaimedSlot, Option<Promise<()>>)>,
    /// Puts that the engine has no room for. It may never have room again for a peer that is gone.
    due: VecDeque<Due>,
    /// When the engine has reported the peer, and why: nothing is put any more.
    suspected: Option<(Instant, String)>,
    has_ended: bool,
}

/// A put that is to be posted.
enum Due {
    /// A part of this length in a slot.
    Part(ClaimedSlot, usize),
    Credit(ClaimedSlot),
}

impl Peer {
    fn is_reachable(&self) -> bool {
        !self.has_ended && self.suspected.is_none()
    }

    /// Whether something that can leave has not left, or was not read.
    fn has_unfinished(&self) -> bool {
        self.is_reachable()
            && (!self.due.is_empty() || !self.in_flight.is_empty() || self.outgoing.has_next())
    }
}

impl Pump {
    pub(crate) fn new(shared: Arc<Shared>, streams: Streams, ends: Arc<dyn Ends>) -> Self {
        let ranks = 1 + streams.others().count();
        let peers = (0..ranks).map(|_| Peer::default()).collect();
        let turn_parts = streams.slots();
        Self { shared, streams, ends, peers, turn_parts }
    }

    /// Runs until the carrier closes.
    pub(crate) fn run(mut self) {
        // What the work changes is not used after a panic, but for the promises.
        if catch_unwind(AssertUnwindSafe(|| self.work())).is_err() {
            let text = "the thread of the carrier panicked; its message is on stderr: report this bug";
            self.end_all(&CarrierError::Failed(text.into()));
        }
        self.ends.leave();
        self.shared.stop();
    }

    fn work(&mut self) {
        stay_near(self.streams.near_cpus());
        let mut nap = SHORTEST_NAP;
        while !self.shared.closed.load(Acquire) {
            if self.turn() {
                nap = SHORTEST_NAP;
                continue;
            }
            std::thread::park_timeout(nap);
            nap = LONGEST_NAP.min(2 * nap);
        }
        // Messages that were sent before the carrier closed, and the credits for those of the peers.
        let deadline = Instant::now() + DRAIN;
        loop {
            let has_moved = self.turn();
            if !self.peers.iter().any(Peer::has_unfinished) || Instant::now() >= deadline {
                break;
            }
            if !has_moved {
                std::thread::sleep(SHORTEST_NAP);
            }
        }
        for position in self.streams.others() {
            if self.peers[position].is_reachable() {
                // Errors mean nothing any more.
                let _ = self.streams.drain(position, deadline);
            }
        }
    }

    /// Does what can be done now. Returns whether anything was.
    fn turn(&mut self) -> bool {
        let mut has_moved = self.take_orders();
        // Looked at before the signals: where a put is complete when the peer has its bytes, what a peer has sent before it
        // left is in this rank's slots by then.
        let ended: Vec<Option<CarrierError>> =
            (0..self.peers.len()).map(|position| self.ends.ended(position)).collect();
        if let Err(error) = self.streams.poll() {
            self.suspect(&error);
        }
        for position in self.streams.others() {
            has_moved |= self.receive(position) | self.complete(position);
            if let Some(error) = &ended[position] {
                self.end(position, error);
            }
            self.judge(position);
            has_moved |= self.post_due(position) | self.send(position);
        }
        has_moved
    }

    /// Takes new orders of callers.
    fn take_orders(&mut self) -> bool {
        let orders = std::mem::take(&mut self.shared.orders().new);
        let has_orders = !orders.is_empty();
        for order in orders {
            match order {
                Order::Send { position, lane, letter } => self.peers[position].outgoing.push(lane, letter),
                Order::Receive { position, lane, capacity, received } => {
                    let peer = &mut self.peers[position];
                    peer.incoming.post(lane, capacity, received);
                    peer.outgoing.count_receive(lane);
                }
            }
        }
        if has_orders {
            // Orders may have been left just before their peer was found to have ended.
            for position in 0..self.peers.len() {
                if self.peers[position].has_ended {
                    self.fail(position);
                }
            }
        }
        has_orders
    }

    /// Takes the parts that have arrived from a peer.
    fn receive(&mut self, position: usize) -> bool {
        let mut has_moved = false;
        for _ in 0..self.turn_parts {
            if self.peers[position].has_ended {
                break;
            }
            let Some((_, claim)) = self.streams.claim_receive(position, u64::MAX) else { break };
            has_moved = true;
            if let Err(found) = self.take_part(position, claim) {
                self.end(position, &CarrierError::Broken(found));
            }
            self.peers[position].due.push_back(Due::Credit(claim));
        }
        has_moved
    }

    /// Takes the part in a slot.
    ///
    /// # Errors
    /// What no correct peer sends.
    fn take_part(&mut self, position: usize, claim: ClaimedSlot) -> Result<(), String> {
        let slot = self.streams.incoming(claim);
        let copy = |from: usize, to: &mut [u8]| {
            // SAFETY: the slot is claimed, so this rank may read all of it until the credit, and `parse` has checked that
            // the part fits. The peer may write at any time; the bytes are copied once and only then looked at.
            unsafe { to.as_mut_ptr().copy_from_nonoverlapping(slot.add(from), to.len()) };
        };
        let mut head = [0; HEAD];
        copy(0, &mut head);
        let peer = &mut self.peers[position];
        match Part::parse(head, self.streams.slot_bytes() - HEAD)? {
            Part::Message { lane, bytes, length } => {
                peer.incoming.take(lane, bytes, length, |part| copy(HEAD, part))
            }
            Part::Posted => {
                let mut counts = [0; COUNTS];
                copy(HEAD, &mut counts);
                peer.outgoing.allow(counts_of(&counts))
            }
        }
    }

    /// Completes messages whose last part a peer has read.
    fn complete(&mut self, position: usize) -> bool {
        let mut has_moved = false;
        let (in_flight, streams) = (&mut self.peers[position].in_flight, &self.streams);
        while in_flight.front().is_some_and(|(claim, _)| streams.is_free(*claim)) {
            has_moved = true;
            if let Some((_, Some(sent))) = in_flight.pop_front() {
                sent.complete(Ok(()));
            }
        }
        has_moved
    }

    /// Puts parts of messages into free slots.
    fn send(&mut self, position: usize) -> bool {
        let mut has_moved = false;
        loop {
            let peer = &mut self.peers[position];
            // If the engine has no room, parts wait in messages and not in slots: headers then go first.
            if !peer.is_reachable() || !peer.due.is_empty() || !peer.outgoing.has_next() {
                return has_moved;
            }
            let Some((_, claim)) = self.streams.claim_send(position, u64::MAX) else { return has_moved };
            let next = peer.outgoing.next(self.streams.slot_bytes() - HEAD).expect("there is a next part");
            has_moved = true;
            let (len, sent) = write(&self.streams, claim, next);
            peer.in_flight.push_back((claim, sent));
            peer.due.push_back(Due::Part(claim, len));
            self.post_due(position);
        }
    }

    /// Posts puts to a peer until the engine has no room for them. Those to a peer that is not reachable are dropped.
    fn post_due(&mut self, position: usize) -> bool {
        let mut has_moved = false;
        while let Some(due) = self.peers[position].due.front() {
            if self.peers[position].is_reachable() {
                // SAFETY: `send` and `receive` have queued the claim of a slot that they have filled or read, once, and a
                // put that was taken leaves the queue.
                let posted = unsafe {
                    match *due {
                        Due::Part(claim, len) => self.streams.post(claim, len),
                        Due::Credit(claim) => self.streams.release(claim),
                    }
                };
                match posted {
                    Ok(Posted::Full) => break,
                    Ok(Posted::Yes) => {}
                    Err(error) => self.suspect(&error),
                }
            }
            self.peers[position].due.pop_front();
            has_moved = true;
        }
        has_moved
    }

    /// Takes note of an error of the engine. What breaks the protocol ends the connection at once. A peer that the engine does
    /// not reach is suspected, until the links say why. An error about no peer ends all connections.
    fn suspect(&mut self, error: &Error) {
        match error {
            Error::Peer(error) if error.peer.index() < self.peers.len() => {
                let position = error.peer.index();
                match error.fault {
                    PeerFault::Broken => self.end(position, &CarrierError::Broken(error.waited_for.clone())),
                    PeerFault::Unreachable => self.end(position, &CarrierError::Unreachable),
                    _ => {
                        let now = Instant::now();
                        self.peers[position].suspected.get_or_insert_with(|| (now, error.waited_for.clone()));
                    }
                }
            }
            error => self.end_all(&CarrierError::Failed(error.to_string())),
        }
    }

    /// Ends the connection with a peer that the engine has reported, if the links have not done so in time.
    fn judge(&mut self, position: usize) {
        let Some((when, why)) = &self.peers[position].suspected else { return };
        if when.elapsed() >= VERDICT {
            let text = format!("{why}; the process is alive: does a firewall close the engine's port?");
            self.end(position, &CarrierError::Failed(text));
        }
    }

    /// Ends the connection with a peer, unless it has ended.
    fn end(&mut self, position: usize, error: &CarrierError) {
        if std::mem::replace(&mut self.peers[position].has_ended, true) {
            return;
        }
        self.shared.orders().ended[position] = Some(error.clone());
        self.fail(position);
    }

    /// Ends all connections that have not ended. No order is taken in between.
    fn end_all(&mut self, error: &CarrierError) {
        for ended in &mut self.shared.orders().ended {
            ended.get_or_insert_with(|| error.clone());
        }
        self.take_orders();
        for position in 0..self.peers.len() {
            self.peers[position].has_ended = true;
            self.fail(position);
        }
    }

    /// Ends all transfers with a peer whose connection has ended.
    fn fail(&mut self, position: usize) {
        let error = self.shared.orders().ended[position].clone().unwrap_or(CarrierError::Closed);
        let peer = &mut self.peers[position];
        peer.outgoing.fail(&error);
        peer.incoming.fail(&error);
        for (_, sent) in peer.in_flight.drain(..) {
            if let Some(sent) = sent {
                sent.complete(Err(error.clone()));
            }
        }
    }
}

/// Writes a part into a claimed slot. Returns its length, and the promise that the peer's credit completes.
fn write(streams: &Streams, claim: ClaimedSlot, next: Next) -> (usize, Option<Promise<()>>) {
    let slot = streams.outgoing(claim);
    let copy = |bytes: &[u8], to: usize| {
        // SAFETY: the slot is claimed, so nothing else writes to it, and the part fits it.
        unsafe { slot.add(to).copy_from_nonoverlapping(bytes.as_ptr(), bytes.len()) };
    };
    let (part, sent) = match next {
        Next::Posted(counts) => {
            copy(&counts_to_bytes(counts), HEAD);
            (Part::Posted, None)
        }
        Next::Message { lane, message, range, sent } => {
            let part = Part::Message { lane, bytes: range.len(), length: message.len() as u64 };
            copy(&message[range], HEAD);
            (part, sent)
        }
    };
    copy(&part.to_head(), 0);
    (HEAD + part.bytes(), sent)
}
