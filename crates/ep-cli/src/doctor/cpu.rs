//! The CPU: model, usable cores, topology, vector extensions and caches.

use std::collections::BTreeSet;

use serde::Serialize;

use super::{
    cgroup,
    check::{Check, Section},
    fact::Fact,
    parse,
    probe::Probe,
};
use crate::common::machine;

const CPU_INFO: &str = "/proc/cpuinfo";
const CPU_DIR: &str = "/sys/devices/system/cpu";

/// The processors.
#[derive(Clone, Debug, Serialize)]
pub(crate) struct Cpu {
    /// The model's name.
    pub(crate) model: Fact<String>,
    /// Cores (hardware threads) that this process may use by its affinity mask and quota.
    pub(crate) cores_usable: Fact<usize>,
    /// Cores (hardware threads) that are online.
    pub(crate) cores_online: Fact<usize>,
    /// Physical cores to which the online cores belong.
    pub(crate) physical_cores_online: Fact<usize>,
    /// The control group's quota, in cores; absent if there is none.
    pub(crate) cgroup_quota_cores: Fact<f64>,
    /// Sockets.
    pub(crate) sockets: Fact<usize>,
    /// NUMA nodes; absent if the kernel was built without NUMA.
    pub(crate) numa_nodes: Fact<usize>,
    /// The supported vector extensions, of those that the backends use.
    pub(crate) vector_extensions: Vec<&'static str>,
    /// The unsupported vector extensions, of those that the backends use.
    pub(crate) vector_extensions_missing: Vec<&'static str>,
    /// The L2 cache of the first core.
    pub(crate) l2_bytes: Fact<u64>,
    /// The L3 cache of the first core.
    pub(crate) l3_bytes: Fact<u64>,
}

impl Cpu {
    pub(super) fn find(probe: &Probe, limits: &cgroup::Limits) -> Self {
        let topology = topology(probe);
        let extensions = |present: bool| {
            let all = probe.process.vector_extensions.iter();
            all.filter(|(_, has)| *has == present).map(|(name, _)| *name).collect()
        };
        Cpu {
            model: model(probe),
            cores_usable: probe.process.cores_usable.clone(),
            cores_online: cores_online(probe),
            physical_cores_online: topology.clone().map(|cores| cores.iter().collect::<BTreeSet<_>>().len()),
            cgroup_quota_cores: limits.cpu_cores.clone(),
            sockets: topology.map(|cores| {
                let sockets: BTreeSet<_> = cores.iter().map(|(socket, _)| socket).collect();
                sockets.len()
            }),
            numa_nodes: probe.value("/sys/devices/system/node/online", parse::list_len),
            vector_extensions: extensions(true),
            vector_extensions_missing: extensions(false),
            l2_bytes: cache_bytes(probe, "2"),
            l3_bytes: cache_bytes(probe, "3"),
        }
    }

    pub(super) fn section(&self) -> Section {
        let mut checks = vec![
            Check::of("model", &self.model, String::clone),
            self.cores_check(),
            self.quota_check(),
            Check::of("sockets", &self.sockets, usize::to_string),
            Check::of_optional(
                "NUMA nodes",
                &self.numa_nodes,
                |nodes| Check::ok("NUMA nodes", nodes.to_string()),
                || Check::ok("NUMA nodes", "1 (the kernel reports none)"),
            ),
        ];
        checks.extend(self.vector_checks());
        for (name, bytes) in [("L2 cache", &self.l2_bytes), ("L3 cache", &self.l3_bytes)] {
            checks.push(Check::of(name, bytes, |&bytes| parse::human_bytes(bytes)));
        }
        Section { title: "CPU", checks }
    }

    fn cores_check(&self) -> Check {
        let mut found = match &self.cores_usable {
            Fact::Known(usable) => format!("{usable} usable by this process"),
            Fact::Absent => "unknown".to_owned(),
            Fact::Unknown(why) => format!("unknown: {why}"),
        };
        if let Some(online) = self.cores_online.known() {
            found.push_str(&format!(", {online} online"));
        }
        if let Some(physical) = self.physical_cores_online.known() {
            found.push_str(&format!(" on {}", parse::count(*physical, "physical core")));
        }
        match self.cores_usable {
            Fact::Known(1) => Check::absent("cores", found).advice(
                "ranks in parallel (on one core they take turns, so times mean little)",
                "use more cores, a wider affinity mask or a higher CPU quota",
            ),
            Fact::Known(_) => Check::ok("cores", found),
            Fact::Absent | Fact::Unknown(_) => Check::absent("cores", found),
        }
    }

