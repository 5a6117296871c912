// Synchronisation of ranks inside an operator: the handshake, bounded waits, fault reports and the end of the operator.
// docs/protocol.md lists every shared word with its writers, readers and memory order.
#pragma once
#include "handle.cuh"
#include "ptx.cuh"

// The ranks of this rank's domain, [first, end). Without rails, there is one domain.
__device__ inline u32 domain_begin(const Common& c) { return RAILS ? c.rails.first : 0; }
__device__ inline u32 domain_size(const Common& c) { return RAILS ? c.rails.local_ranks : c.ranks; }
__device__ inline u32 domain_end(const Common& c) { return domain_begin(c) + domain_size(c); }
// With rails, the number of domains, this rank's included; without rails, 0.
__device__ inline u32 rail_domains(const Common& c) { return RAILS ? c.rails.domains : 0; }

// Polls between two checks of the clock, the abort word and the peer's gone word.
constexpr u32 POLLS = 256;

// The word that a rank which gives up writes to all ranks: the cause, the rank that wrote the word first (`by`), and the rank
// at fault. A rank that gives up because of the word passes it on unchanged. The rank at fault is stored plus one, so that the
// word is never 0, which means that no rank has given up.
__device__ inline u32 abort_word(FaultKind cause, u32 by, u32 at_fault) {
    return cause << 2 * ABORT_RANK_BITS | by << ABORT_RANK_BITS | (at_fault + 1);
}
constexpr u32 ABORT_RANK_MASK = (1u << ABORT_RANK_BITS) - 1;
__device__ inline FaultKind abort_cause(u32 word) { return static_cast<FaultKind>(word >> 2 * ABORT_RANK_BITS); }
__device__ inline u32 abort_by(u32 word) { return word >> ABORT_RANK_BITS & ABORT_RANK_MASK; }
__device__ inline u32 abort_at_fault(u32 word) { return (word & ABORT_RANK_MASK) - 1; }
static_assert(MAX_RANKS < ABORT_RANK_MASK, "a rank plus one fits its bits");
static_assert(sizeof(PeerView) == PEER_VIEW_BYTES);

// Test ==, not >=. A peer may enter epoch + 1 before this rank does. Until this rank enters epoch + 1, only the
// handshake and counts of epoch + 1 arrive here (with rails, also plans and rows), in the copies of the other parity.
// So a word that does not have the awaited value is left over from an earlier operator.
__device__ inline bool reached(u32 seen, u32 epoch) { return seen == epoch; }

// Whether the caller may report. Only the first fault of a rank is reported.
__device__ inline bool claim_fault(const Common& c) { return atom_cas_relaxed_gpu(&c.own->fault_claimed, 0, 1) == 0; }

// Writes all fields but `kind`, which `report` writes last: a reader that sees the kind sees the other fields.
__device__ inline void write_fault(const Common& c, Fault& to, const Fault& fault) {
    to.peer = fault.peer;
    to.waiting_for = fault.waiting_for;
    to.step = c.own->epoch + 1;
    to.expected = fault.expected;
    to.seen = fault.seen;
    to.index = fault.index;
    to.waited_ns = fault.waited_ns;
    to.operation = c.operation;
    to.awaited = fault.awaited;
    to.cause = fault.cause;
    to.rank = c.rank;
}

// Reports a fault, which this thread has claimed, to the host and to all ranks. This rank is one of them, so its other blocks
// give up, too. `word` is an `abort_word`. Only functions that are not inlined call it, directly or through `give_up`:
// this path must not cost the kernels registers.
__device__ inline void report(const Common& c, const Fault& fault, u32 word) {
    write_fault(c, c.own->record.fault, fault);
    write_fault(c, c.report->own.fault, fault);
    fence_acq_rel_sys();
    st_release_sys(&c.own->record.fault.kind, fault.kind);
    st_release_sys(&c.report->own.fault.kind, fault.kind);
#pragma unroll 1
    for (u32 peer = 0; peer < c.ranks; peer++) st_release_sys(&c.control[peer]->abort, word);
}

