//! The computations and exchanges of one layer, by the planner's formulas. The order in which they overlap is not
//! decided here but in [`program`](super::program).

use super::options::{MessageStart, Scheme, SimulationOptions};
use super::world::Family;
use crate::cluster::{Cluster, Level};
use crate::domain::Partition;
use crate::error::Result;
use crate::model::Model;
use crate::planner::{
    Choice, Options, Planner, Replicas, Setting, TokenPath, gathered_experts, refresh_bytes, spread,
    token_messages, token_rows,
};
use crate::stream_model::StreamModel;
use crate::units::{Bytes, Seconds};

/// One exchange of every GPU with its peers at one level.
#[derive(Debug, Clone, Copy, PartialEq)]
pub(crate) struct Exchange {
    pub(crate) level: usize,
    /// The rule by which GPUs form groups.
    pub(crate) family: Family,
    /// Number of GPUs that a GPU sends to.
    pub(crate) peers: usize,
    /// Messages that a GPU sends. The number is fractional where a message is counted once for several chunks or steps.
    pub(crate) messages: f64,
    /// Bytes that a GPU sends, to all peers together.
    pub(crate) bytes: f64,
    /// Seconds that a GPU spends to start its messages.
    pub(crate) start: f64,
    /// Seconds from the end of sending to the last acknowledgement.
    pub(crate) round_trip: f64,
}

/// The computations (seconds of the forward pass) and exchanges of one layer. Lists are in the order in which they run.
#[derive(Debug, Clone, Default, PartialEq)]
pub(crate) struct LayerWork {
    pub(crate) pre_expert: f64,
    pub(crate) expert: f64,
    pub(crate) decode: f64,
    pub(crate) encode: f64,
    /// Encoding and decoding of compressed gradients; 0 for uncompressed gradients.
    pub(crate) gradient_encode: f64,
    pub(crate) gradient_decode: f64,
    pub(crate) gather: Vec<Exchange>,
    pub(crate) dispatch: Vec<Exchange>,
    pub(crate) combine: Vec<Exchange>,
    pub(crate) gradients: Vec<Exchange>,
    pub(crate) refresh: Vec<Exchange>,
}

/// The work of one step: a layer, and the number of times that it runs.
#[derive(Debug, Clone, PartialEq)]
pub(crate) struct StepWork {
    pub(crate) layer: LayerWork,
    pub(crate) domain_sizes: Vec<usize>,
    pub(crate) layers: usize,
    pub(crate) micro_batches: usize,
    pub(crate) chunks: usize,
    pub(crate) live_layers: usize,
    pub(crate) trains: bool,
    /// Whether gathered experts stay in memory for the whole step.
    pub(crate) replicas_kept: bool,
}

impl StepWork {
    /// The work of a step of the model on the cluster, under a scheme.
    pub(crate) fn new(
        cluster: &Cluster,
        model: &Model,
        options: &SimulationOptions,
        scheme: &Scheme,
    ) -> Result<Self> {
        let planner = &options.planner;
        let model = &spread(model, cluster)?;
        let scaling_factors = cluster.scaling_factors();
        let domain_sizes = scheme.domain_sizes(scaling_factors.len());
        let partition = Partition::new(&scaling_factors, &domain_sizes)?;
        let hot = match planner.setting {
            Setting::Paper => vec![1.0; scaling_factors.len()],
            Setting::Full => model.shares().hot_factors(&partition, planner.placement_of(model))?,
        };
        let path = match (scheme, planner.setting) {
            (Scheme::Plain, _) => TokenPath::Direct,
            (_, Setting::Full) => TokenPath::Deduplicated,
            (_, Setting::Paper) => TokenPath::Forwarded,
        };
        let replicas_kept = match planner.replicas {
            Replicas::Keep => true,
            Replicas::Regather => false,
            Replicas::Best => {
                Planner::new(cluster.clone(), model.clone(), planner.clone())?
                    .evaluate(&domain_sizes)?
                    .replicas_kept
            }
        };
        let domains = partition.domains();
        let formulas = Formulas { cluster, model, planner, path, domain_sizes: &domain_sizes, domains, hot };
        Ok(Self {
            layer: formulas.layer(options.message_start),
            layers: options.layers.unwrap_or(planner.layers_per_gpu(model.description().moe_layers)),
            micro_batches: planner.micro_batches,
            chunks: planner.overlap_chunks,
            live_layers: planner.live_layers,
            trains: planner.trains(),
            replicas_kept,
            domain_sizes,
        })
    }

