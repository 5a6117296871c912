// Rails between NVLink domains: the words and lanes that this rank's kernels share with its proxy, and the lists of
// foreign sets. docs/cuda-rails.md explains both. The kernels of all operators include this file. Without RAILS,
// they use only `count_sources`, `source_at` and `SourceItems`.
//
// A source is a rank of the world whose tokens come to this domain: a rank of this domain, or a rank of another domain,
// whose tokens its rail peer in this domain forwards.
#pragma once
#include "worker.cuh"

// The rank of `domain` on this rank's rail.
__device__ inline u32 rail_peer(const Common& c, u32 domain) {
    return domain * c.rails.local_ranks + (c.rank - c.rails.first);
}

// Calls `visit(domain)` for each other domain, in the order in which this rank sends: the next domain first, so that
// ranks of one domain do not all send to the same one.
template <class Visit>
__device__ inline void for_each_other_domain(const Common& c, const Visit& visit) {
#pragma unroll 1
    for (u32 step = 1; step < c.rails.domains; step++) {
        const u32 domain = c.rails.domain + step;
        visit(domain < c.rails.domains ? domain : domain - c.rails.domains);
    }
}

__device__ inline RailEnd* rail_end(const Common& c, u32 epoch, u32 domain) {
    return c.rails.ends + 2 * domain + (epoch & 1);
}
__device__ inline u8* out_lane(const Common& c, u32 epoch, u32 domain) {
    return c.rails.lanes + (4 * static_cast<u64>(domain) + 2 * (epoch & 1)) * c.rails.lane_bytes;
}
__device__ inline u8* in_lane(const Common& c, u32 epoch, u32 domain) {
    return out_lane(c, epoch, domain) + c.rails.lane_bytes;
}

// ---- what this rank sends

// How many rail rows and rail copies this rank has in one domain before each chunk of its tokens. The last entries count
// those of all chunks.
struct RailBegin {
    u32* rows;
    u32* copies;
};

__device__ inline RailBegin rail_begin(const HandleView& h, u32 domain) {
    u32* rows = h.rail_begin + domain * 2 * (h.chunks + 1);
    return {rows, rows + h.chunks + 1};
}

// The head of a plan: sections and numbers.
struct PlanHead {
    RailSection sections[RAIL_SECTIONS]{};
    u32 rows = 0;
    u32 copies = 0;
    u32 units = 0;
    u32 flags_per_unit = 1;
};

// Places a section behind the one that ends at `end`, and moves `end` behind it. Sections begin at multiples of 128.
__device__ inline RailSection place_section(u64& end, u64 elements, u32 stride, RailPer per) {
    RailSection section{};
    section.offset = end;
    section.stride = stride;
    section.per = per;
    end = (end + elements * stride + 127) / 128 * 128;
    return section;
}

// Writes the plan of what this operator sends to `domain`; `ends(unit)` is the number of rows and copies up to and
// including a unit. Called by all threads of one block.
template <class Ends>
__device__ inline void publish_plan(const Common& c, u32 epoch, u32 domain, const PlanHead& head, const Ends& ends) {
    RailPlan* plan = &rail_end(c, epoch, domain)->out;
    for (u32 unit = threadIdx.x; unit < head.units; unit += blockDim.x) {
        const uint2 end = ends(unit);
        plan->ends[unit] = {end.x, end.y};
    }
    if (threadIdx.x < CALL_WORDS) plan->call[threadIdx.x] = c.handshake.call[threadIdx.x];
    // Constant indices, so that `head` stays in registers.
#pragma unroll
    for (u32 at = 0; at < RAIL_SECTIONS; at++)
        if (threadIdx.x == at) plan->sections[at] = head.sections[at];
    __syncthreads();
    if (threadIdx.x != 0) return;
    plan->rows = head.rows;
    plan->copies = head.copies;
    plan->units = head.units;
    plan->flags_per_unit = head.flags_per_unit;
    plan->chunk_rows = c.rails.chunk_rows;
    plan->signature = c.handshake.signature;
    st_release_sys(&plan->epoch, epoch);
}

// ---- what comes from rail peers
//
// The words of the window are in host memory. Loads of one word by several warps are served one after the other, about
// 0.5 us apart on an H100 (docs/lab/032, 044). So one thread of the rank at a time reads the progress of a rail peer,
// for all threads that wait for that peer: the thread that gets the lock `Control::rail_looking`. It copies the word to
// `Control::rail_seen` and, when it first sees the epoch, the plan to `Control::rail_plans`, in GPU memory.

