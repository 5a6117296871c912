//! Unequal sites: members of the outermost level that differ in their numbers of members or in their links.
//!
//! Sites divide into *parts* of equal size, the largest possible. Everything inside a part is uniform, and so is every
//! group that takes the same GPUs of all parts. Only exchanges between parts differ from site to site.

use std::ops::Range;

use super::{Cluster, ClusterDescription, Level, Sharing};
use crate::error::{PlanError, Result, count, number};
use crate::limits;
use crate::units::BytesPerSecond;

/// A member of the outermost level, usually a datacenter.
#[derive(Debug, Clone, PartialEq)]
pub struct Site {
    /// `w_s`: parts of the site; 1 if all sites are equal.
    pub parts: usize,
    /// The levels, outermost first, with the links of this site. Their scaling factors are those of the cluster.
    pub levels: Vec<Level>,
}

/// Checks the lists of a level: whether the level may have them, their lengths and their entries.
pub(super) fn check_lists(description: &ClusterDescription, index: usize) -> Result<()> {
    let level = &description.levels[index];
    let sites = description.levels[0].scaling_factor;
    let refuse =
        |what: String, needed: String| Err(PlanError::Sites { level: level.name.clone(), what, needed });
    if !level.site_members.is_empty() && index != 1 {
        let what = "has a list of members, which only the second level may have".to_owned();
        return refuse(what, "one number of members, which all sites share".into());
    }
    for (list, entries) in
        [("members", level.site_members.len()), ("bandwidth", level.site_bandwidth_gbit_per_s.len())]
    {
        if entries != 0 && entries != sites {
            let outermost = &description.levels[0].name;
            let needed =
                format!("one entry for each of the {sites} members of '{outermost}', or a single value");
            return refuse(format!("has {entries} entries in its list of {list}"), needed);
        }
    }
    for &members in &level.site_members {
        count(format!("an entry of site_members of level '{}'", level.name), members, limits::MEMBERS)?;
    }
    for &rate in &level.site_bandwidth_gbit_per_s {
        let what = format!("an entry of site_bandwidth_gbit_per_s of level '{}'", level.name);
        number(what, rate, limits::LINK_GBIT_PER_S)?;
    }
    if level.site_members.iter().max().is_some_and(|&most| most != level.scaling_factor) {
        let what = format!("has a scaling_factor of {}", level.scaling_factor);
        return refuse(what, "the largest entry of site_members".into());
    }
    let least = level.site_bandwidth_gbit_per_s.iter().copied().reduce(f64::min);
    if least.is_some_and(|least| least != level.bandwidth_gbit_per_s) {
        let what = format!("has a bandwidth_gbit_per_s of {}", level.bandwidth_gbit_per_s);
        return refuse(what, "the least entry of site_bandwidth_gbit_per_s".into());
    }
    Ok(())
}

/// The greatest common divisor.
pub(crate) fn gcd(a: usize, b: usize) -> usize {
    if b == 0 { a } else { gcd(b, a % b) }
}

/// Members of the second level in one part: the greatest common divisor of the sites' numbers of members.
fn members_of_second(description: &ClusterDescription) -> usize {
    let level = &description.levels[1];
    level.site_members.iter().copied().reduce(gcd).unwrap_or(level.scaling_factor)
}

/// `w_s`: parts of every site.
fn parts(description: &ClusterDescription) -> Vec<usize> {
    let sites = description.levels[0].scaling_factor;
    match description.levels.get(1).filter(|level| !level.site_members.is_empty()) {
        Some(level) => {
            let part = members_of_second(description);
            level.site_members.iter().map(|members| members / part).collect()
        }
        None => vec![1; sites],
    }
}

/// Members of a level in one part; at the outermost level, the parts of all sites.
pub(super) fn members_of_part(description: &ClusterDescription, index: usize) -> usize {
    match index {
        0 => parts(description).iter().sum(),
        1 => members_of_second(description),
        _ => description.levels[index].scaling_factor,
    }
}

/// GPUs of a part, which is a member of the outermost level.
fn gpus_of_part(levels: &[Level]) -> usize {
    levels[1..].iter().map(|level| level.scaling_factor).product()
}

