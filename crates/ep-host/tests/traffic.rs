//! Bytes that a rank exchanges: counts in preprocess, whose size does not depend on the number of tokens; rows of other
//! ranks in dispatch and combine; and along rails, each token once for every other domain that needs it.

#![allow(clippy::unwrap_used)]

use ep::workload::Workload;
use ep::{
    Backend, BackendExt as _, CombineInput, CombineOutput, Config, DispatchInput, DispatchMode,
    DispatchOutput, Probs, Routing, TokenFormat, World,
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

/// Bytes of a message besides the data of tokens and copies: the header, and the alignment of six sections.
const MESSAGE_BYTES: usize = 80 + 6 * 63;

/// Numbers of tokens and copies that a rank sends to other domains, and whose sums it receives. A token counts once for
/// each domain that needs it.
fn crossing(world: &World, routing: &Routing) -> (usize, usize) {
    let own = world.topology().domain_of(routing.rank());
    let mut tokens = 0;
    let mut copies = 0;
    for (experts, _) in routing.rows() {
        let placement = world.placement();
        let domains = experts.iter().map(|&expert| placement.domain_at(placement.position_of(expert)));
        let mut others: Vec<usize> = domains.filter(|&domain| domain != own).collect();
        copies += others.len();
        others.sort_unstable();
        others.dedup();
        tokens += others.len();
    }
    (tokens, copies)
}

#[test]
fn rails_carry_each_token_once_for_every_domain() {
    const HIDDEN: usize = 96;
    const ROW: usize = 2 * HIDDEN;
    for (ranks, domains, tokens, topk, mode) in [
        (2, 2, 70, 3, DispatchMode::Plain),
        (4, 2, 200, 6, DispatchMode::Plain),
        (4, 4, 33, 8, DispatchMode::permuted(4).unwrap()),
        (6, 3, 129, 1, DispatchMode::permuted(1).unwrap()),
        (4, 2, 0, 2, DispatchMode::Plain),
    ] {
        let world = World::builder().ranks(ranks).domains(domains).experts(24).build().unwrap();
        for lend in [false, true] {
            let mut config = Config::default();
            config.host.lend = lend;
            let buffers = HostBuffer::threads(&world, &config).unwrap();
            std::thread::scope(|scope| {
                for mut buffer in buffers {
                    let world = &world;
                    scope.spawn(move || {
                        let workload = Workload { tokens, experts: 24, topk, skew: 0.5, seed: 7 };
                        let routing = workload.routing(buffer.rank());
                        let (sent, copies) = crossing(world, &routing);
                        // The sums that this rank returns to its rail peers.
                        let topology = world.topology();
                        let own = topology.domain_of(buffer.rank());
                        let peers = topology.rail_ranks(topology.local_rank_of(buffer.rank()));
                        let peers = peers.filter(|&peer| peer != buffer.rank());
                        let mut returned = 0;
                        for peer in peers {
                            for (experts, _) in workload.routing(peer).rows() {
                                let placement = world.placement();
                                let here =
                                    |&expert: &u32| placement.domain_at(placement.position_of(expert)) == own;
                                returned += usize::from(experts.iter().any(here));
                            }
                        }
                        let mut before = (0, 0);
                        let mut since = |buffer: &HostBuffer| {
                            let traffic = buffer.traffic();
                            let now = (traffic.transport_bytes as usize, traffic.transport_messages as usize);
                            let passed = (now.0 - before.0, now.1 - before.1);
                            before = now;
                            passed
                        };
                        let handle = buffer.preprocess(&routing, mode, None).unwrap();
                        since(&buffer);
                        let input = buffer.alloc(tokens * ROW).unwrap();
                        // The first dispatch of a handle also sends the lists; its rows and weights are those of any other.
                        for lists in [8 * sent + 8 * copies, 0] {
                            let received =
                                buffer.dispatch_new(&handle, DispatchInput::new(&input, HIDDEN)).unwrap();
                            let (bytes, messages) = since(&buffer);
                            let data = sent * ROW + 4 * copies + lists;
                            assert!(
                                (data..=data + messages * MESSAGE_BYTES).contains(&bytes),
                                "dispatch: {bytes} {data} {messages}"
                            );
                            assert_eq!(messages == 0, tokens == 0);
                            let sums = CombineInput::new(&received.tokens, HIDDEN);
                            buffer.combine_new(&handle, sums).unwrap();
                            let (bytes, messages) = since(&buffer);
                            let data = returned * ROW;
                            assert!(
                                (data..=data + messages * MESSAGE_BYTES).contains(&bytes),
                                "combine: {bytes} {data} {messages}"
                            );
                        }
                    });
                }
            });
        }
    }
}
