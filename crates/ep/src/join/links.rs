//! Links: sockets between all pairs of ranks of one machine, which carry descriptors of memory.
//!
//! Every rank opens a [`Door`] (a listening socket) and sends its [`Invitation`] to the other ranks through the
//! rendezvous. Of two ranks, the one with the higher number connects to the other. The system reports to each end the
//! user of the other end, and both ends prove that they know the invitations of all ranks.
//!
//! A link that closes without a leave message means that the process at its other end has died. Ranks can thus detect a
//! death without process IDs, also between PID namespaces.

use std::fmt;
use std::io::{self, ErrorKind};
use std::os::fd::{AsFd, BorrowedFd, OwnedFd};
use std::str::FromStr;
use std::time::{Duration, Instant};

use super::channel::{Channel, Incoming};
use super::handshake::{Claim, Outbound, Progress, Role};
use super::hub::GRACE_PERIOD;
use super::local;
use super::note::{Clock, Loss, kind};
use super::reception::Reception;
use super::secret::{Key, Secret, random};
use super::store::Listener;
use super::wire::{Socket, wait};
use super::{Member, Watch};
use crate::error::{EnvironmentError, Error, PeerFault, Result};
use crate::topology::Rank;

/// Kinds of messages on a link, besides `kind::LEFT` and `kind::LOST`.
const READY: u8 = 16;
const MESSAGE: u8 = 17;
/// Pause between attempts to connect.
const RETRY: Duration = Duration::from_millis(5);
const WHAT: &str = "its link";
/// Hint for a failed socket or descriptor.
const FILES: &str = "has the process reached its limit of open files (ulimit -n)?";

/// The listening socket on which a rank accepts links from its peers.
#[derive(Debug)]
pub struct Door {
    listener: Listener,
    invitation: Invitation,
}

/// The name of a [`Door`]'s socket, and the rank's share of the key of all links. Its text form is 96 hexadecimal
/// digits.
///
/// An invitation is secret: only the ranks of the job may know it.
#[derive(Clone, PartialEq, Eq)]
pub struct Invitation {
    /// The name of the socket.
    name: [u8; 16],
    /// This rank's share of the key of all links.
    share: [u8; 32],
}

impl Door {
    /// Opens a door with a random name and a random share of the key.
    ///
    /// # Errors
    /// [`EnvironmentError`] when the system has no socket or no random numbers.
    pub fn open() -> Result<Self> {
        let (mut name, share) = ([0; 16], random()?);
        name.copy_from_slice(&random()?[..16]);
        let invitation = Invitation { name, share };
        let listener = local::listen(&invitation.socket())
            .and_then(|listener| Listener::SameUser(listener).prepared())
            .map_err(|error| EnvironmentError::new("opening a socket for the other ranks", error, FILES))?;
        Ok(Self { listener, invitation })
    }

    /// The invitation, to be sent to all other ranks of the job.
    pub fn invitation(&self) -> &Invitation {
        &self.invitation
    }
}

impl Invitation {
    fn socket(&self) -> String {
        format!("hybrid-ep/link/{}", hex(&self.name))
    }
}

/// Omits the share, which is secret.
impl fmt::Debug for Invitation {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "Invitation({})", hex(&self.name))
    }
}

impl fmt::Display for Invitation {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{}{}", hex(&self.name), hex(&self.share))
    }
}

impl FromStr for Invitation {
    type Err = NoInvitation;

    fn from_str(text: &str) -> std::result::Result<Self, NoInvitation> {
        let (digits, rest) = text.as_bytes().as_chunks::<2>();
        let bytes: Option<Vec<u8>> = digits
            .iter()
            .map(|&[high, low]| {
                let digit = |byte: u8| char::from(byte).to_digit(16);
                u8::try_from(16 * digit(high)? + digit(low)?).ok()
            })
            .collect();
        let bytes = bytes.filter(|bytes| rest.is_empty() && bytes.len() == 48).ok_or(NoInvitation)?;
        let (mut name, mut share) = ([0; 16], [0; 32]);
        name.copy_from_slice(&bytes[..16]);
        share.copy_from_slice(&bytes[16..]);
        Ok(Self { name, share })
    }
}

