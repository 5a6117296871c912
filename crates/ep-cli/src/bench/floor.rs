//! The bytes that the operators' definition makes pass the ceiling, whatever the implementation: a floor of the time.

use ep::{Rank, Routing, World};
use serde::Serialize;

use crate::bench::measure::Operator;
use crate::bench::plan::Plan;

/// Bytes of one dispatch and of one combine.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) struct MustMove {
    pub(super) dispatch: u64,
    pub(super) combine: u64,
}

impl MustMove {
    /// Bytes that are read once and written once, of all ranks together; `rows` received by all ranks.
    pub(super) fn through_memory(plan: &Plan, routings: &[Routing], rows: u64) -> Self {
        let format = plan.format();
        let sent = |routing: &Routing| {
            (0..routing.tokens()).filter(|&token| !routing.experts_of(token).is_empty()).count()
        };
        let sent: usize = routings.iter().map(sent).sum();
        let tokens: usize = routings.iter().map(Routing::tokens).sum();
        let copies: usize = routings.iter().map(Routing::copies).sum();
        let row =
            format.output_row_bytes(plan.hidden) + format.scale_row_bytes(plan.hidden) + size_of::<f32>();
        let token = format.input_row_bytes(plan.hidden) + format.input_scale_row_bytes(plan.hidden);
        Self {
            dispatch: (sent * token) as u64 + rows * row as u64,
            combine: ((copies + tokens) * plan.bf16_row_bytes()) as u64,
        }
    }

    /// Bytes that cross the wire of the busiest rank in one direction.
    pub(super) fn over_the_wire(plan: &Plan, crossing: &Crossing) -> Self {
        let tokens = crossing.busiest();
        Self { dispatch: tokens * dispatched_row_bytes(plan), combine: tokens * plan.bf16_row_bytes() as u64 }
    }

    pub(super) fn by(self, operator: Operator) -> Option<u64> {
        match operator {
            Operator::Route | Operator::Preprocess => None,
            Operator::Dispatch | Operator::Cold | Operator::Bounded => Some(self.dispatch),
            Operator::Combine | Operator::CombineProbs => Some(self.combine),
            Operator::Layer | Operator::Layers => Some(2 * (self.dispatch + self.combine)),
        }
    }
}

/// Bytes of a dispatched token, scales included.
fn dispatched_row_bytes(plan: &Plan) -> u64 {
    let format = plan.format();
    (format.output_row_bytes(plan.hidden) + format.scale_row_bytes(plan.hidden)) as u64
}

/// Distinct tokens that cross between ranks: a token goes once to each other rank that has any of its experts. In
/// dispatch they are sent and received so; in combine the other way round, a sum for each.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(super) struct Crossing {
    pub(super) sent: Vec<u64>,
    pub(super) received: Vec<u64>,
}

impl Crossing {
    pub(super) fn of(world: &World, routings: &[Routing]) -> Self {
        let mut crossing = Self { sent: vec![0; world.ranks()], received: vec![0; world.ranks()] };
        let owner = |&expert: &u32| world.placement.owner_at(world.placement.position_of(expert));
        let mut owners: Vec<Rank> = Vec::new();
        for routing in routings {
            for (experts, _) in routing.rows() {
                owners.clear();
                owners.extend(experts.iter().map(owner).filter(|&owner| owner != routing.rank()));
                owners.sort_unstable();
                owners.dedup();
                crossing.sent[routing.rank().index()] += owners.len() as u64;
                owners.iter().for_each(|owner| crossing.received[owner.index()] += 1);
            }
        }
        crossing
    }

    /// A wire carries as much in either direction at once: the larger one bounds a rank, and the slowest rank all.
    fn busiest(&self) -> u64 {
        self.sent.iter().chain(&self.received).copied().max().unwrap_or_default()
    }
}

/// Bytes that a dispatch moves between ranks.
#[derive(Debug, Serialize)]
pub(super) struct WireReport {
    pub(super) dispatch_sent_bytes_per_rank: Vec<u64>,
    pub(super) dispatch_received_bytes_per_rank: Vec<u64>,
}

