// dispatch: sends tokens to the ranks of their experts, inside one NVLink domain. One launch: block 0 sends the
// handshake, every block awaits the handshakes of all ranks, then every warp is a worker in one of two roles.
//
//   send        The first blocks. Store this rank's tokens and scales to their first row on each other rank; in the
//               quantising variant (SEND_OWN) to their rows on this rank, too. Store the weights to all ranks. An item
//               is `SPAN` chunks of this rank's tokens, for one group of pieces of the rows. Read the tokens, the
//               caller's scales, the dense probabilities (`dense`), and the lists `sends`, `copies` and `*_begin` of
//               this rank's handle (lists.cuh). When an item is complete, set its flag in every peer's control block.
//   duplicate   The other blocks. Write the padding rows, the further rows of tokens that have several experts on this
//               rank and, unless SEND_OWN, the rows of this rank's own tokens. Await a peer's flag before they read
//               rows that the peer has sent. Read the `recv` lists of the peers (their tokens' rows on this rank)
//               over the links. Write to this rank only.
//
// This rank writes to a peer's outputs only between that peer's handshake and the last flag that this rank sets on that
// peer. To set flags there, and to read its lists, it needs only the handshake. No peer reads this rank's input, so the
// program may overwrite it in stream order. duplicate awaits the flags of all items of all peers, so the output is
// complete when a kernel without a fault ends.
// An await that fails reports the fault, and its worker ends; other workers that wait end at the abort word. send
// awaits no flag and does not read the abort word: it completes its items, also towards a rank that has died. Then the
// output is undefined. docs/protocol.md lists the words that ranks share.
// Variants, chosen by `KernelKey::program` (src/device.rs): PAYLOAD_VARIANT (payload_copy.cuh, payload_quantize.cuh),
// COPY_VARIANT (copy_bulk.cuh, copy_plain.cuh), E4M3_VARIANT (e4m3_cvt.cuh, e4m3_soft.cuh; included by
// payload_quantize.cuh only) and WARPS.
// Not implemented: more than one NVLink domain.
#include "duplicate.cuh"
#include "send.cuh"
#include "split.cuh"

// Sends the handshake, which carries the addresses of the outputs. Called by all threads of one block.
__device__ inline void enter(const DispatchParams& p, u32 epoch) {
    Handshake handshake = handshake_of(p.common, p.handle);
    handshake.tokens = reinterpret_cast<u64>(p.out_tokens);
    handshake.scales = reinterpret_cast<u64>(p.out_scales);
    handshake.probs = reinterpret_cast<u64>(p.out_probs);
    handshake.local_experts = reinterpret_cast<u64>(p.out_local_experts);
    send_handshake(p.common, handshake, epoch);
}

// `WARPS` is the largest number of warps of a block. A launch has fewer if the rings of that many do not fit.
extern "C" __global__ void __launch_bounds__(WARPS* WARP, 1) dispatch(const __grid_constant__ DispatchParams p) {
    extern __shared__ __align__(128) u8 memory[];
    __shared__ u64 barriers[MOST_STAGES];
    const Common& c = p.common;
    const u32 epoch = c.own->epoch + 1;
    auto* peers = reinterpret_cast<PeerView*>(memory);
    u8* stages = memory + peers_bytes(c.ranks);

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

    if (await_all_handshakes(c, epoch, peers)) {
        copy_fence_global();
        if (sends) {
            PayloadBuffers buffers(own_memory + p.stages * p.stage_bytes);
            send(p, worker, ring, buffers, peers, epoch);
        } else {
            duplicate(p, worker, ring, peers, epoch);
        }
    }
    leave(c, epoch);
}
