//! RDMA devices, network interfaces, and their libraries.

use serde::Serialize;

use super::{
    check::{Check, Section},
    fact::Fact,
    library, parse, pci,
    probe::Probe,
    system::System,
};

const RDMA_DIR: &str = "/sys/class/infiniband";
const NET_DIR: &str = "/sys/class/net";

const RDMA_USE: &str = "RDMA between machines (never run)";

/// Network cards and libraries.
#[derive(Clone, Debug, Serialize)]
pub(crate) struct Network {
    /// RDMA devices; absent if the kernel has not loaded RDMA support.
    pub(crate) rdma_devices: Fact<Vec<RdmaDevice>>,
    /// EFA functions on the PCI bus, with or without a driver.
    pub(crate) efa_on_pci_bus: Fact<usize>,
    /// ConnectX and BlueField functions on the PCI bus, with or without a driver.
    pub(crate) mellanox_on_pci_bus: Fact<usize>,
    /// Device files through which programs open RDMA devices.
    pub(crate) uverbs_device_files: usize,
    /// Network interfaces; virtual ones only if there are no others.
    pub(crate) interfaces: Fact<Vec<Interface>>,
    /// Paths of `libfabric.so.1`; a loader takes the first.
    pub(crate) libfabric_paths: Vec<String>,
    /// The providers of libfabric that can carry bytes between domains (`--transport`); absent if the library cannot be
    /// loaded.
    pub(crate) libfabric_providers: Fact<Vec<String>>,
    /// Paths of `libibverbs.so.1`; a loader takes the first.
    pub(crate) libibverbs_paths: Vec<String>,
}

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

/// One network interface.
#[derive(Clone, Debug, PartialEq, Serialize)]
pub(crate) struct Interface {
    /// Its name, such as `eth0`.
    pub(crate) name: String,
    /// Its state, such as `up` or `down`.
    pub(crate) state: Fact<String>,
    /// Its speed in 10^6 bits per second; absent if the driver reports none.
    pub(crate) speed_mbit_per_s: Fact<u32>,
    /// Whether the interface has no hardware on this machine.
    pub(crate) is_virtual: bool,
}

impl Network {
    pub(super) fn find(probe: &Probe, libfabric_providers: Fact<Vec<String>>) -> Self {
        let dirs = library::loader_dirs(probe);
        let pci = pci::devices(probe);
        let on_bus = |wanted: fn(&pci::Device) -> bool| {
            pci.clone().map(|all| all.iter().filter(|device| wanted(device)).count())
        };
        Network {
            rdma_devices: probe
                .names(RDMA_DIR)
                .map(|names| names.into_iter().map(|name| rdma_device(probe, name)).collect()),
            efa_on_pci_bus: on_bus(pci::Device::is_efa),
            mellanox_on_pci_bus: on_bus(pci::Device::is_mellanox_nic),
            uverbs_device_files: probe
                .names_where("/dev/infiniband", |name| name.starts_with("uverbs"))
                .len(),
            interfaces: interfaces(probe),
            libfabric_paths: library::find_all(probe, &dirs, &["libfabric.so.1"]),
            libfabric_providers,
            libibverbs_paths: library::find_all(probe, &dirs, &["libibverbs.so.1"]),
        }
    }

    pub(super) fn section(&self, system: &System) -> Section {
        let mut checks = self.rdma_checks();
        checks.extend(self.interface_checks());
        checks.push(library_check(
            "libfabric.so.1",
            &self.libfabric_paths,
            system.packages.install("libfabric1", "libfabric"),
        ));
        // Without the library, the line above has the advice.
        if self.libfabric_providers != Fact::Absent {
            checks.push(Check::of("libfabric providers", &self.libfabric_providers, |names| {
                match names.len() {
                    0 => "none".to_owned(),
                    _ => names.join(", "),
                }
            }));
        }
        checks.push(library_check(
            "libibverbs.so.1",
            &self.libibverbs_paths,
            system.packages.install("libibverbs1", "libibverbs"),
        ));
        Section { title: "Network (for jobs on several machines, on the host backend)", checks }
    }

    fn rdma_checks(&self) -> Vec<Check> {
        const NAME: &str = "RDMA devices";
        let devices = match &self.rdma_devices {
            Fact::Unknown(why) => return vec![Check::absent(NAME, format!("unknown: {why}"))],
            Fact::Absent => &[][..],
            Fact::Known(devices) => devices,
        };
        if devices.is_empty() {
            return vec![self.no_rdma_check(NAME)];
        }
        let mut checks: Vec<Check> = devices.iter().flat_map(RdmaDevice::checks).collect();
        if self.uverbs_device_files == 0 {
            checks.push(
                Check::absent("/dev/infiniband", "no device files, so programs cannot open the devices")
                    .advice(RDMA_USE, "modprobe ib_uverbs (in a container: --device=/dev/infiniband)"),
            );
        }
        checks
    }

