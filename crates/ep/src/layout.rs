//! The final row of each copy, computed from the sender's routing and the counts of all ranks.
//!
//! No rank sees another rank's routing. Each of the G ranks counts its copies for each of the E experts and its tokens for
//! each of the G ranks ([`Counts`]), and the ranks exchange these counts: G rows of E + G + 3 numbers, independent of
//! the number of tokens. An exclusive scan of the counts over the source ranks gives each (source rank, expert) its
//! first row on the receiving rank. The final row of a copy is this first row plus the copy's index within its source
//! rank and expert, so the sender knows it before any token moves ([`DispatchLayout`]).

use std::num::NonZeroU32;

use std::ops::Range;

use crate::backend::DispatchMode;
use crate::call::{check_capacity, check_experts, check_routing};
use crate::error::{CallerError, EnvironmentError, Result};
use crate::routing::Routing;
use crate::size::Size;
use crate::topology::{Rank, World};

/// What a rank sends to all other ranks in preprocess: the counts of its routing and how it receives rows.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Counts {
    /// Number of tokens of this rank.
    pub tokens: u32,
    /// How this rank receives rows.
    pub mode: DispatchMode,
    /// The most rows that this rank receives; `None` = no limit.
    pub capacity: Option<u32>,
    /// `[experts]`: copies for each expert, by expert position ([`crate::ExpertPlacement`]).
    pub per_expert: Vec<u32>,
    /// `[ranks]`: distinct tokens for each rank.
    pub per_rank: Vec<u32>,
}

/// The exchanged word for "no capacity given".
pub(crate) const UNBOUNDED: u32 = u32::MAX;

impl Counts {
    /// Counts a rank's routing. `capacity` is the most rows that the rank receives.
    ///
    /// # Errors
    /// [`CallerError::Shape`] when the routing is for a different number of experts; [`CallerError::Capacity`] when the
    /// capacity is not a multiple of the pad multiple; [`CallerError::TooManyRows`] when the capacity does not fit in
    /// 32 bits.
    pub fn of(world: &World, routing: &Routing, mode: DispatchMode, capacity: Option<usize>) -> Result<Self> {
        check_experts(world, routing)?;
        let capacity = check_capacity(routing.rank(), mode, capacity)?;
        let mut per_expert = vec![0; world.experts()];
        let mut per_rank = vec![0; world.ranks()];
        by_position(world, routing, |_, experts, _| {
            let mut last_owner = None;
            for &position in experts {
                let owner = world.placement().owner_at(position);
                per_expert[position as usize] += 1;
                per_rank[owner.index()] += u32::from(last_owner.replace(owner) != Some(owner));
            }
        });
        Ok(Self { tokens: routing.tokens() as u32, mode, capacity, per_expert, per_rank })
    }

    /// Number of 32-bit words that [`to_words`](Self::to_words) returns: E + G + 3 for E experts and G ranks.
    pub fn words(world: &World) -> usize {
        3 + world.experts() + world.ranks()
    }

    /// The counts as words, for the exchange: tokens, mode (0 = plain, else the pad multiple), capacity (`u32::MAX` =
    /// none), [`per_expert`](Self::per_expert), [`per_rank`](Self::per_rank).
    pub fn to_words(&self) -> Vec<u32> {
        let mode = match self.mode {
            DispatchMode::Plain => 0,
            DispatchMode::Permuted { pad_multiple } => pad_multiple.get(),
        };
        let mut words = vec![self.tokens, mode, self.capacity.unwrap_or(UNBOUNDED)];
        words.extend_from_slice(&self.per_expert);
        words.extend_from_slice(&self.per_rank);
        words
    }

    /// Reads the words that [`to_words`](Self::to_words) returned on a rank of the same world.
    ///
    /// # Errors
    /// [`ImpossibleCounts`] for words that no routing of this world gives.
    ///
    /// # Panics
    /// When `words` is not [`Counts::words`] long, which is a bug of the backend.
    pub fn from_words(world: &World, words: &[u32]) -> Result<Self, ImpossibleCounts> {
        assert_eq!(words.len(), Self::words(world), "a row of counts has E + G + 3 words");
        let (per_expert, per_rank) = words[3..].split_at(world.experts());
        let counts = Self {
            tokens: words[0],
            mode: NonZeroU32::new(words[1])
                .map_or(DispatchMode::Plain, |pad_multiple| DispatchMode::Permuted { pad_multiple }),
            capacity: (words[2] != UNBOUNDED).then_some(words[2]),
            per_expert: per_expert.to_vec(),
            per_rank: per_rank.to_vec(),
        };
        counts.check(world)?;
        Ok(counts)
    }

