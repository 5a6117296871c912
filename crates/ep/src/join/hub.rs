//! Rank 0's end of the rendezvous. The hub admits the other ranks, gathers their blobs, and decides which rank all
//! ranks report as lost.

use std::sync::Arc;
use std::time::{Duration, Instant};

use rustix::event::PollFd;

use super::channel::{Channel, End, Incoming};
use super::handshake::{Claim, Role};
use super::note::{Clock, Loss, REPEAT, Text, kind, rank_bytes};
use super::reception::Reception;
use super::spoke::BUFFERED;
use super::store::{Listener, Store};
use super::wire::wait;
use super::{Member, Watch};
use crate::error::{Error, PeerFault, Result};
use crate::topology::Rank;

/// The grace period: when a rank left, is late or stalled, another rank's death may be the cause. The hub waits this
/// long for news of such a death before it reports the rank.
pub(super) const GRACE_PERIOD: Duration = Duration::from_millis(200);
/// How long rank 0 still sends a loss to ranks that connect, if a rank is lost before all ranks have joined.
const LINGER: Duration = Duration::from_secs(1);
/// The bound for sending rank 0's final messages.
const FINAL_SEND: Duration = Duration::from_millis(200);

const ZERO: Rank = Rank(0);
const WHAT: &str = "its part of the rendezvous";

/// Rank 0's connections to all other ranks.
#[derive(Debug)]
pub(super) struct Hub {
    ranks: usize,
    generation: u64,
    timeout: Duration,
    /// How long a machine may acknowledge nothing before its ranks are unreachable.
    network_timeout: Duration,
    watch: Watch,
    /// The seats of ranks 1.. in order.
    seats: Vec<Seat>,
    /// The first certain loss: a death, or a rank's own error.
    certain: Option<Loss>,
    /// The first loss that an earlier death may have caused, and when the hub learned of it.
    vague: Option<(Loss, Instant)>,
    /// The first rank that has left without an error. It may have joined, so this is a loss only for an exchange that needs
    /// the rank.
    left: Option<(Loss, Instant)>,
    /// The rank that rank 0 waits for, as last sent to the other ranks, and when it was sent.
    told: Option<(Rank, Instant)>,
    /// The loss that ended the job, once it was sent to all ranks.
    over: Option<Loss>,
}

/// The hub's state of one other rank.
#[derive(Debug, Default)]
struct Seat {
    channel: Option<Channel>,
    /// Whether the rank has joined. No later process can take its seat.
    came: bool,
    /// Whether the rank has sent its final message. The hub can still send to it.
    leaving: bool,
    /// The rank's blob of the current exchange.
    blob: Option<Vec<u8>>,
    /// Whether the rank may have long blobs of an earlier exchange to read.
    is_reading: bool,
}

impl Seat {
    fn receive(&mut self) -> Option<Incoming> {
        self.channel.as_mut().filter(|_| !self.leaving)?.receive()
    }
}

impl Hub {
    /// Listens until all other ranks have joined.
    pub(super) fn open(listener: &Listener, store: &Store, member: Member) -> Result<Self> {
        let Member { rank, ranks, generation, timeout, network_timeout, interrupt, .. } = member;
        let mut hub = Self {
            ranks,
            generation,
            timeout,
            network_timeout,
            watch: Watch { rank, interrupt },
            seats: (1..ranks).map(|_| Seat::default()).collect(),
            certain: None,
            vague: None,
            left: None,
            told: None,
            over: None,
        };
        hub.admit(&mut Reception::new(listener, &store.key, Role::Rendezvous), store)?;
        Ok(hub)
    }

