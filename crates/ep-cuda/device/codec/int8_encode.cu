// int8_encode: writes the payload of an `int8` stream, of elements or of their sums with a carry. A warp encodes GROUP blocks;
// a lane has OF_LANE elements of each. The payload is usually in host memory, so a warp writes whole lines of it.
#include "int8.cuh"

template <bool f32, bool carries>
__device__ inline void encode_group(const Int8EncodeParams& p, u64 group, u32 blocks) {
    const u32 lane = lane_of();
    float own_unit = 0.0f;
    for (u32 of_group = 0; of_group < GROUP; of_group++) {
        const u64 block = group * GROUP + of_group;
        if (block >= blocks) break;
        const u64 first = block * CODEC_BLOCK + lane * OF_LANE;
        float values[OF_LANE];
        u32 absmax = 0;
#pragma unroll
        for (u32 at = 0; at < OF_LANE; at++) {
            float value = 0.0f;
            if (first + at < p.count) {
                value = load<f32>(p.elements, first + at);
                if constexpr (carries) value = p.carry[first + at] + value;
            }
            values[at] = value;
            const u32 magnitude = magnitude_of(value);
            if (magnitude > absmax) absmax = magnitude;
        }
        if (absmax >= INFINITE_BITS) {
#pragma unroll
            for (u32 at = OF_LANE; at-- > 0;)
                if (!is_finite(values[at])) atomicMin(p.bad, static_cast<u32>(first + at));
        }
#pragma unroll
        for (u32 bits = WARP / 2; bits > 0; bits /= 2) {
            const u32 other = __shfl_xor_sync(ALL_LANES, absmax, bits);
            if (other > absmax) absmax = other;
        }
        const Scale scale = scale_of(absmax);
        if (lane == of_group) own_unit = scale.unit;
        u32 codes = 0;
#pragma unroll
        for (u32 at = 0; at < OF_LANE; at++) {
            const u32 code = code_of(values[at], scale.inverse);
            codes |= code << (8 * at);
            if constexpr (carries)
                if (first + at < p.count) p.left[first + at] = values[at] - value_of<true>(code, scale.unit);
        }
        if (first + OF_LANE <= p.count) {
            *reinterpret_cast<u32*>(p.codes + first) = codes;
        } else {
            for (u32 at = 0; at < OF_LANE; at++)
                if (first + at < p.count) p.codes[first + at] = static_cast<u8>(codes >> (8 * at));
        }
    }
    if (group * GROUP + lane < blocks) p.scales[group * GROUP + lane] = own_unit;
}

template <bool f32, bool carries>
__device__ inline void encode_all(const Int8EncodeParams& p) {
    const u32 blocks = p.count / CODEC_BLOCK + (p.count % CODEC_BLOCK != 0);
    const u64 groups = div_up(blocks, GROUP);
    for (u64 group = thread_index() / WARP; group < groups; group += thread_count() / WARP)
        encode_group<f32, carries>(p, group, blocks);
}

extern "C" __global__ void __launch_bounds__(CODEC_THREADS) int8_encode(const __grid_constant__ Int8EncodeParams p) {
    if (p.carry == nullptr) {
        if (p.f32 != 0) encode_all<true, false>(p);
        else encode_all<false, false>(p);
    } else {
        if (p.f32 != 0) encode_all<true, true>(p);
        else encode_all<false, true>(p);
    }
}
