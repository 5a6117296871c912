//! Calls of libfabric that fail, over the fake: each error names the provider, the call and what to do, or the peer, and
//! all objects are closed.
#![allow(clippy::unwrap_used)] // in helpers of tests

mod common;
#[path = "common/fake.rs"]
mod fake;

use std::path::PathBuf;
use std::time::{Duration, Instant};

use common::{ends, open_with, rail, signal_only};
use ep::conformance::{End, TRANSPORT_LIMITS};
use ep::{Error, PeerError, PeerFault, Posted, Rank, Result};
use ep_fabric::Options;
use ep_fabric_fake::{Fake, Gone, Settings, Step, sys};
use fake::Opens;

const EIO: i32 = 5;
const ECONNRESET: i32 = 104;

fn open_error(options: &Options) -> Error {
    open_with(options, rail(2, 0), TRANSPORT_LIMITS).map(drop).unwrap_err()
}

/// Fails unless the error is the environment's, and its text has all these parts.
#[track_caller]
fn assert_environment(error: &Error, parts: &[&str]) {
    let text = error.to_string();
    assert!(matches!(error, Error::Environment(_)), "{text}");
    for part in parts {
        assert!(text.contains(part), "{text:?} lacks {part:?}");
    }
}

/// Makes progress on all ends until one fails on the first end.
#[track_caller]
fn first_error(ends: &[End]) -> Error {
    let deadline = Instant::now() + Duration::from_secs(30);
    loop {
        for end in &ends[1..] {
            let _ = end.transport.poll(&mut |_, _| {});
        }
        if let Err(error) = ends[0].transport.poll(&mut |_, _| {}) {
            return error;
        }
        assert!(Instant::now() < deadline, "no error within 30 s");
    }
}

#[track_caller]
fn peer_error(error: Error) -> PeerError {
    match error {
        Error::Peer(error) => error,
        other => panic!("{other}"),
    }
}

/// Posts a put as soon as the queue has room. (While its thread holds the engine, `put` says that the queue is full.)
fn post(end: &End, peer: Rank) -> Result<()> {
    let deadline = Instant::now() + Duration::from_secs(30);
    while end.transport.put(signal_only(peer, 5))? == Posted::Full {
        end.transport.poll(&mut |_, _| {})?;
        assert!(Instant::now() < deadline, "the queue is full for 30 s");
    }
    Ok(())
}

#[test]
fn a_call_that_fails_while_opening_is_named_and_all_objects_are_closed() {
    for (step, call) in [
        (Step::Fabric, "fi_fabric"),
        (Step::Domain, "fi_domain"),
        (Step::CqOpen, "fi_cq_open"),
        (Step::AvOpen, "fi_av_open"),
        (Step::Endpoint, "fi_endpoint"),
        (Step::BindCq, "fi_ep_bind to the queue"),
        (Step::BindAv, "fi_ep_bind to the addresses"),
        (Step::Enable, "fi_enable"),
        (Step::MrReg, "fi_mr_reg"),
        (Step::MrBind, "fi_mr_bind"),
        (Step::MrEnable, "fi_mr_enable"),
        (Step::Recv, "fi_recv"),
        (Step::GetName, "fi_getname"),
    ] {
        let name = format!("opening, {call}");
        let (mr_mode, mode) = (sys::MR_ENDPOINT, sys::RX_CQ_DATA);
        let fake =
            Fake::new(&name, &Settings { fail: step, errno: EIO, mr_mode, mode, ..Settings::default() });
        let error = open_error(&fake.options());
        assert_environment(&error, &[&name, "libfabric 1.17", &format!("{call}: Input/output error (5)")]);
        let Error::Environment(error) = error else { unreachable!() };
        assert!(!error.hint.is_empty(), "{error}");
        fake.assert_clean(call);
    }
}

#[test]
fn a_window_that_cannot_be_registered_names_the_limit_of_locked_memory() {
    let settings = Settings { fail: Step::MrReg, errno: sys::ENOMEM as i32, ..Settings::default() };
    let fake = Fake::new("no memory", &settings);
    let parts = ["no memory", "fi_mr_reg: Cannot allocate memory (12)", "ulimit -l", TRANSPORT_LIMITS.advice];
    assert_environment(&open_error(&fake.options()), &parts);
}

