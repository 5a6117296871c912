//! Calls that must be refused before the GPU sees them: memory of other buffers, and sizes that no memory has. On a
//! driver without GPUs, each test in a process of its own.
#![cfg(target_os = "linux")]
#![allow(clippy::unwrap_used, reason = "a test that cannot go on panics")]

#[macro_use]
mod fake;

use ep::join::{Rendezvous as _, ThreadRendezvous};
use ep::{
    Backend as _, CallerError, CombineInput, CombineOutput, DeviceReport, DeviceRouting, DispatchInput,
    DispatchMode, DispatchOutput, Element, Error, Indices, Probs, Result, Routing, WeightGradients,
    WeightRows as _, WeightedRows, World,
};
use ep_cuda::{CudaBuffer, CudaHandle, CudaMemory};
use ep_fabric_fake::{Fake, Settings};

use fake::{CAPACITY, HANG, HIDDEN, buffers, config, dispatch, one, preprocess};

/// More bytes than any call of these tests needs.
const BYTES: usize = 1 << 16;

#[track_caller]
fn foreign<T>(what: &str, result: Result<T>) {
    let Err(Error::Caller(CallerError::Memory { .. })) = result.as_ref().map(drop) else {
        panic!("another buffer's memory is taken for {what}: {:?}", result.err());
    };
}

/// Memory for N arguments: that of argument `at` is `other`'s, that of all others is `own`'s.
fn with_one_of<const N: usize>(own: &mut CudaBuffer, other: &mut CudaBuffer, at: usize) -> [CudaMemory; N] {
    std::array::from_fn(|argument| if argument == at { &mut *other } else { &mut *own }.alloc(BYTES).unwrap())
}

fn dispatch_with(
    buffer: &mut CudaBuffer,
    handle: &CudaHandle,
    [tokens, dense, out, probs, local]: &mut [CudaMemory; 5],
    plain: bool,
) -> Result<()> {
    let input = DispatchInput::new(tokens, HIDDEN).probs(Probs::Dense(dense));
    let local_experts = plain.then_some(local);
    buffer.dispatch(handle, input, DispatchOutput::new(out).probs(probs).local_experts(local_experts))
}

fn combine_with(
    buffer: &mut CudaBuffer,
    handle: &CudaHandle,
    [rows, probs, out, out_probs]: &mut [CudaMemory; 4],
    hidden: usize,
) -> Result<()> {
    let input = CombineInput::new(rows, hidden).probs(&*probs);
    buffer.combine(handle, input, CombineOutput::new(out).probs(out_probs))
}

fn preprocess_with(
    buffer: &mut CudaBuffer,
    [idx, weights, padded, kept, overflow]: &mut [CudaMemory; 5],
    (tokens, k): (usize, usize),
) -> Result<CudaHandle> {
    let indices = Indices::Wide(idx);
    let routing = DeviceRouting::TopK { tokens, k, indices, weights: Some(weights) };
    let report = DeviceReport::default().tokens_per_expert(padded).kept_per_expert(kept).overflow(overflow);
    buffer.preprocess_on_device(&routing, DispatchMode::permuted(4)?, Some(CAPACITY), report)
}

