// Copies of rows between global and shared memory, made by the bulk copy engine (sm_90 and later).
//
// All lanes see the completion of a load through its mbarrier. Only lane 0, which issues the stores, sees their
// progress, through its bulk groups.
#pragma once
#include "ptx.cuh"

constexpr bool BULK_COPIES = true;

// copy_plain.cuh has the same interface. Unless said otherwise, all lanes call a function.

// Called by one thread for each barrier. After that, all lanes call `copy_init_done`.
__device__ inline void copy_init(SharedAddress barrier) { mbarrier_init(barrier, 1); }
__device__ inline void copy_init_done() { fence_mbarrier_init(); fence_proxy_async_shared(); }

// Loads a stage. The barrier's phase ends when the bytes have arrived; what lane 0 has written before is then visible,
// too.
__device__ inline void copy_load(SharedAddress stage, const void* global, u32 bytes, SharedAddress barrier) {
    if (lane_id() != 0) return;
    mbarrier_arrive_expect_tx(barrier, bytes);
    cp_async_bulk_g2s(stage, global, bytes, barrier);
}

// Ends the barrier's phase without a load.
__device__ inline void copy_nothing(SharedAddress barrier) {
    if (lane_id() == 0) mbarrier_arrive(barrier);
}

// Waits for the end of the barrier's phase. Also used for phases that `mbarrier_arrive` alone ends.
__device__ inline void await_barrier(SharedAddress barrier, u32 parity) {
    while (!mbarrier_try_wait_parity(barrier, parity)) {
    }
}

// The stores and the functions that wait for them are called by lane 0: bulk groups belong to a thread.
__device__ inline void copy_store(void* global, SharedAddress stage, u32 bytes) {
    cp_async_bulk_s2g(global, stage, bytes);
}

__device__ inline void copy_commit() { cp_async_bulk_commit_group(); }
template <u32 pending>
__device__ inline void copy_read() { cp_async_bulk_wait_group_read<pending>(); }
template <u32 pending>
__device__ inline void copy_done() { cp_async_bulk_wait_group<pending>(); }
// Called before the bulk copy engine reads or writes a stage that threads have written.
__device__ inline void copy_fence_stage() { fence_proxy_async_shared(); }
// Called before the bulk copy engine accesses global memory, after this thread has read the flag or handshake that
// makes the memory accessible.
__device__ inline void copy_fence_global() { fence_proxy_async_global(); }
