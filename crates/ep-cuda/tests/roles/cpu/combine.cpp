// combine as the CPU runs it, in one of its variants.
#include "cuda.hpp"
#include "kernels.hpp"

// The names of each kernel are local to its file, because all variants of a kernel are in one program here.
namespace {

#include "combine/kernel.cu"

thread_local __align__(128) u8 memory[machine::SHARED_BYTES];

u32 shared_bytes(const void* params) {
    const auto& p = *static_cast<const CombineParams*>(params);
    return combine_bytes(p.common.ranks + rail_domains(p.common), TEAMS, CONSUMERS);
}

const Kernel kernel(
    NAME, [](const void* params) { combine(*static_cast<const CombineParams*>(params)); }, [] { return memory; },
    shared_bytes, TEAMS*(1 + CONSUMERS) * WARP);

// A rank that enters, and does nothing more.
const Kernel entering(
    "entering " NAME,
    [](const void* params) {
        const auto& p = *static_cast<const CombineParams*>(params);
        if (blockIdx.x == 0) enter(p, p.common.own->epoch + 1);
    },
    nullptr, [](const void*) { return 0u; }, TEAMS*(1 + CONSUMERS) * WARP);

}  // namespace
