//! Shares registered memory between processes: each process sends its allocations to all other processes of its machine, as
//! file descriptors, and to those of its NVLink domain on other machines, as fabric handles. The receivers map the
//! allocations.
//!
//! A rank has one link to every peer ([`ep::join::Links`]); `remote` serves the links to peers whose memory is not mapped.
//! When a rank's memory grows, the rank sends the new allocation and waits until the peer has mapped it. It also sends
//! heartbeats and, at the end, a leave message. A link that closes without a leave message means that the process died, or
//! that the network does not reach it. Missing heartbeats mean that the process is stopped. The link and heartbeat threads
//! write such news into the control block of their own rank, where its kernels read it.
//!
//! The operating system reports the user of a peer on this machine, and the handshake of the link proves that the peer is a
//! member of the job. Only the driver can interpret a descriptor or a fabric handle, so mapping it is the only possible
//! check.

use std::io;
use std::os::fd::{AsFd as _, BorrowedFd, OwnedFd};
use std::sync::mpsc::{Receiver, RecvTimeoutError, channel};
use std::sync::{Arc, Mutex, TryLockError, Weak};
use std::thread::JoinHandle;
use std::time::{Duration, Instant};

use ep::join::{LinkEvent, LinkReceiver, LinkSender, Machines, SnapshotLink};
use ep::{Config, EnvironmentError, PeerError, PeerFault, Rank, Result};

use crate::arena::Announce;
use crate::beat::{Heartbeat, Hearts};
use crate::buffer::Home;
use crate::driver::{Chunk, FABRIC_BYTES, FABRIC_HINT, Reservation, Shared};
use crate::notices::Notices;
use crate::params::GoneWord;
use crate::peers::Access;
use crate::remote::{Mirrors, News, RemoteLinks, is_left, linger, lock};

/// Kinds of messages: an allocation (`Chunk`) with its size and, between machines, its fabric handle; the answer after
/// mapping it or failing to; a heartbeat; and the word of `Control::left` that stands for the rank once it has left.
const CHUNK: u8 = 0;
const MAPPED: u8 = 1;
const NOT_MAPPED: u8 = 2;
const BEAT: u8 = 3;
const LEAVING: u8 = 5;
/// Stands for an answer when the peer has sent its leave message instead. Never sent.
const LEFT: u8 = 4;
/// The same when the network to the peer's machine has failed. Never sent.
const UNREACHABLE: u8 = 6;

/// How long a link's thread waits for a message at a time. Any length will do, because the thread then waits again.
const IDLE: Duration = Duration::from_secs(3600);

/// The memory of peers that this process maps, and the mirrors of the others. The link threads map further memory.
pub(crate) struct Mapped {
    /// By rank; `None` for this rank and for ranks with mirrors.
    pub(crate) peers: Vec<Option<Arc<Mutex<Reservation>>>>,
    pub(crate) mirrors: Arc<Mirrors>,
    pub(crate) hearts: Arc<Hearts>,
}

