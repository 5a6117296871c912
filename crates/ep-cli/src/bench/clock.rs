//! What a benchmark needs of a backend besides [`ep::Backend`]: a clock, and the GPU that a rank runs on.

use std::time::{Duration, Instant, SystemTime};

use ep::{Backend as _, WeightRows};
use ep_host::HostBuffer;

use crate::bench::gpu::RankGpu;

/// A backend that can be timed.
pub(super) trait Timed: WeightRows + Send + Sized + 'static {
    /// The start of a timed interval.
    type Clock;

    /// Starts the clock: at `together` if the backend can delay its work until then, else now.
    fn start(&mut self, together: SystemTime) -> ep::Result<Self::Clock>;

    /// The time from the start of the clock until all work since then is complete.
    fn stop(&mut self, clock: Self::Clock) -> ep::Result<Duration>;

    /// The GPU that the rank runs on.
    fn gpu_report(&self) -> ep::Result<Option<RankGpu>>;
}

impl Timed for HostBuffer {
    type Clock = Instant;

    fn start(&mut self, _together: SystemTime) -> ep::Result<Instant> {
        Ok(Instant::now())
    }

    fn stop(&mut self, clock: Instant) -> ep::Result<Duration> {
        self.synchronize()?;
        Ok(clock.elapsed())
    }

    fn gpu_report(&self) -> ep::Result<Option<RankGpu>> {
        Ok(None)
    }
}
