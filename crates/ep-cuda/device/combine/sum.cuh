// Sums of rows, and the rows that are summands.
//
// A row is cut into segments, and a segment into slices. A warp adds the same slice of the same segment of all rows of a sum,
// in registers, then that of the next segment. A lane has the same elements of every row, so lanes exchange nothing, and each row
// is read from shared memory once.
//
// A vector is what a lane reads at once: 16 bytes of the wider element type, so 8 elements if rows and wire are bf16, and 4
// if one of them is f32. A lane has up to `TURNS` vectors of a slice.
//
// `KernelKey::program` (src/device.rs) names a variant for each pair of element types by the macros ROWS_F32 (rows and
// results) and WIRE_F32 (partial sums). A new type also changes steps.cuh, push.cuh and reduce.cuh.
#pragma once
#include "bf16.cuh"
#include "worker.cuh"

constexpr u32 element_bytes(bool f32) { return f32 ? 4 : 2; }

// The bits of every NaN in an f32 output.
constexpr u32 CANONICAL_NAN = 0x7FFFFFFFu;

__device__ inline float canonical(float value) { return value != value ? __uint_as_float(CANONICAL_NAN) : value; }

constexpr bool ANY_F32 = ROWS_F32 || WIRE_F32;
constexpr bool SAME_TYPE = ROWS_F32 == WIRE_F32;
// Elements of a vector.
constexpr u32 LENGTH = ANY_F32 ? 4 : 8;
constexpr u32 TURNS = COMBINE_TURNS;
// Slices of a segment, each for one consumer.
constexpr u32 SLICES = CONSUMERS;
// Whether the code for groups of rows (SUM_APART, SUM_TOGETHER) is compiled. Teams of one consumer run only in plain
// mode in one domain (`suits_pairs` in src/tuning.rs), where a token has one row on a rank and no group has several
// rows. So they need no registers for the sum of a group. Teams of two consumers run in every mode.
constexpr bool GROUPS = CONSUMERS > 1;
static_assert(TURNS * 16 * WARP == COMBINE_SLICE_BYTES);

// One row of a sum: its address, which is a multiple of 16, with SUM_* flags in the low four bits.
struct Summand {
    u64 word;

    __device__ const u8* row() const { return reinterpret_cast<const u8*>(word & ~15ull); }
    __device__ u32 flags() const { return static_cast<u32>(word) & 15; }
};
// The summand has a row.
constexpr u32 SUM_ALIVE = 1;
// The row is f32; otherwise bf16.
constexpr u32 SUM_F32 = 2;
// The rows of a group (`Send::GROUP_FIRST`) are added to each other first, and their sum then to the token's sum. In a
// group of several rows, the first row begins a separate sum (APART). When the last row is in it, the separate sum is
// added to the token's sum (TOGETHER).
constexpr u32 SUM_APART = 4;
constexpr u32 SUM_TOGETHER = 8;

// A summand without a row: it adds nothing.
__device__ inline Summand no_summand() { return {0}; }
__device__ inline Summand summand(const void* row, u32 flags) { return {reinterpret_cast<u64>(row) | flags}; }
__device__ inline Summand summand_of(const Summand& mine, u32 lane) {
    return {__shfl_sync(ALL_LANES, mine.word, lane)};
}

// Vectors of a slice of a segment of `count` vectors: each consumer has one, and the last ones may be shorter or empty.
__device__ inline u32 slice_of(u32 count) { return div_up(count, SLICES * WARP) * WARP; }

// A share of a row, which is cut into as few segments as possible, all but the last of equal size. Usually the share is the whole
// row, which one team adds. If a rank has few tokens, its rows have 2 or 4 shares, which are items of their own, so that several
// teams work on a token. Ranks of one combine may have teams of different sizes, so the bounds of a share do not depend on them.
struct Segments {
    u32 first;   // the share's first vector
    u32 end;     // one past its last vector
    u32 stride;  // vectors of a full segment

    __device__ explicit Segments(u32 hidden, u32 share_bits = 0, u32 share = 0) {
        const u32 vectors = div_up(hidden, LENGTH);
        const u32 most = div_up(div_up(vectors, 1u << share_bits), 2 * WARP) * 2 * WARP;
        first = min(share * most, vectors);
        end = min(first + most, vectors);
        const u32 segments = max(div_up(end - first, SLICES * TURNS * WARP), 1u);
        stride = SLICES * slice_of(div_up(end - first, segments));
    }
    // Vectors of the segment that begins at `vector`.
    __device__ u32 count(u32 vector) const { return min(stride, end - vector); }
};

// Where sums are stored.
struct GlobalTarget {
    u8* to;

    __device__ GlobalTarget plus(u32 bytes) const { return {to + bytes}; }
    template <class Vector>
    __device__ void store(const Vector& vector) const {
        *reinterpret_cast<Vector*>(to) = vector;
    }
};
struct SharedTarget {
    SharedAddress to;

    __device__ SharedTarget plus(u32 bytes) const { return {to + bytes}; }
    __device__ void store(const uint4& vector) const { st_shared_v4(to, vector); }
    __device__ void store(const uint2& vector) const { st_shared_v2(to, vector); }
};

// This lane's sums of a slice.
struct Sum {
    // Number of turns whose bounds `store` checks together.
    static constexpr u32 BUNCH = 2;
    float values[TURNS][LENGTH];

    __device__ void clear() {
#pragma unroll
        for (u32 turn = 0; turn < TURNS; turn++)
#pragma unroll
            for (u32 at = 0; at < LENGTH; at++) values[turn][at] = 0.0f;
    }

