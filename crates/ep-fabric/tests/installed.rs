//! The engine over an installed libfabric, with ranks that are threads and processes. Without the library the tests
//! print that they were skipped; `HYBRID_EP_REQUIRE_LIBFABRIC=1` makes that a failure.
#![allow(clippy::unwrap_used)] // in helpers of tests

mod common;

use std::path::{Path, PathBuf};
use std::process::{Child, Command};
use std::time::{Duration, Instant};

use common::{Access, Reorder, conform, ends, open_with, options, rail, signal_only};
use ep::conformance::{End, TRANSPORT_LIMITS, check_transport};
use ep::{Error, Posted};
use ep_fabric::Options;
use ep_fabric::testing::installed;

/// Providers of ranks on one machine.
const PROVIDERS: [&str; 2] = ["tcp", "shm"];

#[test]
fn the_conformance_suite_passes_with_threads() {
    let Some(library) = installed() else { return };
    for provider in PROVIDERS {
        for (ranks, reorder) in [(1, Reorder::No), (2, Reorder::No), (3, Reorder::Yes), (4, Reorder::No)] {
            let result = conform(&options(provider, library.clone()), ranks, reorder);
            assert_eq!(result, Ok(()), "{ranks} ranks over {provider}");
        }
    }
}

/// A rank of `the_conformance_suite_passes_with_processes`, which starts it with these variables.
#[test]
#[ignore = "a part of another test"]
fn one_process_of_the_conformance_suite() {
    let var = |key| std::env::var(key).unwrap();
    let (dir, ranks, own) =
        (PathBuf::from(var("DIR")), var("RANKS").parse().unwrap(), var("OWN").parse().unwrap());
    let library = std::env::var_os("HYBRID_EP_LIBFABRIC").map(PathBuf::from);
    let options = options(&var("PROVIDER"), library);
    let (engine, pages) = open_with(&options, rail(ranks, own), TRANSPORT_LIMITS).unwrap();
    let file = |rank: usize| dir.join(format!("blob.{rank}"));
    std::fs::write(dir.join(format!("new.{own}")), engine.blob()).unwrap();
    std::fs::rename(dir.join(format!("new.{own}")), file(own)).unwrap();
    let deadline = Instant::now() + Duration::from_secs(60);
    let read = |rank| loop {
        match std::fs::read(file(rank)) {
            Ok(blob) => break blob,
            Err(error) => assert!(Instant::now() < deadline, "{error}"),
        }
        std::thread::sleep(Duration::from_millis(1));
    };
    let blobs: Vec<Vec<u8>> = (0..ranks).map(read).collect();
    let transport = engine.connect(&blobs).unwrap();
    let end = End { rail: rail(ranks, own), transport, window: Box::new(Access(pages)) };
    check_transport(end, Duration::from_secs(60)).unwrap();
}

fn spawn(provider: &str, dir: &Path, ranks: usize, own: usize) -> Child {
    let mut command = Command::new(std::env::current_exe().unwrap());
    command.args(["--exact", "one_process_of_the_conformance_suite", "--ignored", "--nocapture"]);
    command
        .env("DIR", dir)
        .env("RANKS", ranks.to_string())
        .env("OWN", own.to_string())
        .env("PROVIDER", provider);
    command.spawn().unwrap()
}

#[test]
fn the_conformance_suite_passes_with_processes() {
    if installed().is_none() {
        return;
    }
    for provider in PROVIDERS {
        let dir =
            Path::new(env!("CARGO_TARGET_TMPDIR")).join(format!("blobs-{provider}-{}", std::process::id()));
        std::fs::create_dir_all(&dir).unwrap();
        let children: Vec<Child> = (0..3).map(|own| spawn(provider, &dir, 3, own)).collect();
        let ended: Vec<bool> =
            children.into_iter().map(|mut child| child.wait().unwrap().success()).collect();
        std::fs::remove_dir_all(&dir).unwrap();
        assert_eq!(ended, [true; 3], "over {provider}");
    }
}

#[test]
fn a_peer_that_is_gone_is_named_by_an_error_within_the_deadline() {
    let Some(library) = installed() else { return };
    for provider in PROVIDERS {
        let mut ends = ends(&options(provider, library.clone()), 3);
        let gone = ends.remove(1);
        let (gone, peer) = (gone.rail.own(), gone.transport);
        drop(peer);
        let end = &ends[0];
        let start = Instant::now();
        let deadline = start + Duration::from_millis(500);
        let mut accepted = 0;
        let drained = loop {
            match end.transport.put(signal_only(gone, 7)) {
                Err(error) => break Err(error),
                Ok(posted) => accepted += usize::from(posted == Posted::Yes),
            }
            let polled = end.transport.poll(&mut |_, _| {});
            if let Err(error) = polled {
                break Err(error);
            }
            if Instant::now() > deadline {
                break end.transport.drain(gone, deadline);
            }
            std::thread::sleep(Duration::from_millis(5));
        };
        // A provider may accept puts for a peer that is gone, or be full for ever. No wait is longer than its deadline.
        match drained {
            Ok(()) if accepted == 0 => {}
            Err(Error::Peer(error)) => {
                assert_eq!((error.peer, error.rank), (gone, end.rail.own()), "{error}")
            }
            other => panic!("{provider}: {other:?}"),
        }
        assert!(start.elapsed() < Duration::from_secs(30));
        // The third rank is still reachable.
        let third = &ends[1];
        let (mut posted, mut seen) = (Posted::Full, Vec::new());
        let deadline = Instant::now() + Duration::from_secs(30);
        while seen.is_empty() && Instant::now() < deadline {
            if posted == Posted::Full {
                posted = end.transport.put(signal_only(third.rail.own(), 9)).unwrap();
            }
            let _ = end.transport.poll(&mut |_, _| {});
            let _ = third.transport.poll(&mut |peer, signal| seen.push((peer, signal.word())));
        }
        assert_eq!(seen, [(end.rail.own(), 9)], "{provider}");
    }
}

