//! The bytes by which peers reach a window.

/// The first bytes of a blob. Change them with the format.
const MAGIC: &[u8; 8] = b"ep-fab 1";

/// What a peer needs to write to a rank's window.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(crate) struct Blob {
    /// The provider, which must be the same on all ranks.
    pub(crate) provider: String,
    /// The endpoint's address.
    pub(crate) address: Vec<u8>,
    /// The key of the window.
    pub(crate) key: u64,
    /// The address of the window's first byte for the provider: its virtual address, or 0.
    pub(crate) base: u64,
    /// The window's length, bytes.
    pub(crate) len: u64,
}

impl Blob {
    /// The greatest length of a provider's name, and of an address.
    const MOST: usize = 4096;

    pub(crate) fn to_bytes(&self) -> Vec<u8> {
        let mut bytes = MAGIC.to_vec();
        for word in [self.key, self.base, self.len] {
            bytes.extend(word.to_le_bytes());
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
        let (key, base, len) = (word()?, word()?, word()?);
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
        // Every offset in the window must be an address that the network can name.
        base.checked_add(len)?;
        rest.is_empty().then_some(Self { provider, address, key, base, len })
    }
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::*;

    proptest! {
        #[test]
        fn blobs_round_trip(provider in "[a-z;_]{1,20}", address: [u8; 16], key: u64, base: u32, len: u32) {
            let (base, len) = (base.into(), len.into());
            let blob = Blob { provider, address: address.to_vec(), key, base, len };
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
        let blob = |base, len| Blob { provider: "p".into(), address: vec![1], key: 0, base, len }.to_bytes();
        assert!(Blob::from_bytes(&blob(u64::MAX - 1, 1)).is_some());
        assert_eq!(Blob::from_bytes(&blob(u64::MAX, 1)), None);
    }
}