    fn admit(&mut self, reception: &mut Reception<'_>, store: &Store) -> Result<()> {
        let clock = Clock::new(self.timeout);
        let mut refused = String::new();
        // The loss that was sent to all ranks, and when. Ranks that connect later only receive this loss.
        let mut lost: Option<(Loss, Instant)> = None;
        loop {
            for (claim, channel) in reception.turn()? {
                self.seat(claim, channel, &mut refused);
            }
            self.progress();
            let mut until = self.watch.until(clock.deadline);
            let all = self.seats.iter().all(|seat| seat.came);
            if lost.is_none() && all && self.certain.is_none() && self.unsure().is_none() {
                self.broadcast(kind::MET, &[]);
                return Ok(());
            }
            if let Some((loss, since)) = &lost {
                let loss = loss.clone();
                if all || since.elapsed() > LINGER || clock.is_over() {
                    return Err(self.conclude(loss, WHAT, &clock));
                }
            } else if let Some(mut loss) = self.settled(self.unsure()) {
                if loss.fault == PeerFault::Absent {
                    // The reporting rank has timed out and knows no cause. Rank 0 adds the cause.
                    loss.text = Text::Seen(cause_of_absence(&refused, reception.dropped, store));
                }
                self.broadcast(kind::LOST, &loss.to_bytes());
                lost = Some((loss, Instant::now()));
            } else if clock.is_over() {
                let absent = self.first(|seat| !seat.came).unwrap_or(Rank(1));
                let cause = cause_of_absence(&refused, reception.dropped, store);
                let loss = Loss::new(absent, PeerFault::Absent, cause);
                let what = format!("its connection at the rendezvous {}", store.name());
                return Err(self.conclude(loss, &what, &clock));
            } else if let Err(error) = self.watch.check() {
                return Err(self.abandon(error));
            } else {
                let missing = self.first(|seat| !seat.came).unwrap_or(ZERO);
                until = until.min(self.tell_missing(missing));
            }
            until = until.min(reception.next_look().unwrap_or(until));
            if lost.is_some() || self.unsure().is_some() {
                until = until.min(Instant::now() + Duration::from_millis(20));
            }
            let mut fds = Vec::new();
            reception.interest(&mut fds);
            self.interest(&mut fds);
            wait(&mut fds, until);
        }
    }

    /// Admits an authenticated rank, or sends it the reason for the refusal. A rank that has already joined keeps its seat.
    fn seat(&mut self, claim: Claim, mut channel: Channel, refused: &mut String) {
        let Claim { from, ranks, generation, .. } = claim;
        let place = from.index().checked_sub(1).filter(|&at| at < self.seats.len());
        let refusal = match place {
            _ if generation != self.generation => {
                let own = self.generation;
                *refused = format!(
                    "rank {from} of generation {generation} was refused: this job is generation {own}"
                );
                channel.send(kind::OTHER_GENERATION, &own.to_le_bytes());
                channel.finish();
                return;
            }
            Some(at) if ranks as usize == self.ranks => {
                if !self.seats[at].came {
                    self.take_in(at, channel);
                    return;
                }
                *refused = format!("a second process that claimed to be rank {from} was refused");
                kind::TAKEN
            }
            _ => {
                *refused = format!("rank {from} of {ranks} was refused: this job has {} ranks", self.ranks);
                kind::OTHER_WORLD
            }
        };
        channel.send(refusal, &(self.ranks as u32).to_le_bytes());
        channel.finish();
    }

    fn take_in(&mut self, at: usize, channel: Channel) {
        channel.wire().socket().watch(self.network_timeout);
        self.seats[at] = Seat { channel: Some(channel), came: true, ..Seat::default() };
        let missing = self.first(|seat| !seat.came).unwrap_or(ZERO);
        if self.told.is_none_or(|(rank, _)| rank != missing) {
            self.tell_missing(missing);
        } else if let Some(channel) = &mut self.seats[at].channel {
            // This message tells the rank that it has been admitted.
            channel.send(kind::WAITING, &rank_bytes(missing));
        }
        let lost = self.settled(self.unsure()).map(|loss| loss.to_bytes());
        if let (Some(lost), Some(channel)) = (lost, &mut self.seats[at].channel) {
            channel.send(kind::LOST, &lost);
        }
    }

