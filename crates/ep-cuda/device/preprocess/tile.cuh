// A tile: the routing of some tokens as two bit matrices in shared memory, one by token and one by expert. The set bits
// of a token's row are its experts in order; the number of set bits of an expert's column before a token is the number
// of earlier tokens of the tile that chose the expert.
//
// Each choice, and each pair of token and rank, is handled by one thread: a token has too few choices to occupy a warp.
#pragma once
#include "rails.cuh"

// Calls `visit(index, *word_at(index))` in order for `count` words that other blocks or ranks have written. Several
// loads are in flight at a time: loading one word after the other would take longer than the rest of the kernel.
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

// The sum of `own` over the lanes up to and including this one.
template <class Number>
__device__ inline Number warp_scan(Number own) {
    Number through = own;
    for (u32 distance = 1; distance < WARP; distance *= 2) {
        const Number other = __shfl_up_sync(ALL_LANES, through, distance);
        if (lane_id() >= distance) through += other;
    }
    return through;
}

// The position of the first expert of `domain`. If `domain` is the number of domains, the number of experts.
__device__ inline u32 first_position(const Common& c, u32 domain) { return c.owner_begin[domain * domain_size(c)]; }

// The column sums, numbers that are summed over tokens: [experts] copies, [ranks] copies, [ranks] tokens, then entries of
// `sends` and of `copies`, and with rails [domains] tokens. Each function returns an index into an array of them. The columns
// of a tile, in contrast, have one bit per token.
struct Columns {
    u32 experts;
    u32 ranks;
    u32 domains;

    __device__ explicit Columns(const Common& c) : experts(c.experts), ranks(c.ranks), domains(rail_domains(c)) {}

    __device__ u32 copies_of(u32 rank) const { return experts + rank; }
    __device__ u32 tokens_of(u32 rank) const { return experts + ranks + rank; }
    __device__ u32 sends() const { return experts + 2 * ranks; }
    __device__ u32 copies() const { return experts + 2 * ranks + 1; }
    __device__ u32 tokens_to(u32 domain) const { return experts + 2 * ranks + 2 + domain; }
    __device__ u32 count() const { return count_columns(experts, ranks, domains); }
};

// The index of the last of `count` ascending numbers that is at most `value`. The first number must be at most `value`.
template <class Number>
__device__ inline u32 last_up_to(const Number* numbers, u32 count, u32 value) {
    u32 at = 0, end = count;
#pragma unroll 1
    while (end - at > 1) {
        const u32 middle = (at + end) / 2;
        if (numbers[middle] <= value)
            at = middle;
        else
            end = middle;
    }
    return at;
}

struct Tile {
    const PreprocessParams& p;
    u32 row_words;     // odd, so that rows of adjacent tokens begin in different banks
    u32 column_words;
    u32* rows;         // [tile][row_words]
    u32* columns;      // [experts][column_words]
    u32* rank_columns; // [ranks][column_words]
    u32* domain_columns; // [domains][column_words], with rails
    u32* scans;        // [ranks + 2][tile + 1]: copies per rank, sends, copies; sums over earlier tokens
    u16* expert_of;    // [experts]: expert by position; set for routing maps only
    u8* owner;         // [experts]: rank by position
    u32 form;          // a `RoutingForm`
    const u32* masks = nullptr; // [rows][mask_words]: the routing of a foreign set
    u32 mask_words = 0;
    u32 first = 0;     // the tile's first token
    u32 tokens = 0;    // number of tokens; functions take a token's index in the tile

    __device__ Tile(const PreprocessParams& p, u32*& memory) : p(p), form(p.form) {
        const Common& c = p.common;
        row_words = tile_row_words(c.experts);
        column_words = p.tile / 32;
        rows = memory;
        columns = rows + p.tile * row_words;
        rank_columns = columns + c.experts * column_words;
        domain_columns = rank_columns + c.ranks * column_words;
        scans = domain_columns + rail_domains(c) * column_words;
        expert_of = reinterpret_cast<u16*>(scans + (c.ranks + 2) * (p.tile + 1));
        owner = reinterpret_cast<u8*>(expert_of + (c.experts + c.experts % 2));
        memory += tile_words(c.experts, c.ranks, rail_domains(c), p.tile);
        for (u32 rank = warp_id(); rank < c.ranks; rank += blockDim.x / WARP)
            for (u32 at = c.owner_begin[rank] + lane_id(); at < c.owner_begin[rank + 1]; at += WARP)
                owner[at] = static_cast<u8>(rank);
        for (u32 expert = threadIdx.x; p.form == ROUTING_MAP && expert < c.experts; expert += blockDim.x)
            expert_of[position_of(expert)] = static_cast<u16>(expert);
    }

