//! GPUs and the files of their driver, found without a query to the driver.

use serde::Serialize;

use super::{
    check::{Check, Section},
    fact::Fact,
    library, parse, pci,
    probe::Probe,
};
use crate::common::machine;

const DRIVER_DIR: &str = "/proc/driver/nvidia";
const MODULES: &str = "/proc/modules";
const IMEX_DIR: &str = "/dev/nvidia-caps-imex-channels";

/// The run-time compiler's names, newest first.
const NVRTC_NAMES: [&str; 2] = ["libnvrtc.so.13", "libnvrtc.so.12"];

/// GPUs, their driver and its libraries.
#[derive(Clone, Debug, Serialize)]
pub(crate) struct Gpus {
    /// The kernel driver's version; absent if it is not loaded.
    pub(crate) driver_version: Fact<String>,
    /// The GPUs of the driver; absent if it is not loaded.
    pub(crate) devices: Fact<Vec<DriverGpu>>,
    /// NVIDIA GPUs on the PCI bus, with or without a driver; absent if there is no PCI bus.
    pub(crate) on_pci_bus: Fact<usize>,
    /// Device files of GPUs in `/dev`, whether or not this process may open them.
    pub(crate) device_files: usize,
    /// Paths of `libcuda.so.1`; a loader takes the first.
    pub(crate) libcuda_paths: Vec<String>,
    /// Paths of all run-time compilers (NVRTC), whether or not the backend uses them.
    pub(crate) nvrtc_paths: Vec<String>,
    /// Modules that let network cards access GPU memory.
    pub(crate) peer_modules: Fact<Vec<PeerModule>>,
    /// NVSwitch devices.
    pub(crate) nvswitch_devices: usize,
    /// Channels for GPU memory shared between nodes over NVLink.
    pub(crate) imex_channels: usize,
}

/// One GPU.
#[derive(Clone, Debug, PartialEq, Serialize)]
pub(crate) struct DriverGpu {
    /// The model's name.
    pub(crate) model: Fact<String>,
    /// The PCI address.
    pub(crate) pci_address: String,
    /// The NUMA node that it is attached to.
    pub(crate) numa_node: Fact<u32>,
    /// The device file; absent if the driver has the GPU but this container does not.
    pub(crate) device_file: Fact<String>,
}

/// A kernel module for transfers between network cards and GPU memory.
#[derive(Clone, Debug, PartialEq, Eq, Serialize)]
pub(crate) struct PeerModule {
    /// The module's name.
    pub(crate) name: &'static str,
    /// Whether it is loaded.
    pub(crate) loaded: bool,
}

impl Gpus {
    pub(super) fn find(probe: &Probe) -> Self {
        let loader_dirs = library::loader_dirs(probe);
        Gpus {
            driver_version: driver_version(probe),
            devices: devices(probe),
            on_pci_bus: pci::devices(probe)
                .map(|all| all.iter().filter(|device| device.is_nvidia_gpu()).count()),
            device_files: probe.names_where("/dev", |name| is_numbered(name, "nvidia")).len(),
            libcuda_paths: library::find_all(probe, &loader_dirs, &["libcuda.so.1"]),
            nvrtc_paths: library::find_all(probe, &library::nvrtc_dirs(probe), &NVRTC_NAMES),
            peer_modules: peer_modules(probe),
            nvswitch_devices: probe.names_where("/dev", |name| is_numbered(name, "nvidia-nvswitch")).len(),
            imex_channels: probe.names_where(IMEX_DIR, |name| name.starts_with("channel")).len(),
        }
    }

    /// Whether there is any sign of an NVIDIA GPU.
    fn any(&self) -> bool {
        let shown = self.devices.known().is_some_and(|gpus| !gpus.is_empty());
        shown || self.device_files > 0 || self.on_pci_bus.known().is_some_and(|&n| n > 0)
    }

    pub(super) fn section(&self) -> Section {
        let mut checks = self.driver_checks();
        checks.push(library_check(
            "libcuda.so.1",
            &self.libcuda_paths,
            "the CUDA backend",
            "install the NVIDIA driver (in a container: --gpus all)",
        ));
        checks.extend(self.peer_module_checks());
        checks.extend(self.link_checks());
        Section { title: "GPUs", checks }
    }

    fn driver_checks(&self) -> Vec<Check> {
        const DRIVER: &str = "NVIDIA driver";
        let driver = Check::of_optional(
            DRIVER,
            &self.driver_version,
            |version| Check::ok(DRIVER, version),
            || self.no_driver_check(DRIVER),
        );
        let mut checks = vec![driver];
        match &self.devices {
            Fact::Known(gpus) => checks.extend(gpus.iter().enumerate().map(|(n, gpu)| gpu.check(n))),
            Fact::Absent => {}
            Fact::Unknown(why) => checks.push(Check::absent("GPUs", format!("unknown: {why}"))),
        }
        checks
    }

    /// The finding if `/proc` shows no driver. Some sandboxes hide the driver's files but provide GPUs.
    fn no_driver_check(&self, name: &str) -> Check {
        let on_bus = self.on_pci_bus.known().copied().unwrap_or(0);
        match (self.device_files, on_bus) {
            (0, 0) => Check::absent(name, "not loaded, and no NVIDIA GPU on the PCI bus")
                .advice("ranks on GPUs", "use a machine with an NVIDIA GPU and its driver"),
            (0, n) => {
                let gpus = parse::count(n, "GPU");
                Check::absent(name, format!("not loaded, but the PCI bus has {gpus}"))
                    .advice("ranks on GPUs", "install the NVIDIA driver")
            }
            (n, _) => {
                let files = parse::count(n, "GPU device file");
                Check::ok(name, format!("version unknown, but {files} in /dev"))
            }
        }
    }

