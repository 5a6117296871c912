//! Untrusted routing traces (`.safetensors`): refused with a message, or valid and spread over any number of ranks.

#![no_main]

use ep::Routing;
use ep::trace::RoutingTrace;
use libfuzzer_sys::{Corpus, fuzz_target};

fuzz_target!(|data: &[u8]| -> Corpus { run(data) });

/// If the first byte is 0, the rest is the file. Otherwise the rest is the file's header, a zero byte, and the tensors,
/// and this function adds the header's length, which random changes would seldom keep correct.
fn run(data: &[u8]) -> Corpus {
    let Some((&first, rest)) = data.split_first() else { return Corpus::Reject };
    if first == 0 {
        check(rest);
        return Corpus::Keep;
    }
    let end = rest.iter().position(|&byte| byte == 0).unwrap_or(rest.len());
    let (header, tensors) = rest.split_at(end);
    let mut file = (header.len() as u64).to_le_bytes().to_vec();
    file.extend(header);
    file.extend(tensors.get(1..).unwrap_or_default());
    check(&file);
    Corpus::Keep
}

fn check(file: &[u8]) {
    let trace = match RoutingTrace::from_bytes(file) {
        Ok(trace) => trace,
        Err(problem) => {
            assert!(!problem.is_empty());
            return;
        }
    };
    for layer in 0..trace.layers.len() {
        let tokens: usize = trace.layers[layer].iter().map(Routing::tokens).sum();
        // Bounds the time of one input: a token takes few bytes of a file.
        if tokens > 1 << 16 {
            return;
        }
        for ranks in [1, 2, 7] {
            let spread = trace.spread(layer, ranks).expect("what was read can be spread");
            assert_eq!(spread.len(), ranks);
            assert_eq!(spread.iter().map(Routing::tokens).sum::<usize>(), tokens);
            for (_, (experts, weights)) in spread.iter().flat_map(|routing| routing.rows().enumerate()) {
                assert!(experts.is_sorted_by(|a, b| a < b) && experts.len() <= trace.topk);
                assert!(experts.iter().all(|&expert| (expert as usize) < trace.experts));
                assert!(weights.iter().all(|weight| weight.is_finite()));
            }
        }
    }
}
