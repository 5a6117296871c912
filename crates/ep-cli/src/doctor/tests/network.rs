//! These tests check NICs, providers of libfabric, and interfaces.

use std::{fs, os::unix::fs::symlink};

use ep_fabric::Relation;

use super::{FakeMachine, assert_sound, find, gpu_server, h200s};
use crate::doctor::{
    check::Mark,
    cuda::{Cuda, CudaGpu},
    fabric::FabricProvider,
    fact::Fact,
    probe::InterfaceAddress,
    report::DoctorReport,
};

/// An RDMA device of a fake machine.
struct Card {
    name: &'static str,
    path: String,
    /// Link layer, state and rate of its port.
    port: [&'static str; 3],
    driver: &'static str,
}

const INFINIBAND: [&str; 3] = ["InfiniBand\n", "4: ACTIVE\n", "400 Gb/sec (4X NDR)\n"];
const ROCE: [&str; 3] = ["Ethernet\n", "4: ACTIVE\n", "100 Gb/sec (4X EDR)\n"];
const NO_LINK: [&str; 3] = ["Ethernet\n", "1: DOWN\n", "40 Gb/sec (4X QDR)\n"];

impl FakeMachine {
    /// Makes a file that leads to a directory below `/sys/devices`, as the files of sysfs do.
    fn link(self, file: &str, path: &str) -> Self {
        let machine = self.dir(path);
        let file = machine.path(file);
        fs::create_dir_all(file.parent().unwrap()).unwrap();
        symlink(machine.path(path), file).unwrap();
        machine
    }

    fn card(self, card: &Card) -> Self {
        let (dir, [layer, state, rate]) = (format!("/sys/class/infiniband/{}", card.name), card.port);
        self.files(&dir, &[("ports/1/link_layer", layer), ("ports/1/state", state), ("ports/1/rate", rate)])
            .file(&format!("{}/uevent", card.path), format!("DRIVER={}\n", card.driver))
            .link(&format!("{dir}/device"), &card.path)
    }

    fn gpu(self, path: &str, numa_node: &str) -> Self {
        let address = path.rsplit('/').next().unwrap();
        self.files(
            path,
            &[
                ("vendor", "0x10de\n"),
                ("device", "0x2330\n"),
                ("class", "0x030200\n"),
                ("numa_node", numa_node),
            ],
        )
        .link(&format!("/sys/bus/pci/devices/{address}"), path)
    }

    fn address(mut self, interface: &str, up: bool, address: &str) -> Self {
        let entry =
            InterfaceAddress { interface: interface.to_owned(), up, address: address.parse().unwrap() };
        let mut all = self.probe.process.addresses.known().cloned().unwrap_or_default();
        all.push(entry);
        self.probe.process.addresses = Fact::Known(all);
        self
    }

