//! Measures the core time that other programs use during a run, because it makes the measured times longer.

use std::collections::BTreeMap;

use serde::{Deserialize, Serialize};

use crate::common::machine;

/// Minimum number of clock ticks per core that gives a meaningful share.
const LEAST_TICKS: u64 = 30;
/// Smallest share of the cores' time that the report mentions.
const WORTH_SAYING: f64 = 0.05;

/// CPU time that a process has used since its start.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize)]
pub(crate) struct ProcessTime {
    pub(crate) pid: u32,
    pub(crate) ticks: u64,
}

impl ProcessTime {
    /// The time of this process; `None` where the system does not report it.
    pub(crate) fn here() -> Option<Self> {
        let stat = std::fs::read_to_string("/proc/self/stat").ok()?;
        Some(Self { pid: std::process::id(), ticks: process_ticks(&stat)? })
    }
}

/// User plus system time from a line of `/proc/PID/stat`. The process name in it may contain any character, so parsing
/// starts after the last parenthesis.
fn process_ticks(stat: &str) -> Option<u64> {
    let mut fields = stat[stat.rfind(')')? + 1..].split_whitespace().skip(11);
    let mut next = || fields.next()?.parse::<u64>().ok();
    Some(next()? + next()?)
}

/// Time of the cores that this process may use, since the system started.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq)]
struct CoreTime {
    cores: u64,
    all: u64,
    idle: u64,
    stolen: u64,
}

impl CoreTime {
    fn here() -> Option<Self> {
        let status = std::fs::read_to_string("/proc/self/status").ok()?;
        let allowed = machine::field(&status, "Cpus_allowed_list")?;
        Self::of(&std::fs::read_to_string("/proc/stat").ok()?, &allowed_cores(allowed)?)
    }

    /// Sums the lines of these cores in `/proc/stat`.
    fn of(stat: &str, allowed: &[(u32, u32)]) -> Option<Self> {
        let mut sum = Self::default();
        for line in stat.lines() {
            let Some((name, ticks)) = line.split_once(' ') else { continue };
            let Some(core) = name.strip_prefix("cpu").and_then(|number| number.parse::<u32>().ok()) else {
                continue;
            };
            if allowed.iter().any(|&(first, last)| (first..=last).contains(&core)) {
                // user, nice, system, idle, iowait, irq, softirq, steal; guests are part of user.
                let ticks: Vec<u64> =
                    ticks.split_whitespace().take(8).map(str::parse).collect::<Result<_, _>>().ok()?;
                sum.cores += 1;
                sum.all += ticks.iter().sum::<u64>();
                sum.idle += ticks.get(3)? + ticks.get(4)?;
                sum.stolen += ticks.get(7)?;
            }
        }
        (sum.cores > 0).then_some(sum)
    }
}

/// Parses a list such as `0-3,8` into ranges.
fn allowed_cores(list: &str) -> Option<Vec<(u32, u32)>> {
    let range = |range: &str| {
        let (first, last) = range.split_once('-').unwrap_or((range, range));
        Some((first.parse().ok()?, last.parse().ok()?))
    };
    list.trim().split(',').map(range).collect()
}

/// Clock readings at the start of an interval.
#[derive(Debug, Clone, Copy)]
pub(crate) struct Watch {
    cores: Option<CoreTime>,
    own: Option<ProcessTime>,
}

/// Shares of the cores' time that did not go to this job.
#[derive(Debug, Clone, Copy, PartialEq, Serialize)]
pub(crate) struct Busy {
    /// Share that programs outside this job used.
    pub(crate) others: f64,
    /// Share that the hypervisor gave to other virtual machines.
    pub(crate) stolen: f64,
}

impl Watch {
    pub(crate) fn start() -> Self {
        Self { cores: CoreTime::here(), own: ProcessTime::here() }
    }

    /// The shares since the start. `ranks`: the known processes of this job. `None` where the system does not report
    /// the times, or if the interval was too short.
    pub(crate) fn stop(self, ranks: impl IntoIterator<Item = ProcessTime>) -> Option<Busy> {
        share(self.cores?, CoreTime::here()?, self.own?, ProcessTime::here()?, ranks)
    }
}

