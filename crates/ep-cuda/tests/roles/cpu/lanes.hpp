// The machine's state of ranks, blocks, warps and lanes.
//
// Nothing here may be touched by code that ThreadSanitizer has instrumented or intercepts: no memcpy, and no allocation
// once lanes run.
#pragma once
#include <ucontext.h>

#include <atomic>
#include <memory>
#include <vector>

#include "machine.hpp"
#include "tsan.hpp"

namespace machine {

constexpr u32 LANES = 32;
constexpr u32 MOST_LANES = 256;
constexpr u32 STACK_BYTES = 256 << 10;

struct Block;
struct Rank;
struct Warp;

// splitmix64.
struct Random {
    u64 state;

    u64 next() {
        u64 z = state += 0x9E3779B97F4A7C15;
        z = (z ^ z >> 30) * 0xBF58476D1CE4E5B9;
        z = (z ^ z >> 27) * 0x94D049BB133111EB;
        return z ^ z >> 31;
    }
    u32 below(u32 bound) { return static_cast<u32>(next() % bound); }
    // Never true for 0.
    bool one_in(u32 times) { return times != 0 && below(times) == 0; }
};

// An address that stands for an order in ThreadSanitizer.
using Sync = u64;

// The groups of asynchronous copies of a lane. They are numbered as they are committed.
struct Groups {
    static constexpr u32 KEPT = 16;
    u32 open = 0;
    Sync read[KEPT];
    Sync done[KEPT];
};

// An asynchronous copy of 16 bytes by a lane.
struct LaneCopy {
    u8* to;
    const u8* from;
    const void* caller;
    Sync issued;
};

// An arrival at an mbarrier that follows copies of a lane.
struct Arrival {
    u64* barrier = nullptr;
    u64 copies = 0;  // one bit per copy that is not made yet
    Sync issued = 0;
};

struct Lane {
    Place place{};
    ucontext_t start;
    void* resume_at[5];
    bool begun = false;
    void* fiber = nullptr;
    std::unique_ptr<u8[]> stack;
    Block* block = nullptr;
    Warp* warp = nullptr;
    u32 index = 0;  // in the warp
    const char* doing = "";
    bool ended = false;
    const u64* awaits = nullptr;  // an mbarrier
    Sync fenced = 0;
    bool fenced_sys = false;
    Groups bulk;
    LaneCopy copies[64];
    u64 copies_pending = 0;  // one bit per copy
    Arrival arrivals[16];
    void* engine = nullptr;
};

// A part of the bulk copy engine that makes one copy at a time.
struct Unit {
    enum class Phase : u8 { idle, issued, read };
    Phase phase = Phase::idle;
    bool load = false;
    u8* to = nullptr;
    const u8* from = nullptr;
    u32 bytes = 0;
    u64* barrier = nullptr;
    Lane* lane = nullptr;
    u32 group = 0;
    const void* caller = nullptr;
    Sync issued = 0;
    Sync moved = 0;
    void* reader = nullptr;
    void* writer = nullptr;
    std::unique_ptr<u64[]> buffer;
};

constexpr u32 UNITS = 8;
constexpr u32 UNIT_BYTES = 16 << 10;

struct Warp {
    Lane* lanes[LANES];
    u32 count = 0;
    // The meeting under way.
    u32 arrived = 0;
    Meeting meeting{};
    u32 turn = 0;
    u64 brought[2][LANES];
    Sync order[2];
    // A fiber for the accesses after which later bulk copies come.
    void* async = nullptr;
    Unit units[UNITS];
};

// Lanes in no particular order.
struct Lanes {
    Lane* all[MOST_LANES];
    u32 count = 0;

    void put(Lane* lane) { all[count++] = lane; }
    Lane* take(u32 at) {
        Lane* lane = all[at];
        all[at] = all[--count];
        return lane;
    }
};

struct Block {
    Rank* rank = nullptr;
    u32 index = 0;
    // The launch that the block runs or waits for.
    u32 launch = 0;
    bool finished = false;
    std::atomic<u32> my_turn{0};

    void* resume_at[5];
    void* fiber = nullptr;
    std::unique_ptr<Lane[]> lanes;
    std::unique_ptr<Warp[]> warps;
    u32 made = 0;
    u32 count = 0;
    u32 live = 0;
    Lanes ready;
    Lanes polling;
    Lanes parked;  // until a phase of the mbarrier that they await ends
    // The meeting under way.
    u32 arrived = 0;
    u32 turn = 0;
    Verdict verdict[2];
    Sync order[2];

    u32 warp_count() const { return (count + LANES - 1) / LANES; }
};

// A rank's stream.
struct Rank {
    u32 index = 0;
    const std::vector<Launch>* launches = nullptr;
    u32 completed = 0;
    u32 blocks_done = 0;
    // The ends of even launches, and of odd ones.
    Sync ended[2];
    std::unique_ptr<Block[]> blocks;
    u32 block_count = 0;
};

// The state that all threads share. Only the thread that has the turn accesses it.
struct World {
    Settings settings{};
    Random random{};
    std::unique_ptr<Rank[]> ranks;
    u32 rank_count = 0;
    u32 entered = ~0u;
    u64 now = 0;
    u64 steps = 0;
    u64 steps_seen = 0;
    u32 idle_turns = 0;
    u32 threads = 0;
    // Once in this number of times, a lane is interrupted, a thread loses its turn, a copy is made before a lane waits
    // for it. 0: never.
    u32 interrupts = 0;
    u32 turns = 0;
    u32 copies = 0;
};

extern World world;
extern constinit thread_local Lane* running;

// ---- machine.cpp

// Waits until a phase of the mbarrier ends.
void park(const u64* barrier);

// ---- engine.cpp

// Makes one copy, or a part of it, that a lane of the block has asked for; returns false if there is none.
bool copy_something(Block& block);
// Bulk copies that `issuer` issues from now on come after what the lanes of warp `of` have fenced.
void see_fences(Warp& issuer, const Warp& of);
// Whether a lane of the block has asked for copies and did not wait for them.
bool copies_under_way(const Block& block);

}  // namespace machine
