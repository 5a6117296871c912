//! The clock of the CUDA backend: events of the GPU.

use std::time::{Duration, SystemTime};

use ep::Backend as _;
use ep_cuda::{CudaBuffer, Event};

use crate::bench::clock::Timed;
use crate::bench::gpu::RankGpu;

/// Shortest pause of a GPU before the first event. All launches of an operator are queued during the pause, so that the
/// measured time contains no wait for a launch.
const LEAST_PAUSE: Duration = Duration::from_micros(100);
/// Longest pause: it bounds the wait if the clocks of the ranks differ.
const MOST_PAUSE: Duration = Duration::from_millis(2);

impl Timed for CudaBuffer {
    type Clock = Event;

    /// The GPU pauses until the common start. Ranks leave a barrier one after the other, and waiting for the last rank
    /// must not count as the operator's time.
    fn start(&mut self, together: SystemTime) -> ep::Result<Event> {
        let left = together.duration_since(SystemTime::now()).unwrap_or_default();
        self.spin(left.clamp(LEAST_PAUSE, MOST_PAUSE))?;
        self.mark()
    }

    fn stop(&mut self, clock: Event) -> ep::Result<Duration> {
        let end = self.mark()?;
        self.synchronize()?;
        end.since(&clock)
    }

    fn gpu_report(&self) -> ep::Result<Option<RankGpu>> {
        let ep_cuda::bench::Gpu { name, pci_bus_id } = self.gpu()?;
        let registered_bytes = self.registered_bytes() as u64;
        Ok(Some(RankGpu { name, pci_bus_id, sms: self.sms(), registered_bytes }))
    }
}
