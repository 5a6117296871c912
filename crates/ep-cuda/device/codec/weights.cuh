// Elements of experts, f32 or bf16, as the kernels of codecs read and write them.
#pragma once
#include "params.cuh"
#include "types.cuh"

// The bits of infinity. Magnitudes with these or larger bits are not finite.
constexpr u32 INFINITE_BITS = 0x7F800000u;

__device__ inline float of_bits(u32 bits) { return __uint_as_float(bits); }
__device__ inline u32 magnitude_of(float value) { return __float_as_uint(value) & 0x7FFFFFFFu; }
__device__ inline bool is_finite(float value) { return magnitude_of(value) < INFINITE_BITS; }

// The largest finite number of the type.
template <bool f32>
__device__ inline float largest() {
    return of_bits(f32 ? 0x7F7FFFFFu : 0x7F7F0000u);
}

template <bool f32>
__device__ inline float load(const u8* elements, u64 at) {
    if constexpr (f32) return reinterpret_cast<const float*>(elements)[at];
    else return of_bits(static_cast<u32>(reinterpret_cast<const u16*>(elements)[at]) << 16);
}

// Rounds to nearest, ties to even. NaN stays NaN.
template <bool f32>
__device__ inline void store(u8* elements, u64 at, float value) {
    if constexpr (f32) {
        reinterpret_cast<float*>(elements)[at] = value;
    } else {
        const u32 bits = magnitude_of(value) > INFINITE_BITS ? 0x7FFF0000u : __float_as_uint(value);
        reinterpret_cast<u16*>(elements)[at] = static_cast<u16>((bits + 0x7FFFu + (bits >> 16 & 1)) >> 16);
    }
}

__device__ inline u64 thread_index() { return static_cast<u64>(blockIdx.x) * blockDim.x + threadIdx.x; }
__device__ inline u64 thread_count() { return static_cast<u64>(gridDim.x) * blockDim.x; }
__device__ inline u32 lane_of() { return threadIdx.x % WARP; }
