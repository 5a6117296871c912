// Conversion of vectors of bf16 values to f32 and back.
#pragma once
#include "ptx.cuh"

// The two values of a word, of which the first one has the lower bits. A bf16 value is the upper half of an f32.
__device__ inline float first_of_two(u32 word) { return __uint_as_float(word << 16); }
__device__ inline float second_of_two(u32 word) { return __uint_as_float(word & 0xFFFF0000u); }

__device__ inline void unpack_bf16(const uint4& packed, float (&values)[8]) {
    const u32 words[4] = {packed.x, packed.y, packed.z, packed.w};
#pragma unroll
    for (u32 word = 0; word < 4; word++) {
        values[2 * word] = first_of_two(words[word]);
        values[2 * word + 1] = second_of_two(words[word]);
    }
}

// Rounded to nearest even.
__device__ inline uint4 pack_bf16(const float (&v)[8]) {
    return make_uint4(cvt_rn_bf16x2(v[1], v[0]), cvt_rn_bf16x2(v[3], v[2]), cvt_rn_bf16x2(v[5], v[4]),
                      cvt_rn_bf16x2(v[7], v[6]));
}

__device__ inline uint2 pack_bf16(const float (&v)[4]) {
    return make_uint2(cvt_rn_bf16x2(v[1], v[0]), cvt_rn_bf16x2(v[3], v[2]));
}
