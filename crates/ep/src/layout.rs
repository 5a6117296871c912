//! Where does a token go? A pure function of the sender's own routing and everybody's counts.
//!
//! No rank ever sees another rank's routing. Each counts its own ([`Counts`]), the counts are exchanged
//! (G rows of E + G + 3 numbers, whatever the number of tokens), and an exclusive scan over the source ranks gives
//! every (source, expert) its first row on the receiving rank. A copy's final row is then
//! `base + own index`, known to its sender before a byte moves ([`DispatchLayout`]).

use std::ops::Range;

use crate::backend::DispatchMode;
use crate::call::{check_capacity, check_experts};
use crate::error::{CallerError, Result};
use crate::routing::Routing;
use crate::topology::{Rank, World};

/// What a rank tells all others about its routing and its wishes: all that ever crosses in preprocessing.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Counts {
    /// Number of tokens of this rank.
    pub tokens: u32,
    /// How this rank wants to receive rows.
    pub mode: DispatchMode,
    /// Rows that this rank has room for; `None` = as many as come.
    pub capacity: Option<u32>,
    /// Copies for each expert, by expert position.
    pub per_expert: Vec<u32>,
    /// Distinct tokens for each rank.
    pub per_rank: Vec<u32>,
}

/// Stands for "no capacity given" in the exchanged words.
pub(crate) const UNBOUNDED: u32 = u32::MAX;

impl Counts {
    /// Counts a rank's routing.
    ///
    /// # Errors
    /// [`CallerError::Shape`] when the routing is for another number of experts; [`CallerError::Capacity`] when the
    /// capacity is not a multiple of the pad multiple; [`CallerError::TooManyRows`] when it cannot be numbered.
    pub fn of(world: &World, routing: &Routing, mode: DispatchMode, capacity: Option<usize>) -> Result<Self> {
        check_experts(world, routing)?;
        let capacity = check_capacity(routing.rank(), mode, capacity)?;
        let mut per_expert = vec![0; world.experts()];
        let mut per_rank = vec![0; world.ranks()];
        by_position(world, routing, |_, experts, _| {
            let mut last_owner = None;
            for &position in experts {
                let owner = world.placement.owner_at(position);
                per_expert[position as usize] += 1;
                per_rank[owner.index()] += u32::from(last_owner.replace(owner) != Some(owner));
            }
        });
        Ok(Self { tokens: routing.tokens() as u32, mode, capacity, per_expert, per_rank })
    }

    /// Number of 32-bit words that [`to_words`](Self::to_words) writes: E + G + 3.
    pub fn words(world: &World) -> usize {
        3 + world.experts() + world.ranks()
    }

    /// The counts as they are exchanged.
    pub fn to_words(&self) -> Vec<u32> {
        let mode = match self.mode {
            DispatchMode::Plain => 0,
            DispatchMode::Permuted { pad_multiple } => pad_multiple,
        };
        let mut words = vec![self.tokens, mode, self.capacity.unwrap_or(UNBOUNDED)];
        words.extend_from_slice(&self.per_expert);
        words.extend_from_slice(&self.per_rank);
        words
    }

    /// Reads what [`to_words`](Self::to_words) wrote; the inverse for every world of the same size.
    ///
    /// # Panics
    /// When `words` is not [`Counts::words`] long: a backend's own mistake.
    pub fn from_words(world: &World, words: &[u32]) -> Self {
        assert_eq!(words.len(), Self::words(world), "a row of counts has E + G + 3 words");
        let (per_expert, per_rank) = words[3..].split_at(world.experts());
        Self {
            tokens: words[0],
            mode: match words[1] {
                0 => DispatchMode::Plain,
                pad_multiple => DispatchMode::Permuted { pad_multiple },
            },
            capacity: (words[2] != UNBOUNDED).then_some(words[2]),
            per_expert: per_expert.to_vec(),
            per_rank: per_rank.to_vec(),
        }
    }
}

