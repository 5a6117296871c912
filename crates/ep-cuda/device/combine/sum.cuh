// Sums of rows.
//
// A vector is 8 elements: 16 bytes of bf16, 32 of f32. A warp adds a run of vectors of one row after the other, each
// lane its own vectors. Each lane fetches for itself, too, several steps ahead, into shared memory that no other lane
// reads: so nobody waits for another lane, registers hold sums only, and many bytes are on their way.
#pragma once
#include "bf16.cuh"
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
constexpr u32 STEPS = 4;
constexpr u32 FETCH_BYTES = STEPS * STEP_BYTES;
// A run of finished sums, and how many may be on their way out: a peer takes them some microseconds later.
constexpr u32 RUN_BYTES = STRIDE * (WIRE_F32 ? 32 : 16);
constexpr u32 RUNS = 2;
// Sums that are put aside lie where finished ones do: a worker has only one of them at a time.
constexpr u32 ASIDE_BYTES = STRIDE * 8 * sizeof(float);
constexpr u32 OUT_BYTES = RUNS * RUN_BYTES;
static_assert(ASIDE_BYTES <= OUT_BYTES);
// Shared memory of a worker; src/tuning.rs computes the same.
constexpr u32 WORKER_BYTES = FETCH_BYTES + OUT_BYTES;

// One row of a sum: its address, a multiple of 16, and flags in the bits below.
struct Summand {
    u64 word;

    __device__ const u8* row() const { return reinterpret_cast<const u8*>(word & ~15ull); }
    __device__ u32 flags() const { return static_cast<u32>(word) & 15; }
};
constexpr u32 SUM_ALIVE = 1;
constexpr u32 SUM_F32 = 2;
// The own rank's rows are added among themselves first, then to the sum: the first, and the last of several.
constexpr u32 SUM_APART = 4;
constexpr u32 SUM_TOGETHER = 8;

// No row: it adds nothing.
__device__ inline Summand no_summand() { return {0}; }
__device__ inline Summand summand(const void* row, u32 flags) { return {reinterpret_cast<u64>(row) | flags}; }

// The sums of one step's vectors.
struct Sum {
    float values[VECTORS][8];

    __device__ void clear() {
#pragma unroll
        for (u32 turn = 0; turn < VECTORS; turn++)
#pragma unroll
            for (u32 at = 0; at < 8; at++) values[turn][at] = 0.0f;
    }

    // `step` is this lane's first vector.
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

    // Puts the sums aside, lane by lane, where finished ones may still be on their way out, and begins new ones; and
    // adds what was put aside.
    __device__ void park(float* aside) {
        if (lane_id() == 0) copy_read<0>();
        __syncwarp();
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
                packed[0] = pack_bf16(v);
            }
        }
    }
};

// Fetches one step of a row, to this lane's first vector at `step`; what does not exist is zero, which adds nothing.
__device__ inline void fetch_step(uint4* step, const Summand& summand, u32 vector, u32 hidden) {
    const bool f32 = ANY_F32 && (summand.flags() & SUM_F32) != 0;
    const u32 first = vector + lane_id();
    const u8* row = summand.row() + static_cast<u64>(first) * (f32 ? 32 : 16);
    // Elements from this lane's first on.
    const i32 there = (summand.flags() & SUM_ALIVE) != 0 ? static_cast<i32>(hidden - 8 * first) : 0;
#pragma unroll
    for (u32 turn = 0; turn < VECTORS; turn++) {
        const i32 element = 8 * WARP * turn;
        uint4* to = step + turn * (ANY_F32 ? 2 : 1) * WARP;
        cp_async_16(to, row + turn * WARP * (f32 ? 32 : 16), element < there);
        if (ANY_F32 && f32) cp_async_16(to + WARP, row + turn * WARP * 32 + 16, element + 4 < there);
    }
}

// Several sums whose rows are the lanes' summands: bit `begins` at the first lane of each, bit `ends` at the last.
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

// A way through the rows of some sums: all rows of one run of vectors, then of the next run, then of the next sum.
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

// Where the steps of a worker lie: a ring.
struct Steps {
    uint4* memory;  // this lane's first vector of the first
    u32 turn = 0;

    __device__ explicit Steps(u8* memory) : memory(reinterpret_cast<uint4*>(memory) + lane_id()) {}

    __device__ uint4* at(u32 step) const { return memory + step * (STEP_BYTES / sizeof(uint4)); }
    // The one at hand; the one before it is the next to be fetched.
    __device__ uint4* here() const { return at(turn); }
    __device__ uint4* before() const { return at((turn + STEPS - 1) % STEPS); }
    __device__ void next() { turn = (turn + 1) % STEPS; }
};

// What is known of the steps on their way: a byte each, the one at hand lowest.
struct Known {
    static constexpr u32 LAST = 16;   // the last row of its run
    static constexpr u32 VALID = 32;  // there is a step
    static_assert(STEPS == sizeof(u32));
    u32 bytes = 0;

    __device__ void push(u32 what) { bytes = bytes >> 8 | what << 24; }
    __device__ bool is(u32 what) const { return (bytes & what) != 0; }
};

__device__ inline Summand summand_of(const Summand& mine, u32 lane) {
    return {__shfl_sync(0xFFFFFFFFu, mine.word, lane)};
}

// Adds one step.
__device__ inline void add_step(Sum& sum, const uint4* step, u32 flags, float* aside) {
    if ((flags & (SUM_APART | SUM_TOGETHER)) == 0) {
        sum.add(step, (flags & SUM_F32) != 0);
        return;
    }
    if ((flags & SUM_APART) != 0) sum.park(aside);
    sum.add(step, (flags & SUM_F32) != 0);
    if ((flags & SUM_TOGETHER) != 0) sum.add_parked(aside);
}

// Makes the sums, rows of `hidden` elements, and gives each run of each to `give(sum, vector, sums)`: the run's first
// vector, and the sums of which this is the first.
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
        // Steps are counted even when there is none.
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

// Makes one sum of any number of rows, without reading ahead: what does not fit a warp's lanes is rare.
// `rows.at(index)` is called by all lanes, each with an index of its own.
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

// The sums that a batch of list entries ends, where a sum may go on from batch to batch.
struct BatchSums {
    Sums whole;       // those that lie in the batch
    bool long_ends;   // one that began before ends here: entries [long_begin, long_begin + long_count)
    u32 long_begin;
    u32 long_count;
    u32 long_end;     // its last lane
};

// `begin` is kept from batch to batch: the entry where the sum that has not ended began, or NONE.
__device__ inline BatchSums sums_of(const Batch& batch, u32 begins, u32 ends, u32& begin) {
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
    // More begin than end: the last goes on.
    if (__popc(begins) > __popc(sums.whole.ends)) {
        const u32 last = 31 - __clz(begins);
        begin = batch.first + last;
        sums.whole.begins &= ~(1u << last);
    }
    return sums;
}

// Bytes from one partial sum to the next; a whole number of vectors.
__device__ inline u64 slot_bytes(const CombineParams& p) {
    return static_cast<u64>(div_up(p.hidden, 8) * 8) * element_bytes(WIRE_F32);
}

__device__ inline const u8* row_at(const CombineParams& p, u32 row) {
    return p.rows + static_cast<u64>(row) * p.hidden * element_bytes(ROWS_F32);
}
