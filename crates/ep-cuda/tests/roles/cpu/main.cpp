// Runs a case: launches the operators of all ranks as src/operators.rs and src/buffer.rs do. Before each kernel, the
// rank's stream writes the inputs and overwrites the outputs; after it, the stream compares the outputs. A caller may
// access the memory at these times.
#include <algorithm>
#include <cstddef>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <iterator>
#include <memory>
#include <string>
#include <vector>

#include <sched.h>

#include "case.hpp"
#include "cuda.hpp"
#include "kernels.hpp"
#include "memory.hpp"

#include "handle.cuh"
#include "ptx.cuh"

namespace {

// Bytes after each part of memory that must not change.
constexpr u64 GUARD_BYTES = 64;
// The content of outputs before a kernel.
constexpr u8 POISON = 0xA7;

// A rank; all parts of its memory keep their addresses over all operators, as those of a training step do.
struct Rank {
    Memory memory;
    FaultReport report{};
    // By rank: the mirror of a control block on another machine; null for a rank of this machine.
    std::vector<Control*> mirrors{};
    // 1 when the rank's stream has ended.
    u32 ended = 0;
};

u32 machine_of(const Record& world, u32 rank) {
    return static_cast<u32>(rank * world.number("machines") / world.number("ranks"));
}

// A mirror: the words before `Control::handshake`, with no memory behind them.
Control* make_mirror() {
    constexpr u64 PAGE = 4096, BYTES = (offsetof(Control, handshake) + PAGE - 1) / PAGE * PAGE;
    void* memory = mmap(nullptr, BYTES + sizeof(Control), PROT_NONE, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0);
    if (memory == MAP_FAILED || mprotect(memory, BYTES, PROT_READ | PROT_WRITE) != 0) machine::fail("no memory for a mirror");
    return reinterpret_cast<Control*>(static_cast<u8*>(memory) + BYTES - offsetof(Control, handshake));
}

// The host memory that a rank shares with its proxy.
struct Window {
    std::vector<RailEnd> ends;  // [domains][2]
    std::vector<u8> lanes;      // [domains][2][2][LANE_BYTES]
};
constexpr u64 LANE_BYTES = 64 << 10;

// What the proxy of a rank does in one operator.
struct Relay {
    const Case* all;
    std::vector<Window>* windows;
    std::vector<Rank>* ranks;
    u32 rank;
    u32 epoch;
};

// A handle's lists, and the gaps between them.
struct Lists {
    HandleView view{};
    u8* begin = nullptr;
    u8* end = nullptr;
    std::vector<const u8*> gaps;
};

// One operator of one rank.
struct Call {
    const char* kernel;
    u32 rank;
    u32 step;
    const Record* record;
    Memory* memory;
    const Case* all;
    const FaultReport* report;
    std::vector<Rank>* ranks;
    Lists handle;
    PreprocessParams preprocess;
    DispatchParams dispatch;
    CombineParams combine;
};

u32 differences = 0;

// ---- what the host does in the stream

void write(Memory& memory, const std::string& name, const Bytes& bytes) {
    u8* to = memory.at(name);
    std::copy(bytes.begin(), bytes.end(), to);
    std::memset(to + bytes.size(), POISON, GUARD_BYTES);
}

bool is_preprocess(const Call& call) { return std::string_view(call.kernel).starts_with("preprocess"); }

void before(const void* params) {
    const Call& call = *static_cast<const Call*>(params);
    if (is_preprocess(call)) std::memset(call.handle.begin, POISON, call.handle.end - call.handle.begin);
    for (const auto& [name, bytes] : call.record->inputs) write(*call.memory, name, bytes);
    for (const auto& [name, bytes] : call.record->outputs) write(*call.memory, name, Bytes(bytes.size(), POISON));
}

void report(const Call& call, const char* what, u64 at, u64 expected, u64 found) {
    __atomic_fetch_add(&differences, 1, __ATOMIC_RELAXED);
    std::printf("rank %u, operator %u (%s): %s at %llu: expected %llx, found %llx\n", call.rank, call.step,
                call.kernel, what, at, expected, found);
}

void compare(const Call& call, const std::string& name, const Bytes& expected) {
    const u8* found = call.memory->at(name);
    for (u64 at = 0; at < expected.size() + GUARD_BYTES; at++) {
        const u8 wanted = at < expected.size() ? expected[at] : POISON;
        if (found[at] == wanted) continue;
        report(call, (name + (at < expected.size() ? "" : ", past its end,")).c_str(), at, wanted, found[at]);
        return;
    }
}

// Checks the other fields of a fault.
void check_fault(const Call& call, const FaultReport& found) {
    const Fault& own = found.own.fault;
    const u64 timeout = call.all->world.number("timeout ns"), stall = call.all->world.number("stall timeout ns");
    if (own.rank != call.rank) report(call, "rank of its own record", own.kind, call.rank, own.rank);
    if (own.kind == FAULT_LATE && own.waited_ns <= timeout) report(call, "time to enter", 0, timeout, own.waited_ns);
    if (own.kind == FAULT_STALLED && (own.waited_ns <= stall || own.waited_ns > timeout))
        report(call, "time without progress", 0, stall, own.waited_ns);
    // If another rank gave up first, the report has that rank's record, too.
    const FaultRecord& record = own.kind == FAULT_ABORTED ? found.theirs : found.own;
    const u32 kind = record.fault.kind, rank = record.fault.rank;
    const u64 roots = call.record->number("faults") & ~(1ull << FAULT_ABORTED);
    if ((roots >> kind & 1) == 0 || rank >= call.all->world.number("ranks"))
        return report(call, "what began it, of these kinds,", rank, roots, kind);
    if (kind != FAULT_MISMATCH) return;
    const auto& ranks = call.all->operators[call.step - 1].ranks;
    const u64 mine = ranks[rank].number("signature"), theirs = ranks[record.fault.peer].number("signature");
    if (record.call[1] != mine) report(call, "what the rank called, it says,", rank, mine, record.call[1]);
    if (record.peer_call[1] != theirs)
        report(call, "what its peer called, it says,", record.fault.peer, theirs, record.peer_call[1]);
}

void after(const void* params) {
    const Call& call = *static_cast<const Call*>(params);
    const u32 kind = __atomic_load_n(&call.report->own.fault.kind, __ATOMIC_ACQUIRE);
    const u64 kinds = call.record->number("faults"), peer = call.record->number("at fault");
    const Fault& fault = call.report->own.fault;
    if ((kinds >> kind & 1) == 0) report(call, "fault, of these kinds,", fault.waiting_for, kinds, kind);
    if (kind != FAULT_NONE) {
        if (peer != NONE && fault.peer != peer) report(call, "rank at fault", kind, peer, fault.peer);
        check_fault(call, *call.report);
        // The outputs of a failed operator are undefined.
        if (call.record->number("untouched") != 0)
            for (const auto& [name, bytes] : call.record->outputs) compare(call, name, Bytes(bytes.size(), POISON));
        return;
    }
    for (const auto& [name, bytes] : call.record->outputs) compare(call, name, bytes);
    for (const u8* gap : call.handle.gaps) {
        const u8* changed = std::find_if(gap, gap + GUARD_BYTES, [](u8 byte) { return byte != POISON; });
        if (changed == gap + GUARD_BYTES) continue;
        report(call, "behind a list of the handle, byte", changed - call.handle.begin, POISON, *changed);
    }
}

// Accesses a rank's control block, as the rank's host does. The running lane sees no memory of this rank afterwards.
template <class Access>
void as_host_of(std::vector<Rank>& ranks, u32 rank, const Access& access) {
    Memory& memory = ranks[rank].memory;
    memory.show_to(rank);
    access(*reinterpret_cast<Control*>(memory.seen_by(rank)));
    memory.show_to(static_cast<u32>(ranks.size()));
}

// Writes a rank's gone word to the control blocks of all ranks, as the hosts do.
void say_gone(const void* params) {
    const Call& call = *static_cast<const Call*>(params);
    const Common& common = call.dispatch.common;
    u32 word = static_cast<u32>(call.record->number("gone"));
    // With its last epoch, rail peers go on waiting for what the rank has sent, which may still be on its way.
    if (word == GONE_LEFT) word |= common.own->epoch << GONE_BITS;
    for (u32 peer = 0; peer < common.ranks; peer++)
        as_host_of(*call.ranks, peer, [&](Control& control) {
            __atomic_store_n(&control.left[common.rank], word, __ATOMIC_RELEASE);
        });
}

// ---- parameters, as the host fills them

// A rank's memory in an operator: null where the operator has no such input or output.
struct Arguments {
    const Record& record;
    Memory& memory;

