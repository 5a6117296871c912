// combine: adds up the experts' output rows of each token. One launch: block 0 sends the handshake, every block awaits the
// handshakes of all ranks of the domain, and then every team of warps (steps.cuh) is one worker, whose producer
// alternates between two roles. A launch has HYBRID_EP_SMS blocks (default 32) of up to TEAMS teams. docs/glossary.md
// ("Operators", "Running an operator", "Memory and transport") defines chunk, item, team, step, partial sum, set and lane. An
// epoch is the number of an operator; a flag holds it, so flags of earlier operators do not count.
//
//   push     Adds the output rows of this rank's experts for a peer's token, and stores the partial sum, rounded to the wire type
//            (the type of sums between ranks), to the peer's `partials`. If the call has probabilities, also stores that of each
//            copy to the peer's `prob_scratch`. An item is one chunk (`chunk_tokens` consecutive tokens) of one peer, never of
//            this rank; or one share of its rows (`Segments` in sum.cuh), if the peer has few tokens. Reads this rank's input
//            and, over the links, the lists `recv` (rows) and `dst_copies` (probabilities) of the peer's handle. When an
//            item is complete, sets its flag in the peer's control block.
//   reduce   Adds the partial sums of this rank's tokens in rank order, and writes the result to `out_tokens`. This
//            rank's own partial sum is not in memory: the rows of its experts are added to each other first, and their
//            sum, unrounded, is then added to the token's sum. After the last token, gathers the probabilities into
//            `out_probs`. Reads partial sums only after the flags of all peers for their chunk and share. Writes nothing
//            on peers. With RAILS (below), also writes lanes and their flags. A worker claims up to
//            `Reducer::MOST_TOKENS` tokens at a time, or one share of one token.
//
// This rank writes to a peer's `partials` and `prob_scratch` only between that peer's handshake and the last flag that this rank
// sets on that peer. From the handshake until its own kernel ends, it may also read the peer's lists (lists.cuh). No peer reads
// this rank's input, so the program may overwrite it in stream order. A kernel without a fault ends after reduce has seen the
// flags of all peers for all chunks. So a later combine may use `partials` and `prob_scratch` again: peers write there only after
// that combine's handshake. A wait that fails reports the fault. Then the output is undefined, and slow peers may still write to
// `partials`: the buffer refuses further operators. The same rules protect a forwarder's `set_partials` and `set_prob_scratch`;
// the flags are then those of the foreign set.
//
// No deadlock: push waits for no peer after the handshakes. A worker waits for flags only when no items are left to push. All
// blocks of all ranks run at the same time (docs/protocol.md, "All blocks run at once"). With RAILS, see docs/cuda-rails.md, "No
// deadlock". docs/protocol.md lists the words that ranks share.
//
// Workers with the same amount of work take up to 1.6 times as long as others, depending on where their SM is. Therefore they
// claim work from shared counters: `items_taken`, `tokens_taken` and, with RAILS, `set_taken`. Only each worker's first
// item to push, and the chunks of this rank's own tokens for which it gathers probabilities, are assigned by the
// worker's number.
//
// Element types are macros that the host defines for each variant: see sum.cuh and docs/adding-a-kernel.md. So are TEAMS, the teams of
// a block, and CONSUMERS, the consumers of a team: one for plain mode on few SMs, otherwise two (`CombineTeams` in src/tuning.rs).
// With RAILS (several NVLink domains, docs/cuda-rails.md), push also serves the foreign sets that other ranks of the domain
// forward. In the reduce role, a worker first claims tokens of the sets that this rank forwards: it computes their domain sums, and
// writes them and the sets' probabilities to the lanes. When all of these tokens are claimed, it claims this rank's own tokens, and
// adds the domain sums that come back for them, in the order of `sends` (`Send::GROUP_FIRST` in lists.cuh), which gives the same
// bits as adding the domains in ascending order.
#include "push.cuh"
#include "reduce.cuh"

