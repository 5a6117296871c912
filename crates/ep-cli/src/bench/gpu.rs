//! Timing and looking at ranks on GPUs.

use std::borrow::Cow;
use std::time::{Duration, SystemTime};

use ep::{Backend as _, DispatchMode};
use ep_cuda::{CudaBuffer, CudaHandle, CudaMemory, DeviceReport, DeviceRouting, Event, Indices};
use serde::{Deserialize, Serialize};

use crate::bench::inspect::{Inspect, TopK};

/// A GPU pauses for this long before the first event, at least: so long that all launches of an operator are queued
/// when it starts, and none is waited for inside the measured time.
const LEAST_PAUSE: Duration = Duration::from_micros(100);
/// And at most: clocks of different machines may differ, and the pause is no place to find that out.
const MOST_PAUSE: Duration = Duration::from_millis(2);

/// A rank's GPU, and what the rank takes of it.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub(super) struct Gpu {
    pub(super) name: String,
    pub(super) pci_bus_id: String,
    /// SMs that dispatch and combine ran on.
    pub(super) sms: u32,
    pub(super) registered_bytes: u64,
}

/// A router's lists on the GPU.
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

    /// The GPU pauses until the moment at which all GPUs are to start: ranks leave a barrier one after the other, and
    /// what an operator waits for the last of them is no time of the operator.
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

    fn gpu_report(&self) -> ep::Result<Option<Gpu>> {
        let ep_cuda::bench::Gpu { name, pci_bus_id } = self.gpu()?;
        let registered_bytes = self.registered_bytes() as u64;
        Ok(Some(Gpu { name, pci_bus_id, sms: self.sms(), registered_bytes }))
    }
}

/// Whether several ranks run on one of these GPUs; by rank.
pub(super) fn shared(gpus: &[Gpu]) -> bool {
    let mut ids: Vec<&str> = gpus.iter().map(|gpu| gpu.pci_bus_id.as_str()).collect();
    ids.sort_unstable();
    ids.windows(2).any(|pair| pair[0] == pair[1])
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn gpus_are_told_apart_by_their_place() {
        let gpu = |id: &str| Gpu { name: "G".into(), pci_bus_id: id.into(), sms: 1, registered_bytes: 2 };
        assert!(!shared(&[]) && !shared(&[gpu("a")]) && !shared(&[gpu("a"), gpu("c"), gpu("b")]));
        assert!(shared(&[gpu("a"), gpu("b"), gpu("a")]));
    }
}
