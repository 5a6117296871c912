//! Memory that operators read and write: registered (peers reach it, no staging), normal (a heap allocation), or
//! borrowed (the caller's own).

use std::ptr::NonNull;
use std::sync::{Arc, Mutex, PoisonError};

use ep::{Rank, Result};

use crate::segment::{Directory, Segment, SegmentName};

/// Every block starts at a multiple of this: whole cache lines, and streaming stores need 64.
const ALIGN: usize = 4096;
/// Segments are at least this long, so that small blocks share one.
const MIN_SEGMENT: usize = 32 << 20;
/// Segments are a multiple of this long: whole huge pages.
const HUGE_PAGE: usize = 2 << 20;

/// Memory for tokens, expert outputs and results.
///
/// [`Backend::alloc`](ep::Backend::alloc) gives registered memory: peers read and write it in place.
/// [`HostMemory::normal`] and [`HostMemory::borrowed`] are any other memory; operators stage it through registered
/// memory where peers must reach it.
#[derive(Debug)]
pub struct HostMemory {
    kind: Kind,
    len: usize,
}

#[derive(Debug)]
enum Kind {
    Registered(Block),
    Normal(Vec<Line>),
    Borrowed(Bytes),
}

/// Where the caller's own bytes begin.
#[derive(Debug, Clone, Copy)]
struct Bytes(NonNull<u8>);

// SAFETY: whoever made the borrow promised that the bytes are this memory's alone, as those of a `Vec` are.
unsafe impl Send for Bytes {}
// SAFETY: as above.
unsafe impl Sync for Bytes {}

/// A cache line: gives heap memory the alignment of registered memory's lines.
#[derive(Debug, Clone, Copy, bytemuck::Pod, bytemuck::Zeroable)]
#[repr(C, align(64))]
struct Line([u8; 64]);

impl HostMemory {
    /// Zeroed heap memory of this rank alone.
    pub fn normal(bytes: usize) -> Self {
        Self { kind: Kind::Normal(vec![Line([0; 64]); bytes.div_ceil(64)]), len: bytes }
    }

    /// Memory that the caller has allocated, a tensor for example: read and written in place.
    ///
    /// Where it lies inside registered memory of the same buffer, peers read it there too.
    ///
    /// # Safety
    /// `start` is that of `len` bytes that stay, and that nobody else writes to, as long as this value lives. Where
    /// operators write to them, nobody else reads them either. `start` is a multiple of 4; it may be anything where
    /// `len` is 0.
    pub unsafe fn borrowed(start: *mut u8, len: usize) -> Self {
        let start = NonNull::new(start).filter(|_| len > 0).unwrap_or(NonNull::<Line>::dangling().cast());
        Self { kind: Kind::Borrowed(Bytes(start)), len }
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
            // SAFETY: the block is this memory's alone until it is dropped; peers write to it only inside an operator
            // that borrows it mutably.
            Kind::Registered(block) => unsafe { std::slice::from_raw_parts(block.start(), self.len) },
            Kind::Normal(lines) => &bytemuck::cast_slice(lines)[..self.len],
            // SAFETY: the promise made to `borrowed`.
            Kind::Borrowed(bytes) => unsafe { std::slice::from_raw_parts(bytes.0.as_ptr(), self.len) },
        }
    }

    /// The bytes, to write.
    pub fn as_bytes_mut(&mut self) -> &mut [u8] {
        match &mut self.kind {
            // SAFETY: as in `as_bytes`, and borrowed mutably.
            Kind::Registered(block) => unsafe { std::slice::from_raw_parts_mut(block.start(), self.len) },
            Kind::Normal(lines) => &mut bytemuck::cast_slice_mut(lines)[..self.len],
            // SAFETY: the promise made to `borrowed`, and borrowed mutably.
            Kind::Borrowed(bytes) => unsafe { std::slice::from_raw_parts_mut(bytes.0.as_ptr(), self.len) },
        }
    }

    /// Where peers find it, to read and to write; `None` for memory that is not registered as its own block: only such
    /// a block can be withdrawn.
    pub(crate) fn place(&self) -> Option<Place> {
        match &self.kind {
            Kind::Registered(block) => {
                Some(Place { segment: block.name, offset: block.offset, len: self.len })
            }
            Kind::Normal(_) | Kind::Borrowed(_) => None,
        }
    }

    /// Takes the memory away from its holder for good, where a peer may still touch it: after a failed operator.
    pub(crate) fn withdraw(&mut self) {
        if let Kind::Registered(_) = self.kind {
            let taken = std::mem::replace(self, Self { kind: Kind::Normal(Vec::new()), len: 0 });
            if let Kind::Registered(block) = taken.kind {
                block.retire();
            }
        }
    }
}

