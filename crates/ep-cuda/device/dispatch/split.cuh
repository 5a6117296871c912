// How many blocks send, and how many copy what stays or has come: by what there is to do, which preprocessing has counted.
#pragma once
#include "send.cuh"

// GB/s of one block: rows sent, rows copied here (less by the smaller pieces of quantised rows), tokens quantised (what
// is read); measured on an H200, where one SM copies 50 at most by the bulk copy engine.
constexpr float SENT = SEND_OWN ? 45.0f : 41.0f, COPIED = SEND_OWN ? 35.0f : 44.0f, QUANTIZED = 35.0f;
// GB/s of all blocks together: what NVLink 4 carries to all peers. NVLink 5 has twice the bandwidth; what it carries has
// not been measured.
#if defined(__CUDA_ARCH__) && __CUDA_ARCH__ >= 1000
constexpr float WIRE = 680.0f;
#else
constexpr float WIRE = 340.0f;
#endif

// Blocks that send rows as they are: no more than this, or a multiple. Between 4 H200s 9 to 15 of them take longer than
// 8: items are dealt out evenly, and where a block's SM lies decides how fast it sends, so the slowest is the end.
constexpr u32 SENDERS = SEND_OWN ? 1 : 8;
// What copying adds to the time, where sending is the longer of the two: what has come last is copied last, and a block
// that waits for it copies nothing else.
constexpr float COPIED_AFTER = SEND_OWN ? 0.0f : 0.6f;

// The division that ends first, between 1 and all blocks but one; of several, that with the fewest senders. Called by all
// lanes of a warp.
__device__ inline u32 sending_blocks(const DispatchParams& p, u32 warps) {
    const Common& c = p.common;
    const u32* shape = p.handle.shape + 3 * (c.owner_begin[c.rank + 1] - c.owner_begin[c.rank]);
    const float rows = static_cast<float>(shape[SHAPE_ROWS]);
    const float remote = static_cast<float>(shape[SHAPE_REMOTE]), own = static_cast<float>(shape[SHAPE_OWN]);
    // Senders that quantise serve the own rank too; about as many tokens come from others as go to them.
    const float sent = remote + (SEND_OWN ? own * rows / max(own + remote, 1.0f) : 0.0f);
    const float quantized = SEND_OWN ? 2.0f * static_cast<float>(p.handle.tokens) : 0.0f;
    const float send = sent / SENT + quantized / QUANTIZED, copy = max(rows - sent, 0.0f) / COPIED;
    const u32 items = div_up(p.handle.chunks, SPAN) * p.groups;
    u32 best = NONE, fastest = 1;
    for (u32 sending = 1 + lane_id(); sending < gridDim.x; sending += WARP) {
        if (sending > SENDERS && sending % SENDERS != 0) continue;
        // Warps take whole items, so in the last round some of them may be idle.
        const u32 rounds = div_up(items, sending * warps);
        const float busy = static_cast<float>(items) / static_cast<float>(max(rounds, 1u) * sending * warps);
        const float sends = max(send / (static_cast<float>(sending) * max(busy, 0.001f)), remote / WIRE);
        // Of a number that is not negative the bits are in order, too.
        const float copies = copy / static_cast<float>(gridDim.x - sending);
        const u32 time = __float_as_uint(max(sends, copies) + COPIED_AFTER * copies);
        if (time < best) {
            best = time;
            fastest = sending;
        }
    }
    const u32 least = __reduce_min_sync(0xFFFFFFFFu, best);
    return __reduce_min_sync(0xFFFFFFFFu, best == least ? fastest : gridDim.x - 1);
}
