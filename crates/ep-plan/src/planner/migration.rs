//! The experts that are worth moving individually. (The plan itself moves all experts of a domain.)

use serde::{Deserialize, Serialize};

use super::cost::{CostModel, Frequencies};
use super::volume::{Choice, TokenPath, token_rows};
use crate::units::Bytes;

/// The bytes on a link, per layer and micro-batch, of one expert's tokens, and of the expert if it is moved instead.
#[derive(Debug, Clone, Copy, PartialEq, Serialize, Deserialize)]
pub struct ExpertTrade {
    /// `4 tokens_e H b`: the expert's tokens in dispatch and combine, forward and backward, for `tokens_e` tokens of
    /// `H` elements of `b` bytes. Without training, half of this.
    pub token_bytes: Bytes,
    /// `P (2 / CR_w + 1 / CR_g)`: the expert in each pass, and its gradients on the way back.
    pub expert_bytes: Bytes,
}

impl ExpertTrade {
    /// Whether moving the expert takes fewer bytes than moving its tokens.
    pub fn migrates(&self) -> bool {
        self.token_bytes.0 > self.expert_bytes.0
    }
}

/// The traffic of a level if each expert were moved or left individually, given the chosen domains of the outer levels.
/// Bytes are those of one GPU, layer and micro-batch.
#[derive(Debug, Clone, Copy, PartialEq, Serialize, Deserialize)]
pub struct SelectiveMigration {
    /// The level, numbered from 0, outermost first.
    pub level: usize,
    /// Experts and copies of experts that are worth moving across the level.
    pub migrating: usize,
    /// Routed experts of a layer, with copies.
    pub experts: usize,
    /// Bytes if only tokens cross the level.
    pub tokens_only: Bytes,
    /// Bytes if every expert crosses the level instead of its tokens.
    pub experts_only: Bytes,
    /// Bytes if an expert crosses the level instead of its tokens wherever that takes fewer bytes.
    pub selective: Bytes,
}

/// The effect of one more member in the domains of a level, in bytes per GPU of one layer and micro-batch, with one copy
/// per (token, expert).
#[derive(Debug, Clone, Copy, PartialEq, Serialize, Deserialize)]
pub struct GrowthTest {
    /// The level, numbered from 0, outermost first.
    pub level: usize,
    /// Bytes of tokens that one more member saves: `2 D / SF_l` in each pass.
    pub saves: Bytes,
    /// Bytes of experts that one more member adds: `n P Π_{j<l} S_j / CR_w` in each gather.
    pub costs: Bytes,
    /// Bytes of gradients that one more member adds: `n P Π_{j<l} S_j / CR_g`, with the bytes of gradients, in each
    /// reduction.
    pub gradients: Bytes,
}

impl CostModel<'_> {
    /// The trade of one expert at a level. `share` is the expert's fraction of all selections.
    ///
    /// A copy of the expert that crosses the level serves the tokens of every GPU inside the receiving member, and, at
    /// the outer levels, those of the domains that share the copy: `tokens_e = T K share_e Π_{j>l} SF_j Π_{j<l} SF_j /
    /// S_j`. On a deduplicated path several experts share a row; each is charged its part of the row.
    pub(super) fn trade(
        &self,
        outer_sizes: &[usize],
        level: usize,
        share: f64,
        replicas_kept: bool,
    ) -> ExpertTrade {
        let scaling = self.cluster.scaling_factors();
        let description = self.model.description();
        let inside: usize = scaling[level + 1..].iter().product();
        let outside: usize =
            scaling[..level].iter().zip(outer_sizes).map(|(factor, size)| factor / size).product();
        let tokens = self.model.tokens() * description.topk as f64 * share * (inside * outside) as f64;
        let frequencies = Frequencies::new(self.options, replicas_kept);
        let row = self.model.dispatch_row_bytes() + self.model.combine_row_bytes();
        ExpertTrade {
            token_bytes: row * (tokens * frequencies.passes * self.rows_per_selection(outer_sizes, level)),
            expert_bytes: self.model.expert_bytes()
                * (frequencies.gathers / self.options.weights_by(self.model))
                + self.model.gradient_bytes()
                    * (frequencies.reductions / self.options.gradients_by(self.model)),
        }
    }

    /// Rows that the path sends, over the rows of a path with one copy per (token, expert).
    fn rows_per_selection(&self, outer_sizes: &[usize], level: usize) -> f64 {
        let description = self.model.description();
        let choice = Choice { experts: self.model.slots(), topk: description.topk };
        let scaling = self.cluster.scaling_factors();
        let mut domains: Vec<usize> =
            scaling[..level].iter().zip(outer_sizes).map(|(factor, size)| factor / size).collect();
        domains.push(scaling[level]);
        let rows = |path| token_rows(path, &domains, level, choice, 1.0);
        let forwarded = rows(TokenPath::Forwarded);
        if forwarded > 0.0 { rows(self.path) / forwarded } else { 1.0 }
    }

    /// The traffic with individually moved experts, at every level that has more than one member.
    pub(crate) fn selective(&self, domain_sizes: &[usize], replicas_kept: bool) -> Vec<SelectiveMigration> {
        let scaling = self.cluster.scaling_factors();
        let gpus = self.cluster.gpus() as f64;
        let shares = self.model.shares().as_slice();
        let levels = (0..scaling.len()).filter(|&level| scaling[level] > 1);
        levels
            .map(|level| {
                let outer = &domain_sizes[..level];
                // Each of the E experts goes to every other member, once per copy that the outer levels hold.
                let copies = ((scaling[level] - 1) * outer.iter().product::<usize>()) as f64 / gpus;
                let trades = shares.iter().map(|&share| self.trade(outer, level, share, replicas_kept));
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

    /// The effect of one more member at every level that has a member outside the domain, given the chosen domains of the
    /// outer levels.
    pub(crate) fn growth_tests(&self, domain_sizes: &[usize], replicas_kept: bool) -> Vec<GrowthTest> {
        let frequencies = Frequencies::new(self.options, replicas_kept);
        let row = self.model.dispatch_row_bytes() + self.model.combine_row_bytes();
        let tokens = row * (self.model.tokens() * self.model.description().topk as f64);
        let own = self.experts_per_gpu as f64;
        let weights =
            self.model.expert_bytes() * (own * frequencies.gathers / self.options.weights_by(self.model));
        let gradients = self.model.gradient_bytes()
            * (own * frequencies.reductions / self.options.gradients_by(self.model));
        let levels = self.cluster.levels().iter().enumerate();
        levels
            .filter(|(level, at)| domain_sizes[*level] < at.scaling_factor)
            .map(|(level, at)| GrowthTest {
                level,
                saves: tokens * (frequencies.passes / at.scaling_factor as f64),
                costs: weights * domain_sizes[..level].iter().product::<usize>() as f64,
                gradients: gradients * domain_sizes[..level].iter().product::<usize>() as f64,
            })
            .collect()
    }
}
