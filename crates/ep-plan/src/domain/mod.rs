//! The domain-based partition (arXiv 2510.19470, Algorithm 1): which GPUs gather experts from each other, and which
//! exchange tokens, at every level of a cluster.
//!
//! Level 0 is the outermost. Level `l` has `SF_l` members (datacenters; nodes of a datacenter; GPUs of a node), divided
//! into domains of `S_l` members. The location of a GPU is its number in mixed radix `SF`. Each digit splits into a
//! domain and an offset in the domain:
//!
//! ```text
//!   SF = [4, 4], S = [2, 4]           digit of level 0:   0      1   |   2      3
//!   GPU 5 = location (1, 1)           domain, offset:    0,0    0,1  |  1,0    1,1
//!
//!   level 0, all-gather:  same domain, other offset   5 = (1,1) ── (0,1) = 1
//!   level 0, all-to-all:  other domain, same offset   5 = (1,1) ── (3,1) = 13
//!   level 1, all-gather:                              5 = (1,1) ── (1,0) (1,2) (1,3) = 4, 6, 7
//! ```
//!
//! Two GPUs exchange data at level `l` only when their locations agree at every other level. The GPUs with the same
//! domain at every level form an *expert domain*: after the gathers, each of them holds all experts of the domain. The
//! GPUs with the same offset at every level form a *dispatch group*. A dispatch group has one GPU of every expert
//! domain, so dispatch and combine inside the group reach every expert. Compared with plain expert parallelism, each
//! rank holds `ΠS` times as many experts and exchanges tokens in a group that is `ΠS` times smaller.
//!
//! ```
//! use ep_plan::{Partition, TopologyRule};
//!
//! let partition = Partition::new(&[4, 4], &[2, 4])?;
//! let peers = partition.peers(5, 0, TopologyRule::Corrected)?;
//! assert_eq!((peers.all_gather, peers.all_to_all), (vec![1], vec![13]));
//! assert_eq!(partition.expert_domain_size(), 8);
//! # Ok::<(), ep_plan::PlanError>(())
//! ```

mod export;
mod reach;

use serde::{Deserialize, Serialize};

use crate::error::{PlanError, Result, count};
use crate::limits;
use crate::stream_model::check_domain_size;
use crate::units::Bytes;

pub use export::{LevelGroups, PartitionExport, RankGroups};
pub use reach::Hop;

/// The GPUs of a cluster, divided into domains at every level.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Partition {
    levels: Vec<Level>,
    gpus: usize,
}

/// One level of a partition.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
struct Level {
    scaling_factor: usize,
    domain_size: usize,
    /// GPUs inside one member of the level.
    stride: usize,
}

impl Level {
    fn digit(self, gpu: usize) -> usize {
        gpu / self.stride % self.scaling_factor
    }

    fn domains(self) -> usize {
        self.scaling_factor / self.domain_size
    }
}

/// The rule by which two GPUs may exchange data at a level.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default, Serialize, Deserialize)]
#[serde(rename_all = "kebab-case")]
pub enum TopologyRule {
    /// Two GPUs exchange data when their locations agree at every other level.
    #[default]
    Corrected,
    /// The paper's Algorithm 1 as printed: line 8 compares the inner levels only (`Loc[l+1:]`), so GPUs of different
    /// datacenters exchange data at inner levels. This rule exists only to show the difference.
    Literal,
}

/// The kind of data that two GPUs exchange at a level.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash, Serialize, Deserialize)]
#[serde(rename_all = "kebab-case")]
pub enum Exchange {
    /// Experts, inside a domain.
    AllGather,
    /// Tokens, between domains.
    AllToAll,
}

/// The GPUs with which one GPU exchanges data at a level, ascending.
#[derive(Debug, Clone, PartialEq, Eq, Default, Serialize, Deserialize)]
pub struct Peers {
    /// GPUs whose experts this GPU gathers.
    pub all_gather: Vec<usize>,
    /// GPUs with which this GPU exchanges tokens.
    pub all_to_all: Vec<usize>,
}

/// Messages of a level: ordered pairs of GPUs that exchange data, counted over all GPUs.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize)]
pub struct Messages {
    /// In the all-gather.
    pub all_gather: usize,
    /// In one all-to-all.
    pub all_to_all: usize,
}

/// Bytes that one GPU receives at a level, in one layer.
#[derive(Debug, Clone, Copy, PartialEq, Serialize, Deserialize)]
pub struct Volumes {
    /// In the all-gather.
    pub all_gather: Bytes,
    /// In one all-to-all, with one copy per (token, expert).
    pub all_to_all: Bytes,
}

