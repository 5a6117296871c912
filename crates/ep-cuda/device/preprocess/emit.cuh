// The lists of the handle: one entry after the other at the place that counting has found.
#pragma once
#include "bases.cuh"

// Where this block's next entries go, in every list; by column.
struct Cursors {
    const u32* run;         // column sums of all tokens before this tile
    const u32* copies_begin; // [ranks]: where the destination's region of recv and dst_copies begins
    const u32* tokens_begin; // [ranks]: the same of recv in plain mode
};

struct TokenPlace {
    u32 sends;      // its first entry
    u32 sends_end;
    u32 copies;
};

__device__ inline TokenPlace place_of(const PreprocessParams& p, const Tile& tile, const Cursors& cursors, u32 token) {
    const Common& c = p.common;
    const Columns column{c.experts, c.ranks};
    TokenPlace place;
    place.sends = cursors.run[column.sends()] + tile.scan(c.ranks)[token];
    u32 sends = 0;
    for (u32 rank = lane_id(); rank < c.ranks; rank += WARP) {
        const u32 chosen = tile.chosen_of(token, rank);
        sends += rank == c.rank && p.handle.permuted ? chosen : min(chosen, 1u);
    }
    place.sends_end = place.sends + max(1u, __reduce_add_sync(0xFFFFFFFFu, sends));
    place.copies = cursors.run[column.copies()] + tile.scan(c.ranks + 1)[token];
    return place;
}

// A chunk begins with this token.
__device__ inline void begin_chunk(const PreprocessParams& p, const Tile& tile, const Cursors& cursors, u32 token,
                                   const TokenPlace& place) {
    const Common& c = p.common;
    const HandleView& h = p.handle;
    const Columns column{c.experts, c.ranks};
    const u32 chunk = (tile.first + token) / h.chunk_tokens;
    if (lane_id() == 0) {
        h.send_begin[chunk] = place.sends;
        h.copy_begin[chunk] = place.copies;
    }
    for (u32 rank = lane_id(); rank < c.ranks; rank += WARP) {
        const u32 copies = cursors.copies_begin[rank] + cursors.run[column.copies_of(rank)] + tile.scan(rank)[token];
        const u32 tokens = cursors.tokens_begin[rank] + cursors.run[column.tokens_of(rank)] +
                           Tile::before(tile.rank_columns + rank * tile.column_words, token);
        const u32 at = rank * (h.chunks + 1) + chunk;
        h.dst_begin[at] = copies;
        h.recv_begin[at] = h.permuted ? copies : tokens;
    }
}

// The row of one copy of a token on the rank that holds the position.
__device__ inline u32 permuted_row(const Tile& tile, const Cursors& cursors, const Bases& bases, u32 token,
                                   u32 position) {
    return bases.base[position] + cursors.run[position] +
           Tile::before(tile.columns + position * tile.column_words, token);
}

// Whether a kept copy is the last one on its rank that is kept: later experts are dropped first.
__device__ inline bool last_kept(const Tile& tile, const Cursors& cursors, const Bases& bases, u32 token, u32 position,
                                 u32 end, u32 limit) {
    u32 next = position + 1;
    while (next < end && !Tile::in(tile.row(token), next)) next++;
    return next == end || permuted_row(tile, cursors, bases, token, next) >= limit;
}

__device__ inline void emit_copy(const PreprocessParams& p, const Tile& tile, const Cursors& cursors,
                                 const Bases& bases, u32 token, const TokenPlace& place, u32 expert, u32 position,
                                 float weight) {
    const Common& c = p.common;
    const HandleView& h = p.handle;
    const Columns column{c.experts, c.ranks};
    const u32* bits = tile.row(token);
    const u32 rank = tile.owner[position];
    const u32 first = c.owner_begin[rank], end = c.owner_begin[rank + 1];
    const u32 among_all = Tile::bits(bits, 0, position);
    const u32 among_rank = Tile::bits(bits, first, position);
    const u32 earlier_tokens =
        cursors.run[column.tokens_of(rank)] + Tile::before(tile.rank_columns + rank * tile.column_words, token);

    const u32 row = h.permuted ? permuted_row(tile, cursors, bases, token, position) : bases.base[rank] + earlier_tokens;
    const u32 limit = bases.limit[rank];
    const bool kept = row < limit;
    const bool last =
        kept && (!h.permuted || last_kept(tile, cursors, bases, token, position, end, limit));
    const u32 kept_row = kept ? row : NONE;

    const u32 copy = place.copies + among_all;
    h.copies[copy] = make_uint4((tile.first + token) * c.experts + expert, rank << 16 | (position - first), kept_row,
                                __float_as_uint(weight));
    const u32 of_destination = cursors.copies_begin[rank] + cursors.run[column.copies_of(rank)] +
                               tile.scan(rank)[token] + among_rank;
    const u32 cell = h.permuted ? row : row * (end - first) + position - first;
    h.dst_copies[of_destination] = make_uint2(kept ? cell : NONE, copy);

    // The ranks below have one entry each, this rank's own in permuted mode one per copy.
    const bool own_copies = h.permuted && rank == c.rank;
    u32 send = place.sends;
    for (u32 below = 0; below < rank; below++) {
        if (!Tile::in(tile.rank_columns + below * tile.column_words, token)) continue;
        send += h.permuted && below == c.rank ? tile.chosen_of(token, below) : 1;
    }
    if (own_copies) send += among_rank;
    if (own_copies || among_rank == 0) {
        u32 flags = rank;
        if (send + 1 == place.sends_end) flags |= SEND_TOKEN_END;
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

// The lists of a tile; its scans must have been summed. Called by all threads.
__device__ inline void emit(const PreprocessParams& p, const Tile& tile, const Cursors& cursors, const Bases& bases) {
    for (u32 token = warp_id(); token < tile.tokens; token += blockDim.x / WARP) {
        const TokenPlace place = place_of(p, tile, cursors, token);
        if ((tile.first + token) % p.handle.chunk_tokens == 0) begin_chunk(p, tile, cursors, token, place);
        if (lane_id() == 0) p.handle.token_begin[tile.first + token] = place.sends;
        if (lane_id() == 0 && Tile::bits(tile.row(token), 0, p.common.experts) == 0)
            p.handle.sends[place.sends] = make_uint2(p.common.rank | SEND_DEAD | SEND_TOKEN_END, NONE);
        for_each_choice(p, tile.first + token, [&](u32 expert, u32 position, float weight) {
            emit_copy(p, tile, cursors, bases, token, place, expert, position, weight);
        });
    }
}
