// CUDA's keywords, types and built-in functions, for a C++ compiler.
#pragma once
#include <bit>
#include <cmath>
#include <cstring>

#include "machine.hpp"

#define __device__
#define __global__
#define __grid_constant__
#define __launch_bounds__(...)
#define __noinline__ __attribute__((noinline))
#define __align__(bytes) __attribute__((aligned(bytes)))
// A block is a thread.
#define __shared__ thread_local

#define threadIdx (machine::here->thread)
#define blockIdx (machine::here->block)
#define blockDim (machine::here->block_dim)
#define gridDim (machine::here->grid_dim)

using machine::Meeting;
using machine::Order;
using machine::Site;

struct __align__(8) uint2 {
    unsigned x, y;
};
struct __align__(16) uint4 {
    unsigned x, y, z, w;
};
inline uint2 make_uint2(unsigned x, unsigned y) { return {x, y}; }
inline uint4 make_uint4(unsigned x, unsigned y, unsigned z, unsigned w) { return {x, y, z, w}; }

// ---- numbers

inline unsigned min(unsigned a, unsigned b) { return a < b ? a : b; }
inline unsigned max(unsigned a, unsigned b) { return a < b ? b : a; }
inline float min(float a, float b) { return std::fmin(a, b); }
inline float max(float a, float b) { return std::fmax(a, b); }
inline unsigned long long min(unsigned long long a, unsigned long long b) { return a < b ? a : b; }
inline unsigned long long max(unsigned long long a, unsigned long long b) { return a < b ? b : a; }

inline int __popc(unsigned bits) { return std::popcount(bits); }
inline int __ffs(unsigned bits) { return bits == 0 ? 0 : std::countr_zero(bits) + 1; }
inline int __clz(unsigned bits) { return std::countl_zero(bits); }
inline unsigned __umulhi(unsigned a, unsigned b) { return static_cast<unsigned>(static_cast<unsigned long long>(a) * b >> 32); }
inline float __uint_as_float(unsigned bits) { return std::bit_cast<float>(bits); }
inline unsigned __float_as_uint(float value) { return std::bit_cast<unsigned>(value); }
inline float __fmul_rn(float a, float b) { return a * b; }
inline float __fmaf_rn(float a, float b, float c) { return std::fmaf(a, b, c); }
inline int __float2int_rn(float value) { return static_cast<int>(std::lrintf(value)); }

// ---- lanes together
//
// Shuffles and votes order no memory; only __syncwarp does.

inline void check_mask(unsigned mask) {
    if (mask != 0xFFFFFFFFu) machine::fail("a meeting of the lanes %08x: these kernels let all lanes meet", mask);
}

template <class T>
unsigned long long to_word(T value) {
    static_assert(sizeof(T) <= sizeof(unsigned long long));
    unsigned long long word = 0;
    std::memcpy(&word, &value, sizeof(T));
    return word;
}

template <class T>
T from_word(unsigned long long word) {
    T value;
    std::memcpy(&value, &word, sizeof(T));
    return value;
}

inline void __syncwarp(Site site = Site::current()) {
    machine::meet_warp(Meeting::sync, 0, !machine::left_out(Order::syncwarp, site));
}

template <class T>
T __shfl_sync(unsigned mask, T value, unsigned lane) {
    check_mask(mask);
    return from_word<T>(machine::meet_warp(Meeting::shuffle, to_word(value), false)[lane % 32]);
}

template <class T>
T __shfl_up_sync(unsigned mask, T value, unsigned distance) {
    check_mask(mask);
    const unsigned lane = threadIdx.x % 32;
    const unsigned from = lane < distance ? lane : lane - distance;
    return from_word<T>(machine::meet_warp(Meeting::shuffle, to_word(value), false)[from]);
}

template <class T>
T __shfl_xor_sync(unsigned mask, T value, unsigned bits) {
    check_mask(mask);
    return from_word<T>(machine::meet_warp(Meeting::shuffle, to_word(value), false)[(threadIdx.x % 32) ^ bits]);
}

inline unsigned __ballot_sync(unsigned mask, bool vote) {
    check_mask(mask);
    const unsigned long long* votes = machine::meet_warp(Meeting::vote, vote, false);
    unsigned bits = 0;
    for (unsigned lane = 0; lane < 32; lane++) bits |= static_cast<unsigned>(votes[lane]) << lane;
    return bits;
}

inline bool __all_sync(unsigned mask, bool vote) { return __ballot_sync(mask, vote) == 0xFFFFFFFFu; }

inline bool orders_block(const Site& site) { return !machine::left_out(Order::syncthreads, site); }

inline void __syncthreads(Site site = Site::current()) { machine::meet_block(true, orders_block(site)); }
inline bool __syncthreads_and(bool vote, Site site = Site::current()) {
    return machine::meet_block(vote, orders_block(site)).all;
}
inline bool __syncthreads_or(bool vote, Site site = Site::current()) {
    return machine::meet_block(vote, orders_block(site)).any;
}

inline unsigned atomicAdd(unsigned* word, unsigned value) {
    machine::step(true);
    return __atomic_fetch_add(word, value, __ATOMIC_RELAXED);
}

inline unsigned atomicOr(unsigned* word, unsigned bits) {
    machine::step(true);
    return __atomic_fetch_or(word, bits, __ATOMIC_RELAXED);
}
