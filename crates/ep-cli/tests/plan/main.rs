//! These tests run `hybrid-ep plan`, `reproduce` and `simulate`, and check their results, files and errors.
#![allow(clippy::unwrap_used, reason = "a test that cannot go on panics")]

mod answers;
#[path = "../common/mod.rs"]
mod common;
mod documentation;
mod layouts;
mod paper;
mod problems;
mod refusals;
mod reports;
mod simulations;
mod sweeps;

use common::{Directory, run};
use serde_json::Value;

/// The cluster of the reference plans: 20 us per message on all levels, a round trip only on the uplink.
const REFERENCE: &str = r#"
[cluster]
name = "reference"

[[cluster.level]]
name = "wan"
members = 2
bandwidth = "100 Gbit/s"
sharing = "per-member"
alpha = "20 us"
round_trip = "5 ms"

[[cluster.level]]
name = "rail"
members = 8
bandwidth = "50 GB/s"
alpha = "20 us"

[[cluster.level]]
name = "nvlink"
members = 8
bandwidth = "450 GB/s"
alpha = "20 us"

[cluster.gpu]
throughput = "400 TFLOP/s"
memory = "141 GB"
memory_bandwidth = "3.35 TB/s"

[model]
preset = "deepseek-v3"

[options]
work = "forward"
memory_cap = "24 GB"
replicas = "regather"
weight_compression = 50
gradient_compression = 1
"#;

fn written(directory: &Directory, name: &str, text: &str) -> String {
    let file = directory.file(name);
    std::fs::write(&file, text).unwrap();
    file
}

/// The JSON of a plan with these options.
fn planned(options: &[&str]) -> Value {
    let finished = run(&[&["plan", "--json", "-"], options].concat()).succeeded();
    assert!(finished.stderr.contains("Best: "), "the text goes to stderr: {}", finished.stderr);
    serde_json::from_str(&finished.stdout).unwrap()
}

/// Checks that tags are balanced and attributes are quoted.
fn assert_well_formed(svg: &str) {
    let mut open = Vec::new();
    for tag in svg.split('<').skip(1) {
        let tag = tag.split('>').next().unwrap();
        let name = tag.trim_start_matches('/').split([' ', '\n', '/']).next().unwrap();
        if tag.starts_with('/') {
            assert_eq!(open.pop(), Some(name), "{svg}");
        } else if !tag.ends_with('/') {
            open.push(name);
        }
        assert!(
            tag.matches('"').count().is_multiple_of(2) && !tag.contains("NaN") && !tag.contains("inf"),
            "{tag}"
        );
    }
    assert!(open.is_empty() && svg.contains("xmlns"), "{open:?}");
    // A strict parser refuses a bare ampersand.
    assert!(
        svg.split('&').skip(1).all(|rest| rest.split(';').next().is_some_and(|name| name.len() <= 6)),
        "{svg}"
    );
}
