//! Random cases, from the same space as the fixed cases of the suite.

use rand::{RngExt as _, SeedableRng as _};
use rand_chacha::ChaCha8Rng;

use super::case::{CapacityKind, Case, ProbsKind, RoutingKind, pad};
use crate::backend::{DispatchMode, Element, TokenFormat};
use crate::numeric::ScaleFormat;
use crate::topology::Rank;

/// A small random case of 1 to `max_ranks` ranks in at most `max_domains` domains; the same for the same arguments.
///
/// # Panics
/// When `max_ranks` or `max_domains` is 0.
pub fn random_case(seed: u64, max_ranks: usize, max_domains: usize) -> Case {
    let rng = &mut ChaCha8Rng::seed_from_u64(seed);
    let ranks = rng.random_range(1..=max_ranks);
    let divisors: Vec<usize> = (1..=max_domains).filter(|&domains| ranks.is_multiple_of(domains)).collect();
    let domains = pick(rng, &divisors);
    RandomWorld::draw(rng, ranks, domains).case(seed, rng, size, 3)
}

/// The parameters of the world of a random case.
#[derive(Debug, Clone)]
pub(super) struct RandomWorld {
    pub(super) ranks: usize,
    pub(super) domains: usize,
    pub(super) experts: usize,
    pub(super) owners: Option<Vec<Rank>>,
}

impl RandomWorld {
    /// Draws the experts: the same number on each rank, or a placement table.
    pub(super) fn draw(rng: &mut ChaCha8Rng, ranks: usize, domains: usize) -> Self {
        let owners = rng.random_bool(0.4).then(|| owners(rng, ranks));
        let experts = owners.as_ref().map_or_else(|| ranks * rng.random_range(1..=4), Vec::len);
        Self { ranks, domains, experts, owners }
    }

    /// Draws all other parameters of a case. `size` draws its size.
    pub(super) fn case(
        self,
        seed: u64,
        rng: &mut ChaCha8Rng,
        size: impl Fn(&mut ChaCha8Rng, usize) -> Size,
        most_runs: usize,
    ) -> Case {
        let Self { ranks, domains, experts, owners } = self;
        let format = format(rng);
        // `hidden` is a multiple of `step`, so that rows are multiples of 16 bytes: dispatch's output rows, and
        // combine's rows, whose elements have at least 2 bytes.
        let step = (16 / format.output_row_bytes(1)).max(8);
        let size = size(rng, step);
        let mode = mode(rng);
        Case {
            name: "random".into(),
            seed,
            ranks,
            domains,
            experts,
            owners,
            tokens: tokens(rng, ranks, size.most_tokens),
            hidden: size.hidden,
            routing: routing(rng, experts),
            mode,
            capacity: capacity(rng, ranks),
            format,
            element: pick(rng, &[Element::Bf16, Element::F32]),
            wire: pick(rng, &[Element::Bf16, Element::F32]),
            probs: pick(rng, &[ProbsKind::Skip, ProbsKind::Routing, ProbsKind::Dense]),
            special: rng.random_bool(0.3),
            runs: rng.random_range(1..=most_runs),
        }
    }
}

pub(super) fn pick<T: Clone>(rng: &mut ChaCha8Rng, all: &[T]) -> T {
    all[rng.random_range(0..all.len())].clone()
}

/// A placement table in which some ranks may hold no expert.
fn owners(rng: &mut ChaCha8Rng, ranks: usize) -> Vec<Rank> {
    let holders: Vec<u32> = (0..ranks as u32).filter(|_| rng.random_bool(0.7)).collect();
    let holders = if holders.is_empty() { vec![ranks as u32 - 1] } else { holders };
    (0..rng.random_range(1..=3 * ranks)).map(|_| Rank(pick(rng, &holders))).collect()
}

fn format(rng: &mut ChaCha8Rng) -> TokenFormat {
    let scales = pick(rng, &SCALE_FORMATS);
    let fp8 = [TokenFormat::Fp8(scales), TokenFormat::QuantizeFp8(scales)];
    pick(rng, &[TokenFormat::Bf16, TokenFormat::F32, fp8[0], fp8[1]])
}

/// All scale formats.
pub(super) const SCALE_FORMATS: [ScaleFormat; 3] =
    [ScaleFormat::F32Per128, ScaleFormat::Ue8m0Per128, ScaleFormat::Ue8m0Per32];

/// The size of a case: the most tokens of a rank, and the width of tokens.
pub(super) struct Size {
    pub(super) most_tokens: usize,
    pub(super) hidden: usize,
}

/// The size of a random case outside a soak. `hidden` is a multiple of `step`.
fn size(rng: &mut ChaCha8Rng, step: usize) -> Size {
    let (most_tokens, steps) = match rng.random_range(0..20) {
        0 => (90, rng.random_range(1..=2)),
        1 => (2, rng.random_range(64..=256)),
        _ => (9, rng.random_range(1..=20)),
    };
    Size { most_tokens, hidden: step * steps }
}

fn tokens(rng: &mut ChaCha8Rng, ranks: usize, most: usize) -> Vec<usize> {
    let absent = pick(rng, &[0.0, 0.1, 0.5]);
    (0..ranks).map(|_| if rng.random_bool(absent) { 0 } else { rng.random_range(0..=most) }).collect()
}

fn routing(rng: &mut ChaCha8Rng, experts: usize) -> RoutingKind {
    match rng.random_range(0..10) {
        0 => RoutingKind::Nothing,
        1 => RoutingKind::HotExpert,
        2..=5 => RoutingKind::MultiHot { density: rng.random_range(0.05..0.6) },
        _ => RoutingKind::TopK { k: rng.random_range(1..=experts.min(8)), skew: pick(rng, &[0.0, 0.6, 1.2]) },
    }
}

fn mode(rng: &mut ChaCha8Rng) -> DispatchMode {
    match rng.random_range(0..3) {
        0 => DispatchMode::Plain,
        _ => pad(pick(rng, &[1, 1, 2, 7, 16, 32])),
    }
}

fn capacity(rng: &mut ChaCha8Rng, ranks: usize) -> Vec<CapacityKind> {
    use CapacityKind::{Exact, Larger, TooSmall, Unbounded, Zero};
    match rng.random_range(0..2) {
        0 => vec![Unbounded; ranks],
        _ => (0..ranks).map(|_| pick(rng, &[Unbounded, Exact, TooSmall, TooSmall, Zero, Larger])).collect(),
    }
}