// Calls `ask` in lane 0, and returns its answer in all lanes. Then all lanes see what lane 0 has acquired.
template <class Ask>
__device__ inline auto ask_once(const Ask& ask) {
    decltype(ask()) answer{};
    if (lane_id() == 0) answer = ask();
    answer = __shfl_sync(ALL_LANES, answer, 0);
    // A shuffle does not order memory.
    __syncwarp();
    return answer;
}

// Chunks of a set of `rows` rows, as `RailState::progress` counts them. A set without rows counts as one chunk, which has
// arrived when all units of the plan have. The lists of such a set have no chunk (`set_view`).
__device__ inline u32 rail_chunks(const Common& c, u32 rows) { return max(div_up(rows, c.rails.chunk_rows), 1u); }

// What a wait for the rail peer in `domain` awaits: the peer's plan, and its first `chunks` chunks.
struct Arrival {
    u32 epoch;
    u32 domain;
    u32 chunks;

    // Whether a progress is of this epoch, which means that the plan has arrived.
    __device__ bool has_plan(u64 progress) const { return reached(static_cast<u32>(progress >> 32), epoch); }
    __device__ bool is_covered(u64 progress) const { return has_plan(progress) && static_cast<u32>(progress) >= chunks; }
    __device__ u64* seen_word(const Common& c) const { return &c.own->rail_seen[epoch & 1][domain]; }
    __device__ u32* looking_word(const Common& c) const { return &c.own->rail_looking[domain]; }

    // May return false for a chunk that has arrived, while another thread holds the lock.
    __device__ bool is_there(const Common& c) const {
        const u64 seen = ld_acquire_gpu_u64(seen_word(c));
        return is_covered(seen) || try_lock_gpu(looking_word(c)) && look(c, seen);
    }
    // Like `is_there`, but waits until the chunks are covered or this thread gets the lock: the thread that holds the
    // lock may have read the progress too early.
    __device__ bool is_there_now(const Common& c) const {
        for (;;) {
            const u64 seen = ld_acquire_gpu_u64(seen_word(c));
            if (is_covered(seen)) return true;
            if (try_lock_gpu(looking_word(c))) return look(c, seen);
        }
    }

    // Reads the peer's progress, copies it to `rail_seen`, and unlocks `rail_looking`, which the caller has locked.
    // `seen`: the value of `rail_seen` before the lock was taken. A peer that has called with other arguments is
    // reported, and its progress is not copied.
    __device__ bool look(const Common& c, u64 seen) const {
        const RailEnd* end = rail_end(c, epoch, domain);
        const u64 progress = ld_acquire_sys_u64(&end->state.progress);
        bool fine = has_plan(progress);
        // `seen` was read without the lock, so another thread may have copied the plan since.
        if (fine && !has_plan(seen) && !has_plan(ld_acquire_gpu_u64(seen_word(c)))) fine = copy_plan(c, end->input);
        if (fine && progress != seen) st_release_gpu_u64(seen_word(c), progress);
        unlock_gpu(looking_word(c));
        return fine && is_covered(progress);
    }

    // Returns false, after the fault was reported, if the peer has called with other arguments.
    __device__ bool copy_plan(const Common& c, const RailPlan& plan) const {
        SeenPlan& copy = c.own->rail_plans[epoch & 1][domain];
        // All loads come before their first use, so that they take one round trip to host memory together.
        const u32 signature = ld_relaxed_sys(&plan.signature), rows = ld_relaxed_sys(&plan.rows);
        u64 offsets[RAIL_SECTIONS];
#pragma unroll
        for (u32 at = 0; at < RAIL_SECTIONS; at++) offsets[at] = ld_relaxed_sys_u64(&plan.sections[at].offset);
        if (signature != c.handshake.signature) {
            report_plan_mismatch(c, rail_peer(c, domain), plan.call, signature);
            return false;
        }
        copy.rows = rows;
#pragma unroll
        for (u32 at = 0; at < RAIL_SECTIONS; at++) copy.sections[at] = offsets[at];
        return true;
    }

    __device__ u32 seen(const Common& c) const { return static_cast<u32>(ld_acquire_gpu_u64(seen_word(c)) >> 32); }
};

// Waits until the plan of the rail peer in `domain` has arrived. Returns false, after the fault was reported, if it
// does not arrive within the entry bound or if the peer has called with other arguments.
__device__ inline bool await_plan(const Common& c, u32 epoch, u32 domain) {
    return wait_until(c, Arrival{epoch, domain, 0}, rail_peer(c, domain), FOR_HANDSHAKE, 0);
}

// Waits for chunk `chunk` of the set that comes from `domain`, and for all earlier ones. Called after `await_plan`.
__device__ inline bool await_rows(const Common& c, u32 epoch, u32 domain, u32 chunk) {
    return wait_until(c, Arrival{epoch, domain, chunk + 1}, rail_peer(c, domain), FOR_RAIL, chunk);
}

