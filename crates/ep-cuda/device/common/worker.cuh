// A worker: one warp (dispatch) or a team of warps (combine) that processes work items on its own, with its own part of the block's
// shared memory. Between the handshake and `leave`, a worker does not wait for another worker of its block. With rails there is
// one exception: after a gone word, a thread waits until another one has unlocked `rail_looking` (`is_there_now` in rails.cuh).
#pragma once
#include COPY_VARIANT
#include "handle.cuh"
#include "sync.cuh"

struct Worker {
    u32 index;    // among the workers of its role in all blocks; NONE: the worker gets no items
    u32 workers;  // of that role
};

// Stores a stage that all lanes have written, or that a load has filled, to global memory. Called by all lanes.
__device__ inline void store_stage(void* global, SharedAddress stage, u32 bytes) {
    if (!BULK_COPIES || lane_id() == 0) copy_store(global, stage, bytes);
}

__device__ inline void commit_stores() {
    if (lane_id() == 0) copy_commit();
}

// Waits until all groups of stores but the `pending` most recent ones have read their stages. Called by all lanes. Only lane 0
// waits: groups belong to the lane that has issued the stores.
template <u32 pending>
__device__ inline void await_stores_read() {
    if (lane_id() == 0) copy_read<pending>();
}

// Like `await_stores_read`, but waits until the groups have arrived in memory.
template <u32 pending>
__device__ inline void await_stores() {
    if (lane_id() == 0) copy_done<pending>();
}

// `rank` modulo the number of ranks, for rank < 2 * ranks.
__device__ inline u32 in_circle(const Common& c, u32 rank) { return rank >= c.ranks ? rank - c.ranks : rank; }

// Claims `count` numbers from a counter that all workers of a role share, and returns the first one. Called by all lanes.
__device__ inline u32 claim(u32* counter, u32 count = 1) {
    u32 first = 0;
    if (lane_id() == 0) first = atom_add_relaxed_gpu(counter, count);
    return __shfl_sync(ALL_LANES, first, 0);
}

// The entries [begin, end) of a list.
struct Range {
    u32 begin = 0;
    u32 end = 0;
};

// Up to 32 consecutive entries of a list, one per lane.
template <class Entry>
struct Batch {
    Entry entry{};
    u32 first = 0;  // index in the list of the first entry
    u32 count = 0;
};

// Reads an entry of a list that may lie on a peer.
template <class Entry>
__device__ inline Entry load_entry(const Entry* entry) {
    return {ld_relaxed_sys_v2(&entry->words)};
}
