// dense: converts a top-k routing to a routing map and dense probabilities. A local kernel: it writes only its two
// outputs and needs no peer. One warp handles one token at a time, one lane one expert, and each element is written
// once: outputs need not be cleared, no addition is atomic, and weights of one expert are added in the order of k.
#include "params.cuh"

template <typename Index>
__device__ inline void spread(const DenseParams& p) {
    const u32 warps = gridDim.x * blockDim.x / WARP;
    const u32 warp = (blockIdx.x * blockDim.x + threadIdx.x) / WARP;
    const u32 lane = threadIdx.x % WARP;
    for (u32 token = warp; token < p.tokens; token += warps) {
        const u64 choices = static_cast<u64>(token) * p.k;
        const auto* indices = reinterpret_cast<const Index*>(p.indices) + choices;
        const u64 row = static_cast<u64>(token) * p.experts;
        for (u32 expert = lane; expert < p.experts; expert += WARP) {
            bool chosen = false;
            float sum = 0.0f;
            for (u32 at = 0; at < p.k; at++) {
                if (static_cast<i64>(indices[at]) != static_cast<i64>(expert)) continue;
                chosen = true;
                if (p.weights != nullptr) sum += p.weights[choices + at];
            }
            if (p.map != nullptr) p.map[row + expert] = chosen ? 1 : 0;
            if (p.probs != nullptr) p.probs[row + expert] = sum;
        }
    }
}

extern "C" __global__ void __launch_bounds__(DENSE_THREADS) dense(const __grid_constant__ DenseParams p) {
    if (p.wide != 0) spread<i64>(p);
    else spread<i32>(p);
}
