//! The bytes that cross each level: one function per formula.
//!
//! All volumes are those of one GPU and one layer, in one direction. `g_l = SF_l / S_l` is the number of domains of
//! level `l`.

use std::ops::RangeInclusive;

use serde::{Deserialize, Serialize};

use crate::cluster::Level;
use crate::units::{Bytes, Seconds};

/// The path of a token to its experts.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "kebab-case")]
pub enum TokenPath {
    /// Plain expert parallelism: one copy per (token, expert), sent directly to the GPU of the expert. A copy crosses
    /// only the outermost level at which the two GPUs differ.
    Direct,
    /// The path of the paper: one copy per (token, expert), forwarded level by level.
    Forwarded,
    /// One row per (token, domain), forwarded level by level and duplicated where its experts are in several domains.
    /// Combine returns sums, one row per (token, domain), on the same path.
    Deduplicated,
}

/// `q = 1 − C(E − E/g, K) / C(E, K)`: the probability that a token chooses at least one expert of one given group out
/// of `g` equal groups. `E` is `experts`, `K` is `topk`, `g` is `groups`.
///
/// The `K` distinct experts of a token avoid the group in `C(E − E/g, K)` of `C(E, K)` cases. On a deduplicated path
/// the token is sent to the group once, not once per expert: with `K = 8` and two datacenters these are 0.997 rows
/// instead of 4.
pub fn group_probability(experts: usize, topk: usize, groups: usize) -> f64 {
    probability_of(experts, topk, experts / groups.max(1))
}

/// The probability that a token chooses at least one of `inside` experts.
fn probability_of(experts: usize, topk: usize, inside: usize) -> f64 {
    let others = experts.saturating_sub(inside);
    if others < topk {
        return 1.0;
    }
    let avoided: f64 = (0..topk).map(|chosen| (others - chosen) as f64 / (experts - chosen) as f64).product();
    1.0 - avoided
}

/// The probability that a token visits the busiest of `groups` groups, whose load is `hot` times the mean. A token
/// visits a group at most once.
pub(crate) fn visits(choice: Choice, groups: f64, hot: f64) -> f64 {
    let inside = (choice.experts as f64 / groups).round() as usize;
    (probability_of(choice.experts, choice.topk, inside) * hot).min(1.0)
}

/// The numbers of experts on which a token volume depends.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Choice {
    /// `E`: routed experts of a layer.
    pub experts: usize,
    /// `K`: experts that a token chooses.
    pub topk: usize,
}

/// Rows that the busiest GPU receives at a level, per token of one GPU. `domains` holds `g_j` of each level and `hot`
/// is `h_l`.
///
/// At level `l` a token is on one GPU of each outer group that it visits. From there it may go to the `g_l − 1` other
/// domains of the level. The token can thus enter `Π_{j<l} g_j (g_l − 1)` groups at this level, each of which is one of
/// `N_l = Π_{j<=l} g_j` groups. It enters
/// - on a deduplicated path: each group with probability `q(N_l)`; the busiest group with probability `min(1, h_l q)`,
///   because a token enters a group at most once;
/// - on a forwarded path: each group once per expert there, `K h_l / N_l` times. For even routing the sum is the
///   paper's `K (1 − S_l / SF_l)`;
/// - on a direct path: like forwarded, but only from the same outer group: `(g_l − 1) K h_l / N_l` rows in all.
///
/// # Panics
/// When `level` is not below the number of levels, or when it or an outer level has 0 domains.
pub fn token_rows(path: TokenPath, domains: &[usize], level: usize, choice: Choice, hot: f64) -> f64 {
    check(domains, level, 0..=level);
    let domains: Vec<f64> = domains.iter().map(|&count| count as f64).collect();
    rows_over(path, &domains, level, choice, hot)
}

/// [`token_rows`] for numbers of domains that need not be whole.
pub(crate) fn rows_over(path: TokenPath, domains: &[f64], level: usize, choice: Choice, hot: f64) -> f64 {
    let outer: f64 = domains[..level].iter().product();
    let groups = outer * domains[level];
    let others = domains[level] - 1.0;
    let copies = choice.topk as f64 * hot / groups;
    match path {
        TokenPath::Direct => others * copies,
        TokenPath::Forwarded => outer * others * copies,
        TokenPath::Deduplicated => outer * others * visits(choice, groups, hot),
    }
}

