// Rows between global and shared memory by the bulk copy engine (sm_90 and later).
//
// A load's arrival is seen by all lanes through its mbarrier, a store's progress by the lane that issued it, always the
// first, through its bulk groups.
#pragma once
#include "ptx.cuh"

constexpr bool BULK_COPIES = true;

// The same interface as that of copy_plain.cuh.

__device__ inline void copy_init(u64* barrier) { mbarrier_init(barrier, 1); }
__device__ inline void copy_init_done() { fence_mbarrier_init(); fence_proxy_async_shared(); }

// One thread: this many bytes will come by loads that name the barrier.
__device__ inline void copy_expect(u64* barrier, u32 bytes) { mbarrier_arrive_expect_tx(barrier, bytes); }

// One thread, any.
__device__ inline void copy_load(void* stage, const void* global, u32 bytes, u64* barrier) {
    cp_async_bulk_g2s(stage, global, bytes, barrier);
}

// Called by all lanes.
__device__ inline void copy_arrived(u64* barrier, u32 parity) {
    while (!mbarrier_try_wait_parity(barrier, parity)) {
    }
}

// The first lane; it alone has groups.
__device__ inline void copy_store(void* global, const void* stage, u32 bytes) {
    cp_async_bulk_s2g(global, stage, bytes);
}

__device__ inline void copy_commit() { cp_async_bulk_commit_group(); }
template <u32 pending>
__device__ inline void copy_read() { cp_async_bulk_wait_group_read<pending>(); }
template <u32 pending>
__device__ inline void copy_done() { cp_async_bulk_wait_group<pending>(); }
// Before the engine reads a stage that threads have written, or writes to one that they have read.
__device__ inline void copy_fence_stage() { fence_proxy_async_shared(); }
// Before the engine touches global memory that another GPU has said is ready.
__device__ inline void copy_fence_global() { fence_proxy_async_global(); }
