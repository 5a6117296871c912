// Rows between global and shared memory by the lanes themselves: the same interface as copy_bulk.cuh for GPUs without
// the bulk copy engine. Copies are over when the call returns, so nothing has to be waited for.
#pragma once
#include "ptx.cuh"

constexpr bool BULK_COPIES = false;

__device__ inline void copy_init(u64*) {}
__device__ inline void copy_init_done() {}
__device__ inline void copy_expect(u64*, u32) {}

// Called by all lanes of the warp, as are all that follow.
__device__ inline void copy_load(void* stage, const void* global, u32 bytes, u64*) {
    auto* to = static_cast<uint4*>(stage);
    auto* from = static_cast<const uint4*>(global);
    // Rows may come from a peer.
    for (u32 at = lane_id(); at < bytes / 16; at += WARP) to[at] = ld_relaxed_sys_v4(from + at);
}

__device__ inline void copy_arrived(u64*, u32) { __syncwarp(); }

__device__ inline void copy_store(void* global, const void* stage, u32 bytes) {
    auto* to = static_cast<uint4*>(global);
    auto* from = static_cast<const uint4*>(stage);
    for (u32 at = lane_id(); at < bytes / 16; at += WARP) to[at] = from[at];
}

__device__ inline void copy_commit() {}
template <u32 pending>
__device__ inline void copy_read() {}
template <u32 pending>
__device__ inline void copy_done() {}
__device__ inline void copy_fence_stage() {}
__device__ inline void copy_fence_global() {}
