//! Links: sockets between all pairs of ranks.
//!
//! Every rank opens a [`Door`] (a listening socket) and sends its [`Invitation`] to the other ranks through the
//! rendezvous. Of two ranks, the one with the higher number connects to the other, and both ends prove that they know the
//! invitations of all ranks.
//!
//! A link between ranks of one machine is a local socket. The system reports to each end the user of the other end, and
//! the link carries descriptors of memory. A link between machines is a TCP connection to the second listener that a door
//! opens for it ([`Door::open_to`]).
//!
//! A link that closes without a leave message means that the process at its other end has died. Ranks can thus detect a
//! death without process IDs, even between PID namespaces and machines. If the machine of the other end acknowledges
//! nothing for [`Member::network_timeout`], the peer is unreachable.

use std::fmt;
use std::io::{self, ErrorKind};
use std::net::{IpAddr, SocketAddr, TcpListener};
use std::str::FromStr;
use std::sync::Arc;
use std::time::{Duration, Instant};

use super::channel::{Channel, End, Incoming, is_unreachable};
use super::handshake::{Claim, Outbound, Progress, Role};
use super::hub::GRACE_PERIOD;
use super::link::{Held, Hold, Link, MESSAGE};
use super::note::{Clock, Loss, kind};
use super::reception::Reception;
use super::secret::{Key, Secret, random};
use super::store::Listener;
use super::wire::{Socket, wait};
use super::{Member, Watch};
use super::{local, network};
use crate::error::{EnvironmentError, Error, PeerFault, Result};
use crate::topology::Rank;

/// Kind of the message with which the listener accepts a link.
const READY: u8 = 16;
/// Interval at which a rank that waits for links asks the rendezvous for lost ranks.
const LOOK: Duration = Duration::from_millis(50);
/// The longest message of a link, in bytes.
const LONGEST: usize = 64 << 10;
/// Pause between attempts to connect.
const RETRY: Duration = Duration::from_millis(5);
const WHAT: &str = "its link";
/// Hint for a failed socket or descriptor.
const FILES: &str = "has the process reached its limit of open files (ulimit -n)?";

/// The listening socket on which a rank accepts links from its peers.
#[derive(Debug)]
pub struct Door {
    listener: Listener,
    /// The listener for ranks of other machines.
    network: Option<Listener>,
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
    /// The network address of the door, if the invitation is of a rank on another machine.
    address: Option<SocketAddr>,
}

impl Door {
    /// Opens a door with a random name and a random share of the key.
    ///
    /// # Errors
    /// [`EnvironmentError`] when the system provides no socket or no random numbers.
    pub fn open() -> Result<Self> {
        let (mut name, share) = ([0; 16], random()?);
        name.copy_from_slice(&random()?[..16]);
        let invitation = Invitation { name, share, address: None };
        let listener = local::listen(&invitation.socket())
            .and_then(|listener| Listener::SameUser(listener).prepared())
            .map_err(|error| EnvironmentError::new("opening a socket for the other ranks", error, FILES))?;
        Ok(Self { listener, network: None, invitation })
    }

    /// Opens the door to ranks of other machines too, at this network address of the machine. Returns the address with
    /// the port, which the system chooses.
    ///
    /// # Errors
    /// [`EnvironmentError`] when the machine does not have the address.
    pub fn open_to(&mut self, address: IpAddr) -> Result<SocketAddr> {
        let failed = |error| {
            let hint = "set HYBRID_EP_TRANSPORT_ADDRESS to an address or an interface of this machine";
            EnvironmentError::new(format!("listening for ranks of other machines at {address}"), error, hint)
        };
        let listener = TcpListener::bind((address, 0)).map_err(failed)?;
        let bound = listener.local_addr().map_err(failed)?;
        self.network = Some(Listener::Tcp(listener).prepared().map_err(failed)?);
        Ok(bound)
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

    /// The invitation of a rank on another machine, whose [`Door::open_to`] returned `address`.
    #[must_use]
    pub fn at(self, address: SocketAddr) -> Self {
        Self { address: Some(address), ..self }
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
        Ok(Self { name, share, address: None })
    }
}

/// The error for a text that is not an [`Invitation`].
#[derive(Debug, Clone, Copy, PartialEq, Eq, thiserror::Error)]
#[error("not the text form of an invitation")]
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
    hold: Arc<Hold>,
}

