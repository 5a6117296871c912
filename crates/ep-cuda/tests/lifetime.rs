//! Tests when memory is freed: never while work in any stream, graph or rank can access it, and always in bounded time.
//! Each test runs in a process of its own, on a fake driver without GPUs.
#![cfg(target_os = "linux")]
#![allow(clippy::unwrap_used, reason = "a test that cannot go on panics")]

#[macro_use]
mod fake;

use std::thread;
use std::time::{Duration, Instant};

use ep::join::{Rendezvous as _, ThreadRendezvous};
use ep::{Backend as _, CallerError, Error, Interrupt, World};
use ep_cuda::{CudaBuffer, finish, leaked_bytes, settle};

use fake::{Driver, HANG, buffers, config, dispatch, is_inside, one, outside, preprocess, text};

/// Waits until `what` returns true, and fails if that takes too long.
#[track_caller]
fn eventually(what: impl Fn() -> bool) {
    let since = Instant::now();
    while !what() {
        assert!(since.elapsed() < HANG / 2, "it never comes");
        thread::sleep(Duration::from_millis(2));
    }
}

/// Sleeps long enough for a thread that frees too early to do so.
fn a_moment() {
    thread::sleep(Duration::from_millis(100));
}

inside!(a_buffer_whose_work_is_over_is_freed_at_once, driver => {
    let mut all = buffers(2, &config());
    for buffer in &mut all {
        let handle = preprocess(buffer);
        dispatch(buffer, &handle);
    }
    assert!(driver.mapped() > 0);
    let told = driver.uploads();
    drop(all);
    assert_eq!(driver.mapped(), 0);
    assert_eq!(driver.uploads(), told + 4, "each rank tells both that it has left");
});

inside!(the_current_gpu_of_the_caller_stays_current, driver => {
    // No context, and a context other than that of the GPU.
    for own in [std::ptr::null_mut(), driver.stream()] {
        assert_eq!(driver.call::<i32>("cuCtxSetCurrent", own), 0);
        let mut buffer = one();
        let stream = driver.stream();
        // SAFETY: the stream is never destroyed.
        unsafe { buffer.set_stream(stream) }.unwrap();
        let handle = preprocess(&mut buffer);
        let (graph, received) = driver.capture(stream, || dispatch(&mut buffer, &handle));
        dispatch(&mut buffer, &handle);
        driver.destroy_graph(graph);
        drop(received);
        drop(buffer);
        assert_eq!(driver.current(), own);
    }
    eventually(|| driver.mapped() == 0);
});

inside!(replays_in_another_stream_are_waited_for, driver => {
    let mut all = buffers(2, &config());
    let (captured_in, replayed_in) = (driver.stream(), driver.stream());
    let mut graphs = Vec::new();
    for buffer in &mut all {
        // SAFETY: the stream is never destroyed.
        unsafe { buffer.set_stream(captured_in) }.unwrap();
        let handle = preprocess(buffer);
        graphs.push(driver.capture(captured_in, || dispatch(buffer, &handle)).0);
    }
    driver.hold(replayed_in);
    for &graph in &graphs {
        for _ in 0..20 {
            driver.replay(graph, replayed_in);
        }
    }
    let told = driver.uploads();
    drop(all);
    // A replay that has not ended keeps its memory when its graph is destroyed.
    graphs.iter().for_each(|&graph| driver.destroy_graph(graph));
    a_moment();
    assert!(driver.mapped() > 0);
    assert_eq!(driver.uploads(), told, "a rank whose operators are replayed has not left");
    driver.release(replayed_in);
    eventually(|| driver.mapped() == 0);
    assert!(settle(HANG));
    assert_eq!((driver.uploads(), leaked_bytes()), (told + 4, 0));
});