/// The sites. `levels` are those of a part. Each site replaces their link bandwidths and, if it shares one uplink, the
/// number of GPUs per uplink.
pub(super) fn sites(description: &ClusterDescription, levels: &[Level]) -> Vec<Site> {
    let parts = parts(description);
    let part_gpus = gpus_of_part(levels);
    let of_site = |(site, &parts): (usize, &usize)| {
        let levels = description.levels.iter().zip(levels).enumerate().map(|(index, (described, level))| {
            let rate = described.site_bandwidth_gbit_per_s.get(site).copied();
            let whole = index == 0 && described.sharing == Sharing::PerMember;
            Level {
                link_bandwidth: described.reached_of(rate.unwrap_or(described.bandwidth_gbit_per_s)),
                gpus_per_link: if whole { parts * part_gpus } else { level.gpus_per_link },
                ..*level
            }
        });
        Site { parts, levels: levels.collect() }
    };
    parts.iter().enumerate().map(of_site).collect()
}

/// The levels with the slowest links of all sites: those with the least bandwidth per GPU.
pub(super) fn slowest(levels: &[Level], sites: &[Site]) -> Vec<Level> {
    let of_level = |(index, level): (usize, &Level)| {
        let slower = |a: Level, b: Level| {
            if b.bandwidth_per_gpu().0 < a.bandwidth_per_gpu().0 { b } else { a }
        };
        sites.iter().map(|site| site.levels[index]).reduce(slower).unwrap_or(*level)
    };
    levels.iter().enumerate().map(of_level).collect()
}

impl Cluster {
    /// The members of the outermost level, in their order.
    pub fn sites(&self) -> &[Site] {
        &self.sites
    }

    /// Whether sites have different numbers of GPUs.
    pub fn is_unequal(&self) -> bool {
        self.sites.iter().any(|site| site.parts > 1)
    }

    /// Whether links of a level have different bandwidths.
    pub fn has_unequal_links(&self, level: usize) -> bool {
        let rate = |site: &Site| site.levels.get(level).map(|at| at.link_bandwidth);
        self.sites.windows(2).any(|pair| rate(&pair[0]) != rate(&pair[1]))
    }

    /// Bandwidth of the fastest link of a level that transfers reach.
    pub(crate) fn fastest_link(&self, level: usize) -> BytesPerSecond {
        let rates = self.sites.iter().map(|site| site.levels[level].link_bandwidth);
        rates.reduce(BytesPerSecond::max).unwrap_or(self.levels[level].link_bandwidth)
    }

    /// The error of a feature that needs equal sites. `what` names the feature, and `possible` says what to do instead.
    pub(crate) fn unequal(&self, what: &'static str, possible: &'static str) -> PlanError {
        let members = self.description.levels.get(1).map(|level| &*level.site_members).unwrap_or_default();
        PlanError::Unequal {
            what,
            level: self.level_name(1),
            members: members.iter().map(usize::to_string).collect::<Vec<_>>().join(", "),
            possible,
        }
    }

    /// The site of a part.
    pub(crate) fn site_of_part(&self, part: usize) -> usize {
        let mut end = 0;
        let found = self.sites.iter().position(|site| {
            end += site.parts;
            part < end
        });
        found.unwrap_or(self.sites.len() - 1)
    }

    /// The site of a GPU.
    pub(crate) fn site_of_gpu(&self, gpu: usize) -> usize {
        self.site_of_part(gpu / gpus_of_part(&self.levels))
    }

    /// The number of links of a level.
    pub(crate) fn links(&self, level: usize) -> usize {
        self.link_ranges(level).map(|(gpus, sharing)| gpus.len().div_ceil(sharing)).sum()
    }

    /// The GPUs that use a link of a level. Links are numbered in the order of their GPUs.
    pub(crate) fn gpus_of_link(&self, level: usize, link: usize) -> Range<usize> {
        let mut before = 0;
        for (gpus, sharing) in self.link_ranges(level) {
            let links = gpus.len().div_ceil(sharing);
            if link < before + links {
                let start = gpus.start + (link - before) * sharing;
                return start..(start + sharing).min(gpus.end);
            }
            before += links;
        }
        0..0
    }

    /// Ranges of GPUs, each with the number of GPUs that share a link of the level there. Unequal sites have one range
    /// each, because more GPUs share the uplink of a larger site.
    fn link_ranges(&self, level: usize) -> impl Iterator<Item = (Range<usize>, usize)> {
        let all = (0..self.gpus(), self.levels[level].gpus_per_link);
        let part_gpus = gpus_of_part(&self.levels);
        let sites = self.sites.iter().scan(0, move |end, site| {
            let start = *end;
            *end += site.parts * part_gpus;
            Some((start..*end, site.levels[level].gpus_per_link))
        });
        let unequal = self.is_unequal();
        let uniform = (!unequal).then_some(all);
        uniform.into_iter().chain(sites.filter(move |_| unequal))
    }

