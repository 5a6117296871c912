// Copies of rows between global and shared memory, made by the lanes: the interface of copy_bulk.cuh for GPUs without
// the bulk copy engine. A copy is complete when the call returns, so the waits and fences are empty.
#pragma once
#include "ptx.cuh"

constexpr bool BULK_COPIES = false;

// Called by one thread for each barrier, and then by all lanes.
__device__ inline void copy_init(u64*) {}
__device__ inline void copy_init_done() {}
__device__ inline void copy_expect(u64*, u32) {}

// Called by all lanes, as are copy_arrived and copy_store.
__device__ inline void copy_load(void* stage, const void* global, u32 bytes, u64*) {
    auto* to = static_cast<uint4*>(stage);
    auto* from = static_cast<const uint4*>(global);
    // Past the first-level cache: the row is read once.
    for (u32 at = lane_id(); at < bytes / 16; at += WARP) to[at] = ld_relaxed_sys_v4(from + at);
}

__device__ inline void copy_arrived(u64*, u32) { __syncwarp(); }

__device__ inline void copy_store(void* global, const void* stage, u32 bytes) {
    auto* to = static_cast<uint4*>(global);
    auto* from = static_cast<const uint4*>(stage);
    for (u32 at = lane_id(); at < bytes / 16; at += WARP) to[at] = from[at];
}

// Called by lane 0, as the two functions after it are.
__device__ inline void copy_commit() {}
template <u32 pending>
__device__ inline void copy_read() {}
template <u32 pending>
__device__ inline void copy_done() {}
// Called by all lanes.
__device__ inline void copy_fence_stage() {}
__device__ inline void copy_fence_global() {}
