//! The operators written from their definition: slow, simple, and for all ranks of the world at once.
//!
//! The results of every backend must equal those of [`dispatch`] and [`combine`] bit for bit. [`combine_f64`]
//! gives sums in double precision and sums of magnitudes, from which tests bound the rounding error. This module does not
//! use [`crate::layout`], so that tests can compare the two modules.
//!
//! Slices with one entry per rank are indexed by rank. The functions panic on arguments that do not fit each other.

use crate::backend::{DispatchMode, Element, TokenFormat};
use crate::layout::ReceiveShape;
use crate::numeric::{bf16_to_f32, canonical_f32, f32_to_bf16, quantize_row};
use crate::routing::Routing;
use crate::topology::{Rank, World};

/// The source of one row: a token, and its experts on the receiving rank with their weights.
#[derive(Debug, Clone, PartialEq)]
pub struct RowSource {
    /// The token's source rank.
    pub rank: Rank,
    /// The token's index on its source rank.
    pub token: usize,
    /// The experts of the row and their weights, in order of local expert; exactly one in permuted mode.
    pub experts: Vec<(u32, f32)>,
}

/// All rows that one rank receives.
#[derive(Debug, Clone, PartialEq)]
pub struct ReceivedRows {
    /// The source of each row; `None` for a padding row.
    pub rows: Vec<Option<RowSource>>,
    /// The shape of the dispatch output.
    pub shape: ReceiveShape,
}

/// The rows that each rank receives, for the routings and capacities of all ranks.
pub fn rows(
    world: &World,
    routings: &[Routing],
    mode: DispatchMode,
    capacity: &[Option<usize>],
) -> Vec<ReceivedRows> {
    world
        .topology()
        .all_ranks()
        .map(|rank| rows_of(world, routings, mode, capacity[rank.index()], rank))
        .collect()
}

fn rows_of(
    world: &World,
    routings: &[Routing],
    mode: DispatchMode,
    capacity: Option<usize>,
    rank: Rank,
) -> ReceivedRows {
    let local: Vec<u32> = world
        .placement()
        .positions_of(rank)
        .map(|position| world.placement().expert_at(position as u32))
        .collect();
    let limit = capacity.unwrap_or(usize::MAX);
    let chosen = |routing: &Routing, token: usize, wanted: &[u32]| -> Vec<(u32, f32)> {
        let all: Vec<(u32, f32)> = routing
            .experts_of(token)
            .iter()
            .copied()
            .zip(routing.weights_of(token).iter().copied())
            .collect();
        wanted.iter().filter_map(|&expert| all.iter().copied().find(|&(e, _)| e == expert)).collect()
    };
    let sources = |wanted: &[u32]| -> Vec<Option<RowSource>> {
        let mut found = Vec::new();
        for routing in routings {
            for token in 0..routing.tokens() {
                let experts = chosen(routing, token, wanted);
                if !experts.is_empty() {
                    found.push(Some(RowSource { rank: routing.rank(), token, experts }));
                }
            }
        }
        found
    };

    let mut out = ReceivedRows {
        rows: Vec::new(),
        shape: ReceiveShape {
            mode,
            rows: 0,
            wanted_rows: 0,
            tokens_per_expert: Vec::new(),
            kept_per_expert: Vec::new(),
            first_row: Vec::new(),
            capacity,
        },
    };
    match mode {
        DispatchMode::Plain => {
            out.rows = sources(&local);
            out.shape.wanted_rows = out.rows.len();
            out.rows.truncate(limit);
        }
        DispatchMode::Permuted { pad_multiple } => {
            for &expert in &local {
                let mut group = sources(&[expert]);
                group.resize(group.len().next_multiple_of(pad_multiple.get() as usize), None);
                out.shape.wanted_rows += group.len();
                out.shape.first_row.push(out.rows.len().min(limit) as u32);
                group.truncate(limit - out.rows.len().min(limit));
                out.shape.tokens_per_expert.push(group.len() as u32);
                out.shape.kept_per_expert.push(group.iter().flatten().count() as u32);
                out.rows.extend(group);
            }
        }
    }
    out.shape.rows = out.rows.len();
    out
}

