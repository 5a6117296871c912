//! Parts: what a slot of a stream holds. A message travels in one part or several, because a slot has a fixed length.
//!
//! A part begins with a head of [`HEAD`] bytes, all little-endian:
//!
//! | offset | bytes | content |
//! |---|---|---|
//! | 0 | 4 | the lane of the message, or [`POSTED`] |
//! | 4 | 4 | number of bytes behind the head |
//! | 8 | 8 | length of the whole message |

use ep_migrate::Lane;

/// Bytes of the head.
pub(crate) const HEAD: usize = 16;
/// In place of a lane: the part has the numbers of receives that its sender has posted so far, by lane.
const POSTED: u32 = 0xFFFF;
/// Bytes of these numbers.
pub(crate) const COUNTS: usize = 8 * LANES;
/// Number of lanes.
pub(crate) const LANES: usize = Lane::ALL.len();

/// The head of a part.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum Part {
    /// `bytes` bytes of a message of `length` bytes, which follow those of the parts before.
    Message { lane: Lane, bytes: usize, length: u64 },
    /// Numbers of posted receives, [`COUNTS`] bytes.
    Posted,
}

impl Part {
    /// Number of bytes behind the head.
    pub(crate) fn bytes(self) -> usize {
        match self {
            Self::Message { bytes, .. } => bytes,
            Self::Posted => COUNTS,
        }
    }

    pub(crate) fn to_head(self) -> [u8; HEAD] {
        let (kind, length) = match self {
            Self::Message { lane, length, .. } => (lane as u32, length),
            Self::Posted => (POSTED, COUNTS as u64),
        };
        let mut head = [0; HEAD];
        head[..4].copy_from_slice(&kind.to_le_bytes());
        // A part fits a slot, whose length `Config` bounds to 1 GiB.
        head[4..8].copy_from_slice(&(self.bytes() as u32).to_le_bytes());
        head[8..].copy_from_slice(&length.to_le_bytes());
        head
    }

    /// Reads the head of a part in a slot that has `room` bytes behind the head.
    ///
    /// # Errors
    /// What no correct peer sends.
    pub(crate) fn parse(head: [u8; HEAD], room: usize) -> Result<Self, String> {
        let word = |at: usize| u32::from_le_bytes([head[at], head[at + 1], head[at + 2], head[at + 3]]);
        let (kind, bytes) = (word(0), word(4) as usize);
        let length = u64::from(word(8)) | u64::from(word(12)) << 32;
        if bytes > room {
            return Err(format!("a part of {bytes} bytes in a slot with room for {room}"));
        }
        if kind == POSTED {
            return match bytes {
                COUNTS => Ok(Self::Posted),
                _ => Err(format!("{bytes} bytes of numbers of receives, not {COUNTS}")),
            };
        }
        let lane = Lane::ALL.into_iter().find(|&lane| lane as u32 == kind);
        let lane = lane.ok_or_else(|| format!("a part of lane {kind}, which does not exist"))?;
        Ok(Self::Message { lane, bytes, length })
    }
}

/// The bytes of numbers of receives, by lane.
pub(crate) fn counts_to_bytes(counts: [u64; LANES]) -> [u8; COUNTS] {
    let mut bytes = [0; COUNTS];
    for (to, count) in bytes.as_chunks_mut().0.iter_mut().zip(counts) {
        *to = count.to_le_bytes();
    }
    bytes
}

/// The numbers of receives in these bytes.
pub(crate) fn counts_of(bytes: &[u8; COUNTS]) -> [u64; LANES] {
    let mut counts = [0; LANES];
    for (count, from) in counts.iter_mut().zip(bytes.as_chunks().0) {
        *count = u64::from_le_bytes(*from);
    }
    counts
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn heads_survive_the_way() {
        for lane in Lane::ALL {
            for (bytes, length) in [(0, 0), (7, 7), (4000, u64::MAX)] {
                let part = Part::Message { lane, bytes, length };
                assert_eq!(Part::parse(part.to_head(), 4000), Ok(part));
            }
        }
        assert_eq!(Part::parse(Part::Posted.to_head(), COUNTS), Ok(Part::Posted));
        let counts = [0, 1, u64::MAX, 3, 1 << 40];
        assert_eq!(counts_of(&counts_to_bytes(counts)), counts);
    }

    #[test]
    fn heads_that_no_correct_peer_sends_are_refused() {
        let head = |kind: u32, bytes: u32| {
            let mut head = [0; HEAD];
            head[..4].copy_from_slice(&kind.to_le_bytes());
            head[4..8].copy_from_slice(&bytes.to_le_bytes());
            head
        };
        for (head, expected) in [
            (head(0, 101), "a part of 101 bytes in a slot with room for 100"),
            (head(5, 1), "lane 5"),
            (head(u32::MAX, 1), "lane 4294967295"),
            (head(POSTED, 39), "39 bytes of numbers"),
            (head(0, u32::MAX), "room for 100"),
        ] {
            let found = Part::parse(head, 100).unwrap_err();
            assert!(found.contains(expected), "{found}");
        }
    }
}