#[test]
fn a_key_that_does_not_fit_is_refused() {
    let (mr_mode, key_size) = (sys::MR_PROV_KEY, 16);
    let fake =
        Fake::new("long keys", &Settings { fail: Step::Key, mr_mode, key_size, ..Settings::default() });
    assert_environment(
        &open_error(&fake.options()),
        &["long keys", "fi_mr_key", "8 bytes", "HYBRID_EP_TRANSPORT"],
    );
    fake.assert_clean("long keys");
}

#[test]
fn limits_of_a_provider_name_the_setting_to_lower() {
    let put = TRANSPORT_LIMITS.put_bytes;
    let fake = Fake::new("short puts", &Settings { max_msg_size: put - 1, ..Settings::default() });
    let parts = ["short puts", &*format!("{put} bytes"), &format!("{}", put - 1), TRANSPORT_LIMITS.advice];
    assert_environment(&open_error(&fake.options()), &parts);
    let fake = Fake::new("short queue", &Settings { cq_size: 8, ..Settings::default() });
    let parts = ["short queue", "fi_cq_open: Invalid argument (22)", TRANSPORT_LIMITS.advice];
    assert_environment(&open_error(&fake.options()), &parts);
    fake.assert_clean("short queue");
}

#[test]
fn a_call_that_fails_later_is_named() {
    let with = |name: &str, fail, errno| Fake::new(name, &Settings { fail, errno, ..Settings::default() });
    let fake = with("refused put", Step::WriteData, sys::EINVAL as i32);
    let both = ends(&fake.options(), 2);
    let error = post(&both[0], both[1].rail.own()).unwrap_err();
    assert_environment(&error, &["refused put", "fi_writedata: Invalid argument (22)", "FI_LOG_LEVEL"]);
    drop(both);
    fake.assert_clean("refused put");

    let fake = with("unreadable", Step::CqRead, EIO);
    let both = ends(&fake.options(), 2);
    let parts = ["unreadable", "fi_cq_read: Input/output error (5)", "FI_LOG_LEVEL"];
    assert_environment(&first_error(&both), &parts);
    // All later calls say the same.
    assert_environment(&both[0].transport.drain(both[1].rail.own(), Instant::now()).unwrap_err(), &parts);
    drop(both);
    fake.assert_clean("unreadable");

    let settings = Settings { fail: Step::CqReadErr, errno: EIO, fail_put: 1, ..Settings::default() };
    let fake = Fake::new("unreadable error", &settings);
    let both = ends(&fake.options(), 2);
    post(&both[0], both[1].rail.own()).unwrap();
    let parts = ["unreadable error", "fi_cq_readerr: Input/output error (5)", "FI_LOG_LEVEL"];
    assert_environment(&first_error(&both), &parts);
}

#[test]
fn a_completion_with_an_error_names_the_peer_and_spares_the_others() {
    for again in [0, 60] {
        let name = format!("failed put, {again}");
        let fake = Fake::new(&name, &Settings { fail_put: 1, again, ..Settings::default() });
        let three = ends(&fake.options(), 3);
        let (lost, other) = (three[1].rail.own(), three[2].rail.own());
        post(&three[0], lost).unwrap();
        let error = peer_error(first_error(&three));
        let text = error.to_string();
        assert_eq!((error.peer, error.rank, error.fault), (lost, three[0].rail.own(), PeerFault::Died));
        assert!(text.contains(&name) && text.contains("Input/output error (5)"), "{text}");
        // `poll` returns the error once, and every later put to this peer returns it again.
        assert_eq!(three[0].transport.poll(&mut |_, _| {}), Ok(()));
        assert_eq!(peer_error(post(&three[0], lost).unwrap_err()).peer, lost);
        assert_eq!(peer_error(three[0].transport.drain(lost, Instant::now()).unwrap_err()).peer, lost);
        post(&three[0], other).unwrap();
        let mut seen = Vec::new();
        let deadline = Instant::now() + Duration::from_secs(30);
        while seen.is_empty() && Instant::now() < deadline {
            three[2].transport.poll(&mut |peer, signal| seen.push((peer, signal.word()))).unwrap();
        }
        assert_eq!(seen, [(three[0].rail.own(), 5)]);
        drop(three);
        fake.assert_clean(&name);
    }
}

