//! Checks every bit of the outputs that a rank holds after the last timed iteration.
//!
//! The expected outputs are not allocated as a whole: [`ep::oracle::rows`] gives the token of each row, [`tokens`]
//! gives its contents, and rows are compared one by one, on all cores.

use ep::oracle::{self, CombineSpec, ReceivedRows, RowSource};
use ep::{DispatchMode, Element, Rank, ReceiveShape, Routing, ScaleFormat, TokenFormat, World};
use rayon::prelude::*;
use serde::{Deserialize, Serialize};

use crate::bench::tokens;

/// Rows that one core checks at a time.
const BATCH: usize = 128;

/// The rows that one rank has received.
#[derive(Debug)]
pub(super) struct HeldRows<'a> {
    pub(super) shape: &'a ReceiveShape,
    pub(super) rows: &'a [u8],
    /// Empty in bf16.
    pub(super) scales: &'a [u8],
    /// One f32 per row; in plain mode, one per row and local expert.
    pub(super) probs: &'a [u8],
}

/// Everything that determines the expected outputs.
#[derive(Debug)]
pub(super) struct Expected<'a> {
    pub(super) world: &'a World,
    pub(super) routings: &'a [Routing],
    /// The rank that holds the outputs.
    pub(super) rank: Rank,
    /// The rows that the rank receives without a capacity.
    pub(super) received: &'a ReceivedRows,
    pub(super) format: TokenFormat,
    pub(super) hidden: usize,
    /// Seed of the tokens' contents.
    pub(super) seed: u64,
}

/// Counts of what was compared and found equal.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq, Serialize, Deserialize)]
pub(super) struct CheckedCounts {
    pub(super) rows: u64,
    pub(super) padding_rows: u64,
    /// Combined tokens.
    pub(super) tokens: u64,
    /// Combined tokens whose returned probabilities were compared.
    pub(super) probs: u64,
    /// Rows of the dispatch with a capacity, padding included.
    pub(super) bounded_rows: u64,
}

/// One row, expected or received.
#[derive(PartialEq)]
struct Row<'a> {
    data: &'a [u8],
    scales: &'a [u8],
    probs: &'a [u8],
}

/// Compares the received rows and the padding rows with the expected ones. Returns how many of each there are. A capacity
/// that drops no rows makes no difference.
///
/// The error describes the first difference, as do the errors of [`combined`] and [`gathered`].
pub(super) fn dispatched(expected: &Expected<'_>, held: &HeldRows<'_>) -> Result<(u64, u64), String> {
    let shape = ReceiveShape { capacity: None, ..held.shape.clone() };
    if shape != expected.received.shape {
        return Err(format!("receives {shape:?}, expected {:?}", expected.received.shape));
    }
    let Expected { hidden, format, .. } = *expected;
    let (row_bytes, scale_bytes) = (format.output_row_bytes(hidden), format.scale_row_bytes(hidden));
    let prob_bytes = size_of::<f32>() * expected.probs_per_row();
    let held_row = |row: usize| Row {
        data: &held.rows[row * row_bytes..][..row_bytes],
        scales: &held.scales[row * scale_bytes..][..scale_bytes],
        probs: &held.probs[row * prob_bytes..][..prob_bytes],
    };
    let mut by_token: Vec<(&RowSource, usize)> = Vec::with_capacity(expected.received.rows.len());
    let (zero_data, zero_scales, zero_probs) =
        (vec![0; row_bytes], vec![0; scale_bytes], vec![0; prob_bytes]);
    let zero = Row { data: &zero_data, scales: &zero_scales, probs: &zero_probs };
    for (row, source) in expected.received.rows.iter().enumerate() {
        match source {
            Some(source) => by_token.push((source, row)),
            None => compare(&held_row(row), &zero, || format!("padding row {row}"))?,
        }
    }
    let padding = expected.received.rows.len() - by_token.len();
    // Sorted by token, so that a token with several rows is generated and quantised once.
    by_token.sort_unstable_by_key(|(source, row)| (source.rank, source.token, *row));
    let check_batch = |batch: &[(&RowSource, usize)]| {
        let mut token = Token::new(hidden, format);
        let mut made = None;
        let mut probs = vec![0; prob_bytes];
        batch.iter().try_for_each(|&(source, row)| {
            if made != Some((source.rank, source.token)) {
                token.make(expected.seed, source.rank, source.token);
                made = Some((source.rank, source.token));
            }
            expected.write_probs(source, &mut probs);
            let right = Row { data: token.data(), scales: &token.scales, probs: &probs };
            compare(&held_row(row), &right, || place(row, source))
        })
    };
    first_error(by_token.par_chunks(BATCH).map(check_batch))?;
    Ok((by_token.len() as u64, padding as u64))
}

