//! Messages between domains: the layout of a slot, defined once for the sender and the receiver.
//!
//! A message is a [`Header`] and up to six sections, each at a multiple of 64 bytes: token indices, ends of the tokens'
//! copies, copies, probabilities, rows, scales. A [`Format`] says which sections exist. `preprocess`, `dispatch` and
//! `combine` write and open messages.

use std::ops::Range;

use ep::layout::TokenCopy;
use ep::{CallerError, Config, Rank, Result, Size, World};

use crate::comm::Op;
use crate::handle::ForwardList;
use crate::signature::SIGNATURE;

/// The first bytes of every message.
#[derive(Debug, Clone, Copy, PartialEq, Eq, bytemuck::Pod, bytemuck::Zeroable)]
#[repr(C)]
pub(crate) struct Header {
    step: u64,
    /// The sender's arguments, so that ranks with different calls get an error and not wrong data.
    signature: [u64; SIGNATURE],
    /// Number of the chunk of tokens.
    chunk: u32,
    /// Tokens in the message.
    tokens: u32,
    /// Copies in the message.
    copies: u32,
    _reserved: u32,
}

/// Alignment of a message's sections, bytes.
const ALIGN: usize = 64;

impl Header {
    pub(crate) fn new(op: &Op<'_>, chunk: usize, tokens: usize, copies: usize) -> Self {
        Self {
            step: op.step,
            signature: op.signature,
            chunk: chunk as u32,
            tokens: tokens as u32,
            copies: copies as u32,
            _reserved: 0,
        }
    }

    /// A header with step and signature 0, for fuzzing without an operator.
    #[cfg(feature = "fuzzing")]
    pub(crate) fn of_counts(chunk: usize, tokens: usize, copies: usize) -> Self {
        let [chunk, tokens, copies] = [chunk, tokens, copies].map(|count| count as u32);
        Self { step: 0, signature: [0; SIGNATURE], chunk, tokens, copies, _reserved: 0 }
    }

    /// Writes the header at the front of a slot.
    ///
    /// # Safety
    /// `slot` must be valid for writes of a header, and 8-byte aligned.
    pub(crate) unsafe fn write(self, slot: *mut u8) {
        // SAFETY: the caller promised a valid and aligned slot.
        unsafe { slot.cast::<Self>().write(self) }
    }

    /// Checks that the message belongs to this operator.
    fn check(&self, op: &Op<'_>, peer: Rank) -> Result<()> {
        op.check_signature(peer, &self.signature)?;
        if self.step != op.step {
            return Err(CallerError::Collective {
                operator: op.operator,
                field: "the number of operators called before",
                rank: op.comm.rank,
                mine: op.step.to_string(),
                peer,
                theirs: self.step.to_string(),
            }
            .into());
        }
        Ok(())
    }
}

/// A received message whose sections lie inside its slot.
///
/// A sender may change a slot at any time, so every number is read from the slot once, and that value is checked. Rows
/// and probabilities may have any bits.
#[derive(Debug)]
pub(crate) struct Message {
    slot: *const u8,
    format: Format,
    sections: Sections,
    /// Tokens in the message.
    pub(crate) tokens: usize,
    /// Copies in the message.
    pub(crate) copies: usize,
}

/// The tokens and experts that the lists of a message may contain.
#[derive(Debug, Clone)]
pub(crate) struct Source {
    /// The sender's tokens in the message's chunk.
    pub(crate) tokens: Range<usize>,
    /// Expert positions of this domain.
    pub(crate) positions: Range<usize>,
}

impl Message {
    /// Opens the message of `chunk` from `peer`.
    ///
    /// # Errors
    /// [`CallerError::Collective`] for a message of another call; [`ep::PeerError`] for one that does not fit its slot
    /// or is not of this chunk.
    ///
    /// # Safety
    /// `slot` must be valid for reads of `slot_bytes` bytes, at least a header's, as long as the message is used, and
    /// aligned to 64 bytes.
    pub(crate) unsafe fn open(
        slot: *const u8,
        slot_bytes: usize,
        format: Format,
        op: &Op<'_>,
        peer: Rank,
        chunk: usize,
    ) -> Result<Self> {
        // SAFETY: the caller promised a valid and aligned slot; any bytes are a header.
        let header = unsafe { slot.cast::<Header>().read_volatile() };
        header.check(op, peer)?;
        Self::of(header, slot, slot_bytes, format, chunk).map_err(|problem| op.broken(peer, problem))
    }

