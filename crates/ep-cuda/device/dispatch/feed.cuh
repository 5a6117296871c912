// A worker's items, divided in advance, as a stream of list entries.
#pragma once
#include "worker.cuh"

// A run of an item's entries, for one piece of their rows.
struct ItemBatch : Batch {
    u32 item = NONE;
    u32 piece = 0;
    bool last = false;

    __device__ bool valid() const { return item != NONE; }
    __device__ uint2 at(u32 index) const {
        return make_uint2(__shfl_sync(0xFFFFFFFFu, entry.x, index), __shfl_sync(0xFFFFFFFFu, entry.y, index));
    }
};

// What comes next is read ahead, since lists may lie on a peer.
// `Items::range(item)` and `Items::list(item)` say where an item's entries are, `Items::skip(item)` that there is none.
template <class Items>
struct Feed {
    // Its own: an object that points into itself would lie in memory, not in registers.
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

    __device__ ItemBatch fetch() {
        ItemBatch batch;
        if (item == NONE) return batch;
        batch.item = item;
        batch.piece = piece;
        batch.first = position;
        batch.count = min(WARP, range.end - position);
        if (lane_id() < batch.count) batch.entry = ld_relaxed_sys_v2(items.list(item) + position + lane_id());
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