    /// Checks bounds that hold for every routing: a token counts at most once for each expert and each rank, and
    /// counts for a rank exactly when it has a copy for one of the rank's experts.
    fn check(&self, world: &World) -> Result<(), ImpossibleCounts> {
        let pad_multiple = self.mode.pad_multiple() as u32;
        if let Some(rows) = self.capacity.filter(|rows| !rows.is_multiple_of(pad_multiple)) {
            let text = format!("a capacity of {rows} rows, which are padded to {pad_multiple}");
            return Err(ImpossibleCounts(text));
        }
        for rank in world.topology().all_ranks() {
            let copies = &self.per_expert[world.placement().positions_of(rank)];
            let (tokens, all) =
                (self.per_rank[rank.index()], copies.iter().map(|&count| u64::from(count)).sum());
            let most = copies.iter().copied().max().unwrap_or(0);
            if tokens > self.tokens || most > tokens || u64::from(tokens) > all {
                return Err(ImpossibleCounts(format!(
                    "{tokens} of {} tokens for rank {rank}, with {all} copies, of which {most} for one expert",
                    self.tokens
                )));
            }
        }
        Ok(())
    }
}

/// The counts that a peer sent are impossible for any routing: the peer's message or memory was damaged.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
#[error("{0}")]
pub struct ImpossibleCounts(String);

/// `all` must hold the counts of every rank of the world, in rank order.
fn check_all(world: &World, all: &[Counts]) -> Result<()> {
    let shape = |what, expected, found, unit| -> Result<()> {
        if expected == found {
            return Ok(());
        }
        Err(CallerError::Shape { what, expected, found, unit }.into())
    };
    shape("counts", world.ranks(), all.len(), "ranks")?;
    for counts in all {
        shape("counts per expert", world.experts(), counts.per_expert.len(), "experts")?;
        shape("counts per rank", world.ranks(), counts.per_rank.len(), "ranks")?;
    }
    Ok(())
}

/// The shape of a rank's dispatch output.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct ReceiveShape {
    /// How the rows are arranged.
    pub mode: DispatchMode,
    /// Rows of the output after drops, padding included.
    pub rows: usize,
    /// Rows of the output without a capacity, padding included.
    pub wanted_rows: usize,
    /// `[local experts]`: rows of each local expert after drops, padding included (empty in plain mode).
    pub tokens_per_expert: Vec<u32>,
    /// `[local experts]`: rows of each local expert after drops, without padding (empty in plain mode).
    pub kept_per_expert: Vec<u32>,
    /// `[local experts]`: first row of each local expert (empty in plain mode).
    pub first_row: Vec<u32>,
    /// The capacity of the rank; `None` = no limit.
    pub capacity: Option<usize>,
}

impl ReceiveShape {
    /// Whether rows were dropped because the capacity was too small.
    pub fn overflow(&self) -> bool {
        self.wanted_rows > self.rows
    }

    /// Rows that the output memory must have: the capacity if one was given, else [`rows`](Self::rows).
    pub fn allocated_rows(&self) -> usize {
        self.capacity.unwrap_or(self.rows)
    }

    /// The padding rows, which must be zero: one range of rows per local expert, possibly empty.
    pub fn padding(&self) -> impl Iterator<Item = Range<usize>> + '_ {
        (0..self.first_row.len()).map(|e| {
            let first = self.first_row[e] as usize;
            first + self.kept_per_expert[e] as usize..first + self.tokens_per_expert[e] as usize
        })
    }
}

