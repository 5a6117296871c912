//! A candidate as one site sees it, and the transfers of the slowest site.
//!
//! Unequal sites divide into parts ([`Cluster`]), and a candidate has one domain size per level of a part. To a site
//! with `w` of the `W` parts, the cluster looks like `W / w` sites of its own kind, each with `w SF_1` members of the
//! second level. The formulas of [`volume`](super::volume) then hold for this site, with a number of sites that need
//! not be whole. In exchanges between sites a site may send more than it receives; the larger of the two counts.

use super::volume::{Choice, TokenPath, Transfer, rows_over, visits};
use crate::cluster::{Cluster, Level, Site, gcd};

/// The factors of a candidate for one site.
#[derive(Debug, Clone)]
pub(crate) struct SiteShape<'a> {
    /// The levels with the links of the site.
    pub(crate) levels: &'a [Level],
    /// Members, domain sizes and domains of each level, as the site sees them.
    members: Vec<f64>,
    sizes: Vec<f64>,
    domains: Vec<f64>,
    /// `f_s = w_s / W` of all sites, if they are unequal.
    shares: Vec<f64>,
    /// `f_s` of this site.
    share: f64,
    /// `w_s` of this site; 1 if all sites are equal.
    parts: usize,
}

/// The candidate as each site sees it; a single shape if all sites are equal.
pub(crate) fn shapes<'a>(cluster: &'a Cluster, domain_sizes: &[usize]) -> Vec<SiteShape<'a>> {
    let members: Vec<f64> = cluster.levels().iter().map(|level| level.scaling_factor as f64).collect();
    let sizes: Vec<f64> = domain_sizes.iter().map(|&size| size as f64).collect();
    let domains: Vec<f64> = members.iter().zip(&sizes).map(|(all, size)| all / size).collect();
    let uniform = |levels: &'a [Level]| SiteShape {
        levels,
        members: members.clone(),
        sizes: sizes.clone(),
        domains: domains.clone(),
        shares: Vec::new(),
        share: 1.0 / members[0],
        parts: 1,
    };
    if !cluster.is_unequal() {
        return vec![uniform(cluster.levels())];
    }
    let shares: Vec<f64> = cluster.sites().iter().map(|site| site.parts as f64 / members[0]).collect();
    let of_site = |site: &'a Site| {
        let parts = site.parts as f64;
        let mut shape = SiteShape {
            shares: shares.clone(),
            share: parts / members[0],
            parts: site.parts,
            ..uniform(&site.levels)
        };
        // A domain that spans sites has the same GPUs of every part; any other domain lies inside a part.
        let divided = if domain_sizes[0] > 1 { &mut shape.sizes } else { &mut shape.domains };
        for factors in [&mut shape.members, divided] {
            factors[0] /= parts;
            factors[1] *= parts;
        }
        shape
    };
    let all = cluster.sites();
    // Equal sites have equal shapes, so only the first of them is priced.
    let distinct = all.iter().enumerate().filter(|(index, site)| !all[..*index].contains(site));
    distinct.map(|(_, site)| of_site(site)).collect()
}

/// The transfer that takes longest; the first one if several take equally long.
pub(crate) fn slowest(transfers: impl Iterator<Item = Transfer>) -> Transfer {
    transfers.reduce(|a, b| if b.time > a.time { b } else { a }).unwrap_or_default()
}

