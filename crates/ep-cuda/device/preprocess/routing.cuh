// What preprocess sends along the rails: for every token of a set, which experts of the domain it chose; and the
// counts of the set.
#pragma once
#include "emit.cuh"

__device__ inline u32 experts_in(const Common& c, u32 domain) {
    return first_position(c, domain + 1) - first_position(c, domain);
}

// Words of a mask: one bit per expert of the domain.
__device__ inline u32 mask_words(const Common& c, u32 domain) { return div_up(experts_in(c, domain), 32); }

// What this rank sends to `domain`: the counts as section 0, the masks as section 1.
__device__ inline PlanHead routing_plan(const PreprocessParams& p, const Columns& column, const u32* totals, u32 domain) {
    const Common& c = p.common;
    const u32 first = domain * domain_size(c);
    PlanHead head;
    u64 end = 0;
    head.sections[0] = place_section(end, 1, 4 * (experts_in(c, domain) + domain_size(c)), RAIL_ONCE);
    head.sections[1] = place_section(end, p.handle.tokens, 4 * mask_words(c, domain), RAIL_PER_ROW);
    head.rows = totals[column.tokens_to(domain)];
    for (u32 rank = first; rank < first + domain_size(c); rank++) head.copies += totals[column.copies_of(rank)];
    head.units = 1;
    return head;
}

// Writes the masks of a tile's tokens. Called by all threads.
__device__ inline void emit_masks(const PreprocessParams& p, const Cursors& cursors, const Columns& column,
                                  const u32* totals, u32 epoch) {
    const Common& c = p.common;
    const Tile& tile = cursors.tile;
    for_each_other_domain(c, [&](u32 domain) {
        const u32 words = mask_words(c, domain), begin = first_position(c, domain), end = first_position(c, domain + 1);
        const u64 offset = routing_plan(p, column, totals, domain).sections[1].offset;
        auto* masks = reinterpret_cast<u32*>(out_lane(c, epoch, domain) + offset);
        for (u32 at = threadIdx.x; at < tile.tokens * words; at += blockDim.x) {
            const u32 token = at / words, word = at % words, from = begin + 32 * word;
            if (!tile.goes_to(domain, token)) continue;
            const u32* row = tile.row(token);
            // The bits [from, from + 32) of the row. Those at or beyond `end` do not belong to `domain`.
            const u32 low = row[from / 32] >> from % 32;
            const u32 high = from % 32 != 0 && from / 32 + 1 < tile.row_words ? row[from / 32 + 1] << (32 - from % 32) : 0;
            const u32 count = min(end - from, 32u);
            const u32 mask = (low | high) & (count == 32 ? ALL_BITS : (1u << count) - 1);
            masks[static_cast<u64>(cursors.rail_row(domain, token)) * words + word] = mask;
        }
    });
}

// Writes the counts and plans for all other domains, and releases them with the masks that all blocks have written before
// the barrier. Returns false, after the fault was reported, if a set has too many copies. Called by all threads of one
// block.
__device__ inline bool send_routing(const PreprocessParams& p, const Columns& column, const u32* totals, u32 epoch) {
    const Common& c = p.common;
    bool fine = true;
    for_each_other_domain(c, [&](u32 domain) {
        const PlanHead head = routing_plan(p, column, totals, domain);
        if (head.copies > c.rails.most_copies) {
            if (fine && threadIdx.x == 0)
                report_own(c, FAULT_RAIL_COPIES, c.rank, head.copies, c.rails.most_copies, 0);
            fine = false;
        }
        if (!fine) return;
        const u32 first = domain * domain_size(c), position = first_position(c, domain), experts = experts_in(c, domain);
        auto* counts = reinterpret_cast<u32*>(out_lane(c, epoch, domain) + head.sections[0].offset);
        for (u32 at = threadIdx.x; at < experts + domain_size(c); at += blockDim.x)
            counts[at] = totals[at < experts ? position + at : column.tokens_of(first + at - experts)];
        __syncthreads();
        if (threadIdx.x == 0) st_release_sys(rail_end(c, epoch, domain)->out_flags, epoch);
        publish_plan(c, epoch, domain, head, [&](u32) { return make_uint2(head.rows, head.copies); });
    });
    // A barrier: the caller may overwrite `totals`, and a thread that still reads `totals` could then find a different
    // number of copies, and return a different result.
    return __syncthreads_and(fine);
}
