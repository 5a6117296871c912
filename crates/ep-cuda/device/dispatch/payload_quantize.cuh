// Tokens are given as bf16 and sent as FP8 e4m3. The send role quantises each token once, in shared memory.
//
// The rounding is defined in crates/ep/src/numeric.rs: amax = max(|x|, 1e-4) over the values that are not NaN,
// scale = amax / 448 (for ue8m0 rounded up to a power of two), code = e4m3(x * (1 / scale)).
#pragma once
#include E4M3_VARIANT
#include "bf16.cuh"
#include "payload.cuh"

constexpr u32 QUANTIZES = 1;
constexpr float LARGEST = 3.4028235e38f;

__device__ inline u32 scale_block(u32 format) { return format == SCALES_UE8M0_32 ? 32 : 128; }

// `amax / 448`, rounded like a division: the product with the reciprocal, corrected by its remainder.
__device__ inline float divided_by_448(float amax) {
    constexpr float RECIPROCAL = 1.0f / 448.0f;
    const float quotient = __fmul_rn(amax, RECIPROCAL);
    const float rest = __fmaf_rn(-448.0f, quotient, amax);
    // For an infinite amax the remainder would be NaN.
    return amax <= LARGEST ? __fmaf_rn(rest, RECIPROCAL, quotient) : amax;
}

// `1 / scale`, rounded like a division; 0 for an infinite scale. Correct for the scales of this file: the finite ones
// and their reciprocals are normal numbers, so no other special cases of a division are needed.
__device__ inline float reciprocal(float scale) {
    const float close = rcp_approx(scale);
    const float corrected = __fmaf_rn(__fmaf_rn(-scale, close, 1.0f), close, close);
    return scale <= LARGEST ? corrected : 0.0f;
}

// The reciprocal of a scale, and the scale in its output format.
struct Scale {
    float inverse;
    u32 written;  // the bits of an f32, or the exponent of a ue8m0
};

template <bool power_of_two>
__device__ inline Scale scale_for(float amax) {
    const float scale = divided_by_448(fmaxf(amax, 1e-4f));
    const u32 bits = __float_as_uint(scale);
    if (!power_of_two) return {reciprocal(scale), bits};
    const u32 exponent = min(max((bits + 0x7FFFFF) >> 23, 1u), 254u);
    // The reciprocal 2^-127 is a subnormal number, whose bits are 0x400000.
    return {__uint_as_float(exponent == 254 ? 0x400000 : (254 - exponent) << 23), exponent};
}

// Quantises `at_once` vectors of eight values per lane, in place, beginning with vector `first`; codes move to the
// front of the stage. `lanes` adjacent vectors share a scale. `all`: every lane has a vector; otherwise the last vector
// is `count` - 1.
template <u32 at_once, bool power_of_two, bool all>
__device__ inline void quantize_some(uint4* stage, u32 first, u32 count, u32 lanes, u8* scales) {
    float value[at_once][8];
    float amax[at_once];
#pragma unroll
    for (u32 turn = 0; turn < at_once; turn++) {
        const u32 vector = first + turn * WARP + lane_id();
        unpack_bf16(all || vector < count ? stage[vector] : make_uint4(0, 0, 0, 0), value[turn]);
        amax[turn] = 0.0f;
#pragma unroll
        for (u32 at = 0; at < 8; at++) amax[turn] = fmaxf(amax[turn], fabsf(value[turn][at]));
    }
    // Codes take half the bytes of values, so the writes below only reach values that all lanes have read by now.
    __syncwarp();
#pragma unroll
    for (u32 distance = 8; distance > 0; distance /= 2) {
        if (distance >= lanes) continue;
#pragma unroll
        for (u32 turn = 0; turn < at_once; turn++)
            amax[turn] = fmaxf(amax[turn], __shfl_xor_sync(ALL_LANES, amax[turn], distance));
    }
    auto* codes = reinterpret_cast<uint2*>(stage);
    const u32 block_of_lane = lane_id() / lanes, blocks = WARP / lanes;
    const bool writes = lane_id() % lanes == 0;
#pragma unroll
    for (u32 turn = 0; turn < at_once; turn++) {
        const u32 vector = first + turn * WARP + lane_id();
        const Scale scale = scale_for<power_of_two>(amax[turn]);
        const uint2 code = e4m3_of(value[turn], scale.inverse);
        if (!all && vector >= count) continue;
        codes[vector] = code;
        const u32 block = (first / WARP + turn) * blocks + block_of_lane;
        if (!writes) continue;
        if (power_of_two)
            scales[block] = static_cast<u8>(scale.written);
        else
            reinterpret_cast<u32*>(scales)[block] = scale.written;
    }
    // Lanes without a vector have diverged.
    if (!all) __syncwarp();
}

template <bool power_of_two>
__device__ inline void quantize(uint4* stage, u32 vectors, u32 lanes, u8* scales) {
    constexpr u32 AT_ONCE = 4;
    u32 first = 0;
    for (; first + AT_ONCE * WARP <= vectors; first += AT_ONCE * WARP)
        quantize_some<AT_ONCE, power_of_two, true>(stage, first, vectors, lanes, scales);
    for (; first < vectors; first += WARP) quantize_some<1, power_of_two, false>(stage, first, vectors, lanes, scales);
}

// Each piece carries the scales of its own elements.
__device__ inline ScalePart scales_of(const DispatchParams& p, u32 piece) {
    const u32 block = scale_block(p.scale_format), bytes_per_scale = p.scale_format == SCALES_F32_128 ? 4 : 1;
    return {piece * (p.piece_bytes / 2 / block) * bytes_per_scale,
            div_up(piece_bytes_at(p, piece) / 2, block) * bytes_per_scale};
}

// The scales were computed with the token.
struct TokenScales {
    __device__ void expect(const DispatchParams&, u32, u32) const {}
    __device__ ScaleRow take(const Payload& payload) const {
        ScaleRow row;
        row.load(payload.scales, payload.scale_part.bytes);
        return row;
    }
};

struct PayloadBuffers {
    u8* scales;

    __device__ explicit PayloadBuffers(u8* memory) : scales(memory) {}

    __device__ Payload prepare(const DispatchParams& p, u8* stage, u32 piece) {
        // All lanes must have read the scales of the previous piece before `quantize` overwrites them.
        __syncwarp();
        const u32 vectors = piece_bytes_at(p, piece) / 16;
        const u32 lanes = scale_block(p.scale_format) / 8;
        if (p.scale_format == SCALES_F32_128)
            quantize<false>(reinterpret_cast<uint4*>(stage), vectors, lanes, scales);
        else
            quantize<true>(reinterpret_cast<uint4*>(stage), vectors, lanes, scales);
        copy_fence_stage();
        __syncwarp();
        Payload payload;
        payload.data = stage;
        payload.bytes = vectors * 8;
        payload.offset = piece * (p.piece_bytes / 2);
        payload.scales = scales;
        payload.scale_part = scales_of(p, piece);
        return payload;
    }

    // Called after a token's stores were committed. Waits until the stores of earlier tokens have read their stage, and frees it.
    __device__ void sent(Ring& ring) { ring.free<GROUPS_PER_TOKEN>(ring.taken - 1); }
};
