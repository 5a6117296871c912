//! Streams and events.

use std::sync::Arc;
use std::time::Duration;

use cudarc::driver::sys;
use ep::Result;

use super::idle::Look;
use super::{Capture, Device, DeviceAddress, check};

/// A stream of a GPU, owned by this crate or by the caller.
#[derive(Debug)]
pub struct Stream {
    device: Arc<Device>,
    stream: sys::CUstream,
    life: Life,
}

/// The lifetime of a stream's handle.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum Life {
    /// Destroyed when this value is dropped.
    Owned,
    /// Valid as long as the context, or as the owner of which this value is a view.
    Lasting,
    /// Valid until the caller destroys it, or valid in one thread only.
    Passing,
}

/// `CU_STREAM_LEGACY`: the other handle of the default stream.
const LEGACY: usize = 1;

// SAFETY: the driver's functions on a stream may be called from any thread.
unsafe impl Send for Stream {}

impl Stream {
    /// Makes a stream that does not synchronise with the default stream.
    pub(crate) fn new(device: &Arc<Device>) -> Result<Self> {
        let _bound = device.bind()?;
        let mut stream = std::ptr::null_mut();
        let flags = sys::CUstream_flags::CU_STREAM_NON_BLOCKING as u32;
        // SAFETY: writes one handle, destroyed in `drop`.
        check(unsafe { sys::cuStreamCreate(&mut stream, flags) }, || "making a stream".into(), "")?;
        Ok(Self { device: Arc::clone(device), stream, life: Life::Owned })
    }

    /// The caller's stream.
    pub(crate) fn borrowed(device: &Arc<Device>, stream: sys::CUstream) -> Self {
        let life = if matches!(stream as usize, 0 | LEGACY) { Life::Lasting } else { Life::Passing };
        Self { device: Arc::clone(device), stream, life }
    }

    /// A view of the same stream, valid as long as its owner `self`.
    pub(crate) fn view(&self) -> Self {
        let life = if self.life == Life::Owned { Life::Lasting } else { self.life };
        Self { device: Arc::clone(&self.device), stream: self.stream, life }
    }

    /// Whether the handle stays valid after the caller has set another stream, and may be used from any thread.
    pub(crate) fn is_lasting(&self) -> bool {
        self.life != Life::Passing
    }

    pub(crate) fn raw(&self) -> sys::CUstream {
        self.stream
    }

    /// Whether work in the stream is captured in a CUDA graph instead of executed.
    pub(crate) fn is_capturing(&self) -> Result<bool> {
        let _bound = self.device.bind()?;
        let mut status = sys::CUstreamCaptureStatus::CU_STREAM_CAPTURE_STATUS_NONE;
        // SAFETY: the stream lives; writes one number.
        let answer = unsafe { sys::cuStreamIsCapturing(self.stream, &mut status) };
        // This is the result for the default stream while another stream is being captured. The default stream itself
        // cannot be captured.
        if answer == sys::CUresult::CUDA_ERROR_STREAM_CAPTURE_IMPLICIT {
            return Ok(false);
        }
        check(answer, || "asking whether a stream is captured".into(), "")?;
        Ok(status != sys::CUstreamCaptureStatus::CU_STREAM_CAPTURE_STATUS_NONE)
    }

    /// The capture that the stream is in; `None` if its work is executed.
    pub(crate) fn capture(&self) -> Result<Option<Capture>> {
        let _bound = self.device.bind()?;
        if !self.is_capturing()? {
            return Ok(None);
        }
        let mut status = sys::CUstreamCaptureStatus::CU_STREAM_CAPTURE_STATUS_NONE;
        let (mut id, mut graph) = (0, std::ptr::null_mut());
        let (nodes, count) = (std::ptr::null_mut(), std::ptr::null_mut());
        // SAFETY: the stream lives; writes a status, a number and a handle; the dependencies are not requested.
        let answer = unsafe {
            sys::cuStreamGetCaptureInfo_v2(self.stream, &mut status, &mut id, &mut graph, nodes, count)
        };
        check(answer, || "asking for the graph that a stream is captured in".into(), "")?;
        Ok((status == sys::CUstreamCaptureStatus::CU_STREAM_CAPTURE_STATUS_ACTIVE)
            .then(|| Capture::new(id, graph)))
    }

