// dispatch: sends tokens to the ranks of their experts. One launch: block 0 sends the handshake, every block awaits the
// handshakes of all ranks of the domain, then every warp is a worker in one of two roles, send and duplicate; with rails,
// the workers of send become those of forward.
//
//   send        The first blocks. Store this rank's tokens and scales to their first row on each other rank; in the
//               quantising variant (SEND_OWN) to their rows on this rank, too. Store the weights and, in plain mode, the
//               map of local experts to all ranks. An item is `SPAN` chunks of this rank's tokens, for one group of
//               pieces of the rows. Read the tokens, the caller's scales, the dense probabilities (`dense`), and the
//               lists `sends` and `copies` of this rank's handle (lists.cuh). When an item is complete, set its flag in
//               every peer's control block. With rails, a lane to another domain is one more destination.
//   duplicate   The other blocks. Write the padding rows, the further rows of tokens that have several experts on this
//               rank and, unless SEND_OWN, the rows of this rank's own tokens. Await a peer's flag before they read
//               rows that the peer has sent. Read the `recv` lists of the peers (their tokens' rows on this rank)
//               over the links. Write to this rank only.
//   forward     With rails: the blocks of send, when they have sent. Read the lanes from other domains and the lists of
//               their sets. Store each token to its first row on each other rank of this domain, and to all its rows
//               on this rank; and, as send does, the scales, the weights and the map of local experts. Await the plan
//               and the rows of each set. Set flags as send does.
//
// This rank writes to a peer's outputs only between that peer's handshake and the last flag that this rank sets on that
// peer. It may set flags there and read its lists from the handshake on, until its own kernel ends. No peer reads this
// rank's input, so the program may overwrite it in stream order. duplicate awaits the flags of all items of all peers, so
// the output is complete when a kernel without a fault ends.
// An await that fails reports the fault, and its worker ends; other workers that wait end at the abort word. send
// awaits no flag and does not read the abort word: it completes its items, also towards a rank that has died. After a
// fault the output is undefined, and slow peers may still write to it, so the buffer allocates no more memory
// (docs/semantics.md). docs/protocol.md lists the words that ranks share.
// Variants, chosen by `KernelKey::program` (src/device.rs): RAILS (0: one NVLink domain; 1: several, docs/cuda-rails.md),
// PAYLOAD_VARIANT (payload_copy.cuh, payload_quantize.cuh), COPY_VARIANT (copy_bulk.cuh, copy_plain.cuh), E4M3_VARIANT
// (e4m3_cvt.cuh, e4m3_soft.cuh; included by payload_quantize.cuh only) and WARPS. docs/adding-a-kernel.md lists what a new
// variant changes.
#include "duplicate.cuh"
#include "forward.cuh"
#include "send.cuh"
#include "split.cuh"

// What this rank sends to another domain: rows, their scales, and the weights of their copies.
__device__ inline PlanHead rows_plan(const DispatchParams& p, u32 domain) {
    const HandleView& h = p.handle;
    const RailBegin begin = rail_begin(h, domain);
    PlanHead head;
    u64 end = 0;
    head.rows = begin.rows[h.chunks];
    head.copies = begin.copies[h.chunks];
    head.sections[0] = place_section(end, head.rows, p.row_bytes_out, RAIL_PER_ROW);
    head.sections[1] = place_section(end, head.rows, p.scale_row_bytes, RAIL_PER_ROW);
    head.sections[2] = place_section(end, head.copies, p.probs == PROBS_SKIP ? 0 : sizeof(float), RAIL_PER_COPY);
    head.units = div_up(h.chunks, SPAN);
    head.flags_per_unit = p.groups;
    return head;
}

// Announces what this rank sends along its rails. Called by all threads of one block.
__device__ inline void announce_rows(const DispatchParams& p, u32 epoch) {
    const HandleView& h = p.handle;
    for_each_other_domain(p.common, [&](u32 domain) {
        const RailBegin begin = rail_begin(h, domain);
        publish_plan(p.common, epoch, domain, rows_plan(p, domain), [&](u32 unit) {
            const u32 end = min(h.chunks, (unit + 1) * SPAN);
            return make_uint2(begin.rows[end], begin.copies[end]);
        });
    });
}

// Views of the lanes: `peers[ranks + domain]` is the lane to `domain`. The send role stores a token to a lane as it does to a rank. Called by
// all threads.
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

// Sends the handshake, which carries the addresses of the outputs. Called by all threads of one block.
__device__ inline void enter(const DispatchParams& p, u32 epoch) {
    Handshake handshake = handshake_of(p.common, p.handle);
    handshake.tokens = reinterpret_cast<u64>(p.out_tokens);
    handshake.scales = reinterpret_cast<u64>(p.out_scales);
    handshake.probs = reinterpret_cast<u64>(p.out_probs);
    handshake.local_experts = reinterpret_cast<u64>(p.out_local_experts);
    send_handshake(p.common, handshake, epoch);
    // Lists of a preprocess that has failed are unfinished. Rail peers then wait for the plan until they have the abort word.
    if (RAILS && !has_given_up(p.common)) announce_rows(p, epoch);
}

// `WARPS` is the largest number of warps of a block. A launch has fewer if the rings of that many do not fit.
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
    const u32 sending = sending_blocks(p, warps);
    const bool sends = blockIdx.x < sending;
    const u32 role_block = sends ? blockIdx.x : blockIdx.x - sending;
    const u32 role_blocks = sends ? sending : gridDim.x - sending;
    const Worker worker{warp * role_blocks + role_block, warps * role_blocks};
    u8* own_memory = stages + warp * dispatch_worker_bytes(p.stages, p.stage_bytes, QUANTIZES);
    Ring ring(own_memory, barriers + warp * p.stages, p.stages, p.stage_bytes);
    ring.init();

    if (RAILS ? await_domain(c, p.handle, epoch, peers, 0, 0) : await_all_handshakes(c, epoch, peers)) {
        if (RAILS) view_lanes(p, peers, epoch);
        copy_fence_global();
        if (sends) {
            PayloadBuffers buffers(own_memory + p.stages * p.stage_bytes);
            send(p, worker, ring, buffers, peers, epoch);
            if (RAILS) forward(p, worker, ring, peers, epoch);
        } else {
            duplicate(p, worker, ring, peers, epoch);
        }
        if (RAILS && blockIdx.x == 0 && warp == 0) await_all_rails(c, epoch);
    }
    leave(c, epoch);
}
