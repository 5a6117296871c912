// The reduce role. The rank that owns the tokens adds the partial sums of the ranks of its domain in rank order. Its
// own partial sum is the sum of its experts' rows, which is not rounded. With rails, it also adds the domain sums of
// the other domains: `Send::GROUP_FIRST` (lists.cuh) describes the order. The rank that forwards a foreign set has
// this role, too: its domain sums of the set go to a rail lane.
//
// The producer warp of every team of every block runs this role, in turn with the push role. It claims tokens and looks
// whether their flags are set; once it has nothing left to push, it waits for them (`push_and_reduce` in kernel.cu). It
// starts the loads of steps, and hands these to the consumers of its team (steps.cuh), which
// add and store later. When `Reducer::reduce` returns, no sum need be in memory. A token whose entries are all dead
// gets a row of zeros.
//
// The role writes this rank's outputs, counters and, with rails, `out` lanes with their flags and `rail_seen`. On peers it
// writes nothing, except that a wait that fails reports the fault to all ranks. `partials` exists once: without a fault,
// this kernel ends only after it has seen all flags, and peers write again only after this rank's next handshake. Rail
// lanes exist twice, by the epoch's parity.
// docs/protocol.md and docs/cuda-rails.md have all words and memory orders, docs/adding-a-kernel.md the places of a
// variant.
#pragma once
#include "rails.cuh"
#include "steps.cuh"

// The tokens that are reduced: this rank's own, or those of a foreign set.
struct ReduceSet {
    HandleView lists;
    u8* partials;
    float* prob_scratch;
    // The domain of the set's tokens. Not used without rails.
    u32 domain;
    // The word that counts the shares of tokens of the set that producers have claimed for this role.
    u32* taken;
    // As in the handshake that its peers have of this rank; 0 for a foreign set.
    u32 share_bits;

    // The index of the flags of a share of a chunk.
    __device__ u32 flag(u32 chunk, u32 share) const { return chunk << share_bits | share; }
};

__device__ inline ReduceSet own_tokens(const CombineParams& p) {
    return {p.handle, p.partials, p.prob_scratch, RAILS ? p.common.rails.domain : 0, &p.common.own->tokens_taken,
            p.common.handshake.share_bits};
}

// The number of slots of `set_partials` for one set. As in `partials`, the slot of a partial sum is the index of its entry
// in the set's `sends`, which has at most one entry for each copy and one dead entry for each token. The slots of this
// rank's own entries and of dead ones stay unused.
__device__ inline u64 set_slots(const Common& c) { return static_cast<u64>(c.rails.most_copies) + c.rails.most_rows; }

__device__ inline ReduceSet foreign_tokens(const CombineParams& p, u32 domain) {
    const Common& c = p.common;
    return {set_of(c, p.handle, domain), p.set_partials + domain * set_slots(c) * slot_bytes(p),
            p.set_prob_scratch + static_cast<u64>(domain) * c.rails.most_copies, domain, &c.own->set_taken[domain], 0};
}

__device__ inline bool is_foreign(const Common& c, const ReduceSet& set) {
    return RAILS && set.domain != c.rails.domain;
}

// The flags that `peer`, a rank of this domain, sets for the tokens of a set: those of this rank's control block that are
// indexed by the rail peer that `peer` has in the set's domain, so that no two ranks write the same flag (`alias` in
// rails.cuh). For this rank's own tokens, that is `peer` itself.
__device__ inline const u32* flags_of(const Common& c, const ReduceSet& set, u32 peer) {
    const u32 source = RAILS ? set.domain * c.rails.local_ranks + (peer - c.rails.first) : peer;
    return c.own->flags[source];
}

// The domain sums of this rank's tokens that come back from `domain` arrive in rail chunks, and those of earlier tokens
// first. Returns the last rail chunk that the chunks [first, end) of this rank's tokens need; NONE if they need none.
__device__ inline u32 rail_chunk(const Common& c, const HandleView& h, u32 domain, u32 first, u32 end) {
    const u32* rows = rail_begin(h, domain).rows;
    return rows[first] == rows[end] ? NONE : (rows[end] - 1) / c.rails.chunk_rows;
}

