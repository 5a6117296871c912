//! The cost of one candidate. Volumes give transfers; transfers and compute give phases; phases give the layer time.

use serde::{Deserialize, Serialize};

use super::memory::{Memory, gathered_by};
use super::options::{Options, Setting};
use super::site::{SiteShape, shapes, slowest};
use super::time::PassTimes;
use super::volume::{Choice, TokenPath, Transfer};
use crate::cluster::{Cluster, Level};
use crate::domain::Partition;
use crate::error::Result;
use crate::model::Model;
use crate::units::{Bytes, Seconds};

/// A choice of domain sizes with its cost. Times and bytes are those of one layer and one micro-batch.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
pub struct Candidate {
    /// `S_l`, outermost level first.
    pub domain_sizes: Vec<usize>,
    /// Whether gathered experts stay in memory for the whole step.
    pub replicas_kept: bool,
    /// Times of the forward pass.
    pub forward: PassTimes,
    /// Times of the backward pass, when training.
    pub backward: Option<PassTimes>,
    /// Sum of the totals of both passes.
    pub layer_time: Seconds,
    /// Memory of one GPU.
    pub memory: Memory,
    /// Traffic of each level, outermost first.
    pub levels: Vec<LevelTraffic>,
}

/// The traffic over the links of one level, of one layer and one micro-batch.
#[derive(Debug, Clone, Copy, PartialEq, Serialize, Deserialize)]
pub struct LevelTraffic {
    /// `S_l`: members of a domain.
    pub domain_size: usize,
    /// `g_l = SF_l / S_l`: domains of the level.
    pub domains: usize,
    /// `h_l`: load of the busiest group over the mean load of all groups, at least 1.
    pub hot_factor: f64,
    /// Rows that the busiest GPU receives over this level in dispatch, per token of one GPU
    /// ([`token_rows`](super::token_rows)).
    pub rows_per_token: f64,
    /// One gather of the domain's experts.
    pub all_gather: Transfer,
    /// One dispatch and one combine.
    pub all_to_all: Transfer,
    /// One reduction of the gradients of gathered experts.
    pub gradients: Transfer,
    /// One refresh of the codec's shared expert.
    pub shared_refresh: Transfer,
    /// Bytes over one link in one direction: the sum of the transfers above, each multiplied by its frequency.
    pub bytes_per_link: Bytes,
}

impl Candidate {
    /// GPUs of one expert domain: `ΠS`.
    pub fn expert_domain_size(&self) -> usize {
        self.domain_sizes.iter().product()
    }

    /// Whether experts are gathered, and kept for the whole step.
    pub fn has_kept_replicas(&self) -> bool {
        self.replicas_kept && self.expert_domain_size() > 1
    }
}

/// A candidate before it is priced: domain sizes, and quantities that do not depend on the speed of links.
#[derive(Debug, Clone)]
pub(crate) struct UnpricedCandidate {
    pub(crate) domain_sizes: Vec<usize>,
    domains: Vec<usize>,
    hot: Vec<f64>,
}

impl UnpricedCandidate {
    pub(crate) fn new(
        scaling_factors: &[usize],
        domain_sizes: Vec<usize>,
        model: &Model,
        options: &Options,
    ) -> Result<Self> {
        let partition = Partition::new(scaling_factors, &domain_sizes)?;
        let hot = match options.setting {
            Setting::Paper => vec![1.0; scaling_factors.len()],
            Setting::Full => model.shares().hot_factors(&partition, options.placement_of(model))?,
        };
        Ok(Self { domains: partition.domains(), hot, domain_sizes })
    }
}

/// Everything that the price of a candidate depends on, except the candidate.
#[derive(Debug, Clone, Copy)]
pub(crate) struct CostModel<'a> {
    pub(crate) cluster: &'a Cluster,
    pub(crate) model: &'a Model,
    pub(crate) options: &'a Options,
    pub(crate) path: TokenPath,
    pub(crate) experts_per_gpu: usize,
    /// Memory before any expert is gathered.
    pub(crate) memory: Memory,
}

