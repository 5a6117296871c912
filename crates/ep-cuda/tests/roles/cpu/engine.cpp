// Asynchronous copies. A copy is made when a lane waits for it or, by chance, earlier; other copies in flight may be made
// before or after it. For ThreadSanitizer, each copy is a thread. It comes after only those accesses that a GPU orders
// before the copy, and before only those lanes that have waited for it.
#include <span>

#include "lanes.hpp"
#include "machine.hpp"

namespace machine {

namespace {

// ---- mbarriers

struct Barrier {
    int bytes;
    u8 expected;
    u8 pending;
    u8 phase;
    u8 made;

    static constexpr u8 MADE = 0x5A;
};
static_assert(sizeof(Barrier) == sizeof(u64));

Barrier& barrier_at(u64* word) {
    auto& barrier = *reinterpret_cast<Barrier*>(word);
    if (barrier.made != Barrier::MADE) fail("an mbarrier is used before it is initialised");
    return barrier;
}

void end_phase_if_complete(Barrier& barrier) {
    if (barrier.pending != 0 || barrier.bytes != 0) return;
    barrier.phase ^= 1;
    barrier.pending = barrier.expected;
    Block& block = *running->block;
    for (u32 at = 0; at < block.parked.count;)
        if (block.parked.all[at]->awaits == reinterpret_cast<const u64*>(&barrier))
            block.ready.put(block.parked.take(at));
        else
            at++;
}

// ---- moving bytes

// Volatile, because the compiler may turn a plain loop into memcpy, which ThreadSanitizer sees.
void move(void* to, const void* from, u32 bytes) {
    auto* target = static_cast<volatile u64*>(to);
    auto* source = static_cast<const volatile u64*>(from);
    for (u32 at = 0; at < bytes / 8; at++) target[at] = source[at];
}

// For ThreadSanitizer's reports: the caller that has asked for the copy.
class Called {
public:
    explicit Called(const void* caller) { tsan::enter(caller); }
    ~Called() { tsan::leave(); }
};

void check_copy(const void* shared, const void* global, u32 bytes) {
    if (bytes == 0) fail("a copy of no bytes");
    if ((reinterpret_cast<u64>(shared) | reinterpret_cast<u64>(global) | bytes) % 16 != 0)
        fail("a copy of %u bytes from or to an address that is no multiple of 16", bytes);
}

Sync& of_group(Sync (&all)[Groups::KEPT], u32 group) { return all[group % Groups::KEPT]; }

// ---- bulk copies

// Advances a copy. A load is made at once. A store takes two calls: the first reads the source, the second writes the
// target.
void advance(Unit& unit) {
    if (unit.phase == Unit::Phase::read) {
        const tsan::As writer(unit.writer);
        const Called called(unit.caller);
        tsan::acquire(&unit.moved);
        tsan::writes(unit.to, unit.bytes);
        move(unit.to, unit.buffer.get(), unit.bytes);
        tsan::release(&of_group(unit.lane->bulk.done, unit.group));
        unit.phase = Unit::Phase::idle;
        return;
    }
    const tsan::As reader(unit.reader);
    const Called called(unit.caller);
    tsan::acquire(&unit.issued);
    tsan::reads(unit.from, unit.bytes);
    if (!unit.load) {
        move(unit.buffer.get(), unit.from, unit.bytes);
        tsan::release(&of_group(unit.lane->bulk.read, unit.group));
        tsan::release(&unit.moved);
        unit.phase = Unit::Phase::read;
        return;
    }
    tsan::writes(unit.to, unit.bytes);
    move(unit.to, unit.from, unit.bytes);
    tsan::reads_word(unit.barrier);
    tsan::release(unit.barrier);
    Barrier& barrier = barrier_at(unit.barrier);
    barrier.bytes -= static_cast<int>(unit.bytes);
    end_phase_if_complete(barrier);
    unit.phase = Unit::Phase::idle;
}

// A random one of the units for which `which` holds; null if there is none.
template <class Which>
Unit* any_unit(std::span<Warp> warps, const Which& which) {
    Unit* found = nullptr;
    u32 seen = 0;
    for (Warp& warp : warps)
        for (Unit& unit : warp.units)
            if (which(unit) && world.random.below(++seen) == 0) found = &unit;
    return found;
}

// The same for the units of one warp.
template <class Which>
Unit* any_unit(Warp& warp, const Which& which) {
    return any_unit(std::span(&warp, 1), which);
}

bool busy(const Unit& unit) { return unit.phase != Unit::Phase::idle; }

Unit& free_unit(Warp& warp) {
    for (;;) {
        if (Unit* unit = any_unit(warp, [](const Unit& each) { return !busy(each); })) return *unit;
        advance(*any_unit(warp, busy));
    }
}

void issue(bool load, void* to, const void* from, u32 bytes, u64* barrier, const void* caller) {
    step(true);
    Lane& self = *running;
    Unit& unit = free_unit(*self.warp);
    if (bytes > UNIT_BYTES) fail("a bulk copy of %u bytes: the machine's buffers have %u", bytes, UNIT_BYTES);
    if (unit.reader == nullptr) {
        unit.reader = tsan::create("bulk copy");
        unit.writer = tsan::create("bulk copy, its writing");
        unit.buffer = std::make_unique_for_overwrite<u64[]>(UNIT_BYTES / 8);
    }
    unit.phase = Unit::Phase::issued;
    unit.load = load;
    unit.to = static_cast<u8*>(to);
    unit.from = static_cast<const u8*>(from);
    unit.bytes = bytes;
    unit.barrier = barrier;
    unit.lane = &self;
    unit.group = self.bulk.open;
    unit.caller = caller;
    const tsan::As async(self.warp->async);
    tsan::acquire(&self.fenced);
    tsan::release(&unit.issued);
}

// ---- copies of a lane

void arrive(Lane& lane, Arrival& arrival) {
    u64* const word = arrival.barrier;
    const tsan::As engine(lane.engine);
    tsan::acquire(&arrival.issued);
    tsan::reads_word(word);
    tsan::release(word);
    Barrier& barrier = barrier_at(word);
    if (barrier.pending == 0) fail("more arrive at an mbarrier than it was initialised for");
    barrier.pending--;
    arrival.barrier = nullptr;
    end_phase_if_complete(barrier);
}

void make_lane_copy(Lane& lane, u32 at) {
    LaneCopy& copy = lane.copies[at];
    {
        const tsan::As engine(lane.engine);
        const Called called(copy.caller);
        tsan::acquire(&copy.issued);
        tsan::reads(copy.from, 16);
        tsan::writes(copy.to, 16);
        move(copy.to, copy.from, 16);
    }
    lane.copies_pending &= ~(1ull << at);
    for (Arrival& arrival : lane.arrivals) {
        arrival.copies &= ~(1ull << at);
        if (arrival.barrier != nullptr && arrival.copies == 0) arrive(lane, arrival);
    }
}

// The number of a random set bit.
u32 any_bit(u64 bits) {
    u32 skip = world.random.below(static_cast<u32>(__builtin_popcountll(bits)));
    for (; skip != 0; skip--) bits &= bits - 1;
    return static_cast<u32>(__builtin_ctzll(bits));
}

// ---- groups

// All groups but the youngest `pending` are over: what follows comes after them.
void see_groups(const Groups& groups, const Sync (&which)[Groups::KEPT], u32 pending) {
    const u32 kept = Groups::KEPT - pending;
    const u32 end = groups.open > pending ? groups.open - pending : 0;
    for (u32 group = end > kept ? end - kept : 0; group < end; group++) tsan::acquire(&which[group % Groups::KEPT]);
}

void wait_bulk(u32 pending, bool reads_only) {
    step(false);
    Lane& self = *running;
    const auto waited_for = [&](const Unit& unit) {
        return busy(unit) && !unit.load && unit.lane == &self && unit.group + pending < self.bulk.open &&
               !(reads_only && unit.phase == Unit::Phase::read);
    };
    while (Unit* unit = any_unit(*self.warp, waited_for)) advance(*unit);
    const auto& which = reads_only ? self.bulk.read : self.bulk.done;
    see_groups(self.bulk, which, pending);
    const tsan::As async(self.warp->async);
    see_groups(self.bulk, which, pending);
}

}  // namespace

bool copy_something(Block& block) {
    Unit* found = nullptr;
    Lane* copier = nullptr;
    u32 seen = 0;
    for (u32 at = 0; at < block.warp_count(); at++) {
        for (Unit& unit : block.warps[at].units)
            if (busy(unit) && world.random.below(++seen) == 0) found = &unit;
    }
    for (u32 at = 0; at < block.count; at++)
        if (block.lanes[at].copies_pending != 0 && world.random.below(++seen) == 0) copier = &block.lanes[at];
    if (copier != nullptr) {
        make_lane_copy(*copier, any_bit(copier->copies_pending));
    } else if (found != nullptr) {
        advance(*found);
    } else {
        return false;
    }
    world.steps++;
    return true;
}

void see_fences(Warp& issuer, const Warp& of) {
    const tsan::As async(issuer.async);
    for (u32 at = 0; at < of.count; at++) tsan::acquire(&of.lanes[at]->fenced);
}

bool copies_under_way(const Block& block) {
    for (u32 at = 0; at < block.warp_count(); at++)
        for (const Unit& unit : block.warps[at].units)
            if (busy(unit)) return true;
    for (u32 at = 0; at < block.count; at++)
        if (block.lanes[at].copies_pending != 0) return true;
    return false;
}

void mbarrier_init(u64* word, u32 count) {
    step(true);
    tsan::writes_word(word);
    *reinterpret_cast<Barrier*>(word) = {0, static_cast<u8>(count), static_cast<u8>(count), 0, Barrier::MADE};
}

void mbarrier_arrive_expect_tx(u64* word, u32 bytes) {
    step(true);
    tsan::reads_word(word);
    tsan::release(word);
    Barrier& barrier = barrier_at(word);
    if (barrier.pending == 0) fail("more arrive at an mbarrier than it was initialised for");
    barrier.bytes += static_cast<int>(bytes);
    barrier.pending--;
    end_phase_if_complete(barrier);
}

bool mbarrier_try_wait_parity(u64* word, u32 parity) {
    tsan::reads_word(word);
    Lane& self = *running;
    const auto arrives_here = [&](const Unit& unit) { return busy(unit) && unit.load && unit.barrier == word; };
    if (barrier_at(word).phase == parity) {
        // Another warp may have issued the load.
        const std::span<Warp> warps(self.block->warps.get(), self.block->warp_count());
        Unit* unit = world.random.one_in(2) ? any_unit(warps, arrives_here) : nullptr;
        if (unit != nullptr) {
            world.steps++;
            advance(*unit);
        }
        if (barrier_at(word).phase == parity) park(word);
    } else {
        step(false);
    }
    if (barrier_at(word).phase == parity) return false;
    tsan::acquire(word);
    const tsan::As async(self.warp->async);
    tsan::acquire(word);
    return true;
}

void bulk_load(void* shared, const void* global, u32 bytes, u64* barrier) {
    check_copy(shared, global, bytes);
    issue(true, shared, global, bytes, barrier, __builtin_return_address(0));
}

void bulk_store(void* global, const void* shared, u32 bytes) {
    check_copy(shared, global, bytes);
    issue(false, global, shared, bytes, nullptr, __builtin_return_address(0));
}

void bulk_commit() { running->bulk.open++; }
void bulk_wait_read(u32 pending) { wait_bulk(pending, true); }
void bulk_wait(u32 pending) { wait_bulk(pending, false); }

void fence_proxy_async() {
    step(false);
    tsan::release(&running->fenced);
}

void lane_copy_16(void* shared, const void* global) {
    step(true);
    check_copy(shared, global, 16);
    Lane& self = *running;
    if (self.engine == nullptr) self.engine = tsan::create("asynchronous copy of a lane");
    if (~self.copies_pending == 0) make_lane_copy(self, any_bit(self.copies_pending));
    const u32 at = static_cast<u32>(__builtin_ctzll(~self.copies_pending));
    LaneCopy& copy = self.copies[at];
    copy.to = static_cast<u8*>(shared);
    copy.from = static_cast<const u8*>(global);
    copy.caller = __builtin_return_address(0);
    tsan::release(&copy.issued);
    self.copies_pending |= 1ull << at;
}

void lane_copies_arrive(u64* barrier) {
    step(true);
    Lane& self = *running;
    if (self.engine == nullptr) self.engine = tsan::create("asynchronous copy of a lane");
    for (Arrival& arrival : self.arrivals) {
        if (arrival.barrier != nullptr) continue;
        arrival.barrier = barrier;
        arrival.copies = self.copies_pending;
        tsan::release(&arrival.issued);
        if (arrival.copies == 0) arrive(self, arrival);
        return;
    }
    fail("a lane has too many copies in flight");
}

}  // namespace machine
