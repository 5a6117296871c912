//! `rail`: measures an engine of libfabric. Without the library the test prints that it was skipped;
//! `HYBRID_EP_REQUIRE_LIBFABRIC=1` makes that a failure.
#![cfg(target_os = "linux")]
#![allow(clippy::unwrap_used, reason = "a test that cannot go on panics")]

mod common;

use common::{program, run};
use serde_json::Value;

#[test]
fn a_rail_is_measured_for_every_pair_and_size() {
    if ep_fabric::testing::installed().is_none() {
        return;
    }
    let mut command = program();
    command.args("rail --ranks 3 --sizes 0,4096 --duration-ms 5 --json -".split(' '));
    let done = command.output().unwrap();
    let error = String::from_utf8_lossy(&done.stderr);
    assert_eq!(done.status.code(), Some(0), "{error}");
    let report: Value = serde_json::from_slice(&done.stdout).unwrap();
    for (pair, rank) in report["pairs"].as_array().unwrap().iter().zip(1..) {
        assert_eq!(pair["rank"], rank);
        let [empty, page] = &pair["sizes"].as_array().unwrap()[..] else { panic!("{pair}") };
        assert_eq!((&empty["message_bytes"], &empty["one_way_gb_per_s"]), (&0.into(), &Value::Null));
        for figure in ["latency_us", "one_way_gb_per_s", "both_ways_gb_per_s", "per_message_us"] {
            assert!(page[figure].as_f64().unwrap() > 0.0, "{page}");
        }
    }
    assert_eq!(report["pairs"].as_array().unwrap().len(), 2);
    assert!(error.contains("rank 0 and rank 2 over ") && error.contains("4.10 kB"), "{error}");
}

#[test]
fn a_rail_of_one_rank_and_messages_that_are_too_long_are_refused() {
    let rail = |options: &str| run(&format!("rail {options}").split(' ').collect::<Vec<_>>());
    rail("--ranks 1").refused(2, &["--ranks 1: a rail needs at least 2 ranks"]);
    rail("--sizes 4194305").refused(2, &["--sizes 4194305: a message has at most 4194304 bytes"]);
    let loopback = "transport loopback: copies inside one machine";
    rail("--transport loopback").refused(2, &[loopback]);
    let mut command = program();
    command.arg("rail").env("HYBRID_EP_TRANSPORT", "loopback");
    let error = command.output().unwrap();
    assert!(
        error.status.code() == Some(2) && String::from_utf8_lossy(&error.stderr).contains(loopback),
        "{error:?}"
    );
}
