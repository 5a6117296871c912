//! Which experts are worth moving at all: a domain moves all of its experts, popular or not.

use serde::{Deserialize, Serialize};

use super::cost::{CostModel, Frequencies};
use super::volume::{Choice, TokenPath, token_rows};
use crate::units::Bytes;

/// What one expert's tokens cost on a link in one step and micro-batch, and what the expert itself would.
#[derive(Debug, Clone, Copy, PartialEq, Serialize, Deserialize)]
pub struct ExpertTrade {
    /// `4 tokens_e H b`: its tokens out and back, forward and backward (half of it without training).
    pub token_bytes: Bytes,
    /// `P (2 / CR_w + 1 / CR_g)`: the expert for each pass, and its gradients home.
    pub expert_bytes: Bytes,
}

impl ExpertTrade {
    /// Whether to move the expert rather than its tokens.
    pub fn migrates(&self) -> bool {
        self.token_bytes.0 > self.expert_bytes.0
    }
}

/// What a level would carry if each expert were moved or left by itself, given the chosen domains of the outer
/// levels. Bytes are per GPU, layer and micro-batch.
#[derive(Debug, Clone, Copy, PartialEq, Serialize, Deserialize)]
pub struct SelectiveMigration {
    /// The level, counted from the outermost.
    pub level: usize,
    /// Experts that are worth moving across it.
    pub migrating: usize,
    /// Of so many.
    pub experts: usize,
    /// Bytes when only tokens cross.
    pub tokens_only: Bytes,
    /// Bytes when every expert does.
    pub experts_only: Bytes,
    /// Bytes when each expert does what is cheaper for it.
    pub selective: Bytes,
}

/// Growing the domain of a level by one member: `2 D / SF_l` against `n P Π_{j<l} S_j / CR_w`, bytes of one
/// forward pass per GPU, token copies counted one per (token, expert).
#[derive(Debug, Clone, Copy, PartialEq, Serialize, Deserialize)]
pub struct GrowthTest {
    /// The level, counted from the outermost.
    pub level: usize,
    /// Bytes of tokens that one more member saves.
    pub saves: Bytes,
    /// Bytes of experts that one more member costs.
    pub costs: Bytes,
}

impl CostModel<'_> {
    /// The trade of one expert at a level.
    ///
    /// A copy of the expert that crosses the level serves the tokens of every GPU inside the member that it goes
    /// to, and, of the outer levels, those of the domains that share the copy: `tokens_e = T K share_e Π_{j>l}
    /// SF_j Π_{j<l} SF_j / S_j`. On a deduplicated path a row is shared by several experts, so that each is
    /// charged its part of one.
    pub(super) fn trade(&self, outer_sizes: &[usize], level: usize, share: f64, kept: bool) -> ExpertTrade {
        let scaling = self.cluster.scaling_factors();
        let description = self.model.description();
        let inside: usize = scaling[level + 1..].iter().product();
        let outside: usize =
            scaling[..level].iter().zip(outer_sizes).map(|(factor, size)| factor / size).product();
        let tokens = self.model.tokens() * description.topk as f64 * share * (inside * outside) as f64;
        let often = Frequencies::new(self.options, kept);
        let row = self.model.dispatch_row_bytes() + self.model.combine_row_bytes();
        ExpertTrade {
            token_bytes: row * (tokens * often.passes * self.rows_per_selection(outer_sizes, level)),
            expert_bytes: self.model.expert_bytes() * (often.gathers / self.options.weight_compression)
                + self.model.gradient_bytes() * (often.reductions / self.options.gradient_compression),
        }
    }

    /// Rows of the path per copy that one copy per (token, expert) would be.
    fn rows_per_selection(&self, outer_sizes: &[usize], level: usize) -> f64 {
        let description = self.model.description();
        let choice = Choice { experts: description.experts, topk: description.topk };
        let scaling = self.cluster.scaling_factors();
        let mut domains: Vec<usize> =
            scaling[..level].iter().zip(outer_sizes).map(|(factor, size)| factor / size).collect();
        domains.push(scaling[level]);
        let rows = |path| token_rows(path, &domains, level, choice, 1.0);
        let forwarded = rows(TokenPath::Forwarded);
        if forwarded > 0.0 { rows(self.path) / forwarded } else { 1.0 }
    }

    /// What each expert would do by itself, at every level that has more than one member.
    pub(crate) fn selective(&self, domain_sizes: &[usize], kept: bool) -> Vec<SelectiveMigration> {
        let scaling = self.cluster.scaling_factors();
        let gpus = self.cluster.gpus() as f64;
        let shares = self.model.shares().as_slice();
        let levels = (0..scaling.len()).filter(|&level| scaling[level] > 1);
        levels
            .map(|level| {
                let outer = &domain_sizes[..level];
                // Each of the E experts goes to every other member, once per copy that the outer levels made.
                let copies = ((scaling[level] - 1) * outer.iter().product::<usize>()) as f64 / gpus;
                let trades = shares.iter().map(|&share| self.trade(outer, level, share, kept));
                let zero = SelectiveMigration {
                    level,
                    migrating: 0,
                    experts: shares.len(),
                    tokens_only: Bytes::ZERO,
                    experts_only: Bytes::ZERO,
                    selective: Bytes::ZERO,
                };
                trades.fold(zero, |sum, trade| SelectiveMigration {
                    migrating: sum.migrating + usize::from(trade.migrates()),
                    tokens_only: sum.tokens_only + trade.token_bytes * copies,
                    experts_only: sum.experts_only + trade.expert_bytes * copies,
                    selective: sum.selective + trade.token_bytes.min(trade.expert_bytes) * copies,
                    ..sum
                })
            })
            .collect()
    }

    /// What one more member would save and cost at every level, given the chosen domains of the outer levels.
    pub(crate) fn growth_tests(&self, domain_sizes: &[usize]) -> Vec<GrowthTest> {
        let row = self.model.dispatch_row_bytes() + self.model.combine_row_bytes();
        let tokens = row * (self.model.tokens() * self.model.description().topk as f64);
        let own = self.model.expert_bytes() * self.experts_per_gpu as f64 / self.options.weight_compression;
        let levels = self.cluster.levels().iter().enumerate();
        levels
            .map(|(level, at)| GrowthTest {
                level,
                saves: tokens / at.scaling_factor as f64,
                costs: own * domain_sizes[..level].iter().product::<usize>() as f64,
            })
            .collect()
    }
}
