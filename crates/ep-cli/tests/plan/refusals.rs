//! These tests check the errors for mistakes in files and options.

use crate::common::{Directory, run};
use crate::{REFERENCE, written};

#[test]
fn errors_in_a_file_have_their_position() {
    let directory = Directory::new("plan-mistakes");
    let spoilt = |line: &str, instead: &str| {
        assert!(REFERENCE.contains(line));
        written(&directory, "spoilt.toml", &REFERENCE.replacen(line, instead, 1))
    };
    for (line, instead, parts) in [
        (
            "bandwidth = \"100 Gbit/s\"",
            "bandwidth = \"100 gbit/s\"",
            &["spoilt.toml:8:13: cluster.level[0].bandwidth", "Gbit/s", "GB/s"][..],
        ),
        (
            "bandwidth = \"100 Gbit/s\"",
            "bandwith = \"100 Gbit/s\"",
            &["spoilt.toml:8:1: cluster.level[0].bandwith", "possible: bandwidth"],
        ),
        ("members = 2", "", &["spoilt.toml:5:1: cluster.level[0]: `members` is missing"]),
        (
            "memory_cap = \"24 GB\"",
            "memory_cap = 24",
            &["options.memory_cap", "without a unit", "memory_cap_gb"],
        ),
        ("[model]", "[model", &["spoilt.toml:30:", "not TOML"]),
        ("preset = \"deepseek-v3\"", "preset = \"deepseek-v2\"", &["model.preset", "possible: deepseek-v3"]),
    ] {
        run(&["plan", "--cluster", &spoilt(line, instead)]).refused(2, parts);
    }
    let model_only = written(&directory, "model.toml", "[model]\npreset = \"deepseek-v3\"\n[options]\n");
    let whole = written(&directory, "whole.toml", REFERENCE);
    run(&["plan", "--cluster", &model_only]).refused(2, &["model.toml", "no [cluster]"]);
    run(&["plan", "--cluster", &whole, "--model", &model_only]).refused(2, &["[options] too"]);
    run(&["plan", "--cluster", &whole, "--model", &whole]).succeeded();
}

#[test]
fn invalid_requests_are_refused() {
    let directory = Directory::new("plan-refused");
    let nowhere = directory.file("no/such/file");
    for (options, parts) in [
        (&["plan", "--cluster", "abacus"][..], &["--cluster abacus", "presets: dgx-h100"][..]),
        (&["plan", "--model", "gpt-2"], &["--model gpt-2", "presets: deepseek-v3"]),
        (
            &["plan", "--cluster", "paper-s"],
            &["weights, gradients and Adam state", "8 GPUs have 640.0 GB", "more GPUs"],
        ),
        (&["plan", "--strategy", "pipeline", "--set", "work=forward"], &["--strategy", "work=training"]),
        (&["plan", "--nodes", "0"], &["--nodes", "from 1 to 65536"]),
        (&["plan", "--uplink", "100"], &["--uplink", "no unit", "Gbit/s"]),
        (&["plan", "--cluster", "paper-m", "--nodes", "2"], &["--nodes is for presets"]),
        (&["plan", "--set", "bandwidth"], &["--set bandwidth", "KEY=VALUE"]),
        (&["plan", "--set", "speed=1"], &["no key `speed`", "weight_compression"]),
        (&["plan", "--set", "bandwidth.lan=1Gbit/s"], &["no level `lan`", "wan, rail, nvlink"]),
        (&["plan", "--set", "work=sleep"], &["not one of training, forward"]),
        (
            &["plan", "--set", "weight_compression=0.5"],
            &["--set weight_compression=0.5", "a number from 1 to 1e6"],
        ),
        (
            &["plan", "--set", "dense_gradient_compression=topk:0"],
            &["--set dense_gradient_compression=topk:0", "more than 0 and at most 1"],
        ),
        (
            &["plan", "--set", "dense_gradient_compression=50"],
            &["--set dense_gradient_compression=50", "the codecs are `exact`, `int8` and `topk`"],
        ),
        (
            &["plan", "--sweep", "dense_gradient_compression=topk:0.1..topk:1"],
            &["`dense_gradient_compression` is not a number; use --set"],
        ),
        (
            &["plan", "--cluster", "dgx-h100", "--model", "qwen3-235b", "--set", "memory_cap=500GB"],
            &["memory_cap (GB) is 500: it must be at most the 80 GB of a GPU"],
        ),
        (&["plan", "--sweep", "bandwidth=1Gbit/s"], &["--sweep", "KEY=FROM..TO"]),
        (&["plan", "--sweep", "bandwidth=9Gbit/s..1Gbit/s"], &["below the second"]),
        (&["plan", "--sweep", "bandwidth=1Gbit/s..9Gbit/s:1"], &["from 2 to 200"]),
        (&["plan", "--sweep", "work=training..forward"], &["not a number"]),
        (&["plan", "--stream", "paper-mix-3"], &["no such case", "paper-mix-1"]),
        (&["plan", "--json", &nowhere], &["--json", "no/such"]),
        (&["plan", "--html", &nowhere], &["--html", "no/such"]),
        (&["plan", "--groups", &nowhere], &["--groups", "no/such"]),
        (&["plan", "--json", "-", "--html", "-"], &["--json and --html"]),
        (&["reproduce", "--markdown", &nowhere], &["--markdown", "no/such"]),
        (&["simulate", "--stragglers", "gpu:999=2"], &["GPU 999", "there are 128"]),
        (&["simulate", "--stragglers", "999"], &["--stragglers", "write gpu:3=1.5"]),
        (&["simulate", "--scheme", "hybrid"], &["--domains", "3 sizes"]),
        (&["simulate", "--scheme", "plain", "--domains", "1,1,1"], &["only the hybrid"]),
        (&["simulate", "--domains", "3,1,1"], &["--domains", "does not divide"]),
        (&["simulate", "--jitter", "-1"], &[]),
        (&["simulate", "--layers", "0"], &["--layers", "from 1 to 10000"]),
    ] {
        let finished = run(options);
        if parts.is_empty() {
            assert_eq!(finished.code, Some(2), "{options:?}");
        } else {
            finished.refused(2, parts);
        }
    }
    for usage in [
        &["plan", "--print-toml", "--html", "x"][..],
        &["reproduce", "table9"],
        &["simulate", "--scheme", "fast"],
    ] {
        assert_eq!(run(usage).code, Some(2), "{usage:?}");
    }
}