#[test]
fn a_peer_that_closes_its_endpoint_is_named() {
    let fake = Fake::new("closed", &Settings::default());
    let mut both = ends(&fake.options(), 2);
    let gone = both.remove(1).rail.own();
    // At least one put, even if the engine's thread holds the engine at first; then more, until the engine knows.
    post(&both[0], gone).unwrap();
    while both[0].transport.put(signal_only(gone, 1)) == Ok(Posted::Yes) {}
    let error = peer_error(first_error(&both));
    let text = error.to_string();
    for _ in 0..1000 {
        assert_eq!(both[0].transport.poll(&mut |_, _| {}), Ok(()), "a second report of one peer");
    }
    assert!(error.peer == gone && text.contains("closed") && text.contains("reset by peer (104)"), "{text}");

    // Where the provider never accepts a put to the peer, no call fails, and no call waits longer than its deadline.
    let fake = Fake::new("closed, again", &Settings { gone: Gone::Again, ..Settings::default() });
    let mut both = ends(&fake.options(), 2);
    let gone = both.remove(1).rail.own();
    for _ in 0..100 {
        assert_eq!(both[0].transport.put(signal_only(gone, 1)), Ok(Posted::Full));
        assert_eq!(both[0].transport.poll(&mut |_, _| {}), Ok(()));
    }
    assert_eq!(both[0].transport.drain(gone, Instant::now()), Ok(()));
}

#[test]
fn a_put_that_the_provider_refuses_for_its_peer_names_the_peer() {
    let settings = Settings { fail: Step::WriteData, errno: ECONNRESET, ..Settings::default() };
    let both = ends(&Fake::new("no way", &settings).options(), 2);
    let peer = both[1].rail.own();
    let error = peer_error(post(&both[0], peer).unwrap_err());
    let text = error.to_string();
    assert!(error.peer == peer && text.contains("no way") && text.contains("reset by peer (104)"), "{text}");
}

#[test]
fn a_shortage_of_this_process_is_no_fault_of_a_peer() {
    for errno in [sys::ENOMEM, sys::ENFILE, sys::EMFILE, sys::ENOBUFS] {
        let settings = Settings { fail: Step::WriteData, errno: errno as i32, ..Settings::default() };
        let name = format!("short of {errno}");
        let both = ends(&Fake::new(&name, &settings).options(), 2);
        let error = post(&both[0], both[1].rail.own()).unwrap_err();
        assert_environment(&error, &[&name, "fi_writedata: ", &format!("({errno})")]);
    }
}

#[test]
fn endpoints_of_shm_are_closed_with_the_last_of_the_process() {
    let fake = Fake::new("shm", &Settings::default());
    let mut both = ends(&fake.options(), 2);
    let gone = both.remove(1).rail.own();
    // Its endpoint is still open, so a put does not fail.
    post(&both[0], gone).unwrap();
    assert_eq!(both[0].transport.poll(&mut |_, _| {}), Ok(()));
    drop(both);
    fake.assert_clean("shm");
}

#[test]
fn an_immediate_without_a_receive_names_the_peer_when_the_provider_gives_up() {
    let (mode, rnr_retries) = (sys::RX_CQ_DATA, 0);
    let fake = Fake::new(
        "no receive",
        &Settings { mode, rnr_retries, rx_size: 1, again: 90, ..Settings::default() },
    );
    let both = ends(&fake.options(), 2);
    let peer = both[1].rail.own();
    let deadline = Instant::now() + Duration::from_secs(30);
    let error = loop {
        assert!(Instant::now() < deadline, "no error within 30 s");
        let put = both[0].transport.put(signal_only(peer, 1)).map(drop);
        if let Err(error) = put.and_then(|()| both[0].transport.poll(&mut |_, _| {})) {
            break peer_error(error);
        }
        let _ = both[1].transport.poll(&mut |_, _| {});
    };
    assert!(error.peer == peer && error.to_string().contains("no receive buffers"), "{error}");
    drop(both);
    fake.assert_clean("no receive");
}

#[test]
fn an_address_that_the_provider_refuses_names_the_peer() {
    let fake = Fake::new("refuses", &Settings { refuses_addresses: true, ..Settings::default() });
    let opened: Vec<_> =
        (0..2).map(|own| open_with(&fake.options(), rail(2, own), TRANSPORT_LIMITS).unwrap()).collect();
    let blobs: Vec<_> = opened.iter().map(|(engine, _)| engine.blob()).collect();
    for (own, (engine, _pages)) in opened.into_iter().enumerate() {
        let error = peer_error(engine.connect(&blobs).map(drop).unwrap_err());
        assert_eq!(error.peer, rail(2, 1 - own).own());
        assert!(error.to_string().contains("an address that provider refuses refuses"), "{error}");
    }
    fake.assert_clean("refused addresses");
}

