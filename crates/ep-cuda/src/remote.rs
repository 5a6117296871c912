//! Ranks on other machines and in other NVLink domains, whose control blocks cannot be mapped.
//!
//! Kernels access few words of the control blocks of other domains: they store the abort word, and load the record of a
//! rank that has given up. For a rank on another machine, kernels get a *mirror* of these words in host memory
//! ([`Mirrors`]). With each heartbeat, a rank sends its [`State`] over its links to ranks of other machines: the abort word
//! that its kernels have stored, its fault report and, when it leaves, its gone word. The receiver stores the records in
//! its mirrors and the abort word in its own control block. docs/protocol.md lists the words.

use std::sync::atomic::{AtomicU32, Ordering, fence};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::thread::{self, JoinHandle};
use std::time::{Duration, Instant};

use ep::join::{LinkEvent, LinkReceiver, LinkSender, SnapshotLink};
use ep::{EnvironmentError, Rank, Result};

use crate::driver::{Device, DeviceAddress, HostWords, Mapped};
use crate::fault::Report;
use crate::params::{
    ABORT_OFFSET, ABORT_RANK_BITS, FaultKind, FaultRecord, FaultReport, GONE_BITS, GoneWord, MIRROR_BYTES,
    NONE, RECORD_OFFSET,
};
use crate::peers::Access;

/// How long a receiver waits for a message at a time. Any length will do, because the receiver then waits again.
const IDLE: Duration = Duration::from_secs(3600);
/// How long a rank that leaves waits until ranks of other machines have read its last messages.
const LINGER: Duration = Duration::from_millis(200);
const MIRROR_WORDS: usize = MIRROR_BYTES / 4;

/// The state that a rank sends to ranks of other machines.
#[derive(Debug, Clone, Copy)]
pub(crate) struct State {
    /// An `abort_word` (sync.cuh); 0: the rank has not given up.
    pub(crate) abort: u32,
    /// The word of `Control::left` that stands for the rank once its links end; 0: the rank has not left.
    pub(crate) left: u32,
    pub(crate) report: FaultReport,
}

/// Whether this is a word of `Control::left` for a rank that has left.
pub(crate) fn is_left(word: u32) -> bool {
    let gone = word & ((1 << GONE_BITS) - 1);
    gone == GoneWord::Left as u32 || word == GoneWord::LeftEarly as u32
}

impl State {
    /// The two words and the report, little-endian.
    pub(crate) fn to_bytes(self) -> Vec<u8> {
        let Self { abort, left, report } = self;
        [&abort.to_le_bytes()[..], &left.to_le_bytes(), bytemuck::bytes_of(&report)].concat()
    }

    /// The state in a message from a rank of a world of `ranks` ranks. `None` for bytes that no rank sends: kernels use the
    /// ranks in abort words and records as indices.
    pub(crate) fn from_bytes(bytes: &[u8], ranks: usize) -> Option<Self> {
        let (abort, bytes) = bytes.split_first_chunk()?;
        let (left, report) = bytes.split_first_chunk()?;
        let (abort, left) = (u32::from_le_bytes(*abort), u32::from_le_bytes(*left));
        let report = bytemuck::try_pod_read_unaligned(report).ok()?;
        let FaultReport { own, theirs } = &report;
        let is_rank = |rank: u32| (rank as usize) < ranks;
        let is_record = |FaultRecord { fault, .. }: &FaultRecord| {
            let known = FaultKind::of(fault.kind).is_some() && FaultKind::of(fault.cause).is_some();
            known
                && is_rank(fault.rank)
                && is_rank(fault.peer)
                && (fault.awaited == NONE || is_rank(fault.awaited))
        };
        let is_abort = |word: u32| {
            let AbortWord { cause, by, at_fault } = AbortWord::of(word);
            FaultKind::of(cause).is_some() && is_rank(by) && is_rank(at_fault)
        };
        let fine = (abort == 0 || is_abort(abort)) && (left == 0 || is_left(left));
        (fine && is_record(own) && is_record(theirs)).then_some(Self { abort, left, report })
    }
}

/// The parts of an `abort_word` (sync.cuh).
pub(crate) struct AbortWord {
    pub(crate) cause: u32,
    /// The rank that has written the word.
    pub(crate) by: u32,
    pub(crate) at_fault: u32,
}

impl AbortWord {
    pub(crate) fn of(word: u32) -> Self {
        let rank = (1 << ABORT_RANK_BITS) - 1;
        Self {
            cause: word >> (2 * ABORT_RANK_BITS),
            by: word >> ABORT_RANK_BITS & rank,
            at_fault: (word & rank).wrapping_sub(1),
        }
    }

