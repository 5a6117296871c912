//! How an operator is cut into pieces, stages and blocks: from its sizes and the GPU's.

use ep::{CallerError, Result};

use crate::device::KernelKey;
use crate::params::MAX_GROUPS;

/// Bytes of shared memory that one peer's view takes in a block.
const PEER_VIEW_BYTES: usize = 80;
/// Longest piece of a row that moves as a unit in dispatch, bytes.
const DISPATCH_PIECE: usize = 16 << 10;
/// The same where tokens are quantised: more warps have to share the memory.
const QUANTIZE_PIECE: usize = 8 << 10;
/// Shared memory of a warp of combine, bytes: `FETCH_BYTES + ASIDE_BYTES` of `device/combine/sum.cuh`.
const COMBINE_WARP_BYTES: usize = (5 + 2) * 2048;
/// Fewest stages of a ring: two stores under way while a third piece arrives.
const FEWEST_STAGES: usize = 3;
/// Stages of a ring, at most: their barriers have a fixed place.
const MOST_STAGES: usize = 32;
/// Bytes of a sender's buffer for scales, where it quantises.
const SCALE_BUFFER: usize = 512;

/// The numbers that a launch of dispatch needs.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) struct DispatchShape {
    pub(crate) threads: u32,
    pub(crate) pieces: u32,
    pub(crate) piece_bytes: u32,
    pub(crate) groups: u32,
    pub(crate) stages: u32,
    pub(crate) shared_bytes: usize,
}

/// The numbers that a launch of combine needs.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) struct CombineShape {
    pub(crate) threads: u32,
    pub(crate) shared_bytes: usize,
}

/// The dispatch kernel for rows that travel as they are, or are quantised.
pub(crate) fn dispatch_key(quantize: bool) -> KernelKey {
    KernelKey::Dispatch { quantize, warps: t("EP_W", if quantize { 7 } else { 4 }) }
}

/// The combine kernel for these types.
pub(crate) fn combine_key(rows_f32: bool, wire_f32: bool) -> KernelKey {
    KernelKey::Combine { rows_f32, wire_f32, push_warps: t("EP_PW", 8), reduce_warps: t("EP_DW", 8) }
}

/// Blocks of a launch of dispatch that send; the others receive.
pub(crate) fn send_blocks(blocks: u32, quantize: bool) -> u32 {
    let _ = quantize;
    t("EP_SB", (blocks / 2).clamp(1, 12)).min(blocks - 1)
}
fn t(k: &str, d: u32) -> u32 { std::env::var(k).ok().map_or(d, |v| v.parse().unwrap()) }

fn peers_bytes(ranks: usize) -> usize {
    (ranks * PEER_VIEW_BYTES).next_multiple_of(128)
}

impl DispatchShape {
    /// `row_bytes` of an input row; `available` bytes of shared memory.
    pub(crate) fn new(key: KernelKey, ranks: usize, row_bytes: usize, available: usize) -> Result<Self> {
        let KernelKey::Dispatch { quantize, warps } = key else { unreachable!("a key of dispatch") };
        let warps = warps as usize;
        let unit = if quantize { 256 } else { 16 };
        let extra = |piece: usize| if quantize { warps * (piece + SCALE_BUFFER) } else { 0 };
        let available = available - peers_bytes(ranks);
        let mut pieces = row_bytes.div_ceil(t("EP_PIECE", if quantize { QUANTIZE_PIECE } else { DISPATCH_PIECE } as u32) as usize);
        loop {
            let piece = if pieces == 1 { row_bytes } else { row_bytes.div_ceil(pieces).next_multiple_of(unit) };
            // The copy engine wants stages at multiples of 128 bytes.
            let stage = piece.next_multiple_of(128);
            let stages = (available.saturating_sub(extra(stage)) / warps / stage).min(MOST_STAGES);
            if stages >= FEWEST_STAGES {
                return Ok(Self {
                    threads: 32 * warps as u32,
                    pieces: row_bytes.div_ceil(piece) as u32,
                    piece_bytes: piece as u32,
                    groups: row_bytes.div_ceil(piece).min(MAX_GROUPS) as u32,
                    stages: stages as u32,
                    shared_bytes: peers_bytes(ranks) + warps * stages * stage + extra(stage),
                });
            }
            pieces += 1;
        }
    }

    /// Bytes from one stage to the next.
    pub(crate) fn stage_bytes(&self) -> u32 {
        self.piece_bytes.next_multiple_of(128)
    }
}

impl CombineShape {
    pub(crate) fn new(key: KernelKey, ranks: usize) -> Self {
        let KernelKey::Combine { push_warps, reduce_warps, .. } = key else { unreachable!("a key of combine") };
        let warps = push_warps + reduce_warps;
        Self { threads: 32 * warps, shared_bytes: peers_bytes(ranks) + warps as usize * COMBINE_WARP_BYTES }
    }
}

/// Shared memory of preprocessing with tiles of `tile` tokens, bytes.
fn preprocess_bytes(experts: usize, ranks: usize, tile: usize) -> usize {
    let columns = experts + 2 * ranks + 2;
    let head = 2 * columns + 2 * ranks + experts.max(ranks) + ranks;
    let rows = tile * experts.div_ceil(32);
    let column_bits = (experts + ranks) * (tile / 32);
    4 * (head + rows + column_bits + (ranks + 2) * tile + experts.div_ceil(4))
}

/// Tokens that a block of preprocessing works on at a time, and its shared memory.
pub(crate) fn preprocess_tile(experts: usize, ranks: usize, available: usize) -> Result<(u32, usize)> {
    for tile in [256usize, 128, 64, 32] {
        let bytes = preprocess_bytes(experts, ranks, tile);
        if bytes <= available {
            return Ok((tile as u32, bytes));
        }
    }
    let problem = format!("{experts} experts do not fit the shared memory of this GPU");
    Err(CallerError::Placement(problem).into())
}