/// Starts the threads that serve the links to all peers and map memory, and the heartbeat thread. `access`: this rank's
/// access to every rank, in rank order. After an error, the peers see the links end only when this rank has reported the
/// error ([`ep::join::join`]).
pub(crate) fn serve_all(
    links: ep::join::Links,
    home: &Home,
    access: &[Access],
    machines: &Machines,
    config: &Config,
) -> Result<(Links, Mapped)> {
    let (rank, device, ranks) = (home.rank, &home.device, access.len());
    // The stall bound: a separate thread of the peer answers, whatever its program does.
    let timeout = config.stall_bound();
    let reserved = |&access: &Access| match access {
        Access::Machine | Access::Domain => {
            Reservation::new(device).map(|room| Some(Arc::new(Mutex::new(room))))
        }
        Access::Own | Access::Mirror => Ok(None),
    };
    let peers: Vec<Option<Arc<Mutex<Reservation>>>> = access.iter().map(reserved).collect::<Result<_>>()?;
    let notices = Notices::new(device, home.control.address(), ranks);
    let hearts = Hearts::new(ranks, timeout);
    let mirrors = Mirrors::new(device, access, Arc::clone(&home.report))?;
    let mut served = Links {
        mapping: MappingLinks {
            rank,
            timeout,
            machines: machines.clone(),
            peers: Vec::new(),
            process: std::process::id(),
        },
        remote: RemoteLinks::new(Arc::clone(&mirrors)),
        notices: Arc::clone(&notices),
        heartbeat: None,
    };
    let mut beats: Vec<(Rank, Box<dyn FnMut() + Send>)> = Vec::new();
    for (peer, link) in links.links {
        if access[peer.index()] == Access::Mirror {
            let (hearts, notices) = (Arc::clone(&hearts), Arc::clone(&notices));
            let tell = move |news| match news {
                News::Heartbeat => hearts.heard(peer),
                News::Abort(word) => notices.abort(word),
                News::Gone(word) => notices.gone(peer, word),
            };
            let beat = served.remote.serve(rank, peer, link.split(), tell)?;
            beats.push((peer, Box::new(beat)));
            continue;
        }
        let is_here = access[peer.index()] == Access::Machine;
        let (sender, receiver) = link.split();
        let sender = if is_here { Outward::Here(sender) } else { Outward::Across(SnapshotLink::new(sender)) };
        let sender = Arc::new(Mutex::new(sender));
        // Weak: the buffer owns the sender, and sends the leave message when the buffer is dropped.
        let (answering, beating) = (Arc::downgrade(&sender), Arc::downgrade(&sender));
        let (told, answers) = channel();
        let memory = peers[peer.index()].as_ref().map_or_else(Weak::new, Arc::downgrade);
        // Weak: the thread that drops the buffer must unmap the memory, not this one.
        let (device, notices, hearts) = (Arc::clone(device), Arc::clone(&notices), Arc::clone(&hearts));
        let thread = std::thread::Builder::new()
            .name(format!("ep-link-{rank}-{peer}"))
            .spawn(move || {
                let map = |bytes, shared: &Shared| {
                    let memory = memory.upgrade()?;
                    let mapped = Chunk::import(&device, shared, bytes)
                        .and_then(|chunk| lock(&memory).push(chunk, &[device.ordinal]));
                    // The peer converts NOT_MAPPED to an error that names this rank.
                    let answer = if mapped.is_ok() { MAPPED } else { NOT_MAPPED };
                    Some(lock(&*answering.upgrade()?).send(&[answer], None, timeout).is_ok())
                };
                let answer = |answer| {
                    // If the buffer has been dropped, no thread waits for the answer.
                    let _ = told.send(answer);
                };
                let across = Some(&answering).filter(|_| !is_here);
                if let Some(gone) = serve(receiver, across, map, answer, || hearts.heard(peer)) {
                    notices.gone(peer, gone);
                }
            })
            .map_err(|error| EnvironmentError::new("starting a thread for a link", error, ""))?;
        beats.push((peer, Box::new(move || beat(&beating))));
        served.mapping.peers.push(Peer { rank: peer, sender, answers, thread });
    }
    let tell = move |peer, silent| {
        notices.silent(peer, silent);
    };
    served.heartbeat = Some(Heartbeat::start(rank, beats, Arc::clone(&hearts), tell)?);
    Ok((served, Mapped { peers, mirrors, hearts }))
}

/// The sending direction of a link to a peer whose memory is mapped.
#[derive(Debug)]
enum Outward {
    /// To a rank of this machine.
    Here(LinkSender),
    /// To a rank on another machine. Messages are counted: a stopped process reads none, and a network connection would end
    /// if heartbeats filled its socket.
    Across(SnapshotLink),
}

impl Outward {
    /// Sends a message, with a descriptor on this machine only. On this machine waits up to `timeout` for the peer to read;
    /// between machines does not wait, and reports nothing: the receiving direction ends if the link does.
    fn send(&mut self, body: &[u8], fd: Option<BorrowedFd<'_>>, timeout: Duration) -> io::Result<()> {
        match self {
            Self::Here(sender) => sender.send(body, fd, timeout),
            Self::Across(link) => {
                link.send(true, || body.to_vec());
                Ok(())
            }
        }
    }

    /// Sends a message without waiting: drops it if the peer does not read.
    fn try_send(&mut self, body: &[u8]) {
        match self {
            Self::Here(sender) => sender.try_send(body),
            // Only a heartbeat may be dropped: another one follows.
            Self::Across(link) => link.send(body != [BEAT], || body.to_vec()),
        }
    }

