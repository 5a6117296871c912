// How many blocks send, and how many copy what stays or has come: by what there is to do, which preprocessing has counted.
#pragma once
#include "send.cuh"

// GB/s of one block: rows pushed to peers, rows quantised and pushed, rows copied here; measured on an H200.
constexpr float PUSHED = 43.0f, QUANTIZED = 15.0f, COPIED = 35.0f;

// The division that ends first, between 1 and all blocks but one. Called by all lanes of a warp.
__device__ inline u32 sending_blocks(const DispatchParams& p) {
    const Common& c = p.common;
    const u32* shape = p.handle.shape + 3 * (c.owner_begin[c.rank + 1] - c.owner_begin[c.rank]);
    // About as many rows come from others as go to them. Senders that quantise serve the own rank too.
    const float sent = static_cast<float>(shape[SHAPE_REMOTE] + (SEND_OWN ? shape[SHAPE_OWN] : 0));
    const float copied = max(static_cast<float>(shape[SHAPE_ROWS]) - sent, 0.0f);
    const float send = sent / (SEND_OWN ? QUANTIZED : PUSHED), copy = copied / COPIED;
    const u32 items = div_up(p.handle.chunks, SPAN) * p.groups;
    u32 best = NONE, fastest = 1;
    for (u32 sending = 1 + lane_id(); sending < gridDim.x; sending += WARP) {
        // Warps take whole items, so in the last round some of them may be idle.
        const u32 rounds = div_up(items, sending * WARPS);
        const float busy = static_cast<float>(items) / static_cast<float>(max(rounds, 1u) * sending * WARPS);
        const float sends = send / (static_cast<float>(sending) * max(busy, 0.001f));
        // Of a number that is not negative the bits are in order, too.
        const u32 time = __float_as_uint(max(sends, copy / static_cast<float>(gridDim.x - sending)));
        if (time < best) {
            best = time;
            fastest = sending;
        }
    }
    const u32 least = __reduce_min_sync(0xFFFFFFFFu, best);
    return __reduce_min_sync(0xFFFFFFFFu, best == least ? fastest : gridDim.x - 1);
}