fn share(
    before: CoreTime,
    after: CoreTime,
    own_before: ProcessTime,
    own_after: ProcessTime,
    ranks: impl IntoIterator<Item = ProcessTime>,
) -> Option<Busy> {
    let all = after.all.checked_sub(before.all).filter(|&all| all >= LEAST_TICKS * before.cores)?;
    let idle = after.idle.saturating_sub(before.idle);
    let stolen = after.stolen.saturating_sub(before.stolen);
    let mut own: BTreeMap<u32, u64> = BTreeMap::new();
    for ProcessTime { pid, ticks } in ranks {
        let longest = own.entry(pid).or_default();
        *longest = ticks.max(*longest);
    }
    own.insert(own_after.pid, own_after.ticks.saturating_sub(own_before.ticks));
    // Ranks report these ticks, so the sum may overflow.
    let own = own.into_values().fold(0, u64::saturating_add);
    let others = all.saturating_sub(idle).saturating_sub(stolen).saturating_sub(own);
    let part = |ticks: u64| ticks as f64 / all as f64;
    Some(Busy { others: part(others), stolen: part(stolen) })
}

impl Busy {
    /// A note for the report if the shares are large enough to affect the results.
    pub(crate) fn note(self) -> Option<String> {
        let Self { others, stolen } = self;
        (others + stolen >= WORTH_SAYING).then(|| {
            let (others, stolen) = (100.0 * others, 100.0 * stolen);
            format!(
                "the machine was busy: of the cores' time during the run, other programs took {others:.0} % and the \
                 hypervisor {stolen:.0} %; times are shorter and the ceiling is higher on an idle machine"
            )
        })
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    const STAT: &str = "cpu  9 9 9 9 9 9 9 9 0 0\n\
                        cpu0 100 10 20 300 5 1 2 4 7 0\n\
                        cpu1 200 0 0 100 0 0 0 0 0 0\n\
                        cpu9 1 1 1 1 1 1 1 1 0 0\n\
                        intr 5\n";

    #[test]
    fn only_the_cores_that_this_process_may_use_count() {
        let cores = allowed_cores("0-1,7\n").unwrap();
        assert_eq!(cores, [(0, 1), (7, 7)]);
        let time = CoreTime::of(STAT, &cores).unwrap();
        assert_eq!(time, CoreTime { cores: 2, all: 742, idle: 405, stolen: 4 });
        assert_eq!(CoreTime::of(STAT, &[(3, 4)]), None);
        assert_eq!(CoreTime::of("cpu0 1 2 x", &cores), None);
    }

    #[test]
    fn a_process_name_may_contain_parentheses_and_spaces() {
        let stat = "7 (a) b 1 2) R 1 7 7 0 -1 4194304 90 0 0 0 30 12 0 0 20 0 1 0";
        assert_eq!(process_ticks(stat), Some(42));
    }

    #[test]
    fn the_remaining_time_counts_as_other_programs() {
        let own = |ticks| ProcessTime { pid: 1, ticks };
        let rank = |pid, ticks| ProcessTime { pid, ticks };
        let before = CoreTime { cores: 2, all: 1000, idle: 500, stolen: 10 };
        let after = CoreTime { cores: 2, all: 1200, idle: 560, stolen: 20 };
        // 200 ticks: 60 idle, 10 stolen, 130 of programs. This process 50, another rank 30 (listed twice); 50 remain.
        let ranks = [rank(1, 999), rank(2, 20), rank(2, 30)];
        let busy = share(before, after, own(100), own(150), ranks).unwrap();
        assert_eq!(busy, Busy { others: 0.25, stolen: 0.05 });
        assert!(busy.note().unwrap().contains("other programs took 25 % and the hypervisor 5 %"));
        let endless = share(before, after, own(100), own(150), [rank(2, u64::MAX), rank(3, 9)]);
        assert_eq!(endless.unwrap().others, 0.0);
        assert_eq!(Busy { others: 0.04, stolen: 0.0 }.note(), None);
        let soon = CoreTime { all: 1010, ..after };
        assert_eq!(share(before, soon, own(0), own(0), []), None);
    }

    #[test]
    #[cfg(target_os = "linux")]
    fn this_machine_reports_the_times() {
        assert!(ProcessTime::here().is_some());
        // The interval is too short for a result, but must not fail.
        let _ = Watch::start().stop([]);
    }
}