impl Expected<'_> {
    fn is_plain(&self) -> bool {
        self.received.shape.mode == DispatchMode::Plain
    }

    /// One probability, or in plain mode one for each local expert.
    fn probs_per_row(&self) -> usize {
        if self.is_plain() { self.world.placement().local_experts(self.rank) } else { 1 }
    }

    /// Writes the probabilities of a row: in plain mode each at its local expert, and 0 at experts that the token did not
    /// choose.
    fn write_probs(&self, source: &RowSource, probs: &mut [u8]) {
        let placement = self.world.placement();
        let first = placement.positions_of(self.rank).start;
        probs.fill(0);
        for &(expert, weight) in &source.experts {
            let column = if self.is_plain() { placement.position_of(expert) as usize - first } else { 0 };
            probs[size_of::<f32>() * column..][..size_of::<f32>()].copy_from_slice(&weight.to_le_bytes());
        }
    }
}

/// Names a row in a message.
fn place(row: usize, source: &RowSource) -> String {
    let experts: Vec<String> = source.experts.iter().map(|(expert, _)| expert.to_string()).collect();
    let noun = if experts.len() == 1 { "expert" } else { "experts" };
    format!("row {row} (token {} of rank {}, for {noun} {})", source.token, source.rank, experts.join(", "))
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
        ("probability byte", held.probs, right.probs),
    ];
    let difference = parts.into_iter().find_map(|(what, held, right)| difference(what, held, right));
    Err(format!("dispatch, {}: {}", place(), difference.unwrap_or_default()))
}

fn difference(what: &str, held: &[u8], right: &[u8]) -> Option<String> {
    let at = held.iter().zip(right).position(|(held, right)| held != right)?;
    Some(format!("{what} {at} is {:#04x}, expected {:#04x}", held[at], right[at]))
}

