//! The bytes that any implementation of the operators must move. Divided by the ceiling they give the floor.

use std::collections::BTreeMap;

use ep::{DispatchMode, Rank, Routing, World};
use serde::Serialize;

use crate::bench::measure::Operator;
use crate::bench::plan::BenchPlan;
use crate::bench::scenario::Scenario;
use crate::common::memory::Moved;

/// The bytes that one dispatch and one combine must move.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) struct MustMove {
    pub(super) dispatch: Moved,
    pub(super) combine: Moved,
}

impl MustMove {
    /// Bytes that all ranks together read once and write once in memory. `rows`: rows received by all ranks.
    pub(super) fn through_memory(
        plan: &BenchPlan,
        scenario: &Scenario,
        routings: &[Routing],
        rows: u64,
    ) -> Self {
        let format = plan.format();
        let sent = |routing: &Routing| {
            (0..routing.tokens()).filter(|&token| !routing.experts_of(token).is_empty()).count()
        };
        let sent: usize = routings.iter().map(sent).sum();
        let tokens: usize = routings.iter().map(Routing::tokens).sum();
        // Combine reads no padding.
        let summed = match scenario.mode {
            DispatchMode::Plain => rows,
            DispatchMode::Permuted { .. } => routings.iter().map(|routing| routing.copies() as u64).sum(),
        };
        let probs = size_of::<f32>() * scenario.probs_per_row(&plan.world);
        let row = format.output_row_bytes(plan.hidden) + format.scale_row_bytes(plan.hidden) + probs;
        let token = format.input_row_bytes(plan.hidden) + format.input_scale_row_bytes(plan.hidden);
        let output = plan.bf16_row_bytes();
        Self {
            dispatch: Moved { read: (sent * token) as u64, written: rows * row as u64 },
            combine: Moved { read: summed * output as u64, written: (tokens * output) as u64 },
        }
    }

    /// Bytes on the links of the busiest GPU, in their busier direction. `gpus`: the GPU of each rank.
    pub(super) fn over_the_wire(plan: &BenchPlan, crossing: &Crossing, gpus: &[String]) -> Self {
        let tokens = crossing.busiest(gpus);
        let received = |read| Moved { read, written: 0 };
        Self {
            dispatch: received(tokens * dispatched_row_bytes(plan)),
            combine: received(tokens * plan.bf16_row_bytes() as u64),
        }
    }

    /// The parts of a timed call, which move their bytes one after the other; `None` for calls that move no tokens.
    pub(super) fn by(self, operator: Operator) -> Option<Vec<Moved>> {
        let Self { dispatch, combine } = self;
        match operator {
            Operator::Route | Operator::Preprocess => None,
            Operator::Dispatch | Operator::Cold | Operator::Bounded => Some(vec![dispatch]),
            Operator::Combine | Operator::CombineProbs => Some(vec![combine]),
            Operator::Layer | Operator::Layers => Some(vec![dispatch, combine, dispatch, combine]),
        }
    }

    /// Estimates the bytes of dispatch or combine, whichever moves fewer, before the received rows are known.
    pub(super) fn about(plan: &BenchPlan, scenario: &Scenario) -> u64 {
        let tokens = scenario.source.all_tokens().unwrap_or(u64::MAX);
        let rows = scenario.most_rows(&plan.world).unwrap_or(u64::MAX);
        let format = plan.format();
        let row = format.output_row_bytes(plan.hidden) as u64;
        let dispatch = tokens
            .saturating_mul(format.input_row_bytes(plan.hidden) as u64)
            .saturating_add(rows.saturating_mul(row));
        let combine = rows.saturating_add(tokens).saturating_mul(plan.bf16_row_bytes() as u64);
        dispatch.min(combine)
    }
}

/// Bytes of a dispatched row, scales included.
fn dispatched_row_bytes(plan: &BenchPlan) -> u64 {
    let format = plan.format();
    (format.output_row_bytes(plan.hidden) + format.scale_row_bytes(plan.hidden)) as u64
}

/// Tokens that cross between ranks of a domain, by rank. A token crosses once to each other rank that has any of its
/// experts: from its own rank, or in another domain from the rank that forwards it. Combine moves one sum per crossing in
/// the opposite direction.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(super) struct Crossing {
    pub(super) sent: Vec<u64>,
    pub(super) received: Vec<u64>,
}

