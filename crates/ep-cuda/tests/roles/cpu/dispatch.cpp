// dispatch as the CPU runs it, in one of its variants.
#include "cuda.hpp"
#include "kernels.hpp"

// The names of each kernel are local to its file, because all variants of a kernel are in one program here.
namespace {

#include "dispatch/kernel.cu"

thread_local __align__(128) u8 memory[machine::SHARED_BYTES];

u32 shared_bytes(const void* params) {
    const auto& p = *static_cast<const DispatchParams*>(params);
    return dispatch_bytes(p.common.ranks + rail_domains(p.common), WARPS, p.stages, p.stage_bytes, QUANTIZES);
}

const Kernel kernel(
    NAME, [](const void* params) { dispatch(*static_cast<const DispatchParams*>(params)); }, [] { return memory; },
    shared_bytes, WARPS* WARP);

// A rank that enters, and does nothing more.
const Kernel entering(
    "entering " NAME,
    [](const void* params) {
        const auto& p = *static_cast<const DispatchParams*>(params);
        if (blockIdx.x == 0) enter(p, p.common.own->epoch + 1);
    },
    nullptr, [](const void*) { return 0u; }, WARPS* WARP);

}  // namespace
