//! Which NIC is nearest to which GPU, by the paths of both below `/sys/devices`.
//!
//! A path names all bridges from the root complex to the device, for example
//! `/sys/devices/pci0000:15/0000:15:01.0/0000:16:00.0/0000:17:00.0/0000:18:00.0`: root complex, root port, upstream port
//! and downstream port of a switch, device.

/// Where a device is.
#[derive(Clone, Debug, Default)]
pub struct DeviceLocation {
    /// Its path, if it is known.
    pub path: Option<String>,
    /// Its NUMA node, if the machine has any and reports it.
    pub numa_node: Option<u32>,
}

/// A NIC to choose from.
#[derive(Clone, Debug)]
pub struct Nic {
    /// Where it is.
    pub location: DeviceLocation,
    /// Its rate in 10^9 bits per second; 0 if it is unknown.
    pub gbit_per_s: f64,
}

/// What a GPU and a NIC have in common. A later variant is nearer.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub enum Relation {
    /// Unknown: no common bridge is known, and at least one of the two NUMA nodes is not.
    Unknown,
    /// Nothing: their NUMA nodes differ.
    OtherNumaNode,
    /// The NUMA node.
    SameNumaNode,
    /// The root complex. In many virtual machines all devices have this in common.
    SameRootComplex,
    /// The root port, and no switch.
    SameRootPort,
    /// A PCIe switch.
    SameSwitch,
}

impl Relation {
    /// In words.
    pub fn text(self) -> &'static str {
        match self {
            Relation::Unknown => "unknown",
            Relation::OtherNumaNode => "different NUMA node",
            Relation::SameNumaNode => "same NUMA node",
            Relation::SameRootComplex => "same root complex",
            Relation::SameRootPort => "same root port",
            Relation::SameSwitch => "same PCIe switch",
        }
    }
}

/// The nearest NICs of a GPU.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Nearest {
    /// Their indices, in ascending order.
    pub nics: Vec<usize>,
    /// What the GPU has in common with each of them.
    pub relation: Relation,
    /// The NICs that the GPU gets when all GPUs share the NICs evenly, in ascending order: the same number for each
    /// GPU, at least one.
    pub chosen: Vec<usize>,
}

/// The networks whose NICs come before all others, in this order, by the names that libfabric and this project use. The
/// ranks of a rail must reach each other, so they choose among the NICs of one network.
const PREFERRED_NETWORKS: [&str; 2] = [Nic::EFA, Nic::INFINIBAND];

impl Nic {
    /// The network of an Elastic Fabric Adapter.
    pub const EFA: &str = "EFA";
    /// The link layer of InfiniBand.
    pub const INFINIBAND: &str = "InfiniBand";

    /// The network to choose NICs from, of those that a machine has; `None`: all of them.
    pub fn preferred_network<'a>(networks: impl Iterator<Item = &'a str> + Clone) -> Option<&'static str> {
        PREFERRED_NETWORKS.into_iter().find(|preferred| networks.clone().any(|network| network == *preferred))
    }
}

