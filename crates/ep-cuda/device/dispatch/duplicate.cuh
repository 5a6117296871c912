// The duplicate role: completes this rank's output. A peer sends a token with several experts on this rank once, to its
// first row; this role copies that row to the others. It writes the padding rows. It awaits the flags of all items that
// peers send, so the output is complete when the kernel ends.
#pragma once
#include "arrivals.cuh"
#include "send.cuh"

// Writes zeros to a row: its tokens, scales and probability.
__device__ inline void zero_row(const DispatchParams& p, u32 row) {
    auto* tokens = reinterpret_cast<uint4*>(p.out_tokens + static_cast<u64>(row) * p.row_bytes_out);
    for (u32 at = lane_id(); at < p.row_bytes_out / 16; at += WARP) tokens[at] = make_uint4(0, 0, 0, 0);
    u8* scales = p.out_scales + static_cast<u64>(row) * p.scale_row_bytes;
    for (u32 at = lane_id(); at < p.scale_row_bytes; at += WARP) scales[at] = 0;
    if (lane_id() == 0 && p.probs != PROBS_SKIP) p.out_probs[row] = 0.0f;
}

// Writes zeros to the padding rows of all experts. The rows are dealt out as if they followed each other, so that workers differ by
// at most one row. Lanes read the shape of one expert each: expert by expert, the worker would wait for three loads in a row.
__device__ inline void zero_padding(const DispatchParams& p, const Worker& worker) {
    const Common& c = p.common;
    const u32 experts = c.owner_begin[c.rank + 1] - c.owner_begin[c.rank];
    u32 skip = worker.index;  // padding rows before this worker's next one, counted from the current expert
    for (u32 base = 0; base < experts; base += WARP) {
        const u32 mine = base + lane_id();
        u32 begin = 0, end = 0;
        if (mine < experts) {
            const u32 first = p.handle.shape[mine];
            begin = first + p.handle.shape[experts + mine];
            end = first + p.handle.shape[2 * experts + mine];
        }
        for (u32 padded = __ballot_sync(ALL_LANES, begin < end); padded != 0; padded &= padded - 1) {
            const u32 lane = __ffs(padded) - 1;
            const u32 last = __shfl_sync(ALL_LANES, end, lane);
            u32 row = __shfl_sync(ALL_LANES, begin, lane) + skip;
            for (; row < last; row += worker.workers) zero_row(p, row);
            skip = row - last;
        }
    }
}

// Awaits the flags of all items in plain mode, in which no row is copied. Each lane of each worker awaits some of them.
__device__ inline void await_arrivals(const DispatchParams& p, const Worker& worker, const ArrivalItems& items, u32 epoch) {
    const Common& c = p.common;
    for (u32 item = worker.index * WARP + lane_id(); item < items.count; item += worker.workers * WARP)
        if (!items.skip(item) && !await_arrival(c, items, item, epoch)) break;
}

__device__ inline void duplicate(const DispatchParams& p, const Worker& worker, Ring& ring, const PeerView* peers,
                                 u32 epoch) {
    const Common& c = p.common;
    const ArrivalItems items(p, peers);
    // In plain mode a token has one row on this rank.
    if (!p.handle.permuted) return await_arrivals(p, worker, items, epoch);
    Feed<ArrivalItems> feed(items, &c.own->arrivals_taken, worker);
    ItemBatch<Receive> next = feed.fetch();
    zero_padding(p, worker);
    u32 arrived = NONE, out_piece = 0;
    u8* stage = nullptr;
    ScaleRow scales, next_scales;
    while (next.valid()) {
        const ItemBatch<Receive> batch = next;
        next = feed.fetch();
        if (arrived != batch.item) {
            arrived = batch.item;
            out_piece = items.piece_bytes(batch.item);
            const bool there = await_arrival(c, items, batch.item, epoch);
            // Each lane has polled on its own, but all lanes must take the same branch.
            if (!__all_sync(ALL_LANES, there)) break;
            copy_fence_global();
            __syncwarp();
        }
        const u32 offset = batch.piece * out_piece;
        const u32 bytes = min(out_piece, p.row_bytes_out - offset);
        // A rank that sends a group for each piece sends all scales with the first one, whatever form this kernel sends.
        const ScalePart part = p.long_rows ? scales_of(p, batch.piece) : ScalePart{0, batch.piece == 0 ? p.scale_row_bytes : 0};
        u32 loads = __ballot_sync(ALL_LANES, lane_id() < batch.count && !batch.entry.is_dropped() &&
                                                 batch.entry.is_first_of_several());
        const auto read_ahead = [&] {
            while (loads != 0 && ring.room()) {
                const u64 row = batch.at(__ffs(loads) - 1).row();
                ring.load(p.out_tokens + row * p.row_bytes_out + offset, bytes);
                loads &= loads - 1;
            }
        };
        // Reads the scales of the next token while the rows of the current token are copied.
        u32 unread = loads;
        const auto read_scales = [&] {
            if (unread == 0) return;
            const u64 row = batch.at(__ffs(unread) - 1).row();
            next_scales.load(p.out_scales + row * p.scale_row_bytes + part.offset, part.bytes);
            unread &= unread - 1;
        };
        read_ahead();
        read_scales();
        for (u32 index = 0; index < batch.count; index++) {
            const Receive entry = batch.at(index);
            const bool first = entry.is_first(), end = entry.is_end();
            // The rows of a token ascend with its experts: if its first row is dropped, so are all others, and `stage`
            // is not used.
            if (entry.is_dropped() || (first && end)) continue;
            if (first) {
                stage = ring.take();
                scales = next_scales;
                read_scales();
                continue;
            }
            store_stage(p.out_tokens + static_cast<u64>(entry.row()) * p.row_bytes_out + offset, shared_address(stage), bytes);
            scales.store(p.out_scales + static_cast<u64>(entry.row()) * p.scale_row_bytes + part.offset);
            if (end) {
                commit_stores();
                ring.free<1>(ring.taken - 1);
                read_ahead();
                feed.prepare();
            }
        }
    }
    ring.drain();
    await_stores<0>();
}
