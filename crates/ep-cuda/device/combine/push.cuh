// Role: on the rank that holds the experts. Adds the rows of each token of a peer, and sends the partial sum to it.
#pragma once
#include "arrivals.cuh"
#include "sum.cuh"

using PushItems = ArrivalItems<false>;

// The weights of a chunk's copies on this rank, back to their token's rank.
__device__ inline void push_probs(const CombineParams& p, const PeerView& peer, u32 chunk) {
    const u32 begin = ld_relaxed_sys(peer.dst_begin + chunk), end = ld_relaxed_sys(peer.dst_begin + chunk + 1);
    for (u32 at = begin + lane_id(); at < end; at += WARP) {
        const uint2 copy = ld_relaxed_sys_v2(peer.dst_copies + at);
        if (copy.x != NONE) peer.probs[copy.y] = p.row_probs[copy.x];
    }
}

// Runs of a partial sum on their way out: one is made while others are still being read.
struct Outbox {
    u8* memory;
    u32 turn = 0;

    template <class Write>
    __device__ void send(u8* to, u32 bytes, const Write& write) {
        if (lane_id() == 0) copy_read<RUNS - 1>();
        __syncwarp();
        u8* run = memory + turn * RUN_BYTES;
        turn = turn + 1 == RUNS ? 0 : turn + 1;
        write(run);
        copy_fence_stage();
        __syncwarp();
        store_stage(to, run, bytes);
        commit_stores();
    }
};

__device__ inline Summand push_summand(const CombineParams& p, u32 row) {
    return row == NONE ? no_summand() : summand(row_at(p, row), SUM_ALIVE | (ROWS_F32 ? SUM_F32 : 0));
}

// A token's rows on this rank, read entry by entry.
struct PushRows {
    const CombineParams& p;
    const uint2* entries;

    __device__ Summand at(u32 index) const { return push_summand(p, ld_relaxed_sys_v2(entries + index).x); }
};

// One worker's part of the role, item by item.
struct Pusher {
    static constexpr u32 VECTOR_BYTES = 8 * element_bytes(WIRE_F32);
    const CombineParams& p;
    const PeerView* peers;
    const u32 epoch;
    u8* memory;
    Feed<PushItems> feed;
    Outbox outbox;
    Completion<RUNS> completion;
    Batch next;
    u32 begin = NONE;

    __device__ Pusher(const CombineParams& p, const Worker& worker, u8* memory, const PeerView* peers, u32 epoch)
        : p(p),
          peers(peers),
          epoch(epoch),
          memory(memory),
          feed(PushItems(p.common, peers, worker, 1, 1, 1), worker.index, worker.workers),
          outbox{memory + FETCH_BYTES},
          next(feed.fetch()) {}

    __device__ bool over() const { return !next.valid(); }

    __device__ void tell(u32 flag, u32 source) const {
        if (lane_id() == 0) st_release_sys(&peers[source].flags[flag], epoch);
    }

    // The next item, all of it.
    __device__ void item() {
        bool last = false;
        while (!last) {
            const Batch batch = next;
            next = feed.fetch();
            push_batch(batch);
            last = batch.last;
        }
    }

    __device__ void push_batch(const Batch& batch) {
        const auto announce = [&](u32 flag, u32 source) { tell(flag, source); };
        // What every run needs, in registers.
        const u32 source = feed.items.source(batch.item), hidden = p.hidden, vectors = div_up(hidden, 8);
        const PeerView& peer = peers[source];
        u8* const partials = peer.tokens;
        const u64 slot_bytes = ::slot_bytes(p);
        const auto send = [&](const Sum& sum, u32 vector, u32 end_lane) {
            const u32 slot = __shfl_sync(0xFFFFFFFFu, batch.entry.y, end_lane) >> 2;
            const u32 run = min(STRIDE, vectors - vector);
            // Slots are a whole number of vectors.
            outbox.send(partials + slot * slot_bytes + static_cast<u64>(vector) * VECTOR_BYTES, run * VECTOR_BYTES,
                        [&](u8* to) { sum.store<WIRE_F32>(to, 8 * run); });
            completion.committed(announce);
        };
        const bool alive = lane_id() < batch.count && batch.entry.x != NONE;
        const u32 begins = __ballot_sync(0xFFFFFFFFu, alive && (batch.entry.y & RECV_FIRST) != 0);
        const u32 ends = __ballot_sync(0xFFFFFFFFu, alive && (batch.entry.y & RECV_END) != 0);
        const BatchSums sums = sums_of(batch, begins, ends, begin);
        if (sums.long_ends)
            make_long_sum(sums.long_count, PushRows{p, peer.recv + sums.long_begin}, hidden, memory,
                          [&](const Sum& sum, u32 vector) { send(sum, vector, sums.long_end); });
        make_sums(sums.whole, push_summand(p, alive ? batch.entry.x : NONE), hidden, memory,
                  [&](const Sum& sum, u32 vector, const Sums& rest) { send(sum, vector, rest.last()); });
        if (batch.last) {
            if (p.row_probs != nullptr) push_probs(p, peer, feed.items.chunk(batch.item));
            completion.finish(feed.items.chunk(batch.item), source, announce);
        }
    }

    __device__ void finish() {
        completion.flush([&](u32 flag, u32 source) { tell(flag, source); });
        if (lane_id() == 0) copy_done<0>();
        __syncwarp();
    }
};
