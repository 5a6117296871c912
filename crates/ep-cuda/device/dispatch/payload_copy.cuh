// Tokens travel as they are: bf16, or FP8 with the caller's scales.
#pragma once
#include "payload.cuh"

// Rows of the own rank are copied by the receiving role, from the tokens themselves: the wire has other things to do.
constexpr bool SEND_OWN = false;

// With the first piece, all of them.
__device__ inline ScalePart scales_of(const DispatchParams& p, u32 piece) { return {0, piece == 0 ? p.scale_row_bytes : 0}; }

// Of the next token: read when they are needed, they would stop the sender once a token.
struct TokenScales {
    ScaleRow row;

    __device__ void expect(const DispatchParams& p, u32 token, u32 piece) {
        row.load(p.scales + static_cast<u64>(token) * p.scale_row_bytes, scales_of(p, piece).bytes);
    }
    __device__ ScaleRow take(const Payload&) const { return row; }
};

struct PayloadBuffers {
    // Groups of stores that may still be reading their stage when the next token is taken.
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

    // After the commit of a token's stores.
    __device__ void sent(Ring& ring) { ring.free<PENDING>(ring.taken < PENDING ? 0 : ring.taken - PENDING); }
};

__device__ inline u32 payload_buffer_bytes() { return 0; }
