// A worker: one warp that takes work items on its own, with shared-memory stages of its own. Warps of a block never
// wait for each other.
#pragma once
#include COPY_VARIANT
#include "handle.cuh"
#include "sync.cuh"

struct Worker {
    u32 index;    // among all workers of its role, in all blocks
    u32 workers;
};

// A ring of stages, loaded one by one. Loads are numbered; load n lies in stage n % stages, and may be issued when
// load n - stages is free. All lanes call everything, with the same arguments.
struct Ring {
    u8* stage0;
    u64* barriers;
    u32 stages;
    u32 stage_bytes;
    u32 issued = 0;
    u32 taken = 0;
    u32 freed = 0;
    u32 issue_at = 0;
    u32 take_at = 0;
    u32 parity = 0;

    // The barriers must be initialised before anybody uses the ring, by `init`.
    __device__ Ring(u8* stage0, u64* barriers, u32 stages, u32 stage_bytes)
        : stage0(stage0), barriers(barriers), stages(stages), stage_bytes(stage_bytes) {}

    __device__ void init() const {
        if (lane_id() < stages) copy_init(&barriers[lane_id()]);
        copy_init_done();
        __syncwarp();
    }

    __device__ bool room() const { return issued - freed < stages; }

    __device__ void load(const void* global, u32 bytes) {
        u8* stage = stage0 + issue_at * stage_bytes;
        if (!BULK_COPIES || lane_id() == 0) {
            copy_expect(&barriers[issue_at], bytes);
            copy_load(stage, global, bytes, &barriers[issue_at]);
        }
        issued++;
        issue_at = issue_at + 1 == stages ? 0 : issue_at + 1;
    }

    // The next load's stage, once it is there.
    __device__ u8* take() {
        u8* stage = stage0 + take_at * stage_bytes;
        copy_arrived(&barriers[take_at], parity);
        taken++;
        if (++take_at == stages) {
            take_at = 0;
            parity ^= 1;
        }
        return stage;
    }

    // All loads before `load` may be overwritten, once the stores of all groups but the youngest `pending` have read
    // their stage.
    template <u32 pending>
    __device__ void free(u32 load) {
        if (lane_id() == 0) copy_read<pending>();
        if (!BULK_COPIES) __syncwarp();
        freed = load;
    }

    // A block must not end before what it has asked for is there.
    __device__ void drain() {
        while (taken != issued) take();
    }
};

// From a stage that all lanes have written, or that came by a load.
__device__ inline void store_stage(void* global, const void* stage, u32 bytes) {
    if (!BULK_COPIES || lane_id() == 0) copy_store(global, stage, bytes);
}

__device__ inline void commit_stores() {
    if (lane_id() == 0) copy_commit();
}

// Tells peers that an item is complete, a few stores later, when it is: so the worker does not stop for it.
template <u32 lag>
struct Completion {
    u32 flag = NONE;
    u32 source = 0;
    u32 groups_since = 0;

    // After each commit.
    template <class Tell>
    __device__ void committed(const Tell& tell) {
        if (flag != NONE && ++groups_since == lag) {
            if (lane_id() == 0) copy_done<lag>();
            publish(tell);
        }
    }

    // The item whose last store was just committed; `item_flag`, `item_source` are what `tell` is called with.
    template <class Tell>
    __device__ void finish(u32 item_flag, u32 item_source, const Tell& tell) {
        flush(tell);
        flag = item_flag;
        source = item_source;
        groups_since = 0;
    }

    template <class Tell>
    __device__ void flush(const Tell& tell) {
        if (flag == NONE) return;
        if (lane_id() == 0) copy_done<0>();
        publish(tell);
    }

    template <class Tell>
    __device__ void publish(const Tell& tell) {
        __syncwarp();
        tell(flag, source);
        flag = NONE;
    }
};

// A run of list entries, one per lane.
struct Batch {
    uint2 entry{0, 0};
    u32 first = 0;  // index of its first entry in the list
    u32 count = 0;
    u32 item = NONE;
    u32 piece = 0;
    bool last = false;

    __device__ bool valid() const { return item != NONE; }
    __device__ uint2 at(u32 index) const {
        return make_uint2(__shfl_sync(0xFFFFFFFFu, entry.x, index), __shfl_sync(0xFFFFFFFFu, entry.y, index));
    }
};

// Where the entries of an item lie in their list.
struct Range {
    u32 begin = 0;
    u32 end = 0;
};

// A worker's items as a stream of batches. What comes next is read ahead, since lists may lie on a peer.
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

    __device__ Batch fetch() {
        Batch batch;
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
