// entries: adds values to elements at some indices, or subtracts them. No index occurs twice.
#include "weights.cuh"

template <bool f32>
__device__ inline void add_all(const EntriesParams& p) {
    for (u64 at = thread_index(); at < p.count; at += thread_count()) {
        const u32 index = p.indices[at];
        const float value = p.values[at], old = load<f32>(p.elements, index);
        store<f32>(p.elements, index, p.subtracts != 0 ? old - value : old + value);
    }
}

extern "C" __global__ void __launch_bounds__(CODEC_THREADS) entries(const __grid_constant__ EntriesParams p) {
    if (p.f32 != 0) add_all<true>(p);
    else add_all<false>(p);
}
