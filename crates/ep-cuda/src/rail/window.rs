//! A rank's rail window, as its proxy reads and writes it.

use std::mem::offset_of;
use std::sync::Arc;
use std::sync::atomic::{AtomicU32, AtomicU64, Ordering::Acquire, Ordering::Relaxed, Ordering::Release};

use ep::{CallerError, Result, Window};

use super::layout::RailLayout;
use crate::params::{RailEnd, RailPlan, RailState};

/// The words of a rail window that the proxy shares with kernels and with the peers' engines.
///
/// The proxy accesses every word atomically, because kernels and engines may write it at any time: a peer that breaks
/// the protocol can change a word between two reads.
pub(super) struct RailWindow {
    memory: Arc<dyn Window>,
    layout: RailLayout,
}

impl RailWindow {
    /// # Errors
    /// [`CallerError::Shape`] for memory that is too short for what lies before the lanes, or not aligned for its words.
    /// The proxy accesses no lane, which may be in other memory.
    pub(super) fn new(memory: Arc<dyn Window>, layout: RailLayout) -> Result<Self> {
        let shape = |what, expected, found| CallerError::Shape { what, expected, found, unit: "bytes" };
        let words = layout.lanes().start;
        if memory.len() < words {
            return Err(shape("the length of a rail window", words, memory.len()).into());
        }
        let aligned = align_of::<RailEnd>();
        let address = memory.start().addr().get();
        if !address.is_multiple_of(aligned) {
            return Err(
                shape("the alignment of a rail window", aligned, 1 << address.trailing_zeros()).into()
            );
        }
        Ok(Self { memory, layout })
    }

    pub(super) fn layout(&self) -> &RailLayout {
        &self.layout
    }

    /// The epoch of the plan to this domain in the copy of this parity. Acquires the words of the plan.
    pub(super) fn out_epoch(&self, domain: usize, parity: usize) -> u32 {
        self.word(self.out_plan(domain, parity) + offset_of!(RailPlan, epoch)).load(Acquire)
    }

    /// The epoch of an `out` flag. Acquires what was stored to the lane before it.
    pub(super) fn out_flag(&self, domain: usize, parity: usize, index: usize) -> u32 {
        let flags = self.layout.end(domain, parity) + offset_of!(RailEnd, out_flags);
        self.word(flags + 4 * index).load(Acquire)
    }

    /// Tells the kernels that the plan of this epoch, and this many chunks at the start of its rows, have arrived from this
    /// domain.
    pub(super) fn set_progress(&self, domain: usize, parity: usize, epoch: u32, chunks: usize) {
        let state = self.layout.end(domain, parity) + offset_of!(RailEnd, state);
        let word = self.long_word(state + offset_of!(RailState, progress));
        word.store(u64::from(epoch) << 32 | chunks as u64, Release);
    }

    /// Offset of the plan that this rank's kernels write.
    pub(super) fn out_plan(&self, domain: usize, parity: usize) -> usize {
        self.layout.end(domain, parity) + offset_of!(RailEnd, out)
    }

    /// Offset of the plan that the rail peer in this domain puts.
    pub(super) fn in_plan(&self, domain: usize, parity: usize) -> usize {
        self.layout.end(domain, parity) + offset_of!(RailEnd, input)
    }

    /// The 32-bit word at this offset, without an order.
    pub(super) fn u32_at(&self, offset: usize) -> u32 {
        self.word(offset).load(Relaxed)
    }

    /// The 64-bit word at this offset, without an order.
    pub(super) fn u64_at(&self, offset: usize) -> u64 {
        self.long_word(offset).load(Relaxed)
    }

    fn long_word(&self, offset: usize) -> &AtomicU64 {
        let word = self.at(offset, size_of::<u64>()).cast();
        // SAFETY: the word is inside the window, which `memory` keeps mapped, and aligned (see `at`). This process
        // accesses it without atomics only where the protocol orders the accesses.
        unsafe { AtomicU64::from_ptr(word) }
    }

    fn word(&self, offset: usize) -> &AtomicU32 {
        let word = self.at(offset, size_of::<u32>()).cast();
        // SAFETY: as in `long_word`.
        unsafe { AtomicU32::from_ptr(word) }
    }

    /// The address of a word of `len` bytes.
    fn at(&self, offset: usize, len: usize) -> *mut u8 {
        // The layout keeps offsets far below the greatest `usize`, and `new` checked the length.
        let end = self.layout.lanes().start;
        assert!(offset + len <= end && offset.is_multiple_of(len), "a word at {offset}");
        // SAFETY: the offset is inside the window.
        unsafe { self.memory.start().as_ptr().add(offset) }
    }
}
