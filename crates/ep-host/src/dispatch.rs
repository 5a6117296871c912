//! Dispatch: sends tokens to the ranks of their experts. `operators` makes a [`Dispatch`] and runs
//! [`Dispatch::work`] on every worker.
//!
//! In each turn a worker claims work from the [`Schedule`]:
//! - *forward*: it copies a chunk that arrived from another domain to its rows on the ranks of this domain;
//! - *own*, when no chunk has arrived: it copies a chunk of this rank's tokens to its rows in this domain, and packs it
//!   once into a slot for each other domain.
//!
//! There is no barrier between the stages: this rank forwards a chunk while the source rank still reads later ones.

use std::sync::atomic::{AtomicBool, Ordering::Relaxed};
use std::sync::{Mutex, PoisonError};

use ep::layout::TokenCopy;
use ep::{DispatchMode, Rank, Result, TokenFormat};
use ep_rail::ClaimedSlot;

use crate::comm::{Op, PeerMemories, PeerMemory};
use crate::handle::{ForwardList, HostHandle};
use crate::memory::HostMemory;
use crate::message::{Format, Header, Message, Source};
use crate::progress::{Idle, Waiting};
use crate::schedule::{MessageCounts, Schedule};
use crate::simd;

/// Indices of the published memories in a control block. Combine publishes its rows and probabilities at the same
/// indices as dispatch.
pub(crate) const TOKENS: usize = 0;
pub(crate) const SCALES: usize = 1;
pub(crate) const PROBS: usize = 2;
pub(crate) const LOCAL_EXPERTS: usize = 3;

/// The source of the probability of each copy; the checked form of [`ep::Probs`].
#[derive(Debug, Clone, Copy)]
pub(crate) enum ProbSource<'a> {
    /// No probabilities are sent.
    Skip,
    /// The weights of the handle's routing.
    Routing,
    /// `[tokens, experts]`.
    Dense(&'a [f32]),
}

/// One rank's dispatch, shared by its workers.
pub(crate) struct Dispatch<'a> {
    pub(crate) op: &'a Op<'a>,
    pub(crate) handle: &'a HostHandle,
    pub(crate) format: TokenFormat,
    pub(crate) hidden: usize,
    /// `[tokens, hidden]` in the input format.
    pub(crate) tokens: &'a [u8],
    /// `[tokens, scales per row]`, when given.
    pub(crate) scales: &'a [u8],
    pub(crate) probs: ProbSource<'a>,
    pub(crate) message: Format,
    pub(crate) state: State,
}

/// The mutable state of a dispatch that its workers share.
pub(crate) struct State {
    schedule: Schedule,
    /// Whether a worker has claimed the padding rows.
    padded: AtomicBool,
    /// (domain, chunk, copies of the chunk in this domain), in order of arrival. Filled by a handle's first dispatch.
    received_lists: Mutex<Vec<(usize, usize, ForwardList)>>,
}

impl State {
    pub(crate) fn new(op: &Op<'_>, handle: &HostHandle, chunk: usize) -> Self {
        let chunks = |domain: usize| handle.rail_tokens[domain].div_ceil(chunk) as u64;
        let own = chunks(op.comm.domain());
        let messages =
            (0..handle.rail_tokens.len()).map(|domain| MessageCounts { sent: own, received: chunks(domain) });
        let schedule = Schedule::new(&op.comm.rails, handle.layout.tokens(), chunk, messages);
        Self { schedule, padded: AtomicBool::new(false), received_lists: Mutex::default() }
    }
}

/// Memory that one worker reuses from token to token.
struct Scratch {
    /// The rows that the current token is copied to.
    targets: Vec<*mut u8>,
    quantised: HostMemory,
    scales: HostMemory,
}

/// The row and the scales of a token, in the output format.
#[derive(Clone, Copy)]
struct TokenRow {
    data: *const u8,
    scales: *const u8,
}

