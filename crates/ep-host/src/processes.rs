//! The processes of the other ranks: receives descriptors of their memory, and detects their deaths.
//!
//! A rank sends the descriptor of every segment that it makes to all other ranks before it publishes a location in the
//! segment. A receiver thread checks and maps the segments that arrive. It accepts only what the system confirms: a
//! memfd of this user with the announced length, sealed, so that no peer can truncate the file under the mapping.
//!
//! `join` connects the processes, `segment` announces and finds segments, `wait` asks for deaths.

use std::collections::HashMap;
use std::os::fd::{AsFd as _, OwnedFd};
use std::os::unix::net::UnixStream;
use std::sync::atomic::{AtomicBool, Ordering::Relaxed};
use std::sync::{Arc, Condvar, Mutex, MutexGuard, PoisonError};
use std::thread::JoinHandle;
use std::time::{Duration, Instant};

use ep::join::{Door, Invitation, Link, LinkEvent, LinkReceiver, LinkSender, Links, Member};
use ep::{EnvironmentError, PeerError, PeerFault, Rank, Result};
use rustix::event::{PollFd, PollFlags, Timespec, poll};

use crate::segment::{Segment, SegmentName};

/// The peers' processes; empty when ranks are threads. Clones share one state. Dropping the last clone sends a leave
/// message to every peer.
#[derive(Debug, Clone, Default)]
pub(crate) struct Processes(Option<Arc<Peers>>);

#[derive(Debug)]
struct Peers {
    rank: Rank,
    /// How long a peer may take to accept a descriptor, or to send one whose segment it has published.
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
    sender: Mutex<LinkSender>,
    /// A pidfd, readable when the process has ended; `None` for a process in another PID namespace.
    process: Option<OwnedFd>,
}

/// The state that the receiver thread shares with the workers.
#[derive(Debug, Default)]
struct Shared {
    arrivals: Mutex<Arrivals>,
    changed: Condvar,
    /// By rank: whether its link closed without a leave message.
    died: Vec<AtomicBool>,
}

/// The messages that have arrived.
#[derive(Debug, Default)]
struct Arrivals {
    /// By owner and the owner's number: the segment, or what is wrong with it.
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
    /// Links this process with those of all other ranks. Collective.
    ///
    /// # Errors
    /// [`PeerError`] that names a rank that is gone or does not connect.
    pub(crate) fn connect(
        door: Door,
        member: &Member,
        invitations: &[Invitation],
        stall_bound: Duration,
    ) -> Result<Self> {
        let mut job = Links::connect(door, member, invitations)?;
        let died = (0..member.ranks).map(|_| AtomicBool::new(false)).collect();
        let shared = Arc::new(Shared { died, ..Shared::default() });
        let (mut peers, mut receivers) = (Vec::new(), Vec::new());
        for (rank, link) in std::mem::take(&mut job.links) {
            let process = process_handle(&link);
            let (sender, receiver) = link.split()?;
            peers.push(Peer { rank, sender: Mutex::new(sender), process });
            receivers.push((rank, receiver));
        }
        let failed =
            |error| EnvironmentError::new("starting the thread that receives peers' memory", error, "");
        let (stop, stopped) = UnixStream::pair().map_err(failed)?;
        let receiving = Arc::clone(&shared);
        let thread = std::thread::Builder::new()
            .name(format!("ep-links-{}", member.rank))
            .spawn(move || receive_until_stopped(&receiving, receivers, &stopped))
            .map_err(failed)?;
        let (stop, thread, process) = (Some(stop), Some(thread), std::process::id());
        let peers = Peers { rank: member.rank, stall_bound, peers, job, shared, stop, thread, process };
        Ok(Self(Some(Arc::new(peers))))
    }

    /// Whether no peer is a process, because ranks are threads.
    pub(crate) fn is_empty(&self) -> bool {
        self.0.is_none()
    }