    /// Largest number of computations and exchanges of a pass through a layer.
    pub(crate) fn operations_per_pass(&self) -> usize {
        let LayerWork { gather, dispatch, combine, gradients, refresh, .. } = &self.layer;
        let chunked = self.chunks * (dispatch.len() + 1 + combine.len());
        1 + chunked + gather.len() + gradients.len() + refresh.len()
    }

    /// The work of the paper's stream model: one level, one layer forward, no expert compute.
    pub(crate) fn stream(
        model: &StreamModel,
        domain_size: usize,
        options: &SimulationOptions,
    ) -> Result<Self> {
        let input = model.input();
        let exchange = |family, peers: usize, bytes: Bytes| Exchange {
            level: 0,
            family,
            peers,
            messages: peers as f64,
            bytes: bytes.0,
            start: 0.0,
            round_trip: 0.0,
        };
        let tokens = model.all_to_all_bytes(domain_size)?;
        let experts = model.all_gather_bytes(domain_size)?;
        let some = |exchange: Exchange| if exchange.messages > 0.0 { vec![exchange] } else { Vec::new() };
        let tokens = some(exchange(Family::Tokens, input.gpus / domain_size - 1, tokens));
        Ok(Self {
            layer: LayerWork {
                pre_expert: input.pre_expert.0,
                gather: some(exchange(Family::Experts, domain_size - 1, experts)),
                dispatch: tokens.clone(),
                combine: tokens,
                ..LayerWork::default()
            },
            domain_sizes: vec![domain_size],
            layers: options.layers.unwrap_or(1),
            micro_batches: options.planner.micro_batches,
            chunks: options.planner.overlap_chunks,
            live_layers: options.planner.live_layers,
            trains: false,
            replicas_kept: false,
        })
    }
}

struct Formulas<'a> {
    cluster: &'a Cluster,
    model: &'a Model,
    planner: &'a Options,
    path: TokenPath,
    domain_sizes: &'a [usize],
    domains: Vec<usize>,
    hot: Vec<f64>,
}