// Like `await_plan` and `await_rows`, without waiting.
__device__ inline bool rows_are_here(const Common& c, u32 epoch, u32 domain, u32 chunk) {
    return Arrival{epoch, domain, chunk + 1}.is_there(c);
}

// The plan of the rail peer in `domain`. Called after `await_plan`.
__device__ inline const SeenPlan& seen_plan(const Common& c, u32 epoch, u32 domain) {
    return c.own->rail_plans[epoch & 1][domain];
}

// Waits until everything that rail peers send in this operator has arrived. The proxies rely on this wait: they may
// overwrite lanes two epochs later. Called by one warp.
__device__ inline void await_all_rails(const Common& c, u32 epoch) {
    for (u32 domain = lane_id(); domain < c.rails.domains; domain += WARP) {
        if (domain == c.rails.domain || !await_plan(c, epoch, domain)) continue;
        await_rows(c, epoch, domain, rail_chunks(c, seen_plan(c, epoch, domain).rows) - 1);
    }
}

// ---- foreign sets

// Maximum number of chunks of a foreign set.
__device__ inline u32 most_set_chunks(const Common& c) { return rail_chunks(c, c.rails.most_rows); }

// Offsets of the lists of a set, from the address of the set's memory; laid out for the maximum numbers of rows and
// copies, so that all ranks compute the same offsets.
struct SetLists {
    u64 sends, send_begin, token_begin, copies, copy_begin, recv, recv_begin, dst_copies, dst_begin, end;

    __device__ explicit SetLists(const Common& c) {
        const u64 rows = c.rails.most_rows, most = c.rails.most_copies, begins = most_set_chunks(c) + 1;
        u64 at = 0;
        const auto place = [&](u64 bytes) {
            const u64 here = at;
            at += (bytes + 15) / 16 * 16;
            return here;
        };
        sends = place(sizeof(Send) * (most + rows));
        send_begin = place(4 * begins);
        token_begin = place(4 * (rows + 1));
        copies = place(sizeof(Copy) * most);
        copy_begin = place(4 * begins);
        recv = place(sizeof(Receive) * most);
        recv_begin = place(4 * begins * c.ranks);
        dst_copies = place(sizeof(DstCopy) * most);
        dst_begin = place(4 * begins * c.ranks);
        end = at;
    }
};

// The set of `domain` among those that this rank forwards, as a handle. Its tokens are the rail rows.
__device__ inline HandleView set_view(const Common& c, const HandleView& own, u32 domain, u32 rows) {
    const SetLists lists(c);
    u8* base = own.sets + domain * lists.end;
    HandleView set = own;
    set.sends = reinterpret_cast<Send*>(base + lists.sends);
    set.send_begin = reinterpret_cast<u32*>(base + lists.send_begin);
    set.token_begin = reinterpret_cast<u32*>(base + lists.token_begin);
    set.copies = reinterpret_cast<Copy*>(base + lists.copies);
    set.copy_begin = reinterpret_cast<u32*>(base + lists.copy_begin);
    set.recv = reinterpret_cast<Receive*>(base + lists.recv);
    set.recv_begin = reinterpret_cast<u32*>(base + lists.recv_begin);
    set.dst_copies = reinterpret_cast<DstCopy*>(base + lists.dst_copies);
    set.dst_begin = reinterpret_cast<u32*>(base + lists.dst_begin);
    set.tokens = rows;
    set.chunks = div_up(rows, c.rails.chunk_rows);
    set.chunk_tokens = c.rails.chunk_rows;
    return set;
}

// Like `set_view`, with the number of rows that preprocess has found.
__device__ inline HandleView set_of(const Common& c, const HandleView& own, u32 domain) {
    return set_view(c, own, domain, own.set_rows[rail_peer(c, domain)]);
}

__device__ inline u32 domain_of(const Common& c, u32 source) { return source / c.rails.local_ranks; }
// The rank of this domain that has the lists of a source: its rail peer if the source is in another domain, otherwise the
// source itself.
__device__ inline u32 forwarder_of(const Common& c, u32 source) {
    return c.rails.first + source % c.rails.local_ranks;
}
// This rank sets the flags of a set that comes from the domain of `source` in `Control::flags[alias]`. `alias` is this rank's
// rail peer in that domain, so no two ranks write the same flag. In dispatch only the forwarder of a set sets flags for it, and
// its rail peer is the set's source.
__device__ inline u32 alias(const Common& c, u32 source) {
    return domain_of(c, source) * c.rails.local_ranks + (c.rank - c.rails.first);
}

