//! The price of one candidate: volumes to transfers, transfers and compute to phases, phases to a layer's time.

use serde::{Deserialize, Serialize};

use super::memory::{Memory, gathered_by};
use super::options::{Options, Setting};
use super::time::{PassTimes, decode_time, encode_time};
use super::volume::{
    Choice, TokenPath, Transfer, gathered_experts, refresh_bytes, token_messages, token_rows,
};
use crate::cluster::{Cluster, Level};
use crate::domain::Partition;
use crate::error::Result;
use crate::model::Model;
use crate::units::{Bytes, Seconds};

/// A choice of domain sizes, and what it costs. Times and bytes are those of one layer and one micro-batch.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
pub struct Candidate {
    /// `S_l`, outermost level first.
    pub domain_sizes: Vec<usize>,
    /// Whether gathered experts stay for the whole step.
    pub replicas_kept: bool,
    /// Forward.
    pub forward: PassTimes,
    /// Backward, when training.
    pub backward: Option<PassTimes>,
    /// Forward and backward.
    pub layer_time: Seconds,
    /// Memory of one GPU.
    pub memory: Memory,
    /// What crosses each level, outermost first.
    pub levels: Vec<LevelTraffic>,
}

/// What crosses the links of one level.
#[derive(Debug, Clone, Copy, PartialEq, Serialize, Deserialize)]
pub struct LevelTraffic {
    /// `S_l`.
    pub domain_size: usize,
    /// `SF_l / S_l`.
    pub domains: usize,
    /// `h_l`: how many times its even share the busiest group gets.
    pub hot_factor: f64,
    /// Rows that the busiest GPU receives in dispatch, per token.
    pub rows_per_token: f64,
    /// One gather of the domain's experts.
    pub all_gather: Transfer,
    /// One dispatch and one combine.
    pub all_to_all: Transfer,
    /// One reduction of gathered experts' gradients.
    pub gradients: Transfer,
    /// One refresh of the codec's shared expert.
    pub shared_refresh: Transfer,
    /// Everything that a link carries, each of the above as often as it happens.
    pub bytes_per_link: Bytes,
}

impl Candidate {
    /// GPUs of one expert domain: `ΠS`.
    pub fn expert_domain_size(&self) -> usize {
        self.domain_sizes.iter().product()
    }
}

/// Domain sizes with what does not depend on how fast links are.
#[derive(Debug, Clone)]
pub(crate) struct Shape {
    pub(crate) domain_sizes: Vec<usize>,
    domains: Vec<usize>,
    hot: Vec<f64>,
}

impl Shape {
    pub(crate) fn new(
        scaling_factors: &[usize],
        domain_sizes: Vec<usize>,
        model: &Model,
        options: &Options,
    ) -> Result<Self> {
        let partition = Partition::new(scaling_factors, &domain_sizes)?;
        let hot = match options.setting {
            Setting::Paper => vec![1.0; scaling_factors.len()],
            Setting::Full => model.shares().hot_factors(&partition, options.placement)?,
        };
        Ok(Self { domains: partition.domains(), hot, domain_sizes })
    }
}

/// Everything that a price depends on, beside the candidate.
#[derive(Debug, Clone, Copy)]
pub(crate) struct CostModel<'a> {
    pub(crate) cluster: &'a Cluster,
    pub(crate) model: &'a Model,
    pub(crate) options: &'a Options,
    pub(crate) path: TokenPath,
    pub(crate) experts_per_gpu: usize,
    /// Before anything is gathered.
    pub(crate) memory: Memory,
}

