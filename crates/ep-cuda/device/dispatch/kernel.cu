// dispatch: tokens to the ranks of their experts, inside one NVLink domain. One launch: ranks greet each other, then
// every warp is a worker of its own; the last flag of the last chunk is the end.
//
//   send        the rank's own tokens to their rows on all ranks
//   duplicate   further rows of what arrived; padding
//   (n2n)       hands chunks for other domains to the transport: not in this version, which serves one domain
#include "duplicate.cuh"
#include "send.cuh"

constexpr u32 WARPS = SEND_WARPS + RECEIVE_WARPS;

extern "C" __global__ void __launch_bounds__(WARPS* WARP, 1) dispatch(const __grid_constant__ DispatchParams p) {
    extern __shared__ __align__(128) u8 memory[];
    __shared__ u64 barriers[WARPS][32];
    const Common& c = p.common;
    const u32 epoch = c.own->epoch + 1;
    auto* peers = reinterpret_cast<PeerView*>(memory);
    u8* stages = memory + div_up(c.ranks * sizeof(PeerView), 128) * 128;

    const u32 warp = warp_id();
    const bool sends = warp < SEND_WARPS;
    const u32 in_role = sends ? warp : warp - SEND_WARPS;
    const u32 role_warps = sends ? SEND_WARPS : RECEIVE_WARPS;
    const Worker<1> worker{lane_id(), 0, in_role * gridDim.x + blockIdx.x, role_warps * gridDim.x};
    const u32 ring_bytes = p.stages * p.stage_bytes + (sends ? payload_buffer_bytes(p.stage_bytes) : 0);
    u8* own_memory = stages + (sends ? warp * ring_bytes
                                     : SEND_WARPS * (p.stages * p.stage_bytes + payload_buffer_bytes(p.stage_bytes)) +
                                           in_role * ring_bytes);
    Ring<Worker<1>> ring(own_memory, barriers[warp], p.stages, p.stage_bytes);
    ring.init(worker);

    if (blockIdx.x == 0) {
        Hello hello{};
        hello.tokens = reinterpret_cast<u64>(p.out_tokens);
        hello.scales = reinterpret_cast<u64>(p.out_scales);
        hello.probs = reinterpret_cast<u64>(p.out_probs);
        hello.local_experts = reinterpret_cast<u64>(p.out_local_experts);
        hello.recv = reinterpret_cast<u64>(p.handle.recv);
        hello.recv_begin = reinterpret_cast<u64>(p.handle.recv_begin);
        hello.dst_copies = reinterpret_cast<u64>(p.handle.dst_copies);
        hello.dst_begin = reinterpret_cast<u64>(p.handle.dst_begin);
        hello.chunks = p.handle.chunks;
        hello.chunk_tokens = p.handle.chunk_tokens;
        hello.signature = c.signature;
        say_hello(c, hello, epoch);
    }
    if (hear_all(c, epoch, peers)) {
        if (sends) {
            PayloadBuffers buffers(own_memory + p.stages * p.stage_bytes, p.piece_bytes);
            send(p, worker, ring, buffers, peers, epoch);
        } else {
            duplicate(p, worker, ring, peers, epoch);
        }
    }
    leave(c, epoch);
}
