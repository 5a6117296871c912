// Entries of the lists of a handle. preprocess writes the lists; dispatch and combine read them, on the rank that owns
// the handle and, over the links, on its peers. The owner keeps lists unchanged for one operator after their handle is
// dropped: then no peer is in an operator that could read them.
//
// With rails, entries of `sends` and `copies` also name lanes: a rank number that is at least the number of ranks
// stands for the lane to domain `rank - ranks`. `row` is then the rail row of a Send and the rail copy of a Copy
// (docs/cuda-rails.md).
//
// Tokens are grouped in chunks of `chunk_tokens`. `recv_begin` and `dst_begin` have, for each destination rank, the index
// of the first entry of each chunk, and then one past the last entry of the last chunk. Rows of a token on a rank ascend
// with the position of their expert, so the rows that a capacity drops are the last ones of their token: the first one is
// kept if any is.
//
//   list        entry     order
//   sends       Send      by token. One entry per destination rank of the token. Permuted mode: each copy on the rank
//                         that owns the handle has an entry of its own. Of one token, the ranks of this domain come first,
//                         then the lanes, both in ascending order; copies on the owner are in order of expert position. A
//                         token without a copy has one dead entry. `token_begin[token]` is the index of the token's first
//                         entry.
//   copies      Copy      by token, then by expert position
//   recv        Receive   by destination rank, then by token, then by expert position. Permuted mode: one entry per copy;
//                         plain mode: one per (token, destination rank). `recv_begin` is `[ranks][chunks + 1]`.
//   dst_copies  DstCopy   by destination rank, then by token, then by expert position. One entry per copy. `dst_begin` is
//                         `[ranks][chunks + 1]`.
//   shape       u32       first row, kept rows and rows with padding of each local expert; then `SHAPE_WORDS` words
//
// combine adds in the order of `recv` (partial sums) and of `sends` (sums of a token), with groups (`Send::GROUP_FIRST`). The
// bits of every sum depend on these orders.
#pragma once
#include "types.cuh"

// The row of a copy that was dropped, because it lies at or beyond its destination's capacity, or of a dead entry.
constexpr u32 NO_ROW = 0xFFFFFFFFu;

// Where a token goes: one row on one rank, or in one lane.
struct Send {
    static constexpr u32 RANK_MASK = 0xFFFF;
    // The last entry of its token.
    static constexpr u32 TOKEN_END = 1u << 16;
    // Nothing is sent: the token has no copy, or its row was dropped.
    static constexpr u32 DEAD = 1u << 17;
    // The first entry of a group: a mark for combine, which adds the entries of a group to each other before it adds them to
    // the sum of the token. Sums must be added in order of domain (docs/semantics.md). Example: a rank of domain 2 has the sum D of
    // its own domain first, and then the lanes of domains 0, 1 and 3 with the sums S0, S1 and S3. S0 and S1 are a group, S3 is a
    // group. Addition is commutative, so D + (S0 + S1) has the bits of (S0 + S1) + D; S3 comes last in both. In general, the
    // lanes to all domains below this one are a group, and each lane to a domain above it is a group. This rank's
    // copies of a token are also a group, because they are a partial sum.
    static constexpr u32 GROUP_FIRST = 1u << 18;
    // The last entry of a group; of this rank's copies, the last one that was kept.
    static constexpr u32 GROUP_END = 1u << 19;

    uint2 words;  // {rank | flags, row}

    __device__ static Send of(u32 rank, u32 row) { return {make_uint2(rank, row)}; }
    __device__ void mark(u32 flags) { words.x |= flags; }
    // The destination.
    __device__ u32 rank() const { return words.x & RANK_MASK; }
    // The row on the destination.
    __device__ u32 row() const { return words.y; }
    __device__ bool ends_token() const { return (words.x & TOKEN_END) != 0; }
    __device__ bool is_dead() const { return (words.x & DEAD) != 0; }
    __device__ bool begins_group() const { return (words.x & GROUP_FIRST) != 0; }
    __device__ bool ends_group() const { return (words.x & GROUP_END) != 0; }
};

// A copy: one (token, expert) pair.
struct Copy {
    static constexpr u32 RANK_SHIFT = 16;
    static constexpr u32 EXPERT_MASK = (1u << RANK_SHIFT) - 1;

    uint4 words;  // {cell, rank << RANK_SHIFT | local expert, row, weight as bits}

    __device__ static Copy of(u32 cell, u32 rank, u32 local_expert, u32 row, float weight) {
        return {make_uint4(cell, rank << RANK_SHIFT | local_expert, row, __float_as_uint(weight))};
    }
    // Index of the pair in a dense [tokens, experts] matrix.
    __device__ u32 cell() const { return words.x; }
    // The rank that holds the expert.
    __device__ u32 rank() const { return words.y >> RANK_SHIFT; }
    // Number of the expert among the experts of that rank.
    __device__ u32 local_expert() const { return words.y & EXPERT_MASK; }
    // The row on that rank.
    __device__ u32 row() const { return words.z; }
    __device__ bool is_dropped() const { return words.z == NO_ROW; }
    __device__ float weight() const { return __uint_as_float(words.w); }
};

// What a destination must know of a row that it receives.
struct Receive {
    static constexpr u32 SOURCE_SHIFT = 2;
    // The first row of its token on the destination.
    static constexpr u32 FIRST = 1;
    // The last kept row of its token on the destination.
    static constexpr u32 END = 2;

    uint2 words;  // {row, source << SOURCE_SHIFT | flags}

    __device__ static Receive of(u32 row, u32 source) { return {make_uint2(row, source << SOURCE_SHIFT)}; }
    __device__ void mark(u32 flags) { words.y |= flags; }
    __device__ u32 row() const { return words.x; }
    __device__ bool is_dropped() const { return words.x == NO_ROW; }
    // Where the partial sum of this token goes: not a rank, but an index in `sends` of the token's rank or, for a foreign set,
    // in `sends` of the set, which its forwarder has. If the destination itself has that list: the number of the token or, for
    // a foreign set, its rail row.
    __device__ u32 source() const { return words.y >> SOURCE_SHIFT; }
    __device__ bool is_first() const { return (words.y & FIRST) != 0; }
    __device__ bool is_end() const { return (words.y & END) != 0; }
    // Whether rows of the same token follow.
    __device__ bool is_first_of_several() const { return (words.y & (FIRST | END)) == FIRST; }
    // `source()` of the entry that another lane holds. Called by all lanes.
    __device__ u32 source_of_lane(u32 lane) const { return __shfl_sync(ALL_LANES, words.y, lane) >> SOURCE_SHIFT; }
};

// Where a copy's weight lies on the destination rank.
struct DstCopy {
    uint2 words;  // {cell, copy}

    __device__ static DstCopy of(u32 cell, u32 copy) { return {make_uint2(cell, copy)}; }
    // Index in the destination's probabilities: the row in permuted mode, row * local experts + local expert in plain
    // mode.
    __device__ u32 cell() const { return words.x; }
    __device__ bool is_dropped() const { return words.x == NO_ROW; }
    // Index in `copies` of the token's rank or, for a foreign set, in `copies` of the set, which its forwarder has.
    __device__ u32 copy() const { return words.y; }
};

static_assert(sizeof(Send) == 8 && sizeof(Copy) == 16 && sizeof(Receive) == 8 && sizeof(DstCopy) == 8);