inside!(a_graph_can_be_replayed_after_its_buffer, driver => {
    let mut buffer = one();
    let stream = driver.stream();
    // SAFETY: the stream is never destroyed.
    unsafe { buffer.set_stream(stream) }.unwrap();
    let handle = preprocess(&mut buffer);
    let (graph, received) = driver.capture(stream, || dispatch(&mut buffer, &handle));
    assert_eq!(driver.call::<i32>("fake_objects_kept", graph), 2, "the rank and the handle, however many operators");
    let told = driver.uploads();
    drop((buffer, handle, received));
    assert!(settle(HANG), "nothing is to be waited for as long as the graph is there");
    a_moment();
    assert!(driver.mapped() > 0);
    driver.replay(graph, stream);
    assert_eq!(driver.uploads(), told);
    driver.destroy_graph(graph);
    eventually(|| driver.mapped() == 0);
    assert_eq!(driver.uploads(), told + 1);
});

inside!(a_graph_keeps_the_handles_that_it_was_captured_with, driver => {
    let mut buffer = one();
    let stream = driver.stream();
    // SAFETY: the stream is never destroyed.
    unsafe { buffer.set_stream(stream) }.unwrap();
    let handle = preprocess(&mut buffer);
    let lists = handle.shape_address();
    let (graph, _received) = driver.capture(stream, || dispatch(&mut buffer, &handle));
    drop(handle);
    // Once peers have gone on, the memory of a dropped handle is given to the next handle of the same size.
    let later: Vec<_> = (0..8).map(|_| preprocess(&mut buffer)).collect();
    assert!(later.iter().all(|handle| handle.shape_address() != lists), "the graph's lists are overwritten");
    driver.destroy_graph(graph);
});

inside!(streams_that_are_gone_are_not_touched, driver => {
    let destroy = |stream| assert_eq!(driver.call::<i32>("cuStreamDestroy_v2", stream), 0);
    // The caller destroys its streams in their context.
    assert_eq!(driver.call::<i32>("cuCtxSetCurrent", driver.stream()), 0);
    let mut buffer = one();
    let (first, second) = (driver.stream(), driver.stream());
    driver.hold(second);
    // SAFETY: the streams live until the last call that uses them has returned.
    unsafe { buffer.set_stream(first) }.unwrap();
    let handle = preprocess(&mut buffer);
    destroy(first);
    // SAFETY: as above.
    unsafe { buffer.set_stream(second) }.unwrap();
    dispatch(&mut buffer, &handle);
    destroy(second);
    drop(handle);
    drop(buffer);
    a_moment();
    assert!(driver.mapped() > 0);
    driver.release(second);
    eventually(|| driver.mapped() == 0);
});

inside!(memory_that_was_handed_out_outlives_work_in_any_stream, driver => {
    let mut buffer = one();
    let mut memory = buffer.alloc(1 << 20).unwrap();
    buffer.upload(&[1; 16], &mut memory).unwrap();
    drop(buffer);
    assert!(settle(HANG));
    assert!(driver.mapped() > 0, "the caller still has some of it");
    let stream = driver.stream();
    driver.hold(stream);
    driver.submit(stream);
    let since = Instant::now();
    drop(memory);
    assert!(since.elapsed() < HANG / 2);
    a_moment();
    assert!(driver.mapped() > 0);
    driver.release(stream);
    eventually(|| driver.mapped() == 0);
});

inside!(captures_of_others_are_left_alone_as_long_as_work_is_waited_for, driver => {
    let mut buffer = one();
    let (busy, captured) = (driver.stream(), driver.stream());
    driver.hold(busy);
    // SAFETY: the stream is never destroyed.
    unsafe { buffer.set_stream(busy) }.unwrap();
    drop(preprocess(&mut buffer));
    driver.capture(captured, || {
        drop(buffer);
        a_moment();
    });
    assert_eq!(driver.ask::<i32>("fake_broken_captures"), 0);
    driver.release(busy);
    eventually(|| driver.mapped() == 0);
});

