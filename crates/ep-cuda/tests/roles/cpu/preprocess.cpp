// preprocess as the CPU runs it.
#include "cuda.hpp"
#include "kernels.hpp"

// Every kernel has names of its own, since variants of one kernel are one program here.
namespace {

#include "preprocess/kernel.cu"

thread_local __align__(16) u32 shared[machine::SHARED_BYTES / sizeof(u32)];

u32 shared_bytes(const void* params) {
    const auto& p = *static_cast<const PreprocessParams*>(params);
    const u32 experts = p.common.experts, ranks = p.common.ranks;
    return preprocess_bytes(experts, ranks, rail_domains(p.common), max(experts, ranks), p.tile);
}

// Fewer threads than on a GPU: how many there are is the launch's affair.
const Kernel kernel(
    NAME, [](const void* params) { preprocess(*static_cast<const PreprocessParams*>(params)); },
    [] { return reinterpret_cast<u8*>(shared); }, shared_bytes, 2 * WARP);

}  // namespace
