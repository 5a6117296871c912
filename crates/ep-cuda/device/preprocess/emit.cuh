// Writes the lists of the handle. The counts determine the index of every entry, so threads write the entries in any order.
#pragma once
#include "bases.cuh"

// The index of a token's first entry in every list of a handle, or of a foreign set.
struct Cursors {
    const Tile& tile;
    const HandleView& lists;
    const u32* run;          // by column: sums over all tokens before this tile
    const u32* copies_begin; // [ranks]: index of the destination's first entry in recv and dst_copies
    const u32* tokens_begin; // [ranks]: the same for recv in plain mode

    __device__ Columns column() const { return Columns(tile.p.common); }
    __device__ u32 sends(u32 token) const { return run[column().sends()] + tile.scan(tile.sends())[token]; }
    __device__ u32 copies(u32 token) const { return run[column().copies()] + tile.scan(tile.copies())[token]; }
    // In recv and dst_copies, for one destination.
    __device__ u32 copies_for(u32 rank, u32 token) const {
        return copies_begin[rank] + run[column().copies_of(rank)] + tile.scan(rank)[token];
    }
    // The number of earlier tokens that have a copy on the rank.
    __device__ u32 tokens_before(u32 rank, u32 token) const {
        return run[column().tokens_of(rank)] + Tile::before(tile.rank_columns + rank * tile.column_words, token);
    }
    // The token's rail row in another domain, and its first copy there.
    __device__ u32 rail_row(u32 domain, u32 token) const {
        return run[column().tokens_to(domain)] + Tile::before(tile.domain_columns + domain * tile.column_words, token);
    }
    __device__ u32 rail_copy(u32 domain, u32 token) const {
        const u32 first = domain * domain_size(tile.p.common);
        u32 copies = 0;
        for (u32 rank = first; rank < first + domain_size(tile.p.common); rank++)
            copies += run[column().copies_of(rank)] + tile.scan(rank)[token];
        return copies;
    }
};

// Computes the index of each destination's first entry in recv and dst_copies, for `Cursors`. Called by all threads.
__device__ inline void begin_regions(const Common& c, const Columns& column, const u32* totals, u32* copies_begin,
                                     u32* tokens_begin) {
    for (u32 rank = domain_begin(c) + threadIdx.x; rank < domain_end(c); rank += blockDim.x) {
        copies_begin[rank] = tokens_begin[rank] = 0;
        for (u32 below = domain_begin(c); below < rank; below++) {
            copies_begin[rank] += totals[column.copies_of(below)];
            tokens_begin[rank] += totals[column.tokens_of(below)];
        }
    }
}

// Writes a chunk's `*_begin` words for one destination rank.
__device__ inline void begin_chunk(const Common& c, const Cursors& cursors, u32 chunk, u32 rank) {
    const Tile& tile = cursors.tile;
    const HandleView& h = cursors.lists;
    const u32 token = chunk * h.chunk_tokens - tile.first;
    if (rank == domain_begin(c)) {
        h.send_begin[chunk] = cursors.sends(token);
        h.copy_begin[chunk] = cursors.copies(token);
    }
    const u32 copies = cursors.copies_for(rank, token);
    const u32 tokens = cursors.tokens_begin[rank] + cursors.tokens_before(rank, token);
    const u32 at = rank * (h.chunks + 1) + chunk;
    h.dst_begin[at] = copies;
    h.recv_begin[at] = h.permuted ? copies : tokens;
}

// Writes a chunk's `rail_begin` words for one domain.
__device__ inline void begin_rail_chunk(const Cursors& cursors, u32 chunk, u32 domain) {
    const HandleView& h = cursors.lists;
    const u32 token = chunk * h.chunk_tokens - cursors.tile.first;
    rail_begin(h, domain).rows[chunk] = cursors.rail_row(domain, token);
    rail_begin(h, domain).copies[chunk] = cursors.rail_copy(domain, token);
}

// Writes a token's `token_begin`, and the dead entry of a token without a copy.
__device__ inline void begin_token(const PreprocessParams& p, const Cursors& cursors, u32 token) {
    const Tile& tile = cursors.tile;
    const u32 send = cursors.sends(token);
    cursors.lists.token_begin[tile.first + token] = send;
    if (tile.of_token(tile.copies(), token) != 0) return;
    Send entry = Send::of(p.common.rank, NO_ROW);
    entry.mark(Send::DEAD | Send::TOKEN_END);
    cursors.lists.sends[send] = entry;
}