    __device__ u32* row(u32 token) const { return rows + token * row_words; }
    __device__ u32* scan(u32 which) const { return scans + which * (p.tile + 1); }
    __device__ u32 position_of(u32 expert) const { return p.position_of != nullptr ? p.position_of[expert] : expert; }
    __device__ float weight_at(u64 at) const { return p.weights != nullptr ? p.weights[at] : 0.0f; }

    // The number of set bits in [from, to) of a row.
    __device__ static u32 bits(const u32* row, u32 from, u32 to) {
        u32 count = 0;
#pragma unroll 1
        for (u32 word = from / 32; word * 32 < to; word++) {
            u32 value = row[word];
            if (word == from / 32) value &= ALL_BITS << from % 32;
            if (to - word * 32 < 32) value &= (1u << to % 32) - 1;
            count += __popc(value);
        }
        return count;
    }

    // The first set bit in [from, to) of a row; `to` if there is none.
    __device__ static u32 next_bit(const u32* row, u32 from, u32 to) {
#pragma unroll 1
        for (u32 word = from / 32; word * 32 < to; word++) {
            u32 value = row[word];
            if (word == from / 32) value &= ALL_BITS << from % 32;
            if (value != 0) return min(to, word * 32 + __ffs(value) - 1);
        }
        return to;
    }

    // The position of a row's set bit number `index`. The row must have more than `index` set bits.
    __device__ static u32 nth_bit(const u32* row, u32 index) {
        u32 word = 0;
#pragma unroll 1
        for (; index >= __popc(row[word]); word++) index -= __popc(row[word]);
        u32 value = row[word];
#pragma unroll 1
        for (; index > 0; index--) value &= value - 1;
        return word * 32 + __ffs(value) - 1;
    }

    // The number of tokens of this tile before `token` whose bit is set in the column.
    __device__ static u32 before(const u32* column, u32 token) { return bits(column, 0, token); }

    // Indices of the scans after those of the ranks.
    __device__ u32 sends() const { return p.common.ranks; }
    __device__ u32 copies() const { return p.common.ranks + 1; }

    // Whether a token chose an expert in the domain.
    __device__ bool goes_to(u32 domain, u32 token) const {
        return (domain_columns[domain * column_words + token / 32] >> token % 32 & 1) != 0;
    }

    // Entries of `sends` of one token for the ranks of this domain.
    __device__ u32 sends_here(u32 token) const {
        const Common& c = p.common;
        u32 entries = 0;
#pragma unroll 1
        for (u32 rank = domain_begin(c); rank < domain_end(c); rank++) {
            const u32 chosen = of_token(rank, token);
            entries += rank == c.rank && p.handle.permuted ? chosen : min(chosen, 1u);
        }
        return entries;
    }
    // Entries of `sends` of one token for the other domains below `domain`.
    __device__ u32 sends_below(u32 domain, u32 token) const {
        u32 entries = 0;
#pragma unroll 1
        for (u32 below = 0; RAILS && below < domain; below++)
            entries += below != p.common.rails.domain && goes_to(below, token);
        return entries;
    }

    // The number of one token in scan `which`.
    __device__ u32 of_token(u32 which, u32 token) const { return scan(which)[token + 1] - scan(which)[token]; }

    // Reads the routing of `number` tokens, beginning with token `from`. Called by all threads of the block.
    __device__ void load(u32 from, u32 number);

    // Adds this tile to the column sums. Called by all threads of the block.
    __device__ void add_to(u32* sums) const;

    // Calls `visit(token, expert, position, weight)` once for each choice of the tile's tokens, each on one thread.
    template <class Visit>
    __device__ void for_each_copy(const Visit& visit) const;

  private:
    template <class Visit>
    __device__ void for_each_listed(const Visit& visit) const;
    __device__ void note(u32 token, u32 expert, u64 at) const;
    __device__ void read_map() const;
    __device__ void read_masks() const;
    __device__ void count() const;
    template <class NumberOf>
    __device__ void sum_up(u32 which, const NumberOf& number_of) const;
};

__device__ inline void bad_routing(const PreprocessParams& p, FaultKind kind, u32 token, u32 seen) {
    report_own(p.common, kind, p.common.rank, token, 0, seen);
}