// Waits for the partial sums of a share of the chunks [first, end): the flags of all peers and, for this rank's own tokens, the
// domain sums of the other domains. Each lane reads flags of its own, so that the warp waits for one latency, not for
// one per chunk. Returns false, after the fault was reported, if a sum does not arrive.
__device__ inline bool await_chunks(const Common& c, const ReduceSet& set, u32 first, u32 end, u32 share, u32 epoch) {
    bool fine = true;
    const u32 peers = domain_end(c) - domain_begin(c);
    for (u32 flag = lane_id(); fine && flag < (end - first) * peers; flag += WARP) {
        const u32 chunk = first + flag / peers, peer = domain_begin(c) + flag % peers;
        if (peer != c.rank)
            fine = wait_for(c, flags_of(c, set, peer) + set.flag(chunk, share), epoch, peer, FOR_CHUNK, chunk);
    }
    for (u32 domain = lane_id(); fine && domain < rail_domains(c); domain += WARP) {
        if (is_foreign(c, set) || domain == c.rails.domain) continue;
        const u32 needed = rail_chunk(c, set.lists, domain, first, end);
        fine = needed == NONE || await_plan(c, epoch, domain) && await_rows(c, epoch, domain, needed);
    }
    fine = __all_sync(ALL_LANES, fine);
    // Makes what one lane has acquired visible to all lanes: a vote does not order memory.
    __syncwarp();
    return fine;
}

// Looks, without waiting, whether the partial sums of a share of a chunk have arrived (as in `await_chunks`). Called by all
// lanes: each answers for the flags and domain sums that it has read, and the caller combines the answers by a vote. With rails, the
// call may read a rail peer's progress, store it for other threads (`rail_seen`), and report a peer that called with
// other arguments. While another thread reads that progress, the answer may be false although the sums have arrived.
__device__ inline bool chunk_is_here(const Common& c, const ReduceSet& set, u32 chunk, u32 share, u32 epoch) {
    bool there = true;
    const u32 at = set.flag(chunk, share);
    for (u32 peer = domain_begin(c) + lane_id(); peer < domain_end(c); peer += WARP)
        if (peer != c.rank) there = there && reached(ld_acquire_sys(flags_of(c, set, peer) + at), epoch);
    for (u32 domain = lane_id(); domain < rail_domains(c); domain += WARP) {
        if (is_foreign(c, set) || domain == c.rails.domain) continue;
        const u32 needed = rail_chunk(c, set.lists, domain, chunk, chunk + 1);
        there = there && (needed == NONE || rows_are_here(c, epoch, domain, needed));
    }
    return there;
}

// The layout of a rail lane to or from another domain: domain sums, then the probabilities of the copies. Moves `end`
// behind them. Block 0 of the sender publishes it (`announce_sums` in kernel.cu); the receiver computes the same
// offsets from its own lists. A unit is a chunk of the set. It has one flag for its sums (`count_written` in steps.cuh)
// and one for its probabilities (`gather_set_probs`); its rows have arrived at the peer when both parts have.
__device__ inline PlanHead sums_plan(const CombineParams& p, u32 rows, u32 copies, u64& end) {
    PlanHead head;
    head.rows = rows;
    head.copies = copies;
    head.sections[0] = place_section(end, rows, static_cast<u32>(slot_bytes(p)), RAIL_PER_ROW);
    head.sections[1] = place_section(end, copies, p.row_probs == nullptr ? 0 : sizeof(float), RAIL_PER_COPY);
    head.flags_per_unit = p.row_probs == nullptr ? 1 : 2;
    return head;
}

// The probabilities in a lane of `rows` rows.
__device__ inline u8* probs_in(const CombineParams& p, u8* lane, u32 rows) {
    u64 end = 0;
    return lane + sums_plan(p, rows, 0, end).sections[1].offset;
}

// The probability of a copy on this rank, or of a copy whose probability a peer has sent. Called after the chunk's
// partial sums have arrived: the acquire of their flags orders plain loads, too. The plain loads of a warp are one
// request, unlike relaxed loads (docs/lab/032).
__device__ inline float gathered(const CombineParams& p, const ReduceSet& set, const Copy& copy, u32 at) {
    const Common& c = p.common;
    if (copy.rank() != c.rank) return set.prob_scratch[at];
    return p.row_probs[copy.row() * p.prob_stride + (p.handle.permuted ? 0 : copy.local_expert())];
}

