//! CUDA graph captures: objects that a graph keeps alive, and driver calls that do not break off captures.

use std::any::Any;
use std::ffi::c_void;

use cudarc::driver::sys;
use ep::Result;

use super::check;
use crate::reaper;

/// A capture in progress.
#[derive(Debug)]
pub(crate) struct Capture {
    /// Unique among all captures of the process.
    pub(crate) id: u64,
    graph: sys::CUgraph,
}

/// An object that a graph keeps alive. The driver gets a pointer to it.
struct Kept(Box<dyn Any + Send>);

impl Capture {
    pub(super) fn new(id: u64, graph: sys::CUgraph) -> Self {
        Self { id, graph }
    }

    /// Keeps `kept` alive as long as the graph, anything instantiated from it, or a launch of one of these exists. After
    /// that the reaper's thread drops `kept`.
    pub(crate) fn keep(&self, kept: impl Any + Send) -> Result<()> {
        // Started here, because `release` runs on a thread of the driver that must not wait.
        reaper::start()?;
        const FREE_ORDER: u32 = sys::CUuserObject_flags::CU_USER_OBJECT_NO_DESTRUCTOR_SYNC as u32;
        const MOVE: u32 = sys::CUuserObjectRetain_flags::CU_GRAPH_USER_OBJECT_MOVE as u32;
        let what = || "tying memory to a CUDA graph".into();
        let kept = Box::into_raw(Box::new(Kept(Box::new(kept))));
        let mut object = std::ptr::null_mut();
        // SAFETY: writes one handle with one reference. When the last reference is released, `release` frees `kept`.
        let answer =
            unsafe { sys::cuUserObjectCreate(&mut object, kept.cast(), Some(release), 1, FREE_ORDER) };
        check(answer, what, "").inspect_err(|_| {
            // SAFETY: made above; no object was created, so the driver does not have the pointer.
            drop(unsafe { Box::from_raw(kept) });
        })?;
        // SAFETY: the graph lives, because its capture in this thread's stream has not ended. It takes the reference.
        let answer = unsafe { sys::cuGraphRetainUserObject(self.graph, object, 1, MOVE) };
        check(answer, what, "").inspect_err(|_| {
            // SAFETY: the graph has not taken the reference.
            let _ = unsafe { sys::cuUserObjectRelease(object, 1) };
        })
    }
}

/// Called by the driver on one of its threads, which must not call the driver and must not wait.
///
/// # Safety
/// `kept` is a pointer that [`Capture::keep`] made, and is passed to this function once.
unsafe extern "C" fn release(kept: *mut c_void) {
    // SAFETY: guaranteed by the caller.
    let kept = unsafe { Box::from_raw(kept.cast::<Kept>()) };
    reaper::drop_later(kept.0);
}

/// While this value lives, driver calls of this thread do not break off captures of other threads, as far as CUDA
/// allows.
pub(crate) struct Relaxed(sys::CUstreamCaptureMode);

impl Relaxed {
    pub(crate) fn new() -> Self {
        let mut mode = sys::CUstreamCaptureMode::CU_STREAM_CAPTURE_MODE_RELAXED;
        // SAFETY: swaps one value. If the driver refuses, neither the mode nor `mode` changes.
        let _ = unsafe { sys::cuThreadExchangeStreamCaptureMode(&mut mode) };
        Self(mode)
    }
}

impl Drop for Relaxed {
    fn drop(&mut self) {
        // SAFETY: as in `new`.
        let _ = unsafe { sys::cuThreadExchangeStreamCaptureMode(&mut self.0) };
    }
}
