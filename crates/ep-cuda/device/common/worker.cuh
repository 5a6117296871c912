// A worker: one warp that takes work items on its own, with shared memory of its own. Warps of a block never wait for
// each other.
#pragma once
#include COPY_VARIANT
#include "handle.cuh"
#include "sync.cuh"

struct Worker {
    u32 index;    // among all workers of its role, in all blocks
    u32 workers;
};

// From a stage that all lanes have written, or that came by a load.
__device__ inline void store_stage(void* global, const void* stage, u32 bytes) {
    if (!BULK_COPIES || lane_id() == 0) copy_store(global, stage, bytes);
}

__device__ inline void commit_stores() {
    if (lane_id() == 0) copy_commit();
}

// A rank of a circle: those past the last are the first again.
__device__ inline u32 in_circle(const Common& c, u32 rank) { return rank >= c.ranks ? rank - c.ranks : rank; }

// The most chunks that a peer has, and with `own` this rank.
__device__ inline u32 most_chunks(const Common& c, const PeerView* peers, bool own) {
    u32 most = 0;
    for (u32 peer = 0; peer < c.ranks; peer++)
        if (own || peer != c.rank) most = max(most, peers[peer].chunks);
    return most;
}

// Where the entries of an item lie in their list.
struct Range {
    u32 begin = 0;
    u32 end = 0;
};

// A run of list entries, one per lane.
struct Batch {
    uint2 entry{0, 0};
    u32 first = 0;  // index of its first entry in the list
    u32 count = 0;
};
