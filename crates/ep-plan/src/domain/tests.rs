use proptest::prelude::*;

use super::*;
use crate::divisors::divisors;

fn partition(scaling_factors: &[usize], domain_sizes: &[usize]) -> Partition {
    Partition::new(scaling_factors, domain_sizes).unwrap()
}

/// The (all-gather, all-to-all) messages of every level by the formula, compared with enumeration.
fn messages(partition: &Partition, rule: TopologyRule) -> Vec<(usize, usize)> {
    (0..partition.depth())
        .map(|level| {
            let formula = partition.messages(level, rule).unwrap();
            let mut counted = Messages { all_gather: 0, all_to_all: 0 };
            for gpu in 0..partition.gpus() {
                let peers = partition.peers(gpu, level, rule).unwrap();
                counted.all_gather += peers.all_gather.len();
                counted.all_to_all += peers.all_to_all.len();
            }
            assert_eq!(formula, counted, "level {level} of {partition:?} under {rule:?}");
            (formula.all_gather, formula.all_to_all)
        })
        .collect()
}

#[test]
fn messages_of_two_level_clusters() {
    let corrected = |sizes: &[usize]| messages(&partition(&[4, 4], sizes), TopologyRule::Corrected);
    assert_eq!(corrected(&[2, 4]), [(16, 16), (48, 0)]);
    assert_eq!(corrected(&[1, 1]), [(0, 48), (0, 48)]);
    assert_eq!(corrected(&[2, 2]), [(16, 16), (16, 16)]);
    assert_eq!(corrected(&[4, 1]), [(48, 0), (0, 48)]);
    assert_eq!(corrected(&[4, 4]), [(48, 0), (48, 0)]);
    // With the paper's line 8 as printed, every GPU gathers from all four outer members at the inner level.
    assert_eq!(messages(&partition(&[4, 4], &[2, 4]), TopologyRule::Literal), [(16, 16), (192, 0)]);
}

#[test]
fn peers_of_three_gpus() {
    let partition = partition(&[4, 4], &[2, 4]);
    let cases = [
        (0, [0, 0], [4], [8], [1, 2, 3]),
        (5, [1, 1], [1], [13], [4, 6, 7]),
        (14, [3, 2], [10], [6], [12, 13, 15]),
    ];
    for (gpu, location, gather_0, exchange_0, gather_1) in cases {
        assert_eq!(partition.location(gpu).unwrap(), location);
        assert_eq!(partition.gpu_at(&location).unwrap(), gpu);
        let outer = partition.peers(gpu, 0, TopologyRule::Corrected).unwrap();
        let inner = partition.peers(gpu, 1, TopologyRule::Corrected).unwrap();
        assert_eq!((&*outer.all_gather, &*outer.all_to_all), (&gather_0[..], &exchange_0[..]));
        assert_eq!((&*inner.all_gather, &*inner.all_to_all), (&gather_1[..], &[][..]));
    }
}

#[test]
fn the_export_names_every_group() {
    let export = partition(&[4, 4], &[2, 4]).export();
    assert_eq!(export.levels[0].all_gather[1], [1, 5]);
    assert_eq!(export.levels[0].all_to_all[5], [5, 13]);
    assert_eq!(export.levels[1].all_gather[1], [4, 5, 6, 7]);
    assert_eq!(export.expert_domains, [[0, 1, 2, 3, 4, 5, 6, 7], [8, 9, 10, 11, 12, 13, 14, 15]]);
    assert_eq!(export.dispatch_groups[5], [5, 13]);
    let rank = &export.rank_groups[13];
    assert_eq!((&*rank.location, rank.expert_domain, rank.dispatch_group), (&[3, 1][..], 1, 5));
    assert_eq!((&*rank.all_gather_group, &*rank.all_to_all_group), (&[5, 3][..], &[5, 13][..]));

    let json = serde_json::to_string(&export).unwrap();
    assert_eq!(serde_json::from_str::<PartitionExport>(&json).unwrap(), export);
}

