// Role: on the rank that holds the experts. Adds the rows of each token of a peer and sends the partial sum to it. One
// row of the wire's type is sent as it is.
#pragma once
#include "arrivals.cuh"
#include "sum.cuh"

// The weights of a chunk's copies on this rank, back to their token's rank.
__device__ inline void push_probs(const CombineParams& p, const Adder& worker, const PeerView& peer, u32 chunk) {
    const u32 begin = ld_relaxed_sys(peer.dst_begin + chunk), end = ld_relaxed_sys(peer.dst_begin + chunk + 1);
    for (u32 at = begin + worker.thread; at < end; at += Adder::THREADS) {
        const uint2 copy = ld_relaxed_sys_v2(peer.dst_copies + at);
        if (copy.x != NONE) peer.probs[copy.y] = p.row_probs[copy.x];
    }
}

__device__ inline void push(const CombineParams& p, const Adder& worker, Ring<Adder>& ring, const PeerView* peers,
                            u32 epoch) {
    const Common& c = p.common;
    if (c.ranks == 1) return;
    const ArrivalItems items(c, peers, p.groups, p.pieces);
    Feed<ArrivalItems> feed(items, worker.index, worker.workers);
    Completion<Adder> completion;
    const auto tell = [&](u32 flag, u32 source) {
        if (worker.first()) st_release_sys(&peers[source].flags[flag], epoch);
    };
    Batch batch = feed.fetch();
    Batch next = feed.fetch();
    u32 ahead = 0;
    const auto read_ahead = [&] {
        while (ahead < batch.count + next.count && ring.room()) {
            const bool here = ahead < batch.count;
            const u32 row = (here ? batch.at(ahead) : next.at(ahead - batch.count)).x;
            ahead++;
            if (row == NONE) continue;
            const Piece piece(p, here ? batch.piece : next.piece);
            ring.load(worker, row_at(p, row) + piece.offset(ROWS_F32), piece.bytes(ROWS_F32));
        }
    };
    Sum sum;
    while (batch.valid()) {
        const PeerView& peer = peers[items.source(batch.item)];
        const Piece piece(p, batch.piece);
        for (u32 index = 0; index < batch.count; index++) {
            read_ahead();
            const uint2 entry = batch.at(index);
            if (entry.x == NONE) continue;
            u8* stage = ring.take(worker);
            const bool first = (entry.y & RECV_FIRST) != 0, end = (entry.y & RECV_END) != 0;
            if (!(first && end && ROWS_F32 == WIRE_F32)) {
                if (first) sum.clear();
                sum.add<ROWS_F32>(stage, piece.vectors(), worker.thread);
                worker.sync();
                if (!end) {
                    ring.template free<0>(worker, ring.taken);
                    continue;
                }
                sum.store<WIRE_F32>(stage, piece.elements, worker.thread);
                copy_fence();
                worker.sync();
            }
            u8* slot = peer.tokens + (entry.y >> 2) * slot_bytes(p);
            ring.store(worker, slot + piece.offset(WIRE_F32), stage, piece.bytes(WIRE_F32));
            ring.commit(worker);
            completion.committed(worker, tell);
            ring.template free<1>(worker, ring.taken - 1);
        }
        if (batch.last) {
            if (p.row_probs != nullptr && items.first_piece(batch.item) == 0)
                push_probs(p, worker, peer, items.chunk(batch.item));
            completion.finish(worker, items.flag(batch.item), items.source(batch.item), tell);
        }
        ahead -= batch.count;
        batch = next;
        next = feed.fetch();
    }
    completion.flush(worker, tell);
    ring.drain(worker);
    if (worker.first()) copy_done<0>();
}
