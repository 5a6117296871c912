// The send role: reads each of this rank's tokens once and stores it to its first row on every other rank, to all its
// rows on this rank and, with rails, to the lanes. Then stores the weights and, in plain mode, the map of local
// experts, and sets the item's flag on every peer and in the `out_flags` of every other domain.
//
// What a warp in this role may access, and when: until the handshakes have arrived, only the input and the lists of its
// rank (the lists only if the abort word is not set), its ring and `items_taken`; then also the outputs of all ranks of
// the domain, and lanes. It loads into a stage again when the stores have read it (ring.cuh), sets a flag when the
// stores to other ranks have completed, and stores nothing to a peer after its last flag there. A lane to another
// domain needs no wait of its own (docs/cuda-rails.md, "Reuse").
#pragma once
#include PAYLOAD_VARIANT
#include "rails.cuh"
#include "feed.cuh"

// The sections of what dispatch sends along a rail.
enum : u32 { SECTION_ROWS = 0, SECTION_SCALES = 1, SECTION_WEIGHTS = 2 };

// The work items of the send and forward roles: `span` chunks of this rank's tokens or of a foreign set, for one group of pieces.
struct SendItems {
    using Entry = Send;
    const Send* sends;
    const u32* send_begin;
    u32 tokens;
    u32 chunk_tokens;
    u32 chunks;
    u32 span;
    u32 count;
    u32 pieces;
    u32 group_bits;

    __device__ SendItems(const DispatchParams& p, const HandleView& lists)
        : sends(lists.sends),
          send_begin(lists.send_begin),
          tokens(lists.tokens),
          chunk_tokens(lists.chunk_tokens),
          chunks(lists.chunks),
          span(span_of(chunks)),
          count(div_up(chunks, span) << p.common.handshake.share_bits),
          pieces(p.pieces),
          group_bits(p.common.handshake.share_bits) {}
    __device__ bool skip(u32) const { return false; }
    __device__ u32 chunk(u32 item) const { return (item >> group_bits) * span; }
    __device__ u32 chunk_end(u32 item) const { return min(chunks, chunk(item) + span); }
    __device__ u32 first_token(u32 item) const { return chunk(item) * chunk_tokens; }
    __device__ u32 token_end(u32 item) const { return min(tokens, chunk_end(item) * chunk_tokens); }
    // An item has the pieces first_piece, first_piece + groups, first_piece + 2 groups, ... that are below pieces_of.
    __device__ u32 first_piece(u32 item) const { return item & (groups_of(item) - 1); }
    __device__ u32 groups_of(u32) const { return 1u << group_bits; }
    __device__ u32 pieces_of(u32) const { return pieces; }
    __device__ Range range(u32 item) const { return {send_begin[chunk(item)], send_begin[chunk_end(item)]}; }
    __device__ const Send* list(u32) const { return sends; }
};

// Enumerates a worker's (item, piece, token) triples in the order in which they are sent.
struct TokenWalk {
    u32 item;          // NONE: beyond the last known item
    u32 after = NONE;  // the item after this one, if it is known
    u32 piece;
    u32 token;
    u32 end;   // one past the item's last token

    __device__ TokenWalk(const SendItems& items, u32 first) : item(first) { enter(items); }

    __device__ void enter(const SendItems& items) {
        if (item == NONE) return;
        piece = items.first_piece(item);
        restart(items);
    }

    __device__ void restart(const SendItems& items) {
        token = items.first_token(item);
        end = items.token_end(item);
    }

    __device__ bool over() const { return item == NONE; }

    // Sets the item that follows the last known one. Called once for each item.
    __device__ void go_on(const SendItems& items, u32 next) {
        if (item != NONE) {
            after = next;
        } else {
            item = next;
            enter(items);
        }
    }

    __device__ void next(const SendItems& items) {
        if (++token < end) return;
        piece += items.groups_of(item);
        if (piece < items.pieces_of(item)) {
            restart(items);
        } else {
            item = after;
            after = NONE;
            enter(items);
        }
    }
};

