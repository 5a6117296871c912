//! Untrusted content of a rail's window, as a peer may write it: messages in slots, and the rings that announce them. Also
//! the status that a rank on another machine sends, and the blob of its engine.

#![no_main]

use ep_fabric::fuzzing::blob;
use ep_fuzz::expected;
use ep_host::fuzzing::{drive_rails, mirror_status, read_slot};
use libfuzzer_sys::{Corpus, fuzz_target};

fuzz_target!(|data: &[u8]| -> Corpus { run(data) });

/// The first byte chooses: the settings and the slot of a message, a script of ring operations, a status, or a blob.
fn run(data: &[u8]) -> Corpus {
    match data {
        [255, status @ ..] => mirror_status(status),
        [254, bytes @ ..] => blob(bytes),
        [first, flags, row_bytes, scale_bytes, slot @ ..] if first % 2 == 0 => {
            if let Err(problem) = read_slot(slot, &expected([*flags, *row_bytes, *scale_bytes])) {
                assert!(!problem.is_empty());
            }
        }
        [first, script @ ..] if first % 2 == 1 => drive_rails(script),
        _ => return Corpus::Reject,
    }
    Corpus::Keep
}
