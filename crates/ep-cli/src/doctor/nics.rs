//! The NIC that is nearest to each GPU, and the value of `HYBRID_EP_TRANSPORT_NIC` that follows.

use ep_fabric::{DeviceLocation, Nic, Relation, nearest};
use serde::{Serialize, Serializer};

use super::{
    check::Check, cuda::Cuda, fabric::FabricProvider, fact::Fact, parse, pci, probe::Probe, rdma::RdmaDevice,
};

/// Which NIC is for which GPU.
#[derive(Clone, Debug, Default, PartialEq, Serialize)]
pub(crate) struct GpuNics {
    /// The GPUs in the driver's order, which `CUDA_VISIBLE_DEVICES` changes; without a driver, by PCI address. Empty if there
    /// is no RDMA device to choose.
    pub(crate) gpus: Vec<GpuNic>,
    /// The value for `HYBRID_EP_TRANSPORT_NIC` that gives all NICs to these GPUs: entry `i` modulo the length has the
    /// NICs of local rank `i`, joined by `+`.
    pub(crate) suggested: Vec<String>,
    /// The NICs that the ranks of these GPUs use without the variable, in the same form: their share when all GPUs on the
    /// PCI bus share the NICs. Empty if any of these GPUs is not on the bus.
    pub(crate) default: Vec<String>,
    /// The RDMA devices that are left out of the choice, with the reason.
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
    /// What the GPU has in common with each of the nearest devices.
    #[serde(serialize_with = "as_name")]
    pub(crate) relation: Relation,
}

fn as_name<S: Serializer>(relation: &Relation, serializer: S) -> Result<S::Ok, S::Error> {
    serializer.serialize_str(match relation {
        Relation::Unknown => "unknown",
        Relation::OtherNumaNode => "other_numa_node",
        Relation::SameNumaNode => "same_numa_node",
        Relation::SameRootComplex => "same_root_complex",
        Relation::SameRootPort => "same_root_port",
        Relation::SameSwitch => "same_switch",
    })
}

/// An RDMA device that is left out of the choice.
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
        let nics: Vec<Nic> = chosen
            .iter()
            .map(|device| Nic { location: device.location(), gbit_per_s: device.gbit_per_s() })
            .collect();
        let nearest_of = |addresses: &[String]| {
            let locations: Vec<_> = addresses.iter().map(|address| location(probe, address)).collect();
            nearest(&locations, &nics)
        };
        let addresses: Vec<String> = gpus.iter().map(|(_, address)| address.clone()).collect();
        let found = nearest_of(&addresses);
        let names = |nics: &[usize]| {
            let names: Vec<String> = nics.iter().map(|&nic| name_of(chosen[nic], providers)).collect();
            names.join("+")
        };
        let suggested: Vec<String> = found.iter().map(|gpu| names(&gpu.chosen)).collect();
        let on_bus = on_bus(probe);
        let shares = nearest_of(&on_bus);
        let share = |address: &String| {
            let index = on_bus.iter().position(|other| other.eq_ignore_ascii_case(address))?;
            Some(names(&shares[index].chosen))
        };
        let default: Vec<String> = addresses.iter().map(share).collect::<Option<_>>().unwrap_or_default();
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
            suggested: shortest_period(&suggested).to_vec(),
            default: shortest_period(&default).to_vec(),
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
        let name = "NICs of local ranks";
        checks.push(if self.suggested == self.default {
            Check::ok(name, format!("{nics} for {gpus}, chosen by default, never run by us"))
        } else {
            Check::ok(name, format!("{nics} for {gpus}, never run by us")).advice(
                "all NICs for these GPUs",
                format!("export HYBRID_EP_TRANSPORT_NIC={}", self.suggested.join(",")),
            )
        });
        checks
    }
}

