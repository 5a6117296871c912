//! Messages between domains: how a slot's bytes are laid out, in one place for the sender and the receiver.

use ep::layout::TokenCopy;
use ep::{CallerError, Config, Rank, Result, World};

use crate::comm::Op;
use crate::control::SIGNATURE;

/// The front of every message.
#[derive(Debug, Clone, Copy, PartialEq, Eq, bytemuck::Pod, bytemuck::Zeroable)]
#[repr(C)]
pub(crate) struct Header {
    step: u64,
    /// The sender's call, so that ranks which called different things find out.
    signature: [u64; SIGNATURE],
    /// Which chunk of the source's tokens.
    pub(crate) chunk: u32,
    /// Tokens in the message.
    pub(crate) tokens: u32,
    /// Copies in the message.
    pub(crate) copies: u32,
    _reserved: u32,
}

/// Sections of a message start at a multiple of this.
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

    /// Writes the header at the front of a slot.
    ///
    /// # Safety
    /// `slot` must be valid for writes of a header, and 8-byte aligned.
    pub(crate) unsafe fn write(self, slot: *mut u8) {
        // SAFETY: the caller's.
        unsafe { slot.cast::<Self>().write(self) }
    }

    /// Reads the header of a message from `peer` and checks that it belongs to this operator.
    ///
    /// # Safety
    /// `slot` must be valid for reads of a header, and 8-byte aligned.
    pub(crate) unsafe fn read(slot: *const u8, op: &Op<'_>, peer: Rank) -> Result<Self> {
        // SAFETY: the caller's; any bytes are a header.
        let header = unsafe { slot.cast::<Self>().read() };
        op.check_signature(peer, &header.signature)?;
        if header.step != op.step {
            return Err(CallerError::Collective {
                operator: op.operator,
                field: "the number of operators called before",
                rank: op.comm.rank,
                mine: op.step.to_string(),
                peer,
                theirs: header.step.to_string(),
            }
            .into());
        }
        Ok(header)
    }
}

/// What a message carries per token and per copy; fixes where its sections are.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) struct Format {
    /// Whether the tokens' indices and copies are listed, or known to the receiver.
    pub(crate) lists: bool,
    /// Whether there is a probability per copy.
    pub(crate) probs: bool,
    /// Bytes of a token's row.
    pub(crate) row_bytes: usize,
    /// Bytes of a token's scales.
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
    /// Where the sections of a message of this many tokens and copies are.
    pub(crate) fn sections(&self, tokens: usize, copies: usize) -> Sections {
        let mut at = size_of::<Header>();
        let mut section = |bytes: usize| {
            at = at.next_multiple_of(ALIGN);
            let start = at;
            at += bytes;
            start
        };
        let lists = usize::from(self.lists);
        Sections {
            index: section(lists * 4 * tokens),
            ends: section(lists * 4 * tokens),
            copies: section(lists * size_of::<TokenCopy>() * copies),
            probs: section(usize::from(self.probs) * 4 * copies),
            rows: section(self.row_bytes * tokens),
            scales: section(self.scale_bytes * tokens),
            end: at,
        }
    }

    /// Tokens per chunk: as configured, or as many as fit a slot however many copies they have.
    ///
    /// # Errors
    /// [`CallerError::Config`] when not even one fits.
    pub(crate) fn chunk_tokens(&self, world: &World, config: &Config) -> Result<usize> {
        let topology = &world.topology;
        if topology.domains() == 1 {
            return Ok(config.chunk_tokens);
        }
        let experts_of =
            |domain| topology.domain_ranks(domain).map(|rank| world.placement.local_experts(rank)).sum();
        let most_copies: usize = (0..topology.domains()).map(experts_of).max().unwrap_or(0);
        let fits = |tokens: &usize| self.sections(*tokens, tokens * most_copies).end <= config.slot_bytes;
        // The sections grow with the tokens, so the largest number that fits can be bisected.
        let (mut fitting, mut too_many) = (0, config.chunk_tokens + 1);
        while too_many - fitting > 1 {
            let middle = fitting + (too_many - fitting) / 2;
            if fits(&middle) { fitting = middle } else { too_many = middle }
        }
        if fitting == 0 {
            let needed = self.sections(1, most_copies).end;
            return Err(CallerError::Config {
                key: "slot_bytes",
                value: config.slot_bytes.to_string(),
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
        let s = format.sections(5, 11);
        let ends = [s.index + 20, s.ends + 20, s.copies + 88, s.probs + 44, s.rows + 240, s.scales + 20];
        let starts = [s.ends, s.copies, s.probs, s.rows, s.scales, s.end];
        assert!(s.index >= size_of::<Header>());
        assert!(ends.iter().zip(starts).all(|(&end, start)| end <= start));
        assert!([s.index, s.copies, s.rows, s.scales].iter().all(|at| at.is_multiple_of(ALIGN)));
    }

    #[test]
    fn chunks_fit_their_slot_or_the_error_says_what_would() {
        let world = World::new(4, 2, 64).unwrap();
        let mut config = Config::default();
        let format = Format { lists: true, probs: true, row_bytes: 4096, scale_bytes: 0 };
        for slot_bytes in [8 << 10, 100 << 10, 1 << 20] {
            config.slot_bytes = slot_bytes;
            let chunk = format.chunk_tokens(&world, &config).unwrap();
            assert!((1..=config.chunk_tokens).contains(&chunk));
            assert!(format.sections(chunk, 32 * chunk).end <= slot_bytes);
            let next = format.sections(chunk + 1, 32 * (chunk + 1)).end;
            assert!(chunk == config.chunk_tokens || next > slot_bytes);
        }
        config.slot_bytes = 4096;
        let error = format.chunk_tokens(&world, &config).unwrap_err().to_string();
        assert!(error.starts_with("slot_bytes = 4096: one token of 4096 bytes"), "{error}");
    }
}