/// Where a peer finds memory.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) struct Place {
    pub(crate) segment: SegmentName,
    pub(crate) offset: usize,
    pub(crate) len: usize,
}

/// A run of bytes of an arena's segment, returned to the arena when dropped.
#[derive(Debug)]
struct Block {
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

    /// Never gives the run back.
    fn retire(mut self) {
        self.size = 0;
    }
}

impl Drop for Block {
    fn drop(&mut self) {
        if self.size > 0 {
            let mut free = self.free.lock().unwrap_or_else(PoisonError::into_inner);
            free.give(Run { segment: self.name.id, offset: self.offset, len: self.size });
        }
    }
}

/// Registered memory of one rank. Grows by whole segments and never shrinks: fresh pages cost more than any operator.
#[derive(Debug)]
pub(crate) struct Arena {
    rank: Rank,
    directory: Directory,
    segments: Vec<(SegmentName, Arc<Segment>)>,
    next_id: u64,
    free: Arc<Mutex<FreeRuns>>,
}

impl Arena {
    /// An empty arena that numbers its segments from `first_id`.
    pub(crate) fn new(rank: Rank, directory: Directory, first_id: u64) -> Self {
        Self { rank, directory, segments: Vec::new(), next_id: first_id, free: Arc::default() }
    }

    /// Bytes of all segments.
    pub(crate) fn registered_bytes(&self) -> usize {
        self.segments.iter().map(|(name, _)| name.len).sum()
    }

    /// A block of `bytes` bytes.
    pub(crate) fn alloc(&mut self, bytes: usize) -> Result<HostMemory> {
        let size = bytes.max(1).next_multiple_of(ALIGN);
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
            segment: Arc::clone(segment),
            name: *name,
            offset: run.offset,
            size,
            free: Arc::clone(&self.free),
        };
        Ok(HostMemory { kind: Kind::Registered(block), len: bytes })
    }

    /// Where peers find `memory`, to read it; `None` when it does not lie in this arena.
    pub(crate) fn readable_place(&self, memory: &HostMemory) -> Option<Place> {
        let Kind::Borrowed(bytes) = &memory.kind else { return memory.place() };
        let (start, len) = (bytes.0.addr().get(), memory.len);
        self.segments.iter().find_map(|(name, segment)| {
            let offset = start.checked_sub(segment.at(0, 0).addr())?;
            let inside = offset.checked_add(len).is_some_and(|end| end <= segment.len());
            inside.then_some(Place { segment: *name, offset, len })
        })
    }

    fn grow(&mut self, size: usize) -> Result<()> {
        let len = size.max(MIN_SEGMENT).next_multiple_of(HUGE_PAGE);
        let segment = self.directory.create(self.rank, self.next_id, len)?;
        let name = SegmentName { id: self.next_id, fd: segment.fd(), len };
        self.next_id += 1;
        self.segments.push((name, segment));
        self.lock().give(Run { segment: name.id, offset: 0, len });
        Ok(())
    }

    fn lock(&self) -> std::sync::MutexGuard<'_, FreeRuns> {
        self.free.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

#[derive(Debug, Clone, Copy, PartialEq, Eq)]
struct Run {
    segment: u64,
    offset: usize,
    len: usize,
}

