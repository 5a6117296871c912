//! One case on all its ranks: as threads, or as this process among others.

use std::panic::AssertUnwindSafe;

use ep::conformance::{Failure as CaseFailure, Prepared, Problem};
use ep::rendezvous::Rendezvous;
use ep::{Config, Error};

use crate::backend::Start;
use crate::failure::Failure;
use crate::verify::cases::Numbered;

/// What was wrong, for people; `None` when nothing was.
pub(super) type Wrong = Option<String>;

/// How much a report tells: when several ranks fail, those that only lost a peer say the least.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord)]
enum Weight {
    Peer,
    Own,
}

/// Runs a case with its ranks as threads.
pub(super) fn on_threads<B: Start>(numbered: &Numbered, config: &Config) -> Result<Wrong, Failure> {
    let prepared = numbered.case.prepare()?;
    let buffers = B::threads(prepared.world(), config)?;
    let reports = std::thread::scope(|scope| {
        let prepared = &prepared;
        let ranks: Vec<_> = buffers
            .into_iter()
            .map(|mut buffer| scope.spawn(move || guarded(prepared, || prepared.check(&mut buffer))))
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
    let report = guarded(&prepared, || prepared.check(&mut buffer));
    // Before the exchange: peers that still wait for this rank in an operator then know that it failed.
    drop(buffer);
    let blob = match report {
        None => Vec::new(),
        Some((weight, message)) => [&[weight as u8], message.as_bytes()].concat(),
    };
    let reports = meet.all_gather(&blob)?.into_iter().filter_map(|blob| {
        let (&weight, message) = blob.split_first()?;
        let weight = if weight == Weight::Own as u8 { Weight::Own } else { Weight::Peer };
        Some((weight, String::from_utf8_lossy(message).into_owned()))
    });
    Ok(most_telling(reports.collect()))
}

/// Turns a failed check, or a panic in it, into a report.
fn guarded(prepared: &Prepared, check: impl FnOnce() -> Result<(), CaseFailure>) -> Option<(Weight, String)> {
    match std::panic::catch_unwind(AssertUnwindSafe(check)) {
        Ok(Ok(())) => None,
        Ok(Err(failure)) => {
            let lost_a_peer = matches!(*failure.problem, Problem::Error(Error::Peer(_)));
            Some((if lost_a_peer { Weight::Peer } else { Weight::Own }, failure.to_string()))
        }
        // The panic's message is on stderr already.
        Err(_) => Some((Weight::Own, format!("{}\n  a rank panicked", prepared.case()))),
    }
}

/// The first of the reports that tell most.
fn most_telling(reports: Vec<(Weight, String)>) -> Wrong {
    reports.into_iter().rev().max_by_key(|(weight, _)| *weight).map(|(_, message)| message)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_cause_is_reported_not_its_consequences() {
        let report = |weight, message: &str| (weight, message.to_string());
        let lost = report(Weight::Peer, "rank 1 left");
        let wrong = report(Weight::Own, "row 3 differs");
        assert_eq!(most_telling(vec![]), None);
        assert_eq!(most_telling(vec![lost.clone(), wrong.clone(), lost.clone()]), Some(wrong.1));
        assert_eq!(most_telling(vec![lost.clone(), report(Weight::Peer, "later")]), Some(lost.1));
    }

    #[test]
    fn a_panic_is_a_failure() {
        let prepared = ep::conformance::random_case(1, 1, 1).prepare().unwrap();
        let (weight, message) = guarded(&prepared, || panic!("expected in this test")).unwrap();
        assert!(weight == Weight::Own && message.ends_with("a rank panicked"), "{message}");
    }
}
