// Role: on the rank whose tokens they are. Adds the partial sums of all ranks in order, its own from the experts' rows
// without rounding in between, and writes the result.
#pragma once
#include "sum.cuh"

// Until all peers have sent what they owe to the chunk; false when one does not.
__device__ inline bool await_chunk(const Common& c, u32 chunk, u32 epoch) {
    bool fine = true;
    for (u32 peer = lane_id(); fine && peer < c.ranks; peer += WARP)
        if (peer != c.rank) fine = wait_for(c, &c.own->flags[peer][chunk], epoch, peer, FOR_CHUNK, chunk);
    fine = __all_sync(0xFFFFFFFFu, fine);
    // What a lane has seen arrive is for all lanes to read; a vote orders nothing.
    __syncwarp();
    return fine;
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

// What a token's sum is made of: a partial sum of another rank, or a row of this one.
__device__ inline Summand reduce_summand(const CombineParams& p, const uint2& entry, u32 send) {
    if ((entry.x & SEND_DEAD) != 0) return no_summand();
    if ((entry.x & SEND_RANK) != p.common.rank)
        return summand(p.partials + send * slot_bytes(p), SUM_ALIVE | (WIRE_F32 ? SUM_F32 : 0));
    const bool begins = (entry.x & SEND_OWN_FIRST) != 0, ends = (entry.x & SEND_OWN_END) != 0;
    u32 flags = SUM_ALIVE | (ROWS_F32 ? SUM_F32 : 0);
    if (begins && !ends) flags |= SUM_APART;
    if (ends && !begins) flags |= SUM_TOGETHER;
    return summand(row_at(p, entry.y), flags);
}

// The same, read entry by entry.
struct ReduceRows {
    const CombineParams& p;
    u32 first;

    __device__ Summand at(u32 index) const { return reduce_summand(p, p.handle.sends[first + index], first + index); }
};

// One worker's part of the role: some tokens at a time, in order.
struct Reducer {
    static constexpr u32 BYTES = element_bytes(ROWS_F32);
    // Tokens that are taken at a time: some, so that their lists are read together; few, so that all end together.
    static constexpr u32 MOST_TOKENS = 4;
    const CombineParams& p;
    const u32 epoch;
    const u32 workers;
    u8* memory;
    // Taken, and not yet reduced: [token, end).
    u32 token = 0;
    u32 end = 0;
    u32 begin = NONE;

    __device__ Reducer(const CombineParams& p, const Worker& worker, u8* memory, u32 epoch)
        : p(p), epoch(epoch), workers(worker.workers), memory(memory) {}

    __device__ bool has_some() const { return token != end; }

    // How many tokens have been taken by all workers, or would have been if there were more.
    __device__ u32 all_taken() const {
        return __shfl_sync(0xFFFFFFFFu, ld_relaxed_gpu(&p.common.own->tokens_taken), 0);
    }

    // Takes some of those that are left, when `taken` were gone a moment ago; false when there are none.
    __device__ bool take(u32 taken) {
        const u32 tokens = p.handle.tokens;
        if (taken >= tokens) return false;
        const u32 count = min(max((tokens - taken) / (4 * workers), 1u), MOST_TOKENS);
        u32 first = 0;
        if (lane_id() == 0) first = atom_add_relaxed_gpu(&p.common.own->tokens_taken, count);
        token = min(__shfl_sync(0xFFFFFFFFu, first, 0), tokens);
        end = min(token + count, tokens);
        return has_some();
    }

    // Whether all peers have sent what they owe to the tokens taken.
    __device__ bool ready() const {
        const Common& c = p.common;
        bool there = true;
        for (u32 chunk = first_chunk(); chunk <= last_chunk(); chunk++)
            for (u32 peer = lane_id(); peer < c.ranks; peer += WARP)
                if (peer != c.rank) there = there && reached(ld_acquire_sys(&c.own->flags[peer][chunk]), epoch);
        there = __all_sync(0xFFFFFFFFu, there);
        // As in `await_chunk`.
        __syncwarp();
        return there;
    }

    // Waits until they have; false when one does not.
    __device__ bool await() const {
        for (u32 chunk = first_chunk(); chunk <= last_chunk(); chunk++)
            if (!await_chunk(p.common, chunk, epoch)) return false;
        return true;
    }

    // Reduces the tokens taken, which are ready.
    __device__ void reduce() {
        const HandleView& h = p.handle;
        const u32 last = h.token_begin[end];
        for (u32 first = h.token_begin[token]; first < last; first += WARP) {
            Batch batch;
            batch.first = first;
            batch.count = min(WARP, last - first);
            if (lane_id() < batch.count) batch.entry = h.sends[first + lane_id()];
            reduce_batch(batch);
        }
        token = end;
    }

    __device__ u32 first_chunk() const { return token / p.handle.chunk_tokens; }
    __device__ u32 last_chunk() const { return (end - 1) / p.handle.chunk_tokens; }

    __device__ void reduce_batch(const Batch& batch) {
        // What every run needs, in registers.
        u8* const out = p.out_tokens;
        const u32 hidden = p.hidden;
        const auto write = [&](const Sum& sum, u32 vector, u32 of) {
            u8* to = out + (static_cast<u64>(of) * hidden + 8 * vector) * BYTES;
            sum.store<ROWS_F32>(to, hidden - 8 * vector);
        };
        const bool mine = lane_id() < batch.count;
        const u32 ends = __ballot_sync(0xFFFFFFFFu, mine && (batch.entry.x & SEND_TOKEN_END) != 0);
        // A token begins where the one before it ends.
        const u32 carried = begin == NONE ? 1 : 0;
        const u32 begins = (ends << 1 | carried) & (batch.count == WARP ? 0xFFFFFFFFu : (1u << batch.count) - 1);
        const BatchSums sums = sums_of(batch, begins, ends, begin);
        if (sums.long_ends) {
            make_long_sum(sums.long_count, ReduceRows{p, sums.long_begin}, hidden, memory,
                          [&](const Sum& sum, u32 vector) { write(sum, vector, token); });
            token++;
        }
        const u32 count = __popc(sums.whole.ends);
        make_sums(sums.whole, mine ? reduce_summand(p, batch.entry, batch.first + lane_id()) : no_summand(), hidden,
                  memory, [&](const Sum& sum, u32 vector, const Sums& rest) {
                      write(sum, vector, token + count - __popc(rest.ends));
                  });
        token += count;
    }
};

// The weights of all chunks, each when it is complete.
__device__ inline void gather_all_probs(const CombineParams& p, const Worker& worker, u32 epoch) {
    for (u32 chunk = worker.index; chunk < p.handle.chunks; chunk += worker.workers) {
        if (!await_chunk(p.common, chunk, epoch)) return;
        gather_probs(p, chunk);
    }
}
