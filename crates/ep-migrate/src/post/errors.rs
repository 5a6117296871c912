//! The errors of a rank about its peers.

use std::time::Duration;

use ep::{EnvironmentError, Error, PeerError, PeerFault, Rank};

use super::Post;
use crate::carrier::CarrierError;

/// What to do about a rank that is late or stopped.
const REMEDY: &str =
    "check whether the rank's process is stopped or skipped a step, and raise the timeout if it is only slow";

impl Post {
    /// The error of this rank's call about `peer`.
    pub(super) fn peer_error(&self, peer: Rank, fault: PeerFault, waited_for: String) -> PeerError {
        let (operator, step) = self.lock().operator;
        let (rank, waited) = (self.setup.rank, Duration::ZERO);
        PeerError { peer, machine: None, fault, operator, step, rank, waited_for, waited, cause: None }
    }

    /// The error of a call that has waited for `peer`.
    pub(super) fn wait_error(
        &self,
        peer: usize,
        fault: PeerFault,
        waited_for: String,
        waited: Duration,
    ) -> PeerError {
        let waited_for = match fault {
            PeerFault::Late | PeerFault::Stalled => {
                format!("{waited_for}; timeout = {} s; {REMEDY}", self.setup.timeout.as_secs_f64())
            }
            _ => waited_for,
        };
        PeerError { waited, ..self.peer_error(self.peer(peer), fault, waited_for) }
    }

    /// The error about a peer whose message is not what a correct peer sends.
    pub(super) fn broken(&self, peer: usize, found: impl Into<String>) -> Error {
        self.peer_error(self.peer(peer), PeerFault::Broken, found.into()).into()
    }

    /// The error of a transfer with a peer that the carrier ended.
    pub(super) fn lost(&self, peer: usize, error: &CarrierError, waited_for: &str) -> Error {
        match error {
            CarrierError::Closed => {
                let fault = self.lock().peers[peer].ended.unwrap_or(PeerFault::Died);
                self.peer_error(self.peer(peer), fault, waited_for.into()).into()
            }
            CarrierError::Unreachable => {
                self.peer_error(self.peer(peer), PeerFault::Unreachable, waited_for.into()).into()
            }
            CarrierError::Broken(found) => self.broken(peer, found),
            other => EnvironmentError::new(
                format!("exchanging messages with rank {}", self.peer(peer)),
                other,
                "the carrier between the ranks failed; look at its error and at that rank's output",
            )
            .into(),
        }
    }

    /// The error of this rank when a peer gives up because of `culprit`, which may be this rank.
    pub(super) fn told(&self, peer: usize, culprit: Rank, fault: PeerFault) -> PeerError {
        let teller = self.peer(peer);
        let told = format!("messages and was told by rank {teller}");
        if culprit == self.setup.rank {
            let cause = Some(format!("rank {culprit} {fault}"));
            return PeerError { cause, ..self.peer_error(teller, PeerFault::Failed, told) };
        }
        // The sender's bound has passed. This rank does not know that bound, so the text has only the remedy.
        let told = match fault {
            PeerFault::Late | PeerFault::Stalled => format!("{told}; {REMEDY}"),
            _ => told,
        };
        self.peer_error(culprit, fault, told)
    }
}
