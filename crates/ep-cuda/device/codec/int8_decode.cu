// int8_decode: writes what the payload of an `int8` stream decodes to, or adds it to f32 sums. A warp decodes GROUP blocks. The
// payload is usually in host memory, so a lane has the codes of several blocks under way.
#include "int8.cuh"

// Blocks whose codes a lane has under way.
constexpr u32 TURN = 8;
static_assert(GROUP % TURN == 0, "whole turns");

template <bool f32, bool adds>
__device__ inline void decode_one(const Int8DecodeParams& p, u64 at, u32 code, float unit) {
    float value = value_of<f32>(code, unit);
    if constexpr (adds) value = load<f32>(p.out, at) + value;
    store<f32>(p.out, at, value);
}

// Decodes whole blocks.
template <bool f32, bool adds>
__device__ inline void decode_whole(const Int8DecodeParams& p, u64 start, float own_unit) {
#pragma unroll 1
    for (u32 turn = 0; turn < GROUP; turn += TURN) {
        const u64 first = start + turn * CODEC_BLOCK + lane_of() * OF_LANE;
        u32 codes[TURN];
#pragma unroll
        for (u32 of_turn = 0; of_turn < TURN; of_turn++)
            codes[of_turn] = *reinterpret_cast<const u32*>(p.codes + first + of_turn * CODEC_BLOCK);
#pragma unroll
        for (u32 of_turn = 0; of_turn < TURN; of_turn++) {
            const float unit = __shfl_sync(ALL_LANES, own_unit, turn + of_turn);
#pragma unroll
            for (u32 at = 0; at < OF_LANE; at++)
                decode_one<f32, adds>(p, first + of_turn * CODEC_BLOCK + at, codes[of_turn] >> (8 * at) & 0xFFu, unit);
        }
    }
}

template <bool f32, bool adds>
__device__ inline void decode_group(const Int8DecodeParams& p, u64 group, u32 blocks) {
    const u64 own_block = group * GROUP + lane_of(), start = group * GROUP * CODEC_BLOCK;
    const float own_unit = own_block < blocks ? p.scales[own_block] : 0.0f;
    if (start + GROUP * CODEC_BLOCK <= p.count) {
        decode_whole<f32, adds>(p, start, own_unit);
        return;
    }
    for (u32 of_group = 0; of_group < GROUP; of_group++) {
        const u64 first = start + of_group * CODEC_BLOCK;
        const float unit = __shfl_sync(ALL_LANES, own_unit, of_group);
        for (u64 at = first + lane_of(); at < first + CODEC_BLOCK && at < p.count; at += WARP)
            decode_one<f32, adds>(p, at, p.codes[at], unit);
    }
}

template <bool f32, bool adds>
__device__ inline void decode_all(const Int8DecodeParams& p) {
    const u32 blocks = p.count / CODEC_BLOCK + (p.count % CODEC_BLOCK != 0);
    const u64 groups = div_up(blocks, GROUP);
    for (u64 group = thread_index() / WARP; group < groups; group += thread_count() / WARP)
        decode_group<f32, adds>(p, group, blocks);
}

extern "C" __global__ void __launch_bounds__(CODEC_THREADS) int8_decode(const __grid_constant__ Int8DecodeParams p) {
    if (p.adds != 0) decode_all<true, true>(p);
    else if (p.f32 != 0) decode_all<true, false>(p);
    else decode_all<false, false>(p);
}
