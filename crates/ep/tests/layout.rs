//! Tests of layouts against the oracle's rows, and of the largest row numbers.

#![allow(clippy::unwrap_used)]

use ep::oracle::{self, ReceivedRows};
use ep::workload::Workload;
use ep::{Counts, DispatchLayout, DispatchMode, Rank, ReceiveShape, Routing, World, layout};
use proptest::prelude::*;

fn counts(tokens: u32, mode: DispatchMode, per_expert: u32, per_rank: u32) -> Counts {
    Counts { tokens, mode, capacity: None, per_expert: vec![per_expert], per_rank: vec![per_rank] }
}

#[test]
fn the_last_row_number_is_used() {
    let world = World::builder().ranks(1).experts(1).build().unwrap();
    let permuted = |rows| counts(1, DispatchMode::permuted(1).unwrap(), rows, 1);
    let plain = |rows| counts(1, DispatchMode::Plain, 1, rows);
    for all in [permuted(u32::MAX), plain(u32::MAX)] {
        let shape = layout::receive_shape(&world, Rank(0), &[all]).unwrap();
        assert_eq!((shape.rows, shape.wanted_rows), (u32::MAX as usize, u32::MAX as usize));
        assert!(!shape.overflow());
        assert_eq!(shape.allocated_rows(), u32::MAX as usize);
    }
}

#[test]
fn one_row_more_is_refused_in_both_modes() {
    let two_ranks = World::builder().ranks(2).experts(2).build().unwrap();
    for mode in [DispatchMode::Plain, DispatchMode::permuted(1).unwrap()] {
        let of = |copies: u32| Counts {
            tokens: 1,
            mode,
            capacity: None,
            per_expert: vec![copies, 0],
            per_rank: vec![copies, 0],
        };
        for more in [1, 5] {
            let all = [of(u32::MAX), of(more)];
            let rows = u64::from(u32::MAX) + u64::from(more);
            let expected = format!("rank 0 would receive {rows} rows");
            let shape = layout::receive_shape(&two_ranks, Rank(0), &all).unwrap_err().to_string();
            assert!(shape.contains(&expected), "{shape}");
            // The sender detects the error too, before it sends anything.
            let routing = Routing::from_topk(Rank(0), 2, 1, &[0], &[1.0]).unwrap();
            let sender = DispatchLayout::new(&two_ranks, &routing, &all).unwrap_err().to_string();
            assert!(sender.contains(&expected), "{sender}");
        }
        assert!(layout::receive_shape(&two_ranks, Rank(0), &[of(u32::MAX), of(0)]).is_ok());
    }
}

#[test]
fn a_capacity_says_whether_it_overflows() {
    let shape = |rows, wanted_rows, capacity| ReceiveShape {
        mode: DispatchMode::Plain,
        rows,
        wanted_rows,
        tokens_per_expert: Vec::new(),
        kept_per_expert: Vec::new(),
        first_row: Vec::new(),
        capacity,
    };
    assert!(!shape(5, 5, None).overflow());
    assert!(!shape(5, 5, Some(5)).overflow());
    assert!(shape(5, 6, Some(5)).overflow());
    assert_eq!(shape(5, 5, None).allocated_rows(), 5);
    assert_eq!(shape(5, 5, Some(9)).allocated_rows(), 9);
    assert_eq!(shape(0, 0, Some(0)).allocated_rows(), 0);
}

#[test]
fn rows_without_a_token_are_the_padding() {
    let shape = ReceiveShape {
        mode: DispatchMode::permuted(4).unwrap(),
        rows: 12,
        wanted_rows: 12,
        tokens_per_expert: vec![4, 0, 8],
        kept_per_expert: vec![3, 0, 6],
        first_row: vec![0, 4, 4],
        capacity: None,
    };
    assert_eq!(shape.padding().collect::<Vec<_>>(), [3..4, 4..4, 10..12]);
}

#[test]
fn layouts_report_tokens_and_copies() {
    let world = World::builder().ranks(2).domains(2).experts(4).build().unwrap();
    let routing = Workload { tokens: 7, experts: 4, topk: 2, skew: 0.0, seed: 3 }.routing(Rank(1));
    let all: Vec<Counts> = [Routing::empty(Rank(0), 4), routing.clone()]
        .iter()
        .map(|routing| Counts::of(&world, routing, DispatchMode::permuted(8).unwrap(), None).unwrap())
        .collect();
    let layout = DispatchLayout::new(&world, &routing, &all).unwrap();
    assert_eq!((layout.tokens(), layout.total_copies()), (7, 14));
    let nothing = DispatchLayout::new(&world, &Routing::empty(Rank(0), 4), &all).unwrap();
    assert_eq!((nothing.tokens(), nothing.total_copies()), (0, 0));
}

proptest! {
    /// The shape of a rank's rows agrees with the oracle, which places every copy of the world.
    #[test]
    fn shapes_describe_the_oracles_rows(
        domains in 1usize..3, domain_size in 1usize..3, per_rank in 1usize..4, topk in 0usize..4,
        pad in prop_oneof![Just(0u32), Just(1), Just(4)],
        tokens in prop::collection::vec(0usize..12, 4),
        capacity in prop::collection::vec(prop::option::of(0usize..8), 4), seed in any::<u64>(),
    ) {
        let ranks = domains * domain_size;
        let experts = ranks * per_rank;
        let world = World::builder().ranks(ranks).domains(domains).experts(experts).build().unwrap();
        let mode = DispatchMode::permuted(pad as usize).unwrap_or(DispatchMode::Plain);
        let capacity: Vec<Option<usize>> =
            capacity[..ranks].iter().map(|rows| rows.map(|rows| rows * mode.pad_multiple())).collect();
        let routings: Vec<Routing> = world.topology().all_ranks().map(|rank| {
            let tokens = tokens[rank.index()];
            Workload { tokens, experts, topk: topk.min(experts), skew: 0.5, seed }.routing(rank)
        }).collect();
        let all: Vec<Counts> = routings.iter().zip(&capacity)
            .map(|(routing, &capacity)| Counts::of(&world, routing, mode, capacity).unwrap()).collect();

        let unlimited = oracle::rows(&world, &routings, mode, &vec![None; ranks]);
        let mut kept = 0;
        for (rank, ReceivedRows { rows, .. }) in oracle::rows(&world, &routings, mode, &capacity).iter().enumerate() {
            let shape = layout::receive_shape(&world, Rank(rank as u32), &all).unwrap();
            prop_assert_eq!(shape.rows, rows.len());
            prop_assert_eq!(shape.overflow(), unlimited[rank].rows.len() > rows.len());
            prop_assert_eq!(shape.allocated_rows(), capacity[rank].unwrap_or(rows.len()));
            let padding: Vec<usize> = shape.padding().flatten().collect();
            let empty: Vec<usize> = (0..rows.len()).filter(|&row| rows[row].is_none()).collect();
            prop_assert_eq!(padding, empty);
            if pad > 0 {
                kept += rows.iter().flatten().count();
            }
        }
        if pad > 0 {
            let layouts = routings.iter().map(|routing| DispatchLayout::new(&world, routing, &all).unwrap());
            prop_assert_eq!(layouts.map(|layout| layout.total_copies()).sum::<usize>(), kept);
        }
    }
}
