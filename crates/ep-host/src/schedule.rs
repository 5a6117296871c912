//! The work of one operator on one rank: which of its own chunks, and which messages of each stream, are claimed.
//! `dispatch` and `combine` make one [`Schedule`] per call; their workers claim all work through it.

use std::ops::Range;
use std::sync::{Mutex, PoisonError};

use ep_rail::{ClaimedSlot, Streams};

/// Numbers of messages sent to a domain and received from it.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) struct MessageCounts {
    pub(crate) sent: u64,
    pub(crate) received: u64,
}

/// The chunks of an operator on one rank, shared by its workers.
pub(crate) struct Schedule {
    /// Tokens of this rank.
    tokens: usize,
    /// Tokens per chunk.
    chunk: usize,
    /// The first own chunk that no worker has claimed.
    next: Mutex<usize>,
    /// By domain: messages before this operator.
    before: Vec<MessageCounts>,
    /// By domain: messages once this operator has ended.
    after: Vec<MessageCounts>,
}

impl Schedule {
    /// The schedule of an operator with these numbers of messages, by domain.
    pub(crate) fn new(
        rails: &Streams,
        tokens: usize,
        chunk: usize,
        messages: impl Iterator<Item = MessageCounts>,
    ) -> Self {
        let mut schedule = Self { tokens, chunk, next: Mutex::new(0), before: Vec::new(), after: Vec::new() };
        for (domain, count) in messages.enumerate() {
            let (sent, received) = rails.position(domain);
            schedule.before.push(MessageCounts { sent, received });
            schedule
                .after
                .push(MessageCounts { sent: sent + count.sent, received: received + count.received });
        }
        schedule
    }

    /// Tokens per chunk.
    pub(crate) fn chunk(&self) -> usize {
        self.chunk
    }

    /// The tokens of one of this rank's chunks.
    pub(crate) fn tokens(&self, chunk: usize) -> Range<usize> {
        chunk * self.chunk..((chunk + 1) * self.chunk).min(self.tokens)
    }

    /// The first own chunk that no worker has claimed, if there is one.
    pub(crate) fn next_own(&self) -> Option<usize> {
        let next = *self.next.lock().unwrap_or_else(PoisonError::into_inner);
        (next * self.chunk < self.tokens).then_some(next)
    }

    /// Claims the next own chunk together with one slot of every other domain, if all domains are `ready`.
    pub(crate) fn claim_own(
        &self,
        rails: &Streams,
        ready: impl Fn(usize) -> bool,
        claim: impl Fn(usize) -> Option<ClaimedSlot>,
    ) -> Option<(usize, Vec<ClaimedSlot>)> {
        let mut next = self.next.lock().unwrap_or_else(PoisonError::into_inner);
        if *next * self.chunk >= self.tokens || !rails.others().all(ready) {
            return None;
        }
        let claims: Vec<ClaimedSlot> = rails.others().filter_map(claim).collect();
        assert_eq!(
            claims.len(),
            rails.others().count(),
            "slots for own chunks are claimed under this lock only"
        );
        *next += 1;
        Some((*next - 1, claims))
    }

    /// Claims the next message to a domain if its slot is free. Returns the message's number within this operator.
    pub(crate) fn claim_send(&self, rails: &Streams, domain: usize) -> Option<(usize, ClaimedSlot)> {
        let (number, claim) = rails.claim_send(domain, self.after[domain].sent)?;
        Some(((number - self.before[domain].sent) as usize, claim))
    }

    /// Claims the next message from a domain if it has arrived. Returns the message's number within this operator.
    pub(crate) fn claim_receive(&self, rails: &Streams, domain: usize) -> Option<(usize, ClaimedSlot)> {
        let (number, claim) = rails.claim_receive(domain, self.after[domain].received)?;
        Some(((number - self.before[domain].received) as usize, claim))
    }

    /// The messages of a domain that no worker has claimed.
    pub(crate) fn unclaimed(&self, rails: &Streams, domain: usize) -> MessageCounts {
        let (sent, received) = rails.position(domain);
        let after = self.after[domain];
        MessageCounts { sent: after.sent - sent, received: after.received - received }
    }
}
