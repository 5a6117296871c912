//! What the tests of engines share.

use std::ops::Range;
use std::sync::Arc;

use ep::conformance::WindowAccess;

use crate::{Loopback, Segment};

/// The part of a window that the caller of [`Loopback`] uses.
pub(crate) struct Usable {
    window: Arc<Segment>,
    start: usize,
}

impl Usable {
    /// The part that begins at `start`.
    pub(crate) fn new(window: Arc<Segment>, start: usize) -> Self {
        Self { window, start }
    }

    /// The part behind the rings of `ring_slots` signals from each of `ranks` ranks.
    pub(crate) fn of(window: &Arc<Segment>, ranks: usize, ring_slots: usize) -> Self {
        let reserved =
            Loopback::reserved(ranks, ring_slots).checked().expect("tests have few ranks and slots");
        Self::new(Arc::clone(window), reserved)
    }

    /// The first offset.
    pub(crate) fn start(&self) -> usize {
        self.start
    }
}

impl WindowAccess for Usable {
    fn usable(&self) -> Range<usize> {
        self.start..self.window.len()
    }

    fn write(&self, offset: usize, bytes: &[u8]) {
        // SAFETY: `at` checks the bounds; the checks access no byte that a put in flight may access.
        unsafe { self.window.at(offset, bytes.len()).copy_from_nonoverlapping(bytes.as_ptr(), bytes.len()) };
    }

    fn read(&self, offset: usize, bytes: &mut [u8]) {
        // SAFETY: as above.
        unsafe {
            bytes.as_mut_ptr().copy_from_nonoverlapping(self.window.at(offset, bytes.len()), bytes.len())
        };
    }
}