// Permuted mode: the row of a token's copy for the expert at `position`, on the rank that holds it.
__device__ inline u32 permuted_row(const Cursors& cursors, const Bases& bases, u32 token, u32 position) {
    const Tile& tile = cursors.tile;
    return bases.base[position] + cursors.run[position] +
           Tile::before(tile.columns + position * tile.column_words, token);
}

// Whether no later copy of the token on that rank is kept. It is enough to look at the next copy: rows grow with the
// expert position, so if the next copy is dropped, all later ones are.
__device__ inline bool last_kept(const Cursors& cursors, const Bases& bases, u32 token, u32 position, u32 end,
                                 u32 limit) {
    const u32 next = Tile::next_bit(cursors.tile.row(token), position + 1, end);
    return next == end || (limit != NONE && permuted_row(cursors, bases, token, next) >= limit);
}

// Writes the entries of one copy that goes along a rail.
__device__ inline void emit_rail_copy(const PreprocessParams& p, const Cursors& cursors, u32 token, u32 expert,
                                      u32 position, float weight) {
    const Tile& tile = cursors.tile;
    const Common& c = p.common;
    const HandleView& h = cursors.lists;
    const u32 domain = domain_of(c, tile.owner[position]), first = first_position(c, domain);
    const u32 among_domain = Tile::bits(tile.row(token), first, position);
    h.copies[cursors.copies(token) + Tile::bits(tile.row(token), 0, position)] =
        Copy::of((tile.first + token) * c.experts + expert, c.ranks + domain, 0,
                 cursors.rail_copy(domain, token) + among_domain, weight);
    if (among_domain != 0) return;
    const u32 here = tile.sends_here(token), below = tile.sends_below(domain, token);
    Send entry = Send::of(c.ranks + domain, cursors.rail_row(domain, token));
    if (here + below + 1 == tile.of_token(tile.sends(), token)) entry.mark(Send::TOKEN_END);
    // combine adds the sums of the domains below this one to each other first, as it does with this rank's rows.
    const bool before = domain < c.rails.domain;
    if (!before || below == 0) entry.mark(Send::GROUP_FIRST);
    if (!before || below + 1 == tile.sends_below(c.rails.domain, token)) entry.mark(Send::GROUP_END);
    h.sends[cursors.sends(token) + here + below] = entry;
}

// Writes the entries of one copy in all lists.
__device__ inline void emit_copy(const PreprocessParams& p, const Cursors& cursors, const Bases& bases, u32 token,
                                 u32 expert, u32 position, float weight) {
    const Tile& tile = cursors.tile;
    const Common& c = p.common;
    const HandleView& h = cursors.lists;
    const u32 rank = tile.owner[position];
    if (RAILS && (rank < domain_begin(c) || rank >= domain_end(c))) {
        emit_rail_copy(p, cursors, token, expert, position, weight);
        return;
    }
    const u32 first = c.owner_begin[rank], end = c.owner_begin[rank + 1];
    const u32 among_rank = Tile::bits(tile.row(token), first, position);
    const u32 earlier_tokens = cursors.tokens_before(rank, token);

    const u32 row = h.permuted ? permuted_row(cursors, bases, token, position) : bases.base[rank] + earlier_tokens;
    const u32 limit = bases.limit[rank];
    const bool kept = row < limit;
    const bool last =
        kept && (!h.permuted || last_kept(cursors, bases, token, position, end, limit));
    const u32 kept_row = kept ? row : NO_ROW;

    // In `sends`, each lower rank that has copies has one entry; in permuted mode, this rank has one entry per copy.
    const u32 token_sends = cursors.sends(token);
    u32 copy = cursors.copies(token) + among_rank, send = token_sends;
    for (u32 below = 0; below < rank; below++) {
        const u32 chosen = tile.of_token(below, token);
        copy += chosen;
        if (below >= domain_begin(c)) send += h.permuted && below == c.rank ? chosen : min(chosen, 1u);
    }
    h.copies[copy] =
        Copy::of((tile.first + token) * c.experts + expert, rank, position - first, kept_row, weight);
    const u32 of_destination = cursors.copies_for(rank, token) + among_rank;
    const u32 cell = h.permuted ? row : row * (end - first) + position - first;
    h.dst_copies[of_destination] = DstCopy::of(kept ? cell : NO_ROW, copy);

    const bool own_copies = h.permuted && rank == c.rank;
    if (own_copies) send += among_rank;
    if (own_copies || among_rank == 0) {
        Send entry = Send::of(rank, kept_row);
        if (send + 1 == token_sends + tile.of_token(tile.sends(), token)) entry.mark(Send::TOKEN_END);
        if (!kept) entry.mark(Send::DEAD);
        if (rank == c.rank && among_rank == 0) entry.mark(Send::GROUP_FIRST);
        if (rank == c.rank && last) entry.mark(Send::GROUP_END);
        h.sends[send] = entry;
    }
    const u32 source = rank == c.rank ? tile.first + token : send;
    if (h.permuted) {
        Receive entry = Receive::of(kept_row, source);
        if (among_rank == 0) entry.mark(Receive::FIRST);
        if (last) entry.mark(Receive::END);
        h.recv[of_destination] = entry;
    } else if (among_rank == 0) {
        Receive entry = Receive::of(kept_row, source);
        entry.mark(Receive::FIRST | Receive::END);
        h.recv[cursors.tokens_begin[rank] + earlier_tokens] = entry;
    }
}

