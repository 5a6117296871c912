#![allow(clippy::unwrap_used, reason = "a test that cannot go on panics")]

use super::*;

#[derive(clap::Parser)]
struct Options {
    #[command(flatten)]
    args: PlanArgs,
}

/// The report as text, as text with `--explain`, and as HTML.
fn reports(options: &str) -> [String; 3] {
    let options = ["plan"].into_iter().chain(options.split_whitespace());
    let args = <Options as clap::Parser>::try_parse_from(options).unwrap().args;
    let problem = Problem::resolve(&args.problem).unwrap();
    let (step, plan) = solve(&args, &problem).unwrap();
    let text = |explain| text::render(&problem, step.as_ref(), &plan, None, explain);
    [text(false), text(true), html::render(&problem, step.as_ref(), &plan, None).unwrap()]
}

/// A pipeline that waits for a link names it, with its time and that of a stage; one that does not wait says nothing.
#[test]
fn a_link_that_the_stages_wait_for_is_named() {
    let slow = "--nodes=32 --uplink=10Gbit/s --set=pipeline_stages=4";
    for shown in reports(&format!("{slow} --set=weight_compression=1")) {
        assert!(shown.contains("Best with all 512 GPUs: a pipeline"), "{shown}");
        // The 58.7 MB of each of 128 GPUs cross an uplink of 10 Gbit/s.
        let line = "The stages wait for level wan: its busiest link sends for 6.013 s per micro-batch in one direction, \
                    and a stage takes ";
        assert_eq!(shown.matches(line).count(), 1, "{shown}");
    }
    // The pipeline is shown, and is not the best strategy.
    for shown in reports(&format!("{slow} --set=weight_compression=50 --strategy=pipeline")) {
        assert!(shown.contains("Best with all 512 GPUs: expert domains"), "{shown}");
        assert_eq!(shown.matches("The stages wait for level wan: ").count(), 1, "{shown}");
    }
    // Links that keep up, and a step of one stage.
    for options in ["", "--nodes=16 --strategy=plain-ep --set=pipeline_stages=1"] {
        for shown in reports(options) {
            assert!(!shown.contains("stages wait for level"), "{shown}");
        }
    }
}
