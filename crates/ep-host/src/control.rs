//! The control block of a rank: the words that tell its peers the state of the rank. Only the owner writes them; all
//! ranks read them. `comm` enters and finishes operators through it, `preprocess` exchanges counts through it, `wait`
//! and `pulse` watch it.
//!
//! Every operator follows this protocol, which makes access to a peer's memory sound:
//!
//! 1. The rank publishes the location of its memory for the operator, then stores the operator's step to `entered`.
//!    From then on, until point 3, its peers may read and write that memory.
//! 2. A rank waits until the `entered` of a peer has reached the step before it accesses the peer's memory.
//! 3. After its last access to memory of other ranks, the rank stores the step to `finished`. It returns to its caller
//!    once all ranks of its domain have done the same.
//!
//! A rank whose operator fails or panics returns early. It withdraws the memory that it had published for writing
//! ([`crate::HostMemory`]): a late peer writes to bytes that no program uses again. It also moves later writes away
//! from the registered memory that it had published for reading. The rank publishes its failure before it returns, and
//! a peer that has read such memory checks for the failure before it accepts its own result ([`crate::comm`]).
//!
//! Words in a peer's control block are not trusted: each is read once and bounded before use.

use std::sync::Arc;
use std::sync::atomic::{
    AtomicU8, AtomicU32, AtomicU64, Ordering::Acquire, Ordering::Relaxed, Ordering::Release,
    Ordering::SeqCst, fence,
};

use ep::{Counts, EnvironmentError, Operator, PeerFault, Rank, Result, Size, World};
use ep_rail::Segment;

use crate::published::{PublishedMemory, SegmentName};
use crate::signature::SIGNATURE;
use crate::status::{HealthWords, Status};

/// Greatest number of memories that a rank publishes for one operator.
pub(crate) const MEMORIES: usize = 4;
/// Heartbeats after which the mark `outside` expires. A rank that waits outside of operators renews the mark several
/// times per heartbeat.
const SAID_LATELY: u64 = 20;
/// Greatest length of the error text that a rank publishes, bytes.
const CAUSE_BYTES: usize = 480;

/// A word alone in 128 bytes, so that polling it does not slow writes to other words.
#[repr(C, align(128))]
struct Polled(AtomicU64);

#[repr(C)]
struct Words {
    /// Newest step that the rank has entered.
    entered: Polled,
    /// Newest step that the rank has finished.
    finished: Polled,
    /// Incremented by the heartbeat thread while the process runs, inside and outside of operators.
    pulse: Polled,
    /// Incremented while workers run inside an operator, whether they find work or not.
    turns: Polled,
    /// Incremented when a worker completes part of an operator's work.
    progress: Polled,
    /// `pulse` plus 1 when the rank last marked that it waits for other ranks outside of operators; 0: never.
    outside: Polled,
    /// `ALIVE`, `LEFT` or `FAILED`; publishes the words up to `cause_len`.
    health: AtomicU32,
    /// With `FAILED`: the rank at fault.
    at_fault: AtomicU32,
    /// With `FAILED`: [`PeerFault::code`].
    fault: AtomicU32,
    /// With `FAILED`: index in `OPERATORS`.
    operator: AtomicU32,
    /// With `FAILED`: the step that failed.
    failed_step: AtomicU64,
    /// The error of the rank as UTF-8 text; `cause_len` bytes are valid.
    cause: [AtomicU8; CAUSE_BYTES],
    cause_len: AtomicU32,
    /// The arguments of the operator entered last, see `signature`.
    signature: [AtomicU64; SIGNATURE],
    /// The memory published for the operator entered last.
    memories: [MemoryWords; MEMORIES],
}

#[repr(C)]
struct MemoryWords {
    /// The number of the segment; 0 = no memory.
    segment: AtomicU64,
    segment_len: AtomicU64,
    offset: AtomicU64,
    len: AtomicU64,
}

/// The state of a rank, as published in its control block.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum Health {
    Alive,
    /// The rank dropped its buffer.
    Left,
    /// A collective operator of the rank failed.
    Failed {
        /// The rank at fault: the failed rank itself, or the peer that its error names.
        at_fault: Rank,
        fault: PeerFault,
        operator: Operator,
        step: u64,
    },
}

const ALIVE: u32 = 0;
const LEFT: u32 = 1;
const FAILED: u32 = 2;
const OPERATORS: [Operator; 6] = [
    Operator::Join,
    Operator::Preprocess,
    Operator::Dispatch,
    Operator::Combine,
    Operator::Reduce,
    Operator::Share,
];