    template <class T>
    T* at(const char* name) const {
        const bool used = record.inputs.count(name) != 0 || record.outputs.count(name) != 0;
        return used ? reinterpret_cast<T*>(memory.at(name)) : nullptr;
    }
    template <class T>
    T* scratch(const std::string& name) const {
        return reinterpret_cast<T*>(memory.at(name));
    }
    u32 number(const char* name) const { return static_cast<u32>(record.number(name)); }
};

// Like `Sizes::lay_out` in src/handle.rs, with a gap behind every list.
Lists lists_of(const Record& world, const Arguments& call) {
    const u64 tokens = call.number("tokens"), copies = call.number("most copies"), ranks = world.number("ranks");
    const u64 chunk_tokens = call.number("chunk tokens"), chunks = (tokens + chunk_tokens - 1) / chunk_tokens;
    Lists lists;
    lists.begin = lists.end = call.scratch<u8>("handle " + std::to_string(call.number("memory of handle")));
    const auto place = [&](auto*& list, u64 bytes) {
        list = reinterpret_cast<std::remove_reference_t<decltype(list)>>(lists.end);
        lists.gaps.push_back(lists.end + bytes);
        lists.end += (bytes + 15) / 16 * 16 + GUARD_BYTES;
    };
    HandleView& view = lists.view;
    place(view.sends, sizeof(Send) * (copies + tokens));
    place(view.send_begin, 4 * (chunks + 1));
    place(view.token_begin, 4 * (tokens + 1));
    place(view.copies, sizeof(Copy) * copies);
    place(view.copy_begin, 4 * (chunks + 1));
    place(view.recv, sizeof(Receive) * copies);
    place(view.recv_begin, 4 * (chunks + 1) * ranks);
    place(view.dst_copies, sizeof(DstCopy) * copies);
    place(view.dst_begin, 4 * (chunks + 1) * ranks);
    place(view.shape, 4 * call.number("shape words"));
    const u64 domains = world.number("domains");
    if (domains > 1) {
        place(view.rail_begin, 4 * domains * 2 * (chunks + 1));
        place(view.set_rows, 4 * ranks);
        place(view.sets, domains * set_bytes(static_cast<u32>(world.number("set rows")),
                                             static_cast<u32>(world.number("set copies")),
                                             static_cast<u32>((world.number("set rows") + world.number("rail chunk rows") - 1) /
                                                              world.number("rail chunk rows")),
                                             static_cast<u32>(ranks)));
    }
    if (lists.end > lists.begin + Memory::REGION_BYTES) machine::fail("a handle that does not fit its memory");
    view.tokens = static_cast<u32>(tokens);
    view.chunks = static_cast<u32>(chunks);
    view.chunk_tokens = static_cast<u32>(chunk_tokens);
    view.permuted = call.number("permuted");
    return lists;
}

u64 number_of(const void* address) { return reinterpret_cast<u64>(address); }

void add_lists(Handshake& handshake, const HandleView& lists) {
    handshake.recv = number_of(lists.recv);
    handshake.recv_begin = number_of(lists.recv_begin);
    handshake.dst_copies = number_of(lists.dst_copies);
    handshake.dst_begin = number_of(lists.dst_begin);
    handshake.chunks = lists.chunks;
    handshake.sets = number_of(lists.sets);
}

PreprocessParams preprocess_params(const Record& world, const Common& common, const HandleView& handle,
                                   const Arguments& call) {
    PreprocessParams p{};
    p.common = common;
    p.handle = handle;
    p.form = call.number("form");
    p.topk = call.number("topk");
    p.pad_multiple = call.number("pad multiple");
    p.capacity = call.number("capacity");
    p.count_words = static_cast<u32>(world.number("count words"));
    p.tile = call.number("tile");
    p.most_copies = call.number("most copies");
    p.topk_idx = call.at<i32>("topk_idx");
    p.topk_idx_wide = call.at<i64>("topk_idx_wide");
    p.weights = call.at<float>("weights");
    p.map = call.at<u8>("map");
    p.row_begin = call.at<u32>("row_begin");
    p.row_experts = call.at<u32>("row_experts");
    p.position_of = call.at<u32>("position_of");
    p.block_columns = call.scratch<u32>("block columns");
    p.host_shape = call.at<u32>("host shape");
    p.tokens_per_expert = call.at<i64>("tokens per expert");
    p.kept_per_expert = call.at<i64>("kept per expert");
    p.overflow = call.at<i32>("overflow");
    return p;
}

DispatchParams dispatch_params(const Common& common, const HandleView& handle, const Arguments& call) {
    DispatchParams p{};
    p.common = common;
    p.handle = handle;
    p.tokens = call.at<u8>("tokens in");
    p.scales = call.at<u8>("scales in");
    p.dense = call.at<float>("dense");
    p.out_tokens = call.at<u8>("tokens");
    p.out_scales = call.at<u8>("scales");
    p.out_probs = call.at<float>("probs");
    p.out_local_experts = call.at<u8>("local_experts");
    Handshake& handshake = p.common.handshake;
    handshake.tokens = number_of(p.out_tokens);
    handshake.scales = number_of(p.out_scales);
    handshake.probs = number_of(p.out_probs);
    handshake.local_experts = number_of(p.out_local_experts);
    p.probs = call.number("probs origin");
    p.scale_format = call.number("scale format");
    p.row_bytes_in = call.number("row bytes in");
    p.row_bytes_out = call.number("row bytes out");
    p.scale_row_bytes = call.number("scale row bytes");
    p.pieces = call.number("pieces");
    p.piece_bytes = call.number("piece bytes");
    p.long_rows = call.number("long rows");
    handshake.share_bits = call.number("share bits");
    p.stages = call.number("stages");
    p.stage_bytes = stage_stride(p.long_rows ? p.piece_bytes : p.row_bytes_in);
    p.senders = call.number("senders");
    return p;
}

CombineParams combine_params(const Common& common, const HandleView& handle, const Arguments& call) {
    CombineParams p{};
    p.common = common;
    p.handle = handle;
    p.rows = call.at<u8>("rows");
    p.row_probs = call.at<float>("row probs");
    p.prob_stride = p.row_probs == nullptr ? 0 : call.number("prob stride");
    p.out_tokens = call.at<u8>("combined");
    p.out_probs = call.at<float>("combined probs");
    p.partials = call.scratch<u8>("partials");
    p.prob_scratch = p.row_probs == nullptr ? nullptr : call.scratch<float>("gathered probs");
    if (common.rails.domains > 1) {
        p.set_partials = call.scratch<u8>("set partials");
        p.set_prob_scratch = call.scratch<float>("set probs");
        p.set_done = call.scratch<u32>("set done");
    }
    Handshake& handshake = p.common.handshake;
    handshake.tokens = number_of(p.partials);
    handshake.probs = number_of(p.prob_scratch);
    handshake.set_tokens = number_of(p.set_partials);
    handshake.set_probs = number_of(p.set_prob_scratch);
    handshake.share_bits = call.number("share bits");
    p.hidden = call.number("hidden");
    p.slack = 0;  // cases are small: tokens are to be reduced between pushes, too
    return p;
}

Common common_of(const Record& world, std::vector<Rank>& ranks, std::vector<Window>& windows, u32 rank, bool translate) {
    Common common{};
    common.rank = rank;
    common.ranks = static_cast<u32>(ranks.size());
    common.experts = static_cast<u32>(world.number("experts"));
    common.timeout_ns = world.number("timeout ns");
    common.stall_timeout_ns = world.number("stall timeout ns");
    common.report = &ranks[rank].report;
    for (u32 peer = 0; peer < ranks.size(); peer++) {
        const Memory& memory = ranks[peer].memory;
        Control* mirror = ranks[rank].mirrors[peer];
        common.control[peer] = mirror != nullptr ? mirror : reinterpret_cast<Control*>(memory.seen_by(rank));
        common.delta[peer] = translate ? memory.seen_by(rank) - memory.seen_by(peer) : 0;
    }
    common.own = common.control[rank];
    Rails& rails = common.rails;
    rails.domains = static_cast<u32>(world.number("domains"));
    rails.local_ranks = common.ranks / rails.domains;
    rails.domain = rank / rails.local_ranks;
    rails.first = rails.domain * rails.local_ranks;
    rails.ends = windows[rank].ends.data();
    rails.lanes = windows[rank].lanes.data();
    rails.lane_bytes = LANE_BYTES;
    rails.chunk_rows = static_cast<u32>(world.number("rail chunk rows"));
    rails.most_rows = static_cast<u32>(world.number("set rows"));
    rails.most_copies = static_cast<u32>(world.number("set copies"));
    const Bytes& owners = world.inputs.at("owner_begin");
    std::copy(owners.begin(), owners.end(), reinterpret_cast<u8*>(common.owner_begin));
    return common;
}

// Adds the launches of one operator of one rank to the rank's stream.
void launch(Call& call, const Case& all, Common common, Memory& memory, std::vector<machine::Launch>& stream) {
    const Arguments arguments{*call.record, memory};
    if (arguments.number("takes part") == 0) return;
    if (call.kernel == std::string_view("say_gone")) {
        call.dispatch.common = common;
        stream.push_back({call.kernel, say_gone, &call, 1, 1, 0, nullptr});
        return;
    }
    const bool stands_still = arguments.number("stands still") != 0;
    const char* teams = arguments.number("pairs") != 0 ? " pairs" : "";
    const Kernel* kernel = Kernel::find((stands_still ? "entering " : "") + std::string(call.kernel) + teams);
    if (kernel == nullptr) machine::fail("there is no kernel \"%s\"", call.kernel);
    call.handle = lists_of(all.world, arguments);
    common.handshake.signature = arguments.number("signature");
    common.handshake.call[1] = common.handshake.signature;
    add_lists(common.handshake, call.handle.view);
    const HandleView& handle = call.handle.view;
    u32 blocks = static_cast<u32>(all.world.number("blocks"));
    const void* params;
    const std::string_view name(call.kernel);
    if (name.starts_with("preprocess")) {
        call.preprocess = preprocess_params(all.world, common, handle, arguments);
        params = &call.preprocess;
        blocks = max(1u, min(blocks, div_up(handle.tokens, call.preprocess.tile)));
    } else if (name.starts_with("dispatch")) {
        call.dispatch = dispatch_params(common, handle, arguments);
        params = &call.dispatch;
    } else {
        call.combine = combine_params(common, handle, arguments);
        params = &call.combine;
    }
    stream.push_back({"the host before a kernel", before, &call, 1, 1, 0, nullptr});
    const u32 shared_bytes = kernel->shared_bytes(params);
    stream.push_back({call.kernel, kernel->body, params, blocks, kernel->threads, shared_bytes, kernel->shared});
    if (!stands_still) stream.push_back({"the host after a kernel", after, &call, 1, 1, 0, nullptr});
}

// ---- the proxies: put what one rank's kernel sends into the windows of its rail peers

// Polls until the word is `epoch`. Returns false when a rank has failed or does not take part: then the word may never
// come.
bool awaits(const Relay& relay, const u32* word) {
    while (ld_acquire_sys(word) != relay.epoch) {
        if (relay.all->operators[relay.epoch - 1].ranks[relay.rank].number("takes part") == 0) return false;
        for (const Rank& rank : *relay.ranks)
            if (__atomic_load_n(&rank.report.own.fault.kind, __ATOMIC_ACQUIRE) != FAULT_NONE) return false;
    }
    return true;
}

// The bytes [begin, end) of a section that belong to one unit of a plan.
struct Part {
    u64 begin = 0;
    u64 end = 0;
};

Part part_of(const RailPlan& plan, const RailSection& section, u32 unit) {
    if (section.per == RAIL_ONCE) return {0, unit == 0 ? section.stride : 0u};
    const auto end = [&](u32 of) -> u64 {
        return static_cast<u64>(section.per == RAIL_PER_ROW ? plan.ends[of].rows : plan.ends[of].copies) * section.stride;
    };
    return {unit == 0 ? 0 : end(unit - 1), end(unit)};
}

// Checks what a plan sends to a domain: each token that the domain needs once, and no more bytes than its data has.
void check_set(const Relay& relay, const RailPlan& plan, u32 domain) {
    const Record& record = relay.all->operators[relay.epoch - 1].ranks[relay.rank];
    // An operator that fails may have another routing than the oracle's.
    if (record.number("faults") != 1u << FAULT_NONE) return;
    u32 expected[3];
    std::memcpy(expected, record.inputs.at("rail sets").data() + domain * sizeof expected, sizeof expected);
    u64 bytes = 0;
    for (const RailSection& section : plan.sections) {
        const u32 elements = section.per == RAIL_ONCE ? 1 : section.per == RAIL_PER_ROW ? plan.rows : plan.copies;
        bytes += static_cast<u64>(section.stride) * elements;
    }
    if (plan.rows != expected[0] || plan.copies != expected[1] || bytes > expected[2])
        machine::fail("a set of %u rows, %u copies and %llu bytes in place of %u, %u and at most %u", plan.rows, plan.copies,
                      static_cast<unsigned long long>(bytes), expected[0], expected[1], expected[2]);
}

void copy_bytes(u8* to, const u8* from, u64 bytes) {
    for (u64 at = 0; at < bytes; at++) static_cast<volatile u8*>(to)[at] = static_cast<const volatile u8*>(from)[at];
}

void relay_to(const Relay& relay, u32 domain) {
    const u32 domains = static_cast<u32>(relay.all->world.number("domains"));
    const u32 local_ranks = static_cast<u32>(relay.windows->size()) / domains;
    const u32 own_domain = relay.rank / local_ranks, peer = domain * local_ranks + relay.rank % local_ranks;
    const u32 parity = relay.epoch & 1;
    Window &mine = (*relay.windows)[relay.rank], &theirs = (*relay.windows)[peer];
    RailEnd &from = mine.ends[2 * domain + parity], &to = theirs.ends[2 * own_domain + parity];
    // The proxy of a rank that leaves is slow in its last operator: `say_gone` comes first.
    if (relay.all->world.number("leaves") == relay.rank + 1 && relay.epoch + 1 == relay.all->operators.size())
        for (u32 polls = 300; polls > 0;) polls -= ld_acquire_sys(&(*relay.ranks)[relay.rank].ended) != 0;
    if (!awaits(relay, &from.out.epoch)) return;
    // A copy: the kernels may write the next plan as soon as the last chunk has been released below.
    const auto copied = std::make_unique<RailPlan>();
    const auto copy_plan = [&](RailPlan& there) {
        const auto part = [&](auto& field, const auto& value) {
            copy_bytes(reinterpret_cast<u8*>(&field), reinterpret_cast<const u8*>(&value), sizeof field);
        };
        part(there.call, from.out.call);
        part(there.sections, from.out.sections);
        for (auto field : {&RailPlan::rows, &RailPlan::copies, &RailPlan::units, &RailPlan::flags_per_unit,
                           &RailPlan::chunk_rows, &RailPlan::signature})
            part(there.*field, from.out.*field);
        for (u32 unit = 0; unit < there.units; unit++) {
            part(there.ends[unit].rows, from.out.ends[unit].rows);
            part(there.ends[unit].copies, from.out.ends[unit].copies);
        }
    };
    copy_plan(*copied);
    copy_plan(to.input);
    const RailPlan& plan = *copied;
    check_set(relay, plan, domain);
    const auto tell = [&](u32 chunks) {
        machine::step(true);
        __atomic_store_n(&to.state.progress, static_cast<u64>(relay.epoch) << 32 | chunks, __ATOMIC_RELEASE);
    };
    tell(0);
    const u8* source = mine.lanes.data() + (4 * domain + 2 * parity) * LANE_BYTES;
    u8* target = theirs.lanes.data() + (4 * own_domain + 2 * parity + 1) * LANE_BYTES;
    u32 chunk = 0;
    const u32 chunks = std::max((plan.rows + plan.chunk_rows - 1) / plan.chunk_rows, 1u);
    const auto arrived = [&](u32 rows, bool all) {
        for (; chunk < chunks; chunk++) {
            if (chunk + 1 == chunks ? !all : rows < (chunk + 1) * plan.chunk_rows) return;
            tell(chunk + 1);
        }
    };
    if (plan.units == 0) arrived(0, true);
    for (u32 unit = 0; unit < plan.units; unit++) {
        for (u32 flag = 0; flag < plan.flags_per_unit; flag++)
            if (!awaits(relay, &from.out_flags[unit * plan.flags_per_unit + flag])) return;
        for (const RailSection& section : plan.sections) {
            const Part part = part_of(plan, section, unit);
            if (section.offset + part.end > LANE_BYTES) machine::fail("a section past the end of its lane");
            copy_bytes(target + section.offset + part.begin, source + section.offset + part.begin, part.end - part.begin);
        }
        arrived(plan.ends[unit].rows, unit + 1 == plan.units);
    }
}

void relay(const void* params) {
    const Relay& relay = *static_cast<const Relay*>(params);
    const u32 domains = static_cast<u32>(relay.all->world.number("domains"));
    const u32 own = relay.rank / (static_cast<u32>(relay.windows->size()) / domains);
    for (u32 step = 1; step < domains; step++) relay_to(relay, (own + step) % domains);
}

// ---- the links between machines: carry what a rank's kernels have stored in the mirror of another rank to that rank

void end_of_stream(const void* params) {
    __atomic_store_n(static_cast<u32*>(const_cast<void*>(params)), 1, __ATOMIC_RELEASE);
}

// Stores a record that a rank has sent, unless there is one. The kind is stored last, as the host does.
void store_record(Control* mirror, const FaultRecord& record) {
    if (mirror == nullptr || record.fault.kind == FAULT_NONE) return;
    FaultRecord& there = mirror->record;
    if (__atomic_load_n(&there.fault.kind, __ATOMIC_ACQUIRE) != FAULT_NONE) return;
    const auto* from = reinterpret_cast<const u32*>(&record);
    auto* to = reinterpret_cast<u32*>(&there);
    for (u32 word = sizeof record / sizeof(u32); word-- > 0;) __atomic_store_n(to + word, from[word], __ATOMIC_RELEASE);
}

void tell(std::vector<Rank>& ranks, u32 from, u32 to, u32 abort) {
    const FaultReport& report = ranks[from].report;
    store_record(ranks[to].mirrors[from], report.own);
    store_record(ranks[to].mirrors[report.theirs.fault.rank], report.theirs);
    as_host_of(ranks, to, [&](Control& control) { __atomic_store_n(&control.abort, abort, __ATOMIC_RELEASE); });
}

void carry(const void* params) {
    auto& ranks = *static_cast<std::vector<Rank>*>(const_cast<void*>(params));
    const u32 count = static_cast<u32>(ranks.size());
    std::vector<bool> told(count * count);
    for (bool running = true; running;) {
        running = false;
        for (const Rank& rank : ranks) running |= ld_acquire_sys(&rank.ended) == 0;
        for (u32 pair = 0; pair < count * count; pair++) {
            const Control* mirror = ranks[pair / count].mirrors[pair % count];
            if (mirror == nullptr || told[pair]) continue;
            const u32 abort = ld_acquire_sys(&mirror->abort);
            if (abort == 0) continue;
            told[pair] = true;
            tell(ranks, pair / count, pair % count, abort);
        }
    }
}

// One thread runs at a time. On one processor, it passes its turn on without waking another processor, which halves the time of
// a run. Where this fails, the run only takes longer.
void stay_on_one_processor() {
    const int processor = sched_getcpu();
    if (processor < 0) return;
    cpu_set_t set;
    CPU_ZERO(&set);
    CPU_SET(processor, &set);
    sched_setaffinity(0, sizeof set, &set);
}

machine::Settings settings_of(int count, char** arguments) {
    machine::Settings settings{};
    settings.seed = std::strtoull(arguments[2], nullptr, 10);
    if (count == 4) settings.list_sites = std::strcmp(arguments[3], "sites") == 0;
    if (count == 4 && !settings.list_sites) {
        char* spec = arguments[3];
        settings.mutant.order = spec;
        if (char* place = std::strchr(spec, '@')) {
            *place = 0;
            settings.mutant.file = place + 1;
            if (char* line = std::strchr(place + 1, ':')) {
                *line = 0;
                settings.mutant.line = static_cast<u32>(std::strtoul(line + 1, nullptr, 10));
            }
        }
    }
    return settings;
}

}  // namespace

