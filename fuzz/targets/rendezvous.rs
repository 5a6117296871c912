//! Bytes on the connections of a joining job, from unauthenticated processes and from members.

#![no_main]

use ep::join::fuzzing::{answer, call, converse, introduce, report};
use libfuzzer_sys::{Corpus, fuzz_target};

fuzz_target!(|data: &[u8]| -> Corpus { run(data) });

/// The first byte chooses the function that receives the rest.
fn run(data: &[u8]) -> Corpus {
    let Some((&first, rest)) = data.split_first() else { return Corpus::Reject };
    match first % 4 {
        0 => call(rest),
        1 => answer(rest),
        2 => converse(rest),
        _ => {
            report(rest);
            introduce(rest);
        }
    }
    Corpus::Keep
}
