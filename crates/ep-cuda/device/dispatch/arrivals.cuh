// The work items of the duplicate role: the chunks that ranks send to this rank.
#pragma once
#include "feed.cuh"
#include "rails.cuh"

// An item is `span_of` chunks of one source, for one group of pieces. Sources differ in the number of groups. Items are numbered
// in the order in which they are expected to arrive.
struct ArrivalItems : SourceItems {
    using Entry = Receive;
    const DispatchParams& p;

    __device__ ArrivalItems(const DispatchParams& p, const PeerView* peers)
        : SourceItems(p.common, peers, [](u32 chunks) { return div_up(chunks, span_of(chunks)); }), p(p) {}
    __device__ u32 span(u32 item) const { return span_of(peer(item).chunks); }
    __device__ u32 chunk(u32 item) const { return unit(item) * span(item); }
    // As in `SendItems`.
    __device__ u32 first_piece(u32 item) const { return part(item); }
    __device__ u32 groups_of(u32 item) const { return parts_of(item); }
    __device__ u32 pieces_of(u32 item) const { return p.long_rows ? p.pieces : groups_of(item); }
    // Bytes of a piece of an output row, which is shorter than the input row if dispatch quantises.
    __device__ u32 piece_bytes(u32 item) const {
        return p.long_rows ? p.piece_bytes / (p.row_bytes_in / p.row_bytes_out) : share_bytes(p.row_bytes_out, groups_of(item));
    }
    __device__ bool skip(u32 item) const { return chunk(item) >= peer(item).chunks; }
    __device__ Range range(u32 item) const {
        const PeerView& of = peer(item);
        const u32 first = chunk(item), end = min(of.chunks, first + span(item));
        return {ld_relaxed_sys(of.recv_begin + first), ld_relaxed_sys(of.recv_begin + end)};
    }
    __device__ const Receive* list(u32 item) const { return peer(item).recv; }
};

// Waits until the rows of an item have arrived. Returns false, after the fault was reported, if they do not arrive.
__device__ inline bool await_arrival(const Common& c, const ArrivalItems& items, u32 item, u32 epoch) {
    const u32 source = items.source(item);
    const bool foreign = RAILS && domain_of(c, source) != c.rails.domain;
    return wait_for(c, &c.own->flags[source][items.place(item)], epoch, foreign ? forwarder_of(c, source) : source,
                    foreign ? FOR_FOREIGN : FOR_CHUNK, items.chunk(item));
}