/// One rank's input to dispatch.
#[derive(Debug, Clone, Default, PartialEq)]
pub struct Tokens {
    /// `[tokens, hidden]` in the input type of the format.
    pub data: Vec<u8>,
    /// `[tokens, scales per row]`; empty unless the format is [`TokenFormat::Fp8`].
    pub scales: Vec<u8>,
    /// `[tokens, experts]`: the probabilities that dispatch sends.
    pub probs: Vec<f32>,
}

/// One rank's output of dispatch. `rows` in the shapes is [`ReceiveShape::rows`].
#[derive(Debug, Clone, Default, PartialEq)]
pub struct Dispatched {
    /// `[rows, hidden]` in the output type of the format.
    pub tokens: Vec<u8>,
    /// `[rows, scales per row]`; empty without scales.
    pub scales: Vec<u8>,
    /// `[rows]` (permuted mode) or `[rows, local experts]` (plain mode).
    pub probs: Vec<f32>,
    /// `[rows, local experts]`, 1 where the row's token chose the expert (plain mode; empty in permuted mode).
    pub local_experts: Vec<u8>,
}

/// Dispatch: the output of every rank, for the `tokens` of every rank and the rows that [`rows`] returned.
pub fn dispatch(
    world: &World,
    received: &[ReceivedRows],
    mode: DispatchMode,
    format: TokenFormat,
    hidden: usize,
    tokens: &[Tokens],
) -> Vec<Dispatched> {
    let wire: Vec<(Vec<u8>, Vec<u8>)> = tokens.iter().map(|t| on_the_wire(format, hidden, t)).collect();
    let row_bytes = format.output_row_bytes(hidden);
    let scale_bytes = format.scale_row_bytes(hidden);
    world
        .topology()
        .all_ranks()
        .map(|rank| {
            let local: Vec<u32> = world
                .placement()
                .positions_of(rank)
                .map(|position| world.placement().expert_at(position as u32))
                .collect();
            let mut out = Dispatched::default();
            for row in &received[rank.index()].rows {
                let Some(source) = row else {
                    out.tokens.resize(out.tokens.len() + row_bytes, 0);
                    out.scales.resize(out.scales.len() + scale_bytes, 0);
                    out.probs.push(0.0);
                    continue;
                };
                let (data, scales) = &wire[source.rank.index()];
                let prob = |expert: u32| {
                    tokens[source.rank.index()].probs[source.token * world.experts() + expert as usize]
                };
                out.tokens.extend_from_slice(&data[source.token * row_bytes..][..row_bytes]);
                out.scales.extend_from_slice(&scales[source.token * scale_bytes..][..scale_bytes]);
                match mode {
                    DispatchMode::Permuted { .. } => out.probs.push(prob(source.experts[0].0)),
                    DispatchMode::Plain => {
                        for &expert in &local {
                            let on = source.experts.iter().any(|&(e, _)| e == expert);
                            out.local_experts.push(on.into());
                            out.probs.push(if on { prob(expert) } else { 0.0 });
                        }
                    }
                }
            }
            out
        })
        .collect()
}

/// A rank's tokens and scales in the form in which they cross from rank to rank.
fn on_the_wire(format: TokenFormat, hidden: usize, tokens: &Tokens) -> (Vec<u8>, Vec<u8>) {
    let TokenFormat::QuantizeFp8(scale_format) = format else {
        return (tokens.data.clone(), tokens.scales.clone());
    };
    let mut data = Vec::new();
    let mut scales = Vec::new();
    for row in tokens.data.chunks_exact(2 * hidden) {
        let row: Vec<u16> = row.chunks_exact(2).map(|b| u16::from_le_bytes([b[0], b[1]])).collect();
        let (mut q, mut s) = (vec![0; hidden], vec![0; scale_format.bytes_per_row(hidden)]);
        quantize_row(&row, scale_format, &mut q, &mut s);
        data.extend(q);
        scales.extend(s);
    }
    (data, scales)
}

