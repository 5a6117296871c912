//! Streams and events.

use std::sync::Arc;
use std::time::Duration;

use cudarc::driver::sys;
use ep::Result;

use super::{Device, DeviceAddress, check};

/// An order of work on a GPU: of this crate's own, or of the caller's.
#[derive(Debug)]
pub struct Stream {
    device: Arc<Device>,
    stream: sys::CUstream,
    owned: bool,
}

// SAFETY: the driver's functions on a stream may be called from any thread.
unsafe impl Send for Stream {}

impl Stream {
    /// A new stream, which does not wait for the default one.
    pub(crate) fn new(device: &Arc<Device>) -> Result<Self> {
        device.bind()?;
        let mut stream = std::ptr::null_mut();
        let flags = sys::CUstream_flags::CU_STREAM_NON_BLOCKING as u32;
        // SAFETY: writes one handle, destroyed in `drop`.
        check(unsafe { sys::cuStreamCreate(&mut stream, flags) }, || "making a stream".into(), "")?;
        Ok(Self { device: Arc::clone(device), stream, owned: true })
    }

    /// The caller's stream.
    pub(crate) fn borrowed(device: &Arc<Device>, stream: sys::CUstream) -> Self {
        Self { device: Arc::clone(device), stream, owned: false }
    }

    pub(crate) fn raw(&self) -> sys::CUstream {
        self.stream
    }

    /// Whether what is put into the stream is recorded in a CUDA graph instead of done.
    pub(crate) fn is_capturing(&self) -> Result<bool> {
        self.device.bind()?;
        let mut status = sys::CUstreamCaptureStatus::CU_STREAM_CAPTURE_STATUS_NONE;
        // SAFETY: the stream lives; writes one number.
        let answer = unsafe { sys::cuStreamIsCapturing(self.stream, &mut status) };
        // The default stream, while another one captures: it cannot be captured itself.
        if answer == sys::CUresult::CUDA_ERROR_STREAM_CAPTURE_IMPLICIT {
            return Ok(false);
        }
        check(answer, || "asking whether a stream is captured".into(), "")?;
        Ok(status != sys::CUstreamCaptureStatus::CU_STREAM_CAPTURE_STATUS_NONE)
    }

    /// What is put in from now on waits for the event.
    pub(crate) fn wait(&self, event: &Event) -> Result<()> {
        self.device.bind()?;
        // SAFETY: both live.
        let answer = unsafe { sys::cuStreamWaitEvent(self.stream, event.event, 0) };
        check(answer, || "ordering two streams".into(), "")
    }

    /// Waits until all work so far is done.
    pub(crate) fn synchronize(&self) -> Result<()> {
        self.device.bind()?;
        // SAFETY: the stream lives.
        check(
            unsafe { sys::cuStreamSynchronize(self.stream) },
            || format!("waiting for GPU {}", self.device.ordinal),
            "an earlier kernel failed; compute-sanitizer says which access",
        )
    }

    /// Copies to the GPU, in order; the bytes may go when this returns.
    pub(crate) fn upload(&self, bytes: &[u8], to: DeviceAddress) -> Result<()> {
        if bytes.is_empty() {
            return Ok(());
        }
        self.device.bind()?;
        // SAFETY: `to` has room by the caller's checks. From pageable memory the driver copies before it returns.
        let answer =
            unsafe { sys::cuMemcpyHtoDAsync_v2(to, bytes.as_ptr().cast(), bytes.len(), self.stream) };
        check(answer, || format!("copying {} bytes to GPU {}", bytes.len(), self.device.ordinal), "")
    }

    /// Copies from the GPU and waits for it.
    pub(crate) fn download(&self, from: DeviceAddress, bytes: &mut [u8]) -> Result<()> {
        if bytes.is_empty() {
            return Ok(());
        }
        // Copies to the host share queues of the GPU: one that stands behind a kernel holds up those of other
        // streams, also those of ranks that the kernel waits for.
        self.synchronize()?;
        // SAFETY: `from` has the bytes by the caller's checks; they are there when the stream was waited for.
        let answer =
            unsafe { sys::cuMemcpyDtoHAsync_v2(bytes.as_mut_ptr().cast(), from, bytes.len(), self.stream) };
        check(answer, || format!("copying {} bytes from GPU {}", bytes.len(), self.device.ordinal), "")?;
        self.synchronize()
    }

    /// Copies inside the GPU, in order.
    pub(crate) fn copy(&self, from: DeviceAddress, to: DeviceAddress, bytes: usize) -> Result<()> {
        if bytes == 0 {
            return Ok(());
        }
        self.device.bind()?;
        // SAFETY: both ranges are inside allocations by the caller's checks.
        let answer = unsafe { sys::cuMemcpyDtoDAsync_v2(to, from, bytes, self.stream) };
        check(answer, || format!("copying {bytes} bytes on GPU {}", self.device.ordinal), "")
    }

    /// Fills with zeros, in order.
    pub(crate) fn zero(&self, to: DeviceAddress, bytes: usize) -> Result<()> {
        if bytes == 0 {
            return Ok(());
        }
        self.device.bind()?;
        // SAFETY: the range is inside an allocation by the caller's checks.
        let answer = unsafe { sys::cuMemsetD8Async(to, 0, bytes, self.stream) };
        check(answer, || format!("clearing {bytes} bytes on GPU {}", self.device.ordinal), "")
    }
}

impl Drop for Stream {
    fn drop(&mut self) {
        if self.owned && self.device.bind().is_ok() {
            // SAFETY: made in `new`, and nobody else has it. The driver finishes its work first.
            let _ = unsafe { sys::cuStreamDestroy_v2(self.stream) };
        }
    }
}

/// A point in a stream's work, for timing.
#[derive(Debug)]
pub struct Event {
    device: Arc<Device>,
    event: sys::CUevent,
}

// SAFETY: the driver's functions on an event may be called from any thread.
unsafe impl Send for Event {}

impl Event {
    pub(crate) fn new(device: &Arc<Device>) -> Result<Self> {
        device.bind()?;
        let mut event = std::ptr::null_mut();
        // SAFETY: writes one handle, destroyed in `drop`.
        check(unsafe { sys::cuEventCreate(&mut event, 0) }, || "making an event".into(), "")?;
        Ok(Self { device: Arc::clone(device), event })
    }

    pub(crate) fn record(&self, stream: &Stream) -> Result<()> {
        self.device.bind()?;
        // SAFETY: both live, on the same GPU.
        check(unsafe { sys::cuEventRecord(self.event, stream.stream) }, || "recording an event".into(), "")
    }

    /// Time from an earlier event to this one; both must be over.
    pub fn since(&self, earlier: &Self) -> Result<Duration> {
        self.device.bind()?;
        let mut milliseconds = 0.0f32;
        // SAFETY: both were recorded; writes one number.
        let answer = unsafe { sys::cuEventElapsedTime(&mut milliseconds, earlier.event, self.event) };
        check(answer, || "reading a time".into(), "")?;
        Ok(Duration::from_secs_f64(f64::from(milliseconds) / 1e3))
    }
}

impl Drop for Event {
    fn drop(&mut self) {
        if self.device.bind().is_ok() {
            // SAFETY: made in `new`, and nobody else has it.
            let _ = unsafe { sys::cuEventDestroy_v2(self.event) };
        }
    }
}
