//! On which CPUs a thread runs.

/// Restricts the calling thread to those of `cpus` on which it may already run. Returns `false`, and restricts nothing, if no
/// such CPU exists or if the operating system does not support or refuses the restriction.
///
/// A thread that calls an engine accesses the registers of the network card, and memory that the card writes. Both accesses
/// take longer from a different NUMA node.
pub fn stay_near(cpus: &[usize]) -> bool {
    restrict(cpus)
}

#[cfg(target_os = "linux")]
fn restrict(cpus: &[usize]) -> bool {
    use rustix::thread::{CpuSet, sched_getaffinity, sched_setaffinity};

    let Ok(allowed) = sched_getaffinity(None) else { return false };
    let mut chosen = CpuSet::new();
    for &cpu in cpus {
        if cpu < CpuSet::MAX_CPU && allowed.is_set(cpu) {
            chosen.set(cpu);
        }
    }
    chosen.count() > 0 && sched_setaffinity(None, &chosen).is_ok()
}

#[cfg(not(target_os = "linux"))]
fn restrict(_cpus: &[usize]) -> bool {
    false
}

#[cfg(all(test, target_os = "linux"))]
mod tests {
    use std::thread;

    use rustix::thread::{CpuSet, sched_getaffinity};

    use super::*;

    fn own_cpus() -> Vec<usize> {
        let set = sched_getaffinity(None).expect("the kernel tells");
        (0..CpuSet::MAX_CPU).filter(|&cpu| set.is_set(cpu)).collect()
    }

    #[test]
    #[cfg_attr(miri, ignore = "asks the operating system")]
    fn a_thread_stays_on_the_cpus_that_it_may_use() {
        let all = own_cpus();
        let last = *all.last().unwrap();
        // A CPU that this machine lacks, a number beyond every CPU set, and a CPU that the thread may use.
        let near = [CpuSet::MAX_CPU - 1, usize::MAX, last];
        let (stays, found) = thread::spawn(move || (stay_near(&near), own_cpus())).join().unwrap();
        assert_eq!((stays, found), (true, vec![last]));
        // Other threads keep their CPUs.
        assert_eq!(own_cpus(), all);
    }

    #[test]
    #[cfg_attr(miri, ignore = "asks the operating system")]
    fn without_a_cpu_that_it_may_use_a_thread_keeps_all() {
        let all = own_cpus();
        for near in [&[][..], &[CpuSet::MAX_CPU - 1]] {
            assert!(!stay_near(near));
            assert_eq!(own_cpus(), all);
        }
    }
}
