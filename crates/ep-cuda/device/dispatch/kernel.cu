// dispatch: sends tokens to the ranks of their experts. One launch: block 0 sends the handshake, every block awaits the
// handshakes of all ranks of the domain, and then every warp is a worker. The first `DispatchParams::senders` warps (the first
// warp of each block, then the second ones) send, then forward (with rails), then duplicate. The others only duplicate, so rows that
// arrive early are copied early; more senders would congest the links (`SendLoad` in src/tuning.rs, which sets their number).
// docs/glossary.md ("Running an operator", "Memory and transport") defines item, piece, first row, set, lane and plan. An
// epoch is the number of an operator; a flag holds it, so flags of earlier operators do not count.
//
//   send        Stores this rank's tokens and scales to their first row on each other rank, and to all their rows on this
//               rank; then, in plain mode, zeros to all cells of these rows; then the weights and, in plain mode, the map of
//               local experts. An item is one or two chunks of this rank's tokens (`span_of`), for one group of pieces.
//               Reads the tokens, the caller's scales, the dense probabilities (`dense`), and the lists `sends` and `copies` of
//               this rank's handle (lists.cuh). When an item's stores to other ranks are complete, sets its flag in every
//               peer's control block. With rails, a lane to another domain is one more destination, whose flags are
//               `out_flags` of this rank's window.
//   forward     With rails, on the rail peer of a token's rank. Reads the lanes from other domains and the lists of their
//               sets. Stores each token to its first row on each other rank of this domain, and to all its rows on this rank;
//               and, as send does, the scales, the weights and the map of local experts. Awaits the plan and the rows of each
//               set. Sets the flags of the rank whose tokens the set has, on the other ranks of this domain.
//   duplicate   Writes the padding rows, and the further rows of received tokens that have several experts here. Awaits a
//               peer's flag before it reads rows that the peer has sent. Reads the `recv` lists of the peers (their tokens'
//               rows on this rank) over the links. Writes to this rank only. In plain mode there is nothing to write, and it
//               only awaits the flags.
//
// Workers with the same amount of work take up to 1.6 times as long as others, depending on where their SM is. Therefore they
// claim items from shared counters: `items_taken`, `arrivals_taken` and, with RAILS, `set_taken`. The following are
// assigned by the workers' numbers: each worker's first item of send, of duplicate and of each foreign set, the padding
// rows and, in plain mode, the flags.
//
// A row at or beyond its destination's capacity has no place there: preprocess gives its list entries `NO_ROW`, and nothing is
// written for them.
//
// No deadlock: all blocks of all ranks run at the same time (docs/protocol.md, "All blocks run at once"). send awaits nothing after the
// handshakes. forward awaits plans and rows, which block 0 and the send role of other domains write; proxies move them, whatever
// kernels do. duplicate awaits send and forward. Last, with rails, one warp awaits what the lanes still receive
// (docs/cuda-rails.md).
//
// A rank writes to a peer's outputs only between the peer's handshake and the last flag that it sets on the peer. It reads the
// peer's lists from the handshake until the end of its own kernel, which may end later than the peer's kernel. So the host does
// not reuse the memory of lists before a later operator shows that all kernels have ended (`Part::lent` in src/arena.rs). No
// peer reads this rank's input, so the program may overwrite it in stream order. duplicate awaits the flags of all items of all
// peers, so the output is complete when a kernel without a fault ends.
//
// A wait that fails reports the fault and ends the worker's role. Later waits of all workers end at the abort word. Once begun,
// send does not look at the abort word: it completes its items, including the stores to a rank that has died. After a
// fault the output is undefined, and slow peers may still write to its memory, even after the program has freed it. So
// the buffer hands out no more memory once its host has noticed the fault (docs/semantics.md). docs/protocol.md lists
// the words that ranks share, and says what a fault leaves unprotected until then.
//
// Variants, chosen by `KernelKey::program` (src/device.rs): RAILS (0: one NVLink domain; 1: several, docs/cuda-rails.md),
// PAYLOAD_VARIANT (payload_copy.cuh, payload_quantize.cuh), COPY_VARIANT (copy_bulk.cuh, copy_plain.cuh), E4M3_VARIANT
// (e4m3_cvt.cuh, e4m3_soft.cuh; included by payload_quantize.cuh only) and WARPS. docs/adding-a-kernel.md lists what a new
// variant changes.
#include "duplicate.cuh"
#include "forward.cuh"
#include "send.cuh"