    /// Tells all ranks which rank is missing, if it has changed or was last sent [`REPEAT`] ago. Returns when to send it
    /// again.
    fn tell_missing(&mut self, missing: Rank) -> Instant {
        let now = Instant::now();
        match self.told {
            Some((rank, at)) if rank == missing && now < at + REPEAT => at + REPEAT,
            _ => {
                self.told = Some((missing, now));
                self.broadcast(kind::WAITING, &rank_bytes(missing));
                now + REPEAT
            }
        }
    }

    fn first(&self, is: impl Fn(&Seat) -> bool) -> Option<Rank> {
        self.seats.iter().position(is).map(|at| Rank(at as u32 + 1))
    }

    /// Sends a message to every connected rank.
    fn broadcast(&mut self, kind: u8, body: &[u8]) {
        for channel in self.seats.iter_mut().filter_map(|seat| seat.channel.as_mut()) {
            channel.send(kind, body);
        }
        self.flush();
    }

    fn flush(&mut self) {
        for channel in self.seats.iter_mut().filter_map(|seat| seat.channel.as_mut()) {
            channel.wire_mut().flush();
        }
    }

    /// Sends queued bytes, and handles the messages that have arrived from all ranks.
    fn progress(&mut self) {
        self.flush();
        for at in 0..self.seats.len() {
            let rank = Rank(at as u32 + 1);
            while let Some(incoming) = self.seats[at].receive() {
                self.handle(at, rank, incoming);
            }
        }
    }

    fn handle(&mut self, at: usize, rank: Rank, incoming: Incoming) {
        let seat = &mut self.seats[at];
        let loss = match incoming {
            Incoming::Message(mut message) => match message[0] {
                kind::BLOB if seat.blob.is_none() => {
                    message.drain(..1);
                    seat.blob = Some(message);
                    // The rank has read all blobs of the earlier exchange before it sent this one.
                    if let (true, Some(channel)) = (std::mem::take(&mut seat.is_reading), &seat.channel) {
                        channel.wire().socket().watch(self.network_timeout);
                    }
                    return;
                }
                kind::LEFT => {
                    seat.channel = None;
                    let loss = Loss::new(rank, PeerFault::Left, "");
                    self.left.get_or_insert((loss, Instant::now()));
                    return;
                }
                kind::LOST => {
                    seat.leaving = true;
                    match Loss::from_bytes(&message[1..]) {
                        // The rank reports rank 0 as lost, but rank 0 is alive: the reporting rank itself has given up.
                        Some(loss) if loss.peer == ZERO => Loss::new(
                            rank,
                            PeerFault::Failed,
                            format!("it reported that rank 0 {}", loss.fault),
                        ),
                        // Other ranks may know why this rank left, is late or stalled.
                        Some(loss)
                            if matches!(
                                loss.fault,
                                PeerFault::Left | PeerFault::Late | PeerFault::Stalled
                            ) =>
                        {
                            self.vague.get_or_insert((loss, Instant::now()));
                            return;
                        }
                        Some(loss) => loss,
                        None => Loss::new(rank, PeerFault::Failed, "it sent a malformed loss message"),
                    }
                }
                _ => {
                    seat.channel = None;
                    Loss::new(rank, PeerFault::Failed, "it sent an unexpected message")
                }
            },
            Incoming::End(end) => {
                seat.channel = None;
                match end {
                    End::Closed => Loss::new(rank, PeerFault::Died, "its connection closed"),
                    End::Malformed => Loss::new(rank, PeerFault::Failed, "it sent a malformed message"),
                    End::Unreachable => Loss::new(rank, PeerFault::Unreachable, ""),
                }
            }
        };
        self.certain.get_or_insert(loss);
    }

    /// The first loss that is not certain.
    fn unsure(&self) -> Option<&(Loss, Instant)> {
        self.vague.as_ref().or(self.left.as_ref())
    }

    /// The loss to report: a certain one at once, `unsure` after the grace period.
    fn settled(&self, unsure: Option<&(Loss, Instant)>) -> Option<Loss> {
        let aged = || unsure.filter(|(_, since)| since.elapsed() >= GRACE_PERIOD);
        self.certain.clone().or_else(|| aged().map(|(loss, _)| loss.clone()))
    }

