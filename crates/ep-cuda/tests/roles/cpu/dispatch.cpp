// dispatch as the CPU runs it, in one of its variants.
#include "cuda.hpp"
#include "kernels.hpp"

// Every kernel has names of its own, since variants of one kernel are one program here.
namespace {

#include "dispatch/kernel.cu"

thread_local __align__(128) u8 memory[machine::SHARED_BYTES];

u32 shared_bytes(const void* params) {
    const auto& p = *static_cast<const DispatchParams*>(params);
    const u32 peers = div_up(p.common.ranks * sizeof(PeerView), 128) * 128;
    return peers + WARPS * (p.stages * p.stage_bytes + payload_buffer_bytes(p.stage_bytes));
}

const Kernel kernel(
    NAME, [](const void* params) { dispatch(*static_cast<const DispatchParams*>(params)); }, [] { return memory; },
    shared_bytes, WARPS* WARP);

}  // namespace