impl Links {
    /// Links this rank with all other ranks. Collective. `invitations` are those of all ranks, in rank order. Those of
    /// ranks on other machines have an address ([`Invitation::at`]). `lost` returns an error when this rank has learned
    /// by other means that a rank is lost, like [`Rendezvous::lost`](super::Rendezvous::lost).
    ///
    /// # Errors
    /// - [`PeerError`](crate::PeerError) that names a rank which is lost, late or unreachable.
    /// - [`EnvironmentError`] when this rank cannot reach another rank's socket.
    /// - [`CallerError::Interrupted`](crate::CallerError::Interrupted) when the program stopped the wait.
    pub fn connect(
        door: Door,
        member: &Member,
        invitations: &[Invitation],
        mut lost: impl FnMut() -> Option<Error>,
    ) -> Result<Self> {
        let shares: Vec<&[u8]> = invitations.iter().map(|invitation| &invitation.share[..]).collect();
        let base =
            member.secret.as_ref().map_or(Key::of(b"hybrid-ep links", b""), |s: &Secret| s.key().clone());
        let key = base.derive(b"links", &shares);
        let mut meeting = Meeting::new(member, &key, invitations);
        let met = meeting.meet(&door, Clock::new(member.timeout), &mut lost);
        // Tell the peers of an error before the door and the links close: a link that closes without a message means
        // that this rank died.
        let error = match met {
            Ok(()) => None,
            Err(error) => Some((Loss::of(&error, member.rank).to_bytes(), error)),
        };
        let (mut links, hold) = (Vec::new(), Arc::new(Hold::default()));
        for (peer, at) in meeting.peers.into_iter().zip(0..) {
            let is_remote = matches!(peer.address, Address::Network(_));
            // A peer may have accepted a proven link already.
            let (State::Linked { mut channel, process } | State::Proven(mut channel, process)) = peer.state
            else {
                continue;
            };
            match &error {
                None => links.push((Rank(at), Link::new(channel, process, is_remote, Arc::clone(&hold)))),
                Some((loss, _)) => {
                    channel.send(kind::LOST, loss);
                    channel.finish();
                }
            }
        }
        match error {
            None => Ok(Self { links, key, hold }),
            Some((_, error)) => Err(error),
        }
    }

    /// Keeps the links open until the returned value is dropped, whatever this rank does with them.
    pub(super) fn hold(&self) -> Held {
        Held::new(&self.hold)
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
    network_timeout: Duration,
    peers: Vec<Peer>,
    /// The first certain loss.
    certain: Option<Loss>,
    /// The first loss that another loss may have caused, and when this rank noticed it.
    vague: Option<(Loss, Instant)>,
}

struct Peer {
    address: Address,
    state: State,
}

/// Where a peer listens.
enum Address {
    /// The name of a local socket.
    Local(String),
    Network(SocketAddr),
}

enum State {
    /// Not connected. This rank tries to connect to a lower rank at the given time; a higher rank connects to this rank.
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
    fn is_linked(&self) -> bool {
        matches!(self.state, State::Linked { .. })
    }

    fn new(invitation: &Invitation) -> Self {
        let local = || Address::Local(invitation.socket());
        let address = invitation.address.map_or_else(local, Address::Network);
        Self { address, state: State::Disconnected(Instant::now()) }
    }
}

impl<'a> Meeting<'a> {
    /// A rank that is linked to no peer yet. `key` is that of all links.
    fn new(member: &Member, key: &'a Key, invitations: &[Invitation]) -> Self {
        Self {
            rank: member.rank,
            ranks: member.ranks as u32,
            key,
            watch: Watch { rank: member.rank, interrupt: member.interrupt.clone() },
            network_timeout: member.network_timeout,
            peers: invitations.iter().map(Peer::new).collect(),
            certain: None,
            vague: None,
        }
    }

