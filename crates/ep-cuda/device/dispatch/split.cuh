// Divides the blocks between the send role and the duplicate role, by an estimate of the time that either takes. The
// amounts of work come from the handle's shape, which preprocess has counted; the host passes the rates of this GPU.
#pragma once
#include "send.cuh"

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
    const Rates& rates;

    __device__ explicit Work(const DispatchParams& p) : rates(p.rates) {
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

    // The time of `rows` rows at `rate` in each of `blocks` blocks.
    __device__ static float at(float rows, u32 rate, float blocks = 1.0f) {
        return rows / (static_cast<float>(rate) * blocks);
    }

    // The rate of each of `blocks` blocks that send unquantised rows.
    __device__ u32 sent_by(u32 blocks) const {
        const u32 lost = min(blocks * rates.sent_loss, rates.sent);
        return max(rates.sent - lost, rates.sent_least);
    }

    // The time if `sending` blocks send and `copying` blocks copy. `busy`: the fraction of the senders' warps that have
    // an item, averaged over the rounds.
    __device__ float time(u32 sending, u32 copying, float busy) const {
        const float senders = static_cast<float>(sending) * max(busy, 0.001f), copiers = static_cast<float>(copying);
        const float wire = at(remote, rates.wire);
        if (SEND_OWN) {
            const float send = at(sent, rates.sent_quantized, senders) + at(quantized, rates.quantized, senders);
            return max(max(send, wire), at(stored, rates.copied_quantized, copiers));
        }
        const float copy = at(stored, rates.stored, copiers) + at(loaded, rates.loaded, copiers);
        return side_by_side(max(at(remote, sent_by(sending), senders), wire), copy);
    }
};

// The number of sending blocks with the shortest estimated time, from 1 to all blocks but one; of equal ones the
// smallest. Called by all lanes of a warp.
__device__ inline u32 sending_blocks(const DispatchParams& p, u32 warps) {
    const Work work(p);
    const u32 items = div_up(p.handle.chunks, SPAN) * p.groups;
    u32 best = NONE, fastest = 1;
    for (u32 sending = 1 + lane_id(); sending < gridDim.x; sending += WARP) {
        if (!SEND_OWN && sending > p.rates.senders && sending % p.rates.senders != 0) continue;
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
