//! Layouts: how the GPUs of a cluster divide into pipeline stages, EP groups and tensor-parallel GPUs.

use serde::{Deserialize, Serialize};

use super::Strategy;
use crate::cluster::Cluster;
use crate::divisors::divisors;
use crate::domain::Partition;
use crate::error::Result;

/// A division of a cluster's GPUs. Lists have one entry per level, outermost first.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct Layout {
    /// `p_0`: runs of equal size into which pipeline stages divide the members of the outermost level.
    pub stages_across: usize,
    /// `p_in`: stages inside each member of the outermost level.
    pub stages_inside: usize,
    /// `t`: GPUs that split the dense parameters.
    pub tensor_parallel: usize,
    /// `SF'_l`: members of each level that one stage keeps.
    pub stage: Vec<usize>,
    /// `e_l`: members of each level in one EP group.
    pub group: Vec<usize>,
}

impl Layout {
    /// `p`: pipeline stages.
    pub fn stages(&self) -> usize {
        self.stages_across * self.stages_inside
    }

    /// `R`: GPUs of a stage.
    pub fn stage_gpus(&self) -> usize {
        self.stage.iter().product()
    }

    /// The most GPUs that can split the dense parameters: those of a stage at the innermost level. With a single level, whose
    /// members are sites, the dense parameters are not split.
    pub(super) fn most_tensor_parallel(&self) -> usize {
        match self.stage[..] {
            [_, .., innermost] => innermost,
            _ => 1,
        }
    }

    /// GPUs of an EP group.
    pub fn group_gpus(&self) -> usize {
        self.group.iter().product()
    }

    /// The levels outside the innermost one at which an EP group has several members, outermost first. Between these members,
    /// tokens and experts do not travel over the links inside a node.
    pub fn group_levels(&self) -> impl Iterator<Item = usize> {
        let (_, outer) = self.group.split_last().unwrap_or((&1, &[]));
        outer.iter().enumerate().filter(|&(_, &members)| members > 1).map(|(level, _)| level)
    }

    /// `c_l = SF'_l / e_l`: EP groups of a stage at each level, which hold the same experts.
    pub fn copies(&self) -> Vec<usize> {
        self.stage.iter().zip(&self.group).map(|(stage, group)| stage / group).collect()
    }

    /// The number of EP groups of a stage.
    pub fn groups_per_stage(&self) -> usize {
        self.copies().iter().product()
    }

    /// Whether some of `experts` experts are on several GPUs of an EP group, because its GPUs do not divide them.
    pub fn replicates_experts(&self, experts: usize) -> bool {
        !experts.is_multiple_of(self.group_gpus())
    }

    /// The GPUs of every EP group of every stage, each list ascending, which is the order of the group's ranks. `members` has
    /// the number of members of each level of the cluster. GPUs are numbered as in a [`Partition`], and so are the stages and
    /// the EP groups of a stage.
    ///
    /// # Errors
    /// Those of [`Partition::new`], if the layout is not one of this cluster.
    pub fn ep_groups(&self, members: &[usize]) -> Result<Vec<Vec<Vec<usize>>>> {
        let (stages, groups) =
            (Partition::new(members, &self.stage)?, Partition::new(&self.stage, &self.group)?);
        let copies = self.groups_per_stage();
        let mut found = vec![vec![Vec::new(); copies]; self.stages()];
        for gpu in 0..stages.gpus() {
            let (stage, place) = (stages.expert_domain_of(gpu)?, stages.dispatch_group_of(gpu)?);
            found[stage][groups.expert_domain_of(place)?].push(gpu);
        }
        Ok(found)
    }

    /// Replicas of a dense parameter at each level: the members of a stage, of which `t` GPUs share one replica.
    pub fn dense_copies(&self) -> Vec<usize> {
        let mut copies = self.stage.clone();
        if let Some(innermost) = copies.last_mut() {
            *innermost /= self.tensor_parallel;
        }
        copies
    }
}