/// What a rank receives: the shape of its dispatch output.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct ReceiveShape {
    /// How the rows are arranged.
    pub mode: DispatchMode,
    /// Rows of the output, padding included, after drops.
    pub rows: usize,
    /// Rows that would have come with unlimited capacity, padding included.
    pub wanted_rows: usize,
    /// Rows of each local expert after drops, padding included (permuted mode; empty in plain mode).
    pub tokens_per_expert: Vec<u32>,
    /// Rows of each local expert after drops, without padding (permuted mode; empty in plain mode).
    pub kept_per_expert: Vec<u32>,
    /// First row of each local expert (permuted mode; empty in plain mode).
    pub first_row: Vec<u32>,
    /// The capacity that the rank gave; `None` = exact size.
    pub capacity: Option<usize>,
}

impl ReceiveShape {
    /// Whether rows were dropped for want of capacity.
    pub fn overflow(&self) -> bool {
        self.wanted_rows > self.rows
    }

    /// Rows that the output memory must have: the capacity where one was given, else exactly what comes.
    pub fn allocated_rows(&self) -> usize {
        self.capacity.unwrap_or(self.rows)
    }

    /// Row ranges inside segments that hold no token and must be zero.
    pub fn padding(&self) -> impl Iterator<Item = Range<usize>> + '_ {
        (0..self.first_row.len()).map(|e| {
            let first = self.first_row[e] as usize;
            first + self.kept_per_expert[e] as usize..first + self.tokens_per_expert[e] as usize
        })
    }
}

/// Calls `visit` with every token's index, its experts' positions in order, and their weights.
fn by_position(world: &World, routing: &Routing, mut visit: impl FnMut(usize, &[u32], &[f32])) {
    let placement = &world.placement;
    if placement.is_in_order() {
        for (token, (experts, weights)) in routing.rows().enumerate() {
            visit(token, experts, weights);
        }
        return;
    }
    // A table may shuffle experts over ranks.
    let mut row: Vec<(u32, f32)> = Vec::new();
    let (mut positions, mut sorted_weights) = (Vec::new(), Vec::new());
    for (token, (experts, weights)) in routing.rows().enumerate() {
        row.clear();
        row.extend(
            experts.iter().zip(weights).map(|(&expert, &weight)| (placement.position_of(expert), weight)),
        );
        row.sort_unstable_by_key(|&(position, _)| position);
        positions.clear();
        sorted_weights.clear();
        positions.extend(row.iter().map(|&(position, _)| position));
        sorted_weights.extend(row.iter().map(|&(_, weight)| weight));
        visit(token, &positions, &sorted_weights);
    }
}

/// Where the rows of one source begin, and end.
struct Bases {
    /// Next free row for this source: by expert position (permuted) or by rank (plain).
    next: Vec<u32>,
    /// Rows at or beyond this are dropped, in the same order.
    limit: Vec<u32>,
}

fn rank_segments(world: &World, rank: Rank, all: &[Counts]) -> Result<Vec<(u64, u64)>> {
    let pad = all[rank.index()].mode.pad_multiple() as u64;
    let mut start = 0u64;
    let mut segments = Vec::with_capacity(world.placement.local_experts(rank));
    for position in world.placement.positions_of(rank) {
        let count: u64 = all.iter().map(|counts| u64::from(counts.per_expert[position])).sum();
        segments.push((start, count));
        start += count.next_multiple_of(pad);
    }
    if start > u64::from(u32::MAX) {
        return Err(CallerError::TooManyRows { rank, rows: start }.into());
    }
    Ok(segments)
}

/// Rows of distinct tokens that a rank receives.
fn distinct_rows(rank: Rank, all: &[Counts]) -> Result<u64> {
    let rows = all.iter().map(|counts| u64::from(counts.per_rank[rank.index()])).sum();
    if rows > u64::from(u32::MAX) {
        return Err(CallerError::TooManyRows { rank, rows }.into());
    }
    Ok(rows)
}

/// Rows at or beyond this do not fit; all rows that can be numbered are below it when there is no capacity.
fn limit_of(counts: &Counts) -> u32 {
    counts.capacity.unwrap_or(u32::MAX)
}

