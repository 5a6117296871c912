//! What a rank with GPUs reads: states of other ranks, what they send while joining, and entries of the kernel cache.

#![no_main]

use ep_cuda::fuzzing::{joining, state};
use ep_cuda::jit::fuzzing::entry;
use libfuzzer_sys::{Corpus, fuzz_target};

fuzz_target!(|data: &[u8]| -> Corpus { run(data) });

/// The first byte chooses the function that receives the rest.
fn run(data: &[u8]) -> Corpus {
    let Some((&first, rest)) = data.split_first() else { return Corpus::Reject };
    match first % 3 {
        0 => state(rest),
        1 => entry(rest),
        _ => joining(rest),
    }
    Corpus::Keep
}
