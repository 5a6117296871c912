//! Bytes of a migration of experts: headers and messages of peers, and saved states.

#![no_main]

use ep_migrate::fuzzing::{header, state, weights};
use libfuzzer_sys::{Corpus, fuzz_target};

fuzz_target!(
    init: {
        // Run the codecs on this thread: waking other threads takes longer than decoding.
        rayon::ThreadPoolBuilder::new().num_threads(1).use_current_thread().build_global().expect("the first pool");
    },
    |data: &[u8]| -> Corpus { run(data) }
);

/// The first byte chooses the function that receives the rest.
fn run(data: &[u8]) -> Corpus {
    let Some((&first, rest)) = data.split_first() else { return Corpus::Reject };
    match first % 3 {
        0 => header(rest),
        1 => weights(rest),
        _ => state(rest),
    }
    Corpus::Keep
}