// The view of a source in another domain. `set_bytes` and `set_prob_bytes`: distance between two sets in the memory
// that the forwarder's handshake names.
__device__ inline PeerView foreign_view(const Common& c, const HandleView& own, u32 source, const AwaitedWords& words,
                                        u64 set_bytes, u64 set_prob_bytes) {
    const u32 forwarder = forwarder_of(c, source), domain = domain_of(c, source);
    const i64 delta = c.delta[forwarder];
    const SetLists lists(c);
    const auto* base = of_peer<const u8>(words.both(HANDSHAKE_WORD(sets)), delta) + domain * lists.end;
    PeerView view{};
    view.chunks = div_up(own.set_rows[source], c.rails.chunk_rows);
    view.share_bits = c.handshake.share_bits;
    view.recv = reinterpret_cast<const Receive*>(base + lists.recv);
    view.recv_begin = reinterpret_cast<const u32*>(base + lists.recv_begin) + c.rank * (view.chunks + 1);
    view.dst_copies = reinterpret_cast<const DstCopy*>(base + lists.dst_copies);
    view.dst_begin = reinterpret_cast<const u32*>(base + lists.dst_begin) + c.rank * (view.chunks + 1);
    view.flags = c.control[forwarder]->flags[alias(c, source)];
    u8* tokens = of_peer<u8>(words.both(HANDSHAKE_WORD(set_tokens)), delta);
    view.tokens = tokens == nullptr ? nullptr : tokens + domain * set_bytes;
    auto* probs = of_peer<u8>(words.both(HANDSHAKE_WORD(set_probs)), delta);
    view.probs = probs == nullptr ? nullptr : reinterpret_cast<float*>(probs + domain * set_prob_bytes);
    return view;
}

// Like `await_all_handshakes`, for the sources of all domains: a source in another domain needs its forwarder's
// handshake.
__device__ inline bool await_domain(const Common& c, const HandleView& own, u32 epoch, PeerView* peers, u64 set_bytes,
                                    u64 set_prob_bytes) {
    return await_views(
        c, epoch, peers, [&](u32 source) { return forwarder_of(c, source); },
        [&](u32 source, const AwaitedWords& words) {
            const bool foreign = domain_of(c, source) != c.rails.domain;
            return foreign ? foreign_view(c, own, source, words, set_bytes, set_prob_bytes) : view_of(c, source, words);
        });
}

// The sources whose lists another rank of this domain has, in the order in which workers serve them: first the other
// ranks of this domain, beginning with the next one, then those of the next domain, and so on. Rail peers of this rank
// are left out: this rank has the lists of their sets itself.
__device__ inline u32 count_sources(const Common& c) {
    const u32 others = domain_size(c) - 1;
    return others + (RAILS ? (c.rails.domains - 1) * others : 0);
}
__device__ inline u32 source_at(const Common& c, u32 index) {
    if (!RAILS) return in_circle(c, c.rank + 1 + index);
    const u32 size = domain_size(c), others = size - 1;
    const u32 local = c.rank - c.rails.first + 1 + index % others;
    const u32 source = c.rails.first + (local >= size ? local - size : local) + index / others * size;
    return in_circle(c, source);
}

// The items of the sources of `count_sources`, which take turns, numbered as if all sources had as many. A source has
// `1 << share_bits` items for each unit of its tokens, and a flag for each item.
struct SourceItems {
    const Common& c;
    const PeerView* peers;
    Divider sources;
    u32 count = 0;

    // `units_of(chunks)`: the units of a source that has this number of chunks.
    template <class UnitsOf>
    __device__ SourceItems(const Common& c, const PeerView* peers, const UnitsOf& units_of)
        : c(c), peers(peers), sources(max(count_sources(c), 1u)) {
        u32 most = 0;
        for (u32 index = 0; index < count_sources(c); index++) {
            const PeerView& peer = peers[source_at(c, index)];
            most = max(most, units_of(peer.chunks) << peer.share_bits);
        }
        count = most * sources.by;
    }
    __device__ u32 source(u32 item) const { return source_at(c, sources.rest(item)); }
    __device__ const PeerView& peer(u32 item) const { return peers[source(item)]; }
    // The item's index among those of its source, which is also that of its flag.
    __device__ u32 place(u32 item) const { return sources.divide(item); }
    __device__ u32 unit(u32 item) const { return place(item) >> peer(item).share_bits; }
    // The item's part of each row of its unit, of `parts_of(item)` parts.
    __device__ u32 part(u32 item) const { return place(item) & (parts_of(item) - 1); }
    __device__ u32 parts_of(u32 item) const { return 1u << peer(item).share_bits; }
};
