// Teams of warps, for the push and the reduce role. The producer decides what is to be done: it reads lists, awaits
// flags and loads rows. The consumers do it, each with one slice of every segment: they add rows, store sums and set
// flags. The team has a ring of stages. A step is an instruction of the producer to the consumers, with a stage, which
// holds a segment of a row or nothing.
//
// No deadlock inside a team: a consumer waits for its next step and for its own copies. At a flag, consumer 0 also
// waits for the other consumer, if there is one; both have the same steps in the same order. While a consumer waits for
// a step, it holds at most one earlier stage, which its last store may still read. The ring has more stages, so the
// producer always gets a free one.
//
// Why not one kind of warp: a warp that adds needs its registers for sums, and while it waits for a list or a flag it adds nothing.
// Why several consumers: a step costs the producer the same time whatever the size of its stage, and one consumer has
// too few registers for the sums of a large stage.
#pragma once
#include "rails.cuh"
#include "sum.cuh"

// What consumers do with a stage, apart from SUM_F32, SUM_APART and SUM_TOGETHER (sum.cuh).
//
// The stage holds a segment of a row: adds it to the sum.
constexpr u32 STEP_ADD = 16;
// Adds the row of the stage, if there is one (STEP_ADD), then stores the sum to `to` and begins a new sum. The stored
// sum has the type of partial sums with STEP_WIRE, otherwise the type of rows.
constexpr u32 STEP_STORE = 32;
constexpr u32 STEP_WIRE = 64;
// The stage holds a segment of a row: stores it to `to` as it is.
constexpr u32 STEP_COPY = 128;
// Sets the flag `to`, when all earlier stores of the team have completed.
constexpr u32 STEP_FLAG = 256;
// Counts tokens of a foreign set as written, when their sums are in the lane: `to` is the first token, `count` their
// number.
constexpr u32 STEP_COUNT = 512;
// The last step.
constexpr u32 STEP_END = 1024;
// In STEP_COUNT, this bit and the bits above it hold the set's domain.
constexpr u32 STEP_DOMAIN_SHIFT = 16;

struct Step {
    u64 to;
    u32 what;
    u32 count;  // vectors of the segment, unless said otherwise

    __device__ static Step of(const uint4& words) {
        return {static_cast<u64>(words.y) << 32 | words.x, words.z, words.w};
    }
    __device__ uint4 words() const {
        return make_uint4(static_cast<u32>(to), static_cast<u32>(to >> 32), what, count);
    }
};

// What the warps of a team share, behind the stages.
struct TeamMemory {
    uint4 steps[COMBINE_STAGES];
    u64 full[COMBINE_STAGES];   // the step and its segment have arrived
    u64 empty[COMBINE_STAGES];  // the consumers are done with the step
    u64 other[COMBINE_STAGES];  // at a STEP_FLAG: the stores of the other consumers have completed
};

constexpr u32 STAGE_BYTES = SLICES * COMBINE_SLICE_BYTES;
static_assert(COMBINE_STAGES * STAGE_BYTES + sizeof(TeamMemory) <= combine_team_bytes(CONSUMERS));

struct Team {
    static constexpr u32 STAGES = COMBINE_STAGES;
    SharedAddress stages;
    SharedAddress memory;

    // `bytes`: `combine_team_bytes(CONSUMERS)` bytes.
    __device__ explicit Team(u8* bytes) : stages(shared_address(bytes)), memory(stages + STAGES * STAGE_BYTES) {}

    __device__ SharedAddress stage(u32 at) const { return stages + at * STAGE_BYTES; }
    __device__ SharedAddress step(u32 at) const { return memory + OFFSET_OF(TeamMemory, steps) + at * sizeof(uint4); }
    __device__ SharedAddress full(u32 at) const { return memory + OFFSET_OF(TeamMemory, full) + at * sizeof(u64); }
    __device__ SharedAddress empty(u32 at) const { return memory + OFFSET_OF(TeamMemory, empty) + at * sizeof(u64); }
    __device__ SharedAddress other(u32 at) const { return memory + OFFSET_OF(TeamMemory, other) + at * sizeof(u64); }

    // Called by one warp, before a barrier of the block.
    __device__ void init() const {
        if (lane_id() < STAGES) {
            copy_init(full(lane_id()));
            mbarrier_init(empty(lane_id()), SLICES);
            if (SLICES > 1) mbarrier_init(other(lane_id()), SLICES - 1);
        }
        copy_init_done();
    }
};

