// Simulates GPUs by threads, for kernels that a C++ compiler has compiled.
//
// Each rank is a GPU. A block is a thread, and its lanes are fibers of that thread, so `__shared__` is `thread_local`.
// For ThreadSanitizer, every lane and every copy in flight is a thread of its own, so it knows only the order that the
// kernels request. One lane runs at a time, and a random generator chooses the next lane wherever the order can be
// observed: a seed repeats a run, and a race is found although the accesses do not collide.
#pragma once
#include <cstdint>
#include <functional>
#include <source_location>
#include <vector>

namespace machine {

using u8 = unsigned char;
using u32 = unsigned int;
using u64 = unsigned long long;
using Site = std::source_location;

// ---- running

// A kernel in a rank's stream, or what the host does between two of them.
struct Launch {
    const char* name;
    void (*body)(const void* params);
    const void* params;
    u32 blocks;
    u32 threads;
    u32 shared_bytes;
    u8* (*shared)();  // the block's dynamic shared memory, of SHARED_BYTES bytes; null where there is none
};

constexpr u32 SHARED_BYTES = 64 << 10;

// An order or a wait that is left out on purpose, everywhere or at one place, to check that a test detects it.
struct Mutant {
    const char* order = "";  // its name in `Order`
    const char* file = "";
    u32 line = 0;
};

struct Settings {
    u64 seed;
    Mutant mutant;
    bool list_sites;  // print every place that a mutant can change
    std::function<void(u32 rank)> enter;  // called when lanes of a different rank continue
    bool seldom_enter;  // ranks change seldom, whatever the seed
};

// Runs the launches of every rank, in order per rank; returns when all have finished. Ends the process when lanes do
// something undefined on a GPU, or when no lane can continue.
void run(const std::vector<std::vector<Launch>>& streams, const Settings& settings);

// Prints the message and what all lanes are doing, and ends the process.
[[noreturn]] void fail(const char* format, ...) __attribute__((format(printf, 1, 2)));

// ---- the place of the running lane

struct Dim {
    u32 x;
};

struct Place {
    Dim thread, block, block_dim, grid_dim;
    u32 rank;
};

extern constinit thread_local const Place* here;

// ---- what lanes call

// Orders and waits that a mutant can leave out, named after the instructions and functions that request them.
enum class Order : u8 {
    none,
    st_release_sys,
    ld_acquire_sys,
    st_release_gpu,
    ld_acquire_gpu,
    atom_add_acq_rel_gpu,
    syncwarp,
    syncthreads,
    mbarrier_try_wait,
    cp_async_bulk_wait_group_read,
    cp_async_bulk_wait_group,
    fence_proxy_async,
    fence_acq_rel_sys,
};

// Whether this use of the order is left out.
bool left_out(Order order, const Site& site);

// Called before an atomic access of scope `gpu`: only one rank, which is a GPU, may use the word.
void use_on_one_gpu(const void* word);
// Called before a load that is repeated until another lane has written.
void poll();
// Called before an access that other lanes can observe: another lane may run first. `changes`: it counts as progress.
void step(bool changes);
// The time in nanoseconds. It advances as blocks take turns, and fast when all lanes wait.
u64 clock();

enum class Meeting : u8 { sync, shuffle, vote };

// Waits for all lanes of the warp. Returns what each lane has brought, valid until the next meeting. `orders`: whether
// the meeting orders the lanes' memory accesses.
const u64* meet_warp(Meeting meeting, u64 brought, bool orders);

struct Verdict {
    bool any;
    bool all;
};

// Waits for all lanes of the block.
Verdict meet_block(bool brought, bool orders);

// ---- asynchronous copies, done late, in any order that is allowed

void mbarrier_init(u64* barrier, u32 count);
void mbarrier_arrive_expect_tx(u64* barrier, u32 bytes);
bool mbarrier_try_wait_parity(u64* barrier, u32 parity);

void bulk_load(void* shared, const void* global, u32 bytes, u64* barrier);
void bulk_store(void* global, const void* shared, u32 bytes);
void bulk_commit();
// Waits until all of this lane's groups but the `pending` youngest have read their source, or have arrived.
void bulk_wait_read(u32 pending);
void bulk_wait(u32 pending);
// Orders this lane's accesses so far before the bulk copies that follow.
void fence_proxy_async();
// Notes whether this lane's accesses so far come before its stores until its next barrier or `__syncwarp`.
void fence_sys(bool orders);
bool has_fenced_sys();

void lane_copy_16(void* shared, const void* global);
// Arrives at the mbarrier when this lane's copies so far are made.
void lane_copies_arrive(u64* barrier);

}  // namespace machine