__device__ inline void push_and_reduce(const CombineParams& p, const Worker& worker, Producer& producer,
                                       const PeerView* peers, u32 epoch) {
    Pusher pusher(p, worker, producer, peers);
    Reducer reducer(p, worker, producer, epoch);
    const u64 items = pusher.items.count, slack = p.slack;
    const u64 tokens = p.handle.tokens << p.common.handshake.share_bits;  // counted in shares, as `all_taken` is
    // Whether tokens of foreign sets may be left for this worker to claim or reduce. Until none are left, the worker
    // does not wait for this rank's own tokens, which need the domain sums of other domains. Foreign tokens need only
    // flags of the push role, so all domain sums are sent.
    bool sets_left = RAILS;
    // A worker has three phases. While items are left, it pushes one and then reduces what has arrived, without
    // waiting. With RAILS, it then claims and reduces foreign tokens until none are left to claim. Last, it waits for
    // this rank's own tokens and reduces them.
    for (;;) {
        const bool pushes = !pusher.over();
        const u64 item = pusher.item;
        if (pushes) pusher.push();
        // Claim tokens only if their sums have probably arrived: while taken <= (item - workers) * tokens / items - slack. (The code
        // multiplies this by `items`, so that nothing is divided or negative.) About `item - workers` items of this rank are
        // complete, because each worker holds one. Peers are assumed to be behind this rank by `slack` tokens, because
        // they may have started some microseconds later. If more tokens than that are already claimed, push the next
        // item first. While this worker has items to push, never wait for a peer here: the peer may be waiting for
        // these items. With RAILS there is no estimate, and `slack` has no effect: tokens of foreign sets are claimed
        // first, then this rank's own.
        for (;;) {
            const bool foreign_only = sets_left && !pushes;
            if (foreign_only && !reducer.foreign()) break;
            if (!reducer.has_some()) {
                if (RAILS) {
                    if (!reducer.take_next(foreign_only)) break;
                } else {
                    const u32 taken = reducer.all_taken();
                    if (pushes && (taken + slack) * items + worker.workers * tokens > item * tokens) break;
                    if (!reducer.take(taken)) break;
                }
            }
            if (pushes) {
                if (!reducer.ready()) break;
            } else if (!reducer.await()) {
                return;
            }
            reducer.reduce();
        }
        if (pushes) {
            pusher.next();
        } else if (sets_left) {
            sets_left = false;
        } else {
            break;
        }
    }
    if (p.out_probs != nullptr) gather_all_probs(p, worker, epoch);
}

// Checks that the lanes have room for the domain sums that this rank sends. The host does not know the number of rows, so
// the kernel checks. Called by all threads of one block, before the handshake: a rank that sees the handshake sees a fault, too.
__device__ inline void check_lanes(const CombineParams& p) {
    const Common& c = p.common;
    for_each_other_domain(c, [&](u32 domain) {
        const HandleView set = set_of(c, p.handle, domain);
        u64 end = 0;
        sums_plan(p, set.tokens, set.copy_begin[set.chunks], end);
        if (end > c.rails.lane_bytes && threadIdx.x == 0) report_own(c, FAULT_SHORT_LANE, c.rank, end, 0, 0);
    });
    __syncthreads();
}

// Announces the domain sums that this rank sends along its rails. Called by all threads of one block.
__device__ inline void announce_sums(const CombineParams& p, u32 epoch) {
    for_each_other_domain(p.common, [&](u32 domain) {
        const HandleView set = set_of(p.common, p.handle, domain);
        u64 end = 0;
        PlanHead head = sums_plan(p, set.tokens, set.copy_begin[set.chunks], end);
        head.units = set.chunks;
        publish_plan(p.common, epoch, domain, head, [&](u32 unit) {
            return make_uint2(min(set.tokens, (unit + 1) * set.chunk_tokens), set.copy_begin[unit + 1]);
        });
    });
}

// Sends the handshake and, with rails, the plans. Called by all threads of one block.
__device__ inline void enter(const CombineParams& p, u32 epoch) {
    // Lists of a preprocess that has failed are unfinished. Then, or if a lane is too short, no plan is written: rail peers wait
    // for it until the abort word reaches them.
    if (RAILS && !has_given_up(p.common)) check_lanes(p);
    send_handshake(p.common, epoch);
    if (RAILS && !has_given_up(p.common)) announce_sums(p, epoch);
}

extern "C" __global__ void __launch_bounds__(TEAMS*(1 + CONSUMERS) * WARP, 1) combine(const __grid_constant__ CombineParams p) {
    extern __shared__ __align__(128) u8 memory[];
    const Common& c = p.common;
    const u32 epoch = c.own->epoch + 1;
    auto* peers = reinterpret_cast<PeerView*>(memory);
    u8* teams = memory + peers_bytes(c.ranks + rail_domains(c));

    if (blockIdx.x == 0) enter(p, epoch);
    // Team t has the warps t, t + TEAMS and, with two consumers, t + 2 TEAMS. The first one is the producer. With four or eight
    // teams, the warps of a team run on one of the SM's four schedulers, and all four schedulers have the same number
    // of teams.
    const u32 in_block = warp_id() % TEAMS, part = warp_id() / TEAMS;
    const Team team(teams + in_block * combine_team_bytes(CONSUMERS));
    if (part == 0) team.init();  // published by the barrier of the block inside the waits below
    const u64 set_bytes = RAILS ? set_slots(c) * slot_bytes(p) : 0;
    const u64 set_prob_bytes = RAILS ? sizeof(float) * static_cast<u64>(c.rails.most_copies) : 0;
    if (RAILS ? await_domain(c, p.handle, epoch, peers, set_bytes, set_prob_bytes)
              : await_all_handshakes(c, epoch, peers)) {
        // The handshakes of the peers make their `partials` writable for this thread. The fence does so for the bulk
        // copy engine.
        copy_fence_global();
        if (part == 0) {
            Producer producer(team, p.hidden);
            push_and_reduce(p, {in_block * gridDim.x + blockIdx.x, TEAMS * gridDim.x}, producer, peers, epoch);
            producer.put(STEP_END);
            if (RAILS && blockIdx.x == 0 && warp_id() == 0) await_all_rails(c, epoch);
        } else {
            consume(p, team, part - 1, epoch);
        }
    }
    leave(c, epoch);
}
