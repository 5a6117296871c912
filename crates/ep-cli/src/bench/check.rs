//! Is what one rank holds after the last timed iteration right, to the last bit?
//!
//! Nothing is materialised: which token stands in which row comes from [`ep::oracle::rows`], a token's contents from
//! [`tokens`], and rows are compared one by one, on all cores.

use ep::oracle::{self, CombineSpec, ReceivedRows, RowSource};
use ep::{Element, Rank, ReceiveShape, Routing, ScaleFormat, TokenFormat, World};
use rayon::prelude::*;
use serde::{Deserialize, Serialize};

use crate::bench::tokens;

/// Rows that one core checks at a time: some tokens with all their rows.
const BATCH: usize = 128;

/// What one rank has received.
#[derive(Debug)]
pub(super) struct HeldRows<'a> {
    pub(super) shape: &'a ReceiveShape,
    /// Rows with their scales (none in bf16) and f32 probabilities.
    pub(super) rows: &'a [u8],
    pub(super) scales: &'a [u8],
    pub(super) probs: &'a [u8],
}

/// What it should hold follows from this.
#[derive(Debug)]
pub(super) struct Expected<'a> {
    pub(super) world: &'a World,
    pub(super) routings: &'a [Routing],
    /// What the rank receives, without a capacity.
    pub(super) received: &'a ReceivedRows,
    pub(super) format: TokenFormat,
    pub(super) hidden: usize,
    /// Of the tokens' contents.
    pub(super) seed: u64,
}

/// What was compared and found equal.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq, Serialize, Deserialize)]
pub(super) struct Checked {
    pub(super) rows: u64,
    pub(super) padding_rows: u64,
    /// Combined.
    pub(super) tokens: u64,
    /// Tokens with their probabilities gathered back.
    pub(super) probs: u64,
    /// Rows of an output with a capacity, padding included.
    pub(super) bounded_rows: u64,
}

/// One row as it should be, or as it is.
#[derive(PartialEq)]
struct Row<'a> {
    data: &'a [u8],
    scales: &'a [u8],
    prob: [u8; 4],
}

/// Compares what a rank has received: rows, and rows of padding. A capacity that holds all makes no difference. The
/// error is the first difference, for people; so it is below.
pub(super) fn dispatched(expected: &Expected<'_>, held: &HeldRows<'_>) -> Result<(u64, u64), String> {
    let shape = ReceiveShape { capacity: None, ..held.shape.clone() };
    if shape != expected.received.shape {
        return Err(format!("receives {shape:?}, expected {:?}", expected.received.shape));
    }
    let Expected { hidden, format, .. } = *expected;
    let (row_bytes, scale_bytes) = (format.output_row_bytes(hidden), format.scale_row_bytes(hidden));
    let held_row = |row: usize| Row {
        data: &held.rows[row * row_bytes..][..row_bytes],
        scales: &held.scales[row * scale_bytes..][..scale_bytes],
        prob: std::array::from_fn(|byte| held.probs[4 * row + byte]),
    };
    let mut by_token: Vec<(&RowSource, usize)> = Vec::with_capacity(expected.received.rows.len());
    let (zero_data, zero_scales) = (vec![0; row_bytes], vec![0; scale_bytes]);
    let zero = Row { data: &zero_data, scales: &zero_scales, prob: [0; 4] };
    for (row, source) in expected.received.rows.iter().enumerate() {
        match source {
            Some(source) => by_token.push((source, row)),
            None => compare(&held_row(row), &zero, || format!("padding row {row}"))?,
        }
    }
    let padding = expected.received.rows.len() - by_token.len();
    // Token by token, so that one with several rows here is made, and quantised, once.
    by_token.sort_unstable_by_key(|(source, row)| (source.rank, source.token, *row));
    let check_batch = |batch: &[(&RowSource, usize)]| {
        let mut token = Token::new(hidden, format);
        let mut made = None;
        batch.iter().try_for_each(|&(source, row)| {
            if made != Some((source.rank, source.token)) {
                token.make(expected.seed, source.rank, source.token);
                made = Some((source.rank, source.token));
            }
            let (expert, weight) = source.experts[0];
            let right = Row { data: token.data(), scales: &token.scales, prob: weight.to_le_bytes() };
            compare(&held_row(row), &right, || {
                format!("row {row} (token {} of rank {}, for expert {expert})", source.token, source.rank)
            })
        })
    };
    first_error(by_token.par_chunks(BATCH).map(check_batch))?;
    Ok((by_token.len() as u64, padding as u64))
}

fn first_error(results: impl IndexedParallelIterator<Item = Result<(), String>>) -> Result<(), String> {
    results.find_map_first(Result::err).map_or(Ok(()), Err)
}