// For routings that are lists of choices: calls `visit(token, expert, at)` for each choice; `at` is its index in the
// list.
template <class Visit>
__device__ inline void Tile::for_each_listed(const Visit& visit) const {
    const bool by_rows = form == ROUTING_ROWS;
    const Divider topk(max(p.topk, 1u));
    const u64 begin = by_rows ? p.row_begin[first] : static_cast<u64>(first) * p.topk;
    const u32 count = by_rows ? p.row_begin[first + tokens] - static_cast<u32>(begin) : tokens * p.topk;
    for (u32 index = threadIdx.x; index < count; index += blockDim.x) {
        const u64 at = begin + index;
        if (by_rows) {
            visit(last_up_to(p.row_begin + first, tokens, static_cast<u32>(at)), p.row_experts[at], at);
            continue;
        }
        const u32 token = topk.divide(index);
        const i64 expert = p.topk_idx != nullptr ? p.topk_idx[at] : p.topk_idx_wide[at];
        if (expert == -1) continue;
        if (expert >= 0 && expert < p.common.experts)
            visit(token, static_cast<u32>(expert), at);
        else
            bad_routing(p, FAULT_INDEX, first + token, static_cast<u32>(expert));
    }
}

// Sets the bits of one choice, and checks it.
__device__ inline void Tile::note(u32 token, u32 expert, u64 at) const {
    const u32 position = position_of(expert);
    const float weight = weight_at(at);
    const u32 old = atomicOr(&row(token)[position / 32], 1u << position % 32);
    if ((old >> position % 32 & 1) != 0) bad_routing(p, FAULT_DUPLICATE, first + token, expert);
    if (weight != weight) bad_routing(p, FAULT_NAN, first + token, expert);
    atomicOr(&columns[position * column_words + token / 32], 1u << token % 32);
}

// For routings that are maps, one byte per (token, expert): a thread reads the bytes of several experts at a time.
__device__ inline void Tile::read_map() const {
    constexpr u32 AT_ONCE = 16;
    const u32 experts = p.common.experts, groups = div_up(experts, AT_ONCE);
    const Divider by_groups(groups);
    const bool aligned = experts % AT_ONCE == 0 && reinterpret_cast<u64>(p.map) % AT_ONCE == 0;
    for (u32 index = threadIdx.x; index < tokens * groups; index += blockDim.x) {
        const u32 token = by_groups.divide(index), from = by_groups.rest(index) * AT_ONCE;
        const u64 at = static_cast<u64>(first + token) * experts + from;
        u32 chosen = 0;
        if (aligned) {
            const uint4 bytes = *reinterpret_cast<const uint4*>(p.map + at);
            const u32 words[] = {bytes.x, bytes.y, bytes.z, bytes.w};
#pragma unroll
            for (u32 byte = 0; byte < AT_ONCE; byte++)
                chosen |= (words[byte / 4] >> byte % 4 * 8 & 0xFF) != 0 ? 1u << byte : 0;
        } else {
#pragma unroll 1
            for (u32 byte = 0; byte < min(AT_ONCE, experts - from); byte++)
                chosen |= p.map[at + byte] != 0 ? 1u << byte : 0;
        }
        for (; chosen != 0; chosen &= chosen - 1) {
            const u32 byte = __ffs(chosen) - 1;
            note(token, from + byte, at + byte);
        }
    }
}

// For the masks of a foreign set, whose routing its sender has checked.
__device__ inline void Tile::read_masks() const {
    const u32 position = p.common.owner_begin[domain_begin(p.common)];
    for (u32 index = threadIdx.x; index < tokens * mask_words; index += blockDim.x) {
        const u32 token = index / mask_words, word = index % mask_words;
        u32 chosen = ld_relaxed_sys(masks + static_cast<u64>(first + token) * mask_words + word);
        for (; chosen != 0; chosen &= chosen - 1) {
            const u32 at = position + 32 * word + __ffs(chosen) - 1;
            atomicOr(&row(token)[at / 32], 1u << at % 32);
            atomicOr(&columns[at * column_words + token / 32], 1u << token % 32);
        }
    }
}

// Computes scan `which` from one number per token: sums over the tokens before each token, and over all. Called by one
// warp.
template <class NumberOf>
__device__ inline void Tile::sum_up(u32 which, const NumberOf& number_of) const {
    u32 sum = 0;
    for (u32 base = 0; base < tokens; base += WARP) {
        const u32 token = base + lane_id(), own = number_of(token), through = warp_scan(own);
        if (token < tokens) scan(which)[token] = sum + through - own;
        sum += __shfl_sync(ALL_LANES, through, WARP - 1);
    }
    if (lane_id() == 0) scan(which)[tokens] = sum;
}

