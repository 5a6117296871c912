// The arithmetic of the codec `int8`: the same operations in the same order as in crates/ep-codec/src/int8.rs. Kernels are
// compiled without contraction to fused operations.
#pragma once
#include "weights.cuh"

// Elements that share a scale.
constexpr u32 CODEC_BLOCK = 128;
// Blocks that a warp handles together, so that it reads or writes their scales at once.
constexpr u32 GROUP = WARP;
// Elements of a block that a lane handles. They follow each other.
constexpr u32 OF_LANE = CODEC_BLOCK / WARP;
// One unit in the last place below the largest f32 divided by 127.
constexpr u32 LARGEST_SCALE_BITS = 0x7C010203u;
constexpr u32 SMALLEST_NORMAL_BITS = 0x00800000u;

struct Scale {
    float unit;
    float inverse;
};

__device__ inline Scale scale_of(u32 absmax) {
    float unit = of_bits(absmax) / 127.0f;
    const float most = of_bits(LARGEST_SCALE_BITS);
    if (unit > most) unit = most;
    if (unit >= of_bits(SMALLEST_NORMAL_BITS)) return {unit, 1.0f / unit};
    return {0.0f, 0.0f};
}

// Near 1.5 * 2^23 the f32 numbers are exactly the integers, so the addition rounds, and the lowest bits are the code.
__device__ inline u32 code_of(float value, float inverse) {
    return __float_as_uint(value * inverse + 12582912.0f) & 0xFFu;
}

template <bool f32>
__device__ inline float value_of(u32 code, float unit) {
    const float value = static_cast<float>(static_cast<i32>(code << 24) >> 24) * unit;
    const float most = largest<f32>();
    return value > most ? most : value < -most ? -most : value;
}