/// Messages that a GPU sends at a level in one all-to-all: one per other domain or, on a direct path, one per GPU of
/// the other domains. The number saturates at `usize::MAX`.
///
/// # Panics
/// When `level` is not below the number of levels, or when it has 0 domains.
pub fn token_messages(path: TokenPath, domains: &[usize], level: usize) -> usize {
    check(domains, level, level..=level);
    let others = domains[level] - 1;
    match path {
        TokenPath::Direct => domains[level + 1..].iter().copied().fold(others, usize::saturating_mul),
        TokenPath::Forwarded | TokenPath::Deduplicated => others,
    }
}

/// Experts that a GPU receives in the all-gather of a level: `n Π_{j<l} S_j (S_l − 1)`, with `n` experts per GPU.
///
/// The outer levels gather first, so that every expert crosses the slow links once; the inner levels forward the
/// received experts. Multiplied by `P / CR_w`, the number of experts gives the bytes of the gather. Multiplied by
/// `P / CR_g`, it gives the bytes of the reduce-scatter of their gradients, which takes the reverse path:
/// `RS_l = AG_l CR_w / CR_g`, which is 50 times the gather if only weights are compressed, by a factor of 50.
///
/// # Panics
/// When `level` is not below the number of levels, or when it has a domain size of 0.
pub fn gathered_experts(experts_per_gpu: usize, domain_sizes: &[usize], level: usize) -> f64 {
    check(domain_sizes, level, level..=level);
    let outer: f64 = domain_sizes[..level].iter().map(|&size| size as f64).product();
    experts_per_gpu as f64 * outer * (domain_sizes[level] - 1) as f64
}

/// Bytes per GPU, at a level, of the all-reduce that refreshes the codec's shared expert:
/// `2 P (SF_l − 1) / Π_{j>=l} SF_j`, with `P` bytes per expert.
///
/// The all-reduce is hierarchical: a reduce-scatter from the innermost level outwards, then an all-gather inwards.
/// Level `l` therefore carries a fraction `1 / Π_{j>l} SF_j` of the expert. Over all levels the bytes add up to `2 P (G
/// − 1) / G`. The refresh need not happen every step, because all ranks take residuals against the same, possibly
/// outdated, shared expert.
///
/// # Panics
/// When `level` is not below the number of levels, or when it or an inner level has 0 members.
pub fn refresh_bytes(expert: Bytes, scaling_factors: &[usize], level: usize) -> Bytes {
    check(scaling_factors, level, level..=scaling_factors.len().saturating_sub(1));
    let parts: f64 = scaling_factors[level..].iter().map(|&members| members as f64).product();
    expert * (2.0 * (scaling_factors[level] - 1) as f64 / parts)
}

/// Panics unless the level exists and the counts of these levels are positive. The formulas divide by the counts, or
/// subtract 1 from them.
fn check(counts: &[usize], level: usize, positive: RangeInclusive<usize>) {
    assert!(
        level < counts.len(),
        "level {level} does not exist: there are {}, numbered from 0",
        counts.len()
    );
    let zero = positive.into_iter().find(|&at| counts[at] == 0);
    assert!(
        zero.is_none(),
        "level {} of {counts:?} has a count of 0: it must be at least 1",
        zero.unwrap_or(level)
    );
}

/// The volume and the time of one exchange over the links of a level.
#[derive(Debug, Clone, Copy, PartialEq, Default, Serialize, Deserialize)]
pub struct Transfer {
    /// Messages that one GPU sends.
    pub messages: usize,
    /// Bytes that the busiest GPU receives.
    pub bytes_per_gpu: Bytes,
    /// Bytes over one link in one direction: `bytes_per_gpu` times the GPUs that share the link.
    pub bytes_per_link: Bytes,
    /// `alpha * messages + round trips * round_trip + bytes_per_gpu / bandwidth per GPU`; zero without a message.
    pub time: Seconds,
}

