//! What a benchmark needs of a backend besides the operators: routings from a router's lists, a clock, and access to
//! memory.

use std::borrow::Cow;
use std::time::{Duration, Instant, SystemTime};

use ep::{Backend as _, DispatchMode, Routing};
use ep_host::{HostBuffer, HostMemory};

use crate::bench::gpu::RankGpu;
use crate::common::backend::Start;

/// A backend that can be timed, and whose memory a benchmark can fill and read.
pub(super) trait Inspect: Start {
    /// A router's lists in the form that preprocessing takes.
    type Routed;
    /// The start of a timed interval.
    type Clock;

    /// Converts a router's lists.
    fn route(&mut self, lists: &TopK) -> ep::Result<Self::Routed>;

    /// Like [`ep::Backend::preprocess`].
    fn preprocess_routed(
        &mut self,
        routed: &Self::Routed,
        mode: DispatchMode,
        capacity: Option<usize>,
    ) -> ep::Result<Self::Handle>;

    /// Starts the clock: at `together` if the backend can delay its work until then, else now.
    fn start(&mut self, together: SystemTime) -> ep::Result<Self::Clock>;

    /// The time from the start of the clock until all work since then is complete.
    fn stop(&mut self, clock: Self::Clock) -> ep::Result<Duration>;

    /// Reads the first `len` bytes.
    fn view<'m>(&mut self, memory: &'m Self::Memory, len: usize) -> ep::Result<Cow<'m, [u8]>>;

    /// Writes the first `len` bytes, which `write` must fill completely.
    fn fill(
        &mut self,
        memory: &mut Self::Memory,
        len: usize,
        write: impl FnOnce(&mut [u8]),
    ) -> ep::Result<()>;

    /// The GPU that the rank runs on.
    fn gpu_report(&self) -> ep::Result<Option<RankGpu>>;
}

impl Inspect for HostBuffer {
    type Routed = Routing;
    type Clock = Instant;

    fn route(&mut self, lists: &TopK) -> ep::Result<Routing> {
        let TopK { experts, k, indices, weights, .. } = lists;
        Routing::from_topk(self.rank(), *experts, *k, indices, weights)
    }

    fn preprocess_routed(
        &mut self,
        routed: &Routing,
        mode: DispatchMode,
        capacity: Option<usize>,
    ) -> ep::Result<Self::Handle> {
        self.preprocess(routed, mode, capacity)
    }

    fn start(&mut self, _together: SystemTime) -> ep::Result<Instant> {
        Ok(Instant::now())
    }

    fn stop(&mut self, clock: Instant) -> ep::Result<Duration> {
        self.synchronize()?;
        Ok(clock.elapsed())
    }

    fn view<'m>(&mut self, memory: &'m HostMemory, len: usize) -> ep::Result<Cow<'m, [u8]>> {
        Ok(Cow::Borrowed(&memory.as_bytes()[..len]))
    }

    fn fill(&mut self, memory: &mut HostMemory, len: usize, write: impl FnOnce(&mut [u8])) -> ep::Result<()> {
        write(&mut memory.as_bytes_mut()[..len]);
        Ok(())
    }

    fn gpu_report(&self) -> ep::Result<Option<RankGpu>> {
        Ok(None)
    }
}

/// A router's lists of shape `[tokens, k]`. Index -1 marks an unused entry.
#[derive(Debug)]
pub(super) struct TopK {
    pub(super) tokens: usize,
    pub(super) experts: usize,
    pub(super) k: usize,
    pub(super) indices: Vec<i32>,
    pub(super) weights: Vec<f32>,
}

impl TopK {
    /// The lists of this routing. Each row has its largest weight first, as routers give them.
    pub(super) fn of(routing: &Routing, k: usize) -> Self {
        let (tokens, experts) = (routing.tokens(), routing.experts());
        let cells = tokens * k;
        let (mut indices, mut weights) = (vec![-1; cells], vec![0.0; cells]);
        let mut row: Vec<(f32, u32)> = Vec::with_capacity(k);
        for token in 0..tokens {
            row.clear();
            row.extend(
                routing.weights_of(token).iter().copied().zip(routing.experts_of(token).iter().copied()),
            );
            row.sort_unstable_by(|a, b| b.0.total_cmp(&a.0).then(a.1.cmp(&b.1)));
            for (at, &(weight, expert)) in (token * k..).zip(&row) {
                indices[at] = expert as i32;
                weights[at] = weight;
            }
        }
        Self { tokens, experts, k, indices, weights }
    }
}

#[cfg(test)]
mod tests {
    use ep::Rank;

    use super::*;

    #[test]
    fn lists_give_back_the_routing_they_were_made_from() {
        let weights = [0.1, 0.7, 0.0, 0.2, 0.5, 0.5];
        let routing = Routing::from_topk(Rank(0), 8, 3, &[7, 1, -1, 0, 3, 2], &weights).unwrap();
        let lists = TopK::of(&routing, 3);
        assert_eq!(lists.indices, [1, 7, -1, 2, 3, 0]);
        let again = Routing::from_topk(Rank(0), 8, lists.k, &lists.indices, &lists.weights).unwrap();
        assert_eq!(again, routing);
    }
}
