//! Misuse that safe code can express: memory of other buffers, sizes that overflow, panics inside an operator, ranks
//! that return late. Each must be an error, and no memory of others may change.

#![forbid(unsafe_code)]
#![allow(clippy::unwrap_used)]

use std::cell::Cell;
use std::num::NonZeroU32;
use std::panic::{AssertUnwindSafe, catch_unwind};
use std::sync::mpsc;
use std::time::Duration;

use ep::workload::Workload;
use ep::{
    Backend, BackendExt, CallerError, CombineInput, CombineOutput, Config, DeviceReport, DeviceRouting,
    DispatchInput, DispatchMode, DispatchOutput, Element, Error, Indices, Interrupt, PeerFault, Probs, Rank,
    Result, Routing, ScaleFormat, TokenFormat, WeightRows, WeightedRows, World,
};
use ep_host::{HostBuffer, HostHandle, HostMemory};

const HIDDEN: usize = 64;
const TOKENS: usize = 40;
const EXPERTS: usize = 4;
const MODE: DispatchMode = DispatchMode::Permuted { pad_multiple: NonZeroU32::new(4).unwrap() };

fn config(workers: usize) -> Config {
    let mut config = Config::default();
    config.host.workers = workers;
    config.timeout = Duration::from_secs(60);
    config.stall_timeout = Duration::from_secs(20);
    config.chunk_tokens = 8;
    config
}

fn world(ranks: usize, domains: usize) -> World {
    World::builder().ranks(ranks).domains(domains).experts(EXPERTS).build().unwrap()
}

fn alone() -> HostBuffer {
    HostBuffer::threads(&world(1, 1), &config(1)).unwrap().remove(0)
}

fn handle(buffer: &mut HostBuffer, tokens: usize) -> HostHandle {
    let workload = Workload { tokens, experts: EXPERTS, topk: 2, skew: 0.0, seed: 1 };
    buffer.preprocess(&workload.routing(buffer.rank()), MODE, None).unwrap()
}

fn tokens_of(hidden: usize, tokens: &HostMemory) -> DispatchInput<'_, HostMemory> {
    DispatchInput::new(tokens, hidden).probs(Probs::Skip)
}

fn into_tokens(tokens: &mut HostMemory) -> DispatchOutput<'_, HostMemory> {
    DispatchOutput::new(tokens)
}

fn caller(result: Result<()>) -> CallerError {
    match result {
        Err(Error::Caller(error)) => error,
        other => panic!("expected a caller's error, got {other:?}"),
    }
}

/// Checks that `rank` refused memory that the buffer of `maker` allocated.
fn assert_foreign(result: Result<()>, maker: Rank, rank: Rank) {
    match caller(result) {
        CallerError::Memory { maker: found, rank: of, what } => {
            assert_eq!((found, of), (maker, rank), "{what}");
        }
        other => panic!("{other}"),
    }
}

/// Runs `body` on one thread per rank and returns the results, by rank.
fn on_threads<T: Send>(buffers: Vec<HostBuffer>, body: impl Fn(HostBuffer) -> T + Sync) -> Vec<T> {
    std::thread::scope(|scope| {
        let threads: Vec<_> = buffers.into_iter().map(|buffer| scope.spawn(|| body(buffer))).collect();
        threads.into_iter().map(|thread| thread.join().unwrap()).collect()
    })
}