    fn interest<'a>(&'a self, fds: &mut Vec<PollFd<'a>>) {
        let heard = self.seats.iter().filter(|seat| !seat.leaving);
        fds.extend(heard.filter_map(|seat| seat.channel.as_ref()).map(|channel| channel.wire().interest()));
    }

    /// Waits until a message arrives, a grace period ends, or `deadline`.
    fn pause(&self, deadline: Instant) {
        let mut until = self.watch.until(deadline);
        if let Some((_, since)) = self.unsure() {
            until = until.min(*since + GRACE_PERIOD);
        }
        let mut fds = Vec::new();
        self.interest(&mut fds);
        wait(&mut fds, until);
    }

    /// Rank 0's part of an exchange: receives the blob of each rank and sends all blobs to each rank, or reports the
    /// rank that is lost.
    pub(super) fn exchange(&mut self, blob: &[u8]) -> Result<Vec<Vec<u8>>> {
        let clock = Clock::new(self.timeout);
        if let Some(loss) = &self.over {
            return Err(loss.error(ZERO, None, WHAT, clock.waited()));
        }
        self.told = None;
        loop {
            self.progress();
            let missing = self.first(|seat| seat.blob.is_none());
            // Check for missing blobs before losses: a rank that has left may have sent its blob before.
            let Some(missing) = missing else { break };
            if let Some(loss) = self.settled(self.unsure()) {
                return Err(self.conclude(loss, WHAT, &clock));
            }
            // Wait for the grace period after the deadline: another rank's death may be the reason for the missing blob.
            let last = clock.deadline + GRACE_PERIOD;
            if Instant::now() >= last {
                return Err(self.conclude(Loss::new(missing, PeerFault::Late, ""), WHAT, &clock));
            }
            if let Err(error) = self.watch.check() {
                return Err(self.abandon(error));
            }
            let again = self.tell_missing(missing);
            self.pause(last.min(again));
        }
        let mut all = vec![Arc::new(blob.to_vec())];
        all.extend(self.seats.iter_mut().map(|seat| Arc::new(seat.blob.take().unwrap_or_default())));
        self.hand_out(&all, &clock)?;
        Ok(all.into_iter().map(Arc::unwrap_or_clone).collect())
    }

    fn hand_out(&mut self, all: &[Arc<Vec<u8>>], clock: &Clock) -> Result<()> {
        // A rank may be late to read. A socket that stays full for the network timeout ends, even if the other machine still
        // acknowledges. The exchange must time out before the socket ends: otherwise a late rank would be reported as
        // unreachable.
        let is_long = all.iter().map(|blob| blob.len()).sum::<usize>() > BUFFERED;
        for seat in &mut self.seats {
            let Some(channel) = &mut seat.channel else { continue };
            if is_long {
                seat.is_reading = true;
                channel.wire().socket().watch(self.timeout.saturating_mul(2));
            }
            for blob in all {
                channel.send_shared(kind::BLOB, blob);
            }
        }
        loop {
            // A rank that has all blobs may continue, leave or die. Such a loss concerns the next exchange, not this one.
            self.progress();
            let has_unsent = |seat: &Seat| seat.channel.as_ref().is_some_and(|c| c.wire().has_unsent());
            let Some(slow) = self.first(has_unsent) else { return Ok(()) };
            if clock.is_over() {
                let loss = Loss::new(slow, PeerFault::Stalled, "it does not read the blobs of the exchange");
                return Err(self.conclude(loss, WHAT, clock));
            }
            self.watch.check().map_err(|error| self.abandon(error))?;
            let mut fds = Vec::new();
            self.interest(&mut fds);
            wait(&mut fds, self.watch.until(clock.deadline));
        }
    }

    /// Tells all ranks which rank is lost, and ends the rendezvous.
    fn conclude(&mut self, loss: Loss, what: &str, clock: &Clock) -> Error {
        let error = loss.error(ZERO, None, what, clock.waited());
        self.end(kind::LOST, &loss.to_bytes());
        self.over = Some(loss);
        error
    }

    /// The error about a rank that was lost since the last exchange. Tells all ranks which rank is lost.
    pub(super) fn lost(&mut self) -> Option<Error> {
        let clock = Clock::new(Duration::ZERO);
        if let Some(loss) = &self.over {
            return Some(loss.error(ZERO, None, WHAT, clock.waited()));
        }
        self.progress();
        // For a rank that does not wait in an exchange, a rank that has joined and left is not a loss.
        let loss = self.settled(self.vague.as_ref())?;
        Some(self.conclude(loss, WHAT, &clock))
    }

    /// Leaves because of `error`. Returns the error to report: `error`, or one about a rank that was lost earlier.
    pub(super) fn abandon(&mut self, error: Error) -> Error {
        if self.over.is_some() {
            return error;
        }
        let clock = Clock::new(GRACE_PERIOD);
        let own = Loss::of(&error, ZERO);
        if let Error::Peer(peer) = &error {
            while self.certain.is_none() && !clock.is_over() {
                self.progress();
                let mut fds = Vec::new();
                self.interest(&mut fds);
                wait(&mut fds, clock.deadline);
            }
            if let Some(better) = self.certain.take().filter(|loss| loss.is_better_than(peer)) {
                return self.conclude(better, &peer.waited_for, &clock);
            }
        }
        self.end(kind::LOST, &own.to_bytes());
        self.over = Some(own);
        error
    }

    fn end(&mut self, kind: u8, body: &[u8]) {
        self.broadcast(kind, body);
        let deadline = Instant::now() + FINAL_SEND;
        loop {
            self.flush();
            let mut channels = self.seats.iter().filter_map(|seat| seat.channel.as_ref());
            if !channels.any(|channel| channel.wire().has_unsent()) || Instant::now() >= deadline {
                break;
            }
            std::thread::sleep(Duration::from_millis(1));
        }
        for seat in &mut self.seats {
            if let Some(channel) = seat.channel.take() {
                channel.finish();
            }
        }
    }
}

