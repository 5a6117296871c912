//! The processes of the other ranks: receives descriptors of their memory or their status, and detects their deaths.
//!
//! A rank sends the descriptor of every segment that it makes to all other ranks of its machine before it publishes a
//! location in the segment. A receiver thread checks and maps the segments that arrive. It accepts only what the system
//! confirms: a memfd of this user with the announced length, sealed, so that no peer can truncate the file under the
//! mapping.
//!
//! To the ranks of other machines, a rank sends its status. The receiver thread stores the status that arrives in the
//! mirror of the sender's control block.
//!
//! `join` connects the processes, `directory` announces and finds segments, `pulse` and `buffer` send the status, `wait`
//! asks for deaths.

use std::collections::HashMap;
use std::io::ErrorKind;
use std::os::fd::{AsFd as _, OwnedFd};
use std::os::unix::net::UnixStream;
use std::sync::atomic::{AtomicU8, Ordering::Relaxed};
use std::sync::{Arc, Condvar, Mutex, MutexGuard, PoisonError};
use std::thread::JoinHandle;
use std::time::{Duration, Instant};

use ep::join::{LinkEvent, LinkReceiver, LinkSender, Links, SnapshotLink};
use ep::{EnvironmentError, PeerError, PeerFault, Rank, Result};
use ep_rail::Segment;
use rustix::event::{PollFd, PollFlags, Timespec, poll};

use crate::control::{Control, Health};
use crate::published::SegmentName;
use crate::status::Status;

/// The peers' processes; empty when ranks are threads. Clones share one state. Dropping the last clone sends a leave
/// message to every peer.
#[derive(Debug, Clone, Default)]
pub(crate) struct Processes(Option<Arc<Peers>>);

#[derive(Debug)]
struct Peers {
    rank: Rank,
    /// How long a peer may take to accept a descriptor, or to send the descriptor of a segment that it has published.
    stall_bound: Duration,
    peers: Vec<Peer>,
    job: Links,
    shared: Arc<Shared>,
    /// Closing this socket ends the receiver thread.
    stop: Option<UnixStream>,
    thread: Option<JoinHandle<()>>,
    /// The process that runs the thread. A forked child has a copy of this value but no thread.
    process: u32,
}

#[derive(Debug)]
struct Peer {
    rank: Rank,
    outward: Outward,
    /// [`Link::process_handle`](ep::join::Link::process_handle). The death of a process without one is detected by its link alone,
    /// and not while a forked child of it keeps the link open.
    process: Option<OwnedFd>,
}

/// The sending direction of a link.
#[derive(Debug)]
enum Outward {
    /// To a rank of this machine: carries descriptors.
    Here(Box<Mutex<LinkSender>>),
    /// To a rank on another machine: carries statuses. The receiver thread counts the statuses that the peer sends.
    Elsewhere(Arc<Mutex<SnapshotLink>>),
}

/// The receiver thread's end of a link.
struct Inward {
    rank: Rank,
    receiver: LinkReceiver,
    /// Whether messages may have arrived. Initially true: linking may have read part of a message.
    is_due: bool,
    /// For a rank on another machine: the mirror that receives its status, and the sending direction of the link.
    remote: Option<(Control, Arc<Mutex<SnapshotLink>>)>,
}

/// The state that the receiver thread shares with the workers.
#[derive(Debug, Default)]
struct Shared {
    arrivals: Mutex<Arrivals>,
    changed: Condvar,
    /// By rank: why its link ended without a leave message ([`PeerFault::code`]), or [`LINKED`].
    lost: Vec<AtomicU8>,
}

/// A link that has not ended, or that ended with a leave message.
const LINKED: u8 = u8::MAX;
/// Maximum number of messages of a peer that the receiver thread handles before it serves the other peers.
const MESSAGES_A_TURN: usize = 64;
/// How long a rank that leaves waits until ranks of other machines have read its last messages.
const LINGER: Duration = Duration::from_millis(200);

/// The messages that have arrived.
#[derive(Debug, Default)]
struct Arrivals {
    /// By owner and the owner's number for the segment: the segment, or what is wrong with it.
    segments: HashMap<(Rank, u64), Result<Arc<Segment>, String>>,
    /// The ranks whose link has ended, and why.
    ended: HashMap<Rank, PeerFault>,
}

