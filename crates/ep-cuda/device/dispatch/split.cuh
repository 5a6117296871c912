// How many blocks send, and how many copy what stays or has come: by what there is to do, which preprocessing has counted.
#pragma once
#include "send.cuh"

// GB/s of one block, measured on H200s. Rows that are stored here and rows that are read for it: most are read once for
// several. Where tokens are quantised: rows sent, rows copied here, and tokens quantised (what is read).
constexpr float STORED = 65.0f, LOADED = 145.0f;
constexpr float SENT_QUANTIZED = 45.0f, COPIED_QUANTIZED = 35.0f, QUANTIZED = 35.0f;
// Rows sent as they are, by one of so many blocks.
__device__ inline float sent_by(u32 blocks) { return max(45.0f - 0.5f * static_cast<float>(blocks), 20.0f); }
// GB/s of all blocks together: what NVLink 4 carries to all peers. NVLink 5 has twice the bandwidth; what it carries has
// not been measured.
#if defined(__CUDA_ARCH__) && __CUDA_ARCH__ >= 1000
constexpr float WIRE = 680.0f;
#else
constexpr float WIRE = 340.0f;
#endif

// Blocks that send rows as they are: no more than this, or a multiple. Between 4 H200s 9 to 15 of them take longer than
// 8: items are dealt out evenly, and where a block's SM lies decides how fast it sends, so the slowest is the end.
constexpr u32 SENDERS = 8;

// How long sending and copying take side by side, from how long either takes alone, in any unit. Where both take equally
// long, each waits for the other now and then; and what comes last is copied last. Fitted to times between 2 and 4 H200s,
// with 16 to 116 blocks of which 2 to 24 send: within 10 % of the best division.
__device__ inline float side_by_side(float send, float copy) {
    const float send_squared = send * send, copy_squared = copy * copy;
    return __fsqrt_rn(__fsqrt_rn(send_squared * send_squared + copy_squared * copy_squared)) + 0.4f * copy;
}

// What there is to do, in rows.
struct Work {
    float remote;  // sent to others
    float stored;  // by the copying role
    float loaded;
    float sent;    // where tokens are quantised: remote ones, and those that senders store here
    float quantized;

    __device__ explicit Work(const DispatchParams& p) {
        const Common& c = p.common;
        const u32* shape = p.handle.shape + 3 * (c.owner_begin[c.rank + 1] - c.owner_begin[c.rank]);
        const float rows = static_cast<float>(shape[SHAPE_ROWS]), own = static_cast<float>(shape[SHAPE_OWN]);
        remote = static_cast<float>(shape[SHAPE_REMOTE]);
        // About as many tokens come from others as go to them; most have several rows here.
        sent = remote + own * rows / max(own + remote, 1.0f);
        stored = max(rows - (SEND_OWN ? sent : remote), 0.0f);
        loaded = min(stored, own + remote);
        quantized = 2.0f * static_cast<float>(p.handle.tokens);
    }

    // How long it takes if `sending` blocks send, of whose warps some may be idle in the last round, and others copy.
    __device__ float time(u32 sending, u32 copying, float busy) const {
        const float senders = static_cast<float>(sending) * max(busy, 0.001f), copiers = static_cast<float>(copying);
        const float wire = remote / WIRE;
        if (SEND_OWN)
            return max(max((sent / SENT_QUANTIZED + quantized / QUANTIZED) / senders, wire),
                       stored / COPIED_QUANTIZED / copiers);
        return side_by_side(max(remote / sent_by(sending) / senders, wire), (stored / STORED + loaded / LOADED) / copiers);
    }
};

// The division that ends first, between 1 and all blocks but one; of several, that with the fewest senders. Called by all
// lanes of a warp.
__device__ inline u32 sending_blocks(const DispatchParams& p, u32 warps) {
    const Work work(p);
    const u32 items = div_up(p.handle.chunks, SPAN) * p.groups;
    u32 best = NONE, fastest = 1;
    for (u32 sending = 1 + lane_id(); sending < gridDim.x; sending += WARP) {
        if (!SEND_OWN && sending > SENDERS && sending % SENDERS != 0) continue;
        // Warps take whole items.
        const u32 rounds = div_up(items, sending * warps);
        const float busy = static_cast<float>(items) / static_cast<float>(max(rounds, 1u) * sending * warps);
        // Of a number that is not negative the bits are in order, too.
        const u32 time = __float_as_uint(work.time(sending, gridDim.x - sending, busy));
        if (time < best) {
            best = time;
            fastest = sending;
        }
    }
    const u32 least = __reduce_min_sync(0xFFFFFFFFu, best);
    return __reduce_min_sync(0xFFFFFFFFu, best == least ? fastest : gridDim.x - 1);
}