fn compare(held: &Row<'_>, right: &Row<'_>, place: impl Fn() -> String) -> Result<(), String> {
    if held == right {
        return Ok(());
    }
    let parts = [
        ("byte", held.data, right.data),
        ("scale byte", held.scales, right.scales),
        ("probability byte", &held.prob, &right.prob),
    ];
    let difference = parts.into_iter().find_map(|(what, held, right)| difference(what, held, right));
    Err(format!("dispatch, {}: {}", place(), difference.unwrap_or_default()))
}

fn difference(what: &str, held: &[u8], right: &[u8]) -> Option<String> {
    let at = held.iter().zip(right).position(|(held, right)| held != right)?;
    Some(format!("{what} {at} is {:#04x}, expected {:#04x}", held[at], right[at]))
}

/// Compares a rank's combined tokens.
pub(super) fn combined(expected: &Expected<'_>, rank: Rank, held: &[u8]) -> Result<u64, String> {
    let Expected { world, hidden, .. } = *expected;
    let spec = CombineSpec { hidden, element: Element::Bf16, wire: Element::Bf16 };
    let routing = &expected.routings[rank.index()];
    let check_token = |token: &mut Token, (index, held): (usize, &[u8])| {
        let mut copies = vec![0; world.ranks()];
        for &expert in routing.experts_of(index) {
            copies[world.placement.owner_at(world.placement.position_of(expert)).index()] += 1;
        }
        token.make(expected.seed, rank, index);
        // Every expert's output is its input, so all rows that are summed are the token itself.
        let right = oracle::combine_token(world, rank, spec, |rank| vec![token.data(); copies[rank.index()]]);
        match difference("byte", held, &right) {
            Some(difference) => Err(format!("combine, token {index} of rank {rank}: {difference}")),
            None => Ok(()),
        }
    };
    let tokens = held.par_chunks_exact(2 * hidden).enumerate();
    first_error(tokens.map_init(|| Token::new(hidden, TokenFormat::Bf16), check_token))?;
    Ok(routing.tokens() as u64)
}

/// Compares a rank's probabilities after they were gathered back: dense, f32.
pub(super) fn gathered(expected: &Expected<'_>, rank: Rank, held: &[u8]) -> Result<u64, String> {
    let routing = &expected.routings[rank.index()];
    let check_token = |(index, held): (usize, &[u8])| {
        let mut right = vec![0; held.len()];
        for (&expert, weight) in routing.experts_of(index).iter().zip(routing.weights_of(index)) {
            right[4 * expert as usize..][..4].copy_from_slice(&weight.to_le_bytes());
        }
        match difference("byte", held, &right) {
            Some(difference) => Err(format!("combine, probabilities of token {index}: {difference}")),
            None => Ok(()),
        }
    };
    first_error(held.par_chunks_exact(4 * routing.experts()).enumerate().map(check_token))?;
    Ok(routing.tokens() as u64)
}

/// A token made, or made again, in the form in which it is delivered.
pub(super) struct Token {
    quantize: Option<ScaleFormat>,
    bf16: Vec<u8>,
    values: Vec<u16>,
    codes: Vec<u8>,
    scales: Vec<u8>,
}

impl Token {
    pub(super) fn new(hidden: usize, format: TokenFormat) -> Self {
        Self {
            quantize: format.scales(),
            bf16: vec![0; 2 * hidden],
            values: vec![0; hidden],
            codes: vec![0; hidden],
            scales: vec![0; format.scale_row_bytes(hidden)],
        }
    }

    pub(super) fn make(&mut self, seed: u64, rank: Rank, token: usize) {
        tokens::fill(seed, rank, token, &mut self.bf16);
        if let Some(format) = self.quantize {
            for (value, bytes) in self.values.iter_mut().zip(self.bf16.chunks_exact(2)) {
                *value = u16::from_le_bytes([bytes[0], bytes[1]]);
            }
            ep::numeric::quantize_row(&self.values, format, &mut self.codes, &mut self.scales);
        }
    }

    pub(super) fn scales(&self) -> &[u8] {
        &self.scales
    }

    pub(super) fn data(&self) -> &[u8] {
        if self.quantize.is_some() { &self.codes } else { &self.bf16 }
    }
}

#[cfg(test)]
mod tests {
    use ep::DispatchMode;
    use ep::oracle::Tokens;
    use ep::workload::Workload;

    use super::*;

    const HIDDEN: usize = 128;
    const SEED: u64 = 5;

    /// What rank 1 of a small world holds when everything is right, and what follows for it.
    struct World1 {
        world: World,
        routings: Vec<Routing>,
        received: Vec<ReceivedRows>,
        shape: ReceiveShape,
        format: TokenFormat,
        dispatched: oracle::Dispatched,
        combined: Vec<u8>,
        gathered: Vec<u8>,
    }

