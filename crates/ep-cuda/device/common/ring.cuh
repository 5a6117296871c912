// The ring of stages of a worker of dispatch, in shared memory.
#pragma once
#include "worker.cuh"

// Loads are numbered: load n fills stage n % stages, and may be issued when load n - stages is free. All lanes call all
// functions, with the same arguments.
//
// A ring has at least 3 stages (`FEWEST_STAGES` in src/tuning.rs): the stores of two tokens may still be reading two stages when
// the next token is taken. With fewer stages, this `take` would wait for ever. A ring has at most 32 stages: one lane initialises
// the barrier of one stage.
struct Ring {
    u8* stage0;
    SharedAddress first_stage;
    SharedAddress barriers;
    u32 stages;
    u32 stage_bytes;
    u32 issued = 0;    // loads issued
    u32 taken = 0;     // loads taken
    u32 freed = 0;     // loads whose stage may be overwritten
    u32 issue_at = 0;  // stage of the next load to issue
    u32 take_at = 0;   // stage of the next load to take
    u32 parity = 0;

    // `init` must be called before the ring is used.
    __device__ Ring(u8* stage0, u64* barriers, u32 stages, u32 stage_bytes)
        : stage0(stage0),
          first_stage(shared_address(stage0)),
          barriers(shared_address(barriers)),
          stages(stages),
          stage_bytes(stage_bytes) {}

    __device__ void init() const {
        if (lane_id() < stages) copy_init(barrier(lane_id()));
        copy_init_done();
        __syncwarp();
    }

    __device__ SharedAddress barrier(u32 at) const { return barriers + sizeof(u64) * at; }

    __device__ bool room() const { return issued - freed < stages; }

    __device__ void load(const void* global, u32 bytes) {
        copy_load(first_stage + issue_at * stage_bytes, global, bytes, barrier(issue_at));
        issued++;
        issue_at = issue_at + 1 == stages ? 0 : issue_at + 1;
    }

    // Waits for the next load and returns its stage.
    __device__ u8* take() {
        u8* stage = stage0 + take_at * stage_bytes;
        await_barrier(barrier(take_at), parity);
        taken++;
        if (++take_at == stages) {
            take_at = 0;
            parity ^= 1;
        }
        return stage;
    }

    // Frees the stages of all loads before load number `load`: later loads may overwrite them. Lane 0 waits until the stores of all
    // groups but the `pending` most recent ones have read their stages. `__syncwarp` waits until all lanes have returned from `take`
    // and have read earlier stages. Without it, lane 0 could overwrite such a stage, or start the next phase of a barrier while a slow
    // lane still waits for this one.
    template <u32 pending>
    __device__ void free(u32 load) {
        await_stores_read<pending>();
        __syncwarp();
        freed = load;
    }

    // Waits for all issued loads: a block must not end while loads into its shared memory are in flight.
    __device__ void drain() {
        while (taken != issued) take();
    }
};