impl Shared {
    fn arrivals(&self) -> MutexGuard<'_, Arrivals> {
        self.arrivals.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

impl Processes {
    /// The processes at the other ends of `job`, the links of rank `own` to all other ranks. `mirror` returns the control
    /// block to which the status of a rank on another machine goes.
    ///
    /// # Errors
    /// [`EnvironmentError`] when the system has no socket or thread.
    pub(crate) fn new(
        own: Rank,
        mut job: Links,
        stall_bound: Duration,
        mirror: impl Fn(Rank) -> Control,
    ) -> Result<Self> {
        let lost = (0..=job.links.len()).map(|_| AtomicU8::new(LINKED)).collect();
        let shared = Arc::new(Shared { lost, ..Shared::default() });
        let (mut peers, mut receivers) = (Vec::new(), Vec::new());
        for (rank, link) in std::mem::take(&mut job.links) {
            let (is_remote, process) = (link.is_remote(), link.process_handle());
            let (sender, receiver) = link.split();
            let (outward, remote) = if is_remote {
                let link = Arc::new(Mutex::new(SnapshotLink::new(sender)));
                (Outward::Elsewhere(Arc::clone(&link)), Some((mirror(rank), link)))
            } else {
                (Outward::Here(Box::new(Mutex::new(sender))), None)
            };
            peers.push(Peer { rank, outward, process });
            receivers.push(Inward { rank, receiver, is_due: true, remote });
        }
        let failed =
            |error| EnvironmentError::new("starting the thread that receives peers' memory", error, "");
        let (stop, stopped) = UnixStream::pair().map_err(failed)?;
        let receiving = Arc::clone(&shared);
        let thread = std::thread::Builder::new()
            .name(format!("ep-links-{own}"))
            .spawn(move || receive_until_stopped(&receiving, receivers, &stopped))
            .map_err(failed)?;
        let (stop, thread, process) = (Some(stop), Some(thread), std::process::id());
        let peers = Peers { rank: own, stall_bound, peers, job, shared, stop, thread, process };
        Ok(Self(Some(Arc::new(peers))))
    }

    /// Whether no peer is a process, because ranks are threads.
    pub(crate) fn is_empty(&self) -> bool {
        self.0.is_none()
    }

    /// Whether `rank` is on another machine.
    pub(crate) fn is_remote(&self, rank: Rank) -> bool {
        let is_elsewhere = |peer: &Peer| matches!(peer.outward, Outward::Elsewhere(_));
        self.peers().iter().any(|peer| peer.rank == rank && is_elsewhere(peer))
    }

    fn peers(&self) -> &[Peer] {
        self.0.as_ref().map_or(&[], |this| &this.peers)
    }

    /// Sends the status of this rank to the ranks of other machines. Does not wait: a status that a socket has no room
    /// for, or that a peer does not read, is dropped, unless it is the `last` one of this rank.
    pub(crate) fn send_status(&self, own: &Control, last: bool) {
        // Messages of a forked child would mix with those of its parent.
        if self.0.as_ref().is_some_and(|this| this.process != std::process::id()) {
            return;
        }
        for peer in self.peers() {
            if let Outward::Elsewhere(link) = &peer.outward {
                lock(link).send(last, || own.status().to_bytes());
            }
        }
    }

    /// Waits until there is news of `rank`, which is on another machine: `news` returns true, or the link of `rank`
    /// ends. Waits at most `timeout`.
    pub(crate) fn await_news(&self, rank: Rank, timeout: Duration, news: impl Fn() -> bool) {
        let Some(this) = &self.0 else { return };
        let start = Instant::now();
        let mut arrivals = this.shared.arrivals();
        while !news() && !arrivals.ended.contains_key(&rank) {
            let left = timeout.saturating_sub(start.elapsed());
            if left.is_zero() {
                return;
            }
            arrivals =
                this.shared.changed.wait_timeout(arrivals, left).unwrap_or_else(PoisonError::into_inner).0;
        }
    }

