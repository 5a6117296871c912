//! Memory that operators read and write: registered (peers access it in place), normal (a heap allocation), or borrowed
//! (allocated by the caller).
//!
//! `buffer` makes one [`Arena`] per rank. `operators` allocates from it and publishes memory to peers.

use std::ptr::NonNull;
use std::sync::atomic::{AtomicBool, Ordering::Relaxed};
use std::sync::{Arc, Mutex, PoisonError};

use ep::call::{Maker, MemoryFacts};
use ep::{EnvironmentError, Error, Result, Size};
use ep_rail::Segment;

use crate::directory::Directory;
use crate::published::{PublishedMemory, SegmentName};

/// Alignment of blocks, bytes: a page, and therefore whole cache lines, which streaming stores need.
const ALIGN: usize = 4096;
/// Least length of a segment, bytes, so that small blocks share one.
const MIN_SEGMENT: usize = 32 << 20;
/// Segment lengths are multiples of this, bytes, so that a segment consists of whole huge pages.
const HUGE_PAGE: usize = 2 << 20;
/// The object that size errors name.
const WHAT: &str = "registered memory";

/// Memory for tokens, expert outputs and results.
///
/// [`Backend::alloc`](ep::Backend::alloc) returns registered memory: peers read and write it in place. Registered
/// memory belongs to the buffer that allocated it and may outlive that buffer. Every other buffer refuses it
/// ([`ep::CallerError::Memory`]). [`HostMemory::normal`] and [`HostMemory::borrowed`] make memory that any buffer
/// accepts; operators copy it through registered memory where peers must access it.
///
/// After a failed dispatch, its registered outputs are empty (length 0): slow peers may still write to their old bytes.
#[derive(Debug)]
pub struct HostMemory {
    kind: Kind,
    len: usize,
}

#[derive(Debug)]
enum Kind {
    Registered(Block),
    Normal(Vec<Line>),
    Borrowed(BorrowedStart),
}

/// The address of the first byte that the caller allocated.
#[derive(Debug, Clone, Copy)]
struct BorrowedStart(NonNull<u8>);

// SAFETY: the caller of `HostMemory::borrowed` promised exclusive access to the bytes, as a `Vec` has to its own.
unsafe impl Send for BorrowedStart {}
// SAFETY: as above.
unsafe impl Sync for BorrowedStart {}

/// A cache line, so that heap memory is aligned to 64 bytes, as registered memory is.
#[derive(Debug, Clone, Copy, bytemuck::Pod, bytemuck::Zeroable)]
#[repr(C, align(64))]
struct Line([u8; 64]);

impl HostMemory {
    /// Allocates `bytes` zeroed bytes on the heap. Peers cannot access them.
    ///
    /// # Errors
    /// [`EnvironmentError`] when memory is short.
    pub fn normal(bytes: usize) -> Result<Self> {
        let lines = bytemuck::allocation::try_zeroed_vec(bytes.div_ceil(64)).map_err(|()| {
            let what = format!("allocating {bytes} bytes");
            EnvironmentError::new(what, "there is not enough memory", "use fewer tokens, or a smaller hidden")
        })?;
        Ok(Self { kind: Kind::Normal(lines), len: bytes })
    }

    /// Wraps `len` bytes at `start` that the caller has allocated, for example a tensor. Operators read and write them
    /// in place.
    ///
    /// If the bytes lie inside registered memory of the buffer that uses them, peers read them in place, too. In all
    /// other memory, registered memory of another buffer included, operators stage the bytes that peers must access.
    ///
    /// # Safety
    /// The `len` bytes at `start` must stay allocated while this value lives, and nothing else may write to them. While
    /// an operator writes to them, nothing else may read them. `start` must be a multiple of 4; with `len` 0 it may be
    /// any value. After a failed combine, a peer may still read bytes that the combine published. The caller may then
    /// write to them only if it does not use the result of that peer's combine, which fails too. No peer sends sums of
    /// changed bytes to another domain.
    pub unsafe fn borrowed(start: *mut u8, len: usize) -> Self {
        let start = NonNull::new(start).filter(|_| len > 0).unwrap_or(NonNull::<Line>::dangling().cast());
        Self { kind: Kind::Borrowed(BorrowedStart(start)), len }
    }

