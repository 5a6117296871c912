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

#[test]
fn the_report_says_what_a_tight_layout_is_and_whether_others_are_not() {
    let plan = |more: &[&str]| run(&[&["plan"], more].concat()).succeeded().stdout;
    let some = plan(&[]);
    assert!(some.contains(" data parallelism (tight) ") && some.contains(" pipeline   "), "{some}");
    assert!(
        some.contains("\n(tight): the parameters fit, but leave less than 30 % of a GPU's memory"),
        "{some}"
    );
    assert!(some.contains("The layouts without this mark leave it. Recomputation, which may be needed then, is not counted: "), "{some}");
    let all = plan(&["--set", "reserved_memory=0"]);
    assert!(
        all.contains("\n(tight): no memory is kept free for activations (`reserved_memory` 0).\n"),
        "{all}"
    );
    let none = plan(&["--set", "memory=2000GB"]);
    assert!(!none.contains("(tight)"), "{none}");
}

#[test]
fn the_report_explains_columns_and_brackets_with_the_levels_of_the_problem() {
    let text = run(&["plan"]).succeeded().stdout;
    let terms = text.lines().find(|line| line.starts_with("Terms: ")).unwrap();
    for term in
        ["a step is", "`dense sync`", "the levels wan, rail, nvlink:", "`sent as tokens`", "`hottest/mean`"]
    {
        assert!(terms.contains(term), "{term}: {terms}");
    }
}
