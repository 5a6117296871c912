//! Formulas for the shared memory of a block, defined once for the host and the kernels.

use crate::mirror::formulas;
use crate::params::{COMBINE_SLICE_BYTES, COMBINE_STAGES, PEER_VIEW_BYTES, SCALE_BUFFER_BYTES, SHAPE_WORDS};

// Flags in formulas are 0 or 1.
formulas! { FORMULAS:
    /// `value`, rounded up to a multiple of `multiple`.
    fn round_up(value, multiple) = (value + multiple - 1) / multiple * multiple;

    /// Bytes of the views of all peers.
    fn peers_bytes(ranks) = round_up(ranks * PEER_VIEW_BYTES, 128);

    /// Bytes between two stages of a ring of dispatch: stages begin at multiples of 128.
    fn stage_stride(piece_bytes) = round_up(piece_bytes, 128);

    /// Bytes of a piece of a row of `row_bytes` bytes that has a group for each piece, because the rank has few tokens.
    fn share_bytes(row_bytes, groups) = round_up((row_bytes + groups - 1) / groups, 16);

    /// Bytes of a worker of dispatch: its ring and, if it quantises, its scales.
    fn dispatch_worker_bytes(stages, stage_bytes, quantize) = stages * stage_bytes + quantize * SCALE_BUFFER_BYTES;

    /// Bytes of a block of dispatch. `ranks`: ranks and, with rails, domains.
    fn dispatch_bytes(ranks, warps, stages, stage_bytes, quantize) =
        peers_bytes(ranks) + warps * dispatch_worker_bytes(stages, stage_bytes, quantize);

    /// Bytes of a team of combine: its ring, and `TeamMemory` (steps.cuh): a step and three barriers for each stage.
    fn combine_team_bytes(consumers) =
        COMBINE_STAGES * consumers * COMBINE_SLICE_BYTES + round_up(COMBINE_STAGES * (16 + 3 * 8), 128);

    /// Bytes of a block of combine. `ranks`: as in `dispatch_bytes`.
    fn combine_bytes(ranks, teams, consumers) = peers_bytes(ranks) + teams * combine_team_bytes(consumers);

    /// The number of sums over tokens in preprocess: copies per expert, copies and tokens per rank, `sends`, `copies`, and
    /// with rails the tokens per domain. `domains` is 0 without rails, here and below.
    fn count_columns(experts, ranks, domains) = experts + 2 * ranks + 2 + domains;

    /// Words of a row of a tile's bit matrix: odd, so that rows of adjacent tokens begin in different banks.
    fn tile_row_words(experts) = (round_up(experts, 32) / 32) | 1;

    /// Words of a tile of preprocess: bits by token, expert, rank and domain; scans; expert and owner by position.
    fn tile_words(experts, ranks, domains, tile) = tile * tile_row_words(experts) + (experts + ranks + domains) * (tile / 32)
        + (ranks + 2) * (tile + 1) + round_up(experts, 2) / 2 + round_up(experts, 4) / 4;

    /// Bytes of a block of preprocess: 64-bit row count and base per segment; two sets of column sums; a limit and two
    /// begins per rank; a tile. `segments`: the larger of experts and ranks.
    fn preprocess_bytes(experts, ranks, domains, segments, tile) = 4 * (3 * segments
        + 2 * count_columns(experts, ranks, domains) + 3 * ranks + tile_words(experts, ranks, domains, tile));

    /// Bytes of the lists of a foreign set. `copies`, `rows`, `chunks`: the maximum numbers of a set.
    fn set_bytes(rows, copies, chunks, ranks) = round_up(8 * (copies + rows), 16) + 2 * round_up(4 * (chunks + 1), 16)
        + round_up(4 * (rows + 1), 16) + 16 * copies + 2 * round_up(8 * copies, 16)
        + 2 * round_up(4 * (chunks + 1) * ranks, 16);

    /// Words of a handle's shape.
    fn shape_words(local_experts) = 3 * local_experts + SHAPE_WORDS;
}