impl GpuNic {
    fn check(&self) -> Check {
        let name = format!("{} ({})", self.gpu, self.pci_address);
        if self.relation == Relation::Unknown {
            let found = "nearest NIC unknown: no NIC shares a PCI bridge or a known NUMA node with this GPU";
            return Check::absent(name, found);
        }
        Check::ok(name, format!("nearest {} ({})", self.nearest.join(", "), self.relation.text()))
    }
}

/// The names and PCI addresses of the GPUs: those that the driver shows, or else those on the PCI bus.
fn gpus(probe: &Probe, cuda: &Cuda) -> Vec<(String, String)> {
    let shown = cuda.gpus.known().map(Vec::as_slice).unwrap_or_default();
    // If the driver shows a GPU without an address, use the GPUs on the bus: leaving it out would change the numbers of
    // the others.
    let shown: Option<Vec<&String>> = shown.iter().map(|gpu| gpu.pci_address.as_ref()).collect();
    let named = |prefix: &str, addresses: Vec<String>| {
        let numbered = addresses.into_iter().enumerate();
        numbered.map(|(number, address)| (format!("{prefix} {number}"), address)).collect()
    };
    match shown {
        Some(shown) if !shown.is_empty() => named("CUDA GPU", shown.into_iter().cloned().collect()),
        _ => named("GPU", on_bus(probe)),
    }
}

/// The PCI addresses of the GPUs on the bus, in ascending order.
fn on_bus(probe: &Probe) -> Vec<String> {
    let devices = pci::devices(probe);
    let devices = devices.known().map(Vec::as_slice).unwrap_or_default();
    let gpus = devices.iter().filter(|device| device.is_nvidia_gpu());
    let mut addresses: Vec<String> = gpus.map(|device| device.address.clone()).collect();
    // Addresses are hexadecimal and of equal length, so they sort as plain text.
    addresses.sort();
    addresses
}

fn location(probe: &Probe, address: &str) -> DeviceLocation {
    DeviceLocation {
        path: pci::path_at(probe, address).known().cloned(),
        numa_node: pci::numa_node_at(probe, address).known().copied(),
    }
}

/// The devices to choose from, and the devices that are left out, with the reason. All NICs of a list are of one network,
/// since the ranks of a rail must reach each other.
fn choose_from(devices: &[RdmaDevice]) -> (Vec<&RdmaDevice>, Vec<LeftOut>) {
    let usable = || devices.iter().filter(|device| device.is_usable());
    let preferred = Nic::preferred_network(usable().map(RdmaDevice::network));
    let mut left_out = Vec::new();
    let mut chosen = Vec::new();
    for device in devices {
        let why = if !device.is_usable() {
            "no active port".to_owned()
        } else if let Some(network) = preferred.filter(|&network| network != device.network()) {
            format!("not {network}, unlike other devices")
        } else {
            chosen.push(device);
            continue;
        };
        left_out.push(LeftOut { device: device.name.clone(), why });
    }
    (chosen, left_out)
}

/// The name of a device in `HYBRID_EP_TRANSPORT_NIC`: the name under which its provider lists it, or else would list it.
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

/// The shortest list of which entry `i` modulo its length is entry `i` of `list`.
fn shortest_period<T: PartialEq>(list: &[T]) -> &[T] {
    let repeats = |len: usize| list.iter().enumerate().all(|(i, item)| *item == list[i % len]);
    let len = (1..list.len()).find(|&len| repeats(len)).unwrap_or(list.len());
    &list[..len]
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_list_is_as_short_as_its_repetition_allows() {
        assert_eq!(shortest_period(&[0, 1, 0, 1]), [0, 1]);
        assert_eq!(shortest_period(&[0, 1, 2, 0]), [0, 1, 2]);
        assert_eq!(shortest_period(&[5, 5, 5]), [5]);
        assert_eq!(shortest_period(&[0, 0, 1, 1]), [0, 0, 1, 1]);
        assert_eq!(shortest_period::<u8>(&[]), [0; 0]);
    }
}