    /// Records the event after all work so far.
    ///
    /// # Errors
    /// The state of that work if the driver refuses; `Running` during a capture.
    pub(crate) fn mark(&self, event: &Event) -> std::result::Result<(), Look> {
        let _bound = self.device.bind_to_look()?;
        let mut status = sys::CUstreamCaptureStatus::CU_STREAM_CAPTURE_STATUS_NONE;
        // SAFETY: the stream lives; writes one number.
        match unsafe { sys::cuStreamIsCapturing(self.stream, &mut status) } {
            sys::CUresult::CUDA_SUCCESS
                if status == sys::CUstreamCaptureStatus::CU_STREAM_CAPTURE_STATUS_NONE => {}
            sys::CUresult::CUDA_SUCCESS => return Err(Look::Running),
            answer => return Err(Look::of(answer)),
        }
        // SAFETY: both live, on the same GPU.
        match unsafe { sys::cuEventRecord(event.event, self.stream) } {
            sys::CUresult::CUDA_SUCCESS => Ok(()),
            answer => Err(Look::of(answer)),
        }
    }

    /// Makes all following work wait for the event.
    pub(crate) fn wait(&self, event: &Event) -> Result<()> {
        let _bound = self.device.bind()?;
        // SAFETY: both live.
        let answer = unsafe { sys::cuStreamWaitEvent(self.stream, event.event, 0) };
        check(answer, || "ordering two streams".into(), "")
    }

    /// Whether all work so far has finished.
    pub(crate) fn is_done(&self) -> Result<bool> {
        let _bound = self.device.bind()?;
        // SAFETY: the stream lives.
        match unsafe { sys::cuStreamQuery(self.stream) } {
            sys::CUresult::CUDA_ERROR_NOT_READY => Ok(false),
            answer => {
                let what = || format!("waiting for GPU {}", self.device.ordinal);
                check(answer, what, "an earlier kernel failed; compute-sanitizer names the access")
                    .map(|()| true)
            }
        }
    }

    /// Waits until all work so far has finished.
    pub(crate) fn synchronize(&self) -> Result<()> {
        let _bound = self.device.bind()?;
        // SAFETY: the stream lives.
        check(
            unsafe { sys::cuStreamSynchronize(self.stream) },
            || format!("waiting for GPU {}", self.device.ordinal),
            "an earlier kernel failed; compute-sanitizer names the access",
        )
    }

    /// Copies to the GPU, in stream order. The caller may reuse `bytes` when this returns.
    pub(crate) fn upload(&self, bytes: &[u8], to: DeviceAddress) -> Result<()> {
        if bytes.is_empty() {
            return Ok(());
        }
        let _bound = self.device.bind()?;
        // SAFETY: callers check the size of `to`. The driver copies pageable memory before it returns.
        let answer =
            unsafe { sys::cuMemcpyHtoDAsync_v2(to, bytes.as_ptr().cast(), bytes.len(), self.stream) };
        check(answer, || format!("copying {} bytes to GPU {}", bytes.len(), self.device.ordinal), "")
    }

    /// Copies from the GPU and waits for the copy.
    pub(crate) fn download(&self, from: DeviceAddress, bytes: &mut [u8]) -> Result<()> {
        if bytes.is_empty() {
            return Ok(());
        }
        // The copies of all streams to the host share the GPU's queues: a copy that waits behind a kernel would delay the
        // copies of other streams, including those of ranks that the kernel waits for. So wait for the kernel first.
        self.synchronize()?;
        let _bound = self.device.bind()?;
        // SAFETY: callers check the size of `from`; `bytes` is complete after `synchronize`.
        let answer =
            unsafe { sys::cuMemcpyDtoHAsync_v2(bytes.as_mut_ptr().cast(), from, bytes.len(), self.stream) };
        check(answer, || format!("copying {} bytes from GPU {}", bytes.len(), self.device.ordinal), "")?;
        self.synchronize()
    }

    /// Copies inside the GPU, in stream order.
    pub(crate) fn copy(&self, from: DeviceAddress, to: DeviceAddress, bytes: usize) -> Result<()> {
        if bytes == 0 {
            return Ok(());
        }
        let _bound = self.device.bind()?;
        // SAFETY: callers check that both ranges are inside allocations.
        let answer = unsafe { sys::cuMemcpyDtoDAsync_v2(to, from, bytes, self.stream) };
        check(answer, || format!("copying {bytes} bytes on GPU {}", self.device.ordinal), "")
    }