impl Crossing {
    pub(super) fn of(world: &World, routings: &[Routing]) -> Self {
        let mut crossing = Self { sent: vec![0; world.ranks()], received: vec![0; world.ranks()] };
        let owner = |&expert: &u32| world.placement().owner_at(world.placement().position_of(expert));
        let topology = world.topology();
        let mut owners: Vec<Rank> = Vec::new();
        for routing in routings {
            let local_rank = topology.local_rank_of(routing.rank());
            for (experts, _) in routing.rows() {
                owners.clear();
                owners.extend(experts.iter().map(owner));
                owners.sort_unstable();
                owners.dedup();
                for &owner in &owners {
                    let from = topology.rank_at(topology.domain_of(owner), local_rank);
                    if from != owner {
                        crossing.sent[from.index()] += 1;
                        crossing.received[owner.index()] += 1;
                    }
                }
            }
        }
        crossing
    }

    /// The most tokens that one GPU sends or receives. Links carry both directions at full rate, so the direction with
    /// more tokens bounds a GPU, and the busiest GPU bounds the operator. `gpus`: the GPU of each rank. Ranks of
    /// different domains may share a GPU.
    fn busiest(&self, gpus: &[String]) -> u64 {
        let of_gpu = |tokens: &[u64]| {
            let mut sums: BTreeMap<&str, u64> = BTreeMap::new();
            gpus.iter()
                .zip(tokens)
                .for_each(|(gpu, tokens)| *sums.entry(gpu.as_str()).or_default() += tokens);
            sums.into_values().max()
        };
        of_gpu(&self.sent).max(of_gpu(&self.received)).unwrap_or_default()
    }
}

/// Bytes that one dispatch moves between ranks.
#[derive(Debug, Serialize)]
pub(super) struct WireReport {
    pub(super) dispatch_sent_bytes_per_rank: Vec<u64>,
    pub(super) dispatch_received_bytes_per_rank: Vec<u64>,
}

impl WireReport {
    pub(super) fn new(plan: &BenchPlan, crossing: &Crossing) -> Self {
        let row = dispatched_row_bytes(plan);
        let bytes = |tokens: &[u64]| tokens.iter().map(|tokens| tokens * row).collect();
        Self {
            dispatch_sent_bytes_per_rank: bytes(&crossing.sent),
            dispatch_received_bytes_per_rank: bytes(&crossing.received),
        }
    }
}

#[cfg(test)]
mod tests {
    use ep::workload::Workload;

    use super::*;
    use crate::bench::plan::tests::plan;

    fn gpus(names: &[&str]) -> Vec<String> {
        names.iter().map(|&name| name.into()).collect()
    }

    #[test]
    fn bytes_through_memory_are_counted_once() {
        let bytes = |options: &str| {
            let plan = plan(&format!(
                "--ranks 2 --domains 1 --experts 4 --topk 2 --hidden 128 --tokens 10 {options}"
            ));
            let scenario = &plan.scenarios[0];
            MustMove::through_memory(&plan, scenario, &scenario.source.routings(), 48)
        };
        // 20 tokens and 48 rows of 256 bytes; 40 rows of real copies and 20 tokens.
        let moved = |read, written| Moved { read, written };
        let bf16 = bytes("");
        assert_eq!(bf16.dispatch, moved(20 * 256, 48 * (256 + 4)));
        assert_eq!(bf16.combine, moved(40 * 256, 20 * 256));
        assert_eq!(bytes("--dtype fp8").dispatch, moved(20 * 256, 48 * (128 + 4 + 4)));
        assert_eq!(bytes("--dtype fp8-given").dispatch, moved(20 * (128 + 4), 48 * (128 + 4 + 4)));
        let layer = bf16.by(Operator::Layer).unwrap();
        assert_eq!(layer.iter().map(|moved| moved.bytes()).sum::<u64>(), 2 * (17_600 + 15_360));
        // In plain mode a row has a probability for each of the rank's two experts, and combine reads all rows.
        let plain = bytes("--mode plain");
        assert_eq!(plain.dispatch, moved(20 * 256, 48 * (256 + 2 * 4)));
        assert_eq!(plain.combine, moved(48 * 256, 20 * 256));
    }

