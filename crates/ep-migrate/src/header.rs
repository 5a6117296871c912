//! The header of a message, 64 bytes. All numbers are little-endian.
//!
//! | offset | bytes | field |
//! |---|---|---|
//! | 0 | 4 | `EPMG` |
//! | 4 | 1 | version, 2 |
//! | 5 | 1 | kind of message |
//! | 6 | 2 | streams of each expert in the body |
//! | 8 | 4 | rank of the sender |
//! | 12 | 4 | layer |
//! | 16 | 8 | step |
//! | 24 | 8 | bytes of the body |
//! | 32 | 8 | run |
//! | 40 | 4 | `Failure`: the rank at fault; `Alive`: 1 if the sender waits for another rank |
//! | 44 | 4 | `Failure`: code of the fault |
//! | 48 | 8 | maximum bytes of a regular body of this kind, as the sender computes it; 0 without a body |
//! | 56 | 8 | XXH64 of bytes 0 .. 56 |
//!
//! The body needs no digest here, because each of its streams has one.

use ep::{PeerFault, Rank};
use ep_codec::xxh64;

/// Bytes of a header.
pub const HEADER_BYTES: usize = 64;
const MAGIC: [u8; 4] = *b"EPMG";
const VERSION: u8 = 2;
const CHECKED: usize = HEADER_BYTES - 8;

/// What a message is.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum Kind {
    /// Weights of the sender's experts of a layer.
    Weights,
    /// The same, complete, for a receiver that asked for them with `Request`.
    Resent,
    /// Gradients of the receiver's experts of a layer.
    Gradients,
    /// The sender's replicas of a layer lack the base of the last weights. No body.
    Request,
    /// The sender cannot go on because of a rank at fault. No body, and no message follows.
    Failure(Rank, PeerFault),
    /// The sender has closed its migration. No body, and no message follows.
    Left,
    /// The sender has waited for the receiver for its whole timeout. No body. The receiver answers with `Alive`.
    Ask,
    /// The sender's process runs. No body.
    Alive(Wait),
}

/// What a rank that answers `Ask` is doing.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum Wait {
    /// It waits for messages of another rank.
    Blocked = 1,
    /// It waits for no message.
    Free = 0,
}

/// A parsed header.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) struct Header {
    pub(crate) kind: Kind,
    /// Number of streams of each expert in the body.
    pub(crate) streams: u16,
    pub(crate) sender: Rank,
    pub(crate) layer: u32,
    pub(crate) step: u64,
    /// Length of the body.
    pub(crate) bytes: u64,
    /// The number of the job, the same on all its ranks.
    pub(crate) run: u64,
    /// Maximum number of bytes of a regular body of this kind. A body that is longer than the receive that a peer has
    /// posted for it can end the peer's process, so the ranks compare this number before they post receives ahead.
    pub(crate) regular: u64,
}

impl Header {
    /// A message without a body.
    pub(crate) fn bare(kind: Kind, sender: Rank, run: u64) -> Self {
        Self { kind, streams: 0, sender, layer: 0, step: 0, bytes: 0, run, regular: 0 }
    }

    pub(crate) fn to_bytes(self) -> Vec<u8> {
        let (kind, rank, fault) = match self.kind {
            Kind::Weights => (1, 0, 0),
            Kind::Resent => (2, 0, 0),
            Kind::Gradients => (3, 0, 0),
            Kind::Request => (4, 0, 0),
            Kind::Failure(rank, fault) => (5, rank.0, u32::from(fault.code())),
            Kind::Left => (6, 0, 0),
            Kind::Ask => (7, 0, 0),
            Kind::Alive(wait) => (8, wait as u32, 0),
        };
        let mut bytes = Vec::with_capacity(HEADER_BYTES);
        bytes.extend(MAGIC);
        bytes.extend([VERSION, kind]);
        bytes.extend(self.streams.to_le_bytes());
        bytes.extend(self.sender.0.to_le_bytes());
        bytes.extend(self.layer.to_le_bytes());
        for word in [self.step, self.bytes, self.run] {
            bytes.extend(word.to_le_bytes());
        }
        bytes.extend(rank.to_le_bytes());
        bytes.extend(fault.to_le_bytes());
        bytes.extend(self.regular.to_le_bytes());
        let check = xxh64(&bytes, 0);
        bytes.extend(check.to_le_bytes());
        bytes
    }

    /// Parses a header; the error says what is wrong with it.
    pub(crate) fn parse(bytes: &[u8]) -> Result<Self, String> {
        let bytes: &[u8; HEADER_BYTES] = bytes
            .try_into()
            .map_err(|_| format!("a header of {} bytes instead of {HEADER_BYTES}", bytes.len()))?;
        let word = |at: usize| u64::from_le_bytes(std::array::from_fn(|i| bytes[at + i]));
        let half = |at: usize| u32::from_le_bytes(std::array::from_fn(|i| bytes[at + i]));
        if bytes[..4] != MAGIC {
            return Err("a message that does not begin with a header".into());
        }
        if bytes[4] != VERSION {
            return Err(format!("a header of version {}; this library has version {VERSION}", bytes[4]));
        }
        if word(CHECKED) != xxh64(&bytes[..CHECKED], 0) {
            return Err("a damaged header".into());
        }
        let kind = match bytes[5] {
            1 => Kind::Weights,
            2 => Kind::Resent,
            3 => Kind::Gradients,
            4 => Kind::Request,
            5 => Kind::Failure(Rank(half(40)), PeerFault::from_code(half(44))),
            6 => Kind::Left,
            7 => Kind::Ask,
            8 => Kind::Alive(if half(40) == Wait::Blocked as u32 { Wait::Blocked } else { Wait::Free }),
            kind => return Err(format!("a message of unknown kind {kind}")),
        };
        Ok(Self {
            kind,
            streams: u16::from_le_bytes([bytes[6], bytes[7]]),
            sender: Rank(half(8)),
            layer: half(12),
            step: word(16),
            bytes: word(24),
            run: word(32),
            regular: word(48),
        })
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_header_survives_the_way_there_and_back() {
        let kinds = [
            Kind::Weights,
            Kind::Resent,
            Kind::Gradients,
            Kind::Request,
            Kind::Failure(Rank(7), PeerFault::Stalled),
            Kind::Left,
            Kind::Ask,
            Kind::Alive(Wait::Blocked),
            Kind::Alive(Wait::Free),
        ];
        for kind in kinds {
            let bare = Header::bare(kind, Rank(3), 11);
            let header = Header { streams: 2, layer: 5, step: 1 << 40, bytes: 77, regular: 1 << 33, ..bare };
            assert_eq!(header.to_bytes().len(), HEADER_BYTES);
            assert_eq!(Header::parse(&header.to_bytes()), Ok(header));
        }
    }

    #[test]
    fn every_damaged_bit_of_a_header_is_found() {
        let bytes = Header::bare(Kind::Left, Rank(1), 9).to_bytes();
        for bit in 0..HEADER_BYTES * 8 {
            let mut damaged = bytes.clone();
            damaged[bit / 8] ^= 1 << (bit % 8);
            assert!(Header::parse(&damaged).is_err(), "bit {bit}");
        }
        assert!(Header::parse(&bytes[1..]).unwrap_err().contains("63 bytes"));
    }
}
