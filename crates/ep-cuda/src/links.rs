//! Registered memory between processes: each process sends its allocations, as file descriptors, to all others of its
//! machine, which map them.
//!
//! A rank has one link to every peer ([`ep::join::Links`]); `remote` serves those to other machines. A rank sends an
//! allocation whenever its memory grows, and waits until the peer has mapped it; heartbeats; and, at the end, a leave
//! message. A link that closes without a leave message means that the process died; missing heartbeats mean that it is
//! stopped. The link and heartbeat threads write both into the control block of their own rank, where its kernels read it.
//!
//! The system vouches for the peer's user, and the handshake of the link for its membership in the job. The descriptor
//! of an allocation belongs to the driver, so mapping it is the only possible check.

use std::io;
use std::os::fd::{AsFd as _, BorrowedFd, OwnedFd};
use std::sync::mpsc::{Receiver, RecvTimeoutError, channel};
use std::sync::{Arc, Mutex, PoisonError, TryLockError, Weak};
use std::time::{Duration, Instant};

use ep::join::{LinkEvent, LinkReceiver, LinkSender, Machines};
use ep::{Config, EnvironmentError, PeerError, PeerFault, Rank, Result};

use crate::arena::Announce;
use crate::beat::{Heartbeat, Hearts};
use crate::buffer::Home;
use crate::driver::{Chunk, Reservation};
use crate::notices::Notices;
use crate::params::GoneWord;
use crate::remote::{Mirrors, News, RemoteLinks, is_left};

/// Kinds of messages: an allocation (`Chunk`) with its size, the answer after mapping it or failing to, a heartbeat, and the
/// word of `Control::left` that stands for the rank once it has left.
const CHUNK: u8 = 0;
const MAPPED: u8 = 1;
const NOT_MAPPED: u8 = 2;
const BEAT: u8 = 3;
const LEAVING: u8 = 5;
/// Stands for an answer when the peer has sent its leave message instead. Never sent.
const LEFT: u8 = 4;

/// How long a link's thread waits for a message at a time. Its value has no effect.
const IDLE: Duration = Duration::from_secs(3600);

/// The memory of the peers of this machine, mapped by this process, and the mirrors of the others. The link threads add to
/// it.
pub(crate) struct Mapped {
    /// By rank; `None` for this rank and for ranks on other machines.
    pub(crate) peers: Vec<Option<Arc<Mutex<Reservation>>>>,
    pub(crate) mirrors: Arc<Mirrors>,
    pub(crate) hearts: Arc<Hearts>,
}

