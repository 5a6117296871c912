//! The control block of a rank: what its peers may know of it. Written by its owner alone, read by all.
//!
//! The protocol of every operator, which is what makes touching a peer's memory sound:
//!
//! 1. A rank publishes where its memory for the operator is, then stores the operator's step to `entered`. From then
//!    on until step 3 its peers may touch that memory.
//! 2. Whoever needs a peer's memory waits until the peer's `entered` has reached the step.
//! 3. When a rank has made its last access to other ranks' memory, it stores the step to `finished`, and returns to
//!    its caller once all ranks of its domain have done so.
//!
//! A failed operator ends step 3 early: the failing rank withdraws the memory it had published for writing
//! ([`crate::HostMemory`]), so that a late peer writes where nobody looks.

use std::sync::Arc;
use std::sync::atomic::{AtomicU32, AtomicU64, Ordering::Acquire, Ordering::Relaxed, Ordering::Release};

use ep::{Counts, Operator, PeerFault, Rank, World};

use crate::memory::Place;
use crate::segment::{Segment, SegmentName};

/// Memories that a rank publishes for one operator, at most.
pub(crate) const BUFFERS: usize = 4;
/// Words of an operator's signature.
pub(crate) const SIGNATURE: usize = 7;

/// A value on a cache line of its own: waiting ranks poll it.
#[repr(C, align(128))]
struct Polled(AtomicU64);

#[repr(C)]
struct Words {
    entered: Polled,
    finished: Polled,
    /// Counts up while the rank is inside the library and alive.
    heartbeat: Polled,
    health: AtomicU32,
    culprit: AtomicU32,
    fault: AtomicU32,
    operator: AtomicU32,
    failed_step: AtomicU64,
    signature: [AtomicU64; SIGNATURE],
    buffers: [BufferWords; BUFFERS],
}

#[repr(C)]
struct BufferWords {
    /// 0 = no memory; else the segment's number.
    segment: AtomicU64,
    fd: AtomicU64,
    segment_len: AtomicU64,
    offset: AtomicU64,
    len: AtomicU64,
}

/// Whether a rank still takes part.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum Health {
    Alive,
    /// It dropped its buffer.
    Left,
    /// It met an error, and who was to blame.
    Failed {
        culprit: Rank,
        fault: PeerFault,
        operator: Operator,
        step: u64,
    },
}

const ALIVE: u32 = 0;
const LEFT: u32 = 1;
const FAILED: u32 = 2;
const FAULTS: [PeerFault; 5] =
    [PeerFault::Died, PeerFault::Left, PeerFault::Stalled, PeerFault::Failed, PeerFault::Absent];
const OPERATORS: [Operator; 4] =
    [Operator::Join, Operator::Preprocess, Operator::Dispatch, Operator::Combine];

fn index_of<T: PartialEq>(all: &[T], one: &T) -> u32 {
    all.iter().position(|other| other == one).unwrap_or(0) as u32
}

/// One rank's control block, mapped.
///
/// Behind the words stand, for each domain, the step of the newest counts from it, and those counts: a rank collects
/// on its rail and its domain reads them from it.
#[derive(Debug, Clone)]
pub(crate) struct Control {
    segment: Arc<Segment>,
    domains: usize,
    count_words: usize,
}

impl Control {
    /// Bytes of a control segment.
    pub(crate) fn bytes(world: &World) -> usize {
        let domains = world.topology.domains();
        size_of::<Words>() + domains * (size_of::<Polled>() + 4 * Counts::words(world))
    }