impl SiteShape<'_> {
    /// Rows that a GPU receives at a level in dispatch, or sends, if these are more, per token of one GPU
    /// ([`token_rows`](super::token_rows)).
    pub(crate) fn rows(&self, path: TokenPath, level: usize, choice: Choice, hot: f64) -> f64 {
        let received = rows_over(path, &self.domains, level, choice, hot);
        if !self.crosses_unequal(level, &self.domains) || path != TokenPath::Deduplicated {
            return received;
        }
        let visited: f64 = self.shares.iter().map(|share| visits(choice, 1.0 / share, hot)).sum();
        received.max(visited - visits(choice, 1.0 / self.share, hot))
    }

    /// Messages that a GPU sends at a level in one all-to-all ([`token_messages`](super::token_messages)).
    pub(crate) fn token_messages(&self, path: TokenPath, level: usize) -> usize {
        let others = self.domains[level] - 1.0;
        let messages = match path {
            TokenPath::Direct => others * self.domains[level + 1..].iter().product::<f64>(),
            _ if self.crosses_unequal(level, &self.domains) => self.shares.len() as f64 - 1.0,
            _ => others,
        };
        messages.round() as usize
    }

    /// The number of experts that a GPU receives in the gather of a level, or sends, if these are more; and the number
    /// of messages that it sends ([`gathered_experts`](super::gathered_experts)).
    pub(crate) fn gathered(&self, experts_per_gpu: usize, level: usize) -> (f64, usize) {
        let own = experts_per_gpu as f64;
        let others = self.sizes[level] - 1.0;
        let received = own * self.sizes[..level].iter().product::<f64>() * others;
        if self.crosses_unequal(level, &self.sizes) {
            let sites = self.shares.len() as f64 - 1.0;
            return (received.max(own * sites), sites as usize);
        }
        (received, others.round() as usize)
    }

    /// The fraction of the reduced bytes that a GPU sends at a level in a hierarchical reduce-scatter or all-gather,
    /// and the number of other members. Every GPU keeps the same number of bytes. `copies` has the number of members of
    /// each level that take part; at the outermost level, 1 or all.
    pub(crate) fn reduced(&self, copies: &[f64], level: usize) -> (f64, usize) {
        let inner: f64 = copies[level + 1..].iter().product();
        if self.crosses_unequal(level, copies) {
            let others = self.shares.len() as f64 - 1.0;
            return ((others * self.share).max(1.0 - self.share) / inner, others as usize);
        }
        let others = copies[level] - 1.0;
        (others / (copies[level] * inner), others.round() as usize)
    }

    /// The number of sites with which a GPU exchanges its share in a direct exchange between sites, and the number of messages
    /// that it sends: one per GPU whose share overlaps its own. The GPUs of a site divide the bytes equally. `copies` has the
    /// number of members of each level that take part, as the site sees them.
    pub(crate) fn exchanged(&self, cluster: &Cluster, copies: &[f64]) -> (f64, usize) {
        if self.crosses_unequal(0, copies) {
            let owners = cluster.sites().iter().map(|other| most_overlaps(self.parts, other.parts));
            // In its own site, a GPU's share overlaps only itself, which the sum counts as one owner.
            return (self.shares.len() as f64 - 1.0, owners.sum::<usize>() - 1);
        }
        let others = copies[0] - 1.0;
        (others, others.round() as usize)
    }

    /// Replicas of each level as the site sees them. `copies` has those of a part; at the outermost level, 1 or all.
    pub(crate) fn replicas(&self, copies: &[usize]) -> Vec<f64> {
        let mut found: Vec<f64> = copies.iter().map(|&count| count as f64).collect();
        if found[0] > 1.0 && !self.shares.is_empty() {
            let parts = self.share * found[0];
            found[0] /= parts;
            found[1] *= parts;
        }
        found
    }

    /// Members of each level, as the site sees them.
    pub(crate) fn members(&self) -> &[f64] {
        &self.members
    }

    /// Whether an exchange between `factors` members of the level connects unequal sites.
    fn crosses_unequal(&self, level: usize, factors: &[f64]) -> bool {
        level == 0 && factors[0] > 1.0 && !self.shares.is_empty()
    }
}

/// Divides a whole twice, into `ours` equal shares and into `theirs` equal shares. Returns the largest number of shares of the
/// second kind that a share of the first kind overlaps.
fn most_overlaps(ours: usize, theirs: usize) -> usize {
    let common = gcd(ours, theirs);
    let (ours, theirs) = (ours / common, theirs / common);
    match (ours, theirs) {
        (1, all) => all,
        (_, 1) => 1,
        // A share of ours that begins just before a border of theirs overlaps the most.
        _ => (theirs - 2) / ours + 2,
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn overlaps_are_those_of_the_worst_share() {
        for ours in 1..40 {
            for theirs in 1..40 {
                let overlaps = |at: usize| {
                    (0..theirs)
                        .filter(|other| at * theirs < (other + 1) * ours && other * ours < (at + 1) * theirs)
                        .count()
                };
                let most = (0..ours).map(overlaps).max().unwrap();
                assert_eq!(most_overlaps(ours, theirs), most, "{ours} {theirs}");
            }
        }
    }
}
