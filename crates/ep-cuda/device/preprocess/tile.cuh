// A tile: a few hundred tokens' routing as two bit matrices in shared memory, one by token and one by expert. A
// token's experts in order are the set bits of its row; how many earlier tokens chose an expert, the set bits of its
// column.
#pragma once
#include "sync.cuh"

// Calls `visit(index, *word_at(index))` for `count` words that others have written, in order. Many are on their way at a
// time: one after the other, waiting for them would take longer than all the rest.
template <class WordAt, class Visit>
__device__ inline void for_each_loaded(u32 count, const WordAt& word_at, const Visit& visit) {
    constexpr u32 UNDER_WAY = 8;
    for (u32 base = 0; base < count; base += UNDER_WAY) {
        u32 words[UNDER_WAY];
#pragma unroll
        for (u32 at = 0; at < UNDER_WAY; at++) words[at] = base + at < count ? ld_relaxed_sys(word_at(base + at)) : 0;
#pragma unroll
        for (u32 at = 0; at < UNDER_WAY; at++)
            if (base + at < count) visit(base + at, words[at]);
    }
}

// Per-column numbers that are summed over tokens: [experts] copies, [ranks] copies, [ranks] tokens, sends, copies.
struct Columns {
    u32 experts;
    u32 ranks;

    __device__ u32 copies_of(u32 rank) const { return experts + rank; }
    __device__ u32 tokens_of(u32 rank) const { return experts + ranks + rank; }
    __device__ u32 sends() const { return experts + 2 * ranks; }
    __device__ u32 copies() const { return experts + 2 * ranks + 1; }
    __device__ u32 count() const { return experts + 2 * ranks + 2; }
};

struct Tile {
    const PreprocessParams& p;
    u32 row_words;
    u32 column_words;
    u32* rows;         // [tile][row_words]
    u32* columns;      // [experts][column_words]
    u32* rank_columns; // [ranks][column_words]
    u32* scans;        // [ranks + 2][tile]: copies of each rank, sends, copies; of a token, then of all before it
    u8* owner;         // [experts]
    u32 first = 0;     // token
    u32 tokens = 0;

    __device__ Tile(const PreprocessParams& p, u32*& memory) : p(p) {
        const Common& c = p.common;
        row_words = div_up(c.experts, 32);
        column_words = p.tile / 32;
        rows = memory;
        columns = rows + p.tile * row_words;
        rank_columns = columns + c.experts * column_words;
        scans = rank_columns + c.ranks * column_words;
        owner = reinterpret_cast<u8*>(scans + (c.ranks + 2) * p.tile);
        memory = scans + (c.ranks + 2) * p.tile + div_up(c.experts, 4);
        for (u32 rank = threadIdx.x; rank < c.ranks; rank += blockDim.x)
            for (u32 at = c.owner_begin[rank]; at < c.owner_begin[rank + 1]; at++) owner[at] = static_cast<u8>(rank);
    }

    __device__ const u32* row(u32 token) const { return rows + token * row_words; }
    __device__ u32* scan(u32 which) const { return scans + which * p.tile; }

    // Set bits in [from, to) of a row.
    __device__ static u32 bits(const u32* row, u32 from, u32 to) {
        u32 count = 0;
        for (u32 word = from / 32; word * 32 < to; word++) {
            u32 value = row[word];
            if (word == from / 32) value &= 0xFFFFFFFFu << from % 32;
            if (to - word * 32 < 32) value &= (1u << to % 32) - 1;
            count += __popc(value);
        }
        return count;
    }

    __device__ u32 chosen_of(u32 token, u32 rank) const {
        return bits(row(token), p.common.owner_begin[rank], p.common.owner_begin[rank + 1]);
    }

    // Tokens of this tile before `token` that are in the column.
    __device__ static u32 before(const u32* column, u32 token) { return bits(column, 0, token); }

    __device__ static bool in(const u32* column, u32 token) { return (column[token / 32] >> token % 32 & 1) != 0; }

    // Reads the routing of some tokens. Called by all threads of the block.
    __device__ void load(u32 first_token, u32 count);

    // Adds this tile to the column sums.
    __device__ void add_to(u32* sums) const;

    // Turns the scans from numbers per token into sums over the tokens before it.
    __device__ void scan_tokens() const;
};

__device__ inline void bad_routing(const PreprocessParams& p, u32 kind, u32 token, u32 seen) {
    Fault fault{};
    fault.kind = kind;
    fault.peer = p.common.rank;
    fault.index = token;
    fault.seen = seen;
    report(p.common, fault, p.common.rank);
}