impl Dispatch<'_> {
    /// The work of one worker; returns when no work is left to claim.
    pub(crate) fn work(&self, idle: &mut Idle) -> Result<()> {
        let quantises = matches!(self.format, TokenFormat::QuantizeFp8(_));
        let scratch = |bytes| HostMemory::normal(if quantises { bytes } else { 0 });
        let mut scratch = Scratch {
            targets: Vec::with_capacity(16),
            quantised: scratch(self.message.row_bytes)?,
            scales: scratch(self.message.scale_bytes)?,
        };
        let rails = &self.op.comm.rails;
        let turn = |idle: &mut Idle, peers: &[PeerMemories]| {
            if !self.state.padded.swap(true, Relaxed) {
                self.zero_padding(&peers[self.local_rank()])?;
            }
            let mut progressed = false;
            for domain in rails.others() {
                if let Some((chunk, claim)) = self.state.schedule.claim_receive(rails, domain) {
                    self.forward(peers, claim, chunk, &mut scratch)?;
                    self.op.release(idle, claim)?;
                    progressed = true;
                }
            }
            if !progressed && let Some((chunk, claims)) = self.claim_own() {
                self.send_own(peers, chunk, &claims, &mut scratch, idle)?;
                progressed = true;
            }
            Ok(progressed)
        };
        self.op.take_turns(idle, turn, || self.all_claimed(), || self.waiting())
    }

    /// By domain: the copies in this domain of the tokens of this rank's rail peer. Call it after all workers have
    /// ended; before that, lists may be missing. All lists are empty unless this was the handle's first dispatch.
    pub(crate) fn into_forward_lists(self) -> Vec<ForwardList> {
        let mut received = self.state.received_lists.into_inner().unwrap_or_else(PoisonError::into_inner);
        received.sort_unstable_by_key(|&(domain, chunk, _)| (domain, chunk));
        let mut lists = vec![ForwardList::default(); self.op.comm.world.topology().domains()];
        for (domain, _, list) in &received {
            lists[*domain].append(list);
        }
        lists
    }

    fn local_rank(&self) -> usize {
        self.op.comm.world.topology().local_rank_of(self.op.comm.rank)
    }

    /// Claims the next chunk of this rank's tokens, with a free slot for every other domain.
    fn claim_own(&self) -> Option<(usize, Vec<ClaimedSlot>)> {
        let (rails, schedule) = (&self.op.comm.rails, &self.state.schedule);
        let claim = |domain| schedule.claim_send(rails, domain).map(|(_, claim)| claim);
        schedule.claim_own(rails, |domain| rails.can_send(domain), claim)
    }

    fn all_claimed(&self) -> bool {
        let (rails, schedule) = (&self.op.comm.rails, &self.state.schedule);
        schedule.next_own().is_none()
            && self.state.padded.load(Relaxed)
            && rails.others().all(|domain| schedule.unclaimed(rails, domain).received == 0)
    }

    /// The event that a worker without work waits for.
    fn waiting(&self) -> Waiting {
        let (rails, schedule) = (&self.op.comm.rails, &self.state.schedule);
        if let Some(waiting) = self.op.waiting_for_entry() {
            return waiting;
        }
        if let Some(chunk) = schedule.next_own()
            && let Some(domain) = rails.others().find(|&domain| !rails.can_send(domain))
        {
            let peer = rails.peer(domain);
            return Waiting {
                peer,
                what: format!("rank {peer} to free a slot for chunk {chunk} of dispatch"),
            };
        }
        let late = |domain: &usize| schedule.unclaimed(rails, *domain).received > 0;
        match rails.others().find(late) {
            Some(domain) => {
                let (peer, left) = (rails.peer(domain), schedule.unclaimed(rails, domain).received);
                Waiting { peer, what: format!("rank {peer} to send its last {left} chunks of dispatch") }
            }
            None => Waiting { peer: self.op.comm.rank, what: "its own workers to finish".into() },
        }
    }

    /// Copies one chunk of this rank's tokens to their rows in this domain and into the claimed slots, then sends the
    /// slots.
    fn send_own(
        &self,
        peers: &[PeerMemories],
        chunk: usize,
        claims: &[ClaimedSlot],
        scratch: &mut Scratch,
        idle: &mut Idle,
    ) -> Result<()> {
        let layout = &self.handle.layout;
        let home = self.op.comm.domain();
        let tokens = self.state.schedule.tokens(chunk);
        let mut messages: Vec<Outgoing<'_>> =
            claims.iter().map(|&claim| Outgoing::new(self, claim, chunk, tokens.clone())).collect();
        for token in tokens {
            if messages.iter().all(|m| layout.copies(token, m.claim.domain).is_empty())
                && layout.copies(token, home).is_empty()
            {
                continue;
            }
            let row = self.row(token, scratch);
            for message in &mut messages {
                message.push(self, token, row);
            }
            let copies = layout.copies(token, home);
            let prob = |at: usize| self.prob(token, home, at, copies[at]);
            self.write_rows(peers, (self.op.comm.rank, copies), prob, row, &mut scratch.targets)?;
        }
        for message in messages {
            message.post(self, idle)?;
        }
        Ok(())
    }

    /// The row of one of this rank's tokens in the output format. A quantised format is quantised here, once per token.
    fn row(&self, token: usize, scratch: &mut Scratch) -> TokenRow {
        let input_bytes = self.format.input_row_bytes(self.hidden);
        let input = &self.tokens[token * input_bytes..][..input_bytes];
        if let TokenFormat::QuantizeFp8(scale_format) = self.format {
            let (out, scales) = (scratch.quantised.as_bytes_mut(), scratch.scales.as_bytes_mut());
            simd::quantize_row(self.op.comm.level, bytemuck::cast_slice(input), scale_format, out, scales);
            return TokenRow { data: out.as_ptr(), scales: scales.as_ptr() };
        }
        let scale_bytes = self.message.scale_bytes;
        let scales = if scale_bytes == 0 { &[] } else { &self.scales[token * scale_bytes..][..scale_bytes] };
        TokenRow { data: input.as_ptr(), scales: scales.as_ptr() }
    }

    /// The probability of copy `at` of a token's copies in `domain`.
    fn prob(&self, token: usize, domain: usize, at: usize, copy: TokenCopy) -> f32 {
        match self.probs {
            ProbSource::Skip => 0.0,
            ProbSource::Routing => self.handle.layout.weights(token, domain)[at],
            ProbSource::Dense(probs) => {
                let placement = self.op.comm.world.placement();
                probs[token * placement.experts() + placement.expert_at(copy.position) as usize]
            }
        }
    }

    /// Copies a chunk that arrived from another domain to its rows in this domain.
    fn forward(
        &self,
        peers: &[PeerMemories],
        claim: ClaimedSlot,
        chunk: usize,
        scratch: &mut Scratch,
    ) -> Result<()> {
        let (op, rails) = (self.op, &self.op.comm.rails);
        let (peer, slot_bytes) = (rails.peer(claim.domain), rails.slot_bytes());
        // SAFETY: only this worker reads a claimed slot until it releases it; slots are aligned to 64 bytes.
        let message =
            unsafe { Message::open(rails.incoming(claim), slot_bytes, self.message, op, peer, chunk)? };
        let source = self.source(claim.domain, chunk);
        let known = self.handle.forward_lists.get().map(|known| &known[claim.domain]);
        let received = match known {
            Some(_) => ForwardList::default(),
            None => message.lists(&source).map_err(|problem| op.broken(peer, problem))?,
        };
        let (list, entries) = match known {
            Some(list) => {
                let entries = list.entries(source.tokens);
                let expected = (entries.len(), list.copies_in(entries.clone()));
                let found = (message.tokens, message.copies);
                if found != expected {
                    let text = format!(
                        "{} tokens and {} copies in chunk {chunk}, where the handle has {} and {}",
                        found.0, found.1, expected.0, expected.1
                    );
                    return Err(op.broken(peer, text));
                }
                (list, entries)
            }
            None => (&received, 0..message.tokens),
        };
        let mut copy = 0;
        for (at, entry) in entries.enumerate() {
            let copies = list.copies(entry);
            let row = TokenRow { data: message.row(at), scales: message.scales(at) };
            self.write_rows(peers, (peer, copies), |k| message.prob(copy + k), row, &mut scratch.targets)?;
            copy += copies.len();
        }
        if known.is_none() {
            let mut all = self.state.received_lists.lock().unwrap_or_else(PoisonError::into_inner);
            all.push((claim.domain, chunk, received));
        }
        Ok(())
    }

    /// The tokens and experts that a chunk of this rank's rail peer in `domain` may contain.
    fn source(&self, domain: usize, chunk: usize) -> Source {
        let world = &self.op.comm.world;
        let first = chunk * self.state.schedule.chunk();
        let end = (first + self.state.schedule.chunk()).min(self.handle.rail_tokens[domain]);
        let mut ranks = world
            .topology()
            .domain_ranks(self.op.comm.domain())
            .map(|rank| world.placement().positions_of(rank));
        let positions =
            ranks.next().map_or(0..0, |first| first.start..ranks.last().map_or(first.end, |last| last.end));
        Source { tokens: first..end, positions }
    }

    /// Writes one token of `source` to the ranks of this domain: rows, scales, probabilities and local-expert cells.
    /// `copies` are in order of rank and row.
    fn write_rows(
        &self,
        peers: &[PeerMemories],
        (source, copies): (Rank, &[TokenCopy]),
        prob: impl Fn(usize) -> f32,
        row: TokenRow,
        targets: &mut Vec<*mut u8>,
    ) -> Result<()> {
        let comm = self.op.comm;
        let (row_bytes, scale_bytes) = (self.message.row_bytes, self.message.scale_bytes);
        targets.clear();
        let mut last = None;
        let mut remote_rows = 0;
        for (at, copy) in copies.iter().enumerate() {
            let owner = comm.world.placement().owner_at(copy.position);
            let memories = &peers[comm.world.topology().local_rank_of(owner)];
            let row_number = copy.row as usize;
            if last != Some((owner, copy.row)) {
                last = Some((owner, copy.row));
                remote_rows += usize::from(owner != comm.rank);
                targets.push(self.target([owner, source], &memories[TOKENS], row_number, row_bytes)?);
                if scale_bytes > 0 {
                    let to = self.target([owner, source], &memories[SCALES], row_number, scale_bytes)?;
                    // SAFETY: `owner` has published the memory for this operator and keeps it until this rank finishes.
                    // Each row belongs to one token, and only this worker has claimed the token's chunk. A hostile
                    // source may repeat row numbers; the writes then still stay inside published outputs.
                    unsafe { row.scales.copy_to_nonoverlapping(to, scale_bytes) };
                }
            }
            let local = comm.world.placement().positions_of(owner);
            let cell = match self.handle.mode {
                DispatchMode::Permuted { .. } => row_number,
                DispatchMode::Plain => row_number * local.len() + (copy.position as usize - local.start),
            };
            if !matches!(self.probs, ProbSource::Skip) {
                let to = self.target([owner, source], &memories[PROBS], cell, size_of::<f32>())?;
                // SAFETY: as above; aligned, since `PeerMemory` begins at a multiple of 4.
                unsafe { to.cast::<f32>().write(prob(at)) };
            }
            if memories[LOCAL_EXPERTS].is_some() {
                let to = self.target([owner, source], &memories[LOCAL_EXPERTS], cell, 1)?;
                // SAFETY: as above.
                unsafe { to.write(1) };
            }
        }
        // SAFETY: the source is a whole row of the input, of a message or of scratch memory. The targets are whole rows
        // of outputs that their ranks have published for this operator, and no output overlaps the source. Rows are
        // distinct, as above; where a hostile source repeats one, it is written twice, one write after the other.
        unsafe { simd::scatter_row(comm.level, row.data, row_bytes, targets, self.streaming()) };
        let bytes = (remote_rows * (row_bytes + scale_bytes)) as u64;
        comm.domain_bytes.fetch_add(bytes, Relaxed);
        Ok(())
    }

    fn streaming(&self) -> bool {
        self.handle.layout.total_copies() * self.message.row_bytes > self.op.comm.config.host.streaming_bytes
    }

    /// The address of element `at` of `bytes` bytes in a memory of `owner`, to be written for a token of `source`.
    ///
    /// # Errors
    /// [`ep::PeerError`] when the memory has no such element.
    fn target(
        &self,
        [owner, source]: [Rank; 2],
        memory: &Option<PeerMemory>,
        at: usize,
        bytes: usize,
    ) -> Result<*mut u8> {
        let address = memory.as_ref().and_then(|memory| memory.element(at, bytes));
        address.ok_or_else(|| {
            // For this rank's own tokens the row numbers follow from the counts: `owner` published too little memory.
            // For other tokens, `source` sent the row number.
            let at_fault = if source == self.op.comm.rank { owner } else { source };
            let text = format!(
                "no element {at} of {bytes} bytes in a dispatch output of rank {owner}, for a token of rank {source}"
            );
            self.op.broken(at_fault, text)
        })
    }

    /// Zeroes the padding rows: those between the last token of an expert and the end of the expert's group of rows.
    fn zero_padding(&self, own: &PeerMemories) -> Result<()> {
        let zero = |memory: &Option<PeerMemory>, rows: &std::ops::Range<usize>, bytes: usize| -> Result<()> {
            for row in rows.clone() {
                let to = self.target([self.op.comm.rank; 2], memory, row, bytes)?;
                // SAFETY: the memory is this rank's own, and no copy has a padding row as its target.
                unsafe { simd::zero_row(self.op.comm.level, to, bytes, false) };
            }
            Ok(())
        };
        for rows in self.handle.shape.padding() {
            zero(&own[TOKENS], &rows, self.message.row_bytes)?;
            if self.message.scale_bytes > 0 {
                zero(&own[SCALES], &rows, self.message.scale_bytes)?;
            }
            if !matches!(self.probs, ProbSource::Skip) {
                zero(&own[PROBS], &rows, size_of::<f32>())?;
            }
        }
        Ok(())
    }
}

