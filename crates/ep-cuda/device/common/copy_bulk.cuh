// Rows between global and shared memory by the bulk copy engine (sm_90 and later).
//
// A load's arrival is seen by all lanes through its mbarrier, a store's progress by the lane that issued it, always the
// first, through its bulk groups.
#pragma once
#include "ptx.cuh"

constexpr bool BULK_COPIES = true;

__device__ inline void mbarrier_init(u64* barrier, u32 count) {
    asm volatile("mbarrier.init.shared::cta.b64 [%0], %1;" ::"r"(shared_address(barrier)), "r"(count) : "memory");
}

__device__ inline void fence_mbarrier_init() { asm volatile("fence.mbarrier_init.release.cluster;" ::: "memory"); }

__device__ inline void mbarrier_arrive_expect_tx(u64* barrier, u32 bytes) {
    asm volatile("mbarrier.arrive.expect_tx.shared::cta.b64 _, [%0], %1;" ::"r"(shared_address(barrier)), "r"(bytes)
                 : "memory");
}

__device__ inline bool mbarrier_try_wait_parity(u64* barrier, u32 parity) {
    u32 done;
    asm volatile(
        "{\n"
        ".reg .pred p;\n"
        "mbarrier.try_wait.parity.shared::cta.b64 p, [%1], %2;\n"
        "selp.u32 %0, 1, 0, p;\n"
        "}"
        : "=r"(done)
        : "r"(shared_address(barrier)), "r"(parity)
        : "memory");
    return done != 0;
}

// Both addresses and the number of bytes are multiples of 16.
__device__ inline void cp_async_bulk_g2s(void* shared, const void* global, u32 bytes, u64* barrier) {
    asm volatile("cp.async.bulk.shared::cluster.global.mbarrier::complete_tx::bytes [%0], [%1], %2, [%3];" ::"r"(
                     shared_address(shared)),
                 "l"(global), "r"(bytes), "r"(shared_address(barrier))
                 : "memory");
}

__device__ inline void cp_async_bulk_s2g(void* global, const void* shared, u32 bytes) {
    asm volatile("cp.async.bulk.global.shared::cta.bulk_group [%0], [%1], %2;" ::"l"(global),
                 "r"(shared_address(shared)), "r"(bytes)
                 : "memory");
}

__device__ inline void cp_async_bulk_commit_group() { asm volatile("cp.async.bulk.commit_group;" ::: "memory"); }

// Until at most `pending` of the youngest groups have not yet read their source.
template <u32 pending>
__device__ inline void cp_async_bulk_wait_group_read() {
    asm volatile("cp.async.bulk.wait_group.read %0;" ::"n"(pending) : "memory");
}

// Until at most `pending` of the youngest groups have not yet arrived where they go.
template <u32 pending>
__device__ inline void cp_async_bulk_wait_group() {
    asm volatile("cp.async.bulk.wait_group %0;" ::"n"(pending) : "memory");
}

// Orders what this thread has read or written itself before what the copy engine reads or writes next.
__device__ inline void fence_proxy_async() { asm volatile("fence.proxy.async;" ::: "memory"); }

// ---- the interface that copy_plain.cuh has too

__device__ inline void copy_init(u64* barrier) { mbarrier_init(barrier, 1); }
__device__ inline void copy_init_done() { fence_mbarrier_init(); fence_proxy_async(); }

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
// Before the engine touches what threads of this GPU, or flags of another, have made ready.
__device__ inline void copy_fence() { fence_proxy_async(); }