/// All layouts of a strategy, with `t = 1`. Layouts with few stages and large EP groups come first. `experts` bounds
/// the GPUs of an EP group, and `stages` fixes the number of stages.
pub(super) fn layouts(
    strategy: Strategy,
    cluster: &Cluster,
    experts: usize,
    stages: Option<usize>,
) -> Vec<Layout> {
    let members = &cluster.scaling_factors()[..];
    let mut found = Vec::new();
    for across in stages_across(strategy, &cluster.outermost_choices(members[0])) {
        for (inside, inner) in inner_stages(&members[1..], across == members[0] || across == 1) {
            let stage: Vec<usize> = std::iter::once(members[0] / across).chain(inner).collect();
            if stages.is_some_and(|wanted| wanted != across * inside) {
                continue;
            }
            for group in groups(strategy, &stage, &cluster.outermost_choices(stage[0]), experts) {
                found.push(Layout {
                    stages_across: across,
                    stages_inside: inside,
                    tensor_parallel: 1,
                    stage: stage.clone(),
                    group,
                });
            }
        }
    }
    found.sort_by_key(|layout| (layout.stages(), std::cmp::Reverse(layout.group_gpus())));
    found
}

/// The numbers of runs into which the outermost level can be divided: the choices above 1 for a pipeline, 1 for other
/// strategies.
fn stages_across(strategy: Strategy, choices: &[usize]) -> Vec<usize> {
    match strategy {
        Strategy::Pipeline => choices.iter().copied().filter(|&parts| parts > 1).collect(),
        _ => vec![1],
    }
}

/// The possible numbers of stages inside a member of the outermost level, each with the members of the inner levels
/// that one stage keeps. Outer levels are divided before inner ones.
fn inner_stages(inner: &[usize], allowed: bool) -> Vec<(usize, Vec<usize>)> {
    let mut found = vec![(1, inner.to_vec())];
    let levels = if allowed { inner.len() } else { 0 };
    for level in 0..levels {
        let outer: usize = inner[..level].iter().product();
        for parts in divisors(inner[level]).into_iter().skip(1) {
            let mut kept = inner.to_vec();
            kept[..level].fill(1);
            kept[level] /= parts;
            found.push((outer * parts, kept));
        }
    }
    found.dedup();
    found
}

/// EP groups: runs of consecutive GPUs of one member of the outermost level, or the same run of several members.
/// `outermost` has the possible numbers of these members.
fn groups(strategy: Strategy, stage: &[usize], outermost: &[usize], experts: usize) -> Vec<Vec<usize>> {
    let outermost = match strategy {
        _ if strategy.spans() => outermost.iter().copied().filter(|&members| members > 1).collect(),
        // A stage that keeps several members may have groups that span them.
        Strategy::Pipeline => outermost.to_vec(),
        _ => vec![1],
    };
    let mut found: Vec<Vec<usize>> = Vec::new();
    for outer in outermost {
        for run in runs(&stage[1..]) {
            let group: Vec<usize> = std::iter::once(outer).chain(run).collect();
            let gpus: usize = group.iter().product();
            if gpus <= experts.max(outer) && !found.contains(&group) {
                found.push(group);
            }
        }
    }
    found
}

