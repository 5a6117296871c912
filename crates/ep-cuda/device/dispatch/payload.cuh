// What a token becomes before it is sent; payload_copy.cuh or payload_quantize.cuh says how.
#pragma once
#include "ring.cuh"

// The part of a row of scales that travels with one piece.
struct ScalePart {
    u32 offset;
    u32 bytes;
};

// One piece of one token in shared memory, ready to be stored, and the scales that belong to it.
struct Payload {
    const u8* data;
    u32 bytes;
    u32 offset;  // in the output row
    const u8* scales;  // where they are made with the token
    ScalePart scale_part;
};

__device__ inline u32 piece_bytes_at(const DispatchParams& p, u32 piece) {
    return min(p.piece_bytes, p.row_bytes_in - piece * p.piece_bytes);
}

// A few bytes from anywhere to a row, by all lanes.
__device__ inline void copy_small(u8* to, const u8* from, u32 bytes) {
    for (u32 at = lane_id(); at < bytes; at += WARP) to[at] = from[at];
}

// The scales of a row, read once and written to several rows. Most rows' scales fit the lanes' registers.
struct ScaleRow {
    static constexpr u32 WORDS = 4;
    const u8* from = nullptr;
    u32 bytes = 0;
    u32 words[WORDS];

    // Whether all rows of scales that `row_bytes` apart begin at a word.
    __device__ static bool fits(const u8* base, u32 bytes) {
        return ((reinterpret_cast<u64>(base) | bytes) & 3) == 0 && bytes <= 4 * WORDS * WARP;
    }

    __device__ void load(const u8* row, u32 row_bytes) {
        from = row;
        bytes = row_bytes;
        if (!fits(from, bytes)) return;
#pragma unroll
        for (u32 at = 0; at < WORDS; at++)
            if (4 * (at * WARP + lane_id()) < bytes) words[at] = reinterpret_cast<const u32*>(from)[at * WARP + lane_id()];
    }

    __device__ void store(u8* to) const {
        if (bytes == 0) return;
        if (!fits(from, bytes) || !fits(to, bytes)) {
            copy_small(to, from, bytes);
            return;
        }
#pragma unroll
        for (u32 at = 0; at < WORDS; at++)
            if (4 * (at * WARP + lane_id()) < bytes) reinterpret_cast<u32*>(to)[at * WARP + lane_id()] = words[at];
    }
};