    /// The message in what has arrived over the link; `None` if it breaks the protocol.
    fn open(&mut self, body: Vec<u8>) -> Option<Vec<u8>> {
        match self {
            Self::Here(_) => Some(body),
            Self::Across(link) => link.receive(&body).map(<[u8]>::to_vec),
        }
    }

    /// Sends a leave message, and no message after it.
    fn leave(&mut self) {
        match self {
            Self::Here(sender) => sender.leave(),
            Self::Across(link) => link.leave(),
        }
    }
}

/// Sends a heartbeat without waiting: it is skipped if the peer is gone or does not read, or if the sender is in use.
fn beat(sender: &Weak<Mutex<Outward>>) {
    let Some(sender) = sender.upgrade() else { return };
    match sender.try_lock() {
        Ok(mut sender) => sender.try_send(&[BEAT]),
        Err(TryLockError::Poisoned(poison)) => poison.into_inner().try_send(&[BEAT]),
        Err(TryLockError::WouldBlock) => {}
    }
}

/// Receives a peer's messages until the link ends. Returns why it ended, or `None` if this rank's own buffer was
/// dropped. `across`: the sending direction of a link between machines.
///
/// `map` maps an allocation of the given number of bytes and sends the answer; it returns `None` if this rank's buffer
/// was dropped, and `Some(false)` if the answer could not be sent. `answer` is called for each answer of the peer,
/// `beat` for each heartbeat.
fn serve(
    mut link: LinkReceiver,
    across: Option<&Weak<Mutex<Outward>>>,
    map: impl Fn(usize, &Shared) -> Option<bool>,
    answer: impl Fn(u8),
    beat: impl Fn(),
) -> Option<u32> {
    const DIED: u32 = GoneWord::Died as u32;
    let mut left = GoneWord::LeftEarly as u32;
    loop {
        let (mut body, fd) = match link.wait(IDLE) {
            None => continue,
            Some(LinkEvent::Message(body, fd)) => (body, fd),
            Some(LinkEvent::Left) => {
                answer(LEFT);
                // A peer on another machine waits for the end of this direction.
                if let Some(sender) = across.and_then(Weak::upgrade) {
                    lock(&sender).leave();
                }
                return Some(left);
            }
            Some(LinkEvent::Unreachable) => {
                answer(UNREACHABLE);
                return Some(GoneWord::Unreachable as u32);
            }
            Some(_) => return Some(DIED),
        };
        if let Some(sender) = across {
            let Some(opened) = lock(&*sender.upgrade()?).open(body) else { return Some(DIED) };
            body = opened;
        }
        match (body.as_slice(), fd) {
            ([BEAT], None) => beat(),
            ([said @ (MAPPED | NOT_MAPPED)], None) => answer(*said),
            (&[LEAVING, a, b, c, d], None) if is_left(u32::from_le_bytes([a, b, c, d])) => {
                left = u32::from_le_bytes([a, b, c, d]);
            }
            ([CHUNK, chunk @ ..], fd) => {
                let Some((bytes, shared)) = announced(chunk, fd) else { return Some(DIED) };
                if !map(bytes, &shared)? {
                    return Some(DIED);
                }
            }
            _ => return Some(DIED),
        }
    }
}

/// The allocation in a message: its size, and either a descriptor or a fabric handle.
pub(crate) fn announced(chunk: &[u8], fd: Option<OwnedFd>) -> Option<(usize, Shared)> {
    let (bytes, fabric) = chunk.split_first_chunk()?;
    let shared = match fd {
        Some(fd) if fabric.is_empty() => Shared::Descriptor(fd),
        None => Shared::Fabric(fabric.try_into().ok()?),
        Some(_) => return None,
    };
    Some((usize::try_from(u64::from_le_bytes(*bytes)).ok()?, shared))
}

/// This rank's links to its peers.
pub(crate) struct Links {
    mapping: MappingLinks,
    /// Dropped after the heartbeat thread has ended.
    remote: RemoteLinks,
    notices: Arc<Notices>,
    heartbeat: Option<Heartbeat>,
}

/// The links to the peers that map this rank's memory.
struct MappingLinks {
    rank: Rank,
    timeout: Duration,
    machines: Machines,
    peers: Vec<Peer>,
    /// The process that has the threads; a forked child has a copy of this value but not the threads.
    process: u32,
}

