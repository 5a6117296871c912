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
/// Lanes, and as many vectors of 8 elements as combine adds in a step: 4 of bf16, 2 where anything is f32.
const COMBINE_STRIDE: [usize; 2] = [4 * 32, 2 * 32];
/// Steps, and finished runs, of combine that are on their way.
const COMBINE_STEPS: usize = 4;
const COMBINE_RUNS: usize = 2;
/// Warps of a block of combine, each a worker.
const COMBINE_WARPS: u32 = 16;
/// Tokens that combine holds back for peers, which start some microseconds apart: what they push in that time.
pub(crate) const COMBINE_SLACK: u32 = 96;
/// Warps of a block of dispatch, each a worker: of those that move rows as they are, as many as have [`FEWEST_STAGES`]
/// each. What a warp does for a row takes as long for a small one, so small rows want more of them.
const DISPATCH_WARPS: [usize; 2] = [8, 4];
const QUANTIZE_WARPS: usize = 10;
/// Fewest stages of a ring: two stores under way while a third piece arrives; or a store, what is quantised, a load.
const FEWEST_STAGES: usize = 3;
/// Stages of all rings of a block, at most, since their barriers have a fixed place (`device/dispatch/kernel.cu`), and of
/// one: a lane each sets them up.
const MOST_STAGES: usize = 128;
const MOST_RING_STAGES: usize = 32;
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
    let warps = if quantize { QUANTIZE_WARPS } else { DISPATCH_WARPS[0] };
    KernelKey::Dispatch { quantize, warps: warps as u32 }
}

/// The combine kernel for these types.
pub(crate) fn combine_key(rows_f32: bool, wire_f32: bool) -> KernelKey {
    KernelKey::Combine { rows_f32, wire_f32, warps: COMBINE_WARPS }
}

/// The key with as many warps as the GPU has shared memory for.
pub(crate) fn fitting(key: KernelKey, ranks: usize, available: usize) -> KernelKey {
    let KernelKey::Combine { rows_f32, wire_f32, warps } = key else { return key };
    let most = (available - peers_bytes(ranks)) / combine_warp_bytes(rows_f32, wire_f32);
    KernelKey::Combine { rows_f32, wire_f32, warps: warps.min(most as u32) }
}

fn peers_bytes(ranks: usize) -> usize {
    (ranks * PEER_VIEW_BYTES).next_multiple_of(128)
}

impl DispatchShape {
    /// `row_bytes` of an input row; `available` bytes of shared memory.
    pub(crate) fn new(quantize: bool, ranks: usize, row_bytes: usize, available: usize) -> Self {
        let unit = if quantize { 256 } else { 16 };
        let choices: &[usize] = if quantize { &[QUANTIZE_WARPS] } else { &DISPATCH_WARPS };
        let available = available - peers_bytes(ranks);
        let mut pieces = row_bytes.div_ceil(if quantize { QUANTIZE_PIECE } else { DISPATCH_PIECE });
        loop {
            let piece =
                if pieces == 1 { row_bytes } else { row_bytes.div_ceil(pieces).next_multiple_of(unit) };
            // The copy engine wants stages at multiples of 128 bytes.
            let stage = piece.next_multiple_of(128);
            for &warps in choices {
                let extra = if quantize { warps * SCALE_BUFFER } else { 0 };
                let stages = available.saturating_sub(extra) / warps / stage;
                let stages = stages.min(MOST_STAGES / warps).min(MOST_RING_STAGES);
                if stages >= FEWEST_STAGES {
                    return Self {
                        threads: 32 * warps as u32,
                        pieces: row_bytes.div_ceil(piece) as u32,
                        piece_bytes: piece as u32,
                        groups: row_bytes.div_ceil(piece).min(MAX_GROUPS) as u32,
                        stages: stages as u32,
                        shared_bytes: peers_bytes(ranks) + warps * stages * stage + extra,
                    };
                }
            }
            pieces += 1;
        }
    }

    /// Bytes from one stage to the next.
    pub(crate) fn stage_bytes(&self) -> u32 {
        self.piece_bytes.next_multiple_of(128)
    }
}

/// Shared memory of a warp of combine, bytes: `WORKER_BYTES` of `device/combine/sum.cuh`.
fn combine_warp_bytes(rows_f32: bool, wire_f32: bool) -> usize {
    let f32 = rows_f32 || wire_f32;
    let stride = COMBINE_STRIDE[usize::from(f32)];
    let fetch = COMBINE_STEPS * stride * if f32 { 32 } else { 16 };
    let runs = COMBINE_RUNS * stride * if wire_f32 { 32 } else { 16 };
    fetch + runs
}

impl CombineShape {
    pub(crate) fn new(key: KernelKey, ranks: usize) -> Self {
        let KernelKey::Combine { rows_f32, wire_f32, warps } = key else { unreachable!("a key of combine") };
        let shared_bytes = peers_bytes(ranks) + warps as usize * combine_warp_bytes(rows_f32, wire_f32);
        Self { threads: 32 * warps, shared_bytes }
    }
}

/// Shared memory of preprocessing with tiles of `tile` tokens, bytes.
fn preprocess_bytes(experts: usize, ranks: usize, tile: usize) -> usize {
    let columns = experts + 2 * ranks + 2;
    let head = 2 * columns + 3 * experts.max(ranks) + 3 * ranks;
    let rows = tile * (experts.div_ceil(32) | 1);
    let column_bits = (experts + ranks) * (tile / 32);
    let by_position = experts.div_ceil(2) + experts.div_ceil(4);
    4 * (head + rows + column_bits + (ranks + 2) * (tile + 1) + by_position)
}

/// Tokens that a block of preprocessing works on at a time, and its shared memory: as few as give all blocks some.
pub(crate) fn preprocess_tile(
    tokens: usize,
    blocks: usize,
    experts: usize,
    ranks: usize,
    available: usize,
) -> Result<(u32, usize)> {
    let wanted = tokens.div_ceil(blocks).next_multiple_of(32).clamp(32, 256);
    for tile in (32..=wanted).rev().step_by(32) {
        let bytes = preprocess_bytes(experts, ranks, tile);
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

    /// What an H200 and an A100 let a block have.
    const SHARED: [usize; 2] = [227 << 10, 163 << 10];

    #[test]
    fn every_row_is_cut_into_pieces_that_fit() {
        for available in SHARED {
            for quantize in [false, true] {
                for row_bytes in [32, 96, 1024, 14_336, 16_400, 57_344, 1 << 20] {
                    let shape = DispatchShape::new(quantize, 8, row_bytes, available);
                    assert!(shape.shared_bytes <= available, "{row_bytes}: {shape:?}");
                    assert!(shape.stages as usize >= FEWEST_STAGES);
                    assert_eq!((shape.pieces as usize), row_bytes.div_ceil(shape.piece_bytes as usize));
                    assert!(shape.groups <= shape.pieces && shape.groups as usize <= MAX_GROUPS);
                }
            }
        }
    }

    #[test]
    fn combine_fits_every_gpu() {
        for available in SHARED {
            for (rows, wire) in [(false, false), (false, true), (true, false), (true, true)] {
                let key = fitting(combine_key(rows, wire), 72, available);
                let shape = CombineShape::new(key, 72);
                assert!(shape.threads >= 32 && shape.shared_bytes <= available, "{key:?}: {shape:?}");
            }
        }
    }
}
