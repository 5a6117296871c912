//! Entry points for the targets in `fuzz/`: they pass bytes that a peer could send to the code that reads them.

use crate::blob::{Blob, Part};

/// Parses `bytes` as the blob of a peer.
///
/// # Panics
/// When writing the blob again changes it, or when an offset in its window has no address.
pub fn blob(bytes: &[u8]) {
    let Some(blob) = Blob::from_bytes(bytes) else { return };
    assert_eq!(blob.to_bytes(), bytes);
    assert!(blob.parts.iter().all(|part| part.base.checked_add(part.len).is_some()));
}

/// A valid blob.
pub fn blob_of(provider: &str, address: &[u8]) -> Vec<u8> {
    let (provider, address) = (provider.into(), address.to_vec());
    let part = Part { key: 7, base: 1 << 40, len: 1 << 20 };
    Blob { provider, address, parts: vec![part; Blob::MOST_PARTS] }.to_bytes()
}
