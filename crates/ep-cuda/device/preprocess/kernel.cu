// preprocess: computes the lists of a handle from this rank's routing. All blocks have the same role, in three steps:
//
//   count      Each block counts the choices of its tokens, tile (`p.tile` tokens) by tile, and writes its sums to
//              `block_columns`. After the barrier of all blocks, each block adds the sums of all blocks. Reads only
//              the routing and `block_columns`.
//   exchange   Block 0 writes this rank's counts (bases.cuh) behind the control block of every rank of its domain and
//              sends the handshake. Every block awaits the handshakes of all ranks of the domain. Without RAILS, ranks
//              exchange nothing else.
//   emit       With the counts of all ranks, each block computes the row of every copy of its tokens, and writes their
//              entries in the lists (lists.cuh). Block 0 also writes the shape and the ends of the lists. Writes to
//              this rank's handle, host shape and the caller's counts only.
//
// With RAILS (several NVLink domains, docs/cuda-rails.md), there is a step between count and exchange: all blocks write the
// masks of the tokens that go to other domains, and block 0 sends them. In the exchange, block 0 first awaits the sets that come
// from other domains, and passes their counts on; then it sends the handshake. After emit, all blocks count and emit
// the tokens of each of these sets.
//
// A wait that fails reports the fault. The lists are then incomplete.
//
// Reuse. Counts and handshakes exist twice, for even and odd epochs: a peer writes those of epoch + 2 after it has seen
// this rank's handshake of epoch + 1, which this rank sends after this kernel. `block_columns` belongs to one operator
// at a time; the barriers order its two halves (docs/protocol.md). Masks lie in lanes (docs/cuda-rails.md, "Reuse").
//
// Variants: with or without RAILS. The form of the routing is a parameter, `p.form`: a `RoutingForm` (params.rs). Each
// form has its case in `Tile::load` (tile.cuh), in `Lists` (src/routing.rs) and in `Form` of the roles' tests.
#include "routing.cuh"

// Calls `visit` for each of the tiles [begin, end) of this block, with the sums of the tokens before it in `run`.
// `several`: blocks may have more than one tile, so each tile is loaded anew. Otherwise a block's only tile is still loaded.
// Called by all threads.
template <class Load, class Visit>
__device__ inline void for_each_tile(const Tile& tile, u32 begin, u32 end, bool several, u32* run, const Load& load,
                                     const Visit& visit) {
    for (u32 at = begin; at < end; at++) {
        if (several) load(at);
        visit();
        // All threads must have read the sums before they change.
        __syncthreads();
        if (at + 1 < end) tile.add_to(run);
    }
}

// Counts and emits the foreign sets that this rank forwards, one after the other. Their routing is the masks that rail
// peers have sent. Called by all threads of all blocks.
__device__ inline void emit_sets(const PreprocessParams& p, Tile& tile, const Columns& column, const Bases& bases,
                                 u32* run, u32* totals, u32* copies_begin, u32* tokens_begin, u32 epoch) {
    const Common& c = p.common;
    bool fine = true;
    u32 turn = 0;
    for_each_other_domain(c, [&](u32 domain) {
        turn++;
        if (!fine) return;
        const u32 source = rail_peer(c, domain);
        const u32 rows = ld_relaxed_sys(counts_at(p, c.own, epoch, source) + COUNT_TOKENS);
        const HandleView lists = set_view(c, p.handle, domain, rows);
        tile.form = ROUTING_MASKS;
        // Blocks other than 0 do not acquire `rail_seen` before they read the plan and the lane. A chain orders these reads: block 0
        // acquires `rail_seen` and passes the barrier of `forward_counts`. Then it releases the handshake to its own control block,
        // and every block acquires that handshake.
        const u64 masks_offset = seen_plan(c, epoch, domain).sections[1];
        tile.masks = reinterpret_cast<const u32*>(in_lane(c, epoch, domain) + masks_offset);
        tile.mask_words = mask_words(c, c.rails.domain);
        const u32 tiles = div_up(rows, p.tile), per_block = div_up(tiles, gridDim.x);
        const u32 begin = min(tiles, blockIdx.x * per_block), end = min(tiles, begin + per_block);
        const auto load = [&](u32 at) { tile.load(at * p.tile, min(p.tile, rows - at * p.tile)); };
        // `block_columns` has two halves, which sets use alternately: a block may write the sums of a set while other
        // blocks read those of the previous set.
        u32* sums = p.block_columns + (turn & 1) * gridDim.x * column.count();
        count_block(column, tile, begin, end, load, run, sums);
        fine = all_blocks(c, &c.own->more_arrived[turn]);
        if (!fine) return;
        sum_blocks(p, sums, run, totals);
        begin_regions(c, column, totals, copies_begin, tokens_begin);
        compute_bases(p, bases, epoch, source, false);
        const Cursors cursors{tile, lists, run, copies_begin, tokens_begin};
        for_each_tile(tile, begin, end, per_block > 1, run, load, [&] { emit(p, cursors, bases); });
        if (blockIdx.x == 0) finish_lists(c, lists, column, totals, copies_begin, tokens_begin);
        __syncthreads();
    });
}