impl Formulas<'_> {
    fn layer(&self, message_start: MessageStart) -> LayerWork {
        let levels = 0..self.domains.len();
        let memory = self.cluster.hbm_bandwidth();
        let own = self.model.expert_bytes() * self.experts_per_gpu() as f64;
        let others = (self.experts_per_gpu() * (self.domain_sizes.iter().product::<usize>() - 1)) as f64;
        let full = self.planner.setting == Setting::Full;
        let busiest = self.hot.last().copied().unwrap_or(1.0);
        let given = |condition: bool, time: Seconds| if condition { time.0 } else { 0.0 };
        let gradients = self.model.gradient_bytes() * others;
        let (weights, reduced) = (self.planner.weight_compression, self.planner.gradient_compression);
        let precision = self.model.description().precision;
        let mut work = LayerWork {
            pre_expert: (self.model.pre_expert_flop() / self.cluster.sustained()).0,
            expert: given(full, self.model.expert_flop() / self.cluster.sustained() * busiest),
            decode: given(
                self.moves(),
                weights.decode_time(self.model.expert_bytes() * others, precision.weights, memory),
            ),
            encode: given(self.moves(), weights.encode_time(own, precision.weights, memory)),
            gradient_encode: reduced.encode_time(gradients, precision.gradients, memory).0,
            gradient_decode: reduced.decode_time(gradients, precision.gradients, memory).0,
            gather: levels.clone().filter_map(|level| self.gather(level)).collect(),
            dispatch: levels.clone().filter_map(|level| self.tokens(level, Leg::Dispatch)).collect(),
            combine: levels.clone().rev().filter_map(|level| self.tokens(level, Leg::Combine)).collect(),
            gradients: levels.clone().rev().filter_map(|level| self.gradients(level)).collect(),
            refresh: self.refresh(),
        };
        if message_start == MessageStart::PerChunk {
            for exchange in work.dispatch.iter_mut().chain(&mut work.combine) {
                exchange.start *= self.planner.overlap_chunks as f64;
                exchange.messages *= self.planner.overlap_chunks as f64;
            }
        }
        work
    }

    fn gather(&self, level: usize) -> Option<Exchange> {
        let experts = gathered_experts(self.experts_per_gpu(), self.domain_sizes, level);
        let bytes = self.model.expert_bytes() * (experts / self.planner.weights_by(self.model));
        self.exchange(level, Family::Experts, self.domain_sizes[level] - 1, bytes)
    }

    fn gradients(&self, level: usize) -> Option<Exchange> {
        let experts = gathered_experts(self.experts_per_gpu(), self.domain_sizes, level);
        let bytes = self.model.gradient_bytes() * (experts / self.planner.gradients_by(self.model));
        self.exchange(level, Family::Experts, self.domain_sizes[level] - 1, bytes)
    }

    fn tokens(&self, level: usize, leg: Leg) -> Option<Exchange> {
        let description = self.model.description();
        let choice = Choice { experts: self.model.slots(), topk: description.topk };
        let rows = self.model.tokens() * token_rows(self.path, &self.domains, level, choice, self.hot[level]);
        let row = match leg {
            Leg::Dispatch => self.model.dispatch_row_bytes(),
            Leg::Combine => self.model.combine_row_bytes(),
        };
        let family = if self.path == TokenPath::Direct { Family::DirectTokens } else { Family::Tokens };
        self.exchange(level, family, token_messages(self.path, &self.domains, level), row * rows)
    }

    /// The refresh of the shared expert: a reduce-scatter from the innermost level outwards, then an all-gather
    /// inwards. Each step sends its fraction of one refresh.
    fn refresh(&self) -> Vec<Exchange> {
        if !self.moves() || !self.planner.weight_compression.has_shared_expert() {
            return Vec::new();
        }
        let scaling_factors = self.cluster.scaling_factors();
        let half = |level: usize| {
            let bytes = refresh_bytes(self.model.expert_bytes(), &scaling_factors, level) / 2.0;
            let whole = self.exchange(level, Family::Members, scaling_factors[level] - 1, bytes)?;
            let steps = self.planner.shared_refresh_steps as f64;
            Some(Exchange {
                messages: whole.messages / steps,
                bytes: whole.bytes / steps,
                start: whole.start / steps,
                round_trip: whole.round_trip / steps,
                ..whole
            })
        };
        let levels = 0..scaling_factors.len();
        levels.clone().rev().chain(levels).filter_map(half).collect()
    }

    fn exchange(&self, index: usize, family: Family, peers: usize, bytes: Bytes) -> Option<Exchange> {
        if peers == 0 {
            return None;
        }
        let level = self.cluster.levels()[index];
        let level = match self.planner.setting {
            Setting::Paper => Level { alpha: Seconds::ZERO, round_trip: Seconds::ZERO, ..level },
            Setting::Full => level,
        };
        Some(Exchange {
            level: index,
            family,
            peers,
            messages: peers as f64,
            bytes: bytes.0,
            start: (level.alpha * peers as f64).0,
            round_trip: level.round_trip.0,
        })
    }

    fn experts_per_gpu(&self) -> usize {
        self.model.slots() / self.cluster.gpus()
    }

    /// Whether experts move, so that codecs take time.
    fn moves(&self) -> bool {
        self.planner.setting == Setting::Full && self.domain_sizes.iter().any(|&size| size > 1)
    }
}

/// The direction of tokens.
#[derive(Debug, Clone, Copy)]
enum Leg {
    Dispatch,
    Combine,
}
