//! The bytes by which peers reach a window.

/// The first bytes of a blob. Change them with the format.
const MAGIC: &[u8; 8] = b"ep-fab 2";

/// A part of a window: a registered region.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) struct Part {
    /// The key of the region.
    pub(crate) key: u64,
    /// The address of its first byte for the provider: its virtual address, or 0.
    pub(crate) base: u64,
    /// Length, bytes.
    pub(crate) len: u64,
}

/// What a peer needs to write to a rank's window.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(crate) struct Blob {
    /// The provider, which must be the same on all ranks.
    pub(crate) provider: String,
    /// The endpoint's address.
    pub(crate) address: Vec<u8>,
    /// The parts of the window, in order of their offsets: that in host memory, and that in the memory of a GPU, if there is one.
    pub(crate) parts: Vec<Part>,
}

impl Blob {
    /// The greatest length of a provider's name, and of an address.
    const MOST: usize = 4096;
    /// The greatest number of parts of a window.
    pub(crate) const MOST_PARTS: usize = 2;

    pub(crate) fn to_bytes(&self) -> Vec<u8> {
        let mut bytes = MAGIC.to_vec();
        bytes.extend((self.parts.len() as u64).to_le_bytes());
        for Part { key, base, len } in &self.parts {
            [key, base, len].into_iter().for_each(|word| bytes.extend(word.to_le_bytes()));
        }
        for part in [self.provider.as_bytes(), &self.address] {
            bytes.extend((part.len() as u16).to_le_bytes());
            bytes.extend(part);
        }
        bytes
    }

    /// Reads a blob of a peer; `None` when it is malformed.
    pub(crate) fn from_bytes(bytes: &[u8]) -> Option<Self> {
        let mut rest = bytes.strip_prefix(MAGIC)?;
        let mut word = || {
            let (word, tail) = rest.split_first_chunk()?;
            rest = tail;
            Some(u64::from_le_bytes(*word))
        };
        let count = usize::try_from(word()?).ok().filter(|count| (1..=Self::MOST_PARTS).contains(count))?;
        let mut parts = Vec::with_capacity(count);
        for _ in 0..count {
            let part = Part { key: word()?, base: word()?, len: word()? };
            // Every offset in the part must be an address that the network can name.
            part.base.checked_add(part.len)?;
            parts.push(part);
        }
        parts.iter().try_fold(0u64, |all, part| all.checked_add(part.len))?;
        let mut part = || {
            let (len, tail) = rest.split_first_chunk()?;
            let len = usize::from(u16::from_le_bytes(*len));
            if len == 0 || len > Self::MOST || len > tail.len() {
                return None;
            }
            let (part, tail) = tail.split_at(len);
            rest = tail;
            Some(part.to_vec())
        };
        let (provider, address) = (String::from_utf8(part()?).ok()?, part()?);
        rest.is_empty().then_some(Self { provider, address, parts })
    }
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::*;

    proptest! {
        #[test]
        fn blobs_round_trip(
            provider in "[a-z;_]{1,20}",
            address: [u8; 16],
            parts in prop::collection::vec(any::<(u64, u32, u32)>(), 1..=Blob::MOST_PARTS),
        ) {
            let part = |(key, base, len): (u64, u32, u32)| Part { key, base: base.into(), len: len.into() };
            let parts = parts.into_iter().map(part).collect();
            let blob = Blob { provider, address: address.to_vec(), parts };
            let bytes = blob.to_bytes();
            prop_assert_eq!(Blob::from_bytes(&bytes), Some(blob));
            for end in 0..bytes.len() {
                prop_assert_eq!(Blob::from_bytes(&bytes[..end]), None);
            }
            prop_assert_eq!(Blob::from_bytes(&[&bytes[..], b"x"].concat()), None);
        }

        #[test]
        fn any_bytes_are_read_without_a_panic(bytes: Vec<u8>) {
            let _ = Blob::from_bytes(&bytes);
            let _ = Blob::from_bytes(&[&MAGIC[..], &bytes].concat());
        }
    }

    #[test]
    fn a_window_beyond_the_last_address_is_refused() {
        let blob = |parts: &[(u64, u64)]| {
            let parts = parts.iter().map(|&(base, len)| Part { key: 0, base, len }).collect();
            Blob::from_bytes(&Blob { provider: "p".into(), address: vec![1], parts }.to_bytes())
        };
        assert!(blob(&[(u64::MAX - 1, 1)]).is_some());
        assert_eq!(blob(&[(u64::MAX, 1)]), None);
        assert!(blob(&[(0, 1), (0, u64::MAX - 1)]).is_some());
        assert_eq!(blob(&[(0, 1), (0, u64::MAX)]), None);
        assert_eq!(blob(&[]), None);
        assert_eq!(blob(&[(0, 1); 3]), None);
    }
}