    /// Checks a header's chunk, and that the sections that it announces fit the slot.
    ///
    /// # Errors
    /// A text that says what was found.
    pub(crate) fn of(
        header: Header,
        slot: *const u8,
        slot_bytes: usize,
        format: Format,
        chunk: usize,
    ) -> Result<Self, String> {
        if header.chunk as usize != chunk {
            return Err(format!("a message of chunk {} where chunk {chunk} is due", header.chunk));
        }
        let (tokens, copies) = (header.tokens as usize, header.copies as usize);
        match format.sections_within(tokens, copies, slot_bytes) {
            Some(sections) => Ok(Self { slot, format, sections, tokens, copies }),
            None => Err(format!(
                "a message of {tokens} tokens and {copies} copies, more than a slot of {slot_bytes} bytes holds"
            )),
        }
    }

    /// Copies the message's lists out of the slot and checks them.
    ///
    /// # Errors
    /// A text that says which list entry violates the protocol.
    ///
    /// # Panics
    /// When the format has no lists.
    pub(crate) fn lists(&self, source: &Source) -> Result<ForwardList, String> {
        assert!(self.format.lists, "the format has no lists");
        let Sections { index, ends, copies, .. } = self.sections;
        let mut list = ForwardList::with_capacity(self.tokens, self.copies);
        let (mut next_token, mut begin) = (source.tokens.start, 0);
        for at in 0..self.tokens {
            // SAFETY: both sections have one word for each token of the message.
            let (index, end) = unsafe { (self.word(index, at), self.word(ends, at) as usize) };
            let token = source.tokens.start + index as usize;
            if !(next_token..source.tokens.end).contains(&token) {
                let left = next_token..source.tokens.end;
                return Err(format!("token {token} in a message, where one of {left:?} is due"));
            }
            if end <= begin || end > self.copies {
                let copies = self.copies;
                return Err(format!("copies {begin}..{end} of a token, in a message of {copies} copies"));
            }
            let mut next_position = source.positions.start;
            for copy in begin..end {
                // SAFETY: the section has two words for each copy of the message, and `end` is at most their number.
                let (position, row) =
                    unsafe { (self.word(copies, 2 * copy), self.word(copies, 2 * copy + 1)) };
                if !(next_position..source.positions.end).contains(&(position as usize)) {
                    let left = next_position..source.positions.end;
                    return Err(format!(
                        "a copy for expert position {position}, where one of {left:?} is due"
                    ));
                }
                next_position = position as usize + 1;
                list.add(TokenCopy { position, row });
            }
            list.close(token as u32);
            (next_token, begin) = (token + 1, end);
        }
        if begin != self.copies {
            return Err(format!("a list of {begin} copies in a message of {} copies", self.copies));
        }
        Ok(list)
    }

    /// Reads a 32-bit word of a section.
    ///
    /// # Safety
    /// The section that begins at offset `start` must have word `at`.
    unsafe fn word(&self, start: usize, at: usize) -> u32 {
        // SAFETY: the caller promised that the section has the word. Sections lie inside the slot, which is valid by
        // the promise to `open`, and are aligned to 64 bytes.
        unsafe { self.slot.add(start + 4 * at).cast::<u32>().read_volatile() }
    }

    /// The probability of a copy; 0 when the message has no probabilities.
    ///
    /// # Panics
    /// When the message has no such copy.
    pub(crate) fn prob(&self, copy: usize) -> f32 {
        if !self.format.probs {
            return 0.0;
        }
        assert!(copy < self.copies, "copy {copy} of a message with {}", self.copies);
        // SAFETY: the section has one word for each copy of the message.
        f32::from_bits(unsafe { self.word(self.sections.probs, copy) })
    }

    /// The address of a token's row, valid for reads of `row_bytes` of the format while the slot is claimed.
    ///
    /// # Panics
    /// When the message has no such token.
    pub(crate) fn row(&self, token: usize) -> *const u8 {
        assert!(token < self.tokens, "row {token} of a message with {}", self.tokens);
        self.slot.wrapping_add(self.sections.rows + token * self.format.row_bytes)
    }