struct Peer {
    rank: Rank,
    sender: Arc<Mutex<Outward>>,
    /// The peer's answers to allocations. Closed when the peer is gone.
    answers: Receiver<u8>,
    /// Receives on the link.
    thread: JoinHandle<()>,
}

impl Peer {
    fn is_across(&self) -> bool {
        matches!(*lock(&self.sender), Outward::Across(_))
    }
}

impl MappingLinks {
    /// Sends an allocation of `bytes` bytes to all peers, and waits until they have mapped it. Peers of this machine get the
    /// descriptor, and those of other machines the fabric handle.
    fn announce(&self, bytes: usize, fd: BorrowedFd<'_>, fabric: Option<&[u8; FABRIC_BYTES]>) -> Result<()> {
        const WAITED_FOR: &str = "it to map memory that this rank has added";
        let since = Instant::now();
        let lost = |peer, fault| {
            let error = PeerError::joining(self.rank, peer, fault, WAITED_FOR, since.elapsed());
            self.machines.locate(error.into())
        };
        let body = [&[CHUNK], &(bytes as u64).to_le_bytes()[..]].concat();
        for peer in &self.peers {
            let sent = match fabric.filter(|_| peer.is_across()) {
                None => lock(&peer.sender).send(&body, Some(fd), self.timeout),
                Some(fabric) => lock(&peer.sender).send(&[&body, &fabric[..]].concat(), None, self.timeout),
            };
            sent.map_err(|error| lost(peer.rank, PeerFault::of_socket(&error)))?;
        }
        // All peers map at the same time.
        for peer in &self.peers {
            match peer.answers.recv_timeout(self.timeout.saturating_sub(since.elapsed())) {
                Ok(MAPPED) => {}
                Ok(LEFT) => return Err(lost(peer.rank, PeerFault::Left)),
                Ok(UNREACHABLE) => return Err(lost(peer.rank, PeerFault::Unreachable)),
                Ok(_) => {
                    let what = format!("sharing memory with rank {}", peer.rank);
                    let hint = if peer.is_across() {
                        FABRIC_HINT
                    } else {
                        "do all ranks see all GPUs of the domain?"
                    };
                    return Err(EnvironmentError::new(what, "it could not map the memory", hint).into());
                }
                Err(RecvTimeoutError::Timeout) => return Err(lost(peer.rank, PeerFault::Stalled)),
                Err(RecvTimeoutError::Disconnected) => return Err(lost(peer.rank, PeerFault::Died)),
            }
        }
        Ok(())
    }
}

impl Announce for Links {
    fn announce(&mut self, chunk: &Chunk) -> Result<()> {
        let crosses = self.mapping.peers.iter().any(Peer::is_across);
        let fabric = crosses.then(|| chunk.export_to_machines()).transpose()?;
        self.mapping.announce(chunk.bytes, chunk.export()?.as_fd(), fabric.as_ref())
    }

    fn tell_fault(&self) {
        self.remote.tell();
    }

    fn leaving(&self, word: u32) {
        self.remote.leaving(word);
        for peer in &self.mapping.peers {
            // A peer that does not read does not need the word.
            lock(&peer.sender).try_send(&[&[LEAVING], &word.to_le_bytes()[..]].concat());
        }
    }
}

impl Drop for Links {
    fn drop(&mut self) {
        self.notices.close();
        // Stop the heartbeats first: the leave message must be the last one.
        self.heartbeat = None;
    }
}

impl Drop for MappingLinks {
    fn drop(&mut self) {
        if self.process == std::process::id() {
            self.peers.iter().for_each(|peer| lock(&peer.sender).leave());
            linger(self.peers.iter().filter(|peer| peer.is_across()).map(|peer| &peer.thread));
        }
    }
}

#[cfg(test)]
mod tests {
    use std::cell::{Cell, RefCell};

    use ep::World;
    use ep::join::{Door, Introduction, Joining, Member, Met, Rendezvous as _, ThreadRendezvous};

    use super::*;
    use crate::params::GONE_BITS;

    const LONG: Duration = Duration::from_secs(60);

    /// The sending end of a link, and the receiving end of its other side.
    fn pair() -> (LinkSender, LinkReceiver) {
        let [(_, receiver), (sender, _)] = ends();
        (sender, receiver)
    }

