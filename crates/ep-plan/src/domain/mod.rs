//! The domain-based partition: which GPUs gather experts from each other, and which exchange tokens, at every
//! level of a cluster.
//!
//! Levels count from the outermost. Level `l` has `SF_l` members (datacenters, then nodes of one, then GPUs of one
//! of those), cut into domains of `S_l`. A GPU's location is its number in mixed radix `SF`; each digit splits
//! into a domain and an offset in it:
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
//! Two GPUs talk at level `l` only when their locations agree at every other level. The GPUs with the same domain
//! at every level are an *expert domain*: after the gathers, each of them holds all experts of the domain. The
//! GPUs with the same offset at every level are a *dispatch group*: one GPU of every expert domain, so that
//! dispatch and combine inside the group reach every expert. That is how a partition runs: `ΠS` times the experts
//! on each rank, and groups `ΠS` times smaller.

mod export;
mod reach;

use serde::{Deserialize, Serialize};

use crate::error::{PlanError, Result, at_least_one};
use crate::stream_model::check_domain_size;
use crate::units::Bytes;

pub use export::{LevelGroups, PartitionExport, RankGroups};
pub use reach::Hop;

/// A cluster's GPUs, cut into domains at every level.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Partition {
    levels: Vec<Level>,
    gpus: usize,
}

/// One level's numbers, with the distance between neighbours on it.
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

/// Who may talk at a level.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default, Serialize, Deserialize)]
#[serde(rename_all = "kebab-case")]
pub enum TopologyRule {
    /// GPUs whose locations agree at every other level.
    #[default]
    Corrected,
    /// The paper's Algorithm 1 to the letter: line 8 compares the inner levels only (`Loc[l+1:]`), so GPUs of
    /// different datacenters pair up at inner levels. Kept to show the difference; nothing else uses it.
    Literal,
}

/// What two GPUs exchange at a level.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash, Serialize, Deserialize)]
#[serde(rename_all = "kebab-case")]
pub enum Exchange {
    /// Experts, inside a domain.
    AllGather,
    /// Tokens, between domains.
    AllToAll,
}

/// The GPUs with which one GPU talks at a level, ascending.
#[derive(Debug, Clone, PartialEq, Eq, Default, Serialize, Deserialize)]
pub struct Peers {
    /// Whose experts it gathers.
    pub all_gather: Vec<usize>,
    /// With whom it exchanges tokens.
    pub all_to_all: Vec<usize>,
}

/// Messages of a level, over all GPUs: ordered pairs that talk.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize)]
pub struct Messages {
    /// In the all-gather.
    pub all_gather: usize,
    /// In one all-to-all.
    pub all_to_all: usize,
}

/// Bytes that one GPU receives at a level.
#[derive(Debug, Clone, Copy, PartialEq, Serialize, Deserialize)]
pub struct Volumes {
    /// In the all-gather.
    pub all_gather: Bytes,
    /// In one all-to-all, its copies counted one per (token, expert).
    pub all_to_all: Bytes,
}