// A position in the ring.
struct RingPosition {
    u32 at = 0;
    u32 parity = 0;

    __device__ void next() {
        if (++at == Team::STAGES) {
            at = 0;
            parity ^= 1;
        }
    }
};

// All lanes call the functions, with the same arguments.
struct Producer {
    const Team team;
    const u32 hidden;
    const Segments whole;
    RingPosition place;

    __device__ Producer(const Team& team, u32 hidden) : team(team), hidden(hidden), whole(hidden) {}

    __device__ Segments segments(u32 share_bits, u32 share) const {
        return share_bits == 0 ? whole : Segments(hidden, share_bits, share);
    }

    // Hands on a step without a row.
    __device__ void put(u32 what, u64 to = 0, u32 count = 0) {
        begin({to, what, count});
        copy_nothing(team.full(place.at));
        place.next();
    }

    // Hands on the segment of a row that has `count` vectors from `vector` on. The result goes to `to`.
    __device__ void put(const Summand& summand, u32 vector, u32 count, u32 what, u8* to) {
        const u32 bytes = LENGTH * element_bytes(ANY_F32 && (summand.flags() & SUM_F32) != 0);
        begin({reinterpret_cast<u64>(to), what, count});
        // Rounded up: the slot of a partial sum contains whole vectors of 8 elements (`slot_bytes`).
        copy_load(team.stage(place.at), summand.row() + static_cast<u64>(vector) * bytes, div_up(count * bytes, 16) * 16,
                  team.full(place.at));
        place.next();
    }

   private:
    // Waits for a free stage, and writes its step.
    __device__ void begin(const Step& step) {
        await_barrier(team.empty(place.at), place.parity ^ 1);
        // Every lane passes this wait before lane 0 hands the stage on. Otherwise the next phase might end before a
        // slow lane tests for the end of this one; that lane would then wait for ever.
        __syncwarp();
        if (lane_id() == 0) st_shared_v4(team.step(place.at), step.words());
    }
};

// Puts the steps of several sums, sum by sum: first the steps of all rows for the first of `segments`, then those
// for the next one, and so on. `mine`: this lane's row. `target(sums)`: where the first of these sums goes. `wire`:
// STEP_WIRE or 0. `single_as_is`: whether the only row of a sum is stored as it is (STEP_COPY).
template <class Target>
__device__ inline void put_sums(Producer& producer, const Segments& segments, const Sums& sums, const Summand& mine, u32 wire,
                                bool single_as_is, const Target& target) {
    const u32 alive = __ballot_sync(ALL_LANES, (mine.flags() & SUM_ALIVE) != 0);
    const u32 bytes = LENGTH * (wire != 0 ? element_bytes(WIRE_F32) : element_bytes(ROWS_F32));
#pragma unroll 1
    for (Sums left = sums; left.any(); left.next()) {
        const u32 rows = alive & left.lanes();
        u8* const to = target(left);
        const bool copy = single_as_is && rows != 0 && (rows & (rows - 1)) == 0;
#pragma unroll 1
        for (u32 vector = segments.first; vector < segments.end; vector += segments.stride) {
            u8* const segment = to + static_cast<u64>(vector) * bytes;
            const u32 count = segments.count(vector);
            if (rows == 0) producer.put(STEP_STORE | wire, reinterpret_cast<u64>(segment), count);
#pragma unroll 1
            for (u32 rest = rows; rest != 0; rest &= rest - 1) {
                const Summand summand = summand_of(mine, __ffs(rest) - 1);
                const bool last = (rest & (rest - 1)) == 0;
                const u32 what = copy ? STEP_COPY : STEP_ADD | summand.flags() | (last ? STEP_STORE | wire : 0);
                producer.put(summand, vector, count, what, segment);
            }
        }
    }
}

