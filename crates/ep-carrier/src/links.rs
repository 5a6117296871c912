//! Which peers are gone, of ranks that are processes: a rank watches its links to them.
//!
//! A link ends with a leave message, or because the process at its other end has died. A forked child of that process may
//! keep the link open, so the processes of this machine are watched too. Between machines, both ends send an empty message
//! again and again: a machine that acknowledges none for a while is unreachable.

use std::os::fd::OwnedFd;
use std::sync::atomic::{AtomicBool, Ordering::Acquire, Ordering::Release};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::thread::JoinHandle;
use std::time::{Duration, Instant};

use ep::join::{Link, LinkEvent, LinkReceiver, LinkSender, SnapshotLink};
use ep::{EnvironmentError, Rank, Result};
use ep_migrate::CarrierError;
use rustix::event::{PollFd, PollFlags, Timespec, poll};

use crate::ends::Ends;

/// The pause between two messages to a rank on another machine.
const EVERY: Duration = Duration::from_millis(100);
/// How long a rank that leaves still reads its links. If it closed a socket with unread bytes, the system would reset the
/// connection, and the peer might not get the leave message.
const LINGER: Duration = Duration::from_millis(200);
/// Maximum number of messages of a peer that the thread handles before it serves the other peers.
const MESSAGES_A_TURN: usize = 64;

/// The links of a rank, and a thread that watches them until the rank leaves.
#[derive(Debug)]
pub(crate) struct LinkEnds {
    shared: Arc<Shared>,
    thread: Mutex<Option<JoinHandle<()>>>,
    /// The process that runs the thread. A forked child has a copy of this value but no thread.
    process: u32,
}

#[derive(Debug)]
struct Shared {
    /// By position on the rail.
    ended: Mutex<Vec<Option<CarrierError>>>,
    outward: Vec<Mutex<Outward>>,
    leaving: AtomicBool,
}

/// The sending direction of a link.
#[derive(Debug)]
enum Outward {
    Here(LinkSender),
    Elsewhere(SnapshotLink),
}

/// What the thread reads of one peer.
struct Inward {
    position: usize,
    receiver: LinkReceiver,
    /// `None` for a process in another PID namespace or on another machine.
    process: Option<OwnedFd>,
}

fn lock<T>(mutex: &Mutex<T>) -> MutexGuard<'_, T> {
    mutex.lock().unwrap_or_else(PoisonError::into_inner)
}

impl LinkEnds {
    /// Watches the `links` of the rank at position `own` to all other ranks, in rank order.
    ///
    /// # Errors
    /// [`EnvironmentError`] when the system has no thread.
    pub(crate) fn watch(own: usize, links: Vec<(Rank, Link)>) -> Result<Self> {
        let (mut outward, mut inward) = (Vec::new(), Vec::new());
        let ranks = links.len() + 1;
        for (rank, link) in links {
            let (is_remote, process) = (link.is_remote(), link.process_handle());
            let (sender, receiver) = link.split();
            outward.push(Mutex::new(match is_remote {
                true => Outward::Elsewhere(SnapshotLink::new(sender)),
                false => Outward::Here(sender),
            }));
            inward.push(Inward { position: rank.index(), receiver, process });
        }
        let (ended, leaving) = (Mutex::new(vec![None; ranks]), AtomicBool::new(false));
        let shared = Arc::new(Shared { ended, outward, leaving });
        let watching = Arc::clone(&shared);
        let thread = std::thread::Builder::new()
            .name(format!("ep-ends-{own}"))
            .spawn(move || watching.watch(inward, own))
            .map_err(|error| {
                let hint = "raise the limit of threads (ulimit -u)";
                EnvironmentError::new("starting the thread that watches the other ranks", error, hint)
            })?;
        Ok(Self { shared, thread: Mutex::new(Some(thread)), process: std::process::id() })
    }

    fn is_of_this_process(&self) -> bool {
        self.process == std::process::id()
    }
}

impl Ends for LinkEnds {
    fn ended(&self, position: usize) -> Option<CarrierError> {
        lock(&self.shared.ended)[position].clone()
    }

    fn leave(&self) {
        if self.is_of_this_process() {
            self.shared.leaving.store(true, Release);
            self.shared.outward.iter().for_each(|link| lock(link).leave());
        }
    }

    fn finish(&self) {
        self.leave();
        if let Some(thread) = lock(&self.thread).take().filter(|_| self.is_of_this_process()) {
            // A thread that panicked has printed its message.
            let _ = thread.join();
        }
    }
}

impl Drop for LinkEnds {
    fn drop(&mut self) {
        self.finish();
    }
}

impl Outward {
    fn leave(&mut self) {
        match self {
            Self::Here(link) => link.leave(),
            Self::Elsewhere(link) => link.leave(),
        }
    }
}

impl Shared {
    /// The thread.
    fn watch(&self, mut inward: Vec<Inward>, own: usize) {
        let (mut beat, mut deadline) = (Instant::now(), None);
        let pause = Timespec::try_from(EVERY).expect("a short pause");
        loop {
            inward.retain_mut(|peer| {
                // Links are in rank order and leave out this rank.
                let link = &self.outward[peer.position - usize::from(peer.position > own)];
                match look(peer, link) {
                    None => true,
                    Some(error) => {
                        lock(&self.ended)[peer.position] = Some(error);
                        false
                    }
                }
            });
            if self.leaving.load(Acquire) {
                let deadline = *deadline.get_or_insert_with(|| Instant::now() + LINGER);
                if inward.is_empty() || Instant::now() >= deadline {
                    return;
                }
            } else if Instant::now() >= beat {
                beat = Instant::now() + EVERY;
                for link in &self.outward {
                    if let Outward::Elsewhere(link) = &mut *lock(link) {
                        link.send(false, Vec::new);
                    }
                }
            }
            let of_process = |peer: &Inward| peer.process.is_some();
            let mut fds: Vec<PollFd<'_>> =
                inward.iter().map(|peer| PollFd::new(&peer.receiver, PollFlags::IN)).collect();
            let processes = inward.iter().filter(|peer| of_process(peer));
            fds.extend(processes.filter_map(|peer| Some(PollFd::new(peer.process.as_ref()?, PollFlags::IN))));
            // A failed poll is a pause that was cut short.
            let _ = poll(&mut fds, Some(&pause));
        }
    }
}

/// Reads what a peer has sent. Returns why its connection has ended, if it has.
fn look(peer: &mut Inward, link: &Mutex<Outward>) -> Option<CarrierError> {
    for _ in 0..MESSAGES_A_TURN {
        match peer.receiver.receive() {
            Some(LinkEvent::Message(body, _)) => {
                let is_right = match &mut *lock(link) {
                    Outward::Elsewhere(link) => link.receive(&body).is_some(),
                    Outward::Here(_) => false,
                };
                if !is_right {
                    let found = "a message on its link that no correct rank sends";
                    return Some(CarrierError::Broken(found.into()));
                }
            }
            Some(LinkEvent::Unreachable) => return Some(CarrierError::Unreachable),
            Some(_) => {
                // The peer waits for the end of this direction.
                lock(link).leave();
                return Some(CarrierError::Closed);
            }
            None => break,
        }
    }
    let process = peer.process.as_ref()?;
    let mut fds = [PollFd::new(process, PollFlags::IN)];
    let polled = poll(&mut fds, Some(&Timespec { tv_sec: 0, tv_nsec: 0 })).is_ok();
    (polled && fds[0].revents().contains(PollFlags::IN)).then_some(CarrierError::Closed)
}
