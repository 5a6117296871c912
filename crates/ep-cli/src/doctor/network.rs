//! RDMA devices, network interfaces, and their libraries.

use serde::Serialize;

use super::{
    check::{Check, Section},
    cuda::Cuda,
    fabric::{self, FabricProvider},
    fact::Fact,
    interface::{self, Interface},
    library,
    nics::{self, GpuNics},
    parse, pci,
    probe::Probe,
    rdma::{self, RdmaDevice},
    system::System,
};

/// Where AWS's EFA installer puts its libfabric.
const EFA_INSTALLER_DIR: &str = "/opt/amazon/efa/";

const EFA_INSTALLER: &str = "run AWS's EFA installer";

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
    /// The NIC that is nearest to each GPU.
    pub(crate) gpu_nics: GpuNics,
    /// Network interfaces without loopback. A virtual one is included only if it has an address or, if all are virtual,
    /// is up.
    pub(crate) interfaces: Fact<Vec<Interface>>,
    /// Paths of `libfabric.so.1`; a loader takes the first.
    pub(crate) libfabric_paths: Vec<String>,
    /// The providers of libfabric that can carry bytes between domains (`--transport`); absent if the library cannot be
    /// loaded.
    pub(crate) libfabric_providers: Fact<Vec<FabricProvider>>,
    /// Paths of `libibverbs.so.1`; a loader takes the first.
    pub(crate) libibverbs_paths: Vec<String>,
}

impl Network {
    pub(super) fn find(probe: &Probe, cuda: &Cuda, libfabric_providers: Fact<Vec<FabricProvider>>) -> Self {
        let dirs = library::loader_dirs(probe);
        let pci = pci::devices(probe);
        let on_bus = |wanted: fn(&pci::Device) -> bool| {
            pci.clone().map(|all| all.iter().filter(|device| wanted(device)).count())
        };
        let rdma_devices = rdma::devices(probe);
        Network {
            gpu_nics: GpuNics::find(probe, cuda, &rdma_devices, &libfabric_providers),
            rdma_devices,
            efa_on_pci_bus: on_bus(pci::Device::is_efa),
            mellanox_on_pci_bus: on_bus(pci::Device::is_mellanox_nic),
            uverbs_device_files: probe
                .names_where("/dev/infiniband", |name| name.starts_with("uverbs"))
                .len(),
            interfaces: interface::interfaces(probe),
            libfabric_paths: library::find_all(probe, &dirs, &["libfabric.so.1"]),
            libfabric_providers,
            libibverbs_paths: library::find_all(probe, &dirs, &["libibverbs.so.1"]),
        }
    }

    pub(super) fn section(&self, system: &System) -> Section {
        let mut checks = self.rdma_checks();
        checks.extend(self.gpu_nics.checks());
        checks.extend(self.interface_checks());
        let how = match self.devices().any(|device| device.is_efa) {
            true => EFA_INSTALLER.to_owned(),
            false => system.packages.install("libfabric1", "libfabric"),
        };
        checks.push(library_check("libfabric.so.1", &self.libfabric_paths, how));
        checks.extend(fabric::checks(&self.libfabric_providers));
        checks.extend(self.missing_provider_checks(system));
        checks.push(library_check(
            "libibverbs.so.1",
            &self.libibverbs_paths,
            system.packages.install("libibverbs1", "libibverbs"),
        ));
        Section { title: "Network (for jobs on several machines)", checks }
    }

    fn devices(&self) -> impl Iterator<Item = &RdmaDevice> {
        self.rdma_devices.known().map(Vec::as_slice).unwrap_or_default().iter()
    }

    /// A finding for each provider of libfabric that does not list the active NICs of this machine.
    fn missing_provider_checks(&self, system: &System) -> Vec<Check> {
        // If the library or the device files are missing, the finding on these has the advice.
        let Some(providers) = self.libfabric_providers.known().filter(|_| self.uverbs_device_files > 0)
        else {
            return Vec::new();
        };
        let mut checks = Vec::new();
        for (core, how) in [("efa", self.efa_advice()), ("verbs", verbs_advice(system))] {
            let of_core = self.devices().filter(|device| device.is_usable() && device.provider() == core);
            let unlisted =
                of_core.filter(|device| nics::listed_as(device, &self.libfabric_providers).is_none());
            let names: Vec<&str> = unlisted.map(|device| device.name.as_str()).collect();
            if names.is_empty() {
                continue;
            }
            let names = names.join(", ");
            let found = match providers.iter().any(|provider| provider.is_over(core)) {
                true => format!("does not list the NICs {names}"),
                false => format!("not offered by libfabric, though there are NICs for it: {names}"),
            };
            let name = format!("provider {core}");
            checks.push(Check::absent(name, found).advice(RDMA_USE, how));
        }
        checks
    }

    /// What to do if libfabric does not list an EFA.
    fn efa_advice(&self) -> String {
        const REASON: &str = "FI_LOG_LEVEL=warn fi_info -p efa shows the reason";
        match self.libfabric_paths.iter().find(|path| path.starts_with(EFA_INSTALLER_DIR)) {
            Some(path) => format!("export HYBRID_EP_LIBFABRIC={path}; with that library, {REASON}"),
            None => format!("{EFA_INSTALLER}, and set HYBRID_EP_LIBFABRIC to its libfabric.so.1; {REASON}"),
        }
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
            return Check::absent(name, found).advice(RDMA_USE, format!("modprobe efa, or {EFA_INSTALLER}"));
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

/// What to do if libfabric does not list an RDMA device other than an EFA. fi_verbs(7) documents that NICs need addresses.
fn verbs_advice(system: &System) -> String {
    format!(
        "install the devices' user-space drivers ({}), and give each NIC's network interface an IP address; \
         FI_LOG_LEVEL=warn fi_info -p verbs shows the reason",
        system.packages.verbs_drivers()
    )
}

fn library_check(name: &str, paths: &[String], how: String) -> Check {
    match paths.first() {
        Some(path) => Check::ok(name, path),
        None => Check::absent(name, "not found").advice(RDMA_USE, how),
    }
}