#[test]
fn memories_swapped_between_two_ranks_are_refused() {
    for domains in [1, 2] {
        let (to, from): (Vec<_>, Vec<_>) = (0..2).map(|_| mpsc::channel::<HostMemory>()).unzip();
        let from: Vec<_> = from.into_iter().map(std::sync::Mutex::new).collect();
        on_threads(HostBuffer::threads(&world(2, domains), &config(1)).unwrap(), |mut buffer| {
            let (rank, other) = (buffer.rank(), Rank(1 - buffer.rank().0));
            let handle = handle(&mut buffer, TOKENS);
            let bytes = buffer.receive_shape(&handle).unwrap().allocated_rows().max(TOKENS) * 2 * HIDDEN;
            let mut tokens = buffer.alloc(bytes).unwrap();
            // Both ranks make the same allocations, so the memory that they exchange has the same location in its
            // owner's segment.
            let mut given_away = buffer.alloc(bytes).unwrap();
            given_away.as_bytes_mut().fill(0xEE);
            let kept = buffer.alloc(bytes).unwrap();
            let held: &[u8] = kept.as_bytes();
            to[other.index()].send(given_away).unwrap();
            let mut foreign = from[rank.index()].lock().unwrap().recv().unwrap();

            assert_foreign(buffer.upload(&[1; 8], &mut foreign), other, rank);
            assert_foreign(buffer.download(&foreign, &mut [1; 8]), other, rank);
            assert_foreign(
                buffer.dispatch(&handle, tokens_of(HIDDEN, &tokens), into_tokens(&mut foreign)),
                other,
                rank,
            );
            assert_foreign(
                buffer.dispatch(&handle, tokens_of(HIDDEN, &foreign), into_tokens(&mut tokens)),
                other,
                rank,
            );
            let mut out = buffer.alloc(bytes).unwrap();
            buffer.dispatch(&handle, tokens_of(HIDDEN, &tokens), into_tokens(&mut out)).unwrap();
            let combined = CombineOutput::new(&mut tokens);
            assert_foreign(
                buffer.combine(&handle, CombineInput::new(&foreign, HIDDEN), combined),
                other,
                rank,
            );
            let combined = CombineOutput::new(&mut foreign);
            assert_foreign(buffer.combine(&handle, CombineInput::new(&out, HIDDEN), combined), other, rank);
            // No byte changed, and the buffer still works with its own memory.
            assert!(foreign.as_bytes().iter().all(|&byte| byte == 0xEE));
            assert!(held.iter().all(|&byte| byte == 0));
            let combined = CombineOutput::new(&mut tokens);
            buffer.combine(&handle, CombineInput::new(&out, HIDDEN), combined).unwrap();
        });
    }
}

#[test]
fn memory_of_another_world_is_refused_and_outlives_its_buffer() {
    let (mut one, mut other) = (alone(), alone());
    let handle = handle(&mut one, TOKENS);
    let rows = one.receive_shape(&handle).unwrap().allocated_rows();
    let tokens = one.alloc(TOKENS * 2 * HIDDEN).unwrap();
    let mut foreign = other.alloc(rows * 2 * HIDDEN).unwrap();
    foreign.as_bytes_mut().fill(7);
    drop(other);
    assert!(foreign.as_bytes().iter().all(|&byte| byte == 7));
    foreign.as_bytes_mut().fill(8);

    assert_foreign(
        one.dispatch(&handle, tokens_of(HIDDEN, &tokens), into_tokens(&mut foreign)),
        Rank(0),
        Rank(0),
    );
    let mut weights = one.alloc(4 * rows).unwrap();
    fn weighted<'a>(
        rows: usize,
        values: &'a HostMemory,
        weights: &'a HostMemory,
    ) -> WeightedRows<'a, HostMemory> {
        WeightedRows::new(values, [rows, HIDDEN], weights)
    }
    let mut out = one.alloc(rows * 2 * HIDDEN).unwrap();
    let of_foreign = weighted(rows, &foreign, &weights);
    assert_foreign(one.weight_rows(&of_foreign, Element::Bf16, &mut out, None), Rank(0), Rank(0));
    let of_own = weighted(rows, &out, &weights);
    assert_foreign(one.weight_rows(&of_own, Element::Bf16, &mut foreign, None), Rank(0), Rank(0));
    // Every buffer accepts memory that belongs to no buffer.
    let mut normal = HostMemory::normal(rows * 2 * HIDDEN).unwrap();
    one.dispatch(&handle, tokens_of(HIDDEN, &tokens), into_tokens(&mut normal)).unwrap();
    one.upload(&[0; 4], &mut weights).unwrap();
    assert!(foreign.as_bytes().iter().all(|&byte| byte == 8));
}