    /// Length in bytes.
    pub fn len(&self) -> usize {
        self.len
    }

    /// Whether it has no bytes.
    pub fn is_empty(&self) -> bool {
        self.len == 0
    }

    /// The bytes.
    pub fn as_bytes(&self) -> &[u8] {
        match &self.kind {
            // SAFETY: this memory owns the block until it is dropped. Peers write to it only during an operator of the
            // buffer that allocated it, and that operator borrows the memory mutably. Every other buffer refuses it.
            Kind::Registered(block) => unsafe { std::slice::from_raw_parts(block.start(), self.len) },
            Kind::Normal(lines) => &bytemuck::cast_slice(lines)[..self.len],
            // SAFETY: the caller of `borrowed` promised `len` valid bytes.
            Kind::Borrowed(start) => unsafe { std::slice::from_raw_parts(start.0.as_ptr(), self.len) },
        }
    }

    /// The bytes, mutable. Memory that a failed combine had published moves to a new heap allocation first, since slow
    /// peers may still read the old bytes.
    pub fn as_bytes_mut(&mut self) -> &mut [u8] {
        self.move_away_from_readers();
        match &mut self.kind {
            // SAFETY: as in `as_bytes`, and borrowed mutably.
            Kind::Registered(block) => unsafe { std::slice::from_raw_parts_mut(block.start(), self.len) },
            Kind::Normal(lines) => &mut bytemuck::cast_slice_mut(lines)[..self.len],
            // SAFETY: the caller of `borrowed` promised `len` valid bytes; `self` is borrowed mutably.
            Kind::Borrowed(start) => unsafe { std::slice::from_raw_parts_mut(start.0.as_ptr(), self.len) },
        }
    }

    /// The length and the owner, which operators check before they use the memory.
    pub(crate) fn facts(&self) -> MemoryFacts {
        let maker = match &self.kind {
            Kind::Registered(block) => Some(block.maker),
            Kind::Normal(_) | Kind::Borrowed(_) => None,
        };
        MemoryFacts { bytes: self.len, maker }
    }

    /// Records that peers may read the memory at any time from now on. A failed combine calls this for the memory that
    /// it had published for reading.
    pub(crate) fn mark_readable_by_late_peers(&self) {
        if let Kind::Registered(block) = &self.kind {
            block.late_readers.store(true, Relaxed);
        }
    }

    /// Replaces a block that late peers may still read by a heap copy, before anything is written.
    fn move_away_from_readers(&mut self) {
        if let Kind::Registered(block) = &self.kind
            && block.late_readers.load(Relaxed)
        {
            let mut lines = vec![Line([0; 64]); self.len.div_ceil(64)];
            bytemuck::cast_slice_mut(&mut lines)[..self.len].copy_from_slice(self.as_bytes());
            self.kind = Kind::Normal(lines);
        }
    }

    /// The location to publish so that peers may read and write the memory. `None` for memory that is not a block of
    /// this crate's arena: only a block can be withdrawn after a failure.
    pub(crate) fn published_for_writing(&self) -> Option<PublishedMemory> {
        match &self.kind {
            Kind::Registered(block) => {
                Some(PublishedMemory { segment: block.name, offset: block.offset, len: self.len })
            }
            Kind::Normal(_) | Kind::Borrowed(_) => None,
        }
    }

    /// Empties the memory and never reuses its block. A failed dispatch calls this, since slow peers may still write
    /// to the block.
    pub(crate) fn withdraw(&mut self) {
        if let Kind::Registered(_) = self.kind {
            let taken = std::mem::replace(self, Self { kind: Kind::Normal(Vec::new()), len: 0 });
            if let Kind::Registered(block) = taken.kind {
                block.retire();
            }
        }
    }
}

/// An allocation in a segment of an arena, returned to the arena when dropped.
#[derive(Debug)]
struct Block {
    maker: Maker,
    /// Whether late peers may read the bytes at any time. Such a block is never reused.
    late_readers: AtomicBool,
    segment: Arc<Segment>,
    name: SegmentName,
    offset: usize,
    size: usize,
    free: Arc<Mutex<FreeRuns>>,
}

