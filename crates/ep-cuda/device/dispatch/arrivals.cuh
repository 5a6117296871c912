// The work items of the duplicate role: the chunks that ranks send to this rank.
#pragma once
#include "feed.cuh"
#include "rails.cuh"

// An item is `span_of` chunks of one source, for one group of pieces. Sources are those of `count_sources`.
// Items are numbered in the order in which they are expected to arrive.
struct ArrivalItems {
    using Entry = Receive;
    const Common& c;
    const PeerView* peers;
    u32 pieces;
    Divider groups;
    Divider sources;
    u32 count;

    __device__ ArrivalItems(const Common& c, const PeerView* peers, u32 groups, u32 pieces)
        : c(c),
          peers(peers),
          pieces(pieces),
          groups(groups),
          sources(max(count_sources(c), 1u)),
          count(most_of_sources(c, peers, [](u32 chunks) { return div_up(chunks, span_of(chunks)); }) * sources.by *
                groups) {}
    __device__ u32 source(u32 item) const { return source_at(c, sources.rest(groups.divide(item))); }
    // The index among the items of the source for the same group of pieces.
    __device__ u32 place(u32 item) const { return sources.divide(groups.divide(item)); }
    __device__ u32 span(u32 item) const { return span_of(peers[source(item)].chunks); }
    __device__ u32 chunk(u32 item) const { return place(item) * span(item); }
    __device__ u32 first_piece(u32 item) const { return groups.rest(item); }
    __device__ u32 flag(u32 item) const { return place(item) * groups.by + first_piece(item); }
    __device__ bool skip(u32 item) const { return chunk(item) >= peers[source(item)].chunks; }
    __device__ Range range(u32 item) const {
        const PeerView& peer = peers[source(item)];
        const u32 first = chunk(item), end = min(peer.chunks, first + span(item));
        return {ld_relaxed_sys(peer.recv_begin + first), ld_relaxed_sys(peer.recv_begin + end)};
    }
    __device__ const Receive* list(u32 item) const { return peers[source(item)].recv; }
};

// Waits until the rows of an item have arrived. Returns false, after the fault was reported, if they do not arrive.
__device__ inline bool await_arrival(const Common& c, const ArrivalItems& items, u32 item, u32 epoch) {
    const u32 source = items.source(item);
    const bool foreign = RAILS && domain_of(c, source) != c.rails.domain;
    return wait_for(c, &c.own->flags[source][items.flag(item)], epoch, foreign ? forwarder_of(c, source) : source,
                    foreign ? FOR_FOREIGN : FOR_CHUNK, items.chunk(item));
}
