// combine: experts' rows back to their tokens, summed, inside one NVLink domain. One launch: ranks greet each other,
// then every warp is a worker of its own.
//
//   push     adds the rows of a peer's token on this rank, and sends the partial sum: the first warps of a block
//   reduce   adds the partial sums of this rank's tokens: the other warps
//   (n2n)    carries partial sums between domains: not in this version, which serves one domain
#include "push.cuh"
#include "reduce.cuh"

constexpr u32 WARPS = PUSH_WARPS + REDUCE_WARPS;

extern "C" __global__ void __launch_bounds__(WARPS* WARP, 1) combine(const __grid_constant__ CombineParams p) {
    extern __shared__ __align__(128) u8 memory[];
    const Common& c = p.common;
    const u32 epoch = c.own->epoch + 1;
    auto* peers = reinterpret_cast<PeerView*>(memory);
    const u32 warp = warp_id();
    const bool pushes = warp < PUSH_WARPS;
    const u32 in_role = pushes ? warp : warp - PUSH_WARPS;
    const u32 role_warps = pushes ? PUSH_WARPS : REDUCE_WARPS;
    u8* own_memory = memory + div_up(c.ranks * sizeof(PeerView), 128) * 128 + warp * (FETCH_BYTES + ASIDE_BYTES);
    const Worker worker{in_role * gridDim.x + blockIdx.x, role_warps * gridDim.x};

    if (blockIdx.x == 0) {
        Hello hello{};
        hello.tokens = reinterpret_cast<u64>(p.partials);
        hello.probs = reinterpret_cast<u64>(p.prob_scratch);
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
        if (pushes)
            push(p, worker, own_memory, peers, epoch);
        else
            reduce(p, worker, own_memory, epoch);
    }
    leave(c, epoch);
}