    /// Sends the descriptor of a new segment of this rank to the peers of its machine. A dead peer is no error here; the
    /// next wait for it reports the death.
    ///
    /// # Errors
    /// [`PeerError`] for a peer that does not accept the descriptor within the stall bound, and [`EnvironmentError`] if the
    /// system does not let this rank send it.
    pub(crate) fn announce(&self, name: SegmentName, file: &OwnedFd) -> Result<()> {
        let Some(this) = &self.0 else { return Ok(()) };
        let body = [name.id.to_le_bytes(), (name.len as u64).to_le_bytes()].concat();
        for peer in &this.peers {
            let Outward::Here(sender) = &peer.outward else { continue };
            let start = Instant::now();
            let sent = lock(sender).send(&body, Some(file.as_fd()), this.stall_bound);
            match sent.map_err(|error| (error.kind(), error)) {
                Ok(()) | Err((ErrorKind::BrokenPipe, _)) => {}
                Err((ErrorKind::TimedOut, _)) => {
                    let (what, fault) = ("it to accept a descriptor of memory", PeerFault::Stalled);
                    return Err(PeerError::joining(this.rank, peer.rank, fault, what, start.elapsed()).into());
                }
                // Without the descriptor, the peer would wait for it and blame this rank.
                Err((_, error)) => {
                    let what = format!("sending a descriptor of memory to rank {}", peer.rank);
                    let hint = "raise the limit of open files (ulimit -n), or free memory";
                    return Err(EnvironmentError::new(what, error, hint).into());
                }
            }
        }
        Ok(())
    }

    /// The segment `name` of `rank`. Waits within the stall bound for its descriptor.
    ///
    /// # Errors
    /// [`PeerError`] when a process has died, the peer has left, the segment is not what the peer published, or its
    /// descriptor does not arrive in time.
    pub(crate) fn find(&self, rank: Rank, name: SegmentName) -> Result<Arc<Segment>> {
        let SegmentName { id, len } = name;
        let what = || format!("segment {id} of its memory");
        let Some(this) = &self.0 else {
            return Err(EnvironmentError::new(
                format!("finding segment {id} of rank {rank}"),
                "it was never made",
                "",
            )
            .into());
        };
        let start = Instant::now();
        let error = |peer: Rank, fault: PeerFault, what: String| {
            Err(PeerError::joining(this.rank, peer, fault, what, start.elapsed()).into())
        };
        let mut arrivals = this.shared.arrivals();
        loop {
            match arrivals.segments.get(&(rank, id)) {
                Some(Ok(segment)) if segment.len() == len => return Ok(Arc::clone(segment)),
                Some(Ok(segment)) => {
                    let found = segment.len();
                    return error(rank, PeerFault::Failed, format!("{} of {len} bytes, not {found}", what()));
                }
                Some(Err(problem)) => {
                    return error(rank, PeerFault::Failed, format!("{}: {problem}", what()));
                }
                None => {}
            }
            // A lost rank comes before a rank that left, which may have left because of the loss. Of several lost
            // ranks, the awaited one comes first, then the lowest, so that every run names the same rank.
            let order = |(&at, &fault): (&Rank, &PeerFault)| (fault == PeerFault::Left, at != rank, at);
            let concerns = |(at, fault): &(&Rank, &PeerFault)| **at == rank || **fault != PeerFault::Left;
            if let Some((&lost, &fault)) =
                arrivals.ended.iter().filter(concerns).min_by_key(|&ended| order(ended))
            {
                return error(lost, fault, what());
            }
            let left = this.stall_bound.saturating_sub(start.elapsed());
            if left.is_zero() {
                return error(rank, PeerFault::Stalled, what());
            }
            arrivals =
                this.shared.changed.wait_timeout(arrivals, left).unwrap_or_else(PoisonError::into_inner).0;
        }
    }

    /// The stamp of segment `id` of `rank`: a code that only members of this job can compute.
    pub(crate) fn stamp(&self, rank: Rank, id: u64) -> [u8; 32] {
        let what = [u64::from(rank.0).to_le_bytes(), id.to_le_bytes()].concat();
        self.0.as_ref().map_or([0; 32], |this| this.job.stamp(&what))
    }

    /// The ranks whose process has ended, or whose link has ended without a leave message, and why.
    pub(crate) fn lost(&self) -> impl Iterator<Item = (Rank, PeerFault)> {
        let (this, peers) = (self.0.as_deref(), self.peers());
        let watched: Vec<&OwnedFd> = peers.iter().filter_map(|peer| peer.process.as_ref()).collect();
        let mut fds: Vec<PollFd<'_>> = watched.iter().map(|fd| PollFd::new(*fd, PollFlags::IN)).collect();
        if !fds.is_empty() {
            // A failed poll leaves all events empty: no rank counts as dead, and the next check polls again.
            let _ = poll(&mut fds, Some(&Timespec { tv_sec: 0, tv_nsec: 0 }));
        }
        let mut ended = fds.into_iter().map(|fd| fd.revents().contains(PollFlags::IN));
        let fault = |peer: &Peer| {
            let died = peer.process.is_some() && ended.next() == Some(true);
            let link = this.map_or(LINKED, |this| this.shared.lost[peer.rank.index()].load(Relaxed));
            let fault = match (died, link) {
                (true, _) => PeerFault::Died,
                (false, LINKED) => return None,
                (false, code) => PeerFault::from_code(code.into()),
            };
            Some((peer.rank, fault))
        };
        peers.iter().filter_map(fault).collect::<Vec<_>>().into_iter()
    }
}

fn lock<T>(sender: &Mutex<T>) -> MutexGuard<'_, T> {
    sender.lock().unwrap_or_else(PoisonError::into_inner)
}

