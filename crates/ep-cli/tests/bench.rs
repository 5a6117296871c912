//! The output of `hybrid-ep bench`. Times are not checked.
#![allow(clippy::unwrap_used, reason = "a test that cannot go on panics")]

mod common;

use common::{Directory, Finished, trace};
use serde_json::Value;

/// A benchmark of the host backend, even on machines with GPUs.
fn tiny(more: &[&str]) -> Finished {
    common::tiny(&[&["--backend", "host"], more].concat())
}

/// The JSON of a run that wrote it to stdout.
#[track_caller]
fn json(more: &[&str]) -> Value {
    let mut options = vec!["--json", "-"];
    options.extend(more);
    let finished = tiny(&options).succeeded();
    assert!(finished.stderr.lines().last().unwrap().starts_with("verified: "), "{}", finished.stderr);
    serde_json::from_str(&finished.stdout).unwrap()
}

/// The numbers of an array.
fn numbers(array: &Value) -> Vec<u64> {
    array.as_array().unwrap().iter().map(|number| number.as_u64().unwrap()).collect()
}

/// Checks all fields that do not depend on times.
fn check_fields(report: &Value, ranks: usize, tokens: &[u64], experts: usize, topk: u64) {
    assert_eq!(report["verified"], true);
    assert_eq!(report["version"], env!("CARGO_PKG_VERSION"));
    assert_eq!(report["config"]["ranks"], ranks);
    assert_eq!(report["config"]["experts"], experts);
    assert!(report["machine"]["cores"].as_u64().unwrap() > 0);
    assert!(!report["machine"]["cpu_model"].as_str().unwrap().is_empty());
    let copied = report["ceiling_copy_gb_per_s"].as_f64().unwrap();
    assert!((report["ceiling_traffic_gb_per_s"].as_f64().unwrap() / copied - 2.0).abs() < 1e-9);
    assert!(report["floor_definition"].as_str().unwrap().contains("read + written by copying"));
    assert!(report["time_definition"].as_str().unwrap().contains("slowest rank"));
    assert_eq!(report["config"]["backend"], "host");
    assert_eq!(report["gpus"].as_array().unwrap().len(), 0);

    for run in report["runs"].as_array().unwrap() {
        assert_eq!(run["verified"], true);
        assert_eq!(run["mode"], "permuted");
        assert!(run.as_object().unwrap()["sms"].is_null());
        assert_eq!(numbers(&run["tokens_per_rank"]), tokens);
        let operators = run["operators"].as_array().unwrap();
        let names: Vec<&str> = operators.iter().map(|o| o["operator"].as_str().unwrap()).collect();
        assert_eq!(names, ["check routing", "preprocess", "dispatch", "combine", "layer"]);
        for operator in operators {
            let (median, p95) =
                (operator["median_us"].as_f64().unwrap(), operator["p95_us"].as_f64().unwrap());
            assert!(0.0 < median && median <= p95);
            assert!(operator["bytes_inside_domains"].is_u64() && operator["bytes_between_domains"].is_u64());
        }
        for operator in &operators[2..] {
            let ratio = operator["median_us"].as_f64().unwrap() / operator["floor_us"].as_f64().unwrap();
            assert!((operator["ratio_to_floor"].as_f64().unwrap() / ratio - 1.0).abs() < 1e-3);
            assert!(operator["must_move_bytes"].as_u64().unwrap() > 0);
            assert!(operator["gb_per_s"].as_f64().unwrap() > 0.0);
        }
        let load = &run["load"];
        let copies = topk * tokens.iter().sum::<u64>();
        assert_eq!(numbers(&load["tokens_per_expert"]).len(), experts);
        assert_eq!(numbers(&load["tokens_per_expert"]).iter().sum::<u64>(), copies);
        assert_eq!(numbers(&load["tokens_per_rank"]).len(), ranks);
        assert_eq!(numbers(&load["tokens_per_rank"]).iter().sum::<u64>(), copies);
        assert!(numbers(&load["rows_per_rank"]).iter().sum::<u64>() >= copies);
        assert!(load["rank_max_over_mean"].as_f64().unwrap() >= 1.0);
        assert!(run["preprocess"]["bytes_per_rank"].as_u64().unwrap() > 0);
    }
}