    impl World1 {
        fn new(format: TokenFormat) -> Self {
            let world = World::new(4, 2, 8).unwrap();
            let draw = |rank: u32| {
                Workload { tokens: 9 * rank as usize, experts: 8, topk: 3, skew: 0.5, seed: 1 }
                    .routing(Rank(rank))
            };
            let routings: Vec<Routing> = (0..4).map(draw).collect();
            let mode = DispatchMode::permuted(4).unwrap();
            let received = oracle::rows(&world, &routings, mode, &[None; 4]);
            let contents = |routing: &Routing| {
                let mut data = vec![0; routing.tokens() * 2 * HIDDEN];
                for (token, row) in data.chunks_exact_mut(2 * HIDDEN).enumerate() {
                    tokens::fill(SEED, routing.rank(), token, row);
                }
                Tokens { data, scales: Vec::new(), probs: routing.dense_probs() }
            };
            let all: Vec<Tokens> = routings.iter().map(contents).collect();
            let dispatched = oracle::dispatch(&world, &received, mode, format, HIDDEN, &all).swap_remove(1);
            let identity = oracle::dispatch(&world, &received, mode, TokenFormat::Bf16, HIDDEN, &all);
            let rows: Vec<Vec<u8>> = identity.into_iter().map(|rank| rank.tokens).collect();
            let spec = CombineSpec { hidden: HIDDEN, element: Element::Bf16, wire: Element::Bf16 };
            let combined = oracle::combine(&world, &routings, &received, spec, &rows).swap_remove(1);
            let shape = received[1].shape.clone();
            let gathered = routings[1].dense_probs().iter().flat_map(|prob| prob.to_le_bytes()).collect();
            Self { world, routings, received, shape, format, dispatched, combined, gathered }
        }

        fn check(&self) -> Result<Checked, String> {
            let expected = Expected {
                world: &self.world,
                routings: &self.routings,
                received: &self.received[1],
                format: self.format,
                hidden: HIDDEN,
                seed: SEED,
            };
            let probs: Vec<u8> = self.dispatched.probs.iter().flat_map(|prob| prob.to_le_bytes()).collect();
            let held = HeldRows {
                shape: &self.shape,
                rows: &self.dispatched.tokens,
                scales: &self.dispatched.scales,
                probs: &probs,
            };
            let (rows, padding_rows) = dispatched(&expected, &held)?;
            let tokens = combined(&expected, Rank(1), &self.combined)?;
            let probs = gathered(&expected, Rank(1), &self.gathered)?;
            Ok(Checked { rows, padding_rows, tokens, probs, bounded_rows: 0 })
        }
    }

    #[test]
    fn what_the_oracle_delivers_is_right() {
        for format in [TokenFormat::Bf16, TokenFormat::QuantizeFp8(ScaleFormat::F32Per128)] {
            let mut world = World1::new(format);
            // Room for more than comes is no difference.
            world.shape.capacity = Some(10_000);
            let checked = world.check().unwrap();
            assert_eq!((checked.tokens, checked.probs), (9, 9));
            assert_eq!((checked.rows + checked.padding_rows) as usize, world.received[1].rows.len());
            assert!(checked.padding_rows > 0);
        }
    }

    #[test]
    fn one_wrong_bit_is_found_and_named() {
        let right = || World1::new(TokenFormat::QuantizeFp8(ScaleFormat::F32Per128));
        let spoil = |spoil: &dyn Fn(&mut World1), expected: &str| {
            let mut world = right();
            spoil(&mut world);
            let message = world.check().unwrap_err();
            assert!(message.contains(expected), "{message}");
        };
        let padding = right().shape.padding().find(|range| !range.is_empty()).unwrap().start;
        spoil(&|w| w.dispatched.tokens[HIDDEN + 5] ^= 1, "row 1 (token ");
        spoil(&|w| w.dispatched.tokens[HIDDEN + 5] ^= 1, ": byte 5 is 0x");
        spoil(&|w| w.dispatched.scales[3] ^= 1, "row 0 (token ");
        spoil(&|w| w.dispatched.probs[0] += 1.0, "probability byte");
        spoil(
            &|w| w.dispatched.tokens[padding * HIDDEN] = 1,
            &format!("padding row {padding}: byte 0 is 0x01"),
        );
        spoil(&|w| w.combined[2 * HIDDEN * 7 + 3] ^= 1, "combine, token 7 of rank 1: byte 3 is 0x");
        spoil(&|w| w.gathered[4 * 8 * 8 + 7] ^= 1, "combine, probabilities of token 8: byte 7 is 0x");
        spoil(&|w| w.shape.rows += 1, "receives ReceiveShape");
    }
}
