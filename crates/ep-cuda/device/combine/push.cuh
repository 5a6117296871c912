// The push role. The rank that holds the experts adds the rows of each token of a peer, and stores the partial sum to
// the peer or, for a foreign set, to the set's forwarder. If rows and partial sums have the same type, a token's only
// row is not added to anything: it is stored from the stage into which it was loaded.
//
// This file is the part of a team's producer warp: it reads lists, loads rows, and hands steps to the consumers, which add, store sums
// and set flags (steps.cuh). The producer itself stores only probabilities. Its only wait is for an empty stage, so for its own
// consumers. It reads no abort word: after a fault it pushes its remaining items, into memory that stays mapped, and then a wait of
// the reduce role fails (docs/cuda.md, "Faults", says what results are worth then).
#pragma once
#include "rails.cuh"
#include "steps.cuh"

// The work items of the push role: the shares of the chunks of the tokens of the other ranks of the domain, and of the foreign
// sets that these ranks forward, in the order in which they are to be sent. For tokens of this rank, and of sets that it forwards,
// the reduce role adds this rank's rows.
struct PushItems : SourceItems {
    __device__ PushItems(const Common& c, const PeerView* peers) : SourceItems(c, peers, [](u32 chunks) { return chunks; }) {}
    __device__ u32 chunk(u32 item) const { return unit(item); }
    __device__ u32 share(u32 item) const { return part(item); }
    __device__ bool is_missing(u32 item) const { return chunk(item) >= peer(item).chunks; }
    __device__ Range range(u32 item) const {
        const u32* begin = peer(item).recv_begin + chunk(item);
        return {ld_relaxed_sys(begin), ld_relaxed_sys(begin + 1)};
    }
};

// The probability of a cell of this rank (DstCopy::cell).
__device__ inline float row_prob(const CombineParams& p, u32 cell) {
    const Common& c = p.common;
    const u32 width = p.handle.permuted ? 1 : c.owner_begin[c.rank + 1] - c.owner_begin[c.rank];
    return p.row_probs[cell / width * p.prob_stride + cell % width];
}

// Stores the probabilities of a chunk's copies on this rank to the rank of their tokens or, for a foreign set, to its forwarder.
// That rank knows which copies were dropped, and does not read their cells.
__device__ inline void push_probs(const CombineParams& p, const PeerView& peer, u32 chunk) {
    const u32 begin = ld_relaxed_sys(peer.dst_begin + chunk), end = ld_relaxed_sys(peer.dst_begin + chunk + 1);
    for (u32 at = begin + lane_id(); at < end; at += WARP) {
        const DstCopy entry = load_entry(peer.dst_copies + at);
        if (!entry.is_dropped()) peer.probs[entry.copy()] = row_prob(p, entry.cell());
    }
}

__device__ inline Summand push_summand(const CombineParams& p, u32 row) {
    return row == NO_ROW ? no_summand() : summand(row_at(p, row), SUM_ALIVE | (ROWS_F32 ? SUM_F32 : 0));
}

// The rows of one token on this rank, read entry by entry.
struct PushRows {
    const CombineParams& p;
    const Receive* entries;

    __device__ Summand at(u32 index) const { return push_summand(p, load_entry(entries + index).row()); }
};

// One producer in the push role. Its first item is assigned statically: the item with the worker's number. It claims
// further items from a shared counter, in order, so that chunks arrive and can be reduced in order.
//
// Constructed after the block has acquired the handshakes, which have the addresses of the lists. All lanes call every function. For each
// item, while `over()` is false: `push()`, then reduce, then `next()`.
struct Pusher {
    const CombineParams& p;
    const u32 workers;
    Producer& producer;
    const PushItems items;
    u32 item;
    Range range;       // of the item's entries
    u32 begin = NONE;  // of `sums_of` in sum.cuh: the first entry of a token whose last entry is in a later batch