    /// The cluster with slow links: at each site, the bandwidth of all links of a level is divided by the largest slowdown
    /// there. An exchange takes as long as at its slowest GPU, so one slow link delays it as much as if all links of the site
    /// were slow. The description keeps the normal bandwidths.
    pub(crate) fn with_slower_links(&self, slow: impl Iterator<Item = (usize, Range<usize>, f64)>) -> Self {
        let mut changed = self.clone();
        let mut most = vec![vec![1.0f64; self.levels.len()]; self.sites.len()];
        for (level, sites, slowdown) in slow {
            for site in sites {
                most[site][level] = most[site][level].max(slowdown);
            }
        }
        for (site, slowdowns) in changed.sites.iter_mut().zip(&most) {
            for (level, slowdown) in site.levels.iter_mut().zip(slowdowns) {
                level.link_bandwidth = level.link_bandwidth / *slowdown;
            }
        }
        changed.levels = slowest(&changed.levels, &changed.sites);
        changed
    }

    /// The numbers of members, out of `members` of the outermost level, that a group of equal GPUs can span: 1 or all
    /// if sites are unequal, otherwise every divisor.
    pub(crate) fn outermost_choices(&self, members: usize) -> Vec<usize> {
        let all = crate::divisors::divisors(members);
        match self.is_unequal() {
            true => all.into_iter().filter(|&choice| choice == 1 || choice == members).collect(),
            false => all,
        }
    }

    /// A group of the cluster with this many members of each level. The number of GPUs that share a link does not
    /// change, because the rest of the cluster uses the links too.
    ///
    /// A group that spans unequal sites keeps them. Any other group has the slowest links of all sites.
    ///
    /// # Errors
    /// [`PlanError::Count`] when a number of members is 0.
    pub(crate) fn group(&self, members: &[usize]) -> Result<Self> {
        if self.is_unequal() && members[0] == self.levels[0].scaling_factor {
            let resized = |levels: &[Level]| -> Vec<Level> {
                let pairs = levels.iter().zip(members);
                pairs.map(|(level, &scaling_factor)| Level { scaling_factor, ..*level }).collect()
            };
            let site = |site: &Site| Site { parts: site.parts, levels: resized(&site.levels) };
            // The description does not change, because `with_bandwidth` scales its rates.
            return Ok(Self {
                description: self.description.clone(),
                levels: resized(&self.levels),
                sites: self.sites.iter().map(site).collect(),
            });
        }
        let mut description = self.description.clone();
        for ((level, at), &members) in description.levels.iter_mut().zip(&self.levels).zip(members) {
            level.scaling_factor = members;
            level.sharing = Sharing::Gpus(at.gpus_per_link);
            (level.site_members, level.site_bandwidth_gbit_per_s) = (Vec::new(), Vec::new());
        }
        description.try_into()
    }

