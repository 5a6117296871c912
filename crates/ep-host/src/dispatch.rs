//! Dispatch: tokens to expert ranks.
//!
//! A worker's turn is one of two kinds, whichever has something to do:
//! - *forward*: a chunk that arrived from another domain goes to its rows on the ranks of this one;
//! - *own*: a chunk of this rank's tokens goes to its rows in this domain, and once into a slot for each other domain.
//!
//! Nothing waits for all tokens: a chunk is forwarded while later ones are still being read at their source.

use std::sync::atomic::{AtomicBool, Ordering::Relaxed};
use std::sync::{Mutex, PoisonError};

use ep::layout::TokenCopy;
use ep::{CallerError, DispatchMode, Result, TokenFormat};

use crate::comm::{Idle, Op, PeerBuffers, PeerMemory, Waiting};
use crate::handle::{ForwardList, HostHandle};
use crate::memory::HostMemory;
use crate::message::{Format, Header};
use crate::rail::Claim;
use crate::schedule::{Messages, Schedule};
use crate::simd;

/// Places of the published memories.
pub(crate) const TOKENS: usize = 0;
pub(crate) const SCALES: usize = 1;
pub(crate) const PROBS: usize = 2;
pub(crate) const LOCAL_EXPERTS: usize = 3;

/// Probabilities that travel with the copies.
#[derive(Debug, Clone, Copy)]
pub(crate) enum Weights<'a> {
    Skip,
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
    pub(crate) weights: Weights<'a>,
    pub(crate) message: Format,
    pub(crate) state: State,
}

/// What the workers of a dispatch share and change.
pub(crate) struct State {
    schedule: Schedule,
    padded: AtomicBool,
    /// (domain, chunk, where its tokens go), as chunks arrive.
    learnt: Mutex<Vec<(usize, u32, ForwardList)>>,
}

impl State {
    pub(crate) fn new(op: &Op<'_>, handle: &HostHandle, chunk: usize) -> Self {
        let chunks = |domain: usize| handle.rail_tokens[domain].div_ceil(chunk) as u64;
        let own = chunks(op.comm.domain());
        let messages =
            (0..handle.rail_tokens.len()).map(|domain| Messages { sent: own, received: chunks(domain) });
        let schedule = Schedule::new(&op.comm.rails, handle.layout.tokens(), chunk, messages);
        Self { schedule, padded: AtomicBool::new(false), learnt: Mutex::default() }
    }
}

/// What one worker reuses from token to token.
struct Scratch {
    targets: Vec<*mut u8>,
    quantised: HostMemory,
    scales: HostMemory,
}

/// A token on its way: its row and scales as they travel.
#[derive(Clone, Copy)]
struct Row {
    data: *const u8,
    scales: *const u8,
}

