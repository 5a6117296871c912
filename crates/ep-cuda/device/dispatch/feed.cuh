// A worker's items, which are assigned statically, as a stream of list entries.
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

// Reads one batch and one item ahead, because lists may lie on a peer. `Items::list(item)` and `Items::range(item)`
// give an item's entries; `Items::skip(item)` says that the item has none.
template <class Items>
struct Feed {
    using Entry = typename Items::Entry;
    // A copy: a Feed that pointed to an object of the same thread would force that object out of registers into memory.
    const Items items;
    u32 item;
    u32 step;
    Range range;
    u32 position;
    u32 piece;
    u32 next_item;
    Range next_range;

    __device__ Feed(const Items& items, u32 first, u32 step) : items(items), step(step) {
        item = advance(first);
        load_range(item, range);
        position = range.begin;
        piece = items.first_piece(item);
        next_item = item == NONE ? NONE : advance(item + step);
        load_range(next_item, next_range);
    }

    // The first item from `candidate` on that this worker does not skip; NONE after the last one.
    __device__ u32 advance(u32 candidate) const {
        while (candidate < items.count) {
            if (!items.skip(candidate)) return candidate;
            candidate += step;
        }
        return NONE;
    }

    __device__ void load_range(u32 which, Range& into) const {
        if (which != NONE) into = items.range(which);
    }

    // The next batch; not `valid` after the last one.
    __device__ ItemBatch<Entry> fetch() {
        ItemBatch<Entry> batch;
        if (item == NONE) return batch;
        batch.item = item;
        batch.piece = piece;
        batch.first = position;
        batch.count = min(WARP, range.end - position);
        if (lane_id() < batch.count) batch.entry = load_entry(items.list(item) + position + lane_id());
        position += batch.count;
        if (position == range.end) {
            piece += items.groups.by;
            position = range.begin;
            if (piece >= items.pieces) {
                batch.last = true;
                item = next_item;
                range = next_range;
                position = range.begin;
                if (item != NONE) {
                    piece = items.first_piece(item);
                    next_item = advance(item + step);
                    load_range(next_item, next_range);
                }
            }
        }
        return batch;
    }
};