#[test]
fn memory_of_a_gpu_that_never_gets_idle_is_given_up_and_that_is_said() {
    if !is_inside() {
        for old in ["0", "1"] {
            let name = "memory_of_a_gpu_that_never_gets_idle_is_given_up_and_that_is_said";
            let said = text(&outside(name, &[("FAKE_CUDA_OLD", old)]));
            for part in [
                "hybrid-ep: warning: the buffer of rank 0: 33554432 bytes of GPU memory stay allocated",
                "hybrid-ep: warning: registered memory of rank 0: 33554432 bytes of GPU memory stay allocated",
                "work that may access it had not finished after ",
            ] {
                assert!(said.contains(part), "{said}");
            }
        }
        return;
    }
    let driver = Driver::new();
    let short = Duration::from_millis(300);
    let mut config = config();
    (config.timeout, config.stall_timeout) = (short, short);
    let stream = driver.stream();
    driver.hold(stream);
    for own in [true, false] {
        let mut buffer = buffers(1, &config).pop().unwrap();
        if own {
            // SAFETY: the stream is never destroyed.
            unsafe { buffer.set_stream(stream) }.unwrap();
            drop(preprocess(&mut buffer));
        } else {
            driver.submit(stream);
        }
        let before = (driver.mapped(), leaked_bytes());
        drop(buffer);
        assert!(settle(HANG));
        assert_eq!((driver.mapped(), leaked_bytes()), (before.0, before.1 + (32 << 20)));
    }
    driver.check();
}

inside!(a_driver_that_is_gone_is_not_waited_for, driver => {
    let mut all = [one(), one(), one()];
    let stream = driver.stream();
    driver.hold(stream);
    for buffer in &mut all {
        // SAFETY: the stream is never destroyed.
        unsafe { buffer.set_stream(stream) }.unwrap();
        drop(preprocess(buffer));
    }
    let [waiting, gone, mut kept] = all;
    let memory = kept.alloc(16).unwrap();
    let mapped = driver.mapped();
    drop(waiting);
    driver.ask::<()>("fake_deinitialize");
    let since = Instant::now();
    drop((gone, kept));
    drop(memory);
    assert!(settle(HANG));
    assert!(since.elapsed() < HANG / 2);
    assert_eq!((driver.mapped(), leaked_bytes()), (mapped, 0));
});

inside!(programs_that_end_leave_although_graphs_are_kept, driver => {
    let mut buffer = one();
    let (stream, other) = (driver.stream(), driver.stream());
    // SAFETY: the stream is never destroyed.
    unsafe { buffer.set_stream(stream) }.unwrap();
    let handle = preprocess(&mut buffer);
    let (graph, _received) = driver.capture(stream, || dispatch(&mut buffer, &handle));
    driver.hold(other);
    driver.replay(graph, other);
    drop(buffer);
    let told = driver.uploads();
    let driver = &driver;
    thread::scope(|scope| {
        let ended = scope.spawn(|| finish(HANG));
        a_moment();
        assert!(!ended.is_finished(), "a replay goes on");
        assert_eq!(driver.uploads(), told);
        driver.release(other);
    });
    assert_eq!(driver.uploads(), told + 1);
    driver.destroy_graph(graph);
    drop(handle);
    a_moment();
    assert!(driver.mapped() > 0, "the end of the process frees it");
});

inside!(a_program_that_was_interrupted_ends_although_its_work_goes_on, driver => {
    let mut config = config();
    config.interrupt = Interrupt::new(|| true);
    let mut buffer = buffers(1, &config).pop().unwrap();
    let stream = driver.stream();
    // SAFETY: the stream is never destroyed.
    unsafe { buffer.set_stream(stream) }.unwrap();
    let handle = preprocess(&mut buffer);
    driver.hold(stream);
    let received = dispatch(&mut buffer, &handle);
    let error = buffer.synchronize().unwrap_err();
    assert!(matches!(error, Error::Caller(CallerError::Interrupted { .. })), "{error}");
    let since = Instant::now();
    drop((buffer, handle, received));
    finish(HANG);
    assert!(since.elapsed() < HANG / 2, "the end of the program waits for interrupted work");
    assert!(!settle(Duration::ZERO), "the memory is not freed while kernels may access it");
    driver.release(stream);
    assert!(settle(HANG));
    assert_eq!((driver.mapped(), leaked_bytes()), (0, 0));
});