// The probability of a copy that has come back from another domain. `Copy::row` of such a copy is not a row, but its
// place among the copies of the rail. Read by a plain load, as in `gathered`.
__device__ inline float returned(const CombineParams& p, const Copy& copy, u32 epoch) {
    const Common& c = p.common;
    const HandleView& h = p.handle;
    const u32 domain = copy.rank() - c.ranks;
    const u8* probs = probs_in(p, in_lane(c, epoch, domain), rail_begin(h, domain).rows[h.chunks]);
    return reinterpret_cast<const float*>(probs)[copy.row()];
}

// Writes zeros to the rows of `out_probs` of the chunks [first, end).
__device__ inline void clear_probs(const CombineParams& p, u32 first, u32 end) {
    const HandleView& h = p.handle;
    const u64 experts = p.common.experts;
    const u64 last = chunk_end_token(h, end - 1) * experts;
    for (u64 cell = first * h.chunk_tokens * experts + lane_id(); cell < last; cell += WARP) p.out_probs[cell] = 0.0f;
}

// Writes to `out_probs`, whose rows are zero, the probability of each copy of the chunks [first, end) that was not dropped.
__device__ inline void gather_probs(const CombineParams& p, u32 first, u32 end, u32 epoch) {
    // Copies per lane and round. Their loads are independent, so that a round takes the latency of two loads.
    constexpr u32 COPIES = 4;
    const Common& c = p.common;
    const HandleView& h = p.handle;
    const ReduceSet own = own_tokens(p);
    const u32 last = h.copy_begin[end];
    for (u32 begin = h.copy_begin[first] + lane_id(); begin < last; begin += COPIES * WARP) {
        Copy copies[COPIES];
        float probs[COPIES];
#pragma unroll
        for (u32 i = 0; i < COPIES; i++) {
            const u32 at = begin + i * WARP;
            copies[i] = at < last ? h.copies[at] : Copy::of(0, 0, 0, NO_ROW, 0.0f);
        }
#pragma unroll
        for (u32 i = 0; i < COPIES; i++) {
            if (copies[i].is_dropped()) continue;
            const bool rail = RAILS && copies[i].rank() >= c.ranks;
            probs[i] = rail ? returned(p, copies[i], epoch) : gathered(p, own, copies[i], begin + i * WARP);
        }
#pragma unroll
        for (u32 i = 0; i < COPIES; i++)
            if (!copies[i].is_dropped()) p.out_probs[copies[i].cell()] = probs[i];
    }
}

// Writes the probabilities of a chunk of a foreign set to the rail lane, and releases them to the proxy by the
// chunk's second flag.
__device__ inline void gather_set_probs(const CombineParams& p, const ReduceSet& set, u32 chunk, u32 epoch) {
    const Common& c = p.common;
    const HandleView& h = set.lists;
    auto* probs = reinterpret_cast<float*>(probs_in(p, out_lane(c, epoch, set.domain), h.tokens));
    for (u32 at = h.copy_begin[chunk] + lane_id(); at < h.copy_begin[chunk + 1]; at += WARP) {
        const Copy copy = h.copies[at];
        probs[at] = copy.is_dropped() ? 0.0f : gathered(p, set, copy, at);
    }
    __syncwarp();
    if (lane_id() == 0) st_release_sys(&rail_end(c, epoch, set.domain)->out_flags[2 * chunk + 1], epoch);
}

// The summand of the entry with the index `send`: the partial sum of another rank, a row of this rank, or another
// domain's sum.
__device__ inline Summand reduce_summand(const CombineParams& p, const ReduceSet& set, const Send& entry, u32 send,
                                         u32 epoch) {
    if (entry.is_dead()) return no_summand();
    const Common& c = p.common;
    const bool rail = RAILS && entry.rank() >= c.ranks;
    constexpr u32 WIRE = WIRE_F32 ? SUM_F32 : 0;
    if (!rail && entry.rank() != c.rank) return summand(set.partials + send * slot_bytes(p), SUM_ALIVE | WIRE);
    const bool begins = entry.begins_group(), ends = entry.ends_group();
    u32 flags = SUM_ALIVE;
    if (begins && !ends) flags |= SUM_APART;
    if (ends && !begins) flags |= SUM_TOGETHER;
    if (rail) return summand(in_lane(c, epoch, entry.rank() - c.ranks) + entry.row() * slot_bytes(p), flags | WIRE);
    return summand(row_at(p, entry.row()), flags | (ROWS_F32 ? SUM_F32 : 0));
}

