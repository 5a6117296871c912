// Wrappers of the PTX instructions that CUDA C++ does not expose, named after their instructions, and a few helpers: the place of a
// thread, addresses in shared memory, and the lock, which combines several instructions.
#pragma once
#include "types.cuh"

// ---- threads and time

__device__ inline u32 lane_id() { return threadIdx.x % WARP; }
__device__ inline u32 warp_id() { return threadIdx.x / WARP; }

__device__ inline u64 globaltimer() {
    u64 ns;
    asm volatile("mov.u64 %0, %%globaltimer;" : "=l"(ns));
    return ns;
}

// Returns the value in a register. Otherwise the compiler would compute some values, such as the lane's number, again
// at each use.
__device__ inline u32 in_register(u32 value) {
    u32 copy;
    asm volatile("mov.u32 %0, %1;" : "=r"(copy) : "r"(value));
    return copy;
}

// An address in shared memory.
using SharedAddress = u32;
__device__ inline SharedAddress shared_address(const void* pointer) {
    return in_register(static_cast<u32>(__cvta_generic_to_shared(pointer)));
}

// ---- numbers

// 1 / value with an error of at most one unit in the last place, for normal numbers.
__device__ inline float rcp_approx(float value) {
    float result;
    asm("rcp.approx.ftz.f32 %0, %1;" : "=f"(result) : "f"(value));
    return result;
}

// ---- memory that other blocks, GPUs or the host read and write

__device__ inline u32 ld_acquire_sys(const u32* pointer) {
    u32 value;
    asm volatile("ld.acquire.sys.global.u32 %0, [%1];" : "=r"(value) : "l"(pointer) : "memory");
    return value;
}

__device__ inline void st_release_sys(u32* pointer, u32 value) {
    asm volatile("st.release.sys.global.u32 [%0], %1;" ::"l"(pointer), "r"(value) : "memory");
}

__device__ inline u64 ld_acquire_sys_u64(const u64* pointer) {
    u64 value;
    asm volatile("ld.acquire.sys.global.u64 %0, [%1];" : "=l"(value) : "l"(pointer) : "memory");
    return value;
}

__device__ inline u64 ld_acquire_gpu_u64(const u64* pointer) {
    u64 value;
    asm volatile("ld.acquire.gpu.global.u64 %0, [%1];" : "=l"(value) : "l"(pointer) : "memory");
    return value;
}

__device__ inline void st_release_gpu_u64(u64* pointer, u64 value) {
    asm volatile("st.release.gpu.global.u64 [%0], %1;" ::"l"(pointer), "l"(value) : "memory");
}

// Locks the word unless another thread of this GPU has locked it. Does not wait.
__device__ inline bool try_lock_gpu(u32* pointer) {
    u32 old;
    asm volatile("ld.relaxed.gpu.global.u32 %0, [%1];" : "=r"(old) : "l"(pointer) : "memory");
    if (old != 0) return false;
    asm volatile("atom.cas.acquire.gpu.global.b32 %0, [%1], 0, 1;" : "=r"(old) : "l"(pointer) : "memory");
    return old == 0;
}

__device__ inline void unlock_gpu(u32* pointer) {
    asm volatile("st.release.gpu.global.u32 [%0], 0;" ::"l"(pointer) : "memory");
}

__device__ inline u32 ld_relaxed_gpu(const u32* pointer) {
    u32 value;
    asm volatile("ld.relaxed.gpu.global.u32 %0, [%1];" : "=r"(value) : "l"(pointer) : "memory");
    return value;
}

__device__ inline u32 atom_add_acq_rel_gpu(u32* pointer, u32 value) {
    u32 old;
    asm volatile("atom.add.acq_rel.gpu.global.u32 %0, [%1], %2;" : "=r"(old) : "l"(pointer), "r"(value) : "memory");
    return old;
}

__device__ inline u32 atom_add_relaxed_gpu(u32* pointer, u32 value) {
    u32 old;
    asm volatile("atom.add.relaxed.gpu.global.u32 %0, [%1], %2;" : "=r"(old) : "l"(pointer), "r"(value) : "memory");
    return old;
}

