//! These tests check machines with damaged files, and the search for libraries.

use std::{
    fs,
    path::{Path, PathBuf},
};

use super::{FakeMachine, V2_MOUNT, assert_sound, find, gpu_server};
use crate::doctor::{check::Mark, fact::Fact};

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