// Stores the weight of a copy, and in plain mode its mark in the map of local experts, on the copy's rank.
__device__ inline void store_weight(const DispatchParams& p, const PeerView* peers, const Copy& copy, float weight) {
    const u32 row = copy.row();
    if (row == NO_ROW) return;
    const u32 rank = copy.rank(), expert = copy.local_expert();
    if (RAILS && rank >= p.common.ranks) {
        // In a lane, weights are indexed by rail copy.
        if (p.probs != PROBS_SKIP) peers[rank].probs[row] = weight;
        return;
    }
    const u32 experts = p.common.owner_begin[rank + 1] - p.common.owner_begin[rank];
    const u64 cell = p.handle.permuted ? row : static_cast<u64>(row) * experts + expert;
    if (p.probs != PROBS_SKIP) peers[rank].probs[cell] = weight;
    if (peers[rank].local_experts != nullptr) peers[rank].local_experts[cell] = 1;
}

// Whether the worker clears the cells of a batch's rows. Each piece of the rows has batches of its own; those of the first piece do.
__device__ inline bool clears(const DispatchParams& p, const ItemBatch<Send>& batch) {
    return !p.handle.permuted && batch.piece == 0;
}

// In plain mode a row has a cell for each expert of its rank. Writes zeros to all cells of a batch's rows, before the item's weights.
// All lanes write to one row at a time, so that the link carries few packets.
__device__ inline void clear_cells(const DispatchParams& p, const PeerView* peers, const ItemBatch<Send>& batch) {
#pragma unroll 1
    for (u32 index = 0; index < batch.count; index++) {
        const Send entry = batch.at(index);
        const u32 rank = entry.rank();
        if (entry.is_dead() || RAILS && rank >= p.common.ranks) continue;
        const u32 experts = p.common.owner_begin[rank + 1] - p.common.owner_begin[rank];
        const u64 cell = static_cast<u64>(entry.row()) * experts;
        for (u32 expert = lane_id(); expert < experts; expert += WARP) {
            if (peers[rank].probs != nullptr) peers[rank].probs[cell + expert] = 0.0f;
            if (peers[rank].local_experts != nullptr) peers[rank].local_experts[cell + expert] = 0;
        }
    }
}

// The weights of an item's copies, which are stored after the item's tokens. Lists and weights are read while the
// tokens are in flight; read at the end of the item, they would stall the worker once per list.
struct ItemWeights {
    // Copies per lane that are read ahead.
    static constexpr u32 AHEAD = 2;
    const DispatchParams& p;
    const bool wanted;
    u32 item;
    u32 begin = 0;
    u32 end = 0;
    u32 next_begin = 0;
    u32 next_end = 0;
    Copy copies[AHEAD];
    float weights[AHEAD];
    bool weighed = true;  // `weights` has been loaded

    __device__ ItemWeights(const DispatchParams& p, const SendItems& items, u32 first)
        : p(p), wanted(p.probs != PROBS_SKIP || !p.handle.permuted), item(NONE) {
        find(items, first);
    }

    // Loads the range of the copies of the item that is entered next.
    __device__ void find(const SendItems& items, u32 which) {
        if (!wanted || which == NONE) return;
        next_begin = p.handle.copy_begin[items.chunk(which)];
        next_end = p.handle.copy_begin[items.chunk_end(which)];
    }

    // Begins item `which`: loads its copies.
    __device__ void begin_item(const SendItems& items, u32 which) {
        if (!wanted || which == item) return;
        item = which;
        begin = next_begin;
        // Items of the same chunks differ in their pieces; the item of the first group of pieces sends the weights.
        end = items.first_piece(item) == 0 ? next_end : begin;
#pragma unroll
        for (u32 turn = 0; turn < AHEAD; turn++) {
            const u32 at = begin + turn * WARP + lane_id();
            if (at < end) copies[turn] = p.handle.copies[at];
        }
        weighed = false;
    }

    __device__ float weight_of(const Copy& copy) const {
        return p.probs == PROBS_DENSE ? p.dense[copy.cell()] : copy.weight();
    }

    // Loads the weights of the copies that were read ahead.
    __device__ void weigh() {
        if (weighed) return;
        weighed = true;
#pragma unroll
        for (u32 turn = 0; turn < AHEAD; turn++)
            if (begin + turn * WARP + lane_id() < end) weights[turn] = weight_of(copies[turn]);
    }

