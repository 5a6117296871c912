//! Lost peers, and the end of a proxy.

use std::sync::atomic::{AtomicBool, Ordering::Relaxed};
use std::time::Duration;
use std::{panic, thread};

use ep::{CallerError, EnvironmentError, PeerError, PeerFault};

use super::*;
use crate::rail::Proxy;

const LANE: usize = 1 << 16;
/// Ends a test that hangs.
const LONG: Duration = Duration::from_secs(60);

fn died(peer: Rank) -> PeerError {
    PeerError::joining(RANKS[0], peer, PeerFault::Died, "a put", Duration::ZERO)
}

fn broken_card() -> EnvironmentError {
    EnvironmentError::new("posting a put", "the card is gone", "look at the card")
}

/// Waits until `done` returns true.
fn wait_until(mut done: impl FnMut() -> bool) {
    let start = Instant::now();
    while !done() {
        assert!(start.elapsed() < LONG, "it takes too long");
        thread::yield_now();
    }
}

/// Releases an epoch to both peers, in which this rank sends the plans and nothing else.
fn release_all(bench: &Bench, epoch: u32) {
    [1, 2].into_iter().for_each(|domain| bench.release(domain, &plan_of(epoch, &[])));
}

fn receivers(bench: &Bench) -> Vec<Rank> {
    bench.script.puts().iter().map(|put| put.peer).collect()
}

#[test]
fn a_peer_that_a_put_does_not_reach_is_reported_once_and_the_other_is_served() {
    let lost: [Error; 2] = [
        died(RANKS[1]).into(),
        CallerError::Shape { what: "a put", expected: 1, found: 2, unit: "bytes" }.into(),
    ];
    for error in lost {
        let (bench, mut pump) = Bench::pump(LANE);
        let answer = error.clone();
        bench
            .script
            .answer(move |put| if put.peer == RANKS[1] { Err(answer.clone()) } else { Ok(Posted::Yes) });
        for epoch in [1, 2] {
            release_all(&bench, epoch);
            settle(&mut pump);
            assert_eq!(receivers(&bench), [RANKS[2]]);
        }
        bench.script.fail_poll(died(RANKS[1]));
        settle(&mut pump);
        assert_eq!(bench.reports(), [(RANKS[1], error.to_string())]);
        assert_eq!(pump.losses().failures().all(), [(RANKS[1], error)].into());
        bench.put_plan(2, &plan_of(1, &[]));
        bench.script.arrive(RANKS[2], plan_signal(1));
        settle(&mut pump);
        assert!(bench.entered(2, 1));
    }
}

#[test]
fn what_a_peer_sent_before_it_was_gone_arrives() {
    let (bench, mut pump) = Bench::pump(LANE);
    for epoch in [1, 2] {
        bench.put_plan(1, &plan_of(epoch, &[]));
    }
    bench.script.arrive(RANKS[1], plan_signal(1));
    bench.script.fail_poll(died(RANKS[1]));
    settle(&mut pump);
    // An engine may pass on later what has arrived before.
    bench.script.arrive(RANKS[1], plan_signal(2));
    settle(&mut pump);
    assert_eq!([1, 2].map(|epoch| bench.arrived(1, epoch)), [1, 1]);
    assert_eq!(bench.reports(), [(RANKS[1], died(RANKS[1]).to_string())]);
    release_all(&bench, 1);
    settle(&mut pump);
    assert_eq!(receivers(&bench), [RANKS[2]], "nothing is sent to a lost peer");
}

#[test]
fn an_error_of_the_environment_loses_all_peers() {
    type Fail = fn(&Bench);
    let by_put: Fail = |bench| bench.script.answer(|_| Err(broken_card().into()));
    let by_poll: Fail = |bench| bench.script.fail_poll(broken_card());
    let by_unknown_peer: Fail = |bench| bench.script.fail_poll(died(Rank(77)));
    let by_unknown_sender: Fail = |bench| bench.script.arrive(Rank(77), plan_signal(1));
    for (fail, text) in [
        (by_put, "the card is gone"),
        (by_poll, "the card is gone"),
        (by_unknown_peer, "rank 77 died"),
        (by_unknown_sender, "engine scripted delivered a signal of rank 77"),
    ] {
        let (bench, mut pump) = Bench::pump(LANE);
        bench.script.fail_poll(died(RANKS[2]));
        settle(&mut pump);
        release_all(&bench, 1);
        fail(&bench);
        let error = pump.step().unwrap_err();
        assert!(error.to_string().contains(text), "{error}");
        let expected = [(RANKS[2], died(RANKS[2]).to_string()), (RANKS[1], error.to_string())];
        assert_eq!(bench.reports(), expected, "the lost peer keeps its error");
        assert_eq!((pump.step(), receivers(&bench)), (Err(error), vec![]));
    }
}