/// The receiver thread: handles the messages of the peers until `stopped` closes. Then it waits until the ranks of other
/// machines have closed their direction of the links: if this end closed a socket with unread bytes, the system would
/// reset the connection, and the leave message could be lost.
fn receive_until_stopped(shared: &Shared, mut inwards: Vec<Inward>, stopped: &UnixStream) {
    let mut deadline = None;
    loop {
        inwards.retain_mut(|inward| !inward.is_due || receive_some(shared, inward));
        let wait = match deadline {
            None => None,
            Some(_) if inwards.is_empty() => return,
            Some(deadline) => match Instant::now() {
                now if now >= deadline => return,
                now => Timespec::try_from(deadline - now).ok(),
            },
        };
        let mut fds: Vec<PollFd<'_>> =
            inwards.iter().map(|inward| PollFd::new(&inward.receiver, PollFlags::IN)).collect();
        if deadline.is_none() {
            fds.push(PollFd::new(stopped, PollFlags::IN));
        }
        let polled = poll(&mut fds, wait.as_ref()).is_ok();
        let ready: Vec<bool> = fds.iter().map(|fd| polled && !fd.revents().is_empty()).collect();
        inwards.iter_mut().zip(&ready).for_each(|(inward, &ready)| inward.is_due = ready);
        if deadline.is_none() && ready.last() == Some(&true) {
            inwards.retain(|inward| inward.remote.is_some());
            deadline = Some(Instant::now() + LINGER);
        }
    }
}

/// Handles messages of one peer that have arrived, at most [`MESSAGES_A_TURN`], so that the other peers have their
/// turn. Returns whether more messages can follow.
fn receive_some(shared: &Shared, inward: &mut Inward) -> bool {
    let Inward { rank, receiver, remote, .. } = inward;
    for _ in 0..MESSAGES_A_TURN {
        // No bytes beyond a message are read, so the socket stays readable while further messages wait.
        let Some(received) = receiver.receive() else { return true };
        let fault = match (received, &*remote) {
            (LinkEvent::Message(body, _), Some((mirror, link))) => {
                let status = lock(link).receive(&body).and_then(Status::from_bytes);
                match status {
                    Some(status) => {
                        // With the lock, a thread that waits for news sees the status when it checks again.
                        let _arrivals = shared.arrivals();
                        mirror.mirror(&status);
                        shared.changed.notify_all();
                        continue;
                    }
                    None => PeerFault::Broken,
                }
            }
            (LinkEvent::Message(body, file), None) => {
                if let Some((name, segment)) = map_announced(&body, file) {
                    shared.arrivals().segments.entry((*rank, name.id)).or_insert(segment);
                    shared.changed.notify_all();
                }
                continue;
            }
            (LinkEvent::Left, _) => PeerFault::Left,
            (LinkEvent::Unreachable, _) => PeerFault::Unreachable,
            (_, _) => PeerFault::Died,
        };
        match (fault, &*remote) {
            (PeerFault::Left, None) => {}
            (PeerFault::Left, Some((mirror, link))) => {
                if mirror.health() == Health::Alive {
                    mirror.set_health(Health::Left);
                }
                // The peer waits for the end of this direction.
                lock(link).leave();
            }
            _ => shared.lost[rank.index()].store(fault.code(), Relaxed),
        }
        shared.arrivals().ended.insert(*rank, fault);
        shared.changed.notify_all();
        return false;
    }
    true
}

/// Maps an announced segment. `None` for a message of the wrong length.
fn map_announced(body: &[u8], file: Option<OwnedFd>) -> Option<(SegmentName, Result<Arc<Segment>, String>)> {
    let (id, len) = body.split_first_chunk()?;
    let (id, len) = (u64::from_le_bytes(*id), u64::from_le_bytes(len.try_into().ok()?));
    let segment = match (usize::try_from(len), file) {
        (Ok(len), Some(file)) => Segment::received(&file, len).map(Arc::new),
        (Err(_), _) => Err(format!("{len} bytes are more than the address space")),
        (_, None) => Err("no descriptor came with it; raise the limit of open files (ulimit -n)".into()),
    };
    Some((SegmentName { id, len: usize::try_from(len).unwrap_or(usize::MAX) }, segment))
}