__device__ inline u32 atom_cas_relaxed_gpu(u32* pointer, u32 expected, u32 value) {
    u32 old;
    asm volatile("atom.cas.relaxed.gpu.global.b32 %0, [%1], %2, %3;"
                 : "=r"(old)
                 : "l"(pointer), "r"(expected), "r"(value)
                 : "memory");
    return old;
}

// Relaxed loads bypass the first-level cache. They are for words that another thread may be writing, and for data that
// is read once. Plain loads are also allowed for what a flag or handshake publishes. For example, the duplicate role
// loads scales plainly. An acquire orders the later plain loads of its thread and, through `__syncwarp` or
// `__syncthreads`, those of other threads. Without an acquire, a plain load may return older bytes of the first-level
// cache, which is not coherent.
__device__ inline uint2 ld_relaxed_sys_v2(const uint2* pointer) {
    u64 both;
    asm volatile("ld.relaxed.sys.global.u64 %0, [%1];" : "=l"(both) : "l"(pointer) : "memory");
    return make_uint2(static_cast<u32>(both), static_cast<u32>(both >> 32));
}

__device__ inline u32 ld_relaxed_sys(const u32* pointer) {
    u32 value;
    asm volatile("ld.relaxed.sys.global.u32 %0, [%1];" : "=r"(value) : "l"(pointer) : "memory");
    return value;
}

__device__ inline u64 ld_relaxed_sys_u64(const u64* pointer) {
    u64 value;
    asm volatile("ld.relaxed.sys.global.u64 %0, [%1];" : "=l"(value) : "l"(pointer) : "memory");
    return value;
}

// A store that earlier stores, before this thread's last `fence_acq_rel_sys`, come before: the two are a release. One fence serves
// several such stores; each `st_release_sys` has a fence of its own, which waits for all stores before it.
__device__ inline void st_fenced_sys_u64(u64* pointer, u64 value) {
    asm volatile("st.relaxed.sys.global.u64 [%0], %1;" ::"l"(pointer), "l"(value) : "memory");
}

__device__ inline void fence_acq_rel_sys() { asm volatile("fence.acq_rel.sys;" ::: "memory"); }

// ---- asynchronous copies of 16 bytes

// Copies 16 bytes, bypassing the first-level cache.
__device__ inline void cp_async_16(SharedAddress shared, const void* global) {
    asm volatile("cp.async.cg.shared.global [%0], [%1], 16;" ::"r"(shared), "l"(global) : "memory");
}

// Arrives at the mbarrier when all copies that this lane has issued before are complete. `noinc`: the arrival does not
// increase the barrier's pending count, so the count of `mbarrier_init` must include it.
__device__ inline void cp_async_mbarrier_arrive(SharedAddress barrier) {
    asm volatile("cp.async.mbarrier.arrive.noinc.shared.b64 [%0];" ::"r"(barrier) : "memory");
}

// ---- mbarriers

__device__ inline void mbarrier_init(SharedAddress barrier, u32 count) {
    asm volatile("mbarrier.init.shared.b64 [%0], %1;" ::"r"(barrier), "r"(count) : "memory");
}

__device__ inline void mbarrier_arrive(SharedAddress barrier) {
    asm volatile(
        "{\n"
        ".reg .b64 state;\n"
        "mbarrier.arrive.shared.b64 state, [%0];\n"
        "}" ::"r"(barrier)
        : "memory");
}

// Whether the phase of this parity has ended.
__device__ inline bool mbarrier_test_wait_parity(SharedAddress barrier, u32 parity) {
    u32 done;
    asm volatile(
        "{\n"
        ".reg .pred p;\n"
        "mbarrier.test_wait.parity.shared.b64 p, [%1], %2;\n"
        "selp.u32 %0, 1, 0, p;\n"
        "}"
        : "=r"(done)
        : "r"(barrier), "r"(parity)
        : "memory");
    return done != 0;
}

// ---- copies by the bulk copy engine (sm_90 and later)

__device__ inline void fence_mbarrier_init() { asm volatile("fence.mbarrier_init.release.cluster;" ::: "memory"); }