    #[cfg(any(test, feature = "fuzzing"))]
    pub(crate) fn word(&self) -> u32 {
        self.cause << (2 * ABORT_RANK_BITS) | self.by << ABORT_RANK_BITS | (self.at_fault + 1)
    }
}

/// The mirrors of the control blocks of all ranks on other machines, for the kernels of one rank.
pub(crate) struct Mirrors {
    /// `[ranks.len()][MIRROR_WORDS]`
    words: Box<dyn HostWords>,
    /// The address of `words` for kernels.
    address: DeviceAddress,
    /// The ranks of the mirrors.
    ranks: Vec<Rank>,
    /// Number of ranks of the world.
    world: usize,
    /// Returns the fault report of this rank.
    report: Box<dyn Fn() -> Option<FaultReport> + Send + Sync>,
    /// [`State::left`] of this rank.
    left: AtomicU32,
    /// Held while records are stored: the threads of several links may store records of one rank.
    storing: Mutex<()>,
}

impl std::fmt::Debug for Mirrors {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("Mirrors").field("ranks", &self.ranks).finish_non_exhaustive()
    }
}

impl Mirrors {
    /// Makes mirrors of the ranks whose memory is not mapped. `access`: this rank's access to every rank, in rank order;
    /// `report`: the fault report of this rank.
    pub(crate) fn new(device: &Arc<Device>, access: &[Access], report: Arc<Report>) -> Result<Arc<Self>> {
        let world = access.len();
        let mirrored = (0..).map(Rank).zip(access).filter(|&(_, &access)| access == Access::Mirror);
        let ranks: Vec<Rank> = mirrored.map(|(rank, _)| rank).collect();
        let words = Mapped::new(device, (ranks.len() * MIRROR_WORDS).max(1))?;
        let address = words.address();
        let (words, report) = (Box::new(words), Box::new(move || report.read()));
        let (left, storing) = (AtomicU32::new(0), Mutex::new(()));
        Ok(Arc::new(Self { words, address, ranks, world, report, left, storing }))
    }

    fn first_word_of(&self, rank: Rank) -> Option<usize> {
        self.ranks.iter().position(|&mirrored| mirrored == rank).map(|at| at * MIRROR_WORDS)
    }

    /// The address of the mirror of `rank`; `None` for a rank whose memory is mapped.
    pub(crate) fn address_of(&self, rank: Rank) -> Option<DeviceAddress> {
        Some(self.address + 4 * self.first_word_of(rank)? as DeviceAddress)
    }

    /// The state of this rank. Its kernels store the report first, and then the abort word in the mirrors, one after the
    /// other.
    fn state(&self) -> State {
        let of = |at: usize| self.words.read(at * MIRROR_WORDS + ABORT_OFFSET / 4);
        let abort = (0..self.ranks.len()).map(of).find(|&word| word != 0).unwrap_or(0);
        // The report was stored before the word.
        fence(Ordering::Acquire);
        let report = (self.report)().filter(|_| abort != 0).unwrap_or(bytemuck::Zeroable::zeroed());
        State { abort, left: self.left.load(Ordering::Relaxed), report }
    }

    /// Stores the records of the report of `sender` in the mirrors. The report may have a copy of a third rank's record,
    /// and that rank's own report may not have arrived yet.
    fn store(&self, sender: Rank, report: &FaultReport) {
        let FaultReport { own, theirs } = report;
        for (rank, record) in [(sender, own), (Rank(theirs.fault.rank), theirs)] {
            let Some(first) = self.first_word_of(rank).filter(|_| record.fault.kind != 0) else { continue };
            let first = first + RECORD_OFFSET / 4;
            let _storing = lock(&self.storing);
            // A record that was stored before does not change, because kernels may be reading it.
            if self.words.read(first) != 0 {
                continue;
            }
            let words: &[u32] = bytemuck::cast_slice(bytemuck::bytes_of(record));
            // The kind is the first word, and kernels read it first.
            for (at, &word) in words.iter().enumerate().rev() {
                self.words.write(first + at, word);
            }
        }
    }
}

/// What happens on the link to a rank of another machine.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum News {
    /// The rank has sent a heartbeat.
    Heartbeat,
    /// The rank has given up, with this abort word. Its record is in the mirrors.
    Abort(u32),
    /// The link has ended. The word is one of `Control::left`.
    Gone(u32),
}