impl Run {
    fn touches(&self, next: &Run) -> bool {
        self.segment == next.segment && self.offset + self.len == next.offset
    }
}

/// Free runs in order of (segment, offset), neighbours merged.
#[derive(Debug, Default)]
struct FreeRuns(Vec<Run>);

impl FreeRuns {
    /// Takes `size` bytes off the smallest run that has them.
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
    use super::*;

    fn arena() -> Arena {
        Arena::new(Rank(0), Directory::of_threads(), 2)
    }

    #[test]
    fn blocks_are_apart_and_come_back() {
        let mut arena = arena();
        let mut a = arena.alloc(100).unwrap();
        let mut b = arena.alloc(ALIGN + 1).unwrap();
        a.as_bytes_mut().fill(1);
        b.as_bytes_mut().fill(2);
        assert!(a.as_bytes() == [1; 100] && b.as_bytes().iter().all(|&x| x == 2));
        let place = a.place().unwrap();
        drop(a);
        assert_eq!(arena.alloc(10).unwrap().place().unwrap().offset, place.offset);
        drop(b);
        assert_eq!(arena.lock().0, [Run { segment: 2, offset: 0, len: MIN_SEGMENT }]);
    }

    #[test]
    fn it_grows() {
        let mut arena = arena();
        let small = arena.alloc(1).unwrap();
        let large = arena.alloc(MIN_SEGMENT + 1).unwrap();
        assert_ne!(small.place().unwrap().segment.id, large.place().unwrap().segment.id);
        assert_eq!(arena.alloc(0).unwrap().len(), 0);
    }

    #[test]
    fn withdrawn_memory_is_never_reused() {
        let mut arena = arena();
        let mut memory = arena.alloc(ALIGN).unwrap();
        let place = memory.place().unwrap();
        memory.withdraw();
        assert!(memory.is_empty() && memory.as_bytes().is_empty());
        drop(memory);
        assert_ne!(arena.alloc(ALIGN).unwrap().place(), Some(place));
    }

    #[test]
    fn borrowed_memory_is_the_callers() {
        let arena = arena();
        let mut bytes = vec![3u8; 64];
        // SAFETY: the vector lives longer, and is left alone until the borrow is over.
        let mut memory = unsafe { HostMemory::borrowed(bytes.as_mut_ptr(), 64) };
        memory.as_bytes_mut()[63] = 4;
        memory.withdraw();
        assert_eq!((memory.len(), memory.place(), arena.readable_place(&memory)), (64, None, None));
        drop(memory);
        assert_eq!(bytes[62..], [3, 4]);
        // SAFETY: no bytes.
        assert!(unsafe { HostMemory::borrowed(std::ptr::null_mut(), 0) }.as_bytes().is_empty());
    }

    #[test]
    fn what_lies_in_the_arena_is_found_by_its_address() {
        let mut arena = arena();
        let _first = arena.alloc(MIN_SEGMENT).unwrap();
        let mut block = arena.alloc(4096).unwrap();
        let place = block.place().unwrap();
        let start = block.as_bytes_mut().as_mut_ptr();
        // SAFETY: inside the block, which lives longer.
        let part = unsafe { HostMemory::borrowed(start.add(16), 100) };
        let expected = Place { segment: place.segment, offset: place.offset + 16, len: 100 };
        assert_eq!(arena.readable_place(&part), Some(expected));
        assert_eq!(part.place(), None);
        assert_eq!(arena.readable_place(&block), Some(place));
        assert_eq!(arena.readable_place(&HostMemory::normal(8)), None);
    }

    #[test]
    fn normal_memory_is_aligned_and_private() {
        let mut memory = HostMemory::normal(130);
        assert!(memory.as_bytes().as_ptr().addr().is_multiple_of(64));
        memory.as_bytes_mut()[129] = 1;
        assert_eq!((memory.len(), memory.place()), (130, None));
        memory.withdraw();
        assert_eq!(memory.len(), 130);
    }
}
