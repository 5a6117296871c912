// The items that a worker claims, as a stream of list entries.
#pragma once
#include "worker.cuh"

// Consecutive entries of an item, for one piece of their rows.
template <class Entry>
struct ItemBatch : Batch<Entry> {
    u32 item = NONE;
    u32 piece = 0;
    bool last = false;  // the last batch of the item

    __device__ bool valid() const { return item != NONE; }
    // The entry that lane `index` holds. Called by all lanes.
    __device__ Entry at(u32 index) const {
        const uint2& own = this->entry.words;
        return {make_uint2(__shfl_sync(ALL_LANES, own.x, index), __shfl_sync(ALL_LANES, own.y, index))};
    }
};

// Maximum number of items of a rank for one group of pieces.
constexpr u32 MOST_ITEMS = 512;
// Chunks of an item: one, or two if a rank has more than MOST_ITEMS chunks (it has at most MAX_CHUNKS), because each item costs
// a fence. The rank that stores the rows and the ranks that receive them compute this number from the number of chunks
// of the same source. An item of combine is one chunk, or a share of one.
__device__ inline u32 span_of(u32 chunks) { return max(div_up(chunks, MOST_ITEMS), 1u); }

// Claims items one by one from a counter that all workers of a role share, because some workers are faster than others
// (kernel.cu). The first item of each worker is assigned statically. Callers fetch one batch ahead, because lists may
// lie on a peer; the feed claims one item further ahead. `Items::list(item)` and `Items::range(item)` give an item's
// entries; `Items::skip(item)` says that the item does not exist, because its source has fewer chunks. An item that
// exists may have no entries: its flag is still set or awaited.
template <class Items>
struct Feed {
    using Entry = typename Items::Entry;
    // A copy: a Feed that pointed to an object of the same thread would force that object out of registers into memory.
    const Items items;
    u32* const counter;
    const u32 workers;
    u32 item;
    Range range;
    u32 position;
    u32 piece = 0;
    bool done = false;      // the range of this piece has been read to its end
    u32 claimed;            // lane 0: the number that the last claim has returned
    bool claiming = false;  // `claimed` has not become `next_item` yet
    u32 next_item = NONE;
    Range next_range;

    // `worker`: this worker among all those that claim from `counter`.
    __device__ Feed(const Items& items, u32* counter, const Worker& worker)
        : items(items), counter(counter), workers(worker.workers) {
        item = existing(worker.index);
        load_range(item, range);
        begin_item();
        claim_ahead();
    }

    __device__ void begin_item() {
        position = range.begin;
        if (item != NONE) piece = items.first_piece(item);
    }

    // Starts a claim, whose result `prepare` takes later: the atomic addition takes most of a microsecond.
    __device__ void claim_ahead() {
        if (item == NONE) return;
        if (lane_id() == 0) claimed = atom_add_relaxed_gpu(counter, 1);
        claiming = true;
    }

    // `candidate` if that item exists, otherwise the next claimed item that exists; NONE if all items are claimed.
    __device__ u32 existing(u32 candidate) {
        while (candidate < items.count && items.skip(candidate)) candidate = workers + claim(counter);
        return candidate < items.count ? candidate : NONE;
    }

    __device__ void load_range(u32 which, Range& into) const {
        if (which != NONE) into = items.range(which);
    }

    // Takes the claimed item, and loads its range. To be called some time after `fetch`, so that the worker does not wait for
    // the claim.
    __device__ void prepare() {
        if (!claiming) return;
        claiming = false;
        next_item = existing(workers + __shfl_sync(ALL_LANES, claimed, 0));
        load_range(next_item, next_range);
    }

    // The next batch; not `valid` after the last one.
    __device__ ItemBatch<Entry> fetch() {
        ItemBatch<Entry> batch;
        if (item != NONE && done) {
            piece += items.groups_of(item);
            position = range.begin;
            if (piece >= items.pieces_of(item)) {
                prepare();
                item = next_item;
                range = next_range;
                begin_item();
                claim_ahead();
            }
        }
        if (item == NONE) return batch;
        batch.item = item;
        batch.piece = piece;
        batch.first = position;
        batch.count = min(WARP, range.end - position);
        if (lane_id() < batch.count) batch.entry = load_entry(items.list(item) + position + lane_id());
        position += batch.count;
        done = position == range.end;
        batch.last = done && piece + items.groups_of(item) >= items.pieces_of(item);
        return batch;
    }
};
