// combine: experts' rows back to their tokens, summed, inside one NVLink domain. One launch: ranks greet each other,
// then every worker of a few warps takes items of its own.
//
//   push     adds the rows of a peer's token on this rank, and sends the partial sum
//   reduce   adds the partial sums of this rank's tokens
//   (n2n)    carries partial sums between domains: not in this version, which serves one domain
#include "push.cuh"
#include "reduce.cuh"

constexpr u32 WORKERS = PUSH_WORKERS + REDUCE_WORKERS;

extern "C" __global__ void __launch_bounds__(WORKERS* Adder::THREADS, 1)
    combine(const __grid_constant__ CombineParams p) {
    extern __shared__ __align__(128) u8 memory[];
    __shared__ u64 barriers[WORKERS][32];
    const Common& c = p.common;
    const u32 epoch = c.own->epoch + 1;
    auto* peers = reinterpret_cast<PeerView*>(memory);
    u8* stages = memory + div_up(c.ranks * sizeof(PeerView), 128) * 128;

    const u32 of_block = threadIdx.x / Adder::THREADS;
    const bool pushes = of_block < PUSH_WORKERS;
    const u32 in_role = pushes ? of_block : of_block - PUSH_WORKERS;
    const u32 role_workers = pushes ? PUSH_WORKERS : REDUCE_WORKERS;
    // Barrier 0 is the block's.
    const Adder worker{threadIdx.x % Adder::THREADS, 1 + of_block, in_role * gridDim.x + blockIdx.x,
                       role_workers * gridDim.x};
    Ring<Adder> ring(stages + of_block * p.stages * p.stage_bytes, barriers[of_block], p.stages, p.stage_bytes);
    ring.init(worker);

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
            push(p, worker, ring, peers, epoch);
        else
            reduce(p, worker, ring, epoch);
    }
    leave(c, epoch);
}
