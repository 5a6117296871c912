// Role reduce, on the rank that owns the tokens: adds the partial sums of all ranks in rank order and writes the
// result. This rank's own partial sum is added from the experts' rows, without rounding in between.
#pragma once
#include "sum.cuh"

// Waits for the flags of all peers for the chunk. Returns false, after the fault was reported, if one does not come.
__device__ inline bool await_chunk(const Common& c, u32 chunk, u32 epoch) {
    bool fine = true;
    for (u32 peer = lane_id(); fine && peer < c.ranks; peer += WARP)
        if (peer != c.rank) fine = wait_for(c, &c.own->flags[peer][chunk], epoch, peer, FOR_CHUNK, chunk);
    fine = __all_sync(ALL_LANES, fine);
    // Makes what one lane has acquired visible to all lanes: a vote does not order memory.
    __syncwarp();
    return fine;
}

// Writes the chunk's rows of `out_probs`: the weights of the copies that were kept, zero elsewhere.
__device__ inline void gather_probs(const CombineParams& p, u32 chunk) {
    const Common& c = p.common;
    const HandleView& h = p.handle;
    const u64 experts = c.experts;
    const u64 first = chunk * h.chunk_tokens * experts, last = chunk_end_token(h, chunk) * experts;
    for (u64 cell = first + lane_id(); cell < last; cell += WARP) p.out_probs[cell] = 0.0f;
    __syncwarp();
    const u32 own_experts = c.owner_begin[c.rank + 1] - c.owner_begin[c.rank];
    for (u32 at = h.copy_begin[chunk] + lane_id(); at < h.copy_begin[chunk + 1]; at += WARP) {
        const Copy copy = h.copies[at];
        if (copy.is_dropped()) continue;
        const u64 own_cell = h.permuted ? copy.row() : static_cast<u64>(copy.row()) * own_experts + copy.local_expert();
        const u32* there = reinterpret_cast<const u32*>(p.prob_scratch + at);
        p.out_probs[copy.cell()] =
            copy.rank() == c.rank ? p.row_probs[own_cell] : __uint_as_float(ld_relaxed_sys(there));
    }
}

// The summand of entry number `send`: the partial sum of another rank, or a row of this rank.
__device__ inline Summand reduce_summand(const CombineParams& p, const Send& entry, u32 send) {
    if (entry.is_dead()) return no_summand();
    if (entry.rank() != p.common.rank)
        return summand(p.partials + send * slot_bytes(p), SUM_ALIVE | (WIRE_F32 ? SUM_F32 : 0));
    const bool begins = entry.is_own_first(), ends = entry.is_own_end();
    u32 flags = SUM_ALIVE | (ROWS_F32 ? SUM_F32 : 0);
    if (begins && !ends) flags |= SUM_APART;
    if (ends && !begins) flags |= SUM_TOGETHER;
    return summand(row_at(p, entry.row()), flags);
}

// The summands of one token, read entry by entry.
struct ReduceRows {
    const CombineParams& p;
    u32 first;

    __device__ Summand at(u32 index) const { return reduce_summand(p, p.handle.sends[first + index], first + index); }
};

// One worker in the reduce role. It claims a few consecutive tokens at a time.
struct Reducer {
    static constexpr u32 BYTES = element_bytes(ROWS_F32);
    // Maximum number of tokens of a claim: several, so that their lists are read together; few, so that workers finish
    // at about the same time.
    static constexpr u32 MOST_TOKENS = 4;
    const CombineParams& p;
    const u32 epoch;
    const u32 workers;
    u8* memory;
    // Claimed and not yet reduced: tokens [token, end).
    u32 token = 0;
    u32 end = 0;
    u32 begin = NONE;  // see `sums_of`

    __device__ Reducer(const CombineParams& p, const Worker& worker, u8* memory, u32 epoch)
        : p(p), epoch(epoch), workers(worker.workers), memory(memory) {}

    __device__ bool has_some() const { return token != end; }

    // The number of tokens that all workers have claimed. May exceed the number of tokens.
    __device__ u32 all_taken() const {
        return __shfl_sync(ALL_LANES, ld_relaxed_gpu(&p.common.own->tokens_taken), 0);
    }

    // Claims tokens; returns false if none are left. `taken`: a recent value of `all_taken`, which determines how many
    // tokens are claimed.
    __device__ bool take(u32 taken) {
        const u32 tokens = p.handle.tokens;
        if (taken >= tokens) return false;
        const u32 count = min(max((tokens - taken) / (4 * workers), 1u), MOST_TOKENS);
        u32 first = 0;
        if (lane_id() == 0) first = atom_add_relaxed_gpu(&p.common.own->tokens_taken, count);
        token = min(__shfl_sync(ALL_LANES, first, 0), tokens);
        end = min(token + count, tokens);
        return has_some();
    }

    // Whether the flags of all peers for the claimed tokens have been set.
    __device__ bool ready() const {
        const Common& c = p.common;
        bool there = true;
        for (u32 chunk = first_chunk(); chunk <= last_chunk(); chunk++)
            for (u32 peer = lane_id(); peer < c.ranks; peer += WARP)
                if (peer != c.rank) there = there && reached(ld_acquire_sys(&c.own->flags[peer][chunk]), epoch);
        there = __all_sync(ALL_LANES, there);
        // As in `await_chunk`: makes what one lane has acquired visible to all lanes.
        __syncwarp();
        return there;
    }

    // Waits until `ready`. Returns false, after the fault was reported, if a flag does not come.
    __device__ bool await() const {
        for (u32 chunk = first_chunk(); chunk <= last_chunk(); chunk++)
            if (!await_chunk(p.common, chunk, epoch)) return false;
        return true;
    }

    // Reduces the claimed tokens, which must be ready.
    __device__ void reduce() {
        const HandleView& h = p.handle;
        const u32 last = h.token_begin[end];
        for (u32 first = h.token_begin[token]; first < last; first += WARP) {
            Batch<Send> batch;
            batch.first = first;
            batch.count = min(WARP, last - first);
            if (lane_id() < batch.count) batch.entry = h.sends[first + lane_id()];
            reduce_batch(batch);
        }
        token = end;
    }

    __device__ u32 first_chunk() const { return token / p.handle.chunk_tokens; }
    __device__ u32 last_chunk() const { return (end - 1) / p.handle.chunk_tokens; }

    __device__ void reduce_batch(const Batch<Send>& batch) {
        // Loaded once, into registers.
        u8* const out = p.out_tokens;
        const u32 hidden = p.hidden;
        const auto write = [&](const Sum& sum, u32 vector, u32 of) {
            u8* to = out + (static_cast<u64>(of) * hidden + 8 * vector) * BYTES;
            sum.store<ROWS_F32>(to, hidden - 8 * vector);
        };
        const bool mine = lane_id() < batch.count;
        const u32 ends = __ballot_sync(ALL_LANES, mine && batch.entry.ends_token());
        // A token begins after the end of the previous token; the first one, unless it began in the previous batch.
        const u32 carried = begin == NONE ? 1 : 0;
        const u32 begins = (ends << 1 | carried) & (batch.count == WARP ? ALL_LANES : (1u << batch.count) - 1);
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

// Gathers the weights of all chunks, each after its flags. Chunks are assigned statically.
__device__ inline void gather_all_probs(const CombineParams& p, const Worker& worker, u32 epoch) {
    for (u32 chunk = worker.index; chunk < p.handle.chunks; chunk += worker.workers) {
        if (!await_chunk(p.common, chunk, epoch)) return;
        gather_probs(p, chunk);
    }
}