/// The runs of consecutive GPUs: a divisor of the members of one level, times all members of the levels inside it.
fn runs(members: &[usize]) -> Vec<Vec<usize>> {
    let mut found = vec![vec![1; members.len()]];
    for level in (0..members.len()).rev() {
        for part in divisors(members[level]).into_iter().skip(1) {
            let mut run = members.to_vec();
            run[..level].fill(1);
            run[level] = part;
            found.push(run);
        }
    }
    found
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::presets;

    fn cluster(members: &[usize]) -> Cluster {
        let mut description = presets::datacenters(members[0], 100.0, 0.0, presets::dgx_h100(1));
        description.levels.truncate(members.len());
        for (level, &members) in description.levels.iter_mut().zip(members) {
            level.scaling_factor = members;
        }
        description.try_into().unwrap()
    }

    /// Sites of 2, 2 and 1 parts: a pipeline has a multiple of 5 stages, and a group has one part or all.
    #[test]
    fn parts_of_unequal_sites_are_not_divided_otherwise() {
        let mut description = presets::datacenters(3, 100.0, 0.0, presets::dgx_h100(8));
        description.levels[1].set_members(&[8, 8, 4]);
        let cluster = Cluster::try_from(description).unwrap();
        for strategy in Strategy::ALL {
            let all = layouts(strategy, &cluster, 256, None);
            assert!(!all.is_empty(), "{strategy:?}");
            for layout in all {
                assert_eq!(layout.stages() * layout.stage_gpus(), 160, "{layout:?}");
                assert_eq!(layout.stages_across, if strategy == Strategy::Pipeline { 5 } else { 1 });
                assert_eq!(layout.group[0], if strategy.spans() { 5 } else { 1 });
            }
        }
    }

    #[test]
    fn stages_and_groups_divide_the_gpus() {
        for strategy in Strategy::ALL {
            let all = layouts(strategy, &cluster(&[4, 6, 8]), 256, None);
            assert!(all.len() > 5, "{strategy:?}");
            for layout in all {
                let gpus = layout.stages() * layout.stage_gpus();
                assert_eq!(gpus, 4 * 6 * 8, "{layout:?}");
                let copies = layout.groups_per_stage();
                assert_eq!(copies * layout.group_gpus(), layout.stage_gpus(), "{layout:?}");
                assert!(strategy == Strategy::Pipeline || (layout.group[0] > 1) == strategy.spans());
                assert_eq!(layout.stages_across > 1, strategy == Strategy::Pipeline);
            }
        }
    }

    /// A stage keeps a run of members of each level, and an EP group a run of those of the stage.
    #[test]
    fn ep_groups_have_every_gpu_once_at_the_places_that_are_priced() {
        let members = [4, 6, 8];
        let digits = |gpu: usize| [gpu / 48, gpu / 8 % 6, gpu % 8];
        for strategy in Strategy::ALL {
            for layout in layouts(strategy, &cluster(&members), 256, None) {
                let stages = layout.ep_groups(&members).unwrap();
                assert_eq!(stages.len(), layout.stages(), "{layout:?}");
                let mut all: Vec<usize> = stages.iter().flatten().flatten().copied().collect();
                all.sort_unstable();
                assert_eq!(all, (0..4 * 6 * 8).collect::<Vec<_>>(), "{layout:?}");
                let runs = |gpus: &mut dyn Iterator<Item = usize>, lengths: &[usize]| {
                    let gpus: Vec<_> = gpus.map(digits).collect();
                    for (level, &length) in lengths.iter().enumerate() {
                        let found = gpus.iter().map(|digits| digits[level]);
                        let (first, last) = (found.clone().min().unwrap(), found.max().unwrap());
                        assert_eq!((last - first + 1, first % length), (length, 0), "{layout:?}");
                    }
                    assert_eq!(gpus.len(), lengths.iter().product::<usize>(), "{layout:?}");
                };
                for groups in &stages {
                    runs(&mut groups.iter().flatten().copied(), &layout.stage);
                    for group in groups {
                        assert!(group.is_sorted());
                        runs(&mut group.iter().copied(), &layout.group);
                    }
                }
            }
        }
    }

    #[test]
    fn stages_follow_each_other_along_the_levels() {
        let layout = Layout {
            stages_across: 1,
            stages_inside: 2,
            tensor_parallel: 1,
            stage: vec![2, 1, 2],
            group: vec![2, 1, 1],
        };
        let expected = [[[0, 4], [1, 5]], [[2, 6], [3, 7]]];
        assert_eq!(
            layout.ep_groups(&[2, 2, 2]).unwrap(),
            expected.map(|groups| groups.map(|gpus| gpus.to_vec()).to_vec())
        );
    }

    #[test]
    fn a_fixed_number_of_stages_is_kept() {
        let layouts = layouts(Strategy::Pipeline, &cluster(&[2, 8, 8]), 256, Some(4));
        assert!(!layouts.is_empty() && layouts.iter().all(|layout| layout.stages() == 4));
        assert_eq!((layouts[0].stage.clone(), layouts[0].group.clone()), (vec![1, 4, 8], vec![1, 4, 8]));
    }

    #[test]
    fn few_experts_have_small_groups() {
        let few = layouts(Strategy::DataParallel, &cluster(&[2, 8, 8]), 8, None);
        assert!(few.iter().all(|layout| layout.group_gpus() <= 8));
        // 1009 datacenters of one GPU cannot form smaller groups.
        assert_eq!(layouts(Strategy::HierarchicalEp, &cluster(&[1009]), 8, None)[0].group, [1009]);
    }
}