    /// The finding without RDMA devices: there may be a card whose driver is missing.
    fn no_rdma_check(&self, name: &str) -> Check {
        let on_bus = |fact: &Fact<usize>| fact.known().copied().unwrap_or(0);
        let (efa, mellanox) = (on_bus(&self.efa_on_pci_bus), on_bus(&self.mellanox_on_pci_bus));
        if efa > 0 {
            let found = format!("none, but the PCI bus has {}", parse::count(efa, "EFA"));
            return Check::absent(name, found).advice(RDMA_USE, "modprobe efa, or run AWS's EFA installer");
        }
        if mellanox > 0 {
            let cards = parse::count(mellanox, "ConnectX or BlueField function");
            return Check::absent(name, format!("none, but the PCI bus has {cards}"))
                .advice(RDMA_USE, "modprobe mlx5_ib on the host");
        }
        Check::absent(name, "none").advice(RDMA_USE, "use a machine with InfiniBand, RoCE or EFA")
    }

    fn interface_checks(&self) -> Vec<Check> {
        match &self.interfaces {
            Fact::Known(interfaces) if !interfaces.is_empty() => {
                interfaces.iter().map(Interface::check).collect()
            }
            Fact::Known(_) | Fact::Absent => {
                vec![
                    Check::absent("interfaces", "none except loopback")
                        .advice("ranks on several machines", "attach a network"),
                ]
            }
            Fact::Unknown(why) => vec![Check::absent("interfaces", format!("unknown: {why}"))],
        }
    }
}

impl RdmaDevice {
    /// A finding for each port.
    fn checks(&self) -> Vec<Check> {
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
            found.push("EFA".to_owned());
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

impl Interface {
    fn check(&self) -> Check {
        let mut found = match &self.state {
            Fact::Known(state) => state.clone(),
            Fact::Absent => "state not reported".to_owned(),
            Fact::Unknown(why) => format!("state unknown: {why}"),
        };
        match self.speed_mbit_per_s {
            Fact::Known(mbit) if mbit >= 1000 => {
                found.push_str(&format!(", {} Gbit/s", f64::from(mbit) / 1000.0));
            }
            Fact::Known(mbit) => found.push_str(&format!(", {mbit} Mbit/s")),
            Fact::Absent | Fact::Unknown(_) => found.push_str(", speed not reported"),
        }
        if self.is_virtual {
            found.push_str(", virtual");
        }
        match self.state.known().map(String::as_str) {
            // Tunnels and some drivers never report "up".
            Some("up" | "unknown") => Check::ok(&self.name, found),
            _ => Check::absent(&self.name, found),
        }
    }
}

fn library_check(name: &str, paths: &[String], how: String) -> Check {
    match paths.first() {
        Some(path) => Check::ok(name, path),
        None => Check::absent(name, "not found").advice(RDMA_USE, how),
    }
}

fn rdma_device(probe: &Probe, name: String) -> RdmaDevice {
    let dir = format!("{RDMA_DIR}/{name}");
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

fn interfaces(probe: &Probe) -> Fact<Vec<Interface>> {
    probe.names(NET_DIR).map(|names| {
        let all = names
            .into_iter()
            // Some files here are not interfaces (`bonding_masters`).
            .filter(|name| name != "lo" && probe.exists(&format!("{NET_DIR}/{name}/operstate")))
            .map(|name| interface(probe, name));
        let (mut inner, mut outer): (Vec<_>, Vec<_>) = all.partition(|it| it.is_virtual);
        // Bridges and tunnels of a machine are left out, but a container may have only virtual interfaces.
        if outer.is_empty() {
            inner.retain(|it| it.state == Fact::Known("up".to_owned()));
            outer = inner;
        }
        outer
    })
}

fn interface(probe: &Probe, name: String) -> Interface {
    let dir = format!("{NET_DIR}/{name}");
    // Reading the speed of a link that is down fails, and a device without a speed reports -1.
    let speed = probe.value(&format!("{dir}/speed"), |text| text.parse::<i64>().ok());
    let speed_mbit_per_s = speed.and_then(|mbit| match u32::try_from(mbit) {
        Ok(0 | u32::MAX) | Err(_) => Fact::Absent,
        Ok(mbit) => Fact::Known(mbit),
    });
    let behind_it = ["device", "bonding"].map(|file| probe.exists(&format!("{dir}/{file}")));
    Interface {
        state: probe.line(&format!("{dir}/operstate")),
        speed_mbit_per_s,
        is_virtual: !behind_it.contains(&true),
        name,
    }
}