    /// The address of a token's scales, valid for reads of `scale_bytes` of the format while the slot is claimed.
    ///
    /// # Panics
    /// When the message has no such token.
    pub(crate) fn scales(&self, token: usize) -> *const u8 {
        assert!(token < self.tokens, "scales {token} of a message with {}", self.tokens);
        self.slot.wrapping_add(self.sections.scales + token * self.format.scale_bytes)
    }
}

/// The contents of a message per token and per copy, from which the offsets of its sections follow.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) struct Format {
    /// Whether the message lists its tokens and copies. Otherwise the receiver knows them from its handle.
    pub(crate) lists: bool,
    /// Whether the message has a probability per copy.
    pub(crate) probs: bool,
    /// Bytes of a token's row.
    pub(crate) row_bytes: usize,
    /// Bytes of a token's scales; 0 without scales.
    pub(crate) scale_bytes: usize,
}

/// Offsets of the sections of one message.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) struct Sections {
    /// `[tokens]` u32: index of the token in its chunk.
    pub(crate) index: usize,
    /// `[tokens]` u32: end of the token's copies.
    pub(crate) ends: usize,
    /// `[copies]` [`TokenCopy`].
    pub(crate) copies: usize,
    /// `[copies]` f32.
    pub(crate) probs: usize,
    /// `[tokens, row_bytes]`.
    pub(crate) rows: usize,
    /// `[tokens, scale_bytes]`.
    pub(crate) scales: usize,
    /// Length of the message.
    pub(crate) end: usize,
}

impl Format {
    /// The sections of a message of `tokens` tokens and `copies` copies; `None` when it is longer than `slot_bytes`.
    pub(crate) fn sections_within(
        &self,
        tokens: usize,
        copies: usize,
        slot_bytes: usize,
    ) -> Option<Sections> {
        let sections = self.sections(tokens, copies)?;
        (sections.end <= slot_bytes).then_some(sections)
    }

    /// The sections of a message; `None` when it is longer than the address space.
    fn sections(&self, tokens: usize, copies: usize) -> Option<Sections> {
        let mut at = Size::new(size_of::<Header>());
        let mut section = |count: usize, bytes: usize| {
            let start = at.next_multiple_of(ALIGN);
            at = start + Size::new(count) * bytes;
            start.checked()
        };
        let lists = usize::from(self.lists);
        Some(Sections {
            index: section(tokens, lists * 4)?,
            ends: section(tokens, lists * 4)?,
            copies: section(copies, lists * size_of::<TokenCopy>())?,
            probs: section(copies, usize::from(self.probs) * 4)?,
            rows: section(tokens, self.row_bytes)?,
            scales: section(tokens, self.scale_bytes)?,
            end: at.checked()?,
        })
    }