impl Block {
    fn start(&self) -> *mut u8 {
        self.segment.at(self.offset, self.size)
    }

    /// Drops the block without returning its bytes to the arena.
    fn retire(mut self) {
        self.size = 0;
    }
}

impl Drop for Block {
    fn drop(&mut self) {
        if self.size > 0 && !*self.late_readers.get_mut() {
            let mut free = self.free.lock().unwrap_or_else(PoisonError::into_inner);
            free.give(Run { segment: self.name.id, offset: self.offset, len: self.size });
        }
    }
}

/// The registered memory of one rank. Grows by whole segments and never shrinks, because the first access to fresh
/// pages costs more than an operator.
#[derive(Debug)]
pub(crate) struct Arena {
    maker: Maker,
    directory: Directory,
    segments: Vec<(SegmentName, Arc<Segment>)>,
    next_id: u64,
    free: Arc<Mutex<FreeRuns>>,
}

impl Arena {
    /// An empty arena of the buffer `maker`. Its segments are numbered from `first_id`.
    pub(crate) fn new(maker: Maker, directory: Directory, first_id: u64) -> Self {
        Self { maker, directory, segments: Vec::new(), next_id: first_id, free: Arc::default() }
    }

    /// Total length of all segments, bytes.
    pub(crate) fn registered_bytes(&self) -> usize {
        self.segments.iter().map(|(name, _)| name.len).sum()
    }

    /// Allocates `bytes` bytes of registered memory. The contents are unspecified where the bytes were used before.
    ///
    /// # Errors
    /// [`ep::CallerError::TooLarge`]; [`EnvironmentError`] when memory is short;
    /// [`PeerError`](ep::PeerError) when a peer does not receive the descriptor of a new segment.
    pub(crate) fn alloc(&mut self, bytes: usize) -> Result<HostMemory> {
        let size = Size::new(bytes.max(1)).next_multiple_of(ALIGN).bytes(WHAT)?;
        let free = self.lock().take(size);
        let run = match free {
            Some(run) => run,
            None => {
                self.grow(size)?;
                self.lock().take(size).expect("the new segment is large enough")
            }
        };
        let (name, segment) = self
            .segments
            .iter()
            .find(|(name, _)| name.id == run.segment)
            .expect("runs come from this arena's segments");
        let block = Block {
            maker: self.maker,
            late_readers: AtomicBool::new(false),
            segment: Arc::clone(segment),
            name: *name,
            offset: run.offset,
            size,
            free: Arc::clone(&self.free),
        };
        Ok(HostMemory { kind: Kind::Registered(block), len: bytes })
    }

    /// The location to publish so that peers may read `memory`; `None` when it does not lie in this arena.
    pub(crate) fn published_for_reading(&self, memory: &HostMemory) -> Option<PublishedMemory> {
        let Kind::Borrowed(start) = &memory.kind else { return memory.published_for_writing() };
        let (start, len) = (start.0.addr().get(), memory.len);
        self.segments.iter().find_map(|(name, segment)| {
            let offset = start.checked_sub(segment.at(0, 0).addr())?;
            let inside = offset.checked_add(len).is_some_and(|end| end <= segment.len());
            inside.then_some(PublishedMemory { segment: *name, offset, len })
        })
    }

    fn grow(&mut self, size: usize) -> Result<()> {
        let len = Size::new(size.max(MIN_SEGMENT)).next_multiple_of(HUGE_PAGE).bytes(WHAT)?;
        // Advance the number even if `create` fails: some peers may already know a segment with this number.
        let id = self.next_id;
        self.next_id += 1;
        let segment =
            self.directory.create(self.maker.rank(), id, len).map_err(Error::while_sharing_memory)?;
        let name = SegmentName { id, len };
        self.segments.push((name, segment));
        self.lock().give(Run { segment: name.id, offset: 0, len });
        Ok(())
    }

