// Role: on the rank whose tokens they are. Adds the partial sums of all ranks in order, its own from the experts' rows
// without rounding in between, and writes the result.
#pragma once
#include "sum.cuh"

// Until all peers have sent what they owe to the chunk; false when one does not.
__device__ inline bool await_chunk(const Common& c, u32 chunk, u32 epoch) {
    bool fine = true;
    for (u32 peer = lane_id(); fine && peer < c.ranks; peer += WARP)
        if (peer != c.rank) fine = wait_for(c, &c.own->flags[peer][chunk], epoch, peer, FOR_CHUNK, chunk);
    return __all_sync(0xFFFFFFFFu, fine);
}

// The chunk's row of a dense matrix: zero but for the copies that were kept.
__device__ inline void gather_probs(const CombineParams& p, u32 chunk) {
    const Common& c = p.common;
    const HandleView& h = p.handle;
    const u64 experts = c.experts;
    const u64 first = chunk * h.chunk_tokens * experts, last = chunk_end_token(h, chunk) * experts;
    for (u64 cell = first + lane_id(); cell < last; cell += WARP) p.out_probs[cell] = 0.0f;
    __syncwarp();
    const u32 own_experts = c.owner_begin[c.rank + 1] - c.owner_begin[c.rank];
    for (u32 at = h.copy_begin[chunk] + lane_id(); at < h.copy_begin[chunk + 1]; at += WARP) {
        const uint4 copy = h.copies[at];
        if (copy.z == NONE) continue;
        const u64 own_cell = h.permuted ? copy.z : static_cast<u64>(copy.z) * own_experts + (copy.y & 0xFFFF);
        const u32* there = reinterpret_cast<const u32*>(p.prob_scratch + at);
        p.out_probs[copy.x] = copy.y >> 16 == c.rank ? p.row_probs[own_cell] : __uint_as_float(ld_relaxed_sys(there));
    }
}

// What a token's sum is made of, in order: partial sums of other ranks, and rows of this one.
struct ReduceRows {
    const CombineParams& p;
    u32 first;  // entry of the list of sends

    __device__ Summand at(u32 index) const {
        const uint2 entry = p.handle.sends[first + index];
        if ((entry.x & SEND_DEAD) != 0) return {0, 0};
        if ((entry.x & SEND_RANK) != p.common.rank)
            return {reinterpret_cast<u64>(p.partials + (first + index) * slot_bytes(p)),
                    SUM_ALIVE | (WIRE_F32 ? SUM_F32 : 0)};
        const bool begins = (entry.x & SEND_OWN_FIRST) != 0, ends = (entry.x & SEND_OWN_END) != 0;
        u32 flags = SUM_ALIVE | (ROWS_F32 ? SUM_F32 : 0);
        if (begins && !ends) flags |= SUM_APART;
        if (ends && !begins) flags |= SUM_TOGETHER;
        return {reinterpret_cast<u64>(row_at(p, entry.y)), flags};
    }
};

__device__ inline void reduce_token(const CombineParams& p, u8* memory, u32 token) {
    const u32 first = p.handle.token_begin[token], count = p.handle.token_begin[token + 1] - first;
    constexpr u32 BYTES = element_bytes(ROWS_F32);
    u8* out = p.out_tokens + static_cast<u64>(token) * p.hidden * BYTES;
    sum_rows(count, p.hidden, memory, ReduceRows{p, first}, [&](const Sum& sum, u32 vector) {
        sum.store<ROWS_F32>(out + static_cast<u64>(vector) * (8 * BYTES), p.hidden - 8 * vector);
    });
}

__device__ inline void reduce(const CombineParams& p, const Worker& worker, u8* memory, u32 epoch) {
    const HandleView& h = p.handle;
    for (u32 token = worker.index; token < h.tokens; token += worker.workers) {
        if (!await_chunk(p.common, token / h.chunk_tokens, epoch)) return;
        reduce_token(p, memory, token);
    }
    if (p.out_probs == nullptr) return;
    for (u32 chunk = worker.index; chunk < h.chunks; chunk += worker.workers) {
        if (!await_chunk(p.common, chunk, epoch)) return;
        gather_probs(p, chunk);
    }
}
