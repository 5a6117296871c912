//! Combine: sums the expert outputs of each token and returns the sum to the token's rank. `operators` makes a
//! [`Combine`] and runs [`Combine::work`] on every worker.
//!
//! In each turn a worker claims work from the [`Schedule`]:
//! - *domain*: for a chunk of the tokens of this rank's rail peer in another domain, it sums the rows on the ranks of
//!   this domain and sends the domain sums;
//! - *own*: for a chunk of this rank's tokens whose domain sums have all arrived, it sums the rows on the ranks of
//!   this domain and the domain sums, in order of domain.
//!
//! A worker reads each row in place, on the rank where the expert wrote it, and writes only domain sums and results.

use std::sync::atomic::Ordering::Relaxed;

use ep::call::dispatched;
use ep::layout::TokenCopy;
use ep::{DispatchMode, Element, Error, Rank, Result};
use ep_rail::ClaimedSlot;

use crate::comm::{Op, PeerMemories, PeerMemory};
use crate::dispatch::{PROBS, TOKENS};
use crate::handle::HostHandle;
use crate::message::{Format, Header, Message};
use crate::progress::{Idle, Waiting};
use crate::schedule::{MessageCounts, Schedule};
use crate::simd::{self, SumRow, flag};

/// One rank's combine, shared by its workers.
pub(crate) struct Combine<'a> {
    pub(crate) op: &'a Op<'a>,
    pub(crate) handle: &'a HostHandle,
    pub(crate) hidden: usize,
    pub(crate) element: Element,
    pub(crate) wire: Element,
    /// `[tokens, hidden]` of `element`.
    pub(crate) out: OutPtr,
    /// `[tokens, experts]` f32; null without probs.
    pub(crate) probs_out: OutPtr,
    pub(crate) message: Format,
    pub(crate) schedule: Schedule,
}

/// The first byte of an output that the workers write in disjoint parts.
#[derive(Debug, Clone, Copy)]
pub(crate) struct OutPtr(pub(crate) *mut u8);

// SAFETY: workers write disjoint rows, since only one worker claims a chunk.
unsafe impl Sync for OutPtr {}
// SAFETY: as above.
unsafe impl Send for OutPtr {}

/// The schedule of a combine. This rank sends domain sums for the chunks of its rail peers, and receives domain sums
/// for its own chunks.
pub(crate) fn schedule(op: &Op<'_>, handle: &HostHandle, chunk: usize) -> Schedule {
    let chunks = |domain: usize| handle.rail_tokens[domain].div_ceil(chunk) as u64;
    let own = chunks(op.comm.domain());
    let messages =
        (0..handle.rail_tokens.len()).map(|domain| MessageCounts { sent: chunks(domain), received: own });
    Schedule::new(&op.comm.rails, handle.layout.tokens(), chunk, messages)
}

/// The rows of the token that a worker sums now, and those of the next token, which it prefetches.
#[derive(Default)]
struct Terms {
    current: Vec<SumRow>,
    next: Vec<SumRow>,
}

/// A message of domain sums that is being read in order of token.
struct Incoming {
    claim: ClaimedSlot,
    message: Message,
    /// Tokens and copies read so far.
    tokens: usize,
    copies: usize,
}

