//! The results of a simulation: times by phase, and traffic by level and link.

use serde::{Deserialize, Serialize};

use super::timeline::Timeline;
use crate::units::{Bytes, Seconds};

/// A phase of a layer.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash, PartialOrd, Ord, Serialize, Deserialize)]
#[serde(rename_all = "kebab-case")]
pub enum Phase {
    /// Compute before the routed experts.
    PreExpert,
    /// All-gather of experts.
    AllGather,
    /// Dispatch: tokens to the experts.
    Dispatch,
    /// Decoding of gathered experts, and of gradients if they are compressed.
    Decode,
    /// Expert compute.
    Expert,
    /// Encoding of own experts, and of gradients if they are compressed.
    Encode,
    /// Combine: expert outputs back to the tokens' GPUs.
    Combine,
    /// Reduction of the gradients of gathered experts to their owners.
    Gradients,
    /// Refresh of the codec's shared expert.
    SharedRefresh,
}

impl Phase {
    /// Every phase, in the order of a layer.
    pub const ALL: [Self; 9] = [
        Self::PreExpert,
        Self::AllGather,
        Self::Dispatch,
        Self::Decode,
        Self::Expert,
        Self::Encode,
        Self::Combine,
        Self::Gradients,
        Self::SharedRefresh,
    ];

    /// The name of the phase in reports and timelines.
    pub fn name(self) -> &'static str {
        match self {
            Self::PreExpert => "pre-expert",
            Self::AllGather => "all-gather",
            Self::Dispatch => "dispatch",
            Self::Decode => "decode",
            Self::Expert => "expert",
            Self::Encode => "encode",
            Self::Combine => "combine",
            Self::Gradients => "gradients",
            Self::SharedRefresh => "shared-refresh",
        }
    }

    /// Whether the phase occupies the compute stream of a GPU. The other phases occupy links.
    pub fn computes(self) -> bool {
        matches!(self, Self::PreExpert | Self::Decode | Self::Expert | Self::Encode)
    }
}

/// The results of one simulated step.
#[derive(Debug, Clone, PartialEq, Serialize)]
pub struct Outcome {
    /// Time from the start of the step to the end of its last computation or transfer, over all simulated layers and
    /// micro-batches.
    pub step_seconds: Seconds,
    /// `step_seconds` divided by the simulated layers and micro-batches. It corresponds to the planner's `layer_time`.
    pub layer_seconds: Seconds,
    /// Simulated layers.
    pub layers: usize,
    /// Simulated micro-batches.
    pub micro_batches: usize,
    /// Busy time of each phase that occurs. Phases overlap, so the times do not add up to the step.
    pub phases: Vec<PhaseTime>,
    /// Idle time of the compute stream, as the mean over all GPUs: the transfer time that overlap did not hide.
    pub compute_idle_seconds: Seconds,
    /// Traffic of each level, outermost first.
    pub levels: Vec<LevelOutcome>,
    /// Traffic of each link. Equal links have one common entry.
    pub links: Vec<LinkOutcome>,
    /// Processed events.
    pub events: u64,
    /// Simulated flows.
    pub flows: u64,
    /// Messages between pairs of GPUs that the flows represent.
    pub messages: f64,
    /// Number of separately simulated GPUs. It is smaller than the number of GPUs of the cluster if some GPUs are equal.
    pub simulated_gpus: usize,
    /// The timeline, if [`Record`](super::Record) named any GPU.
    pub timeline: Option<Timeline>,
}

impl Outcome {
    /// Busy time of a phase; zero if the phase does not occur.
    pub fn phase(&self, phase: Phase) -> PhaseTime {
        let none = PhaseTime { phase, mean_seconds: Seconds::ZERO, longest_seconds: Seconds::ZERO };
        self.phases.iter().copied().find(|time| time.phase == phase).unwrap_or(none)
    }
}

/// Busy time of a phase over the whole step: the time that it occupies its stream.
#[derive(Debug, Clone, Copy, PartialEq, Serialize, Deserialize)]
pub struct PhaseTime {
    /// The phase.
    pub phase: Phase,
    /// Mean of the busy time over all GPUs.
    pub mean_seconds: Seconds,
    /// Maximum of the busy time over all GPUs.
    pub longest_seconds: Seconds,
}

/// The traffic of one level.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
pub struct LevelOutcome {
    /// Name of the level in the cluster.
    pub name: String,
    /// Number of links in each direction.
    pub links: usize,
    /// Bytes that all GPUs together sent over the level. The same number of bytes arrived.
    pub bytes: Bytes,
    /// Messages between pairs of GPUs.
    pub messages: f64,
    /// Utilisation of the uplinks (bytes over the bytes that a link can carry during the step), as the mean over them.
    pub mean_utilisation: f64,
    /// Utilisation of the uplink with the highest utilisation.
    pub peak_utilisation: f64,
}

/// A direction of a link.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "kebab-case")]
pub enum Direction {
    /// From the GPUs of the link.
    Up,
    /// To the GPUs of the link. Downlinks are listed only where they can limit a flow: aggregated flows cross downlinks
    /// only if links differ.
    Down,
}

/// The traffic of one link, or of several equal links.
#[derive(Debug, Clone, Copy, PartialEq, Serialize, Deserialize)]
pub struct LinkOutcome {
    /// Level of the link, numbered from 0, outermost first.
    pub level: usize,
    /// Direction of the traffic.
    pub direction: Direction,
    /// Number of the link on its level. If the entry represents several links, the number of one of them.
    pub link: usize,
    /// Number of equal links that this entry represents.
    pub alike: usize,
    /// Bytes that one link carried: its rate, integrated over time.
    pub bytes: Bytes,
    /// Time during which the link carried any flow.
    pub busy_seconds: Seconds,
    /// Bytes over the bytes that the link can carry during the step, from 0 to 1.
    pub utilisation: f64,
}
