// Copies of rows between global and shared memory, made by the lanes: the interface of copy_bulk.cuh for GPUs without
// the bulk copy engine. Loads are asynchronous. A lane has read its part of a stage when its call of `copy_store` returns, so the
// waits for stores and the fences are empty.
#pragma once
#include "ptx.cuh"

constexpr bool BULK_COPIES = false;

// A phase has 33 arrivals: one of each lane for its copies, and one of lane 0 for what it has written before.
__device__ inline void copy_init(SharedAddress barrier) { mbarrier_init(barrier, WARP + 1); }
__device__ inline void copy_init_done() {}

__device__ inline void copy_load(SharedAddress stage, const void* global, u32 bytes, SharedAddress barrier) {
    auto* from = static_cast<const uint4*>(global);
    for (u32 at = lane_id(); at < bytes / 16; at += WARP) cp_async_16(stage + 16 * at, from + at);
    cp_async_mbarrier_arrive(barrier);
    if (lane_id() == 0) mbarrier_arrive(barrier);
}

__device__ inline void copy_nothing(SharedAddress barrier) {
    mbarrier_arrive(barrier);
    if (lane_id() == 0) mbarrier_arrive(barrier);
}

// Also used for phases that `mbarrier_arrive` alone ends.
__device__ inline void await_barrier(SharedAddress barrier, u32 parity) {
    while (!mbarrier_test_wait_parity(barrier, parity)) {
    }
}

// Called by all lanes.
__device__ inline void copy_store(void* global, SharedAddress stage, u32 bytes) {
    auto* to = static_cast<uint4*>(global);
    for (u32 at = lane_id(); at < bytes / 16; at += WARP) to[at] = ld_shared_v4(stage + 16 * at);
}

// Called by lane 0, like the next two functions.
__device__ inline void copy_commit() {}
template <u32 pending>
__device__ inline void copy_read() {}
template <u32 pending>
__device__ inline void copy_done() {}
// Called by all lanes.
__device__ inline void copy_fence_stage() {}
__device__ inline void copy_fence_global() {}