#[test]
fn sizes_beyond_the_address_space_are_refused() {
    let mut buffer = alone();
    for bytes in [usize::MAX, usize::MAX - 4095, 1 << 63, (1 << 63) - 1] {
        assert!(matches!(buffer.alloc(bytes), Err(Error::Caller(CallerError::TooLarge { .. }))), "{bytes}");
        assert!(HostMemory::normal(bytes).is_err(), "{bytes}");
    }
    assert!(buffer.alloc(1 << 62).is_err());

    // Without tokens every memory is long enough, so only the check of `hidden` can refuse.
    for tokens in [0, TOKENS] {
        let handle = handle(&mut buffer, tokens);
        let rows = buffer.receive_shape(&handle).unwrap().allocated_rows();
        let given = buffer.alloc(1 << 20).unwrap();
        let mut taken = buffer.alloc(1 << 20).unwrap();
        buffer.dispatch(&handle, tokens_of(HIDDEN, &given), into_tokens(&mut taken)).unwrap();
        for hidden in [(1 << 63) + 8, 1 << 63, 1 << 62, (1 << 62) + 8, 1 << 61, 1 << 40, usize::MAX - 7] {
            let mut out = buffer.alloc(1 << 20).unwrap();
            caller(buffer.dispatch(&handle, tokens_of(hidden, &given), into_tokens(&mut out)));
            for (element, wire) in
                [(Element::Bf16, Element::Bf16), (Element::F32, Element::Bf16), (Element::Bf16, Element::F32)]
            {
                let input = CombineInput::new(&taken, hidden).element(element).wire(wire);
                caller(buffer.combine(&handle, input, CombineOutput::new(&mut out)));
                let input = CombineInput::new(&taken, hidden).element(element).wire(wire);
                assert!(buffer.combine_new(&handle, input).is_err(), "{hidden}");
            }
            for format in [
                TokenFormat::Bf16,
                TokenFormat::QuantizeFp8(ScaleFormat::F32Per128),
                TokenFormat::Fp8(ScaleFormat::Ue8m0Per32),
            ] {
                let input = tokens_of(hidden, &given).format(format);
                assert!(buffer.dispatch_new(&handle, input).is_err(), "{hidden}");
            }
        }
        for (rows, hidden) in
            [(usize::MAX, 8), (1 << 61, 8), (8, 1 << 61), (1 << 32, 1 << 32), (1, usize::MAX - 7)]
        {
            let input = WeightedRows::new(&given, [rows, hidden], &given);
            caller(buffer.weight_rows(&input, Element::F32, &mut taken, None));
        }
        // Zero rows have no bytes at any width, and neither has any number of rows of width 0.
        for (rows, hidden) in [(0, 1 << 63), (0, usize::MAX - 7), (1 << 20, 0)] {
            let input = WeightedRows::new(&given, [rows, hidden], &given);
            let _ = buffer.weight_rows(&input, Element::F32, &mut taken, None);
        }
        assert!(rows * 2 * HIDDEN <= 1 << 20);
    }
}

#[test]
fn settings_and_worlds_beyond_the_address_space_are_refused() {
    let spoils: [fn(&mut Config); 5] = [
        |config| config.host.slot_bytes = usize::MAX,
        |config| config.host.slot_bytes = usize::MAX - 63,
        |config| config.host.slot_bytes = 1 << 62,
        |config| config.host.slots = usize::MAX,
        |config| config.chunk_tokens = usize::MAX,
    ];
    for spoil in spoils {
        let mut config = config(1);
        spoil(&mut config);
        assert!(matches!(HostBuffer::threads(&world(2, 2), &config), Err(Error::Caller(_))), "{config:?}");
    }
    for (ranks, domains) in [(1 << 40, 1 << 20), (usize::MAX, 1), (1 << 32, 1 << 16)] {
        assert!(World::builder().ranks(ranks).domains(domains).experts(ranks).build().is_err(), "{ranks}");
    }
}

/// Between domains, the counts of a rank must fit a slot. With one domain there are no messages and no such limit.
#[test]
fn counts_longer_than_a_slot_need_no_slot_in_one_domain() {
    let mut config = config(1);
    config.host.slot_bytes = 4096;
    let world = |domains| World::builder().ranks(2).domains(domains).experts(4000).build().unwrap();
    let buffers = HostBuffer::threads(&world(1), &config).unwrap();
    std::thread::scope(|scope| {
        for mut buffer in buffers {
            scope.spawn(move || {
                let routing = Routing::from_topk(buffer.rank(), 4000, 1, &[3999], &[1.0]).unwrap();
                let handle = buffer.preprocess(&routing, MODE, None).unwrap();
                assert_eq!(handle.receive_shape().rows, 4 * buffer.rank().index());
            });
        }
    });
    let error = HostBuffer::threads(&world(2), &config).unwrap_err();
    assert!(error.to_string().contains("HYBRID_EP_SLOT_BYTES"), "{error}");
}