    // Stores the item's weights, and in plain mode the map of local experts, to the destinations.
    __device__ void store(const SendItems& items, const PeerView* peers) {
        if (begin == end) return;
        weigh();
        // Another lane may have cleared the cell of a weight.
        if (!p.handle.permuted) __syncwarp();
#pragma unroll
        for (u32 turn = 0; turn < AHEAD; turn++)
            if (begin + turn * WARP + lane_id() < end) store_weight(p, peers, copies[turn], weights[turn]);
        for (u32 at = begin + AHEAD * WARP + lane_id(); at < end; at += WARP) {
            const Copy copy = p.handle.copies[at];
            store_weight(p, peers, copy, weight_of(copy));
        }
    }
};

// The entries of one token in a batch of `sends`. Bit i of a mask stands for the entry that lane i of the warp holds. A token may
// lie in several batches.
struct TokenPart {
    u32 above;  // to higher ranks and, with rails, to the lanes of other domains
    u32 below;  // to lower ranks
    u32 own;    // to this rank
    bool ends;  // the token's last entry is in the batch
};

// The tokens of a batch, one after the other.
struct TokenParts {
    u32 rest;  // entries that are left
    u32 ends, above, below, own;

    __device__ TokenParts(const Common& c, const ItemBatch<Send>& batch) {
        const bool mine = lane_id() < batch.count;
        rest = __ballot_sync(ALL_LANES, mine);
        ends = __ballot_sync(ALL_LANES, mine && batch.entry.ends_token());
        const bool alive = mine && !batch.entry.is_dead();
        above = __ballot_sync(ALL_LANES, alive && batch.entry.rank() > c.rank);
        below = __ballot_sync(ALL_LANES, alive && batch.entry.rank() < c.rank);
        own = __ballot_sync(ALL_LANES, alive && batch.entry.rank() == c.rank);
    }
    __device__ bool any() const { return rest != 0; }
    __device__ TokenPart next() {
        const u32 end = ends & rest;
        // All entries up to the first end, or all entries if there is no end.
        const u32 part = rest & (((end & (0u - end)) << 1) - 1);
        rest &= ~part;
        return {part & above, part & below, part & own, end != 0};
    }
};

// Stores a part of a token: `store(lane)` starts the stores of that lane's entry. Each rank begins with the next higher rank:
// if all began with rank 0, they would congest its link. A token's stores are two groups. The flag of an item waits for all
// groups of the item but the second one of its last token (`Completion::publish`).
template <class Store>
__device__ inline void store_part(const TokenPart& part, const Store& store) {
    for (u32 left = part.above; left != 0; left &= left - 1) store(__ffs(left) - 1);
    for (u32 left = part.below; left != 0; left &= left - 1) store(__ffs(left) - 1);
    if (part.ends) commit_stores();
    for (u32 left = part.own; left != 0; left &= left - 1) store(__ffs(left) - 1);
    if (part.ends) commit_stores();
}

// Sets the flag of a finished item some tokens later, when its stores to other ranks have completed, so that the worker goes
// on meanwhile.
struct Completion {
    // Tokens between an item's last token and its flag.
    static constexpr u32 LAG = 2;
    u32 flag = NONE;  // of the finished item whose flag is not set yet
    u32 tokens_since = 0;

    // Called after a token's stores were committed.
    template <class Tell>
    __device__ void committed(const Tell& tell) {
        if (flag != NONE && ++tokens_since == LAG) publish<LAG>(tell);
    }

    // Called after the item's last token.
    template <class Tell>
    __device__ void finish(u32 item_flag, const Tell& tell) {
        flush(tell);
        flag = item_flag;
        tokens_since = 0;
    }

    template <class Tell>
    __device__ void flush(const Tell& tell) {
        if (flag == NONE) return;
        if (tokens_since == 0) publish<0>(tell);
        else publish<1>(tell);
    }

    // `since`: at least this many tokens were committed after the item's last token. Their groups of stores, and the
    // last token's group of stores to this rank, may still be in flight.
    template <u32 since, class Tell>
    __device__ void publish(const Tell& tell) {
        await_stores<GROUPS_PER_TOKEN * since + 1>();
        __syncwarp();
        tell(flag);
        flag = NONE;
    }
};

