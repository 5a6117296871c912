// Fixed-width names; kernels are compiled without any header of the toolkit.
#pragma once

using u8 = unsigned char;
using u16 = unsigned short;
using u32 = unsigned int;
using u64 = unsigned long long;
using i32 = int;
using i64 = long long;

static_assert(sizeof(u32) == 4 && sizeof(u64) == 8 && sizeof(void*) == 8, "a 64-bit device");

// "No row": dropped for want of capacity, or none chosen.
constexpr u32 NONE = 0xFFFFFFFFu;

constexpr u32 WARP = 32;

__device__ inline u32 div_up(u32 a, u32 b) { return (a + b - 1) / b; }

// Division by a number that is known at run time only: exact for values below 2^32 / by, and a tenth of the instructions.
struct Divider {
    u32 by;
    u32 factor;

    __device__ explicit Divider(u32 by) : by(by), factor(0xFFFFFFFFu / by + 1) {}
    // For 1 the factor would be 2^32.
    __device__ u32 divide(u32 value) const { return by == 1 ? value : __umulhi(value, factor); }
    __device__ u32 rest(u32 value) const { return value - divide(value) * by; }
};