/// Calls every operator with `other`'s memory for each of its arguments in turn.
fn check_all(own: &mut CudaBuffer, other: &mut CudaBuffer) {
    let handle = preprocess(own);
    dispatch(own, &handle);
    let plain = {
        let routing = ep::Routing::from_topk(own.rank(), own.world().experts(), 1, &[0], &[1.0]).unwrap();
        own.preprocess(&routing, DispatchMode::Plain, Some(CAPACITY)).unwrap()
    };
    for at in 0..5 {
        let mut memory = with_one_of(own, other, at);
        foreign("preprocess", preprocess_with(own, &mut memory, (2, 1)));
        let what = format!("argument {at} of dispatch");
        if at < 4 {
            foreign(&what, dispatch_with(own, &handle, &mut memory, false));
        }
        foreign(&what, dispatch_with(own, &plain, &mut memory, true));
        let [values, weights, out, rows, dots] = &mut memory;
        let input = WeightedRows::new(values, [2, HIDDEN], weights);
        let backward = WeightGradients::new(rows, dots);
        foreign(
            &format!("argument {at} of weight_rows"),
            own.weight_rows(&input, Element::Bf16, out, Some(backward)),
        );
    }
    for at in 0..4 {
        let mut memory = with_one_of(own, other, at);
        foreign(&format!("argument {at} of combine"), combine_with(own, &handle, &mut memory, HIDDEN));
    }
    for at in 0..2 {
        let [map, probs] = &with_one_of(own, other, at);
        let routing = DeviceRouting::Map { tokens: 1, most: 1, map, probs: Some(probs) };
        let made = own.preprocess_on_device(&routing, DispatchMode::Plain, Some(1), DeviceReport::default());
        foreign(&format!("argument {at} of preprocess with a map"), made);
    }
    let mut memory = other.alloc(BYTES).unwrap();
    foreign("upload", own.upload(&[1; 16], &mut memory));
    foreign("download", own.download(&memory, &mut [1; 16]));
    foreign("clear", own.clear(&mut memory, 0..8));
    // The buffer's own memory, and memory without a buffer, are accepted.
    dispatch(own, &handle);
    // SAFETY: memory of the fake driver, which nothing else touches.
    let mut borrowed = unsafe { CudaMemory::borrowed(memory.address(), memory.len()) };
    own.upload(&[1; 16], &mut borrowed).unwrap();
}

inside!(memory_of_another_rank_is_refused, driver => {
    let mut ranks = buffers(2, &config());
    let [one, other] = &mut ranks[..] else { panic!("two ranks") };
    check_all(one, other);
    check_all(other, one);
    assert!(driver.mapped() > 0);
});

inside!(memory_and_handles_of_another_buffer_of_this_rank_are_refused, driver => {
    let (mut buffer, mut other) = (one(), one());
    check_all(&mut buffer, &mut other);
    let handle = preprocess(&mut other);
    let refused = |result: Result<()>| {
        assert!(matches!(result, Err(Error::Caller(CallerError::Handle(_)))), "{result:?}");
    };
    let mut memory = with_one_of(&mut buffer, &mut other, 9);
    refused(dispatch_with(&mut buffer, &handle, &mut memory, false));
    let mut memory = with_one_of(&mut buffer, &mut other, 9);
    refused(combine_with(&mut buffer, &handle, &mut memory, HIDDEN));
    refused(buffer.receive_shape(&handle).map(drop));
    // Memory is also refused after its buffer was dropped.
    let mut memory = other.alloc(16).unwrap();
    drop((other, handle));
    foreign("upload", buffer.upload(&[1; 16], &mut memory));
    assert!(driver.mapped() > 0);
});

// Peers map the chunks of a rank's memory one after the other: a chunk that fails must not count.
inside!(memory_that_cannot_be_accessed_leaves_no_gap, driver => {
    let mut buffer = one();
    let mapped = driver.mapped();
    driver.ask::<()>("fake_refuse_access");
    let error = buffer.alloc(1 << 26).unwrap_err();
    assert!(matches!(error, Error::Environment(_)), "{error}");
    assert_eq!(driver.mapped(), mapped);
    buffer.alloc(1 << 26).unwrap();
    assert!(driver.mapped() > mapped);
});

