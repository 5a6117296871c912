// Sums of rows.
//
// A vector is 8 elements: 16 bytes of bf16, 32 of f32. A warp adds a run of vectors of one row after the other, each
// lane its own vectors. Each lane fetches for itself, too, several steps ahead, into shared memory that no other lane
// reads: so nobody waits for another lane, registers hold sums only, and many bytes are on their way.
#pragma once
#include "worker.cuh"

constexpr u32 element_bytes(bool f32) { return f32 ? 4 : 2; }

__device__ inline float canonical(float value) { return value != value ? __uint_as_float(0x7FFFFFFFu) : value; }

constexpr bool ANY_F32 = ROWS_F32 || WIRE_F32;
// Vectors that a lane adds in one step, and a warp.
constexpr u32 VECTORS = ANY_F32 ? 2 : 4;
constexpr u32 STRIDE = VECTORS * WARP;
// Bytes of one step in shared memory.
constexpr u32 STEP_BYTES = STRIDE * (ANY_F32 ? 32 : 16);
// Steps that are on their way, the one at hand included.
constexpr u32 STEPS = 5;
// Shared memory of a worker: steps, and room for finished runs that are sent, or for sums that are put aside.
constexpr u32 FETCH_BYTES = STEPS * STEP_BYTES;
constexpr u32 ASIDE_BYTES = 2 * STRIDE * 16 * (ANY_F32 ? 2 : 1);
static_assert(ASIDE_BYTES >= STRIDE * 8 * sizeof(float), "sums that are put aside are f32");

// One row of a sum; flags are below.
struct Summand {
    u64 row;
    u32 flags;
};
constexpr u32 SUM_ALIVE = 1;
constexpr u32 SUM_F32 = 2;
// The own rank's rows are added among themselves first, then to the sum: the first, and the last of several.
constexpr u32 SUM_APART = 4;
constexpr u32 SUM_TOGETHER = 8;

// The sums of one step's vectors.
struct Sum {
    float values[VECTORS][8];

    __device__ void clear() {
#pragma unroll
        for (u32 turn = 0; turn < VECTORS; turn++)
#pragma unroll
            for (u32 at = 0; at < 8; at++) values[turn][at] = 0.0f;
    }

    __device__ void add(const uint4* step, bool f32) {
#pragma unroll
        for (u32 turn = 0; turn < VECTORS; turn++) {
            const uint4 low = step[turn * (ANY_F32 ? 2 : 1) * WARP + lane_id()];
            const u32 words[4] = {low.x, low.y, low.z, low.w};
            if (ANY_F32 && f32) {
                const uint4 high = step[(2 * turn + 1) * WARP + lane_id()];
                const u32 more[4] = {high.x, high.y, high.z, high.w};
#pragma unroll
                for (u32 at = 0; at < 4; at++) {
                    values[turn][at] += __uint_as_float(words[at]);
                    values[turn][4 + at] += __uint_as_float(more[at]);
                }
            } else {
#pragma unroll
                for (u32 at = 0; at < 4; at++) {
                    values[turn][2 * at] += __uint_as_float(words[at] << 16);
                    values[turn][2 * at + 1] += __uint_as_float(words[at] & 0xFFFF0000u);
                }
            }
        }
    }

    // Puts the sums aside, lane by lane, and begins new ones; and adds what was put aside.
    __device__ void park(float* aside) {
#pragma unroll
        for (u32 turn = 0; turn < VECTORS; turn++)
#pragma unroll
            for (u32 at = 0; at < 8; at++) aside[(8 * turn + at) * WARP + lane_id()] = values[turn][at];
        clear();
    }
    __device__ void add_parked(const float* aside) {
#pragma unroll
        for (u32 turn = 0; turn < VECTORS; turn++)
#pragma unroll
            for (u32 at = 0; at < 8; at++) values[turn][at] = aside[(8 * turn + at) * WARP + lane_id()] + values[turn][at];
    }

    // Writes this lane's vectors, rounded; those of the run begin at `to`, of which `elements` exist.
    template <bool f32>
    __device__ void store(u8* to, u32 elements) const {
#pragma unroll
        for (u32 turn = 0; turn < VECTORS; turn++) {
            const u32 at = turn * WARP + lane_id();
            const float(&v)[8] = values[turn];
            auto* packed = reinterpret_cast<uint4*>(to + at * (f32 ? 32 : 16));
            if constexpr (f32) {
#pragma unroll
                for (u32 half = 0; half < 2; half++)
                    if (8 * at + 4 * half < elements)
                        packed[half] = make_uint4(
                            __float_as_uint(canonical(v[4 * half])), __float_as_uint(canonical(v[4 * half + 1])),
                            __float_as_uint(canonical(v[4 * half + 2])), __float_as_uint(canonical(v[4 * half + 3])));
            } else if (8 * at < elements) {
                packed[0] = make_uint4(cvt_rn_bf16x2(v[1], v[0]), cvt_rn_bf16x2(v[3], v[2]), cvt_rn_bf16x2(v[5], v[4]),
                                       cvt_rn_bf16x2(v[7], v[6]));
            }
        }
    }
};

