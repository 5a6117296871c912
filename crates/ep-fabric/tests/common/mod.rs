//! Windows and rails for tests of the engine.
#![allow(clippy::unwrap_used, dead_code, unreachable_pub)] // each test uses a part

use std::alloc::{Layout, alloc_zeroed, dealloc};
use std::ops::Range;
use std::path::PathBuf;
use std::ptr::NonNull;
use std::sync::Arc;
use std::time::Duration;

use ep::conformance::{
    End, Reordering, TRANSPORT_LIMITS, TransportFailure, WindowAccess, check_transport,
    transport_window_bytes,
};
use ep::{Limits, Rail, Rank, Result, Unconnected, Window};
use ep_fabric::Options;

/// Page-aligned memory.
pub struct Pages {
    start: NonNull<u8>,
    layout: Layout,
}

// SAFETY: an address range; every access states why it may happen.
unsafe impl Send for Pages {}
// SAFETY: as above.
unsafe impl Sync for Pages {}

impl Pages {
    pub fn new(len: usize) -> Arc<Self> {
        let layout = Layout::from_size_align(len, 4096).unwrap();
        // SAFETY: the length is not 0.
        let start = NonNull::new(unsafe { alloc_zeroed(layout) }).unwrap();
        Arc::new(Self { start, layout })
    }

    fn at(&self, offset: usize, len: usize) -> *mut u8 {
        assert!(offset + len <= self.layout.size());
        // SAFETY: inside the allocation.
        unsafe { self.start.add(offset).as_ptr() }
    }
}

impl Drop for Pages {
    fn drop(&mut self) {
        // SAFETY: allocated with this layout.
        unsafe { dealloc(self.start.as_ptr(), self.layout) };
    }
}

impl Window for Pages {
    fn start(&self) -> NonNull<u8> {
        self.start
    }

    fn len(&self) -> usize {
        self.layout.size()
    }
}

pub struct Access(pub Arc<Pages>);

impl WindowAccess for Access {
    fn usable(&self) -> Range<usize> {
        0..self.0.layout.size()
    }

    fn write(&self, offset: usize, bytes: &[u8]) {
        // SAFETY: in bounds; the checks access no byte that a put in flight may access.
        unsafe { self.0.at(offset, bytes.len()).copy_from_nonoverlapping(bytes.as_ptr(), bytes.len()) };
    }

    fn read(&self, offset: usize, bytes: &mut [u8]) {
        // SAFETY: as above.
        unsafe { bytes.as_mut_ptr().copy_from_nonoverlapping(self.0.at(offset, bytes.len()), bytes.len()) };
    }
}

/// A rail whose ranks have numbers other than their indices.
pub fn rail(ranks: usize, own: usize) -> Rail {
    Rail::new((0..ranks as u32).map(|rank| Rank(2 * rank + 1)).collect(), own).unwrap()
}

pub fn open_with(
    options: &Options,
    rail: Rail,
    limits: Limits,
) -> Result<(Box<dyn Unconnected>, Arc<Pages>)> {
    let pages = Pages::new(transport_window_bytes(rail.ranks().len()));
    // SAFETY: the pages are allocated until they are dropped.
    let engine = unsafe { ep_fabric::open(options, rail, Arc::clone(&pages) as Arc<dyn Window>, limits)? };
    Ok((engine, pages))
}

/// The connected ends of a rail whose ranks are threads.
pub fn ends(options: &Options, ranks: usize) -> Vec<End> {
    let opened: Vec<_> = (0..ranks)
        .map(|own| {
            open_with(options, rail(ranks, own), TRANSPORT_LIMITS).unwrap_or_else(|error| panic!("{error}"))
        })
        .collect();
    let blobs: Vec<Vec<u8>> = opened.iter().map(|(engine, _)| engine.blob()).collect();
    let connect = |(own, (engine, pages)): (usize, (Box<dyn Unconnected>, _))| {
        let transport = engine.connect(&blobs).unwrap_or_else(|error| panic!("{error}"));
        End { rail: rail(ranks, own), transport, window: Box::new(Access(pages)) }
    };
    opened.into_iter().enumerate().map(connect).collect()
}

/// Whether the adapter `Reordering` is between the engine and the suite.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Reorder {
    No,
    Yes,
}

/// Runs the conformance suite with ranks that are threads.
pub fn conform(
    options: &Options,
    ranks: usize,
    reorder: Reorder,
) -> std::result::Result<(), TransportFailure> {
    let ends = ends(options, ranks);
    std::thread::scope(|scope| {
        let check = |mut end: End| {
            if reorder == Reorder::Yes {
                end.transport = Box::new(Reordering::new(end.transport, end.rail.own_index() as u64));
            }
            scope.spawn(|| check_transport(end, Duration::from_secs(60)))
        };
        let threads: Vec<_> = ends.into_iter().map(check).collect();
        threads.into_iter().try_for_each(|thread| thread.join().unwrap())
    })
}

pub fn options(provider: &str, library: Option<PathBuf>) -> Options {
    Options { provider: provider.into(), library, ..Options::default() }
}

pub fn signal_only(peer: Rank, word: u32) -> ep::Put {
    ep::Put::new(peer, ep::Signal::new(word).unwrap())
}