// Puts the steps of one sum of any number of rows: sums of more rows than a batch holds are rare. `rows.at(index)` is called by
// all lanes with the same index.
template <class Rows>
__device__ inline void put_long_sum(Producer& producer, const Segments& segments, u32 rows_in_sum, const Rows& rows, u32 wire,
                                    u8* to) {
    const u32 bytes = LENGTH * (wire != 0 ? element_bytes(WIRE_F32) : element_bytes(ROWS_F32));
#pragma unroll 1
    for (u32 vector = segments.first; vector < segments.end; vector += segments.stride) {
        u8* const segment = to + static_cast<u64>(vector) * bytes;
        const u32 count = segments.count(vector);
#pragma unroll 1
        for (u32 index = 0; index < rows_in_sum; index++) {
            const Summand summand = rows.at(index);
            if ((summand.flags() & SUM_ALIVE) == 0) continue;
            producer.put(summand, vector, count, STEP_ADD | summand.flags(), segment);
        }
        producer.put(STEP_STORE | wire, reinterpret_cast<u64>(segment), count);
    }
}

// All lanes call the functions, with the same arguments.
struct Consumer {
    static constexpr u32 NO_STAGE = Team::STAGES;
    const Team team;
    const u32 which;  // of the team's consumers
    const u32 lane;
    RingPosition place;
    // One bit per stage: the parity of the phase of `other` for its next STEP_FLAG.
    u32 flag_parity = 0;
    // A stage that a bulk store may still be reading.
    u32 stored = NO_STAGE;

    __device__ Consumer(const Team& team, u32 which) : team(team), which(which), lane(in_register(lane_id())) {}

    // Waits for the next step.
    __device__ Step take() const {
        await_barrier(team.full(place.at), place.parity);
        return Step::of(ld_shared_v4(team.step(place.at)));
    }

    // This consumer's slice of a segment of `count` vectors: its first vector, and its vectors. The only consumer of a team has the
    // whole segment, known without a computation, since each sum would wait for its result.
    __device__ u32 first(u32 count) const { return SLICES == 1 ? 0 : which * slice_of(count); }
    __device__ u32 part(u32 count) const {
        return SLICES == 1 ? count : min(count - min(count, first(count)), slice_of(count));
    }

    __device__ SharedAddress stage() const { return team.stage(place.at); }

    // Frees this stage when all lanes have finished with it. Before that, waits for the bulk store of the previous
    // stage, if one is pending, and frees that stage.
    __device__ void release() {
        if (stored != NO_STAGE) {
            await_stores_read<0>();
            free(stored);
            stored = NO_STAGE;
        }
        __syncwarp();
        free(place.at);
        place.next();
    }

    // Stores `bytes` bytes of the stage, and goes on to the next step while the bulk copy engine may still read the
    // stage.
    __device__ void store(u8* to, SharedAddress from, u32 bytes) {
        if (bytes != 0) store_stage(to, from, bytes);
        commit_stores();
        // After this, no lane reads the step or, if lanes copy (copy_plain.cuh), the stage.
        __syncwarp();
        if (stored != NO_STAGE) {
            await_stores_read<1>();
            free(stored);
        }
        stored = place.at;
        place.next();
    }

    // Sets a flag when the stores of all consumers have completed: the others arrive at `other`, where consumer 0
    // waits. Called before `release`, so that no other consumer arrives for the next flag in this stage before consumer
    // 0 has waited for this flag.
    __device__ void set_flag(u32* flag, u32 epoch) {
        await_stores<0>();
        __syncwarp();
        const SharedAddress other = team.other(place.at);
        if (which != 0) {
            if (lane == 0) mbarrier_arrive(other);
            return;
        }
        if (SLICES > 1) {
            await_barrier(other, flag_parity >> place.at & 1);
            flag_parity ^= 1u << place.at;
        }
        if (lane == 0) st_release_sys(flag, epoch);
    }

   private:
    __device__ void free(u32 at) const {
        if (lane == 0) mbarrier_arrive(team.empty(at));
    }
};

// Counts `count` rows of a foreign set, from row `first`. This consumer has stored all its slices of these rows to the
// lane. The consumer that completes the count of a chunk releases the chunk's rows to the proxy; `gather_set_probs`
// releases its probabilities.
__device__ inline void count_written(const CombineParams& p, u32 domain, u32 first, u32 count, u32 epoch) {
    const Common& c = p.common;
    const HandleView set = set_of(c, p.handle, domain);
    const u32 rows = set.chunk_tokens, per_unit = p.row_probs == nullptr ? 1 : 2;
    u32* const done = p.set_done + domain * MAX_CHUNKS;
    const u32 end = first + count;
    for (u32 row = first; row < end;) {
        const u32 chunk = row / rows, chunk_end = min((chunk + 1) * rows, set.tokens);
        const u32 stored = min(chunk_end, end) - row;
        if (atom_add_acq_rel_gpu(&done[chunk], stored) + stored == SLICES * (chunk_end - chunk * rows)) {
            done[chunk] = 0;
            st_release_sys(&rail_end(c, epoch, domain)->out_flags[per_unit * chunk], epoch);
        }
        row += stored;
    }
}

