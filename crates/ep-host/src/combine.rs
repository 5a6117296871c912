//! Combine: expert outputs back to their tokens' ranks, reduced.
//!
//! A worker's turn is one of two kinds, whichever has something to do:
//! - *partial*: for a chunk of another domain's tokens, the sums over this domain's ranks go into a slot for it;
//! - *own*: for a chunk of this rank's tokens whose partial sums have all arrived, the sum over this domain's ranks
//!   joins them, in order of domain.
//!
//! Rows are read where the experts left them, on whichever rank of the domain: each is read once, and nothing is
//! written but partial sums and results.

use std::sync::atomic::Ordering::Relaxed;

use ep::call::dispatched;
use ep::layout::TokenCopy;
use ep::{CallerError, DispatchMode, Element, Rank, Result};

use crate::comm::{Idle, Op, PeerBuffers, PeerMemory, Waiting};
use crate::dispatch::{PROBS, TOKENS};
use crate::handle::HostHandle;
use crate::message::{Format, Header, Sections};
use crate::rail::Claim;
use crate::schedule::{Messages, Schedule};
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

/// The start of an output that workers write in disjoint pieces.
#[derive(Debug, Clone, Copy)]
pub(crate) struct OutPtr(pub(crate) *mut u8);

// SAFETY: workers write disjoint rows: a chunk is claimed by one worker only.
unsafe impl Sync for OutPtr {}
// SAFETY: as above.
unsafe impl Send for OutPtr {}

/// The messages of a combine: partial sums for the rail's other ranks, and from them.
pub(crate) fn schedule(op: &Op<'_>, handle: &HostHandle, chunk: usize) -> Schedule {
    let chunks = |domain: usize| handle.rail_tokens[domain].div_ceil(chunk) as u64;
    let own = chunks(op.comm.domain());
    let messages =
        (0..handle.rail_tokens.len()).map(|domain| Messages { sent: chunks(domain), received: own });
    Schedule::new(&op.comm.rails, handle.layout.tokens(), chunk, messages)
}

/// The rows of the token that is being summed, and of the one after it.
#[derive(Default)]
struct Terms {
    now: Vec<SumRow>,
    then: Vec<SumRow>,
}

/// A message of partial sums, being read in order of token.
struct Incoming {
    claim: Claim,
    slot: *const u8,
    sections: Sections,
    tokens: usize,
    copies: usize,
    header: Header,
}