impl Dispatch<'_> {
    /// One worker: takes turns until there is nothing left to start.
    pub(crate) fn work(&self, idle: &mut Idle) -> Result<()> {
        let mut scratch = Scratch {
            targets: Vec::with_capacity(16),
            quantised: HostMemory::normal(self.message.row_bytes),
            scales: HostMemory::normal(self.message.scale_bytes),
        };
        let rails = &self.op.comm.rails;
        let turn = |idle: &mut Idle, peers: &[PeerBuffers]| {
            if !self.state.padded.swap(true, Relaxed) {
                self.zero_padding(&peers[self.local_rank()])?;
            }
            let mut progressed = false;
            for domain in rails.others() {
                if let Some(claim) = self.state.schedule.claim_receive(rails, domain) {
                    self.forward(peers, claim, &mut scratch)?;
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

    /// Where the tokens of other domains go, in order; complete once all workers are done.
    pub(crate) fn into_learnt(self) -> Vec<ForwardList> {
        let mut learnt = self.state.learnt.into_inner().unwrap_or_else(PoisonError::into_inner);
        learnt.sort_unstable_by_key(|&(domain, chunk, _)| (domain, chunk));
        let mut lists = vec![ForwardList::default(); self.op.comm.world.topology.domains()];
        for (domain, _, list) in &learnt {
            lists[*domain].append(list);
        }
        lists
    }

    fn local_rank(&self) -> usize {
        self.op.comm.world.topology.local_rank_of(self.op.comm.rank)
    }

    /// The next chunk of own tokens, with a free slot for every other domain.
    fn claim_own(&self) -> Option<(usize, Vec<Claim>)> {
        let (rails, schedule) = (&self.op.comm.rails, &self.state.schedule);
        let claim = |domain| schedule.claim_send(rails, domain).map(|(_, claim)| claim);
        schedule.claim_own(rails, |domain| rails.can_send(domain), claim)
    }

    fn all_claimed(&self) -> bool {
        let (rails, schedule) = (&self.op.comm.rails, &self.state.schedule);
        schedule.next_own().is_none()
            && self.state.padded.load(Relaxed)
            && rails.others().all(|domain| schedule.left(rails, domain).received == 0)
    }

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
                what: format!("rank {peer} to take chunk {chunk} of dispatch off the rail"),
            };
        }
        let late = |domain: &usize| schedule.left(rails, *domain).received > 0;
        match rails.others().find(late) {
            Some(domain) => {
                let (peer, left) = (rails.peer(domain), schedule.left(rails, domain).received);
                Waiting { peer, what: format!("rank {peer} to send its last {left} chunks of dispatch") }
            }
            None => Waiting { peer: self.op.comm.rank, what: "its own workers".into() },
        }
    }

    /// Sends one chunk of this rank's tokens on its way.
    fn send_own(
        &self,
        peers: &[PeerBuffers],
        chunk: usize,
        claims: &[Claim],
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
            let prob = |at: usize| self.weight(token, home, at, copies[at]);
            self.place(peers, copies, prob, row, &mut scratch.targets)?;
        }
        for message in messages {
            message.post(self, idle)?;
        }
        Ok(())
    }

    /// The token's row as it travels: quantised here, once, when asked for.
    fn row(&self, token: usize, scratch: &mut Scratch) -> Row {
        let input_bytes = self.format.input_row_bytes(self.hidden);
        let input = &self.tokens[token * input_bytes..][..input_bytes];
        if let TokenFormat::QuantizeFp8(scale_format) = self.format {
            let (out, scales) = (scratch.quantised.as_bytes_mut(), scratch.scales.as_bytes_mut());
            simd::quantize_row(self.op.comm.level, bytemuck::cast_slice(input), scale_format, out, scales);
            return Row { data: out.as_ptr(), scales: scales.as_ptr() };
        }
        let scale_bytes = self.message.scale_bytes;
        let scales = if scale_bytes == 0 { &[] } else { &self.scales[token * scale_bytes..][..scale_bytes] };
        Row { data: input.as_ptr(), scales: scales.as_ptr() }
    }

    fn weight(&self, token: usize, domain: usize, at: usize, copy: TokenCopy) -> f32 {
        match self.weights {
            Weights::Skip => 0.0,
            Weights::Routing => self.handle.layout.weights(token, domain)[at],
            Weights::Dense(probs) => {
                let placement = &self.op.comm.world.placement;
                probs[token * placement.experts() + placement.expert_at(copy.position) as usize]
            }
        }
    }

    /// A chunk from another domain goes to its rows in this one.
    fn forward(&self, peers: &[PeerBuffers], claim: Claim, scratch: &mut Scratch) -> Result<()> {
        let rails = &self.op.comm.rails;
        let message = rails.incoming(claim);
        // SAFETY: a claimed slot is this worker's to read, and longer than a header.
        let header = unsafe { Header::read(message, self.op, rails.peer(claim.domain))? };
        let (tokens, copies) = (header.tokens as usize, header.copies as usize);
        let sections = self.message.sections(tokens, copies);
        assert!(sections.end <= rails.slot_bytes(), "a message is as long as its header says");
        // SAFETY: the sections lie inside the slot, are aligned to 64 bytes, and any bytes are valid elements. The
        // sender wrote them before its signal, and leaves them alone until the slot is released.
        let (index, ends, all_copies, probs) = unsafe {
            let lists = if self.message.lists { (tokens, copies) } else { (0, 0) };
            (
                std::slice::from_raw_parts(message.add(sections.index).cast::<u32>(), lists.0),
                std::slice::from_raw_parts(message.add(sections.ends).cast::<u32>(), lists.0),
                std::slice::from_raw_parts(message.add(sections.copies).cast::<TokenCopy>(), lists.1),
                std::slice::from_raw_parts(
                    message.add(sections.probs).cast::<f32>(),
                    if self.message.probs { copies } else { 0 },
                ),
            )
        };
        let first = header.chunk as usize * self.state.schedule.chunk();
        let known = self.handle.forwarded.get().map(|lists| &lists[claim.domain]);
        let places = known.map_or(0..0, |list| list.places(first..first + self.state.schedule.chunk()));
        let mut learnt = ForwardList::default();
        let mut copy = 0;
        for at in 0..tokens {
            let token_copies = match known {
                Some(list) => list.copies(places.start + at),
                None => {
                    let token_copies = &all_copies[copy..ends[at] as usize];
                    learnt.push(first as u32 + index[at], token_copies);
                    token_copies
                }
            };
            let row = Row {
                data: message.wrapping_add(sections.rows + at * self.message.row_bytes),
                scales: message.wrapping_add(sections.scales + at * self.message.scale_bytes),
            };
            let prob = |k: usize| probs.get(copy + k).copied().unwrap_or(0.0);
            self.place(peers, token_copies, prob, row, &mut scratch.targets)?;
            copy += token_copies.len();
        }
        if known.is_none() {
            let mut all = self.state.learnt.lock().unwrap_or_else(PoisonError::into_inner);
            all.push((claim.domain, header.chunk, learnt));
        }
        Ok(())
    }

    /// Writes one token to its rows on the ranks of this domain.
    fn place(
        &self,
        peers: &[PeerBuffers],
        copies: &[TokenCopy],
        prob: impl Fn(usize) -> f32,
        row: Row,
        targets: &mut Vec<*mut u8>,
    ) -> Result<()> {
        let comm = self.op.comm;
        let (row_bytes, scale_bytes) = (self.message.row_bytes, self.message.scale_bytes);
        targets.clear();
        let mut last = None;
        let mut remote_rows = 0;
        for (at, copy) in copies.iter().enumerate() {
            let owner = comm.world.placement.owner_at(copy.position);
            let buffers = &peers[comm.world.topology.local_rank_of(owner)];
            let row_number = copy.row as usize;
            if last != Some((owner, copy.row)) {
                last = Some((owner, copy.row));
                remote_rows += usize::from(owner != comm.rank);
                targets.push(self.target(&buffers[TOKENS], row_number, row_bytes)?);
                if scale_bytes > 0 {
                    let to = self.target(&buffers[SCALES], row_number, scale_bytes)?;
                    // SAFETY: `to` is this copy's own place in memory that its rank has opened to this operator.
                    unsafe { row.scales.copy_to_nonoverlapping(to, scale_bytes) };
                }
            }
            let local = comm.world.placement.positions_of(owner);
            let cell = match self.handle.mode {
                DispatchMode::Permuted { .. } => row_number,
                DispatchMode::Plain => row_number * local.len() + (copy.position as usize - local.start),
            };
            if !matches!(self.weights, Weights::Skip) {
                let to = self.target(&buffers[PROBS], cell, size_of::<f32>())?;
                // SAFETY: as above; 4-byte aligned, since memories are aligned to 64 bytes.
                unsafe { to.cast::<f32>().write(prob(at)) };
            }
            if buffers[LOCAL_EXPERTS].is_some() {
                let to = self.target(&buffers[LOCAL_EXPERTS], cell, 1)?;
                // SAFETY: as above.
                unsafe { to.write(1) };
            }
        }
        // SAFETY: the row is a whole row of input, of a message, or of scratch; every target is a copy's own row in
        // memory that its rank has opened to this operator, so none overlaps another.
        unsafe { simd::scatter_row(comm.level, row.data, row_bytes, targets, self.streaming()) };
        let bytes = (remote_rows * (row_bytes + scale_bytes)) as u64;
        comm.domain_bytes.fetch_add(bytes, Relaxed);
        Ok(())
    }

    fn streaming(&self) -> bool {
        self.handle.layout.total_copies() * self.message.row_bytes > self.op.comm.config.streaming_bytes
    }

    fn target(&self, memory: &Option<PeerMemory>, at: usize, bytes: usize) -> Result<*mut u8> {
        let place = memory.as_ref().and_then(|memory| memory.at(at * bytes, bytes));
        place.ok_or_else(|| {
            CallerError::Handle(format!(
                "a rank of the domain has no row {at} of {bytes} bytes in its dispatch output"
            ))
            .into()
        })
    }

    /// Rows between an expert's last token and the end of its segment are zero.
    fn zero_padding(&self, own: &PeerBuffers) -> Result<()> {
        let zero = |memory: &Option<PeerMemory>, rows: &std::ops::Range<usize>, bytes: usize| -> Result<()> {
            for row in rows.clone() {
                let to = self.target(memory, row, bytes)?;
                // SAFETY: own memory, in rows that no copy goes to.
                unsafe { simd::zero_row(self.op.comm.level, to, bytes, false) };
            }
            Ok(())
        };
        for rows in self.handle.shape.padding() {
            zero(&own[TOKENS], &rows, self.message.row_bytes)?;
            if self.message.scale_bytes > 0 {
                zero(&own[SCALES], &rows, self.message.scale_bytes)?;
            }
            if !matches!(self.weights, Weights::Skip) {
                zero(&own[PROBS], &rows, size_of::<f32>())?;
            }
        }
        Ok(())
    }
}