// The summands of one token, read entry by entry.
struct ReduceRows {
    const CombineParams& p;
    const ReduceSet& set;
    u32 first;
    u32 epoch;

    __device__ Summand at(u32 index) const {
        return reduce_summand(p, set, set.lists.sends[first + index], first + index, epoch);
    }
};

// The producer of one team in the reduce role. It claims a few consecutive tokens of one set at a time. With rails,
// it first claims tokens of foreign sets, because their sums still have to cross to another domain.
struct Reducer {
    // Maximum number of tokens of a claim: several, so that their lists are read together; few, so that workers finish
    // at about the same time.
    static constexpr u32 MOST_TOKENS = 4;
    const CombineParams& p;
    const u32 epoch;
    const u32 workers;
    Producer& producer;
    // Claimed and not yet reduced: a share of the tokens [token, end).
    u32 share = 0;
    u32 token = 0;
    u32 end = 0;
    // The first entry of a token whose entries began in an earlier batch; NONE if there is none (`sums_of` in
    // sum.cuh).
    u32 begin = NONE;
    // The domain whose tokens are claimed.
    u32 domain;

    __device__ Reducer(const CombineParams& p, const Worker& worker, Producer& producer, u32 epoch)
        : p(p), epoch(epoch), workers(worker.workers), producer(producer), domain(RAILS ? next_domain(p.common.rails.domain) : 0) {}

    __device__ u32 next_domain(u32 after) const { return after + 1 < p.common.rails.domains ? after + 1 : 0; }

    // The set whose tokens are claimed.
    __device__ ReduceSet set() const { return foreign() ? foreign_tokens(p, domain) : own_tokens(p); }
    // Whether foreign sets are left.
    __device__ bool foreign() const { return RAILS && domain != p.common.rails.domain; }

    __device__ bool has_some() const { return token != end; }

    // The number of shares of tokens of the set that all workers have claimed. May exceed their number.
    __device__ u32 all_taken() const { return __shfl_sync(ALL_LANES, ld_relaxed_gpu(set().taken), 0); }

    // Claims tokens of the set, or a share of one token; returns false if none are left. kernel.cu decides whether to claim at all.
    // `taken`: a recent value of `all_taken`, which determines how many tokens are claimed.
    __device__ bool take(u32 taken) {
        const ReduceSet from = set();
        const u32 bits = from.share_bits, most = from.lists.tokens << bits;
        if (taken >= most) return false;
        const u32 count = bits != 0 ? 1 : min(max((most - taken) / (4 * workers), 1u), MOST_TOKENS);
        const u32 first = min(claim(from.taken, count), most);
        token = first >> bits;
        share = first & ((1u << bits) - 1);
        end = div_up(min(first + count, most), 1u << bits);
        return has_some();
    }

    // Claims tokens of this set or, with rails, of the next one that has some left. With `foreign_only`, it claims none of
    // this rank's own tokens. A producer that has nothing left to push waits for what it claims, and it must not wait for
    // domain sums of others while tokens of foreign sets are left (docs/cuda-rails.md, "No deadlock").
    __device__ bool take_next(bool foreign_only) {
        while (!take(all_taken())) {
            if (!foreign()) return false;
            domain = next_domain(domain);
            if (foreign_only && !foreign()) return false;
        }
        return true;
    }

    // Whether all sums that the claimed tokens need have arrived.
    __device__ bool ready() const {
        const ReduceSet from = set();
        bool there = true;
        for (u32 chunk = first_chunk(); chunk <= last_chunk(); chunk++)
            there = chunk_is_here(p.common, from, chunk, share, epoch) && there;
        there = __all_sync(ALL_LANES, there);
        // As in `await_chunks`: makes what one lane has acquired visible to all lanes.
        __syncwarp();
        return there;
    }

    // Waits until `ready` would return true. Returns false, after the fault was reported, if a sum does not arrive.
    // Then the caller ends the steps of its team; the claimed tokens are not reduced, and their outputs are
    // undefined.
    __device__ bool await() const {
        return await_chunks(p.common, set(), first_chunk(), last_chunk() + 1, share, epoch);
    }