    // Adds a slice of `turns` vectors per lane. `mine`: this lane's first vector. If the slice has TURNS vectors per
    // lane, all of them are loaded before the first one is used, because one load takes as long as all of them
    // together; otherwise two are loaded at a time. Lanes beyond the end of a row add undefined bytes to sums that are
    // never stored.
    __device__ void add(SharedAddress mine, u32 turns, bool f32) {
        if (turns == TURNS) return add_turns<0, TURNS>(mine, f32);
        add_some<0>(mine, turns, f32);
    }

    __device__ void add(const Sum& other) {
#pragma unroll
        for (u32 turn = 0; turn < TURNS; turn++)
#pragma unroll
            for (u32 at = 0; at < LENGTH; at++) values[turn][at] += other.values[turn][at];
    }

    // Writes the sums, rounded to the output type. `to`: where the slice's first vector goes; `count`: its vectors; `lane`: this
    // lane.
    template <bool f32, class Target>
    __device__ void store(const Target& to, u32 count, u32 lane) const {
        const Target mine = to.plus(lane * LENGTH * element_bytes(f32));
#pragma unroll
        for (u32 first = 0; first < TURNS; first += BUNCH) {
            if (first * WARP >= count) break;
            const u32 end = min(first + BUNCH, TURNS);
            if (end * WARP <= count) {
#pragma unroll
                for (u32 turn = first; turn < end; turn++) store_vector<f32>(mine, turn);
            } else {
#pragma unroll
                for (u32 turn = first; turn < end; turn++)
                    if (turn * WARP + lane < count) store_vector<f32>(mine, turn);
            }
        }
    }

   private:
    // Adds the turns from `first` to `turns` - 1. It must not read turn `turns`, which is in the slice of the other
    // consumer: that consumer may be storing its sums there.
    template <u32 first>
    __device__ void add_some(SharedAddress mine, u32 turns, bool f32) {
        if constexpr (first + 1 < TURNS) {
            if (turns >= first + 2) {
                add_turns<first, first + 2>(mine, f32);
                add_some<first + 2>(mine, turns, f32);
                return;
            }
        }
        if constexpr (first < TURNS) {
            if (turns > first) add_turns<first, first + 1>(mine, f32);
        }
    }

    template <u32 first, u32 end>
    __device__ void add_turns(SharedAddress mine, bool f32) {
        uint4 words[end - first];
#pragma unroll
        for (u32 turn = first; turn < end; turn++) words[turn - first] = load(mine, turn, f32);
#pragma unroll
        for (u32 turn = first; turn < end; turn++) {
            if (f32)
                add_f32(values[turn], words[turn - first]);
            else
                add_bf16(values[turn], words[turn - first]);
        }
    }

    // This lane's vector of a turn. `mine`: this lane's first vector.
    __device__ static uint4 load(SharedAddress mine, u32 turn, bool f32) {
        if (!ANY_F32 || f32) return ld_shared_v4(mine + 16 * WARP * turn);
        const uint2 half = ld_shared_v2(mine + 8 * WARP * turn);
        return make_uint4(half.x, half.y, 0, 0);
    }

    // `mine`: where this lane's first vector goes.
    template <bool f32, class Target>
    __device__ void store_vector(const Target& mine, u32 turn) const {
        const float(&v)[LENGTH] = values[turn];
        const Target to = mine.plus(turn * WARP * LENGTH * element_bytes(f32));
        if constexpr (f32)
            to.store(make_uint4(__float_as_uint(canonical(v[0])), __float_as_uint(canonical(v[1])),
                                __float_as_uint(canonical(v[2])), __float_as_uint(canonical(v[3]))));
        else
            to.store(pack_bf16(v));
    }

    __device__ static void add_bf16(float (&sum)[LENGTH], const uint4& vector) {
        const u32 words[4] = {vector.x, vector.y, vector.z, vector.w};
#pragma unroll
        for (u32 word = 0; word < LENGTH / 2; word++) {
            sum[2 * word] += first_of_two(words[word]);
            sum[2 * word + 1] += second_of_two(words[word]);
        }
    }

    __device__ static void add_f32(float (&sum)[LENGTH], const uint4& vector) {
        const u32 words[4] = {vector.x, vector.y, vector.z, vector.w};
#pragma unroll
        for (u32 word = 0; word < 4; word++) sum[word] += __uint_as_float(words[word]);
    }
};

// Several sums of the lanes' summands. `begins` has a bit for the first lane of each sum, `ends` for the last lane.
struct Sums {
    u32 begins;
    u32 ends;

    __device__ bool any() const { return ends != 0; }
    __device__ u32 first() const { return __ffs(begins) - 1; }
    __device__ u32 last() const { return __ffs(ends) - 1; }
    // The lanes of the first sum.
    __device__ u32 lanes() const { return (2u << last()) - (1u << first()); }
    __device__ void next() {
        begins &= begins - 1;
        ends &= ends - 1;
    }
};

// The sums that end in a batch of list entries. A sum may span several batches.
struct BatchSums {
    Sums whole;       // the sums that begin and end in the batch
    bool long_ends;   // a sum that began in an earlier batch ends here: entries [long_begin, long_begin + long_count)
    u32 long_begin;
    u32 long_count;
    u32 long_end;     // the lane of its last entry
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

// Bytes of the slot of one partial sum: its elements, rounded up to a multiple of 8.
__device__ inline u64 slot_bytes(const CombineParams& p) {
    return static_cast<u64>(div_up(p.hidden, 8) * 8) * element_bytes(WIRE_F32);
}

__device__ inline const u8* row_at(const CombineParams& p, u32 row) {
    return p.rows + static_cast<u64>(row) * p.hidden * element_bytes(ROWS_F32);
}