fn index_of<T: PartialEq>(all: &[T], one: &T) -> u32 {
    all.iter().position(|other| other == one).unwrap_or(0) as u32
}

/// One rank's control block, mapped, or the mirror of the control block of a rank on another machine. A mirror is memory
/// of this process, to which the receiver thread writes the rank's [`Status`]. It has no signature, memories or counts:
/// only ranks of one domain read those.
///
/// After [`Words`] follow one ready word and one row of counts per domain. A rank stores the counts of its rail peer in
/// each domain there, and all ranks of its own domain read them.
#[derive(Debug, Clone)]
pub(crate) struct Control {
    segment: Arc<Segment>,
    rank: Rank,
    /// Number of ranks in the world.
    ranks: usize,
    domains: usize,
    /// Words in one row of counts.
    count_words: usize,
}

/// Checks that a segment, which a peer may have made, has at least `needed` bytes.
///
/// # Errors
/// [`EnvironmentError`] that names the rank.
pub(crate) fn check_segment(rank: Rank, what: &str, segment: &Segment, needed: usize) -> Result<()> {
    if segment.len() >= needed {
        return Ok(());
    }
    Err(EnvironmentError::new(
        format!("joining rank {rank}"),
        format!("its {what} has {} bytes, and {needed} are needed", segment.len()),
        "run the same version of the library on all ranks",
    )
    .into())
}

impl Control {
    /// Length of a control block, bytes.
    ///
    /// # Errors
    /// [`ep::CallerError::TooLarge`].
    pub(crate) fn bytes(world: &World) -> Result<usize> {
        let row = Size::new(Counts::words(world)) * 4 + size_of::<Polled>();
        (row * world.topology().domains() + size_of::<Words>()).bytes("the control block of a rank")
    }

    /// The control block of `rank` in `segment`.
    ///
    /// # Errors
    /// [`EnvironmentError`] that names the rank when the segment is too short.
    pub(crate) fn new(rank: Rank, segment: Arc<Segment>, world: &World) -> Result<Self> {
        check_segment(rank, "control block", &segment, Self::bytes(world)?)?;
        let (domains, ranks) = (world.topology().domains(), world.ranks());
        Ok(Self { segment, rank, ranks, domains, count_words: Counts::words(world) })
    }

    fn words(&self) -> &Words {
        // SAFETY: `Words` holds atomics only, of which any bytes are valid; a new segment is zeroed.
        unsafe { self.segment.view(0) }
    }

    fn ready_word(&self, domain: usize) -> &AtomicU64 {
        assert!(domain < self.domains);
        // SAFETY: as in `words`; `new` checked the length.
        &unsafe { self.segment.view::<Polled>(size_of::<Words>() + domain * size_of::<Polled>()) }.0
    }

    fn count_row(&self, domain: usize) -> &[AtomicU32] {
        assert!(domain < self.domains);
        let bytes = 4 * self.count_words;
        let offset = size_of::<Words>() + self.domains * size_of::<Polled>() + domain * bytes;
        // SAFETY: in bounds (checked by `at`), aligned since everything before is a multiple of 4 bytes, and atomics.
        unsafe { std::slice::from_raw_parts(self.segment.at(offset, bytes).cast(), self.count_words) }
    }

    /// Point 1 of the protocol: publishes the call's signature and memories, then the step.
    pub(crate) fn enter(
        &self,
        step: u64,
        signature: [u64; SIGNATURE],
        memories: [Option<PublishedMemory>; MEMORIES],
    ) {
        let words = self.words();
        for (word, value) in words.signature.iter().zip(signature) {
            word.store(value, Relaxed);
        }
        for (words, memory) in words.memories.iter().zip(memories) {
            let Some(PublishedMemory { segment, offset, len }) = memory else {
                words.segment.store(0, Relaxed);
                continue;
            };
            words.segment.store(segment.id, Relaxed);
            words.segment_len.store(segment.len as u64, Relaxed);
            words.offset.store(offset as u64, Relaxed);
            words.len.store(len as u64, Relaxed);
        }
        words.entered.0.store(step, Release);
    }

    /// The newest step that the rank has entered. Pairs with [`enter`](Self::enter).
    pub(crate) fn entered(&self) -> u64 {
        self.words().entered.0.load(Acquire)
    }