    /// Both directions of both ends of a link.
    fn ends() -> [(LinkSender, LinkReceiver); 2] {
        let doors = [Door::open().unwrap(), Door::open().unwrap()];
        let invitations = doors.each_ref().map(|door| door.invitation().clone());
        let mut ends = std::thread::scope(|scope| {
            let threads: Vec<_> = doors
                .into_iter()
                .zip(0..)
                .map(|(door, rank)| {
                    let (member, invitations) = (Member::new(Rank(rank), 2, LONG), &invitations);
                    scope
                        .spawn(move || ep::join::Links::connect(door, &member, invitations, || None).unwrap())
                })
                .collect();
            threads.into_iter().map(|thread| thread.join().unwrap().links.remove(0).1).collect::<Vec<_>>()
        });
        [ends.remove(1).split(), ends.remove(0).split()]
    }

    /// What `serve` returns, the answers that it received, and the number of heartbeats.
    type Served = (Option<u32>, Vec<u8>, usize);

    fn served(said: impl FnOnce(LinkSender)) -> Served {
        served_by(false, |_, _| panic!("there is no memory"), said)
    }

    /// Like `served`, over a link between machines or not, and with `map` for allocations.
    fn served_by(
        is_across: bool,
        map: impl Fn(usize, &Shared) -> Option<bool>,
        said: impl FnOnce(LinkSender),
    ) -> Served {
        let [(own, receiver), (theirs, _receiver)] = ends();
        said(theirs);
        let (beats, answers) = (Cell::new(0), RefCell::new(Vec::new()));
        let answer = |answer| answers.borrow_mut().push(answer);
        let own = Arc::new(Mutex::new(Outward::Across(SnapshotLink::new(own))));
        let own = is_across.then(|| Arc::downgrade(&own)).zip(Some(own));
        let across = own.as_ref().map(|(weak, _)| weak);
        let gone = serve(receiver, across, map, answer, || beats.set(beats.get() + 1));
        (gone, answers.into_inner(), beats.get())
    }

    const DIED: u32 = GoneWord::Died as u32;
    const EARLY: u32 = GoneWord::LeftEarly as u32;

    #[test]
    fn a_link_distinguishes_heartbeats_answers_leaving_and_death() {
        let say = |peer: &mut LinkSender, body: &[u8]| peer.send(body, None, LONG).unwrap();
        let dies = |peer: LinkSender| rustix::net::shutdown(&peer, rustix::net::Shutdown::Both).unwrap();
        assert_eq!(served(dies), (Some(DIED), vec![], 0));
        let leaves =
            |mut peer: LinkSender| [BEAT, MAPPED, BEAT].iter().for_each(|&kind| say(&mut peer, &[kind]));
        assert_eq!(served(leaves), (Some(EARLY), vec![MAPPED, LEFT], 2));
        for word in [GoneWord::Left as u32 | 7 << GONE_BITS, EARLY] {
            let says_it =
                |mut peer: LinkSender| say(&mut peer, &[&[LEAVING], &word.to_le_bytes()[..]].concat());
            assert_eq!(served(says_it), (Some(word), vec![LEFT], 0));
        }
        let beats_and_dies = |mut peer: LinkSender| {
            say(&mut peer, &[BEAT]);
            dies(peer);
        };
        assert_eq!(served(beats_and_dies), (Some(DIED), vec![], 1));
        // An allocation without its descriptor, an unknown kind, an empty message, a message that is too long, a word that
        // does not stand for a rank that has left.
        for wrong in
            [&[CHUNK, 0, 0, 32, 0, 0, 0, 0, 0][..], &[LEFT], &[], &[BEAT, BEAT], &[LEAVING, 2, 0, 0, 0]]
        {
            assert_eq!(served(|mut peer| say(&mut peer, wrong)), (Some(DIED), vec![], 0), "{wrong:?}");
        }
    }