    /// Tokens per chunk: the configured number, or fewer, so that a chunk fits a slot even with the greatest number of
    /// copies per token.
    ///
    /// # Errors
    /// [`CallerError::Config`] when one token does not fit a slot.
    pub(crate) fn chunk_tokens(&self, world: &World, config: &Config) -> Result<usize> {
        let topology = world.topology();
        if topology.domains() == 1 {
            return Ok(config.chunk_tokens);
        }
        let experts_of =
            |domain| topology.domain_ranks(domain).map(|rank| world.placement().local_experts(rank)).sum();
        let most_copies: usize = (0..topology.domains()).map(experts_of).max().unwrap_or(0);
        let fits = |tokens: usize| {
            let copies = (Size::new(tokens) * most_copies).checked();
            copies.and_then(|copies| self.sections_within(tokens, copies, config.host.slot_bytes)).is_some()
        };
        // The length of a message grows with the number of tokens, so bisection finds the largest number that fits.
        let (mut fitting, mut too_many) = (0, config.chunk_tokens + 1);
        while too_many - fitting > 1 {
            let middle = fitting + (too_many - fitting) / 2;
            if fits(middle) { fitting = middle } else { too_many = middle }
        }
        if fitting == 0 {
            let needed = self.sections(1, most_copies).map_or(Size::MAX, |sections| sections.end);
            return Err(CallerError::Config {
                key: "host.slot_bytes",
                value: config.host.slot_bytes.to_string(),
                problem: format!(
                    "one token of {} bytes with up to {most_copies} experts in a domain takes {needed} bytes; \
                     raise it with HYBRID_EP_SLOT_BYTES",
                    self.row_bytes
                ),
            }
            .into());
        }
        Ok(fitting)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn sections_do_not_overlap() {
        let format = Format { lists: true, probs: true, row_bytes: 48, scale_bytes: 4 };
        let s = format.sections(5, 11).unwrap();
        let ends = [s.index + 20, s.ends + 20, s.copies + 88, s.probs + 44, s.rows + 240, s.scales + 20];
        let starts = [s.ends, s.copies, s.probs, s.rows, s.scales, s.end];
        assert!(s.index >= size_of::<Header>());
        assert!(ends.iter().zip(starts).all(|(&end, start)| end <= start));
        assert!([s.index, s.copies, s.rows, s.scales].iter().all(|at| at.is_multiple_of(ALIGN)));
    }

    #[test]
    fn chunks_fit_their_slot_or_the_error_says_what_would() {
        let world = World::builder().ranks(4).domains(2).experts(64).build().unwrap();
        let mut config = Config::default();
        let format = Format { lists: true, probs: true, row_bytes: 4096, scale_bytes: 0 };
        for slot_bytes in [8 << 10, 100 << 10, 1 << 20] {
            config.host.slot_bytes = slot_bytes;
            let chunk = format.chunk_tokens(&world, &config).unwrap();
            assert!((1..=config.chunk_tokens).contains(&chunk));
            assert!(format.sections_within(chunk, 32 * chunk, slot_bytes).is_some());
            let next = format.sections_within(chunk + 1, 32 * (chunk + 1), slot_bytes);
            assert!(chunk == config.chunk_tokens || next.is_none());
        }
        config.host.slot_bytes = 4096;
        let error = format.chunk_tokens(&world, &config).unwrap_err().to_string();
        assert!(error.starts_with("host.slot_bytes = 4096: one token of 4096 bytes"), "{error}");
    }

    #[test]
    fn messages_longer_than_the_address_space_have_no_sections() {
        let format = Format { lists: true, probs: true, row_bytes: 1 << 30, scale_bytes: 1 << 24 };
        for (tokens, copies) in
            [(usize::MAX, 0), (0, usize::MAX), (1 << 33, 1), (usize::MAX / 4, usize::MAX / 8)]
        {
            assert_eq!(format.sections_within(tokens, copies, usize::MAX), None, "{tokens} {copies}");
        }
        // A row that is longer than any message is refused even with the largest slots.
        let world = World::builder().ranks(2).domains(2).experts(2).build().unwrap();
        let mut config = Config::default();
        config.chunk_tokens = usize::MAX - 1;
        config.host.slot_bytes = usize::MAX;
        let huge = Format { row_bytes: Size::MAX, ..format };
        assert!(huge.chunk_tokens(&world, &config).is_err());
    }

    /// The bytes of a slot, aligned as a slot is.
    struct Slot(Vec<[u64; 8]>);

    impl Slot {
        fn new(bytes: usize) -> Self {
            Self(vec![[0; 8]; bytes.div_ceil(64)])
        }

        fn bytes(&mut self) -> &mut [u8] {
            bytemuck::cast_slice_mut(&mut self.0)
        }

        fn put(&mut self, at: usize, words: &[u32]) {
            self.bytes()[at..at + 4 * words.len()].copy_from_slice(bytemuck::cast_slice(words));
        }

        fn header(&self) -> Header {
            *bytemuck::from_bytes(&bytemuck::cast_slice::<_, u8>(&self.0)[..size_of::<Header>()])
        }
    }

    const LISTED: Format = Format { lists: true, probs: true, row_bytes: 16, scale_bytes: 4 };
    const SOURCE: Source = Source { tokens: 40..44, positions: 6..9 };

    /// A valid message: tokens 40 and 43, with three copies.
    fn valid() -> (Slot, Message) {
        let mut slot = Slot::new(1024);
        let header =
            Header { step: 1, signature: [0; SIGNATURE], chunk: 10, tokens: 2, copies: 3, _reserved: 0 };
        slot.bytes()[..size_of::<Header>()].copy_from_slice(bytemuck::bytes_of(&header));
        let sections = LISTED.sections(2, 3).unwrap();
        slot.put(sections.index, &[0, 3]);
        slot.put(sections.ends, &[1, 3]);
        slot.put(sections.copies, &[6, 5, 7, 0, 8, u32::MAX]);
        let message = message(&slot).unwrap();
        (slot, message)
    }

    fn message(slot: &Slot) -> Result<Message, String> {
        Message::of(slot.header(), slot.0.as_ptr().cast(), 64 * slot.0.len(), LISTED, 10)
    }

    #[test]
    fn a_valid_message_is_read() {
        let (_slot, message) = valid();
        let list = message.lists(&SOURCE).unwrap();
        assert_eq!((list.entries(40..43), list.entries(43..44)), (0..1, 1..2));
        assert_eq!(list.copies(0), [TokenCopy { position: 6, row: 5 }]);
        assert_eq!(list.copies(1)[1], TokenCopy { position: 8, row: u32::MAX });
        assert_eq!((message.prob(2), list.copies_in(0..2)), (0.0, 3));
    }

    #[test]
    fn every_number_of_a_message_is_bounded() {
        let sections = LISTED.sections(2, 3).unwrap();
        let chunk = std::mem::offset_of!(Header, chunk);
        for (at, words, problem) in [
            (chunk, &[11][..], "chunk 11 where chunk 10 is due"),
            (chunk + 4, &[u32::MAX], "more than a slot of 1024 bytes holds"),
            (chunk + 4, &[1000], "more than a slot of 1024 bytes holds"),
            (chunk + 8, &[u32::MAX], "more than a slot of 1024 bytes holds"),
            (chunk + 8, &[2], "copies 1..3 of a token, in a message of 2 copies"),
            (chunk + 8, &[4], "copies "),
            (sections.index, &[4], "token 44 in a message, where one of 40..44 is due"),
            (sections.index, &[u32::MAX], "is due"),
            (sections.index, &[3, 3], "token 43 in a message, where one of 44..44 is due"),
            (sections.ends, &[0], "copies 0..0 of a token"),
            (sections.ends, &[3, 3], "copies 3..3 of a token"),
            (sections.ends, &[3, 2], "copies 3..2 of a token"),
            (sections.ends, &[u32::MAX], "copies 0..4294967295 of a token"),
            (sections.ends, &[1, 2], "a list of 2 copies in a message of 3 copies"),
            (sections.copies, &[9], "expert position 9, where one of 6..9 is due"),
            (sections.copies, &[5], "expert position 5"),
            (sections.copies, &[u32::MAX], "expert position 4294967295"),
            (sections.copies + 8, &[7, 0, 7], "expert position 7, where one of 8..9 is due"),
        ] {
            let (mut slot, _) = valid();
            slot.put(at, words);
            let found = message(&slot).and_then(|message| message.lists(&SOURCE)).unwrap_err();
            assert!(found.contains(problem), "{found}");
        }
    }

    proptest::proptest! {
        /// A message with any bytes is refused, or all its parts lie inside the slot and its copies inside the domain.
        #[test]
        fn no_message_reaches_beyond_its_slot(
            damage in proptest::collection::vec((0usize..256, proptest::prelude::any::<u32>()), 0..6),
            small in proptest::prelude::any::<bool>(),
        ) {
            let (mut slot, _) = valid();
            for (word, value) in damage {
                slot.put(4 * word, &[if small { value % 12 } else { value }]);
            }
            let Ok(message) = message(&slot) else { return Ok(()) };
            let end = slot.0.as_ptr().addr() + 1024;
            for token in 0..message.tokens {
                proptest::prop_assert!(message.row(token).addr() + 16 <= end);
                proptest::prop_assert!(message.scales(token).addr() + 4 <= end);
            }
            let _: f32 = (0..message.copies).map(|copy| message.prob(copy)).sum();
            let Ok(list) = message.lists(&SOURCE) else { return Ok(()) };
            proptest::prop_assert_eq!(list.copies_in(0..message.tokens), message.copies);
            for entry in 0..message.tokens {
                let copies = list.copies(entry);
                proptest::prop_assert!(!copies.is_empty() && copies.len() <= 3);
                proptest::prop_assert!(copies.iter().all(|copy| (6..9).contains(&copy.position)));
            }
        }
    }
}
