//! The cluster: levels of links, outermost first, and the GPUs that they connect.

mod sites;

use serde::{Deserialize, Serialize};

pub use sites::Site;
pub(crate) use sites::gcd;

use crate::error::{PlanError, Result, count, number};
use crate::limits;
use crate::units::{Bytes, BytesPerSecond, FlopPerSecond, Seconds};

/// An unchecked description of a cluster; [`Cluster`] is the checked form.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct ClusterDescription {
    /// Name of the cluster, for reports.
    pub name: String,
    /// The levels, outermost first: for example datacenters, nodes of a datacenter, GPUs of a node.
    pub levels: Vec<LevelDescription>,
    /// The GPUs, which are all equal.
    pub gpu: GpuDescription,
}

/// An unchecked description of one level: its members, and the links between them.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct LevelDescription {
    /// Name of the links, for reports: "wan", "rail", "nvlink".
    pub name: String,
    /// Members of the level: datacenters of the cluster, nodes of a datacenter, or GPUs of a node. With `site_members`,
    /// the largest entry.
    pub scaling_factor: usize,
    /// Members of the level in each site, if sites are unequal. A site is a member of the outermost level. Only the
    /// second level may have such a list. Empty: all sites have `scaling_factor` members.
    #[serde(default, skip_serializing_if = "Vec::is_empty")]
    pub site_members: Vec<usize>,
    /// Time that a sender spends to start one message, in addition to the time for its bytes, seconds.
    #[serde(default)]
    pub alpha_s: f64,
    /// Round-trip time between two members, seconds. An exchange ends when its last acknowledgement has arrived.
    #[serde(default)]
    pub round_trip_s: f64,
    /// Bandwidth of one link in each direction, Gbit/s. With `site_bandwidth_gbit_per_s`, the least entry.
    pub bandwidth_gbit_per_s: f64,
    /// Bandwidth of the links of each site, Gbit/s, if they are unequal: that of the site's uplink at the outermost
    /// level, that of the links inside the site at inner levels. Empty: all links have `bandwidth_gbit_per_s`.
    #[serde(default, skip_serializing_if = "Vec::is_empty")]
    pub site_bandwidth_gbit_per_s: Vec<f64>,
    /// The GPUs that share one link.
    #[serde(default)]
    pub sharing: Sharing,
    /// Part of the bandwidth that transfers reach: what protocols, encryption and other traffic leave.
    #[serde(default = "whole")]
    pub efficiency: f64,
    /// Fraction of packets that are lost. A fraction above 0 limits the rate of each flow by the formula of Mathis
    /// ([`flow_rate`]).
    #[serde(default)]
    pub loss: f64,
    /// Flows (connections) over one link at a time. `loss` limits each of them separately.
    #[serde(default = "one")]
    pub flows: usize,
}

fn whole() -> f64 {
    1.0
}

fn one() -> usize {
    1
}

/// Payload of a packet, bytes: Ethernet's 1500 without the headers of IP and TCP.
const SEGMENT: f64 = 1460.0;

/// The maximum rate of one TCP flow with this round trip (seconds) and this fraction of lost packets, by Mathis et al.
/// ("The macroscopic behavior of the TCP congestion avoidance algorithm", 1997):
/// `segment / round trip * sqrt(3 / (2 loss))`. `None` without loss or without a round trip: then nothing limits the
/// flow.
pub fn flow_rate(round_trip_s: f64, loss: f64) -> Option<BytesPerSecond> {
    let limited = round_trip_s > 0.0 && loss > 0.0;
    limited.then(|| BytesPerSecond(SEGMENT / round_trip_s * (1.5 / loss).sqrt()))
}

impl LevelDescription {
    /// The bandwidth of one link that transfers reach: `min(bandwidth * efficiency, flows * flow rate)`. With unequal
    /// links, that of the slowest link.
    pub fn reached(&self) -> BytesPerSecond {
        self.reached_of(self.bandwidth_gbit_per_s)
    }

