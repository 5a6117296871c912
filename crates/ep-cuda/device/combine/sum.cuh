// Sums of rows in registers: each thread of a worker holds `VECTORS` times 8 elements of the piece at hand.
#pragma once
#include "worker.cuh"

using Adder = Worker<WORKER_WARPS>;

constexpr u32 PIECE_ELEMENTS_MAX = Adder::THREADS * 8 * VECTORS;

constexpr u32 element_bytes(bool f32) { return f32 ? 4 : 2; }

__device__ inline float canonical(float value) { return value != value ? __uint_as_float(0x7FFFFFFFu) : value; }

struct Sum {
    float values[VECTORS][8];

    __device__ void clear() {
#pragma unroll
        for (u32 vector = 0; vector < VECTORS; vector++)
#pragma unroll
            for (u32 at = 0; at < 8; at++) values[vector][at] = 0.0f;
    }

    __device__ void add(const Sum& other) {
#pragma unroll
        for (u32 vector = 0; vector < VECTORS; vector++)
#pragma unroll
            for (u32 at = 0; at < 8; at++) values[vector][at] += other.values[vector][at];
    }

    // Adds a piece of `count` vectors of 8 elements that lies in shared memory.
    template <bool f32>
    __device__ void add(const u8* stage, u32 count, u32 thread) {
        const auto* packed = reinterpret_cast<const uint4*>(stage);
#pragma unroll
        for (u32 vector = 0; vector < VECTORS; vector++) {
            const u32 at = vector * Adder::THREADS + thread;
            if (at >= count) continue;
            if constexpr (f32) {
#pragma unroll
                for (u32 half = 0; half < 2; half++) {
                    const uint4 four = packed[2 * at + half];
                    values[vector][4 * half] += __uint_as_float(four.x);
                    values[vector][4 * half + 1] += __uint_as_float(four.y);
                    values[vector][4 * half + 2] += __uint_as_float(four.z);
                    values[vector][4 * half + 3] += __uint_as_float(four.w);
                }
            } else {
                const uint4 eight = packed[at];
                const u32 words[4] = {eight.x, eight.y, eight.z, eight.w};
#pragma unroll
                for (u32 word = 0; word < 4; word++) {
                    values[vector][2 * word] += __uint_as_float(words[word] << 16);
                    values[vector][2 * word + 1] += __uint_as_float(words[word] & 0xFFFF0000u);
                }
            }
        }
    }

    // Writes the piece, rounded, to shared or global memory; `elements` of it exist.
    template <bool f32>
    __device__ void store(u8* to, u32 elements, u32 thread) const {
        auto* packed = reinterpret_cast<uint4*>(to);
#pragma unroll
        for (u32 vector = 0; vector < VECTORS; vector++) {
            const u32 at = vector * Adder::THREADS + thread;
            if (8 * at >= elements) continue;
            const float(&v)[8] = values[vector];
            if constexpr (f32) {
#pragma unroll
                for (u32 half = 0; half < 2; half++)
                    if (8 * at + 4 * half < elements)
                        packed[2 * at + half] = make_uint4(
                            __float_as_uint(canonical(v[4 * half])), __float_as_uint(canonical(v[4 * half + 1])),
                            __float_as_uint(canonical(v[4 * half + 2])), __float_as_uint(canonical(v[4 * half + 3])));
            } else {
                packed[at] = make_uint4(cvt_rn_bf16x2(v[1], v[0]), cvt_rn_bf16x2(v[3], v[2]), cvt_rn_bf16x2(v[5], v[4]),
                                        cvt_rn_bf16x2(v[7], v[6]));
            }
        }
    }
};

// One piece of a row: its place in elements.
struct Piece {
    u32 first;
    u32 elements;

    __device__ Piece(const CombineParams& p, u32 piece)
        : first(piece * p.piece_elements), elements(min(p.piece_elements, p.hidden - first)) {}
    __device__ u32 vectors() const { return div_up(elements, 8); }
    // Bytes that are copied: a multiple of 16.
    __device__ u32 bytes(bool f32) const { return div_up(elements * element_bytes(f32), 16) * 16; }
    __device__ u32 offset(bool f32) const { return first * element_bytes(f32); }
};

// Bytes from one partial sum to the next; a whole number of vectors.
__device__ inline u64 slot_bytes(const CombineParams& p) {
    return static_cast<u64>(div_up(p.hidden, 8) * 8) * element_bytes(WIRE_F32);
}

__device__ inline const u8* row_at(const CombineParams& p, u32 row) {
    return p.rows + static_cast<u64>(row) * p.hidden * element_bytes(ROWS_F32);
}
