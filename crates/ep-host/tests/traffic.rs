//! Bytes that a rank exchanges: counts in preprocess, whose size does not depend on the number of tokens, and rows of other
//! ranks in dispatch and combine.

#![allow(clippy::unwrap_used)]

use ep::workload::Workload;
use ep::{
    Backend, CombineInput, CombineOutput, Config, DispatchInput, DispatchMode, DispatchOutput, Probs,
    Routing, TokenFormat, World,
};
use ep_host::HostBuffer;

#[test]
fn preprocess_exchanges_only_counts() {
    for (ranks, domains, experts) in [(1, 1, 4), (4, 1, 16), (4, 2, 16), (6, 3, 12)] {
        for tokens in [0, 3, 300] {
            let world = World::builder().ranks(ranks).domains(domains).experts(experts).build().unwrap();
            let buffers = HostBuffer::threads(&world, &Config::default()).unwrap();
            std::thread::scope(|scope| {
                for mut buffer in buffers {
                    scope.spawn(move || {
                        let workload = Workload { tokens, experts, topk: 3, skew: 0.0, seed: 1 };
                        let routing = workload.routing(buffer.rank());
                        buffer.preprocess(&routing, DispatchMode::Plain, None).unwrap();
                        let words = (ranks - 1) * (experts + ranks + 3);
                        assert_eq!(buffer.traffic().preprocess_bytes, 4 * words as u64);
                    });
                }
            });
        }
    }
}

#[test]
fn dispatch_and_combine_count_rows_of_other_ranks_and_scales() {
    const TOKENS: usize = 5;
    const HIDDEN: usize = 256;
    let world = World::builder().ranks(2).experts(4).build().unwrap();
    let buffers = HostBuffer::threads(&world, &Config::default()).unwrap();
    std::thread::scope(|scope| {
        for mut buffer in buffers {
            scope.spawn(move || {
                // Each token has one expert on its own rank, and two on the other rank, which share a row.
                let own = 2 * buffer.rank().0 as i32;
                let other = 2 - own;
                let experts = [own, other, other + 1].repeat(TOKENS);
                let routing = Routing::from_topk(buffer.rank(), 4, 3, &experts, &[1.0; 3 * TOKENS]);
                let handle = buffer.preprocess(&routing.unwrap(), DispatchMode::Plain, None).unwrap();
                let rows = buffer.receive_shape(&handle).unwrap().allocated_rows();
                let tokens = buffer.alloc(TOKENS * 2 * HIDDEN).unwrap();
                let [mut out, mut scales] = [HIDDEN, 8].map(|bytes| buffer.alloc(rows * bytes).unwrap());
                let format = TokenFormat::QuantizeFp8(ep::ScaleFormat::F32Per128);
                let input = DispatchInput::new(&tokens, HIDDEN).format(format).probs(Probs::Skip);
                buffer.dispatch(&handle, input, DispatchOutput::new(&mut out).scales(&mut scales)).unwrap();
                let dispatched = (TOKENS * (HIDDEN + 8)) as u64;
                assert_eq!(buffer.traffic().domain_bytes, dispatched);
                let sums = buffer.alloc(rows * 2 * HIDDEN).unwrap();
                let mut back = buffer.alloc(TOKENS * 2 * HIDDEN).unwrap();
                buffer
                    .combine(&handle, CombineInput::new(&sums, HIDDEN), CombineOutput::new(&mut back))
                    .unwrap();
                assert_eq!(buffer.traffic().domain_bytes, dispatched + (TOKENS * 2 * HIDDEN) as u64);
            });
        }
    });
}