// Reports a fault of this rank's own call, or of the rows that `peer` would receive.
__device__ __noinline__ void report_own(const Common& c, FaultKind kind, u32 peer, u64 index, u32 expected, u32 seen) {
    if (!claim_fault(c)) return;
    Fault fault{};
    fault.kind = kind;
    fault.peer = peer;
    fault.index = index;
    fault.expected = expected;
    fault.seen = seen;
    report(c, fault, abort_word(FAULT_ABORTED, c.rank, c.rank));
}

// Reports that `peer` has called with other arguments.
__device__ __noinline__ void report_mismatch(const Common& c, u32 peer, const u64* call, u32 signature) {
    if (!claim_fault(c)) return;
#pragma unroll 1
    for (u32 word = 0; word < CALL_WORDS; word++) {
        c.own->record.call[word] = c.report->own.call[word] = c.call[word];
        c.own->record.peer_call[word] = c.report->own.peer_call[word] = ld_relaxed_sys_u64(call + word);
    }
    Fault fault{};
    fault.kind = FAULT_MISMATCH;
    fault.peer = peer;
    fault.expected = c.signature;
    fault.seen = signature;
    report(c, fault, abort_word(FAULT_ABORTED, c.rank, peer));
}

// Copies the record of `rank` to the host's report. Returns false if that record is empty or says that the rank itself
// gave up because of another rank.
__device__ inline bool copy_record(const Common& c, u32 rank) {
    const FaultRecord* record = &c.control[rank]->record;
    const u32 kind = ld_acquire_sys(&record->fault.kind);
    if (kind == FAULT_NONE || kind == FAULT_ABORTED) return false;
    const auto* from = reinterpret_cast<const u32*>(record);
    auto* to = reinterpret_cast<u32*>(&c.report->theirs);
#pragma unroll 1
    for (u32 word = 0; word < sizeof(FaultRecord) / sizeof(u32); word++) to[word] = ld_relaxed_sys(from + word);
    return true;
}

// Gives up because another rank has written an abort word here, and passes that word on unchanged. If the word says
// that this rank is at fault, the report names the rank that wrote the word.
__device__ inline void give_up(const Common& c, Fault fault) {
    if (!claim_fault(c)) return;
    // Acquire: the writer's record, which was written before the word, is visible to the reads below.
    const u32 word = ld_acquire_sys(&c.own->abort);
    const u32 by = abort_by(word), at_fault = abort_at_fault(word);
    const bool on_this = at_fault == c.rank;
    fault.kind = FAULT_ABORTED;
    fault.peer = on_this ? by : at_fault;
    fault.cause = on_this ? FAULT_ABORTED : abort_cause(word);
    if (on_this || !copy_record(c, at_fault)) copy_record(c, by);
    report(c, fault, word);
}

// Like `give_up`, but outside a wait.
__device__ __noinline__ void give_up_at_once(const Common& c) {
    Fault fault{};
    fault.awaited = NONE;
    give_up(c, fault);
}

// `word`: this rank's abort word. If a rank has given up, gives up too and returns true.
__device__ inline bool aborted(const Common& c, u32 word) {
    if (word != 0) give_up_at_once(c);
    return word != 0;
}

// Whether a rank has given up, in an earlier operator or in this one, as far as this rank's abort word says. All
// threads of a block call this together, and get the same answer.
__device__ inline bool has_given_up(const Common& c) { return __syncthreads_or(ld_relaxed_sys(&c.own->abort) != 0); }

// The fault of a peer that has not written the awaited word.
__device__ inline FaultKind absence(u32 gone, u32 waiting_for) {
    switch (gone) {
        case GONE_LEFT:
        case GONE_LEFT_EARLY: return FAULT_LEFT;
        case GONE_DIED: return FAULT_DIED;
        case GONE_SILENT: return FAULT_SILENT;
        case GONE_UNREACHABLE: return FAULT_UNREACHABLE;
        default: return waiting_for == FOR_HANDSHAKE ? FAULT_LATE : FAULT_STALLED;
    }
}