    fn meet(&mut self, door: &Door, clock: Clock, lost: &mut dyn FnMut() -> Option<Error>) -> Result<()> {
        let listeners = [Some(&door.listener), door.network.as_ref()].into_iter().flatten();
        let mut receptions: Vec<_> =
            listeners.map(|listener| Reception::new(listener, self.key, Role::Link)).collect();
        loop {
            for reception in &mut receptions {
                for (claim, channel) in reception.turn()? {
                    self.accept(claim, channel);
                }
            }
            for at in 0..self.peers.len() {
                if at != self.rank.index() {
                    self.advance(at)?;
                }
            }
            if let Some(loss) = self.loss() {
                return Err(loss.error(self.rank, None, WHAT, clock.waited()));
            }
            let missing =
                (0..self.peers.len()).find(|&at| at != self.rank.index() && !self.peers[at].is_linked());
            let Some(missing) = missing else { return Ok(()) };
            if let Some(error) = lost() {
                return Err(error);
            }
            if clock.is_over() {
                let loss = Loss::new(Rank(missing as u32), PeerFault::Late, "");
                return Err(loss.error(self.rank, None, WHAT, clock.waited()));
            }
            self.watch.check()?;
            let looks = receptions.iter().filter_map(Reception::next_look);
            let mut until = looks.fold(self.watch.until(clock.deadline), Instant::min);
            // The wait does not poll the sockets of the rendezvous, so it must be short.
            until = until.min(Instant::now() + LOOK);
            if self.vague.is_some()
                || self.peers.iter().any(|peer| matches!(peer.state, State::Disconnected(_)))
            {
                until = until.min(Instant::now() + RETRY);
            }
            let mut fds = Vec::new();
            receptions.iter().for_each(|reception| reception.interest(&mut fds));
            for peer in &self.peers {
                fds.extend(match &peer.state {
                    State::Disconnected(_) => None,
                    State::Proving(outbound, _) => outbound.wire().map(|wire| wire.interest()),
                    State::Proven(channel, _) => Some(channel.wire().interest()),
                    State::Linked { channel, .. } => {
                        // Messages that have already arrived are for later and must not end the wait.
                        (!channel.wire().holds()).then(|| channel.wire().interest())
                    }
                });
            }
            wait(&mut fds, until);
        }
    }

