// Conversion to FP8 e4m3 without the instruction (before sm_89): to nearest even, saturating, every NaN to 0x7F.
#pragma once
#include "ptx.cuh"

__device__ inline u32 e4m3_code(float value) {
    if (value != value) return 0x7F;
    const u32 sign = __float_as_uint(value) >> 24 & 0x80;
    const float magnitude = fminf(fabsf(value), 448.0f);
    // Subnormal codes: below 2^-6 the code is the number of steps of 2^-9.
    if (magnitude < 0.015625f) return sign | static_cast<u32>(__float2int_rn(magnitude * 512.0f));
    const u32 bits = __float_as_uint(magnitude);
    const u32 tie = bits >> 20 & 1;
    return sign | ((bits + 0x7FFFF + tie >> 20) - ((127 - 7) << 3));
}

// The codes of eight values, each multiplied by `inverse`.
__device__ inline uint2 e4m3_of(const float (&values)[8], float inverse) {
    u32 words[2] = {0, 0};
#pragma unroll
    for (u32 at = 0; at < 8; at++) words[at / 4] |= e4m3_code(__fmul_rn(values[at], inverse)) << 8 * (at % 4);
    return make_uint2(words[0], words[1]);
}