impl Partition {
    /// A cluster of `scaling_factors`, outermost first, cut into domains of `domain_sizes`.
    ///
    /// # Errors
    /// [`PlanError::Levels`] when the two lengths differ or are 0, [`PlanError::DomainSize`] for a domain that does not
    /// divide its level, [`PlanError::Quantity`] for an empty level or more GPUs than can be counted.
    pub fn new(scaling_factors: &[usize], domain_sizes: &[usize]) -> Result<Self> {
        let count = scaling_factors.len();
        if count == 0 || domain_sizes.len() != count {
            return Err(PlanError::Levels { what: "domain sizes", found: domain_sizes.len(), levels: count });
        }
        let mut levels = Vec::with_capacity(count);
        let mut stride = 1usize;
        for (level, (&scaling_factor, &domain_size)) in
            scaling_factors.iter().zip(domain_sizes).enumerate().rev()
        {
            at_least_one(format!("scaling factor of level {level}"), scaling_factor)?;
            check_domain_size(level, domain_size, scaling_factor)?;
            levels.push(Level { scaling_factor, domain_size, stride });
            stride = stride.checked_mul(scaling_factor).ok_or_else(|| PlanError::Quantity {
                what: format!("number of GPUs from level {level} inwards"),
                value: stride as f64 * scaling_factor as f64,
                needed: "a number that this machine can count",
            })?;
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

    /// The GPU's digits, outermost first.
    ///
    /// # Errors
    /// [`PlanError::Index`] for a GPU that does not exist.
    pub fn location(&self, gpu: usize) -> Result<Vec<usize>> {
        self.check_gpu(gpu)?;
        Ok(self.levels.iter().map(|level| level.digit(gpu)).collect())
    }

    /// The GPU at a location.
    ///
    /// # Errors
    /// [`PlanError::Levels`] for a wrong number of digits, [`PlanError::Index`] for a digit out of range.
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

    /// The number of the expert domain that a GPU belongs to, its level domains read in mixed radix.
    ///
    /// # Errors
    /// [`PlanError::Index`] for a GPU that does not exist.
    pub fn expert_domain_of(&self, gpu: usize) -> Result<usize> {
        self.check_gpu(gpu).map(|()| self.domain_and_offset(gpu).0)
    }

    /// The number of the dispatch group that a GPU belongs to, its level offsets read in mixed radix.
    ///
    /// # Errors
    /// [`PlanError::Index`] for a GPU that does not exist.
    pub fn dispatch_group_of(&self, gpu: usize) -> Result<usize> {
        self.check_gpu(gpu).map(|()| self.domain_and_offset(gpu).1)
    }

    /// What two GPUs exchange at a level, if anything: the definition that everything else follows.
    ///
    /// # Errors
    /// [`PlanError::Index`] for a GPU or a level that does not exist.
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

    /// The GPUs with which one GPU talks at a level.
    ///
    /// # Errors
    /// [`PlanError::Index`] for a GPU or a level that does not exist.
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

    /// Messages of a level over all GPUs: `G (S_l − 1)` in the all-gather, `G (SF_l / S_l − 1)` in one all-to-all.
    ///
    /// Under the literal rule each GPU also talks to its like in every combination of outer digits.
    ///
    /// # Errors
    /// [`PlanError::Index`] for a level that does not exist.
    pub fn messages(&self, level: usize, rule: TopologyRule) -> Result<Messages> {
        let at = self.level(level)?;
        let likes = match rule {
            TopologyRule::Corrected => 1,
            TopologyRule::Literal => self.gpus / (at.stride * at.scaling_factor),
        };
        Ok(Messages {
            all_gather: likes * self.gpus * (at.domain_size - 1),
            all_to_all: likes * self.gpus * (at.domains() - 1),
        })
    }

    /// Bytes per GPU at a level: `P_E Π_{j<l} S_j (S_l − 1)` of experts, `D (1 − S_l / SF_l)` of tokens in one
    /// all-to-all.
    ///
    /// The product is there because a gather at level `l` hands on what the outer levels gathered.
    ///
    /// # Errors
    /// [`PlanError::Index`] for a level that does not exist.
    pub fn volumes(&self, level: usize, token_bytes: Bytes, expert_bytes: Bytes) -> Result<Volumes> {
        let at = self.level(level)?;
        let gathered: usize = self.levels[..level].iter().map(|outer| outer.domain_size).product();
        Ok(Volumes {
            all_gather: expert_bytes * (gathered * (at.domain_size - 1)) as f64,
            all_to_all: token_bytes * (1.0 - at.domain_size as f64 / at.scaling_factor as f64),
        })
    }

    /// The GPUs that agree with one at every level but this, itself included.
    fn neighbours(&self, gpu: usize, level: Level) -> impl Iterator<Item = usize> {
        let first = gpu - level.digit(gpu) * level.stride;
        (0..level.scaling_factor).map(move |digit| first + digit * level.stride)
    }

    /// A GPU's expert domain and dispatch group: its level domains, and its level offsets, in mixed radix.
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

/// Checks that an index is below its count.
fn check_index(what: &'static str, index: usize, count: usize) -> Result<()> {
    if index < count { Ok(()) } else { Err(PlanError::Index { what, index, count }) }
}

#[cfg(test)]
mod tests;