impl Partition {
    /// Divides a cluster with `scaling_factors` members per level into domains of `domain_sizes` members, both
    /// outermost level first.
    ///
    /// # Errors
    /// [`PlanError::Levels`] when the two lengths differ or are 0. [`PlanError::DomainSize`] when a domain size does
    /// not divide its level. [`PlanError::Count`] when a level is empty, or when there are more levels or GPUs than
    /// [`limits::LEVELS`] and [`limits::GPUS`] allow.
    pub fn new(scaling_factors: &[usize], domain_sizes: &[usize]) -> Result<Self> {
        let depth = scaling_factors.len();
        if depth == 0 || domain_sizes.len() != depth {
            return Err(PlanError::Levels { what: "domain sizes", found: domain_sizes.len(), levels: depth });
        }
        count("number of levels", depth, limits::LEVELS)?;
        let mut levels = Vec::with_capacity(depth);
        let mut stride = 1usize;
        for (level, (&scaling_factor, &domain_size)) in
            scaling_factors.iter().zip(domain_sizes).enumerate().rev()
        {
            count(format!("scaling factor of level {level}"), scaling_factor, limits::GPUS)?;
            check_domain_size(level, domain_size, scaling_factor)?;
            levels.push(Level { scaling_factor, domain_size, stride });
            // Both factors are bounded, so their product cannot overflow.
            let what = format!("number of GPUs from level {level} inwards");
            stride = count(what, stride * scaling_factor, limits::GPUS)?;
        }
        levels.reverse();
        Ok(Self { levels, gpus: stride })
    }

    /// Number of GPUs.
    pub fn gpus(&self) -> usize {
        self.gpus
    }

    /// Number of levels.
    pub fn depth(&self) -> usize {
        self.levels.len()
    }

    /// Members of each level, outermost first.
    pub fn scaling_factors(&self) -> Vec<usize> {
        self.levels.iter().map(|level| level.scaling_factor).collect()
    }

    /// Domain size of each level, outermost first.
    pub fn domain_sizes(&self) -> Vec<usize> {
        self.levels.iter().map(|level| level.domain_size).collect()
    }

    /// Domains of each level, outermost first: `SF_l / S_l`.
    pub fn domains(&self) -> Vec<usize> {
        self.levels.iter().map(|level| level.domains()).collect()
    }

    /// GPUs of one expert domain: `ΠS`.
    pub fn expert_domain_size(&self) -> usize {
        self.levels.iter().map(|level| level.domain_size).product()
    }

    /// The location of a GPU: its digits, outermost level first.
    ///
    /// # Errors
    /// [`PlanError::Index`] when the GPU does not exist.
    pub fn location(&self, gpu: usize) -> Result<Vec<usize>> {
        self.check_gpu(gpu)?;
        Ok(self.levels.iter().map(|level| level.digit(gpu)).collect())
    }

    /// The GPU at a location.
    ///
    /// # Errors
    /// [`PlanError::Levels`] when there is not one digit per level, [`PlanError::Index`] when a digit is out of range.
    pub fn gpu_at(&self, location: &[usize]) -> Result<usize> {
        if location.len() != self.depth() {
            let (found, levels) = (location.len(), self.depth());
            return Err(PlanError::Levels { what: "digits of a location", found, levels });
        }
        let mut gpu = 0;
        for (&digit, level) in location.iter().zip(&self.levels) {
            check_index("member of a level", digit, level.scaling_factor)?;
            gpu += digit * level.stride;
        }
        Ok(gpu)
    }

    /// The number of a GPU's expert domain: its domains of all levels, as one number in mixed radix.
    ///
    /// # Errors
    /// [`PlanError::Index`] when the GPU does not exist.
    pub fn expert_domain_of(&self, gpu: usize) -> Result<usize> {
        self.check_gpu(gpu).map(|()| self.domain_and_offset(gpu).0)
    }

    /// The number of a GPU's dispatch group: its offsets at all levels, as one number in mixed radix.
    ///
    /// # Errors
    /// [`PlanError::Index`] when the GPU does not exist.
    pub fn dispatch_group_of(&self, gpu: usize) -> Result<usize> {
        self.check_gpu(gpu).map(|()| self.domain_and_offset(gpu).1)
    }