// What this rank sends to another domain: rows, their scales, and the weights of their copies.
__device__ inline PlanHead rows_plan(const DispatchParams& p, u32 domain) {
    const HandleView& h = p.handle;
    const RailBegin begin = rail_begin(h, domain);
    PlanHead head;
    u64 end = 0;
    head.rows = begin.rows[h.chunks];
    head.copies = begin.copies[h.chunks];
    head.sections[SECTION_ROWS] = place_section(end, head.rows, p.row_bytes_out, RAIL_PER_ROW);
    head.sections[SECTION_SCALES] = place_section(end, head.rows, p.scale_row_bytes, RAIL_PER_ROW);
    head.sections[SECTION_WEIGHTS] = place_section(end, head.copies, p.probs == PROBS_SKIP ? 0 : sizeof(float), RAIL_PER_COPY);
    head.units = div_up(h.chunks, span_of(h.chunks));
    head.flags_per_unit = 1u << p.common.handshake.share_bits;
    return head;
}

// Announces what this rank sends along its rails. Called by all threads of one block.
__device__ inline void announce_rows(const DispatchParams& p, u32 epoch) {
    const HandleView& h = p.handle;
    const u32 span = span_of(h.chunks);
    for_each_other_domain(p.common, [&](u32 domain) {
        const RailBegin begin = rail_begin(h, domain);
        publish_plan(p.common, epoch, domain, rows_plan(p, domain), [&](u32 unit) {
            const u32 end = min(h.chunks, (unit + 1) * span);
            return make_uint2(begin.rows[end], begin.copies[end]);
        });
    });
}

// Views of the lanes: `peers[ranks + domain]` is the lane to `domain`. The send role stores a token to a lane as it does to a
// rank. Called by all threads.
__device__ inline void view_lanes(const DispatchParams& p, PeerView* peers, u32 epoch) {
    const Common& c = p.common;
    for (u32 domain = threadIdx.x; domain < c.rails.domains; domain += blockDim.x) {
        if (domain == c.rails.domain) continue;
        const PlanHead head = rows_plan(p, domain);
        u8* lane = out_lane(c, epoch, domain);
        PeerView view{};
        view.tokens = lane + head.sections[0].offset;
        view.scales = lane + head.sections[1].offset;
        view.probs = reinterpret_cast<float*>(lane + head.sections[2].offset);
        view.flags = rail_end(c, epoch, domain)->out_flags;
        peers[c.ranks + domain] = view;
    }
    __syncthreads();
}

// Sends the handshake and, with rails, the plans. Called by all threads of one block.
__device__ inline void enter(const DispatchParams& p, u32 epoch) {
    send_handshake(p.common, epoch);
    // Lists of a preprocess that has failed are unfinished. Rail peers then wait for the plan until they have the abort word.
    if (RAILS && !has_given_up(p.common)) announce_rows(p, epoch);
}

// `WARPS` is the largest number of warps of a block. A launch has fewer warps if the rings of that many warps do not
// fit.
extern "C" __global__ void __launch_bounds__(WARPS* WARP, 1) dispatch(const __grid_constant__ DispatchParams p) {
    extern __shared__ __align__(128) u8 memory[];
    __shared__ u64 barriers[MOST_STAGES];
    const Common& c = p.common;
    const u32 epoch = c.own->epoch + 1;
    auto* peers = reinterpret_cast<PeerView*>(memory);
    u8* stages = memory + peers_bytes(c.ranks + rail_domains(c));

    if (blockIdx.x == 0) enter(p, epoch);
    // Work that needs no peer, while the handshakes are in flight.
    const u32 warp = warp_id(), warps = blockDim.x / WARP;
    u8* own_memory = stages + warp * dispatch_worker_bytes(p.stages, p.stage_bytes, QUANTIZES);
    Ring ring(own_memory, barriers + warp * p.stages, p.stages, p.stage_bytes);
    ring.init();
    // The first warps of every block before the second ones, so that all SMs send.
    const u32 worker = warp * gridDim.x + blockIdx.x, workers = warps * gridDim.x;
    const bool sends = worker < p.senders;
    // Lists of a preprocess that has failed are unfinished; this rank's abort word then says so.
    const bool reads = sends && __shfl_sync(ALL_LANES, ld_relaxed_sys(&c.own->abort), 0) == 0;
    const Worker sending{reads ? worker : NONE, p.senders};
    Sender sender(p, sending, ring, peers, epoch);

    if (RAILS ? await_domain(c, p.handle, epoch, peers, 0, 0) : await_all_handshakes(c, epoch, peers)) {
        if (RAILS) view_lanes(p, peers, epoch);
        // The handshakes of the peers make their outputs accessible to this thread. The fence does so for the bulk copy engine.
        copy_fence_global();
        PayloadBuffers buffers(own_memory + p.stages * p.stage_bytes);
        sender.send(buffers);
        if (RAILS && sends) forward(p, sending, ring, peers, epoch);
        // In the duplicate role, workers that do not send have the lowest numbers. So the first items are theirs: they begin while
        // the others still send.
        const u32 turn = sends ? worker + workers - p.senders : worker - p.senders;
        duplicate(p, {turn, workers}, ring, peers, epoch);
        if (RAILS && blockIdx.x == 0 && warp == 0) await_all_rails(c, epoch);
    } else {
        ring.drain();
    }
    leave(c, epoch);
}
