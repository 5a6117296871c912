// The exchange of counts, and what follows from the counts of all ranks: for every segment (in permuted mode an expert, in plain
// mode a rank) the first row of a source's tokens (this rank's, or those of a foreign set), and the shape of this rank's output.
#pragma once
#include "tile.cuh"

// The words of a rank's counts: tokens, `pad_multiple` and capacity; then [experts] copies and [ranks] tokens.
constexpr u32 COUNT_TOKENS = 0, COUNT_MODE = 1, COUNT_CAPACITY = 2, COUNT_HEAD = 3;

// Counts the choices of the tiles [begin, end) and publishes the sums to the other blocks, in `block_columns`.
// `load(at)` loads a tile. Called by all threads.
template <class Load>
__device__ inline void count_block(const Columns& column, const Tile& tile, u32 begin, u32 end, const Load& load,
                                   u32* run, u32* block_columns) {
    for (u32 at = threadIdx.x; at < column.count(); at += blockDim.x) run[at] = 0;
    __syncthreads();
    for (u32 at = begin; at < end; at++) {
        load(at);
        tile.add_to(run);
    }
    for (u32 at = threadIdx.x; at < column.count(); at += blockDim.x)
        block_columns[blockIdx.x * column.count() + at] = run[at];
}

// Reports that there are too many rows, or in plain mode too many weights, to number them. `experts`: 0 for rows; the
// number of weights of a row for weights.
__device__ inline void too_many(const PreprocessParams& p, u32 rank, u64 rows, u32 experts) {
    report_own(p.common, FAULT_TOO_MANY_ROWS, rank, rows, experts, 0);
}

__device__ inline void too_many_copies(const PreprocessParams& p, u32 copies) {
    report_own(p.common, FAULT_TOO_MANY_COPIES, p.common.rank, copies, p.most_copies, 0);
}

// Adds the column sums of the blocks before this one (`before`) and of all blocks (`totals`). Called by all threads.
__device__ inline void sum_blocks(const PreprocessParams& p, const u32* block_columns, u32* before, u32* totals) {
    const u32 columns = Columns(p.common).count(), blocks = gridDim.x;
    // If there are fewer columns than threads, several threads share a column, each with some of the blocks.
    const u32 parts = max(1u, min(blocks, blockDim.x / columns)), each = div_up(blocks, parts);
    for (u32 column = threadIdx.x; column < columns; column += blockDim.x) before[column] = totals[column] = 0;
    __syncthreads();
    for (u32 index = threadIdx.x; index < columns * parts; index += blockDim.x) {
        const u32 first = min(blocks, index / columns * each), count = min(each, blocks - first), column = index % columns;
        u32 earlier = 0, total = 0;
        for_each_loaded(
            count, [&](u32 at) { return &block_columns[(first + at) * columns + column]; },
            [&](u32 at, u32 sum) {
                if (first + at < blockIdx.x) earlier += sum;
                total += sum;
            });
        atomicAdd(&before[column], earlier);
        atomicAdd(&totals[column], total);
    }
    __syncthreads();
}

// The counts of `source` in the memory behind `control`. Those of a source in another domain are written by its forwarder.
__device__ inline u32* counts_at(const PreprocessParams& p, Control* control, u32 epoch, u32 source) {
    return reinterpret_cast<u32*>(control + 1) + ((epoch & 1) * p.common.ranks + source) * p.count_words;
}

// Writes this rank's counts to all ranks of its domain, then sends the handshake, whose release order covers the
// counts: the barrier orders the counts before the handshake. Called by all threads of one block.
__device__ inline void send_counts(const PreprocessParams& p, const u32* totals, u32 epoch) {
    const Common& c = p.common;
    const Columns column(c);
    for (u32 at = threadIdx.x; at < p.count_words * domain_size(c); at += blockDim.x) {
        const u32 peer = domain_begin(c) + at / p.count_words, word = at % p.count_words;
        u32 value = p.capacity;
        if (word == COUNT_TOKENS) value = p.handle.tokens;
        if (word == COUNT_MODE) value = p.pad_multiple;
        if (word >= COUNT_HEAD) value = totals[word - COUNT_HEAD];
        if (word >= COUNT_HEAD + c.experts) value = totals[column.tokens_of(word - COUNT_HEAD - c.experts)];
        counts_at(p, c.control[peer], epoch, c.rank)[word] = value;
    }
    __syncthreads();
    send_handshake(c, epoch);
}

