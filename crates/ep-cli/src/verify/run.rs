//! One case on all its ranks: as threads, or as this process among others. And what ranks say of a check.

use std::panic::AssertUnwindSafe;

use ep::conformance::{Case, Failure as CaseFailure, Problem};
use ep::rendezvous::Rendezvous;
use ep::{Config, Error};

use crate::backend::Start;
use crate::failure::Failure;
use crate::verify::cases::Numbered;

/// What was wrong, for people; `None` when nothing was.
pub(super) type Wrong = Option<String>;

/// What a rank says of a check that it did not pass.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(super) struct Report {
    pub(super) weight: Weight,
    /// Whether the backend cannot go on.
    pub(super) ended: bool,
    message: String,
}

/// How much a report tells: when several ranks fail, those that only lost a peer say the least.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord)]
pub(super) enum Weight {
    Peer,
    Own,
}

impl Report {
    pub(super) fn message(&self) -> &str {
        &self.message
    }

    #[cfg(test)]
    pub(super) fn of_test(own: bool, message: &str) -> Self {
        let weight = if own { Weight::Own } else { Weight::Peer };
        Self { weight, ended: false, message: message.into() }
    }

    /// As ranks exchange it; empty for a check that was passed.
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
pub(super) fn on_threads<B: Start>(numbered: &Numbered, config: &Config) -> Result<Wrong, Failure> {
    let prepared = numbered.case.prepare()?;
    let buffers = B::threads(prepared.world(), config)?;
    let reports = std::thread::scope(|scope| {
        let prepared = &prepared;
        let ranks: Vec<_> = buffers
            .into_iter()
            .map(|mut buffer| scope.spawn(move || guarded(prepared.case(), || prepared.check(&mut buffer))))
            .collect();
        // The panic of a check is caught inside, so a thread always returns.
        ranks.into_iter().filter_map(|rank| rank.join().ok().flatten()).collect::<Vec<_>>()
    });
    Ok(most_telling(reports))
}

/// Runs a case with this process as one rank; every rank learns the outcome. Collective.
pub(super) fn as_one_rank<B: Start>(
    numbered: &Numbered,
    meet: &mut dyn Rendezvous,
    config: &Config,
) -> Result<Wrong, Failure> {
    let prepared = numbered.case.prepare()?;
    let mut buffer = B::join(prepared.world(), meet, config)?;
    let report = guarded(prepared.case(), || prepared.check(&mut buffer));
    // Before the exchange: peers that still wait for this rank in an operator then know that it failed.
    drop(buffer);
    let reports = meet.all_gather(&Report::to_bytes(report.as_ref()))?;
    Ok(most_telling(reports.iter().filter_map(|bytes| Report::from_bytes(bytes)).collect()))
}

/// Turns a failed check, or a panic in it, into a report.
pub(super) fn guarded(case: &Case, check: impl FnOnce() -> Result<(), CaseFailure>) -> Option<Report> {
    match std::panic::catch_unwind(AssertUnwindSafe(check)) {
        Ok(Ok(())) => None,
        Ok(Err(failure)) => {
            let lost_a_peer = matches!(*failure.problem, Problem::Error(Error::Peer(_)));
            let weight = if lost_a_peer { Weight::Peer } else { Weight::Own };
            Some(Report { weight, ended: failure.stopped, message: failure.to_string() })
        }
        // The panic's message is on stderr already.
        Err(_) => {
            let message = format!("{case}\n  a rank panicked");
            Some(Report { weight: Weight::Own, ended: true, message })
        }
    }
}

/// The first of the reports that tell most, and below it what other ranks say: what came first need not tell most.
pub(super) fn most_telling(reports: Vec<Report>) -> Wrong {
    let telling = reports.iter().rev().max_by_key(|report| report.weight)?;
    let mut lines = vec![telling.message.as_str()];
    for other in &reports {
        // Behind the case, which is the same for all.
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

    #[test]
    fn the_cause_is_reported_before_its_consequences() {
        let report = |weight, message: &str| Report { weight, ended: false, message: message.into() };
        let lost = report(Weight::Peer, "case 7\n  rank 1 left");
        let wrong = report(Weight::Own, "case 7\n  row 3 differs");
        assert_eq!(most_telling(vec![]), None);
        let all = "case 7\n  row 3 differs\n  rank 1 left";
        assert_eq!(most_telling(vec![lost.clone(), wrong, lost.clone()]).as_deref(), Some(all));
        let both = "case 7\n  rank 1 left\n  later";
        assert_eq!(most_telling(vec![lost, report(Weight::Peer, "case 7\n  later")]).as_deref(), Some(both));
    }

    #[test]
    fn a_panic_is_a_failure() {
        let prepared = ep::conformance::random_case(1, 1, 1).prepare().unwrap();
        let report = guarded(prepared.case(), || panic!("expected in this test")).unwrap();
        assert!(report.weight == Weight::Own && report.ended, "{report:?}");
        assert!(report.message.ends_with("a rank panicked"), "{report:?}");
    }

    #[test]
    fn reports_survive_the_exchange() {
        let report = Report { weight: Weight::Own, ended: true, message: "row 3 differs".into() };
        assert_eq!(Report::from_bytes(&Report::to_bytes(Some(&report))), Some(report));
        assert_eq!(Report::from_bytes(&Report::to_bytes(None)), None);
    }
}
