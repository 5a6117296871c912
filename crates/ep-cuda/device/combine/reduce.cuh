// Role: on the rank whose tokens they are. Adds the partial sums of all ranks in order, its own from the experts' rows
// without rounding in between, and writes the result.
#pragma once
#include "push.cuh"

struct TokenItems {
    const CombineParams& p;
    u32 count;
    u32 groups;
    u32 pieces;

    __device__ explicit TokenItems(const CombineParams& p)
        : p(p), count(p.handle.chunks * p.groups), groups(p.groups), pieces(p.pieces) {}
    __device__ bool skip(u32) const { return false; }
    __device__ u32 chunk(u32 item) const { return item / groups; }
    __device__ u32 first_piece(u32 item) const { return item % groups; }
    __device__ Range range(u32 item) const {
        const u32* begin = p.handle.send_begin + chunk(item);
        return {p.handle.sends, begin[0], begin[1]};
    }
};

// The chunk's row of a dense matrix: zero but for the copies that were kept.
__device__ inline void gather_probs(const CombineParams& p, const Adder& worker, u32 chunk) {
    const Common& c = p.common;
    const HandleView& h = p.handle;
    const u64 experts = c.experts;
    const u64 first = chunk * h.chunk_tokens * experts, last = chunk_end_token(h, chunk) * experts;
    for (u64 cell = first + worker.thread; cell < last; cell += Adder::THREADS) p.out_probs[cell] = 0.0f;
    worker.sync();
    const u32 own_experts = c.owner_begin[c.rank + 1] - c.owner_begin[c.rank];
    for (u32 at = h.copy_begin[chunk] + worker.thread; at < h.copy_begin[chunk + 1]; at += Adder::THREADS) {
        const uint4 copy = h.copies[at];
        if (copy.z == NONE) continue;
        const u64 own_cell = h.permuted ? copy.z : static_cast<u64>(copy.z) * own_experts + (copy.y & 0xFFFF);
        const u32* there = reinterpret_cast<const u32*>(p.prob_scratch + at);
        p.out_probs[copy.x] = copy.y >> 16 == c.rank ? p.row_probs[own_cell] : __uint_as_float(ld_relaxed_sys(there));
    }
}

// Until all peers have sent what they owe to the item; false when one does not.
__device__ inline bool await_item(const CombineParams& p, const Adder& worker, const TokenItems& items, u32 item,
                                  u32 epoch) {
    const Common& c = p.common;
    const u32 flag = items.chunk(item) * p.groups + items.first_piece(item);
    bool fine = true;
    for (u32 peer = worker.thread; fine && peer < c.ranks; peer += Adder::THREADS)
        if (peer != c.rank) fine = wait_for(c, &c.own->flags[peer][flag], epoch, peer, FOR_CHUNK, items.chunk(item));
    copy_fence();
    return worker.all(fine);
}

__device__ inline void reduce(const CombineParams& p, const Adder& worker, Ring<Adder>& ring, u32 epoch) {
    const Common& c = p.common;
    const TokenItems items(p);
    Feed<TokenItems> feed(items, worker.index, worker.workers);
    Batch batch = feed.fetch();
    Batch next = feed.fetch();
    u32 ahead = 0;
    u32 awaited = NONE;
    bool fine = true;
    const auto own = [&](const uint2& entry) { return (entry.x & SEND_RANK) == c.rank; };
    const auto read_ahead = [&] {
        while (fine && ahead < batch.count + next.count && ring.room()) {
            const bool here = ahead < batch.count;
            const Batch& of = here ? batch : next;
            if (awaited != of.item) {
                awaited = of.item;
                fine = await_item(p, worker, items, awaited, epoch);
                if (!fine) return;
            }
            const u32 index = here ? ahead : ahead - batch.count;
            const uint2 entry = of.at(index);
            ahead++;
            if ((entry.x & SEND_DEAD) != 0) continue;
            const Piece piece(p, of.piece);
            if (own(entry))
                ring.load(worker, row_at(p, entry.y) + piece.offset(ROWS_F32), piece.bytes(ROWS_F32));
            else
                ring.load(worker, p.partials + (of.first + index) * slot_bytes(p) + piece.offset(WIRE_F32),
                          piece.bytes(WIRE_F32));
        }
    };
    Sum sum, own_sum;
    sum.clear();
    own_sum.clear();
    u32 at_item = NONE, at_piece = NONE, token = 0;
    while (batch.valid()) {
        if (at_item != batch.item || at_piece != batch.piece) {
            at_item = batch.item;
            at_piece = batch.piece;
            token = items.chunk(batch.item) * p.handle.chunk_tokens;
        }
        const Piece piece(p, batch.piece);
        for (u32 index = 0; index < batch.count; index++) {
            read_ahead();
            if (!fine) break;
            const uint2 entry = batch.at(index);
            if ((entry.x & SEND_DEAD) == 0) {
                const u8* stage = ring.take(worker);
                const bool single = (entry.x & SEND_OWN_FIRST) != 0 && (entry.x & SEND_OWN_END) != 0;
                if (!own(entry)) {
                    sum.add<WIRE_F32>(stage, piece.vectors(), worker.thread);
                } else if (single) {
                    sum.add<ROWS_F32>(stage, piece.vectors(), worker.thread);
                } else {
                    if ((entry.x & SEND_OWN_FIRST) != 0) own_sum.clear();
                    own_sum.add<ROWS_F32>(stage, piece.vectors(), worker.thread);
                    if ((entry.x & SEND_OWN_END) != 0) sum.add(own_sum);
                }
                worker.sync();
                ring.freed = ring.taken;
            }
            if ((entry.x & SEND_TOKEN_END) != 0) {
                u8* out = p.out_tokens + static_cast<u64>(token) * p.hidden * element_bytes(ROWS_F32);
                sum.store<ROWS_F32>(out + piece.offset(ROWS_F32), piece.elements, worker.thread);
                sum.clear();
                token++;
            }
        }
        if (!fine) break;
        if (batch.last && p.out_probs != nullptr && items.first_piece(batch.item) == 0)
            gather_probs(p, worker, items.chunk(batch.item));
        ahead -= batch.count;
        batch = next;
        next = feed.fetch();
    }
    ring.drain(worker);
}
