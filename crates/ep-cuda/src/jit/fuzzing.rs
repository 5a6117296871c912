//! Entry point for the target in `fuzz/`: entries of the kernel cache.

use super::entry::Entry;
use super::program::Key;
use super::{Arch, Program, Resources, Version};

fn key() -> Key {
    let program = Program { name: "copy", source: "", headers: &[], defines: Vec::new() };
    Key::of(&program, Arch::Sm90a)
}

fn example() -> Entry {
    let resources = vec![Resources { kernel: "copy".into(), registers: 10, ..Resources::default() }];
    Entry { key: key(), nvrtc: Version { major: 13, minor: 0 }, resources, cubin: b"\x7fELF".to_vec() }
}

/// Parses an entry that has these bytes after the line with its key, and the correct checksum.
///
/// # Panics
/// When writing and parsing the entry again changes it.
pub fn entry(bytes: &[u8]) {
    let body = [format!("key {}\n", key()).as_bytes(), bytes].concat();
    if let Ok(entry) = Entry::from_bytes(&Entry::sealed(&body), key()) {
        assert_eq!(Entry::from_bytes(&entry.to_bytes(), key()), Ok(entry));
    }
}

/// An input of [`entry`] that is valid.
pub fn entry_of() -> Vec<u8> {
    let bytes = example().to_bytes();
    let lines = bytes.split_inclusive(|&byte| byte == b'\n').take(2).map(<[u8]>::len).sum::<usize>();
    bytes[lines..].to_vec()
}
