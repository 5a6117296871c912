//! These tests check the verdict on a machine, and what the report says about its kernel and CPU.

use super::{FakeMachine, assert_sound, find, known};
use crate::doctor::{check::Mark, examine, fact::Fact, memory::Limit};

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
    let report = examine("hybrid-ep");
    assert_sound(&report);
    assert!(report.verdict.thread_ranks);
}