/// Ranks 0 and 1 of one NVLink domain, on machines `node-a` and `node-b`: buffers, or errors.
fn on_two_machines() -> Vec<ep::Result<CudaBuffer>> {
    let world = World::builder().ranks(2).experts(4).build().unwrap();
    let join = |mut meet: ThreadRendezvous| {
        let mut config = config();
        config.machine = Some(if meet.rank().0 == 0 { "node-a" } else { "node-b" }.into());
        config.host.transport.address = Some("127.0.0.1".into());
        CudaBuffer::join(&world, &mut meet, &config)
    };
    thread::scope(|scope| {
        let ends = ThreadRendezvous::new(2, HANG).into_iter();
        let ends: Vec<_> = ends.map(|end| scope.spawn(move || join(end))).collect();
        ends.into_iter().map(|end| end.join().unwrap()).collect()
    })
}

#[test]
fn a_domain_over_machines_shares_memory_by_fabric_handles() {
    let name = "a_domain_over_machines_shares_memory_by_fabric_handles";
    if !is_inside() {
        outside(name, &[("FAKE_CUDA_FABRIC", "1")]);
        return;
    }
    let driver = Driver::new();
    let mut ranks: Vec<CudaBuffer> = on_two_machines().into_iter().map(Result::unwrap).collect();
    assert_eq!(driver.ask::<i32>("fake_fabric_imports"), 2, "each has mapped the memory of the other");
    // Memory that is added later.
    let added = ranks[0].alloc(64 << 20).unwrap();
    assert_eq!(driver.ask::<i32>("fake_fabric_imports"), 3);
    for rank in &mut ranks {
        let handle = preprocess(rank);
        dispatch(rank, &handle);
    }
    drop(added);
    let told = driver.uploads();
    drop(ranks);
    assert!(settle(HANG));
    // Each rank writes its gone word to both ranks. Where the buffer still exists, the end of a link is written, too.
    assert!(driver.uploads() >= told + 4);
    assert_eq!((driver.mapped(), leaked_bytes()), (0, 0));
    driver.check();
}

#[test]
fn a_domain_over_machines_without_fabric_handles_is_refused() {
    let name = "a_domain_over_machines_without_fabric_handles_is_refused";
    if !is_inside() {
        for fabric in ["0", "2"] {
            outside(name, &[("FAKE_CUDA_FABRIC", fabric)]);
        }
        return;
    }
    for made in on_two_machines() {
        // Each error names its own rank, or the other rank, whose failure for the same reason was seen first.
        let error = made.unwrap_err().to_string();
        let error = error
            .replace("and rank 0 cannot", "and rank N cannot")
            .replace("and rank 1 cannot", "and rank N cannot");
        assert_eq!(
            error.split_once("its error: ").map_or(error.as_str(), |(_, theirs)| theirs),
            "topology: ranks 0 on node-a and 1 on node-b are in one NVLink domain, and rank N cannot share memory with other \
             machines; choose the number of domains so that each domain is on one machine, and number the ranks of a machine \
             consecutively, or, if NVLink connects the machines, run the service nvidia-imex on all of them and give the \
             processes a channel (/dev/nvidia-caps-imex-channels)"
        );
    }
}

// A peer leaves while this rank's work goes on: the peer's memory stays mapped here until that work is over.
inside!(a_peer_that_is_gone_is_not_waited_for, driver => {
    let world = World::builder().ranks(2).experts(4).build().unwrap();
    let mut ranks = thread::scope(|scope| {
        let join = |mut meet: ThreadRendezvous| CudaBuffer::join(&world, &mut meet, &config()).unwrap();
        let ends: Vec<_> = ThreadRendezvous::new(2, HANG).into_iter().map(|end| scope.spawn(move || join(end))).collect();
        ends.into_iter().map(|end| end.join().unwrap()).collect::<Vec<_>>()
    });
    let stream = driver.stream();
    driver.hold(stream);
    // SAFETY: the stream is never destroyed.
    unsafe { ranks[0].set_stream(stream) }.unwrap();
    drop(preprocess(&mut ranks[0]));
    let both = driver.mapped();
    let peer = ranks.pop().unwrap();
    let since = Instant::now();
    drop(peer);
    drop(ranks);
    assert!(since.elapsed() < HANG / 2);
    a_moment();
    assert_eq!(driver.mapped(), both);
    driver.release(stream);
    assert!(settle(HANG));
    assert_eq!(driver.mapped(), 0);
});
