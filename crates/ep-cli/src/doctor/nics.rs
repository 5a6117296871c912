//! The NIC that is nearest to each GPU, and the value of `HYBRID_EP_TRANSPORT_NIC` that follows.

use serde::Serialize;

use super::{
    check::Check,
    cuda::Cuda,
    fabric::FabricProvider,
    fact::Fact,
    nearest::{self, DeviceLocation, Nic, Relation},
    parse, pci,
    probe::Probe,
    rdma::{EFA, INFINIBAND, RdmaDevice},
};

/// Which NIC is for which GPU.
#[derive(Clone, Debug, Default, PartialEq, Serialize)]
pub(crate) struct GpuNics {
    /// The GPUs in the driver's order, which `CUDA_VISIBLE_DEVICES` changes; without a driver, by PCI address. Empty if there
    /// is no RDMA device to choose.
    pub(crate) gpus: Vec<GpuNic>,
    /// The value for `HYBRID_EP_TRANSPORT_NIC`: the NICs of local rank `i` are at `i` modulo the length, several with a `+`
    /// between them.
    pub(crate) suggested: Vec<String>,
    /// The RDMA devices that are not chosen from, with the reason.
    pub(crate) left_out: Vec<LeftOut>,
}

/// One GPU and its NICs.
#[derive(Clone, Debug, PartialEq, Eq, Serialize)]
pub(crate) struct GpuNic {
    /// Its name in this report, such as `CUDA GPU 0`.
    pub(crate) gpu: String,
    /// The PCI address.
    pub(crate) pci_address: String,
    /// The RDMA devices that are nearest.
    pub(crate) nearest: Vec<String>,
    /// What the GPU has in common with each of them.
    pub(crate) relation: Relation,
}

/// An RDMA device that is not chosen from.
#[derive(Clone, Debug, PartialEq, Eq, Serialize)]
pub(crate) struct LeftOut {
    /// Its name.
    pub(crate) device: String,
    /// The reason.
    pub(crate) why: String,
}

impl GpuNics {
    pub(super) fn find(
        probe: &Probe,
        cuda: &Cuda,
        devices: &Fact<Vec<RdmaDevice>>,
        providers: &Fact<Vec<FabricProvider>>,
    ) -> Self {
        let gpus = gpus(probe, cuda);
        let devices = devices.known().map(Vec::as_slice).unwrap_or_default();
        let (chosen, left_out) = choose_from(devices);
        if gpus.is_empty() || chosen.is_empty() {
            return GpuNics::default();
        }
        let locations: Vec<DeviceLocation> =
            gpus.iter().map(|(_, address)| location(probe, address)).collect();
        let nics: Vec<Nic> = chosen
            .iter()
            .map(|device| Nic { location: device.location(), gbit_per_s: device.gbit_per_s() })
            .collect();
        let found = nearest::nearest(&locations, &nics);
        let names = |nics: &[usize]| {
            let names: Vec<String> = nics.iter().map(|&nic| name_of(chosen[nic], providers)).collect();
            names.join("+")
        };
        let suggested: Vec<String> = found.iter().map(|gpu| names(&gpu.chosen)).collect();
        GpuNics {
            gpus: gpus
                .into_iter()
                .zip(found)
                .map(|((gpu, pci_address), found)| GpuNic {
                    gpu,
                    pci_address,
                    nearest: found.nics.iter().map(|&nic| chosen[nic].name.clone()).collect(),
                    relation: found.relation,
                })
                .collect(),
            suggested: nearest::shortest_period(&suggested).to_vec(),
            left_out,
        }
    }

    pub(super) fn checks(&self) -> Vec<Check> {
        if self.gpus.is_empty() {
            return Vec::new();
        }
        let mut checks: Vec<Check> = self.gpus.iter().map(GpuNic::check).collect();
        let mut left_out: Vec<(&str, Vec<&str>)> = Vec::new();
        for LeftOut { device, why } in &self.left_out {
            match left_out.iter_mut().find(|(reason, _)| reason == why) {
                Some((_, devices)) => devices.push(device),
                None => left_out.push((why, vec![device])),
            }
        }
        for (why, devices) in left_out {
            checks.push(Check::absent("NICs left out", format!("{why}: {}", devices.join(", "))));
        }
        let mut used: Vec<&str> = self.suggested.iter().flat_map(|nics| nics.split('+')).collect();
        used.sort();
        used.dedup();
        let (nics, gpus) = (parse::count(used.len(), "NIC"), parse::count(self.gpus.len(), "GPU"));
        checks.push(Check::ok("NICs of local ranks", format!("{nics} for {gpus}, never run by us")).advice(
            "local rank i on NICs near GPU i",
            format!("export HYBRID_EP_TRANSPORT_NIC={}", self.suggested.join(",")),
        ));
        checks
    }
}

