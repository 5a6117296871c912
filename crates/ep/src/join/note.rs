//! The messages between rank 0 and the other ranks, and [`Loss`]: which rank is lost, and why.

use std::time::{Duration, Instant};

use crate::error::{Error, PeerError, PeerFault};
use crate::topology::Rank;

/// Kinds of messages between rank 0 and another rank.
pub(super) mod kind {
    /// The sender's blob of an exchange. Rank 0 sends the blobs of all ranks, in rank order.
    pub(crate) const BLOB: u8 = 0;
    /// From rank 0: the first rank that it waits for.
    pub(crate) const WAITING: u8 = 1;
    /// From rank 0: all ranks have joined.
    pub(crate) const MET: u8 = 2;
    /// A [`Loss`](super::Loss). The sender leaves because of it.
    pub(crate) const LOST: u8 = 3;
    /// Leave message: the sender leaves, without an error.
    pub(crate) const LEFT: u8 = 4;
    /// From rank 0, a refusal: the job has a different number of ranks.
    pub(crate) const OTHER_WORLD: u8 = 5;
    /// From rank 0, a refusal: another process has joined as this rank.
    pub(crate) const TAKEN: u8 = 6;
    /// From rank 0, a refusal: the job has a different generation, which is the body.
    pub(crate) const OTHER_GENERATION: u8 = 7;
}

/// While rank 0 waits for a rank, it sends that rank's number to the others at this interval, to show that rank 0 itself is
/// not stopped.
pub(super) const REPEAT: Duration = Duration::from_millis(500);
/// If rank 0 has named the rank that it waits for, and then sends nothing for this long, rank 0 is stopped.
pub(super) const SILENCE: Duration = Duration::from_secs(2);

/// The longest text of a loss, in bytes. It becomes part of a one-line error.
const MAX_TEXT: usize = 500;
/// Flag in the byte of the fault: the text is the lost rank's own error.
const OWN_ERROR: u8 = 0x80;

/// A lost rank: a rank that can no longer take part in the job, and why.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(super) struct Loss {
    pub(super) peer: Rank,
    pub(super) fault: PeerFault,
    pub(super) text: Text,
}

/// Details of a loss.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(super) enum Text {
    /// What another rank observed; may be empty.
    Seen(String),
    /// The lost rank's own error.
    OwnError(String),
}

impl Loss {
    /// A loss that another rank observed.
    pub(super) fn new(peer: Rank, fault: PeerFault, seen: impl Into<String>) -> Self {
        Self { peer, fault, text: Text::Seen(seen.into()) }
    }

    /// The loss that makes `rank` leave with `error`: the peer that the error names, else `rank` itself.
    pub(super) fn of(error: &Error, rank: Rank) -> Self {
        match error {
            Error::Peer(error) => {
                let text = error.cause.clone().map_or(Text::Seen(String::new()), Text::OwnError);
                Self { peer: error.peer, fault: error.fault, text }
            }
            error => Self { peer: rank, fault: PeerFault::Failed, text: Text::OwnError(error.to_string()) },
        }
    }

    /// Whether this loss says more than a rank's own `error`: the loss names a different rank than `error`, or quotes the error
    /// of that rank, while `error` only says that a connection or a wait ended.
    pub(super) fn is_better_than(&self, error: &PeerError) -> bool {
        let quotes = matches!(self.text, Text::OwnError(_));
        self.peer != error.peer || (quotes && error.cause.is_none())
    }

    pub(super) fn to_bytes(&self) -> Vec<u8> {
        let fault = self.fault.code();
        let (flag, text) = match &self.text {
            Text::Seen(text) => (0, text),
            Text::OwnError(text) => (OWN_ERROR, text),
        };
        let text = &text[..text.floor_char_boundary(MAX_TEXT)];
        [&self.peer.0.to_le_bytes()[..], &[fault | flag], text.as_bytes()].concat()
    }

    pub(super) fn from_bytes(bytes: &[u8]) -> Option<Self> {
        let (peer, rest) = bytes.split_first_chunk()?;
        let (&fault, text) = rest.split_first()?;
        let said = String::from_utf8_lossy(&text[..text.len().min(MAX_TEXT)]).into_owned();
        let text = if fault & OWN_ERROR == 0 { Text::Seen(said) } else { Text::OwnError(said) };
        let fault = PeerFault::from_code((fault & !OWN_ERROR).into());
        Some(Self { peer: Rank(u32::from_le_bytes(*peer)), fault, text })
    }

