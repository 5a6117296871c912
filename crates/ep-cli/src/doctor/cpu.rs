//! CPU: what computes, how much of it this process may use, and where it sits.

use std::collections::BTreeSet;

use serde::Serialize;

use super::{
    cgroup,
    check::{Check, Section},
    fact::Fact,
    parse,
    probe::Probe,
};

const CPU_INFO: &str = "/proc/cpuinfo";
const CPU_DIR: &str = "/sys/devices/system/cpu";

/// The processors.
#[derive(Clone, Debug, Serialize)]
pub(crate) struct Cpu {
    /// The model's name.
    pub(crate) model: Fact<String>,
    /// Cores (hardware threads) that this process may use, affinity and quota counted in.
    pub(crate) cores_usable: Fact<usize>,
    /// Cores (hardware threads) that the machine runs.
    pub(crate) cores_online: Fact<usize>,
    /// Physical cores among them.
    pub(crate) physical_cores_online: Fact<usize>,
    /// The control group's quota, in cores; absent where there is none.
    pub(crate) cgroup_quota_cores: Fact<f64>,
    /// Sockets.
    pub(crate) sockets: Fact<usize>,
    /// NUMA nodes; absent where the kernel was built without NUMA.
    pub(crate) numa_nodes: Fact<usize>,
    /// The vector extensions that are there, of those that matter here.
    pub(crate) vector_extensions: Vec<&'static str>,
    /// The vector extensions that are not, of those that matter here.
    pub(crate) vector_extensions_missing: Vec<&'static str>,
    /// The second-level cache of the first core.
    pub(crate) l2_bytes: Fact<u64>,
    /// The third-level cache that the first core shares with its neighbours.
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
                || Check::ok("NUMA nodes", "1 (the kernel shows none)"),
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
                "ranks side by side (on one core they take turns, and times say little)",
                "more cores, a wider affinity mask or a higher CPU quota",
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
            checks.push(Check::absent(NAME, format!("without {missing}")).advice(
                "faster copies and bf16 sums; results are the same without",
                "a CPU that has it, or a virtual machine that passes its flags through",
            ));
        }
        if checks.is_empty() {
            checks.push(Check::absent(NAME, "none looked for on this architecture"));
        }
        checks
    }
}

/// The model's name: x86 spells it out, Arm gives numbers.
fn model(probe: &Probe) -> Fact<String> {
    let info = probe.text(CPU_INFO).or_unknown(CPU_INFO);
    info.and_then(|text| {
        let spelled = ["model name", "cpu model", "Model", "cpu"]
            .into_iter()
            .find_map(|key| parse::field(&text, key))
            .filter(|name| !name.is_empty())
            .map(str::to_owned);
        match spelled.or_else(|| arm_model(&text)) {
            Some(model) => Fact::Known(model),
            None => Fact::Unknown(format!("{CPU_INFO} names no model")),
        }
    })
}

/// Server cores by name, any other by number.
fn arm_model(text: &str) -> Option<String> {
    let implementer = parse::field(text, "CPU implementer")?;
    let part = parse::field(text, "CPU part")?;
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
                0 => Fact::Unknown(format!("{CPU_INFO} lists no processor")),
                n => Fact::Known(n),
            }
        })
    })
}

/// Socket and core number of each CPU that has them. (Offline CPUs have no such directory.)
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
            return Fact::Unknown(format!("{CPU_DIR}/cpu*/topology is not there"));
        }
        Fact::Known(cores)
    })
}

/// The size of the first core's cache at a level.
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
