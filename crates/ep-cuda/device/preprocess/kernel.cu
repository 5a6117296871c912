// preprocess: a rank's own routing to the lists of a handle. Each block counts some tokens; the counts, and nothing
// else, are exchanged with all ranks; then each block knows the row of every copy of its tokens.
#include "emit.cuh"

constexpr u32 THREADS = 1024;

extern "C" __global__ void __launch_bounds__(THREADS, 1) preprocess(const __grid_constant__ PreprocessParams p) {
    extern __shared__ __align__(16) u32 shared[];
    const Common& c = p.common;
    const Columns column{c.experts, c.ranks};
    const u32 epoch = c.own->epoch + 1;
    const u32 segments = max(c.experts, c.ranks);
    // Rows of 64 bits first, which must lie at multiples of them.
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

    for (u32 at = threadIdx.x; at < column.count(); at += blockDim.x) run[at] = 0;
    __syncthreads();
    for (u32 at = begin; at < end; at++) {
        load(at);
        tile.add_to(run);
    }
    for (u32 at = threadIdx.x; at < column.count(); at += blockDim.x)
        p.block_columns[blockIdx.x * column.count() + at] = run[at];
    bool fine = all_blocks(c) && !__syncthreads_or(aborted(c, ld_relaxed_sys(&c.own->abort)));

    if (fine) sum_blocks(p, run, totals);
    for (u32 rank = threadIdx.x; rank < c.ranks; rank += blockDim.x) {
        copies_begin[rank] = tokens_begin[rank] = 0;
        for (u32 below = 0; below < rank; below++) {
            copies_begin[rank] += totals[column.copies_of(below)];
            tokens_begin[rank] += totals[column.tokens_of(below)];
        }
    }
    if (fine && totals[column.copies()] > p.most_copies) {
        fine = false;
        if (threadIdx.x == 0) too_many_copies(p, totals[column.copies()]);
    }
    if (fine && blockIdx.x == 0) send_counts(p, totals, epoch);
    for (u32 peer = threadIdx.x; fine && peer < c.ranks; peer += blockDim.x) fine = hear(c, epoch, peer);
    fine = __syncthreads_and(fine);

    if (fine) {
        compute_bases(p, bases, epoch, blockIdx.x == 0);
        const Cursors cursors{tile, run, copies_begin, tokens_begin};
        for (u32 at = begin; at < end; at++) {
            if (per_block > 1) load(at);
            emit(p, cursors, bases);
            // Whoever has not read the sums yet, does so before they change.
            __syncthreads();
            if (at + 1 < end) tile.add_to(run);
        }
        if (blockIdx.x == 0) {
            const HandleView& h = p.handle;
            for (u32 rank = threadIdx.x; rank < c.ranks; rank += blockDim.x) {
                const u32 copies = copies_begin[rank] + totals[column.copies_of(rank)];
                const u32 tokens = tokens_begin[rank] + totals[column.tokens_of(rank)];
                h.dst_begin[rank * (h.chunks + 1) + h.chunks] = copies;
                h.recv_begin[rank * (h.chunks + 1) + h.chunks] = h.permuted ? copies : tokens;
            }
            if (threadIdx.x == 0) {
                u32 remote = 0;
                for (u32 rank = 0; rank < c.ranks; rank++)
                    if (rank != c.rank) remote += totals[column.tokens_of(rank)];
                const u32 rest = 3 * (c.owner_begin[c.rank + 1] - c.owner_begin[c.rank]);
                set_shape(p, rest + SHAPE_REMOTE, remote);
                set_shape(p, rest + SHAPE_OWN, totals[column.tokens_of(c.rank)]);
                h.send_begin[h.chunks] = h.token_begin[h.tokens] = totals[column.sends()];
                h.copy_begin[h.chunks] = totals[column.copies()];
            }
        }
    }
    leave(c, epoch);
}