    /// The control block in a segment of at least [`bytes`](Self::bytes).
    pub(crate) fn new(segment: Arc<Segment>, world: &World) -> Self {
        assert!(segment.len() >= Self::bytes(world));
        Self { segment, domains: world.topology.domains(), count_words: Counts::words(world) }
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

    /// Step 1: tells peers what this rank is about to do, and where its memory is.
    pub(crate) fn enter(&self, step: u64, signature: [u64; SIGNATURE], buffers: [Option<Place>; BUFFERS]) {
        let words = self.words();
        for (word, value) in words.signature.iter().zip(signature) {
            word.store(value, Relaxed);
        }
        for (words, place) in words.buffers.iter().zip(buffers) {
            let Some(Place { segment, offset, len }) = place else {
                words.segment.store(0, Relaxed);
                continue;
            };
            words.segment.store(segment.id, Relaxed);
            words.fd.store(segment.fd.into(), Relaxed);
            words.segment_len.store(segment.len as u64, Relaxed);
            words.offset.store(offset as u64, Relaxed);
            words.len.store(len as u64, Relaxed);
        }
        words.entered.0.store(step, Release);
    }

    /// The newest step that the rank has entered.
    pub(crate) fn entered(&self) -> u64 {
        self.words().entered.0.load(Acquire)
    }

    /// What the rank said when it entered; read after [`entered`](Self::entered) has shown the step.
    pub(crate) fn signature(&self) -> [u64; SIGNATURE] {
        std::array::from_fn(|at| self.words().signature[at].load(Relaxed))
    }

    /// Where its memory is; read after [`entered`](Self::entered) has shown the step.
    pub(crate) fn buffer(&self, at: usize) -> Option<Place> {
        let words = &self.words().buffers[at];
        let id = words.segment.load(Relaxed);
        (id != 0).then(|| Place {
            segment: SegmentName {
                id,
                fd: words.fd.load(Relaxed) as u32,
                len: words.segment_len.load(Relaxed) as usize,
            },
            offset: words.offset.load(Relaxed) as usize,
            len: words.len.load(Relaxed) as usize,
        })
    }

    /// Step 3: the rank touches no other rank's memory for this step any more.
    pub(crate) fn finish(&self, step: u64) {
        self.words().finished.0.store(step, Release);
    }

    /// The newest step that the rank has finished.
    pub(crate) fn finished(&self) -> u64 {
        self.words().finished.0.load(Acquire)
    }

    /// Shows that the rank is there.
    pub(crate) fn beat(&self) {
        self.words().heartbeat.0.fetch_add(1, Relaxed);
    }

    /// Changes while the rank is there.
    pub(crate) fn heartbeat(&self) -> u64 {
        self.words().heartbeat.0.load(Relaxed)
    }

    /// Publishes the end of taking part.
    pub(crate) fn set_health(&self, health: Health) {
        let words = self.words();
        match health {
            Health::Alive => words.health.store(ALIVE, Release),
            Health::Left => words.health.store(LEFT, Release),
            Health::Failed { culprit, fault, operator, step } => {
                words.culprit.store(culprit.0, Relaxed);
                words.fault.store(index_of(&FAULTS, &fault), Relaxed);
                words.operator.store(index_of(&OPERATORS, &operator), Relaxed);
                words.failed_step.store(step, Relaxed);
                words.health.store(FAILED, Release);
            }
        }
    }

    /// Whether the rank takes part.
    pub(crate) fn health(&self) -> Health {
        let words = self.words();
        match words.health.load(Acquire) {
            LEFT => Health::Left,
            FAILED => Health::Failed {
                culprit: Rank(words.culprit.load(Relaxed)),
                fault: FAULTS[words.fault.load(Relaxed) as usize % FAULTS.len()],
                operator: OPERATORS[words.operator.load(Relaxed) as usize % OPERATORS.len()],
                step: words.failed_step.load(Relaxed),
            },
            _ => Health::Alive,
        }
    }

    /// Publishes the counts of this rank's rail peer in a domain (or its own).
    pub(crate) fn publish_counts(&self, domain: usize, step: u64, counts: &[u32]) {
        for (word, &count) in self.count_row(domain).iter().zip(counts) {
            word.store(count, Relaxed);
        }
        self.ready_word(domain).store(step, Release);
    }

    /// The counts from a domain, once they are those of `step`.
    pub(crate) fn counts(&self, domain: usize, step: u64) -> Option<Vec<u32>> {
        (self.ready_word(domain).load(Acquire) >= step)
            .then(|| self.count_row(domain).iter().map(|word| word.load(Relaxed)).collect())
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn control(domains: usize) -> (Control, World) {
        let world = World::new(2 * domains, domains, 4 * domains).unwrap();
        let segment = Arc::new(Segment::private(Control::bytes(&world)).unwrap());
        (Control::new(segment, &world), world)
    }

    #[test]
    fn what_is_published_is_read() {
        let (control, world) = control(3);
        assert_eq!((control.entered(), control.finished(), control.health()), (0, 0, Health::Alive));
        let place = Place { segment: SegmentName { id: 9, fd: 4, len: 1 << 21 }, offset: 4096, len: 77 };
        control.enter(5, [1, 2, 3, 4, 5, 6, 7], [None, Some(place), None, None]);
        assert_eq!(control.entered(), 5);
        assert_eq!(control.signature(), [1, 2, 3, 4, 5, 6, 7]);
        assert_eq!((control.buffer(0), control.buffer(1)), (None, Some(place)));
        let counts: Vec<u32> = (0..Counts::words(&world) as u32).collect();
        control.publish_counts(2, 7, &counts);
        assert_eq!(control.counts(2, 8), None);
        assert_eq!(control.counts(2, 7), Some(counts));
        assert_eq!(control.counts(1, 7), None);
    }

    #[test]
    fn health_survives_the_words() {
        let (control, _) = control(1);
        let failed = Health::Failed {
            culprit: Rank(3),
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
