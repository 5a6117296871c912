// residuals: counts the residuals `expert - base` by magnitude, or collects those at or above a floor. A block handles a tile of
// RESIDUAL_TILE elements at a time, a lane every 32nd element of its warp's part, so that collected residuals keep their order.
#include "weights.cuh"

constexpr u32 WARPS = CODEC_THREADS / WARP;
// Elements of a tile that a lane has.
constexpr u32 TURNS = RESIDUAL_TILE / CODEC_THREADS;
static_assert(TURNS * CODEC_THREADS == RESIDUAL_TILE && RESIDUAL_TILE <= 65536, "positions in a block of 65,536");

__device__ inline u32 element_of(u32 turn) {
    return (threadIdx.x / WARP * TURNS + turn) * WARP + lane_of();
}

// Reads a lane's residuals of a tile. Those after the end are zero.
template <bool f32>
__device__ inline void read(const ResidualsParams& p, u64 tile, float (&values)[TURNS]) {
#pragma unroll
    for (u32 turn = 0; turn < TURNS; turn++) {
        const u64 at = tile * RESIDUAL_TILE + element_of(turn);
        values[turn] = 0.0f;
        if (at < p.count) {
            values[turn] = load<f32>(p.expert, at);
            if (p.base != nullptr) values[turn] = values[turn] - load<f32>(p.base, at);
        }
    }
}

template <bool f32>
__device__ inline void count_all(const ResidualsParams& p, u64 tiles) {
    __shared__ u32 counts[RESIDUAL_BINS];
    for (u32 bin = threadIdx.x; bin < RESIDUAL_BINS; bin += blockDim.x) counts[bin] = 0;
    __syncthreads();
    for (u64 tile = blockIdx.x; tile < tiles; tile += gridDim.x) {
        float values[TURNS];
        read<f32>(p, tile, values);
#pragma unroll
        for (u32 turn = 0; turn < TURNS; turn++)
            if (tile * RESIDUAL_TILE + element_of(turn) < p.count)
                atomicAdd(&counts[magnitude_of(values[turn]) >> RESIDUAL_BIN_SHIFT], 1u);
    }
    __syncthreads();
    for (u32 bin = threadIdx.x; bin < RESIDUAL_BINS; bin += blockDim.x)
        if (counts[bin] != 0) atomicAdd(&p.counts[bin], counts[bin]);
}

template <bool f32>
__device__ inline void collect_all(const ResidualsParams& p, u64 tiles) {
    __shared__ u32 found[WARPS];
    __shared__ u32 start;
    const u32 warp = threadIdx.x / WARP, lane = lane_of();
    for (u64 tile = blockIdx.x; tile < tiles; tile += gridDim.x) {
        float values[TURNS];
        read<f32>(p, tile, values);
        u32 hits[TURNS], of_warp = 0;
#pragma unroll
        for (u32 turn = 0; turn < TURNS; turn++) {
            const bool inside = tile * RESIDUAL_TILE + element_of(turn) < p.count;
            hits[turn] = __ballot_sync(ALL_LANES, inside && magnitude_of(values[turn]) >= p.floor);
            of_warp += __popc(hits[turn]);
        }
        if (lane == 0) found[warp] = of_warp;
        __syncthreads();
        if (threadIdx.x == 0) {
            u32 all = 0;
            for (u32 other = 0; other < WARPS; other++) all += found[other];
            start = all == 0 ? 0 : atomicAdd(p.cursor, all);
            p.segments[2 * tile] = start;
            p.segments[2 * tile + 1] = all;
        }
        __syncthreads();
        u32 to = start;
        for (u32 other = 0; other < warp; other++) to += found[other];
#pragma unroll
        for (u32 turn = 0; turn < TURNS; turn++) {
            if (hits[turn] >> lane & 1) {
                const u32 place = to + __popc(hits[turn] & ((1u << lane) - 1));
                // The place is always inside, unless another thread of the program changes the elements meanwhile.
                if (place < p.capacity) {
                    const u64 at = tile * RESIDUAL_TILE + element_of(turn);
                    p.positions[place] = static_cast<u16>(at);
                    p.values[place] = values[turn];
                }
            }
            to += __popc(hits[turn]);
        }
        // The next tile overwrites `found` and `start`.
        __syncthreads();
    }
}

template <bool f32>
__device__ inline void run(const ResidualsParams& p) {
    const u64 tiles = p.count / RESIDUAL_TILE + (p.count % RESIDUAL_TILE != 0);
    if (p.counts != nullptr) count_all<f32>(p, tiles);
    else collect_all<f32>(p, tiles);
}

extern "C" __global__ void __launch_bounds__(CODEC_THREADS) residuals(const __grid_constant__ ResidualsParams p) {
    if (p.f32 != 0) run<true>(p);
    else run<false>(p);
}