    fn quota_check(&self) -> Check {
        const NAME: &str = "cgroup CPU quota";
        Check::of_optional(
            NAME,
            &self.cgroup_quota_cores,
            |cores| Check::ok(NAME, format!("{cores:.2} cores")),
            || Check::ok(NAME, "none"),
        )
    }

    fn vector_checks(&self) -> Vec<Check> {
        const NAME: &str = "vector extensions";
        let mut checks = Vec::new();
        if !self.vector_extensions.is_empty() {
            checks.push(Check::ok(NAME, self.vector_extensions.join(", ")));
        }
        if !self.vector_extensions_missing.is_empty() {
            let missing = self.vector_extensions_missing.join(", ");
            checks.push(Check::absent(NAME, format!("missing: {missing}")).advice(
                "faster copies and bf16 sums (results do not change)",
                "use a CPU with these extensions, or a virtual machine that exposes them",
            ));
        }
        if checks.is_empty() {
            checks.push(Check::absent(NAME, "not checked on this architecture"));
        }
        checks
    }
}

/// The model's name: spelled out on x86, given by numbers on Arm.
fn model(probe: &Probe) -> Fact<String> {
    let info = probe.text(CPU_INFO).or_unknown(CPU_INFO);
    info.and_then(|text| {
        let spelled = ["model name", "cpu model", "Model", "cpu"]
            .into_iter()
            .find_map(|key| machine::field(&text, key))
            .filter(|name| !name.is_empty())
            .map(str::to_owned);
        match spelled.or_else(|| arm_model(&text)) {
            Some(model) => Fact::Known(model),
            None => Fact::Unknown(format!("{CPU_INFO} contains no model name")),
        }
    })
}

/// The name of a known server core, or the numbers of any other.
fn arm_model(text: &str) -> Option<String> {
    let implementer = machine::field(text, "CPU implementer")?;
    let part = machine::field(text, "CPU part")?;
    let name = match (implementer, part) {
        ("0x41", "0xd0c") => "Arm Neoverse N1",
        ("0x41", "0xd40") => "Arm Neoverse V1",
        ("0x41", "0xd49") => "Arm Neoverse N2",
        ("0x41", "0xd4f") => "Arm Neoverse V2",
        _ => return Some(format!("implementer {implementer}, part {part}")),
    };
    Some(name.to_owned())
}

fn cores_online(probe: &Probe) -> Fact<usize> {
    let online = probe.value(&format!("{CPU_DIR}/online"), parse::list_len);
    online.or_else(|| {
        let info = probe.text(CPU_INFO).or_unknown(CPU_INFO);
        info.and_then(|text| {
            let lines = text.lines();
            match lines.filter(|line| line.starts_with("processor")).count() {
                0 => Fact::Unknown(format!("{CPU_INFO} contains no processor")),
                n => Fact::Known(n),
            }
        })
    })
}

/// Socket and core number of each online CPU. Offline CPUs have no topology directory.
fn topology(probe: &Probe) -> Fact<Vec<(i64, i64)>> {
    probe.names(CPU_DIR).or_unknown(CPU_DIR).and_then(|names| {
        let number = |text: &str| text.parse::<i64>().ok();
        let mut cores = Vec::new();
        let cpus = names
            .iter()
            .filter(|name| name.strip_prefix("cpu").is_some_and(|rest| rest.parse::<u32>().is_ok()));
        for cpu in cpus {
            let dir = format!("{CPU_DIR}/{cpu}/topology");
            let socket = probe.value(&format!("{dir}/physical_package_id"), number);
            let core = probe.value(&format!("{dir}/core_id"), number);
            match (socket, core) {
                (Fact::Known(socket), Fact::Known(core)) => cores.push((socket, core)),
                (Fact::Unknown(why), _) | (_, Fact::Unknown(why)) => return Fact::Unknown(why),
                (Fact::Absent, _) | (_, Fact::Absent) => {}
            }
        }
        if cores.is_empty() {
            return Fact::Unknown(format!("{CPU_DIR}/cpu*/topology does not exist"));
        }
        Fact::Known(cores)
    })
}

/// The size of the first core's cache at this level.
fn cache_bytes(probe: &Probe, level: &str) -> Fact<u64> {
    let dir = format!("{CPU_DIR}/cpu0/cache");
    probe.names(&dir).or_unknown(&dir).and_then(|names| {
        names
            .iter()
            .filter(|name| name.starts_with("index"))
            .find(|name| probe.line(&format!("{dir}/{name}/level")).known() == Some(&level.to_owned()))
            .map_or(Fact::Absent, |name| probe.value(&format!("{dir}/{name}/size"), parse::size_bytes))
    })
}