/// A message that is being packed into a claimed slot.
struct Outgoing<'a> {
    claim: ClaimedSlot,
    chunk: usize,
    /// First token of the chunk.
    first_token: usize,
    slot: *mut u8,
    sections: crate::message::Sections,
    /// Tokens and copies packed so far.
    tokens: usize,
    copies: usize,
    layout: &'a ep::DispatchLayout,
}

impl<'a> Outgoing<'a> {
    fn new(job: &Dispatch<'a>, claim: ClaimedSlot, chunk: usize, tokens: std::ops::Range<usize>) -> Self {
        let layout = &job.handle.layout;
        let all = tokens.clone().map(|token| layout.copies(token, claim.domain).len());
        let (count, copies) = all.fold((0, 0), |(n, m), len| (n + usize::from(len > 0), m + len));
        let slot = job.op.comm.rails.outgoing(claim);
        let sections = job.message.sections_within(count, copies, job.op.comm.rails.slot_bytes());
        let sections = sections.expect("chunks are sized to fit a slot");
        let header = Header::new(job.op, chunk, count, copies);
        // SAFETY: only this worker writes a claimed slot; it is longer than a header and 64-byte aligned.
        unsafe { header.write(slot) };
        Self { claim, chunk, first_token: tokens.start, slot, sections, tokens: 0, copies: 0, layout }
    }