    #[test]
    fn between_machines_an_allocation_is_a_fabric_handle() {
        let mapped = RefCell::new(Vec::new());
        let map = |bytes, shared: &Shared| {
            let Shared::Fabric(fabric) = shared else { panic!("{shared:?}") };
            mapped.borrow_mut().push((bytes, *fabric));
            Some(true)
        };
        let handle = [7; FABRIC_BYTES];
        let chunk = |handle: &[u8]| [&[CHUNK], &3u64.to_le_bytes()[..], handle].concat();
        let says = |bodies: Vec<Vec<u8>>| {
            move |sender: LinkSender| {
                let mut sender = Outward::Across(SnapshotLink::new(sender));
                bodies.iter().for_each(|body| sender.send(body, None, LONG).unwrap());
                sender.leave();
            }
        };
        let bodies = vec![vec![BEAT], chunk(&handle), vec![MAPPED]];
        assert_eq!(served_by(true, map, says(bodies)), (Some(EARLY), vec![MAPPED, LEFT], 1));
        assert_eq!(mapped.take(), [(3, handle)]);
        // A handle of a different size, no size, a message without its count.
        for wrong in [chunk(&handle[1..]), chunk(&[]), vec![CHUNK, 3]] {
            assert_eq!(served_by(true, map, says(vec![wrong.clone()])), (Some(DIED), vec![], 0), "{wrong:?}");
        }
        let uncounted = |mut sender: LinkSender| sender.send(&[BEAT], None, LONG).unwrap();
        assert_eq!(served_by(true, map, uncounted), (Some(DIED), vec![], 0));
        assert!(mapped.take().is_empty());
    }

    /// What the ranks of two machines with two ranks each have once they have met.
    fn two_machines() -> Vec<Met<String>> {
        let world = World::builder().ranks(4).domains(2).experts(4).build().unwrap();
        let meet = |mut rendezvous: ThreadRendezvous| {
            let mut config = Config::default();
            let machine = if rendezvous.rank().0 < 2 { "node-a" } else { "node-b" };
            config.machine = Some(machine.into());
            config.host.transport.engine = "tcp".into();
            config.host.transport.address = Some("127.0.0.1".into());
            let (settings, facts) = (Vec::new(), String::new());
            let introduction = Introduction { backend: "test", settings, facts };
            let make = |joining: &mut Joining<'_>| joining.meet(introduction, || Err(""));
            ep::join::join(&world, &mut rendezvous, &config, make).unwrap()
        };
        let meet = &meet;
        std::thread::scope(|scope| {
            let ends = ThreadRendezvous::new(4, LONG).into_iter();
            let threads: Vec<_> = ends.map(|end| scope.spawn(move || meet(end))).collect();
            threads.into_iter().map(|thread| thread.join().unwrap()).collect()
        })
    }

    #[test]
    fn a_peer_that_does_not_map_an_allocation_is_named_with_its_machine() {
        let mut met = two_machines();
        let Met { machines, links, .. } = met.remove(0);
        let (rank, link) = links.links.into_iter().next().unwrap();
        assert!(rank == Rank(1) && !link.is_remote());
        let (sender, _receiver) = link.split();
        let (told, answers) = channel();
        let sender = Arc::new(Mutex::new(Outward::Here(sender)));
        let peer = Peer { rank, sender, answers, thread: std::thread::spawn(|| {}) };
        let process = std::process::id();
        let here = MappingLinks { rank: Rank(0), timeout: LONG, machines, peers: vec![peer], process };
        let (fd, _) = std::io::pipe().unwrap();
        let announce = |answer: u8| {
            told.send(answer).unwrap();
            here.announce(1, fd.as_fd(), None).map_err(|error| error.to_string())
        };
        assert_eq!(announce(MAPPED), Ok(()));
        let left = announce(LEFT).unwrap_err();
        assert!(left.starts_with("rank 1 on node-a left (join): rank 0 was waiting"), "{left}");
        let unreachable = announce(UNREACHABLE).unwrap_err();
        assert!(
            unreachable.starts_with("rank 1 on node-a is unreachable (join): rank 0 was waiting"),
            "{unreachable}"
        );
        // A peer that has ended its links reads nothing any more.
        drop(met);
        let died = announce(MAPPED).unwrap_err();
        assert!(died.starts_with("rank 1 on node-a died (join): rank 0 was waiting"), "{died}");
    }

    #[test]
    fn sending_a_heartbeat_never_blocks() {
        let (sender, mut receiver) = pair();
        let sender = Arc::new(Mutex::new(Outward::Here(sender)));
        // More than the socket buffers hold if the peer does not read.
        for _ in 0..100_000 {
            beat(&Arc::downgrade(&sender));
        }
        let held = lock(&sender);
        beat(&Arc::downgrade(&sender));
        drop(held);
        assert!(matches!(receiver.wait(LONG), Some(LinkEvent::Message(body, None)) if body == [BEAT]));
        drop(sender);
    }
}
