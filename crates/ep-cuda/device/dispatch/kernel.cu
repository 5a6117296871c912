// dispatch: tokens to the ranks of their experts, inside one NVLink domain. One launch: ranks greet each other, then
// every warp is a worker of its own; the last flag of the last chunk is the end.
//
//   send        the rank's own tokens to their rows on other ranks: the first blocks
//   duplicate   rows of its own tokens, further rows of what arrived, padding: the other blocks
//   (n2n)       hands chunks for other domains to the transport: not in this version, which serves one domain
#include "duplicate.cuh"
#include "send.cuh"
#include "split.cuh"

// Of all rings of a block.
constexpr u32 MOST_STAGES = 128;

// `WARPS` is the most that a block may have: small rows want many, large ones leave no room for their rings.
extern "C" __global__ void __launch_bounds__(WARPS* WARP, 1) dispatch(const __grid_constant__ DispatchParams p) {
    extern __shared__ __align__(128) u8 memory[];
    __shared__ u64 barriers[MOST_STAGES];
    const Common& c = p.common;
    const u32 epoch = c.own->epoch + 1;
    auto* peers = reinterpret_cast<PeerView*>(memory);
    u8* stages = memory + div_up(c.ranks * sizeof(PeerView), 128) * 128;

    if (blockIdx.x == 0) {
        Hello hello = hello_of(c, p.handle);
        hello.tokens = reinterpret_cast<u64>(p.out_tokens);
        hello.scales = reinterpret_cast<u64>(p.out_scales);
        hello.probs = reinterpret_cast<u64>(p.out_probs);
        hello.local_experts = reinterpret_cast<u64>(p.out_local_experts);
        say_hello(c, hello, epoch);
    }
    // While the hellos are on their way:
    const u32 warp = warp_id(), warps = blockDim.x / WARP;
    const u32 sending = sending_blocks(p, warps);
    const bool sends = blockIdx.x < sending;
    const u32 role_block = sends ? blockIdx.x : blockIdx.x - sending;
    const u32 role_blocks = sends ? sending : gridDim.x - sending;
    const Worker worker{warp * role_blocks + role_block, warps * role_blocks};
    u8* own_memory = stages + warp * (p.stages * p.stage_bytes + payload_buffer_bytes());
    Ring ring(own_memory, barriers + warp * p.stages, p.stages, p.stage_bytes);
    ring.init();

    if (hear_all(c, epoch, peers)) {
        copy_fence_global();
        if (sends) {
            PayloadBuffers buffers(own_memory + p.stages * p.stage_bytes);
            send(p, worker, ring, buffers, peers, epoch);
        } else {
            duplicate(p, worker, ring, peers, epoch);
        }
    }
    leave(c, epoch);
}
