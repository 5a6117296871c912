// Ranks meeting in an operator: who is here, where their memory is, waits that end, and leaving.
#pragma once
#include "handle.cuh"
#include "ptx.cuh"

// Polls between two looks at the clock.
constexpr u32 POLLS = 256;

// Nobody is ahead of what is awaited: a peer's next operator needs this rank's next hello. So nothing but equality counts,
// and what was written any number of operators ago does not.
__device__ inline bool reached(u32 seen, u32 epoch) { return seen == epoch; }

// Tells the host, and all peers, what went wrong first; the rest of this kernel gives up. `cause` is what became of the
// rank to blame. Its callers are not inlined, so that kernels keep their registers to themselves.
__device__ inline void report(const Common& c, Fault fault, FaultKind cause, u32 to_blame) {
    if (atom_cas_relaxed_gpu(&c.own->fault_claimed, 0, 1) == 0) {
        const u32 kind = fault.kind;
        fault.kind = FAULT_NONE;
        fault.step = c.own->epoch + 1;
        fault.operation = c.operation;
        *c.fault = fault;
        membar_sys();
        st_release_sys(&c.fault->kind, kind);
        const u32 word = abort_word(cause, c.rank, to_blame);
#pragma unroll 1
        for (u32 peer = 0; peer < c.ranks; peer++) st_release_sys(&c.control[peer]->abort, word);
    }
}

// What is wrong with this rank's own call, or with what `peer` would receive.
__device__ __noinline__ void report_own(const Common& c, FaultKind kind, u32 peer, u64 index, u32 expected, u32 seen) {
    Fault fault{};
    fault.kind = kind;
    fault.peer = peer;
    fault.index = index;
    fault.expected = expected;
    fault.seen = seen;
    report(c, fault, FAULT_ABORTED, c.rank);
}

__device__ __noinline__ void report_mismatch(const Common& c, u32 peer, u32 signature) {
    Fault fault{};
    fault.kind = FAULT_MISMATCH;
    fault.peer = peer;
    fault.expected = c.signature;
    fault.seen = signature;
    report(c, fault, FAULT_ABORTED, peer);
}

// What this rank reports when another has given up, by the word that it left. The others may have given up on this rank:
// then the one that said so is named.
__device__ inline void give_up(const Common& c, u32 word, Fault fault) {
    const u32 to_blame = abort_to_blame(word);
    const bool on_this = to_blame == c.rank;
    fault.kind = FAULT_ABORTED;
    fault.peer = on_this ? abort_by(word) : to_blame;
    fault.cause = on_this ? FAULT_ABORTED : abort_cause(word);
    report(c, fault, abort_cause(word), to_blame);
}

__device__ __noinline__ void give_up_at_once(const Common& c, u32 word) {
    Fault fault{};
    fault.awaited = NONE;
    give_up(c, word, fault);
}

// Whether `word`, which is the own control block's, says that a rank has given up; then this one does too.
__device__ inline bool aborted(const Common& c, u32 word) {
    if (word != 0) give_up_at_once(c, word);
    return word != 0;
}

// The slow part of a wait: polls, and looks at the clock and at what others say.
__device__ __noinline__ bool wait_long(const Common& c, const u32* word, u32 epoch, u32 peer, u32 waiting_for,
                                       u64 index) {
    const u64 start = globaltimer();
    for (;;) {
#pragma unroll 1
        for (u32 poll = 0; poll < POLLS; poll++) {
            if (reached(ld_acquire_sys(word), epoch)) return true;
        }
        const u32 left = ld_acquire_sys(&c.own->left[peer]);
        if (left != 0 && reached(ld_acquire_sys(word), epoch)) return true;
        // A rank that leaves because of a fault has said before whose fault it is.
        const u32 given_up = ld_relaxed_sys(&c.own->abort);
        const u64 waited = globaltimer() - start;
        if (given_up == 0 && left == 0 && waited <= c.timeout_ns) continue;
        Fault fault{};
        fault.waiting_for = waiting_for;
        fault.awaited = peer;
        fault.expected = epoch;
        fault.seen = ld_relaxed_sys(word);
        fault.index = index;
        fault.waited_ns = waited;
        if (given_up != 0) {
            give_up(c, given_up, fault);
            return false;
        }
        const FaultKind kind = left == 0 ? FAULT_TIMEOUT : left == 1 ? FAULT_LEFT : FAULT_DIED;
        fault.kind = kind;
        fault.peer = peer;
        report(c, fault, kind, peer);
        return false;
    }
}

// Waits until a peer has written `epoch`; false when it did not in time, or something else failed.
__device__ inline bool wait_for(const Common& c, const u32* word, u32 epoch, u32 peer, u32 waiting_for, u64 index) {
    return reached(ld_acquire_sys(word), epoch) || wait_long(c, word, epoch, peer, waiting_for, index);
}

// What a block knows of a peer in this operator, in its own addresses.
struct PeerView {
    u8* tokens;
    u8* scales;
    float* probs;
    u8* local_experts;
    const uint2* recv;
    const u32* recv_begin;
    const uint2* dst_copies;
    const u32* dst_begin;
    u32* flags;  // where this rank's progress is written on the peer
    u32 chunks;
};