    __device__ Pusher(const CombineParams& p, const Worker& worker, Producer& producer, const PeerView* peers)
        : p(p),
          workers(worker.workers),
          producer(producer),
          items(p.common, peers),
          item(worker.index) {
        load_range();
        claim_existing();
    }

    __device__ bool over() const { return item >= items.count; }

    // Claims the next item.
    __device__ void take() { item = workers + claim(&p.common.own->items_taken); }

    // Items are numbered as if all peers had the same number of chunks. Items past the end of a peer's chunks do not
    // exist.
    __device__ bool exists() const { return !over() && !items.is_missing(item); }

    // Loads the range of the item's entries.
    __device__ void load_range() {
        if (exists()) range = items.range(item);
    }

    // Claims items until one exists.
    __device__ void claim_existing() {
        while (!over() && !exists()) {
            take();
            load_range();
        }
    }

    // Hands on the steps of the item's partial sums, and stores its probabilities.
    __device__ void push() {
        Batch<Receive> next = read(range.begin);
        for (bool last = false; !last;) {
            const Batch<Receive> batch = next;
            last = batch.first + batch.count == range.end;
            if (!last) next = read(batch.first + batch.count);
            push_batch(batch);
        }
        if (p.row_probs != nullptr && items.share(item) == 0) push_probs(p, items.peer(item), items.chunk(item));
        // Orders the probabilities that all lanes have stored before the producer's next arrival at `full`. Consumer 0 acquires that, then
        // releases the item's flag, which `Pusher::next` hands on.
        __syncwarp();
    }

    // Hands on the flag of the finished item, and claims the next one. Called after the worker has reduced, so that the item's stores
    // complete while consumers add: directly after the item, consumers would wait for them at the flag.
    __device__ void next() {
        producer.put(STEP_FLAG, reinterpret_cast<u64>(&items.peer(item).flags[items.place(item)]));
        take();
        load_range();
        claim_existing();
    }

    // Lanes from `count` on have no entry.
    __device__ Batch<Receive> read(u32 first) const {
        Batch<Receive> batch;
        batch.first = first;
        batch.count = min(WARP, range.end - first);
        if (lane_id() < batch.count) batch.entry = load_entry(items.peer(item).recv + first + lane_id());
        return batch;
    }

    __device__ void push_batch(const Batch<Receive>& batch) {
        const PeerView& peer = items.peer(item);
        // In combine, `tokens` of the view are the target's `partials` or, for a foreign set, the forwarder's `set_partials`. Loaded once,
        // into registers.
        u8* const partials = peer.tokens;
        const u64 slot_bytes = ::slot_bytes(p);
        const auto slot = [&](u32 end_lane) { return partials + batch.entry.source_of_lane(end_lane) * slot_bytes; };
        // A capacity keeps rows in order of experts, so if a token's first row is dropped, all of them are. The last one that is kept has
        // the mark of the end.
        const bool alive = lane_id() < batch.count && !batch.entry.is_dropped();
        const u32 begins = __ballot_sync(ALL_LANES, alive && batch.entry.is_first());
        const u32 ends = __ballot_sync(ALL_LANES, alive && batch.entry.is_end());
        const BatchSums sums = sums_of(batch, begins, ends, begin);
        const Segments segments = producer.segments(peer.share_bits, items.share(item));
        if (sums.long_ends)
            put_long_sum(producer, segments, sums.long_count, PushRows{p, peer.recv + sums.long_begin}, STEP_WIRE, slot(sums.long_end));
        // A single row of the wire type is sent instead of its sum. Its bits may differ from those of 0 + row, if it is -0 or a NaN. The
        // token's final sum does not: it begins with 0, and has one form of NaN (`canonical`).
        put_sums(producer, segments, sums.whole, push_summand(p, alive ? batch.entry.row() : NO_ROW), STEP_WIRE, SAME_TYPE,
                 [&](const Sums& rest) { return slot(rest.last()); });
    }
};