inside!(sizes_that_no_memory_has_are_refused, driver => {
    let mut buffer = one();
    let handle = preprocess(&mut buffer);
    dispatch(&mut buffer, &handle);
    for bytes in [usize::MAX, usize::MAX - 254, (1 << 63) + 8, 1 << 63, isize::MAX as usize] {
        let error = buffer.alloc(bytes).unwrap_err();
        assert!(matches!(error, Error::Caller(CallerError::TooLarge { .. })), "{bytes}: {error}");
    }
    // Sizes that fit an address space but no GPU.
    let mapped = driver.mapped();
    for bytes in [(1 << 62) + 1, 1 << 40, (2 << 30) + 1] {
        let error = buffer.alloc(bytes).unwrap_err();
        let said = error.to_string();
        assert!(matches!(error, Error::Environment(_)) && said.contains(" of 2147483648 bytes are free"), "{said}");
    }
    assert_eq!(driver.mapped(), mapped);

    let refused = |what: &str, result: Result<()>| assert!(matches!(result, Err(Error::Caller(_))), "{what}: {result:?}");
    let widths = [(1 << 63) + 8, 1 << 63, 1 << 62, (1 << 32) + 8, usize::MAX - 7, usize::MAX];
    let mut three: [CudaMemory; 4] = std::array::from_fn(|_| buffer.alloc(BYTES).unwrap());
    for hidden in widths {
        refused(&format!("hidden {hidden}"), combine_with(&mut buffer, &handle, &mut three, hidden));
    }
    let mut five: [CudaMemory; 5] = std::array::from_fn(|_| buffer.alloc(BYTES).unwrap());
    refused("4097 choices", preprocess_with(&mut buffer, &mut five, (1, 4097)).map(drop));
    preprocess_with(&mut buffer, &mut five, (1, 4096)).unwrap();
    for size in [(1 << 61, 8), (1 << 63, 2), (usize::MAX, usize::MAX), (2, 1 << 63), ((1 << 62) + 1, 4)] {
        refused(&format!("{size:?}"), preprocess_with(&mut buffer, &mut five, size).map(drop));
        let [values, weights, out, ..] = &mut five;
        let input = WeightedRows::new(values, [size.0, size.1 / 8 * 8], weights).element(Element::F32);
        if input.hidden > 0 {
            refused(&format!("{size:?}"), buffer.weight_rows(&input, Element::F32, out, None));
        }
        let many = size.0.max(size.1);
        let [map, probs, ..] = &five;
        let routing = DeviceRouting::Map { tokens: many, most: 1, map, probs: Some(probs) };
        let made =
            buffer.preprocess_on_device(&routing, DispatchMode::Plain, Some(1), DeviceReport::default());
        refused(&format!("{size:?}"), made.map(drop));
    }
    // The buffer is still usable.
    dispatch(&mut buffer, &handle);
});

/// Two ranks in two domains, with `rail_tokens` of their own, joined as processes are.
fn between_domains(rail_tokens: [usize; 2]) -> Vec<Result<CudaBuffer>> {
    let fake = Fake::new("bounds", &Settings::default());
    let world = World::builder().ranks(2).domains(2).experts(4).build().unwrap();
    let join = |mut meet: ThreadRendezvous| {
        let mut config = config();
        config.host.transport.engine = fake.provider().into();
        config.host.transport.libfabric = Some(fake.path().into());
        config.cuda.lane_bytes = 1 << 20;
        config.cuda.rail_tokens = rail_tokens[meet.rank().index()];
        CudaBuffer::join(&world, &mut meet, &config)
    };
    std::thread::scope(|scope| {
        let ends = ThreadRendezvous::new(2, HANG).into_iter();
        let ends: Vec<_> = ends.map(|end| scope.spawn(move || join(end))).collect();
        ends.into_iter().map(|end| end.join().unwrap()).collect()
    })
}

inside!(the_largest_bound_of_tokens_between_domains_applies_to_all_ranks, driver => {
    for mut rank in between_domains([2, 24]).into_iter().map(Result::unwrap) {
        let mut preprocess = |tokens: usize| {
            let (experts, weights) = (vec![0; tokens], vec![1.0; tokens]);
            let routing = Routing::from_topk(rank.rank(), 4, 1, &experts, &weights).unwrap();
            rank.preprocess(&routing, DispatchMode::permuted(4).unwrap(), Some(CAPACITY))
        };
        let refused = preprocess(25).unwrap_err().to_string();
        assert!(refused.contains("HYBRID_EP_CUDA_RAIL_TOKENS") && refused.contains("24"), "{refused}");
        preprocess(24).unwrap();
    }
});