// What every operator that uses a handle says of it.
__device__ inline Hello hello_of(const Common& c, const HandleView& handle) {
    Hello hello{};
    hello.recv = reinterpret_cast<u64>(handle.recv);
    hello.recv_begin = reinterpret_cast<u64>(handle.recv_begin);
    hello.dst_copies = reinterpret_cast<u64>(handle.dst_copies);
    hello.dst_begin = reinterpret_cast<u64>(handle.dst_begin);
    hello.chunks = handle.chunks;
    hello.signature = c.signature;
    return hello;
}

// One block says hello to all peers; called by all its threads.
__device__ inline void say_hello(const Common& c, Hello hello, u32 epoch) {
    for (u32 peer = threadIdx.x; peer < c.ranks; peer += blockDim.x) {
        Hello* there = &c.control[peer]->hello[epoch & 1][c.rank];
        there->tokens = hello.tokens;
        there->scales = hello.scales;
        there->probs = hello.probs;
        there->local_experts = hello.local_experts;
        there->recv = hello.recv;
        there->recv_begin = hello.recv_begin;
        there->dst_copies = hello.dst_copies;
        there->dst_begin = hello.dst_begin;
        there->chunks = hello.chunks;
        there->signature = hello.signature;
        st_release_sys(&there->epoch, epoch);
    }
}

template <class T>
__device__ inline T* of_peer(u64 pointer, i64 delta) {
    return pointer == 0 ? nullptr : reinterpret_cast<T*>(pointer + static_cast<u64>(delta));
}

// Waits for a peer's hello; false when it does not come, or is for another call.
__device__ inline bool hear(const Common& c, u32 epoch, u32 peer) {
    const Hello* hello = &c.own->hello[epoch & 1][peer];
    if (!wait_for(c, &hello->epoch, epoch, peer, FOR_HELLO, 0)) return false;
    const u32 signature = ld_relaxed_sys(&hello->signature);
    if (signature == c.signature) return true;
    report_mismatch(c, peer, signature);
    return false;
}

// A peer's hello in this rank's addresses.
__device__ inline PeerView view_of(const Common& c, u32 epoch, u32 peer) {
    const Hello* hello = &c.own->hello[epoch & 1][peer];
    const i64 delta = c.delta[peer];
    const u32 chunks = ld_relaxed_sys(&hello->chunks);
    PeerView view;
    view.tokens = of_peer<u8>(ld_relaxed_sys_u64(&hello->tokens), delta);
    view.scales = of_peer<u8>(ld_relaxed_sys_u64(&hello->scales), delta);
    view.probs = of_peer<float>(ld_relaxed_sys_u64(&hello->probs), delta);
    view.local_experts = of_peer<u8>(ld_relaxed_sys_u64(&hello->local_experts), delta);
    view.recv = of_peer<const uint2>(ld_relaxed_sys_u64(&hello->recv), delta);
    view.recv_begin = of_peer<const u32>(ld_relaxed_sys_u64(&hello->recv_begin), delta) + c.rank * (chunks + 1);
    view.dst_copies = of_peer<const uint2>(ld_relaxed_sys_u64(&hello->dst_copies), delta);
    view.dst_begin = of_peer<const u32>(ld_relaxed_sys_u64(&hello->dst_begin), delta) + c.rank * (chunks + 1);
    view.flags = c.control[peer]->flags[c.rank];
    view.chunks = chunks;
    return view;
}

// A block waits for the hello of all peers; false when one is missing, or has given up in an operator before: its lists
// may be unfinished, and its outputs taken back. Called by all threads.
__device__ inline bool hear_all(const Common& c, u32 epoch, PeerView* peers) {
    bool fine = true;
    for (u32 peer = threadIdx.x; fine && peer < c.ranks; peer += blockDim.x) {
        fine = hear(c, epoch, peer);
        if (!fine) break;
        // A rank that gives up says so before it says hello again. Read beside the view, which takes as long.
        const u32 given_up = ld_relaxed_sys(&c.own->abort);
        peers[peer] = view_of(c, epoch, peer);
        fine = !aborted(c, given_up);
    }
    return __syncthreads_and(fine);
}

// All blocks of the kernel meet; false when something failed. Called by all threads.
__device__ inline bool all_blocks(const Common& c) {
    __syncthreads();
    bool fine = true;
    if (threadIdx.x == 0) {
        atom_add_acq_rel_gpu(&c.own->blocks_arrived, 1);
        fine = wait_for(c, &c.own->blocks_arrived, gridDim.x, c.rank, FOR_BLOCKS, 0);
    }
    return __syncthreads_and(fine);
}

// The last block out closes the operator. Called by all threads, after all that they do.
__device__ inline void leave(const Common& c, u32 epoch) {
    __syncthreads();
    if (threadIdx.x == 0 && atom_add_acq_rel_gpu(&c.own->blocks_done, 1) == gridDim.x - 1) {
        c.own->blocks_done = 0;
        c.own->blocks_arrived = 0;
        c.own->tokens_taken = 0;
        c.own->items_taken = 0;
        c.own->epoch = epoch;
    }
}
