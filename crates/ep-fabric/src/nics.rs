//! The NICs of a rank that has a GPU and no setting, and the CPUs near a NIC.
//!
//! A provider of RDMA NICs tells their PCI addresses. The machine's directory `/sys` tells where those addresses are, and which
//! GPUs it has, including GPUs that this process cannot use: its ranks share the NICs with the ranks of other processes.

use std::fs;
use std::path::Path;
use std::sync::Arc;

use ep::Result;

use crate::Options;
use crate::info::{Entry, Memory, find_entry};
use crate::library::Library;
use crate::nearest::{DeviceLocation, Nic, nearest};

/// The directory of the running system's devices, for [`nearest_nics`].
pub const SYSFS: &str = "/sys";

/// The identifier of the vendor NVIDIA on the PCI bus.
const NVIDIA: u32 = 0x10de;
/// The classes of GPUs: VGA controllers and 3D controllers.
const GPU_CLASSES: [u32; 2] = [0x0300, 0x0302];

/// Whether a PCI device is a GPU among which the NICs are shared, by its vendor and its class (base class, subclass and
/// programming interface, a byte each).
pub fn is_nvidia_gpu(vendor: u32, class: u32) -> bool {
    vendor == NVIDIA && GPU_CLASSES.contains(&(class >> 8))
}

/// The NICs of the provider in `options` that are for the GPU at the PCI address `gpu`, as [`Options::domains`] takes them:
/// the nearest ones, shared evenly with the other GPUs of the machine.
///
/// Empty where they cannot be determined: the provider does not tell where its NICs are, as with `tcp`, or the machine does
/// not show the GPU. `sysfs` is [`SYSFS`], or a directory like it.
///
/// # Errors
/// As of [`open`](crate::open), for the library and the options.
pub fn nearest_nics(options: &Options, gpu: &str, sysfs: &Path) -> Result<Vec<String>> {
    let bus = Bus(sysfs);
    let gpus = bus.gpus();
    let Some(own) = gpus.iter().position(|address| address.eq_ignore_ascii_case(gpu)) else {
        return Ok(Vec::new());
    };
    let library = Library::load(options.library.as_deref())?;
    let candidates = Candidate::all(&library, options, bus)?;
    let nics: Vec<Nic> = candidates.iter().map(|candidate| candidate.nic.clone()).collect();
    let locations: Vec<DeviceLocation> = gpus.iter().map(|address| bus.location(address)).collect();
    let chosen = nearest(&locations, &nics).into_iter().nth(own).map(|nearest| nearest.chosen);
    Ok(chosen.unwrap_or_default().into_iter().map(|nic| candidates[nic].domain.clone()).collect())
}

/// A NIC that an engine can use.
struct Candidate {
    domain: String,
    network: String,
    nic: Nic,
}

impl Candidate {
    /// The NICs of one network whose places the provider tells and whose links are not down.
    fn all(library: &Arc<Library>, options: &Options, bus: Bus<'_>) -> Result<Vec<Self>> {
        let mut all: Vec<Self> = Vec::new();
        find_entry(library, options, options.address.as_deref(), Memory::OfHost, |entry| {
            if let Some(candidate) = Self::new(entry, bus)
                && all.iter().all(|known| known.domain != candidate.domain)
            {
                all.push(candidate);
            }
            Ok(None::<()>)
        })?;
        let preferred = Nic::preferred_network(all.iter().map(|candidate| candidate.network.as_str()));
        all.retain(|candidate| preferred.is_none_or(|network| candidate.network == network));
        Ok(all)
    }

    fn new(entry: Entry<'_>, bus: Bus<'_>) -> Option<Self> {
        let location = bus.location(&entry.pci_address()?);
        let link = entry.link();
        if link.as_ref().is_some_and(|link| link.is_down) {
            return None;
        }
        let gbit_per_s = link.as_ref().map_or(0.0, |link| link.bits_per_s as f64 / 1e9);
        let network = link.map_or_else(String::new, |link| link.network);
        Some(Self { domain: entry.domain_name(), network, nic: Nic { location, gbit_per_s } })
    }
}

/// The PCI bus as the directory `/sys` shows it.
#[derive(Clone, Copy)]
pub(crate) struct Bus<'a>(&'a Path);

impl Bus<'_> {
    pub(crate) fn of_this_machine() -> Self {
        Bus(Path::new(SYSFS))
    }

    /// A file of the device at this PCI address, without white space at its ends.
    fn text(self, address: &str, file: &str) -> Option<String> {
        let path = self.0.join("bus/pci/devices").join(address.to_ascii_lowercase()).join(file);
        Some(fs::read_to_string(path).ok()?.trim().to_owned())
    }

    /// The PCI addresses of the GPUs, in ascending order.
    fn gpus(self) -> Vec<String> {
        let number = |address: &str, file| {
            let text = self.text(address, file)?;
            u32::from_str_radix(text.trim_start_matches("0x"), 16).ok()
        };
        let is_gpu = |address: &String| {
            let registers = number(address, "vendor").zip(number(address, "class"));
            registers.is_some_and(|(vendor, class)| is_nvidia_gpu(vendor, class))
        };
        let Ok(devices) = fs::read_dir(self.0.join("bus/pci/devices")) else { return Vec::new() };
        let addresses = devices.filter_map(|device| device.ok()?.file_name().into_string().ok());
        let mut gpus: Vec<String> = addresses.filter(is_gpu).collect();
        gpus.sort();
        gpus
    }

    /// Where the device at this PCI address is.
    fn location(self, address: &str) -> DeviceLocation {
        let link = self.0.join("bus/pci/devices").join(address.to_ascii_lowercase());
        let path = fs::canonicalize(link).ok().and_then(|path| path.into_os_string().into_string().ok());
        // The kernel writes -1 for "no node".
        let numa_node = self.text(address, "numa_node").and_then(|node| node.parse().ok());
        DeviceLocation { path, numa_node }
    }

    /// The CPUs near the device at this PCI address; empty if the machine does not tell.
    pub(crate) fn cpus(self, address: &str) -> Vec<usize> {
        self.text(address, "local_cpulist").and_then(|list| cpus_of(&list)).unwrap_or_default()
    }
}

/// The numbers of a list of the kernel, such as `0-3,8-11`; `None` for other texts and for numbers that no machine has.
fn cpus_of(list: &str) -> Option<Vec<usize>> {
    /// More than any machine has.
    const MOST_CPUS: usize = 1 << 20;
    let mut cpus = Vec::new();
    for range in list.split(',') {
        let (first, last) = range.split_once('-').unwrap_or((range, range));
        let (first, last): (usize, usize) = (first.trim().parse().ok()?, last.trim().parse().ok()?);
        if last >= MOST_CPUS {
            return None;
        }
        cpus.extend(first..=last);
    }
    Some(cpus)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn lists_of_cpus() {
        assert_eq!(cpus_of("0-3,8,10-11"), Some(vec![0, 1, 2, 3, 8, 10, 11]));
        assert_eq!(cpus_of("5"), Some(vec![5]));
        for other in ["", "a", "1-", "0-4294967295", "1,,2"] {
            assert_eq!(cpus_of(other), None, "{other}");
        }
    }
}