// Writes the ends of `rail_begin`, and the numbers of rows of all foreign sets. Called by all threads of one block.
__device__ inline void finish_rails(const PreprocessParams& p, const Columns& column, const u32* totals, u32 epoch) {
    const Common& c = p.common;
    const HandleView& h = p.handle;
    for (u32 domain = threadIdx.x; domain < c.rails.domains; domain += blockDim.x) {
        u32 copies = 0;
        for (u32 local = 0; local < domain_size(c); local++)
            copies += totals[column.copies_of(domain * domain_size(c) + local)];
        rail_begin(h, domain).rows[h.chunks] = totals[column.tokens_to(domain)];
        rail_begin(h, domain).copies[h.chunks] = copies;
    }
    for (u32 source = threadIdx.x; source < c.ranks; source += blockDim.x)
        h.set_rows[source] = ld_relaxed_sys(counts_at(p, c.own, epoch, source) + COUNT_TOKENS);
}

constexpr u32 THREADS = RAILS ? PREPROCESS_RAIL_THREADS : PREPROCESS_THREADS;

extern "C" __global__ void __launch_bounds__(THREADS, 1) preprocess(const __grid_constant__ PreprocessParams p) {
    extern __shared__ __align__(16) u32 shared[];
    const Common& c = p.common;
    const Columns column(c);
    const u32 epoch = c.own->epoch + 1;
    const u32 segments = max(c.experts, c.ranks);
    // The 64-bit numbers come first, because of their alignment.
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
    const Cursors cursors{tile, p.handle, run, copies_begin, tokens_begin};
    const auto for_own_tiles = [&](const auto& visit) {
        for_each_tile(tile, begin, end, per_block > 1, run, load, visit);
    };

    count_block(column, tile, begin, end, load, run, p.block_columns);
    bool fine = all_blocks(c, &c.own->blocks_arrived) && !__syncthreads_or(aborted(c, ld_relaxed_sys(&c.own->abort)));

    if (fine) sum_blocks(p, p.block_columns, run, totals);
    if (RAILS && fine) {
        for_own_tiles([&] { emit_masks(p, cursors, column, totals, epoch); });
        fine = all_blocks(c, &c.own->more_arrived[0]);
        if (fine && blockIdx.x == 0) fine = send_routing(p, column, totals, epoch);
        // The loop above has advanced `run`: compute it again.
        if (per_block > 1) sum_blocks(p, p.block_columns, run, totals);
    }
    begin_regions(c, column, totals, copies_begin, tokens_begin);
    if (exchange_counts(p, column, totals, epoch, fine)) {
        compute_bases(p, bases, epoch, c.rank, blockIdx.x == 0);
        for_own_tiles([&] { emit(p, cursors, bases); });
        if (blockIdx.x == 0) {
            finish_lists(c, p.handle, column, totals, copies_begin, tokens_begin);
            if (threadIdx.x == 0) finish_shape(p, column, totals);
        }
        if (RAILS) {
            if (blockIdx.x == 0) finish_rails(p, column, totals, epoch);
            // All threads must have read the sums before they change.
            __syncthreads();
            emit_sets(p, tile, column, bases, run, totals, copies_begin, tokens_begin, epoch);
        }
    }
    leave(c, epoch);
}