/// The value of element number `at` of `rows`.
pub(crate) fn value(element: Element, rows: &[u8], at: usize) -> f32 {
    match element {
        Element::Bf16 => bf16_to_f32(u16::from_le_bytes([rows[2 * at], rows[2 * at + 1]])),
        Element::F32 => {
            f32::from_le_bytes([rows[4 * at], rows[4 * at + 1], rows[4 * at + 2], rows[4 * at + 3]])
        }
    }
}

/// The bytes of `values` as elements of a row: rounded, with canonical NaN.
pub(crate) fn stored(element: Element, values: &[f32]) -> Vec<u8> {
    match element {
        Element::Bf16 => values.iter().flat_map(|&value| f32_to_bf16(value).to_le_bytes()).collect(),
        Element::F32 => values.iter().flat_map(|&value| canonical_f32(value).to_le_bytes()).collect(),
    }
}

/// A partial sum or domain sum after it has crossed from rank to rank.
fn cross(wire: Element, value: f32) -> f32 {
    match wire {
        Element::Bf16 => bf16_to_f32(f32_to_bf16(value)),
        Element::F32 => value,
    }
}

/// The width and element types of a combine.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct CombineSpec {
    /// Width of a token, in elements.
    pub hidden: usize,
    /// Element type of expert outputs and of the result.
    pub element: Element,
    /// Element type of partial sums and domain sums that cross from rank to rank.
    pub wire: Element,
}

/// For each token (source rank, index) the rows of one rank that hold its copies, in row order, which is the order of
/// local experts.
type RowsOfToken = std::collections::HashMap<(Rank, usize), Vec<usize>>;

fn rows_by_token(received: &[ReceivedRows]) -> Vec<RowsOfToken> {
    let mut by_token = vec![RowsOfToken::new(); received.len()];
    for (rows, by_token) in received.iter().zip(&mut by_token) {
        for (row, source) in rows.rows.iter().enumerate() {
            if let Some(source) = source {
                by_token.entry((source.rank, source.token)).or_default().push(row);
            }
        }
    }
    by_token
}

/// Combine of one token of rank `source`: the sum of its expert output rows, in the order and with the rounding of
/// [`Backend::combine`](crate::Backend::combine). `rows` gives the token's expert output rows on each rank, in order of local
/// expert. Returns one row.
pub fn combine_token<'a>(
    world: &World,
    source: Rank,
    spec: CombineSpec,
    rows: impl Fn(Rank) -> Vec<&'a [u8]>,
) -> Vec<u8> {
    let topology = world.topology();
    let mut total = vec![0.0f32; spec.hidden];
    for domain in 0..topology.domains() {
        let rail_rank = topology.rank_at(domain, topology.local_rank_of(source));
        let mut domain_sum = vec![0.0f32; spec.hidden];
        for rank in topology.domain_ranks(domain) {
            let mut rank_sum = vec![0.0f32; spec.hidden];
            for row in rows(rank) {
                for (column, sum) in rank_sum.iter_mut().enumerate() {
                    *sum += value(spec.element, row, column);
                }
            }
            // Each rank of a domain sends its partial sum to the domain's rank on the rail of `source`.
            for (sum, &part) in domain_sum.iter_mut().zip(&rank_sum) {
                *sum += if rank == rail_rank { part } else { cross(spec.wire, part) };
            }
        }
        for (sum, &part) in total.iter_mut().zip(&domain_sum) {
            *sum += if rail_rank == source { part } else { cross(spec.wire, part) };
        }
    }
    stored(spec.element, &total)
}

/// Combine: every rank's output `[tokens, hidden]`, for the expert output rows `[rows, hidden]` of every rank.
pub fn combine(
    world: &World,
    routings: &[Routing],
    received: &[ReceivedRows],
    spec: CombineSpec,
    expert_rows: &[Vec<u8>],
) -> Vec<Vec<u8>> {
    let by_token = rows_by_token(received);
    let row_bytes = spec.hidden * spec.element.bytes();
    let combine_one = |source: Rank, token: usize| {
        combine_token(world, source, spec, |rank| {
            let rows = by_token[rank.index()].get(&(source, token)).into_iter().flatten();
            rows.map(|row| &expert_rows[rank.index()][row * row_bytes..][..row_bytes]).collect()
        })
    };
    routings
        .iter()
        .map(|routing| (0..routing.tokens()).flat_map(|token| combine_one(routing.rank(), token)).collect())
        .collect()
}