// Computes the scans, and the columns of ranks and domains, from the rows.
__device__ inline void Tile::count() const {
    const Common& c = p.common;
    for (u32 rank = warp_id(); rank < c.ranks; rank += blockDim.x / WARP)
        sum_up(rank, [&](u32 token) {
            const u32 chosen = token < tokens ? bits(row(token), c.owner_begin[rank], c.owner_begin[rank + 1]) : 0;
            const u32 any = __ballot_sync(ALL_LANES, chosen != 0);
            if (lane_id() == 0) rank_columns[rank * column_words + token / 32] = any;
            return chosen;
        });
    for (u32 domain = warp_id(); domain < rail_domains(c); domain += blockDim.x / WARP)
        for (u32 base = 0; base < tokens; base += WARP) {
            const u32 token = base + lane_id(), begin = first_position(c, domain), end = first_position(c, domain + 1);
            const u32 chosen = token < tokens ? bits(row(token), begin, end) : 0;
            const u32 any = __ballot_sync(ALL_LANES, chosen != 0);
            if (lane_id() == 0) domain_columns[domain * column_words + base / 32] = any;
        }
    __syncthreads();
    if (warp_id() == 0)
        sum_up(sends(), [&](u32 token) {
            const u32 entries = token < tokens ? sends_here(token) + sends_below(c.rails.domains, token) : 0;
            return token < tokens ? max(entries, 1u) : 0;
        });
    if (warp_id() == 1)
        sum_up(copies(), [&](u32 token) { return token < tokens ? bits(row(token), 0, c.experts) : 0; });
}

__device__ inline void Tile::load(u32 from, u32 number) {
    first = from;
    tokens = number;
    __syncthreads();
    for (u32 at = threadIdx.x; at < p.tile * row_words; at += blockDim.x) rows[at] = 0;
    for (u32 at = threadIdx.x; at < p.common.experts * column_words; at += blockDim.x) columns[at] = 0;
    __syncthreads();
    if (RAILS && form == ROUTING_MASKS)
        read_masks();
    else if (form == ROUTING_MAP)
        read_map();
    else
        for_each_listed([&](u32 token, u32 expert, u64 at) { note(token, expert, at); });
    __syncthreads();
    count();
    __syncthreads();
}

template <class Visit>
__device__ inline void Tile::for_each_copy(const Visit& visit) const {
    if (form != ROUTING_MAP && !(RAILS && form == ROUTING_MASKS)) {
        for_each_listed(
            [&](u32 token, u32 expert, u64 at) { visit(token, expert, position_of(expert), weight_at(at)); });
        return;
    }
    // Few bits of a map or mask are set, so each thread finds its copies by searching the scan instead of scanning the map
    // again.
    const u32* sums = scan(copies());
    for (u32 copy = threadIdx.x; copy < sums[tokens]; copy += blockDim.x) {
        const u32 token = last_up_to(sums, tokens, copy);
        const u32 position = nth_bit(row(token), copy - sums[token]);
        if (RAILS && form == ROUTING_MASKS) {
            // A copy of a foreign set has no cell in this rank's matrices, and its weight comes with dispatch.
            visit(token, 0, position, 0.0f);
            continue;
        }
        const u32 expert = expert_of[position];
        visit(token, expert, position, weight_at(static_cast<u64>(first + token) * p.common.experts + expert));
    }
}

__device__ inline void Tile::add_to(u32* sums) const {
    const Common& c = p.common;
    const Columns column(c);
    for (u32 domain = threadIdx.x; domain < rail_domains(c); domain += blockDim.x)
        sums[column.tokens_to(domain)] += before(domain_columns + domain * column_words, tokens);
    for (u32 at = threadIdx.x; at < c.experts; at += blockDim.x) sums[at] += before(columns + at * column_words, tokens);
    for (u32 rank = threadIdx.x; rank < c.ranks; rank += blockDim.x)
        sums[column.tokens_of(rank)] += before(rank_columns + rank * column_words, tokens);
    for (u32 which = threadIdx.x; which < c.ranks + 2; which += blockDim.x) {
        const u32 at = which < c.ranks ? column.copies_of(which) : which == sends() ? column.sends() : column.copies();
        sums[at] += scan(which)[tokens];
    }
    __syncthreads();
}
