// Sums of rows, by one warp.
//
// A vector is 8 elements: 16 bytes of bf16, 32 bytes of f32. A run is `STRIDE` consecutive vectors of a row, the same
// number per lane. The warp adds one run of all rows of a sum, then the next run. A step is one run of one row. Each
// lane fetches its own vectors, several steps ahead, into shared memory that no other lane reads: lanes need not
// synchronise, registers hold only sums, and many bytes are in flight.
//
// `KernelKey::program` (src/device.rs) names a variant for each pair of element types by the macros ROWS_F32 (rows and
// results) and WIRE_F32 (partial sums). A new type also changes push.cuh, reduce.cuh and the sizes in src/shared.rs.
#pragma once
#include "bf16.cuh"
#include "worker.cuh"

constexpr u32 element_bytes(bool f32) { return f32 ? 4 : 2; }

// The bits of every NaN in an f32 output.
constexpr u32 CANONICAL_NAN = 0x7FFFFFFFu;

__device__ inline float canonical(float value) { return value != value ? __uint_as_float(CANONICAL_NAN) : value; }

constexpr bool ANY_F32 = ROWS_F32 || WIRE_F32;
// Vectors of a step, of a lane and of the warp.
constexpr u32 VECTORS = combine_vectors(ANY_F32);
constexpr u32 STRIDE = combine_stride(ANY_F32);
static_assert(STRIDE == VECTORS * WARP);
// Bytes of one step in shared memory.
constexpr u32 STEP_BYTES = combine_step_bytes(ANY_F32);
// Steps in flight, including the current one.
constexpr u32 STEPS = COMBINE_STEPS;
constexpr u32 FETCH_BYTES = combine_fetch_bytes(ANY_F32);
// Bytes of a run of finished sums, and the number of runs whose stores may be in flight.
constexpr u32 RUN_BYTES = combine_run_bytes(ANY_F32, WIRE_F32);
constexpr u32 RUNS = COMBINE_RUNS;
// Parked sums use the memory of finished runs: a worker does not need both at the same time.
constexpr u32 ASIDE_BYTES = STRIDE * 8 * sizeof(float);
constexpr u32 OUT_BYTES = RUNS * RUN_BYTES;
static_assert(ASIDE_BYTES <= OUT_BYTES);
constexpr u32 WORKER_BYTES = combine_worker_bytes(ROWS_F32, WIRE_F32);
static_assert(FETCH_BYTES + OUT_BYTES == WORKER_BYTES);

// One row of a sum: its address, which is a multiple of 16, with SUM_* flags in the low four bits.
struct Summand {
    u64 word;

    __device__ const u8* row() const { return reinterpret_cast<const u8*>(word & ~15ull); }
    __device__ u32 flags() const { return static_cast<u32>(word) & 15; }
};
// There is a row.
constexpr u32 SUM_ALIVE = 1;
// The row is f32; otherwise bf16.
constexpr u32 SUM_F32 = 2;
// The rows of a group (`Send::OWN_FIRST`) are added to each other first, then to the sum. The first of several rows
// starts a new sum (APART), the last one adds the two sums (TOGETHER).
constexpr u32 SUM_APART = 4;
constexpr u32 SUM_TOGETHER = 8;

// No row; adds nothing.
__device__ inline Summand no_summand() { return {0}; }
__device__ inline Summand summand(const void* row, u32 flags) { return {reinterpret_cast<u64>(row) | flags}; }

// This lane's sums of one run.
struct Sum {
    float values[VECTORS][8];

    __device__ void clear() {
#pragma unroll
        for (u32 turn = 0; turn < VECTORS; turn++)
#pragma unroll
            for (u32 at = 0; at < 8; at++) values[turn][at] = 0.0f;
    }

    // Adds this lane's vectors of a step. `step`: the first of them.
    __device__ void add(const uint4* step, bool f32) {
#pragma unroll
        for (u32 turn = 0; turn < VECTORS; turn++) {
            const uint4 low = ld_shared_v4(step + turn * (ANY_F32 ? 2 : 1) * WARP);
            const u32 words[4] = {low.x, low.y, low.z, low.w};
            if (ANY_F32 && f32) {
                const uint4 high = ld_shared_v4(step + (2 * turn + 1) * WARP);
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

    // Moves the sums to `aside` and starts new ones. Finished runs may still be leaving from the same memory.
    __device__ void park(float* aside) {
        await_stores_read<0>();
        __syncwarp();
#pragma unroll
        for (u32 turn = 0; turn < VECTORS; turn++)
#pragma unroll
            for (u32 at = 0; at < 8; at++) aside[(8 * turn + at) * WARP + lane_id()] = values[turn][at];
        clear();
    }
    // Adds the parked sums.
    __device__ void add_parked(const float* aside) {
#pragma unroll
        for (u32 turn = 0; turn < VECTORS; turn++)
#pragma unroll
            for (u32 at = 0; at < 8; at++) values[turn][at] = aside[(8 * turn + at) * WARP + lane_id()] + values[turn][at];
    }

    // Writes this lane's vectors, rounded to the output type. `to`: the run's first vector; `elements`: elements of the
    // row from there on, beyond which nothing is written.
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
                packed[0] = pack_bf16(v);
            }
        }
    }
};

