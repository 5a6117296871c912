//! The first lines of `hybrid-ep plan`: the answer for problems in which moving experts gains nothing.
#![allow(clippy::unwrap_used, reason = "a test that cannot go on panics")]

mod common;

use common::{Directory, run};

/// Two GPUs so slow that no transfer matters.
const SLOW_COMPUTE: &str = r#"
[[cluster.level]]
name = "wan"
members = 2
bandwidth = "1 Gbit/s"
sharing = "per-member"
[cluster.gpu]
throughput = "0.03 TFLOP/s"
memory = "2000 GB"
memory_bandwidth = "10 GB/s"
[model]
preset = "mixtral-8x7b"
"#;

#[test]
fn a_gain_that_rounds_to_nothing_is_not_worth_it() {
    let directory = Directory::new("answers");
    let file = directory.file("slow.toml");
    std::fs::write(&file, SLOW_COMPUTE).unwrap();
    let plan = |more: &[&str]| run(&[&["plan", "--cluster", &file], more].concat()).succeeded().stdout;
    let training = plan(&[]);
    assert!(training.contains("Best: expert domains (2)"), "{training}");
    assert!(
        training.contains("as fast (1.00x). Moving experts is not worth it: the gain is 1.00x."),
        "{training}"
    );
    // With fast GPUs the link decides, and the remark is absent.
    let fast = plan(&["--set", "throughput=400TFLOP/s"]);
    assert!(!fast.contains("the gain is 1.00x"), "{fast}");
}