__device__ inline void mbarrier_arrive_expect_tx(SharedAddress barrier, u32 bytes) {
    asm volatile("mbarrier.arrive.expect_tx.shared::cta.b64 _, [%0], %1;" ::"r"(barrier), "r"(bytes)
                 : "memory");
}

// Like `mbarrier_test_wait_parity`, but may suspend the thread for a limited time before it returns false.
__device__ inline bool mbarrier_try_wait_parity(SharedAddress barrier, u32 parity) {
    u32 done;
    asm volatile(
        "{\n"
        ".reg .pred p;\n"
        "mbarrier.try_wait.parity.shared::cta.b64 p, [%1], %2;\n"
        "selp.u32 %0, 1, 0, p;\n"
        "}"
        : "=r"(done)
        : "r"(barrier), "r"(parity)
        : "memory");
    return done != 0;
}

// Both addresses and the number of bytes are multiples of 16.
__device__ inline void cp_async_bulk_g2s(SharedAddress shared, const void* global, u32 bytes, SharedAddress barrier) {
    asm volatile("cp.async.bulk.shared::cluster.global.mbarrier::complete_tx::bytes [%0], [%1], %2, [%3];" ::"r"(shared),
                 "l"(global), "r"(bytes), "r"(barrier)
                 : "memory");
}

__device__ inline void cp_async_bulk_s2g(void* global, SharedAddress shared, u32 bytes) {
    asm volatile("cp.async.bulk.global.shared::cta.bulk_group [%0], [%1], %2;" ::"l"(global),
                 "r"(shared), "r"(bytes)
                 : "memory");
}

__device__ inline void cp_async_bulk_commit_group() { asm volatile("cp.async.bulk.commit_group;" ::: "memory"); }

// Waits until all groups but the `pending` most recent ones have read their source.
template <u32 pending>
__device__ inline void cp_async_bulk_wait_group_read() {
    asm volatile("cp.async.bulk.wait_group.read %0;" ::"n"(pending) : "memory");
}

// Waits until the writes of all groups but the `pending` most recent ones are visible to this thread.
template <u32 pending>
__device__ inline void cp_async_bulk_wait_group() {
    asm volatile("cp.async.bulk.wait_group %0;" ::"n"(pending) : "memory");
}

// Orders this thread's earlier reads and writes before later ones of the bulk copy engine, in shared memory or in
// global memory. One fence for both would also wait for all other memory operations of the thread.
__device__ inline void fence_proxy_async_shared() { asm volatile("fence.proxy.async.shared::cta;" ::: "memory"); }
__device__ inline void fence_proxy_async_global() { asm volatile("fence.proxy.async.global;" ::: "memory"); }

// Loads from shared memory. A constant that is added to such an address becomes a part of the instruction.
__device__ inline uint4 ld_shared_v4(SharedAddress address) {
    uint4 value;
    asm volatile("ld.shared.v4.u32 {%0, %1, %2, %3}, [%4];"
                 : "=r"(value.x), "=r"(value.y), "=r"(value.z), "=r"(value.w)
                 : "r"(address));
    return value;
}

__device__ inline void st_shared_v4(SharedAddress address, const uint4& value) {
    asm volatile("st.shared.v4.u32 [%0], {%1, %2, %3, %4};" ::"r"(address), "r"(value.x), "r"(value.y), "r"(value.z),
                 "r"(value.w)
                 : "memory");
}

__device__ inline void st_shared_v2(SharedAddress address, const uint2& value) {
    asm volatile("st.shared.v2.u32 [%0], {%1, %2};" ::"r"(address), "r"(value.x), "r"(value.y) : "memory");
}

__device__ inline uint2 ld_shared_v2(SharedAddress address) {
    uint2 value;
    asm volatile("ld.shared.v2.u32 {%0, %1}, [%2];" : "=r"(value.x), "=r"(value.y) : "r"(address));
    return value;
}

// ---- conversions, rounded to nearest even, every NaN to 0x7FFF

__device__ inline u32 cvt_rn_bf16x2(float high, float low) {
    u32 both;
    asm("cvt.rn.bf16x2.f32 %0, %1, %2;" : "=r"(both) : "f"(high), "f"(low));
    return both;
}