// The bound of a wait. In one domain, the bound for a handshake is longer than the bounds inside an operator: a peer that has
// not entered may be busy with other work of its program. A rank of another domain may enter equally late, and then
// wait equally long for the handshakes of its own domain. So a wait for what other ranks pass on has a longer bound
// than the waits of those ranks: a rank that waits directly for the rank at fault is the first to report it.
__device__ inline u64 bound_of(const Common& c, u32 waiting_for) {
    if (waiting_for == FOR_HANDSHAKE) return c.timeout_ns;
    if (RAILS && waiting_for == FOR_RAIL) return 2 * c.timeout_ns + 2 * c.stall_timeout_ns;
    if (RAILS && waiting_for == FOR_FOREIGN) return 2 * c.timeout_ns + 4 * c.stall_timeout_ns;
    return c.stall_timeout_ns;
}

// What a peer's word in `Control::left` means for a wait in `epoch`. What a rank has sent along its rail may arrive after
// the news that it has left, so a wait for that rank goes on, until its bound, if the rank took part in the operator.
__device__ inline u32 gone_of(const Common& c, u32 word, u32 epoch, u32 peer) {
    const u32 gone = word & ((1u << GONE_BITS) - 1), last = word - gone;
    const bool on_rail = RAILS && (peer < domain_begin(c) || peer >= domain_end(c));
    // Above the `GoneWord`, the word has the low bits of the last epoch. `epoch`, shifted by the same number of bits,
    // is compared with them modulo 2^32.
    const bool took_part = static_cast<i32>(last - (epoch << GONE_BITS)) >= 0;
    return gone == GONE_LEFT && on_rail && took_part ? GONE_HERE : gone;
}

// What a wait awaits: a word that this rank or another rank writes. `epoch` is the awaited value: an epoch or, in
// `all_blocks`, the number of blocks.
struct Flag {
    const u32* word;
    u32 epoch;

    __device__ bool is_there(const Common&) const { return reached(ld_acquire_sys(word), epoch); }
    // Like `is_there`, but never false if the value was written before another word that the caller has read with
    // acquire order.
    __device__ bool is_there_now(const Common& c) const { return is_there(c); }
    // The word's value, for the report of a fault.
    __device__ u32 seen(const Common&) const { return ld_relaxed_sys(word); }
};

// The slow path of `wait_until`: polls, and now and then checks the clock, the abort word and the peer's gone word.
template <class Awaited>
__device__ __noinline__ bool wait_long(const Common& c, const Awaited awaited, u32 peer, u32 waiting_for, u64 index) {
    const u64 start = globaltimer();
    const u64 limit = bound_of(c, waiting_for);
    for (;;) {
#pragma unroll 1
        for (u32 poll = 0; poll < POLLS; poll++) {
            if (awaited.is_there(c)) return true;
        }
        const u32 gone = gone_of(c, ld_acquire_sys(&c.own->left[peer]), awaited.epoch, peer);
        if (gone != GONE_HERE && awaited.is_there_now(c)) return true;
        // Read after the gone word: a rank that leaves because of a fault writes the abort word before it leaves.
        const u32 given_up = ld_relaxed_sys(&c.own->abort);
        const u64 waited = globaltimer() - start;
        if (given_up == 0 && gone == GONE_HERE && waited <= limit) continue;
        Fault fault{};
        fault.waiting_for = waiting_for;
        fault.awaited = peer;
        fault.expected = awaited.epoch;
        fault.seen = awaited.seen(c);
        fault.index = index;
        fault.waited_ns = waited;
        if (given_up != 0) {
            give_up(c, fault);
        } else if (claim_fault(c)) {
            const FaultKind kind = absence(gone, waiting_for);
            fault.kind = kind;
            fault.peer = peer;
            report(c, fault, abort_word(kind, c.rank, peer));
        }
        return false;
    }
}

// Waits for what `peer` writes, with acquire order. Returns false, after the fault was reported, if it does not come
// within its bound, if the peer is gone, or if any rank gave up. `index` is reported with the fault.
template <class Awaited>
__device__ inline bool wait_until(const Common& c, const Awaited& awaited, u32 peer, u32 waiting_for, u64 index) {
    return awaited.is_there(c) || wait_long(c, awaited, peer, waiting_for, index);
}

