// Role duplicate: completes this rank's output. A peer sends a token with several experts on this rank once, to the row
// of the first expert; this role copies that row to the others. Unless SEND_OWN, it copies rows of this rank's own
// tokens from the input. It writes the padding rows. It awaits the flags of all items that peers send, so the output is
// complete when the kernel ends.
#pragma once
#include "arrivals.cuh"
#include "send.cuh"

// Writes zeros to the padding rows of each expert.
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

// Where rows and scales are copied from: this rank's output, or the input if the source is this rank.
struct Origin {
    const u8* tokens;
    const u8* scales;
    bool own;

    __device__ Origin(const DispatchParams& p, u32 source) : own(source == p.common.rank) {
        tokens = own ? p.tokens : p.out_tokens;
        scales = own ? p.scales : p.out_scales;
    }
    // The row to copy, for the first entry of a token.
    __device__ u64 row(const Receive& first) const { return own ? first.source() : first.row(); }
    // Whether `entry` is the first entry of a token whose row must be copied.
    __device__ bool wanted(const Receive& entry) const {
        return !entry.is_dropped() && (own ? entry.is_first() : entry.is_first_of_several());
    }
};

__device__ inline void duplicate(const DispatchParams& p, const Worker& worker, Ring& ring, const PeerView* peers,
                                 u32 epoch) {
    const Common& c = p.common;
    if (p.handle.permuted) zero_padding(p, worker);
    if (count_sources<!SEND_OWN>(c) == 0) return;
    const ArrivalItems<!SEND_OWN> items(c, peers, worker, SPAN, p.groups, p.pieces);
    Feed<ArrivalItems<!SEND_OWN>> feed(items, worker.index, worker.workers);
    // Bytes of a piece of an output row, which is shorter than the input row if dispatch quantises.
    const u32 out_piece = p.piece_bytes / (p.row_bytes_in / p.row_bytes_out);
    ItemBatch<Receive> next = feed.fetch();
    u32 arrived = NONE;
    u8* stage = nullptr;
    ScaleRow scales, next_scales;
    while (next.valid()) {
        const ItemBatch<Receive> batch = next;
        next = feed.fetch();
        const u32 source = items.source(batch.item);
        const Origin origin(p, source);
        if (arrived != batch.item && !origin.own) {
            arrived = batch.item;
            const u32 flag = items.flag(batch.item);
            const bool foreign = RAILS && domain_of(c, source) != c.rails.domain;
            const bool there = wait_for(c, &c.own->flags[source][flag], epoch, foreign ? forwarder_of(c, source) : source,
                                        foreign ? FOR_FOREIGN : FOR_CHUNK, items.chunk(batch.item));
            // Each lane has polled for itself: all must take the same branch.
            if (!__all_sync(ALL_LANES, there)) break;
            copy_fence_global();
            __syncwarp();
        }
        const u32 offset = batch.piece * out_piece;
        const u32 bytes = min(out_piece, p.row_bytes_out - offset);
        const ScalePart part = scales_of(p, batch.piece);
        u32 loads = __ballot_sync(ALL_LANES, lane_id() < batch.count && origin.wanted(batch.entry));
        const auto read_ahead = [&] {
            while (loads != 0 && ring.room()) {
                const u64 row = origin.row(batch.at(__ffs(loads) - 1));
                ring.load(origin.tokens + row * p.row_bytes_out + offset, bytes);
                loads &= loads - 1;
            }
        };
        // Reads the scales of the next token while the rows of the current token are copied.
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
            const Receive entry = batch.at(index);
            const bool first = entry.is_first(), end = entry.is_end();
            if (entry.is_dropped() || (first && end && !origin.own)) continue;
            if (first) {
                stage = ring.take();
                scales = next_scales;
                read_scales();
                if (!origin.own) continue;
            }
            store_stage(p.out_tokens + static_cast<u64>(entry.row()) * p.row_bytes_out + offset, stage, bytes);
            scales.store(p.out_scales + static_cast<u64>(entry.row()) * p.scale_row_bytes + part.offset);
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