#[test]
fn parts_that_do_not_fit_each_other_are_refused() {
    let refused = |change: &dyn Fn(&mut ProxyParts)| {
        let (_, mut parts) = Bench::new(LANE);
        change(&mut parts);
        Pump::new(parts).err().unwrap().to_string()
    };
    let text = refused(&|parts| parts.rail = Rail::new(RANKS[..2].to_vec(), 0).unwrap());
    assert_eq!(text, "the layout of a rail window: expected 2 domains, found 3");
    let text = refused(&|parts| parts.window = Memory::new(parts.layout.lanes().start - 1));
    assert!(text.starts_with("the length of a rail window: expected "), "{text}");

    /// Memory at an odd address.
    struct Odd(Arc<Memory>);
    impl Window for Odd {
        fn start(&self) -> NonNull<u8> {
            NonNull::new(self.0.at(1, 0)).unwrap()
        }
        fn len(&self) -> usize {
            self.0.len() - 1
        }
    }
    let text = refused(&|parts| parts.window = Arc::new(Odd(Memory::new(parts.layout.bytes() + 1))));
    assert_eq!(text, "the alignment of a rail window: expected 8 bytes, found 1");
}

#[test]
fn a_proxy_that_stops_posts_and_drains_what_the_kernels_have_completed() {
    let (bench, parts) = Bench::new(LANE);
    let (began, room) = (Arc::new(AtomicU32::new(0)), Arc::new(AtomicU32::new(0)));
    let (refuse, may) = (Arc::clone(&began), Arc::clone(&room));
    bench.script.answer(move |_| {
        refuse.fetch_add(1, Release);
        Ok(if may.load(Acquire) == 0 { Posted::Full } else { Posted::Yes })
    });
    let proxy = Proxy::start(parts, LONG).unwrap();
    let mut plan = plan_of(1, &[(1, 0), (2, 0), (3, 0)]);
    plan.sections[0] = section(0, 8, RailPer::Row);
    bench.release(1, &plan);
    bench.release(2, &plan_of(1, &[]));
    // The kernels have failed before unit 2: the proxy does not wait for it.
    [0, 1].into_iter().for_each(|unit| bench.complete(1, 1, unit));
    wait_until(|| began.load(Acquire) > 0);
    let stop = thread::spawn(|| proxy.stop());
    let attempts = began.load(Acquire);
    wait_until(|| began.load(Acquire) > attempts + 4);
    assert!(!stop.is_finished());
    room.store(1, Release);
    stop.join().unwrap().unwrap();
    let mut sent: Vec<_> = bench.script.puts().iter().map(|put| (put.peer, put.signal)).collect();
    sent.sort_unstable();
    let expected = [(RANKS[1], plan_signal(1)), (RANKS[1], part(1, 0, 0, 2)), (RANKS[2], plan_signal(1))];
    assert_eq!(sent, expected);
    assert_eq!(*bench.script.drained.lock().unwrap(), RANKS[1..]);
}

#[test]
fn a_proxy_that_cannot_post_ends_after_its_patience_and_drains_the_other_peers() {
    let (bench, parts) = Bench::new(LANE);
    bench.script.answer(|put| Ok(if put.peer == RANKS[1] { Posted::Full } else { Posted::Yes }));
    let proxy = Proxy::start(parts, Duration::from_millis(5)).unwrap();
    release_all(&bench, 1);
    wait_until(|| !bench.script.puts.lock().unwrap().is_empty());
    let text = proxy.stop().unwrap_err().to_string();
    assert!(text.starts_with("rank 1 stalled (join): rank 5 waited "), "{text}");
    assert!(text.ends_with(" s for room in the queue of puts before leaving"), "{text}");
    assert_eq!(*bench.script.drained.lock().unwrap(), RANKS[1..]);
    assert_eq!(bench.reports(), []);
}

#[test]
fn the_thread_reports_lost_peers_and_goes_on() {
    let (bench, parts) = Bench::new(LANE);
    let proxy = Proxy::start(parts, LONG).unwrap();
    bench.script.fail_poll(died(RANKS[1]));
    wait_until(|| !bench.reports().is_empty());
    assert_eq!(proxy.failures(), [(RANKS[1], died(RANKS[1]).into())].into());
    release_all(&bench, 1);
    // Also after a pause in which the thread has gone to sleep.
    thread::sleep(Duration::from_millis(20));
    release_all(&bench, 2);
    wait_until(|| bench.script.puts.lock().unwrap().len() == 2);
    drop(proxy);
    assert_eq!((receivers(&bench), bench.reports().len()), (vec![RANKS[2]; 2], 1));
    assert_eq!(*bench.script.drained.lock().unwrap(), [RANKS[2]]);
}