    /// The rate that transfers reach on a link with this bandwidth, Gbit/s, at this level.
    pub fn reached_of(&self, bandwidth_gbit_per_s: f64) -> BytesPerSecond {
        let link = BytesPerSecond::from_gbit_per_s(bandwidth_gbit_per_s) * self.efficiency;
        flow_rate(self.round_trip_s, self.loss).map_or(link, |flow| link.min(flow * self.flows as f64))
    }

    /// Sets the number of members of every site: as one number if all are equal, otherwise as a list.
    ///
    /// `members` must not be empty.
    pub fn set_members(&mut self, members: &[usize]) {
        self.scaling_factor = members.iter().copied().max().unwrap_or(self.scaling_factor);
        let unequal = members.iter().any(|&count| count != self.scaling_factor);
        self.site_members = if unequal { members.to_vec() } else { Vec::new() };
    }

    /// Sets the bandwidth of the links of every site, Gbit/s: as one number if all are equal, otherwise as a list.
    ///
    /// `bandwidths` must not be empty.
    pub fn set_bandwidths(&mut self, bandwidths: &[f64]) {
        self.bandwidth_gbit_per_s =
            bandwidths.iter().copied().reduce(f64::min).unwrap_or(self.bandwidth_gbit_per_s);
        let unequal = bandwidths.iter().any(|&rate| rate != self.bandwidth_gbit_per_s);
        self.site_bandwidth_gbit_per_s = if unequal { bandwidths.to_vec() } else { Vec::new() };
    }
}

impl ClusterDescription {
    /// Number of GPUs. The description is unchecked, so the number saturates at `usize::MAX`.
    pub fn gpus(&self) -> usize {
        let inside = |from: usize| {
            let levels = self.levels.get(from..).unwrap_or_default();
            levels.iter().map(|level| level.scaling_factor).fold(1, usize::saturating_mul)
        };
        match self.levels.get(1).filter(|level| !level.site_members.is_empty()) {
            Some(level) => {
                let members = level.site_members.iter().copied().fold(0, usize::saturating_add);
                members.saturating_mul(inside(2))
            }
            None => inside(0),
        }
    }
}

/// The GPUs that share one link of a level.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default, Serialize, Deserialize)]
#[serde(rename_all = "kebab-case")]
pub enum Sharing {
    /// Every GPU has its own link.
    #[default]
    PerGpu,
    /// All GPUs of a member share one link, such as the uplink of a datacenter.
    PerMember,
    /// This many GPUs share one link. Two, for example, for nodes with four network cards and eight GPUs.
    Gpus(usize),
}

/// An unchecked description of a GPU.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct GpuDescription {
    /// Name of the GPU, for reports.
    pub name: String,
    /// Throughput that matrix products reach in practice, not the peak of the datasheet, TFLOP/s.
    pub sustained_tflops: f64,
    /// Memory, GB (10⁹ bytes).
    pub memory_gb: f64,
    /// Bandwidth of the memory, GB/s.
    pub hbm_gb_per_s: f64,
}

/// A checked cluster. Every number is inside its bounds of [`limits`].
///
/// If sites are unequal, they divide into equal *parts*, and the parts are the members of the outermost level: sites of
/// 8, 8 and 4 nodes have two, two and one parts of 4 nodes, and their [`scaling_factors`](Self::scaling_factors) begin
/// with 5 and 4. `docs/step-model.md` has the rules.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
#[serde(try_from = "ClusterDescription", into = "ClusterDescription")]
pub struct Cluster {
    description: ClusterDescription,
    /// The levels of a part, each with the slowest links of all sites.
    levels: Vec<Level>,
    sites: Vec<Site>,
}

/// One checked level.
#[derive(Debug, Clone, Copy, PartialEq)]
pub struct Level {
    /// `SF_l`: members of the level. If sites are unequal, the outermost level has the parts of all sites, and inner
    /// levels have the members of one part.
    pub scaling_factor: usize,
    /// Time to start one message, in addition to the time for its bytes.
    pub alpha: Seconds,
    /// Round-trip time between two members.
    pub round_trip: Seconds,
    /// Bandwidth of one link in each direction that transfers reach ([`LevelDescription::reached`]).
    pub link_bandwidth: BytesPerSecond,
    /// GPUs that share one link.
    pub gpus_per_link: usize,
}

