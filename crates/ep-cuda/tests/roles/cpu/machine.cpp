// Decides what runs when: lanes, meetings, blocks and their turns.
#include "machine.hpp"

#include <cstdarg>
#include <cstdio>
#include <cstring>
#include <thread>

#include <linux/futex.h>
#include <sys/syscall.h>
#include <unistd.h>

#include "lanes.hpp"

namespace machine {

constinit thread_local const Place* here = nullptr;
constinit thread_local Lane* running = nullptr;
World world;

namespace {

// Number of turns without progress after which time runs fast, and after which the run counts as deadlocked.
constexpr u32 IDLE_TURNS = 16;
constexpr u32 HOPELESS_TURNS = 400'000;
constexpr u64 TURN_NS = 100;
constexpr u64 IDLE_NS = 1'000'000;
constexpr u64 GARBAGE = 0xA5A5A5A5A5A5A5A5;

const Launch& launch_of(const Block& block) { return (*block.rank->launches)[block.launch]; }

bool may_run(const Block& block) { return !block.finished && block.launch <= block.rank->completed; }

void print_lanes() {
    for (u32 rank = 0; rank < world.rank_count; rank++) {
        const Rank& r = world.ranks[rank];
        for (u32 index = 0; index < r.block_count; index++) {
            const Block& block = r.blocks[index];
            if (block.finished) continue;
            const char* state = may_run(block) ? "" : ": waits for its turn in the stream";
            std::fprintf(stderr, "  rank %u, block %u, %s%s\n", rank, index, launch_of(block).name, state);
            if (!may_run(block)) continue;
            const char* before = nullptr;
            for (u32 lane = 0; lane < block.count; lane++) {
                const Lane& l = block.lanes[lane];
                const char* doing = l.ended ? "has ended" : l.doing;
                if (doing != before) std::fprintf(stderr, "    from thread %u: %s\n", lane, doing);
                before = doing;
            }
        }
    }
}

// ---- turns of the threads

Block* any_runnable_block() {
    Block* found = nullptr;
    u32 seen = 0;
    for (u32 rank = 0; rank < world.rank_count; rank++)
        for (u32 index = 0; index < world.ranks[rank].block_count; index++) {
            Block& block = world.ranks[rank].blocks[index];
            if (may_run(block) && world.random.below(++seen) == 0) found = &block;
        }
    return found;
}

// The system call itself, because `std::atomic::wait` first yields several times, which takes most of the time of a
// turn, and ThreadSanitizer would take a semaphore for an order between the blocks.
void futex(std::atomic<u32>& word, int operation, u32 value) { syscall(SYS_futex, &word, operation, value, nullptr); }

void give_turn(Block& block) {
    block.my_turn.store(1, std::memory_order_release);
    futex(block.my_turn, FUTEX_WAKE_PRIVATE, 1);
}

void await_turn(Block& block) {
    while (block.my_turn.load(std::memory_order_acquire) == 0) futex(block.my_turn, FUTEX_WAIT_PRIVATE, 0);
    block.my_turn.store(0, std::memory_order_relaxed);
    if (world.entered == block.rank->index) return;
    world.entered = block.rank->index;
    world.settings.enter(world.entered);
}

void pass_turn(Block& block) {
    const bool idle = world.steps == world.steps_seen;
    world.steps_seen = world.steps;
    world.idle_turns = idle ? world.idle_turns + 1 : 0;
    world.now += world.idle_turns > IDLE_TURNS * world.threads ? IDLE_NS : TURN_NS;
    if (world.idle_turns > HOPELESS_TURNS) fail("no block can continue");
    Block* next = any_runnable_block();
    if (next == nullptr) fail("no block may run");
    if (next == &block) return;
    give_turn(*next);
    await_turn(block);
}

// ---- lanes of a thread

void become(Lane& lane) {
    running = &lane;
    here = &lane.place;
    tsan::become(lane.fiber);
}

void wake(Block& block, u32 at) { block.ready.put(block.polling.take(at)); }

// Chooses the lane that runs next. The calling lane has put itself into the list to which it belongs, if there is one.
Lane& next_of(Block& block) {
    for (;;) {
        Random& random = world.random;
        if (random.one_in(world.copies)) copy_something(block);
        if (block.polling.count != 0 && random.one_in(16)) wake(block, random.below(block.polling.count));
        if (block.ready.count != 0) {
            if (random.one_in(world.turns)) pass_turn(block);
            return *block.ready.take(random.below(block.ready.count));
        }
        const bool copied = copy_something(block);
        if (block.polling.count == 0) {
            if (!copied) fail("lanes wait for each other at different places");
            continue;
        }
        pass_turn(block);
        while (block.polling.count != 0) wake(block, 0);
    }
}

// Continues a lane where it stopped, or begins it. Does not use swapcontext, which makes a system call for the signal
// mask every time.
[[noreturn, gnu::noinline]] void jump_to(Lane& lane) {
    become(lane);
    if (lane.begun) __builtin_longjmp(lane.resume_at, 1);
    lane.begun = true;
    setcontext(&lane.start);
    fail("a lane cannot begin");
}

[[gnu::noinline]] void go_on(Lane& self) {
    Lane& next = next_of(*self.block);
    if (&next != &self && __builtin_setjmp(self.resume_at) == 0) jump_to(next);
}

void lane_main() {
    Lane& self = *running;
    Block& block = *self.block;
    const Launch& launch = launch_of(block);
    tsan::acquire(&block.rank->ended[(block.launch + 1) & 1]);
    tsan::acquire(&block);
    launch.body(launch.params);
    self.ended = true;
    if (self.warp->arrived != 0) fail("a lane ends while others of its warp wait for it");
    if (block.arrived != 0) fail("a lane ends while others of its block wait for it");
    tsan::release(&block.rank->ended[block.launch & 1]);
    world.steps++;
    if (--block.live != 0) jump_to(next_of(block));
    running = nullptr;
    tsan::become(block.fiber);
    __builtin_longjmp(block.resume_at, 1);
}

// ---- a block's way through the stream

// Volatile, because the compiler may turn a plain loop into memset, which ThreadSanitizer sees.
void fill(volatile u64* words, u32 count) {
    for (u32 at = 0; at < count; at++) words[at] = GARBAGE;
}

void make_lanes(Block& block, u32 threads) {
    if (threads > MOST_LANES) fail("%u threads a block: at most %u", threads, MOST_LANES);
    for (; block.made < threads; block.made++) {
        Lane& lane = block.lanes[block.made];
        lane.stack = std::make_unique_for_overwrite<u8[]>(STACK_BYTES);
        lane.block = &block;
        lane.index = block.made % LANES;
        lane.warp = &block.warps[block.made / LANES];
        lane.warp->lanes[lane.index] = &lane;
        lane.fiber = tsan::create("lane");
        if (lane.warp->async == nullptr) lane.warp->async = tsan::create("order of bulk copies");
    }
}

void start_lanes(Block& block, const Launch& launch) {
    make_lanes(block, launch.threads);
    block.count = block.live = launch.threads;
    for (u32 at = 0; at < launch.threads; at++) {
        Lane& lane = block.lanes[at];
        lane.place = {{at}, {block.index}, {launch.threads}, {launch.blocks}, block.rank->index};
        lane.ended = false;
        lane.doing = "runs";
        lane.warp->count = std::min(LANES, launch.threads - at / LANES * LANES);
        lane.begun = false;
        getcontext(&lane.start);
        lane.start.uc_stack.ss_sp = lane.stack.get();
        lane.start.uc_stack.ss_size = STACK_BYTES;
        lane.start.uc_link = nullptr;
        makecontext(&lane.start, lane_main, 0);
        block.ready.put(&lane);
    }
    for (u32 warp = 0; warp < block.warp_count(); warp++) {
        const tsan::As async(block.warps[warp].async);
        tsan::acquire(&block.rank->ended[(block.launch + 1) & 1]);
        tsan::acquire(&block);
    }
}

[[gnu::noinline]] void run_launch(Block& block, const Launch& launch) {
    auto* shared = launch.shared == nullptr ? nullptr : reinterpret_cast<volatile u64*>(launch.shared());
    const u32 used = (launch.shared_bytes + 7) / 8;
    if (shared != nullptr) fill(shared, SHARED_BYTES / 8);
    tsan::release(&block);
    start_lanes(block, launch);
    Lane& first = *block.ready.take(world.random.below(block.ready.count));
    if (__builtin_setjmp(block.resume_at) == 0) jump_to(first);
    if (copies_under_way(block)) fail("the block has ended before copies that it asked for");
    for (u32 at = used; shared != nullptr && at < SHARED_BYTES / 8; at++)
        if (shared[at] != GARBAGE) fail("shared memory is written past the launch's %u bytes", launch.shared_bytes);
}

void run_block(Block& block) {
    block.fiber = tsan::current();
    await_turn(block);
    Rank& rank = *block.rank;
    for (block.launch = 0; block.launch < rank.launches->size(); block.launch++) {
        const Launch& launch = launch_of(block);
        if (block.index >= launch.blocks) continue;
        while (rank.completed < block.launch) pass_turn(block);
        run_launch(block, launch);
        world.steps++;
        if (++rank.blocks_done == launch.blocks) {
            rank.blocks_done = 0;
            rank.completed++;
        }
    }
    block.finished = true;
    // A thread that joins this one observes everything that this one did.
    tsan::acquire(&rank.ended[0]);
    tsan::acquire(&rank.ended[1]);
    if (Block* next = any_runnable_block()) give_turn(*next);
}

void prepare(const std::vector<std::vector<Launch>>& streams) {
    world.rank_count = static_cast<u32>(streams.size());
    world.ranks = std::make_unique<Rank[]>(streams.size());
    for (u32 index = 0; index < streams.size(); index++) {
        Rank& rank = world.ranks[index];
        rank.index = index;
        rank.launches = &streams[index];
        for (const Launch& launch : streams[index]) rank.block_count = std::max(rank.block_count, launch.blocks);
        rank.blocks = std::make_unique<Block[]>(rank.block_count);
        world.threads += rank.block_count;
        for (u32 at = 0; at < rank.block_count; at++) {
            Block& block = rank.blocks[at];
            block.rank = &rank;
            block.index = at;
            block.lanes = std::make_unique<Lane[]>(MOST_LANES);
            block.warps = std::make_unique<Warp[]>(MOST_LANES / LANES);
        }
    }
}

}  // namespace

void fail(const char* format, ...) {
    std::fflush(stdout);
    va_list arguments;
    va_start(arguments, format);
    std::fputs("machine: ", stderr);
    std::vfprintf(stderr, format, arguments);
    va_end(arguments);
    if (const Lane* lane = running) {
        const Place& place = lane->place;
        std::fprintf(stderr, "\n  at rank %u, block %u, thread %u of %s", place.rank, place.block.x, place.thread.x,
                     launch_of(*lane->block).name);
    }
    std::fprintf(stderr, "\n  seed %llu; the others:\n", world.settings.seed);
    print_lanes();
    _exit(3);
}

void run(const std::vector<std::vector<Launch>>& streams, const Settings& settings) {
    world.settings = settings;
    world.random.state = settings.seed;
    // Each seed chooses these frequencies.
    const u32 seldom[] = {4, 32, 256};
    const u32 before_waited_for[] = {0, 0, 64, 8, 1};
    world.interrupts = seldom[world.random.below(3)];
    world.turns = seldom[world.random.below(3)];
    if (settings.seldom_enter) world.turns = seldom[2];
    world.copies = before_waited_for[world.random.below(5)];
    prepare(streams);
    std::vector<std::thread> threads;
    for (u32 rank = 0; rank < world.rank_count; rank++)
        for (u32 at = 0; at < world.ranks[rank].block_count; at++)
            threads.emplace_back(run_block, std::ref(world.ranks[rank].blocks[at]));
    if (Block* first = any_runnable_block()) give_turn(*first);
    for (std::thread& thread : threads) thread.join();
    std::printf("machine: %llu steps\n", world.steps);
}

bool left_out(Order order, const Site& site) {
    static constexpr const char* NAMES[] = {
        "none",
        "st_release_sys",
        "ld_acquire_sys",
        "st_release_gpu",
        "ld_acquire_gpu",
        "atom_add_acq_rel_gpu",
        "syncwarp",
        "syncthreads",
        "mbarrier_try_wait",
        "cp_async_bulk_wait_group_read",
        "cp_async_bulk_wait_group",
        "fence_proxy_async",
        "fence_acq_rel_sys",
    };
    const Mutant& mutant = world.settings.mutant;
    if (*mutant.order == 0 && !world.settings.list_sites) return false;
    const char* name = NAMES[static_cast<u32>(order)];
    const char* slash = std::strrchr(site.file_name(), '/');
    const char* file = slash == nullptr ? site.file_name() : slash + 1;
    if (world.settings.list_sites) std::printf("site %s@%s:%u\n", name, file, site.line());
    if (std::strcmp(mutant.order, name) != 0) return false;
    return *mutant.file == 0 || (mutant.line == site.line() && std::strcmp(mutant.file, file) == 0);
}

void use_on_one_gpu(const void* word) {
    static std::pair<const void*, u32> known[256];
    const u32 rank = here->rank;
    for (auto& [address, owner] : known) {
        if (address == nullptr) {
            address = word;
            owner = rank;
        }
        if (address != word) continue;
        if (owner != rank) fail("an order that holds on one GPU, for a word that rank %u uses too", owner);
        return;
    }
    fail("more words than the machine can watch");
}

void poll() {
    Lane& self = *running;
    self.doing = "polls";
    self.block->polling.put(&self);
    go_on(self);
    self.doing = "runs";
}

void park(const u64* barrier) {
    Lane& self = *running;
    self.doing = "waits at an mbarrier";
    self.awaits = barrier;
    self.block->parked.put(&self);
    go_on(self);
    self.doing = "runs";
}

void step(bool changes) {
    Lane& self = *running;
    if (changes) world.steps++;
    if (!world.random.one_in(world.interrupts)) return;
    self.block->ready.put(&self);
    go_on(self);
}

void fence_sys(bool orders) { running->fenced_sys = orders; }
bool has_fenced_sys() { return running->fenced_sys; }

u64 clock() { return world.now; }

const u64* meet_warp(Meeting meeting, u64 brought, bool orders) {
    static constexpr const char* DOING[] = {"waits at __syncwarp", "waits at a shuffle", "waits at a vote"};
    Lane& self = *running;
    Warp& warp = *self.warp;
    world.steps++;
    if (warp.arrived == 0) warp.meeting = meeting;
    self.doing = DOING[static_cast<u32>(meeting)];
    if (warp.meeting != meeting) fail("lanes of a warp meet for different reasons");
    for (u32 at = 0; at < warp.count; at++)
        if (warp.lanes[at]->ended) fail("lanes of a warp meet, but lane %u has ended", at);
    const u32 turn = warp.turn;
    warp.brought[turn][self.index] = brought;
    if (orders) tsan::release(&warp.order[turn]);
    if (++warp.arrived == warp.count) {
        warp.arrived = 0;
        warp.turn ^= 1;
        if (orders) see_fences(warp, warp);
        for (u32 at = 0; at < warp.count; at++)
            if (warp.lanes[at] != &self) self.block->ready.put(warp.lanes[at]);
    } else {
        go_on(self);
    }
    self.doing = "runs";
    if (orders) {
        tsan::acquire(&warp.order[turn]);
        self.fenced_sys = false;
    }
    return warp.brought[turn];
}

Verdict meet_block(bool brought, bool orders) {
    Lane& self = *running;
    Block& block = *self.block;
    world.steps++;
    if (block.live != block.count) fail("lanes of a block meet, but some have ended");
    const u32 turn = block.turn;
    Verdict& verdict = block.verdict[turn];
    if (block.arrived == 0) verdict = {false, true};
    verdict.any |= brought;
    verdict.all &= brought;
    self.doing = "waits at __syncthreads";
    if (orders) tsan::release(&block.order[turn]);
    if (++block.arrived == block.count) {
        block.arrived = 0;
        block.turn ^= 1;
        for (u32 warp = 0; orders && warp < block.warp_count(); warp++)
            for (u32 of = 0; of < block.warp_count(); of++) see_fences(block.warps[warp], block.warps[of]);
        for (u32 at = 0; at < block.count; at++)
            if (&block.lanes[at] != &self) block.ready.put(&block.lanes[at]);
    } else {
        go_on(self);
    }
    self.doing = "runs";
    if (orders) tsan::acquire(&block.order[turn]);
    self.fenced_sys = false;
    return verdict;
}

}  // namespace machine
