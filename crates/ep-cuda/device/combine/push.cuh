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

// Runs of a partial sum on their way out: one is made while the other is still being read.
struct Outbox {
    u8* memory;
    u32 turn = 0;

    template <class Write>
    __device__ void send(u8* to, u32 bytes, const Write& write) {
        if (lane_id() == 0) copy_read<1>();
        __syncwarp();
        u8* run = memory + turn * (ASIDE_BYTES / 2);
        turn ^= 1;
        write(run);
        copy_fence();
        __syncwarp();
        store_stage(to, run, bytes);
        commit_stores();
    }
};

// A token's rows on this rank: entries of a list.
struct PushRows {
    const CombineParams& p;
    const uint2* entries;

    __device__ Summand at(u32 index) const {
        const u32 row = ld_relaxed_sys_v2(entries + index).x;
        return {reinterpret_cast<u64>(row_at(p, row)), SUM_ALIVE | (ROWS_F32 ? SUM_F32 : 0)};
    }
};

// Sends the sum of `count` rows.
template <class Tell>
__device__ inline void push_token(const CombineParams& p, u8* memory, const PushRows& rows, u32 count, u8* slot,
                                  Outbox& outbox, Completion<4>& completion, const Tell& tell) {
    constexpr u32 VECTOR_BYTES = 8 * element_bytes(WIRE_F32);
    const u32 vectors = div_up(p.hidden, 8);
    sum_rows(count, p.hidden, memory, rows, [&](const Sum& sum, u32 vector) {
        const u32 run = min(STRIDE, vectors - vector);
        // Slots are a whole number of vectors.
        outbox.send(slot + static_cast<u64>(vector) * VECTOR_BYTES, run * VECTOR_BYTES,
                    [&](u8* to) { sum.store<WIRE_F32>(to, 8 * run); });
        completion.committed(tell);
    });
}

__device__ inline void push(const CombineParams& p, const Worker& worker, u8* memory, const PeerView* peers,
                            u32 epoch) {
    const Common& c = p.common;
    if (c.ranks == 1) return;
    const PushItems items(c, peers, 1, 1);
    Feed<PushItems> feed(items, worker.index, worker.workers);
    Outbox outbox{memory + FETCH_BYTES};
    Completion<4> completion;
    const auto tell = [&](u32 flag, u32 source) {
        if (lane_id() == 0) st_release_sys(&peers[source].flags[flag], epoch);
    };
    Batch next = feed.fetch();
    u32 begin = 0;
    while (next.valid()) {
        const Batch batch = next;
        next = feed.fetch();
        const u32 source = items.source(batch.item);
        const PeerView& peer = peers[source];
        // A token's entries may begin in an earlier batch.
        const bool alive = lane_id() < batch.count && batch.entry.x != NONE;
        const u32 begins = __ballot_sync(0xFFFFFFFFu, alive && (batch.entry.y & RECV_FIRST) != 0);
        u32 ends = __ballot_sync(0xFFFFFFFFu, alive && (batch.entry.y & RECV_END) != 0);
        u32 done = 0;
        while (ends != 0) {
            const u32 end = __ffs(ends) - 1;
            ends &= ends - 1;
            const u32 upto = end == 31 ? 0xFFFFFFFFu : (1u << (end + 1)) - 1;
            const u32 here = begins & upto & ~done;
            if (here != 0) begin = batch.first + __ffs(here) - 1;
            done = upto;
            const u32 slot = __shfl_sync(0xFFFFFFFFu, batch.entry.y, end) >> 2;
            push_token(p, memory, PushRows{p, peer.recv + begin}, batch.first + end + 1 - begin,
                       peer.tokens + slot * slot_bytes(p), outbox, completion, tell);
        }
        // The one that goes on in the next batch.
        if ((begins & ~done) != 0) begin = batch.first + __ffs(begins & ~done) - 1;
        if (batch.last) {
            if (p.row_probs != nullptr) push_probs(p, peer, items.chunk(batch.item));
            completion.finish(items.chunk(batch.item), source, tell);
        }
    }
    completion.flush(tell);
    if (lane_id() == 0) copy_done<0>();
}
