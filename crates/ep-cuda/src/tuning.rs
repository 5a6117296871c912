//! The division of an operator into pieces, stages and blocks, from its sizes and those of the GPU.

use ep::{CallerError, Result, World};

use crate::params::{MAX_GROUPS, MOST_STAGES, SCALE_BUFFER_BYTES};
use crate::shared::{
    combine_bytes, combine_team_bytes, dispatch_bytes, peers_bytes, preprocess_bytes, share_bytes,
    stage_stride,
};

/// SMs of dispatch and combine if the caller does not set them.
const DEFAULT_SMS: u32 = 32;
/// The same for one or two ranks in one domain. They copy and add more rows locally than cross a link, so the SMs are the
/// bound.
const DEFAULT_SMS_OF_TWO: u32 = 48;
/// Maximum size of a piece of a row in dispatch, in bytes.
const DISPATCH_PIECE: usize = 16 << 10;
/// The same if dispatch quantises, where more warps share the memory.
const QUANTIZE_PIECE: usize = 8 << 10;
/// Slices of rows that a block of combine works on at a time: four teams of two consumers, or eight of one.
const COMBINE_SLICES: u32 = 8;
/// Maximum number of blocks of a combine whose teams are pairs: a producer and one consumer ([`CombineLoad::suits_pairs`]).
pub(crate) const MOST_BLOCKS_OF_PAIRS: u32 = 24;
/// Minimum number of bytes of a row's part that is an item of its own, if a rank has few tokens. Not measured.
const SHARE_BYTES: usize = 2048;
/// `CombineParams::slack`: ranks start some microseconds apart, and a peer pushes this many tokens in that time.
pub(crate) const COMBINE_SLACK: u32 = 96;
/// Numbers of warps of a block of dispatch, each a worker, if dispatch does not quantise. A launch uses the first number
/// with which each worker gets [`FEWEST_STAGES`] stages. A warp's work per row does not depend on the row's size, so small
/// rows need more warps.
const DISPATCH_WARPS: [usize; 2] = [8, 4];
const QUANTIZE_WARPS: usize = 10;
/// Maximum number of bytes that the senders of a rank store to other ranks at a time, if each sends one piece of a row. For
/// rows of hidden size 7168 in bf16, this allows 96 senders between two GPUs, and 35 between four. Fewer senders do not
/// fill the links. More senders congest them: between four GPUs, plain dispatch on 116 SMs took 17 % longer than the floor
/// with 464 senders, and 2 % with 35.
const SENDING_BYTES: f64 = 96.0 * 14_336.0;
/// The senders of a rank are not limited if it has at most this many tokens for each sender that the limit would allow: so
/// few rows do not congest a link.
const FEW_TOKENS: usize = 8;
/// Minimum number of stages of a ring: two stores in flight and a load; or a store, a quantisation and a load.
const FEWEST_STAGES: usize = 3;
/// Maximum number of stages of a ring: one lane initialises one stage's barrier.
const MOST_RING_STAGES: usize = 32;

/// The number of SMs of dispatch and combine if the caller does not set it.
pub(crate) fn default_sms(world: &World) -> u32 {
    if world.topology().domains() == 1 && world.ranks() <= 2 { DEFAULT_SMS_OF_TWO } else { DEFAULT_SMS }
}

/// The logarithm to base 2 of the number of parts of each row that are items of their own: as many as give no worker a second
/// item, because that one comes 4 to 5 us later, and none of less than [`SHARE_BYTES`].
fn share_bits(tokens: usize, workers: usize, row_bytes: usize) -> u32 {
    let fits = |&bits: &u32| tokens > 0 && tokens << bits <= workers && row_bytes >> bits >= SHARE_BYTES;
    (1..=MAX_GROUPS.ilog2()).rev().find(fits).unwrap_or(0)
}

/// The sizes of a launch of dispatch.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) struct DispatchShape {
    pub(crate) threads: u32,
    pub(crate) pieces: u32,
    pub(crate) piece_bytes: u32,
    /// The logarithm to base 2 of the number of groups of pieces.
    pub(crate) group_bits: u32,
    pub(crate) stages: u32,
    pub(crate) shared_bytes: usize,
}

/// The teams of a block of combine. A team has a producer, which loads rows, and consumers, which add them.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub(crate) struct CombineTeams {
    pub(crate) teams: u32,
    pub(crate) consumers: u32,
}

