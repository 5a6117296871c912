//! These tests check GPUs, RDMA devices and interfaces that the report finds by their files.

use std::fs;

use super::{FakeMachine, assert_sound, find, gpu_server, known};
use crate::doctor::{check::Mark, fact::Fact};

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
    // Without device files, no program can open the devices.
    assert_eq!(find(&report, "/dev/infiniband").mark, Mark::Absent);
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
