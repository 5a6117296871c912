//! Memory that operators read and write: registered (peers reach it, no staging) or normal (a heap allocation).

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
/// [`HostMemory::normal`] is any other memory; operators stage it through registered memory where peers must reach it.
#[derive(Debug)]
pub struct HostMemory {
    kind: Kind,
    len: usize,
}

#[derive(Debug)]
enum Kind {
    Registered(Block),
    Normal(Vec<Line>),
}

/// A cache line: gives heap memory the alignment of registered memory's lines.
#[derive(Debug, Clone, Copy, bytemuck::Pod, bytemuck::Zeroable)]
#[repr(C, align(64))]
struct Line([u8; 64]);

impl HostMemory {
    /// Zeroed heap memory of this rank alone.
    pub fn normal(bytes: usize) -> Self {
        Self { kind: Kind::Normal(vec![Line([0; 64]); bytes.div_ceil(64)]), len: bytes }
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
        }
    }

    /// The bytes, to write.
    pub fn as_bytes_mut(&mut self) -> &mut [u8] {
        match &mut self.kind {
            // SAFETY: as in `as_bytes`, and borrowed mutably.
            Kind::Registered(block) => unsafe { std::slice::from_raw_parts_mut(block.start(), self.len) },
            Kind::Normal(lines) => &mut bytemuck::cast_slice_mut(lines)[..self.len],
        }
    }

    /// Where peers find it; `None` for normal memory.
    pub(crate) fn place(&self) -> Option<Place> {
        match &self.kind {
            Kind::Registered(block) => {
                Some(Place { segment: block.name, offset: block.offset, len: self.len })
            }
            Kind::Normal(_) => None,
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
    fn normal_memory_is_aligned_and_private() {
        let mut memory = HostMemory::normal(130);
        assert!(memory.as_bytes().as_ptr().addr().is_multiple_of(64));
        memory.as_bytes_mut()[129] = 1;
        assert_eq!((memory.len(), memory.place()), (130, None));
        memory.withdraw();
        assert_eq!(memory.len(), 130);
    }
}
