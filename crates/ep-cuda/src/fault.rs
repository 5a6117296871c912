//! What a kernel has reported, as an error that names who is at fault.

use std::time::Duration;

use ep::error::RoutingProblem;
use ep::{CallerError, Error, Operator, PeerError, PeerFault, Rank};

use crate::driver::Mapped;

/// The operators called last, to name the one that failed.
#[derive(Debug, Default)]
pub(crate) struct History(std::collections::VecDeque<(u32, Operator)>);

impl History {
    const KEPT: usize = 64;

    pub(crate) fn push(&mut self, step: u64, operator: Operator) {
        if self.0.len() == Self::KEPT {
            self.0.pop_front();
        }
        self.0.push_back((step as u32, operator));
    }

    fn find(&self, step: u32) -> Operator {
        let found = self.0.iter().rev().find(|&&(known, _)| known == step);
        found.or(self.0.back()).map_or(Operator::Join, |&(_, operator)| operator)
    }
}

/// The first fault of a rank, if there is one. The layout is that of `Fault` in `device/common/params.cuh`.
pub(crate) fn read(record: &Mapped, rank: Rank, experts: usize, history: &History) -> Option<Error> {
    let kind = record.read(0);
    if kind == 0 {
        return None;
    }
    let [peer, waiting_for, step, expected, seen] = std::array::from_fn(|at| record.read(1 + at));
    let long = |at| u64::from(record.read(at)) | u64::from(record.read(at + 1)) << 32;
    let (index, waited) = (long(6), Duration::from_nanos(long(8)));
    let operator = history.find(step);
    let peer_error = |fault| {
        let what = match waiting_for {
            0 => format!("its greeting (expected step {expected}, seen {seen})"),
            1 => "its counts".into(),
            2 => format!("chunk {index} (expected step {expected}, seen {seen})"),
            _ => format!("the blocks of this rank's own kernel ({seen} of {expected} arrived)"),
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
        1 => peer_error(PeerFault::Stalled),
        2 => peer_error(PeerFault::Failed),
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
        8 => peer_error(PeerFault::Left),
        _ => peer_error(PeerFault::Died),
    })
}
