//! What a benchmark needs of the CUDA backend: timing by GPU events, and memory access by copies.

use std::borrow::Cow;
use std::time::{Duration, SystemTime};

use ep::{Backend as _, DispatchMode};
use ep_cuda::{CudaBuffer, CudaHandle, CudaMemory, DeviceReport, DeviceRouting, Event, Indices};

use crate::bench::gpu::RankGpu;
use crate::bench::inspect::{Inspect, TopK};

/// Shortest pause of a GPU before the first event. All launches of an operator are queued during the pause, so that the
/// measured time contains no wait for a launch.
const LEAST_PAUSE: Duration = Duration::from_micros(100);
/// Longest pause: it bounds the wait if the clocks of the ranks differ.
const MOST_PAUSE: Duration = Duration::from_millis(2);

/// A router's lists in GPU memory.
#[derive(Debug)]
pub(super) struct DeviceLists {
    tokens: usize,
    k: usize,
    indices: CudaMemory,
    weights: CudaMemory,
}

impl Inspect for CudaBuffer {
    type Routed = DeviceLists;
    type Clock = Event;

    fn route(&mut self, lists: &TopK) -> ep::Result<DeviceLists> {
        let mut place = |bytes: Vec<u8>| -> ep::Result<CudaMemory> {
            let mut memory = self.alloc(bytes.len())?;
            self.upload(&bytes, &mut memory)?;
            Ok(memory)
        };
        Ok(DeviceLists {
            tokens: lists.tokens,
            k: lists.k,
            indices: place(lists.indices.iter().flat_map(|index| index.to_le_bytes()).collect())?,
            weights: place(lists.weights.iter().flat_map(|weight| weight.to_le_bytes()).collect())?,
        })
    }

    fn preprocess_routed(
        &mut self,
        routed: &DeviceLists,
        mode: DispatchMode,
        capacity: Option<usize>,
    ) -> ep::Result<CudaHandle> {
        let DeviceLists { tokens, k, indices, weights } = routed;
        let (tokens, k, indices) = (*tokens, *k, Indices::Narrow(indices));
        let routing = DeviceRouting::TopK { tokens, k, indices, weights: Some(weights) };
        self.preprocess_on_device(&routing, mode, capacity, DeviceReport::default())
    }

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

    fn view<'m>(&mut self, memory: &'m CudaMemory, len: usize) -> ep::Result<Cow<'m, [u8]>> {
        let mut bytes = vec![0; len];
        self.download(memory, &mut bytes)?;
        Ok(Cow::Owned(bytes))
    }

    fn fill(&mut self, memory: &mut CudaMemory, len: usize, write: impl FnOnce(&mut [u8])) -> ep::Result<()> {
        let mut bytes = vec![0; len];
        write(&mut bytes);
        self.upload(&bytes, memory)
    }

    fn gpu_report(&self) -> ep::Result<Option<RankGpu>> {
        let ep_cuda::bench::Gpu { name, pci_bus_id } = self.gpu()?;
        let registered_bytes = self.registered_bytes() as u64;
        Ok(Some(RankGpu { name, pci_bus_id, sms: self.sms(), registered_bytes }))
    }
}