    /// Counts crossings pair by pair: whether `from` sends a token of a rank on its rail to `to`, a rank of its domain.
    fn brute_force(world: &World, routings: &[Routing]) -> Crossing {
        let goes = |routing: &Routing, token: usize, to: Rank| {
            let experts = world.placement().positions_of(to).map(|at| world.placement().expert_at(at as u32));
            experts.into_iter().any(|expert| routing.experts_of(token).contains(&expert))
        };
        let topology = world.topology();
        let between = |from: Rank, to: Rank| {
            if from == to || topology.domain_of(from) != topology.domain_of(to) {
                return 0;
            }
            let on_rail = topology.rail_ranks(topology.local_rank_of(from));
            let of = |source: Rank| {
                let routing = &routings[source.index()];
                (0..routing.tokens()).filter(|&token| goes(routing, token, to)).count() as u64
            };
            on_rail.map(of).sum()
        };
        let all = || world.topology().all_ranks();
        Crossing {
            sent: all().map(|from| all().map(|to| between(from, to)).sum()).collect(),
            received: all().map(|to| all().map(|from| between(from, to)).sum()).collect(),
        }
    }

    #[test]
    fn crossings_equal_a_count_pair_by_pair() {
        let mut most_received = 0;
        for (ranks, experts, topk, skew) in [(1, 4, 2, 0.0), (2, 4, 1, 0.0), (4, 16, 5, 1.5), (8, 8, 8, 0.3)]
        {
            let world = || World::builder().ranks(ranks);
            // Experts placed round-robin: neighbouring experts are on different ranks.
            let dealt: Vec<Rank> = (0..experts).map(|expert| Rank((expert % ranks) as u32)).collect();
            let domains = [1, 2, 4].into_iter().filter(|domains| ranks % domains == 0);
            let worlds = domains.flat_map(|domains| {
                [world().domains(domains).experts(experts), world().domains(domains).placement(&dealt)]
            });
            for world in worlds {
                let world = world.build().unwrap();
                let draw = |rank: u32| {
                    Workload { tokens: 17 * rank as usize, experts, topk, skew, seed: 3 }.routing(Rank(rank))
                };
                let routings: Vec<Routing> = (0..ranks as u32).map(draw).collect();
                let crossing = Crossing::of(&world, &routings);
                assert_eq!(crossing, brute_force(&world, &routings));
                most_received = most_received.max(crossing.received.iter().copied().max().unwrap());
            }
        }
        assert!(most_received > 0);
    }

    #[test]
    fn the_busier_direction_of_the_busiest_rank_bounds_the_operator() {
        let plan = |dtype: &str| plan(&format!("--ranks 2 --domains 1 --hidden 256 --dtype {dtype}"));
        for crossing in [
            Crossing { sent: vec![5, 9], received: vec![9, 5] },
            Crossing { sent: vec![9, 0], received: vec![0, 9] },
            Crossing { sent: vec![4, 5], received: vec![9, 0] },
        ] {
            let bf16 = MustMove::over_the_wire(&plan("bf16"), &crossing, &gpus(&["a", "b"]));
            let received = |read| Moved { read, written: 0 };
            assert_eq!(bf16, MustMove { dispatch: received(9 * 512), combine: received(9 * 512) });
            let fp8 = MustMove::over_the_wire(&plan("fp8"), &crossing, &gpus(&["a", "b"]));
            assert_eq!(fp8, MustMove { dispatch: received(9 * (256 + 8)), combine: received(9 * 512) });
            let layer = fp8.by(Operator::Layers).unwrap();
            assert_eq!(layer.iter().map(|moved| moved.bytes()).sum::<u64>(), 2 * 9 * (264 + 512));
            assert_eq!(fp8.by(Operator::Bounded), fp8.by(Operator::Cold));
        }
    }

    #[test]
    fn ranks_that_share_a_gpu_share_its_links() {
        let crossing = Crossing { sent: vec![5, 9, 4, 1], received: vec![3, 3, 6, 7] };
        assert_eq!(crossing.busiest(&gpus(&["a", "b", "a", "b"])), 10);
        assert_eq!(crossing.busiest(&gpus(&["a", "b", "b", "a"])), 13);
        assert_eq!(crossing.busiest(&gpus(&["a", "b", "c", "d"])), 9);
    }
}