#[test]
fn unusable_blobs_are_errors_that_name_the_peer() {
    let Some(library) = installed() else { return };
    let open =
        |provider: &str, own| open_with(&options(provider, library.clone()), rail(2, own), TRANSPORT_LIMITS);
    let other = open("shm", 1).unwrap().0.blob();
    let good = open("tcp", 1).unwrap().0.blob();
    let short = good[..good.len() - 1].to_vec();
    for (blob, reason) in [(other, "provider shm"), (short, "malformed"), (Vec::new(), "malformed")] {
        let (engine, _pages) = open("tcp", 0).unwrap();
        let own = engine.blob();
        match engine.connect(&[own, blob]).map(drop) {
            Err(Error::Peer(error)) => {
                assert!(error.peer == rail(2, 0).ranks()[1] && error.to_string().contains(reason), "{error}")
            }
            other => panic!("{reason}: {other:?}"),
        }
    }
    let (engine, _pages) = open("tcp", 0).unwrap();
    assert!(matches!(engine.connect(&[]).map(drop), Err(Error::Caller(_))));
}

#[test]
fn a_provider_that_is_not_offered_is_named_with_those_that_are() {
    let Some(library) = installed() else { return };
    let error = |options: &Options| {
        open_with(options, rail(2, 0), TRANSPORT_LIMITS).map(drop).unwrap_err().to_string()
    };
    let text = error(&options("no such provider", library.clone()));
    assert!(
        text.contains("no such provider") && text.contains("offered: ") && text.contains("shm"),
        "{text}"
    );
    let text = error(&Options { address: Some("203.0.113.7".into()), ..options("tcp", library.clone()) });
    assert!(text.contains("203.0.113.7"), "{text}");
    let text = error(&options("a\0b", library));
    assert!(text.contains("zero byte"), "{text}");
}

#[test]
fn a_nic_and_a_traffic_class_that_are_not_offered_are_named_with_their_settings() {
    let Some(library) = installed() else { return };
    let open = |options: &Options| open_with(options, rail(2, 0), TRANSPORT_LIMITS).map(drop);
    let on = |domain: &str| Options { domains: vec![domain.into()], ..options("tcp", library.clone()) };
    assert_eq!(open(&on("lo")), Ok(()));
    let text = open(&on("no such NIC")).unwrap_err().to_string();
    assert!(text.contains("HYBRID_EP_TRANSPORT_NIC") && text.contains("lo"), "{text}");
    // The installed providers know no traffic classes, and those of 1.17 list themselves for every one.
    for provider in PROVIDERS {
        let class = Some(ep::TrafficClass::LowLatency);
        let options = Options { traffic_class: class, ..options(provider, library.clone()) };
        let text = open(&options).unwrap_err().to_string();
        assert!(text.contains(provider) && text.contains("HYBRID_EP_TRANSPORT_TRAFFIC_CLASS"), "{text}");
    }
}

#[test]
fn the_providers_are_listed() {
    let Some(library) = installed() else { return };
    let (version, providers) = ep_fabric::providers(library.as_deref()).unwrap();
    assert!(version.contains('.'), "{version}");
    assert!(
        providers.iter().any(|provider| provider.name == "shm" && !provider.domains.is_empty()),
        "{providers:?}"
    );
}

/// The process of `signals_keep_their_actions`. No other test may have loaded the library before.
#[test]
#[ignore = "a part of another test"]
fn one_process_that_loads_the_library() {
    let caught = || {
        let status = std::fs::read_to_string("/proc/self/status").unwrap();
        status.lines().find(|line| line.starts_with("SigCgt")).unwrap().to_owned()
    };
    let before = caught();
    ep_fabric::providers(std::env::var_os("HYBRID_EP_LIBFABRIC").map(PathBuf::from).as_deref()).unwrap();
    assert_eq!(caught(), before);
}

#[test]
fn signals_keep_their_actions() {
    if installed().is_none() {
        return;
    }
    let mut command = Command::new(std::env::current_exe().unwrap());
    command.args(["--exact", "one_process_that_loads_the_library", "--ignored", "--nocapture"]);
    assert!(command.status().unwrap().success());
}

#[test]
fn without_the_library_the_error_says_what_to_install() {
    let missing = options("tcp", Some("/nonexistent/libfabric.so.1".into()));
    let text = open_with(&missing, rail(2, 0), TRANSPORT_LIMITS).map(drop).unwrap_err().to_string();
    assert!(
        text.contains("/nonexistent/libfabric.so.1") && text.contains("apt-get install libfabric1"),
        "{text}"
    );
}
