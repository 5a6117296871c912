//! The PCI bus: devices that exist even if no driver is loaded for them.

use super::{fact::Fact, parse, probe::Probe};

pub(super) const VENDOR_AMAZON: u32 = 0x1d0f;
pub(super) const VENDOR_MELLANOX: u32 = 0x15b3;

const DEVICES: &str = "/sys/bus/pci/devices";

/// The address and the configuration registers of one device.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(super) struct Device {
    /// The address, such as `0000:18:00.0`.
    pub(super) address: String,
    vendor: u32,
    device: u32,
    /// Base class, subclass and programming interface, a byte each.
    class: u32,
}

impl Device {
    /// An NVIDIA display or 3D controller.
    pub(super) fn is_nvidia_gpu(&self) -> bool {
        ep_fabric::is_nvidia_gpu(self.vendor, self.class)
    }

    /// An Elastic Fabric Adapter. The vendor's other devices are ordinary network and disk controllers.
    pub(super) fn is_efa(&self) -> bool {
        self.vendor == VENDOR_AMAZON && self.device >> 4 == 0xefa
    }

    /// A ConnectX or BlueField network function.
    pub(super) fn is_mellanox_nic(&self) -> bool {
        self.vendor == VENDOR_MELLANOX && self.class >> 16 == 0x02
    }
}

/// All devices; absent if there is no PCI bus.
pub(super) fn devices(probe: &Probe) -> Fact<Vec<Device>> {
    probe.names(DEVICES).map(|addresses| {
        let register = |address: &str, file: &str| {
            let path = format!("{DEVICES}/{address}/{file}");
            probe.value(&path, parse::hex).known().copied()
        };
        addresses
            .iter()
            .filter_map(|address| {
                Some(Device {
                    address: address.clone(),
                    vendor: register(address, "vendor")?,
                    device: register(address, "device")?,
                    class: register(address, "class")?,
                })
            })
            .collect()
    })
}

/// The NUMA node of the device with this directory; absent if it belongs to none.
pub(super) fn numa_node(probe: &Probe, device_dir: &str) -> Fact<u32> {
    let node = probe.value(&format!("{device_dir}/numa_node"), |text| text.parse::<i32>().ok());
    // The kernel writes -1 for "no node".
    node.and_then(|node| u32::try_from(node).map_or(Fact::Absent, Fact::Known))
}

/// The NUMA node of the device at a PCI address.
pub(super) fn numa_node_at(probe: &Probe, address: &str) -> Fact<u32> {
    numa_node(probe, &format!("{DEVICES}/{}", address.to_ascii_lowercase()))
}

/// The path below `/sys/devices` of the device at a PCI address. The path names the bridges above the device.
pub(super) fn path_at(probe: &Probe, address: &str) -> Fact<String> {
    probe.real_path(&format!("{DEVICES}/{}", address.to_ascii_lowercase()))
}