/// Maximum number of warps of a block of the dispatch kernel that quantises rows (`quantize`) or sends them unchanged.
pub(crate) fn dispatch_warps(quantize: bool) -> u32 {
    let warps = if quantize { QUANTIZE_WARPS } else { DISPATCH_WARPS[0] };
    warps as u32
}

impl CombineTeams {
    /// The teams of a launch.
    pub(crate) fn of_launch(load: &CombineLoad, views: usize, available: usize) -> Self {
        let consumers = if load.suits_pairs() { 1 } else { 2 };
        Self::new(consumers, views, available)
    }

    /// Enough teams to work on [`COMBINE_SLICES`] slices at a time, or fewer if they do not fit the shared memory of a
    /// block, which has `available` bytes. `views`, here and below: the number of peers that a block has views of: the
    /// ranks and, with rails, the domains.
    pub(crate) fn new(consumers: u32, views: usize, available: usize) -> Self {
        let most = (available - peers_bytes(views)) / combine_team_bytes(consumers as usize);
        Self { teams: (COMBINE_SLICES / consumers).min(most as u32), consumers }
    }

    pub(crate) fn threads(self) -> u32 {
        32 * self.teams * (1 + self.consumers)
    }

    /// Bytes of shared memory of a block.
    pub(crate) fn shared_bytes(self, views: usize) -> usize {
        combine_bytes(views, self.teams as usize, self.consumers as usize)
    }
}

impl DispatchShape {
    /// `row_bytes`: bytes of an input row; `available`: bytes of shared memory of a block.
    pub(crate) fn new(quantize: bool, views: usize, row_bytes: usize, available: usize) -> Self {
        let unit = if quantize { 256 } else { 16 };
        let choices: &[usize] = if quantize { &[QUANTIZE_WARPS] } else { &DISPATCH_WARPS };
        let available = available - peers_bytes(views);
        let mut pieces = row_bytes.div_ceil(if quantize { QUANTIZE_PIECE } else { DISPATCH_PIECE });
        loop {
            let piece =
                if pieces == 1 { row_bytes } else { row_bytes.div_ceil(pieces).next_multiple_of(unit) };
            let stage = stage_stride(piece);
            for &warps in choices {
                let extra = if quantize { warps * SCALE_BUFFER_BYTES } else { 0 };
                let stages = available.saturating_sub(extra) / warps / stage;
                let stages = stages.min(MOST_STAGES / warps).min(MOST_RING_STAGES);
                if stages >= FEWEST_STAGES {
                    return Self {
                        threads: 32 * warps as u32,
                        pieces: row_bytes.div_ceil(piece) as u32,
                        piece_bytes: piece as u32,
                        group_bits: row_bytes.div_ceil(piece).min(MAX_GROUPS).ilog2(),
                        stages: stages as u32,
                        shared_bytes: dispatch_bytes(views, warps, stages, stage, quantize.into()),
                    };
                }
            }
            pieces += 1;
        }
    }

    /// The division of a row, which must be equal on all ranks. It is 1 if a row is one group of pieces. Otherwise senders
    /// set, and receivers await, flags of each group, so the pieces must have the same bytes of the input and the same
    /// scales on all ranks.
    pub(crate) fn division(&self, quantize: bool) -> u64 {
        if self.group_bits == 0 {
            return 1;
        }
        u64::from(self.piece_bytes) << 32 | u64::from(quantize) << 31 | u64::from(self.pieces)
    }

    /// Number of warps of a launch that begin with the send role. In plain mode these are all warps, because the duplicate
    /// role copies nothing. In permuted mode they are half of each block's warps or, if dispatch quantises, all but one,
    /// because senders then have the most work. [`SendLoad::most_senders`] limits the number. If half of the warps are too few
    /// to give every token a sender of its own, and all are enough, all send: a second item of a sender comes 4 us later.
    pub(crate) fn senders(&self, load: &SendLoad) -> u32 {
        let warps = self.threads / 32;
        let one_each = |warps: u32| load.tokens <= (warps * load.blocks) as usize;
        let all_send = load.domains == 1 && !load.quantize && one_each(warps) && !one_each(warps / 2);
        let per_block = match (load.permuted, load.quantize) {
            (false, _) => warps,
            _ if all_send => warps,
            (true, true) => warps - 1,
            (true, false) => warps / 2,
        };
        let all = per_block * load.blocks;
        load.most_senders(self.piece_bytes).map_or(all, |most| all.min(most))
    }