/// This rank's links to ranks of other machines. Dropping it tells them that this rank leaves.
#[derive(Debug)]
pub(crate) struct RemoteLinks {
    mirrors: Arc<Mirrors>,
    links: Vec<Arc<Mutex<SnapshotLink>>>,
    threads: Vec<JoinHandle<()>>,
    /// The process that has the threads; a forked child has a copy of this value but not the threads.
    process: u32,
}

impl RemoteLinks {
    pub(crate) fn new(mirrors: Arc<Mirrors>) -> Self {
        Self { mirrors, links: Vec::new(), threads: Vec::new(), process: std::process::id() }
    }

    /// Starts the thread that receives the states of `peer` and calls `tell`, and returns a function that sends this rank's
    /// state.
    ///
    /// # Errors
    /// [`EnvironmentError`] if the thread cannot be started.
    pub(crate) fn serve(
        &mut self,
        own: Rank,
        peer: Rank,
        (sender, receiver): (LinkSender, LinkReceiver),
        tell: impl Fn(News) + Send + 'static,
    ) -> Result<impl FnMut() + Send + 'static> {
        let link = Arc::new(Mutex::new(SnapshotLink::new(sender)));
        self.links.push(Arc::clone(&link));
        // Weak: the thread that drops the buffer must free the pinned memory, not this one.
        let (mirrors, receiving, ranks) =
            (Arc::downgrade(&self.mirrors), Arc::clone(&link), self.mirrors.world);
        let run = move || {
            let learn = |state: &State| {
                tell(News::Heartbeat);
                let mirrors = mirrors.upgrade().filter(|_| state.abort != 0);
                if let Some(mirrors) = mirrors {
                    mirrors.store(peer, &state.report);
                    tell(News::Abort(state.abort));
                }
            };
            let gone = receive(receiver, &receiving, ranks, learn);
            tell(News::Gone(gone));
        };
        let thread = thread::Builder::new().name(format!("ep-link-{own}-{peer}")).spawn(run);
        let failed = |error| EnvironmentError::new("starting a thread for a link", error, "");
        self.threads.push(thread.map_err(failed)?);
        let mirrors = Arc::clone(&self.mirrors);
        Ok(move || lock(&link).send(false, || mirrors.state().to_bytes()))
    }

    /// Sends this rank's state now: the process may end before the next heartbeat.
    pub(crate) fn tell(&self) {
        if self.process == std::process::id() {
            self.send(false);
        }
    }

    /// Sets the word of `Control::left` that stands for this rank once its links end. All later states have the word.
    pub(crate) fn leaving(&self, word: u32) {
        self.mirrors.left.store(word, Ordering::Relaxed);
    }

    fn send(&self, last: bool) {
        for link in &self.links {
            lock(link).send(last, || self.mirrors.state().to_bytes());
        }
    }
}

impl Drop for RemoteLinks {
    /// Sends the last state, so that the peers learn of a fault before they learn that this rank has left.
    fn drop(&mut self) {
        if self.process != std::process::id() {
            return;
        }
        self.send(true);
        self.links.iter().for_each(|link| lock(link).leave());
        linger(&self.threads);
    }
}

/// Waits a short time until the peers have read the leave messages of this rank. `threads` receive on links to other
/// machines, and end when the peer has read that message and has closed its direction. If this process ended with unread
/// bytes in a socket, the system would reset the connection, and the message could be lost.
pub(crate) fn linger<'a>(threads: impl IntoIterator<Item = &'a JoinHandle<()>, IntoIter: Clone>) {
    let (threads, until) = (threads.into_iter(), Instant::now() + LINGER);
    while threads.clone().any(|thread| !thread.is_finished()) && Instant::now() < until {
        thread::sleep(Duration::from_millis(1));
    }
}

/// Receives the states of a rank until its link ends. Returns the word of `Control::left` that says why.
fn receive(
    mut receiver: LinkReceiver,
    link: &Mutex<SnapshotLink>,
    ranks: usize,
    learn: impl Fn(&State),
) -> u32 {
    let mut left = GoneWord::LeftEarly as u32;
    loop {
        match receiver.wait(IDLE) {
            None => {}
            Some(LinkEvent::Message(body, _)) => {
                let state = lock(link).receive(&body).and_then(|snapshot| State::from_bytes(snapshot, ranks));
                match state {
                    Some(state) => {
                        learn(&state);
                        if state.left != 0 {
                            left = state.left;
                        }
                    }
                    None => {
                        // Tells the peer that this rank does not listen any more.
                        lock(link).leave();
                        return GoneWord::Died as u32;
                    }
                }
            }
            Some(LinkEvent::Left) => {
                // The peer waits for the end of this direction.
                lock(link).leave();
                return left;
            }
            Some(LinkEvent::Unreachable) => return GoneWord::Unreachable as u32,
            Some(_) => return GoneWord::Died as u32,
        }
    }
}

