// combine: experts' rows back to their tokens, summed, inside one NVLink domain. One launch: ranks greet each other,
// then every warp is a worker of its own, in both roles by turns:
//
//   push     adds the rows of a peer's token on this rank, and sends the partial sum
//   reduce   adds the partial sums of this rank's tokens, some time after their like were pushed
//   (n2n)    carries partial sums between domains: not in this version, which serves one domain
//
// Workers are not equally fast: where an SM lies decides its share of the wire, and some take 1.6 times as long as others
// to push as much. So work is nobody's in advance: who has time takes some.
#include "push.cuh"
#include "reduce.cuh"

__device__ inline void push_and_reduce(const CombineParams& p, const Worker& worker, u8* memory, const PeerView* peers,
                                       u32 epoch) {
    Pusher pusher(p, worker, memory, peers, epoch);
    Reducer reducer(p, worker, memory, epoch);
    const u64 items = pusher.items.count, tokens = p.handle.tokens, slack = p.slack;
    while (!pusher.over()) {
        const u64 item = pusher.item;
        pusher.push();
        // Tokens are reduced in step with what is pushed. Each worker is at one item, so most before `item - workers`
        // are done, and peers are as far, but for the slack. No peer is waited for: as long as a worker has something
        // to push, a peer may be waiting for it.
        for (;;) {
            if (!reducer.has_some()) {
                const u32 taken = reducer.all_taken();
                if ((taken + slack) * items + worker.workers * tokens > item * tokens || !reducer.take(taken)) break;
            }
            if (!reducer.ready()) break;
            reducer.reduce();
        }
        pusher.next();
    }
    while (reducer.has_some() || reducer.take(reducer.all_taken())) {
        if (!reducer.await()) return;
        reducer.reduce();
    }
    if (p.out_probs != nullptr) gather_all_probs(p, worker, epoch);
}

extern "C" __global__ void __launch_bounds__(WARPS* WARP, 1) combine(const __grid_constant__ CombineParams p) {
    extern __shared__ __align__(128) u8 memory[];
    const Common& c = p.common;
    const u32 epoch = c.own->epoch + 1;
    auto* peers = reinterpret_cast<PeerView*>(memory);
    u8* own_memory = memory + div_up(c.ranks * sizeof(PeerView), 128) * 128 + warp_id() * WORKER_BYTES;
    const Worker worker{warp_id() * gridDim.x + blockIdx.x, WARPS * gridDim.x};

    if (blockIdx.x == 0) {
        Hello hello = hello_of(c, p.handle);
        hello.tokens = reinterpret_cast<u64>(p.partials);
        hello.probs = reinterpret_cast<u64>(p.prob_scratch);
        say_hello(c, hello, epoch);
    }
    if (hear_all(c, epoch, peers)) {
        copy_fence_global();
        push_and_reduce(p, worker, own_memory, peers, epoch);
    }
    leave(c, epoch);
}