impl CostModel<'_> {
    pub(crate) fn price(&self, unpriced: &UnpricedCandidate, replicas_kept: bool) -> Candidate {
        let sites = shapes(self.cluster, &unpriced.domain_sizes);
        let levels: Vec<LevelTraffic> = (0..unpriced.domain_sizes.len())
            .map(|level| self.traffic(unpriced, &sites, level, replicas_kept))
            .collect();
        let gathered = self.gathered_per_layer(unpriced);
        let forward = self.forward(unpriced, &levels, replicas_kept);
        let backward = self.options.trains().then(|| self.backward(unpriced, &levels, replicas_kept));
        Candidate {
            domain_sizes: unpriced.domain_sizes.clone(),
            replicas_kept,
            forward,
            backward,
            layer_time: forward.total + backward.map_or(Seconds::ZERO, |pass| pass.total),
            memory: Memory {
                gathered_experts: gathered_by(self.model, self.options, gathered, replicas_kept),
                ..self.memory
            },
            levels,
        }
    }

    /// With kept replicas only the first micro-batch gathers experts; otherwise each micro-batch does.
    fn forward(
        &self,
        unpriced: &UnpricedCandidate,
        levels: &[LevelTraffic],
        replicas_kept: bool,
    ) -> PassTimes {
        let chunks = self.options.overlap_chunks;
        let bare = PassTimes {
            pre_expert: self.pre_expert_time(),
            all_to_all: levels.iter().map(|level| level.all_to_all.time).sum(),
            expert: self.expert_time(unpriced),
            ..PassTimes::default()
        };
        let gathering = self.with_gather(unpriced, levels, bare).overlapped(chunks);
        let heavy = if replicas_kept { 1 } else { self.options.micro_batches };
        gathering.mean(heavy, bare.overlapped(chunks), self.options.micro_batches - heavy)
    }

    /// The backward pass has twice the compute of the forward pass. It gathers experts again unless replicas are kept.
    /// The last micro-batch encodes experts for the next step and refreshes the shared expert. Every micro-batch
    /// reduces gradients; with kept replicas only the last does.
    fn backward(
        &self,
        unpriced: &UnpricedCandidate,
        levels: &[LevelTraffic],
        replicas_kept: bool,
    ) -> PassTimes {
        let chunks = self.options.overlap_chunks;
        let memory = self.cluster.hbm_bandwidth();
        let own = self.model.expert_bytes() * self.experts_per_gpu as f64;
        let bare = PassTimes {
            pre_expert: self.pre_expert_time() * 2.0,
            all_to_all: levels.iter().map(|level| level.all_to_all.time).sum(),
            expert: self.expert_time(unpriced) * 2.0,
            ..PassTimes::default()
        };
        let gathered = if replicas_kept { bare } else { self.with_gather(unpriced, levels, bare) };
        let reduced = self.with_gradients(unpriced, levels, gathered);
        let mut last = reduced;
        if self.moves(unpriced) {
            let weights = self.model.description().precision.weights;
            last.encode += self.options.weight_compression.encode_time(own, weights, memory);
        }
        if self.shared_expert(unpriced) {
            last.shared_refresh = levels.iter().map(|level| level.shared_refresh.time).sum::<Seconds>()
                / self.options.shared_refresh_steps as f64;
        }
        let other = if replicas_kept { gathered } else { reduced };
        last.overlapped(chunks).mean(1, other.overlapped(chunks), self.options.micro_batches - 1)
    }

    fn with_gather(
        &self,
        unpriced: &UnpricedCandidate,
        levels: &[LevelTraffic],
        pass: PassTimes,
    ) -> PassTimes {
        let gathered = self.model.expert_bytes() * self.gathered_per_layer(unpriced);
        let weights = self.model.description().precision.weights;
        let decode = match self.moves(unpriced) {
            true => {
                self.options.weight_compression.decode_time(gathered, weights, self.cluster.hbm_bandwidth())
            }
            false => Seconds::ZERO,
        };
        let all_gather = levels.iter().map(|level| level.all_gather.time).sum();
        PassTimes { all_gather, decode: pass.decode + decode, ..pass }
    }

    fn with_gradients(
        &self,
        unpriced: &UnpricedCandidate,
        levels: &[LevelTraffic],
        pass: PassTimes,
    ) -> PassTimes {
        let memory = self.cluster.hbm_bandwidth();
        let gathered = self.model.gradient_bytes() * self.gathered_per_layer(unpriced);
        let (codec, element) =
            (self.options.gradient_compression, self.model.description().precision.gradients);
        PassTimes {
            gradients: levels.iter().map(|level| level.gradients.time).sum(),
            encode: pass.encode + codec.encode_time(gathered, element, memory),
            decode: pass.decode + codec.decode_time(gathered, element, memory),
            ..pass
        }
    }

    fn traffic(
        &self,
        unpriced: &UnpricedCandidate,
        sites: &[SiteShape<'_>],
        index: usize,
        replicas_kept: bool,
    ) -> LevelTraffic {
        let description = self.model.description();
        let choice = Choice { experts: self.model.slots(), topk: description.topk };
        let hot = unpriced.hot[index];
        let trains = self.options.trains();
        // Every exchange takes as long as at the slowest site.
        let slowest = |transfer: &dyn Fn(&SiteShape<'_>, &Level) -> Transfer| {
            slowest(sites.iter().map(|site| transfer(site, &self.level(site, index))))
        };
        let expert_transfer = |one: Bytes, compression: f64| {
            slowest(&|site, level| {
                let (experts, messages) = site.gathered(self.experts_per_gpu, index);
                Transfer::new(level, messages, one * (experts / compression), 1)
            })
        };
        let all_gather = expert_transfer(self.model.expert_bytes(), self.options.weights_by(self.model));
        let gradients = match trains {
            true => expert_transfer(self.model.gradient_bytes(), self.options.gradients_by(self.model)),
            false => Transfer::default(),
        };
        let rows = |site: &SiteShape<'_>| site.rows(self.path, index, choice, hot);
        let all_to_all = slowest(&|site, level| {
            let messages = site.token_messages(self.path, index);
            let rows = self.model.tokens() * rows(site);
            let part = |row: Bytes| Transfer::new(level, messages, row * rows, 1);
            part(self.model.dispatch_row_bytes()).then(part(self.model.combine_row_bytes()))
        });
        let shared_refresh = match trains && self.shared_expert(unpriced) {
            true => slowest(&|site, level| {
                let (part, others) = site.reduced(site.members(), index);
                Transfer::new(level, 2 * others, self.model.expert_bytes() * (2.0 * part), 2)
            }),
            false => Transfer::default(),
        };
        let frequencies = Frequencies::new(self.options, replicas_kept);
        LevelTraffic {
            domain_size: unpriced.domain_sizes[index],
            domains: unpriced.domains[index],
            hot_factor: hot,
            rows_per_token: sites.iter().map(rows).fold(0.0, f64::max),
            all_gather,
            all_to_all,
            gradients,
            shared_refresh,
            bytes_per_link: all_gather.bytes_per_link * frequencies.gathers
                + all_to_all.bytes_per_link * frequencies.passes
                + gradients.bytes_per_link * frequencies.reductions
                + shared_refresh.bytes_per_link * frequencies.refreshes,
        }
    }

    /// The level under the setting: the paper's links have a bandwidth but no latency.
    fn level(&self, site: &SiteShape<'_>, index: usize) -> Level {
        let level = site.levels[index];
        match self.options.setting {
            Setting::Paper => Level { alpha: Seconds::ZERO, round_trip: Seconds::ZERO, ..level },
            Setting::Full => level,
        }
    }

    pub(crate) fn pre_expert_time(&self) -> Seconds {
        self.model.pre_expert_flop() / self.cluster.sustained()
    }

    /// Expert compute of the busiest GPU. It is zero under the paper's model, where it hides behind the transfers.
    fn expert_time(&self, unpriced: &UnpricedCandidate) -> Seconds {
        let busiest = unpriced.hot.last().copied().unwrap_or(1.0);
        match self.options.setting {
            Setting::Paper => Seconds::ZERO,
            Setting::Full => self.model.expert_flop() / self.cluster.sustained() * busiest,
        }
    }

    /// Experts of other GPUs that a GPU holds per layer after the gathers: `n (ΠS − 1)`.
    fn gathered_per_layer(&self, unpriced: &UnpricedCandidate) -> f64 {
        (self.experts_per_gpu * (unpriced.domain_sizes.iter().product::<usize>() - 1)) as f64
    }

    /// Whether experts move, so that codecs take time. Under the paper's model codecs take none.
    fn moves(&self, unpriced: &UnpricedCandidate) -> bool {
        self.options.setting == Setting::Full && unpriced.domain_sizes.iter().any(|&size| size > 1)
    }

    /// Whether experts move through a codec with a shared expert.
    fn shared_expert(&self, unpriced: &UnpricedCandidate) -> bool {
        self.moves(unpriced) && self.options.weight_compression.has_shared_expert()
    }
}

/// The number of times that each transfer happens, per layer and micro-batch.
#[derive(Debug, Clone, Copy)]
pub(crate) struct Frequencies {
    /// Token exchanges: 1 forward, and 1 backward when training.
    pub(crate) passes: f64,
    /// Gathers: one per pass, or one per step when replicas are kept.
    pub(crate) gathers: f64,
    /// Reductions of gradients: one per micro-batch, or one per step when replicas are kept; 0 without training.
    pub(crate) reductions: f64,
    /// Refreshes of the shared expert: one per `shared_refresh_steps` steps; 0 without training.
    pub(crate) refreshes: f64,
}

impl Frequencies {
    pub(crate) fn new(options: &Options, replicas_kept: bool) -> Self {
        let micro_batches = options.micro_batches as f64;
        let training = if options.trains() { 1.0 } else { 0.0 };
        let passes = 1.0 + training;
        Self {
            passes,
            gathers: if replicas_kept { 1.0 / micro_batches } else { passes },
            reductions: if replicas_kept { training / micro_batches } else { training },
            refreshes: training / (micro_batches * options.shared_refresh_steps as f64),
        }
    }
}
