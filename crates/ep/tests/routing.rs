//! Tests of routings against simple sorted lists.

#![allow(clippy::unwrap_used)]

use ep::{Rank, Routing};
use proptest::prelude::*;

/// Experts with their weights, ascending.
type Row = Vec<(u32, f32)>;

/// A number of experts and random rows. The numbers of experts are small, or near one or two words of 64 bits.
fn rows() -> impl Strategy<Value = (usize, Vec<Row>)> {
    prop_oneof![1usize..9, 60usize..70, 120usize..135].prop_flat_map(|experts| {
        let row = prop::collection::btree_map(0..experts as u32, 0.01f32..9.0, 0..experts.min(12) + 1);
        let rows = prop::collection::vec(row.prop_map(|row| row.into_iter().collect::<Row>()), 0..6);
        (Just(experts), rows)
    })
}

proptest! {
    #[test]
    fn every_view_of_a_routing_shows_the_same_rows((experts, rows) in rows(), rank in 0u32..9, turn in 0usize..12) {
        // One more than the longest row, so that every row has a -1. The order of a row's entries is arbitrary.
        let k = rows.iter().map(Vec::len).max().unwrap_or(0) + 1;
        let (mut topk_idx, mut topk_weights) = (Vec::new(), Vec::new());
        let (mut map, mut dense) = (vec![0; rows.len() * experts], vec![0.0; rows.len() * experts]);
        for (token, row) in rows.iter().enumerate() {
            let mut cells: Vec<(i32, f32)> = row.iter().map(|&(expert, weight)| (expert as i32, weight)).collect();
            cells.resize(k, (-1, f32::NAN));
            cells.reverse();
            cells.rotate_left(turn % k);
            topk_idx.extend(cells.iter().map(|cell| cell.0));
            topk_weights.extend(cells.iter().map(|cell| cell.1));
            for &(expert, weight) in row {
                map[token * experts + expert as usize] = 1 + token as u8;
                dense[token * experts + expert as usize] = weight;
            }
        }
        let routing = Routing::from_topk(Rank(rank), experts, k, &topk_idx, &topk_weights).unwrap();
        prop_assert_eq!(&Routing::from_map(Rank(rank), experts, &map, &dense).unwrap(), &routing);

        let copies: Vec<(u32, f32)> = rows.concat();
        prop_assert_eq!(routing.rank(), Rank(rank));
        prop_assert_eq!((routing.tokens(), routing.experts(), routing.copies()), (rows.len(), experts, copies.len()));
        prop_assert!(routing.all_experts().iter().copied().eq(copies.iter().map(|copy| copy.0)));
        prop_assert!(routing.all_weights().iter().copied().eq(copies.iter().map(|copy| copy.1)));
        prop_assert_eq!(routing.dense_probs(), dense);
        let mut begins = vec![0];
        begins.extend(rows.iter().scan(0, |end, row| { *end += row.len() as u32; Some(*end) }));
        prop_assert_eq!(routing.row_begins(), begins);
        prop_assert_eq!(routing.rows().len(), rows.len());
        for (token, (row, (in_order, weights))) in rows.iter().zip(routing.rows()).enumerate() {
            prop_assert!(in_order.iter().copied().zip(weights.iter().copied()).eq(row.iter().copied()));
            prop_assert_eq!(routing.experts_of(token), in_order);
            prop_assert_eq!(routing.weights_of(token), weights);
        }
    }
}

#[test]
fn the_views_of_an_empty_routing_are_empty() {
    let empty = Routing::empty(Rank(5), 3);
    assert_eq!((empty.rank(), empty.tokens(), empty.experts(), empty.copies()), (Rank(5), 0, 3, 0));
    assert_eq!(empty.row_begins(), [0]);
    assert!(
        empty.all_experts().is_empty() && empty.all_weights().is_empty() && empty.dense_probs().is_empty()
    );
}

#[test]
fn lists_of_the_wrong_length_are_refused() {
    let message = |result: ep::Result<Routing>| result.unwrap_err().to_string();
    let map = |map: &[u8], probs: &[f32]| message(Routing::from_map(Rank(0), 4, map, probs));
    assert!(map(&[1; 6], &[0.5; 6]).contains("routing_map: expected 4 elements, found 6"));
    assert!(map(&[1; 8], &[0.5; 7]).contains("probs: expected 8 elements, found 7"));
    assert!(map(&[1; 4], &[0.5, f32::NAN, 0.5, 0.5]).contains("the weight of expert 1 is NaN"));
    let topk = |k, idx: &[i32], weights: &[f32]| message(Routing::from_topk(Rank(0), 4, k, idx, weights));
    assert!(topk(3, &[0, 1, 2, 3], &[0.5; 4]).contains("topk_idx: expected 3 elements, found 4"));
    assert!(topk(2, &[0, 1], &[0.5; 1]).contains("topk_weights: expected 2 elements, found 1"));
    // Index 4 is beyond the last expert; index 3 is the last expert.
    assert!(topk(1, &[4], &[0.5]).contains("expert index 4 is out of range"));
    assert!(Routing::from_topk(Rank(0), 4, 1, &[3], &[0.5]).is_ok());
}

#[test]
fn tokens_may_choose_nothing() {
    let routing = Routing::without_copies(Rank(1), 5, 3).unwrap();
    assert_eq!(routing, Routing::from_topk(Rank(1), 5, 1, &[-1; 3], &[0.0; 3]).unwrap());
    assert_eq!(Routing::without_copies(Rank(1), 5, 0).unwrap(), Routing::empty(Rank(1), 5));
    assert!(Routing::without_copies(Rank(0), 0, 3).is_err());
    assert!(Routing::without_copies(Rank(0), 5, 1 << 33).is_err());
}