#[test]
fn a_provider_without_what_an_engine_needs_is_refused_with_what_it_lacks() {
    for (name, settings) in [
        ("without remote writes", Settings { lacks: sys::RMA, ..Settings::default() }),
        ("with short immediates", Settings { data_size: 2, ..Settings::default() }),
        ("with another mode", Settings { mode: 1 << 55, ..Settings::default() }),
        ("with long keys", Settings { key_size: 16, ..Settings::default() }),
    ] {
        let fake = Fake::new(name, &settings);
        let parts = [name, "what an engine needs", "immediates of 4 bytes", "offered: "];
        assert_environment(&open_error(&fake.options()), &parts);
        fake.assert_clean(name);
    }
    let fake = Fake::new("broken list", &Settings { fail: Step::GetInfo, errno: EIO, ..Settings::default() });
    assert_environment(&open_error(&fake.options()), &["fi_getinfo: Input/output error (5)", "FI_LOG_LEVEL"]);
}

/// A copy of the fake, which has a state of its own.
fn copy(name: &str, change: impl FnOnce(&mut Vec<u8>)) -> PathBuf {
    let mut bytes = std::fs::read(ep_fabric_fake::path()).unwrap();
    change(&mut bytes);
    let file = format!("{name}-{}.so", std::process::id());
    let path = PathBuf::from(env!("CARGO_TARGET_TMPDIR")).join(file);
    std::fs::write(&path, bytes).unwrap();
    path
}

#[test]
fn a_library_without_providers_says_that_it_offers_none() {
    let path = copy("empty", |_| {});
    let error = open_error(&common::options("verbs;ofi_rxm", Some(path.clone())));
    assert_environment(&error, &["verbs;ofi_rxm", "not offered here", "offered: none"]);
    assert_eq!(ep_fabric::providers(Some(&path)).unwrap(), ("1.17".into(), Vec::new()));
    std::fs::remove_file(path).unwrap();
}

#[test]
fn a_library_of_an_older_version_says_what_to_install() {
    let path = copy("old", |_| {});
    let fake = Fake::at(path.clone(), "old");
    fake.offer("nic0", "", &Settings::default());
    fake.set_version(sys::version(1, 16));
    let error = open_error(&fake.options());
    assert_environment(
        &error,
        &["its version is 1.16", "libfabric 1.17 or later", "apt-get install libfabric1"],
    );
    // A later library is asked for the interface of 1.17, and works.
    fake.set_version(sys::version(2, 6));
    assert_eq!(open_with(&fake.options(), rail(2, 0), TRANSPORT_LIMITS).map(drop), Ok(()));
    std::fs::remove_file(path).unwrap();
}

#[test]
fn a_library_without_one_of_the_functions_names_it() {
    for name in ["fi_version", "fi_getinfo", "fi_freeinfo", "fi_dupinfo", "fi_fabric", "fi_strerror"] {
        // Renames the function in the library's table of strings.
        let path = copy(name, |bytes| {
            let old = [b"\0", name.as_bytes(), b"\0"].concat();
            let at = bytes.windows(old.len()).position(|window| window == old).unwrap();
            bytes[at + 1] = b'x';
        });
        let error = open_error(&common::options("any", Some(path.clone())));
        assert_environment(&error, &[name, "apt-get install libfabric1"]);
        std::fs::remove_file(path).unwrap();
    }
}

#[test]
fn nothing_waits_for_a_call_of_the_engines_thread_that_never_returns() {
    let fake = Fake::new("stuck", &Settings { stuck: true, ..Settings::default() });
    let both = ends(&fake.options(), 2);
    let (tell, told) = std::sync::mpsc::channel();
    std::thread::spawn(move || {
        // The engine's thread is inside the call, and workers do not wait for it.
        std::thread::sleep(Duration::from_millis(200));
        let (end, peer) = (&both[0], both[1].rail.own());
        assert_eq!(end.transport.put(signal_only(peer, 5)), Ok(Posted::Full));
        end.transport.poll(&mut |_, _| {}).unwrap();
        let stalled = end.transport.drain(peer, Instant::now() + Duration::from_millis(50)).unwrap_err();
        assert_eq!(peer_error(stalled).fault, PeerFault::Stalled);
        drop(both);
        tell.send(()).unwrap();
    });
    told.recv_timeout(Duration::from_secs(60)).expect("the engines are dropped");
}