impl Bases {
    fn new(world: &World, source: Rank, all: &[Counts]) -> Result<Self> {
        let before = &all[..source.index()];
        let (mut next, mut limit) = (Vec::new(), Vec::new());
        for rank in world.topology.all_ranks() {
            let rows_limit = limit_of(&all[rank.index()]);
            match all[source.index()].mode {
                DispatchMode::Plain => {
                    distinct_rows(rank, all)?;
                    next.push(before.iter().map(|counts| counts.per_rank[rank.index()]).sum());
                    limit.push(rows_limit);
                }
                DispatchMode::Permuted { .. } => {
                    let positions = world.placement.positions_of(rank);
                    for (position, (start, _)) in positions.zip(rank_segments(world, rank, all)?) {
                        // Below the rank's rows, which were found to fit 32 bits.
                        let earlier: u32 = before.iter().map(|counts| counts.per_expert[position]).sum();
                        next.push(start as u32 + earlier);
                        limit.push(rows_limit);
                    }
                }
            }
        }
        Ok(Self { next, limit })
    }

    /// The next row, and whether it is kept.
    fn take(&mut self, counter: usize) -> (u32, bool) {
        let row = self.next[counter];
        self.next[counter] = row.wrapping_add(1);
        (row, row < self.limit[counter])
    }
}

/// What `rank` receives, given everybody's counts.
///
/// # Errors
/// [`CallerError::TooManyRows`] when the rows cannot be numbered with 32 bits.
pub fn receive_shape(world: &World, rank: Rank, all: &[Counts]) -> Result<ReceiveShape> {
    let own = &all[rank.index()];
    let limit = u64::from(limit_of(own));
    let capacity = own.capacity.map(|rows| rows as usize);
    let mut shape = ReceiveShape {
        mode: own.mode,
        rows: 0,
        wanted_rows: 0,
        tokens_per_expert: Vec::new(),
        kept_per_expert: Vec::new(),
        first_row: Vec::new(),
        capacity,
    };
    match own.mode {
        DispatchMode::Plain => {
            let wanted = distinct_rows(rank, all)?;
            shape.wanted_rows = wanted as usize;
            shape.rows = wanted.min(limit) as usize;
        }
        DispatchMode::Permuted { pad_multiple } => {
            let pad = u64::from(pad_multiple);
            for (start, count) in rank_segments(world, rank, all)? {
                let kept = limit.saturating_sub(start).min(count);
                let padded = kept.next_multiple_of(pad);
                shape.wanted_rows = (start + count.next_multiple_of(pad)) as usize;
                shape.rows += padded as usize;
                shape.tokens_per_expert.push(padded as u32);
                shape.kept_per_expert.push(kept as u32);
                shape.first_row.push(start.min(limit) as u32);
            }
        }
    }
    Ok(shape)
}

/// One copy of a token: the expert it is for, and the row where it lands on the rank that holds the expert.
#[derive(Debug, Clone, Copy, PartialEq, Eq, bytemuck::Pod, bytemuck::Zeroable)]
#[repr(C)]
pub struct TokenCopy {
    /// The expert's position ([`crate::ExpertPlacement`]); it gives the rank too.
    pub position: u32,
    /// Final row on that rank.
    pub row: u32,
}

/// Where every copy of one source rank's tokens lands; dropped copies are left out.
///
/// A token's copies are ordered by expert position, so those for one rank, and those for one domain, are adjacent.
/// In plain mode the copies for experts of one rank share a row.
#[derive(Debug, Clone, PartialEq)]
pub struct DispatchLayout {
    domains: usize,
    /// `[tokens * domains + 1]`: where the copies of (token, domain) begin.
    offsets: Vec<u32>,
    copies: Vec<TokenCopy>,
    weights: Vec<f32>,
}

