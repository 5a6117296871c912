// The work items of the duplicate role: the chunks that ranks send to this rank.
#pragma once
#include "feed.cuh"
#include "rails.cuh"

// An item is `span_of` chunks of one source, for one group of pieces. Sources are those of `count_sources`, and differ in the number
// of groups. Items are numbered in the order in which they are expected to arrive.
struct ArrivalItems {
    using Entry = Receive;
    const DispatchParams& p;
    const Common& c;
    const PeerView* peers;
    Divider sources;
    u32 count;

    __device__ ArrivalItems(const DispatchParams& p, const PeerView* peers)
        : p(p),
          c(p.common),
          peers(peers),
          sources(max(count_sources(c), 1u)),
          count(most_of_sources(c, peers, [](const PeerView& peer) {
                    return div_up(peer.chunks, span_of(peer.chunks)) << peer.share_bits;
                }) * sources.by) {}
    __device__ u32 source(u32 item) const { return source_at(c, sources.rest(item)); }
    __device__ const PeerView& peer(u32 item) const { return peers[source(item)]; }
    // The index among the items of the source, which is also that of the item's flag.
    __device__ u32 place(u32 item) const { return sources.divide(item); }
    __device__ u32 span(u32 item) const { return span_of(peer(item).chunks); }
    __device__ u32 chunk(u32 item) const { return (place(item) >> peer(item).share_bits) * span(item); }
    // As in `SendItems`.
    __device__ u32 first_piece(u32 item) const { return place(item) & (groups_of(item) - 1); }
    __device__ u32 groups_of(u32 item) const { return 1u << peer(item).share_bits; }
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