    /// The cut of a rank's own tokens. With few tokens, rows are cut into groups of one piece each, so that several senders of
    /// this rank, and several workers of a receiver, work on a token. Without it, one worker stores all rows of a token, and
    /// most have nothing to do. Between domains rows stay whole, which was not measured, and if dispatch quantises: receivers
    /// expect all scales of such rows with their first piece.
    pub(crate) fn shares(&self, load: &SendLoad, row_bytes: usize) -> Self {
        if self.pieces > 1 || load.quantize || load.domains > 1 {
            return *self;
        }
        let group_bits = share_bits(load.tokens, self.senders(load) as usize, row_bytes);
        if group_bits == 0 {
            return *self;
        }
        let groups = 1 << group_bits;
        Self {
            pieces: groups,
            piece_bytes: share_bytes(row_bytes, groups as usize) as u32,
            group_bits,
            ..*self
        }
    }

    /// Bytes between two stages.
    pub(crate) fn stage_bytes(&self) -> u32 {
        stage_stride(self.piece_bytes as usize) as u32
    }
}

/// What a rank sends in a dispatch, and with how many blocks.
#[derive(Debug, Clone, Copy)]
pub(crate) struct SendLoad {
    pub(crate) quantize: bool,
    pub(crate) permuted: bool,
    pub(crate) tokens: usize,
    /// Upper bound of the copies of all tokens.
    pub(crate) copies: usize,
    /// Ranks of the NVLink domain.
    pub(crate) ranks: usize,
    pub(crate) domains: usize,
    pub(crate) blocks: u32,
}

/// What a rank combines, and with how many blocks.
#[derive(Debug, Clone, Copy)]
pub(crate) struct CombineLoad {
    pub(crate) permuted: bool,
    pub(crate) rails: bool,
    /// Whether rows and partial sums are bf16.
    pub(crate) bf16: bool,
    /// Tokens of this rank.
    pub(crate) tokens: usize,
    pub(crate) blocks: u32,
}

impl CombineLoad {
    /// Whether teams of one consumer are faster. On few SMs the consumers limit the speed; with pairs, the consumers of an
    /// SM work on eight different tokens at a time instead of four. But a pair takes longer for one token. It has no
    /// registers for the sums of groups of rows, which occur in permuted mode and between domains. Pairs were not measured
    /// with f32.
    fn suits_pairs(&self) -> bool {
        let one_row_of_a_rank = !self.permuted && !self.rails;
        let (few, many) = (self.blocks <= MOST_BLOCKS_OF_PAIRS, self.tokens > self.blocks as usize);
        one_row_of_a_rank && self.bf16 && few && many
    }
}

impl CombineLoad {
    /// The logarithm to base 2 of the number of shares into which combine divides the rows of this rank's tokens. Without
    /// shares, one team adds all rows of a token, one segment after the other, and with few tokens most teams have nothing to
    /// do. `workers`: the teams of all blocks. Between domains the proxy counts whole rows.
    pub(crate) fn share_bits(&self, hidden: usize, workers: usize) -> u32 {
        if self.rails { 0 } else { share_bits(self.tokens, workers, 2 * hidden) }
    }
}

impl SendLoad {
    /// The number of other ranks of the domain that need a token, on average, if experts are chosen at random.
    fn peers_of_a_token(&self) -> f64 {
        let ranks = self.ranks as f64;
        let choices = self.copies as f64 / self.tokens.max(1) as f64;
        (ranks - 1.0) * (1.0 - (1.0 - ranks.recip()).powf(choices))
    }

    /// The number of senders that fills the links with pieces of `piece_bytes`; more senders would congest them. If it
    /// exceeds the number of blocks, it is rounded to a multiple of that number, so that every block has the same number of
    /// senders. `None` if there is no limit: if dispatch quantises, because senders then take longer, or with several
    /// domains, where lanes are destinations too (neither was measured); or if there are few tokens.
    fn most_senders(&self, piece_bytes: u32) -> Option<u32> {
        if self.quantize || self.domains > 1 {
            return None;
        }
        // Without peers the quotient is infinite, and the conversion makes it the largest number.
        let most = (SENDING_BYTES / (self.peers_of_a_token() * f64::from(piece_bytes))) as u32;
        if self.tokens <= FEW_TOKENS.saturating_mul(most as usize) {
            return None;
        }
        if most < self.blocks {
            return Some(most.max(1));
        }
        Some((f64::from(most) / f64::from(self.blocks)).round() as u32 * self.blocks)
    }
}

