//! The file format of a cache entry: a checksum of everything after it, some lines of text, an empty line, the machine
//! code.
//!
//! ```text
//! hybrid-ep-cubin 1 3b0c...
//! key 9f86...
//! nvrtc 13.5
//! kernel copy registers 10 spill 0 shared 256 stack 0
//!
//! <machine code>
//! ```

use std::fmt::Write as _;

use sha2::{Digest, Sha256};

use super::program::Key;
use super::{Resources, Version};

const MAGIC: &str = "hybrid-ep-cubin 1 ";
const CHECKSUM_CHARS: usize = 64;

/// A compiled program in the cache.
#[derive(Debug, Clone, PartialEq)]
pub(super) struct Entry {
    pub(super) key: Key,
    /// The version of the compiler that made it.
    pub(super) nvrtc: Version,
    pub(super) resources: Vec<Resources>,
    pub(super) cubin: Vec<u8>,
}

impl Entry {
    pub(super) fn to_bytes(&self) -> Vec<u8> {
        let mut text = format!("key {}\nnvrtc {}\n", self.key, self.nvrtc);
        for r in &self.resources {
            // Writing to a string does not fail.
            let _ = writeln!(
                text,
                "kernel {} registers {} spill {} shared {} stack {}",
                r.kernel, r.registers, r.spill_bytes, r.static_shared_bytes, r.stack_bytes
            );
        }
        text.push('\n');
        Self::sealed(&[text.as_bytes(), &self.cubin].concat())
    }

    /// An entry: its first line, which has the checksum, and `body`.
    pub(super) fn sealed(body: &[u8]) -> Vec<u8> {
        [format!("{MAGIC}{}\n", checksum(body)).as_bytes(), body].concat()
    }

    /// Parses an entry for `key`.
    ///
    /// # Errors
    /// The reason why the bytes are not a complete entry for `key`.
    pub(super) fn from_bytes(bytes: &[u8], key: Key) -> Result<Self, &'static str> {
        let rest = bytes.strip_prefix(MAGIC.as_bytes()).ok_or("not a cache entry of this format")?;
        let (sum, rest) = rest.split_at_checked(CHECKSUM_CHARS).ok_or("cut short")?;
        let body = rest.strip_prefix(b"\n").ok_or("damaged")?;
        if checksum(body).as_bytes() != sum {
            return Err("damaged");
        }
        let end = body.windows(2).position(|pair| pair == b"\n\n").ok_or("its head has no end")?;
        let head = str::from_utf8(&body[..end]).map_err(|_| "its head is not text")?;
        let mut lines = head.lines();
        let mut field = |name: &str| lines.next()?.strip_prefix(name)?.strip_prefix(' ');
        if field("key") != Some(key.to_string().as_str()) {
            return Err("an entry for something else");
        }
        let nvrtc = field("nvrtc").and_then(Version::parse).ok_or("no compiler version")?;
        let resources = lines.map(parse_kernel).collect::<Option<_>>().ok_or("malformed resources")?;
        Ok(Self { key, nvrtc, resources, cubin: body[end + 2..].to_vec() })
    }
}

fn parse_kernel(line: &str) -> Option<Resources> {
    let words: Vec<&str> = line.split(' ').collect();
    let &["kernel", kernel, "registers", registers, "spill", spill, "shared", shared, "stack", stack] =
        words.as_slice()
    else {
        return None;
    };
    Some(Resources {
        kernel: kernel.to_owned(),
        registers: registers.parse().ok()?,
        spill_bytes: spill.parse().ok()?,
        static_shared_bytes: shared.parse().ok()?,
        stack_bytes: stack.parse().ok()?,
    })
}

fn checksum(bytes: &[u8]) -> String {
    let mut text = String::with_capacity(CHECKSUM_CHARS);
    for byte in Sha256::digest(bytes) {
        let _ = write!(text, "{byte:02x}");
    }
    text
}

#[cfg(test)]
pub(super) mod tests {
    use super::*;
    use crate::jit::{Arch, Program};

    pub(in crate::jit) const PROGRAM: Program =
        Program { name: "copy", source: "", headers: &[], defines: Vec::new() };

    pub(in crate::jit) fn entry() -> Entry {
        let kernel = |kernel: &str, registers| Resources {
            kernel: kernel.into(),
            registers,
            spill_bytes: 1,
            static_shared_bytes: 2,
            stack_bytes: 3,
        };
        Entry {
            key: Key::of(&PROGRAM, Arch::Sm90a),
            nvrtc: Version { major: 13, minor: 5 },
            resources: vec![kernel("copy", 10), kernel("copy_all", 255)],
            // Machine code that contains the separator of head and code.
            cubin: b"\x7fELF\0\n\n\n\xff".to_vec(),
        }
    }

    #[test]
    fn entries_survive_the_round_trip() {
        let bare = Entry { resources: Vec::new(), cubin: Vec::new(), ..entry() };
        for entry in [entry(), bare] {
            assert_eq!(Entry::from_bytes(&entry.to_bytes(), entry.key), Ok(entry));
        }
    }

    #[test]
    fn every_damaged_byte_is_detected() {
        let entry = entry();
        let bytes = entry.to_bytes();
        for at in 0..bytes.len() {
            let mut damaged = bytes.clone();
            damaged[at] ^= 1;
            assert!(Entry::from_bytes(&damaged, entry.key).is_err(), "byte {at}");
            assert!(Entry::from_bytes(&bytes[..at], entry.key).is_err(), "cut at {at}");
        }
        assert!(Entry::from_bytes(&[bytes.as_slice(), b"\0"].concat(), entry.key).is_err());
        let other = Key::of(&PROGRAM, Arch::Sm80);
        assert_eq!(Entry::from_bytes(&bytes, other), Err("an entry for something else"));
    }
}
