//! Which rank sums which elements.

use std::ops::Range;

use ep::{CallerError, Element, Rank, Result};
use ep_codec::GradientCodec;

/// The ranks of a job by datacenter, seen from one of them.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Datacenters {
    rank: Rank,
    members: Vec<Vec<Rank>>,
    /// This rank's datacenter.
    own: usize,
    /// This rank's place in its datacenter.
    place: usize,
}

/// Elements that one rank of every datacenter sums.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(crate) struct Atom {
    pub(crate) elements: Range<usize>,
    /// One for each datacenter.
    pub(crate) owners: Vec<Rank>,
}

/// The share of the member at `place` of `members`. Shares are as equal as whole elements allow.
pub(crate) fn share(elements: usize, place: usize, members: usize) -> Range<usize> {
    let border = |at: usize| (elements as u128 * at as u128 / members as u128) as usize;
    border(place)..border(place + 1)
}

impl Datacenters {
    /// The datacenters `members`, in the order in which sums are computed, seen from `rank`. They may have different
    /// numbers of ranks.
    ///
    /// # Errors
    /// [`CallerError::Topology`] if a datacenter has no rank, its ranks do not ascend, a rank is in two datacenters, or `rank` is in
    /// none.
    pub fn new(rank: Rank, members: &[Vec<Rank>]) -> Result<Self> {
        let refuse = |text: String| Err(CallerError::Topology(text).into());
        for (datacenter, ranks) in members.iter().enumerate() {
            if ranks.is_empty() || !ranks.is_sorted_by(|one, next| one < next) {
                return refuse(format!("datacenter {datacenter} must have ranks in ascending order"));
            }
        }
        let mut all: Vec<Rank> = members.iter().flatten().copied().collect();
        all.sort_unstable();
        if let Some(twice) = all.windows(2).find(|pair| pair[0] == pair[1]) {
            return refuse(format!("rank {} is in two datacenters", twice[0]));
        }
        let found = members.iter().enumerate().find_map(|(datacenter, ranks)| {
            Some((datacenter, ranks.iter().position(|&other| other == rank)?))
        });
        match found {
            Some((own, place)) => Ok(Self { rank, members: members.to_vec(), own, place }),
            None => refuse(format!("rank {rank} is in no datacenter")),
        }
    }

    /// This rank.
    pub fn rank(&self) -> Rank {
        self.rank
    }

    pub(crate) fn members(&self) -> &[Vec<Rank>] {
        &self.members
    }

    /// Index of this rank's datacenter.
    pub(crate) fn own(&self) -> usize {
        self.own
    }

    /// The ranks of this rank's datacenter, this rank included.
    pub(crate) fn inside(&self) -> &[Rank] {
        &self.members[self.own]
    }

    /// The ranks to which this rank has connections, ascending: its datacenter, and the owners of common elements in the others.
    pub(crate) fn peers(&self) -> Vec<Rank> {
        let own = self.inside().len();
        let mut peers: Vec<Rank> = Vec::new();
        for (datacenter, ranks) in self.members.iter().enumerate() {
            for (place, &rank) in ranks.iter().enumerate() {
                // Whether the shares [place, place + 1) / count overlap. Shares of whole elements overlap only if these
                // do.
                let overlaps = self.place * ranks.len() < (place + 1) * own
                    && place * own < (self.place + 1) * ranks.len();
                if rank != self.rank && (datacenter == self.own || overlaps) {
                    peers.push(rank);
                }
            }
        }
        peers.sort_unstable();
        peers
    }

    /// The elements that the rank at `place` of this datacenter sums, in a bucket of `elements`.
    pub(crate) fn share_at(&self, place: usize, elements: usize) -> Range<usize> {
        share(elements, place, self.inside().len())
    }

    /// The elements that this rank sums.
    pub(crate) fn own_share(&self, elements: usize) -> Range<usize> {
        self.share_at(self.place, elements)
    }

    /// An upper bound on the bytes of a message for a bucket of at most `elements`. It is the same on all ranks.
    pub(crate) fn most_bytes(&self, codec: GradientCodec, elements: usize) -> usize {
        let fewest = self.members.iter().map(Vec::len).min().unwrap_or(1);
        let share = elements.div_ceil(fewest);
        // Each share of another datacenter that begins inside a share divides it. Each part has a stream.
        let parts = 1 + self.members.iter().map(Vec::len).sum::<usize>();
        let stream = |codec: GradientCodec, elements| codec.max_bytes(Element::F32, elements);
        stream(GradientCodec::Exact, share).max(stream(codec, share) + parts * stream(codec, 1))
    }

