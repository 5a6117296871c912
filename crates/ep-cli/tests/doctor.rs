//! The output of `hybrid-ep doctor` as text and as JSON.
#![allow(clippy::unwrap_used, reason = "a test that cannot go on panics")]

mod common;

use common::run;

#[test]
fn the_report_is_text_or_json() {
    let text = run(&["doctor"]).succeeded().stdout;
    assert!(text.lines().count() > 3, "{text}");
    let json: serde_json::Value =
        serde_json::from_str(&run(&["doctor", "--json"]).succeeded().stdout).unwrap();
    assert_eq!(json["hybrid_ep_version"], env!("CARGO_PKG_VERSION"));
}