impl Level {
    /// Bandwidth of one GPU while all GPUs that share its link send: `link_bandwidth / gpus_per_link`.
    pub fn bandwidth_per_gpu(&self) -> BytesPerSecond {
        self.link_bandwidth / self.gpus_per_link as f64
    }
}

impl TryFrom<ClusterDescription> for Cluster {
    type Error = PlanError;

    fn try_from(description: ClusterDescription) -> Result<Self> {
        let found = description.levels.len();
        if found == 0 {
            return Err(PlanError::Levels { what: "levels of a cluster", found, levels: 1 });
        }
        count("number of levels", found, limits::LEVELS)?;
        let mut levels = Vec::with_capacity(found);
        let mut inside = 1usize; // GPUs of one member of the level; at level 0 with unequal sites, of one part
        for (index, level) in description.levels.iter().enumerate().rev() {
            let what = |quantity: &str| format!("{quantity} of level '{}'", level.name);
            sites::check_lists(&description, index)?;
            count(what("scaling_factor"), level.scaling_factor, limits::MEMBERS)?;
            number(what("bandwidth_gbit_per_s"), level.bandwidth_gbit_per_s, limits::LINK_GBIT_PER_S)?;
            number(what("efficiency"), level.efficiency, limits::EFFICIENCY)?;
            number(what("loss"), level.loss, limits::LOSS)?;
            if level.loss > 0.0 && level.round_trip_s == 0.0 {
                let what = "has a loss and no round trip, so that nothing limits its flows".to_owned();
                let needed = "a round_trip above 0, or no loss".to_owned();
                return Err(PlanError::Sites { level: level.name.clone(), what, needed });
            }
            count(what("flows"), level.flows, limits::FLOWS)?;
            let gpus_per_link = match level.sharing {
                Sharing::PerGpu => 1,
                Sharing::PerMember => inside,
                Sharing::Gpus(gpus) => count(what("GPUs that share a link"), gpus, limits::GPUS)?,
            };
            let scaling_factor = sites::members_of_part(&description, index);
            levels.push(Level {
                scaling_factor,
                alpha: Seconds(number(what("alpha_s"), level.alpha_s, limits::SECONDS)?),
                round_trip: Seconds(number(what("round_trip_s"), level.round_trip_s, limits::SECONDS)?),
                link_bandwidth: level.reached(),
                gpus_per_link,
            });
            // Both factors are bounded, so their product cannot overflow.
            inside = count(what("number of GPUs in all members"), inside * scaling_factor, limits::GPUS)?;
        }
        levels.reverse();
        number("sustained_tflops of the GPU", description.gpu.sustained_tflops, limits::TFLOPS)?;
        number("memory_gb of the GPU", description.gpu.memory_gb, limits::MEMORY_GB)?;
        number("hbm_gb_per_s of the GPU", description.gpu.hbm_gb_per_s, limits::MEMORY_GB_PER_S)?;
        let sites = sites::sites(&description, &levels);
        let levels = sites::slowest(&levels, &sites);
        Ok(Self { description, levels, sites })
    }
}

impl From<Cluster> for ClusterDescription {
    fn from(cluster: Cluster) -> Self {
        cluster.description
    }
}

impl Cluster {
    /// The description of the cluster.
    pub fn description(&self) -> &ClusterDescription {
        &self.description
    }

    /// The levels, outermost first.
    pub fn levels(&self) -> &[Level] {
        &self.levels
    }

    /// The name of a level, or its number as text if the level does not exist.
    pub fn level_name(&self, level: usize) -> String {
        self.description.levels.get(level).map_or_else(|| level.to_string(), |at| at.name.clone())
    }

    /// Members of each level, outermost first.
    pub fn scaling_factors(&self) -> Vec<usize> {
        self.levels.iter().map(|level| level.scaling_factor).collect()
    }

    /// Number of GPUs.
    pub fn gpus(&self) -> usize {
        self.levels.iter().map(|level| level.scaling_factor).product()
    }

    /// Sustained throughput of a GPU in matrix products.
    pub fn sustained(&self) -> FlopPerSecond {
        FlopPerSecond::from_tflops(self.description.gpu.sustained_tflops)
    }