    /// What two GPUs exchange at a level, if anything. This function is the definition of the partition: the other
    /// functions are derived from it and tested against it.
    ///
    /// # Errors
    /// [`PlanError::Index`] when a GPU or the level does not exist.
    pub fn exchange(&self, a: usize, b: usize, level: usize, rule: TopologyRule) -> Result<Option<Exchange>> {
        self.check_gpu(a)?;
        self.check_gpu(b)?;
        let at = self.level(level)?;
        let agree = |levels: &[Level]| levels.iter().all(|other| other.digit(a) == other.digit(b));
        let may_talk = agree(&self.levels[level + 1..])
            && (rule == TopologyRule::Literal || agree(&self.levels[..level]));
        let same_domain = at.digit(a) / at.domain_size == at.digit(b) / at.domain_size;
        let same_offset = at.digit(a) % at.domain_size == at.digit(b) % at.domain_size;
        Ok(match (may_talk, same_domain, same_offset) {
            (true, true, false) => Some(Exchange::AllGather),
            (true, false, true) => Some(Exchange::AllToAll),
            _ => None,
        })
    }

    /// The GPUs with which one GPU exchanges data at a level.
    ///
    /// # Errors
    /// [`PlanError::Index`] when the GPU or the level does not exist.
    pub fn peers(&self, gpu: usize, level: usize, rule: TopologyRule) -> Result<Peers> {
        self.check_gpu(gpu)?;
        let candidates: Vec<usize> = match rule {
            TopologyRule::Corrected => self.neighbours(gpu, self.level(level)?).collect(),
            TopologyRule::Literal => (0..self.gpus).collect(),
        };
        let mut peers = Peers::default();
        for other in candidates {
            match self.exchange(gpu, other, level, rule)? {
                Some(Exchange::AllGather) => peers.all_gather.push(other),
                Some(Exchange::AllToAll) => peers.all_to_all.push(other),
                None => {}
            }
        }
        Ok(peers)
    }

    /// Messages of a level over all `G` GPUs: `G (S_l − 1)` in the all-gather, `G (SF_l / S_l − 1)` in one all-to-all
    /// (arXiv 2510.19470, Table VII).
    ///
    /// Under [`TopologyRule::Literal`] both are multiplied by the number of members of the outer levels.
    ///
    /// # Errors
    /// [`PlanError::Index`] when the level does not exist.
    pub fn messages(&self, level: usize, rule: TopologyRule) -> Result<Messages> {
        let at = self.level(level)?;
        let outer_members = match rule {
            TopologyRule::Corrected => 1,
            TopologyRule::Literal => self.gpus / (at.stride * at.scaling_factor),
        };
        Ok(Messages {
            all_gather: outer_members * self.gpus * (at.domain_size - 1),
            all_to_all: outer_members * self.gpus * (at.domains() - 1),
        })
    }

    /// Bytes that one GPU receives at a level: `P_E Π_{j<l} S_j (S_l − 1)` of experts, and `D (1 − S_l / SF_l)` of
    /// tokens in one all-to-all. `token_bytes` is `D` and `expert_bytes` is `P_E` of
    /// [`StreamInput`](crate::StreamInput).
    ///
    /// The product occurs because a gather at level `l` also forwards the experts that the outer levels gathered.
    ///
    /// # Errors
    /// [`PlanError::Index`] when the level does not exist.
    pub fn volumes(&self, level: usize, token_bytes: Bytes, expert_bytes: Bytes) -> Result<Volumes> {
        let at = self.level(level)?;
        let gathered: usize = self.levels[..level].iter().map(|outer| outer.domain_size).product();
        Ok(Volumes {
            all_gather: expert_bytes * (gathered * (at.domain_size - 1)) as f64,
            all_to_all: token_bytes * (1.0 - at.domain_size as f64 / at.scaling_factor as f64),
        })
    }

    /// The GPUs whose locations agree with `gpu` at every level except this one, `gpu` included.
    fn neighbours(&self, gpu: usize, level: Level) -> impl Iterator<Item = usize> {
        let first = gpu - level.digit(gpu) * level.stride;
        (0..level.scaling_factor).map(move |digit| first + digit * level.stride)
    }

    /// A GPU's expert domain and dispatch group: its domains, and its offsets, in mixed radix.
    fn domain_and_offset(&self, gpu: usize) -> (usize, usize) {
        self.levels.iter().fold((0, 0), |(domain, offset), level| {
            let digit = level.digit(gpu);
            (
                domain * level.domains() + digit / level.domain_size,
                offset * level.domain_size + digit % level.domain_size,
            )
        })
    }

    fn level(&self, level: usize) -> Result<Level> {
        check_index("level", level, self.depth()).map(|()| self.levels[level])
    }

    fn check_gpu(&self, gpu: usize) -> Result<()> {
        check_index("GPU", gpu, self.gpus)
    }
}

/// Checks that `index` is below `count`.
fn check_index(what: &'static str, index: usize, count: usize) -> Result<()> {
    if index < count { Ok(()) } else { Err(PlanError::Index { what, index, count }) }
}

#[cfg(test)]
mod tests;