impl Transfer {
    /// Prices an exchange over a level that takes this many consecutive round trips.
    pub fn new(level: &Level, messages: usize, bytes_per_gpu: Bytes, round_trips: usize) -> Self {
        if messages == 0 {
            return Self::default();
        }
        let waits = level.alpha * messages as f64 + level.round_trip * round_trips as f64;
        Self {
            messages,
            bytes_per_gpu,
            bytes_per_link: bytes_per_gpu * level.gpus_per_link as f64,
            time: waits + bytes_per_gpu / level.bandwidth_per_gpu(),
        }
    }

    /// The sum of two consecutive exchanges.
    #[must_use]
    pub fn then(self, next: Self) -> Self {
        Self {
            messages: self.messages + next.messages,
            bytes_per_gpu: self.bytes_per_gpu + next.bytes_per_gpu,
            bytes_per_link: self.bytes_per_link + next.bytes_per_link,
            time: self.time + next.time,
        }
    }
}

#[cfg(test)]
mod tests {
    use std::collections::BTreeSet;

    use proptest::prelude::*;

    use super::*;
    use crate::divisors::divisor_product;
    use crate::domain::{Hop, Partition};
    use crate::units::BytesPerSecond;

    /// Every set of `topk` experts.
    fn choices(experts: usize, topk: usize) -> Vec<Vec<usize>> {
        (0..1u32 << experts)
            .filter(|set| set.count_ones() as usize == topk)
            .map(|set| (0..experts).filter(|expert| set >> expert & 1 == 1).collect())
            .collect()
    }

    fn eight_gpus() -> impl Strategy<Value = Vec<usize>> {
        prop::sample::select(vec![vec![8], vec![2, 4], vec![4, 2], vec![2, 2, 2]])
    }

    #[test]
    fn group_probability_agrees_with_enumeration() {
        for (experts, topk, groups) in [(8, 2, 4), (8, 3, 2), (12, 4, 3), (12, 2, 12), (6, 6, 3), (5, 3, 1)] {
            let size = experts / groups;
            let all = choices(experts, topk);
            let visiting = all.iter().filter(|choice| choice.iter().any(|&expert| expert < size)).count();
            let expected = visiting as f64 / all.len() as f64;
            assert!((group_probability(experts, topk, groups) - expected).abs() < 1e-12);
        }
        assert!((group_probability(256, 8, 2) - 0.9966).abs() < 1e-4);
    }

    proptest! {
        /// Sends every possible choice of experts from every GPU along the paths of the partition.
        #[test]
        fn token_rows_agree_with_enumeration(
            levels in eight_gpus(),
            pick in any::<prop::sample::Index>(),
            topk in 1..=4usize,
        ) {
            let sizes = pick.get(&divisor_product(&levels)).clone();
            let partition = Partition::new(&levels, &sizes).unwrap();
            let domains = partition.domains();
            let choice = Choice { experts: 8, topk };
            let all = choices(8, topk);
            let mut forwarded = vec![0; levels.len()];
            let mut distinct = vec![0; levels.len()];
            for from in 0..8 {
                for experts in &all {
                    let hops: Vec<Hop> =
                        experts.iter().flat_map(|&owner| partition.token_path(from, owner).unwrap()).collect();
                    hops.iter().for_each(|hop| forwarded[hop.level] += 1);
                    let once: BTreeSet<_> = hops.iter().map(|hop| (hop.level, hop.from, hop.to)).collect();
                    once.iter().for_each(|&(level, ..)| distinct[level] += 1);
                }
            }
            for level in 0..levels.len() {
                let mean = |count: usize| count as f64 / (8 * all.len()) as f64;
                let rows = |path| token_rows(path, &domains, level, choice, 1.0);
                prop_assert!((rows(TokenPath::Forwarded) - mean(forwarded[level])).abs() < 1e-9);
                prop_assert!((rows(TokenPath::Deduplicated) - mean(distinct[level])).abs() < 1e-9);
                let paper = topk as f64 * (1.0 - sizes[level] as f64 / levels[level] as f64);
                prop_assert!((rows(TokenPath::Forwarded) - paper).abs() < 1e-9);
            }
        }

        #[test]
        fn direct_rows_agree_with_enumeration(levels in eight_gpus(), topk in 1..=8usize) {
            let partition = Partition::new(&levels, &vec![1; levels.len()]).unwrap();
            let mut pairs = vec![0; levels.len()];
            for owner in 0..8 {
                let (here, there) = (partition.location(0).unwrap(), partition.location(owner).unwrap());
                if let Some(level) = (0..levels.len()).find(|&level| here[level] != there[level]) {
                    pairs[level] += 1;
                }
            }
            for (level, &pairs) in pairs.iter().enumerate() {
                let rows = token_rows(TokenPath::Direct, &levels, level, Choice { experts: 8, topk }, 1.0);
                prop_assert!((rows - (topk * pairs) as f64 / 8.0).abs() < 1e-9);
                prop_assert_eq!(token_messages(TokenPath::Direct, &levels, level), pairs);
            }
        }

        #[test]
        fn gathers_and_refreshes_of_all_levels_add_up(
            levels in prop::collection::vec(1..=6usize, 1..=4),
            pick in any::<prop::sample::Index>(),
            own in 1..4usize,
        ) {
            let sizes = pick.get(&divisor_product(&levels)).clone();
            let total: usize = levels.iter().product();
            let gathered: f64 = (0..levels.len()).map(|level| gathered_experts(own, &sizes, level)).sum();
            prop_assert_eq!(gathered, (own * (sizes.iter().product::<usize>() - 1)) as f64);
            let refreshed: f64 = (0..levels.len()).map(|level| refresh_bytes(Bytes(1.0), &levels, level).0).sum();
            prop_assert!((refreshed - 2.0 * (total - 1) as f64 / total as f64).abs() < 1e-12);
        }
    }

