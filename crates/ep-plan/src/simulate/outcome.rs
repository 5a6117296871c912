//! What a simulated step took, and what crossed which link.

use serde::{Deserialize, Serialize};

use super::timeline::Timeline;
use crate::units::{Bytes, Seconds};

/// Where a GPU's time goes.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash, PartialOrd, Ord, Serialize, Deserialize)]
#[serde(rename_all = "kebab-case")]
pub enum Phase {
    /// Compute before the routed experts.
    PreExpert,
    /// Experts gathered.
    AllGather,
    /// Tokens to the experts.
    Dispatch,
    /// Gathered experts (and gradients, where they are compressed) decoded.
    Decode,
    /// The experts.
    Expert,
    /// Own experts (and gradients, where they are compressed) encoded.
    Encode,
    /// Tokens back.
    Combine,
    /// Gradients of gathered experts, back to their owners.
    Gradients,
    /// The codec's shared expert made anew.
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

    /// The name that reports and timelines use.
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

    /// Whether it keeps a GPU's compute stream busy; otherwise it keeps links busy.
    pub fn computes(self) -> bool {
        matches!(self, Self::PreExpert | Self::Decode | Self::Expert | Self::Encode)
    }
}

/// A simulated step.
#[derive(Debug, Clone, PartialEq, Serialize)]
pub struct Outcome {
    /// From the start to the end of the last computation or transfer, all simulated layers and micro-batches.
    pub step_seconds: Seconds,
    /// `step_seconds` over the simulated layers and micro-batches: compares with a candidate's `layer_time`.
    pub layer_seconds: Seconds,
    /// Layers that were simulated.
    pub layers: usize,
    /// Micro-batches that were simulated.
    pub micro_batches: usize,
    /// Busy time of each phase that occurs. Phases overlap, so these do not add up to the step.
    pub phases: Vec<PhaseTime>,
    /// Time that a GPU's compute stream waits, mean over all GPUs: what overlap did not hide.
    pub compute_idle_seconds: Seconds,
    /// What crossed each level, outermost first.
    pub levels: Vec<LevelOutcome>,
    /// What each link carried. Links that nothing tells apart have one entry.
    pub links: Vec<LinkOutcome>,
    /// Events processed.
    pub events: u64,
    /// Flows simulated.
    pub flows: u64,
    /// Messages between pairs of GPUs that these flows stand for.
    pub messages: f64,
    /// GPUs simulated: fewer than there are, where nothing tells some apart.
    pub simulated_gpus: usize,
    /// What was recorded, if anything was asked for.
    pub timeline: Option<Timeline>,
}

impl Outcome {
    /// Busy time of a phase; zero where it does not occur.
    pub fn phase(&self, phase: Phase) -> PhaseTime {
        let none = PhaseTime { phase, mean_seconds: Seconds::ZERO, longest_seconds: Seconds::ZERO };
        self.phases.iter().copied().find(|time| time.phase == phase).unwrap_or(none)
    }
}

/// Busy time of a phase over the whole step: computing, or occupying the stream that sends.
#[derive(Debug, Clone, Copy, PartialEq, Serialize, Deserialize)]
pub struct PhaseTime {
    /// Which one.
    pub phase: Phase,
    /// Mean over all GPUs.
    pub mean_seconds: Seconds,
    /// Of the GPU that was busy with it longest.
    pub longest_seconds: Seconds,
}

/// What crossed the links of one level.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
pub struct LevelOutcome {
    /// Its name in the cluster.
    pub name: String,
    /// Links in each direction.
    pub links: usize,
    /// Bytes that all GPUs sent over it. As many arrived.
    pub bytes: Bytes,
    /// Messages between pairs of GPUs.
    pub messages: f64,
    /// Bytes over what the uplinks could have carried in the step: mean over all links.
    pub mean_utilisation: f64,
    /// The same of the link that carried most.
    pub peak_utilisation: f64,
}

/// A direction of a link.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "kebab-case")]
pub enum Direction {
    /// From its GPUs.
    Up,
    /// To its GPUs. Listed only where it can limit a flow: aggregated flows meet no downlink unless links differ.
    Down,
}

/// What one link (or several alike) carried.
#[derive(Debug, Clone, Copy, PartialEq, Serialize, Deserialize)]
pub struct LinkOutcome {
    /// Its level, counted from the outermost.
    pub level: usize,
    /// Which way.
    pub direction: Direction,
    /// Its number on the level; of several alike, that of one of them.
    pub link: usize,
    /// How many links this entry stands for.
    pub alike: usize,
    /// Bytes that one of them carried: its rate summed over time.
    pub bytes: Bytes,
    /// Time during which something crossed it.
    pub busy_seconds: Seconds,
    /// Bytes over what it could have carried in the step.
    pub utilisation: f64,
}
