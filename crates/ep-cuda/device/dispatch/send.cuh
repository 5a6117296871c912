// Role send: reads each of this rank's tokens once and stores it to its first row on every other rank and, with rails, to
// the lanes; with SEND_OWN also to all its rows on this rank. Then stores the weights and, in plain mode, the map of local
// experts, and sets the item's flag on every peer and in the `out_flags` of every other domain.
#pragma once
#include PAYLOAD_VARIANT
#include "rails.cuh"
#include "feed.cuh"

// Chunks of an item. An item of combine is one chunk, because combine does more work per row.
constexpr u32 SPAN = 2;

// The work items of the send role: `SPAN` chunks of this rank's tokens, for one group of pieces.
struct SendItems {
    using Entry = Send;
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
    __device__ const Send* list(u32) const { return p.handle.sends; }
};

// Enumerates a worker's (item, piece, token) triples in the order in which they are sent.
struct TokenWalk {
    const SendItems& items;
    u32 item;
    u32 step;  // from one item of this worker to the next
    u32 piece;
    u32 token;
    u32 end;   // one past the item's last token

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

// Stores the weight of a copy, and in plain mode its mark in the map of local experts, on the copy's rank.
__device__ inline void store_weight(const DispatchParams& p, const PeerView* peers, const Copy& copy, float weight) {
    const u32 row = copy.row();
    if (row == NO_ROW) return;
    const u32 rank = copy.rank(), expert = copy.local_expert();
    if (RAILS && rank >= p.common.ranks) {
        // In a lane, weights are indexed by rail copy.
        if (p.probs != PROBS_SKIP) peers[rank].probs[row] = weight;
        return;
    }
    const u32 experts = p.common.owner_begin[rank + 1] - p.common.owner_begin[rank];
    const u64 cell = p.handle.permuted ? row : static_cast<u64>(row) * experts + expert;
    if (p.probs != PROBS_SKIP) peers[rank].probs[cell] = weight;
    if (peers[rank].local_experts != nullptr) peers[rank].local_experts[cell] = 1;
}

// In plain mode a row has a cell for each expert of its rank. Writes zeros to all cells of the rows of the entries
// [first, last) of `sends`, before the weights.
__device__ inline void clear_cells(const DispatchParams& p, const PeerView* peers, const Send* sends, u32 first, u32 last) {
    for (u32 send = first + lane_id(); send < last; send += WARP) {
        const Send entry = sends[send];
        const u32 rank = entry.rank();
        if (entry.is_dead() || RAILS && rank >= p.common.ranks) continue;
        const u32 experts = p.common.owner_begin[rank + 1] - p.common.owner_begin[rank];
        const u64 cell = static_cast<u64>(entry.row()) * experts;
        for (u32 expert = 0; expert < experts; expert++) {
            if (peers[rank].probs != nullptr) peers[rank].probs[cell + expert] = 0.0f;
            if (peers[rank].local_experts != nullptr) peers[rank].local_experts[cell + expert] = 0;
        }
    }
    __syncwarp();
}

// The weights of an item's copies, which are stored after the item's tokens. Lists and weights are read while the
// tokens are in flight; read at the end of the item, they would stall the worker once per list.
struct ItemWeights {
    // Copies per lane that are read ahead.
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
    Copy copies[AHEAD];
    float weights[AHEAD];
    bool weighed = true;  // `weights` has been loaded

    __device__ ItemWeights(const DispatchParams& p, const SendItems& items, const Worker& worker)
        : p(p), items(items), step(worker.workers), wanted(p.probs != PROBS_SKIP || !p.handle.permuted), item(NONE) {
        find(worker.index);
    }

    // Loads the range of the copies of a later item.
    __device__ void find(u32 which) {
        if (!wanted || which >= items.count) return;
        next_begin = p.handle.copy_begin[items.chunk(which)];
        next_end = p.handle.copy_begin[items.chunk_end(which)];
    }

    // Begins item `which`: loads its copies, and the range of the worker's next item.
    __device__ void enter(u32 which) {
        if (!wanted || which == item) return;
        item = which;
        begin = next_begin;
        // Items of the same chunks differ in their pieces; the item of the first group of pieces sends the weights.
        end = items.first_piece(item) == 0 ? next_end : begin;
        find(item + step);
#pragma unroll
        for (u32 turn = 0; turn < AHEAD; turn++) {
            const u32 at = begin + turn * WARP + lane_id();
            if (at < end) copies[turn] = p.handle.copies[at];
        }
        weighed = false;
    }