    fn peer_module_checks(&self) -> Vec<Check> {
        // The modules matter only with a GPU.
        if !self.any() {
            return Vec::new();
        }
        let modules = match &self.peer_modules {
            Fact::Known(modules) => modules,
            Fact::Absent => return vec![Check::absent("GPUDirect", "this kernel does not support modules")],
            Fact::Unknown(why) => {
                return vec![Check::absent("GPUDirect", format!("unknown: {why}"))];
            }
        };
        modules.iter().map(PeerModule::check).collect()
    }

    fn link_checks(&self) -> Vec<Check> {
        if !self.any() {
            return Vec::new();
        }
        let mut checks = Vec::new();
        // The absence of NVSwitch is not reported: many machines have none, and some hide it from virtual machines.
        if self.nvswitch_devices > 0 {
            checks.push(Check::ok("NVSwitch", parse::count(self.nvswitch_devices, "device")));
        }
        if self.imex_channels > 0 {
            checks.push(Check::ok("multi-node NVLink", parse::count(self.imex_channels, "IMEX channel")));
        }
        checks
    }
}

impl DriverGpu {
    fn check(&self, number: usize) -> Check {
        let name = format!("GPU {number}");
        let mut found = match &self.model {
            Fact::Known(model) => model.clone(),
            Fact::Absent => "unnamed".to_owned(),
            Fact::Unknown(why) => format!("model unknown: {why}"),
        };
        found.push_str(&format!(", PCI {}", self.pci_address));
        if let Some(node) = self.numa_node.known() {
            found.push_str(&format!(", NUMA node {node}"));
        }
        match &self.device_file {
            Fact::Known(file) => Check::ok(name, format!("{found}, {file}")),
            Fact::Absent => Check::absent(name, format!("{found}, no device file"))
                .advice("ranks on this GPU", "give the GPU to the container: --gpus all"),
            Fact::Unknown(_) => Check::ok(name, found),
        }
    }
}

impl PeerModule {
    fn check(&self) -> Check {
        if self.loaded {
            return Check::ok(self.name, "loaded");
        }
        let enables = match self.name {
            "gdrdrv" => "small copies between CPU and GPU without a driver call",
            _ => "RDMA from GPU memory on systems without DMA-BUF",
        };
        let how = format!("modprobe {} on the host", self.name);
        Check::absent(self.name, "not loaded").advice(enables, how)
    }
}

/// The finding on a library. All copies are listed, because a loader may take a copy that the user does not expect.
fn library_check(name: &str, paths: &[String], enables: &str, how: &str) -> Check {
    match paths {
        [] => Check::absent(name, "not found").advice(enables, how),
        [path] => Check::ok(name, path),
        [path, more @ ..] => Check::ok(name, format!("{path} (also {})", more.join(", "))),
    }
}

/// The version in a text such as `NVRM version: NVIDIA UNIX x86_64 Kernel Module  580.95.05  ...`: the first word that
/// consists of numbers separated by dots.
fn driver_version(probe: &Probe) -> Fact<String> {
    probe.value(&format!("{DRIVER_DIR}/version"), |text| {
        let line = text.lines().next()?;
        let mut words = line.split_whitespace();
        let version = words.find(|word| {
            word.contains('.')
                && word.split('.').all(|part| !part.is_empty() && part.bytes().all(|b| b.is_ascii_digit()))
        })?;
        Some(version.to_owned())
    })
}

fn devices(probe: &Probe) -> Fact<Vec<DriverGpu>> {
    let dir = format!("{DRIVER_DIR}/gpus");
    probe.names(&dir).map(|addresses| {
        let mut addresses = addresses;
        // Addresses are hexadecimal and of equal length, so they sort as plain text.
        addresses.sort();
        addresses.into_iter().map(|address| device(probe, address)).collect()
    })
}

fn device(probe: &Probe, pci_address: String) -> DriverGpu {
    let path = format!("{DRIVER_DIR}/gpus/{pci_address}/information");
    let information = probe.text(&path).or_unknown(&path);
    let field = |key: &str| {
        information.clone().and_then(|text| match machine::field(&text, key) {
            Some(value) => Fact::Known(value.to_owned()),
            None => Fact::Unknown(format!("{path} contains no {key:?}")),
        })
    };
    let device_file = field("Device Minor").and_then(|minor| {
        let file = format!("/dev/nvidia{minor}");
        if probe.exists(&file) { Fact::Known(file) } else { Fact::Absent }
    });
    DriverGpu {
        model: field("Model"),
        numa_node: pci::numa_node_at(probe, &pci_address),
        device_file,
        pci_address,
    }
}

fn peer_modules(probe: &Probe) -> Fact<Vec<PeerModule>> {
    probe.text(MODULES).map(|text| {
        ["nvidia_peermem", "gdrdrv"]
            .map(|name| PeerModule {
                name,
                loaded: text.lines().any(|line| line.split_whitespace().next() == Some(name)),
            })
            .to_vec()
    })
}

/// Whether a device file belongs to one device (`nvidia0`), not to all devices (`nvidiactl`).
fn is_numbered(name: &str, prefix: &str) -> bool {
    name.strip_prefix(prefix).is_some_and(|number| number.parse::<u32>().is_ok())
}