impl Combine<'_> {
    /// The work of one worker; returns when no work is left to claim.
    pub(crate) fn work(&self, idle: &mut Idle) -> Result<()> {
        let rails = &self.op.comm.rails;
        let mut terms = Terms::default();
        let turn = |idle: &mut Idle, peers: &[PeerMemories]| {
            let mut progressed = false;
            for domain in rails.others() {
                if let Some((chunk, claim)) = self.schedule.claim_send(rails, domain) {
                    self.send_domain_sums(peers, claim, chunk, &mut terms, idle)?;
                    progressed = true;
                }
            }
            if let Some((chunk, claims)) = self.claim_own() {
                self.finish_own(peers, chunk, &claims, &mut terms, idle)?;
                progressed = true;
            }
            Ok(progressed)
        };
        self.op.take_turns(idle, turn, || self.all_claimed(), || self.waiting())
    }

    /// Claims the next chunk of this rank's tokens, with the domain sums from every other domain.
    fn claim_own(&self) -> Option<(usize, Vec<ClaimedSlot>)> {
        let rails = &self.op.comm.rails;
        let claim = |domain| self.schedule.claim_receive(rails, domain).map(|(_, claim)| claim);
        self.schedule.claim_own(rails, |domain| rails.can_receive(domain), claim)
    }

    fn all_claimed(&self) -> bool {
        let rails = &self.op.comm.rails;
        self.schedule.next_own().is_none()
            && rails.others().all(|domain| self.schedule.unclaimed(rails, domain).sent == 0)
    }

    /// The event that a worker without work waits for.
    fn waiting(&self) -> Waiting {
        let rails = &self.op.comm.rails;
        if let Some(waiting) = self.op.waiting_for_entry() {
            return waiting;
        }
        if let Some(chunk) = self.schedule.next_own()
            && let Some(domain) = rails.others().find(|&domain| !rails.can_receive(domain))
        {
            let peer = rails.peer(domain);
            return Waiting { peer, what: format!("rank {peer} to send the domain sums of chunk {chunk}") };
        }
        match rails.others().find(|&domain| self.schedule.unclaimed(rails, domain).sent > 0) {
            Some(domain) => {
                let peer = rails.peer(domain);
                Waiting { peer, what: format!("rank {peer} to free a slot for domain sums") }
            }
            None => Waiting { peer: self.op.comm.rank, what: "its own workers to finish".into() },
        }
    }

    /// Sends the domain sums of this domain for one chunk of the tokens of a rail peer.
    fn send_domain_sums(
        &self,
        peers: &[PeerMemories],
        claim: ClaimedSlot,
        chunk: usize,
        terms: &mut Terms,
        idle: &mut Idle,
    ) -> Result<()> {
        let comm = self.op.comm;
        let list = &dispatched(self.handle.forward_lists.get())?[claim.domain];
        let entries = list.entries(chunk * self.schedule.chunk()..(chunk + 1) * self.schedule.chunk());
        let copies = list.copies_in(entries.clone());
        let sections = self.message.sections_within(entries.len(), copies, comm.rails.slot_bytes());
        let sections = sections.expect("chunks are sized to fit a slot");
        let slot = comm.rails.outgoing(claim);
        // SAFETY: only this worker writes a claimed slot; it is longer than a header and 64-byte aligned.
        unsafe { Header::new(self.op, chunk, entries.len(), copies).write(slot) };
        let first = entries.start;
        // SAFETY: the section has a row for every entry and lies inside the slot.
        unsafe {
            let to = slot.wrapping_add(sections.rows);
            let gather =
                |at: usize, rows: &mut Vec<SumRow>| self.push_rows(peers, list.copies(first + at), rows);
            self.sum_each(entries.len(), terms, gather, to, self.wire, false)?;
        }
        if self.message.probs {
            let probs = slot.wrapping_add(sections.probs).cast::<f32>();
            for (at, &copy) in entries.flat_map(|entry| list.copies(entry)).enumerate() {
                // SAFETY: the section has a cell for every copy, lies inside the slot and is aligned to 64 bytes.
                unsafe { probs.add(at).write(self.prob(peers, copy)?) };
            }
        }
        // The receiver does not see the rows of this domain, so it could not notice that they were changed.
        self.op.check_inputs_unchanged()?;
        self.op.post(idle, claim, sections.end)
    }

    /// Writes the results of one chunk of this rank's tokens.
    fn finish_own(
        &self,
        peers: &[PeerMemories],
        chunk: usize,
        claims: &[ClaimedSlot],
        terms: &mut Terms,
        idle: &mut Idle,
    ) -> Result<()> {
        let comm = self.op.comm;
        let layout = &self.handle.layout;
        let home = comm.domain();
        let tokens = self.schedule.tokens(chunk);
        let mut incoming =
            claims.iter().map(|&claim| self.open(claim, chunk)).collect::<Result<Vec<Incoming>>>()?;
        let row_bytes = self.hidden * self.element.bytes();
        let streaming = layout.tokens() * row_bytes > comm.config.host.streaming_bytes;
        if self.message.probs {
            // Zero the rows before `push_domain_sum` writes the probabilities that came from other domains.
            for token in tokens.clone() {
                self.zero_probs(token);
                for &copy in layout.copies(token, home) {
                    self.put_prob(token, copy, self.prob(peers, copy)?);
                }
            }
        }
        let first = tokens.start;
        let gather = |at: usize, rows: &mut Vec<SumRow>| {
            let token = first + at;
            // The order of the terms is part of the result: domains in order. `claims` are in order of domain too.
            for message in incoming.iter_mut().filter(|m| m.claim.domain < home) {
                self.push_domain_sum(message, token, rows)?;
            }
            self.push_rows(peers, layout.copies(token, home), rows)?;
            for message in incoming.iter_mut().filter(|m| m.claim.domain > home) {
                self.push_domain_sum(message, token, rows)?;
            }
            Ok(())
        };
        // SAFETY: the output has a row for every token, and only this worker has claimed this chunk.
        unsafe {
            let to = self.out.0.wrapping_add(first * row_bytes);
            self.sum_each(tokens.len(), terms, gather, to, self.element, streaming)?;
        }
        for message in incoming {
            self.check_all_read(&message)?;
            self.op.release(idle, message.claim)?;
        }
        Ok(())
    }

    /// For each of `count` tokens, sums the rows that `gather` appends and writes the sum as a row of type `element`.
    /// The output rows are adjacent and begin at `to`. Rows are gathered one token ahead, so that the sum of one token
    /// can prefetch the rows of the next.
    ///
    /// # Safety
    /// `to` must be valid for writes of `count` rows, which must not overlap a row of a peer or of a message.
    unsafe fn sum_each(
        &self,
        count: usize,
        terms: &mut Terms,
        mut gather: impl FnMut(usize, &mut Vec<SumRow>) -> Result<()>,
        to: *mut u8,
        element: Element,
        streaming: bool,
    ) -> Result<()> {
        let Terms { current, next } = terms;
        next.clear();
        if count > 0 {
            gather(0, next)?;
        }
        for at in 0..count {
            std::mem::swap(current, next);
            next.clear();
            if at + 1 < count {
                gather(at + 1, next)?;
            }
            let to = to.wrapping_add(at * self.hidden * element.bytes());
            // SAFETY: the rows are whole rows of memories that their ranks have published for this operator, or of
            // claimed messages; the caller promised the target.
            unsafe { simd::sum_rows(self.op.comm.level, current, next, self.hidden, to, element, streaming) };
        }
        Ok(())
    }

    /// Opens a message of domain sums of one of this rank's chunks.
    fn open(&self, claim: ClaimedSlot, chunk: usize) -> Result<Incoming> {
        let (op, rails) = (self.op, &self.op.comm.rails);
        let (peer, slot_bytes) = (rails.peer(claim.domain), rails.slot_bytes());
        // SAFETY: only this worker reads a claimed slot until it releases it; slots are aligned to 64 bytes.
        let message =
            unsafe { Message::open(rails.incoming(claim), slot_bytes, self.message, op, peer, chunk)? };
        Ok(Incoming { claim, message, tokens: 0, copies: 0 })
    }

    /// Checks that the message had exactly one domain sum for every token with copies in its domain, and one
    /// probability for every copy.
    fn check_all_read(&self, incoming: &Incoming) -> Result<()> {
        let Incoming { message, tokens, copies, .. } = incoming;
        let copies = if self.message.probs { *copies } else { message.copies };
        if (*tokens, copies) == (message.tokens, message.copies) {
            return Ok(());
        }
        Err(self.wrong_counts(incoming))
    }

    fn wrong_counts(&self, incoming: &Incoming) -> Error {
        let Message { tokens, copies, .. } = incoming.message;
        let what = format!(
            "a message of domain sums for {tokens} tokens and {copies} copies, which is not what this rank dispatched"
        );
        self.op.broken(self.op.comm.rails.peer(incoming.claim.domain), what)
    }

    /// Appends the domain sum of a token from another domain, if it has copies there.
    fn push_domain_sum(&self, incoming: &mut Incoming, token: usize, rows: &mut Vec<SumRow>) -> Result<()> {
        let copies = self.handle.layout.copies(token, incoming.claim.domain);
        if copies.is_empty() {
            return Ok(());
        }
        let message = &incoming.message;
        if incoming.tokens == message.tokens
            || self.message.probs && copies.len() > message.copies - incoming.copies
        {
            return Err(self.wrong_counts(incoming));
        }
        let element = if self.wire == Element::F32 { flag::F32 } else { 0 };
        // No rounding here: the sender has already rounded the domain sum to the wire type.
        let flags = flag::CLOSES_RANK | flag::CLOSES_DOMAIN | element;
        rows.push(SumRow { ptr: message.row(incoming.tokens), flags });
        incoming.tokens += 1;
        if self.message.probs {
            for &copy in copies {
                self.put_prob(token, copy, message.prob(incoming.copies));
                incoming.copies += 1;
            }
        }
        Ok(())
    }

    /// Appends a token's rows on the ranks of this domain.
    fn push_rows(&self, peers: &[PeerMemories], copies: &[TokenCopy], rows: &mut Vec<SumRow>) -> Result<()> {
        let comm = self.op.comm;
        let row_bytes = self.hidden * self.element.bytes();
        let element = if self.element == Element::F32 { flag::F32 } else { 0 };
        // The definition rounds the sum of another rank of the domain to the wire type, since it crosses a link.
        let closes = |owner: Rank| {
            let rounds = owner != comm.rank && self.wire == Element::Bf16;
            flag::CLOSES_RANK | if rounds { flag::ROUNDS_RANK } else { 0 }
        };
        let mut last: Option<(Rank, u32)> = None;
        let mut remote_rows = 0;
        for copy in copies {
            let owner = comm.world.placement().owner_at(copy.position);
            if last == Some((owner, copy.row)) {
                continue;
            }
            if let Some((before, _)) = last.filter(|&(before, _)| before != owner)
                && let Some(row) = rows.last_mut()
            {
                row.flags |= closes(before);
            }
            last = Some((owner, copy.row));
            remote_rows += u64::from(owner != comm.rank);
            let local = comm.world.topology().local_rank_of(owner);
            let ptr = self.source(owner, &peers[local][TOKENS], copy.row as usize, row_bytes)?;
            rows.push(SumRow { ptr, flags: element });
        }
        if let (Some((owner, _)), Some(row)) = (last, rows.last_mut()) {
            row.flags |= closes(owner) | flag::CLOSES_DOMAIN;
        }
        comm.domain_bytes.fetch_add(remote_rows * row_bytes as u64, Relaxed);
        Ok(())
    }

    /// The address of element `at` of `bytes` bytes in a memory that `owner` published.
    ///
    /// # Errors
    /// [`ep::PeerError`] when the memory has no such element.
    fn source(&self, owner: Rank, memory: &Option<PeerMemory>, at: usize, bytes: usize) -> Result<*const u8> {
        let address = memory.as_ref().and_then(|memory| memory.element(at, bytes));
        address.map(|address| address.cast_const()).ok_or_else(|| {
            self.op
                .broken(owner, format!("no element {at} of {bytes} bytes in a combine input of rank {owner}"))
        })
    }

    /// Reads the probability of one copy from the rank of its expert.
    fn prob(&self, peers: &[PeerMemories], copy: TokenCopy) -> Result<f32> {
        let comm = self.op.comm;
        let owner = comm.world.placement().owner_at(copy.position);
        let local = comm.world.placement().positions_of(owner);
        let cell = match self.handle.mode {
            DispatchMode::Permuted { .. } => copy.row as usize,
            DispatchMode::Plain => copy.row as usize * local.len() + (copy.position as usize - local.start),
        };
        let memory = &peers[comm.world.topology().local_rank_of(owner)][PROBS];
        let from = self.source(owner, memory, cell, size_of::<f32>())?.cast::<f32>();
        // SAFETY: inside memory that its rank has published for this operator; `PeerMemory` begins at a multiple of 4.
        Ok(unsafe { from.read() })
    }

    /// Zeroes a token's row of output probabilities. Zeroing per chunk keeps the row in the cache until its
    /// probabilities are written.
    fn zero_probs(&self, token: usize) {
        let experts = self.op.comm.world.experts();
        // SAFETY: the output has a row for every token, and only this worker has claimed the token.
        unsafe { self.probs_out.0.cast::<f32>().add(token * experts).write_bytes(0, experts) };
    }

    fn put_prob(&self, token: usize, copy: TokenCopy, prob: f32) {
        let placement = self.op.comm.world.placement();
        let cell = token * placement.experts() + placement.expert_at(copy.position) as usize;
        // SAFETY: the output has a cell for every token and expert, and only this worker has claimed the token.
        unsafe { self.probs_out.0.cast::<f32>().add(cell).write(prob) };
    }
}