pub(crate) fn lock<T>(mutex: &Mutex<T>) -> MutexGuard<'_, T> {
    mutex.lock().unwrap_or_else(PoisonError::into_inner)
}

#[cfg(test)]
mod tests {
    use std::net::Ipv4Addr;
    use std::sync::atomic::{AtomicU32, Ordering::SeqCst};
    use std::sync::mpsc::{Receiver, channel};

    use bytemuck::Zeroable as _;
    use ep::join::{Door, Link, Links, Member};

    use super::*;
    use crate::params::Fault;

    /// Ends a test that hangs.
    const LONG: Duration = Duration::from_secs(60);
    const RANKS: usize = 3;
    /// Ranks 1 and 2 are not on the machine of rank 0.
    const AWAY: [u32; 2] = [1, 2];

    #[derive(Debug)]
    struct Plain(Vec<AtomicU32>);

    impl HostWords for Plain {
        fn read(&self, at: usize) -> u32 {
            self.0[at].load(SeqCst)
        }

        fn write(&self, at: usize, word: u32) {
            self.0[at].store(word, SeqCst);
        }
    }

    /// What the kernels of a rank report.
    type Reported = Arc<Mutex<Option<FaultReport>>>;

    fn mirrors(ranks: &[u32]) -> (Arc<Mirrors>, Reported) {
        let words = (0..ranks.len() * MIRROR_WORDS).map(|_| AtomicU32::new(0)).collect();
        let reported = Reported::default();
        let report = Arc::clone(&reported);
        let mirrors = Mirrors {
            words: Box::new(Plain(words)),
            address: 1 << 20,
            ranks: ranks.iter().copied().map(Rank).collect(),
            world: RANKS,
            report: Box::new(move || *lock(&report)),
            left: AtomicU32::new(0),
            storing: Mutex::new(()),
        };
        (Arc::new(mirrors), reported)
    }

    /// Both ends of a link between machines.
    fn linked() -> [Link; 2] {
        let mut doors = [(); 2].map(|()| Door::open().unwrap());
        let invitations = doors.each_mut().map(|door| {
            let address = door.open_to(Ipv4Addr::LOCALHOST.into()).unwrap();
            door.invitation().clone().at(address)
        });
        thread::scope(|scope| {
            let mut rank = 0..;
            let threads = doors.map(|door| {
                let (member, invitations) = (Member::new(Rank(rank.next().unwrap()), 2, LONG), &invitations);
                scope.spawn(move || Links::connect(door, &member, invitations, || None).unwrap())
            });
            threads.map(|thread| thread.join().unwrap().links.pop().unwrap().1)
        })
    }

    /// A rank and what it learns of the other one.
    struct End {
        mirrors: Arc<Mirrors>,
        reported: Reported,
        links: RemoteLinks,
        send: Box<dyn FnMut()>,
        news: Receiver<News>,
    }

    impl End {
        /// The next news that is not a heartbeat.
        fn next(&self) -> News {
            self.news.iter().find(|&news| news != News::Heartbeat).unwrap()
        }

        /// The record of `rank` as this rank's kernels load it: the rank that recorded it, and its kind.
        fn record_of(&self, rank: u32) -> (u32, u32) {
            let first = self.mirrors.first_word_of(Rank(rank)).unwrap() + RECORD_OFFSET / 4;
            let record: Vec<u32> =
                (0..size_of::<FaultRecord>() / 4).map(|word| self.mirrors.words.read(first + word)).collect();
            let record: FaultRecord = bytemuck::pod_read_unaligned(bytemuck::cast_slice(&record));
            (record.fault.rank, record.fault.kind)
        }
    }

    /// Rank `own`, which is 0 or 1, at its end of a link.
    fn end(own: u32, link: Link) -> End {
        let (mirrors, reported) = mirrors(if own == 0 { &AWAY } else { &[0] });
        let (tell, news) = channel();
        let mut links = RemoteLinks::new(Arc::clone(&mirrors));
        let tell = move |news| _ = tell.send(news);
        let send = Box::new(links.serve(Rank(own), Rank(1 - own), link.split(), tell).unwrap());
        End { mirrors, reported, links, send, news }
    }

    fn ends() -> [End; 2] {
        let [zero, one] = linked();
        [end(0, zero), end(1, one)]
    }

    fn abort_word(cause: FaultKind, by: u32, at_fault: u32) -> u32 {
        AbortWord { cause: cause as u32, by, at_fault }.word()
    }