    fn provider(mut self, name: &str, nics: &[&str]) -> Self {
        let mut all = self.providers.known().cloned().unwrap_or_default();
        all.push(FabricProvider::new(
            name.to_owned(),
            nics.iter().map(|&nic| nic.to_owned()).collect(),
            false,
        ));
        self.providers = Fact::Known(all);
        self
    }
}

/// The path of a device at a port of a switch with two GPUs and two NICs.
fn behind_switch(switch: usize, port: usize) -> String {
    let bus = 0x18 + 0x20 * switch;
    let root = format!("/sys/devices/pci0000:{bus:02x}/0000:{bus:02x}:01.0");
    let (up, down) = (bus + 1, bus + 2);
    format!("{root}/0000:{up:02x}:00.0/0000:{down:02x}:{port:02x}.0/0000:{:02x}:00.0", bus + 3 + port)
}

/// Eight GPUs and eight InfiniBand NICs, two of each on a switch, a storage NIC, and a management NIC without a link.
fn dgx() -> FakeMachine {
    const NAMES: [&str; 8] =
        ["mlx5_0", "mlx5_3", "mlx5_4", "mlx5_5", "mlx5_6", "mlx5_9", "mlx5_10", "mlx5_11"];
    let mut machine = FakeMachine::new().linux().file("/dev/infiniband/uverbs0", "");
    for (i, name) in NAMES.into_iter().enumerate() {
        let node = if i < 4 { "0\n" } else { "1\n" };
        machine = machine.gpu(&behind_switch(i / 2, i % 2), node);
        let path = behind_switch(i / 2, 2 + i % 2);
        machine = machine.card(&Card { name, path, port: INFINIBAND, driver: "mlx5_core" });
    }
    // Both are behind the switch of the first GPUs.
    for (name, port, state) in [("mlx5_1", 4, ROCE), ("mlx5_2", 5, NO_LINK)] {
        let path = behind_switch(0, port);
        machine = machine.card(&Card { name, path, port: state, driver: "mlx5_core" });
    }
    machine
}

const DGX_LIST: &str = "mlx5_0,mlx5_3,mlx5_4,mlx5_5,mlx5_6,mlx5_9,mlx5_10,mlx5_11";

fn names_of(report: &DoctorReport) -> Vec<&str> {
    report.sections.iter().flat_map(|section| &section.checks).map(|check| check.name.as_str()).collect()
}

#[test]
fn each_gpu_has_a_nic_behind_its_switch() {
    let report = dgx().examine();
    assert_sound(&report);
    // Without a driver, the GPUs are numbered by address: `1b` is before `78`.
    assert_eq!(find(&report, "GPU 0 (0000:1b:00.0)").found, "nearest mlx5_0, mlx5_3 (same PCIe switch)");
    assert_eq!(find(&report, "GPU 7 (0000:7c:00.0)").found, "nearest mlx5_10, mlx5_11 (same PCIe switch)");
    let value = find(&report, "NICs of local ranks");
    let found = "8 NICs for 8 GPUs, chosen by default, never run by us";
    assert_eq!((value.mark, value.found.as_str(), &value.how), (Mark::Ok, found, &None));
    assert_eq!(report.network.gpu_nics.suggested.join(","), DGX_LIST);
    let left_out: Vec<_> =
        report.network.gpu_nics.left_out.iter().map(|out| (&*out.device, &*out.why)).collect();
    assert_eq!(left_out, [("mlx5_1", "not InfiniBand, unlike other devices"), ("mlx5_2", "no active port")]);
    assert_eq!(find(&report, "NICs left out").found, "not InfiniBand, unlike other devices: mlx5_1");
    let json = serde_json::to_value(&report.network).unwrap();
    assert_eq!(json["gpu_nics"]["gpus"][7]["relation"], "same_switch");
    assert_eq!(json["rdma_devices"][0]["path"], behind_switch(0, 2));
}

#[test]
fn the_order_of_the_gpus_is_the_drivers() {
    let mut machine = dgx();
    let Fact::Known(gpu) = h200s(1).gpus else { panic!("no GPU") };
    // `CUDA_VISIBLE_DEVICES=7,0`.
    let shown = ["0000:7c:00.0", "0000:1b:00.0"]
        .map(|address| CudaGpu { pci_address: Some(address.to_owned()), ..gpu[0].clone() });
    machine.cuda = Cuda { gpus: Fact::Known(shown.to_vec()), ..h200s(2) };
    let report = machine.examine();
    assert_eq!(
        find(&report, "CUDA GPU 0 (0000:7c:00.0)").found,
        "nearest mlx5_10, mlx5_11 (same PCIe switch)"
    );
    // Nothing else uses the NICs of the other GPUs.
    assert_eq!(report.network.gpu_nics.suggested, ["mlx5_10+mlx5_11", "mlx5_0+mlx5_3"]);
    // By default each GPU has its share, since other processes may use the other GPUs.
    assert_eq!(report.network.gpu_nics.default, ["mlx5_11", "mlx5_0"]);
    let value = find(&report, "NICs of local ranks");
    assert_eq!(value.found, "4 NICs for 2 GPUs, never run by us");
    assert_eq!(value.how.as_deref(), Some("export HYBRID_EP_TRANSPORT_NIC=mlx5_10+mlx5_11,mlx5_0+mlx5_3"));

    // A driver that does not report addresses: the bus decides.
    machine.cuda = h200s(8);
    assert_eq!(machine.examine().network.gpu_nics.suggested.join(","), DGX_LIST);
}

#[test]
fn a_machine_with_flat_buses_and_efa() {
    let efa = |name, slot: u32| Card {
        name,
        path: format!("/sys/devices/pci0000:{slot:02x}/0000:{slot:02x}:1b.0"),
        port: ["Unspecified\n", "4: ACTIVE\n", "100 Gb/sec (4X EDR)\n"],
        driver: "efa",
    };
    let gpu = |bus: u32, slot: u32| format!("/sys/devices/pci0000:{bus:02x}/0000:{bus:02x}:{slot:02x}.0");
    let machine = FakeMachine::new()
        .linux()
        .file("/dev/infiniband/uverbs0", "")
        .gpu(&gpu(0x10, 0x1c), "-1\n")
        .gpu(&gpu(0x10, 0x1d), "-1\n")
        .gpu(&gpu(0x20, 0x1c), "-1\n")
        .gpu(&gpu(0x20, 0x1d), "-1\n")
        .card(&efa("rdmap16s27", 0x10))
        .card(&efa("rdmap32s27", 0x20));
    let report = machine.examine();
    assert_sound(&report);
    assert_eq!(find(&report, "GPU 3 (0000:20:1d.0)").found, "nearest rdmap32s27 (same root complex)");
    // The suffix that libfabric appends is part of the names, even if libfabric lists nothing.
    let expected = ["rdmap16s27-rdm", "rdmap16s27-rdm", "rdmap32s27-rdm", "rdmap32s27-rdm"];
    assert_eq!(report.network.gpu_nics.suggested, expected);
    // Without libfabric, its line has the advice.
    assert_eq!(find(&report, "libfabric.so.1").how.as_deref(), Some("run AWS's EFA installer"));
    assert!(!names_of(&report).contains(&"provider efa"));
    // The name that the provider lists takes precedence.
    let machine = machine.provider("efa", &["rdmap16s27-x", "rdmap32s27-x"]);
    assert_eq!(machine.examine().network.gpu_nics.suggested[2], "rdmap32s27-x");
}

#[test]
fn gpus_and_nics_without_a_common_place() {
    let card = |name, domain: u32| Card {
        name,
        path: format!("/sys/devices/vmbus/pci{domain:04x}:00/{domain:04x}:00:00.0"),
        port: INFINIBAND,
        driver: "mlx5_core",
    };
    let machine = FakeMachine::new()
        .linux()
        .gpu("/sys/devices/vmbus/pci0001:00/0001:00:00.0", "-1\n")
        .gpu("/sys/devices/vmbus/pci0002:00/0002:00:00.0", "-1\n")
        .card(&card("mlx5_0", 3))
        .card(&card("mlx5_1", 4));
    let report = machine.examine();
    assert_sound(&report);
    let gpu = find(&report, "GPU 0 (0001:00:00.0)");
    assert_eq!(gpu.mark, Mark::Absent);
    assert!(gpu.found.starts_with("nearest NIC unknown"), "{}", gpu.found);
    assert_eq!(report.network.gpu_nics.suggested, ["mlx5_0", "mlx5_1"]);

    // If the NUMA nodes are known, they decide.
    for (domain, node) in [(1, "1\n"), (2, "0\n"), (3, "0\n"), (4, "1\n")] {
        let file = format!("/sys/devices/vmbus/pci{domain:04x}:00/{domain:04x}:00:00.0/numa_node");
        fs::write(machine.path(&file), node).unwrap();
    }
    let report = machine.examine();
    assert_eq!(report.network.gpu_nics.gpus[0].relation, Relation::SameNumaNode);
    assert_eq!(report.network.gpu_nics.suggested, ["mlx5_1", "mlx5_0"]);
}

#[test]
fn without_gpus_or_active_nics_no_list_is_suggested() {
    let card = |port| Card { name: "mlx5_0", path: behind_switch(0, 2), port, driver: "mlx5_core" };
    for machine in [
        FakeMachine::new().linux().card(&card(INFINIBAND)),
        FakeMachine::new().linux().gpu(&behind_switch(0, 0), "0\n").card(&card(NO_LINK)),
        FakeMachine::new().linux().gpu(&behind_switch(0, 0), "0\n"),
    ] {
        let report = machine.examine();
        assert_sound(&report);
        assert_eq!(report.network.gpu_nics, Default::default());
        assert!(!names_of(&report).contains(&"NICs of local ranks"));
    }
}

#[test]
fn providers_are_listed_with_their_nics() {
    let machine = dgx().provider("verbs;ofi_rxm", &["mlx5_0", "mlx5_1"]).provider("tcp", &["eth0", "lo"]);
    let report = machine.examine();
    assert_sound(&report);
    assert_eq!(find(&report, "provider verbs;ofi_rxm").found, "never run by us; NICs mlx5_0, mlx5_1");
    assert_eq!(find(&report, "provider tcp").found, "NICs eth0, lo");
    let json = serde_json::to_value(&report.network.libfabric_providers).unwrap();
    assert_eq!(json[0]["state"], "never_run");
    assert_eq!(json[1]["nics"], serde_json::json!(["eth0", "lo"]));
}

#[test]
fn a_nic_without_its_provider_is_reported_with_advice() {
    let machine = dgx().provider("tcp", &["eth0"]);
    let report = machine.examine();
    assert_sound(&report);
    let verbs = find(&report, "provider verbs");
    assert_eq!(verbs.mark, Mark::Absent);
    assert!(verbs.found.starts_with("not offered by libfabric, though"), "{}", verbs.found);
    assert!(verbs.found.contains("mlx5_11") && !verbs.found.contains("mlx5_2"), "{}", verbs.found);
    assert!(verbs.how.as_ref().unwrap().contains("apt-get install ibverbs-providers"), "{verbs:?}");
    assert!(!names_of(&report).contains(&"provider efa"));

    // libfabric lists only some of the NICs.
    let machine =
        machine.provider("verbs;ofi_rxm", &["mlx5_0", "mlx5_1", "mlx5_3", "mlx5_4", "mlx5_5", "mlx5_6"]);
    let report = machine.examine();
    assert_eq!(find(&report, "provider verbs").found, "does not list the NICs mlx5_9, mlx5_10, mlx5_11");
    // Without device files, their line has the advice.
    fs::remove_file(machine.path("/dev/infiniband/uverbs0")).unwrap();
    let report = machine.examine();
    assert_eq!(find(&report, "/dev/infiniband").mark, Mark::Absent);
    assert!(!names_of(&report).contains(&"provider verbs"));

    let efa = Card { name: "rdmap0s6", path: behind_switch(0, 0), port: ROCE, driver: "efa" };
    let machine = FakeMachine::new()
        .linux()
        .file("/dev/infiniband/uverbs0", "")
        .file("/usr/lib/libfabric.so.1", "")
        .card(&efa)
        .provider("tcp", &["eth0"]);
    let advice = |machine: &FakeMachine| find(&machine.examine(), "provider efa").how.clone().unwrap();
    assert!(advice(&machine).starts_with("run AWS's EFA installer"), "{}", advice(&machine));
    let machine = machine.file("/opt/amazon/efa/lib/libfabric.so.1", "");
    let export = "export HYBRID_EP_LIBFABRIC=/opt/amazon/efa/lib/libfabric.so.1;";
    assert!(advice(&machine).starts_with(export), "{}", advice(&machine));
}

#[test]
fn interfaces_are_reported_with_their_addresses() {
    let machine = gpu_server()
        .files("/sys/class/net/ib0", &[("operstate", "down\n"), ("device/vendor", "0x15b3\n")])
        .files("/sys/class/net/ib1", &[("operstate", "up\n"), ("device/vendor", "0x15b3\n")])
        .files("/sys/class/net/veth7", &[("operstate", "up\n")])
        .address("lo", true, "127.0.0.1")
        .address("eno1", true, "fe80::1")
        .address("eno1", true, "2001:db8::7")
        .address("eno1", true, "198.51.100.7")
        .address("ib1", true, "fe80::2")
        .address("docker0", true, "172.17.0.1")
        .address("veth7", true, "fe80::3");
    let report = machine.examine();
    assert_sound(&report);
    // The same as `HYBRID_EP_TRANSPORT_ADDRESS` chooses: IPv4 first, and no link-local address.
    assert_eq!(find(&report, "eno1").found, "up, 25 Gbit/s, 198.51.100.7, 2001:db8::7");
    assert_eq!(find(&report, "ib0").found, "down, speed not reported, no address");
    assert_eq!(find(&report, "ib1").found, "up, speed not reported, only a link-local address");
    assert_eq!(find(&report, "docker0").found, "up, 10 Gbit/s, virtual, 172.17.0.1");
    let names = names_of(&report);
    assert!(!names.contains(&"veth7") && !names.contains(&"lo"), "{names:?}");
    let json = serde_json::to_value(&report.network.interfaces).unwrap();
    assert_eq!(json[0]["addresses"], serde_json::json!(["198.51.100.7", "fe80::1", "2001:db8::7"]));
}

#[test]
fn interfaces_are_reported_where_their_files_are_hidden() {
    let machine = FakeMachine::new()
        .linux()
        .address("lo", true, "127.0.0.1")
        .address("eth0", true, "198.51.100.7")
        .address("eth0", true, "2001:db8::7")
        .address("eth1", false, "198.51.100.8");
    let report = machine.examine();
    assert_sound(&report);
    assert_eq!(report.network.interfaces.known().unwrap().len(), 2);
    assert_eq!(find(&report, "eth0").found, "up, speed not reported, 198.51.100.7, 2001:db8::7");
    assert_eq!(find(&report, "eth1").mark, Mark::Absent);
}
