//! Kinds of GPUs: GPUs of one kind behave equally, so only one of them is simulated.
//!
//! Two GPUs are of one kind if they are equally fast and if, in every relevant cut (groups that wait for each other,
//! GPUs that share a link), their sets contain the same numbers of GPUs of each kind. The coarsest such division is
//! found by refining the division by speed until it is stable. By induction over the events, GPUs of one kind do
//! everything at the same time. Simulating one of them is therefore exact.

use std::collections::HashMap;

use super::shape::{Cut, Shape};

/// GPUs by kind.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(crate) struct Kinds {
    /// The kind of each GPU.
    pub(crate) of: Vec<u32>,
    /// The first GPU of each kind.
    pub(crate) first: Vec<u32>,
    /// The number of GPUs of each kind.
    pub(crate) count: Vec<u32>,
}

impl Kinds {
    /// Every GPU is its own kind.
    pub(crate) fn all_different(gpus: usize) -> Self {
        let each: Vec<u32> = (0..gpus as u32).collect();
        Self { count: vec![1; gpus], first: each.clone(), of: each }
    }

    /// The coarsest division that is stable under the cuts and finer than `first`, which has equal numbers for GPUs
    /// that may be of one kind.
    pub(crate) fn coarsest(shape: &Shape, cuts: &[Cut], first: Vec<u64>) -> Self {
        let mut kinds = Self::numbered(&first);
        loop {
            let mut keys: Vec<u64> = kinds.of.iter().map(|&kind| mix(u64::from(kind))).collect();
            for &cut in cuts {
                let fingerprints = kinds.fingerprints(shape, cut);
                for (gpu, key) in keys.iter_mut().enumerate() {
                    *key = mix(key.rotate_left(17) ^ fingerprints[shape.set_of(cut, gpu)]);
                }
            }
            let finer = Self::numbered(&keys);
            if finer.first.len() == kinds.first.len() {
                return kinds;
            }
            kinds = finer;
        }
    }

    /// A fingerprint of each set, which depends only on the number of GPUs of each kind in the set.
    pub(crate) fn fingerprints(&self, shape: &Shape, cut: Cut) -> Vec<u64> {
        let mut sums = vec![0u64; shape.sets(cut)];
        for (gpu, &kind) in self.of.iter().enumerate() {
            let sum = &mut sums[shape.set_of(cut, gpu)];
            *sum = sum.wrapping_add(mix(u64::from(kind) ^ 0x5EED));
        }
        sums
    }

    fn numbered(keys: &[u64]) -> Self {
        let mut numbers: HashMap<u64, u32> = HashMap::new();
        let (mut first, mut count) = (Vec::new(), Vec::new());
        let of = keys
            .iter()
            .enumerate()
            .map(|(gpu, &key)| {
                let kind = *numbers.entry(key).or_insert_with(|| {
                    first.push(gpu as u32);
                    count.push(0);
                    (first.len() - 1) as u32
                });
                count[kind as usize] += 1;
                kind
            })
            .collect();
        Self { of, first, count }
    }
}

/// The finalizer of SplitMix64. Its values are random enough that equal sums of them mean equal multisets.
pub(crate) fn mix(value: u64) -> u64 {
    let mut bits = value.wrapping_add(0x9E37_79B9_7F4A_7C15);
    bits = (bits ^ (bits >> 30)).wrapping_mul(0xBF58_476D_1CE4_E5B9);
    bits = (bits ^ (bits >> 27)).wrapping_mul(0x94D0_49BB_1331_11EB);
    bits ^ (bits >> 31)
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::cluster::Cluster;
    use crate::presets;
    use crate::simulate::shape::Family;

    fn kinds_with(slow: &[usize]) -> Kinds {
        let cluster = Cluster::try_from(presets::datacenters(4, 10.0, 0.0, presets::dgx_h100(2))).unwrap();
        let shape = Shape::new(&cluster, &[1, 1, 1]);
        let cuts: Vec<Cut> = (0..3)
            .flat_map(|level| [Cut::Link(level), Cut::Group(Family::Tokens, level), Cut::Parent(level)])
            .collect();
        let first = (0..cluster.gpus()).map(|gpu| u64::from(slow.contains(&gpu))).collect();
        Kinds::coarsest(&shape, &cuts, first)
    }

    #[test]
    fn equal_gpus_are_one_kind() {
        let kinds = kinds_with(&[]);
        assert_eq!((kinds.first.len(), kinds.count[0]), (1, 64));
    }

    /// The other GPUs differ by the levels at which their location differs from that of the slow one: 2 x 2 x 2 kinds.
    #[test]
    fn one_slow_gpu_makes_eight_kinds() {
        let kinds = kinds_with(&[21]);
        assert_eq!(kinds.first.len(), 8);
        let mut counts = kinds.count.clone();
        counts.sort_unstable();
        assert_eq!(counts, [1, 1, 3, 3, 7, 7, 21, 21]);
    }

    #[test]
    fn the_division_is_stable() {
        let kinds = kinds_with(&[3, 17, 40]);
        let cluster = Cluster::try_from(presets::datacenters(4, 10.0, 0.0, presets::dgx_h100(2))).unwrap();
        let shape = Shape::new(&cluster, &[1, 1, 1]);
        for cut in [Cut::Link(0), Cut::Group(Family::Tokens, 0), Cut::Group(Family::Tokens, 2)] {
            let mut sets: HashMap<usize, Vec<u32>> = HashMap::new();
            for (gpu, &kind) in kinds.of.iter().enumerate() {
                sets.entry(shape.set_of(cut, gpu)).or_default().push(kind);
            }
            let mut seen: HashMap<u32, Vec<u32>> = HashMap::new();
            for mut set in sets.into_values() {
                set.sort_unstable();
                for &kind in &set {
                    assert_eq!(seen.entry(kind).or_insert_with(|| set.clone()), &set);
                }
            }
        }
    }
}