    fn lock(&self) -> std::sync::MutexGuard<'_, FreeRuns> {
        self.free.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

/// A range of bytes of one segment.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
struct Run {
    segment: u64,
    offset: usize,
    len: usize,
}

impl Run {
    /// Whether `next` begins where this run ends.
    fn touches(&self, next: &Run) -> bool {
        self.segment == next.segment && self.offset + self.len == next.offset
    }
}

/// Free runs in order of (segment, offset). Adjacent runs are merged.
#[derive(Debug, Default)]
struct FreeRuns(Vec<Run>);

impl FreeRuns {
    /// Takes `size` bytes off the smallest run that is long enough.
    fn take(&mut self, size: usize) -> Option<Run> {
        let fitting = self.0.iter().enumerate().filter(|(_, run)| run.len >= size);
        let (at, _) = fitting.min_by_key(|(_, run)| run.len)?;
        let run = &mut self.0[at];
        let taken = Run { len: size, ..*run };
        if run.len == size {
            self.0.remove(at);
        } else {
            run.offset += size;
            run.len -= size;
        }
        Some(taken)
    }

    /// Returns a run.
    fn give(&mut self, run: Run) {
        let at = self.0.partition_point(|other| (other.segment, other.offset) < (run.segment, run.offset));
        self.0.insert(at, run);
        if at + 1 < self.0.len() && self.0[at].touches(&self.0[at + 1]) {
            self.0[at].len += self.0.remove(at + 1).len;
        }
        if at > 0 && self.0[at - 1].touches(&self.0[at]) {
            self.0[at - 1].len += self.0.remove(at).len;
        }
    }
}

#[cfg(test)]
mod tests {
    use ep::{CallerError, Error, Rank};
    use proptest::prelude::*;

    use super::*;

    fn arena() -> Arena {
        Arena::new(Maker::new(Rank(0)), Directory::of_threads(), 2)
    }

    #[test]
    fn sizes_that_overflow_are_refused() {
        let mut arena = arena();
        for bytes in [usize::MAX, usize::MAX - 4094, usize::MAX / 2 + 1, isize::MAX as usize] {
            let error = arena.alloc(bytes).unwrap_err();
            assert!(matches!(error, Error::Caller(CallerError::TooLarge { .. })), "{bytes}: {error}");
        }
        for bytes in [usize::MAX, isize::MAX as usize] {
            let error = HostMemory::normal(bytes).unwrap_err();
            assert!(matches!(error, Error::Environment(_)), "{bytes}: {error}");
        }
        assert_eq!(arena.registered_bytes(), 0);
    }

    #[test]
    fn memory_that_late_peers_may_read_is_never_overwritten() {
        let mut arena = arena();
        let mut memory = arena.alloc(100).unwrap();
        memory.as_bytes_mut().fill(7);
        let published = memory.published_for_writing().unwrap();
        let (segment, start) = (Arc::clone(&arena.segments[0].1), memory.as_bytes().as_ptr());
        memory.mark_readable_by_late_peers();
        assert_eq!(memory.as_bytes().as_ptr(), start);
        memory.as_bytes_mut().fill(9);
        assert_eq!((memory.as_bytes(), memory.published_for_writing()), (&[9; 100][..], None));
        // SAFETY: inside the segment, and only this thread touches it.
        assert_eq!(unsafe { segment.at(published.offset, 1).read() }, 7);
        drop(memory);
        assert_ne!(arena.alloc(100).unwrap().published_for_writing(), Some(published));
    }

    proptest! {
        /// Free runs stay disjoint, ordered and merged; no byte is allocated twice or lost.
        #[test]
        fn runs_are_allocated_once(asked in prop::collection::vec((1usize..9, any::<prop::sample::Index>()), 0..40)) {
            const ALL: usize = 64;
            let mut free = FreeRuns::default();
            for segment in [3, 5] {
                free.give(Run { segment, offset: 0, len: ALL });
            }
            let mut taken: Vec<Run> = Vec::new();
            for (size, which) in asked {
                match free.take(size) {
                    Some(run) => taken.push(run),
                    None => prop_assert!(free.0.iter().all(|run| run.len < size)),
                }
                if size % 3 == 0 && !taken.is_empty() {
                    free.give(taken.swap_remove(which.index(taken.len())));
                }
                let mut all: Vec<Run> = taken.iter().chain(&free.0).copied().collect();
                all.sort_by_key(|run| (run.segment, run.offset));
                prop_assert_eq!(all.iter().map(|run| run.len).sum::<usize>(), 2 * ALL);
                prop_assert!(all.windows(2).all(|two| two[0].segment != two[1].segment || two[0].touches(&two[1])));
                prop_assert!(free.0.windows(2).all(|two| !two[0].touches(&two[1])));
            }
            taken.into_iter().for_each(|run| free.give(run));
            prop_assert_eq!(free.0.len(), 2);
        }
    }