/// The error for a text that is not an [`Invitation`].
#[derive(Debug, Clone, Copy, PartialEq, Eq, thiserror::Error)]
#[error("not an invitation of a rank")]
pub struct NoInvitation;

fn hex(bytes: &[u8]) -> String {
    bytes.iter().map(|byte| format!("{byte:02x}")).collect()
}

/// This rank's links to all other ranks.
#[derive(Debug)]
pub struct Links {
    /// The links in rank order, without this rank.
    pub links: Vec<(Rank, Link)>,
    key: Key,
}

impl Links {
    /// Links this rank with all other ranks. Collective. `invitations` are those of all ranks, in rank order.
    ///
    /// # Errors
    /// - [`PeerError`](crate::PeerError) that names a rank which is lost or late.
    /// - [`EnvironmentError`] when this rank cannot reach another rank's socket.
    /// - [`CallerError::Interrupted`](crate::CallerError::Interrupted) when the program stopped the wait.
    pub fn connect(door: Door, member: &Member, invitations: &[Invitation]) -> Result<Self> {
        let shares: Vec<&[u8]> = invitations.iter().map(|invitation| &invitation.share[..]).collect();
        let base =
            member.secret.as_ref().map_or(Key::of(b"hybrid-ep links", b""), |s: &Secret| s.key().clone());
        let key = base.derive(b"links", &shares);
        let mut meeting = Meeting {
            rank: member.rank,
            ranks: member.ranks as u32,
            key: &key,
            watch: Watch { rank: member.rank, interrupt: member.interrupt.clone() },
            peers: invitations.iter().map(|invitation| Peer::new(invitation.socket())).collect(),
            certain: None,
            vague: None,
        };
        let met = meeting.meet(&door, Clock::new(member.timeout));
        // Tell the peers of an error before the door and the links close: a link that closes without a message means
        // that this rank died.
        let error = match met {
            Ok(()) => None,
            Err(error) => Some((Loss::of(&error, member.rank).to_bytes(), error)),
        };
        let mut links = Vec::new();
        for (peer, at) in meeting.peers.into_iter().zip(0..) {
            let State::Linked { mut channel, process } = peer.state else { continue };
            match &error {
                None => links.push((Rank(at), Link { channel, process })),
                Some((loss, _)) => {
                    channel.send(kind::LOST, loss);
                    channel.finish();
                }
            }
        }
        match error {
            None => Ok(Self { links, key }),
            Some((_, error)) => Err(error),
        }
    }

    /// A code over `what` that only the ranks of this job can make.
    pub fn stamp(&self, what: &[u8]) -> [u8; 32] {
        self.key.code(b"stamp", &[what])
    }
}

/// The state of a rank while it connects its links.
struct Meeting<'a> {
    rank: Rank,
    ranks: u32,
    key: &'a Key,
    watch: Watch,
    peers: Vec<Peer>,
    /// The first certain loss.
    certain: Option<Loss>,
    /// The first loss that another loss may have caused, and when this rank noticed it.
    vague: Option<(Loss, Instant)>,
}

struct Peer {
    socket: String,
    state: State,
}

enum State {
    /// Not connected. This rank tries to connect to a lower rank from the given time on; a higher rank connects itself.
    Disconnected(Instant),
    /// The handshake is in progress. The number is the process ID of the other end.
    Proving(Outbound, Option<u32>),
    /// The handshake is complete, but the listener has not accepted the link yet.
    Proven(Channel, Option<u32>),
    Linked {
        channel: Channel,
        process: Option<u32>,
    },
}

impl Peer {
    fn new(socket: String) -> Self {
        Self { socket, state: State::Disconnected(Instant::now()) }
    }
}