    fn record(kind: FaultKind, rank: u32, peer: u32) -> FaultRecord {
        let fault = Fault { kind: kind as u32, rank, peer, awaited: NONE, ..Fault::zeroed() };
        FaultRecord { fault, ..FaultRecord::zeroed() }
    }

    /// What the kernels of rank 1 do when they give up because of the fault of rank 2, which is on their machine.
    fn give_up(end: &End) -> u32 {
        let own = record(FaultKind::Aborted, 1, 2);
        let theirs = record(FaultKind::Nan, 2, 2);
        *lock(&end.reported) = Some(FaultReport { own, theirs });
        let word = abort_word(FaultKind::Aborted, 2, 2);
        end.mirrors.words.write(ABORT_OFFSET / 4, word);
        word
    }

    #[test]
    #[cfg_attr(miri, ignore = "sockets")]
    fn a_rank_learns_the_abort_word_and_the_records_of_ranks_on_another_machine() {
        let [zero, mut one] = ends();
        (one.send)();
        assert_eq!(zero.news.recv(), Ok(News::Heartbeat));
        let word = give_up(&one);
        (one.send)();
        assert_eq!(zero.next(), News::Abort(word));
        // Rank 1 has the record of rank 2, from which rank 0 has received nothing.
        assert_eq!(zero.record_of(1), (1, FaultKind::Aborted as u32));
        assert_eq!(zero.record_of(2), (2, FaultKind::Nan as u32));
        // A record that kernels may be reading does not change.
        let later =
            FaultReport { own: record(FaultKind::Died, 1, 0), theirs: record(FaultKind::Duplicate, 2, 2) };
        zero.mirrors.store(Rank(1), &later);
        assert_eq!(zero.record_of(1), (1, FaultKind::Aborted as u32));
        assert_eq!(zero.record_of(2), (2, FaultKind::Nan as u32));
    }

    #[test]
    #[cfg_attr(miri, ignore = "sockets")]
    fn a_rank_that_gives_up_and_leaves_sends_its_abort_word_first() {
        let [mut zero, one] = ends();
        let word = give_up(&one);
        drop(one.links);
        assert_eq!((zero.next(), zero.next()), (News::Abort(word), News::Gone(GoneWord::LeftEarly as u32)));
        (zero.send)();
    }

    #[test]
    #[cfg_attr(miri, ignore = "sockets")]
    fn the_last_state_of_a_rank_that_leaves_has_its_last_epoch() {
        let [zero, one] = ends();
        let word = GoneWord::Left as u32 | 7 << GONE_BITS;
        one.links.leaving(word);
        drop(one.links);
        assert_eq!(zero.next(), News::Gone(word));
    }

    #[test]
    #[cfg_attr(miri, ignore = "sockets")]
    fn a_link_that_closes_or_carries_what_no_rank_sends_ends_as_a_death() {
        let fine = State { abort: abort_word(FaultKind::Died, 1, 2), left: 0, report: FaultReport::zeroed() };
        let with = |change: &dyn Fn(&mut State)| {
            let mut state = fine;
            change(&mut state);
            state.to_bytes()
        };
        assert!(State::from_bytes(&with(&|_| {}), RANKS).is_some());
        let beyond = RANKS as u32;
        for wrong in [
            Vec::new(),
            fine.to_bytes()[1..].to_vec(),
            [fine.to_bytes(), vec![0; 4]].concat(),
            with(&|state| state.abort = abort_word(FaultKind::Died, beyond, 2)),
            with(&|state| state.abort = abort_word(FaultKind::Died, 1, beyond)),
            with(&|state| state.abort = 1 << 8),
            with(&|state| state.abort |= 0xFFFF << 16),
            with(&|state| state.left = GoneWord::Died as u32),
            with(&|state| state.report.own.fault.peer = beyond),
            with(&|state| state.report.own.fault.kind = 99),
            with(&|state| state.report.theirs.fault.rank = beyond),
            with(&|state| state.report.theirs.fault.cause = 99),
            with(&|state| state.report.theirs.fault.awaited = beyond),
        ] {
            assert!(State::from_bytes(&wrong, RANKS).is_none(), "{wrong:?}");
            let [zero, one] = ends();
            lock(&one.links.links[0]).send(true, || wrong);
            assert_eq!(zero.next(), News::Gone(GoneWord::Died as u32));
        }
        let [zero, one] = linked();
        let (zero, one) = (end(0, zero), one.split());
        // The system closes the sockets of a process that is killed.
        rustix::net::shutdown(&one.0, rustix::net::Shutdown::Both).unwrap();
        assert_eq!(zero.next(), News::Gone(GoneWord::Died as u32));
    }
}
