//! RDMA devices and their ports.

use ep_fabric::{DeviceLocation, Nic};
use serde::Serialize;

use super::{check::Check, fact::Fact, parse, pci, probe::Probe};

const DIR: &str = "/sys/class/infiniband";

/// One RDMA device.
#[derive(Clone, Debug, PartialEq, Serialize)]
pub(crate) struct RdmaDevice {
    /// Its name, such as `mlx5_0`.
    pub(crate) name: String,
    /// Whether it is an Elastic Fabric Adapter.
    pub(crate) is_efa: bool,
    /// The type that its driver reports, such as `MT4129`.
    pub(crate) hca_type: Fact<String>,
    /// The NUMA node that it is attached to.
    pub(crate) numa_node: Fact<u32>,
    /// Its directory below `/sys/devices`, which names the PCI bridges above it; absent if there is no hardware behind it.
    pub(crate) path: Fact<String>,
    /// Its ports.
    pub(crate) ports: Fact<Vec<RdmaPort>>,
}

/// One port of an RDMA device.
#[derive(Clone, Debug, PartialEq, Serialize)]
pub(crate) struct RdmaPort {
    /// Its number, from 1.
    pub(crate) number: String,
    /// Its state, such as `ACTIVE` or `DOWN`.
    pub(crate) state: Fact<String>,
    /// Its rate in 10^9 bits per second.
    pub(crate) rate_gbit_per_s: Fact<f64>,
    /// Its link layer: `InfiniBand`, `Ethernet` (RoCE) or `Unspecified` (EFA).
    pub(crate) link_layer: Fact<String>,
}

impl RdmaDevice {
    /// The ports that are active, or whose state is unknown.
    fn usable_ports(&self) -> impl Iterator<Item = &RdmaPort> {
        let ports = self.ports.known().map(Vec::as_slice).unwrap_or_default();
        ports.iter().filter(|port| port.state.known().is_none_or(|state| state == "ACTIVE"))
    }

    /// Whether it may have a port that carries bytes.
    pub(super) fn is_usable(&self) -> bool {
        matches!(self.ports, Fact::Unknown(_)) || self.usable_ports().next().is_some()
    }

    /// The provider of libfabric for it.
    pub(super) fn provider(&self) -> &'static str {
        if self.is_efa { "efa" } else { "verbs" }
    }

    /// The kind of its network, in words.
    pub(super) fn network(&self) -> &str {
        let layer = || self.usable_ports().find_map(|port| port.link_layer.known());
        if self.is_efa { Nic::EFA } else { layer().map_or("unknown", String::as_str) }
    }

    /// The rate of its fastest usable port in 10^9 bits per second; 0 if it is unknown.
    pub(super) fn gbit_per_s(&self) -> f64 {
        self.usable_ports().filter_map(|port| port.rate_gbit_per_s.known().copied()).fold(0.0, f64::max)
    }

    /// Where it is.
    pub(super) fn location(&self) -> DeviceLocation {
        DeviceLocation { path: self.path.known().cloned(), numa_node: self.numa_node.known().copied() }
    }

    /// A finding for each port.
    pub(super) fn checks(&self) -> Vec<Check> {
        match &self.ports {
            Fact::Known(ports) if !ports.is_empty() => {
                ports.iter().map(|port| self.port_check(port)).collect()
            }
            Fact::Known(_) | Fact::Absent => vec![Check::absent(&self.name, "no ports")],
            Fact::Unknown(why) => vec![Check::absent(&self.name, format!("unknown: {why}"))],
        }
    }

    fn port_check(&self, port: &RdmaPort) -> Check {
        let name = format!("{} port {}", self.name, port.number);
        let mut found = vec![match &port.state {
            Fact::Known(state) => state.clone(),
            Fact::Absent => "state not reported".to_owned(),
            Fact::Unknown(why) => format!("state unknown: {why}"),
        }];
        if let Some(rate) = port.rate_gbit_per_s.known() {
            found.push(format!("{rate} Gbit/s"));
        }
        if self.is_efa {
            found.push(Nic::EFA.to_owned());
        } else if let Some(layer) = port.link_layer.known() {
            found.push(layer.clone());
        }
        if let Some(kind) = self.hca_type.known() {
            found.push(kind.clone());
        }
        if let Some(node) = self.numa_node.known() {
            found.push(format!("NUMA node {node}"));
        }
        let found = found.join(", ");
        match port.state.known().map(String::as_str) {
            Some("ACTIVE") => Check::ok(name, found),
            Some("INIT" | "ARMED") => Check::absent(name, found)
                .advice("use of this port", "wait for the subnet manager, or start one (opensm)"),
            Some(_) => {
                Check::absent(name, found).advice("use of this port", "check the cable and the switch's port")
            }
            None => Check::absent(name, found),
        }
    }
}

/// The RDMA devices; absent if the kernel has not loaded RDMA support.
pub(super) fn devices(probe: &Probe) -> Fact<Vec<RdmaDevice>> {
    probe.names(DIR).map(|names| names.into_iter().map(|name| rdma_device(probe, name)).collect())
}

fn rdma_device(probe: &Probe, name: String) -> RdmaDevice {
    let dir = format!("{DIR}/{name}");
    let vendor = probe.value(&format!("{dir}/device/vendor"), parse::hex);
    let uevent = probe.text(&format!("{dir}/device/uevent"));
    let driver_is_efa = uevent.known().is_some_and(|text| text.lines().any(|line| line == "DRIVER=efa"));
    let ports = probe
        .names(&format!("{dir}/ports"))
        .map(|numbers| numbers.into_iter().map(|number| rdma_port(probe, &dir, number)).collect());
    RdmaDevice {
        is_efa: driver_is_efa || vendor.known() == Some(&pci::VENDOR_AMAZON),
        hca_type: probe.line(&format!("{dir}/hca_type")),
        numa_node: pci::numa_node(probe, &format!("{dir}/device")),
        path: probe.real_path(&format!("{dir}/device")),
        ports,
        name,
    }
}

fn rdma_port(probe: &Probe, device_dir: &str, number: String) -> RdmaPort {
    let dir = format!("{device_dir}/ports/{number}");
    RdmaPort {
        // `4: ACTIVE`
        state: probe.value(&format!("{dir}/state"), |text| {
            let (_, word) = text.split_once(':')?;
            Some(word.trim().to_owned())
        }),
        // `400 Gb/sec (4X NDR)`
        rate_gbit_per_s: probe.value(&format!("{dir}/rate"), |text| {
            let (rate, _) = text.split_once(" Gb/sec")?;
            rate.parse::<f64>().ok().filter(|rate| rate.is_finite())
        }),
        link_layer: probe.line(&format!("{dir}/link_layer")),
        number,
    }
}
