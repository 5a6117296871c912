//! Where it is trained: levels of links, outermost first, and the GPU at the end of them.

use serde::{Deserialize, Serialize};

use crate::error::{PlanError, Result, at_least_one, not_negative, positive};
use crate::units::{Bytes, BytesPerSecond, FlopPerSecond, Seconds};

/// A cluster as people write it down; [`Cluster`] is the checked form.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct ClusterDescription {
    /// Its name, for reports.
    pub name: String,
    /// The levels, outermost first: datacenters, then nodes of one, then GPUs of one of those.
    pub levels: Vec<LevelDescription>,
    /// Its GPUs, all alike.
    pub gpu: GpuDescription,
}

/// One level: how many members it has, and the links between them.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct LevelDescription {
    /// What the members are joined by, for reports: "wan", "rail", "nvlink".
    pub name: String,
    /// Members: datacenters of the cluster, nodes of a datacenter, GPUs of a node.
    pub scaling_factor: usize,
    /// Cost of each message beside its bytes: what a sender spends on starting it.
    #[serde(default)]
    pub alpha_s: f64,
    /// There and back: an exchange is over when its last acknowledgement arrived.
    #[serde(default)]
    pub round_trip_s: f64,
    /// What one link carries, in each direction.
    pub bandwidth_gbit_per_s: f64,
    /// Who shares a link.
    #[serde(default)]
    pub sharing: Sharing,
}

/// Who shares one link of a level.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default, Serialize, Deserialize)]
#[serde(rename_all = "kebab-case")]
pub enum Sharing {
    /// Nobody: every GPU has its own.
    #[default]
    PerGpu,
    /// All GPUs of a member, as with the uplink of a datacenter.
    PerMember,
    /// This many GPUs, as with four network cards for eight GPUs.
    Gpus(usize),
}

/// A GPU, by what the model needs of it.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct GpuDescription {
    /// Its name, for reports.
    pub name: String,
    /// What its matrix products reach in practice, not on paper.
    pub sustained_tflops: f64,
    /// Memory, GB (10⁹ bytes).
    pub memory_gb: f64,
    /// Bandwidth of its memory, GB/s.
    pub hbm_gb_per_s: f64,
}

/// A cluster whose numbers make sense together.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
#[serde(try_from = "ClusterDescription", into = "ClusterDescription")]
pub struct Cluster {
    description: ClusterDescription,
    levels: Vec<Level>,
}

/// One checked level.
#[derive(Debug, Clone, Copy, PartialEq)]
pub struct Level {
    /// Members.
    pub scaling_factor: usize,
    /// Cost of each message beside its bytes.
    pub alpha: Seconds,
    /// There and back.
    pub round_trip: Seconds,
    /// What one link carries, in each direction.
    pub link_bandwidth: BytesPerSecond,
    /// GPUs that share a link.
    pub gpus_per_link: usize,
}

impl Level {
    /// What one GPU gets of its link when all that share it send.
    pub fn bandwidth_per_gpu(&self) -> BytesPerSecond {
        self.link_bandwidth / self.gpus_per_link as f64
    }
}

impl TryFrom<ClusterDescription> for Cluster {
    type Error = PlanError;

