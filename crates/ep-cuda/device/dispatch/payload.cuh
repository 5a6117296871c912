// The form in which a token is sent. The macro PAYLOAD_VARIANT names the file that defines it: payload_copy.cuh (rows
// are sent unchanged) or payload_quantize.cuh (bf16 to FP8). Other files use these of its names:
//
//   QUANTIZES       u32, 0 or 1: whether a worker has `SCALE_BUFFER_BYTES` bytes behind its ring (src/shared.rs)
//   scales_of       the part of a row of scales that is sent with a piece. The parts of all pieces make up the row.
//   TokenScales     the scales of a token. `expect` is called for each (token, piece), one pair ahead; `take` is called
//                   after `prepare` of the same (token, piece).
//   PayloadBuffers  made once per worker, from the address of the bytes behind its ring. `prepare` turns a stage with
//                   a piece of an input row into a `Payload`, which stays valid until the next `prepare`. `sent` is
//                   called after a token's stores were committed, and frees stages of the ring.
//
// All lanes call the functions, with the same arguments.
#pragma once
#include "ring.cuh"

// The bytes of a row of scales that are sent with one piece.
struct ScalePart {
    u32 offset;
    u32 bytes;
};

// One piece of one token in shared memory, ready to be stored, and its scales.
struct Payload {
    const u8* data;
    u32 bytes;
    u32 offset;  // in the output row
    const u8* scales;  // in shared memory; quantising variant only
    ScalePart scale_part;
};

__device__ inline u32 piece_bytes_at(const DispatchParams& p, u32 piece) {
    return min(p.piece_bytes, p.row_bytes_in - piece * p.piece_bytes);
}

// Groups of a token's stores; `store_part` (send.cuh) commits them.
constexpr u32 GROUPS_PER_TOKEN = 2;

// Copies a few bytes of any alignment. Called by all lanes.
__device__ inline void copy_small(u8* to, const u8* from, u32 bytes) {
    for (u32 at = lane_id(); at < bytes; at += WARP) to[at] = from[at];
}

// The scales of a row, read once and written to several rows. They are held in the lanes' registers if they fit, and
// are read again for each store otherwise.
struct ScaleRow {
    static constexpr u32 WORDS = 4;
    const u8* from = nullptr;
    u32 bytes = 0;
    u32 words[WORDS];

    // Whether `bytes` bytes at `base` are whole aligned words and fit the registers.
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
