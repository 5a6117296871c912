//! Preprocess exchanges counts, and their size does not depend on the number of tokens.

#![allow(clippy::unwrap_used)]

use ep::workload::Workload;
use ep::{Backend, Config, DispatchMode, World};
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