/// Compares a rank's combined tokens.
pub(super) fn combined(expected: &Expected<'_>, held: &[u8]) -> Result<u64, String> {
    let Expected { world, hidden, rank, .. } = *expected;
    let spec = CombineSpec { hidden, element: Element::Bf16, wire: Element::Bf16 };
    let routing = &expected.routings[rank.index()];
    let check_token = |token: &mut Token, (index, held): (usize, &[u8])| {
        let mut copies = vec![0; world.ranks()];
        for &expert in routing.experts_of(index) {
            copies[world.placement().owner_at(world.placement().position_of(expert)).index()] += 1;
        }
        if expected.is_plain() {
            // A rank has one row of a token, however many of the token's experts it holds.
            copies.iter_mut().for_each(|copies| *copies = (*copies).min(1));
        }
        token.make(expected.seed, rank, index);
        // Experts are the identity, so every summed row is the token itself.
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

/// Compares the probabilities that combine returned: dense, f32, one per expert.
pub(super) fn gathered(expected: &Expected<'_>, held: &[u8]) -> Result<u64, String> {
    let routing = &expected.routings[expected.rank.index()];
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

/// Buffers for one generated token in the format in which dispatch delivers it.
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
    use ep::oracle::Tokens;
    use ep::workload::Workload;

    use super::*;

    const HIDDEN: usize = 128;
    const SEED: u64 = 5;

    /// The correct outputs of rank 1 of a small world, and everything that determines them.
    struct Rank1 {
        world: World,
        routings: Vec<Routing>,
        received: Vec<ReceivedRows>,
        shape: ReceiveShape,
        format: TokenFormat,
        dispatched: oracle::Dispatched,
        combined: Vec<u8>,
        gathered: Vec<u8>,
    }

    impl Rank1 {
        fn new(mode: DispatchMode, format: TokenFormat) -> Self {
            let world = World::builder().ranks(4).domains(2).experts(8).build().unwrap();
            let draw = |rank: u32| {
                Workload { tokens: 9 * rank as usize, experts: 8, topk: 3, skew: 0.5, seed: 1 }
                    .routing(Rank(rank))
            };
            let routings: Vec<Routing> = (0..4).map(draw).collect();
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

        fn check(&self) -> Result<CheckedCounts, String> {
            let expected = Expected {
                world: &self.world,
                routings: &self.routings,
                rank: Rank(1),
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
            let tokens = combined(&expected, &self.combined)?;
            let probs = gathered(&expected, &self.gathered)?;
            Ok(CheckedCounts { rows, padding_rows, tokens, probs, bounded_rows: 0 })
        }
    }

    const FP8: TokenFormat = TokenFormat::QuantizeFp8(ScaleFormat::F32Per128);

    fn modes() -> [DispatchMode; 2] {
        [DispatchMode::Plain, DispatchMode::permuted(4).unwrap()]
    }

    #[test]
    fn the_oracles_outputs_pass() {
        for (mode, format) in modes().into_iter().flat_map(|mode| [(mode, TokenFormat::Bf16), (mode, FP8)]) {
            let mut world = Rank1::new(mode, format);
            // A capacity beyond the received rows makes no difference.
            world.shape.capacity = Some(10_000);
            let checked = world.check().unwrap();
            assert_eq!((checked.tokens, checked.probs), (9, 9));
            assert_eq!((checked.rows + checked.padding_rows) as usize, world.received[1].rows.len());
            assert_eq!(checked.padding_rows == 0, mode == DispatchMode::Plain);
        }
    }

    /// Spoils the correct outputs of a mode and checks the message about them.
    fn spoil(mode: DispatchMode, spoil: &dyn Fn(&mut Rank1), expected: &str) {
        let mut world = Rank1::new(mode, FP8);
        spoil(&mut world);
        let message = world.check().unwrap_err();
        assert!(message.contains(expected), "{message}");
    }

    #[test]
    fn one_wrong_bit_is_found_and_located() {
        for mode in modes() {
            spoil(mode, &|w| w.dispatched.tokens[HIDDEN + 5] ^= 1, "row 1 (token ");
            spoil(mode, &|w| w.dispatched.tokens[HIDDEN + 5] ^= 1, ": byte 5 is 0x");
            spoil(mode, &|w| w.dispatched.scales[3] ^= 1, "row 0 (token ");
            spoil(mode, &|w| w.dispatched.probs[0] += 1.0, "probability byte");
            spoil(mode, &|w| w.combined[2 * HIDDEN * 7 + 3] ^= 1, "combine, token 7 of rank 1: byte 3 is 0x");
            spoil(
                mode,
                &|w| w.gathered[4 * 8 * 8 + 7] ^= 1,
                "combine, probabilities of token 8: byte 7 is 0x",
            );
            spoil(mode, &|w| w.shape.rows += 1, "receives ReceiveShape");
        }
    }

    #[test]
    fn a_wrong_padding_row_is_found() {
        let mode = modes()[1];
        let padding = Rank1::new(mode, FP8).shape.padding().find(|range| !range.is_empty()).unwrap().start;
        let byte = format!("padding row {padding}: byte 0 is 0x01");
        spoil(mode, &|w| w.dispatched.tokens[padding * HIDDEN] = 1, &byte);
        spoil(mode, &|w| w.dispatched.probs[padding] = 1.0, &format!("padding row {padding}: probability"));
    }

    #[test]
    fn in_plain_mode_every_probability_of_a_row_has_its_expert() {
        let mode = DispatchMode::Plain;
        // Rank 1 has experts 2 and 3. A row with one of them must have 0 for the other one.
        let world = Rank1::new(mode, FP8);
        let rows = &world.received[1].rows;
        let chose = |experts: &[u32]| {
            let found = rows.iter().position(|row| {
                row.as_ref().unwrap().experts.iter().map(|&(expert, _)| expert).eq(experts.iter().copied())
            });
            found.unwrap()
        };
        let (first, second, both) = (chose(&[2]), chose(&[3]), chose(&[2, 3]));
        let check = |row: usize, experts: &str, change: &dyn Fn(&mut [f32])| {
            let mut world = Rank1::new(mode, FP8);
            change(&mut world.dispatched.probs[2 * row..][..2]);
            let message = world.check().unwrap_err();
            for part in [&*format!("dispatch, row {row} (token "), experts, "probability byte"] {
                assert!(message.contains(part), "no `{part}` in {message}");
            }
        };
        check(first, "for expert 2)", &|probs| probs[1] = 1e-9);
        check(first, "for expert 2)", &|probs| probs.swap(0, 1));
        check(second, "for expert 3)", &|probs| probs[0] = -0.0);
        check(both, "for experts 2, 3)", &|probs| probs[1] *= 2.0);
        check(both, "for experts 2, 3)", &|probs| probs.swap(0, 1));
    }

    #[test]
    fn in_plain_mode_combine_sums_one_row_per_rank() {
        let [plain, permuted] = modes().map(|mode| Rank1::new(mode, TokenFormat::Bf16));
        assert_ne!(plain.combined, permuted.combined);
        let mut world = plain;
        world.combined = permuted.combined;
        assert!(world.check().unwrap_err().starts_with("combine, token "));
    }
}
