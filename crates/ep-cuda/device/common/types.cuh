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
