// Where rows pass through shared memory.
#pragma once
#include "worker.cuh"

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
