// Tokens come as bf16 and travel as FP8 e4m3, quantised here, once.
//
// The rounding is the library's definition (numeric.rs): amax = max(|x|, 1e-4) over what is not NaN, scale = amax / 448,
// for ue8m0 rounded up to a power of two, code = e4m3(x * (1 / scale)).
#pragma once
#include E4M3_VARIANT
#include "payload.cuh"

constexpr u32 SCALE_BUFFER_BYTES = 512;

__device__ inline u32 scale_block(u32 format) { return format == SCALES_UE8M0_32 ? 32 : 128; }

__device__ inline float scale_for(u32 format, float amax) {
    const float scale = fmaxf(amax, 1e-4f) / 448.0f;
    if (format == SCALES_F32_128) return scale;
    const u32 bits = __float_as_uint(scale);
    const u32 above = (bits & 0x7FFFFF) != 0 ? 1 : 0;
    return __uint_as_float(min(max((bits >> 23) + above, 1u), 254u) << 23);
}

// Eight bf16 values as f32.
__device__ inline void unpack(const uint4& packed, float (&values)[8]) {
    const u32 words[4] = {packed.x, packed.y, packed.z, packed.w};
#pragma unroll
    for (u32 word = 0; word < 4; word++) {
        values[2 * word] = __uint_as_float(words[word] << 16);
        values[2 * word + 1] = __uint_as_float(words[word] & 0xFFFF0000u);
    }
}

// Quantises `vectors` of eight values. A block of values is `lanes` neighbouring vectors; several vectors per lane are
// on their way at once.
template <u32 at_once>
__device__ inline void quantize(const uint4* values, u32 vectors, u32 format, u8* codes, u8* scales) {
    const u32 lanes = scale_block(format) / 8;
    for (u32 base = 0; base < vectors; base += at_once * WARP) {
        float value[at_once][8];
        float amax[at_once];
#pragma unroll
        for (u32 turn = 0; turn < at_once; turn++) {
            const u32 vector = base + turn * WARP + lane_id();
            unpack(vector < vectors ? values[vector] : make_uint4(0, 0, 0, 0), value[turn]);
            amax[turn] = 0.0f;
#pragma unroll
            for (u32 at = 0; at < 8; at++) amax[turn] = fmaxf(amax[turn], fabsf(value[turn][at]));
        }
#pragma unroll
        for (u32 distance = 8; distance > 0; distance /= 2) {
            if (distance >= lanes) continue;
#pragma unroll
            for (u32 turn = 0; turn < at_once; turn++)
                amax[turn] = fmaxf(amax[turn], __shfl_xor_sync(0xFFFFFFFFu, amax[turn], distance));
        }
#pragma unroll
        for (u32 turn = 0; turn < at_once; turn++) {
            const u32 vector = base + turn * WARP + lane_id();
            if (vector >= vectors) continue;
            const float scale = scale_for(format, amax[turn]);
            reinterpret_cast<uint2*>(codes)[vector] = e4m3_of(value[turn], 1.0f / scale);
            if (vector % lanes != 0) continue;
            if (format == SCALES_F32_128)
                reinterpret_cast<float*>(scales)[vector / lanes] = scale;
            else
                scales[vector / lanes] = static_cast<u8>(__float_as_uint(scale) >> 23);
        }
    }
}

// Rows of the own rank are sent like all others: what is quantised is in shared memory, once.
constexpr bool SEND_OWN = true;

// Each piece has its own.
__device__ inline ScalePart scales_of(const DispatchParams& p, u32 piece) {
    const u32 block = scale_block(p.scale_format), bytes_per_scale = p.scale_format == SCALES_F32_128 ? 4 : 1;
    return {piece * (p.piece_bytes / 2 / block) * bytes_per_scale,
            div_up(piece_bytes_at(p, piece) / 2, block) * bytes_per_scale};
}

struct PayloadBuffers {
    u8* memory;
    u32 bytes;
    u32 turn = 0;

    __device__ PayloadBuffers(u8* memory, u32 piece_bytes) : memory(memory), bytes(piece_bytes / 2) {}

    __device__ Payload prepare(const DispatchParams& p, Ring& ring, u8* stage, u32, u32 piece) {
        u8* codes = memory + turn * bytes;
        u8* scales = memory + 2 * bytes;
        turn ^= 1;
        // The stores before the last have read this buffer; all lanes have read the scales.
        if (lane_id() == 0) copy_read<1>();
        __syncwarp();
        const u32 vectors = piece_bytes_at(p, piece) / 16;
        quantize<4>(reinterpret_cast<const uint4*>(stage), vectors, p.scale_format, codes, scales);
        copy_fence();
        __syncwarp();
        ring.freed = ring.taken;
        Payload payload;
        payload.data = codes;
        payload.bytes = vectors * 8;
        payload.offset = piece * (p.piece_bytes / 2);
        payload.scales = scales;
        payload.scale_part = scales_of(p, piece);
        return payload;
    }

    // After the commit of a token's stores.
    __device__ void sent(Ring&) {}
};

__device__ inline u32 payload_buffer_bytes(u32 stage_bytes) { return stage_bytes + SCALE_BUFFER_BYTES; }