impl GpuNic {
    fn check(&self) -> Check {
        let name = format!("{} ({})", self.gpu, self.pci_address);
        if self.relation == Relation::Unknown {
            let found = "nearest NIC unknown: they have no PCI bridge and no known NUMA node in common";
            return Check::absent(name, found);
        }
        Check::ok(name, format!("nearest {} ({})", self.nearest.join(", "), self.relation.text()))
    }
}

/// The names and PCI addresses of the GPUs: those that the driver shows, or else those on the PCI bus.
fn gpus(probe: &Probe, cuda: &Cuda) -> Vec<(String, String)> {
    let shown = cuda.gpus.known().map(Vec::as_slice).unwrap_or_default();
    // One without an address would change the numbers of the others.
    let shown: Option<Vec<&String>> = shown.iter().map(|gpu| gpu.pci_address.as_ref()).collect();
    let named = |prefix: &str, addresses: Vec<String>| {
        let numbered = addresses.into_iter().enumerate();
        numbered.map(|(number, address)| (format!("{prefix} {number}"), address)).collect()
    };
    match shown {
        Some(shown) if !shown.is_empty() => named("CUDA GPU", shown.into_iter().cloned().collect()),
        _ => {
            let on_bus = pci::devices(probe);
            let on_bus = on_bus.known().map(Vec::as_slice).unwrap_or_default();
            let gpus = on_bus.iter().filter(|device| device.is_nvidia_gpu());
            let mut addresses: Vec<String> = gpus.map(|device| device.address.clone()).collect();
            // Addresses are hexadecimal and of equal length, so they sort as plain text.
            addresses.sort();
            named("GPU", addresses)
        }
    }
}

fn location(probe: &Probe, address: &str) -> DeviceLocation {
    DeviceLocation {
        path: pci::path_at(probe, address).known().cloned(),
        numa_node: pci::numa_node_at(probe, address).known().copied(),
    }
}

/// The devices to choose from, and the others with the reason. A list of NICs is of one network, since the ranks of a rail
/// must reach each other.
fn choose_from(devices: &[RdmaDevice]) -> (Vec<&RdmaDevice>, Vec<LeftOut>) {
    let usable = || devices.iter().filter(|device| device.is_usable());
    let has = |network: &str| usable().any(|device| device.network() == network);
    let first_choice = [EFA, INFINIBAND].into_iter().find(|network| has(network));
    let mut left_out = Vec::new();
    let mut chosen = Vec::new();
    for device in devices {
        let why = if !device.is_usable() {
            "no active port".to_owned()
        } else if let Some(network) = first_choice.filter(|&network| network != device.network()) {
            format!("not {network} as others are")
        } else {
            chosen.push(device);
            continue;
        };
        left_out.push(LeftOut { device: device.name.clone(), why });
    }
    (chosen, left_out)
}

/// The name of a device in `HYBRID_EP_TRANSPORT_NIC`: as its provider lists it, or else as the provider would.
pub(super) fn name_of(device: &RdmaDevice, providers: &Fact<Vec<FabricProvider>>) -> String {
    match listed_as(device, providers) {
        Some(name) => name.to_owned(),
        None if device.is_efa => format!("{}-rdm", device.name),
        None => device.name.clone(),
    }
}

/// The name under which its provider lists a device.
pub(super) fn listed_as<'a>(
    device: &RdmaDevice,
    providers: &'a Fact<Vec<FabricProvider>>,
) -> Option<&'a str> {
    let all = providers.known().map(Vec::as_slice).unwrap_or_default();
    let mut own = all.iter().filter(|provider| provider.is_over(device.provider()));
    own.find_map(|provider| provider.nic_of(&device.name))
}