/// Starts the threads that serve the links to all peers and map the memory of those of this machine, and the heartbeat
/// thread. After an error, the peers see the links end only when this rank has reported the error ([`ep::join::join`]).
pub(crate) fn serve_all(
    links: ep::join::Links,
    home: &Home,
    machines: &Machines,
    ranks: usize,
    config: &Config,
) -> Result<(Links, Mapped)> {
    let (rank, device) = (home.rank, &home.device);
    // The stall bound: a separate thread of the peer answers, whatever its program does.
    let timeout = config.stall_bound();
    let mut peers: Vec<Option<Arc<Mutex<Reservation>>>> = Vec::with_capacity(ranks);
    for peer in 0..ranks {
        let is_mapped = peer != rank.index() && !machines.is_remote(Rank(peer as u32));
        peers.push(if !is_mapped { None } else { Some(Arc::new(Mutex::new(Reservation::new(device)?))) });
    }
    let notices = Notices::new(device, home.control.address(), ranks);
    let hearts = Hearts::new(ranks, timeout);
    let mirrors = Mirrors::new(device, machines, ranks, Arc::clone(&home.report))?;
    let mut served = Links {
        here: LocalLinks { rank, timeout, machines: machines.clone(), peers: Vec::new() },
        remote: RemoteLinks::new(Arc::clone(&mirrors)),
        notices: Arc::clone(&notices),
        heartbeat: None,
    };
    let mut beats: Vec<(Rank, Box<dyn FnMut() + Send>)> = Vec::new();
    for (peer, link) in links.links {
        if link.is_remote() {
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
        let (sender, receiver) = link.split();
        let sender = Arc::new(Mutex::new(sender));
        // Weak: the sender goes with the buffer, and sends the leave message when it is dropped.
        let (answering, beating) = (Arc::downgrade(&sender), Arc::downgrade(&sender));
        let (told, answers) = channel();
        let memory = peers[peer.index()].as_ref().map_or_else(Weak::new, Arc::downgrade);
        // Weak: the thread that drops the buffer must unmap the memory, not this one.
        let (device, notices, hearts) = (Arc::clone(device), Arc::clone(&notices), Arc::clone(&hearts));
        std::thread::Builder::new()
            .name(format!("ep-link-{rank}-{peer}"))
            .spawn(move || {
                let map = |bytes, fd: &OwnedFd| {
                    let memory = memory.upgrade()?;
                    let mapped = Chunk::import(&device, fd, bytes).and_then(|chunk| {
                        let mut memory = memory.lock().unwrap_or_else(PoisonError::into_inner);
                        memory.push(chunk, &[device.ordinal])
                    });
                    let sender = answering.upgrade()?;
                    let mut sender = sender.lock().unwrap_or_else(PoisonError::into_inner);
                    // The peer converts NOT_MAPPED to an error that names this rank.
                    let answer = if mapped.is_ok() { MAPPED } else { NOT_MAPPED };
                    Some(sender.send(&[answer], None, timeout).is_ok())
                };
                let answer = |answer| {
                    // If the buffer has been dropped, no thread waits for the answer.
                    let _ = told.send(answer);
                };
                if let Some(gone) = serve(receiver, map, answer, || hearts.heard(peer)) {
                    notices.gone(peer, gone);
                }
            })
            .map_err(|error| EnvironmentError::new("starting a thread for a link", error, ""))?;
        beats.push((peer, Box::new(move || beat(&beating))));
        served.here.peers.push(Peer { rank: peer, sender, answers });
    }
    let tell = move |peer, silent| {
        notices.silent(peer, silent);
    };
    served.heartbeat = Some(Heartbeat::start(rank, beats, Arc::clone(&hearts), tell)?);
    Ok((served, Mapped { peers, mirrors, hearts }))
}

/// Sends a heartbeat without waiting: it is skipped if the peer is gone or does not read, or if the sender is in use.
fn beat(sender: &Weak<Mutex<LinkSender>>) {
    let Some(sender) = sender.upgrade() else { return };
    match sender.try_lock() {
        Ok(mut sender) => sender.try_send(&[BEAT]),
        Err(TryLockError::Poisoned(poison)) => poison.into_inner().try_send(&[BEAT]),
        Err(TryLockError::WouldBlock) => {}
    }
}

/// Receives a peer's messages until the link ends. Returns why it ended, or `None` if this rank's own buffer was
/// dropped.
///
/// `map` maps an allocation of the given number of bytes and sends the answer; it returns `None` if this rank's buffer
/// was dropped, and `Some(false)` if the answer could not be sent. `answer` is called for each answer of the peer,
/// `beat` for each heartbeat.
fn serve(
    mut link: LinkReceiver,
    map: impl Fn(usize, &OwnedFd) -> Option<bool>,
    answer: impl Fn(u8),
    beat: impl Fn(),
) -> Option<u32> {
    const DIED: u32 = GoneWord::Died as u32;
    let mut left = GoneWord::LeftEarly as u32;
    loop {
        let (body, fd) = match link.wait(IDLE) {
            None => continue,
            Some(LinkEvent::Message(body, fd)) => (body, fd),
            Some(LinkEvent::Left) => {
                answer(LEFT);
                return Some(left);
            }
            Some(_) => return Some(DIED),
        };
        match (body.as_slice(), fd) {
            ([BEAT], None) => beat(),
            ([said @ (MAPPED | NOT_MAPPED)], None) => answer(*said),
            (&[LEAVING, a, b, c, d], None) if is_left(u32::from_le_bytes([a, b, c, d])) => {
                left = u32::from_le_bytes([a, b, c, d]);
            }
            ([CHUNK, bytes @ ..], Some(fd)) => {
                let bytes =
                    bytes.try_into().ok().and_then(|bytes| usize::try_from(u64::from_le_bytes(bytes)).ok());
                let Some(bytes) = bytes else { return Some(DIED) };
                if !map(bytes, &fd)? {
                    return Some(DIED);
                }
            }
            _ => return Some(DIED),
        }
    }
}

/// This rank's links to its peers.
pub(crate) struct Links {
    here: LocalLinks,
    /// Dropped after the heartbeat thread has ended.
    remote: RemoteLinks,
    notices: Arc<Notices>,
    heartbeat: Option<Heartbeat>,
}

/// The links to the peers of this machine.
struct LocalLinks {
    rank: Rank,
    timeout: Duration,
    machines: Machines,
    peers: Vec<Peer>,
}

struct Peer {
    rank: Rank,
    sender: Arc<Mutex<LinkSender>>,
    /// The peer's answers to allocations. Closed when the peer is gone.
    answers: Receiver<u8>,
}

impl LocalLinks {
    /// Sends an allocation of `bytes` bytes to all peers, and waits until they have mapped it.
    fn announce(&self, bytes: usize, fd: BorrowedFd<'_>) -> Result<()> {
        const WAITED_FOR: &str = "it to map memory that this rank has added";
        let since = Instant::now();
        let lost = |peer, fault| {
            let error = PeerError::joining(self.rank, peer, fault, WAITED_FOR, since.elapsed());
            self.machines.locate(error.into())
        };
        let body = [&[CHUNK], &(bytes as u64).to_le_bytes()[..]].concat();
        for peer in &self.peers {
            let mut sender = peer.sender.lock().unwrap_or_else(PoisonError::into_inner);
            let sent: io::Result<()> = sender.send(&body, Some(fd), self.timeout);
            sent.map_err(|error| lost(peer.rank, PeerFault::of_socket(&error)))?;
        }
        // All peers map at the same time.
        for peer in &self.peers {
            match peer.answers.recv_timeout(self.timeout.saturating_sub(since.elapsed())) {
                Ok(MAPPED) => {}
                Ok(LEFT) => return Err(lost(peer.rank, PeerFault::Left)),
                Ok(_) => {
                    let what = format!("sharing memory with rank {}", peer.rank);
                    let hint = "do all ranks see all GPUs of the domain?";
                    return Err(EnvironmentError::new(what, "it could not map it", hint).into());
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
        self.here.announce(chunk.bytes, chunk.export()?.as_fd())
    }

    fn tell_fault(&self) {
        self.remote.tell();
    }

    fn leaving(&self, word: u32) {
        self.remote.leaving(word);
        for peer in &self.here.peers {
            let mut sender = peer.sender.lock().unwrap_or_else(PoisonError::into_inner);
            // A peer that does not read does not need it.
            sender.try_send(&[&[LEAVING], &word.to_le_bytes()[..]].concat());
        }
    }
}

impl Drop for Links {
    fn drop(&mut self) {
        self.notices.close();
        // Stop the heartbeats first: the leave message, which each sender sends when it is dropped, must be the last
        // one.
        self.heartbeat = None;
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

    /// Both ends of a link.
    fn pair() -> (LinkSender, LinkReceiver) {
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
        let (_, receiver) = ends.remove(1).split();
        let (sender, _) = ends.remove(0).split();
        (sender, receiver)
    }

    /// What `serve` returns, the answers that it received, and the number of heartbeats.
    fn served(said: impl FnOnce(LinkSender)) -> (Option<u32>, Vec<u8>, usize) {
        let (sender, receiver) = pair();
        said(sender);
        let (beats, answers) = (Cell::new(0), RefCell::new(Vec::new()));
        let map = |_, _: &OwnedFd| panic!("there is no memory");
        let answer = |answer| answers.borrow_mut().push(answer);
        let gone = serve(receiver, map, answer, || beats.set(beats.get() + 1));
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

    /// What the ranks of two machines with two ranks each have once they have met.
    fn two_machines() -> Vec<Met<String>> {
        let world = World::builder().ranks(4).domains(2).experts(4).build().unwrap();
        let meet = |mut rendezvous: ThreadRendezvous| {
            let mut config = Config::default();
            let machine = if rendezvous.rank().0 < 2 { "node-a" } else { "node-b" };
            config.machine = Some(machine.into());
            config.host.transport.engine = "tcp".into();
            config.host.transport.address = Some("127.0.0.1".into());
            let introduction = Introduction { backend: "test", settings: Vec::new(), facts: String::new() };
            let make = |joining: &mut Joining<'_>| joining.meet(introduction);
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
        let peer = Peer { rank, sender: Arc::new(Mutex::new(sender)), answers };
        let here = LocalLinks { rank: Rank(0), timeout: LONG, machines, peers: vec![peer] };
        let (fd, _) = std::io::pipe().unwrap();
        let announce = |answer: u8| {
            told.send(answer).unwrap();
            here.announce(1, fd.as_fd()).map_err(|error| error.to_string())
        };
        assert_eq!(announce(MAPPED), Ok(()));
        let left = announce(LEFT).unwrap_err();
        assert!(left.starts_with("rank 1 on node-a left (join): rank 0 waited"), "{left}");
        // A peer that has ended its links reads nothing any more.
        drop(met);
        let died = announce(MAPPED).unwrap_err();
        assert!(died.starts_with("rank 1 on node-a died (join): rank 0 waited"), "{died}");
    }

    #[test]
    fn sending_a_heartbeat_never_blocks() {
        let (sender, mut receiver) = pair();
        let sender = Arc::new(Mutex::new(sender));
        // More than the socket buffers hold if the peer does not read.
        for _ in 0..100_000 {
            beat(&Arc::downgrade(&sender));
        }
        let held = sender.lock().unwrap();
        beat(&Arc::downgrade(&sender));
        drop(held);
        assert!(matches!(receiver.wait(LONG), Some(LinkEvent::Message(body, None)) if body == [BEAT]));
        drop(sender);
    }
}
