//! The content of a case: routings, tokens, expert outputs and probabilities, generated from the case's seed.

use rand::RngExt as _;
use rand_chacha::ChaCha8Rng;

use super::case::{Case, RoutingKind};
use crate::backend::{Element, TokenFormat};
use crate::error::Result;
use crate::oracle::ReceivedRows;
use crate::routing::Routing;
use crate::topology::{Rank, World};
use crate::workload::{Workload, rng_for};

/// The purpose of a random number generator. Each purpose has its own stream, so that contents are independent.
#[derive(Debug, Clone, Copy)]
pub(super) enum Purpose {
    Routing,
    Tokens,
    Dense,
    ExpertRows,
    RowProbs,
}

impl Case {
    /// The generator of one rank's content for one purpose, in one run.
    pub(super) fn rng(&self, rank: Rank, purpose: Purpose, run: usize) -> ChaCha8Rng {
        // `Workload` uses purpose 0 for its routings.
        rng_for(self.seed, rank, 1 + purpose as u64 + 8 * run as u64)
    }

    /// The routing of one rank.
    pub(super) fn routing_of(&self, rank: Rank) -> Result<Routing> {
        let tokens = self.tokens[rank.index()];
        let experts = self.experts;
        let mut rng = self.rng(rank, Purpose::Routing, 0);
        match self.routing {
            RoutingKind::TopK { k, skew } => {
                let workload = Workload { tokens, experts, topk: k.min(experts), skew, seed: self.seed };
                Ok(workload.routing(rank))
            }
            RoutingKind::MultiHot { density } => {
                let map: Vec<u8> = (0..tokens * experts)
                    .map(|at| match (at / experts + rank.index()) % 5 {
                        0 => 0,
                        1 => 1,
                        _ => rng.random_bool(density).into(),
                    })
                    .collect();
                // A weight of zero must not be mistaken for an expert that is not chosen.
                let weights: Vec<f32> = (0..map.len())
                    .map(|_| if rng.random_bool(0.1) { 0.0 } else { rng.random_range(0.05..1.0) })
                    .collect();
                Routing::from_map(rank, experts, &map, &weights)
            }
            RoutingKind::HotExpert => {
                let hot = (self.seed % experts as u64) as i32;
                let weights: Vec<f32> = (0..tokens).map(|_| rng.random_range(0.05..1.0)).collect();
                Routing::from_topk(rank, experts, 1, &vec![hot; tokens], &weights)
            }
            RoutingKind::Nothing => {
                Routing::from_topk(rank, experts, 1, &vec![-1; tokens], &vec![1.0; tokens])
            }
        }
    }

    /// The decoy routing: small, different from the routing of the case, in the same world.
    pub(super) fn decoy_of(&self, rank: Rank) -> Routing {
        let (experts, topk) = (self.experts, self.experts.min(2));
        let seed = self.seed ^ 0x5EED;
        Workload { tokens: 2 + rank.index() % 3, experts, topk, skew: 0.0, seed }.routing(rank)
    }

    /// The input tokens and scales of dispatch.
    pub(super) fn tokens_of(&self, rank: Rank, run: usize) -> (Vec<u8>, Vec<u8>) {
        let tokens = self.tokens[rank.index()];
        let mut rng = self.rng(rank, Purpose::Tokens, run);
        if let TokenFormat::Fp8(_) = self.format {
            // Dispatch copies FP8 codes and scales without interpreting them, so random bytes are valid.
            let mut bytes = |len: usize| (0..len).map(|_| rng.random()).collect::<Vec<u8>>();
            let data = bytes(tokens * self.hidden);
            return (data, bytes(tokens * self.format.scale_row_bytes(self.hidden)));
        }
        let mut data = Vec::with_capacity(tokens * self.format.input_row_bytes(self.hidden));
        for token in 0..tokens {
            // Rows differ in magnitude. Some rows are zero, to test the scale of a block of zeros.
            let size = if token % 7 == 5 { 0.0 } else { 2f32.powi(token as i32 % 11 - 6) };
            for _ in 0..self.hidden {
                let value = rng.random_range(-4.0f32..4.0) * size;
                let bits =
                    if self.special && rng.random_bool(0.05) { odd(&mut rng) } else { value.to_bits() };
                match self.format {
                    TokenFormat::F32 => data.extend(bits.to_le_bytes()),
                    _ => data.extend(upper_half(bits).to_le_bytes()),
                }
            }
        }
        (data, Vec::new())
    }

