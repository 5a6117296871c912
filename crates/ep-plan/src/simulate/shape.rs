//! Sets of GPUs: GPUs that exchange with each other, GPUs behind one link, GPUs of one member. Each kind divides all
//! GPUs into sets, which follow from the numbers of the GPUs by arithmetic.

use crate::cluster::Cluster;

/// The kind of group whose GPUs exchange with each other at a level.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub(crate) enum Family {
    /// Experts and gradients: GPUs of one domain of the level.
    Experts,
    /// Tokens that are forwarded level by level: GPUs of equal offset in all domains of the level.
    Tokens,
    /// Refresh of the shared expert: GPUs whose locations agree at every other level.
    Members,
    /// Tokens that are sent directly to their experts: all GPUs inside one member of the next outer level. A GPU sends
    /// to the GPUs of the other members.
    DirectTokens,
}

/// A way to divide all GPUs into sets.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub(crate) enum Cut {
    /// GPUs that wait for each other in an exchange at the level.
    Group(Family, usize),
    /// GPUs that share a link of the level.
    Link(usize),
    /// GPUs inside the same member of the next outer level.
    Parent(usize),
    /// GPUs inside the same member of the level.
    Member(usize),
    /// Each GPU is a set.
    Single,
}

/// The sizes of a cluster's levels.
#[derive(Debug, Clone)]
pub(crate) struct Shape {
    levels: Vec<LevelShape>,
    gpus: usize,
}

#[derive(Debug, Clone, Copy)]
struct LevelShape {
    scaling_factor: usize,
    domain_size: usize,
    /// GPUs inside one member.
    stride: usize,
    gpus_per_link: usize,
}

impl Shape {
    pub(crate) fn new(cluster: &Cluster, domain_sizes: &[usize]) -> Self {
        let gpus = cluster.gpus();
        let mut stride = gpus;
        let levels = cluster.levels().iter().zip(domain_sizes).map(|(level, &domain_size)| {
            stride /= level.scaling_factor;
            LevelShape {
                scaling_factor: level.scaling_factor,
                domain_size,
                stride,
                gpus_per_link: level.gpus_per_link,
            }
        });
        Self { levels: levels.collect(), gpus }
    }

    pub(crate) fn gpus(&self) -> usize {
        self.gpus
    }

    /// The number of the set that a GPU belongs to. Sets are numbered without gaps.
    pub(crate) fn set_of(&self, cut: Cut, gpu: usize) -> usize {
        let within = |at: LevelShape, size: usize| gpu / (at.stride * size) * at.stride + gpu % at.stride;
        match cut {
            Cut::Group(Family::Experts, level) => {
                let at = self.levels[level];
                within(at, at.domain_size)
            }
            Cut::Group(Family::Members, level) => {
                let at = self.levels[level];
                within(at, at.scaling_factor)
            }
            Cut::Group(Family::Tokens, level) => {
                let at = self.levels[level];
                let outer = gpu / (at.stride * at.scaling_factor);
                let offset = gpu / at.stride % at.domain_size;
                (outer * at.domain_size + offset) * at.stride + gpu % at.stride
            }
            Cut::Group(Family::DirectTokens, level) | Cut::Parent(level) => {
                let at = self.levels[level];
                gpu / (at.stride * at.scaling_factor)
            }
            Cut::Link(level) => gpu / self.levels[level].gpus_per_link,
            Cut::Member(level) => gpu / self.levels[level].stride,
            Cut::Single => gpu,
        }
    }

    /// Number of sets.
    pub(crate) fn sets(&self, cut: Cut) -> usize {
        let at = |level: usize| self.levels[level];
        match cut {
            Cut::Group(Family::Experts, level) => self.gpus / at(level).domain_size,
            Cut::Group(Family::Members, level) => self.gpus / at(level).scaling_factor,
            Cut::Group(Family::Tokens, level) => self.gpus / at(level).scaling_factor * at(level).domain_size,
            Cut::Group(Family::DirectTokens, level) | Cut::Parent(level) => {
                self.gpus / (at(level).stride * at(level).scaling_factor)
            }
            Cut::Link(level) => self.gpus.div_ceil(at(level).gpus_per_link),
            Cut::Member(level) => self.gpus / at(level).stride,
            Cut::Single => self.gpus,
        }
    }

    /// The part of its group that a GPU does not send to: the GPU itself, or all GPUs of its own member.
    pub(crate) fn own_side(family: Family, level: usize) -> Cut {
        if family == Family::DirectTokens { Cut::Member(level) } else { Cut::Single }
    }

    /// The GPUs that a GPU sends to, ascending.
    pub(crate) fn peers(&self, family: Family, level: usize, gpu: usize) -> impl Iterator<Item = usize> + '_ {
        let at = self.levels[level];
        let parent = self.set_of(Cut::Parent(level), gpu);
        let (first, count) = (parent * at.stride * at.scaling_factor, at.stride * at.scaling_factor);
        // The GPUs of a group are a stride apart. A group of `DirectTokens` contains all GPUs of the parent.
        let (start, step) =
            if family == Family::DirectTokens { (first, 1) } else { (first + gpu % at.stride, at.stride) };
        let (group, own) = (Cut::Group(family, level), Self::own_side(family, level));
        (start..first + count).step_by(step).filter(move |&other| {
            self.set_of(group, other) == self.set_of(group, gpu)
                && self.set_of(own, other) != self.set_of(own, gpu)
        })
    }
}
