//! These tests compare the results of `hybrid-ep simulate` with the plan.

use serde_json::Value;

use crate::assert_well_formed;
use crate::common::{Directory, run};

#[test]
fn a_simulation_is_compared_with_the_plan() {
    let directory = Directory::new("simulate");
    let [trace, svg] = ["trace.json", "timeline.svg"].map(|name| directory.file(name));
    let options = ["--layers", "2", "--trace", &trace, "--svg", &svg, "--json", "-"];
    let finished = run(&[&["simulate"], &options[..]].concat()).succeeded();
    assert!(finished.stderr.contains("simulated/planned"), "{}", finished.stderr);
    let report: Value = serde_json::from_str(&finished.stdout).unwrap();
    assert_eq!(report["scheme"]["hybrid"]["domain_sizes"], report["planned"]["domain_sizes"]);
    let ratio = report["simulated_over_planned"].as_f64().unwrap();
    assert!(ratio > 0.5 && ratio < 2.0, "{ratio}");
    let trace: Value = serde_json::from_str(&std::fs::read_to_string(trace).unwrap()).unwrap();
    assert!(!trace["traceEvents"].as_array().unwrap().is_empty());
    assert_well_formed(&std::fs::read_to_string(svg).unwrap());

    // A slow link delays all GPUs, and the same seed gives the same run.
    let layer = |options: &[&str]| {
        let all = [&["simulate", "--layers", "2", "--set", "work=forward", "--json", "-"], options].concat();
        let report: Value = serde_json::from_str(&run(&all).succeeded().stdout).unwrap();
        report["simulated"]["layer_seconds"].as_f64().unwrap()
    };
    let alone = layer(&["--scheme", "plain"]);
    assert!(layer(&["--scheme", "plain", "--stragglers", "link:wan:0=3"]) > 1.5 * alone);
    let seeded = |seed| layer(&["--domains", "2,2,2", "--jitter", "0.3", "--seed", seed]);
    assert_eq!(seeded("1"), seeded("1"));
    assert_ne!(seeded("1"), seeded("2"));
}

/// Steps of all strategies are simulated. A slow GPU makes a step longer where compute is the limit; where links are,
/// it may change little (SIMULATOR.md).
#[test]
fn whole_steps_are_simulated() {
    let steps = |options: &[&str]| {
        let all = [&["simulate", "--steps", "--nodes=16", "--set=global_batch=2097152", "--json=-"], options]
            .concat();
        let report: Value = serde_json::from_str(&run(&all).succeeded().stdout).unwrap();
        let of = |row: &Value| {
            let simulated = row["simulated"]["Ok"]["step_time"].as_f64().unwrap();
            (
                row["priced"]["strategy"].as_str().unwrap().to_owned(),
                simulated,
                row["priced"]["step_time"].as_f64().unwrap(),
            )
        };
        report["steps"].as_array().unwrap().iter().map(of).collect::<Vec<_>>()
    };
    let (even, slow) = (steps(&[]), steps(&["--stragglers=gpu:0=2"]));
    assert_eq!(even.len(), 6);
    for ((name, simulated, priced), (.., slower, _)) in even.iter().zip(&slow) {
        assert!((simulated / priced - 1.0).abs() < 0.05, "{name}: {simulated} {priced}");
        let least = if name == "pipeline" { 1.2 } else { 0.98 };
        assert!(slower / simulated > least, "{name}: {slower} {simulated}");
    }
    run(&["simulate", "--steps", "--set", "work=forward"]).refused(2, &["--steps", "work=training"]);
}

/// A slow uplink counts like an uplink of less bandwidth, even where no EP group crosses it: at the boundaries of stages and
/// in the exchanges at the end of a step. Links are numbered in the whole cluster.
#[test]
fn a_slow_uplink_counts_in_every_strategy() {
    let cluster =
        ["--cluster=dgx-h100", "--model=qwen3-235b", "--datacenters=3", "--nodes=8", "--round-trip=30ms"];
    let steps = |options: &[&str]| {
        let json =
            run(&[&["simulate", "--steps", "--json=-"], &cluster[..], options].concat()).succeeded().stdout;
        let report: Value = serde_json::from_str(&json).unwrap();
        let of = |row: &Value| {
            let simulated = row["simulated"]["Ok"]["step_time"].as_f64().unwrap();
            (row["priced"]["strategy"].as_str().unwrap().to_owned(), simulated)
        };
        report["steps"].as_array().unwrap().iter().map(of).collect::<std::collections::BTreeMap<_, _>>()
    };
    let even = steps(&["--uplink=10Gbit/s"]);
    assert_eq!(even.len(), 6);
    for (link, uplinks) in [("0", "5Gbit/s,10Gbit/s,10Gbit/s"), ("1", "10Gbit/s,5Gbit/s,10Gbit/s")] {
        let straggler = format!("--stragglers=link:wan:{link}=2");
        let slow = steps(&["--uplink=10Gbit/s", &straggler]);
        let narrow = steps(&[&*format!("--uplink={uplinks}")]);
        for (name, &narrow) in &narrow {
            // The uplink in the middle of a pipeline carries twice as much as the first, so half of the first is as busy. The layout
            // for unequal uplinks may be another one.
            let balanced = name == "pipeline" && link == "0";
            let (same, least) = if balanced { (0.05, 1.0) } else { (0.01, 1.2) };
            assert!((slow[name] / narrow - 1.0).abs() < same, "{name} {link}: {} {narrow}", slow[name]);
            assert!(slow[name] > least * even[name], "{name} {link}: {} {}", slow[name], even[name]);
        }
    }
    // GPUs are numbered in the whole cluster, too.
    let slow = steps(&["--uplink=10Gbit/s", "--stragglers=gpu:191=2"]);
    assert!(slow["local-steps"] > 1.3 * even["local-steps"], "{slow:?}");
    for (straggler, parts) in [
        ("link:wan:3=2", ["straggling link 3 does not exist", "there are 3"]),
        ("gpu:192=2", ["straggling GPU 192 does not exist", "there are 192"]),
    ] {
        run(&[&["simulate", "--steps", "--stragglers", straggler], &cluster[..]].concat()).refused(2, &parts);
    }
}