// Waits until `*word` is `expected`.
__device__ inline bool wait_for(const Common& c, const u32* word, u32 expected, u32 peer, u32 waiting_for, u64 index) {
    return wait_until(c, Flag{word, expected}, peer, waiting_for, index);
}

// A handshake with the lists of a handle. The caller adds the addresses of its outputs.
__device__ inline Handshake handshake_of(const Common& c, const HandleView& handle) {
    Handshake handshake{};
    handshake.recv = reinterpret_cast<u64>(handle.recv);
    handshake.recv_begin = reinterpret_cast<u64>(handle.recv_begin);
    handshake.dst_copies = reinterpret_cast<u64>(handle.dst_copies);
    handshake.dst_begin = reinterpret_cast<u64>(handle.dst_begin);
    if (RAILS) handshake.sets = reinterpret_cast<u64>(handle.sets);
    handshake.chunks = handle.chunks;
    handshake.signature = c.signature;
    return handshake;
}

// Writes this rank's handshake to the control blocks of all ranks of its domain, this one included. It overwrites the
// handshake of epoch - 2, which no peer still reads as long as no rank has given up: this rank has seen the peer's handshake
// of epoch - 1, which the peer sent after its kernel of epoch - 2 had ended. Called by all threads of one block.
__device__ inline void send_handshake(const Common& c, Handshake handshake, u32 epoch) {
    for (u32 peer = domain_begin(c) + threadIdx.x; peer < domain_end(c); peer += blockDim.x) {
        Handshake* there = &c.control[peer]->handshake[epoch & 1][c.rank];
        there->tokens = handshake.tokens;
        there->scales = handshake.scales;
        there->probs = handshake.probs;
        there->local_experts = handshake.local_experts;
        there->recv = handshake.recv;
        there->recv_begin = handshake.recv_begin;
        there->dst_copies = handshake.dst_copies;
        there->dst_begin = handshake.dst_begin;
        if (RAILS) {
            there->sets = handshake.sets;
            there->set_tokens = handshake.set_tokens;
            there->set_probs = handshake.set_probs;
        }
#pragma unroll
        for (u32 word = 0; word < CALL_WORDS; word++) there->call[word] = c.call[word];
        there->chunks = handshake.chunks;
        there->signature = handshake.signature;
        st_release_sys(&there->epoch, epoch);
    }
}

// An address of a peer as an address of this rank; null stays null.
template <class T>
__device__ inline T* of_peer(u64 pointer, i64 delta) {
    return pointer == 0 ? nullptr : reinterpret_cast<T*>(pointer + static_cast<u64>(delta));
}

// Whether a peer's handshake has this rank's signature; if not, reports the mismatch.
__device__ inline bool has_same_call(const Common& c, u32 epoch, u32 peer, u32 signature) {
    if (signature == c.signature) return true;
    report_mismatch(c, peer, c.own->handshake[epoch & 1][peer].call, signature);
    return false;
}

// Waits for a peer's handshake. Returns false, after the fault was reported, if it does not come within the bound of
// `waiting_for` or if the peer has called with other arguments.
__device__ inline bool await_handshake(const Common& c, u32 epoch, u32 peer, u32 waiting_for = FOR_HANDSHAKE) {
    const Handshake* handshake = &c.own->handshake[epoch & 1][peer];
    return wait_for(c, &handshake->epoch, epoch, peer, waiting_for, 0) &&
           has_same_call(c, epoch, peer, ld_relaxed_sys(&handshake->signature));
}

