// Role: a rank's own tokens go out. Each is read once and stored to its row on every rank that wants it; with SEND_OWN
// to all its rows on the own rank too.
#pragma once
#include PAYLOAD_VARIANT
#include "feed.cuh"

// Chunks that move as a unit. combine, whose work on a row is more, takes each for itself.
constexpr u32 SPAN = 2;

// The own lists by item.
struct SendItems {
    const DispatchParams& p;
    u32 count;
    u32 pieces;
    Divider groups;

    __device__ explicit SendItems(const DispatchParams& p)
        : p(p), count(div_up(p.handle.chunks, SPAN) * p.groups), pieces(p.pieces), groups(p.groups) {}
    __device__ bool skip(u32) const { return false; }
    __device__ u32 chunk(u32 item) const { return groups.divide(item) * SPAN; }
    __device__ u32 chunk_end(u32 item) const { return min(p.handle.chunks, chunk(item) + SPAN); }
    __device__ u32 first_piece(u32 item) const { return groups.rest(item); }
    __device__ Range range(u32 item) const {
        const u32* begin = p.handle.send_begin;
        return {begin[chunk(item)], begin[chunk_end(item)]};
    }
    __device__ const uint2* list(u32) const { return p.handle.sends; }
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
        piece += items.groups.by;
        if (piece < items.pieces) {
            restart();
        } else {
            item += step;
            enter();
        }
    }
};

// The weights of an item's copies, which go to their rows after its tokens. They are read while those are on their way:
// at the end of the item the worker would wait for one list after the other, and send nothing meanwhile.
struct ItemWeights {
    static constexpr u32 AHEAD = 2;
    const DispatchParams& p;
    const SendItems& items;
    const u32 step;
    const bool wanted;
    u32 item;
    u32 begin = 0;
    u32 end = 0;
    u32 next_begin = 0;
    u32 next_end = 0;
    uint4 copies[AHEAD];
    float weights[AHEAD];
    bool weighed = true;

    __device__ ItemWeights(const DispatchParams& p, const SendItems& items, const Worker& worker)
        : p(p), items(items), step(worker.workers), wanted(p.probs != PROBS_SKIP || !p.handle.permuted), item(NONE) {
        find(worker.index);
    }

    // Where the copies of a later item are.
    __device__ void find(u32 which) {
        if (!wanted || which >= items.count) return;
        next_begin = p.handle.copy_begin[items.chunk(which)];
        next_end = p.handle.copy_begin[items.chunk_end(which)];
    }

    __device__ void enter(u32 which) {
        if (!wanted || which == item) return;
        item = which;
        begin = next_begin;
        // Of the items that share their tokens, the first sends the weights.
        end = items.first_piece(item) == 0 ? next_end : begin;
        find(item + step);
#pragma unroll
        for (u32 turn = 0; turn < AHEAD; turn++) {
            const u32 at = begin + turn * WARP + lane_id();
            if (at < end) copies[turn] = p.handle.copies[at];
        }
        weighed = false;
    }

    __device__ float weight_of(const uint4& copy) const {
        return p.probs == PROBS_DENSE ? p.dense[copy.x] : __uint_as_float(copy.w);
    }

    // When the copies have come.
    __device__ void weigh() {
        if (weighed) return;
        weighed = true;
#pragma unroll
        for (u32 turn = 0; turn < AHEAD; turn++)
            if (begin + turn * WARP + lane_id() < end) weights[turn] = weight_of(copies[turn]);
    }

    __device__ void store(const PeerView* peers) {
        if (begin == end) return;
        weigh();
        if (!p.handle.permuted) clear_cells(peers);
#pragma unroll
        for (u32 turn = 0; turn < AHEAD; turn++)
            if (begin + turn * WARP + lane_id() < end) store_one(peers, copies[turn], weights[turn]);
        for (u32 at = begin + AHEAD * WARP + lane_id(); at < end; at += WARP) {
            const uint4 copy = p.handle.copies[at];
            store_one(peers, copy, weight_of(copy));
        }
    }

    __device__ void store_one(const PeerView* peers, const uint4& copy, float weight) const {
        if (copy.z == NONE) return;
        const u32 rank = copy.y >> 16, expert = copy.y & 0xFFFF;
        const u32 experts = p.common.owner_begin[rank + 1] - p.common.owner_begin[rank];
        const u64 cell = p.handle.permuted ? copy.z : static_cast<u64>(copy.z) * experts + expert;
        if (p.probs != PROBS_SKIP) peers[rank].probs[cell] = weight;
        if (peers[rank].local_experts != nullptr) peers[rank].local_experts[cell] = 1;
    }

    // In plain mode a row has a cell for each expert of the rank; most are zero.
    __device__ void clear_cells(const PeerView* peers) const {
        const HandleView& h = p.handle;
        const u32 first = h.send_begin[items.chunk(item)], last = h.send_begin[items.chunk_end(item)];
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
};

// Tells peers that an item is complete, a few stores later, when it is: so the worker does not stop for it.
struct Completion {
    static constexpr u32 LAG = 4;
    u32 flag = NONE;
    u32 groups_since = 0;

    // After each commit.
    template <class Tell>
    __device__ void committed(const Tell& tell) {
        if (flag != NONE && ++groups_since == LAG) {
            if (lane_id() == 0) copy_done<LAG>();
            publish(tell);
        }
    }

    // The item whose last store was just committed.
    template <class Tell>
    __device__ void finish(u32 item_flag, const Tell& tell) {
        flush(tell);
        flag = item_flag;
        groups_since = 0;
    }

    template <class Tell>
    __device__ void flush(const Tell& tell) {
        if (flag == NONE) return;
        if (lane_id() == 0) copy_done<0>();
        publish(tell);
    }

    template <class Tell>
    __device__ void publish(const Tell& tell) {
        __syncwarp();
        tell(flag);
        flag = NONE;
    }
};

__device__ inline void send(const DispatchParams& p, const Worker& worker, Ring& ring, PayloadBuffers& buffers,
                            const PeerView* peers, u32 epoch) {
    const SendItems items(p);
    ItemWeights weights(p, items, worker);
    if (!SEND_OWN && p.common.ranks == 1) {
        // There is nobody to send tokens to.
        for (u32 item = worker.index; item < items.count; item += worker.workers) {
            weights.enter(item);
            weights.store(peers);
        }
        return;
    }
    Feed<SendItems> feed(items, worker.index, worker.workers);
    TokenWalk ahead(items, worker.index, worker.workers);
    TokenWalk here(items, worker.index, worker.workers);
    Completion completion;
    const auto tell = [&](u32 flag) {
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
    ItemBatch next = feed.fetch();
    bool token_begins = true;
    Payload payload;
    ScaleRow scales;
    TokenScales token_scales;
    const auto expect_scales = [&] {
        if (!here.over()) token_scales.expect(p, here.token, here.piece);
    };
    expect_scales();
    while (next.valid()) {
        const ItemBatch batch = next;
        next = feed.fetch();
        weights.enter(batch.item);
        for (u32 index = 0; index < batch.count; index++) {
            const uint2 entry = batch.at(index);
            const u32 rank = entry.x & SEND_RANK;
            if (token_begins) {
                payload = buffers.prepare(p, ring.take(), here.piece);
                scales = token_scales.take(payload);
                here.next();
                expect_scales();
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
                read_ahead();
                weights.weigh();
            }
        }
        if (batch.last) {
            weights.store(peers);
            completion.finish(batch.item, tell);
        }
    }
    completion.flush(tell);
    if (lane_id() == 0) copy_done<0>();
}