    /// The signature that the rank published; valid after [`entered`](Self::entered) has returned the step.
    pub(crate) fn signature(&self) -> [u64; SIGNATURE] {
        std::array::from_fn(|at| self.words().signature[at].load(Relaxed))
    }

    /// Memory `at` that the rank published; valid after [`entered`](Self::entered) has returned the step.
    pub(crate) fn memory(&self, at: usize) -> Option<PublishedMemory> {
        let words = &self.words().memories[at];
        let id = words.segment.load(Relaxed);
        (id != 0).then(|| PublishedMemory {
            segment: SegmentName { id, len: words.segment_len.load(Relaxed) as usize },
            offset: words.offset.load(Relaxed) as usize,
            len: words.len.load(Relaxed) as usize,
        })
    }

    /// Point 3 of the protocol: the rank no longer accesses memory of other ranks in this step.
    pub(crate) fn finish(&self, step: u64) {
        self.words().finished.0.store(step, Release);
    }

    /// The newest step that the rank has finished.
    pub(crate) fn finished(&self) -> u64 {
        self.words().finished.0.load(Acquire)
    }

    /// Counts one heartbeat.
    pub(crate) fn beat(&self) {
        self.words().pulse.0.fetch_add(1, Relaxed);
    }

    /// Heartbeats so far; changes while the rank's process runs.
    pub(crate) fn pulse(&self) -> u64 {
        self.words().pulse.0.load(Relaxed)
    }

    /// Records that a worker runs inside an operator.
    pub(crate) fn turn(&self) {
        self.words().turns.0.fetch_add(1, Relaxed);
    }

    /// Counter that changes while the rank's workers run inside an operator.
    pub(crate) fn turns(&self) -> u64 {
        self.words().turns.0.load(Relaxed)
    }

    /// Records that a worker has completed part of an operator's work.
    pub(crate) fn advance(&self) {
        self.words().progress.0.fetch_add(1, Relaxed);
        self.turn();
    }

    /// Counter that changes when the rank's workers complete part of an operator's work.
    pub(crate) fn progress(&self) -> u64 {
        self.words().progress.0.load(Relaxed)
    }

    /// Records that the rank waits for other ranks outside of operators.
    pub(crate) fn wait_outside(&self) {
        self.words().outside.0.store(self.pulse().saturating_add(1), Relaxed);
    }

    /// Whether the rank waits for other ranks outside of operators: it has marked so within [`SAID_LATELY`] heartbeats.
    pub(crate) fn waits_outside(&self) -> bool {
        let said = self.words().outside.0.load(Relaxed);
        said != 0 && self.pulse().saturating_sub(said - 1) <= SAID_LATELY
    }

    /// Stores the text of this rank's error. Call it before [`set_health`](Self::set_health), which publishes the text.
    pub(crate) fn set_cause(&self, error: &str) {
        let end = error.floor_char_boundary(CAUSE_BYTES);
        for (to, &from) in self.words().cause.iter().zip(&error.as_bytes()[..end]) {
            to.store(from, Relaxed);
        }
        self.words().cause_len.store(end as u32, Relaxed);
    }

    /// The error text of the rank, if it has stored one; valid after [`health`](Self::health) has returned a failure.
    pub(crate) fn cause(&self) -> Option<String> {
        let words = self.words();
        let len = (words.cause_len.load(Relaxed) as usize).min(CAUSE_BYTES);
        let bytes: Vec<u8> = words.cause[..len].iter().map(|byte| byte.load(Relaxed)).collect();
        // Another process wrote the text: control characters must not reach this process's terminal or log, and bytes
        // that are not UTF-8 become longer when they are replaced.
        let mut text = String::from_utf8_lossy(&bytes).replace(char::is_control, " ");
        text.truncate(text.floor_char_boundary(CAUSE_BYTES));
        (!text.is_empty()).then_some(text)
    }

    /// Publishes the state of this rank.
    pub(crate) fn set_health(&self, health: Health) {
        let words = self.words();
        match health {
            Health::Alive => words.health.store(ALIVE, Release),
            Health::Left => words.health.store(LEFT, Release),
            Health::Failed { at_fault, fault, operator, step } => {
                words.at_fault.store(at_fault.0, Relaxed);
                words.fault.store(fault.code().into(), Relaxed);
                words.operator.store(index_of(&OPERATORS, &operator), Relaxed);
                words.failed_step.store(step, Relaxed);
                words.health.store(FAILED, Release);
                // What the program writes after the error must not be visible before the word `health`: peers check
                // that word after they have read this rank's rows.
                fence(SeqCst);
            }
        }
    }

