// weight_rows: multiplies experts' rows by their weights, in f32 with one rounding; backward, computes both gradients.
// One warp handles one row at a time. A local kernel: it writes `out` and `dots`, needs no peer, and runs on all SMs.
#include "bf16.cuh"
#include "params.cuh"

// 8 elements in their memory format.
template <bool f32>
struct Packed {
    uint4 words[f32 ? 2 : 1];

    __device__ void load(const u8* row, u32 vector) {
        const auto* from = reinterpret_cast<const uint4*>(row) + static_cast<u64>(vector) * (f32 ? 2 : 1);
#pragma unroll
        for (u32 half = 0; half < (f32 ? 2 : 1); half++) words[half] = from[half];
    }

    __device__ void unpack(float (&to)[8]) const {
        if constexpr (f32) {
#pragma unroll
            for (u32 half = 0; half < 2; half++) {
                to[4 * half] = __uint_as_float(words[half].x);
                to[4 * half + 1] = __uint_as_float(words[half].y);
                to[4 * half + 2] = __uint_as_float(words[half].z);
                to[4 * half + 3] = __uint_as_float(words[half].w);
            }
        } else {
            unpack_bf16(words[0], to);
        }
    }
};

template <bool f32>
__device__ inline void store(u8* row, u32 vector, const float (&v)[8]) {
    auto* to = reinterpret_cast<uint4*>(row) + static_cast<u64>(vector) * (f32 ? 2 : 1);
    if constexpr (f32) {
#pragma unroll
        for (u32 half = 0; half < 2; half++)
            to[half] = make_uint4(__float_as_uint(v[4 * half]), __float_as_uint(v[4 * half + 1]),
                                  __float_as_uint(v[4 * half + 2]), __float_as_uint(v[4 * half + 3]));
    } else {
        to[0] = pack_bf16(v);
    }
}

// Vectors that a lane has in flight at a time.
constexpr u32 TURNS = 4;

template <bool values_f32, bool out_f32, bool gradients>
__device__ inline void weight_all(const WeightRowsParams& p) {
    const u32 vectors = p.hidden / 8;
    const u32 warps = gridDim.x * blockDim.x / WARP;
    for (u32 row = blockIdx.x * (blockDim.x / WARP) + warp_id(); row < p.count; row += warps) {
        const u64 elements = static_cast<u64>(row) * p.hidden;
        const u8* values = p.values + elements * (values_f32 ? 4 : 2);
        const u8* rows = p.rows + elements * (out_f32 ? 4 : 2);
        u8* out = p.out + elements * (out_f32 ? 4 : 2);
        const float weight = p.weights[row];
        float dot = 0.0f;
        for (u32 first = lane_id(); first < vectors; first += TURNS * WARP) {
            Packed<values_f32> value[TURNS];
            Packed<out_f32> other[TURNS];
#pragma unroll
            for (u32 turn = 0; turn < TURNS; turn++) {
                const u32 vector = first + turn * WARP;
                if (vector >= vectors) continue;
                value[turn].load(values, vector);
                if (gradients) other[turn].load(rows, vector);
            }
#pragma unroll
            for (u32 turn = 0; turn < TURNS; turn++) {
                const u32 vector = first + turn * WARP;
                if (vector >= vectors) continue;
                float v[8];
                value[turn].unpack(v);
                if (gradients) {
                    float w[8];
                    other[turn].unpack(w);
#pragma unroll
                    for (u32 at = 0; at < 8; at++) dot += v[at] * w[at];
                }
#pragma unroll
                for (u32 at = 0; at < 8; at++) v[at] *= weight;
                store<out_f32>(out, vector, v);
            }
        }
        if (!gradients) continue;
#pragma unroll
        for (u32 distance = WARP / 2; distance > 0; distance /= 2) dot += __shfl_xor_sync(ALL_LANES, dot, distance);
        if (lane_id() == 0) p.dots[row] = dot;
    }
}

template <bool values_f32, bool out_f32>
__device__ inline void weight_typed(const WeightRowsParams& p) {
    if (p.rows == nullptr) weight_all<values_f32, out_f32, false>(p);
    else weight_all<values_f32, out_f32, true>(p);
}

extern "C" __global__ void __launch_bounds__(WEIGHT_ROWS_THREADS) weight_rows(const __grid_constant__ WeightRowsParams p) {
    if (p.values_f32 != 0) {
        if (p.out_f32 != 0) weight_typed<true, true>(p);
        else weight_typed<true, false>(p);
    } else {
        if (p.out_f32 != 0) weight_typed<false, true>(p);
        else weight_typed<false, false>(p);
    }
}
