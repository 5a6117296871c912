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

// Reports that `peer` has called with other arguments: `word_of(index)` is a word of its call.
template <class WordOf>
__device__ inline void report_mismatch(const Common& c, u32 peer, u32 signature, const WordOf& word_of) {
    if (!claim_fault(c)) return;
#pragma unroll 1
    for (u32 word = 0; word < CALL_WORDS; word++) {
        c.own->record.call[word] = c.report->own.call[word] = c.handshake.call[word];
        c.own->record.peer_call[word] = c.report->own.peer_call[word] = word_of(word);
    }
    Fault fault{};
    fault.kind = FAULT_MISMATCH;
    fault.peer = peer;
    fault.expected = c.handshake.signature;
    fault.seen = signature;
    report(c, fault, abort_word(FAULT_ABORTED, c.rank, peer));
}

// The same for a peer whose rail plan has its call.
__device__ __noinline__ void report_plan_mismatch(const Common& c, u32 peer, const u64* call, u32 signature) {
    report_mismatch(c, peer, signature, [&](u32 word) { return ld_relaxed_sys_u64(call + word); });
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

// A word of a handshake, by its place in `Handshake`, and the words that are awaited before an operator goes on. The others are the
// peer's call, which is read only if it differs.
#define HANDSHAKE_WORD(field) (OFFSET_OF(Handshake, field) / sizeof(u32))
constexpr u32 AWAITED_WORDS = RAILS ? HANDSHAKE_WORD(call) : HANDSHAKE_WORD(sets);
static_assert(sizeof(Handshake) == HANDSHAKE_WORDS * sizeof(u32) && AWAITED_WORDS <= WARP, "a lane awaits one word");

__device__ inline u64 packet_of(u32 epoch, u32 word) { return static_cast<u64>(epoch) << 32 | word; }

// A packet of a handshake (`Control::handshake`), as what a wait awaits.
struct Packet {
    const u64* packet;
    u32 epoch;

    __device__ bool is_there(const Common& c) const { return reached(seen_with(ld_acquire_sys_u64(packet)), epoch); }
    __device__ bool is_there_now(const Common& c) const { return is_there(c); }
    __device__ u32 seen(const Common&) const { return seen_with(ld_relaxed_sys_u64(packet)); }
    // The word, once it is there.
    __device__ u32 word() const { return static_cast<u32>(ld_relaxed_sys_u64(packet)); }
    __device__ static u32 seen_with(u64 value) { return static_cast<u32>(value >> 32); }
};

// A word of the handshake that this rank has of `peer`.
__device__ inline Packet packet_from(const Common& c, u32 epoch, u32 peer, u32 at) {
    return {&c.own->handshake[epoch & 1][peer][at], epoch};
}

// Sends this rank's handshake to all ranks of its domain, this one included. It overwrites the handshake of epoch - 2, which no
// peer still reads as long as no rank has given up: this rank has seen the peer's handshake of epoch - 1, which the peer sent
// after its kernel of epoch - 2 had ended. A warp writes to one rank, beginning with the last warp, because the first ones have
// lists to read. The fence releases what earlier kernels of this rank have written, and, after a barrier, what this block has.
// Called by all threads of one block.
__device__ inline void send_handshake(const Common& c, u32 epoch) {
    const u32 warps = blockDim.x / WARP, first = warps - 1 - warp_id();
    if (first >= domain_size(c)) return;
    const auto* words = reinterpret_cast<const u32*>(&c.handshake);
    constexpr u32 TURNS_OF_WARP = (HANDSHAKE_WORDS + WARP - 1) / WARP;
    u32 mine[TURNS_OF_WARP];  // loaded while the fence waits
#pragma unroll
    for (u32 turn = 0; turn < TURNS_OF_WARP; turn++) mine[turn] = words[min(turn * WARP + lane_id(), HANDSHAKE_WORDS - 1)];
    fence_acq_rel_sys();
    for (u32 peer = domain_begin(c) + first; peer < domain_end(c); peer += warps) {
        u64* there = c.control[peer]->handshake[epoch & 1][c.rank];
#pragma unroll
        for (u32 turn = 0; turn < TURNS_OF_WARP; turn++) {
            const u32 at = turn * WARP + lane_id();
            if (at < HANDSHAKE_WORDS) st_fenced_sys_u64(there + at, packet_of(epoch, mine[turn]));
        }
    }
}

// An address of a peer as an address of this rank; null stays null.
template <class T>
__device__ inline T* of_peer(u64 pointer, i64 delta) {
    return pointer == 0 ? nullptr : reinterpret_cast<T*>(pointer + static_cast<u64>(delta));
}

// The handshake of `peer` has another signature than this rank's: reports the mismatch. If the rest of the peer's call does not
// arrive, reports that instead.
__device__ __noinline__ void report_other_call(const Common& c, u32 epoch, u32 peer, u32 signature) {
    const auto half = [&](u32 at) { return packet_from(c, epoch, peer, HANDSHAKE_WORD(call) + at); };
#pragma unroll 1
    for (u32 at = 0; at < 2 * CALL_WORDS; at++)
        if (!wait_until(c, half(at), peer, FOR_HANDSHAKE, 0)) return;
    report_mismatch(c, peer, signature, [&](u32 word) {
        return static_cast<u64>(half(2 * word + 1).word()) << 32 | half(2 * word).word();
    });
}

// Whether a peer's handshake has this rank's signature; if not, reports the mismatch.
__device__ inline bool has_same_call(const Common& c, u32 epoch, u32 peer, u32 signature) {
    if (signature == c.handshake.signature) return true;
    report_other_call(c, epoch, peer, signature);
    return false;
}

// Looks for a word of a peer's handshake for a while, and returns whether it has come.
__device__ inline bool poll_word(const Common& c, u32 epoch, u32 peer, u32 at, u32& word) {
    const Packet from = packet_from(c, epoch, peer, at);
#pragma unroll 1
    for (u32 poll = 0; poll < POLLS; poll++) {
        const u64 value = ld_acquire_sys_u64(from.packet);
        word = static_cast<u32>(value);
        if (reached(Packet::seen_with(value), epoch)) return true;
    }
    return false;
}

// Waits for a peer's signature. Returns false, after the fault was reported, if it does not come within the bound of `waiting_for`
// or if the peer has called with other arguments.
__device__ inline bool await_handshake(const Common& c, u32 epoch, u32 peer, u32 waiting_for) {
    const Packet signature = packet_from(c, epoch, peer, HANDSHAKE_WORD(signature));
    return wait_until(c, signature, peer, waiting_for, 0) && has_same_call(c, epoch, peer, signature.word());
}

// The awaited words of a peer's handshake: lane i has word i. All lanes call all functions.
struct AwaitedWords {
    u32 mine;

    __device__ u32 word(u32 at) const { return __shfl_sync(ALL_LANES, mine, at); }
    __device__ u64 both(u32 at) const { return static_cast<u64>(word(at + 1)) << 32 | word(at); }
};

// A peer's handshake in this rank's addresses. Called by all lanes.
__device__ inline PeerView view_of(const Common& c, u32 peer, const AwaitedWords& words) {
    const i64 delta = c.delta[peer];
    const u32 chunks = words.word(HANDSHAKE_WORD(chunks));
    PeerView view;
    view.tokens = of_peer<u8>(words.both(HANDSHAKE_WORD(tokens)), delta);
    view.scales = of_peer<u8>(words.both(HANDSHAKE_WORD(scales)), delta);
    view.probs = of_peer<float>(words.both(HANDSHAKE_WORD(probs)), delta);
    view.local_experts = of_peer<u8>(words.both(HANDSHAKE_WORD(local_experts)), delta);
    view.recv = of_peer<const Receive>(words.both(HANDSHAKE_WORD(recv)), delta);
    view.recv_begin = of_peer<const u32>(words.both(HANDSHAKE_WORD(recv_begin)), delta) + c.rank * (chunks + 1);
    view.dst_copies = of_peer<const DstCopy>(words.both(HANDSHAKE_WORD(dst_copies)), delta);
    view.dst_begin = of_peer<const u32>(words.both(HANDSHAKE_WORD(dst_begin)), delta) + c.rank * (chunks + 1);
    view.flags = c.control[peer]->flags[c.rank];
    view.chunks = chunks;
    view.share_bits = words.word(HANDSHAKE_WORD(share_bits));
    return view;
}

// Stores the views of all ranks in `peers`: `view_of(source, words)`, after the handshake of `peer_of(source)` has arrived.
// Returns false, after the fault was reported, if a handshake is missing, if a peer has called with other arguments, or
// if any rank has given up: a rank that gave up may have unfinished lists. A warp awaits one handshake at a time, beginning with
// the last warp, because the first ones have lists to read. Called by all threads.
template <class PeerOf, class ViewOf>
__device__ inline bool await_views(const Common& c, u32 epoch, PeerView* peers, const PeerOf& peer_of, const ViewOf& view_of) {
    bool fine = true;
    const u32 warps = blockDim.x / WARP;
    for (u32 source = warps - 1 - warp_id(); fine && source < c.ranks; source += warps) {
        const u32 peer = peer_of(source);
        AwaitedWords words{0};
        const bool reads = lane_id() < AWAITED_WORDS;
        const bool there = !reads || poll_word(c, epoch, peer, lane_id(), words.mine);
        if (!__all_sync(ALL_LANES, there)) {
            // The lanes await the ranks that are left to this warp at the same time. One after the other, the entry bounds
            // would add up, and a rank that has died or called with other arguments would be noticed only after another one
            // that is late.
            for (u32 next = source + lane_id() * warps; fine && next < c.ranks; next += WARP * warps)
                fine = await_handshake(c, epoch, peer_of(next), FOR_HANDSHAKE);
            if (fine && reads) {
                const Packet mine = packet_from(c, epoch, peer, lane_id());
                fine = wait_until(c, mine, peer, FOR_HANDSHAKE, 0);
                words.mine = mine.word();
            }
        }
        fine = __all_sync(ALL_LANES, fine);
        if (!fine) break;
        // Makes what one lane has acquired visible to all lanes: a vote does not order memory. A rank that gave up in an
        // earlier operator wrote the abort word before its next handshake, so the word is visible here.
        __syncwarp();
        const u32 given_up = ld_relaxed_sys(&c.own->abort);
        const PeerView view = view_of(source, words);
        if (lane_id() == 0) peers[source] = view;
        fine = has_same_call(c, epoch, peer, words.word(HANDSHAKE_WORD(signature))) && !aborted(c, given_up);
        fine = __all_sync(ALL_LANES, fine);
    }
    return __syncthreads_and(fine);
}

// The same without rails: each rank's view needs that rank's handshake.
__device__ inline bool await_all_handshakes(const Common& c, u32 epoch, PeerView* peers) {
    return await_views(
        c, epoch, peers, [](u32 source) { return source; },
        [&](u32 source, const AwaitedWords& words) { return view_of(c, source, words); });
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