int main(int count, char** arguments) {
    if (count != 3 && count != 4) {
        std::fputs("usage: roles CASE SEED [ORDER[@FILE:LINE] | delta | sites]\n", stderr);
        return 2;
    }
    stay_on_one_processor();
    const Case all = Reader(arguments[1]).read();
    const u32 rank_count = static_cast<u32>(all.world.number("ranks"));
    const u64 counts = 2 * rank_count * all.world.number("count words") * sizeof(u32);
    if (sizeof(Control) + counts > Memory::CONTROL_BYTES) machine::fail("counts that do not fit their memory");
    std::vector<Rank> ranks;
    for (u32 rank = 0; rank < rank_count; rank++) ranks.push_back({Memory(rank, rank_count)});
    const auto share_memory = [&](u32 one, u32 other) { return machine_of(all.world, one) == machine_of(all.world, other); };
    for (u32 rank = 0; rank < rank_count; rank++)
        for (u32 peer = 0; peer < rank_count; peer++)
            ranks[rank].mirrors.push_back(share_memory(rank, peer) ? nullptr : make_mirror());
    machine::Settings settings = settings_of(count, arguments);
    // Which addresses a rank uses depends little on the order of lanes, so guards in one of six seeds are enough.
    Memory::guarded = APART && settings.seed % 6 == 0;
    settings.seldom_enter = Memory::guarded;
    settings.enter = [&](u32 rank) {
        if (!Memory::guarded) return;
        for (u32 owner = 0; owner < rank_count; owner++)
            ranks[owner].memory.show_to(rank < rank_count && !share_memory(rank, owner) ? rank_count : rank);
    };
    // The translation of addresses, which can be left out on purpose, too.
    const bool translate = std::string_view(settings.mutant.order) != "delta";
    const u32 domains = static_cast<u32>(all.world.number("domains"));
    std::vector<Window> windows(rank_count);
    for (Window& window : windows) {
        window.ends.resize(2 * domains);
        window.lanes.resize(4 * domains * LANE_BYTES);
    }
    std::vector<std::unique_ptr<Relay>> relays;
    // With rails, each rank's proxy has a stream, behind those of the ranks.
    std::vector<std::vector<machine::Launch>> streams(rank_count * (domains > 1 ? 2 : 1));
    std::vector<std::unique_ptr<Call>> calls;
    for (u32 rank = 0; rank < rank_count; rank++) {
        const Common common = common_of(all.world, ranks, windows, rank, translate);
        for (u32 step = 0; step < all.operators.size(); step++) {
            const Operator& each = all.operators[step];
            calls.push_back(std::make_unique<Call>());
            Call& call = *calls.back();
            call.kernel = each.kernel.c_str();
            call.rank = rank;
            call.step = step + 1;
            call.record = &each.ranks[rank];
            call.memory = &ranks[rank].memory;
            call.all = &all;
            call.report = &ranks[rank].report;
            call.ranks = &ranks;
            launch(call, all, common, ranks[rank].memory, streams[rank]);
            if (domains == 1 || call.kernel == std::string_view("say_gone")) continue;
            relays.push_back(std::make_unique<Relay>(Relay{&all, &windows, &ranks, rank, step + 1}));
            streams[rank_count + rank].push_back({"a proxy", relay, relays.back().get(), 1, 1, 0, nullptr});
        }
    }
    for (u32 rank = 0; rank < rank_count; rank++)
        streams[rank].push_back({"the end of a stream", end_of_stream, &ranks[rank].ended, 1, 1, 0, nullptr});
    if (all.world.number("machines") > 1) {
        streams.push_back({{"the links between machines", carry, &ranks, 1, 1, 0, nullptr}});
    }
    machine::run(streams, settings);
    return differences == 0 ? 0 : 1;
}