/// The nearest NICs of each GPU; empty if there is no NIC. Of NICs at the same distance, only the fastest ones count.
///
/// The result depends on where the devices are and not on their order, so all ranks of a machine find the same one.
pub fn nearest(gpus: &[DeviceLocation], nics: &[Nic]) -> Vec<Nearest> {
    if nics.is_empty() {
        return Vec::new();
    }
    let mut all: Vec<Nearest> = gpus.iter().map(|gpu| nearest_of(gpu, nics)).collect();
    // A GPU with few nearest NICs chooses before one with many, which has others left.
    let mut order: Vec<usize> = (0..all.len()).collect();
    order.sort_by_key(|&gpu| (all[gpu].nics.len(), &gpus[gpu].path));
    let mut uses = vec![0; nics.len()];
    let path = |nic: usize| &nics[nic].location.path;
    for &gpu in &order {
        // At least one NIC is nearest.
        let least =
            all[gpu].nics.iter().copied().min_by_key(|&nic| (uses[nic], path(nic))).unwrap_or_default();
        all[gpu].chosen.push(least);
        uses[least] += 1;
    }
    // Give every GPU one more NIC of its NUMA node, as long as there are enough for all GPUs.
    loop {
        let mut next = Vec::new();
        for &gpu in &order {
            let is_near = all[gpu].relation >= Relation::SameNumaNode;
            let unused = all[gpu]
                .nics
                .iter()
                .copied()
                .filter(|&nic| is_near && uses[nic] == 0)
                .min_by_key(|&nic| path(nic));
            unused.iter().for_each(|&nic| uses[nic] += 1);
            next.extend(unused.map(|nic| (gpu, nic)));
        }
        if next.len() < all.len() || all.is_empty() {
            break;
        }
        next.into_iter().for_each(|(gpu, nic)| all[gpu].chosen.push(nic));
    }
    all.iter_mut().for_each(|gpu| gpu.chosen.sort_unstable());
    all
}

fn nearest_of(gpu: &DeviceLocation, nics: &[Nic]) -> Nearest {
    let distances: Vec<_> = nics.iter().map(|nic| relation(gpu, &nic.location)).collect();
    let best = distances.iter().max().copied().unwrap_or((Relation::Unknown, 0));
    let near = || (0..nics.len()).filter(|&nic| distances[nic] == best);
    let fastest = near().map(|nic| nics[nic].gbit_per_s).fold(0.0, f64::max);
    let nics = near().filter(|&nic| nics[nic].gbit_per_s >= fastest).collect();
    Nearest { nics, relation: best.0, chosen: Vec::new() }
}

/// What two devices have in common, and how many bridges and root complexes they share.
fn relation(gpu: &DeviceLocation, nic: &DeviceLocation) -> (Relation, usize) {
    let bridges_of = |location: &DeviceLocation| location.path.as_deref().map(bridges).unwrap_or_default();
    let shared = bridges_of(gpu).iter().zip(&bridges_of(nic)).take_while(|(a, b)| a == b).count();
    let relation = match (shared, gpu.numa_node, nic.numa_node) {
        (0, Some(a), Some(b)) if a == b => Relation::SameNumaNode,
        (0, Some(_), Some(_)) => Relation::OtherNumaNode,
        (0, ..) => Relation::Unknown,
        (1, ..) => Relation::SameRootComplex,
        (2, ..) => Relation::SameRootPort,
        _ => Relation::SameSwitch,
    };
    (relation, shared)
}

/// The root complex and the bridges above a device. Directories that are no part of the bus are left out: the devices of
/// drivers below a PCI device, and those above a root complex (`/sys/devices/platform/...`, or a virtual bus).
fn bridges(path: &str) -> Vec<String> {
    let mut parts: Vec<String> = path
        .split('/')
        .skip_while(|part| !is_root(part))
        .filter(|part| is_root(part) || is_address(part))
        .map(str::to_owned)
        .collect();
    // The device itself.
    parts.pop();
    parts
}

/// Whether this is a root complex, such as `pci0000:15`.
fn is_root(part: &str) -> bool {
    part.strip_prefix("pci")
        .and_then(|rest| rest.split_once(':'))
        .is_some_and(|(domain, bus)| is_hex(domain) && is_hex(bus))
}

/// Whether this is an address on the PCI bus, such as `0000:18:00.0`.
fn is_address(part: &str) -> bool {
    let fields = part.split_once(':').and_then(|(domain, rest)| {
        let (bus, rest) = rest.split_once(':')?;
        let (slot, function) = rest.split_once('.')?;
        Some([domain, bus, slot, function])
    });
    fields.is_some_and(|fields| fields.into_iter().all(is_hex))
}

fn is_hex(text: &str) -> bool {
    !text.is_empty() && text.bytes().all(|byte| byte.is_ascii_hexdigit())
}

#[cfg(test)]
mod tests;
