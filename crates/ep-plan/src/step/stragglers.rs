//! The parts of a step that the stragglers of a cluster slow down: the layers of an EP group, the boundaries of stages,
//! and the exchanges at the end of a step.

use std::collections::BTreeMap;
use std::ops::Range;

use super::StepPlanner;
use super::layout::Layout;
use crate::cluster::Cluster;
use crate::domain::Partition;
use crate::error::Result;
use crate::simulate::{SimulationOptions, Straggler, Stragglers};

/// A slow link of a cluster.
#[derive(Debug, Clone, PartialEq)]
pub(super) struct SlowLink {
    pub(super) level: usize,
    /// The sites of its GPUs.
    pub(super) sites: Range<usize>,
    /// For every stage, whether one of its GPUs uses the link.
    stages: Vec<bool>,
    /// Normal bandwidth over the bandwidth of the link.
    pub(super) slowdown: f64,
}

impl SlowLink {
    /// Whether the link belongs to this level and this site, and one of these two stages uses it.
    pub(super) fn is_used(&self, level: usize, site: usize, stages: [usize; 2]) -> bool {
        let uses = |stage: usize| self.stages.get(stage).copied().unwrap_or(false);
        self.level == level && self.sites.contains(&site) && stages.into_iter().any(uses)
    }
}

/// The stragglers of a cluster in one layout.
#[derive(Debug, Clone, PartialEq, Default)]
pub(super) struct Slow {
    pub(super) links: Vec<SlowLink>,
    /// The stragglers inside each EP group that has any, numbered in the group. Equal lists occur once.
    pub(super) groups: Vec<Stragglers>,
}

impl StepPlanner {
    /// The stragglers of the cluster, in the layout. GPUs and links are numbered in the whole cluster.
    ///
    /// # Errors
    /// [`PlanError::Index`](crate::PlanError::Index) when a GPU or a link does not exist,
    /// [`PlanError::Quantity`](crate::PlanError::Quantity) when a slowdown is out of range.
    pub(super) fn slow(&self, options: &SimulationOptions, layout: &Layout) -> Result<Slow> {
        options.check(&self.cluster)?;
        let list = match &options.stragglers {
            Stragglers::None => return Ok(Slow::default()),
            random @ Stragglers::Random { .. } => {
                return Ok(Slow { links: Vec::new(), groups: vec![random.clone()] });
            }
            Stragglers::Listed(list) => list,
        };
        let places = Places::of(&self.cluster, layout)?;
        let mut links = BTreeMap::new();
        let mut groups: BTreeMap<usize, Vec<Straggler>> = BTreeMap::new();
        for straggler in list {
            match *straggler {
                Straggler::Gpu { gpu, slowdown } => {
                    let (group, gpu) = places.of_gpu(gpu);
                    groups.entry(group).or_default().push(Straggler::Gpu { gpu, slowdown });
                }
                Straggler::Link { level, link, slowdown } => {
                    *links.entry((level, link)).or_insert(1.0) *= slowdown;
                }
            }
        }
        let mut slow = Vec::new();
        for ((level, link), slowdown) in links {
            let gpus = self.cluster.gpus_of_link(level, link);
            let sites = self.cluster.site_of_gpu(gpus.start)..self.cluster.site_of_gpu(gpus.end - 1) + 1;
            // In a simulated EP group, normal links have the bandwidth of the slowest site, so the slowdown is
            // converted to that bandwidth.
            let normal = self.cluster.levels()[level].bandwidth_per_gpu();
            let inside =
                slowdown * (normal / self.cluster.sites()[sites.start].levels[level].bandwidth_per_gpu());
            // Nothing crosses a level at which an EP group has one member.
            if layout.group[level] > 1 && inside > 1.0 {
                for (group, link) in places.of_link(level, gpus.clone()) {
                    let straggler = Straggler::Link { level, link, slowdown: inside };
                    groups.entry(group).or_default().push(straggler);
                }
            }
            let mut stages = vec![false; layout.stages()];
            gpus.for_each(|gpu| stages[places.stage[gpu]] = true);
            slow.push(SlowLink { level, sites, stages, slowdown });
        }
        let mut distinct: Vec<Stragglers> = Vec::new();
        for list in groups.into_values().map(Stragglers::Listed) {
            if !distinct.contains(&list) {
                distinct.push(list);
            }
        }
        Ok(Slow { links: slow, groups: distinct })
    }
}

/// The places of all GPUs of a cluster in a layout.
struct Places {
    /// The stage of every GPU.
    stage: Vec<usize>,
    /// For every GPU, its EP group and its number in the group.
    group: Vec<(usize, usize)>,
    /// GPUs of an EP group that share a link of each level.
    sharing: Vec<usize>,
}

impl Places {
    fn of(cluster: &Cluster, layout: &Layout) -> Result<Self> {
        let members = cluster.scaling_factors();
        let stages = Partition::new(&members, &layout.stage)?;
        let stage = (0..stages.gpus()).map(|gpu| stages.expert_domain_of(gpu)).collect::<Result<_>>()?;
        let mut group = vec![(0, 0); stages.gpus()];
        for (index, gpus) in layout.ep_groups(&members)?.iter().flatten().enumerate() {
            gpus.iter().enumerate().for_each(|(at, &gpu)| group[gpu] = (index, at));
        }
        let inside = |level: usize| layout.group[level + 1..].iter().product::<usize>();
        let levels = cluster.levels().iter().enumerate();
        let sharing = levels.map(|(level, at)| at.gpus_per_link.min(inside(level))).collect();
        Ok(Self { stage, group, sharing })
    }

    fn of_gpu(&self, gpu: usize) -> (usize, usize) {
        self.group[gpu]
    }

    /// The EP groups of these GPUs, which share a link, each with the number of the link in the group.
    fn of_link(&self, level: usize, gpus: Range<usize>) -> Vec<(usize, usize)> {
        let mut found: Vec<(usize, usize)> = gpus
            .map(|gpu| {
                let (group, at) = self.group[gpu];
                (group, at / self.sharing[level])
            })
            .collect();
        found.sort_unstable();
        found.dedup();
        found
    }
}
