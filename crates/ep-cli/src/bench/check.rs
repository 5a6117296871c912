//! Is what one rank holds after the last timed iteration right, to the last bit?
//!
//! Nothing is materialised: which token stands in which row comes from [`ep::oracle::rows`], a token's contents from
//! [`tokens`], and rows are compared one by one.

use ep::oracle::{self, CombineSpec, ReceivedRows, RowSource};
use ep::{Element, Rank, ReceiveShape, Routing, ScaleFormat, TokenFormat, World};
use serde::{Deserialize, Serialize};

use crate::bench::tokens;

/// What one rank holds.
#[derive(Debug)]
pub(super) struct Held<'a> {
    pub(super) rank: Rank,
    pub(super) shape: &'a ReceiveShape,
    /// Dispatched rows with their scales (none in bf16) and f32 probabilities.
    pub(super) rows: &'a [u8],
    pub(super) scales: &'a [u8],
    pub(super) probs: &'a [u8],
    /// Combined tokens.
    pub(super) combined: &'a [u8],
}

/// What it should hold follows from this.
#[derive(Debug)]
pub(super) struct Expected<'a> {
    pub(super) world: &'a World,
    pub(super) routings: &'a [Routing],
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
    pub(super) tokens: u64,
}

/// Compares all that a rank holds; the error is the first difference, for people.
pub(super) fn check(expected: &Expected<'_>, held: &Held<'_>) -> Result<Checked, String> {
    if *held.shape != expected.received.shape {
        return Err(format!("receives {:?}, expected {:?}", held.shape, expected.received.shape));
    }
    let (rows, padding_rows) = check_dispatched(expected, held)?;
    let tokens = check_combined(expected, held)?;
    Ok(Checked { rows, padding_rows, tokens })
}

/// One row as it should be, or as it is.
#[derive(PartialEq)]
struct Row<'a> {
    data: &'a [u8],
    scales: &'a [u8],
    prob: [u8; 4],
}

fn check_dispatched(expected: &Expected<'_>, held: &Held<'_>) -> Result<(u64, u64), String> {
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
    let mut token = Token::new(hidden, format);
    let mut made = None;
    for &(source, row) in &by_token {
        if made != Some((source.rank, source.token)) {
            token.make(expected.seed, source.rank, source.token);
            made = Some((source.rank, source.token));
        }
        let (expert, weight) = source.experts[0];
        let right = Row { data: token.data(), scales: &token.scales, prob: weight.to_le_bytes() };
        compare(&held_row(row), &right, || {
            format!("row {row} (token {} of rank {}, for expert {expert})", source.token, source.rank)
        })?;
    }
    Ok((by_token.len() as u64, padding as u64))
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

fn check_combined(expected: &Expected<'_>, held: &Held<'_>) -> Result<u64, String> {
    let Expected { world, hidden, .. } = *expected;
    let spec = CombineSpec { hidden, element: Element::Bf16, wire: Element::Bf16 };
    let routing = &expected.routings[held.rank.index()];
    let mut token = Token::new(hidden, TokenFormat::Bf16);
    let mut copies = vec![0; world.ranks()];
    for (index, combined) in held.combined.chunks_exact(2 * hidden).enumerate() {
        copies.fill(0);
        for &expert in routing.experts_of(index) {
            copies[world.placement.owner_at(world.placement.position_of(expert)).index()] += 1;
        }
        token.make(expected.seed, held.rank, index);
        // Every expert's output is its input, so all rows that are summed are the token itself.
        let right =
            oracle::combine_token(world, held.rank, spec, |rank| vec![token.data(); copies[rank.index()]]);
        if let Some(difference) = difference("byte", combined, &right) {
            return Err(format!("combine, token {index} of rank {}: {difference}", held.rank));
        }
    }
    Ok(routing.tokens() as u64)
}

/// A token made again, in the form in which it is delivered.
struct Token {
    quantize: Option<ScaleFormat>,
    bf16: Vec<u8>,
    values: Vec<u16>,
    codes: Vec<u8>,
    scales: Vec<u8>,
}

impl Token {
    fn new(hidden: usize, format: TokenFormat) -> Self {
        Self {
            quantize: format.scales(),
            bf16: vec![0; 2 * hidden],
            values: vec![0; hidden],
            codes: vec![0; hidden],
            scales: vec![0; format.scale_row_bytes(hidden)],
        }
    }

    fn make(&mut self, seed: u64, rank: Rank, token: usize) {
        tokens::fill(seed, rank, token, &mut self.bf16);
        if let Some(format) = self.quantize {
            for (value, bytes) in self.values.iter_mut().zip(self.bf16.chunks_exact(2)) {
                *value = u16::from_le_bytes([bytes[0], bytes[1]]);
            }
            ep::numeric::quantize_row(&self.values, format, &mut self.codes, &mut self.scales);
        }
    }

    fn data(&self) -> &[u8] {
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
            Self { world, routings, received, shape, format, dispatched, combined }
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
            check(
                &expected,
                &Held {
                    rank: Rank(1),
                    shape: &self.shape,
                    rows: &self.dispatched.tokens,
                    scales: &self.dispatched.scales,
                    probs: &probs,
                    combined: &self.combined,
                },
            )
        }
    }

    #[test]
    fn what_the_oracle_delivers_is_right() {
        for format in [TokenFormat::Bf16, TokenFormat::QuantizeFp8(ScaleFormat::F32Per128)] {
            let world = World1::new(format);
            let checked = world.check().unwrap();
            assert_eq!(checked.tokens, 9);
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
        spoil(&|w| w.shape.rows += 1, "receives ReceiveShape");
    }
}