    /// The error to report on `rank`, which waited for `what`. `reporter` is the rank that sent the loss to `rank`.
    pub(super) fn error(&self, rank: Rank, reporter: Option<Rank>, what: &str, waited: Duration) -> Error {
        let told = reporter.filter(|&reporter| reporter != self.peer);
        let (seen, cause) = match &self.text {
            Text::Seen(seen) => (seen.as_str(), None),
            Text::OwnError(error) => ("", Some(error.clone())),
        };
        let waited_for = match (told, seen) {
            (None, "") => what.into(),
            (None, seen) => format!("{what} ({seen})"),
            (Some(reporter), "") => format!("{what} (reported by rank {reporter})"),
            (Some(reporter), seen) => format!("{what} (reported by rank {reporter}: {seen})"),
        };
        let error = PeerError::joining(rank, self.peer, self.fault, waited_for, waited);
        PeerError { cause, ..error }.into()
    }
}

/// The start and the deadline of a wait.
#[derive(Debug, Clone, Copy)]
pub(super) struct Clock {
    pub(super) start: Instant,
    pub(super) deadline: Instant,
}

impl Clock {
    pub(super) fn new(timeout: Duration) -> Self {
        let start = Instant::now();
        // If the deadline is beyond the range of `Instant`, use one that is decades away.
        let deadline = start.checked_add(timeout).unwrap_or(start + Duration::from_secs(1 << 30));
        Self { start, deadline }
    }

    pub(super) fn waited(&self) -> Duration {
        self.start.elapsed()
    }

    pub(super) fn is_over(&self) -> bool {
        Instant::now() >= self.deadline
    }
}

pub(super) fn rank_bytes(rank: Rank) -> [u8; 4] {
    rank.0.to_le_bytes()
}

pub(super) fn rank_of(body: &[u8]) -> Option<Rank> {
    Some(Rank(u32::from_le_bytes(body.try_into().ok()?)))
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::error::CallerError;

    #[test]
    fn a_loss_survives_the_round_trip() {
        for fault in PeerFault::ALL {
            for text in [Text::Seen("what".into()), Text::OwnError("why".into())] {
                let loss = Loss { peer: Rank(7), fault, text };
                assert_eq!(Loss::from_bytes(&loss.to_bytes()), Some(loss));
            }
        }
        let long = Loss::new(Rank(1), PeerFault::Failed, "é".repeat(400));
        assert_eq!(Loss::from_bytes(&long.to_bytes()).unwrap().text, Text::Seen("é".repeat(250)));
        assert_eq!(Loss::from_bytes(&[1, 0, 0]), None);
        assert_eq!(Loss::from_bytes(&[1, 0, 0, 0]), None);
        let unknown = Loss::from_bytes(&[1, 0, 0, 0, 120, 0xFF]).unwrap();
        assert_eq!((unknown.peer, unknown.fault), (Rank(1), PeerFault::Failed));
    }

    #[test]
    fn a_rank_that_fails_is_quoted() {
        let error = CallerError::Topology("no ranks".into()).into();
        let loss = Loss::of(&error, Rank(2));
        let said = loss.error(Rank(1), Some(Rank(0)), "its part", Duration::ZERO).to_string();
        assert_eq!(
            said,
            "rank 2 failed (join): rank 1 was waiting for its part (reported by rank 0); its error: topology: no ranks"
        );
    }

    #[test]
    fn a_loss_of_another_rank_or_a_quoted_error_says_more() {
        let seen = |peer| Loss::new(Rank(peer), PeerFault::Died, "");
        let quoted = |peer| Loss { text: Text::OwnError("why".into()), ..seen(peer) };
        let error = |loss: Loss| match loss.error(Rank(0), None, "its part", Duration::ZERO) {
            Error::Peer(error) => error,
            other => panic!("{other}"),
        };
        for known in [seen(1), quoted(1)] {
            assert!(seen(2).is_better_than(&error(known.clone())));
            assert!(quoted(2).is_better_than(&error(known.clone())));
            assert!(!seen(1).is_better_than(&error(known)));
        }
        assert!(quoted(1).is_better_than(&error(seen(1))));
        assert!(!quoted(1).is_better_than(&error(quoted(1))));
    }

    #[test]
    fn a_rank_survives_the_round_trip() {
        for rank in [Rank(0), Rank(0x0102_0304)] {
            assert_eq!(rank_of(&rank_bytes(rank)), Some(rank));
        }
        assert_eq!(rank_of(&[0; 3]), None);
    }
}
