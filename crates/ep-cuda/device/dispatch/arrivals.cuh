// The work items of the duplicate role: the chunks that ranks send to this rank.
#pragma once
#include "feed.cuh"
#include "rails.cuh"

// An item is `span` chunks of one source, for one group of pieces. Sources are those of `count_sources`.
// Items are numbered in the order in which they are expected to arrive.
template <bool own>
struct ArrivalItems {
    using Entry = Receive;
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
          sources(max(count_sources<own>(c), 1u)),
          workers(worker.workers),
          turn(sources.by + 1 - worker.workers / groups % sources.by),
          count(div_up(most_chunks(c, peers, own), span) * sources.by * groups) {}
    // Rotates the order of the sources from round to round, so that each worker serves all sources in turn. Without the
    // rotation, 96 workers and four sources would give each worker one source, and this rank's own chunks are more work
    // than the chunks of peers.
    __device__ u32 source(u32 item) const {
        const u32 round = workers.divide(place(item) * sources.by * groups.by);
        return source_at<own>(c, sources.rest(groups.divide(item) + round * turn));
    }
    // The index among the items of the source.
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
    __device__ const Receive* list(u32 item) const { return peers[source(item)].recv; }
};