#[test]
fn an_error_of_the_environment_ends_the_thread() {
    let (bench, parts) = Bench::new(LANE);
    let proxy = Proxy::start(parts, LONG).unwrap();
    bench.script.fail_poll(broken_card());
    wait_until(|| bench.reports().len() == 2);
    assert_eq!(proxy.failures().len(), 2);
    assert_eq!(proxy.stop().unwrap_err(), broken_card().into());
    assert_eq!(*bench.script.drained.lock().unwrap(), []);
}

/// An engine whose card is near some CPUs. It records the CPUs on which the thread that polls may run.
struct NearCard {
    engine: Box<dyn Transport>,
    near: Vec<usize>,
    polled_on: Arc<Mutex<String>>,
}

impl Transport for NearCard {
    fn name(&self) -> &str {
        self.engine.name()
    }

    fn put(&self, put: Put) -> Result<Posted> {
        self.engine.put(put)
    }

    fn poll(&self, on_signal: &mut dyn FnMut(Rank, Signal)) -> Result<()> {
        *self.polled_on.lock().unwrap() = allowed_cpus();
        self.engine.poll(on_signal)
    }

    fn drain(&self, peer: Rank, deadline: Instant) -> Result<()> {
        self.engine.drain(peer, deadline)
    }

    fn near_cpus(&self) -> &[usize] {
        &self.near
    }
}

/// The CPUs on which the calling thread may run, in the notation of the kernel.
fn allowed_cpus() -> String {
    let status = std::fs::read_to_string("/proc/thread-self/status").unwrap();
    let line = status.lines().find_map(|line| line.strip_prefix("Cpus_allowed_list:"));
    line.unwrap().trim().to_owned()
}

#[test]
#[cfg_attr(miri, ignore = "asks the operating system")]
fn the_thread_runs_near_the_card() {
    let (_bench, mut parts) = Bench::new(LANE);
    let all = allowed_cpus();
    let last: usize = all.rsplit([',', '-']).next().unwrap().parse().unwrap();
    let polled_on = Arc::new(Mutex::new(String::new()));
    let (engine, near) = (parts.transport, vec![last]);
    parts.transport = Box::new(NearCard { engine, near, polled_on: Arc::clone(&polled_on) });
    let proxy = Proxy::start(parts, LONG).unwrap();
    wait_until(|| !polled_on.lock().unwrap().is_empty());
    assert_eq!((polled_on.lock().unwrap().as_str(), allowed_cpus()), (last.to_string().as_str(), all));
    proxy.stop().unwrap();
}

#[test]
fn panics_of_the_thread_are_errors_of_all_peers() {
    let (bench, parts) = Bench::new(LANE);
    bench.script.answer(|_| panic!("a bug of the engine"));
    let proxy = Proxy::start(parts, LONG).unwrap();
    bench.release(1, &plan_of(1, &[]));
    wait_until(|| bench.reports().len() == 2);
    let text = "serving the rail of rank 5: the proxy thread panicked: a bug of the engine; report this bug with the \
                panic's message";
    assert_eq!(bench.reports(), [(RANKS[1], text.to_string()), (RANKS[2], text.to_string())]);
    assert_eq!(proxy.stop().unwrap_err().to_string(), text);
}

#[test]
fn a_report_that_panics_does_not_prevent_other_reports() {
    let (bench, mut parts) = Bench::new(LANE);
    let reports = Arc::clone(&bench.reports);
    parts.on_lost = Box::new(move |rank, error| {
        reports.lock().unwrap().push((rank, error.to_string()));
        panic::panic_any(3);
    });
    let proxy = Proxy::start(parts, LONG).unwrap();
    bench.script.fail_poll(died(RANKS[1]));
    wait_until(|| bench.reports().len() == 2);
    let text = proxy.stop().unwrap_err().to_string();
    assert!(text.contains("the proxy thread panicked: no message"), "{text}");
    assert_eq!(bench.reports(), [(RANKS[1], died(RANKS[1]).to_string()), (RANKS[2], text)]);
}

#[test]
fn a_proxy_whose_engine_does_not_return_from_a_call_ends_nevertheless() {
    let (bench, parts) = Bench::new(LANE);
    let (entered, release) = (Arc::new(AtomicBool::new(false)), Arc::new(AtomicBool::new(false)));
    let (enters, released) = (Arc::clone(&entered), Arc::clone(&release));
    bench.script.answer(move |_| {
        enters.store(true, Relaxed);
        while !released.load(Relaxed) {
            thread::sleep(Duration::from_millis(1));
        }
        Ok(Posted::Yes)
    });
    let proxy = Proxy::start(parts, Duration::from_millis(5)).unwrap();
    release_all(&bench, 1);
    wait_until(|| entered.load(Relaxed));
    let stop = thread::spawn(|| proxy.stop());
    wait_until(|| stop.is_finished());
    let error = stop.join().unwrap().unwrap_err().to_string();
    assert!(error.starts_with("ending the proxy thread ep-rail-5: a call of the engine"), "{error}");
    release.store(true, Relaxed);
}
