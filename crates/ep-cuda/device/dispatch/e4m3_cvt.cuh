// Conversion to FP8 e4m3 by the instruction (sm_89 and later): to nearest even, saturating, every NaN to 0x7F.
#pragma once
#include "ptx.cuh"

__device__ inline u32 cvt_rn_satfinite_e4m3x2(float high, float low) {
    u16 both;
    asm("cvt.rn.satfinite.e4m3x2.f32 %0, %1, %2;" : "=h"(both) : "f"(high), "f"(low));
    return both;
}

// The codes of eight values, each multiplied by `inverse`.
__device__ inline uint2 e4m3_of(const float (&values)[8], float inverse) {
    u32 pairs[4];
#pragma unroll
    for (u32 pair = 0; pair < 4; pair++)
        pairs[pair] = cvt_rn_satfinite_e4m3x2(__fmul_rn(values[2 * pair + 1], inverse), __fmul_rn(values[2 * pair], inverse));
    return make_uint2(pairs[0] | pairs[1] << 16, pairs[2] | pairs[3] << 16);
}