    #[test]
    fn a_missing_level_and_a_count_of_zero_are_named() {
        let choice = Choice { experts: 8, topk: 2 };
        let of = |counts: &[usize], level: usize, formula: usize| {
            let volume = || match formula {
                0 => token_rows(TokenPath::Deduplicated, counts, level, choice, 1.0),
                1 => token_messages(TokenPath::Direct, counts, level) as f64,
                2 => gathered_experts(1, counts, level),
                _ => refresh_bytes(Bytes(1.0), counts, level).0,
            };
            std::panic::catch_unwind(volume).map_err(|panic| *panic.downcast::<String>().unwrap())
        };
        for formula in 0..4 {
            assert!(of(&[4, 2], 1, formula).unwrap().is_finite());
            assert_eq!(
                of(&[4, 2], 2, formula).unwrap_err(),
                "level 2 does not exist: there are 2, numbered from 0"
            );
            assert!(of(&[4, 0], 1, formula).unwrap_err().starts_with("level 1 of [4, 0] has a count of 0"));
            assert!(of(&[1, usize::MAX, usize::MAX], 1, formula).is_ok());
        }
    }

    #[test]
    fn a_hot_group_receives_a_token_at_most_once() {
        let choice = Choice { experts: 256, topk: 8 };
        let rows = |hot| token_rows(TokenPath::Deduplicated, &[4], 0, choice, hot);
        assert!(rows(1.0) < rows(1.05) && rows(1.05) < rows(2.0));
        assert_eq!(rows(2.0), 3.0);
        assert_eq!(token_rows(TokenPath::Forwarded, &[4], 0, choice, 2.0), 12.0);
    }

    #[test]
    fn a_transfer_takes_starts_round_trip_and_bytes() {
        let level = Level {
            scaling_factor: 4,
            alpha: Seconds(1.0),
            round_trip: Seconds(10.0),
            link_bandwidth: BytesPerSecond(200.0),
            gpus_per_link: 2,
        };
        let transfer = Transfer::new(&level, 3, Bytes(100.0), 1);
        assert_eq!(transfer.time, Seconds(3.0 + 10.0 + 1.0));
        assert_eq!(transfer.bytes_per_link, Bytes(200.0));
        assert_eq!(Transfer::new(&level, 0, Bytes(100.0), 1), Transfer::default());
        assert_eq!(transfer.then(transfer).time, Seconds(28.0));
    }
}