    __device__ float weight_of(const Copy& copy) const {
        return p.probs == PROBS_DENSE ? p.dense[copy.cell()] : copy.weight();
    }

    // Loads the weights of the copies that were read ahead.
    __device__ void weigh() {
        if (weighed) return;
        weighed = true;
#pragma unroll
        for (u32 turn = 0; turn < AHEAD; turn++)
            if (begin + turn * WARP + lane_id() < end) weights[turn] = weight_of(copies[turn]);
    }

    // Stores the item's weights, and in plain mode the map of local experts, to the destinations.
    __device__ void store(const PeerView* peers) {
        if (begin == end) return;
        weigh();
        if (!p.handle.permuted) {
            const u32* sends = p.handle.send_begin;
            clear_cells(p, peers, p.handle.sends, sends[items.chunk(item)], sends[items.chunk_end(item)]);
        }
#pragma unroll
        for (u32 turn = 0; turn < AHEAD; turn++)
            if (begin + turn * WARP + lane_id() < end) store_weight(p, peers, copies[turn], weights[turn]);
        for (u32 at = begin + AHEAD * WARP + lane_id(); at < end; at += WARP) {
            const Copy copy = p.handle.copies[at];
            store_weight(p, peers, copy, weight_of(copy));
        }
    }
};

// Sets the flag of a finished item some store groups later, when its stores have completed, so that the worker need not
// wait for them.
struct Completion {
    // Store groups between an item's last group and its flag.
    static constexpr u32 LAG = 4;
    u32 flag = NONE;  // of the finished item whose flag is not set yet
    u32 groups_since = 0;

    // Called after each commit.
    template <class Tell>
    __device__ void committed(const Tell& tell) {
        if (flag != NONE && ++groups_since == LAG) {
            if (lane_id() == 0) copy_done<LAG>();
            publish(tell);
        }
    }

    // Called after the commit of an item's last store.
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
        // No peer: only the weights are stored.
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
        for (u32 peer = domain_begin(p.common) + lane_id(); peer < domain_end(p.common); peer += WARP)
            if (peer != p.common.rank) st_release_sys(&peers[peer].flags[flag], epoch);
        for (u32 domain = lane_id(); domain < rail_domains(p.common); domain += WARP)
            if (domain != p.common.rails.domain) st_release_sys(&peers[p.common.ranks + domain].flags[flag], epoch);
    };
    const auto read_ahead = [&] {
        while (!ahead.over() && ring.room()) {
            const u64 row = static_cast<u64>(ahead.token) * p.row_bytes_in + ahead.piece * p.piece_bytes;
            ring.load(p.tokens + row, piece_bytes_at(p, ahead.piece));
            ahead.next();
        }
    };
    read_ahead();
    ItemBatch<Send> next = feed.fetch();
    bool token_begins = true;
    Payload payload;
    ScaleRow scales;
    TokenScales token_scales;
    const auto expect_scales = [&] {
        if (!here.over()) token_scales.expect(p, here.token, here.piece);
    };
    expect_scales();
    while (next.valid()) {
        const ItemBatch<Send> batch = next;
        next = feed.fetch();
        weights.enter(batch.item);
        for (u32 index = 0; index < batch.count; index++) {
            const Send entry = batch.at(index);
            const u32 rank = entry.rank();
            if (token_begins) {
                payload = buffers.prepare(p, ring.take(), here.piece);
                scales = token_scales.take(payload);
                here.next();
                expect_scales();
            }
            token_begins = entry.ends_token();
            if (!entry.is_dead() && (SEND_OWN || rank != p.common.rank)) {
                const PeerView& peer = peers[rank];
                store_stage(peer.tokens + static_cast<u64>(entry.row()) * p.row_bytes_out + payload.offset,
                            payload.data, payload.bytes);
                scales.store(peer.scales + static_cast<u64>(entry.row()) * p.scale_row_bytes +
                             payload.scale_part.offset);
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