    /// Stores a word, in stream order. A thread that reads the word also sees what earlier work of the stream has written.
    pub(crate) fn store(&self, to: DeviceAddress, word: u32) -> Result<()> {
        let _bound = self.device.bind()?;
        let flags = sys::CUstreamWriteValue_flags::CU_STREAM_WRITE_VALUE_DEFAULT as u32;
        // SAFETY: callers check that `to` is a word of an allocation.
        let answer = unsafe { sys::cuStreamWriteValue32_v2(self.stream, to, word, flags) };
        check(answer, || format!("storing a word on GPU {}", self.device.ordinal), "")
    }

    /// Fills with zeros, in stream order.
    pub(crate) fn zero(&self, to: DeviceAddress, bytes: usize) -> Result<()> {
        if bytes == 0 {
            return Ok(());
        }
        let _bound = self.device.bind()?;
        // SAFETY: callers check that the range is inside an allocation.
        let answer = unsafe { sys::cuMemsetD8Async(to, 0, bytes, self.stream) };
        check(answer, || format!("clearing {bytes} bytes on GPU {}", self.device.ordinal), "")
    }
}

impl Drop for Stream {
    fn drop(&mut self) {
        if self.life != Life::Owned {
            return;
        }
        if let Ok(_bound) = self.device.bind() {
            // SAFETY: made in `new`, and views do not outlive it. The driver finishes the stream's work first.
            let _ = unsafe { sys::cuStreamDestroy_v2(self.stream) };
        }
    }
}

/// A point in a stream's work.
#[derive(Debug)]
pub struct Event {
    device: Arc<Device>,
    event: sys::CUevent,
}

// SAFETY: the driver's functions on an event may be called from any thread.
unsafe impl Send for Event {}

impl Event {
    /// An event with a time stamp.
    pub(crate) fn new(device: &Arc<Device>) -> Result<Self> {
        Self::with(device, sys::CUevent_flags::CU_EVENT_DEFAULT)
    }

    /// An event without a time stamp, which costs the GPU less.
    pub(crate) fn untimed(device: &Arc<Device>) -> Result<Self> {
        Self::with(device, sys::CUevent_flags::CU_EVENT_DISABLE_TIMING)
    }

    fn with(device: &Arc<Device>, flags: sys::CUevent_flags) -> Result<Self> {
        let _bound = device.bind()?;
        let mut event = std::ptr::null_mut();
        // SAFETY: writes one handle, destroyed in `drop`.
        check(unsafe { sys::cuEventCreate(&mut event, flags as u32) }, || "making an event".into(), "")?;
        Ok(Self { device: Arc::clone(device), event })
    }

    pub(crate) fn raw(&self) -> sys::CUevent {
        self.event
    }

    /// The state of all work before the event; `Over` if the event was never recorded.
    pub(crate) fn look(&self) -> Look {
        let _bound = match self.device.bind_to_look() {
            Ok(bound) => bound,
            Err(look) => return look,
        };
        // SAFETY: the event lives.
        Look::of(unsafe { sys::cuEventQuery(self.event) })
    }

    pub(crate) fn record(&self, stream: &Stream) -> Result<()> {
        let _bound = self.device.bind()?;
        // SAFETY: both live, on the same GPU.
        check(unsafe { sys::cuEventRecord(self.event, stream.stream) }, || "recording an event".into(), "")
    }

    /// The time from an earlier event to this one.
    ///
    /// # Errors
    /// [`ep::EnvironmentError`] if the work before either event has not finished, or a driver call fails.
    pub fn since(&self, earlier: &Self) -> Result<Duration> {
        let _bound = self.device.bind()?;
        let mut milliseconds = 0.0f32;
        // SAFETY: both were recorded; writes one number.
        let answer = unsafe { sys::cuEventElapsedTime(&mut milliseconds, earlier.event, self.event) };
        check(answer, || "reading a time".into(), "")?;
        Ok(Duration::from_secs_f64(f64::from(milliseconds) / 1e3))
    }
}

impl Drop for Event {
    fn drop(&mut self) {
        if let Ok(_bound) = self.device.bind() {
            // SAFETY: made in `with`, and destroyed only here.
            let _ = unsafe { sys::cuEventDestroy_v2(self.event) };
        }
    }
}
