// sums: adds elements to f32 numbers, looks for the first sum or element that is not finite, or both.
#include "weights.cuh"

template <bool f32>
__device__ inline void add_all(const SumsParams& p) {
    u32 first_bad = ALL_BITS;
    for (u64 at = thread_index(); at < p.count; at += thread_count()) {
        float value = load<f32>(p.elements, at);
        if (p.addend != nullptr) value = p.addend[at] + value;
        if (p.bad != nullptr && !is_finite(value) && at < first_bad) first_bad = static_cast<u32>(at);
        if (p.sums != nullptr) p.sums[at] = value;
    }
    if (first_bad != ALL_BITS) atomicMin(p.bad, first_bad);
}

extern "C" __global__ void __launch_bounds__(CODEC_THREADS) sums(const __grid_constant__ SumsParams p) {
    if (p.f32 != 0) add_all<true>(p);
    else add_all<false>(p);
}
