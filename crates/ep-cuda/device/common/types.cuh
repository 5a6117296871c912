// Integer types of fixed width and small helpers. Kernels are compiled without the headers of the CUDA toolkit.
#pragma once

using u8 = unsigned char;
using u16 = unsigned short;
using u32 = unsigned int;
using u64 = unsigned long long;
using i32 = int;
using i64 = long long;

static_assert(sizeof(u32) == 4 && sizeof(u64) == 8 && sizeof(void*) == 8, "a 64-bit device");

// Lanes of a warp.
constexpr u32 WARP = 32;
// The mask of warp-wide shuffles and votes. All of them are executed by all lanes.
constexpr u32 ALL_LANES = 0xFFFFFFFFu;
// A word with all bits set.
constexpr u32 ALL_BITS = 0xFFFFFFFFu;

// The offset of a field in its struct, in bytes. NVRTC has no <cstddef>, and its builtin differs from the C++
// compilers'.
#ifdef __CUDACC_RTC__
#define OFFSET_OF(type, field) __INTADDR__(&((type*)0)->field)
#else
#define OFFSET_OF(type, field) __builtin_offsetof(type, field)
#endif

__device__ inline u32 div_up(u32 a, u32 b) { return (a + b - 1) / b; }

// Division by a divisor that is known only at run time, by one multiplication instead of a division loop (a tenth of
// the instructions). Exact for values below 2^32 / by.
struct Divider {
    u32 by;
    u32 factor;

    __device__ explicit Divider(u32 by) : by(by), factor(ALL_BITS / by + 1) {}
    // For a divisor of 1 the factor would be 2^32, which overflows.
    __device__ u32 divide(u32 value) const { return by == 1 ? value : __umulhi(value, factor); }
    __device__ u32 rest(u32 value) const { return value - divide(value) * by; }
};