    /// Divides this rank's share so that each part has a single owner in every datacenter.
    pub(crate) fn atoms(&self, elements: usize) -> Vec<Atom> {
        let own = self.own_share(elements);
        let mut borders: Vec<usize> = self
            .members
            .iter()
            .flat_map(|ranks| (0..ranks.len()).map(|place| share(elements, place, ranks.len()).start))
            .filter(|border| own.contains(border))
            .chain([own.start, own.end])
            .collect();
        borders.sort_unstable();
        borders.dedup();
        borders
            .windows(2)
            .map(|pair| {
                let owner = |ranks: &Vec<Rank>| {
                    let holds = |place: &usize| share(elements, *place, ranks.len()).contains(&pair[0]);
                    ranks[(0..ranks.len()).find(holds).expect("the last share ends with the last element")]
                };
                Atom { elements: pair[0]..pair[1], owners: self.members.iter().map(owner).collect() }
            })
            .collect()
    }
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::*;

    /// Datacenters of these sizes, with ranks numbered one after the other, seen from every rank.
    fn everywhere(sizes: &[usize]) -> Vec<Datacenters> {
        let mut next = 0..;
        let members: Vec<Vec<Rank>> =
            sizes.iter().map(|&size| next.by_ref().take(size).map(Rank).collect()).collect();
        members.iter().flatten().map(|&rank| Datacenters::new(rank, &members).unwrap()).collect()
    }

    proptest! {
        #[test]
        fn every_element_has_one_owner_in_each_datacenter_and_owners_agree(
            sizes in prop::collection::vec(1..6_usize, 1..5),
            elements in 0..40_usize,
        ) {
            let all = everywhere(&sizes);
            for (datacenter, &size) in sizes.iter().enumerate() {
                let mut owned: Vec<usize> = Vec::new();
                for here in all.iter().filter(|here| here.own == datacenter) {
                    prop_assert_eq!(here.inside().len(), size);
                    for atom in here.atoms(elements) {
                        owned.extend(atom.elements.clone());
                        prop_assert_eq!(atom.owners[datacenter], here.rank);
                        for owner in &atom.owners {
                            let there = &all[owner.0 as usize];
                            prop_assert!(there.atoms(elements).contains(&atom));
                            prop_assert!(*owner == here.rank || here.peers().contains(owner));
                        }
                    }
                }
                prop_assert_eq!(owned, (0..elements).collect::<Vec<_>>());
            }
        }

        #[test]
        fn no_message_is_longer_than_the_bound_that_all_ranks_compute(
            sizes in prop::collection::vec(1..6_usize, 1..5),
            elements in 0..3000_usize,
            codec in prop::sample::select(vec!["exact", "int8", "topk:0.01", "topk:1"]),
        ) {
            let codec: GradientCodec = codec.parse().unwrap();
            let all = everywhere(&sizes);
            let bound = all[0].most_bytes(codec, elements);
            for here in &all {
                prop_assert_eq!(here.most_bytes(codec, elements), bound);
                let share = here.own_share(elements).len();
                prop_assert!(GradientCodec::Exact.max_bytes(Element::F32, share) <= bound);
                let streams = here.atoms(elements).into_iter();
                let exchanged: usize =
                    streams.map(|atom| codec.max_bytes(Element::F32, atom.elements.len())).sum();
                prop_assert!(exchanged <= bound, "{} > {}", exchanged, bound);
            }
        }

        #[test]
        fn connections_have_two_ends_and_join_all_ranks(sizes in prop::collection::vec(1..6_usize, 1..5)) {
            let all = everywhere(&sizes);
            for here in &all {
                for peer in here.peers() {
                    prop_assert!(all[peer.0 as usize].peers().contains(&here.rank));
                }
                let others = sizes.len() - 1;
                prop_assert!(here.peers().len() >= here.inside().len() - 1 + others);
            }
        }
    }

    #[test]
    fn equal_datacenters_exchange_between_equal_places() {
        let here = &everywhere(&[2, 2, 2])[3];
        assert_eq!(here.peers(), [Rank(1), Rank(2), Rank(5)]);
        let atoms = here.atoms(7);
        assert_eq!(atoms, [Atom { elements: 3..7, owners: vec![Rank(1), Rank(3), Rank(5)] }]);
        assert_eq!(here.own_share(7), 3..7);
    }

    #[test]
    fn datacenters_name_their_mistakes() {
        let of = |members: &[&[u32]]| {
            let members: Vec<Vec<Rank>> =
                members.iter().map(|ranks| ranks.iter().copied().map(Rank).collect()).collect();
            Datacenters::new(Rank(1), &members).unwrap_err().to_string()
        };
        assert_eq!(of(&[&[0, 1], &[]]), "topology: datacenter 1 must have ranks in ascending order");
        assert_eq!(of(&[&[1, 0]]), "topology: datacenter 0 must have ranks in ascending order");
        assert_eq!(of(&[&[0, 1], &[1]]), "topology: rank 1 is in two datacenters");
        assert_eq!(of(&[&[0], &[2]]), "topology: rank 1 is in no datacenter");
    }
}
