//! Runs one case, with ranks as threads or with this process as one rank, and merges the ranks' reports of it.

use std::panic::AssertUnwindSafe;

use ep::conformance::{Case, Failure as CaseFailure, Problem};
use ep::join::Rendezvous;
use ep::{Config, EnvironmentError, Error, WeightRows};

use crate::common::failure::Failure;
use crate::common::threads;
use crate::verify::cases::NumberedCase;

/// Description of what was wrong; `None` if the case passed.
pub(super) type Wrong = Option<String>;

/// The report of one rank on a check that failed.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(super) struct CheckReport {
    pub(super) weight: Weight,
    /// Whether the backend cannot be used any more.
    pub(super) ended: bool,
    message: String,
}

/// How much a report explains: a rank's own failure explains more than the loss of a peer.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord)]
pub(super) enum Weight {
    Peer,
    Own,
}

impl CheckReport {
    pub(super) fn message(&self) -> &str {
        &self.message
    }

    #[cfg(test)]
    pub(super) fn of_test(own: bool, message: &str) -> Self {
        let weight = if own { Weight::Own } else { Weight::Peer };
        Self { weight, ended: false, message: message.into() }
    }

    /// Serialises a report for the exchange between ranks; empty for a check that passed.
    pub(super) fn to_bytes(report: Option<&Self>) -> Vec<u8> {
        report.map_or_else(Vec::new, |Self { weight, ended, message }| {
            [&[*weight as u8, u8::from(*ended)], message.as_bytes()].concat()
        })
    }

    pub(super) fn from_bytes(bytes: &[u8]) -> Option<Self> {
        let (&[weight, ended], message) = bytes.split_first_chunk()?;
        let weight = if weight == Weight::Own as u8 { Weight::Own } else { Weight::Peer };
        let message = String::from_utf8_lossy(message).into_owned();
        Some(Self { weight, ended: ended != 0, message })
    }
}

/// Runs a case with its ranks as threads.
pub(super) fn on_threads<B: WeightRows + Send>(
    numbered: &NumberedCase,
    config: &Config,
) -> Result<Wrong, Failure> {
    let prepared = numbered.case.prepare()?;
    let buffers = B::threads(prepared.world(), config)?;
    let reports = std::thread::scope(|scope| {
        let prepared = &prepared;
        let start = |mut buffer: B| {
            let what = format!("the thread of rank {}", buffer.rank());
            let work = move || guarded(prepared.case(), || prepared.check(&mut buffer));
            threads::spawn_scoped(scope, &what, work)
        };
        // An error drops the other buffers, so ranks that run already see that their peers left, and end.
        let ranks = buffers.into_iter().map(start).collect::<Result<Vec<_>, _>>()?;
        // `guarded` catches panics, so every thread returns.
        Ok::<_, EnvironmentError>(ranks.into_iter().filter_map(|rank| rank.join().ok().flatten()).collect())
    });
    Ok(merge(reports?))
}

/// Runs a case with this process as one rank. Every rank returns the same outcome. Collective.
pub(super) fn as_one_rank<B: WeightRows + Send>(
    numbered: &NumberedCase,
    meet: &mut dyn Rendezvous,
    config: &Config,
) -> Result<Wrong, Failure> {
    let prepared = numbered.case.prepare()?;
    let mut buffer = B::join(prepared.world(), meet, config)?;
    let report = guarded(prepared.case(), || prepared.check(&mut buffer));
    // Dropped before the exchange: peers that still wait in an operator for a failed rank then see that it left.
    drop(buffer);
    let reports = meet.all_gather(&CheckReport::to_bytes(report.as_ref()))?;
    Ok(merge(reports.iter().filter_map(|bytes| CheckReport::from_bytes(bytes)).collect()))
}

/// Turns a failed check, or a panic in it, into a report.
pub(super) fn guarded(case: &Case, check: impl FnOnce() -> Result<(), CaseFailure>) -> Option<CheckReport> {
    match std::panic::catch_unwind(AssertUnwindSafe(check)) {
        Ok(Ok(())) => None,
        Ok(Err(failure)) => {
            let lost_a_peer = matches!(*failure.problem, Problem::Error(Error::Peer(_)));
            let weight = if lost_a_peer { Weight::Peer } else { Weight::Own };
            Some(CheckReport { weight, ended: failure.stopped, message: failure.to_string() })
        }
        // The panic handler has printed the message to stderr.
        Err(_) => {
            let message = format!("{case}\n  a rank panicked");
            Some(CheckReport { weight: Weight::Own, ended: true, message })
        }
    }
}

/// Merges the reports: first the report with the largest weight, then the lines of other reports that add something.
pub(super) fn merge(reports: Vec<CheckReport>) -> Wrong {
    let telling = reports.iter().rev().max_by_key(|report| report.weight)?;
    let mut lines = vec![telling.message.as_str()];
    for other in &reports {
        // The first line describes the case, which is the same for all reports.
        for line in other.message.lines().skip(1) {
            if !lines.iter().any(|said| said.contains(line)) {
                lines.push(line);
            }
        }
    }
    Some(lines.join("\n"))
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::verify::cases::Origin;

    #[test]
    fn the_cause_is_reported_before_its_consequences() {
        let report = |weight, message: &str| CheckReport { weight, ended: false, message: message.into() };
        let lost = report(Weight::Peer, "case 7\n  rank 1 left");
        let wrong = report(Weight::Own, "case 7\n  row 3 differs");
        assert_eq!(merge(vec![]), None);
        let all = "case 7\n  row 3 differs\n  rank 1 left";
        assert_eq!(merge(vec![lost.clone(), wrong, lost.clone()]).as_deref(), Some(all));
        let both = "case 7\n  rank 1 left\n  later";
        assert_eq!(merge(vec![lost, report(Weight::Peer, "case 7\n  later")]).as_deref(), Some(both));
    }

    #[test]
    fn a_panic_is_a_failure() {
        let prepared = ep::conformance::random_case(1, 1, 1).prepare().unwrap();
        let report = guarded(prepared.case(), || panic!("expected in this test")).unwrap();
        assert!(report.weight == Weight::Own && report.ended, "{report:?}");
        assert!(report.message.ends_with("a rank panicked"), "{report:?}");
    }

    #[test]
    fn a_rank_without_a_thread_is_an_error_that_ends_the_others() {
        let three = |seed: &u64| {
            let case = ep::conformance::random_case(*seed, 3, 1);
            case.prepare().unwrap().world().ranks() == 3
        };
        let number = (0..).find(three).unwrap();
        let case = ep::conformance::random_case(number, 3, 1);
        let numbered = NumberedCase { origin: Origin::Random, number, case };
        for allowed in 0..3 {
            let run = || on_threads::<ep_host::HostBuffer>(&numbered, &Config::default());
            let error = threads::quota::of(allowed, run).unwrap_err().to_string();
            assert!(error.contains(&format!("starting the thread of rank {allowed}")), "{error}");
        }
    }

    #[test]
    fn reports_survive_the_exchange() {
        let report = CheckReport { weight: Weight::Own, ended: true, message: "row 3 differs".into() };
        assert_eq!(CheckReport::from_bytes(&CheckReport::to_bytes(Some(&report))), Some(report));
        assert_eq!(CheckReport::from_bytes(&CheckReport::to_bytes(None)), None);
    }
}