impl DispatchLayout {
    /// Lays out the tokens of `routing.rank()`, given the counts of all ranks in order.
    ///
    /// # Errors
    /// [`CallerError::TooManyRows`] when a rank's rows cannot be numbered.
    pub fn new(world: &World, routing: &Routing, all: &[Counts]) -> Result<Self> {
        let source = routing.rank();
        let mut bases = Bases::new(world, source, all)?;
        let permuted = matches!(all[source.index()].mode, DispatchMode::Permuted { .. });
        let placement = &world.placement;
        let domains = world.topology.domains();
        let mut layout = Self {
            domains,
            offsets: Vec::with_capacity(routing.tokens() * domains + 1),
            copies: Vec::with_capacity(routing.copies()),
            weights: Vec::with_capacity(routing.copies()),
        };
        layout.offsets.push(0);
        by_position(world, routing, |token, positions, weights| {
            let first = token * domains;
            let mut last_owner = None;
            let mut next = (0, true);
            for (&position, &weight) in positions.iter().zip(weights) {
                if domains > 1 {
                    layout.close_before(first + placement.domain_at(position));
                }
                if permuted {
                    next = bases.take(position as usize);
                } else {
                    let owner = placement.owner_at(position);
                    if last_owner.replace(owner) != Some(owner) {
                        next = bases.take(owner.index());
                    }
                }
                let (row, kept) = next;
                if kept {
                    layout.copies.push(TokenCopy { position, row });
                    layout.weights.push(weight);
                }
            }
            layout.close_before(first + domains);
        });
        Ok(layout)
    }

    /// Ends every (token, domain) before the one at this place.
    fn close_before(&mut self, place: usize) {
        while self.offsets.len() <= place {
            self.offsets.push(self.copies.len() as u32);
        }
    }

    /// Number of tokens of the source.
    pub fn tokens(&self) -> usize {
        (self.offsets.len() - 1) / self.domains
    }

    /// The copies of one token that stay in, or go to, one domain.
    pub fn copies(&self, token: usize, domain: usize) -> &[TokenCopy] {
        &self.copies[self.range(token..token + 1, domain)]
    }

    /// The routing weights of [`copies`](Self::copies), in the same order.
    pub fn weights(&self, token: usize, domain: usize) -> &[f32] {
        &self.weights[self.range(token..token + 1, domain)]
    }

    /// All copies that were not dropped.
    pub fn total_copies(&self) -> usize {
        self.copies.len()
    }

    fn range(&self, token: Range<usize>, domain: usize) -> Range<usize> {
        let at = token.start * self.domains + domain;
        self.offsets[at] as usize..self.offsets[at + 1] as usize
    }
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::*;
    use crate::oracle;
    use crate::workload::Workload;

    fn all_counts(
        world: &World,
        routings: &[Routing],
        mode: DispatchMode,
        capacity: &[Option<usize>],
    ) -> Vec<Counts> {
        routings.iter().zip(capacity).map(|(r, &c)| Counts::of(world, r, mode, c).unwrap()).collect()
    }

    #[test]
    fn words_are_linear_in_experts_and_ranks_and_independent_of_tokens() {
        let world = World::new(8, 2, 64).unwrap();
        for tokens in [0, 1, 1000] {
            let routing = Workload { tokens, experts: 64, topk: 8, skew: 0.0, seed: 1 }.routing(Rank(3));
            let counts =
                Counts::of(&world, &routing, DispatchMode::Permuted { pad_multiple: 16 }, Some(32)).unwrap();
            let words = counts.to_words();
            assert_eq!(words.len(), 64 + 8 + 3);
            assert_eq!(Counts::from_words(&world, &words), counts);
        }
    }

    #[test]
    fn capacity_must_fit_the_padding() {
        let world = World::new(1, 1, 2).unwrap();
        let routing = Routing::empty(Rank(0), 2);
        let error =
            Counts::of(&world, &routing, DispatchMode::Permuted { pad_multiple: 16 }, Some(24)).unwrap_err();
        assert_eq!(error.to_string(), "capacity of 24 rows is not a multiple of pad_multiple 16");
        let error = Counts::of(&world, &routing, DispatchMode::Plain, Some(1 << 32)).unwrap_err();
        assert!(error.to_string().contains("4294967296 rows"), "{error}");
        let error = Counts::of(&world, &Routing::empty(Rank(0), 3), DispatchMode::Plain, None).unwrap_err();
        assert_eq!(error.to_string(), "routing: expected 2 experts, found 3");
    }