    /// Memory of a GPU.
    pub fn memory(&self) -> Bytes {
        Bytes::from_gb(self.description.gpu.memory_gb)
    }

    /// Memory bandwidth of a GPU.
    pub fn hbm_bandwidth(&self) -> BytesPerSecond {
        BytesPerSecond::from_gb_per_s(self.description.gpu.hbm_gb_per_s)
    }

    /// The cluster with reduced bandwidth of the links that more GPUs share than a member has: each GPU keeps the bandwidth
    /// that it has while GPUs outside this cluster use the link too. A simulation of a part of a cluster needs this.
    ///
    /// # Errors
    /// [`PlanError::Quantity`] when the bandwidth of a link falls below [`limits::LINK_GBIT_PER_S`].
    pub(crate) fn alone(&self) -> Result<Self> {
        let mut description = self.description.clone();
        let mut inside = 1;
        for (level, at) in description.levels.iter_mut().zip(&self.levels).rev() {
            if at.gpus_per_link > inside {
                let part = inside as f64 / at.gpus_per_link as f64;
                level.bandwidth_gbit_per_s = (at.link_bandwidth * part).as_gbit_per_s();
                (level.efficiency, level.loss) = (1.0, 0.0);
                level.sharing = Sharing::Gpus(inside);
            }
            inside *= level.scaling_factor;
        }
        description.try_into()
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::presets;

    fn two_datacenters() -> ClusterDescription {
        presets::datacenters(2, 400.0, 0.005, presets::dgx_h100(8))
    }

    #[test]
    fn gpus_that_share_a_link_divide_its_bandwidth() {
        let cluster = Cluster::try_from(two_datacenters()).unwrap();
        assert_eq!(cluster.scaling_factors(), [2, 8, 8]);
        assert_eq!(cluster.gpus(), 128);
        assert_eq!(cluster.levels()[0].gpus_per_link, 64);
        assert_eq!(cluster.levels()[0].bandwidth_per_gpu(), BytesPerSecond(50e9 / 64.0));
        assert_eq!(cluster.levels()[1].bandwidth_per_gpu(), BytesPerSecond::from_gb_per_s(50.0));
        let mut shared = two_datacenters();
        shared.levels[1].sharing = Sharing::Gpus(2);
        let shared = Cluster::try_from(shared).unwrap();
        assert_eq!(shared.levels()[1].bandwidth_per_gpu(), BytesPerSecond::from_gb_per_s(25.0));
        let faster = shared.with_bandwidth(0, BytesPerSecond::from_gbit_per_s(800.0)).unwrap();
        assert_eq!(faster.levels()[0].link_bandwidth, BytesPerSecond(100e9));
        assert!(shared.with_bandwidth(3, BytesPerSecond(1.0)).is_err());
    }

    #[test]
    fn the_gpus_of_an_unchecked_description_saturate() {
        let mut description = two_datacenters();
        assert_eq!(description.gpus(), 128);
        description.levels[1].scaling_factor = usize::MAX;
        assert_eq!(description.gpus(), usize::MAX);
        description.levels[1].site_members = vec![usize::MAX, 2];
        assert_eq!(description.gpus(), usize::MAX);
    }

    #[test]
    fn a_loss_needs_a_round_trip() {
        let mut description = presets::datacenters(2, 10.0, 0.0, presets::dgx_h200(8));
        description.levels[0].loss = 1e-4;
        let error = Cluster::try_from(description.clone()).unwrap_err().to_string();
        assert!(error.contains("level 'wan' has a loss and no round trip"), "{error}");
        description.levels[0].round_trip_s = 0.03;
        assert!(Cluster::try_from(description).is_ok());
    }

    /// A flow with a round trip of 30 ms and one lost packet in 10,000 reaches about 50 Mbit/s on any link.
    #[test]
    fn loss_limits_flows() {
        let flow = flow_rate(0.03, 1e-4).unwrap();
        assert!((flow.as_gbit_per_s() - 0.0477).abs() < 1e-4, "{flow}");
        let mut description = two_datacenters();
        let wan = &mut description.levels[0];
        (wan.round_trip_s, wan.loss, wan.flows, wan.efficiency) = (0.03, 1e-4, 64, 0.8);
        let reached = |description: &ClusterDescription| {
            Cluster::try_from(description.clone()).unwrap().levels()[0].link_bandwidth.as_gbit_per_s()
        };
        assert!((reached(&description) / (64.0 * flow.as_gbit_per_s()) - 1.0).abs() < 1e-12);
        description.levels[0].flows = 100_000;
        assert_eq!(reached(&description), 320.0);
        description.levels[0].loss = 0.0;
        assert_eq!(reached(&description), 320.0);
        description.levels[0].efficiency = 0.0;
        let error = Cluster::try_from(description).unwrap_err().to_string();
        assert!(error.contains("efficiency of level 'wan' is 0"), "{error}");
    }

    #[test]
    fn a_part_of_a_cluster_keeps_the_bandwidth_of_a_gpu() {
        let cluster = Cluster::try_from(two_datacenters()).unwrap();
        let part = cluster.group(&[2, 4, 8]).unwrap();
        let alone = part.alone().unwrap();
        assert_eq!((part.gpus(), part.levels()[0].gpus_per_link), (64, 64));
        assert_eq!(
            (alone.levels()[0].gpus_per_link, alone.levels()[0].link_bandwidth.as_gbit_per_s()),
            (32, 200.0)
        );
        for level in 0..3 {
            let rates = [&cluster, &part, &alone].map(|at| at.levels()[level].bandwidth_per_gpu());
            assert_eq!(rates, [rates[0]; 3]);
        }
    }

    #[test]
    fn errors_of_impossible_clusters_name_the_possible_values() {
        let with = |change: fn(&mut ClusterDescription)| {
            let mut description = two_datacenters();
            change(&mut description);
            Cluster::try_from(description).unwrap_err().to_string()
        };
        assert_eq!(
            with(|cluster| cluster.levels[0].bandwidth_gbit_per_s = 0.0),
            "bandwidth_gbit_per_s of level 'wan' is 0: it must be from 1e-6 to 1e9"
        );
        assert!(with(|cluster| cluster.levels.clear()).contains("at least one level"));
        assert!(with(|cluster| cluster.levels[1].scaling_factor = 0).contains("from 1 to 65536"));
        let many = with(|cluster| cluster.levels.iter_mut().for_each(|level| level.scaling_factor = 60_000));
        assert!(
            many.contains("GPUs") && many.contains("is 3600000000") && many.contains("to 1048576"),
            "{many}"
        );
        let deep = with(|cluster| cluster.levels = vec![cluster.levels[2].clone(); 9]);
        assert_eq!(deep, "number of levels is 9: it must be a whole number from 1 to 8");
        assert!(
            with(|cluster| cluster.levels[0].round_trip_s = -1.0).contains("round_trip_s of level 'wan'")
        );
        assert!(with(|cluster| cluster.levels[0].sharing = Sharing::Gpus(0)).contains("share a link"));
        assert!(with(|cluster| cluster.gpu.hbm_gb_per_s = f64::INFINITY).contains("hbm_gb_per_s"));
    }

    #[test]
    fn a_cluster_survives_json_and_is_checked_when_read() {
        let text = r#"{"name": "pair", "levels": [
              {"name": "wan", "scaling_factor": 2, "round_trip_s": 0.005, "bandwidth_gbit_per_s": 10,
               "sharing": "per-member"},
              {"name": "nvlink", "scaling_factor": 8, "bandwidth_gbit_per_s": 3600, "sharing": {"gpus": 1}}],
            "gpu": {"name": "H100", "sustained_tflops": 400, "memory_gb": 80, "hbm_gb_per_s": 3350}}"#;
        let cluster: Cluster = serde_json::from_str(text).unwrap();
        assert_eq!(cluster.levels()[0].gpus_per_link, 8);
        let again: Cluster = serde_json::from_str(&serde_json::to_string(&cluster).unwrap()).unwrap();
        assert_eq!(again, cluster);
        let error = serde_json::from_str::<Cluster>(&text.replace("10,", "0,")).unwrap_err().to_string();
        assert!(error.contains("level 'wan' is 0"), "{error}");
    }
}
