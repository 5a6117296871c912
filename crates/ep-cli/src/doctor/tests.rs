//! Reports on fake machines.

mod network;

use std::{
    collections::BTreeMap,
    fs,
    path::{Path, PathBuf},
    sync::atomic::{AtomicU32, Ordering},
};

use super::{
    check::{Check, Mark},
    cuda::{Cuda, CudaGpu, KernelCache, Nvrtc},
    fabric::FabricProvider,
    fact::Fact,
    memory::Limit,
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

#[test]
fn an_empty_machine_is_reported() {
    let machine = FakeMachine::new();
    let report = machine.examine();
    assert_sound(&report);
    assert_eq!(report.memory.total_bytes, Fact::Unknown("/proc/meminfo does not exist".to_owned()));
    assert_eq!(report.gpus.devices, Fact::Absent);
    assert_eq!(report.network.rdma_devices, Fact::Absent);
    assert!(matches!(report.verdict.process_ranks, Fact::Unknown(_)));
    assert!(
        report.verdict.text.starts_with("ready: thread ranks on 2 cores; process ranks unknown"),
        "{}",
        report.verdict.text
    );
}

#[test]
fn a_missing_root_is_reported_like_an_empty_machine() {
    let mut machine = FakeMachine::new();
    let real = machine.probe.root.clone();
    machine.probe.root = real.join("no/such/place");
    assert_sound(&machine.examine());
    machine.probe.root = real;
}

#[test]
fn an_ordinary_machine_is_ready() {
    let machine = FakeMachine::new().linux();
    let report = machine.examine();
    assert_sound(&report);
    assert_eq!(report.verdict.text, "ready: thread ranks and process ranks on 2 cores; try: hybrid-ep bench");
    assert_eq!(report.cpu.model, known("Fast CPU"));
    assert_eq!(report.cpu.sockets, Fact::Known(2));
    assert_eq!(report.cpu.numa_nodes, Fact::Known(2));
    assert_eq!(report.cpu.cores_online, Fact::Known(8));
    assert_eq!(report.cpu.physical_cores_online, Fact::Known(4));
    assert_eq!(report.cpu.l2_bytes, Fact::Known(2 << 20));
    assert_eq!(report.cpu.l3_bytes, Fact::Known(32 << 20));
    assert_eq!(report.cpu.cgroup_quota_cores, Fact::Absent);
    assert_eq!(report.memory.total_bytes, Fact::Known(1 << 20));
    assert_eq!(report.memory.cgroup_limit_bytes, Fact::Absent);
    assert_eq!(report.memory.memlock_bytes, Fact::Known(Limit::Unlimited));
    assert_eq!(report.memory.open_files, Fact::Known(Limit::At(1024)));
    assert_eq!(find(&report, "libfabric.so.1").how.as_deref(), Some("apt-get install libfabric1"));
    assert_eq!(find(&report, "host").found, "ready");
    assert_eq!(find(&report, "cuda").found, "no GPU driver (libcuda.so.1)");
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

#[test]
fn eight_gpus_and_two_infiniband_cards() {
    let machine = gpu_server();
    let report = machine.examine();
    assert_sound(&report);

    let gpus = &report.gpus;
    assert_eq!(gpus.driver_version, known("580.95.05"));
    let devices = gpus.devices.known().unwrap();
    assert_eq!(devices.len(), 8);
    assert_eq!(devices[7].model, known("NVIDIA H200"));
    assert_eq!(devices[7].pci_address, "0000:1f:00.0");
    assert_eq!(devices[7].numa_node, Fact::Known(1));
    assert_eq!(devices[7].device_file, known("/dev/nvidia7"));
    assert_eq!(gpus.on_pci_bus, Fact::Known(8));
    assert_eq!(gpus.nvswitch_devices, 4);
    assert_eq!(gpus.libcuda_paths, ["/usr/lib/x86_64-linux-gnu/libcuda.so.1"]);
    assert_eq!(
        gpus.nvrtc_paths,
        [
            "/usr/local/cuda-12.8/lib64/libnvrtc.so.12",
            "/venv/lib/python3.12/site-packages/nvidia/cu13/lib/libnvrtc.so.13",
        ]
    );
    assert_eq!(find(&report, "nvidia_peermem").found, "loaded");
    assert_eq!(find(&report, "gdrdrv").mark, Mark::Absent);

    let cards = report.network.rdma_devices.known().unwrap();
    assert_eq!(cards.len(), 2);
    assert!(!cards[0].is_efa);
    assert_eq!(cards[0].numa_node, Fact::Absent);
    let port = &cards[0].ports.known().unwrap()[0];
    assert_eq!(port.state, known("ACTIVE"));
    assert_eq!(port.rate_gbit_per_s, Fact::Known(400.0));
    let up = find(&report, "mlx5_0 port 1");
    assert_eq!(up.mark, Mark::Ok);
    assert_eq!(up.found, "ACTIVE, 400 Gbit/s, InfiniBand, MT4129");
    let down = find(&report, "mlx5_1 port 1");
    assert_eq!(down.mark, Mark::Absent);
    assert_eq!(down.found, "DOWN, 2.5 Gbit/s, InfiniBand, MT4129");

    let interfaces = report.network.interfaces.known().unwrap();
    assert_eq!(interfaces.len(), 1);
    assert_eq!(interfaces[0].speed_mbit_per_s, Fact::Known(25_000));
    assert_eq!(find(&report, "eno1").found, "up, 25 Gbit/s");
    assert_eq!(find(&report, "libfabric.so.1").found, "/opt/amazon/efa/lib/libfabric.so.1");
    // The files exist, but the driver does not answer: its answers decide.
    assert_eq!(find(&report, "cuda").mark, Mark::Absent);
    assert_eq!(report.verdict.problems, 0);
}

#[test]
fn a_gpu_without_its_device_file_is_not_usable() {
    let machine = gpu_server();
    fs::remove_file(machine.path("/dev/nvidia3")).unwrap();
    let report = machine.examine();
    assert_eq!(find(&report, "GPU 3").mark, Mark::Absent);
    assert_eq!(find(&report, "GPU 4").mark, Mark::Ok);
}

#[test]
fn gpus_in_a_sandbox_that_hides_the_driver() {
    let machine = FakeMachine::new().linux().file("/dev/nvidia0", "").file("/dev/nvidiactl", "");
    let report = machine.examine();
    assert_eq!(report.gpus.device_files, 1);
    let driver = find(&report, "NVIDIA driver");
    assert_eq!(driver.mark, Mark::Ok);
    assert_eq!(driver.found, "version unknown, but 1 GPU device file in /dev");
}

#[test]
fn gpus_and_cards_without_drivers() {
    let pci = "/sys/bus/pci/devices";
    let machine = FakeMachine::new()
        .linux()
        .files(
            &format!("{pci}/0000:01:00.0"),
            &[("vendor", "0x10de"), ("device", "0x2330"), ("class", "0x030200")],
        )
        .files(
            // The sound function of the GPU is not a GPU.
            &format!("{pci}/0000:01:00.1"),
            &[("vendor", "0x10de"), ("device", "0x22ba"), ("class", "0x040300")],
        )
        .files(
            &format!("{pci}/0000:02:00.0"),
            &[("vendor", "0x1d0f"), ("device", "0xefa2"), ("class", "0x020000")],
        );
    let report = machine.examine();
    assert_sound(&report);
    assert_eq!(find(&report, "NVIDIA driver").found, "not loaded, but the PCI bus has 1 GPU");
    assert_eq!(find(&report, "RDMA devices").found, "none, but the PCI bus has 1 EFA");
}

#[test]
fn efa_is_recognised_by_vendor_or_driver() {
    let dir = "/sys/class/infiniband";
    let machine = FakeMachine::new()
        .linux()
        .files(
            &format!("{dir}/rdmap16s27"),
            &[("device/vendor", "0x1d0f\n"), ("ports/1/state", "4: ACTIVE\n")],
        )
        .files(
            &format!("{dir}/rdmap32s27"),
            &[("device/uevent", "DRIVER=efa\n"), ("ports/1/state", "2: INIT\n")],
        );
    let report = machine.examine();
    assert_sound(&report);
    let cards = report.network.rdma_devices.known().unwrap();
    assert!(cards.iter().all(|card| card.is_efa));
    assert_eq!(find(&report, "rdmap16s27 port 1").found, "ACTIVE, EFA");
    assert!(find(&report, "rdmap32s27 port 1").how.as_ref().unwrap().contains("subnet"));
    // Without device files no program can open them.
    assert_eq!(find(&report, "/dev/infiniband").mark, Mark::Absent);
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

fn old_driver() -> Cuda {
    let problem = "the driver supports CUDA 11.8, and 12.0 is needed";
    Cuda { driver_supports: known("11.8"), driver_problem: Some(problem.to_owned()), ..h200s(2) }
}

#[test]
fn a_missing_driver_and_compiler_are_reported_with_advice() {
    let report = FakeMachine::new().linux().examine();
    assert_sound(&report);
    assert_eq!(find(&report, "CUDA driver").mark, Mark::Absent);
    let compiler = find(&report, "kernel compiler");
    assert_eq!(compiler.mark, Mark::Absent);
    assert!(compiler.found.contains("looked at everything"));
    assert!(compiler.how.as_ref().unwrap().contains("pip install nvidia-cuda-nvrtc"));
    assert_eq!(find(&report, "kernel cache").found, "/home/a/.cache/hybrid-ep: 0 programs, 8 GiB free");
    assert_eq!(report.verdict.problems, 0);
    let json = serde_json::to_value(&report.cuda).unwrap();
    assert!(json["gpus"].is_null() && json["nvrtc"].is_null());
}

#[test]
fn the_answers_of_the_driver_are_reported() {
    let mut machine = gpu_server();
    machine.cuda = h200s(8);
    let report = machine.examine();
    assert_sound(&report);
    assert_eq!(find(&report, "CUDA driver").found, "CUDA 13.0, 8 GPUs");
    assert_eq!(
        find(&report, "CUDA GPU 7").found,
        "NVIDIA H200, compute capability 9.0 (kernels for sm_90a), 132 SMs, 140 GiB"
    );
    assert_eq!(
        find(&report, "peer access").found,
        "between all 8 GPUs, with atomic operations on every link (NVLink)"
    );
    let fabric = find(&report, "fabric handles");
    assert_eq!(
        (fabric.mark, fabric.found.as_str()),
        (Mark::Absent, "offered by the driver; no channel of nvidia-imex")
    );
    assert_eq!(find(&report, "kernel compiler").found, "NVRTC 13.0, /venv/libnvrtc.so.13");
    assert_eq!(
        find(&report, "kernel cache").found,
        "/home/a/.cache/hybrid-ep: 3 programs, 96 KiB, 8 GiB free"
    );
    let json = serde_json::to_value(&report.cuda).unwrap();
    assert_eq!(json["gpus"][0]["offers_fabric"], true);
    assert_eq!(json["peer_links"][1][1], "own");
    assert_eq!(json["gpus"][0]["architecture"], "sm_90a");
}

#[test]
fn the_cuda_backend_is_ready_if_nothing_is_missing() {
    let state = |cuda: Cuda| {
        let mut machine = gpu_server();
        machine.cuda = cuda;
        let report = machine.examine();
        assert_sound(&report);
        let check = find(&report, "cuda").clone();
        assert_eq!(report.verdict.text.contains("; cuda ready on "), check.mark == Mark::Ok);
        let json = serde_json::to_value(&report.backends[1]).unwrap();
        assert_eq!(json["state"], if check.mark == Mark::Ok { "ready" } else { "missing" });
        assert_eq!(json["found"], check.found);
        (check.mark, check.found)
    };
    let without_compiler = |entries| Cuda {
        nvrtc: Fact::Absent,
        kernel_cache: KernelCache { entries, ..no_cuda().kernel_cache },
        ..h200s(2)
    };
    let Fact::Known(mut gpus) = h200s(2).gpus else { panic!("no GPUs") };
    gpus[1].architecture = None;
    let unsupported = Cuda { gpus: Fact::Known(gpus), ..h200s(2) };
    for (cuda, mark, found) in [
        (h200s(8), Mark::Ok, "ready on 8 GPUs"),
        (without_compiler(1), Mark::Ok, "ready on 2 GPUs, with 1 program from the cache"),
        (without_compiler(0), Mark::Absent, "no kernel compiler, and no kernel in the cache"),
        (h200s(0), Mark::Absent, "the driver shows no GPU"),
        (unsupported, Mark::Absent, "no kernels for CUDA GPU 1"),
        (old_driver(), Mark::Absent, "the driver supports CUDA 11.8, and 12.0 is needed"),
        (no_cuda(), Mark::Absent, "no GPU driver (libcuda.so.1)"),
    ] {
        assert_eq!(state(cuda), (mark, found.to_owned()));
    }
}

#[test]
fn an_old_driver_is_reported_with_advice() {
    let mut machine = gpu_server();
    machine.cuda = old_driver();
    let report = machine.examine();
    let driver = find(&report, "CUDA driver");
    assert_eq!(driver.mark, Mark::Absent);
    assert!(driver.found.starts_with("CUDA 11.8, 2 GPUs; "), "{}", driver.found);
    assert!(driver.how.as_ref().unwrap().contains("525"), "{driver:?}");
}

#[test]
fn unsupported_gpus_and_missing_links_are_reported() {
    let mut machine = gpu_server();
    let (mut gpus, mut links) = match h200s(3) {
        Cuda { gpus: Fact::Known(gpus), peer_links: Fact::Known(links), .. } => (gpus, links),
        other => panic!("{other:?}"),
    };
    gpus[1] = CudaGpu { compute_capability: "7.5".to_owned(), architecture: None, ..gpus[1].clone() };
    links[0][2] = "plain";
    links[2][1] = "none";
    machine.cuda = Cuda { gpus: Fact::Known(gpus), peer_links: Fact::Known(links), ..h200s(3) };
    let report = machine.examine();
    assert_sound(&report);
    let old = find(&report, "CUDA GPU 1");
    assert_eq!(old.mark, Mark::Absent);
    assert!(old.found.contains("7.5 (no kernels for it)"), "{}", old.found);
    assert!(old.how.as_ref().unwrap().contains("9.0"));
    let peers = find(&report, "peer access");
    assert_eq!(peers.mark, Mark::Absent);
    assert_eq!(peers.found, "missing from GPU to GPU: 2 to 1");

    let Fact::Known(links) = &mut machine.cuda.peer_links else { panic!("no links") };
    links[2][1] = "plain";
    assert_eq!(
        find(&machine.examine(), "peer access").found,
        "between all 3 GPUs, without atomic operations from GPU to GPU: 0 to 2, 2 to 1 (PCI Express)"
    );
    machine.cuda = h200s(1);
    let report = machine.examine();
    assert!(report.sections.iter().flat_map(|s| &s.checks).all(|check| check.name != "peer access"));
}

#[test]
fn a_failing_driver_and_an_unwritable_cache_are_reported() {
    let mut machine = gpu_server();
    let why = || "GPU driver (libcuda.so.1): system not yet initialized (error 802)".to_owned();
    machine.cuda = Cuda {
        driver_supports: Fact::Unknown(why()),
        gpus: Fact::Unknown(why()),
        peer_links: Fact::Unknown(why()),
        ..no_cuda()
    };
    machine.cuda.kernel_cache.problem = Some("/home/a cannot be written to".to_owned());
    let report = machine.examine();
    assert_sound(&report);
    assert!(find(&report, "CUDA driver").found.contains("error 802"));
    let cache = find(&report, "kernel cache");
    assert_eq!(cache.mark, Mark::Absent);
    assert_eq!(cache.found, "0 programs; /home/a cannot be written to");
    assert!(cache.how.as_ref().unwrap().contains("HYBRID_EP_KERNEL_CACHE"));
}

const V2_MOUNT: &str = "30 23 0:26 / /sys/fs/cgroup rw shared:9 - cgroup2 cgroup2 rw,nsdelegate\n";

#[test]
fn the_lowest_cgroup_v2_limit_of_all_levels_counts() {
    let machine = FakeMachine::new()
        .linux()
        .file("/proc/self/cgroup", "0::/pod/box\n")
        .file("/proc/self/mountinfo", V2_MOUNT)
        .files(
            "/sys/fs/cgroup/pod",
            &[
                ("cpu.max", "150000 100000\n"),
                ("memory.max", "1073741824\n"),
                ("box/cpu.max", "max 100000\n"),
                ("box/memory.max", "2147483648\n"),
            ],
        );
    let report = machine.examine();
    assert_sound(&report);
    assert_eq!(report.cpu.cgroup_quota_cores, Fact::Known(1.5));
    assert_eq!(report.memory.cgroup_limit_bytes, Fact::Known(1 << 30));
    assert_eq!(find(&report, "cgroup CPU quota").found, "1.50 cores");
    assert_eq!(find(&report, "cgroup limit").found, "1 GiB (more than the machine has)");
}

#[test]
fn cgroup_v1_limits_below_a_container_root() {
    let machine = FakeMachine::new()
        .linux()
        .file("/proc/self/cgroup", "5:memory:/docker/abc\n4:cpu,cpuacct:/docker/abc\n0::/docker/abc\n")
        .file(
            "/proc/self/mountinfo",
            format!(
                "31 30 0:28 /docker/abc /cg/cpu,cpuacct ro - cgroup cgroup rw,cpu,cpuacct\n\
                 32 30 0:29 /docker/abc /cg/memory ro - cgroup cgroup rw,memory\n{V2_MOUNT}"
            ),
        )
        .files("/cg/cpu,cpuacct", &[("cpu.cfs_quota_us", "400000\n"), ("cpu.cfs_period_us", "100000\n")])
        .file("/cg/memory/memory.limit_in_bytes", "524288\n");
    let report = machine.examine();
    assert_sound(&report);
    assert_eq!(report.cpu.cgroup_quota_cores, Fact::Known(4.0));
    assert_eq!(report.memory.cgroup_limit_bytes, Fact::Known(512 << 10));
    assert_eq!(find(&report, "cgroup limit").found, "512 KiB");
}

#[test]
fn cgroup_v1_without_limits() {
    let machine = FakeMachine::new()
        .linux()
        .file("/proc/self/cgroup", "5:memory:/\n4:cpu:/\n")
        .file(
            "/proc/self/mountinfo",
            "31 30 0:28 / /cg/cpu rw - cgroup cgroup rw,cpu\n\
             32 30 0:29 / /cg/memory rw - cgroup cgroup rw,memory\n",
        )
        .files(
            "/cg",
            &[
                ("cpu/cpu.cfs_quota_us", "-1\n"),
                ("cpu/cpu.cfs_period_us", "100000\n"),
                ("memory/memory.limit_in_bytes", "9223372036854771712\n"),
            ],
        );
    let report = machine.examine();
    assert_eq!(report.cpu.cgroup_quota_cores, Fact::Absent);
    assert_eq!(report.memory.cgroup_limit_bytes, Fact::Absent);
}

#[test]
fn malformed_files_are_reported_as_unknown() {
    let garbage: &[u8] = b"\xff\xfe\x00\x1b[2J : [ - , = \n\n : \n";
    let mut machine = gpu_server()
        .file("/proc/self/cgroup", "0::/\n")
        .file("/proc/self/mountinfo", V2_MOUNT)
        .file("/sys/fs/cgroup/cpu.max", "plenty\n")
        .file("/sys/fs/cgroup/memory.max", "-5\n")
        .file("/proc/mounts", "tmpfs /dev/shm tmpfs rw,size=much 0 0\nshort\n\n")
        .file("/sys/kernel/mm/transparent_hugepage/enabled", "always never\n")
        .file("/sys/kernel/mm/hugepages/hugepages-2048kB/nr_hugepages", "\n");
    let report = machine.examine();
    assert_sound(&report);
    assert_eq!(
        report.cpu.cgroup_quota_cores,
        Fact::Unknown("/sys/fs/cgroup/cpu.max contains \"plenty\"".to_owned())
    );
    assert!(matches!(report.memory.cgroup_limit_bytes, Fact::Unknown(_)));
    assert!(matches!(report.memory.transparent_huge_pages, Fact::Unknown(_)));
    assert!(matches!(report.memory.reserved_huge_pages[0].reserved, Fact::Unknown(_)));
    let shm = report.memory.dev_shm.known().unwrap();
    assert!(matches!(shm.size_bytes, Fact::Unknown(_)));

    for file in all_files(&machine.probe.root) {
        fs::write(file, garbage).unwrap();
    }
    machine = machine.env("MASTER_PORT", "\u{1b}[31m");
    let report = machine.examine();
    assert_sound(&report);
    assert!(matches!(report.memory.total_bytes, Fact::Unknown(_)));
    assert!(matches!(report.gpus.driver_version, Fact::Unknown(_)));
    assert!(matches!(report.verdict.process_ranks, Fact::Unknown(_)));
    assert_eq!(find(&report, "memfd").mark, Mark::Problem);

    for file in all_files(&machine.probe.root) {
        fs::write(file, "").unwrap();
    }
    assert_sound(&machine.examine());
}

#[test]
fn directories_in_place_of_files_and_files_in_place_of_directories_are_unknown() {
    let machine = FakeMachine::new()
        .dir("/proc/meminfo")
        .dir("/proc/cpuinfo")
        .dir("/proc/sys/kernel/osrelease")
        .dir("/usr/lib/libcuda.so.1")
        .file("/sys/class/infiniband", "")
        .file("/sys/class/net", "")
        .file("/sys/devices/system/cpu", "")
        .file("/proc/driver/nvidia/gpus", "");
    let report = machine.examine();
    assert_sound(&report);
    assert!(matches!(report.memory.total_bytes, Fact::Unknown(_)));
    assert!(matches!(report.network.rdma_devices, Fact::Unknown(_)));
    assert!(report.gpus.libcuda_paths.is_empty());
}

#[cfg(unix)]
#[test]
fn a_library_with_two_paths_counts_once_and_dead_links_do_not_count() {
    use std::os::unix::fs::symlink;
    let machine = FakeMachine::new()
        .file("/usr/lib/libcuda.so.580", "")
        .dir("/usr/lib64")
        .env("LD_LIBRARY_PATH", "relative::/usr/lib64");
    symlink("libcuda.so.580", machine.path("/usr/lib/libcuda.so.1")).unwrap();
    symlink("usr/lib", machine.path("/lib")).unwrap();
    symlink("gone", machine.path("/usr/lib64/libcuda.so.1")).unwrap();
    let report = machine.examine();
    assert_eq!(report.gpus.libcuda_paths, ["/usr/lib/libcuda.so.1"]);
}

#[test]
fn libraries_are_found_in_configured_directories() {
    let machine = FakeMachine::new()
        .file("/etc/ld.so.conf.d/nvidia.conf", "# comment\n/opt/nv/lib\n")
        .file("/etc/ld.so.conf.d/README", "/opt/other\n")
        .file("/opt/nv/lib/libcuda.so.1", "")
        .file("/opt/other/libcuda.so.1", "")
        .file("/mine/libibverbs.so.1", "")
        .file("/conda/bin/python3", "")
        .file("/conda/lib/python3.11/site-packages/nvidia/cuda_nvrtc/lib/libnvrtc.so.12", "")
        .env("LD_LIBRARY_PATH", "/mine/")
        .env("PATH", "/nowhere/bin:/conda/bin");
    let report = machine.examine();
    assert_eq!(report.gpus.libcuda_paths, ["/opt/nv/lib/libcuda.so.1"]);
    assert_eq!(report.network.libibverbs_paths, ["/mine/libibverbs.so.1"]);
    assert_eq!(
        report.gpus.nvrtc_paths,
        ["/conda/lib/python3.11/site-packages/nvidia/cuda_nvrtc/lib/libnvrtc.so.12"]
    );
}

#[test]
fn old_kernels_rule_out_process_ranks() {
    for (release, memfd, pidfd) in [("3.10.0-1160.el7", false, false), ("4.18.0-553", true, false)] {
        let machine = FakeMachine::new().linux().file("/proc/sys/kernel/osrelease", release);
        let report = machine.examine();
        assert_sound(&report);
        assert_eq!(report.system.memfd, Fact::Known(memfd));
        assert_eq!(report.system.pidfd, Fact::Known(pidfd));
        assert_eq!(report.verdict.process_ranks, Fact::Known(false));
        assert!(report.verdict.text.contains("process ranks need a newer kernel"));
    }
}

#[test]
fn the_kernel_release_of_gvisor_is_not_trusted() {
    let machine = FakeMachine::new()
        .linux()
        .file("/proc/sys/kernel/osrelease", "4.4.0")
        .file("/proc/version", "Linux version 4.4.0 #1 SMP Sun Jan 10 15:06:54 PST 2016\n");
    assert!(matches!(machine.examine().system.pidfd, Fact::Unknown(_)));
}

#[test]
fn other_systems_run_thread_ranks() {
    let mut machine = FakeMachine::new();
    machine.probe.process.os = "macos";
    machine.probe.process.arch = "aarch64";
    let report = machine.examine();
    assert_sound(&report);
    assert_eq!(
        report.verdict.text,
        "ready: thread ranks on 2 cores; process ranks need Linux; try: hybrid-ep bench"
    );
    assert_eq!(find(&report, "process ranks").mark, Mark::Absent);
}

#[test]
fn arm_models_have_names() {
    let info = "processor\t: 0\nCPU implementer\t: 0x41\nCPU part\t: 0xd4f\n";
    let machine = FakeMachine::new().linux().file("/proc/cpuinfo", info);
    assert_eq!(machine.examine().cpu.model, known("Arm Neoverse V2"));
    let machine = machine.file("/proc/cpuinfo", info.replace("0x41", "0x99"));
    assert_eq!(machine.examine().cpu.model, known("implementer 0x99, part 0xd4f"));
}

#[test]
fn shared_memory_and_huge_pages_are_reported() {
    let machine = FakeMachine::new()
        .linux()
        .file("/proc/mounts", "tmpfs /dev/shm tmpfs rw 0 0\nshm /dev/shm tmpfs rw,nosuid,size=65536k 0 0\n")
        .files(
            "/sys/kernel/mm/transparent_hugepage",
            &[
                ("enabled", "always [madvise] never\n"),
                ("shmem_enabled", "always within_size advise [never] deny force\n"),
            ],
        )
        .files(
            "/sys/kernel/mm/hugepages/hugepages-2048kB",
            &[("nr_hugepages", "512\n"), ("free_hugepages", "500\n")],
        );
    let report = machine.examine();
    assert_sound(&report);
    assert_eq!(find(&report, "/dev/shm").found, "tmpfs, 64 MiB");
    assert_eq!(find(&report, "THP, private memory").mark, Mark::Ok);
    assert_eq!(find(&report, "THP, shared memory").mark, Mark::Absent);
    assert_eq!(find(&report, "reserved 2 MiB pages").found, "512 (500 free)");
    assert_eq!(find(&report, "reserved 1 GiB pages").found, "this machine does not support this page size");
}

#[test]
fn few_open_files_are_a_problem() {
    let machine = FakeMachine::new().linux().file("/proc/self/limits", "Max open files 64 64 files\n");
    let report = machine.examine();
    assert_sound(&report);
    assert_eq!(find(&report, "open files").mark, Mark::Problem);
    assert!(report.verdict.text.contains("; 1 problem above (!!);"));
    assert!(matches!(report.memory.memlock_bytes, Fact::Unknown(_)));
}

#[test]
fn launch_variables_are_shown_and_checked() {
    let machine = FakeMachine::new()
        .linux()
        .env("RANK", "3")
        .env("WORLD_SIZE", "8")
        .env("MASTER_ADDR", "10.0.0.1")
        .env("MASTER_PORT", "29500")
        .env("SLURM_PROCID", "");
    let report = machine.examine();
    assert_sound(&report);
    assert_eq!(find(&report, "RANK").found, "3");
    assert_eq!(find(&report, "MASTER_ADDR").found, "10.0.0.1");
    // Set but empty is not set.
    assert_eq!(report.launch.variables["SLURM_PROCID"], None);
    assert_eq!(find(&report, "Slurm").mark, Mark::Absent);
    assert_eq!(report.verdict.problems, 0);

    let broken = [
        ("RANK", "8", "rank 8 of 8"),
        ("RANK", "-1", "RANK is not a number"),
        ("WORLD_SIZE", "many", "WORLD_SIZE is not a number"),
        ("WORLD_SIZE", "", "WORLD_SIZE is not set"),
    ];
    for (name, value, found) in broken {
        let machine = FakeMachine::new().env("RANK", "3").env("WORLD_SIZE", "8");
        let report = machine.env(name, value).examine();
        let check = find(&report, "RANK/WORLD_SIZE");
        assert_eq!((check.mark, check.found.as_str()), (Mark::Problem, found));
    }
    for port in ["99999", "0", "http"] {
        let report = FakeMachine::new().env("MASTER_PORT", port).examine();
        let check = find(&report, "MASTER_PORT");
        assert_eq!(check.mark, Mark::Problem);
        assert_eq!(check.found, format!("{port} is not a port number"));
    }
}

#[test]
fn the_secret_is_reported_but_never_shown() {
    let find_secret = |machine: FakeMachine| {
        let report = machine.examine();
        assert!(!format!("{report:?}{}", render(&report)).contains("hush"), "the secret shows");
        find(&report, "job secret").clone()
    };
    let none = find_secret(FakeMachine::new().linux());
    assert_eq!(none.mark, Mark::Absent);
    assert!(none.found.contains("processes of this user on this machine"), "{}", none.found);
    let set = find_secret(FakeMachine::new().linux().env("HYBRID_EP_SECRET", "hush, this is a secret"));
    assert_eq!(
        (set.mark, set.found.as_str()),
        (Mark::Ok, "HYBRID_EP_SECRET is set: ranks must know it to join")
    );
    let file = find_secret(FakeMachine::new().linux().env("HYBRID_EP_SECRET_FILE", "/hush"));
    assert!(file.found.starts_with("HYBRID_EP_SECRET_FILE is set"), "{}", file.found);
}

#[test]
fn a_virtual_interface_is_reported_if_there_is_no_other() {
    let machine = FakeMachine::new()
        .linux()
        .files("/sys/class/net/eth0", &[("operstate", "up\n"), ("speed", "-1\n")])
        .files("/sys/class/net/ifb0", &[("operstate", "down\n")]);
    let report = machine.examine();
    assert_eq!(report.network.interfaces.known().unwrap().len(), 1);
    assert_eq!(find(&report, "eth0").found, "up, speed not reported, virtual");
}

#[test]
fn a_single_core_is_reported() {
    let mut machine = FakeMachine::new().linux();
    machine.probe.process.cores_usable = Fact::Known(1);
    let report = machine.examine();
    assert_eq!(find(&report, "cores").mark, Mark::Absent);
    assert!(report.verdict.text.contains("on 1 core;"));
    machine.probe.process.cores_usable = Fact::Unknown("no answer".to_owned());
    let report = machine.examine();
    assert_sound(&report);
    assert!(report.verdict.text.contains("an unknown number of cores"));
}

#[test]
fn this_machine_can_be_examined() {
    let report = super::examine("hybrid-ep");
    assert_sound(&report);
    assert!(report.verdict.thread_ranks);
}

fn all_files(dir: &Path) -> Vec<PathBuf> {
    let mut files = Vec::new();
    for entry in fs::read_dir(dir).unwrap() {
        let path = entry.unwrap().path();
        if path.is_dir() {
            files.extend(all_files(&path));
        } else {
            files.push(path);
        }
    }
    files
}