/// Sites of 3, 3 and 2 parts, each of 2 nodes of 4 GPUs: 6, 6 and 4 nodes.
#[test]
fn datacenters_are_the_sites_of_parts() {
    let parts = partition(&[8, 2, 4], &[8, 1, 2]).export();
    assert_eq!((parts.datacenters.len(), &*parts.datacenters[1]), (8, &[8, 9, 10, 11, 12, 13, 14, 15][..]));
    let sites = parts.clone().in_sites(&[3, 3, 2]);
    let ranks = |range: std::ops::Range<usize>| range.collect::<Vec<_>>();
    assert_eq!(sites.datacenters, [ranks(0..24), ranks(24..48), ranks(48..64)]);
    // Site, node of the site, GPU of the node.
    for (rank, location) in
        [(0, [0, 0, 0]), (23, [0, 5, 3]), (24, [1, 0, 0]), (48, [2, 0, 0]), (63, [2, 3, 3])]
    {
        assert_eq!(sites.rank_groups[rank].location, location, "{rank}");
    }
    // Ranks are in the order of their locations, so each site has consecutive ranks.
    assert!(sites.rank_groups.windows(2).all(|pair| pair[0].location < pair[1].location));
    // The groups do not change.
    assert_eq!((&sites.levels, &sites.expert_domains), (&parts.levels, &parts.expert_domains));
    assert_eq!(sites.dispatch_groups, parts.dispatch_groups);
    // A group inside a part, and equal sites.
    let inside = partition(&[1, 2, 4], &[1, 1, 2]).export();
    assert_eq!(inside.datacenters, [ranks(0..8)]);
    assert_eq!(inside.clone().in_sites(&[3, 3, 2]), inside);
    let equal = partition(&[2, 4], &[2, 1]).export();
    assert_eq!(equal.datacenters, [[0, 1, 2, 3], [4, 5, 6, 7]]);
    assert_eq!(equal.clone().in_sites(&[1, 1]), equal);
}

#[test]
fn experts_of_an_expert_domain_follow_its_ranks() {
    let partition = partition(&[4, 4], &[2, 2]);
    let domains = partition.expert_domain_of_experts(32).unwrap();
    assert_eq!(domains[..8], [0, 0, 0, 0, 1, 1, 1, 1]); // ranks 0, 1 | 2, 3 with two experts each
    assert_eq!(domains[8..16], [0, 0, 0, 0, 1, 1, 1, 1]); // ranks 4, 5 | 6, 7: next outer member, same domains
    let error = partition.expert_domain_of_experts(8).unwrap_err().to_string();
    assert!(error.contains("8 experts cannot be spread evenly over 16 GPUs") && error.contains("1, 2, 4, 8"));
}

#[test]
fn errors_of_impossible_partitions_name_the_possible_values() {
    let error = |scaling: &[usize], sizes: &[usize]| Partition::new(scaling, sizes).unwrap_err().to_string();
    assert!(
        error(&[2, 8], &[2, 3])
            .contains("level 1: a domain of 3 does not divide its 8 members; possible: 1, 2, 4, 8")
    );
    assert!(error(&[2, 8], &[2]).contains("1 given for 2 levels"));
    assert!(error(&[], &[]).contains("at least one level"));
    assert!(error(&[2, 0], &[1, 1]).contains("scaling factor of level 1"));
    assert!(error(&[usize::MAX, 2], &[1, 1]).contains("scaling factor of level 0 is 18446744073709551615"));
    assert!(error(&[1 << 62], &[1]).contains("a whole number from 1 to 1048576"));
    assert!(error(&[1 << 11, 1 << 11], &[1, 1]).contains("number of GPUs from level 0 inwards is 4194304"));
    assert!(error(&[1; 9], &[1; 9]).contains("number of levels is 9"));
    // The largest partition counts its messages without an overflow.
    let most = partition(&[1 << 20], &[1 << 20]);
    assert_eq!(most.messages(0, TopologyRule::Literal).unwrap().all_gather, (1 << 20) * ((1 << 20) - 1));
    assert!(partition(&[2], &[1]).location(2).unwrap_err().to_string().contains("numbered from 0"));
}

/// Up to four levels of up to twelve members and at most 300 GPUs, with domain sizes that divide the levels.
fn any_partition() -> impl Strategy<Value = Partition> {
    prop::collection::vec((1..=12usize, any::<prop::sample::Index>()), 1..=4)
        .prop_filter("few GPUs", |levels| levels.iter().map(|(members, _)| members).product::<usize>() <= 300)
        .prop_map(|levels| {
            let scaling: Vec<usize> = levels.iter().map(|(members, _)| *members).collect();
            let sizes: Vec<usize> =
                levels.iter().map(|(members, pick)| *pick.get(&divisors(*members))).collect();
            partition(&scaling, &sizes)
        })
}