impl Combine<'_> {
    /// One worker: takes turns until there is nothing left to start.
    pub(crate) fn work(&self, idle: &mut Idle) -> Result<()> {
        let rails = &self.op.comm.rails;
        let mut terms = Terms::default();
        let turn = |idle: &mut Idle, peers: &[PeerBuffers]| {
            let mut progressed = false;
            for domain in rails.others() {
                if let Some((chunk, claim)) = self.schedule.claim_send(rails, domain) {
                    self.send_partial(peers, claim, chunk, &mut terms, idle)?;
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

    /// The next chunk of own tokens, with the partial sums from every other domain.
    fn claim_own(&self) -> Option<(usize, Vec<Claim>)> {
        let rails = &self.op.comm.rails;
        let claim = |domain| self.schedule.claim_receive(rails, domain);
        self.schedule.claim_own(rails, |domain| rails.can_receive(domain), claim)
    }

    fn all_claimed(&self) -> bool {
        let rails = &self.op.comm.rails;
        self.schedule.next_own().is_none()
            && rails.others().all(|domain| self.schedule.left(rails, domain).sent == 0)
    }

    fn waiting(&self) -> Waiting {
        let rails = &self.op.comm.rails;
        if let Some(waiting) = self.op.waiting_for_entry() {
            return waiting;
        }
        if let Some(chunk) = self.schedule.next_own()
            && let Some(domain) = rails.others().find(|&domain| !rails.can_receive(domain))
        {
            let peer = rails.peer(domain);
            return Waiting { peer, what: format!("rank {peer} to send the partial sums of chunk {chunk}") };
        }
        match rails.others().find(|&domain| self.schedule.left(rails, domain).sent > 0) {
            Some(domain) => {
                let peer = rails.peer(domain);
                Waiting { peer, what: format!("rank {peer} to take partial sums off the rail") }
            }
            None => Waiting { peer: self.op.comm.rank, what: "its own workers".into() },
        }
    }

    /// Sums of this domain's ranks for one chunk of another domain's tokens.
    fn send_partial(
        &self,
        peers: &[PeerBuffers],
        claim: Claim,
        chunk: usize,
        terms: &mut Terms,
        idle: &mut Idle,
    ) -> Result<()> {
        let comm = self.op.comm;
        let list = &dispatched(self.handle.forwarded.get())?[claim.domain];
        let places = list.places(chunk * self.schedule.chunk()..(chunk + 1) * self.schedule.chunk());
        let copies: usize = places.clone().map(|place| list.copies(place).len()).sum();
        let sections = self.message.sections(places.len(), copies);
        assert!(sections.end <= comm.rails.slot_bytes(), "chunks are sized to fit a slot");
        let slot = comm.rails.outgoing(claim);
        // SAFETY: a claimed slot is this worker's to write, longer than a header, and 64-byte aligned.
        unsafe { Header::new(self.op, chunk, places.len(), copies).write(slot) };
        let first = places.start;
        // SAFETY: the section has a row for every place and lies inside the slot.
        unsafe {
            let to = slot.wrapping_add(sections.rows);
            let gather =
                |at: usize, rows: &mut Vec<SumRow>| self.push_rows(peers, list.copies(first + at), rows);
            self.sum_each(places.len(), terms, gather, to, self.wire, false)?;
        }
        if self.message.probs {
            let probs = slot.wrapping_add(sections.probs).cast::<f32>();
            for (at, &copy) in places.flat_map(|place| list.copies(place)).enumerate() {
                // SAFETY: the section has a cell for every copy, lies inside the slot and is aligned to 64 bytes.
                unsafe { probs.add(at).write(self.prob(peers, copy)?) };
            }
        }
        self.op.post(idle, claim, sections.end)
    }

    /// The sums of one chunk of this rank's tokens, for good.
    fn finish_own(
        &self,
        peers: &[PeerBuffers],
        chunk: usize,
        claims: &[Claim],
        terms: &mut Terms,
        idle: &mut Idle,
    ) -> Result<()> {
        let comm = self.op.comm;
        let layout = &self.handle.layout;
        let home = comm.domain();
        let tokens = self.schedule.tokens(chunk);
        let mut incoming = claims.iter().map(|&claim| self.open(claim)).collect::<Result<Vec<Incoming>>>()?;
        let row_bytes = self.hidden * self.element.bytes();
        let streaming = layout.tokens() * row_bytes > comm.config.streaming_bytes;
        if self.message.probs {
            // Before those that came from other domains, which are put as their partial sums are gathered.
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
            // Claims are in order of domain, and so must be the terms.
            for message in incoming.iter_mut().filter(|m| m.claim.domain < home) {
                self.push_partial(message, token, rows);
            }
            self.push_rows(peers, layout.copies(token, home), rows)?;
            for message in incoming.iter_mut().filter(|m| m.claim.domain > home) {
                self.push_partial(message, token, rows);
            }
            Ok(())
        };
        // SAFETY: the output has a row for every token, and this worker alone has claimed this chunk's.
        unsafe {
            let to = self.out.0.wrapping_add(first * row_bytes);
            self.sum_each(tokens.len(), terms, gather, to, self.element, streaming)?;
        }
        for message in incoming {
            let read = (message.tokens, if self.message.probs { message.copies } else { 0 });
            let sent = (
                message.header.tokens as usize,
                if self.message.probs { message.header.copies as usize } else { 0 },
            );
            assert_eq!(
                read, sent,
                "a message has a partial sum for every token that has copies in its domain"
            );
            self.op.release(idle, message.claim)?;
        }
        Ok(())
    }

    /// Sums the rows that `gather` gives for each of `count` tokens into adjacent rows of type `element` from `to` on.
    /// A token's rows are gathered one token ahead, so that they are on their way when their sum begins.
    ///
    /// # Safety
    /// `to` must be valid for writes of `count` rows that overlap no row of a peer or message.
    unsafe fn sum_each(
        &self,
        count: usize,
        terms: &mut Terms,
        mut gather: impl FnMut(usize, &mut Vec<SumRow>) -> Result<()>,
        to: *mut u8,
        element: Element,
        streaming: bool,
    ) -> Result<()> {
        let Terms { now, then } = terms;
        then.clear();
        if count > 0 {
            gather(0, then)?;
        }
        for at in 0..count {
            std::mem::swap(now, then);
            then.clear();
            if at + 1 < count {
                gather(at + 1, then)?;
            }
            let to = to.wrapping_add(at * self.hidden * element.bytes());
            // SAFETY: rows are whole rows of memories that their ranks have opened to this operator, or of claimed
            // messages; the target is the caller's promise.
            unsafe { simd::sum_rows(self.op.comm.level, now, then, self.hidden, to, element, streaming) };
        }
        Ok(())
    }

    /// Opens a message of partial sums.
    fn open(&self, claim: Claim) -> Result<Incoming> {
        let rails = &self.op.comm.rails;
        let slot = rails.incoming(claim);
        // SAFETY: a claimed slot is this worker's to read, and longer than a header.
        let header = unsafe { Header::read(slot, self.op, rails.peer(claim.domain))? };
        let sections = self.message.sections(header.tokens as usize, header.copies as usize);
        assert!(sections.end <= rails.slot_bytes(), "a message is as long as its header says");
        Ok(Incoming { claim, slot, sections, tokens: 0, copies: 0, header })
    }

    /// Appends the partial sum of a token from another domain, if it has copies there.
    fn push_partial(&self, message: &mut Incoming, token: usize, rows: &mut Vec<SumRow>) {
        let copies = self.handle.layout.copies(token, message.claim.domain);
        if copies.is_empty() {
            return;
        }
        assert!(
            message.tokens < message.header.tokens as usize,
            "a message has a partial sum for every token"
        );
        let ptr = message.slot.wrapping_add(message.sections.rows + message.tokens * self.message.row_bytes);
        let element = if self.wire == Element::F32 { flag::F32 } else { 0 };
        // Rounded before it crossed.
        rows.push(SumRow { ptr, flags: flag::CLOSES_RANK | flag::CLOSES_DOMAIN | element });
        message.tokens += 1;
        if self.message.probs {
            for &copy in copies {
                let from =
                    message.slot.wrapping_add(message.sections.probs + 4 * message.copies).cast::<f32>();
                // SAFETY: inside the slot, since the header's copies are all that are read, and aligned.
                let prob = unsafe { from.read() };
                self.put_prob(token, copy, prob);
                message.copies += 1;
            }
        }
    }

    /// Appends a token's rows on the ranks of this domain.
    fn push_rows(&self, peers: &[PeerBuffers], copies: &[TokenCopy], rows: &mut Vec<SumRow>) -> Result<()> {
        let comm = self.op.comm;
        let row_bytes = self.hidden * self.element.bytes();
        let element = if self.element == Element::F32 { flag::F32 } else { 0 };
        // What comes from another rank of the domain has crossed a link.
        let closes = |owner: Rank| {
            let rounds = owner != comm.rank && self.wire == Element::Bf16;
            flag::CLOSES_RANK | if rounds { flag::ROUNDS_RANK } else { 0 }
        };
        let mut last: Option<(Rank, u32)> = None;
        let mut remote_rows = 0;
        for copy in copies {
            let owner = comm.world.placement.owner_at(copy.position);
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
            let local = comm.world.topology.local_rank_of(owner);
            let ptr = self.source(&peers[local][TOKENS], copy.row as usize, row_bytes)?;
            rows.push(SumRow { ptr, flags: element });
        }
        if let (Some((owner, _)), Some(row)) = (last, rows.last_mut()) {
            row.flags |= closes(owner) | flag::CLOSES_DOMAIN;
        }
        comm.domain_bytes.fetch_add(remote_rows * row_bytes as u64, Relaxed);
        Ok(())
    }

    fn source(&self, memory: &Option<PeerMemory>, at: usize, bytes: usize) -> Result<*const u8> {
        let place = memory.as_ref().and_then(|memory| memory.at(at * bytes, bytes));
        place.map(|place| place.cast_const()).ok_or_else(|| {
            CallerError::Handle(format!(
                "a rank of the domain has no row {at} of {bytes} bytes in its combine input"
            ))
            .into()
        })
    }

    /// The probability of one copy, where the experts' rank left it.
    fn prob(&self, peers: &[PeerBuffers], copy: TokenCopy) -> Result<f32> {
        let comm = self.op.comm;
        let owner = comm.world.placement.owner_at(copy.position);
        let local = comm.world.placement.positions_of(owner);
        let cell = match self.handle.mode {
            DispatchMode::Permuted { .. } => copy.row as usize,
            DispatchMode::Plain => copy.row as usize * local.len() + (copy.position as usize - local.start),
        };
        let memory = &peers[comm.world.topology.local_rank_of(owner)][PROBS];
        let from = self.source(memory, cell, size_of::<f32>())?.cast::<f32>();
        // SAFETY: inside memory that its rank has opened to this operator; aligned, as memories are to 64 bytes.
        Ok(unsafe { from.read() })
    }

    /// Zeroes a token's row of the output: chunk by chunk, it is still in the cache when its probabilities are put.
    fn zero_probs(&self, token: usize) {
        let experts = self.op.comm.world.experts();
        // SAFETY: the output has a row for every token, and this worker alone has claimed the token.
        unsafe { self.probs_out.0.cast::<f32>().add(token * experts).write_bytes(0, experts) };
    }

    fn put_prob(&self, token: usize, copy: TokenCopy, prob: f32) {
        let placement = &self.op.comm.world.placement;
        let cell = token * placement.experts() + placement.expert_at(copy.position) as usize;
        // SAFETY: the output has a cell for every token and expert, and this worker alone has claimed the token.
        unsafe { self.probs_out.0.cast::<f32>().add(cell).write(prob) };
    }
}
