//! These tests examine fake machines and check the reports.

mod cuda;
mod devices;
mod files;
mod launch;
mod limits;
mod network;
mod system;

use std::{
    collections::BTreeMap,
    fs,
    path::PathBuf,
    sync::atomic::{AtomicU32, Ordering},
};

use super::{
    check::Check,
    cuda::{Cuda, CudaGpu, KernelCache, Nvrtc},
    fabric::FabricProvider,
    fact::Fact,
    probe::{Probe, Process},
    render::render,
    report::DoctorReport,
};

/// A fake machine: a temporary file tree, which is removed when this value is dropped.
struct FakeMachine {
    probe: Probe,
    cuda: Cuda,
    /// Providers of libfabric.
    providers: Fact<Vec<FabricProvider>>,
}

impl FakeMachine {
    fn new() -> Self {
        static NEXT: AtomicU32 = AtomicU32::new(0);
        let root = std::env::temp_dir().join(format!(
            "hybrid-ep-doctor-{}-{}",
            std::process::id(),
            NEXT.fetch_add(1, Ordering::Relaxed)
        ));
        fs::create_dir(&root).unwrap();
        FakeMachine {
            probe: Probe {
                root,
                env: BTreeMap::new(),
                process: Process {
                    os: "linux",
                    arch: "x86_64",
                    cores_usable: Fact::Known(2),
                    vector_extensions: vec![("avx2", true), ("avx512f", false)],
                    addresses: Fact::Absent,
                },
            },
            cuda: no_cuda(),
            providers: Fact::Absent,
        }
    }

    fn path(&self, path: &str) -> PathBuf {
        self.probe.resolve(path)
    }

    fn file(self, path: &str, text: impl AsRef<[u8]>) -> Self {
        let path = self.path(path);
        fs::create_dir_all(path.parent().unwrap()).unwrap();
        fs::write(path, text).unwrap();
        self
    }

    fn files(self, dir: &str, files: &[(&str, &str)]) -> Self {
        files.iter().fold(self, |machine, (name, text)| machine.file(&format!("{dir}/{name}"), text))
    }

    fn dir(self, path: &str) -> Self {
        fs::create_dir_all(self.path(path)).unwrap();
        self
    }

    fn env(mut self, name: &str, value: &str) -> Self {
        self.probe.env.insert(name.to_owned(), value.to_owned());
        self
    }

    /// An ordinary Linux with two sockets.
    fn linux(self) -> Self {
        let mut machine = self
            .file("/proc/sys/kernel/osrelease", "6.8.0-31-generic\n")
            .file("/etc/os-release", "PRETTY_NAME=\"Ubuntu 24.04\"\nID=ubuntu\n")
            .file("/proc/cpuinfo", "processor\t: 0\nmodel name\t: Fast CPU\n")
            .file("/proc/meminfo", "MemTotal: 1024 kB\nMemAvailable:  512 kB\n")
            .file("/proc/self/cgroup", "0::/\n")
            .file("/proc/self/mountinfo", "")
            .file("/proc/mounts", "")
            .file(
                "/proc/self/limits",
                "Limit                     Soft Limit           Hard Limit           Units     \n\
                 Max open files            1024                 1048576              files     \n\
                 Max locked memory         unlimited            unlimited            bytes     \n",
            )
            .file("/sys/devices/system/node/online", "0-1\n")
            .file("/sys/devices/system/cpu/online", "0-7\n")
            .file("/sys/devices/system/cpu/cpuidle/current_driver", "none\n")
            .files(
                "/sys/devices/system/cpu/cpu0/cache",
                &[
                    ("index0/level", "1\n"),
                    ("index0/size", "48K\n"),
                    ("index2/level", "2\n"),
                    ("index2/size", "2048K\n"),
                    ("index3/level", "3\n"),
                    ("index3/size", "32M\n"),
                ],
            );
        for cpu in 0..8 {
            machine = machine.files(
                &format!("/sys/devices/system/cpu/cpu{cpu}/topology"),
                &[("physical_package_id", &(cpu / 4).to_string()), ("core_id", &(cpu % 2).to_string())],
            );
        }
        machine
    }

    fn examine(&self) -> DoctorReport {
        DoctorReport::of(&self.probe, self.cuda.clone(), self.providers.clone(), "hybrid-ep")
    }
}

impl Drop for FakeMachine {
    fn drop(&mut self) {
        // A leftover temporary directory is no reason to fail.
        let _ = fs::remove_dir_all(&self.probe.root);
    }
}

/// A machine without a GPU driver, a compiler or a compiled kernel.
fn no_cuda() -> Cuda {
    Cuda {
        driver_supports: Fact::Absent,
        driver_problem: None,
        gpus: Fact::Absent,
        peer_links: Fact::Absent,
        nvrtc: Fact::Absent,
        nvrtc_problem: Some("NVRTC: none that can be used; looked at everything".to_owned()),
        kernel_cache: KernelCache {
            dir: Some("/home/a/.cache/hybrid-ep".to_owned()),
            entries: 0,
            bytes: 0,
            free_bytes: Fact::Known(8 << 30),
            problem: None,
        },
    }
}

fn find<'a>(report: &'a DoctorReport, name: &str) -> &'a Check {
    let mut checks = report.sections.iter().flat_map(|section| &section.checks);
    checks
        .find(|check| check.name == name)
        .unwrap_or_else(|| panic!("no check {name:?} in\n{}", render(report)))
}

