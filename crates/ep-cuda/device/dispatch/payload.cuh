// What a token becomes before it is sent; payload_copy.cuh or payload_quantize.cuh says how.
#pragma once
#include "worker.cuh"

// One piece of one token in shared memory, ready to be stored, and the scales that belong to it.
struct Payload {
    const u8* data;
    u32 bytes;
    u32 offset;  // in the output row
    const u8* scales;
    u32 scale_bytes;
    u32 scale_offset;  // in the row of scales
};

__device__ inline u32 piece_bytes_at(const DispatchParams& p, u32 piece) {
    return min(p.piece_bytes, p.row_bytes_in - piece * p.piece_bytes);
}
