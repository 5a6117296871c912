//! Which ranks take part in a migration, what it moves, and how.

use std::time::Duration;

use ep::{CallerError, Interrupt, Rank, Result};
use ep_codec::{GradientCodec, WeightCodec};

/// The highest staleness. No run has this many steps, and sums with it do not overflow.
const MOST_STALENESS: u64 = u32::MAX as u64;

/// The expert domain of a rank: the ranks that gather each other's experts.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Domain {
    rank: Rank,
    ranks: Vec<Rank>,
}

impl Domain {
    /// The domain `ranks`, ascending, seen from its member `rank`.
    ///
    /// # Errors
    /// [`CallerError::Topology`] if the ranks do not ascend, or if `rank` is not among them.
    pub fn new(rank: Rank, ranks: &[Rank]) -> Result<Self> {
        let listed = || ranks.iter().map(ToString::to_string).collect::<Vec<_>>().join(", ");
        if !ranks.is_sorted_by(|one, next| one < next) {
            let text = format!("the ranks of an expert domain must ascend; found {}", listed());
            return Err(CallerError::Topology(text).into());
        }
        if !ranks.contains(&rank) {
            let text = format!("rank {rank} is not in its expert domain, {}", listed());
            return Err(CallerError::Topology(text).into());
        }
        Ok(Self { rank, ranks: ranks.to_vec() })
    }

    /// This rank.
    pub fn rank(&self) -> Rank {
        self.rank
    }

    /// All ranks of the domain, ascending.
    pub fn ranks(&self) -> &[Rank] {
        &self.ranks
    }

    /// The other ranks of the domain, ascending.
    pub fn peers(&self) -> Vec<Rank> {
        self.ranks.iter().copied().filter(|&rank| rank != self.rank).collect()
    }
}

/// The experts of a model, as far as a migration needs them.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Shape {
    /// Number of experts that each rank owns, in every layer.
    pub experts_per_rank: usize,
    /// By layer: number of weights of an expert.
    pub expert_elements: Vec<usize>,
}

/// How a migration moves experts. All ranks of a domain must have the same settings.
#[derive(Debug, Clone)]
pub struct Settings {
    /// The codec of weights. [`WeightCodec::Shared`] needs a staleness of 0.
    pub weights: WeightCodec,
    /// The codec of gradients.
    pub gradients: GradientCodec,
    /// Number of bodies of weights of one peer that a rank receives ahead of the layer that it gathers. There is no
    /// limit if `staleness` is not 0. Also the number of receives of weights, and of gradients, that are posted for a
    /// peer before the bodies are announced.
    pub depth: usize,
    /// Number of steps that a replica may lag behind its owner, at most `u32::MAX`.
    pub staleness: u64,
    /// Number of steps between two shared experts, for [`WeightCodec::Shared`].
    pub shared_refresh: u64,
    /// The longest wait for a peer.
    pub timeout: Duration,
    /// A number that the ranks of a job agree on. Messages with a different number are refused.
    pub run: u64,
    /// Lets the program stop a waiting call.
    pub interrupt: Interrupt,
}

impl Default for Settings {
    /// `int8` for weights and gradients, depth 4, no staleness, a timeout of 100 s.
    fn default() -> Self {
        Self {
            weights: WeightCodec::Int8,
            gradients: GradientCodec::Int8,
            depth: 4,
            staleness: 0,
            shared_refresh: 100,
            timeout: Duration::from_secs(100),
            run: 0,
            interrupt: Interrupt::default(),
        }
    }
}

impl Shape {
    pub(crate) fn check(&self) -> Result<()> {
        let positive = |what, found| {
            if found == 0 {
                Err(CallerError::Shape { what, expected: 1, found, unit: "or more" })
            } else {
                Ok(())
            }
        };
        positive("experts of a rank", self.experts_per_rank)?;
        positive("layers", self.expert_elements.len())?;
        for &elements in &self.expert_elements {
            positive("weights of an expert", elements)?;
        }
        Ok(())
    }
}

impl Settings {
    pub(crate) fn check(&self) -> Result<()> {
        let wrong = |key, value: String, problem: &str| {
            Err(CallerError::Config { key, value, problem: problem.into() }.into())
        };
        if self.depth == 0 {
            return wrong("depth", "0".into(), "must be 1 or more");
        }
        if matches!(self.weights, WeightCodec::Shared { .. }) && self.staleness != 0 {
            return wrong("staleness", self.staleness.to_string(), "must be 0 with the codec `shared`");
        }
        if self.staleness > MOST_STALENESS {
            return wrong(
                "staleness",
                self.staleness.to_string(),
                &format!("must be at most {MOST_STALENESS}"),
            );
        }
        if self.shared_refresh == 0 {
            return wrong("shared_refresh", "0".into(), "must be 1 or more");
        }
        if self.timeout.is_zero() {
            return wrong("timeout", "0".into(), "must be positive");
        }
        Ok(())
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_domain_names_its_mistakes() {
        let domain = |rank, ranks: &[u32]| {
            Domain::new(Rank(rank), &ranks.iter().copied().map(Rank).collect::<Vec<_>>())
        };
        assert_eq!(domain(4, &[1, 4, 9]).unwrap().peers(), [Rank(1), Rank(9)]);
        let error = domain(4, &[4, 1]).unwrap_err().to_string();
        assert_eq!(error, "topology: the ranks of an expert domain must ascend; found 4, 1");
        let error = domain(2, &[1, 4]).unwrap_err().to_string();
        assert_eq!(error, "topology: rank 2 is not in its expert domain, 1, 4");
        assert!(domain(1, &[1, 1]).is_err());
    }

    #[test]
    fn settings_out_of_range_are_named() {
        let bad = Settings { depth: 0, ..Settings::default() };
        assert_eq!(bad.check().unwrap_err().to_string(), "depth = 0: must be 1 or more");
        assert!(Settings { timeout: Duration::ZERO, ..Settings::default() }.check().is_err());
        let bad = Settings { staleness: u64::MAX, ..Settings::default() };
        assert_eq!(
            bad.check().unwrap_err().to_string(),
            "staleness = 18446744073709551615: must be at most 4294967295"
        );
        assert!(Settings { staleness: MOST_STALENESS, ..Settings::default() }.check().is_ok());
        let shared = WeightCodec::Shared { density: 0.1 };
        let bad = Settings { weights: shared, staleness: 1, ..Settings::default() };
        assert_eq!(bad.check().unwrap_err().to_string(), "staleness = 1: must be 0 with the codec `shared`");
        assert!(Settings { shared_refresh: 0, ..Settings::default() }.check().is_err());
        assert!(Shape { experts_per_rank: 2, expert_elements: vec![] }.check().is_err());
        assert!(Shape { experts_per_rank: 2, expert_elements: vec![8, 0] }.check().is_err());
    }
}