    /// Accepts a link from a higher rank, unless that rank already has a link.
    fn accept(&mut self, claim: Claim, mut channel: Channel) {
        let free = |peer: &Peer| matches!(peer.state, State::Disconnected(_));
        let fits = claim.to == self.rank && claim.from > self.rank && claim.ranks == self.ranks;
        let Some(peer) = self.peers.get_mut(claim.from.index()).filter(|peer| fits && free(peer)) else {
            channel.finish();
            return;
        };
        let process = match (channel.wire().socket(), &peer.address) {
            // The listener has checked the user; this asks for the process ID.
            (Socket::Unix(socket), Address::Local(_)) => local::same_user(socket).flatten(),
            (Socket::Tcp(socket), Address::Network(_))
                if network::watch(socket, self.network_timeout).is_ok() =>
            {
                None
            }
            // A rank of this machine connects over the network, or a rank of another machine over a local socket.
            _ => return,
        };
        channel.accept_at_most(LONGEST);
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
            State::Disconnected(_) => match self.connect(at) {
                Ok((socket, process)) => {
                    let claim = Claim { from: self.rank, to: rank, ranks: self.ranks, generation: 0 };
                    match Outbound::new(socket, key, Role::Link, claim)? {
                        Some(outbound) => State::Proving(outbound, process),
                        None => return Ok(()),
                    }
                }
                Err(error) if is_out_of_files(&error) => {
                    let what = format!("opening a socket to rank {rank}");
                    return Err(EnvironmentError::new(what, error, FILES).into());
                }
                Err(error) => return self.not_connected(at, error.kind(), || error.to_string()),
            },
            State::Proving(mut outbound, process) => match outbound.advance(key) {
                Progress::Waiting => State::Proving(outbound, process),
                Progress::Unauthenticated => {
                    return match outbound.wire().and_then(|wire| wire.failure()) {
                        Some(kind) => self.not_connected(at, kind, || kind.to_string()),
                        None => Ok(()),
                    };
                }
                Progress::Done((), mut channel) => {
                    channel.accept_at_most(LONGEST);
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

    /// Starts a connection to a peer. Returns the socket and the peer's process ID, if the system knows it.
    fn connect(&self, at: usize) -> io::Result<(Socket, Option<u32>)> {
        Ok(match &self.peers[at].address {
            Address::Local(name) => {
                let (stream, process) = local::connect(name)?;
                (Socket::Unix(stream), process)
            }
            Address::Network(address) => {
                (Socket::Tcp(network::start_connecting(*address, self.network_timeout)?), None)
            }
        })
    }

    /// Notes why a connection to a peer failed. This rank retries until the grace period of the loss ends.
    fn not_connected(&mut self, at: usize, kind: ErrorKind, error: impl Fn() -> String) -> Result<()> {
        if let Some(loss) = loss_of(Rank(at as u32), &self.peers[at].address, kind, error)? {
            self.vague.get_or_insert((loss, Instant::now()));
        }
        Ok(())
    }

    /// The loss that ends the meeting, if there is one. A peer that could not be reached and has been linked since is not
    /// lost.
    fn loss(&mut self) -> Option<Loss> {
        if self.vague.as_ref().is_some_and(|(loss, _)| self.peers[loss.peer.index()].is_linked()) {
            self.vague = None;
        }
        let aged = self.vague.as_ref().filter(|(_, since)| since.elapsed() >= GRACE_PERIOD);
        self.certain.clone().or_else(|| aged.map(|(loss, _)| loss.clone()))
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
            Incoming::End(End::Unreachable) => {
                Some(Loss::new(rank, PeerFault::Unreachable, "its link broke"))
            }
            Incoming::End(_) => Some(Loss::new(rank, PeerFault::Died, "its link closed")),
        }
    }
}

/// Whether no descriptor is left, in this process or in the system.
fn is_out_of_files(error: &io::Error) -> bool {
    use rustix::io::Errno;
    matches!(Errno::from_io_error(error), Some(Errno::MFILE | Errno::NFILE))
}

/// The loss that a failed connection to a peer implies; `None` if it implies none.
fn loss_of(
    rank: Rank,
    address: &Address,
    kind: ErrorKind,
    error: impl Fn() -> String,
) -> Result<Option<Loss>> {
    Ok(match (kind, address) {
        // The peer's door was open when it sent its invitation, so the peer has closed it since. (A full queue gives
        // another error.)
        (ErrorKind::ConnectionRefused, Address::Local(_)) => {
            Some(Loss::new(rank, PeerFault::Died, "its socket is closed"))
        }
        (ErrorKind::ConnectionRefused, Address::Network(address)) => {
            let seen = format!("{address} refuses connections; does a firewall reject them?");
            Some(Loss::new(rank, PeerFault::Died, seen))
        }
        (_, Address::Network(address)) if is_unreachable(kind) => {
            let seen = format!("{address}: {}; do a firewall and the routes allow this connection?", error());
            Some(Loss::new(rank, PeerFault::Unreachable, seen))
        }
        // Either the peer's queue of connections is full, or the peer closed this one: to make room for another connection, or
        // because it closed its door. A closed door refuses the next attempt.
        (ErrorKind::WouldBlock | ErrorKind::ConnectionReset | ErrorKind::BrokenPipe, _)
        | (_, Address::Network(_)) => None,
        (_, Address::Local(_)) => return Err(unreachable(rank, &error())),
    })
}

fn unreachable(rank: Rank, error: &str) -> Error {
    let hint = "ranks of one machine must run as one user; set HYBRID_EP_MACHINE to a different name in each container that shares no memory with the others";
    EnvironmentError::new(format!("reaching rank {rank}"), error, hint).into()
}

#[cfg(test)]
mod tests;