    /// A dense matrix of probabilities, non-zero even where a token did not choose the expert.
    pub(super) fn dense_of(&self, rank: Rank, run: usize) -> Vec<f32> {
        self.probs_of(self.tokens[rank.index()] * self.experts, self.rng(rank, Purpose::Dense, run))
    }

    /// `len` probabilities of received rows, for combine to gather.
    pub(super) fn row_probs_of(&self, rank: Rank, run: usize, len: usize) -> Vec<f32> {
        self.probs_of(len, self.rng(rank, Purpose::RowProbs, run))
    }

    fn probs_of(&self, len: usize, mut rng: ChaCha8Rng) -> Vec<f32> {
        let value = |rng: &mut ChaCha8Rng| {
            if self.special { f32::from_bits(odd(rng)) } else { rng.random_range(0.05f32..1.0) }
        };
        (0..len).map(|_| value(&mut rng)).collect()
    }

    /// Expert outputs for all allocated rows of a rank. Rows differ from each other, so that a wrong row changes the
    /// result. Rows without a token are NaN, so that adding one changes the result.
    pub(super) fn expert_rows_of(&self, rank: Rank, run: usize, received: &ReceivedRows) -> Vec<u8> {
        let mut rng = self.rng(rank, Purpose::ExpertRows, run);
        let allocated = received.shape.allocated_rows();
        let mut bytes = Vec::with_capacity(allocated * self.hidden * self.element.bytes());
        for row in 0..allocated {
            let holds_token = received.rows.get(row).is_some_and(Option::is_some);
            for column in 0..self.hidden {
                let bits = if !holds_token {
                    0x7FC0_0000
                } else if self.special {
                    special_summand(column, &mut rng)
                } else {
                    summand(column, &mut rng)
                };
                match self.element {
                    Element::Bf16 => bytes.extend(upper_half(bits).to_le_bytes()),
                    Element::F32 => bytes.extend(bits.to_le_bytes()),
                }
            }
        }
        bytes
    }
}

/// The bf16 bits with the sign, the exponent and the upper mantissa bits of an f32.
fn upper_half(bits: u32) -> u16 {
    (bits >> 16) as u16
}

/// A summand, as f32 bits. In every second column the sum depends on the order of additions and the places of rounding.
/// The other columns hold values of similar magnitude, which f32 adds without rounding.
fn summand(column: usize, rng: &mut ChaCha8Rng) -> u32 {
    let plain = rng.random_range(-4.0f32..4.0);
    let value = match column % 4 {
        // Large values that cancel each other absorb the small values added between them.
        1 => match rng.random_range(0..3) {
            0 => 2f32.powi(30),
            1 => -2f32.powi(30),
            _ => plain,
        },
        3 => plain * 2f32.powi(rng.random_range(-14..14)),
        _ => plain,
    };
    value.to_bits()
}

/// A summand, as f32 bits, whose sums reach the limits of the range of f32.
fn special_summand(column: usize, rng: &mut ChaCha8Rng) -> u32 {
    let random: u32 = rng.random();
    match column % 6 {
        // Subnormal in bf16 and in f32.
        0 => random & 0x807F_FFFF,
        // Sums of negative zeros only.
        1 => 0x8000_0000,
        // Near the largest finite value: sums overflow or cancel.
        2 => 0x7F00_0000 | random & 0x807F_FFFF,
        // Near the smallest normal value: differences are subnormal.
        3 => 0x0080_0000 | random & 0x80FF_FFFF,
        _ if random.is_multiple_of(8) => odd(rng),
        _ => summand(column, rng),
    }
}

/// Bits of a special value, such as NaN, an infinity, a zero or a subnormal.
fn odd(rng: &mut ChaCha8Rng) -> u32 {
    const ODD: [u32; 14] = [
        0x7FC0_0000, // NaN
        0xFFC1_2345, // a negative NaN with a payload
        0x7F81_0001, // a signalling NaN
        0x7FFF_FFFF, // the canonical NaN
        0x7F80_0000, // infinity
        0xFF80_0000,
        0x0000_0000,
        0x8000_0000, // negative zero
        0x0001_0001, // subnormal
        0x807F_FFFF,
        0x0080_0000, // the smallest normal
        0x7F7F_FFFF, // the largest finite value
        0xFF7F_0000,
        0x3F80_0000,
    ];
    ODD[rng.random_range(0..ODD.len())]
}

/// The routings of all ranks.
pub(super) fn routings(case: &Case, world: &World) -> Result<Vec<Routing>> {
    world.topology().all_ranks().map(|rank| case.routing_of(rank)).collect()
}