#[test]
fn the_report_of_threads_is_complete() {
    let report = json(&[]);
    check_fields(&report, 4, &[24; 4], 8, 3);
    assert_eq!(report["config"]["processes"], false);
    // Two domains of two ranks: bytes move inside and between domains.
    for operator in &report["runs"][0]["operators"].as_array().unwrap()[2..] {
        assert!(operator["bytes_inside_domains"].as_u64().unwrap() > 0);
        assert!(operator["bytes_between_domains"].as_u64().unwrap() > 0);
    }
}

#[test]
fn the_report_of_processes_is_complete() {
    let report = json(&["--processes", "--ranks", "2", "--domains", "1"]);
    check_fields(&report, 2, &[24; 2], 8, 3);
    assert_eq!(report["config"]["processes"], true);
    for operator in report["runs"][0]["operators"].as_array().unwrap() {
        let moves_tokens = !["check routing", "preprocess"].contains(&operator["operator"].as_str().unwrap());
        assert_eq!(moves_tokens, !operator["must_move_bytes"].is_null());
    }
    assert_eq!(report["runs"][0]["operators"][2]["bytes_between_domains"], 0);
}

#[test]
fn fp8_with_skew_and_uneven_tokens() {
    for dtype in ["fp8", "fp8-given"] {
        let options = ["--dtype", dtype, "--hidden", "256", "--skew", "1.2", "--tokens", "9+0+33+1"];
        let report = json(&options);
        check_fields(&report, 4, &[9, 0, 33, 1], 8, 3);
        assert_eq!(report["config"]["dtype"], dtype);
        let in_processes = json(&[&options[..], &["--processes"]].concat());
        check_fields(&in_processes, 4, &[9, 0, 33, 1], 8, 3);
        assert_eq!(in_processes["runs"][0]["load"], report["runs"][0]["load"]);
    }
}

/// The mode and the tokens of each run of a report.
fn runs(report: &Value) -> Vec<(String, Vec<u64>)> {
    assert_eq!(report["verified"], true);
    let run = |run: &Value| (run["mode"].as_str().unwrap().to_owned(), numbers(&run["tokens_per_rank"]));
    report["runs"].as_array().unwrap().iter().map(run).collect()
}

#[test]
fn all_modes_and_numbers_of_tokens_are_measured_by_threads_and_processes() {
    let options =
        ["--mode", "plain,permuted", "--tokens", "1,9+0+33+1,0", "--dtype", "fp8", "--hidden", "128"];
    let report = json(&options);
    let expected = ["plain", "permuted"]
        .map(|mode| [vec![1; 4], vec![9, 0, 33, 1], vec![0; 4]].map(|tokens| (mode.to_owned(), tokens)))
        .concat();
    assert_eq!(runs(&report), expected);
    let in_processes = json(&[&options[..], &["--processes"]].concat());
    assert_eq!(runs(&in_processes), expected);
    for (one, other) in
        report["runs"].as_array().unwrap().iter().zip(in_processes["runs"].as_array().unwrap())
    {
        assert_eq!(one["load"], other["load"]);
        // In plain mode a rank has one row of a token, whatever the number of its experts there; no rows are padded.
        let rows: u64 = numbers(&one["load"]["rows_per_rank"]).iter().sum();
        let copies: u64 = numbers(&one["load"]["tokens_per_rank"]).iter().sum();
        assert!(if one["mode"] == "plain" { rows <= copies } else { rows >= copies });
    }
}

#[test]
fn plain_mode_alone_is_one_run() {
    let finished = tiny(&["--mode", "plain"]).succeeded();
    let lines: Vec<&str> = finished.stdout.lines().collect();
    assert!(
        lines[1].starts_with("24 tokens a rank, ") && lines[1].contains(", bf16, plain mode, "),
        "{lines:?}"
    );
    let last = lines.last().unwrap();
    assert!(
        last.contains("rows (token and a probability per local expert) and 96 combined tokens"),
        "{last}"
    );
}

