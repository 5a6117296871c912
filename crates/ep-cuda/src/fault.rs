//! What a kernel has reported, as an error that names who is at fault.

use std::time::Duration;

use ep::error::RoutingProblem;
use ep::{CallerError, Error, Operator, PeerError, PeerFault, Rank};

use crate::driver::Mapped;
use crate::params::{FAULT_WORDS, NONE};

/// The first fault of a rank, if there is one. The layout is that of `Fault` in `device/common/params.cuh`.
pub(crate) fn read(record: &Mapped, rank: Rank, experts: usize) -> Option<Error> {
    let words = std::array::from_fn(|at| record.read(at));
    from_words(&words, rank, experts)
}

fn from_words(words: &[u32; FAULT_WORDS], rank: Rank, experts: usize) -> Option<Error> {
    let &[kind, peer, waiting_for, step, expected, seen, ..] = words;
    if kind == 0 {
        return None;
    }
    let long = |at: usize| u64::from(words[at]) | u64::from(words[at + 1]) << 32;
    let (index, waited) = (long(6), Duration::from_nanos(long(8)));
    let &[.., operation, awaited, cause, _] = words;
    let operator = operator(operation);
    let peer_error = |fault| {
        let of = if awaited == peer { "its".into() } else { format!("rank {awaited}'s") };
        let what = match waiting_for {
            _ if awaited == NONE => "nothing: it had learnt of that".into(),
            0 => format!("{of} greeting (expected step {expected}, seen {seen})"),
            1 => format!("{of} counts"),
            2 => format!("{of} chunk {index} (expected step {expected}, seen {seen})"),
            _ => format!("the blocks of its own kernel ({seen} of {expected} arrived)"),
        };
        Error::Peer(PeerError {
            peer: Rank(peer),
            fault,
            operator,
            step: step.into(),
            rank,
            waited_for: what,
            waited,
        })
    };
    let routing = |problem| CallerError::Routing { rank, row: index as usize, problem }.into();
    Some(match kind {
        2 => peer_error(became(cause)),
        3 => CallerError::Collective {
            operator,
            field: "the call (operator, handle, hidden, types, outputs)",
            rank,
            mine: format!("{expected:#010x}"),
            peer: Rank(peer),
            theirs: format!("{seen:#010x}"),
        }
        .into(),
        4 => routing(RoutingProblem::IndexOutOfRange { index: (seen as i32).into(), experts }),
        5 => routing(RoutingProblem::DuplicateExpert(seen)),
        6 => routing(RoutingProblem::NanWeight(seen)),
        9 => CallerError::Shape {
            what: "routing",
            expected: expected as usize,
            found: index as usize,
            unit: "choices at most",
        }
        .into(),
        7 => CallerError::TooManyRows { rank: Rank(peer), rows: index }.into(),
        _ => peer_error(became(kind)),
    })
}

/// What became of a rank, by the kind of the fault of who waited for it.
fn became(kind: u32) -> PeerFault {
    match kind {
        1 => PeerFault::Stalled,
        8 => PeerFault::Left,
        10 => PeerFault::Died,
        _ => PeerFault::Failed,
    }
}

/// What the host has called, by its number in the kernels' parameters.
fn operator(operation: u32) -> Operator {
    [Operator::Preprocess, Operator::Dispatch, Operator::Combine]
        .into_iter()
        .find(|&operator| operator as u32 == operation)
        .unwrap_or(Operator::Join)
}

#[cfg(test)]
mod tests {
    use super::*;

    const COMBINE: u32 = Operator::Combine as u32;

    fn said(words: [u32; FAULT_WORDS]) -> String {
        from_words(&words, Rank(0), 8).unwrap().to_string()
    }

    #[test]
    fn who_is_to_blame_and_who_was_awaited_are_two_things() {
        let waited = 1_500_000_000;
        let stalled = [1, 2, 2, 7, 7, 6, 17, 0, waited, 0, COMBINE, 2, 0, 0];
        assert_eq!(
            said(stalled),
            "rank 2 stalled (combine #7): rank 0 waited 1.500 s for its chunk 17 (expected step 7, seen 6)"
        );
        // Rank 2 is gone, so rank 1 gave up, whose chunk this rank needs.
        let gone = [2, 2, 2, 7, 7, 6, 17, 0, waited, 0, COMBINE, 1, 10, 0];
        assert_eq!(
            said(gone),
            "rank 2 died (combine #7): rank 0 waited 1.500 s for rank 1's chunk 17 (expected step 7, seen 6)"
        );
        let told = [2, 3, 0, 8, 0, 0, 0, 0, 0, 0, Operator::Dispatch as u32, NONE, 2, 0];
        assert_eq!(
            said(told),
            "rank 3 failed (dispatch #8): rank 0 waited 0.000 s for nothing: it had learnt of that"
        );
        assert_eq!(from_words(&[0; FAULT_WORDS], Rank(0), 8), None);
    }

    #[test]
    fn every_operator_is_found_by_its_number() {
        for known in [Operator::Preprocess, Operator::Dispatch, Operator::Combine] {
            assert_eq!(operator(known as u32), known);
        }
    }
}
