// What tokens of all ranks mean for this rank, as work items: each rank's chunks, by pieces of a row.
#pragma once
#include "feed.cuh"

// All chunks of all peers for this rank, and with `own` of itself, `span` of them as one item; neighbours in time are
// neighbours in number.
template <bool own>
struct ArrivalItems {
    const Common& c;
    const PeerView* peers;
    u32 span;
    u32 pieces;
    Divider groups;
    Divider sources;
    Divider workers;
    u32 turn;
    u32 count;

    __device__ ArrivalItems(const Common& c, const PeerView* peers, const Worker& worker, u32 span, u32 groups, u32 pieces)
        : c(c),
          peers(peers),
          span(span),
          pieces(pieces),
          groups(groups),
          sources(max(own ? c.ranks : c.ranks - 1, 1u)),
          workers(worker.workers),
          turn(sources.by + 1 - worker.workers / groups % sources.by),
          count(div_up(most_chunks(c, peers, own), span) * sources.by * groups) {}
    // Each worker has the sources by turns, from round to round: where there are, say, four sources and 96 workers, each
    // would have one source only otherwise, and the own rank's chunks are more work than others. The order of the sources
    // is turned by what the number of workers lacks to that.
    __device__ u32 source(u32 item) const {
        const u32 round = workers.divide(place(item) * sources.by * groups.by);
        return in_circle(c, c.rank + (own ? 0 : 1) + sources.rest(groups.divide(item) + round * turn));
    }
    // Its place among the items of its source, and its first chunk.
    __device__ u32 place(u32 item) const { return sources.divide(groups.divide(item)); }
    __device__ u32 chunk(u32 item) const { return place(item) * span; }
    __device__ u32 first_piece(u32 item) const { return groups.rest(item); }
    __device__ u32 flag(u32 item) const { return place(item) * groups.by + first_piece(item); }
    __device__ bool skip(u32 item) const { return chunk(item) >= peers[source(item)].chunks; }
    __device__ Range range(u32 item) const {
        const PeerView& peer = peers[source(item)];
        const u32 first = chunk(item), end = min(peer.chunks, first + span);
        return {ld_relaxed_sys(peer.recv_begin + first), ld_relaxed_sys(peer.recv_begin + end)};
    }
    __device__ const uint2* list(u32 item) const { return peers[source(item)].recv; }
};
