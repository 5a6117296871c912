// The lists of the handle: one entry after the other at the place that counting has found.
#pragma once
#include "bases.cuh"

// Where a token's entries begin, in every list.
struct Cursors {
    const Tile& tile;
    const u32* run;          // by column: sums of all tokens before this tile
    const u32* copies_begin; // [ranks]: where the destination's region of recv and dst_copies begins
    const u32* tokens_begin; // [ranks]: the same of recv in plain mode

    __device__ Columns column() const { return {tile.p.common.experts, tile.p.common.ranks}; }
    __device__ u32 sends(u32 token) const { return run[column().sends()] + tile.scan(tile.sends())[token]; }
    __device__ u32 copies(u32 token) const { return run[column().copies()] + tile.scan(tile.copies())[token]; }
    // Those for one rank, in recv and dst_copies.
    __device__ u32 copies_for(u32 rank, u32 token) const {
        return copies_begin[rank] + run[column().copies_of(rank)] + tile.scan(rank)[token];
    }
    // Earlier tokens that have a copy on the rank.
    __device__ u32 tokens_before(u32 rank, u32 token) const {
        return run[column().tokens_of(rank)] + Tile::before(tile.rank_columns + rank * tile.column_words, token);
    }
};

// Where the lists of a chunk begin.
__device__ inline void begin_chunk(const PreprocessParams& p, const Cursors& cursors, u32 chunk, u32 rank) {
    const Tile& tile = cursors.tile;
    const HandleView& h = p.handle;
    const u32 token = chunk * h.chunk_tokens - tile.first;
    if (rank == 0) {
        h.send_begin[chunk] = cursors.sends(token);
        h.copy_begin[chunk] = cursors.copies(token);
    }
    const u32 copies = cursors.copies_for(rank, token);
    const u32 tokens = cursors.tokens_begin[rank] + cursors.tokens_before(rank, token);
    const u32 at = rank * (h.chunks + 1) + chunk;
    h.dst_begin[at] = copies;
    h.recv_begin[at] = h.permuted ? copies : tokens;
}

// Where the entries of a token begin; one that goes nowhere has an entry that says so.
__device__ inline void begin_token(const PreprocessParams& p, const Cursors& cursors, u32 token) {
    const Tile& tile = cursors.tile;
    const u32 send = cursors.sends(token);
    p.handle.token_begin[tile.first + token] = send;
    if (tile.of_token(tile.copies(), token) == 0)
        p.handle.sends[send] = make_uint2(p.common.rank | SEND_DEAD | SEND_TOKEN_END, NONE);
}

// The row of one copy of a token on the rank that holds the position.
__device__ inline u32 permuted_row(const Cursors& cursors, const Bases& bases, u32 token, u32 position) {
    const Tile& tile = cursors.tile;
    return bases.base[position] + cursors.run[position] +
           Tile::before(tile.columns + position * tile.column_words, token);
}

// Whether there is no later copy of the token on that rank, or none that is kept: later experts are dropped first.
__device__ inline bool last_kept(const Cursors& cursors, const Bases& bases, u32 token, u32 position, u32 end,
                                 u32 limit) {
    const u32 next = Tile::next_bit(cursors.tile.row(token), position + 1, end);
    return next == end || (limit != NONE && permuted_row(cursors, bases, token, next) >= limit);
}

__device__ inline void emit_copy(const PreprocessParams& p, const Cursors& cursors, const Bases& bases, u32 token,
                                 u32 expert, u32 position, float weight) {
    const Tile& tile = cursors.tile;
    const Common& c = p.common;
    const HandleView& h = p.handle;
    const u32 rank = tile.owner[position];
    const u32 first = c.owner_begin[rank], end = c.owner_begin[rank + 1];
    const u32 among_rank = Tile::bits(tile.row(token), first, position);
    const u32 earlier_tokens = cursors.tokens_before(rank, token);

    const u32 row = h.permuted ? permuted_row(cursors, bases, token, position) : bases.base[rank] + earlier_tokens;
    const u32 limit = bases.limit[rank];
    const bool kept = row < limit;
    const bool last =
        kept && (!h.permuted || last_kept(cursors, bases, token, position, end, limit));
    const u32 kept_row = kept ? row : NONE;

    // The ranks below have one entry each among the sends, this rank's own in permuted mode one per copy.
    const u32 token_sends = cursors.sends(token);
    u32 copy = cursors.copies(token) + among_rank, send = token_sends;
    for (u32 below = 0; below < rank; below++) {
        const u32 chosen = tile.of_token(below, token);
        copy += chosen;
        send += h.permuted && below == c.rank ? chosen : min(chosen, 1u);
    }
    h.copies[copy] = make_uint4((tile.first + token) * c.experts + expert, rank << 16 | (position - first), kept_row,
                                __float_as_uint(weight));
    const u32 of_destination = cursors.copies_for(rank, token) + among_rank;
    const u32 cell = h.permuted ? row : row * (end - first) + position - first;
    h.dst_copies[of_destination] = make_uint2(kept ? cell : NONE, copy);

    const bool own_copies = h.permuted && rank == c.rank;
    if (own_copies) send += among_rank;
    if (own_copies || among_rank == 0) {
        u32 flags = rank;
        if (send + 1 == token_sends + tile.of_token(tile.sends(), token)) flags |= SEND_TOKEN_END;
        if (!kept) flags |= SEND_DEAD;
        if (rank == c.rank && among_rank == 0) flags |= SEND_OWN_FIRST;
        if (rank == c.rank && last) flags |= SEND_OWN_END;
        h.sends[send] = make_uint2(flags, kept_row);
    }
    const u32 known_as = rank == c.rank ? tile.first + token : send;
    if (h.permuted) {
        u32 flags = known_as << 2;
        if (among_rank == 0) flags |= RECV_FIRST;
        if (last) flags |= RECV_END;
        h.recv[of_destination] = make_uint2(kept_row, flags);
    } else if (among_rank == 0) {
        h.recv[cursors.tokens_begin[rank] + earlier_tokens] = make_uint2(kept_row, known_as << 2 | RECV_FIRST | RECV_END);
    }
}

// The lists of a tile. Called by all threads.
__device__ inline void emit(const PreprocessParams& p, const Cursors& cursors, const Bases& bases) {
    const Tile& tile = cursors.tile;
    const u32 ranks = p.common.ranks, chunk_tokens = p.handle.chunk_tokens;
    const u32 chunk = div_up(tile.first, chunk_tokens), chunks = div_up(tile.first + tile.tokens, chunk_tokens) - chunk;
    for (u32 at = threadIdx.x; at < chunks * ranks; at += blockDim.x)
        begin_chunk(p, cursors, chunk + at / ranks, at % ranks);
    for (u32 token = threadIdx.x; token < tile.tokens; token += blockDim.x) begin_token(p, cursors, token);
    tile.for_each_copy([&](u32 token, u32 expert, u32 position, float weight) {
        emit_copy(p, cursors, bases, token, expert, position, weight);
    });
}