    /// The state of the rank.
    pub(crate) fn health(&self) -> Health {
        let words = self.words();
        match words.health.load(Acquire) {
            LEFT => Health::Left,
            FAILED => Health::Failed {
                // If the number is not a rank, name the failed rank itself.
                at_fault: Some(Rank(words.at_fault.load(Relaxed)))
                    .filter(|at_fault| at_fault.index() < self.ranks)
                    .unwrap_or(self.rank),
                fault: PeerFault::from_code(words.fault.load(Relaxed)),
                operator: OPERATORS[words.operator.load(Relaxed) as usize % OPERATORS.len()],
                step: words.failed_step.load(Relaxed),
            },
            _ => Health::Alive,
        }
    }

    /// The status of this rank, for its mirrors.
    pub(crate) fn status(&self) -> Status {
        let words = self.words();
        // Read before `finished`: a peer that sees this health then sees no older `finished` (see `judge` in `comm`).
        let health = words.health.load(Acquire);
        let failed = health == FAILED;
        Status {
            health: HealthWords {
                health,
                at_fault: words.at_fault.load(Relaxed),
                fault: words.fault.load(Relaxed),
                operator: words.operator.load(Relaxed),
                failed_step: words.failed_step.load(Relaxed),
            },
            cause: self.cause().filter(|_| failed).unwrap_or_default(),
            entered: self.entered(),
            finished: self.finished(),
            pulse: self.pulse(),
            turns: self.turns(),
            progress: self.progress(),
            outside: words.outside.0.load(Relaxed),
        }
    }

    /// Stores the status of a rank on another machine in this mirror. One thread calls this.
    pub(crate) fn mirror(&self, status: &Status) {
        let words = self.words();
        words.pulse.0.store(status.pulse, Relaxed);
        words.turns.0.store(status.turns, Relaxed);
        words.progress.0.store(status.progress, Relaxed);
        words.outside.0.store(status.outside, Relaxed);
        words.entered.0.store(status.entered, Release);
        words.finished.0.store(status.finished, Release);
        if words.health.load(Relaxed) == ALIVE && status.health.health != ALIVE {
            let HealthWords { health, at_fault, fault, operator, failed_step } = status.health;
            self.set_cause(&status.cause);
            words.at_fault.store(at_fault, Relaxed);
            words.fault.store(fault, Relaxed);
            words.operator.store(operator, Relaxed);
            words.failed_step.store(failed_step, Relaxed);
            words.health.store(health, Release);
        }
    }

    /// Publishes the counts of this rank's rail peer in `domain`; with this rank's domain, its own counts.
    pub(crate) fn publish_counts(&self, domain: usize, step: u64, counts: &[u32]) {
        for (word, &count) in self.count_row(domain).iter().zip(counts) {
            word.store(count, Relaxed);
        }
        self.ready_word(domain).store(step, Release);
    }

    /// The counts from `domain`, once the rank has published those of `step`.
    pub(crate) fn counts(&self, domain: usize, step: u64) -> Option<Vec<u32>> {
        (self.ready_word(domain).load(Acquire) >= step)
            .then(|| self.count_row(domain).iter().map(|word| word.load(Relaxed)).collect())
    }
}

/// The control blocks of a world of one domain, for tests.
#[cfg(test)]
pub(crate) fn controls(ranks: usize) -> Vec<Control> {
    let world = World::builder().ranks(ranks).experts(ranks).build().unwrap();
    let segment = || Arc::new(Segment::private(Control::bytes(&world).unwrap()).unwrap());
    world.topology().all_ranks().map(|rank| Control::new(rank, segment(), &world).unwrap()).collect()
}

#[cfg(test)]
mod tests {
    use super::*;

    fn control(domains: usize) -> (Control, World) {
        let world =
            World::builder().ranks(2 * domains).domains(domains).experts(4 * domains).build().unwrap();
        let segment = Arc::new(Segment::private(Control::bytes(&world).unwrap()).unwrap());
        (Control::new(Rank(1), segment, &world).unwrap(), world)
    }