impl CostModel<'_> {
    pub(crate) fn price(&self, shape: &Shape, kept: bool) -> Candidate {
        let levels: Vec<LevelTraffic> =
            (0..shape.domain_sizes.len()).map(|level| self.traffic(shape, level, kept)).collect();
        let gathered = self.gathered_per_layer(shape);
        let forward = self.forward(shape, &levels, kept);
        let backward = self.options.trains().then(|| self.backward(shape, &levels, kept));
        Candidate {
            domain_sizes: shape.domain_sizes.clone(),
            replicas_kept: kept,
            forward,
            backward,
            layer_time: forward.total + backward.map_or(Seconds::ZERO, |pass| pass.total),
            memory: Memory {
                gathered_experts: gathered_by(self.model, self.options, gathered, kept),
                ..self.memory
            },
            levels,
        }
    }

    /// The first micro-batch of kept replicas gathers; otherwise each does.
    fn forward(&self, shape: &Shape, levels: &[LevelTraffic], kept: bool) -> PassTimes {
        let chunks = self.options.overlap_chunks;
        let bare = PassTimes {
            pre_expert: self.pre_expert_time(),
            all_to_all: levels.iter().map(|level| level.all_to_all.time).sum(),
            expert: self.expert_time(shape),
            ..PassTimes::default()
        };
        let gathering = self.with_gather(shape, levels, bare).overlapped(chunks);
        let heavy = if kept { 1 } else { self.options.micro_batches };
        gathering.mean(heavy, bare.overlapped(chunks), self.options.micro_batches - heavy)
    }

    /// Twice the compute; experts gathered again unless they were kept; the last micro-batch encodes for the next
    /// step and refreshes the shared expert; gradients are reduced by every micro-batch, or, when replicas are
    /// kept, by the last.
    fn backward(&self, shape: &Shape, levels: &[LevelTraffic], kept: bool) -> PassTimes {
        let chunks = self.options.overlap_chunks;
        let memory = self.cluster.hbm_bandwidth();
        let own = self.model.expert_bytes() * self.experts_per_gpu as f64;
        let bare = PassTimes {
            pre_expert: self.pre_expert_time() * 2.0,
            all_to_all: levels.iter().map(|level| level.all_to_all.time).sum(),
            expert: self.expert_time(shape) * 2.0,
            ..PassTimes::default()
        };
        let gathered = if kept { bare } else { self.with_gather(shape, levels, bare) };
        let reduced = self.with_gradients(shape, levels, gathered);
        let mut last = reduced;
        if self.codec_runs(shape) {
            last.encode += encode_time(own, memory);
            last.shared_refresh = levels.iter().map(|level| level.shared_refresh.time).sum::<Seconds>()
                / self.options.shared_refresh_steps as f64;
        }
        let other = if kept { gathered } else { reduced };
        last.overlapped(chunks).mean(1, other.overlapped(chunks), self.options.micro_batches - 1)
    }

    fn with_gather(&self, shape: &Shape, levels: &[LevelTraffic], pass: PassTimes) -> PassTimes {
        let gathered = self.model.expert_bytes() * self.gathered_per_layer(shape);
        let decode = match self.codec_runs(shape) {
            true => decode_time(gathered, self.cluster.hbm_bandwidth()),
            false => Seconds::ZERO,
        };
        let all_gather = levels.iter().map(|level| level.all_gather.time).sum();
        PassTimes { all_gather, decode: pass.decode + decode, ..pass }
    }

    fn with_gradients(&self, shape: &Shape, levels: &[LevelTraffic], pass: PassTimes) -> PassTimes {
        let memory = self.cluster.hbm_bandwidth();
        let gathered = self.model.gradient_bytes() * self.gathered_per_layer(shape);
        let compressed = self.options.gradient_compression > 1.0;
        let codec = |time: Seconds| if compressed { time } else { Seconds::ZERO };
        PassTimes {
            gradients: levels.iter().map(|level| level.gradients.time).sum(),
            encode: pass.encode + codec(encode_time(gathered, memory)),
            decode: pass.decode + codec(decode_time(gathered, memory)),
            ..pass
        }
    }

    fn traffic(&self, shape: &Shape, index: usize, kept: bool) -> LevelTraffic {
        let level = &self.level(index);
        let sizes = &shape.domain_sizes;
        let description = self.model.description();
        let choice = Choice { experts: description.experts, topk: description.topk };
        let rows_per_token = token_rows(self.path, &shape.domains, index, choice, shape.hot[index]);
        let rows = self.model.tokens() * rows_per_token;

        let others = sizes[index] - 1;
        let experts = gathered_experts(self.experts_per_gpu, sizes, index);
        let weights = self.model.expert_bytes() * (experts / self.options.weight_compression);
        let gradients = self.model.gradient_bytes() * (experts / self.options.gradient_compression);
        let all_gather = Transfer::new(level, others, weights, 1);
        let gradients = match self.options.trains() {
            true => Transfer::new(level, others, gradients, 1),
            false => Transfer::default(),
        };
        let messages = token_messages(self.path, &shape.domains, index);
        let dispatch = Transfer::new(level, messages, self.model.dispatch_row_bytes() * rows, 1);
        let combine = Transfer::new(level, messages, self.model.combine_row_bytes() * rows, 1);
        let all_to_all = dispatch.then(combine);
        let shared_refresh = match self.options.trains() && self.codec_runs(shape) {
            true => {
                let bytes = refresh_bytes(self.model.expert_bytes(), &self.cluster.scaling_factors(), index);
                Transfer::new(level, 2 * (level.scaling_factor - 1), bytes, 2)
            }
            false => Transfer::default(),
        };

        let often = Frequencies::new(self.options, kept);
        LevelTraffic {
            domain_size: sizes[index],
            domains: shape.domains[index],
            hot_factor: shape.hot[index],
            rows_per_token,
            all_gather,
            all_to_all,
            gradients,
            shared_refresh,
            bytes_per_link: all_gather.bytes_per_link * often.gathers
                + all_to_all.bytes_per_link * often.passes
                + gradients.bytes_per_link * often.reductions
                + shared_refresh.bytes_per_link * often.refreshes,
        }
    }

    /// The level as the setting sees it: the paper's links have a bandwidth and nothing else.
    fn level(&self, index: usize) -> Level {
        let level = self.cluster.levels()[index];
        match self.options.setting {
            Setting::Paper => Level { alpha: Seconds::ZERO, round_trip: Seconds::ZERO, ..level },
            Setting::Full => level,
        }
    }

    pub(crate) fn pre_expert_time(&self) -> Seconds {
        self.model.pre_expert_flop() / self.cluster.sustained()
    }

    /// The busiest GPU's; none under the paper's model, where it hides behind the transfers.
    fn expert_time(&self, shape: &Shape) -> Seconds {
        let busiest = shape.hot.last().copied().unwrap_or(1.0);
        match self.options.setting {
            Setting::Paper => Seconds::ZERO,
            Setting::Full => self.model.expert_flop() / self.cluster.sustained() * busiest,
        }
    }

    /// Experts of others that a GPU holds per layer after the gathers: `n (ΠS − 1)`.
    fn gathered_per_layer(&self, shape: &Shape) -> f64 {
        (self.experts_per_gpu * (shape.domain_sizes.iter().product::<usize>() - 1)) as f64
    }

    fn codec_runs(&self, shape: &Shape) -> bool {
        self.options.setting == Setting::Full
            && self.options.codec()
            && shape.domain_sizes.iter().any(|&size| size > 1)
    }
}

/// How often a transfer happens, per micro-batch.
#[derive(Debug, Clone, Copy)]
pub(crate) struct Frequencies {
    /// Forward, and backward when training.
    pub(crate) passes: f64,
    /// Every pass, or once per step when replicas are kept.
    pub(crate) gathers: f64,
    /// Every micro-batch, or once per step when replicas are kept; never without training.
    pub(crate) reductions: f64,
    /// Once in so many steps; never without training.
    pub(crate) refreshes: f64,
}

impl Frequencies {
    pub(crate) fn new(options: &Options, kept: bool) -> Self {
        let micro_batches = options.micro_batches as f64;
        let training = if options.trains() { 1.0 } else { 0.0 };
        let passes = 1.0 + training;
        Self {
            passes,
            gathers: if kept { 1.0 / micro_batches } else { passes },
            reductions: if kept { training / micro_batches } else { training },
            refreshes: training / (micro_batches * options.shared_refresh_steps as f64),
        }
    }
}
