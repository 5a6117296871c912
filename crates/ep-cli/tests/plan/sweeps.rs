//! These tests check plans of many values of one key.

use serde_json::Value;

use crate::common::{Directory, run};
use crate::planned;

#[test]
fn a_sweep_plans_every_value() {
    let plan = planned(&["--set", "work=forward", "--sweep", "bandwidth=1Gbit/s..400Gbit/s:5"]);
    let points = plan["sweep"]["points"].as_array().unwrap();
    let values: Vec<f64> = points.iter().map(|point| point["value"].as_f64().unwrap()).collect();
    assert_eq!((values.len(), values[0], values[4]), (5, 1.0, 400.0));
    let times: Vec<f64> =
        points.iter().map(|point| point["outcome"]["Ok"]["seconds"].as_f64().unwrap()).collect();
    assert!(times.windows(2).all(|pair| pair[1] < pair[0]), "{times:?}");
    // Values that span a factor of at least 8 have equal ratios; others have equal differences.
    for (range, expected) in [("1..8:4", [1.0, 2.0, 4.0, 8.0]), ("1..7:4", [1.0, 3.0, 5.0, 7.0])] {
        let accumulated = planned(&["--sweep", &format!("gradient_accumulation={range}")]);
        let points = accumulated["sweep"]["points"].as_array().unwrap();
        let values: Vec<f64> = points.iter().map(|point| point["value"].as_f64().unwrap()).collect();
        assert_eq!(values, expected, "{range}");
    }
    // Some values allow no plan, which the result says: 4 nodes cannot hold the model.
    let members = planned(&["--sweep", "members.rail=4..8:3"]);
    let outcomes: Vec<bool> = members["sweep"]["points"]
        .as_array()
        .unwrap()
        .iter()
        .map(|point| point["outcome"]["Ok"].is_object())
        .collect();
    assert_eq!(outcomes, [false, true, true]);
}

/// A sweep finds the values at which there is a plan, even if the problem itself has none. Files are refused, because they
/// would contain the plan of the problem.
#[test]
fn a_problem_without_a_plan_is_swept() {
    let directory = Directory::new("plan-sweep-without");
    let json = directory.file("plan.json");
    let options = ["plan", "--cluster=dgx-h100", "--uplink=20Gbit/s", "--sweep=members.rail=8..16:2"];
    let swept = run(&options).succeeded();
    let row = |from: &str| swept.stdout.lines().any(|line| line.trim_start().starts_with(from));
    assert!(row("8    no plan") && row("16   pipeline"), "{swept:?}");
    assert!(swept.stderr.starts_with("note: the problem itself has no plan: "), "{swept:?}");
    run(&[&options[..], &["--json", &json]].concat()).refused(2, &["possible: more GPUs"]);
    // No value has a plan.
    run(&["plan", "--cluster=dgx-h100", "--sweep=members.rail=2..4:2"]).refused(2, &["possible: more GPUs"]);
}

/// A row calls the best strategy the best, as the table of strategies does, and the last column says whether fewer GPUs are
/// faster.
#[test]
fn a_sweep_says_whether_fewer_gpus_are_faster() {
    let directory = Directory::new("plan-sweep-fewer");
    let [page, json] = ["page.html", "plan.json"].map(|name| directory.file(name));
    let options = ["--datacenters=4", "--nodes=64", "--sweep=bandwidth=1Gbit/s..400Gbit/s:2"];
    let text = run(&[&["plan", "--html", &page, "--json", &json], &options[..]].concat()).succeeded().stdout;
    let rows: Vec<&str> =
        text.lines().skip_while(|line| !line.ends_with("fewer GPUs")).skip(2).take(2).collect();
    let json: Value = serde_json::from_str(&std::fs::read_to_string(json).unwrap()).unwrap();
    let found = |point: usize| &json["sweep"]["points"][point]["outcome"]["Ok"];
    let part = &found(0)["fewer"];
    assert_eq!((&part["sites"], &part["gpus"]), (&serde_json::json!([0]), &serde_json::json!(512)));
    assert_eq!(part["members"], serde_json::json!([64]));
    let gain = part["gain"].as_f64().unwrap();
    assert!(gain > 100.0, "{gain}");
    assert!(rows[0].ends_with(&format!(" {gain:.0}x faster (512)")), "{text}");
    assert!(rows[1].ends_with(" -") && found(1)["fewer"].is_null(), "{text}");
    for row in rows {
        // Once as the name of the choice, once in the column of the strategy.
        assert!(row.contains(" pipeline ") && row.contains(" best ") && !row.contains("as fast"), "{row}");
    }
    let page = std::fs::read_to_string(page).unwrap();
    assert!(page.contains("At 1 of the values, fewer GPUs are faster than all of them."), "{page}");
    // Forward passes are not planned on parts of the cluster.
    let forward = run(&[&["plan", "--set=work=forward"], &options[..]].concat()).succeeded().stdout;
    assert!(!forward.contains("fewer GPUs"), "{forward}");
}

/// Values without a layout are rows of a sweep; the reasons stand below the table. Expert domains have their name.
#[test]
fn a_sweep_says_why_a_value_has_no_plan() {
    let text = run(&["plan", "--sweep=pipeline_stages=1..8:8"]).succeeded().stdout;
    for stages in [3, 6] {
        let row =
            |line: &str| line.trim_start().starts_with(&format!("{stages} ")) && line.contains("no plan");
        assert!(text.lines().any(row), "{text}");
        assert!(
            text.contains(&format!("No plan at {stages}: pipeline_stages is {stages}, and no")),
            "{text}"
        );
    }
    let sweep = planned(&["--nodes=32", "--set=pipeline_stages=4", "--sweep=bandwidth=1Gbit/s..10Gbit/s:2"]);
    let choice = sweep["sweep"]["points"][0]["outcome"]["Ok"]["choice"].as_str().unwrap();
    assert!(choice.starts_with("expert domains ("), "{choice}");
}
