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

// Tokens that a worker takes at a time: some, so that their lists are read together; few, so that all workers have some.
struct ReduceItems {
    const HandleView& h;
    u32 tokens;
    u32 count;
    u32 groups = 1;
    u32 pieces = 1;

    __device__ ReduceItems(const HandleView& h, u32 workers)
        : h(h), tokens(min(max(h.tokens / (4 * workers), 1u), 4u)), count(div_up(h.tokens, tokens)) {}
    __device__ bool skip(u32) const { return false; }
    __device__ u32 first_piece(u32) const { return 0; }
    __device__ u32 first(u32 item) const { return item * tokens; }
    __device__ u32 end(u32 item) const { return min(h.tokens, first(item) + tokens); }
    __device__ Range range(u32 item) const { return {h.token_begin[first(item)], h.token_begin[end(item)]}; }
    __device__ const uint2* list(u32) const { return h.sends; }
};

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

// One worker's part of the role, item by item.
struct Reducer {
    static constexpr u32 BYTES = element_bytes(ROWS_F32);
    const CombineParams& p;
    const u32 epoch;
    u8* memory;
    Feed<ReduceItems> feed;
    Batch next;
    u32 begin = NONE;
    u32 token = 0;

    __device__ Reducer(const CombineParams& p, const Worker& worker, u8* memory, u32 epoch)
        : p(p),
          epoch(epoch),
          memory(memory),
          feed(ReduceItems(p.handle, worker.workers), worker.index, worker.workers),
          next(feed.fetch()) {}

    __device__ bool over() const { return !next.valid(); }

    // The next item, all of it; false when a peer does not send what it owes.
    __device__ bool item() {
        token = feed.items.first(next.item);
        const u32 last_chunk = (feed.items.end(next.item) - 1) / p.handle.chunk_tokens;
        for (u32 chunk = token / p.handle.chunk_tokens; chunk <= last_chunk; chunk++)
            if (!await_chunk(p.common, chunk, epoch)) return false;
        bool last = false;
        while (!last) {
            const Batch batch = next;
            next = feed.fetch();
            reduce_batch(batch);
            last = batch.last;
        }
        return true;
    }

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