// Awaits the counts of the foreign sets that this rank forwards, and writes them to all ranks of its domain, as the
// counts of the ranks whose tokens the sets have. Returns false, after the fault was reported, if they do not arrive.
// Called by all threads of one block.
__device__ inline bool forward_counts(const PreprocessParams& p, u32 epoch) {
    const Common& c = p.common;
    bool fine = true;
    for (u32 domain = threadIdx.x; fine && domain < c.rails.domains; domain += blockDim.x)
        fine = domain == c.rails.domain || await_plan(c, epoch, domain) &&
            await_rows(c, epoch, domain, rail_chunks(c, seen_plan(c, epoch, domain).rows) - 1);
    if (!__syncthreads_and(fine)) return false;
    const u32 first = c.owner_begin[domain_begin(c)], experts = c.owner_begin[domain_end(c)] - first;
    const u32 words = 1 + experts + domain_size(c);
    for_each_other_domain(c, [&](u32 domain) {
        // Section 0, the counts, begins at offset 0 of the lane.
        const auto* counts = reinterpret_cast<const u32*>(in_lane(c, epoch, domain));
        const u32 rows = seen_plan(c, epoch, domain).rows;
        const u32 source = rail_peer(c, domain);
        for (u32 at = threadIdx.x; at < words * domain_size(c); at += blockDim.x) {
            const u32 peer = domain_begin(c) + at / words, word = at % words;
            u32* there = counts_at(p, c.control[peer], epoch, source);
            if (word == 0)
                there[COUNT_TOKENS] = rows;
            else if (word <= experts)
                there[COUNT_HEAD + first + word - 1] = ld_relaxed_sys(counts + word - 1);
            else
                there[COUNT_HEAD + c.experts + domain_begin(c) + word - 1 - experts] = ld_relaxed_sys(counts + word - 1);
        }
    });
    return true;
}

// Checks this rank's number of copies, sends its counts from block 0, and awaits the counts of all sources. Returns
// false if `fine` is false or, after the fault was reported, if something failed. Called by all threads.
__device__ inline bool exchange_counts(const PreprocessParams& p, const Columns& column, const u32* totals, u32 epoch,
                                       bool fine) {
    const Common& c = p.common;
    if (fine && totals[column.copies()] > p.most_copies) {
        fine = false;
        if (threadIdx.x == 0) too_many_copies(p, totals[column.copies()]);
    }
    if (RAILS && fine && blockIdx.x == 0) fine = forward_counts(p, epoch);
    if (fine && blockIdx.x == 0) send_counts(p, totals, epoch);
    // With rails, a rank sends its handshake after it has received counts from other domains.
    const u32 waiting_for = RAILS ? FOR_FOREIGN : FOR_HANDSHAKE;
    static_assert(MAX_RANKS <= PREPROCESS_RAIL_THREADS, "a thread awaits one rank");
    const u32 peer = domain_begin(c) + threadIdx.x;
    if (fine && peer < domain_end(c)) fine = await_handshake(c, epoch, peer, waiting_for);
    return __syncthreads_and(fine);
}

// A segment is an expert in permuted mode, a rank in plain mode.
struct Bases {
    u64* total;  // [segments]: rows from all ranks
    u32* base;   // [segments]: first row of the source's tokens; until `compute_bases` ends, rows from lower sources
    u32* limit;  // [ranks]: rows at or beyond the limit are dropped; NONE if all rows fit
};

// Writes one word of the shape, for the kernels and, if requested, for the host.
__device__ inline void set_shape(const PreprocessParams& p, u32 at, u32 value) {
    p.handle.shape[at] = value;
    if (p.host_shape != nullptr) p.host_shape[at] = value;
}

// Writes how many rows this rank receives, and how many it would receive without a limit.
__device__ inline void set_rows(const PreprocessParams& p, u32 local_experts, u64 kept, u64 wanted) {
    set_shape(p, 3 * local_experts + SHAPE_ROWS, static_cast<u32>(kept));
    set_shape(p, 3 * local_experts + SHAPE_WANTED, static_cast<u32>(wanted));
    if (p.overflow != nullptr) *p.overflow = wanted > kept;
}

