//! The streams that a buffer's operators are launched in, and the CUDA graphs that capture them.

use std::sync::Arc;

use ep::Result;

use crate::buffer::CudaBuffer;
use crate::driver::{Event, Stream};
use crate::handle::CudaHandle;

/// The handle of the default stream of the calling thread (`CU_STREAM_PER_THREAD`).
const PER_THREAD: usize = 2;

impl CudaBuffer {
    /// Launches the following operators in the caller's stream, after all work that this buffer has put into the
    /// previous stream. A stream that captures a CUDA graph does not wait for that work: the capture's own rules order
    /// it.
    ///
    /// # Errors
    /// [`ep::EnvironmentError`] if a driver call fails.
    ///
    /// # Safety
    /// `stream` is a `CUstream` of the buffer's GPU. It lives until the last call that uses it has returned. Neither
    /// setting another stream nor dropping the buffer accesses it.
    pub unsafe fn set_stream(&mut self, stream: *mut std::ffi::c_void) -> Result<()> {
        // The default stream of a thread has the same handle in every thread.
        if self.stream.raw() == stream.cast() && stream.addr() != PER_THREAD {
            return Ok(());
        }
        let next = Stream::borrowed(&self.device, stream.cast());
        self.member.with_tail(|tail| tail.go_on_in(&self.stream, &next))?;
        self.stream = next;
        Ok(())
    }

    /// Checks whether the stream captures a CUDA graph. If so, the graph keeps the memory that operators access, and
    /// memory that is handed out is never reused, because replays may write to it.
    pub(crate) fn notice_capture(&mut self) -> Result<bool> {
        let capture = self.stream.capture()?;
        self.arena.set_captured(capture.is_some());
        if let Some(capture) = &capture
            && self.capture != Some(capture.id)
        {
            capture.keep(Arc::clone(&self.member))?;
        }
        self.capture = capture.map(|capture| capture.id);
        Ok(self.capture.is_some())
    }

    /// Like [`notice_capture`](Self::notice_capture), for an operator with a handle, which the graph keeps, too.
    pub(crate) fn notice_capture_with(&mut self, handle: &CudaHandle) -> Result<()> {
        self.notice_capture()?;
        if self.capture.is_some()
            && self.capture != handle.kept_by.get()
            && let Some(capture) = self.stream.capture()?
        {
            capture.keep(Arc::clone(&handle.memory))?;
            handle.kept_by.set(self.capture);
        }
        Ok(())
    }

    /// Called after work was put into the stream: memory stays until that work has finished.
    pub(crate) fn notice_work(&self) -> Result<()> {
        // The graph keeps the memory of captured work. A lasting stream is recorded when the buffer is dropped.
        if self.capture.is_some() || self.stream.is_lasting() {
            return Ok(());
        }
        self.member.with_tail(|tail| tail.record(&self.stream))
    }

    /// The stream that operators are launched in.
    pub fn stream(&self) -> &Stream {
        &self.stream
    }

    /// Records an event after all work in the stream so far.
    ///
    /// # Errors
    /// [`ep::EnvironmentError`] if a driver call fails.
    pub fn mark(&self) -> Result<Event> {
        let event = Event::new(&self.device)?;
        event.record(&self.stream)?;
        Ok(event)
    }
}