// A peer's handshake in this rank's addresses.
__device__ inline PeerView view_of(const Common& c, u32 epoch, u32 peer) {
    const Handshake* handshake = &c.own->handshake[epoch & 1][peer];
    const i64 delta = c.delta[peer];
    const u32 chunks = ld_relaxed_sys(&handshake->chunks);
    PeerView view;
    view.tokens = of_peer<u8>(ld_relaxed_sys_u64(&handshake->tokens), delta);
    view.scales = of_peer<u8>(ld_relaxed_sys_u64(&handshake->scales), delta);
    view.probs = of_peer<float>(ld_relaxed_sys_u64(&handshake->probs), delta);
    view.local_experts = of_peer<u8>(ld_relaxed_sys_u64(&handshake->local_experts), delta);
    view.recv = of_peer<const Receive>(ld_relaxed_sys_u64(&handshake->recv), delta);
    view.recv_begin = of_peer<const u32>(ld_relaxed_sys_u64(&handshake->recv_begin), delta) + c.rank * (chunks + 1);
    view.dst_copies = of_peer<const DstCopy>(ld_relaxed_sys_u64(&handshake->dst_copies), delta);
    view.dst_begin = of_peer<const u32>(ld_relaxed_sys_u64(&handshake->dst_begin), delta) + c.rank * (chunks + 1);
    view.flags = c.control[peer]->flags[c.rank];
    view.chunks = chunks;
    return view;
}

// Stores the views of all ranks in `peers`: `view_of(source)`, after the handshake of `peer_of(source)` has arrived.
// Returns false, after the fault was reported, if a handshake is missing, if a peer has called with other arguments, or
// if any rank has given up: a rank that gave up may have unfinished lists. Called by all threads.
template <class PeerOf, class ViewOf>
__device__ inline bool await_views(const Common& c, u32 epoch, PeerView* peers, const PeerOf& peer_of, const ViewOf& view_of) {
    bool fine = true;
    for (u32 source = threadIdx.x; fine && source < c.ranks; source += blockDim.x) {
        const u32 peer = peer_of(source);
        const Handshake* handshake = &c.own->handshake[epoch & 1][peer];
        fine = wait_for(c, &handshake->epoch, epoch, peer, FOR_HANDSHAKE, 0);
        if (!fine) break;
        // All loads come before the first use: one load takes as long as all of them together. A rank that gave up in
        // an earlier operator wrote the abort word before its next handshake, so the word is visible here.
        const u32 signature = ld_relaxed_sys(&handshake->signature);
        const u32 given_up = ld_relaxed_sys(&c.own->abort);
        peers[source] = view_of(source);
        fine = has_same_call(c, epoch, peer, signature) && !aborted(c, given_up);
    }
    return __syncthreads_and(fine);
}

// The same without rails: each rank's view needs that rank's handshake.
__device__ inline bool await_all_handshakes(const Common& c, u32 epoch, PeerView* peers) {
    return await_views(c, epoch, peers, [](u32 source) { return source; }, [&](u32 source) { return view_of(c, epoch, source); });
}

// A barrier of all blocks of the kernel. Returns false, after the fault was reported, if a block does not arrive within
// the stall bound or any rank gave up. `arrived`: a word of this barrier only, because a block that has passed this
// barrier may reach the next one before others have read the word. Called by all threads.
__device__ inline bool all_blocks(const Common& c, u32* arrived) {
    __syncthreads();
    bool fine = true;
    if (threadIdx.x == 0) {
        atom_add_acq_rel_gpu(arrived, 1);
        fine = wait_for(c, arrived, gridDim.x, c.rank, FOR_BLOCKS, 0);
    }
    return __syncthreads_and(fine);
}

// Finishes the operator, also after a fault, without waiting for peers. The last block resets the counters for the next
// operator and publishes the epoch to it; kernels of one rank run one after the other in stream order, so plain stores
// are enough. Called by all threads, at their end.
__device__ inline void leave(const Common& c, u32 epoch) {
    __syncthreads();
    if (threadIdx.x == 0 && atom_add_acq_rel_gpu(&c.own->blocks_done, 1) == gridDim.x - 1) {
        c.own->blocks_done = 0;
        c.own->blocks_arrived = 0;
        c.own->tokens_taken = 0;
        c.own->items_taken = 0;
        c.own->arrivals_taken = 0;
        for (u32 domain = 0; RAILS && domain < c.rails.domains; domain++) c.own->set_taken[domain] = 0;
        for (u32 turn = 0; RAILS && turn < c.rails.domains; turn++) c.own->more_arrived[turn] = 0;
        c.own->epoch = epoch;
    }
}