fn known(text: &str) -> Fact<String> {
    Fact::Known(text.to_owned())
}

/// Invariants of every report.
fn assert_sound(report: &DoctorReport) {
    let text = render(report);
    assert_eq!(text.lines().last(), Some(report.verdict.text.as_str()));
    assert!(text.chars().all(|c| c == '\n' || !c.is_control()), "{text}");
    for check in report.sections.iter().flat_map(|section| &section.checks) {
        assert!(!check.name.is_empty() && !check.found.is_empty(), "{check:?}");
        assert_eq!(check.enables.is_some(), check.how.is_some(), "{check:?}");
    }
    let json: serde_json::Value = serde_json::from_str(&serde_json::to_string(report).unwrap()).unwrap();
    assert_eq!(json["verdict"]["text"], report.verdict.text);
}

/// A large server: the files that the drivers of its GPUs and network cards provide.
fn gpu_server() -> FakeMachine {
    let mut machine = FakeMachine::new()
        .linux()
        .file(
            "/proc/driver/nvidia/version",
            "NVRM version: NVIDIA UNIX Open Kernel Module for x86_64  580.95.05  Release Build\n\
             GCC version:  gcc version 13.3.0\n",
        )
        .file("/proc/modules", "nvidia_peermem 16384 0 - Live 0x0\nnvidia 1 2 - Live 0x0\n")
        .file("/dev/nvidiactl", "")
        .file("/dev/nvidia-nvswitchctl", "")
        .file("/dev/infiniband/uverbs0", "")
        .file("/dev/infiniband/uverbs1", "")
        .file("/usr/lib/x86_64-linux-gnu/libcuda.so.1", "")
        .file("/usr/local/cuda-12.8/lib64/libnvrtc.so.12", "")
        .file("/venv/lib/python3.12/site-packages/nvidia/cu13/lib/libnvrtc.so.13", "")
        .file("/opt/amazon/efa/lib/libfabric.so.1", "")
        .env("VIRTUAL_ENV", "/venv");
    for switch in 0..4 {
        machine = machine.file(&format!("/dev/nvidia-nvswitch{switch}"), "");
    }
    for gpu in 0..8u32 {
        let address = format!("0000:{:02x}:00.0", 0x18 + gpu);
        machine = machine
            .file(&format!("/dev/nvidia{gpu}"), "")
            .file(
                &format!("/proc/driver/nvidia/gpus/{address}/information"),
                format!(
                    "Model: \t\t NVIDIA H200\nIRQ:   \t\t 64\nBus Location: \t {address}\n\
                     Device Minor: \t {gpu}\n"
                ),
            )
            .files(
                &format!("/sys/bus/pci/devices/{address}"),
                &[
                    ("vendor", "0x10de\n"),
                    ("device", "0x2335\n"),
                    ("class", "0x030200\n"),
                    ("numa_node", &format!("{}\n", gpu / 4)),
                ],
            );
    }
    for card in 0..2 {
        let (state, rate) = match card {
            0 => ("4: ACTIVE\n", "400 Gb/sec (4X NDR)\n"),
            _ => ("1: DOWN\n", "2.5 Gb/sec (1X SDR)\n"),
        };
        machine = machine.files(
            &format!("/sys/class/infiniband/mlx5_{card}"),
            &[
                ("hca_type", "MT4129\n"),
                ("device/vendor", "0x15b3\n"),
                ("device/numa_node", "-1\n"),
                ("device/uevent", "DRIVER=mlx5_core\nPCI_CLASS=20700\n"),
                ("ports/1/state", state),
                ("ports/1/rate", rate),
                ("ports/1/link_layer", "InfiniBand\n"),
            ],
        );
    }
    machine
        .files(
            "/sys/class/net/eno1",
            &[("operstate", "up\n"), ("speed", "25000\n"), ("device/vendor", "0x15b3\n")],
        )
        .files("/sys/class/net/docker0", &[("operstate", "up\n"), ("speed", "10000\n")])
        .files("/sys/class/net/lo", &[("operstate", "unknown\n")])
        .file("/sys/class/net/bonding_masters", "\n")
}

/// The driver's answers on a server with `count` GPUs.
fn h200s(count: usize) -> Cuda {
    let gpu = CudaGpu {
        name: "NVIDIA H200".to_owned(),
        compute_capability: "9.0".to_owned(),
        architecture: Some("sm_90a"),
        multiprocessors: 132,
        memory_bytes: 140 << 30,
        offers_fabric: true,
        pci_address: None,
    };
    let links = |a| (0..count).map(|b| if a == b { "own" } else { "atomics" }).collect();
    Cuda {
        driver_supports: known("13.0"),
        driver_problem: None,
        gpus: Fact::Known(vec![gpu; count]),
        peer_links: Fact::Known((0..count).map(links).collect()),
        nvrtc: Fact::Known(Nvrtc { version: "13.0".to_owned(), path: "/venv/libnvrtc.so.13".to_owned() }),
        nvrtc_problem: None,
        kernel_cache: KernelCache { entries: 3, bytes: 96 << 10, ..no_cuda().kernel_cache },
    }
}

const V2_MOUNT: &str = "30 23 0:26 / /sys/fs/cgroup rw shared:9 - cgroup2 cgroup2 rw,nsdelegate\n";
