// Runs one of the kernels of codecs on the CPU. The lanes of a block have stacks of their own in one thread: a lane runs until
// it meets others, and then the next one does.
#include <ucontext.h>

#include <bit>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <memory>
#include <vector>

#define __device__
#define __global__
#define __grid_constant__
#define __launch_bounds__(...)
#define __shared__ static

namespace {

struct Index {
    unsigned x;
};

struct Lane {
    ucontext_t start;
    void* resume_at[5];
    std::unique_ptr<char[]> stack;
    bool begun, ended;
};

constexpr unsigned STACK_BYTES = 64 << 10, LANES = 32;
std::vector<Lane> lanes;
void* scheduler[5];
Index threadIdx, blockIdx, blockDim, gridDim;
// What the lanes of each warp bring to a meeting. Two meetings can be under way: some lanes may still read the first one.
std::vector<unsigned> brought[2];
std::vector<unsigned> meetings;
// The lanes that wait at the barrier of the block, and how often all have been there.
unsigned arrived, phase;
void (*entry)(const void*);
const void* arguments;

[[noreturn, gnu::noinline]] void jump(void** to) { __builtin_longjmp(to, 1); }

// Continues a lane, or begins it. Does not use swapcontext, which makes a system call for the signal mask every time.
[[noreturn, gnu::noinline]] void jump_to(Lane& lane) {
    if (lane.begun) jump(lane.resume_at);
    lane.begun = true;
    setcontext(&lane.start);
    std::abort();
}

// Runs a lane until it meets others, or ends.
[[gnu::noinline]] void run(Lane& lane) {
    if (__builtin_setjmp(scheduler) == 0) jump_to(lane);
}

// Lets the other lanes run until they are as far as this one.
[[gnu::noinline]] void meet() {
    Lane& own = lanes[threadIdx.x];
    if (__builtin_setjmp(own.resume_at) == 0) jump(scheduler);
}

// Returns what the lanes of this warp have brought.
const unsigned* meet_warp(unsigned value) {
    const unsigned turn = meetings[threadIdx.x]++ % 2;
    brought[turn][threadIdx.x] = value;
    meet();
    return &brought[turn][threadIdx.x / LANES * LANES];
}

void run_lane() {
    entry(arguments);
    lanes[threadIdx.x].ended = true;
    jump(scheduler);
}

unsigned __float_as_uint(float value) { return std::bit_cast<unsigned>(value); }
float __uint_as_float(unsigned bits) { return std::bit_cast<float>(bits); }
unsigned __umulhi(unsigned a, unsigned b) { return static_cast<unsigned long long>(a) * b >> 32; }
int __popc(unsigned bits) { return std::popcount(bits); }
void __syncthreads() {
    const unsigned own_phase = phase;
    if (++arrived == blockDim.x) {
        arrived = 0;
        phase++;
    }
    while (phase == own_phase) meet();
}
template <class T>
T __shfl_sync(unsigned, T value, unsigned lane) {
    return std::bit_cast<T>(meet_warp(std::bit_cast<unsigned>(value))[lane % LANES]);
}
template <class T>
T __shfl_xor_sync(unsigned, T value, unsigned bits) {
    return std::bit_cast<T>(meet_warp(std::bit_cast<unsigned>(value))[threadIdx.x % LANES ^ bits]);
}
unsigned __ballot_sync(unsigned, bool vote) {
    const unsigned* votes = meet_warp(vote);
    unsigned bits = 0;
    for (unsigned lane = 0; lane < LANES; lane++) bits |= votes[lane] << lane;
    return bits;
}
unsigned atomicAdd(unsigned* word, unsigned value) {
    const unsigned old = *word;
    *word += value;
    return old;
}
unsigned atomicMin(unsigned* word, unsigned value) {
    const unsigned old = *word;
    if (value < old) *word = value;
    return old;
}

}  // namespace

// Each kernel in a namespace of its own, because their helpers have the same names.
#include "int8.cuh"
namespace int8_encode_ {
#include "int8_encode.cu"
}
namespace int8_decode_ {
#include "int8_decode.cu"
}
namespace residuals_ {
#include "residuals.cu"
}
namespace entries_ {
#include "entries.cu"
}
namespace sums_ {
#include "sums.cu"
}

namespace {

template <class Params, void (*kernel)(Params)>
void call(const void* params) {
    kernel(*static_cast<const Params*>(params));
}

}  // namespace

// Returns 0, or 1 if there is no such kernel.
extern "C" int launch(const char* name, unsigned blocks, unsigned threads, const void* params) {
    if (std::strcmp(name, "int8_encode") == 0) entry = call<Int8EncodeParams, int8_encode_::int8_encode>;
    else if (std::strcmp(name, "int8_decode") == 0) entry = call<Int8DecodeParams, int8_decode_::int8_decode>;
    else if (std::strcmp(name, "residuals") == 0) entry = call<ResidualsParams, residuals_::residuals>;
    else if (std::strcmp(name, "entries") == 0) entry = call<EntriesParams, entries_::entries>;
    else if (std::strcmp(name, "sums") == 0) entry = call<SumsParams, sums_::sums>;
    else return 1;
    arguments = params;
    gridDim = {blocks};
    blockDim = {threads};
    for (auto& values : brought) values.assign(threads, 0);
    if (lanes.size() != threads) {
        lanes = std::vector<Lane>(threads);
        for (auto& lane : lanes) lane.stack = std::make_unique_for_overwrite<char[]>(STACK_BYTES);
    }
    for (blockIdx.x = 0; blockIdx.x < blocks; blockIdx.x++) {
        meetings.assign(threads, 0);
        for (auto& lane : lanes) {
            lane.begun = lane.ended = false;
            getcontext(&lane.start);
            lane.start.uc_stack.ss_sp = lane.stack.get();
            lane.start.uc_stack.ss_size = STACK_BYTES;
            lane.start.uc_link = nullptr;
            makecontext(&lane.start, run_lane, 0);
        }
        for (bool living = true; living;) {
            living = false;
            for (unsigned lane = 0; lane < threads; lane++) {
                if (lanes[lane].ended) continue;
                living = true;
                threadIdx.x = lane;
                run(lanes[lane]);
            }
        }
    }
    return 0;
}
