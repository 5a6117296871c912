// combine as the CPU runs it, in one of its variants.
#include "cuda.hpp"
#include "kernels.hpp"

// Every kernel has names of its own, since variants of one kernel are one program here.
namespace {

#include "combine/kernel.cu"

thread_local __align__(128) u8 memory[machine::SHARED_BYTES];

u32 shared_bytes(const void* params) {
    const auto& p = *static_cast<const CombineParams*>(params);
    return div_up(p.common.ranks * sizeof(PeerView), 128) * 128 + WARPS * WORKER_BYTES;
}

const Kernel kernel(
    NAME, [](const void* params) { combine(*static_cast<const CombineParams*>(params)); }, [] { return memory; },
    shared_bytes, WARPS* WARP);

}  // namespace