#[test]
fn the_report_of_several_runs_ends_with_one_table_of_all() {
    let finished = tiny(&["--mode", "plain,permuted", "--pad", "8", "--tokens", "3,1000"]).succeeded();
    for heading in [
        "\n\nplain mode, 3 tokens a rank\n",
        "\n\nplain mode, 1,000 tokens a rank\n",
        "\n\npermuted mode padded to 8, 3 tokens a rank\n",
        "\n\npermuted mode padded to 8, 1,000 tokens a rank\n",
    ] {
        assert_eq!(finished.stdout.matches(heading).count(), 1, "{heading:?}: {}", finished.stdout);
    }
    assert_eq!(finished.stdout.matches("floor = ").count(), 1, "{}", finished.stdout);
    let lines: Vec<&str> = finished.stdout.lines().collect();
    assert!(lines.last().unwrap().starts_with("verified: all 4 runs"), "{lines:?}");
    let rows = lines[lines.len() - 6..lines.len() - 2].iter();
    let rows: Vec<String> =
        rows.map(|row| row.split_whitespace().take(2).collect::<Vec<_>>().join(" ")).collect();
    assert_eq!(rows, ["plain 3", "plain 1,000", "permuted 3", "permuted 1,000"]);
}

#[test]
fn a_benchmark_without_tokens_passes() {
    let finished = tiny(&["--tokens", "0"]).succeeded();
    assert!(finished.stdout.contains("verified: all 0 dispatched rows"), "{}", finished.stdout);
}

#[test]
fn bytes_exchanged_in_preprocessing_do_not_grow_with_tokens() {
    let bytes =
        |tokens| json(&["--tokens", tokens])["runs"][0]["preprocess"]["bytes_per_rank"].as_u64().unwrap();
    assert_eq!(bytes("3"), bytes("300"));
}

#[test]
fn the_table_shows_what_was_measured_and_checked() {
    let finished = tiny(&[]).succeeded();
    for part in [
        "preprocess",
        "dispatch",
        "combine",
        "layer",
        "inside domains",
        "between domains",
        "floor = ",
        "GB/s read + written by copying",
        "independent of the number of tokens",
        "load per rank",
        "load per expert",
        "max/mean",
    ] {
        assert!(finished.stdout.contains(part), "no `{part}` in\n{}", finished.stdout);
    }
    let last = finished.stdout.lines().last().unwrap();
    assert!(last.starts_with("verified: ") && last.contains("288 dispatched rows"), "{last}");
    assert_eq!(finished.stderr, "", "no progress bar without a terminal");
}

#[test]
fn the_json_file_is_complete_and_no_other_file_remains() {
    let directory = Directory::new("bench-json");
    let file = directory.file("result.json");
    let finished = tiny(&["--json", &file]).succeeded();
    assert!(finished.stdout.contains("verified: "));
    check_fields(&serde_json::from_slice(&std::fs::read(&file).unwrap()).unwrap(), 4, &[24; 4], 8, 3);
    assert_eq!(directory.names(), ["result.json"]);
}

#[test]
fn a_recorded_routing_is_measured_layer_by_layer() {
    let directory = Directory::new("bench-trace");
    let file = directory.file("trace.safetensors");
    std::fs::write(&file, trace([13, 6], |_| {})).unwrap();

    let report = json(&["--routing", &file, "--ranks", "2", "--domains", "1"]);
    check_fields(&report, 2, &[13, 6], 8, 2);
    let layers: Vec<u64> =
        report["runs"].as_array().unwrap().iter().map(|run| run["layer"].as_u64().unwrap()).collect();
    assert_eq!(layers, [0, 1]);

    // Both layers in both modes; the load of each layer is shown once.
    let options = ["--routing", &file, "--ranks", "2", "--domains", "1", "--mode", "plain,permuted"];
    let report = json(&options);
    let run = |run: &Value| (run["mode"].clone(), run["layer"].clone());
    let expected: Vec<(Value, Value)> = ["plain", "permuted"]
        .iter()
        .flat_map(|mode| [0, 1].map(|layer| (Value::from(*mode), Value::from(layer))))
        .collect();
    assert_eq!(report["runs"].as_array().unwrap().iter().map(run).collect::<Vec<_>>(), expected);
    let text = tiny(&options).succeeded().stdout;
    assert!(
        text.contains("\nplain mode, layer 1, 13 + 6 tokens a rank\n") && text.contains("trace layer"),
        "{text}"
    );
    assert_eq!(text.matches("load per rank").count(), 2, "{text}");

    // With a number of ranks that differs from the recording's.
    let report = json(&["--routing", &file, "--layer", "1", "--processes"]);
    check_fields(&report, 4, &[4, 5, 5, 5], 8, 2);
    assert_eq!(report["runs"][0]["layer"], 1);
}