    // Hands on the steps that reduce the claimed tokens, which must be ready. The consumers store the sums later.
    __device__ void reduce() {
        // Orders the partial sums and rail lanes, which others have written, before the bulk loads that `put` issues.
        copy_fence_global();
        __syncwarp();
        const ReduceSet from = set();
        const HandleView& h = from.lists;
        const u32 last = h.token_begin[end];
        const u32 first_token = token;
        for (u32 first = h.token_begin[token]; first < last; first += WARP) {
            Batch<Send> batch;
            batch.first = first;
            batch.count = min(WARP, last - first);
            if (lane_id() < batch.count) batch.entry = h.sends[first + lane_id()];
            reduce_batch(from, batch);
        }
        token = end;
        if (!foreign()) return;
        producer.put(STEP_COUNT | domain << STEP_DOMAIN_SHIFT, first_token, end - first_token);
        // The worker that has claimed the first token of a chunk also gathers the chunk's probabilities. It does so
        // now, not at the end: the proxy sends a unit's sums and probabilities separately, but the peer needs both.
        if (p.row_probs == nullptr) return;
        for (u32 chunk = div_up(first_token, h.chunk_tokens); chunk * h.chunk_tokens < end; chunk++)
            gather_set_probs(p, from, chunk, epoch);
    }

    __device__ u32 chunk_tokens() const { return foreign() ? p.common.rails.chunk_rows : p.handle.chunk_tokens; }
    __device__ u32 first_chunk() const { return token / chunk_tokens(); }
    __device__ u32 last_chunk() const { return (end - 1) / chunk_tokens(); }

    __device__ void reduce_batch(const ReduceSet& from, const Batch<Send>& batch) {
        // Loaded once, into registers.
        const bool to_lane = foreign();
        u8* const out = to_lane ? out_lane(p.common, epoch, domain) : p.out_tokens;
        const u32 wire = to_lane ? STEP_WIRE : 0;
        const u64 row_bytes = to_lane ? slot_bytes(p) : static_cast<u64>(p.hidden) * element_bytes(ROWS_F32);
        const bool mine = lane_id() < batch.count;
        const u32 ends = __ballot_sync(ALL_LANES, mine && batch.entry.ends_token());
        // A token begins at the entry after the end of the previous token. The first entry of the batch also begins a
        // token, unless that token began in an earlier batch.
        const u32 carried = begin == NONE ? 1 : 0;
        const u32 begins = (ends << 1 | carried) & (batch.count == WARP ? ALL_LANES : (1u << batch.count) - 1);
        const BatchSums sums = sums_of(batch, begins, ends, begin);
        const Segments segments = producer.segments(from.share_bits, share);
        if (sums.long_ends) {
            put_long_sum(producer, segments, sums.long_count, ReduceRows{p, from, sums.long_begin, epoch}, wire, out + token * row_bytes);
            token++;
        }
        const u32 count = __popc(sums.whole.ends);
        const Summand summand =
            mine ? reduce_summand(p, from, batch.entry, batch.first + lane_id(), epoch) : no_summand();
        // A single summand is added, too: that converts its type, and gives -0 and NaNs the bits of a sum.
        put_sums(producer, segments, sums.whole, summand, wire, /*single_as_is=*/false,
                 [&](const Sums& rest) { return out + (token + count - __popc(rest.ends)) * row_bytes; });
        token += count;
    }
};

// Gathers the probabilities of this rank's tokens, after their partial sums, if they are requested. Called by each
// producer after its last token; its consumers may still add. Each worker has a range of consecutive chunks, which it
// sweeps as one list: chunk by chunk, it would wait for three loads in a row in each (docs/lab/053).
__device__ inline void gather_all_probs(const CombineParams& p, const Worker& worker, u32 epoch) {
    const u64 chunks = p.handle.chunks;
    const u32 first = chunks * worker.index / worker.workers, end = chunks * (worker.index + 1) / worker.workers;
    if (first == end) return;
    clear_probs(p, first, end);
    // The barrier at the end of `await_chunks` also orders the zeros before the probabilities, which other lanes store.
    // Probabilities come with share 0 of their chunk.
    if (!await_chunks(p.common, own_tokens(p), first, end, 0, epoch)) return;
    gather_probs(p, first, end, epoch);
}
