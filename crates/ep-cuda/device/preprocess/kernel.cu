// preprocess: computes the lists of a handle from this rank's routing. All blocks have the same role, in three steps:
//
//   count      Each block counts the choices of its tokens, tile (`p.tile` tokens) by tile, and writes its sums to
//              `block_columns`. After the barrier of all blocks, each block adds the sums of all blocks. Reads the
//              routing only.
//   exchange   Block 0 writes this rank's counts (bases.cuh) behind the control block of every rank and sends the
//              handshake. Every block awaits the handshakes of all ranks. Ranks exchange nothing else.
//   emit       With the counts of all ranks, each block knows the row of every copy of its tokens, and writes their
//              entries in the lists (lists.cuh). Block 0 also writes the shape and the ends of the lists. Writes to
//              this rank's handle, host shape and the caller's counts only.
//
// If an await fails, it reports the fault, and the lists are incomplete.
#include "emit.cuh"

extern "C" __global__ void __launch_bounds__(PREPROCESS_THREADS, 1) preprocess(const __grid_constant__ PreprocessParams p) {
    extern __shared__ __align__(16) u32 shared[];
    const Common& c = p.common;
    const Columns column{c.experts, c.ranks};
    const u32 epoch = c.own->epoch + 1;
    const u32 segments = max(c.experts, c.ranks);
    // The 64-bit numbers first, because of their alignment.
    auto* row_totals = reinterpret_cast<u64*>(shared);
    u32* memory = shared + 2 * segments;
    const auto take = [&](u32 words) {
        u32* taken = memory;
        memory += words;
        return taken;
    };
    u32 *run = take(column.count()), *totals = take(column.count());
    u32 *copies_begin = take(c.ranks), *tokens_begin = take(c.ranks);
    const Bases bases{row_totals, take(segments), take(c.ranks)};
    Tile tile(p, memory);

    const u32 tiles = div_up(p.handle.tokens, p.tile);
    const u32 per_block = div_up(tiles, gridDim.x);
    const u32 begin = min(tiles, blockIdx.x * per_block), end = min(tiles, begin + per_block);
    const auto load = [&](u32 at) { tile.load(at * p.tile, min(p.tile, p.handle.tokens - at * p.tile)); };

    count_block(p, column, tile, begin, end, load, run);
    bool fine = all_blocks(c) && !__syncthreads_or(aborted(c, ld_relaxed_sys(&c.own->abort)));

    if (fine) sum_blocks(p, run, totals);
    begin_regions(c, column, totals, copies_begin, tokens_begin);
    if (exchange_counts(p, column, totals, epoch, fine)) {
        compute_bases(p, bases, epoch, blockIdx.x == 0);
        const Cursors cursors{tile, run, copies_begin, tokens_begin};
        for (u32 at = begin; at < end; at++) {
            if (per_block > 1) load(at);
            emit(p, cursors, bases);
            // Before the sums change, all threads have read them.
            __syncthreads();
            if (at + 1 < end) tile.add_to(run);
        }
        if (blockIdx.x == 0) finish_lists(p, column, totals, copies_begin, tokens_begin);
    }
    leave(c, epoch);
}