    #[test]
    fn published_words_are_read_back() {
        let (control, world) = control(3);
        assert_eq!((control.entered(), control.finished(), control.health()), (0, 0, Health::Alive));
        let published =
            PublishedMemory { segment: SegmentName { id: 9, len: 1 << 21 }, offset: 4096, len: 77 };
        control.enter(5, [1, 2, 3, 4, 5, 6, 7], [None, Some(published), None, None]);
        assert_eq!(control.entered(), 5);
        assert_eq!(control.signature(), [1, 2, 3, 4, 5, 6, 7]);
        assert_eq!((control.memory(0), control.memory(1)), (None, Some(published)));
        let counts: Vec<u32> = (0..Counts::words(&world) as u32).collect();
        control.publish_counts(2, 7, &counts);
        assert_eq!(control.counts(2, 8), None);
        assert_eq!(control.counts(2, 7), Some(counts));
        assert_eq!(control.counts(1, 7), None);
    }

    #[test]
    fn the_cause_of_a_failure_is_one_line_of_bounded_length() {
        let (control, _) = control(1);
        assert_eq!(control.cause(), None);
        control.set_cause("hidden is 128\non rank 1\u{1b}[31m");
        assert_eq!(control.cause().unwrap(), "hidden is 128 on rank 1 [31m");
        // The last character has two bytes, of which only one would fit.
        let long = format!("{}é", "x".repeat(CAUSE_BYTES - 1));
        control.set_cause(&long);
        assert_eq!(control.cause().unwrap(), "x".repeat(CAUSE_BYTES - 1));
        // A length that a peer wrote is bounded.
        control.words().cause_len.store(u32::MAX, Relaxed);
        assert_eq!(control.cause().unwrap().len(), CAUSE_BYTES);
        // Replacing bytes that are not UTF-8 keeps the bound, too: a status has no room for a longer text.
        control.words().cause.iter().for_each(|byte| byte.store(0xFF, Relaxed));
        assert_eq!(control.cause().unwrap(), "\u{FFFD}".repeat(CAUSE_BYTES / 3));
        control.status();
    }

    #[test]
    fn a_segment_too_short_for_a_control_block_names_its_rank() {
        let world = World::builder().ranks(2).experts(4).build().unwrap();
        let needed = Control::bytes(&world).unwrap();
        for len in [16, needed - 1] {
            let segment = Arc::new(Segment::private(len).unwrap());
            let error = Control::new(Rank(1), segment, &world).unwrap_err().to_string();
            let text = format!("joining rank 1: its control block has {len} bytes, and {needed} are needed");
            assert!(error.starts_with(&text), "{error}");
        }
    }

    #[test]
    fn invalid_words_are_bounded() {
        let (control, _) = control(1);
        for word in [2, u32::MAX] {
            control.words().at_fault.store(word, Relaxed);
            control.words().fault.store(word, Relaxed);
            control.words().operator.store(word, Relaxed);
            control.words().health.store(FAILED, Relaxed);
            assert!(matches!(control.health(), Health::Failed { at_fault: Rank(1), .. }), "{word}");
        }
        control.words().health.store(u32::MAX, Relaxed);
        assert_eq!(control.health(), Health::Alive);
    }

    #[test]
    fn a_mirror_shows_the_status_of_its_rank() {
        let ((control, _), (mirror, _)) = (control(1), control(1));
        let show = || mirror.mirror(&Status::from_bytes(&control.status().to_bytes()).unwrap());
        control.enter(5, [0; SIGNATURE], [None; MEMORIES]);
        control.finish(4);
        control.beat();
        control.advance();
        show();
        assert_eq!((mirror.entered(), mirror.finished(), mirror.health()), (5, 4, Health::Alive));
        assert_eq!((mirror.pulse(), mirror.turns(), mirror.progress()), (1, 1, 1));
        let failed = Health::Failed {
            at_fault: Rank(0),
            fault: PeerFault::Unreachable,
            operator: Operator::Dispatch,
            step: 5,
        };
        control.set_cause("no route");
        control.set_health(failed);
        show();
        assert_eq!((mirror.health(), mirror.cause()), (failed, Some("no route".into())));
        // Health changes once: a rank that has failed does not become one that left.
        control.set_health(Health::Left);
        show();
        assert_eq!(mirror.health(), failed);
    }

    #[test]
    fn health_round_trips_through_the_words() {
        let (control, _) = control(1);
        let failed = Health::Failed {
            at_fault: Rank(0),
            fault: PeerFault::Stalled,
            operator: Operator::Combine,
            step: 12,
        };
        for health in [Health::Left, failed] {
            control.set_health(health);
            assert_eq!(control.health(), health);
        }
    }
}