// Starts to fetch this lane's vectors of one step of a row. `vector`: the run's first vector. Elements past the end of
// the row are fetched as zeros, which add nothing.
__device__ inline void fetch_step(uint4* step, const Summand& summand, u32 vector, u32 hidden) {
    const bool f32 = ANY_F32 && (summand.flags() & SUM_F32) != 0;
    const u32 first = vector + lane_id();
    const u8* row = summand.row() + static_cast<u64>(first) * (f32 ? 32 : 16);
    // Elements of the row from this lane's first element on.
    const i32 there = (summand.flags() & SUM_ALIVE) != 0 ? static_cast<i32>(hidden - 8 * first) : 0;
#pragma unroll
    for (u32 turn = 0; turn < VECTORS; turn++) {
        const i32 element = 8 * WARP * turn;
        uint4* to = step + turn * (ANY_F32 ? 2 : 1) * WARP;
        cp_async_16(to, row + turn * WARP * (f32 ? 32 : 16), element < there);
        if (ANY_F32 && f32) cp_async_16(to + WARP, row + turn * WARP * 32 + 16, element + 4 < there);
    }
}

// Several sums of the lanes' summands. `begins` has a bit for the first lane of each sum, `ends` for the last lane.
struct Sums {
    u32 begins;
    u32 ends;

    __device__ bool any() const { return ends != 0; }
    __device__ u32 first() const { return __ffs(begins) - 1; }
    __device__ u32 last() const { return __ffs(ends) - 1; }
    __device__ void next() {
        begins &= begins - 1;
        ends &= ends - 1;
    }
};

// Enumerates the steps of some sums: all rows for one run, then for the next run, then the next sum.
struct Walk {
    Sums sums;
    u32 vector = 0;
    u32 lane = 0;
    u32 last = 0;

    __device__ explicit Walk(const Sums& sums) : sums(sums) { rewind(); }
    __device__ bool over() const { return !sums.any(); }
    __device__ void rewind() {
        lane = sums.first();
        last = sums.last();
    }
    __device__ void next(u32 vectors) {
        if (lane++ != last) return;
        vector += STRIDE;
        if (vector >= vectors) {
            vector = 0;
            sums.next();
        }
        rewind();
    }
};

// A worker's ring of steps in shared memory.
struct Steps {
    uint4* memory;  // this lane's first vector of the first step
    u32 turn = 0;

    __device__ explicit Steps(u8* memory) : memory(reinterpret_cast<uint4*>(memory) + lane_id()) {}

    __device__ uint4* at(u32 step) const { return memory + step * (STEP_BYTES / sizeof(uint4)); }
    // The current step; the memory of the step before it is the next to be filled.
    __device__ uint4* here() const { return at(turn); }
    __device__ uint4* before() const { return at((turn + STEPS - 1) % STEPS); }
    __device__ void next() { turn = (turn + 1) % STEPS; }
};

// Flags of the steps in flight: one byte per step, the current step in the lowest byte. The low bits are SUM_* flags.
struct Known {
    static constexpr u32 LAST = 16;   // the last row of its run
    static constexpr u32 VALID = 32;  // there is a step
    static_assert(STEPS == sizeof(u32));
    u32 bytes = 0;

    __device__ void push(u32 what) { bytes = bytes >> 8 | what << 24; }
    __device__ bool is(u32 what) const { return (bytes & what) != 0; }
};

__device__ inline Summand summand_of(const Summand& mine, u32 lane) {
    return {__shfl_sync(ALL_LANES, mine.word, lane)};
}

// Adds one step. `flags`: SUM_*.
__device__ inline void add_step(Sum& sum, const uint4* step, u32 flags, float* aside) {
    if ((flags & (SUM_APART | SUM_TOGETHER)) == 0) {
        sum.add(step, (flags & SUM_F32) != 0);
        return;
    }
    if ((flags & SUM_APART) != 0) sum.park(aside);
    sum.add(step, (flags & SUM_F32) != 0);
    if ((flags & SUM_TOGETHER) != 0) sum.add_parked(aside);
}