/// Tokens without choices, and weights that are not given, have no memory whose size would bound their number.
#[test]
fn numbers_of_tokens_that_no_memory_bounds_are_refused() {
    let mut buffer = alone();
    let (short, wide) = (buffer.alloc(64).unwrap(), usize::MAX / 64);
    for (tokens, k) in [(1 << 33, 0), (1 << 62, 0), (1 << 40, 1), (1 << 31, 1 << 20), (wide, 1), (1 << 62, 1)]
    {
        let indices = Indices::Wide(&short);
        let routing = DeviceRouting::TopK { tokens, k, indices, weights: None };
        let result = buffer.preprocess_on_device(&routing, MODE, None, DeviceReport::default());
        caller(result.map(drop));
    }
    for tokens in [1 << 40, 1 << 61] {
        let routing = DeviceRouting::Map { tokens, most: 1, map: &short, probs: None };
        caller(buffer.preprocess_on_device(&routing, MODE, None, DeviceReport::default()).map(drop));
    }
    let routing = DeviceRouting::TopK { tokens: 5, k: 0, indices: Indices::Wide(&short), weights: None };
    let handle = buffer.preprocess_on_device(&routing, MODE, None, DeviceReport::default()).unwrap();
    assert_eq!(handle.receive_shape().rows, 0);
}

thread_local! {
    /// The function that this thread calls when an operator asks whether to stop.
    static QUESTION: Cell<Option<fn()>> = const { Cell::new(None) };
}

/// Settings whose interrupt calls [`QUESTION`] and never stops the operator.
fn with_question(mut config: Config) -> Config {
    config.interrupt = Interrupt::new(|| {
        if let Some(question) = QUESTION.get() {
            question();
        }
        false
    });
    config
}

fn panic_in_question() {
    panic!("a bug in the program's question");
}

/// Rank 1 panics in `call` while it waits for rank 0, and catches the panic. Then rank 0 calls the operator too.
/// `after` checks the memories of rank 1 after the panic.
fn panic_in(
    ranks: usize,
    domains: usize,
    workers: usize,
    call: impl Fn(&mut HostBuffer, &HostHandle, &mut HostMemory, &mut HostMemory) -> Result<()> + Sync,
    after: impl Fn(&mut HostMemory, &mut HostMemory) + Sync,
) {
    let buffers = HostBuffer::threads(&world(ranks, domains), &with_question(config(workers))).unwrap();
    let (tell, told) = mpsc::channel();
    let told = std::sync::Mutex::new(told);
    on_threads(buffers, |mut buffer| {
        let handle = handle(&mut buffer, TOKENS);
        let rows = buffer.receive_shape(&handle).unwrap().allocated_rows();
        let tokens = buffer.alloc(TOKENS * 2 * HIDDEN).unwrap();
        let mut received = buffer.alloc(rows.max(TOKENS) * 2 * HIDDEN).unwrap();
        buffer.dispatch(&handle, tokens_of(HIDDEN, &tokens), into_tokens(&mut received)).unwrap();
        let mut other = buffer.alloc(rows.max(TOKENS) * 2 * HIDDEN).unwrap();
        if buffer.rank() == Rank(0) {
            told.lock().unwrap().recv().unwrap();
            let Err(Error::Peer(error)) = call(&mut buffer, &handle, &mut received, &mut other) else {
                panic!("rank 1 failed")
            };
            assert_eq!((error.peer, error.fault), (Rank(1), PeerFault::Failed), "{error}");
            assert!(error.to_string().contains("a bug in the program's question"), "{error}");
            return;
        }
        if buffer.rank() != Rank(1) {
            let Err(Error::Peer(error)) = call(&mut buffer, &handle, &mut received, &mut other) else {
                panic!("rank 1 failed")
            };
            return assert_eq!(error.peer, Rank(1), "{error}");
        }
        QUESTION.set(Some(panic_in_question));
        let caught = catch_unwind(AssertUnwindSafe(|| call(&mut buffer, &handle, &mut received, &mut other)));
        QUESTION.set(None);
        let panic = caught.expect_err("the question panics");
        assert_eq!(panic.downcast_ref::<&str>(), Some(&"a bug in the program's question"));
        after(&mut received, &mut other);
        // The buffer refuses further use and returns the same error.
        let again = call(&mut buffer, &handle, &mut received, &mut other).unwrap_err();
        assert!(again.to_string().contains("it panicked: a bug in the program's question"), "{again}");
        assert_eq!(buffer.alloc(8).unwrap_err(), again);
        tell.send(()).unwrap();
    });
}

