// preprocess as the CPU runs it.
#include "cuda.hpp"
#include "kernels.hpp"

// The names of each kernel are local to its file, because all variants of a kernel are in one program here.
namespace {

#include "preprocess/kernel.cu"

thread_local __align__(16) u32 shared[machine::SHARED_BYTES / sizeof(u32)];

u32 shared_bytes(const void* params) {
    const auto& p = *static_cast<const PreprocessParams*>(params);
    const u32 experts = p.common.experts, ranks = p.common.ranks;
    return preprocess_bytes(experts, ranks, rail_domains(p.common), max(experts, ranks), p.tile);
}

// Fewer threads than on a GPU: the kernel reads their number from the launch.
const Kernel kernel(
    NAME, [](const void* params) { preprocess(*static_cast<const PreprocessParams*>(params)); },
    [] { return reinterpret_cast<u8*>(shared); }, shared_bytes, 2 * WARP);

}  // namespace