// Computes the sums of rows of `hidden` elements. Calls `give(sum, vector, rest)` for each run of each sum: `vector` is
// the run's first vector, and the current sum is the first of `rest`.
template <class Give>
__device__ inline void make_sums(const Sums& sums, const Summand& mine, u32 hidden, u8* memory, const Give& give) {
    auto* aside = reinterpret_cast<float*>(memory + FETCH_BYTES);
    const u32 vectors = div_up(hidden, 8);
    Steps steps(memory);
    Walk ahead(sums);
    Known known;
    const auto fetch = [&](uint4* to) {
        u32 what = 0;
        if (!ahead.over()) {
            const Summand summand = summand_of(mine, ahead.lane);
            fetch_step(to, summand, ahead.vector, hidden);
            what = summand.flags() | Known::VALID | (ahead.lane == ahead.last ? Known::LAST : 0);
            ahead.next(vectors);
        }
        // Commit an empty group after the last step, so that the number of groups in flight stays constant.
        cp_async_commit_group();
        known.push(what);
    };
    for (u32 step = 0; step < STEPS - 1; step++) fetch(steps.at(step));
    Sums here = sums;
    u32 vector = 0;
    Sum sum;
    sum.clear();
#pragma unroll 1
    for (;;) {
        fetch(steps.before());
        if (!known.is(Known::VALID)) return;
        cp_async_wait_group<STEPS - 1>();
        add_step(sum, steps.here(), known.bytes, aside);
        steps.next();
        if (!known.is(Known::LAST)) continue;
        give(sum, vector, here);
        sum.clear();
        vector += STRIDE;
        if (vector >= vectors) {
            vector = 0;
            here.next();
        }
    }
}

// Computes one sum of any number of rows, without reading ahead: sums of more rows than a batch holds are rare.
// `rows.at(index)` is called by all lanes with the same index.
template <class Rows, class Give>
__device__ inline void make_long_sum(u32 count, const Rows& rows, u32 hidden, u8* memory, const Give& give) {
    auto* aside = reinterpret_cast<float*>(memory + FETCH_BYTES);
    auto* step = reinterpret_cast<uint4*>(memory) + lane_id();
    Sum sum;
#pragma unroll 1
    for (u32 vector = 0; vector < div_up(hidden, 8); vector += STRIDE) {
        sum.clear();
#pragma unroll 1
        for (u32 index = 0; index < count; index++) {
            const Summand summand = rows.at(index);
            fetch_step(step, summand, vector, hidden);
            cp_async_commit_group();
            cp_async_wait_group<0>();
            add_step(sum, step, summand.flags(), aside);
        }
        give(sum, vector);
    }
}

// The sums that end in a batch of list entries. A sum may span several batches.
struct BatchSums {
    Sums whole;       // the sums that lie in the batch
    bool long_ends;   // a sum that began in an earlier batch ends here: entries [long_begin, long_begin + long_count)
    u32 long_begin;
    u32 long_count;
    u32 long_end;     // its last lane
};

// `begin` is the caller's state from batch to batch: the entry at which the unfinished sum begins, or NONE.
template <class Entry>
__device__ inline BatchSums sums_of(const Batch<Entry>& batch, u32 begins, u32 ends, u32& begin) {
    BatchSums sums{};
    sums.whole = {begins, ends};
    if (begin != NONE && ends != 0) {
        sums.long_ends = true;
        sums.long_begin = begin;
        sums.long_end = __ffs(ends) - 1;
        sums.long_count = batch.first + sums.long_end + 1 - begin;
        sums.whole.ends &= ends - 1;
        begin = NONE;
    }
    // More sums begin than end: the last one continues in the next batch.
    if (__popc(begins) > __popc(sums.whole.ends)) {
        const u32 last = 31 - __clz(begins);
        begin = batch.first + last;
        sums.whole.begins &= ~(1u << last);
    }
    return sums;
}

// Bytes of the slot of one partial sum: whole vectors.
__device__ inline u64 slot_bytes(const CombineParams& p) {
    return static_cast<u64>(div_up(p.hidden, 8) * 8) * element_bytes(WIRE_F32);
}

__device__ inline const u8* row_at(const CombineParams& p, u32 row) {
    return p.rows + static_cast<u64>(row) * p.hidden * element_bytes(ROWS_F32);
}