#[test]
fn a_panic_in_dispatch_withdraws_its_outputs() {
    for (ranks, domains, workers) in [(2, 1, 1), (2, 1, 3), (4, 2, 1), (4, 2, 2)] {
        panic_in(
            ranks,
            domains,
            workers,
            |buffer, handle, tokens, out| {
                buffer.dispatch(handle, tokens_of(HIDDEN, tokens), into_tokens(out))
            },
            |tokens, out| {
                assert!(out.is_empty() && out.as_bytes_mut().is_empty(), "peers may still write to it");
                assert!(!tokens.is_empty());
            },
        );
    }
}

#[test]
fn a_panic_in_combine_moves_later_writes_to_other_memory() {
    for (ranks, domains, workers) in [(2, 1, 1), (2, 1, 3), (4, 2, 1)] {
        panic_in(
            ranks,
            domains,
            workers,
            |buffer, handle, rows, out| {
                let output = CombineOutput::new(out);
                buffer.combine(handle, CombineInput::new(rows, HIDDEN), output)
            },
            |rows, _| {
                let start = rows.as_bytes().as_ptr();
                let bytes = rows.as_bytes().to_vec();
                // Writes go to other memory with the same contents.
                assert!(rows.as_bytes_mut() == bytes && rows.as_bytes().as_ptr() != start);
            },
        );
    }
}

#[test]
fn a_panic_in_preprocess_fails_the_rank() {
    let buffers = HostBuffer::threads(&world(2, 1), &with_question(config(1))).unwrap();
    let (tell, told) = mpsc::channel();
    let told = std::sync::Mutex::new(told);
    on_threads(buffers, |mut buffer| {
        let routing = ep::Routing::empty(buffer.rank(), EXPERTS);
        if buffer.rank() == Rank(0) {
            told.lock().unwrap().recv().unwrap();
            let Err(Error::Peer(error)) = buffer.preprocess(&routing, MODE, None) else {
                panic!("rank 1 failed")
            };
            return assert_eq!(error.peer, Rank(1), "{error}");
        }
        QUESTION.set(Some(panic_in_question));
        catch_unwind(AssertUnwindSafe(|| buffer.preprocess(&routing, MODE, None))).unwrap_err();
        QUESTION.set(None);
        assert!(buffer.preprocess(&routing, MODE, None).is_err());
        tell.send(()).unwrap();
    });
}

/// Rank 0 gives up on rank 1 and changes its expert rows. Rank 1 then continues its combine, which must fail.
#[test]
fn a_combine_fails_when_a_peer_gave_up_and_changed_its_rows() {
    use std::sync::atomic::{AtomicBool, Ordering::SeqCst};
    static STOPPED: AtomicBool = AtomicBool::new(false);
    static CONTINUE: AtomicBool = AtomicBool::new(false);
    fn until(flag: &AtomicBool) {
        while !flag.load(SeqCst) {
            std::thread::sleep(Duration::from_millis(1));
        }
    }
    fn block() {
        STOPPED.store(true, SeqCst);
        until(&CONTINUE);
    }
    let mut config = with_question(config(1));
    config.stall_timeout = Duration::from_secs(2);
    on_threads(HostBuffer::threads(&world(2, 1), &config).unwrap(), |mut buffer| {
        let handle = handle(&mut buffer, TOKENS);
        let rows = buffer.receive_shape(&handle).unwrap().allocated_rows();
        let tokens = buffer.alloc(TOKENS * 2 * HIDDEN).unwrap();
        let mut received = buffer.alloc(rows * 2 * HIDDEN).unwrap();
        buffer.dispatch(&handle, tokens_of(HIDDEN, &tokens), into_tokens(&mut received)).unwrap();
        let mut out = buffer.alloc(TOKENS * 2 * HIDDEN).unwrap();
        let mut combine = |buffer: &mut HostBuffer, rows: &HostMemory| {
            let output = CombineOutput::new(&mut out);
            buffer.combine(&handle, CombineInput::new(rows, HIDDEN), output)
        };
        if buffer.rank() == Rank(1) {
            QUESTION.set(Some(block));
            let Err(Error::Peer(error)) = combine(&mut buffer, &received) else {
                panic!("rank 0 gave up and changed its rows")
            };
            return assert_eq!(error.peer, Rank(0), "{error}");
        }
        until(&STOPPED);
        let Err(Error::Peer(error)) = combine(&mut buffer, &received) else { panic!("rank 1 is blocked") };
        assert_eq!((error.peer, error.fault), (Rank(1), PeerFault::Stalled), "{error}");
        received.as_bytes_mut().fill(0x3F);
        CONTINUE.store(true, SeqCst);
    });
}
