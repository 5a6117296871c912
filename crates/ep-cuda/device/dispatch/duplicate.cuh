// Role: what this rank receives beside the wire. A token with several experts on this rank came over once, to the row of
// the first; the other rows are copied from it here. Rows of the rank's own tokens are copied from the tokens. This role
// sees every chunk arrive, so when it ends the output is complete.
#pragma once
#include "arrivals.cuh"
#include "send.cuh"

// Rows that fill a segment up carry zeros.
__device__ inline void zero_padding(const DispatchParams& p, const Worker& worker) {
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

// Where the row of a list's first entry comes from, and its scales: this rank's output, or its own tokens.
struct Origin {
    const u8* tokens;
    const u8* scales;
    bool own;

    __device__ Origin(const DispatchParams& p, u32 source) : own(source == p.common.rank) {
        tokens = own ? p.tokens : p.out_tokens;
        scales = own ? p.scales : p.out_scales;
    }
    __device__ u64 row(const uint2& first) const { return own ? first.y >> 2 : first.x; }
    // Whether there is anything to copy for a token that begins so.
    __device__ bool wanted(const uint2& entry) const {
        return entry.x != NONE && (own ? (entry.y & RECV_FIRST) != 0 : (entry.y & 3) == RECV_FIRST);
    }
};

__device__ inline void duplicate(const DispatchParams& p, const Worker& worker, Ring& ring, const PeerView* peers,
                                 u32 epoch) {
    const Common& c = p.common;
    if (p.handle.permuted) zero_padding(p, worker);
    if (SEND_OWN && c.ranks == 1) return;
    const ArrivalItems<!SEND_OWN> items(c, peers, worker, SPAN, p.groups, p.pieces);
    Feed<ArrivalItems<!SEND_OWN>> feed(items, worker.index, worker.workers);
    // Pieces of the output row.
    const u32 out_piece = p.piece_bytes / (p.row_bytes_in / p.row_bytes_out);
    ItemBatch next = feed.fetch();
    u32 arrived = NONE;
    u8* stage = nullptr;
    ScaleRow scales, next_scales;
    while (next.valid()) {
        const ItemBatch batch = next;
        next = feed.fetch();
        const u32 source = items.source(batch.item);
        const Origin origin(p, source);
        if (arrived != batch.item && !origin.own) {
            arrived = batch.item;
            const u32 flag = items.flag(batch.item);
            const bool there = wait_for(c, &c.own->flags[source][flag], epoch, source, FOR_CHUNK, items.chunk(batch.item));
            // Lanes see for themselves; they must not part.
            if (!__all_sync(0xFFFFFFFFu, there)) break;
            copy_fence_global();
            __syncwarp();
        }
        const u32 offset = batch.piece * out_piece;
        const u32 bytes = min(out_piece, p.row_bytes_out - offset);
        const ScalePart part = scales_of(p, batch.piece);
        u32 loads = __ballot_sync(0xFFFFFFFFu, lane_id() < batch.count && origin.wanted(batch.entry));
        const auto read_ahead = [&] {
            while (loads != 0 && ring.room()) {
                const u64 row = origin.row(batch.at(__ffs(loads) - 1));
                ring.load(origin.tokens + row * p.row_bytes_out + offset, bytes);
                loads &= loads - 1;
            }
        };
        // Scales of the batch's next token are read while the rows of this one are copied.
        u32 unread = loads;
        const auto read_scales = [&] {
            if (unread == 0) return;
            const u64 row = origin.row(batch.at(__ffs(unread) - 1));
            next_scales.load(origin.scales + row * p.scale_row_bytes + part.offset, part.bytes);
            unread &= unread - 1;
        };
        read_ahead();
        read_scales();
        for (u32 index = 0; index < batch.count; index++) {
            const uint2 entry = batch.at(index);
            const bool first = (entry.y & RECV_FIRST) != 0, end = (entry.y & RECV_END) != 0;
            if (entry.x == NONE || (first && end && !origin.own)) continue;
            if (first) {
                stage = ring.take();
                scales = next_scales;
                read_scales();
                if (!origin.own) continue;
            }
            store_stage(p.out_tokens + static_cast<u64>(entry.x) * p.row_bytes_out + offset, stage, bytes);
            scales.store(p.out_scales + static_cast<u64>(entry.x) * p.scale_row_bytes + part.offset);
            if (end) {
                commit_stores();
                ring.free<1>(ring.taken - 1);
                read_ahead();
            }
        }
    }
    ring.drain();
    if (lane_id() == 0) copy_done<0>();
}