impl Meeting<'_> {
    fn meet(&mut self, door: &Door, clock: Clock) -> Result<()> {
        let mut reception = Reception::new(&door.listener, self.key, Role::Link);
        loop {
            for (claim, channel) in reception.turn()? {
                self.accept(claim, channel);
            }
            for at in 0..self.peers.len() {
                if at != self.rank.index() {
                    self.advance(at)?;
                }
            }
            let linked = |peer: &Peer| matches!(peer.state, State::Linked { .. });
            let missing =
                (0..self.peers.len()).find(|&at| at != self.rank.index() && !linked(&self.peers[at]));
            let aged = self.vague.as_ref().filter(|(_, since)| since.elapsed() >= GRACE_PERIOD);
            if let Some(loss) = self.certain.clone().or_else(|| aged.map(|(loss, _)| loss.clone())) {
                return Err(loss.error(self.rank, None, WHAT, clock.waited()));
            }
            let Some(missing) = missing else { return Ok(()) };
            if clock.is_over() {
                let loss = Loss::new(Rank(missing as u32), PeerFault::Late, "");
                return Err(loss.error(self.rank, None, WHAT, clock.waited()));
            }
            self.watch.check()?;
            let mut until =
                self.watch.until(clock.deadline).min(reception.next_look().unwrap_or(clock.deadline));
            if self.vague.is_some()
                || self.peers.iter().any(|peer| matches!(peer.state, State::Disconnected(_)))
            {
                until = until.min(Instant::now() + RETRY);
            }
            let mut fds = Vec::new();
            reception.interest(&mut fds);
            for peer in &self.peers {
                fds.extend(match &peer.state {
                    State::Disconnected(_) => None,
                    State::Proving(outbound, _) => outbound.wire().map(|wire| wire.interest()),
                    State::Proven(channel, _) => Some(channel.wire().interest()),
                    State::Linked { channel, .. } => {
                        // Messages that are already here are for later and must not end the wait.
                        (!channel.wire().holds()).then(|| channel.wire().interest())
                    }
                });
            }
            wait(&mut fds, until);
        }
    }

    /// Accepts a link from a higher rank, unless that rank has one already.
    fn accept(&mut self, claim: Claim, mut channel: Channel) {
        let free = |peer: &Peer| matches!(peer.state, State::Disconnected(_));
        let fits = claim.to == self.rank && claim.from > self.rank && claim.ranks == self.ranks;
        let Some(peer) = self.peers.get_mut(claim.from.index()).filter(|peer| fits && free(peer)) else {
            channel.finish();
            return;
        };
        let Socket::Unix(socket) = channel.wire().socket() else { return };
        // The listener has checked the user; this asks for the process ID.
        let process = local::same_user(socket).flatten();
        channel.send(READY, &[]);
        channel.wire_mut().take_descriptors();
        channel.wire_mut().flush();
        peer.state = State::Linked { channel, process };
    }

    fn advance(&mut self, at: usize) -> Result<()> {
        let (rank, key) = (Rank(at as u32), self.key);
        let state = std::mem::replace(&mut self.peers[at].state, State::Disconnected(Instant::now() + RETRY));
        self.peers[at].state = match state {
            State::Disconnected(when) if rank > self.rank || Instant::now() < when => {
                State::Disconnected(when)
            }
            State::Disconnected(_) => match local::connect(&self.peers[at].socket) {
                Ok((stream, process)) => {
                    let claim = Claim { from: self.rank, to: rank, ranks: self.ranks };
                    match Outbound::new(Socket::Unix(stream), key, Role::Link, claim)? {
                        Some(outbound) => State::Proving(outbound, process),
                        None => return Ok(()),
                    }
                }
                Err(error) => {
                    // The peer's door was open when it sent its invitation, so the peer has closed it since. (A full
                    // queue gives another error.)
                    if error.kind() == ErrorKind::ConnectionRefused {
                        let loss = Loss::new(rank, PeerFault::Died, "its socket is closed");
                        self.vague.get_or_insert((loss, Instant::now()));
                    } else if error.kind() != ErrorKind::WouldBlock {
                        return Err(unreachable(rank, &error));
                    }
                    return Ok(());
                }
            },
            State::Proving(mut outbound, process) => match outbound.advance(key) {
                Progress::Waiting => State::Proving(outbound, process),
                Progress::Unauthenticated => return Ok(()),
                Progress::Done((), mut channel) => {
                    channel.wire_mut().take_descriptors();
                    State::Proven(channel, process)
                }
            },
            State::Proven(mut channel, process) => {
                channel.wire_mut().flush();
                match channel.receive() {
                    None => State::Proven(channel, process),
                    Some(Incoming::Message(message)) if message[0] == READY => {
                        State::Linked { channel, process }
                    }
                    Some(_) => return Ok(()),
                }
            }
            State::Linked { mut channel, process } => {
                channel.wire_mut().flush();
                if let Some(end) = self.loss_on(&mut channel, rank) {
                    self.certain.get_or_insert(end);
                }
                State::Linked { channel, process }
            }
        };
        Ok(())
    }

    /// The loss of a linked rank, if it is lost already. Messages of the peer stay in the socket: a rank that has all
    /// its links may already send descriptors.
    fn loss_on(&self, channel: &mut Channel, rank: Rank) -> Option<Loss> {
        match channel.receive_unless(MESSAGE)? {
            Incoming::Message(message) if message[0] == kind::LOST => {
                let told = Loss::from_bytes(&message[1..]).filter(|loss| loss.peer != self.rank);
                let text = || format!("it reported that rank {} is lost", self.rank);
                Some(told.unwrap_or_else(|| Loss::new(rank, PeerFault::Failed, text())))
            }
            Incoming::Message(message) if message[0] == kind::LEFT => {
                Some(Loss::new(rank, PeerFault::Left, ""))
            }
            Incoming::Message(_) => Some(Loss::new(rank, PeerFault::Failed, "it sent an unexpected message")),
            Incoming::End(_) => Some(Loss::new(rank, PeerFault::Died, "its link closed")),
        }
    }
}

