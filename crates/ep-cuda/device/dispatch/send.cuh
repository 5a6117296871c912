// Role: a rank's own tokens go out. Each is read once and stored to its row on every rank that wants it; with SEND_OWN
// to all its rows on the own rank too.
#pragma once
#include PAYLOAD_VARIANT

// Chunks that move as a unit. combine, whose work on a row is more, takes each for itself.
constexpr u32 SPAN = 2;

// The own lists by item.
struct SendItems {
    const DispatchParams& p;
    u32 count;
    u32 groups;
    u32 pieces;

    __device__ explicit SendItems(const DispatchParams& p)
        : p(p), count(div_up(p.handle.chunks, SPAN) * p.groups), groups(p.groups), pieces(p.pieces) {}
    __device__ bool skip(u32) const { return false; }
    __device__ u32 chunk(u32 item) const { return item / groups * SPAN; }
    __device__ u32 chunk_end(u32 item) const { return min(p.handle.chunks, chunk(item) + SPAN); }
    __device__ u32 first_piece(u32 item) const { return item % groups; }
    __device__ Range range(u32 item) const {
        const u32* begin = p.handle.send_begin;
        return {p.handle.sends, begin[chunk(item)], begin[chunk_end(item)]};
    }
};

// Tokens to be read, in the order in which they are sent.
struct TokenWalk {
    const SendItems& items;
    u32 item;
    u32 step;
    u32 piece;
    u32 token;
    u32 end;

    __device__ TokenWalk(const SendItems& items, u32 first, u32 step) : items(items), item(first), step(step) { enter(); }

    __device__ void enter() {
        if (item >= items.count) return;
        piece = items.first_piece(item);
        restart();
    }

    __device__ void restart() {
        token = items.chunk(item) * items.p.handle.chunk_tokens;
        end = chunk_end_token(items.p.handle, items.chunk_end(item) - 1);
    }

    __device__ bool over() const { return item >= items.count; }

    __device__ void next() {
        if (++token < end) return;
        piece += items.groups;
        if (piece < items.pieces) {
            restart();
        } else {
            item += step;
            enter();
        }
    }
};

// The weights of some chunks' copies, to their rows.
__device__ inline void send_probs(const DispatchParams& p, const PeerView* peers, u32 chunk, u32 chunk_end) {
    const HandleView& h = p.handle;
    const u32 begin = h.copy_begin[chunk], end = h.copy_begin[chunk_end];
    if (!h.permuted) {
        // A row has a cell for each expert of the rank; most are zero.
        const u32 first = h.send_begin[chunk], last = h.send_begin[chunk_end];
        for (u32 send = first + lane_id(); send < last; send += WARP) {
            const uint2 entry = h.sends[send];
            if ((entry.x & SEND_DEAD) != 0) continue;
            const u32 rank = entry.x & SEND_RANK;
            const u32 experts = p.common.owner_begin[rank + 1] - p.common.owner_begin[rank];
            const u64 cell = static_cast<u64>(entry.y) * experts;
            for (u32 expert = 0; expert < experts; expert++) {
                if (peers[rank].probs != nullptr) peers[rank].probs[cell + expert] = 0.0f;
                if (peers[rank].local_experts != nullptr) peers[rank].local_experts[cell + expert] = 0;
            }
        }
        __syncwarp();
    }
    for (u32 at = begin + lane_id(); at < end; at += WARP) {
        const uint4 copy = h.copies[at];
        if (copy.z == NONE) continue;
        const u32 rank = copy.y >> 16, expert = copy.y & 0xFFFF;
        const u32 experts = p.common.owner_begin[rank + 1] - p.common.owner_begin[rank];
        const u64 cell = h.permuted ? copy.z : static_cast<u64>(copy.z) * experts + expert;
        const float weight = p.probs == PROBS_DENSE ? p.dense[copy.x] : __uint_as_float(copy.w);
        if (p.probs != PROBS_SKIP) peers[rank].probs[cell] = weight;
        if (peers[rank].local_experts != nullptr) peers[rank].local_experts[cell] = 1;
    }
}

__device__ inline void send(const DispatchParams& p, const Worker& worker, Ring& ring, PayloadBuffers& buffers,
                            const PeerView* peers, u32 epoch) {
    const SendItems items(p);
    Feed<SendItems> feed(items, worker.index, worker.workers);
    TokenWalk ahead(items, worker.index, worker.workers);
    TokenWalk here(items, worker.index, worker.workers);
    Completion<4> completion;
    const auto tell = [&](u32 flag, u32) {
        for (u32 peer = lane_id(); peer < p.common.ranks; peer += WARP)
            if (peer != p.common.rank) st_release_sys(&peers[peer].flags[flag], epoch);
    };
    const auto read_ahead = [&] {
        while (!ahead.over() && ring.room()) {
            const u64 row = static_cast<u64>(ahead.token) * p.row_bytes_in + ahead.piece * p.piece_bytes;
            ring.load(p.tokens + row, piece_bytes_at(p, ahead.piece));
            ahead.next();
        }
    };
    read_ahead();
    Batch next = feed.fetch();
    bool token_begins = true;
    Payload payload;
    ScaleRow scales;
    while (next.valid()) {
        const Batch batch = next;
        next = feed.fetch();
        for (u32 index = 0; index < batch.count; index++) {
            const uint2 entry = batch.at(index);
            const u32 rank = entry.x & SEND_RANK;
            if (token_begins) {
                payload = buffers.prepare(p, ring, ring.take(), here.token, here.piece);
                scales.load(payload.scales, payload.scale_part.bytes);
            }
            token_begins = (entry.x & SEND_TOKEN_END) != 0;
            if ((entry.x & SEND_DEAD) == 0 && (SEND_OWN || rank != p.common.rank)) {
                const PeerView& peer = peers[rank];
                store_stage(peer.tokens + static_cast<u64>(entry.y) * p.row_bytes_out + payload.offset, payload.data,
                            payload.bytes);
                scales.store(peer.scales + static_cast<u64>(entry.y) * p.scale_row_bytes + payload.scale_part.offset);
            }
            if (token_begins) {
                commit_stores();
                completion.committed(tell);
                buffers.sent(ring);
                here.next();
                read_ahead();
            }
        }
        if (batch.last) {
            const u32 item = batch.item;
            if (items.first_piece(item) == 0 && (p.probs != PROBS_SKIP || !p.handle.permuted))
                send_probs(p, peers, items.chunk(item), items.chunk_end(item));
            completion.finish(item, 0, tell);
        }
    }
    completion.flush(tell);
    if (lane_id() == 0) copy_done<0>();
}
