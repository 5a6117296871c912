// Role: what arrives. A token with several experts on this rank came over the wire once, to the row of the first; the
// other rows are copied from it here. This role sees every chunk arrive, so when it ends the output is complete.
#pragma once
#include "arrivals.cuh"
#include "send.cuh"

using Receiver = Worker<1>;

// Rows that fill a segment up carry zeros.
__device__ inline void zero_padding(const DispatchParams& p, const Receiver& worker) {
    const Common& c = p.common;
    const u32 experts = c.owner_begin[c.rank + 1] - c.owner_begin[c.rank];
    for (u32 expert = 0; expert < experts; expert++) {
        const u32 first = p.handle.shape[expert];
        const u32 kept = p.handle.shape[experts + expert], padded = p.handle.shape[2 * experts + expert];
        for (u32 row = first + kept + worker.index; row < first + padded; row += worker.workers) {
            auto* tokens = reinterpret_cast<uint4*>(p.out_tokens + static_cast<u64>(row) * p.row_bytes_out);
            for (u32 at = lane_id(); at < p.row_bytes_out / 16; at += WARP) tokens[at] = make_uint4(0, 0, 0, 0);
            u8* scales = p.out_scales + static_cast<u64>(row) * p.scale_row_bytes;
            for (u32 at = lane_id(); at < p.scale_row_bytes; at += WARP) scales[at] = 0;
            if (lane_id() == 0 && p.probs != PROBS_SKIP) p.out_probs[row] = 0.0f;
        }
    }
}

__device__ inline void duplicate(const DispatchParams& p, const Receiver& worker, Ring<Receiver>& ring,
                                 const PeerView* peers, u32 epoch) {
    const Common& c = p.common;
    if (p.handle.permuted) zero_padding(p, worker);
    if (c.ranks == 1) return;
    const ArrivalItems items(c, peers, p.groups, p.pieces);
    Feed<ArrivalItems> feed(items, worker.index, worker.workers);
    // Pieces of the output row.
    const u32 out_piece = p.piece_bytes / (p.row_bytes_in / p.row_bytes_out);
    Batch next = feed.fetch();
    u32 arrived = NONE;
    u8* stage = nullptr;
    u32 first_row = NONE;
    while (next.valid()) {
        const Batch batch = next;
        next = feed.fetch();
        if (arrived != batch.item) {
            arrived = batch.item;
            const u32 source = items.source(batch.item), flag = items.flag(batch.item);
            if (!wait_for(c, &c.own->flags[source][flag], epoch, source, FOR_CHUNK, items.chunk(batch.item))) break;
            copy_fence();
            worker.sync();
        }
        const u32 offset = batch.piece * out_piece;
        const u32 bytes = min(out_piece, p.row_bytes_out - offset);
        const bool more = lane_id() < batch.count && batch.entry.x != NONE && (batch.entry.y & 3) == RECV_FIRST;
        u32 loads = __ballot_sync(0xFFFFFFFFu, more);
        const auto read_ahead = [&] {
            while (loads != 0 && ring.room()) {
                const u32 row = batch.at(__ffs(loads) - 1).x;
                ring.load(worker, p.out_tokens + static_cast<u64>(row) * p.row_bytes_out + offset, bytes);
                loads &= loads - 1;
            }
        };
        read_ahead();
        for (u32 index = 0; index < batch.count; index++) {
            const uint2 entry = batch.at(index);
            const u32 place = entry.y & 3;
            if (entry.x == NONE || place == (RECV_FIRST | RECV_END)) continue;
            if (place == RECV_FIRST) {
                first_row = entry.x;
                stage = ring.take(worker);
                continue;
            }
            ring.store(worker, p.out_tokens + static_cast<u64>(entry.x) * p.row_bytes_out + offset, stage, bytes);
            if (p.scale_row_bytes != 0 && batch.piece == 0)
                copy_small(p.out_scales + static_cast<u64>(entry.x) * p.scale_row_bytes,
                           p.out_scales + static_cast<u64>(first_row) * p.scale_row_bytes, p.scale_row_bytes);
            if (place == RECV_END) {
                ring.commit(worker);
                ring.free<1>(worker, ring.taken - 1);
                read_ahead();
            }
        }
    }
    ring.drain(worker);
    if (worker.first()) copy_done<0>();
}
