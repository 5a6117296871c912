// The wrappers of device/common/ptx.cuh for the CPU, with the memory order that each instruction guarantees. Reads and
// writes without a wrapper are plain in C++, too, so two unordered ones are a data race.
#pragma once
#include "types.cuh"

// ---- threads and time

__device__ inline u32 lane_id() { return threadIdx.x % WARP; }
__device__ inline u32 warp_id() { return threadIdx.x / WARP; }

__device__ inline u64 globaltimer() { return machine::clock(); }

__device__ inline u32 in_register(u32 value) { return value; }

// A pointer here.
using SharedAddress = u8*;
__device__ inline SharedAddress shared_address(const void* shared) { return static_cast<u8*>(const_cast<void*>(shared)); }

__device__ inline u64* word_at(SharedAddress address) { return reinterpret_cast<u64*>(address); }

// ---- numbers

// Off by one in the last place, as the instruction may be.
__device__ inline float rcp_approx(float value) { return std::nextafter(1.0f / value, 0.0f); }

// ---- memory that other blocks, GPUs or the host read and write

__device__ inline u32 ld_acquire_sys(const u32* pointer, Site site = Site::current()) {
    machine::poll();
    if (machine::left_out(Order::ld_acquire_sys, site)) return __atomic_load_n(pointer, __ATOMIC_RELAXED);
    return __atomic_load_n(pointer, __ATOMIC_ACQUIRE);
}

__device__ inline void st_release_sys(u32* pointer, u32 value, Site site = Site::current()) {
    machine::step(true);
    if (machine::left_out(Order::st_release_sys, site)) return __atomic_store_n(pointer, value, __ATOMIC_RELAXED);
    __atomic_store_n(pointer, value, __ATOMIC_RELEASE);
}

__device__ inline u64 ld_acquire_sys_u64(const u64* pointer, Site site = Site::current()) {
    machine::poll();
    if (machine::left_out(Order::ld_acquire_sys, site)) return __atomic_load_n(pointer, __ATOMIC_RELAXED);
    return __atomic_load_n(pointer, __ATOMIC_ACQUIRE);
}

__device__ inline u64 ld_acquire_gpu_u64(const u64* pointer, Site site = Site::current()) {
    machine::use_on_one_gpu(pointer);
    machine::poll();
    if (machine::left_out(Order::ld_acquire_gpu, site)) return __atomic_load_n(pointer, __ATOMIC_RELAXED);
    return __atomic_load_n(pointer, __ATOMIC_ACQUIRE);
}

__device__ inline void st_release_gpu_u64(u64* pointer, u64 value, Site site = Site::current()) {
    machine::use_on_one_gpu(pointer);
    machine::step(true);
    if (machine::left_out(Order::st_release_gpu, site)) return __atomic_store_n(pointer, value, __ATOMIC_RELAXED);
    __atomic_store_n(pointer, value, __ATOMIC_RELEASE);
}

// Locking and unlocking do not count as progress: waits lock again and again.
__device__ inline bool try_lock_gpu(u32* pointer) {
    machine::use_on_one_gpu(pointer);
    machine::poll();
    u32 expected = 0;
    return __atomic_compare_exchange_n(pointer, &expected, 1, false, __ATOMIC_ACQUIRE, __ATOMIC_RELAXED);
}

__device__ inline void unlock_gpu(u32* pointer) {
    machine::use_on_one_gpu(pointer);
    machine::step(false);
    __atomic_store_n(pointer, 0, __ATOMIC_RELEASE);
}

__device__ inline u32 atom_add_acq_rel_gpu(u32* pointer, u32 value, Site site = Site::current()) {
    machine::use_on_one_gpu(pointer);
    machine::step(true);
    if (machine::left_out(Order::atom_add_acq_rel_gpu, site))
        return __atomic_fetch_add(pointer, value, __ATOMIC_RELAXED);
    return __atomic_fetch_add(pointer, value, __ATOMIC_ACQ_REL);
}

__device__ inline u32 atom_add_relaxed_gpu(u32* pointer, u32 value) {
    machine::use_on_one_gpu(pointer);
    machine::step(true);
    return __atomic_fetch_add(pointer, value, __ATOMIC_RELAXED);
}

__device__ inline u32 atom_cas_relaxed_gpu(u32* pointer, u32 expected, u32 value) {
    machine::use_on_one_gpu(pointer);
    machine::step(true);
    __atomic_compare_exchange_n(pointer, &expected, value, false, __ATOMIC_RELAXED, __ATOMIC_RELAXED);
    return expected;
}

__device__ inline u32 ld_relaxed_gpu(const u32* pointer) {
    machine::use_on_one_gpu(pointer);
    machine::step(false);
    return __atomic_load_n(pointer, __ATOMIC_RELAXED);
}

__device__ inline u32 ld_relaxed_sys(const u32* pointer) {
    machine::step(false);
    return __atomic_load_n(pointer, __ATOMIC_RELAXED);
}