// Adds the row of a step. `mine`: this lane's first vector in the segment; `turns`: vectors of a lane.
__device__ inline void add_row(const Consumer& consumer, const Step& step, u32 mine, u32 turns, Sum& sum) {
    const bool f32 = ANY_F32 && (step.what & SUM_F32) != 0;
    sum.add(consumer.stage() + mine * LENGTH * element_bytes(f32), turns, f32);
}

// Does the steps of one segment of a sum; `step` is the first of them. The sum stays in registers.
__device__ inline void add_up(Consumer& consumer, Step step) {
    // The same for all steps of a sum.
    const u32 begin = consumer.first(step.count), mine = begin + consumer.lane;
    const u32 count = consumer.part(step.count), turns = div_up(count, WARP);
    Sum sum;
    sum.clear();
#pragma unroll 1
    for (;;) {
        if (GROUPS && (step.what & SUM_APART) != 0) {
            // A separate loop: if one loop added to either sum, moving values between the two would cost an instruction
            // each.
            Sum group;
            group.clear();
#pragma unroll 1
            for (;;) {
                add_row(consumer, step, mine, turns, group);
                if ((step.what & SUM_TOGETHER) != 0) break;
                consumer.release();
                step = consumer.take();
            }
            sum.add(group);
        } else if ((step.what & STEP_ADD) != 0) {
            add_row(consumer, step, mine, turns, sum);
        }
        if ((step.what & STEP_STORE) != 0) break;
        consumer.release();
        step = consumer.take();
    }
    u8* const to = reinterpret_cast<u8*>(step.to);
    const u32 first = begin * LENGTH;
    if (SAME_TYPE && (step.what & STEP_WIRE) != 0) {
        // Over the link, a bulk store takes half as long as stores by the lanes. Its source is this consumer's slice of
        // the current stage, which is free for the sum: the row in it, if any, has been added. (If rows and sums had
        // different sizes, this slice would overlap the other consumer's row.)
        const SharedAddress slice = consumer.stage() + first * element_bytes(WIRE_F32);
        sum.store<WIRE_F32>(SharedTarget{slice}, count, consumer.lane);
        copy_fence_stage();
        __syncwarp();
        consumer.store(to + first * element_bytes(WIRE_F32), slice, count * LENGTH * element_bytes(WIRE_F32));
        return;
    }
    consumer.release();
    if (SAME_TYPE || (step.what & STEP_WIRE) != 0)
        sum.store<WIRE_F32>(GlobalTarget{to + first * element_bytes(WIRE_F32)}, count, consumer.lane);
    else
        sum.store<ROWS_F32>(GlobalTarget{to + first * element_bytes(ROWS_F32)}, count, consumer.lane);
}

// Does the steps of a team, as one of its consumers.
__device__ inline void consume(const CombineParams& p, const Team& team, u32 which, u32 epoch) {
    constexpr u32 COPY_BYTES = LENGTH * element_bytes(WIRE_F32);
    Consumer consumer(team, which);
#pragma unroll 1
    for (;;) {
        const Step step = consumer.take();
        if ((step.what & STEP_COPY) != 0) {
            const u32 first = consumer.first(step.count) * COPY_BYTES;
            consumer.store(reinterpret_cast<u8*>(step.to) + first, consumer.stage() + first,
                           consumer.part(step.count) * COPY_BYTES);
            continue;
        }
        if ((step.what & (STEP_ADD | STEP_STORE)) != 0) {
            add_up(consumer, step);
            continue;
        }
        if ((step.what & STEP_FLAG) != 0) consumer.set_flag(reinterpret_cast<u32*>(step.to), epoch);
        if (RAILS && (step.what & STEP_COUNT) != 0) {
            await_stores<0>();
            __syncwarp();
            if (consumer.lane == 0)
                count_written(p, step.what >> STEP_DOMAIN_SHIFT, static_cast<u32>(step.to), step.count, epoch);
        }
        consumer.release();
        if ((step.what & STEP_END) != 0) break;
    }
    await_stores<0>();
}
