//! `calibrate`: measures ranks of this machine, and writes a cluster that `plan` reads.
#![allow(clippy::unwrap_used, reason = "a test that cannot go on panics")]

mod common;

use common::{Directory, run};
use serde_json::Value;

#[test]
fn a_measured_cluster_is_planned() {
    let directory = Directory::new("calibrate");
    let (toml, json) = (directory.file("measured.toml"), directory.file("measured.json"));
    let options = "calibrate --ranks 3 --sizes 1000,300000 --flows 4,1 --duration-ms 3 --write";
    let mut arguments: Vec<&str> = options.split(' ').collect();
    arguments.extend([&*toml, "--json", &*json]);
    let text = run(&arguments).succeeded().stdout;
    assert!(text.contains("2 to 1") && text.contains("GEMM") && text.contains("300 kB"), "{text}");

    let report: Value = serde_json::from_str(&std::fs::read_to_string(json).unwrap()).unwrap();
    assert_eq!(report["directions"].as_array().unwrap().len(), 6);
    assert_eq!(report["directions"][0]["flows"][1]["flows"], 4);
    assert_eq!(report["hosts"].as_array().unwrap().len(), 3);
    let wan = &report["cluster"]["levels"][0];
    assert_eq!(wan["scaling_factor"], 3);

    let small = directory.file("small.toml");
    let model = "[model]\nhidden = 64\nexpert_intermediate = 128\nexperts = 6\ntopk = 2\nmoe_layers = 3\n\
                 tokens_per_gpu = 256\ncontext = 256\n";
    std::fs::write(&small, model).unwrap();
    let planned = run(&["plan", "--cluster", &toml, "--model", &small, "--json", "-"]).succeeded().stdout;
    let planned: Value = serde_json::from_str(&planned).unwrap();
    assert_eq!(planned["problem"]["cluster"], report["cluster"]);
    assert_eq!(planned["step"]["prices"].as_array().unwrap().len(), 6);
}

#[test]
fn a_stated_link_gives_an_efficiency() {
    let toml = run(&[
        "calibrate",
        "--sizes",
        "1000",
        "--flows",
        "1",
        "--duration-ms",
        "3",
        "--link",
        "100 Gbit/s",
        "--write",
        "-",
    ])
    .succeeded()
    .stdout;
    assert!(toml.contains("bandwidth = \"100 Gbit/s\""), "{toml}");
    let efficiency = toml.lines().find_map(|line| line.strip_prefix("efficiency = ")).unwrap();
    let efficiency: f64 = efficiency.split(' ').next().unwrap().parse().unwrap();
    assert!(efficiency > 0.0 && efficiency < 1.0, "{toml}");
}

#[test]
fn impossible_requests_are_refused() {
    let refuse = |options: &str, parts: &[&str]| {
        let arguments: Vec<&str> = std::iter::once("calibrate").chain(options.split(' ')).collect();
        run(&arguments).refused(2, parts);
    };
    refuse("--ranks 1", &["--ranks 1: a link needs at least 2 hosts"]);
    refuse("--link fast", &["--link fast", "does not begin with a number"]);
    refuse("--link 100gb/s", &["--link 100gb/s", "is not a unit"]);
    refuse("--flows 0", &["--flows", "1 to 256"]);
    refuse("--sizes 0", &["--sizes", "1 to 1073741824"]);
    refuse("--duration-ms 0", &["--duration-ms"]);
}