proptest! {
    #[test]
    fn every_token_reaches_a_holder_of_its_expert(
        partition in any_partition(),
        seed in any::<[prop::sample::Index; 2]>(),
    ) {
        let (from, owner) = (seed[0].index(partition.gpus()), seed[1].index(partition.gpus()));
        let mut at = from;
        for hop in partition.token_path(from, owner).unwrap() {
            prop_assert_eq!(hop.from, at);
            let exchange = partition.exchange(hop.from, hop.to, hop.level, TopologyRule::Corrected).unwrap();
            prop_assert_eq!(exchange, Some(Exchange::AllToAll));
            at = hop.to;
        }
        prop_assert_eq!(at, partition.holder(from, owner).unwrap());
        prop_assert!(partition.gathered_owners(at).unwrap().contains(&owner));
        prop_assert_eq!(partition.dispatch_group_of(at).unwrap(), partition.dispatch_group_of(from).unwrap());
        prop_assert_eq!(partition.expert_domain_of(at).unwrap(), partition.expert_domain_of(owner).unwrap());
    }

    /// Runs the gathers level by level; each level forwards the experts that the outer levels gathered.
    #[test]
    fn the_gathers_bring_exactly_the_expert_domain(partition in any_partition()) {
        let mut held: Vec<Vec<usize>> = (0..partition.gpus()).map(|gpu| vec![gpu]).collect();
        for level in 0..partition.depth() {
            let volume = partition.volumes(level, Bytes(1.0), Bytes(1.0)).unwrap().all_gather;
            let before = held.clone();
            for (gpu, mine) in held.iter_mut().enumerate() {
                for peer in partition.peers(gpu, level, TopologyRule::Corrected).unwrap().all_gather {
                    mine.extend(&before[peer]);
                }
                prop_assert_eq!((mine.len() - before[gpu].len()) as f64, volume.0);
            }
        }
        for (gpu, mut mine) in held.into_iter().enumerate() {
            mine.sort_unstable();
            prop_assert_eq!(mine, partition.gathered_owners(gpu).unwrap());
        }
    }

    /// Sends one token from every GPU to the experts of every GPU: `D (1 − S / SF)` bytes cross each level.
    #[test]
    fn token_volumes_by_enumeration_equal_the_formula(partition in any_partition()) {
        prop_assume!(partition.gpus() <= 100);
        let gpus = partition.gpus();
        let mut received = vec![vec![0usize; partition.depth()]; gpus];
        for from in 0..gpus {
            for owner in 0..gpus {
                partition.token_path(from, owner).unwrap().iter().for_each(|hop| received[hop.to][hop.level] += 1);
            }
        }
        for level in 0..partition.depth() {
            let volume = partition.volumes(level, Bytes(gpus as f64), Bytes::ZERO).unwrap().all_to_all;
            for counts in &received {
                prop_assert!((counts[level] as f64 - volume.0).abs() < 1e-9 * gpus as f64);
            }
        }
    }

    #[test]
    fn groups_and_messages_agree_with_the_definition(partition in any_partition()) {
        prop_assume!(partition.gpus() <= 60);
        messages(&partition, TopologyRule::Literal);
        messages(&partition, TopologyRule::Corrected);
        let export = partition.export();
        for rank in 0..partition.gpus() {
            let groups = &export.rank_groups[rank];
            for (level, lists) in export.levels.iter().enumerate() {
                let mut expected = Peers::default();
                for other in 0..partition.gpus() {
                    match partition.exchange(rank, other, level, TopologyRule::Corrected).unwrap() {
                        Some(Exchange::AllGather) => expected.all_gather.push(other),
                        Some(Exchange::AllToAll) => expected.all_to_all.push(other),
                        None => {}
                    }
                }
                prop_assert_eq!(&partition.peers(rank, level, TopologyRule::Corrected).unwrap(), &expected);
                let others = |group: &[usize]| group.iter().copied().filter(|&r| r != rank).collect::<Vec<_>>();
                prop_assert_eq!(others(&lists.all_gather[groups.all_gather_group[level]]), expected.all_gather);
                prop_assert_eq!(others(&lists.all_to_all[groups.all_to_all_group[level]]), expected.all_to_all);
            }
            prop_assert_eq!(export.expert_domains[groups.expert_domain][groups.dispatch_group], rank);
            prop_assert_eq!(export.dispatch_groups[groups.dispatch_group][groups.expert_domain], rank);
            prop_assert_eq!(&export.expert_domains[groups.expert_domain], &partition.gathered_owners(rank).unwrap());
        }
    }
}
