// Divides the blocks between the send role and the duplicate role, by an estimate of the time that either takes. The
// amounts of work come from the handle's shape, which preprocess has counted.
#pragma once
#include "send.cuh"

// GB/s of one block, measured on H200s. duplicate: rows stored, and rows loaded (most are loaded once for several
// stores). Quantising variant: rows sent, rows copied by duplicate, and tokens quantised (bytes read).
constexpr float STORED = 65.0f, LOADED = 145.0f;
constexpr float SENT_QUANTIZED = 45.0f, COPIED_QUANTIZED = 35.0f, QUANTIZED = 35.0f;
// Unquantised rows sent, per block, if `blocks` blocks send.
__device__ inline float sent_by(u32 blocks) { return max(45.0f - 0.5f * static_cast<float>(blocks), 20.0f); }
// GB/s of all blocks together: the rate of NVLink 4 to all peers. NVLink 5 has twice the bandwidth; its value is an
// estimate, not a measurement.
#if defined(__CUDA_ARCH__) && __CUDA_ARCH__ >= 1000
constexpr float WIRE = 680.0f;
#else
constexpr float WIRE = 340.0f;
#endif

// The number of blocks that send unquantised rows is at most this number, or a multiple of it. Between 4 H200s, 9 to 15
// blocks take longer than 8: items are divided evenly, blocks send at unequal speeds depending on the place of their
// SM, and the slowest block determines the time.
constexpr u32 SENDERS = 8;

// The time of sending and copying in parallel, from the time of either alone, in any unit. The maximum is smoothed,
// because roles of equal duration wait for each other now and then; the second term is the copying after the last
// arrival. Fitted to times between 2 and 4 H200s, with 16 to 116 blocks of which 2 to 24 send: within 10 % of the best
// division.
__device__ inline float side_by_side(float send, float copy) {
    const float send_squared = send * send, copy_squared = copy * copy;
    return __fsqrt_rn(__fsqrt_rn(send_squared * send_squared + copy_squared * copy_squared)) + 0.4f * copy;
}

// The work of this rank, in rows.
struct Work {
    float remote;     // sent to other ranks
    float stored;     // by duplicate
    float loaded;     // by duplicate
    float sent;       // quantising variant: remote rows, and rows that the send role stores on this rank
    float quantized;  // in rows of output bytes: a token is read as bf16, which has twice the bytes

    __device__ explicit Work(const DispatchParams& p) {
        const Common& c = p.common;
        const u32* shape = p.handle.shape + 3 * (c.owner_begin[c.rank + 1] - c.owner_begin[c.rank]);
        const float rows = static_cast<float>(shape[SHAPE_ROWS]), own = static_cast<float>(shape[SHAPE_OWN]);
        remote = static_cast<float>(shape[SHAPE_REMOTE]);
        // An estimate: as many tokens come from other ranks as go to them, and each token has the same number of rows
        // here.
        sent = remote + own * rows / max(own + remote, 1.0f);
        stored = max(rows - (SEND_OWN ? sent : remote), 0.0f);
        loaded = min(stored, own + remote);
        quantized = 2.0f * static_cast<float>(p.handle.tokens);
    }

    // The time if `sending` blocks send and `copying` blocks copy. `busy`: the fraction of the senders' warps that have
    // an item, averaged over the rounds.
    __device__ float time(u32 sending, u32 copying, float busy) const {
        const float senders = static_cast<float>(sending) * max(busy, 0.001f), copiers = static_cast<float>(copying);
        const float wire = remote / WIRE;
        if (SEND_OWN)
            return max(max((sent / SENT_QUANTIZED + quantized / QUANTIZED) / senders, wire),
                       stored / COPIED_QUANTIZED / copiers);
        return side_by_side(max(remote / sent_by(sending) / senders, wire), (stored / STORED + loaded / LOADED) / copiers);
    }
};

// The number of sending blocks with the shortest estimated time, from 1 to all blocks but one; of equal ones the
// smallest. Called by all lanes of a warp.
__device__ inline u32 sending_blocks(const DispatchParams& p, u32 warps) {
    const Work work(p);
    const u32 items = div_up(p.handle.chunks, SPAN) * p.groups;
    u32 best = NONE, fastest = 1;
    for (u32 sending = 1 + lane_id(); sending < gridDim.x; sending += WARP) {
        if (!SEND_OWN && sending > SENDERS && sending % SENDERS != 0) continue;
        // A warp processes whole items.
        const u32 rounds = div_up(items, sending * warps);
        const float busy = static_cast<float>(items) / static_cast<float>(max(rounds, 1u) * sending * warps);
        // The bits of non-negative floats are ordered as the floats are.
        const u32 time = __float_as_uint(work.time(sending, gridDim.x - sending, busy));
        if (time < best) {
            best = time;
            fastest = sending;
        }
    }
    const u32 least = __reduce_min_sync(ALL_LANES, best);
    return __reduce_min_sync(ALL_LANES, best == least ? fastest : gridDim.x - 1);
}
