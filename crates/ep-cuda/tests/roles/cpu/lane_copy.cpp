// lane_copy as the CPU runs it, and a host that commands copies as src/lanes/kernel.rs does.
#include <cstdio>
#include <cstdlib>
#include <vector>

#include "cuda.hpp"

namespace {

#include "lane_copy.cu"

// Fewer threads than on a GPU: the kernel reads their number from the launch.
constexpr u32 THREADS = 4 * WARP;
constexpr u32 SLOTS = 4;
constexpr u32 COPIES = 40;
// Numbers wrap around during the test.
constexpr u32 FIRST = 0u - COPIES / 2;
// The kernel may leave after each command.
constexpr u32 MOST_LAUNCHES = COPIES + 1;
constexpr u32 LANE_BYTES = 2048;

// What the stream launches. The host fills the parameters, as it would for the driver.
struct Launched {
    LaneCopyParams params;
    // 1: launched; 2: not needed.
    u32 state;
};

alignas(16) u8 source[SLOTS][LANE_BYTES];
alignas(16) u8 destination[SLOTS][LANE_BYTES];
u64 commands[SLOTS * LANE_COMMAND_WORDS];
u32 ended = FIRST - 1, left = 0;
Launched launches[MOST_LAUNCHES];

// The orders of the host are not those of the kernel: a mutant leaves them as they are.
u32 load(const u32* word) {
    machine::poll();
    return __atomic_load_n(word, __ATOMIC_ACQUIRE);
}

template <class Word>
void store(Word* word, Word value) {
    machine::step(true);
    __atomic_store_n(word, value, __ATOMIC_RELEASE);
}

void kernel(const void* params) {
    const auto& launched = *static_cast<const Launched*>(params);
    u32 state = 0;
    while (state == 0) state = load(&launched.state);
    if (state == 1) lane_copy(launched.params);
}

class Host {
public:
    // With a short patience, the kernel often leaves.
    explicit Host(u32 patience_ns) : patience_ns(patience_ns) {}

    void run() {
        for (u32 copy = 0; copy < COPIES; copy++) {
            if (copy >= SLOTS) check(copy - SLOTS);
            command(copy);
        }
        for (u32 copy = COPIES - SLOTS; copy < COPIES; copy++) check(copy);
        for (u32 at = launched; at < MOST_LAUNCHES; at++) store(&launches[at].state, 2u);
        std::printf("launches: %u\n", launched);
    }

private:
    u32 patience_ns;
    u32 launched = 0;
    u32 commanded = FIRST - 1;

    // Vectors, words and bytes; parts that one warp copies, and parts that all do.
    static u32 bytes_of(u32 copy) {
        constexpr u32 SIZES[] = {2032, 4, 1028, 16, 544, 601, 1};
        return SIZES[copy % 7];
    }
    static u32 offset_of(u32 copy) {
        constexpr u32 OFFSETS[] = {16, 4, 3};
        return OFFSETS[copy % 3];
    }
    static u8 content(u32 copy, u32 at) { return static_cast<u8>(copy * 131 + at * 7 + at / 251); }

    void command(u32 copy) {
        const u32 slot = copy % SLOTS, number = FIRST + copy, offset = offset_of(copy), bytes = bytes_of(copy);
        for (u32 at = 0; at < LANE_BYTES; at++) destination[slot][at] = 0xEE;
        for (u32 at = 0; at < bytes; at++) source[slot][offset + at] = content(copy, at);
        const u64 from = reinterpret_cast<u64>(&source[slot][offset]);
        const u64 to = reinterpret_cast<u64>(&destination[slot][offset]);
        const u64 words[] = {from & ALL_BITS, from >> 32, to & ALL_BITS, to >> 32, bytes};
        for (u32 at = 0; at < 5; at++)
            store(&commands[number % SLOTS * LANE_COMMAND_WORDS + at], static_cast<u64>(number) << 32 | words[at]);
        commanded = number;
        go_on();
    }

    void go_on() {
        if (load(&left) != launched) return;
        const u32 last = load(&ended);
        if (last == commanded) return;
        if (launched == MOST_LAUNCHES) machine::fail("more launches than commands");
        Launched& next = launches[launched++];
        next.params = {commands, &ended, &left, last + 1, launched, SLOTS, patience_ns};
        store(&next.state, 1u);
    }

    void check(u32 copy) {
        while (load(&ended) - (FIRST + copy) >= 1u << 31) go_on();
        const u32 offset = offset_of(copy), bytes = bytes_of(copy);
        for (u32 at = 0; at < LANE_BYTES; at++) {
            const bool inside = at >= offset && at < offset + bytes;
            const u32 found = destination[copy % SLOTS][at], expected = inside ? content(copy, at - offset) : 0xEE;
            if (found == expected) continue;
            std::printf("copy %u, byte %u: expected %u, found %u\n", copy, at, expected, found);
            std::fflush(stdout);
            std::exit(1);
        }
    }
};

}  // namespace

// `lane-copy - SEED [ORDER]`: the first argument is not used. ORDER: the one to leave out.
int main(int count, char** arguments) {
    // No word of the ring may have a number that is in use.
    for (u64& word : commands) word = static_cast<u64>(FIRST - 1) << 32;
    machine::Settings settings{};
    settings.seed = std::strtoull(arguments[2], nullptr, 10);
    if (count == 4) settings.mutant.order = arguments[3];
    settings.enter = [](u32) {};
    std::vector<std::vector<machine::Launch>> streams(2);
    for (Launched& launched : launches) streams[0].push_back({"lane_copy", kernel, &launched, 1, THREADS, 0, nullptr});
    Host host(settings.seed % 2 == 0 ? 0 : 100'000);
    const auto run = [](const void* host) { static_cast<Host*>(const_cast<void*>(host))->run(); };
    streams[1].push_back({"the host", run, &host, 1, 1, 0, nullptr});
    machine::run(streams, settings);
    return 0;
}