// Calls `visit(expert, position, weight)` for each choice of a token, lane by lane; all lanes of a warp call this.
template <class Visit>
__device__ inline void for_each_choice(const PreprocessParams& p, u32 token, const Visit& visit) {
    const u32 experts = p.common.experts;
    u64 begin = static_cast<u64>(token) * (p.form == ROUTING_MAP ? experts : p.topk), end = begin;
    if (p.form == ROUTING_ROWS) {
        begin = p.row_begin[token];
        end = p.row_begin[token + 1];
    } else {
        end += p.form == ROUTING_MAP ? experts : p.topk;
    }
    for (u64 at = begin + lane_id(); at < end; at += WARP) {
        i64 expert = 0;
        if (p.form == ROUTING_MAP) {
            if (p.map[at] == 0) continue;
            expert = static_cast<i64>(at - begin);
        } else if (p.form == ROUTING_ROWS) {
            expert = p.row_experts[at];
        } else {
            expert = p.topk_idx != nullptr ? p.topk_idx[at] : p.topk_idx_wide[at];
            if (expert == -1) continue;
            if (expert < 0 || expert >= experts) {
                bad_routing(p, FAULT_INDEX, token, static_cast<u32>(expert));
                continue;
            }
        }
        const u32 chosen = static_cast<u32>(expert);
        const float weight = p.weights != nullptr ? p.weights[at] : 0.0f;
        visit(chosen, p.position_of != nullptr ? p.position_of[chosen] : chosen, weight);
    }
}

__device__ inline void Tile::load(u32 first_token, u32 count) {
    const Common& c = p.common;
    first = first_token;
    tokens = count;
    __syncthreads();
    for (u32 at = threadIdx.x; at < p.tile * row_words; at += blockDim.x) rows[at] = 0;
    for (u32 at = threadIdx.x; at < (c.experts + c.ranks) * column_words; at += blockDim.x) columns[at] = 0;
    __syncthreads();
    for (u32 token = warp_id(); token < tokens; token += blockDim.x / WARP) {
        u32* own = rows + token * row_words;
        for_each_choice(p, first + token, [&](u32 expert, u32 position, float weight) {
            const u32 old = atomicOr(&own[position / 32], 1u << position % 32);
            if ((old >> position % 32 & 1) != 0) bad_routing(p, FAULT_DUPLICATE, first + token, expert);
            if (weight != weight) bad_routing(p, FAULT_NAN, first + token, expert);
            atomicOr(&columns[position * column_words + token / 32], 1u << token % 32);
        });
        __syncwarp();
        u32 sends = 0, copies = 0;
        for (u32 rank = lane_id(); rank < c.ranks; rank += WARP) {
            const u32 chosen = chosen_of(token, rank);
            scan(rank)[token] = chosen;
            copies += chosen;
            sends += rank == c.rank && p.handle.permuted ? chosen : min(chosen, 1u);
            if (chosen != 0) atomicOr(&rank_columns[rank * column_words + token / 32], 1u << token % 32);
        }
        sends = __reduce_add_sync(0xFFFFFFFFu, sends);
        copies = __reduce_add_sync(0xFFFFFFFFu, copies);
        if (lane_id() == 0) {
            scan(c.ranks)[token] = max(sends, 1u);
            scan(c.ranks + 1)[token] = copies;
        }
    }
    __syncthreads();
}

__device__ inline void Tile::add_to(u32* sums) const {
    const Common& c = p.common;
    const Columns column{c.experts, c.ranks};
    for (u32 at = threadIdx.x; at < c.experts; at += blockDim.x) sums[at] += before(columns + at * column_words, tokens);
    for (u32 rank = threadIdx.x; rank < c.ranks; rank += blockDim.x)
        sums[column.tokens_of(rank)] += before(rank_columns + rank * column_words, tokens);
    for (u32 which = warp_id(); which < c.ranks + 2; which += blockDim.x / WARP) {
        u32 sum = 0;
        for (u32 token = lane_id(); token < tokens; token += WARP) sum += scan(which)[token];
        sum = __reduce_add_sync(0xFFFFFFFFu, sum);
        if (lane_id() == 0) {
            const u32 at = which < c.ranks ? column.copies_of(which) : which == c.ranks ? column.sends() : column.copies();
            sums[at] += sum;
        }
    }
    __syncthreads();
}

__device__ inline void Tile::scan_tokens() const {
    for (u32 which = warp_id(); which < p.common.ranks + 2; which += blockDim.x / WARP) {
        u32 sum = 0;
        for (u32 base = 0; base < tokens; base += WARP) {
            const u32 token = base + lane_id();
            const u32 own = token < tokens ? scan(which)[token] : 0;
            u32 through = own;
            for (u32 distance = 1; distance < WARP; distance *= 2) {
                const u32 other = __shfl_up_sync(0xFFFFFFFFu, through, distance);
                if (lane_id() >= distance) through += other;
            }
            if (token < tokens) scan(which)[token] = sum + through - own;
            sum += __shfl_sync(0xFFFFFFFFu, through, WARP - 1);
        }
    }
    __syncthreads();
}