// Writes the entries of a tile's tokens. Called by all threads.
__device__ inline void emit(const PreprocessParams& p, const Cursors& cursors, const Bases& bases) {
    const Tile& tile = cursors.tile;
    const Common& c = p.common;
    const u32 ranks = domain_size(c), chunk_tokens = cursors.lists.chunk_tokens;
    const u32 chunk = div_up(tile.first, chunk_tokens), chunks = div_up(tile.first + tile.tokens, chunk_tokens) - chunk;
    for (u32 at = threadIdx.x; at < chunks * ranks; at += blockDim.x)
        begin_chunk(c, cursors, chunk + at / ranks, domain_begin(c) + at % ranks);
    for (u32 token = threadIdx.x; token < tile.tokens; token += blockDim.x) begin_token(p, cursors, token);
    tile.for_each_copy([&](u32 token, u32 expert, u32 position, float weight) {
        emit_copy(p, cursors, bases, token, expert, position, weight);
    });
    // The tokens of a foreign set stay in this domain.
    const u32 domains = tile.form == ROUTING_MASKS ? 0 : rail_domains(c);
    for (u32 at = threadIdx.x; at < chunks * domains; at += blockDim.x)
        begin_rail_chunk(cursors, chunk + at / domains, at % domains);
}

// Writes the ends of all lists. Called by all threads of one block.
__device__ inline void finish_lists(const Common& c, const HandleView& h, const Columns& column, const u32* totals,
                                    const u32* copies_begin, const u32* tokens_begin) {
    for (u32 rank = domain_begin(c) + threadIdx.x; rank < domain_end(c); rank += blockDim.x) {
        const u32 copies = copies_begin[rank] + totals[column.copies_of(rank)];
        const u32 tokens = tokens_begin[rank] + totals[column.tokens_of(rank)];
        h.dst_begin[rank * (h.chunks + 1) + h.chunks] = copies;
        h.recv_begin[rank * (h.chunks + 1) + h.chunks] = h.permuted ? copies : tokens;
    }
    if (threadIdx.x == 0) {
        h.send_begin[h.chunks] = h.token_begin[h.tokens] = totals[column.sends()];
        h.copy_begin[h.chunks] = totals[column.copies()];
    }
}

// Writes the part of the shape that concerns what this rank sends. Called by one thread.
__device__ inline void finish_shape(const PreprocessParams& p, const Columns& column, const u32* totals) {
    const Common& c = p.common;
    u32 remote = 0;
    for (u32 rank = domain_begin(c); rank < domain_end(c); rank++)
        if (rank != c.rank) remote += totals[column.tokens_of(rank)];
    const u32 rest = 3 * (c.owner_begin[c.rank + 1] - c.owner_begin[c.rank]);
    set_shape(p, rest + SHAPE_REMOTE, remote);
}