fn unreachable(rank: Rank, error: &io::Error) -> Error {
    let hint = "all ranks must run as one user on one machine, in one network namespace";
    EnvironmentError::new(format!("reaching rank {rank}"), error, hint).into()
}

/// A socket to another rank of the machine.
#[derive(Debug)]
pub struct Link {
    channel: Channel,
    process: Option<u32>,
}

impl Link {
    /// The process ID of the other end, from the system; `None` if that process is not visible in this PID namespace.
    pub fn process(&self) -> Option<u32> {
        self.process
    }

    /// Splits the link into its sending and its receiving direction, for use by different threads.
    ///
    /// # Errors
    /// [`EnvironmentError`] when the process has no descriptor left.
    pub fn split(self) -> Result<(LinkSender, LinkReceiver)> {
        let failed = |error| EnvironmentError::new("duplicating the socket of a link", error, FILES);
        let (sender, receiver) = self.channel.split().map_err(failed)?;
        let process = std::process::id();
        Ok((LinkSender { channel: Some(sender), process }, LinkReceiver { channel: receiver }))
    }
}

/// The sending direction of a [`Link`]. Dropping it sends a leave message.
#[derive(Debug)]
pub struct LinkSender {
    channel: Option<Channel>,
    /// The process that joined. A forked child must not send a leave message.
    process: u32,
}