impl Drop for Peers {
    fn drop(&mut self) {
        let Some(thread) = self.thread.take() else { return };
        if self.process == std::process::id() {
            for peer in &self.peers {
                match &peer.outward {
                    Outward::Here(sender) => lock(sender).leave(),
                    Outward::Elsewhere(link) => lock(link).leave(),
                }
            }
            self.stop = None;
            // A panic of the thread has already been printed, and the rank ends anyway.
            let _ = thread.join();
        }
    }
}

#[cfg(test)]
mod tests {
    use std::os::fd::AsRawFd as _;

    use ep::join::{Door, Invitation, Member};

    use super::*;

    const LONG: Duration = Duration::from_secs(60);

    /// The links of `ranks` ranks, all in this process.
    fn connected(ranks: usize) -> Vec<Processes> {
        let doors: Vec<Door> = (0..ranks).map(|_| Door::open().unwrap()).collect();
        let invitations: Vec<Invitation> = doors.iter().map(|door| door.invitation().clone()).collect();
        std::thread::scope(|scope| {
            let threads: Vec<_> = doors
                .into_iter()
                .zip(0..)
                .map(|(door, rank)| {
                    let member = Member::new(Rank(rank), ranks, LONG);
                    let invitations = &invitations;
                    let never = |_| unreachable!("all ranks are on one machine");
                    scope.spawn(move || {
                        let links = Links::connect(door, &member, invitations, || None).unwrap();
                        Processes::new(member.rank, links, LONG, never).unwrap()
                    })
                })
                .collect();
            threads.into_iter().map(|thread| thread.join().unwrap()).collect()
        })
    }