/// [`combine`] in double precision: for each element the sum, and the sum of magnitudes. The bound for the rounding
/// error of combine is proportional to the latter.
pub fn combine_f64(
    routings: &[Routing],
    received: &[ReceivedRows],
    spec: CombineSpec,
    expert_rows: &[Vec<u8>],
) -> Vec<Vec<(f64, f64)>> {
    let by_token = rows_by_token(received);
    routings
        .iter()
        .map(|routing| {
            let mut out = vec![(0.0, 0.0); routing.tokens() * spec.hidden];
            for (token, sums) in out.chunks_exact_mut(spec.hidden).enumerate() {
                for (rows, by_token) in expert_rows.iter().zip(&by_token) {
                    for &row in by_token.get(&(routing.rank(), token)).into_iter().flatten() {
                        for (column, (sum, magnitude)) in sums.iter_mut().enumerate() {
                            let x = f64::from(value(spec.element, rows, row * spec.hidden + column));
                            *sum += x;
                            *magnitude += x.abs();
                        }
                    }
                }
            }
            out
        })
        .collect()
}

/// Combine of probabilities: gathers `row_probs`, in the shape of [`Dispatched::probs`], to every rank's dense
/// `[tokens, experts]`.
pub fn combine_probs(
    world: &World,
    routings: &[Routing],
    received: &[ReceivedRows],
    mode: DispatchMode,
    row_probs: &[Vec<f32>],
) -> Vec<Vec<f32>> {
    let experts = world.experts();
    let mut dense: Vec<Vec<f32>> = routings.iter().map(|r| vec![0.0; r.tokens() * experts]).collect();
    for rank in world.topology().all_ranks() {
        let positions = world.placement().positions_of(rank);
        for (row, source) in received[rank.index()].rows.iter().enumerate() {
            let Some(source) = source else { continue };
            for &(expert, _) in &source.experts {
                let local = world.placement().position_of(expert) as usize - positions.start;
                let at = match mode {
                    DispatchMode::Permuted { .. } => row,
                    DispatchMode::Plain => row * positions.len() + local,
                };
                dense[source.rank.index()][source.token * experts + expert as usize] =
                    row_probs[rank.index()][at];
            }
        }
    }
    dense
}

#[cfg(test)]
mod tests {
    use super::*;

    fn bf16(values: &[f32]) -> Vec<u8> {
        values.iter().flat_map(|&v| f32_to_bf16(v).to_le_bytes()).collect()
    }

    fn world_of_two() -> (World, Vec<Routing>) {
        // Rank 0 holds experts 0 and 1, rank 1 holds 2 and 3.
        let world = World::builder().ranks(2).experts(4).build().unwrap();
        let routings = vec![
            Routing::from_topk(Rank(0), 4, 2, &[1, 2, 0, 1], &[0.1, 0.2, 0.3, 0.4]).unwrap(),
            Routing::from_topk(Rank(1), 4, 2, &[3, 1], &[0.5, 0.6]).unwrap(),
        ];
        (world, routings)
    }