/// A message under construction in a claimed slot.
struct Outgoing<'a> {
    claim: Claim,
    chunk: usize,
    first_token: usize,
    slot: *mut u8,
    sections: crate::message::Sections,
    tokens: usize,
    copies: usize,
    layout: &'a ep::DispatchLayout,
}

impl<'a> Outgoing<'a> {
    fn new(job: &Dispatch<'a>, claim: Claim, chunk: usize, tokens: std::ops::Range<usize>) -> Self {
        let layout = &job.handle.layout;
        let all = tokens.clone().map(|token| layout.copies(token, claim.domain).len());
        let (count, copies) = all.fold((0, 0), |(n, m), len| (n + usize::from(len > 0), m + len));
        let slot = job.op.comm.rails.outgoing(claim);
        let header = Header::new(job.op, chunk, count, copies);
        // SAFETY: a claimed slot is this worker's to write, longer than a header, and 64-byte aligned.
        unsafe { header.write(slot) };
        let sections = job.message.sections(count, copies);
        assert!(sections.end <= job.op.comm.rails.slot_bytes(), "chunks are sized to fit a slot");
        Self { claim, chunk, first_token: tokens.start, slot, sections, tokens: 0, copies: 0, layout }
    }

    /// Appends a token, if it has a copy in the message's domain.
    fn push(&mut self, job: &Dispatch<'_>, token: usize, row: Row) {
        let copies = self.layout.copies(token, self.claim.domain);
        if copies.is_empty() {
            return;
        }
        let (format, at) = (&job.message, self.tokens);
        let section =
            |start: usize, element: usize, index: usize| self.slot.wrapping_add(start + element * index);
        // SAFETY: all sections lie inside the slot (checked in `new`), which is this worker's to write; they are
        // aligned to 64 bytes. The row and its scales are as long as the format says.
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
                    let prob = job.weight(token, self.claim.domain, k, copy);
                    section(self.sections.probs, 4, self.copies + k).cast::<f32>().write(prob);
                }
            }
            // Not past the caches: the transport reads the slot at once.
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
            self.sections,
            job.message.sections(self.tokens, self.copies),
            "chunk {}",
            self.chunk
        );
        job.op.post(idle, self.claim, self.sections.end)
    }
}