// Fetches one step of a row: what of it exists.
__device__ inline void fetch_step(uint4* step, const Summand& summand, u32 vector, u32 hidden) {
    if ((summand.flags & SUM_ALIVE) == 0) return;
    const bool f32 = ANY_F32 && (summand.flags & SUM_F32) != 0;
    const u8* row = reinterpret_cast<const u8*>(summand.row) + static_cast<u64>(vector + lane_id()) * (f32 ? 32 : 16);
#pragma unroll
    for (u32 turn = 0; turn < VECTORS; turn++) {
        const u32 element = 8 * (vector + turn * WARP + lane_id());
        uint4* to = step + turn * (ANY_F32 ? 2 : 1) * WARP + lane_id();
        if (element < hidden) cp_async_16(to, row + turn * WARP * (f32 ? 32 : 16));
        if (ANY_F32 && f32 && element + 4 < hidden) cp_async_16(to + WARP, row + turn * WARP * 32 + 16);
    }
}

// The rows of one sum, a warp's worth at a time: `rows.at(index)` is called by all lanes, each with an index of its own.
template <class Rows>
struct Window {
    const Rows& rows;
    u32 count;
    u32 window = 0;
    Summand mine;

    __device__ Window(const Rows& rows, u32 count) : rows(rows), count(count) { fetch(); }

    __device__ void fetch() {
        const u32 index = window * WARP + lane_id();
        mine = index < count ? rows.at(index) : Summand{0, 0};
    }

    __device__ Summand at(u32 index) {
        if (index / WARP != window) {
            window = index / WARP;
            fetch();
        }
        return {__shfl_sync(0xFFFFFFFFu, mine.row, index % WARP), __shfl_sync(0xFFFFFFFFu, mine.flags, index % WARP)};
    }

    __device__ u32 flags(u32 index) {
        if (index / WARP != window) {
            window = index / WARP;
            fetch();
        }
        return __shfl_sync(0xFFFFFFFFu, mine.flags, index % WARP);
    }
};

// A row's place in the steps of a sum: all rows of one run of vectors, then of the next run.
struct Step {
    u32 vector = 0;
    u32 row = 0;

    __device__ void next(u32 count) {
        if (++row == count) {
            row = 0;
            vector += STRIDE;
        }
    }
};

// Adds `count` rows of `hidden` elements, and gives each run of sums to `give(sum, vector)`, the run's first vector.
template <class Rows, class Give>
__device__ inline void sum_rows(u32 count, u32 hidden, u8* memory, const Rows& rows, const Give& give) {
    auto* steps = reinterpret_cast<uint4*>(memory);
    auto* aside = reinterpret_cast<float*>(memory + FETCH_BYTES);
    constexpr u32 STEP = STEP_BYTES / sizeof(uint4);
    Window<Rows> window(rows, count);
    const u32 vectors = div_up(hidden, 8);
    Step ahead, here;
    u32 fetch_at = 0, add_at = 0;
    const auto fetch = [&] {
        if (ahead.vector < vectors) {
            fetch_step(steps + fetch_at * STEP, window.at(ahead.row), ahead.vector, hidden);
            ahead.next(count);
        }
        // Steps are counted even when there is none.
        cp_async_commit_group();
        fetch_at = fetch_at + 1 == STEPS ? 0 : fetch_at + 1;
    };
    for (u32 step = 0; step < STEPS - 1; step++) fetch();
    Sum sum;
    sum.clear();
#pragma unroll 1
    while (here.vector < vectors) {
        fetch();
        cp_async_wait_group<STEPS - 1>();
        const u32 flags = window.flags(here.row);
        if ((flags & SUM_APART) != 0) sum.park(aside);
        if ((flags & SUM_ALIVE) != 0) sum.add(steps + add_at * STEP, (flags & SUM_F32) != 0);
        if ((flags & SUM_TOGETHER) != 0) sum.add_parked(aside);
        add_at = add_at + 1 == STEPS ? 0 : add_at + 1;
        if (here.row + 1 == count) {
            give(sum, here.vector);
            sum.clear();
        }
        here.next(count);
    }
    cp_async_wait_group<0>();
}

// Bytes from one partial sum to the next; a whole number of vectors.
__device__ inline u64 slot_bytes(const CombineParams& p) {
    return static_cast<u64>(div_up(p.hidden, 8) * 8) * element_bytes(WIRE_F32);
}

__device__ inline const u8* row_at(const CombineParams& p, u32 row) {
    return p.rows + static_cast<u64>(row) * p.hidden * element_bytes(ROWS_F32);
}