    #[test]
    fn a_small_world_gives_the_results_computed_by_hand() {
        let (world, routings) = world_of_two();
        let mode = DispatchMode::permuted(2).unwrap();
        let received = rows(&world, &routings, mode, &[None, None]);
        // Rank 0, expert 0: token (0,1), padding; expert 1: tokens (0,0) (0,1) (1,0), padding.
        let shape = &received[0].shape;
        assert_eq!(
            (shape.rows, &shape.tokens_per_expert[..], &shape.kept_per_expert[..]),
            (6, &[2, 4][..], &[1, 3][..])
        );
        let tokens = vec![
            Tokens { data: bf16(&[1.0, 2.0]), scales: vec![], probs: routings[0].dense_probs() },
            Tokens { data: bf16(&[3.0]), scales: vec![], probs: routings[1].dense_probs() },
        ];
        let out = dispatch(&world, &received, mode, TokenFormat::Bf16, 1, &tokens);
        assert_eq!(out[0].tokens, bf16(&[2.0, 0.0, 1.0, 2.0, 3.0, 0.0]));
        assert_eq!(out[0].probs, [0.3, 0.0, 0.1, 0.4, 0.6, 0.0]);
        assert_eq!(out[1].tokens, bf16(&[1.0, 0.0, 3.0, 0.0]));

        let spec = CombineSpec { hidden: 1, element: Element::Bf16, wire: Element::Bf16 };
        let expert_rows = [bf16(&[10., -9., 1., 100., 5., -9.]), bf16(&[20., -9., 50., -9.])];
        let combined = combine(&world, &routings, &received, spec, &expert_rows);
        assert_eq!(combined, [bf16(&[21.0, 110.0]), bf16(&[55.0])]);
        let two_columns = expert_rows.map(|rows| {
            let values = (0..rows.len() / 2).map(|row| value(Element::Bf16, &rows, row));
            bf16(&values.flat_map(|x| [x, x / -2.0]).collect::<Vec<f32>>())
        });
        let spec = CombineSpec { hidden: 2, ..spec };
        assert_eq!(
            combine_f64(&routings, &received, spec, &two_columns),
            [
                vec![(21.0, 21.0), (-10.5, 10.5), (110.0, 110.0), (-55.0, 55.0)],
                vec![(55.0, 55.0), (-27.5, 27.5)]
            ]
        );
        let back =
            combine_probs(&world, &routings, &received, mode, &[out[0].probs.clone(), out[1].probs.clone()]);
        assert_eq!(back, [routings[0].dense_probs(), routings[1].dense_probs()]);
    }

    #[test]
    fn capacity_drops_later_experts_first() {
        let (world, routings) = world_of_two();
        let mode = DispatchMode::permuted(1).unwrap();
        let received = rows(&world, &routings, mode, &[Some(2), Some(0)]);
        let shape = &received[0].shape;
        assert_eq!(
            (&shape.tokens_per_expert[..], shape.wanted_rows, shape.overflow()),
            (&[1, 1][..], 4, true)
        );
        assert_eq!(received[0].rows[1].as_ref().unwrap().token, 0);
        assert!(received[1].rows.is_empty() && received[1].shape.overflow());
    }

    #[test]
    fn plain_rows_are_distinct_tokens() {
        let (world, routings) = world_of_two();
        let received = rows(&world, &routings, DispatchMode::Plain, &[None, None]);
        assert_eq!(received[0].rows.len(), 3);
        assert_eq!(received[0].rows[1].as_ref().unwrap().experts, [(0, 0.3), (1, 0.4)]);
        assert!(received[0].shape.tokens_per_expert.is_empty());
    }

    #[test]
    fn only_what_crosses_is_rounded() {
        // bf16 cannot represent the f32 sum of two expert outputs. Both experts are on the other rank, then on this rank.
        let world = World::builder().ranks(2).experts(4).build().unwrap();
        let spec = CombineSpec { hidden: 1, element: Element::F32, wire: Element::Bf16 };
        let rows_of = |indices: &[i32]| {
            vec![Routing::from_topk(Rank(0), 4, 2, indices, &[0.5, 0.5]).unwrap(), Routing::empty(Rank(1), 4)]
        };
        let f32s = |values: &[f32]| values.iter().flat_map(|v| v.to_le_bytes()).collect::<Vec<u8>>();
        let mode = DispatchMode::permuted(1).unwrap();
        for (indices, expected) in [([2, 3], 1.0f32), ([0, 1], 1.0 + 2f32.powi(-12))] {
            let routings = rows_of(&indices);
            let received = rows(&world, &routings, mode, &[None, None]);
            let expert_rows: Vec<Vec<u8>> = received
                .iter()
                .map(|r| if r.rows.is_empty() { vec![] } else { f32s(&[1.0, 2f32.powi(-12)]) })
                .collect();
            let out = combine(&world, &routings, &received, spec, &expert_rows);
            assert_eq!(out[0], f32s(&[expected]));
        }
    }
}
