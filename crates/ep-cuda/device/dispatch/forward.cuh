// The forward role, with rails only: reads the tokens of foreign sets from the `in` lanes, and stores each to its first row
// on each other rank of this domain, and to all its rows on this rank. Like the send role, it stores the weights and
// the map of local experts, and sets flags on the peers.
//
// Senders have this role after the send role and before the duplicate role. Each is one warp, a worker, and takes items of all
// foreign sets, one domain after the other. It waits for the rail peer's plan, and for the rows of each item: both waits end by
// the proxy's word, by a gone word or at their bound, and then report the fault and return false. It writes only the rows that
// `set.copies` lists and the flags of the sets that this rank forwards. The duplicate role stores further rows on other ranks, and
// padding rows.
#pragma once
#include "send.cuh"

// Stores the weights of an item's copies, in plain mode also the map of local experts. Only the item of the first group of pieces has
// them. `weights`: those of the set in the lane, in the order of its copies.
__device__ inline void forward_weights(const DispatchParams& p, const PeerView* peers, const HandleView& set,
                                       const SendItems& items, u32 item, const float* weights) {
    if (items.first_piece(item) != 0 || p.probs == PROBS_SKIP && p.handle.permuted) return;
    // Another lane may have cleared the cell of a weight.
    if (!p.handle.permuted) __syncwarp();
    const u32 end = set.copy_begin[items.chunk_end(item)];
    for (u32 at = set.copy_begin[items.chunk(item)] + lane_id(); at < end; at += WARP) {
        const bool weighted = p.probs != PROBS_SKIP;
        // A plain load: the loads of a warp become one request, which acquire loads do not. Rows, scales and weights of an item arrive
        // together. The acquire of `rows_are_here` or `await_rows` orders the load, and `ask_once` passes that order on to all threads
        // of the warp.
        store_weight(p, peers, set.copies[at], weighted ? weights[at] : 0.0f);
    }
}

// Forwards items of the set of `domain` until none is left. Returns false, after the fault was reported, if its plan or its rows do
// not come; the flag of the item that it waited for is then never set. `peers`: the views of all ranks, by global rank.
__device__ inline bool forward_set(const DispatchParams& p, const Worker& worker, Ring& ring, const PeerView* peers,
                                   u32 domain, u32 epoch) {
    // Tokens whose stores may still be reading their stage when the next token is taken.
    constexpr u32 PENDING = 2;
    const Common& c = p.common;
    if (!ask_once([&] { return await_plan(c, epoch, domain); })) return false;
    const HandleView set = set_of(c, p.handle, domain);
    // The items of a set are numbered like those of a rank, so receivers find the flags of both in the same way.
    const SendItems items(p, set);
    const u8* const lane = in_lane(c, epoch, domain);
    const SeenPlan& plan = seen_plan(c, epoch, domain);
    const u8 *const rows = lane + plan.sections[SECTION_ROWS], *const row_scales = lane + plan.sections[SECTION_SCALES];
    const auto* const weights = reinterpret_cast<const float*>(lane + plan.sections[SECTION_WEIGHTS]);
    // A piece is measured in bytes of the input. The lane has rows of the output's format, which are shorter by a whole factor if
    // dispatch converts, else as long.
    const u32 out_piece = p.piece_bytes / (p.row_bytes_in / p.row_bytes_out);
    // The view of a rank of this domain has the memory of its rows. The view of rank `local` of the other domain has the flags, on
    // rank `local` of this domain, for the set that this rank forwards.
    const u32 first_source = domain * domain_size(c);
    // Sets an item's flag on all other ranks of the domain. `Completion` calls it when all stores of the item have completed.
    const auto tell = [&](u32 flag) {
        for (u32 local = lane_id(); local < domain_size(c); local += WARP)
            if (domain_begin(c) + local != c.rank) st_release_sys(&peers[first_source + local].flags[flag], epoch);
    };
    Feed<SendItems> feed(items, &c.own->set_taken[domain], worker);
    Completion completion;
    ItemBatch<Send> next = feed.fetch();
    u32 item = NONE, piece = NONE;
    u32 row = 0;  // the rail row of the next token
    bool begins = true, fine = true;
    u8* stage = nullptr;
    ScaleRow scales;
    while (next.valid()) {
        const ItemBatch<Send> batch = next;
        next = feed.fetch();
        if (batch.item != item) {
            const u32 last_chunk = items.chunk_end(batch.item) - 1;
            if (!ask_once([&] { return rows_are_here(c, epoch, domain, last_chunk); })) {
                // Set the flag of the previous item before this wait. Otherwise its receivers would wait for these rows, too.
                completion.flush(tell);
                fine = ask_once([&] { return await_rows(c, epoch, domain, last_chunk); });
            }
            if (!fine) break;
            // The acquire orders loads of threads. Bulk loads are those of the asynchronous proxy, so each thread also executes this
            // fence before the warp issues any.
            copy_fence_global();
            __syncwarp();
        }
        if (batch.item != item || batch.piece != piece) row = items.first_token(batch.item);
        item = batch.item;
        piece = batch.piece;
        const u32 offset = piece * out_piece;
        const u32 bytes = min(out_piece, p.row_bytes_out - offset);
        const ScalePart part = scales_of(p, piece);
        TokenParts parts(c, batch);
        // Tokens that begin in this batch: one after each end, and one at the start unless the previous batch ends within a token.
        u32 loads = __popc((parts.ends << 1 | (begins ? 1 : 0)) & parts.rest);
        u32 load_row = row;
        const auto read_ahead = [&] {
            while (loads != 0 && ring.room()) {
                ring.load(rows + static_cast<u64>(load_row) * p.row_bytes_out + offset, bytes);
                load_row++;
                loads--;
            }
        };
        read_ahead();
        while (parts.any()) {
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
                store_stage(peer.tokens + static_cast<u64>(entry.row()) * p.row_bytes_out + offset, shared_address(stage), bytes);
                scales.store(peer.scales + static_cast<u64>(entry.row()) * p.scale_row_bytes + part.offset);
            });
            if (!token.ends) continue;
            completion.committed(tell);
            ring.free<GROUPS_PER_TOKEN * PENDING>(ring.taken < PENDING ? 0 : ring.taken - PENDING);
            read_ahead();
            feed.prepare();
        }
        if (clears(p, batch)) clear_cells(p, peers, batch);
        if (batch.last) {
            forward_weights(p, peers, set, items, item, weights);
            completion.finish(item, tell);
        }
    }
    completion.flush(tell);
    ring.drain();
    await_stores<0>();
    return fine;
}

// Forwards the sets of all other domains. After a fault, which is reported, it skips the rest: the abort word ends the waits of the
// roles that follow.
__device__ inline void forward(const DispatchParams& p, const Worker& worker, Ring& ring, const PeerView* peers, u32 epoch) {
    bool fine = true;
    for_each_other_domain(p.common, [&](u32 domain) { fine = fine && forward_set(p, worker, ring, peers, domain, epoch); });
}
