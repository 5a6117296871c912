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
//! death without process IDs, also between PID namespaces and machines. If the machine of the other end acknowledges
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
/// How often a rank that waits for links looks for news of the rendezvous.
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
    /// The address of the socket for ranks of other machines, for a rank of another machine.
    address: Option<SocketAddr>,
}

impl Door {
    /// Opens a door with a random name and a random share of the key.
    ///
    /// # Errors
    /// [`EnvironmentError`] when the system has no socket or no random numbers.
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
    hold: Arc<Hold>,
}

impl Links {
    /// Links this rank with all other ranks. Collective. `invitations` are those of all ranks, in rank order. Those of
    /// ranks on other machines have an address ([`Invitation::at`]). `lost` returns an error when this rank has learned
    /// otherwise that a rank is lost, as [`Rendezvous::lost`](super::Rendezvous::lost) does.
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
        let mut meeting = Meeting {
            rank: member.rank,
            ranks: member.ranks as u32,
            key: &key,
            watch: Watch { rank: member.rank, interrupt: member.interrupt.clone() },
            network_timeout: member.network_timeout,
            peers: invitations.iter().map(Peer::new).collect(),
            certain: None,
            vague: None,
        };
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
    fn new(invitation: &Invitation) -> Self {
        let local = || Address::Local(invitation.socket());
        let address = invitation.address.map_or_else(local, Address::Network);
        Self { address, state: State::Disconnected(Instant::now()) }
    }
}