    /// Sends the descriptor of a new segment of this rank to all peers. A dead peer is no error here; the next wait for
    /// it reports the death.
    ///
    /// # Errors
    /// [`PeerError`] for a peer that does not accept the descriptor within the stall bound.
    pub(crate) fn announce(&self, name: SegmentName, file: &OwnedFd) -> Result<()> {
        let Some(this) = &self.0 else { return Ok(()) };
        let body = [name.id.to_le_bytes(), (name.len as u64).to_le_bytes()].concat();
        for peer in &this.peers {
            let start = Instant::now();
            let mut sender = peer.sender.lock().unwrap_or_else(PoisonError::into_inner);
            let sent = sender.send(&body, Some(file.as_fd()), this.stall_bound);
            if sent.is_err_and(|error| error.kind() == std::io::ErrorKind::TimedOut) {
                let waited_for = "it to accept a descriptor of memory";
                let fault = PeerFault::Stalled;
                return Err(
                    PeerError::joining(this.rank, peer.rank, fault, waited_for, start.elapsed()).into()
                );
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
            let died =
                arrivals.ended.iter().find(|(_, fault)| **fault == PeerFault::Died).map(|(rank, _)| *rank);
            if let Some(died) = died {
                return error(died, PeerFault::Died, what());
            }
            if let Some(&fault) = arrivals.ended.get(&rank) {
                return error(rank, fault, what());
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

    /// The ranks whose process has ended, or whose link has closed without a leave message.
    pub(crate) fn dead(&self) -> impl Iterator<Item = Rank> {
        let this = self.0.as_deref();
        let peers: &[Peer] = this.map_or(&[], |this| &this.peers);
        let watched: Vec<&OwnedFd> = peers.iter().filter_map(|peer| peer.process.as_ref()).collect();
        let mut fds: Vec<PollFd<'_>> = watched.iter().map(|fd| PollFd::new(*fd, PollFlags::IN)).collect();
        if !fds.is_empty() {
            // A failed poll leaves all events empty: no rank counts as dead, and the next check polls again.
            let _ = poll(&mut fds, Some(&Timespec { tv_sec: 0, tv_nsec: 0 }));
        }
        let mut ended = fds.into_iter().map(|fd| fd.revents().contains(PollFlags::IN));
        let gone = |peer: &Peer| {
            let process = peer.process.is_some() && ended.next() == Some(true);
            let link = this.is_some_and(|this| this.shared.died[peer.rank.index()].load(Relaxed));
            (process || link).then_some(peer.rank)
        };
        peers.iter().filter_map(gone).collect::<Vec<_>>().into_iter()
    }
}

/// A pidfd of the process at the other end; `None` for a process in another PID namespace. The death of such a process
/// is detected by its link alone, and not while a forked child of it keeps the link open.
fn process_handle(link: &Link) -> Option<OwnedFd> {
    use rustix::process::{Pid, PidfdFlags, pidfd_open};
    let process = Pid::from_raw(i32::try_from(link.process()?).ok()?)?;
    pidfd_open(process, PidfdFlags::empty()).ok()
}

/// The receiver thread: handles the messages of the peers until `stopped` closes.
fn receive_until_stopped(shared: &Shared, mut receivers: Vec<(Rank, LinkReceiver)>, stopped: &UnixStream) {
    loop {
        receivers.retain_mut(|(rank, receiver)| {
            while let Some(received) = receiver.receive() {
                let fault = match received {
                    LinkEvent::Message(body, file) => {
                        if let Some((name, segment)) = map_announced(&body, file) {
                            shared.arrivals().segments.entry((*rank, name.id)).or_insert(segment);
                            shared.changed.notify_all();
                        }
                        continue;
                    }
                    LinkEvent::Left => PeerFault::Left,
                    _ => {
                        shared.died[rank.index()].store(true, Relaxed);
                        PeerFault::Died
                    }
                };
                shared.arrivals().ended.insert(*rank, fault);
                shared.changed.notify_all();
                return false;
            }
            true
        });
        let mut fds = vec![PollFd::new(stopped, PollFlags::IN)];
        fds.extend(receivers.iter().map(|(_, receiver)| PollFd::new(receiver, PollFlags::IN)));
        if poll(&mut fds, None).is_ok() && !fds[0].revents().is_empty() {
            return;
        }
    }
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
            self.stop = None;
            // The rank ends too, and the thread has printed its panic, if it had one.
            let _ = thread.join();
        }
    }
}

#[cfg(test)]
mod tests {
    use std::os::fd::AsRawFd as _;

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
                    scope.spawn(move || Processes::connect(door, &member, invitations, LONG).unwrap())
                })
                .collect();
            threads.into_iter().map(|thread| thread.join().unwrap()).collect()
        })
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
        assert_eq!(all[0].dead().count(), 0);
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
            let peers = all[0].0.as_ref().unwrap();
            peers.peers[0].sender.lock().unwrap().send(body, None, LONG).unwrap();
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
            let sender = other.0.as_ref().unwrap().peers[0].sender.lock().unwrap();
            rustix::net::shutdown(&*sender, rustix::net::Shutdown::Both).unwrap();
        }
        let error = all[0].find(Rank(1), SegmentName { id: 1, len: 1 }).unwrap_err().to_string();
        assert!(error.starts_with("rank 1 died"), "{error}");
        assert_eq!(all[0].dead().collect::<Vec<_>>(), [Rank(1)]);
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
        assert_eq!(all[0].dead().count(), 0);
        child.kill().unwrap();
        while all[0].dead().count() == 0 {
            std::thread::yield_now();
        }
        // A zombie has ended.
        assert_eq!(all[0].dead().collect::<Vec<_>>(), [Rank(1)]);
        child.wait().unwrap();
        assert_eq!(all[0].dead().collect::<Vec<_>>(), [Rank(1)]);
        assert_eq!(Processes::default().dead().count(), 0);
    }
}
