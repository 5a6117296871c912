//! Decides, when a wait has timed out, whether the awaited peer is at fault or itself waits for another rank.
//!
//! In a reduction a rank may wait for a peer that itself waits for the rank at fault, and both timeouts may end at the same time.
//! So a rank asks the peer, and the peer asks the rank that it waits for. A rank without an answer from its peer, or
//! whose peer waits for no message, names that peer, and tells all others.

use std::time::{Duration, Instant};

use ep::PeerFault;

use crate::header::Wait;

/// How long a peer may take to answer.
const ANSWER: Duration = Duration::from_millis(500);
/// If a peer answers that it waits as well: the time from the question to the message that names the rank at fault. It
/// is less than a second, so that an error comes at most a second after the timeout.
const VERDICT: Duration = Duration::from_millis(850);

/// The question whether a peer is at fault, and the answer.
#[derive(Debug, Clone, Copy, Default)]
pub(crate) struct Question {
    asked: Option<Instant>,
    answer: Option<Wait>,
}

/// What a wait does next.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum Patience {
    /// It waits for this long, or until something changes.
    For(Duration),
    /// It asks the peer.
    Ask,
    /// It ends: the peer has this fault.
    Over(PeerFault),
}

impl Question {
    /// A question that is sent now.
    pub(crate) fn ask() -> Self {
        Self { asked: Some(Instant::now()), answer: None }
    }

    /// Records the answer.
    pub(crate) fn answer(&mut self, wait: Wait) {
        self.answer = self.asked.map(|_| wait);
    }

    /// What a wait does next about this peer, after its timeout.
    pub(crate) fn patience(self) -> Patience {
        let Some(asked) = self.asked else { return Patience::Ask };
        let (bound, fault) = match self.answer {
            None => (ANSWER, PeerFault::Stalled),
            Some(Wait::Blocked) => (VERDICT, PeerFault::Late),
            Some(Wait::Free) => (Duration::ZERO, PeerFault::Late),
        };
        match bound.checked_sub(asked.elapsed()) {
            Some(left) if !left.is_zero() => Patience::For(left),
            _ => Patience::Over(fault),
        }
    }
}