impl Meeting<'_> {
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
            let linked = |peer: &Peer| matches!(peer.state, State::Linked { .. });
            let missing =
                (0..self.peers.len()).find(|&at| at != self.rank.index() && !linked(&self.peers[at]));
            let aged = self.vague.as_ref().filter(|(_, since)| since.elapsed() >= GRACE_PERIOD);
            if let Some(loss) = self.certain.clone().or_else(|| aged.map(|(loss, _)| loss.clone())) {
                return Err(loss.error(self.rank, None, WHAT, clock.waited()));
            }
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
            // The sockets of the rendezvous are not among those that end the wait.
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
        let process = match (channel.wire().socket(), &peer.address) {
            // The listener has checked the user; this asks for the process ID.
            (Socket::Unix(socket), Address::Local(_)) => local::same_user(socket).flatten(),
            (Socket::Tcp(socket), Address::Network(_))
                if network::watch(socket, self.network_timeout).is_ok() =>
            {
                None
            }
            // A rank of this machine that connects over the network, or a rank of another one over a local socket.
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

    /// Notes why a connection to a peer failed. The caller tries again, until the loss is certain.
    fn not_connected(&mut self, at: usize, kind: ErrorKind, error: impl Fn() -> String) -> Result<()> {
        let (rank, address) = (Rank(at as u32), &self.peers[at].address);
        let loss = match (kind, address) {
            // The peer's door was open when it sent its invitation, so the peer has closed it since. (A full queue gives
            // another error.)
            (ErrorKind::ConnectionRefused, Address::Local(_)) => {
                Loss::new(rank, PeerFault::Died, "its socket is closed")
            }
            (ErrorKind::ConnectionRefused, Address::Network(address)) => {
                let seen = format!("{address} refuses connections; does a firewall reject them?");
                Loss::new(rank, PeerFault::Died, seen)
            }
            (_, Address::Network(address)) if is_unreachable(kind) => {
                let seen =
                    format!("{address}: {}; do a firewall and the routes allow this connection?", error());
                Loss::new(rank, PeerFault::Unreachable, seen)
            }
            // Retry. Either the peer's queue of connections is full, or the peer closed this one: to make room for another
            // one, or because it closed its door. A closed door refuses the next attempt.
            (ErrorKind::WouldBlock | ErrorKind::ConnectionReset | ErrorKind::BrokenPipe, _)
            | (_, Address::Network(_)) => return Ok(()),
            (_, Address::Local(_)) => return Err(unreachable(rank, &error())),
        };
        self.vague.get_or_insert((loss, Instant::now()));
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

fn unreachable(rank: Rank, error: &str) -> Error {
    let hint = "ranks of one machine must run as one user; set HYBRID_EP_MACHINE to a name in each container that shares no memory with the others";
    EnvironmentError::new(format!("reaching rank {rank}"), error, hint).into()
}

#[cfg(test)]
mod tests {
    use std::net::Ipv4Addr;
    use std::sync::atomic::{AtomicBool, Ordering::Relaxed};

    use rustix::event::{PollFd, PollFlags};

    use super::super::{LinkEvent, LinkReceiver, LinkSender};
    use super::*;
    use crate::error::PeerError;

    const LONG: Duration = Duration::from_secs(60);

    /// Two ranks whose links lead over the network. Returns the links of each.
    fn two_machines() -> [Links; 2] {
        two_machines_at(|address| address, LONG).map(Result::unwrap)
    }

    /// As [`two_machines`], with `spoil`ed addresses, and with the timeout of rank 0.
    fn two_machines_at(spoil: impl Fn(SocketAddr) -> SocketAddr, timeout: Duration) -> [Result<Links>; 2] {
        let mut doors = [(); 2].map(|()| Door::open().unwrap());
        let addresses = doors.each_mut().map(|door| door.open_to(Ipv4Addr::LOCALHOST.into()).unwrap());
        let invitations = [0, 1].map(|rank| {
            let invitation = doors[rank].invitation().clone();
            invitation.at(spoil(addresses[rank]))
        });
        std::thread::scope(|scope| {
            let mut members = [timeout, LONG].into_iter().zip(0..);
            let threads = doors.map(|door| {
                let (timeout, rank) = members.next().unwrap();
                let member = Member::new(Rank(rank), 2, timeout);
                let invitations = &invitations;
                scope.spawn(move || Links::connect(door, &member, invitations, || None))
            });
            threads.map(|thread| thread.join().unwrap())
        })
    }

    fn halves(mut links: Links) -> (LinkSender, LinkReceiver) {
        let (_, link) = links.links.pop().unwrap();
        assert!(link.is_remote() && link.process().is_none());
        link.split()
    }

    #[test]
    #[cfg_attr(miri, ignore = "sockets")]
    fn links_between_machines_carry_messages_and_end_with_a_leave_message_or_a_death() {
        for leaves in [true, false] {
            let [mut one, mut other] = two_machines().map(halves);
            one.0.try_send(b"first");
            one.0.queue(b"second");
            for expected in [&b"first"[..], b"second"] {
                match other.1.wait(LONG) {
                    Some(LinkEvent::Message(body, None)) => assert_eq!(body, expected),
                    event => panic!("{event:?}"),
                }
            }
            if leaves {
                one.0.leave();
                assert!(matches!(other.1.wait(LONG), Some(LinkEvent::Left)));
            } else {
                // The system closes the sockets of a process that is killed.
                rustix::net::shutdown(&one.0, rustix::net::Shutdown::Both).unwrap();
                assert!(matches!(other.1.wait(LONG), Some(LinkEvent::Died)));
            }
            other.0.try_send(b"to a rank that is gone");
        }
    }

    /// A peer that was stopped for a while reads all that was sent to it before the link ended.
    #[test]
    #[cfg_attr(miri, ignore = "sockets")]
    fn a_leave_message_follows_messages_that_the_socket_had_no_room_for() {
        let [mut one, mut other] = two_machines().map(halves);
        let mut sent = 0;
        while one.0.has_room() {
            one.0.queue(&[7; 60_000]);
            sent += 1;
        }
        std::thread::scope(|scope| {
            let read = scope.spawn(move || {
                let mut messages = 0;
                loop {
                    match other.1.wait(LONG) {
                        Some(LinkEvent::Message(..)) => messages += 1,
                        Some(LinkEvent::Left) => break messages,
                        event => panic!("{event:?} after {messages} messages"),
                    }
                }
            });
            one.0.leave();
            assert_eq!(read.join().unwrap(), sent);
        });
    }

    #[test]
    #[cfg_attr(miri, ignore = "sockets")]
    fn both_directions_of_a_link_share_one_descriptor() {
        use std::os::fd::{AsFd as _, AsRawFd as _};
        let [one, mut other] = two_machines().map(halves);
        let (sender, mut receiver) = one;
        assert_eq!(sender.as_fd().as_raw_fd(), receiver.as_fd().as_raw_fd());
        // It stays open until both directions are dropped.
        drop(sender);
        assert!(matches!(other.1.wait(LONG), Some(LinkEvent::Left)));
        other.0.queue(b"to the receiver");
        assert!(
            matches!(receiver.wait(LONG), Some(LinkEvent::Message(body, None)) if body == b"to the receiver")
        );
    }

    #[test]
    #[cfg_attr(miri, ignore = "sockets")]
    fn a_rank_whose_address_answers_to_nothing_is_named() {
        // A port that was bound a moment ago, and is free again.
        let free = TcpListener::bind("127.0.0.1:0").unwrap().local_addr().unwrap();
        let [zero, one] = two_machines_at(|_| free, Duration::from_secs(2));
        let said = one.as_ref().unwrap_err().to_string();
        assert!(
            said.contains(&format!("{free} refuses connections; does a firewall reject them?")),
            "{said}"
        );
        let fault = |links: Result<Links>| match links {
            Err(Error::Peer(PeerError { peer, fault, .. })) => (peer, fault),
            other => panic!("{other:?}"),
        };
        // Rank 1 connects to rank 0, which waits for it.
        assert_eq!(fault(one), (Rank(0), PeerFault::Died));
        assert_eq!(fault(zero), (Rank(1), PeerFault::Late));
    }

    #[test]
    #[cfg_attr(miri, ignore = "sockets")]
    fn a_rank_of_this_machine_cannot_link_over_the_network() {
        let mut doors = [(); 2].map(|()| Door::open().unwrap());
        let address = doors[0].open_to(Ipv4Addr::LOCALHOST.into()).unwrap();
        let honest: Vec<Invitation> = doors.iter().map(|door| door.invitation().clone()).collect();
        let mut lying = honest.clone();
        lying[0] = lying[0].clone().at(address);
        std::thread::scope(|scope| {
            let [zero, one] = doors;
            let member = |rank| Member::new(Rank(rank), 2, Duration::from_millis(300));
            let (honest, lying) = (&honest, &lying);
            let zero = scope.spawn(move || Links::connect(zero, &member(0), honest, || None));
            let one = scope.spawn(move || Links::connect(one, &member(1), lying, || None));
            for rank in [zero, one] {
                assert!(rank.join().unwrap().is_err());
            }
        });
    }

    /// The doors of `N` ranks, the invitations of all of them, and the key of their links.
    fn doors<const N: usize>() -> ([Door; N], Vec<Invitation>, Key) {
        let doors = [(); N].map(|()| Door::open().unwrap());
        let invitations: Vec<Invitation> = doors.iter().map(|door| door.invitation().clone()).collect();
        let shares: Vec<&[u8]> = invitations.iter().map(|invitation| &invitation.share[..]).collect();
        let key = Key::of(b"hybrid-ep links", b"").derive(b"links", &shares);
        (doors, invitations, key)
    }

    /// A member that waits for long.
    fn patient(rank: u32, ranks: usize) -> Member {
        Member::new(Rank(rank), ranks, LONG)
    }

    /// Connects to a rank that links, as the rank of `claim`.
    fn call(to: &Invitation, key: &Key, claim: Claim) -> Channel {
        let (stream, _) = local::connect(&to.socket()).unwrap();
        let mut caller = Outbound::new(Socket::Unix(stream), key, Role::Link, claim).unwrap().unwrap();
        loop {
            match caller.advance(key) {
                Progress::Done((), channel) => return channel,
                Progress::Waiting => wait(&mut [caller.wire().unwrap().interest()], Instant::now() + LONG),
                Progress::Unauthenticated => panic!("the caller knows the secret"),
            }
        }
    }

    /// Accepts the link of a rank, and says so.
    fn answer(door: &Door, key: &Key) -> Channel {
        let mut reception = Reception::new(&door.listener, key, Role::Link);
        let (_, mut channel) = loop {
            match reception.turn().unwrap().pop() {
                Some(proven) => break proven,
                None => std::thread::sleep(Duration::from_millis(1)),
            }
        };
        channel.send(READY, &[]);
        channel.wire_mut().flush();
        channel
    }

    fn next(channel: &mut Channel) -> Incoming {
        loop {
            match channel.receive() {
                Some(incoming) => return incoming,
                None => wait(&mut [channel.wire().interest()], Instant::now() + LONG),
            }
        }
    }

    /// A peer drops a connection whose offer it has not read, for example to make room.
    #[test]
    #[cfg_attr(miri, ignore = "sockets")]
    fn a_rank_whose_connection_is_reset_connects_again() {
        let ([zero, one], invitations, _) = doors();
        let invitations = &invitations;
        std::thread::scope(|scope| {
            let one = scope.spawn(move || Links::connect(one, &patient(1, 2), invitations, || None));
            let unread = loop {
                match zero.listener.accept() {
                    Ok(socket) => break socket.unwrap(),
                    Err(_) => std::thread::sleep(Duration::from_millis(1)),
                }
            };
            wait(&mut [PollFd::new(&unread, PollFlags::IN)], Instant::now() + LONG);
            drop(unread);
            Links::connect(zero, &patient(0, 2), invitations, || None).unwrap();
            one.join().unwrap().unwrap();
        });
    }

    /// Rank 2 has a door but never links. The test is rank 0 for rank 1, to let rank 1 fail once it has linked, and then
    /// rank 1 for rank 0.
    #[test]
    #[cfg_attr(miri, ignore = "sockets")]
    fn a_rank_that_fails_after_it_has_linked_is_named_while_another_rank_is_missing() {
        let ([zero, one, _two], invitations, key) = doors();
        let invitations = &invitations;
        let fails = &AtomicBool::new(false);
        let said = std::thread::scope(|scope| {
            let failing = scope.spawn(move || {
                let failure = || EnvironmentError::new("mapping memory", "no memory is left", "").into();
                let lost = || fails.load(Relaxed).then(failure);
                Links::connect(one, &patient(1, 3), invitations, lost)
            });
            let mut link = answer(&zero, &key);
            fails.store(true, Relaxed);
            let said = next(&mut link);
            let found = failing.join().unwrap();
            assert!(matches!(found, Err(Error::Environment(_))), "{found:?}");
            said
        });
        let Incoming::Message(said) = said else { panic!("{said:?}") };
        assert_eq!(said[0], kind::LOST);
        let error = std::thread::scope(|scope| {
            let zero = scope.spawn(move || Links::connect(zero, &patient(0, 3), invitations, || None));
            let claim = Claim { from: Rank(1), to: Rank(0), ranks: 3, generation: 0 };
            let mut link = call(&invitations[0], &key, claim);
            link.send(said[0], &said[1..]);
            link.finish();
            zero.join().unwrap().unwrap_err()
        });
        let Error::Peer(error) = error else { panic!("{error}") };
        assert_eq!((error.peer, error.fault), (Rank(1), PeerFault::Failed));
        assert!(error.cause.as_ref().is_some_and(|cause| cause.contains("no memory is left")), "{error}");
    }

    #[test]
    #[cfg_attr(miri, ignore = "sockets")]
    fn a_claim_that_does_not_fit_gets_no_link() {
        let fits = Claim { from: Rank(1), to: Rank(0), ranks: 2, generation: 0 };
        let another_world = Claim { ranks: 3, ..fits };
        let another_rank = Claim { to: Rank(1), ..fits };
        let itself = Claim { from: Rank(0), ..fits };
        let no_rank = Claim { from: Rank(2), ..fits };
        for claim in [fits, another_world, another_rank, itself, no_rank] {
            let ([zero, _one], invitations, key) = doors();
            let (invitations, is_answered) = (&invitations, &AtomicBool::new(false));
            let (answer, found) = std::thread::scope(|scope| {
                let zero = scope.spawn(move || {
                    let stop = || EnvironmentError::new("linking", "the caller has its answer", "").into();
                    let lost = || is_answered.load(Relaxed).then(stop);
                    Links::connect(zero, &patient(0, 2), invitations, lost)
                });
                // It stays open until rank 0 has linked: its end would be the death of a linked rank.
                let mut caller = call(&invitations[0], &key, claim);
                let answer = next(&mut caller);
                is_answered.store(true, Relaxed);
                (answer, zero.join().unwrap())
            });
            let expected =
                if claim == fits { Incoming::Message(vec![READY]) } else { Incoming::End(End::Closed) };
            assert_eq!(answer, expected, "{claim:?}");
            assert_eq!(found.is_ok(), claim == fits, "{claim:?}: {found:?}");
        }
    }

    #[test]
    #[cfg_attr(miri, ignore = "sockets")]
    fn only_the_ranks_that_are_linked_stamp_alike() {
        let stamps = || two_machines().map(|links| [&b"one"[..], b"two"].map(|what| links.stamp(what)));
        let [zero, one] = stamps();
        assert_eq!(zero, one);
        assert_ne!(zero[0], zero[1]);
        let [others, _] = stamps();
        assert!(zero.iter().all(|stamp| !others.contains(stamp)));
    }

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
