//! These tests check limits of cores, memory and open files.

use super::{FakeMachine, V2_MOUNT, assert_sound, find};
use crate::doctor::{check::Mark, fact::Fact};

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