    /// The same cluster with a different link bandwidth at one level. Efficiency and loss of the level still reduce
    /// what transfers reach. With unequal links, `link_bandwidth` is that of the slowest link, and the others change in
    /// proportion.
    ///
    /// # Errors
    /// [`PlanError::Index`] when the level does not exist, [`PlanError::Quantity`] when a bandwidth is outside
    /// [`limits::LINK_GBIT_PER_S`].
    pub fn with_bandwidth(&self, level: usize, link_bandwidth: BytesPerSecond) -> Result<Self> {
        let mut changed = self.clone();
        let count = changed.levels.len();
        let missing = PlanError::Index { what: "level", index: level, count };
        let described = changed.description.levels.get_mut(level).ok_or(missing)?;
        let rate = link_bandwidth.as_gbit_per_s();
        let factor = rate / described.bandwidth_gbit_per_s;
        let scaled: Vec<f64> = described.site_bandwidth_gbit_per_s.iter().map(|old| old * factor).collect();
        for &rate in scaled.iter().chain([&rate]) {
            let what = format!("bandwidth_gbit_per_s of level '{}'", described.name);
            number(what, rate, limits::LINK_GBIT_PER_S)?;
        }
        described.bandwidth_gbit_per_s = rate;
        described.set_bandwidths(if scaled.is_empty() { std::slice::from_ref(&rate) } else { &scaled });
        for (index, site) in changed.sites.iter_mut().enumerate() {
            let of_site = described.site_bandwidth_gbit_per_s.get(index).copied();
            site.levels[level].link_bandwidth = described.reached_of(of_site.unwrap_or(rate));
        }
        changed.levels = slowest(&changed.levels, &changed.sites);
        Ok(changed)
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::presets;

    fn three_sites() -> ClusterDescription {
        let mut cluster = presets::datacenters(3, 100.0, 0.005, presets::dgx_h200(8));
        cluster.levels[1].set_members(&[8, 8, 4]);
        cluster.levels[0].set_bandwidths(&[100.0, 100.0, 25.0]);
        cluster
    }

    #[test]
    fn unequal_sites_divide_into_equal_parts() {
        let description = three_sites();
        assert_eq!(description.gpus(), 20 * 8);
        let cluster = Cluster::try_from(description).unwrap();
        assert_eq!((cluster.scaling_factors(), cluster.gpus()), (vec![5, 4, 8], 160));
        assert_eq!(cluster.sites().iter().map(|site| site.parts).collect::<Vec<_>>(), [2, 2, 1]);
        assert_eq!((0..5).map(|part| cluster.site_of_part(part)).collect::<Vec<_>>(), [0, 0, 1, 1, 2]);
        let uplinks = cluster.sites().iter().map(|site| site.levels[0]);
        let uplinks: Vec<_> =
            uplinks.map(|at| (at.gpus_per_link, at.link_bandwidth.as_gbit_per_s())).collect();
        assert_eq!(uplinks, [(64, 100.0), (64, 100.0), (32, 25.0)]);
        // The slowest link is that of the third site: 25 / 32 Gbit/s per GPU, less than 100 / 64.
        assert_eq!(cluster.levels()[0].gpus_per_link, 32);
        assert!(cluster.is_unequal() && cluster.has_unequal_links(0) && !cluster.has_unequal_links(1));
        assert_eq!(cluster.outermost_choices(5), [1, 5]);
    }

    #[test]
    fn groups_keep_sites_only_where_they_span_them() {
        let cluster = Cluster::try_from(three_sites()).unwrap();
        let spanning = cluster.group(&[5, 2, 8]).unwrap();
        assert_eq!((spanning.gpus(), spanning.sites().len()), (80, 3));
        assert_eq!(spanning.sites()[0].levels[0].gpus_per_link, 64);
        let inside = cluster.group(&[1, 4, 8]).unwrap();
        assert_eq!((inside.gpus(), inside.is_unequal()), (32, false));
        let faster = spanning.with_bandwidth(0, BytesPerSecond::from_gbit_per_s(50.0)).unwrap();
        let rates = faster.sites().iter().map(|site| site.levels[0].link_bandwidth.as_gbit_per_s());
        assert_eq!(rates.collect::<Vec<_>>(), [200.0, 200.0, 50.0]);
        assert_eq!(faster.levels()[0].link_bandwidth.as_gbit_per_s(), 50.0);
    }

    #[test]
    fn lists_of_equal_entries_are_single_values() {
        let mut cluster = three_sites();
        cluster.levels[1].set_members(&[8, 8, 8]);
        cluster.levels[0].set_bandwidths(&[100.0; 3]);
        assert_eq!(cluster, presets::datacenters(3, 100.0, 0.005, presets::dgx_h200(8)));
    }

    #[test]
    fn errors_of_lists_name_the_level() {
        let with = |change: fn(&mut ClusterDescription)| {
            let mut description = three_sites();
            change(&mut description);
            Cluster::try_from(description).unwrap_err().to_string()
        };
        let length = with(|cluster| cluster.levels[1].set_members(&[8, 4]));
        assert!(
            length.contains("level 'rail' has 2 entries") && length.contains("3 members of 'wan'"),
            "{length}"
        );
        let place = with(|cluster| cluster.levels[2].set_members(&[8, 8, 4]));
        assert!(place.contains("level 'nvlink'") && place.contains("only the second level"), "{place}");
        let zero = with(|cluster| cluster.levels[1].set_members(&[8, 8, 0]));
        assert!(zero.contains("site_members of level 'rail' is 0"), "{zero}");
        let slow = with(|cluster| cluster.levels[0].set_bandwidths(&[0.0, 1.0, 1.0]));
        assert!(slow.contains("site_bandwidth_gbit_per_s of level 'wan' is 0"), "{slow}");
        assert!(with(|cluster| cluster.levels[1].scaling_factor = 4).contains("largest entry"));
        assert!(with(|cluster| cluster.levels[0].bandwidth_gbit_per_s = 30.0).contains("least entry"));
    }
}
