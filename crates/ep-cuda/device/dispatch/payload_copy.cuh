// Tokens are sent unchanged: bf16, f32, or FP8 with the caller's scales.
#pragma once
#include "payload.cuh"

constexpr u32 QUANTIZES = 0;

// The first piece carries all scales.
__device__ inline ScalePart scales_of(const DispatchParams& p, u32 piece) { return {0, piece == 0 ? p.scale_row_bytes : 0}; }

// The scales of the next token, read one token ahead: otherwise the sender would wait for them at each token.
struct TokenScales {
    ScaleRow row;

    __device__ void expect(const DispatchParams& p, u32 token, u32 piece) {
        row.load(p.scales + static_cast<u64>(token) * p.scale_row_bytes, scales_of(p, piece).bytes);
    }
    __device__ ScaleRow take(const Payload&) const { return row; }
};

struct PayloadBuffers {
    // Tokens whose stores may still be reading their stage when the next token is taken.
    static constexpr u32 PENDING = 2;

    __device__ explicit PayloadBuffers(u8*) {}

    __device__ Payload prepare(const DispatchParams& p, u8* stage, u32 piece) {
        Payload payload;
        payload.data = stage;
        payload.bytes = piece_bytes_at(p, piece);
        payload.offset = piece * p.piece_bytes;
        payload.scale_part = scales_of(p, piece);
        return payload;
    }

    // Called after a token's stores were committed.
    __device__ void sent(Ring& ring) { ring.free<GROUPS_PER_TOKEN * PENDING>(ring.taken < PENDING ? 0 : ring.taken - PENDING); }
};