/// Calls `visit` for each token with its index, the positions of its experts in ascending order, and their weights.
fn by_position(world: &World, routing: &Routing, mut visit: impl FnMut(usize, &[u32], &[f32])) {
    let placement = world.placement();
    if placement.is_in_order() {
        for (token, (experts, weights)) in routing.rows().enumerate() {
            visit(token, experts, weights);
        }
        return;
    }
    // A routing's rows are sorted by expert, and a placement table may give experts positions in a different order.
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

/// The rows of one source rank on all receiving ranks. Both tables are indexed by expert position (permuted mode) or by
/// rank (plain mode).
struct Bases {
    /// Next free row for a copy of this source rank.
    next: Vec<u32>,
    /// The first row that is dropped.
    limit: Vec<u32>,
}

/// First row and number of unpadded rows of each local expert of `rank`.
fn expert_groups(world: &World, rank: Rank, all: &[Counts]) -> Result<Vec<(u64, u64)>> {
    let pad = all[rank.index()].mode.pad_multiple() as u64;
    let mut start = 0u64;
    let mut groups = Vec::with_capacity(world.placement().local_experts(rank));
    for position in world.placement().positions_of(rank) {
        let count: u64 = all.iter().map(|counts| u64::from(counts.per_expert[position])).sum();
        groups.push((start, count));
        start += count.next_multiple_of(pad);
    }
    if start > u64::from(u32::MAX) {
        return Err(CallerError::TooManyRows { rank, rows: start }.into());
    }
    Ok(groups)
}

/// Rows that a rank receives in plain mode, before drops.
fn distinct_rows(rank: Rank, all: &[Counts]) -> Result<u64> {
    let rows = all.iter().map(|counts| u64::from(counts.per_rank[rank.index()])).sum();
    if rows > u64::from(u32::MAX) {
        return Err(CallerError::TooManyRows { rank, rows }.into());
    }
    Ok(rows)
}

/// The first row that is dropped. Without a capacity it is `u32::MAX`, beyond every row number: a rank has at most
/// `u32::MAX` rows.
fn limit_of(counts: &Counts) -> u32 {
    counts.capacity.unwrap_or(u32::MAX)
}

impl Bases {
    fn new(world: &World, source: Rank, all: &[Counts]) -> Result<Self> {
        let before = &all[..source.index()];
        let (mut next, mut limit) = (Vec::new(), Vec::new());
        for rank in world.topology().all_ranks() {
            let rows_limit = limit_of(&all[rank.index()]);
            match all[source.index()].mode {
                DispatchMode::Plain => {
                    distinct_rows(rank, all)?;
                    next.push(before.iter().map(|counts| counts.per_rank[rank.index()]).sum());
                    limit.push(rows_limit);
                }
                DispatchMode::Permuted { .. } => {
                    let positions = world.placement().positions_of(rank);
                    for (position, (start, _)) in positions.zip(expert_groups(world, rank, all)?) {
                        // The sum cannot overflow: it is at most the rank's rows, which `expert_groups` checked.
                        let earlier: u32 = before.iter().map(|counts| counts.per_expert[position]).sum();
                        next.push(start as u32 + earlier);
                        limit.push(rows_limit);
                    }
                }
            }
        }
        Ok(Self { next, limit })
    }

    /// Takes the next row of a table entry. Returns the row and whether it is kept.
    fn take(&mut self, counter: usize) -> (u32, bool) {
        let row = self.next[counter];
        self.next[counter] = row.wrapping_add(1);
        (row, row < self.limit[counter])
    }
}

/// The shape of the dispatch output of `rank`, given the counts of all ranks in rank order.
///
/// # Errors
/// [`CallerError::TooManyRows`] when the number of rows does not fit in 32 bits; [`CallerError::Shape`] when the counts
/// are not those of this world.
///
/// # Panics
/// When the world has no such rank.
pub fn receive_shape(world: &World, rank: Rank, all: &[Counts]) -> Result<ReceiveShape> {
    check_all(world, all)?;
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
            let pad = u64::from(pad_multiple.get());
            for (start, count) in expert_groups(world, rank, all)? {
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

/// One copy of a token: its expert, and its row on the rank that holds the expert.
#[derive(Debug, Clone, Copy, PartialEq, Eq, bytemuck::Pod, bytemuck::Zeroable)]
#[repr(C)]
pub struct TokenCopy {
    /// The expert's position ([`crate::ExpertPlacement`]), which determines the rank too.
    pub position: u32,
    /// Final row on that rank.
    pub row: u32,
}

/// The final row of every copy of one source rank's tokens, without dropped copies.
///
/// A token's copies are ordered by expert position, so the copies for one rank, and those for one domain, are adjacent.
/// In plain mode a token's copies for experts of one rank share a row.
#[derive(Debug, Clone, PartialEq)]
pub struct DispatchLayout {
    domains: usize,
    /// `[tokens * domains + 1]`: index of the first copy of each (token, domain), and the number of copies.
    offsets: Vec<u32>,
    copies: Vec<TokenCopy>,
    weights: Vec<f32>,
}

impl DispatchLayout {
    /// Lays out the tokens of `routing.rank()`, given the counts of all ranks in rank order.
    ///
    /// # Errors
    /// - [`CallerError::TooManyRows`] when the number of rows of a rank does not fit in 32 bits.
    /// - [`CallerError::Shape`] when the routing or the counts are not those of this world.
    /// - [`EnvironmentError`] when there is not enough memory for the layout.
    pub fn new(world: &World, routing: &Routing, all: &[Counts]) -> Result<Self> {
        let source = routing.rank();
        check_all(world, all)?;
        check_routing(world, source, routing)?;
        let mut bases = Bases::new(world, source, all)?;
        let permuted = matches!(all[source.index()].mode, DispatchMode::Permuted { .. });
        let placement = world.placement();
        let domains = world.topology().domains();
        let mut offsets = Vec::new();
        let needed = (Size::new(routing.tokens()) * domains + 1).get("a layout", "offsets")?;
        offsets.try_reserve_exact(needed).map_err(|problem| {
            EnvironmentError::new(
                format!("allocating a layout of {needed} offsets"),
                problem,
                "use fewer tokens",
            )
        })?;
        let mut layout = Self {
            domains,
            offsets,
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

    /// Ends the runs of copies of all (token, domain) pairs before index `place`.
    fn close_before(&mut self, place: usize) {
        while self.offsets.len() <= place {
            self.offsets.push(self.copies.len() as u32);
        }
    }

    /// Number of tokens of the source.
    pub fn tokens(&self) -> usize {
        (self.offsets.len() - 1) / self.domains
    }

    /// The copies of one token for experts of one domain.
    pub fn copies(&self, token: usize, domain: usize) -> &[TokenCopy] {
        &self.copies[self.range(token, domain)]
    }

    /// The routing weights of [`copies`](Self::copies), in the same order.
    pub fn weights(&self, token: usize, domain: usize) -> &[f32] {
        &self.weights[self.range(token, domain)]
    }

    /// Number of copies that are not dropped.
    pub fn total_copies(&self) -> usize {
        self.copies.len()
    }

    fn range(&self, token: usize, domain: usize) -> Range<usize> {
        let at = token * self.domains + domain;
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
        let world = World::builder().ranks(8).domains(2).experts(64).build().unwrap();
        for tokens in [0, 1, 1000] {
            let routing = Workload { tokens, experts: 64, topk: 8, skew: 0.0, seed: 1 }.routing(Rank(3));
            let counts = Counts::of(&world, &routing, DispatchMode::permuted(16).unwrap(), Some(32)).unwrap();
            let words = counts.to_words();
            assert_eq!(words.len(), 64 + 8 + 3);
            assert_eq!(Counts::from_words(&world, &words), Ok(counts));
        }
    }

    #[test]
    fn capacity_must_fit_the_padding() {
        let world = World::builder().ranks(1).experts(2).build().unwrap();
        let routing = Routing::empty(Rank(0), 2);
        let error = Counts::of(&world, &routing, DispatchMode::permuted(16).unwrap(), Some(24)).unwrap_err();
        assert_eq!(error.to_string(), "capacity of 24 rows is not a multiple of pad_multiple 16");
        let error = Counts::of(&world, &routing, DispatchMode::Plain, Some(1 << 32)).unwrap_err();
        assert!(error.to_string().contains("4294967296 rows"), "{error}");
        let error = Counts::of(&world, &Routing::empty(Rank(0), 3), DispatchMode::Plain, None).unwrap_err();
        assert_eq!(error.to_string(), "routing: expected 2 experts, found 3");
    }

    #[test]
    fn rows_beyond_32_bits_are_refused() {
        let world = World::builder().ranks(1).experts(1).build().unwrap();
        let counts = Counts {
            tokens: u32::MAX,
            mode: DispatchMode::permuted(128).unwrap(),
            capacity: None,
            per_expert: vec![u32::MAX],
            per_rank: vec![u32::MAX],
        };
        let error = receive_shape(&world, Rank(0), &[counts]).unwrap_err();
        assert!(error.to_string().contains("rank 0 would receive 4294967296 rows"), "{error}");
    }

    /// A world of 2 ranks with 2 experts each, and the counts of a rank with 5 tokens: 4 for rank 0, 3 for rank 1.
    fn possible() -> (World, Vec<u32>) {
        (World::builder().ranks(2).experts(4).build().unwrap(), vec![5, 2, UNBOUNDED, 4, 1, 2, 2, 4, 3])
    }

    #[test]
    fn counts_that_no_routing_gives_are_refused() {
        let (world, words) = possible();
        Counts::from_words(&world, &words).unwrap();
        for (at, value) in [
            (0, 3),        // fewer tokens than rank 0 receives
            (2, 7),        // a capacity that is not a multiple of the pad multiple
            (3, 5),        // more copies for an expert than tokens for its rank
            (4, u32::MAX), // as above
            (5, 0),        // fewer copies than tokens
            (7, 3),        // fewer tokens than copies for one expert
            (7, 6),        // more tokens for a rank than the source has
            (8, u32::MAX), // as above
        ] {
            let mut words = words.clone();
            words[at] = value;
            assert!(Counts::from_words(&world, &words).is_err(), "word {at} is {value}");
        }
    }

    #[test]
    fn counts_and_routings_of_another_world_are_refused() {
        let (world, words) = possible();
        let counts = Counts::from_words(&world, &words).unwrap();
        let routing = Routing::empty(Rank(0), 4);
        let all = vec![counts.clone(), counts];
        DispatchLayout::new(&world, &routing, &all).unwrap();
        assert!(DispatchLayout::new(&world, &routing, &all[..1]).is_err());
        assert!(receive_shape(&world, Rank(0), &all[..1]).is_err());
        assert!(DispatchLayout::new(&world, &Routing::empty(Rank(0), 5), &all).is_err());
        let mut short = all.clone();
        short[1].per_expert.pop();
        assert!(DispatchLayout::new(&world, &routing, &short).is_err());
        assert!(receive_shape(&world, Rank(1), &short).is_err());
    }

    proptest! {
        /// Damaged counts of a peer are rejected, or give rows within the allocation, or an error.
        #[test]
        fn damaged_counts_give_no_rows_beyond_the_allocation(
            damage in prop::collection::vec((0usize..9, prop_oneof![0u32..8, any::<u32>()]), 0..5),
            capacity in prop::option::of(0usize..9),
        ) {
            let (world, mut words) = possible();
            damage.into_iter().for_each(|(at, value)| words[at] = value);
            let Ok(theirs) = Counts::from_words(&world, &words) else { return Ok(()) };
            let routing = Workload { tokens: 9, experts: 4, topk: 3, skew: 0.0, seed: 1 }.routing(Rank(1));
            let own = Counts::of(&world, &routing, theirs.mode, capacity.map(|rows| rows * theirs.mode.pad_multiple()));
            let Ok(own) = own else { return Ok(()) };
            let all = [theirs, own];
            if let Ok(shape) = receive_shape(&world, Rank(1), &all) {
                prop_assert!(shape.rows <= shape.allocated_rows() && shape.allocated_rows() <= u32::MAX as usize);
                prop_assert!(shape.padding().all(|rows| rows.end <= shape.rows));
            }
            if let Ok(layout) = DispatchLayout::new(&world, &routing, &all) {
                prop_assert!(layout.total_copies() <= routing.copies());
            }
        }

        /// The layout equals the oracle, which places all copies of the world: it has every kept copy once, in the
        /// oracle's row, and no other copy.
        #[test]
        fn layout_equals_the_oracle(
            domains in 1usize..4, domain_size in 1usize..4, per_rank in 1usize..4,
            topk in 0usize..6, pad in prop_oneof![Just(0u32), Just(1), Just(4), Just(16)],
            tokens in prop::collection::vec(0usize..20, 9), capacity in prop::collection::vec(prop::option::of(0usize..6), 9),
            shuffle in any::<bool>(), seed in any::<u64>(),
        ) {
            let ranks = domains * domain_size;
            let experts = ranks * per_rank;
            let world = World::builder().ranks(ranks).domains(domains);
            let world = if shuffle {
                let owners: Vec<Rank> = (0..experts).map(|e| Rank(((e as u64 * 7 + seed % 5) % ranks as u64) as u32)).collect();
                world.placement(&owners)
            } else {
                world.experts(experts)
            };
            let world = world.build().unwrap();
            let mode = DispatchMode::permuted(pad as usize).unwrap_or(DispatchMode::Plain);
            let capacity: Vec<Option<usize>> =
                (0..ranks).map(|r| capacity[r].map(|c| c * 3 * mode.pad_multiple())).collect();
            let routings: Vec<Routing> = world.topology().all_ranks().map(|rank| {
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
                            let owner = world.placement().owner_at(copy.position);
                            prop_assert_eq!(world.topology().domain_of(owner), domain);
                            let expert = world.placement().expert_at(copy.position);
                            placed[owner.index()].entry(copy.row as usize).or_insert_with(Vec::new)
                                .push((routing.rank(), token, expert, weight));
                        }
                    }
                }
            }
            for rank in world.topology().all_ranks() {
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