    /// Appends a token, if it has a copy in the message's domain.
    fn push(&mut self, job: &Dispatch<'_>, token: usize, row: TokenRow) {
        let copies = self.layout.copies(token, self.claim.domain);
        if copies.is_empty() {
            return;
        }
        let (format, at) = (&job.message, self.tokens);
        let section =
            |start: usize, element: usize, index: usize| self.slot.wrapping_add(start + element * index);
        // SAFETY: all sections lie inside the slot (checked in `new`), which only this worker writes; they are aligned
        // to 64 bytes. The row and its scales are as long as the format says.
        unsafe {
            if format.lists {
                section(self.sections.index, 4, at).cast::<u32>().write((token - self.first_token) as u32);
                section(self.sections.ends, 4, at).cast::<u32>().write((self.copies + copies.len()) as u32);
                let to =
                    section(self.sections.copies, size_of::<TokenCopy>(), self.copies).cast::<TokenCopy>();
                to.copy_from_nonoverlapping(copies.as_ptr(), copies.len());
            }
            if format.probs {
                for (k, &copy) in copies.iter().enumerate() {
                    let prob = job.prob(token, self.claim.domain, k, copy);
                    section(self.sections.probs, 4, self.copies + k).cast::<f32>().write(prob);
                }
            }
            // No streaming stores: the transport, or the receiver of a lent slot, reads the slot soon.
            let to = section(self.sections.rows, format.row_bytes, at);
            simd::copy_row(job.op.comm.level, row.data, to, format.row_bytes, false);
            let to = section(self.sections.scales, format.scale_bytes, at);
            row.scales.copy_to_nonoverlapping(to, format.scale_bytes);
        }
        self.tokens += 1;
        self.copies += copies.len();
    }

    fn post(self, job: &Dispatch<'_>, idle: &mut Idle) -> Result<()> {
        debug_assert_eq!(
            Some(self.sections),
            job.message.sections_within(self.tokens, self.copies, self.sections.end),
            "chunk {}",
            self.chunk
        );
        job.op.post(idle, self.claim, self.sections.end)
    }
}