__device__ inline u64 ld_relaxed_sys_u64(const u64* pointer) {
    machine::step(false);
    return __atomic_load_n(pointer, __ATOMIC_RELAXED);
}

__device__ inline uint2 ld_relaxed_sys_v2(const uint2* pointer) {
    const u64 both = ld_relaxed_sys_u64(reinterpret_cast<const u64*>(pointer));
    return make_uint2(static_cast<u32>(both), static_cast<u32>(both >> 32));
}

// ThreadSanitizer does not support fences. So the stores that need one are releases here, if the lane has executed it since its last
// barrier or `__syncwarp`: it does not order what the lane learns there.
__device__ inline void fence_acq_rel_sys(Site site = Site::current()) {
    machine::step(false);
    machine::fence_sys(!machine::left_out(Order::fence_acq_rel_sys, site));
}

__device__ inline void st_fenced_sys_u64(u64* pointer, u64 value) {
    machine::step(true);
    __atomic_store_n(pointer, value, machine::has_fenced_sys() ? __ATOMIC_RELEASE : __ATOMIC_RELAXED);
}

// ---- asynchronous copies of 16 bytes

__device__ inline void cp_async_16(SharedAddress shared, const void* global) { machine::lane_copy_16(shared, global); }

__device__ inline void cp_async_mbarrier_arrive(SharedAddress barrier) { machine::lane_copies_arrive(word_at(barrier)); }

__device__ inline uint4 ld_shared_v4(SharedAddress address) { return *reinterpret_cast<const uint4*>(address); }
__device__ inline void st_shared_v4(SharedAddress address, const uint4& value) { *reinterpret_cast<uint4*>(address) = value; }
__device__ inline void st_shared_v2(SharedAddress address, const uint2& value) { *reinterpret_cast<uint2*>(address) = value; }
__device__ inline uint2 ld_shared_v2(SharedAddress address) { return *reinterpret_cast<const uint2*>(address); }

// ---- copies by the bulk copy engine

__device__ inline void mbarrier_init(SharedAddress barrier, u32 count) { machine::mbarrier_init(word_at(barrier), count); }
// On a GPU, orders what fence_proxy_async_shared orders, for mbarriers alone.
__device__ inline void fence_mbarrier_init() {}

__device__ inline void mbarrier_arrive(SharedAddress barrier) { machine::mbarrier_arrive_expect_tx(word_at(barrier), 0); }
__device__ inline void mbarrier_arrive_expect_tx(SharedAddress barrier, u32 bytes) {
    machine::mbarrier_arrive_expect_tx(word_at(barrier), bytes);
}

__device__ inline bool mbarrier_try_wait_parity(SharedAddress barrier, u32 parity, Site site = Site::current()) {
    return machine::left_out(Order::mbarrier_try_wait, site) || machine::mbarrier_try_wait_parity(word_at(barrier), parity);
}
__device__ inline bool mbarrier_test_wait_parity(SharedAddress barrier, u32 parity, Site site = Site::current()) {
    return mbarrier_try_wait_parity(barrier, parity, site);
}

__device__ inline void cp_async_bulk_g2s(SharedAddress shared, const void* global, u32 bytes, SharedAddress barrier) {
    machine::bulk_load(shared, global, bytes, word_at(barrier));
}

__device__ inline void cp_async_bulk_s2g(void* global, SharedAddress shared, u32 bytes) {
    machine::bulk_store(global, shared, bytes);
}

__device__ inline void cp_async_bulk_commit_group() { machine::bulk_commit(); }

template <u32 pending>
__device__ inline void cp_async_bulk_wait_group_read(Site site = Site::current()) {
    if (!machine::left_out(Order::cp_async_bulk_wait_group_read, site)) machine::bulk_wait_read(pending);
}

template <u32 pending>
__device__ inline void cp_async_bulk_wait_group(Site site = Site::current()) {
    if (!machine::left_out(Order::cp_async_bulk_wait_group, site)) machine::bulk_wait(pending);
}

// On the machine, either fence orders both shared and global memory.
__device__ inline void fence_proxy_async_shared(Site site = Site::current()) {
    if (!machine::left_out(Order::fence_proxy_async, site)) machine::fence_proxy_async();
}
__device__ inline void fence_proxy_async_global(Site site = Site::current()) {
    if (!machine::left_out(Order::fence_proxy_async, site)) machine::fence_proxy_async();
}

// ---- conversions, rounded to nearest even, every NaN to 0x7FFF

__device__ inline u32 cvt_rn_bf16(float value) {
    if (value != value) return 0x7FFF;
    const u32 bits = __float_as_uint(value);
    return (bits + 0x7FFF + (bits >> 16 & 1)) >> 16;
}

__device__ inline u32 cvt_rn_bf16x2(float high, float low) { return cvt_rn_bf16(high) << 16 | cvt_rn_bf16(low); }
