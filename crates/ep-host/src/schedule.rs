//! What the workers of an operator have taken, and what is left: own chunks, and messages on each rail.

use std::ops::Range;
use std::sync::{Mutex, PoisonError};

use crate::rail::{Claim, Rails};

/// Messages of an operator: sent to a domain, and received from it.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) struct Messages {
    pub(crate) sent: u64,
    pub(crate) received: u64,
}

/// The chunks of an operator on one rank, shared by its workers.
pub(crate) struct Schedule {
    /// Tokens of this rank.
    tokens: usize,
    /// Tokens per chunk.
    chunk: usize,
    next: Mutex<usize>,
    /// By domain: the numbers of the messages before this operator's, and after them.
    before: Vec<Messages>,
    after: Vec<Messages>,
}

impl Schedule {
    /// The schedule of an operator with this many messages per domain; all workers' claims on rails go through it.
    pub(crate) fn new(
        rails: &Rails,
        tokens: usize,
        chunk: usize,
        messages: impl Iterator<Item = Messages>,
    ) -> Self {
        let mut schedule = Self { tokens, chunk, next: Mutex::new(0), before: Vec::new(), after: Vec::new() };
        for (domain, count) in messages.enumerate() {
            let (sent, received) = rails.position(domain);
            schedule.before.push(Messages { sent, received });
            schedule.after.push(Messages { sent: sent + count.sent, received: received + count.received });
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

    /// The next of this rank's chunks, if one is left.
    pub(crate) fn next_own(&self) -> Option<usize> {
        let next = *self.next.lock().unwrap_or_else(PoisonError::into_inner);
        (next * self.chunk < self.tokens).then_some(next)
    }

    /// Takes the next of this rank's chunks, with a claim on every other domain's rail, once all of them are `ready`.
    pub(crate) fn claim_own(
        &self,
        rails: &Rails,
        ready: impl Fn(usize) -> bool,
        claim: impl Fn(usize) -> Option<Claim>,
    ) -> Option<(usize, Vec<Claim>)> {
        let mut next = self.next.lock().unwrap_or_else(PoisonError::into_inner);
        if *next * self.chunk >= self.tokens || !rails.others().all(ready) {
            return None;
        }
        let claims: Vec<Claim> = rails.others().filter_map(claim).collect();
        assert_eq!(claims.len(), rails.others().count(), "own chunks' claims are made under this lock alone");
        *next += 1;
        Some((*next - 1, claims))
    }

    /// Takes the next message to a domain, if its slot is free; returns its number among this operator's.
    pub(crate) fn claim_send(&self, rails: &Rails, domain: usize) -> Option<(usize, Claim)> {
        let (number, claim) = rails.claim_send(domain, self.after[domain].sent)?;
        Some(((number - self.before[domain].sent) as usize, claim))
    }

    /// Takes the next message from a domain, if it has arrived.
    pub(crate) fn claim_receive(&self, rails: &Rails, domain: usize) -> Option<Claim> {
        rails.claim_receive(domain, self.after[domain].received).map(|(_, claim)| claim)
    }

    /// The messages of a domain that nobody has taken yet.
    pub(crate) fn left(&self, rails: &Rails, domain: usize) -> Messages {
        let (sent, received) = rails.position(domain);
        let after = self.after[domain];
        Messages { sent: after.sent - sent, received: after.received - received }
    }
}
