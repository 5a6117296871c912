//! Where the time of a step goes.

use serde::{Deserialize, Serialize};

use super::price::{StepPrice, link_load};
use crate::units::Seconds;

/// The time of a step, divided into parts that do not overlap. Their sum is [`StepPrice::step_time`].
#[derive(Debug, Clone, Copy, PartialEq, Serialize, Deserialize)]
pub struct StepParts {
    /// Compute of a GPU, as the mean over all GPUs.
    pub compute: Seconds,
    /// The rest of the time that the stages need for their micro-batches: exchanges of tokens and experts and of tensor
    /// parallelism that compute does not hide, and GPUs that wait for those with more work.
    pub exchanges: Seconds,
    /// Stages wait for a link between stages, which sends longer per micro-batch than a stage takes.
    pub stage_links: Seconds,
    /// Start and end of the pipeline: the first micro-batch arrives at the later stages, and its gradients return.
    pub fill: Seconds,
    /// The exchanges that make replicas of parameters equal again.
    pub replicas: Seconds,
}

impl StepPrice {
    /// Where the time of the step goes.
    pub fn parts(&self) -> StepParts {
        let slowest = self.boundaries.iter().map(|at| link_load(&self.boundaries, at));
        let slowest = slowest.fold(self.stage_time, Seconds::max);
        let after_the_first = (self.micro_batches - 1) as f64;
        let stage_links = Seconds((slowest.0 - self.stage_time.0) * after_the_first);
        let stages = self.stage_time * self.micro_batches as f64;
        let compute = self.step_time * (1.0 - self.idle_share);
        StepParts {
            compute,
            exchanges: Seconds(stages.0 - compute.0),
            stage_links,
            fill: Seconds(self.passes.0 - stages.0 - stage_links.0),
            replicas: self.dense_sync + self.expert_sync,
        }
    }
}
