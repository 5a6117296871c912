// Role forward, with rails only: reads the tokens of foreign sets from the lanes, and stores each to its first row on
// each other rank of this domain, and to all its rows on this rank. As send, it stores the weights and the map of local
// experts, and sets flags on the peers.
#pragma once
#include "send.cuh"

// The work items of one set: `span` chunks, for one group of pieces. Numbered as those of the send role, so that
// receivers find the flags of a set as they find those of a rank.
struct SetItems {
    using Entry = Send;
    const Send* sends;
    const u32* send_begin;
    u32 chunks;
    u32 span;
    u32 count;
    u32 pieces;
    Divider groups;

    __device__ SetItems(const DispatchParams& p, const HandleView& set)
        : sends(set.sends),
          send_begin(set.send_begin),
          chunks(set.chunks),
          span(span_of(chunks)),
          count(div_up(chunks, span) * p.groups),
          pieces(p.pieces),
          groups(p.groups) {}
    __device__ bool skip(u32) const { return false; }
    __device__ u32 chunk(u32 item) const { return groups.divide(item) * span; }
    __device__ u32 chunk_end(u32 item) const { return min(chunks, chunk(item) + span); }
    __device__ u32 first_piece(u32 item) const { return groups.rest(item); }
    __device__ Range range(u32 item) const { return {send_begin[chunk(item)], send_begin[chunk_end(item)]}; }
    __device__ const Send* list(u32) const { return sends; }
};

// Stores the weights of an item's copies.
__device__ inline void forward_weights(const DispatchParams& p, const PeerView* peers, const HandleView& set,
                                       const SetItems& items, u32 item, const float* weights) {
    if (items.first_piece(item) != 0 || p.probs == PROBS_SKIP && p.handle.permuted) return;
    if (!p.handle.permuted) {
        const Range sends = items.range(item);
        clear_cells(p, peers, set.sends, sends.begin, sends.end);
    }
    const u32 end = set.copy_begin[items.chunk_end(item)];
    for (u32 at = set.copy_begin[items.chunk(item)] + lane_id(); at < end; at += WARP) {
        const bool weighted = p.probs != PROBS_SKIP;
        // A plain load: those of a warp are one request.
        store_weight(p, peers, set.copies[at], weighted ? weights[at] : 0.0f);
    }
}

// Forwards the set of `domain`. Returns false, after the fault was reported, if its rows do not come.
__device__ inline bool forward_set(const DispatchParams& p, const Worker& worker, Ring& ring, const PeerView* peers,
                                   u32 domain, u32 epoch) {
    // Tokens whose stores may still be reading their stage when the next token is taken.
    constexpr u32 PENDING = 2;
    const Common& c = p.common;
    if (!ask_once([&] { return await_plan(c, epoch, domain); })) return false;
    const HandleView set = set_of(c, p.handle, domain);
    const SetItems items(p, set);
    const u8* const lane = in_lane(c, epoch, domain);
    const auto section = [&](u32 at) { return lane + ask_once([&] { return section_offset(c, epoch, domain, at); }); };
    const u8 *const rows = section(0), *const row_scales = section(1);
    const auto* const weights = reinterpret_cast<const float*>(section(2));
    const u32 out_piece = p.piece_bytes / (p.row_bytes_in / p.row_bytes_out);
    const u32 first_alias = domain * domain_size(c);
    const auto tell = [&](u32 flag) {
        for (u32 local = lane_id(); local < domain_size(c); local += WARP)
            if (domain_begin(c) + local != c.rank) st_release_sys(&peers[first_alias + local].flags[flag], epoch);
    };
    Feed<SetItems> feed(items, &c.own->set_taken[domain], worker);
    Completion completion;
    ItemBatch<Send> next = feed.fetch();
    u32 item = NONE, piece = NONE;
    u32 row = 0;  // the next token's
    bool begins = true, fine = true;
    u8* stage = nullptr;
    ScaleRow scales;
    while (next.valid()) {
        const ItemBatch<Send> batch = next;
        next = feed.fetch();
        if (batch.item != item) {
            const u32 last = items.chunk_end(batch.item) - 1;
            fine = ask_once([&] { return await_rows(c, epoch, domain, last); });
            if (!fine) break;
            copy_fence_global();
            __syncwarp();
        }
        if (batch.item != item || batch.piece != piece) row = items.chunk(batch.item) * set.chunk_tokens;
        item = batch.item;
        piece = batch.piece;
        const u32 offset = piece * out_piece;
        const u32 bytes = min(out_piece, p.row_bytes_out - offset);
        const ScalePart part = scales_of(p, piece);
        const u32 ends = __ballot_sync(ALL_LANES, lane_id() < batch.count && batch.entry.ends_token());
        const u32 valid = batch.count == WARP ? ALL_LANES : (1u << batch.count) - 1;
        u32 loads = __popc((ends << 1 | (begins ? 1 : 0)) & valid), load_row = row;
        const auto read_ahead = [&] {
            while (loads != 0 && ring.room()) {
                ring.load(rows + static_cast<u64>(load_row) * p.row_bytes_out + offset, bytes);
                load_row++;
                loads--;
            }
        };
        read_ahead();
        for (TokenParts parts(c, batch); parts.any();) {
            if (begins) {
                stage = ring.take();
                scales.load(row_scales + static_cast<u64>(row) * p.scale_row_bytes + part.offset, part.bytes);
                row++;
            }
            const TokenPart token = parts.next();
            begins = token.ends;
            store_part(token, [&](u32 at) {
                const Send entry = batch.at(at);
                const PeerView& peer = peers[entry.rank()];
                store_stage(peer.tokens + static_cast<u64>(entry.row()) * p.row_bytes_out + offset, stage, bytes);
                scales.store(peer.scales + static_cast<u64>(entry.row()) * p.scale_row_bytes + part.offset);
            });
            if (!token.ends) continue;
            completion.committed(tell);
            ring.free<GROUPS_PER_TOKEN * PENDING>(ring.taken < PENDING ? 0 : ring.taken - PENDING);
            read_ahead();
            feed.prepare();
        }
        if (batch.last) {
            forward_weights(p, peers, set, items, item, weights);
            completion.finish(item, tell);
        }
    }
    completion.flush(tell);
    ring.drain();
    if (lane_id() == 0) copy_done<0>();
    return fine;
}

__device__ inline void forward(const DispatchParams& p, const Worker& worker, Ring& ring, const PeerView* peers, u32 epoch) {
    bool fine = true;
    for_each_other_domain(p.common, [&](u32 domain) { fine = fine && forward_set(p, worker, ring, peers, domain, epoch); });
}