/// Tokens of a tile of preprocess, and the shared memory of a block. A tile has a block's share of the tokens, rounded up
/// to a multiple of 32, but at most 256 tokens and no more than fit the shared memory. `domains`: 0 without rails.
///
/// # Errors
/// [`CallerError::Placement`] if not even the smallest tile fits `available` bytes of shared memory.
pub(crate) fn preprocess_tile(
    tokens: usize,
    blocks: usize,
    experts: usize,
    ranks: usize,
    domains: usize,
    available: usize,
) -> Result<(u32, usize)> {
    let wanted = tokens.div_ceil(blocks).next_multiple_of(32).clamp(32, 256);
    for tile in (32..=wanted).rev().step_by(32) {
        let bytes = preprocess_bytes(experts, ranks, domains, experts.max(ranks), tile);
        if bytes <= available {
            return Ok((tile as u32, bytes));
        }
    }
    let problem = format!("{experts} experts do not fit the shared memory of this GPU");
    Err(CallerError::Placement(problem).into())
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::jit::Arch;

    /// Shared memory of a block on an H200 and on an A100, in bytes.
    const SHARED: [usize; 2] = [227 << 10, 163 << 10];

    const LOAD: SendLoad = SendLoad {
        quantize: false,
        permuted: true,
        tokens: 4096,
        copies: 8 * 4096,
        ranks: 4,
        domains: 1,
        blocks: 32,
    };

    #[test]
    fn two_gpus_use_more_sms() {
        let default = |ranks, domains| {
            let world = World::builder().ranks(ranks).domains(domains).experts(8).build().unwrap();
            default_sms(&world)
        };
        assert_eq!([default(1, 1), default(2, 1), default(4, 1), default(2, 2)], [48, 48, 32, 32]);
    }

    #[test]
    fn ranks_agree_on_pieces_that_have_flags_of_their_own() {
        let division = |quantize, hidden: usize, available| {
            let row_bytes = if quantize { 2 * hidden } else { hidden };
            DispatchShape::new(quantize, 8, row_bytes, available).division(quantize)
        };
        let [large, small] = SHARED;
        // With one group, one rank may pass FP8 rows and another may quantise, on any two GPUs.
        assert_eq!([division(false, 1024, large), division(true, 1024, small)], [1, 1]);
        // The same number of groups, but pieces of different sizes.
        let wide = 1 << 16;
        assert_ne!(division(false, wide, large), division(true, wide, large));
        assert_ne!(division(false, 1 << 20, large), division(false, 1 << 20, small));
        assert_eq!(division(false, 1 << 20, large), division(false, 1 << 20, large));
        // Each field changes the value.
        let shape = |piece_bytes, pieces| DispatchShape {
            threads: 128,
            pieces,
            piece_bytes,
            group_bits: 1,
            stages: 3,
            shared_bytes: 0,
        };
        let mut all: Vec<u64> = [(4096, 3), (4096, 4), (8192, 3), (8192, 4)]
            .into_iter()
            .flat_map(|(bytes, pieces)| [false, true].map(|quantize| shape(bytes, pieces).division(quantize)))
            .collect();
        all.sort_unstable();
        all.dedup();
        assert_eq!(all.len(), 8);
    }

    #[test]
    fn every_row_is_cut_into_pieces_that_fit() {
        for available in SHARED {
            for quantize in [false, true] {
                for row_bytes in [32, 96, 1024, 14_336, 16_400, 57_344, 1 << 20] {
                    let shape = DispatchShape::new(quantize, 8, row_bytes, available);
                    assert!(shape.shared_bytes <= available, "{row_bytes}: {shape:?}");
                    assert!(shape.stages as usize >= FEWEST_STAGES);
                    assert_eq!((shape.pieces as usize), row_bytes.div_ceil(shape.piece_bytes as usize));
                    assert!(1 << shape.group_bits <= shape.pieces && 1 << shape.group_bits <= MAX_GROUPS);
                    // At least one warp sends.
                    let warps = 8 * shape.threads / 32;
                    for ranks in [1, 2, 8, 72] {
                        let load = SendLoad { quantize, ranks, blocks: 8, ..LOAD };
                        assert!((1..warps).contains(&shape.senders(&load)));
                        assert!((1..=warps).contains(&shape.senders(&SendLoad { permuted: false, ..load })));
                    }
                }
            }
        }
    }

    #[test]
    fn senders_are_limited_where_they_congest_a_link() {
        let senders = |load: SendLoad| DispatchShape::new(load.quantize, 8, 14_336, SHARED[0]).senders(&load);
        let between = |ranks| SendLoad { ranks, ..LOAD };
        assert_eq!([2, 4, 8].map(|ranks| senders(between(ranks))), [64, 32, 20]);
        let plain = |ranks| SendLoad { permuted: false, ..between(ranks) };
        assert_eq!([2, 4, 8].map(|ranks| senders(plain(ranks))), [96, 32, 20]);
        // Every block has the same number of senders, or at most one.
        assert_eq!(
            [16, 20, 24, 116].map(|blocks| senders(SendLoad { blocks, ..plain(4) })),
            [32, 40, 24, 35]
        );
        // All warps are senders: a rank without peers, few SMs, few tokens or none, quantisation, several domains.
        assert_eq!(senders(plain(1)), 128);
        assert_eq!(senders(SendLoad { blocks: 8, ..plain(4) }), 32);
        assert_eq!(senders(SendLoad { tokens: 128, copies: 8 * 128, ..plain(4) }), 128);
        assert_eq!(senders(SendLoad { tokens: 0, copies: 0, ..plain(4) }), 128);
        assert_eq!(senders(SendLoad { quantize: true, ..plain(4) }), 320);
        assert_eq!(senders(SendLoad { domains: 2, ..plain(4) }), 128);
    }

    #[test]
    fn few_tokens_have_a_sender_each_if_there_are_enough() {
        let senders = |load: SendLoad| DispatchShape::new(load.quantize, 8, 14_336, SHARED[0]).senders(&load);
        let of = |tokens| SendLoad { tokens, copies: 8 * tokens, ranks: 2, ..LOAD };
        assert_eq!([1, 64, 65, 128, 129].map(|tokens| senders(of(tokens))), [64, 64, 128, 128, 64]);
        // Not measured: quantisation and several domains.
        assert_eq!(senders(SendLoad { quantize: true, ..of(200) }), 9 * 32);
        assert_eq!(senders(SendLoad { domains: 2, ..of(128) }), 64);
    }

    /// Items of a rank's tokens in dispatch, and the bytes of a part of a row.
    fn shares(load: SendLoad, row_bytes: usize) -> (u32, u32) {
        let cut = DispatchShape::new(load.quantize, 8, row_bytes, SHARED[0]);
        let shares = cut.shares(&load, row_bytes);
        assert!(shares.pieces * shares.piece_bytes >= row_bytes as u32, "{shares:?}");
        assert!((shares.pieces - 1) * shares.piece_bytes < row_bytes as u32, "{shares:?}");
        assert!(shares.stage_bytes() <= cut.stage_bytes());
        (load.tokens as u32 * shares.pieces, shares.piece_bytes)
    }

    #[test]
    fn rows_of_few_tokens_have_an_item_for_each_part() {
        let of = |tokens| SendLoad { tokens, copies: 8 * tokens, ranks: 2, ..LOAD };
        // 64 of 128 warps send: no sender gets a second item.
        assert_eq!(
            [1, 16, 17, 32, 33, 64].map(|tokens| shares(of(tokens), 14_336)),
            [(4, 3584), (64, 3584), (34, 7168), (64, 7168), (33, 14_336), (64, 14_336)]
        );
        assert_eq!(shares(of(0), 14_336), (0, 14_336));
        // Small parts do not pay. Parts have whole vectors of 16 bytes.
        assert_eq!([4096, 2048, 8208].map(|bytes| shares(of(1), bytes)), [(2, 2048), (1, 2048), (4, 2064)]);
        // Rows that are cut anyway, and what was not measured.
        assert_eq!(shares(of(1), 1 << 16).1, shares(of(4096), 1 << 16).1);
        assert_eq!(shares(SendLoad { domains: 2, ..of(1) }, 14_336), (1, 14_336));
        assert_eq!(shares(SendLoad { quantize: true, ..of(1) }, 2048), (1, 2048));
    }

    #[test]
    fn combine_divides_rows_of_few_tokens() {
        let load = |tokens| CombineLoad { permuted: true, rails: false, bf16: true, tokens, blocks: 32 };
        let bits = |tokens| load(tokens).share_bits(7168, 128);
        assert_eq!([0, 1, 32, 33, 64, 65, 128, 4096].map(bits), [0, 2, 2, 1, 1, 0, 0, 0]);
        assert_eq!([512, 1024, 2048, 4096].map(|hidden| load(1).share_bits(hidden, 128)), [0, 0, 1, 2]);
        assert_eq!(CombineLoad { rails: true, ..load(1) }.share_bits(7168, 128), 0);
    }

    #[test]
    fn one_more_stage_or_warp_would_not_fit() {
        for available in SHARED {
            for (quantize, row_bytes) in
                [(false, 1024), (false, 8192), (false, 14_336), (true, 1024), (true, 14_336)]
            {
                let shape = DispatchShape::new(quantize, 8, row_bytes, available);
                let DispatchShape { threads, stages, shared_bytes, .. } = shape;
                let (warps, stages) = (threads as usize / 32, stages as usize);
                let full = stages + 1 > MOST_RING_STAGES || warps * (stages + 1) > MOST_STAGES;
                let one_more_each = warps * shape.stage_bytes() as usize;
                assert!(full || shared_bytes + one_more_each > available, "{row_bytes}: {shape:?}");
            }
            for consumers in [1, 2] {
                let teams = CombineTeams::new(consumers, 72, available);
                let full = teams.teams * consumers == COMBINE_SLICES;
                let one_more = combine_team_bytes(consumers as usize);
                assert!(full || teams.shared_bytes(72) + one_more > available, "{teams:?}");
            }
        }
    }

    #[test]
    fn teams_of_combine_are_pairs_on_few_blocks_in_plain_mode() {
        let load = CombineLoad { permuted: false, rails: false, bf16: true, tokens: 4096, blocks: 8 };
        let consumers = |load: CombineLoad| CombineTeams::of_launch(&load, 2, SHARED[0]).consumers;
        assert_eq!([8, 24, 25, 32].map(|blocks| consumers(CombineLoad { blocks, ..load })), [1, 1, 2, 2]);
        assert_eq!([0, 1, 8, 9].map(|tokens| consumers(CombineLoad { tokens, ..load })), [2, 2, 2, 1]);
        assert_eq!(consumers(CombineLoad { permuted: true, ..load }), 2);
        assert_eq!(consumers(CombineLoad { rails: true, ..load }), 2);
        assert_eq!(consumers(CombineLoad { bf16: false, ..load }), 2);
    }

    #[test]
    fn combine_fits_every_gpu() {
        for &available in Arch::ALL.into_iter().flat_map(Arch::shared_bytes) {
            for consumers in [1, 2] {
                let teams = CombineTeams::new(consumers, 72, available);
                assert!(
                    teams.teams >= 1 && teams.shared_bytes(72) <= available,
                    "{available} bytes: {teams:?}"
                );
            }
        }
    }

    #[test]
    fn tiles_of_preprocess_give_every_block_one_and_fit() {
        let [available, _] = SHARED;
        for (tokens, tile) in [(0, 32), (512, 32), (513, 64), (1008, 64), (4096, 256), (1 << 20, 256)] {
            let bytes = preprocess_bytes(64, 8, 0, 64, tile);
            assert_eq!(
                preprocess_tile(tokens, 16, 64, 8, 0, available),
                Ok((tile as u32, bytes)),
                "{tokens}"
            );
        }
        // With fewer experts than ranks, the number of ranks determines the number of segments.
        assert_eq!(preprocess_tile(0, 16, 4, 8, 0, available), Ok((32, preprocess_bytes(4, 8, 0, 8, 32))));
    }

    #[test]
    fn a_tile_of_preprocess_shrinks_to_the_shared_memory() {
        let bytes = |tile| preprocess_bytes(4096, 8, 0, 4096, tile);
        let tile = |available| preprocess_tile(1 << 20, 16, 4096, 8, 0, available);
        for (available, expected) in [(bytes(256), 256), (bytes(256) - 1, 224), (bytes(32), 32)] {
            assert_eq!(tile(available), Ok((expected as u32, bytes(expected))), "{available}");
        }
        let error = tile(bytes(32) - 1).unwrap_err().to_string();
        assert!(error.contains("4096 experts do not fit the shared memory"), "{error}");
    }
}
