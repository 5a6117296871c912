// lane_copy: copies the puts of an emulated link from lane to lane, on one SM, in the order in which the host asks.
//
// The host writes commands to a ring in host memory. A command is five words of 64 bits: 32 bits of data, and above them
// the command's number. So each word says by itself whether it has been written, and one warp loads a command at once.
// One warp takes commands, one tells the host which copies have ended, and the others copy. The first warp is one command
// ahead of the others. After a while without a command it ends the kernel, because whoever waits for all work of the GPU
// waits for this kernel, too. The host then launches it again.
#include "params.cuh"
#include "ptx.cuh"

// Commands in shared memory.
constexpr u32 DEPTH = 2;
// Words of a command that have data.
constexpr u32 COMMAND_WORDS = 5;
// Vectors that a thread loads before it stores them.
constexpr u32 BATCH = 8;

struct LanePart {
    const u8* from;
    u8* to;
    // 0: the kernel ends.
    u32 bytes;
};

// Where the warps of the block pass on commands. Command n has slot n % DEPTH.
struct Slots {
    LanePart parts[DEPTH];
    // mbarriers: the command is in the slot; all warps have copied their parts of it; the slot is free.
    u64 given[DEPTH];
    u64 copied[DEPTH];
    u64 freed[DEPTH];
};

__device__ inline void await_phase(const u64* barrier, u32 turn) {
    while (!mbarrier_test_wait_parity(shared_address(barrier), turn / DEPTH & 1)) {
    }
}

// Waits for command `number`. Returns a part without bytes if none has come for `patience_ns`. Called by one warp.
__device__ inline LanePart next_command(const LaneCopyParams& p, u32 number) {
    const u64* words = p.commands + static_cast<u64>(number % p.slots) * LANE_COMMAND_WORDS;
    const u64 begin = globaltimer();
    for (;;) {
        u64 word = 0;
        if (lane_id() < COMMAND_WORDS) word = ld_acquire_sys_u64(words + lane_id());
        const bool is_late = __shfl_sync(ALL_LANES, globaltimer() - begin > p.patience_ns, 0);
        const bool is_there = lane_id() >= COMMAND_WORDS || static_cast<u32>(word >> 32) == number;
        if (__all_sync(ALL_LANES, is_there)) {
            // What other lanes have acquired is visible to lane 0, which passes the command on.
            __syncwarp();
            const u32 data = static_cast<u32>(word);
            const auto pair = [&](u32 low, u32 high) {
                return static_cast<u64>(__shfl_sync(ALL_LANES, data, high)) << 32 | __shfl_sync(ALL_LANES, data, low);
            };
            const u64 from = pair(0, 1), to = pair(2, 3);
            return {reinterpret_cast<const u8*>(from), reinterpret_cast<u8*>(to), __shfl_sync(ALL_LANES, data, 4)};
        }
        if (is_late) return {nullptr, nullptr, 0};
    }
}

__device__ inline void take_commands(const LaneCopyParams& p, Slots& slots) {
    for (u32 turn = 0;; turn++) {
        const u32 slot = turn % DEPTH;
        if (turn >= DEPTH) await_phase(&slots.freed[slot], turn - DEPTH);
        const LanePart part = next_command(p, p.first + turn);
        if (lane_id() == 0) {
            slots.parts[slot] = part;
            mbarrier_arrive(shared_address(&slots.given[slot]));
        }
        if (part.bytes == 0) return;
    }
}

// Called by one thread.
__device__ inline void tell_host(const LaneCopyParams& p, Slots& slots) {
    for (u32 turn = 0;; turn++) {
        const u32 slot = turn % DEPTH;
        await_phase(&slots.given[slot], turn);
        if (slots.parts[slot].bytes == 0) break;
        await_phase(&slots.copied[slot], turn);
        mbarrier_arrive(shared_address(&slots.freed[slot]));
        st_release_sys(p.ended, p.first + turn);
    }
    st_release_sys(p.left, p.launch);
}

// Copies the part's vectors `first`, `first + step`, ...
template <class Vector>
__device__ inline void copy_vectors(const LanePart& part, u32 first, u32 step) {
    const auto* from = reinterpret_cast<const Vector*>(part.from);
    auto* to = reinterpret_cast<Vector*>(part.to);
    const u32 count = part.bytes / sizeof(Vector);
    for (; first < count; first += BATCH * step) {
        Vector values[BATCH];
#pragma unroll
        for (u32 at = 0; at < BATCH; at++)
            if (first + at * step < count) values[at] = from[first + at * step];
#pragma unroll
        for (u32 at = 0; at < BATCH; at++)
            if (first + at * step < count) to[first + at * step] = values[at];
    }
}

// `copier`: the number of this thread among those that copy.
__device__ inline void copy_parts(Slots& slots, u32 copier, u32 copiers) {
    for (u32 turn = 0;; turn++) {
        const u32 slot = turn % DEPTH;
        await_phase(&slots.given[slot], turn);
        const LanePart part = slots.parts[slot];
        if (part.bytes == 0) return;
        const u64 ends = reinterpret_cast<u64>(part.from) | reinterpret_cast<u64>(part.to) | part.bytes;
        if (ends % sizeof(uint4) == 0) copy_vectors<uint4>(part, copier, copiers);
        else if (ends % sizeof(u32) == 0) copy_vectors<u32>(part, copier, copiers);
        else copy_vectors<u8>(part, copier, copiers);
        __syncwarp();
        if (lane_id() == 0) mbarrier_arrive(shared_address(&slots.copied[slot]));
    }
}

extern "C" __global__ void __launch_bounds__(LANE_COPY_THREADS) lane_copy(const __grid_constant__ LaneCopyParams p) {
    __shared__ Slots slots;
    const u32 copiers = blockDim.x - 2 * WARP;
    if (threadIdx.x == 0) {
        for (u32 slot = 0; slot < DEPTH; slot++) {
            mbarrier_init(shared_address(&slots.given[slot]), 1);
            mbarrier_init(shared_address(&slots.copied[slot]), copiers / WARP);
            mbarrier_init(shared_address(&slots.freed[slot]), 1);
        }
    }
    __syncthreads();
    if (warp_id() == 0) {
        take_commands(p, slots);
    } else if (warp_id() == 1) {
        if (lane_id() == 0) tell_host(p, slots);
    } else {
        copy_parts(slots, threadIdx.x - 2 * WARP, copiers);
    }
}