    /// The sender of the link to the first peer.
    fn to_peer(processes: &Processes) -> MutexGuard<'_, LinkSender> {
        match &processes.peers()[0].outward {
            Outward::Here(sender) => lock(sender),
            Outward::Elsewhere(_) => unreachable!("all ranks are on one machine"),
        }
    }

    #[test]
    #[cfg_attr(miri, ignore = "sockets")]
    fn processes_reach_the_same_bytes_and_learn_who_leaves() {
        let mut all = connected(3);
        let (segment, file) = Segment::shared(8192).unwrap();
        let name = SegmentName { id: 7, len: 8192 };
        all[1].announce(name, &file).unwrap();
        drop(file);
        for rank in [0, 2] {
            let theirs = all[rank].find(Rank(1), name).unwrap();
            assert_ne!(segment.at(0, 1), theirs.at(0, 1));
            // SAFETY: both ranges are mapped, and only this thread touches them.
            unsafe {
                segment.at(5000, 1).write(70 + rank as u8);
                assert_eq!(theirs.at(5000, 1).read(), 70 + rank as u8);
            }
            let longer = all[rank].find(Rank(1), SegmentName { id: 7, len: 4096 }).unwrap_err().to_string();
            assert!(
                longer.starts_with("rank 1 failed") && longer.contains("4096 bytes, not 8192"),
                "{longer}"
            );
        }
        assert_eq!(all[0].stamp(Rank(1), 7), all[2].stamp(Rank(1), 7));
        assert_ne!(all[0].stamp(Rank(1), 7), all[0].stamp(Rank(1), 8));
        assert_ne!(all[0].stamp(Rank(1), 7), connected(1)[0].stamp(Rank(1), 7));
        drop(all.remove(1));
        let error = all[0].find(Rank(1), SegmentName { id: 8, len: 1 }).unwrap_err().to_string();
        assert!(error.starts_with("rank 1 left"), "{error}");
        // Rank 1 left, but this process is alive.
        assert_eq!(all[0].lost().count(), 0);
    }

    #[test]
    #[cfg_attr(miri, ignore = "sockets")]
    fn only_sealed_memory_of_the_announced_length_is_mapped() {
        use rustix::fs::{MemfdFlags, SealFlags, fcntl_add_seals, ftruncate, memfd_create};
        let all = connected(2);
        let memfd = |len: u64, seals: SealFlags| {
            let file = memfd_create("test", MemfdFlags::CLOEXEC | MemfdFlags::ALLOW_SEALING).unwrap();
            ftruncate(&file, len).unwrap();
            fcntl_add_seals(&file, seals).unwrap();
            file
        };
        let plain: OwnedFd = {
            let path = std::env::temp_dir().join(format!("hybrid-ep-fd-{}", std::process::id()));
            let file =
                std::fs::File::options().create(true).truncate(true).read(true).write(true).open(&path);
            let file = file.unwrap();
            file.set_len(4096).unwrap();
            std::fs::remove_file(path).unwrap();
            file.into()
        };
        let sealed = SealFlags::SHRINK | SealFlags::GROW | SealFlags::SEAL;
        let read_only: OwnedFd = {
            let file = memfd(4096, sealed);
            std::fs::File::open(format!("/proc/self/fd/{}", file.as_raw_fd())).unwrap().into()
        };
        let cases = [
            (plain, "must be a memfd that is sealed"),
            (memfd(4096, SealFlags::empty()), "must be a memfd that is sealed"),
            (memfd(4096, SealFlags::SHRINK | SealFlags::GROW), "must be a memfd that is sealed"),
            (memfd(16, sealed), "its file has 16 bytes"),
            (memfd(8192, sealed), "its file has 8192 bytes"),
            (read_only, "mapping it"),
        ];
        for ((file, problem), id) in cases.into_iter().zip(1..) {
            let name = SegmentName { id, len: 4096 };
            all[0].announce(name, &file).unwrap();
            let error = all[1].find(Rank(0), name).unwrap_err().to_string();
            assert!(error.starts_with("rank 0 failed") && error.contains(problem), "{error}");
        }
        // A body that is too short, a message without a descriptor, and a number that was announced before.
        let sender = |body: &[u8]| {
            to_peer(&all[0]).send(body, None, LONG).unwrap();
        };
        sender(&[9; 3]);
        sender(&[20u64.to_le_bytes(), 4096u64.to_le_bytes()].concat());
        let bare = all[1].find(Rank(0), SegmentName { id: 20, len: 4096 }).unwrap_err().to_string();
        assert!(bare.contains("no descriptor came with it"), "{bare}");
        let (good, file) = Segment::shared(4096).unwrap();
        all[0].announce(SegmentName { id: 1, len: 4096 }, &file).unwrap();
        all[0].announce(SegmentName { id: 30, len: 4096 }, &file).unwrap();
        assert!(all[1].find(Rank(0), SegmentName { id: 30, len: 4096 }).is_ok());
        assert!(
            all[1].find(Rank(0), SegmentName { id: 1, len: 4096 }).is_err(),
            "the first announcement counts"
        );
        drop(good);
    }

    #[test]
    #[cfg_attr(miri, ignore = "sockets")]
    fn a_link_that_closes_without_a_leave_message_is_a_death() {
        let mut all = connected(2);
        let peers = Arc::get_mut(all[0].0.as_mut().unwrap()).unwrap();
        peers.peers[0].process = None;
        // The system closes the sockets of a process that is killed; no leave message is sent.
        let other = all.pop().unwrap();
        {
            rustix::net::shutdown(&*to_peer(&other), rustix::net::Shutdown::Both).unwrap();
        }
        let error = all[0].find(Rank(1), SegmentName { id: 1, len: 1 }).unwrap_err().to_string();
        assert!(error.starts_with("rank 1 died"), "{error}");
        assert_eq!(all[0].lost().collect::<Vec<_>>(), [(Rank(1), PeerFault::Died)]);
    }

    #[test]
    #[cfg_attr(miri, ignore = "processes")]
    fn only_ranks_whose_process_has_ended_are_dead() {
        use rustix::process::{Pid, PidfdFlags, pidfd_open};
        let mut all = connected(2);
        let mut child = std::process::Command::new("sleep").arg("60").spawn().unwrap();
        let process = pidfd_open(Pid::from_child(&child), PidfdFlags::empty()).unwrap();
        let peers = Arc::get_mut(all[0].0.as_mut().unwrap()).unwrap();
        peers.peers[0].process = Some(process);
        assert_eq!(all[0].lost().count(), 0);
        child.kill().unwrap();
        while all[0].lost().count() == 0 {
            std::thread::yield_now();
        }
        // A zombie process has ended, too.
        assert_eq!(all[0].lost().collect::<Vec<_>>(), [(Rank(1), PeerFault::Died)]);
        child.wait().unwrap();
        assert_eq!(all[0].lost().collect::<Vec<_>>(), [(Rank(1), PeerFault::Died)]);
        assert_eq!(Processes::default().lost().count(), 0);
    }
}