    #[test]
    fn blocks_are_disjoint_and_freed_bytes_are_reused() {
        let mut arena = arena();
        let mut a = arena.alloc(100).unwrap();
        let mut b = arena.alloc(ALIGN + 1).unwrap();
        a.as_bytes_mut().fill(1);
        b.as_bytes_mut().fill(2);
        assert!(a.as_bytes() == [1; 100] && b.as_bytes().iter().all(|&x| x == 2));
        let published = a.published_for_writing().unwrap();
        drop(a);
        assert_eq!(arena.alloc(10).unwrap().published_for_writing().unwrap().offset, published.offset);
        drop(b);
        assert_eq!(arena.lock().0, [Run { segment: 2, offset: 0, len: MIN_SEGMENT }]);
    }

    #[test]
    fn the_arena_grows_by_segments() {
        let mut arena = arena();
        let small = arena.alloc(1).unwrap();
        let large = arena.alloc(MIN_SEGMENT + 1).unwrap();
        assert_ne!(
            small.published_for_writing().unwrap().segment.id,
            large.published_for_writing().unwrap().segment.id
        );
        assert_eq!(arena.alloc(0).unwrap().len(), 0);
    }

    #[test]
    fn withdrawn_memory_is_never_reused() {
        let mut arena = arena();
        let mut memory = arena.alloc(ALIGN).unwrap();
        let published = memory.published_for_writing().unwrap();
        memory.withdraw();
        assert!(memory.is_empty() && memory.as_bytes().is_empty());
        drop(memory);
        assert_ne!(arena.alloc(ALIGN).unwrap().published_for_writing(), Some(published));
    }

    #[test]
    fn borrowed_memory_keeps_the_callers_bytes() {
        let arena = arena();
        let mut bytes = vec![3u8; 64];
        // SAFETY: the vector outlives the memory, and nothing else uses it until the memory is dropped.
        let mut memory = unsafe { HostMemory::borrowed(bytes.as_mut_ptr(), 64) };
        memory.as_bytes_mut()[63] = 4;
        memory.withdraw();
        assert_eq!(
            (memory.len(), memory.published_for_writing(), arena.published_for_reading(&memory)),
            (64, None, None)
        );
        drop(memory);
        assert_eq!(bytes[62..], [3, 4]);
        // SAFETY: no bytes.
        assert!(unsafe { HostMemory::borrowed(std::ptr::null_mut(), 0) }.as_bytes().is_empty());
    }

    #[test]
    fn borrowed_memory_inside_the_arena_is_published_for_reading() {
        let mut arena = arena();
        let _first = arena.alloc(MIN_SEGMENT).unwrap();
        let mut block = arena.alloc(4096).unwrap();
        let published = block.published_for_writing().unwrap();
        let start = block.as_bytes_mut().as_mut_ptr();
        // SAFETY: inside the block, which outlives the borrow.
        let part = unsafe { HostMemory::borrowed(start.add(16), 100) };
        let expected =
            PublishedMemory { segment: published.segment, offset: published.offset + 16, len: 100 };
        assert_eq!(arena.published_for_reading(&part), Some(expected));
        assert_eq!(part.published_for_writing(), None);
        assert_eq!(arena.published_for_reading(&block), Some(published));
        assert_eq!(arena.published_for_reading(&HostMemory::normal(8).unwrap()), None);
    }

    #[test]
    fn normal_memory_is_aligned_and_private() {
        let mut memory = HostMemory::normal(130).unwrap();
        assert!(memory.as_bytes().as_ptr().addr().is_multiple_of(64));
        memory.as_bytes_mut()[129] = 1;
        assert_eq!((memory.len(), memory.published_for_writing()), (130, None));
        memory.withdraw();
        assert_eq!(memory.len(), 130);
    }
}
