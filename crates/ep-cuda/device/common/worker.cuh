// A worker: a few warps that take work items on their own, with a ring of shared-memory stages of their own. Workers
// of a block never wait for each other.
#pragma once
#include COPY_VARIANT
#include "handle.cuh"
#include "sync.cuh"

template <u32 warps>
struct Worker {
    static constexpr u32 THREADS = warps * WARP;
    u32 thread;   // in the worker
    u32 barrier;  // the named barrier that is this worker's
    u32 index;    // among all workers of its role, in all blocks
    u32 workers;

    __device__ bool first() const { return thread == 0; }

    __device__ void sync() const {
        if constexpr (warps == 1) {
            __syncwarp();
        } else {
            asm volatile("bar.sync %0, %1;" ::"r"(barrier), "n"(THREADS) : "memory");
        }
    }

    // Whether all threads say so; a barrier too.
    __device__ bool all(bool value) const {
        if constexpr (warps == 1) {
            return __all_sync(0xFFFFFFFFu, value);
        } else {
            u32 agreed;
            asm volatile(
                "{\n"
                ".reg .pred mine, all;\n"
                "setp.ne.u32 mine, %1, 0;\n"
                "barrier.cta.red.and.pred all, %2, %3, mine;\n"
                "selp.u32 %0, 1, 0, all;\n"
                "}"
                : "=r"(agreed)
                : "r"(static_cast<u32>(value)), "r"(barrier), "n"(THREADS)
                : "memory");
            return agreed != 0;
        }
    }
};

// A ring of stages. Loads are numbered; load n lies in stage n % stages, and may be issued when load n - stages is
// free. All threads of the worker call everything, with the same arguments.
template <class W>
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

    __device__ Ring(u8* stage0, u64* barriers, u32 stages, u32 stage_bytes)
        : stage0(stage0), barriers(barriers), stages(stages), stage_bytes(stage_bytes) {}

    // Before the block's first barrier.
    __device__ void init(const W& worker) const {
        if (worker.first()) {
            for (u32 stage = 0; stage < stages; stage++) copy_init(&barriers[stage]);
            copy_init_done();
        }
    }

    __device__ bool room() const { return issued - freed < stages; }

    __device__ void load(const W& worker, const void* global, u32 bytes) {
        u8* stage = stage0 + issue_at * stage_bytes;
        if (!BULK_COPIES || worker.first())
            copy_load(stage, global, bytes, &barriers[issue_at], worker.thread, W::THREADS);
        issued++;
        issue_at = issue_at + 1 == stages ? 0 : issue_at + 1;
    }

    // The next load's stage, once it is there.
    __device__ u8* take(const W& worker) {
        u8* stage = stage0 + take_at * stage_bytes;
        copy_arrived(&barriers[take_at], parity);
        if (!BULK_COPIES) worker.sync();
        taken++;
        if (++take_at == stages) {
            take_at = 0;
            parity ^= 1;
        }
        return stage;
    }

    // Copies from shared memory that all threads have written, or that came by `load`.
    __device__ void store(const W& worker, void* global, const void* stage, u32 bytes) const {
        if (!BULK_COPIES || worker.first()) copy_store(global, stage, bytes, worker.thread, W::THREADS);
    }

    __device__ void commit(const W& worker) const {
        if (worker.first()) copy_commit();
    }

    // A block must not end before what it has asked for is there.
    __device__ void drain(const W& worker) {
        while (taken != issued) take(worker);
    }

    // All loads before `load` may be overwritten, once the stores of all groups but the youngest `pending` have read
    // their stage.
    template <u32 pending>
    __device__ void free(const W& worker, u32 load) {
        if (worker.first()) copy_read<pending>();
        if (!BULK_COPIES) worker.sync();
        freed = load;
    }
};

// Tells peers that an item is complete, a few stores later, when it is: so the worker does not stop for it.
template <class W>
struct Completion {
    static constexpr u32 LAG = 4;
    u32 flag = NONE;
    u32 source = 0;
    u32 groups_since = 0;

    // After each commit.
    template <class Tell>
    __device__ void committed(const W& worker, const Tell& tell) {
        if (flag != NONE && ++groups_since == LAG) {
            if (worker.first()) copy_done<LAG>();
            publish(worker, tell);
        }
    }

    // The item whose last store was just committed; `flag` is what `tell` is called with.
    template <class Tell>
    __device__ void finish(const W& worker, u32 item_flag, u32 item_source, const Tell& tell) {
        flush(worker, tell);
        flag = item_flag;
        source = item_source;
        groups_since = 0;
    }

    template <class Tell>
    __device__ void flush(const W& worker, const Tell& tell) {
        if (flag == NONE) return;
        if (worker.first()) copy_done<0>();
        publish(worker, tell);
    }

    template <class Tell>
    __device__ void publish(const W& worker, const Tell& tell) {
        worker.sync();
        tell(flag, source);
        flag = NONE;
    }
};

// A run of list entries, one per lane, each warp having all.
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

// Where the entries of an item lie.
struct Range {
    const uint2* list = nullptr;
    u32 begin = 0;
    u32 end = 0;
};

// A worker's items as a stream of batches. What comes next is read ahead, since lists may lie on a peer.
// `Items::range(item)` says where an item's entries are, `Items::skip(item)` whether it does not exist.
template <class Items>
struct Feed {
    const Items& items;
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
        if (lane_id() < batch.count) batch.entry = ld_relaxed_sys_v2(range.list + position + lane_id());
        position += batch.count;
        if (position == range.end) {
            piece += items.groups;
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