// Adds the counts of all sources by segment of this domain, and loads the limits. `own`: the source whose base is
// computed. Called by all threads.
__device__ inline void sum_sources(const PreprocessParams& p, const Bases& bases, u32 epoch, u32 own) {
    const Common& c = p.common;
    const bool permuted = p.handle.permuted != 0;
    const u32 begin = !RAILS ? 0 : permuted ? c.owner_begin[domain_begin(c)] : domain_begin(c);
    const u32 end = !RAILS ? (permuted ? c.experts : c.ranks) : permuted ? c.owner_begin[domain_end(c)] : domain_end(c);
    const u32 head = COUNT_HEAD + (permuted ? 0 : c.experts);
    for (u32 segment = begin + threadIdx.x; segment < end; segment += blockDim.x) {
        u64 total = 0;
        u32 earlier = 0;
        for_each_loaded(
            c.ranks, [&](u32 source) { return counts_at(p, c.own, epoch, source) + head + segment; },
            [&](u32 source, u32 count) {
                if (source < own) earlier += count;
                total += count;
            });
        bases.total[segment] = total;
        bases.base[segment] = earlier;
    }
    // Starts with the last thread, so that threads without a segment above load the limits, if there are such threads.
    for (u32 rank = domain_begin(c) + blockDim.x - 1 - threadIdx.x; rank < domain_end(c); rank += blockDim.x)
        bases.limit[rank] = ld_relaxed_sys(counts_at(p, c.own, epoch, rank) + COUNT_CAPACITY);
    __syncthreads();
}

// Permuted mode: the bases of one destination rank's segments, expert by expert. Called by one warp per rank.
__device__ inline void permuted_bases(const PreprocessParams& p, const Bases& bases, u32 rank, bool shape) {
    const Common& c = p.common;
    // All ranks have the same multiple: it is part of the call's signature.
    const u32 pad = max(1u, p.pad_multiple), limit = bases.limit[rank];
    const u32 first = c.owner_begin[rank], experts = c.owner_begin[rank + 1] - first;
    u64 start = 0, kept_rows = 0;
    for (u32 group = 0; group < experts; group += WARP) {
        const u32 expert = group + lane_id();
        const u64 total = expert < experts ? bases.total[first + expert] : 0;
        const u64 padded = (total + pad - 1) / pad * pad;
        const u64 through = warp_scan(padded);
        const u64 begin = start + through - padded;
        start += __shfl_sync(ALL_LANES, through, WARP - 1);
        const u64 kept = limit > begin ? min(limit - begin, total) : 0;
        const u64 kept_padded = (kept + pad - 1) / pad * pad;
        kept_rows += __shfl_sync(ALL_LANES, warp_scan(kept_padded), WARP - 1);
        if (expert < experts) {
            bases.base[first + expert] += static_cast<u32>(begin);
            if (shape && rank == c.rank) {
                set_shape(p, expert, static_cast<u32>(min(begin, static_cast<u64>(limit))));
                set_shape(p, experts + expert, static_cast<u32>(kept));
                set_shape(p, 2 * experts + expert, static_cast<u32>(kept_padded));
                if (p.tokens_per_expert != nullptr) p.tokens_per_expert[expert] = static_cast<i64>(kept_padded);
                if (p.kept_per_expert != nullptr) p.kept_per_expert[expert] = static_cast<i64>(kept);
            }
        }
    }
    // All lanes must have read the limit before lane 0 overwrites it.
    __syncwarp();
    if (lane_id() != 0) return;
    bases.limit[rank] = start <= limit ? NONE : limit;
    if (start > NONE) too_many(p, rank, start, 0);
    if (shape && rank == c.rank) {
        set_rows(p, experts, kept_rows, start);
    }
}

// Plain mode: sets the limit of one destination rank, checks its number of rows and, for this rank, writes the shape.
// `sum_sources` has computed the base. Called by one thread per rank.
__device__ inline void plain_base(const PreprocessParams& p, const Bases& bases, u32 rank, bool shape) {
    const Common& c = p.common;
    const u32 limit = bases.limit[rank];
    const u64 total = bases.total[rank];
    bases.limit[rank] = total <= limit ? NONE : limit;
    const u32 experts = c.owner_begin[rank + 1] - c.owner_begin[rank];
    const u64 kept = min(total, static_cast<u64>(limit));
    if (total > NONE)
        too_many(p, rank, total, 0);
    else if (kept * experts > NONE)
        too_many(p, rank, kept, experts);  // the cells of `DstCopy`
    if (shape && rank == c.rank) set_rows(p, experts, kept, total);
}

// The bases of the tokens of `source`. Called by all threads, after the handshakes of all ranks. `shape`: this block
// writes the shape.
__device__ inline void compute_bases(const PreprocessParams& p, const Bases& bases, u32 epoch, u32 source, bool shape) {
    const Common& c = p.common;
    const u32 begin = domain_begin(c), end = domain_end(c);
    sum_sources(p, bases, epoch, source);
    if (p.handle.permuted) {
        for (u32 rank = begin + warp_id(); rank < end; rank += blockDim.x / WARP) permuted_bases(p, bases, rank, shape);
    } else {
        for (u32 rank = begin + threadIdx.x; rank < end; rank += blockDim.x) plain_base(p, bases, rank, shape);
    }
    __syncthreads();
}