impl WireReport {
    pub(super) fn new(plan: &Plan, crossing: &Crossing) -> Self {
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
    use ep::Topology;
    use ep::topology::ExpertPlacement;
    use ep::workload::Workload;

    use super::*;
    use crate::bench::plan::tests::plan;

    #[test]
    fn bytes_through_memory_are_counted_once() {
        let bytes = |options: &str| {
            let plan = plan(&format!(
                "--ranks 2 --domains 1 --experts 4 --topk 2 --hidden 128 --tokens 10 {options}"
            ));
            MustMove::through_memory(&plan, &plan.scenarios[0].routings(), 48)
        };
        // 20 tokens and 48 rows of 256 bytes; 40 rows of real copies and 20 tokens.
        assert_eq!(bytes(""), MustMove { dispatch: 20 * 256 + 48 * (256 + 4), combine: 60 * 256 });
        assert_eq!(bytes("--dtype fp8").dispatch, 20 * 256 + 48 * (128 + 4 + 4));
        assert_eq!(bytes("--dtype fp8-given").dispatch, 20 * (128 + 4) + 48 * (128 + 4 + 4));
        assert_eq!(bytes("").by(Operator::Layer), Some(2 * (17_600 + 15_360)));
    }

    /// Does a token of `from` have an expert on `to`? Asked for every pair, one by one.
    fn brute_force(world: &World, routings: &[Routing]) -> Crossing {
        let goes = |routing: &Routing, token: usize, to: Rank| {
            let experts = world.placement.positions_of(to).map(|at| world.placement.expert_at(at as u32));
            experts.into_iter().any(|expert| routing.experts_of(token).contains(&expert))
        };
        let between = |from: Rank, to: Rank| {
            let routing = &routings[from.index()];
            let crosses = |&token: &usize| from != to && goes(routing, token, to);
            (0..routing.tokens()).filter(crosses).count() as u64
        };
        let all = || world.topology.all_ranks();
        Crossing {
            sent: all().map(|from| all().map(|to| between(from, to)).sum()).collect(),
            received: all().map(|to| all().map(|from| between(from, to)).sum()).collect(),
        }
    }

    #[test]
    fn tokens_that_cross_are_those_of_a_count_one_by_one() {
        let mut most_received = 0;
        for (ranks, experts, topk, skew) in [(1, 4, 2, 0.0), (2, 4, 1, 0.0), (4, 16, 5, 1.5), (8, 8, 8, 0.3)]
        {
            let topology = Topology::new(ranks, 1).unwrap();
            // Experts dealt out in turn: neighbours live on different ranks.
            let dealt: Vec<Rank> = (0..experts).map(|expert| Rank((expert % ranks) as u32)).collect();
            for placement in [
                ExpertPlacement::contiguous(experts, &topology).unwrap(),
                ExpertPlacement::table(&dealt, &topology).unwrap(),
            ] {
                let world = World { topology, placement };
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
    fn the_busiest_direction_of_the_busiest_rank_is_the_floors() {
        let plan = |dtype: &str| plan(&format!("--ranks 2 --domains 1 --hidden 256 --dtype {dtype}"));
        for crossing in [
            Crossing { sent: vec![5, 9], received: vec![9, 5] },
            Crossing { sent: vec![9, 0], received: vec![0, 9] },
            Crossing { sent: vec![4, 5], received: vec![9, 0] },
        ] {
            let bf16 = MustMove::over_the_wire(&plan("bf16"), &crossing);
            assert_eq!(bf16, MustMove { dispatch: 9 * 512, combine: 9 * 512 });
            let fp8 = MustMove::over_the_wire(&plan("fp8"), &crossing);
            assert_eq!(fp8, MustMove { dispatch: 9 * (256 + 8), combine: 9 * 512 });
            assert_eq!(fp8.by(Operator::Layers), Some(2 * 9 * (264 + 512)));
            assert_eq!(fp8.by(Operator::Bounded), fp8.by(Operator::Cold));
        }
    }
}