// One worker in the send role. The constructor reads what needs no peer: the lists of the first item, and its first tokens.
//
// Lists are read one batch ahead (`next`), and tokens as far ahead as the ring has room (`ahead`). A walk that has come to the end of
// its item goes on when the next batch names a different item.
struct Sender {
    const DispatchParams& p;
    const PeerView* const peers;
    const u32 epoch;
    Ring& ring;
    const SendItems items;
    Feed<SendItems> feed;
    ItemWeights weights;
    TokenWalk ahead;  // the next token to load
    TokenWalk here;   // the next token to send
    ItemBatch<Send> next;
    TokenScales token_scales;

    // `peers` may be written after the construction.
    __device__ Sender(const DispatchParams& p, const Worker& worker, Ring& ring, const PeerView* peers, u32 epoch)
        : p(p),
          peers(peers),
          epoch(epoch),
          ring(ring),
          items(p, p.handle),
          feed(items, &p.common.own->items_taken, worker),
          weights(p, items, feed.item),
          ahead(items, feed.item),
          here(items, feed.item) {
        read_ahead();
        next = feed.fetch();
        expect_scales();
        if (next.valid()) weights.begin_item(items, next.item);
    }

    // Sets the flag of an item on every peer and, with rails, in `out_flags` of every other domain.
    __device__ void tell(u32 flag) const {
        for (u32 peer = domain_begin(p.common) + lane_id(); peer < domain_end(p.common); peer += WARP)
            if (peer != p.common.rank) st_release_sys(&peers[peer].flags[flag], epoch);
        for (u32 domain = lane_id(); domain < rail_domains(p.common); domain += WARP)
            if (domain != p.common.rails.domain) st_release_sys(&peers[p.common.ranks + domain].flags[flag], epoch);
    }

    __device__ void read_ahead() {
        while (!ahead.over() && ring.room()) {
            const u64 row = static_cast<u64>(ahead.token) * p.row_bytes_in + ahead.piece * p.piece_bytes;
            ring.load(p.tokens + row, piece_bytes_at(p, ahead.piece));
            ahead.next(items);
        }
    }

    __device__ void expect_scales() {
        if (!here.over()) token_scales.expect(p, here.token, here.piece);
    }

    // Sends all items that this worker can claim.
    __device__ void send(PayloadBuffers& buffers) {
        const auto tell_peers = [&](u32 flag) { tell(flag); };
        Completion completion;
        bool token_begins = true;
        Payload payload;
        ScaleRow scales;
        while (next.valid()) {
            const ItemBatch<Send> batch = next;
            next = feed.fetch();
            weights.begin_item(items, batch.item);
            if (next.valid() && next.item != batch.item) {
                weights.find(items, next.item);
                ahead.go_on(items, next.item);
                // The scales of the next token to send are read ahead, too, as soon as that token is known.
                const bool was_over = here.over();
                here.go_on(items, next.item);
                if (was_over) expect_scales();
            }
            for (TokenParts parts(p.common, batch); parts.any();) {
                if (token_begins) {
                    payload = buffers.prepare(p, ring.take(), here.piece);
                    scales = token_scales.take(payload);
                    here.next(items);
                    expect_scales();
                }
                const TokenPart part = parts.next();
                token_begins = part.ends;
                store_part(part, [&](u32 lane) {
                    const Send entry = batch.at(lane);
                    const PeerView& peer = peers[entry.rank()];
                    store_stage(peer.tokens + static_cast<u64>(entry.row()) * p.row_bytes_out + payload.offset,
                                shared_address(payload.data), payload.bytes);
                    scales.store(peer.scales + static_cast<u64>(entry.row()) * p.scale_row_bytes +
                                 payload.scale_part.offset);
                });
                if (!part.ends) continue;
                completion.committed(tell_peers);
                buffers.sent(ring);
                read_ahead();
                weights.weigh();
                feed.prepare();
            }
            if (clears(p, batch)) clear_cells(p, peers, batch);
            if (batch.last) {
                weights.store(items, peers);
                completion.finish(batch.item, tell_peers);
            }
        }
        completion.flush(tell_peers);
        await_stores<0>();
    }
};
