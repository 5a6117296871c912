// Copies of rows between global and shared memory, made by the bulk copy engine (sm_90 and later).
//
// All lanes see the completion of a load through its mbarrier. Only lane 0, which issues the stores, sees their
// progress, through its bulk groups.
#pragma once
#include "ptx.cuh"

constexpr bool BULK_COPIES = true;

// copy_plain.cuh has the same interface.

__device__ inline void copy_init(u64* barrier) { mbarrier_init(barrier, 1); }
__device__ inline void copy_init_done() { fence_mbarrier_init(); fence_proxy_async_shared(); }

// Announces `bytes` bytes of loads that name the barrier. Called by one thread.
__device__ inline void copy_expect(u64* barrier, u32 bytes) { mbarrier_arrive_expect_tx(barrier, bytes); }

// Called by any one thread.
__device__ inline void copy_load(void* stage, const void* global, u32 bytes, u64* barrier) {
    cp_async_bulk_g2s(stage, global, bytes, barrier);
}

// Waits for the loads of the barrier's phase. Called by all lanes.
__device__ inline void copy_arrived(u64* barrier, u32 parity) {
    while (!mbarrier_try_wait_parity(barrier, parity)) {
    }
}

// The stores and the functions that wait for them are called by lane 0: bulk groups belong to a thread.
__device__ inline void copy_store(void* global, const void* stage, u32 bytes) {
    cp_async_bulk_s2g(global, stage, bytes);
}

__device__ inline void copy_commit() { cp_async_bulk_commit_group(); }
template <u32 pending>
__device__ inline void copy_read() { cp_async_bulk_wait_group_read<pending>(); }
template <u32 pending>
__device__ inline void copy_done() { cp_async_bulk_wait_group<pending>(); }
// Before the engine reads a stage that threads have written, or writes to a stage that threads have read.
__device__ inline void copy_fence_stage() { fence_proxy_async_shared(); }
// Before the engine accesses global memory after this thread has read the flag or handshake that makes it accessible.
__device__ inline void copy_fence_global() { fence_proxy_async_global(); }