impl LinkSender {
    /// Sends a message with or without a descriptor. Waits at most `timeout` for the peer to read.
    ///
    /// # Errors
    /// [`ErrorKind::TimedOut`] when the peer does not read in time, [`ErrorKind::BrokenPipe`] when the peer has closed
    /// the link, or an error of the system when it cannot duplicate the descriptor.
    pub fn send(
        &mut self,
        body: &[u8],
        descriptor: Option<BorrowedFd<'_>>,
        timeout: Duration,
    ) -> io::Result<()> {
        let Some(channel) = &mut self.channel else { return Err(ErrorKind::BrokenPipe.into()) };
        let clock = Clock::new(timeout);
        match descriptor {
            Some(descriptor) => {
                channel.send_descriptor(MESSAGE, body, descriptor.try_clone_to_owned()?);
            }
            None => channel.send(MESSAGE, body),
        }
        loop {
            let wire = channel.wire_mut();
            wire.flush();
            match (wire.is_unwritable(), wire.has_unsent()) {
                (true, _) => return Err(ErrorKind::BrokenPipe.into()),
                (false, false) => return Ok(()),
                (false, true) if clock.is_over() => return Err(ErrorKind::TimedOut.into()),
                // Rare and short, because a thread of the peer reads descriptors as they arrive.
                (false, true) => std::thread::sleep(Duration::from_millis(1)),
            }
        }
    }
}

impl LinkSender {
    /// Sends a message if the socket has room for it now, else drops it. No error if the peer has closed the link.
    pub fn try_send(&mut self, body: &[u8]) {
        let Some(channel) = &mut self.channel else { return };
        channel.wire_mut().flush();
        if !channel.wire().has_unsent() {
            channel.send(MESSAGE, body);
            channel.wire_mut().flush();
        }
    }
}

impl AsFd for LinkSender {
    fn as_fd(&self) -> BorrowedFd<'_> {
        self.channel.as_ref().expect("as long as it lives").wire().socket().as_fd()
    }
}

impl Drop for LinkSender {
    fn drop(&mut self) {
        if let Some(mut channel) = self.channel.take()
            && self.process == std::process::id()
        {
            channel.send(kind::LEFT, &[]);
            channel.wire_mut().flush();
            channel.wire().socket().shut_down();
        }
    }
}

/// What a [`LinkReceiver`] received.
#[derive(Debug)]
#[non_exhaustive]
pub enum LinkEvent {
    /// A message of the peer's [`LinkSender`], with its descriptor.
    Message(Vec<u8>, Option<OwnedFd>),
    /// The peer's leave message. No event follows.
    Left,
    /// The peer's process has died, or it sent a malformed message. No event follows.
    Died,
}

/// The receiving direction of a [`Link`].
#[derive(Debug)]
pub struct LinkReceiver {
    channel: Channel,
}

impl LinkReceiver {
    /// The next event, if it has arrived.
    pub fn receive(&mut self) -> Option<LinkEvent> {
        Some(match self.channel.receive()? {
            Incoming::Message(mut message) => match message[0] {
                MESSAGE => {
                    message.drain(..1);
                    LinkEvent::Message(message, self.channel.descriptor())
                }
                kind::LEFT | kind::LOST => LinkEvent::Left,
                // An unknown kind, for example of a later version: an empty message, which the caller can ignore.
                _ => LinkEvent::Message(Vec::new(), self.channel.descriptor()),
            },
            Incoming::End(_) => LinkEvent::Died,
        })
    }

    /// The next event; `None` if none arrives within `timeout`.
    pub fn wait(&mut self, timeout: Duration) -> Option<LinkEvent> {
        let clock = Clock::new(timeout);
        loop {
            match self.receive() {
                None if clock.is_over() => return None,
                None => wait(&mut [self.channel.wire().interest()], clock.deadline),
                received => return received,
            }
        }
    }
}

impl AsFd for LinkReceiver {
    fn as_fd(&self) -> BorrowedFd<'_> {
        self.channel.wire().socket().as_fd()
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn invitations_survive_the_round_trip_as_text() {
        let door = Door::open().unwrap();
        let text = door.invitation().to_string();
        assert_eq!(text.parse().as_ref(), Ok(door.invitation()));
        assert_eq!(text.len(), 96);
        for wrong in ["", &text[2..], &format!("{text}0"), &text.replace(['0', '1', '2', '3'], "g")] {
            assert_eq!(wrong.parse::<Invitation>(), Err(NoInvitation), "{wrong}");
        }
        assert!(!format!("{door:?}").contains(&text[32..]));
    }
}