    fn try_from(description: ClusterDescription) -> Result<Self> {
        let count = description.levels.len();
        if count == 0 {
            return Err(PlanError::Levels { what: "levels of a cluster", found: 0, levels: 1 });
        }
        let mut levels = Vec::with_capacity(count);
        let mut inside = 1usize; // GPUs of one member of the level at hand
        for level in description.levels.iter().rev() {
            let what = |quantity: &str| format!("{quantity} of level '{}'", level.name);
            at_least_one(what("scaling_factor"), level.scaling_factor)?;
            positive(what("bandwidth_gbit_per_s"), level.bandwidth_gbit_per_s)?;
            let gpus_per_link = match level.sharing {
                Sharing::PerGpu => 1,
                Sharing::PerMember => inside,
                Sharing::Gpus(gpus) => at_least_one(what("GPUs that share a link"), gpus)?,
            };
            levels.push(Level {
                scaling_factor: level.scaling_factor,
                alpha: Seconds(not_negative(what("alpha_s"), level.alpha_s)?),
                round_trip: Seconds(not_negative(what("round_trip_s"), level.round_trip_s)?),
                link_bandwidth: BytesPerSecond::from_gbit_per_s(level.bandwidth_gbit_per_s),
                gpus_per_link,
            });
            inside = inside.checked_mul(level.scaling_factor).ok_or_else(|| PlanError::Quantity {
                what: what("GPUs from inside"),
                value: inside as f64 * level.scaling_factor as f64,
                needed: "a number that this machine can count",
            })?;
        }
        levels.reverse();
        positive("sustained_tflops of the GPU", description.gpu.sustained_tflops)?;
        positive("memory_gb of the GPU", description.gpu.memory_gb)?;
        positive("hbm_gb_per_s of the GPU", description.gpu.hbm_gb_per_s)?;
        Ok(Self { description, levels })
    }
}

impl From<Cluster> for ClusterDescription {
    fn from(cluster: Cluster) -> Self {
        cluster.description
    }
}

impl Cluster {
    /// The description it was made of.
    pub fn description(&self) -> &ClusterDescription {
        &self.description
    }

    /// The levels, outermost first.
    pub fn levels(&self) -> &[Level] {
        &self.levels
    }

    /// The name of a level; its number where there is no such level.
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

    /// What a GPU's matrix products reach.
    pub fn sustained(&self) -> FlopPerSecond {
        FlopPerSecond::from_tflops(self.description.gpu.sustained_tflops)
    }

    /// Memory of a GPU.
    pub fn memory(&self) -> Bytes {
        Bytes::from_gb(self.description.gpu.memory_gb)
    }

    /// Bandwidth of a GPU's memory.
    pub fn hbm_bandwidth(&self) -> BytesPerSecond {
        BytesPerSecond::from_gb_per_s(self.description.gpu.hbm_gb_per_s)
    }

    /// The same cluster with other links at one level.
    ///
    /// # Errors
    /// [`PlanError::Index`] for a level that does not exist, [`PlanError::Quantity`] for a bandwidth that is not
    /// above zero.
    pub fn with_bandwidth(&self, level: usize, link_bandwidth: BytesPerSecond) -> Result<Self> {
        let mut description = self.description.clone();
        let count = description.levels.len();
        let at = description.levels.get_mut(level).ok_or(PlanError::Index {
            what: "level",
            index: level,
            count,
        })?;
        at.bandwidth_gbit_per_s = link_bandwidth.as_gbit_per_s();
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
    fn sharing_divides_a_link() {
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
    fn impossible_clusters_say_what_would_be_possible() {
        let with = |change: fn(&mut ClusterDescription)| {
            let mut description = two_datacenters();
            change(&mut description);
            Cluster::try_from(description).unwrap_err().to_string()
        };
        assert_eq!(
            with(|cluster| cluster.levels[0].bandwidth_gbit_per_s = 0.0),
            "bandwidth_gbit_per_s of level 'wan' is 0: it must be finite and above zero"
        );
        assert!(with(|cluster| cluster.levels.clear()).contains("at least one level"));
        assert!(with(|cluster| cluster.levels[1].scaling_factor = 0).contains("at least one"));
        assert!(
            with(|cluster| cluster.levels[0].round_trip_s = -1.0).contains("round_trip_s of level 'wan'")
        );
        assert!(with(|cluster| cluster.levels[0].sharing = Sharing::Gpus(0)).contains("share a link"));
        assert!(with(|cluster| cluster.gpu.hbm_gb_per_s = f64::INFINITY).contains("hbm_gb_per_s"));
    }

    #[test]
    fn a_cluster_is_read_checked_and_written_back() {
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