    #[test]
    fn rows_beyond_32_bits_are_refused() {
        let world = World::new(1, 1, 1).unwrap();
        let counts = Counts {
            tokens: u32::MAX,
            mode: DispatchMode::Permuted { pad_multiple: 128 },
            capacity: None,
            per_expert: vec![u32::MAX],
            per_rank: vec![u32::MAX],
        };
        let error = receive_shape(&world, Rank(0), &[counts]).unwrap_err();
        assert!(error.to_string().contains("rank 0 would receive 4294967296 rows"), "{error}");
    }

    proptest! {
        /// The layout is what the oracle, which sorts all copies of the world, says: every kept copy once, in its
        /// row, and nothing else.
        #[test]
        fn layout_equals_the_oracle(
            domains in 1usize..4, domain_size in 1usize..4, per_rank in 1usize..4,
            topk in 0usize..6, pad in prop_oneof![Just(0u32), Just(1), Just(4), Just(16)],
            tokens in prop::collection::vec(0usize..20, 9), capacity in prop::collection::vec(prop::option::of(0usize..6), 9),
            shuffle in any::<bool>(), seed in any::<u64>(),
        ) {
            let ranks = domains * domain_size;
            let experts = ranks * per_rank;
            let mut world = World::new(ranks, domains, experts).unwrap();
            if shuffle {
                let owners: Vec<Rank> = (0..experts).map(|e| Rank(((e as u64 * 7 + seed % 5) % ranks as u64) as u32)).collect();
                world.placement = crate::ExpertPlacement::table(&owners, &world.topology).unwrap();
            }
            let mode = if pad == 0 { DispatchMode::Plain } else { DispatchMode::Permuted { pad_multiple: pad } };
            let capacity: Vec<Option<usize>> =
                (0..ranks).map(|r| capacity[r].map(|c| c * 3 * mode.pad_multiple())).collect();
            let routings: Vec<Routing> = world.topology.all_ranks().map(|rank| {
                Workload { tokens: tokens[rank.index()], experts, topk: topk.min(experts), skew: 0.7, seed }.routing(rank)
            }).collect();
            let counts = all_counts(&world, &routings, mode, &capacity);
            let expected = oracle::rows(&world, &routings, mode, &capacity);

            let mut placed = vec![std::collections::BTreeMap::new(); ranks];
            for routing in &routings {
                let layout = DispatchLayout::new(&world, routing, &counts).unwrap();
                prop_assert_eq!(layout.tokens(), routing.tokens());
                for token in 0..layout.tokens() {
                    for domain in 0..domains {
                        for (copy, &weight) in layout.copies(token, domain).iter().zip(layout.weights(token, domain)) {
                            let owner = world.placement.owner_at(copy.position);
                            prop_assert_eq!(world.topology.domain_of(owner), domain);
                            let expert = world.placement.expert_at(copy.position);
                            placed[owner.index()].entry(copy.row as usize).or_insert_with(Vec::new)
                                .push((routing.rank(), token, expert, weight));
                        }
                    }
                }
            }
            for rank in world.topology.all_ranks() {
                let expected = &expected[rank.index()];
                prop_assert_eq!(&receive_shape(&world, rank, &counts).unwrap(), &expected.shape);
                let rows: std::collections::BTreeMap<_, _> = expected.rows.iter().enumerate()
                    .filter_map(|(row, source)| source.as_ref().map(|s| (row, s.experts.iter()
                        .map(|&(e, w)| (s.rank, s.token, e, w)).collect::<Vec<_>>())))
                    .collect();
                prop_assert_eq!(&placed[rank.index()], &rows);
            }
        }
    }
}
