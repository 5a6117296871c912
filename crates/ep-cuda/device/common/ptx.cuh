// Every instruction that C++ has no word for; each wrapper is named after its instruction.
#pragma once
#include "types.cuh"

// ---- who am I

__device__ inline u32 lane_id() { return threadIdx.x % WARP; }
__device__ inline u32 warp_id() { return threadIdx.x / WARP; }

// Bits of the lanes below this one.
__device__ inline u32 lanemask_lt() { return (1u << lane_id()) - 1; }

__device__ inline u64 globaltimer() {
    u64 ns;
    asm volatile("mov.u64 %0, %%globaltimer;" : "=l"(ns));
    return ns;
}

__device__ inline u32 shared_address(const void* pointer) { return static_cast<u32>(__cvta_generic_to_shared(pointer)); }

// ---- memory that other GPUs read and write

__device__ inline u32 ld_acquire_sys(const u32* pointer) {
    u32 value;
    asm volatile("ld.acquire.sys.global.u32 %0, [%1];" : "=r"(value) : "l"(pointer) : "memory");
    return value;
}

__device__ inline void st_release_sys(u32* pointer, u32 value) {
    asm volatile("st.release.sys.global.u32 [%0], %1;" ::"l"(pointer), "r"(value) : "memory");
}

__device__ inline u32 ld_acquire_gpu(const u32* pointer) {
    u32 value;
    asm volatile("ld.acquire.gpu.global.u32 %0, [%1];" : "=r"(value) : "l"(pointer) : "memory");
    return value;
}

__device__ inline u32 atom_add_acq_rel_gpu(u32* pointer, u32 value) {
    u32 old;
    asm volatile("atom.add.acq_rel.gpu.global.u32 %0, [%1], %2;" : "=r"(old) : "l"(pointer), "r"(value) : "memory");
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

// What is read once or written by a peer: past the first-level cache, which is not coherent.
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

__device__ inline void membar_sys() { asm volatile("fence.acq_rel.sys;" ::: "memory"); }

// ---- copies of 16 bytes by a lane, for itself

// Zeros where there is nothing to copy: the address is not read then.
__device__ inline void cp_async_16(void* shared, const void* global, bool there) {
    asm volatile("cp.async.cg.shared.global [%0], [%1], 16, %2;" ::"r"(shared_address(shared)), "l"(global),
                 "r"(there ? 16 : 0)
                 : "memory");
}

__device__ inline void cp_async_commit_group() { asm volatile("cp.async.commit_group;" ::: "memory"); }

template <u32 pending>
__device__ inline void cp_async_wait_group() {
    asm volatile("cp.async.wait_group %0;" ::"n"(pending) : "memory");
}

__device__ inline uint4 ld_shared_v4(const void* shared) {
    uint4 value;
    asm volatile("ld.shared.v4.u32 {%0, %1, %2, %3}, [%4];"
                 : "=r"(value.x), "=r"(value.y), "=r"(value.z), "=r"(value.w)
                 : "r"(shared_address(shared)));
    return value;
}

// ---- conversions, rounded to nearest even, every NaN to 0x7FFF

__device__ inline u32 cvt_rn_bf16x2(float high, float low) {
    u32 both;
    asm("cvt.rn.bf16x2.f32 %0, %1, %2;" : "=r"(both) : "f"(high), "f"(low));
    return both;
}