/// The probable reason why a rank has not joined: which rank was `refused`, how many connections were `dropped`, or where
/// rank 0 listens.
fn cause_of_absence(refused: &str, dropped: u64, store: &Store) -> String {
    let cause = if refused.is_empty() { store.only_here() } else { refused.into() };
    if dropped > 0 {
        let (and, hint) = (if cause.is_empty() { "" } else { "; " }, store.hint());
        return format!("{cause}{and}{dropped} unauthenticated connections were dropped: {hint}");
    }
    if cause.is_empty() {
        return "was it started, with this rendezvous and number of ranks? see its output".into();
    }
    cause
}

impl Drop for Hub {
    fn drop(&mut self) {
        if self.over.is_none() {
            self.end(kind::LEFT, &[]);
        }
    }
}

#[cfg(all(test, target_os = "linux"))]
mod tests {
    use std::os::fd::{AsFd as _, AsRawFd as _};

    use super::super::channel::tests::channels;
    use super::*;

    /// A rank that is leaving closes its connection at some time, which would end every later wait at once.
    #[test]
    #[cfg_attr(miri, ignore = "sockets")]
    fn a_wait_looks_at_the_ranks_that_are_heard_and_not_at_those_that_leave() {
        let [heard, leaving] = channels();
        let descriptor = heard.wire().interest().as_fd().as_raw_fd();
        let seat = |channel, leaving| Seat { channel, came: true, leaving, ..Seat::default() };
        let hub = Hub {
            ranks: 4,
            generation: 0,
            timeout: GRACE_PERIOD,
            network_timeout: GRACE_PERIOD,
            watch: Watch { rank: ZERO, interrupt: crate::Interrupt::default() },
            seats: vec![seat(Some(leaving), true), seat(None, false), seat(Some(heard), false)],
            certain: None,
            vague: None,
            left: None,
            told: None,
            over: None,
        };
        let mut fds = Vec::new();
        hub.interest(&mut fds);
        let polled: Vec<_> = fds.iter().map(|fd| fd.as_fd().as_raw_fd()).collect();
        assert_eq!(polled, [descriptor]);
    }
}
