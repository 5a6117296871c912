//! These tests check how the planner reads a problem from files, presets and options, and how it prints one.

use crate::common::{Directory, run, trace};
use crate::{REFERENCE, planned, written};

#[test]
fn codecs_and_counts_are_written_as_in_a_file() {
    let of = |setting: &str| run(&["plan", "--set", setting]).succeeded().stdout;
    assert_eq!(of("weight_compression=exact"), of("weight_compression=1"));
    assert_eq!(of("global_batch=31_457_280"), of("global_batch=31457280"));
}

#[test]
fn a_printed_problem_can_be_read_back() {
    let directory = Directory::new("plan-toml");
    let options = [
        "--model",
        "qwen3-235b",
        "--datacenters",
        "4",
        "--nodes",
        "2",
        "--uplink",
        "25Gbit/s",
        "--set",
        "zipf=0.5",
    ];
    let toml = run(&[&["plan", "--print-toml"], &options[..]].concat()).succeeded().stdout;
    let file = written(&directory, "problem.toml", &toml);
    let again = planned(&["--cluster", &file]);
    assert_eq!(again["problem"], planned(&options)["problem"]);
    assert_eq!(again["plan"], planned(&options)["plan"]);
    assert_eq!(run(&["plan", "--print-toml", "--cluster", &file]).succeeded().stdout, toml);
}

/// A file that is printed in order to change it need not have a plan yet.
#[test]
fn a_problem_without_a_plan_is_printed_with_a_note() {
    let directory = Directory::new("impossible");
    let small = ["--model=deepseek-v3", "--nodes=1", "--set=memory=8GB"];
    let printed = run(&[&["plan", "--print-toml"], &small[..]].concat()).succeeded();
    assert!(printed.stderr.starts_with("note: this problem has no plan: "), "{printed:?}");
    assert!(printed.stderr.contains("; possible: more GPUs (at least 1343), more memory (at least 671.0 GB in each), or a smaller model"), "{printed:?}");
    let named = [&["plan", "--print-toml", "--strategy=pipeline"], &small[..]].concat();
    run(&named).refused(2, &["possible: more GPUs"]);
    let file = written(&directory, "problem.toml", &printed.stdout);
    run(&["plan", "--cluster", &file]).refused(2, &["possible: more GPUs"]);
    run(&["plan", "--cluster", &file, "--set=memory=1000GB"]).succeeded();
}

/// What an error about memory offers has a plan.
#[test]
fn a_cluster_that_is_too_small_names_larger_ones_with_a_plan() {
    let link = ["plan", "--cluster=dgx-h100", "--uplink=20Gbit/s", "--round-trip=60ms"];
    // The options that are too small, the offers of the error, and the offers as options.
    for (nodes, memory, offer, larger) in [
        (
            "--nodes=8",
            "--set=memory=80GB",
            "With 15 nodes in each datacenter (240 GPUs), or with 118 GB in each GPU, there is a plan that leaves `reserved_memory` free.",
            ["--nodes=15", "--set=memory=118GB"],
        ),
        (
            "--nodes=8,4",
            "--set=memory=80GB",
            "With 17, 9 nodes in the datacenters (208 GPUs), or with 162 GB in each GPU, there is a plan that leaves `reserved_memory` free.",
            ["--nodes=17,9", "--set=memory=162GB"],
        ),
        // The parameters fit into all GPUs together, but not as whole experts and layers.
        (
            "--nodes=8",
            "--set=memory=84GB",
            "With 12 nodes in each datacenter (192 GPUs), or with 118 GB in each GPU, there is a plan that leaves `reserved_memory` free.",
            ["--nodes=12", "--set=memory=118GB"],
        ),
    ] {
        run(&[&link[..], &[nodes, memory]].concat()).refused(2, &[offer]);
        for larger in [[larger[0], memory], [nodes, larger[1]]] {
            let text = run(&[&link[..], &larger].concat()).succeeded().stdout;
            assert!(text.contains("\nBest") && !text.contains("No layout leaves 30 %"), "{text}");
        }
    }
    run(&["plan", "--cluster=dgx-h100", "--nodes=4", "--datacenters=1"])
        .refused(2, &["With 26 nodes (208 GPUs), or "]);
}

/// What `--runnable` offers is runnable: a number of stages, nodes with a number of stages, and memory.
#[test]
fn a_runnable_layout_that_does_not_fit_offers_stages_and_memory_for_one_that_runs() {
    let options =
        ["plan", "--cluster=dgx-h100", "--nodes=16", "--uplink=20Gbit/s", "--round-trip=60ms", "--runnable"];
    run(&options).refused(
        2,
        &["With `--set pipeline_stages=4`, or with 233 GB in each GPU, there is a plan that leaves `reserved_memory` free."],
    );
    run(&[&options[..], &["--set=memory=233GB"]].concat()).succeeded();
    run(&[&options[..], &["--set=pipeline_stages=4"]].concat()).succeeded();
    let few = |nodes| [&options[..2], &options[3..], &[nodes]].concat();
    run(&few("--nodes=4"))
        .refused(2, &["With 16 nodes in each datacenter (256 GPUs) and `--set pipeline_stages=4`, or with "]);
    // 32 GPUs in each of 7 stages divide the 256 experts, 224 do not.
    run(&few("--nodes=14"))
        .refused(2, &["possible: `--set pipeline_stages=7` in a program with a pipeline, or other numbers"]);
    run(&[&few("--nodes=14")[..], &["--set=pipeline_stages=7"]].concat()).succeeded();
}

/// More stages are offered where a runnable layout has too many ranks, and they run.
#[test]
fn a_runnable_layout_of_too_many_ranks_offers_more_stages() {
    let options =
        ["plan", "--cluster=dgx-h100", "--nodes=16", "--uplink=20Gbit/s", "--round-trip=60ms", "--runnable"];
    let refused =
        "an operator of hybrid-ep supports at most 72; possible: more stages (`--set pipeline_stages=4`), ";
    run(&[&options[..], &["--set=pipeline_stages=2"]].concat()).refused(2, &[refused]);
    run(&[&options[..], &["--set=pipeline_stages=4"]].concat()).succeeded();
}

/// `--set` accepts the keys of `[options]`, because a key that it refused could not be swept.
#[test]
fn set_changes_the_options_of_a_file() {
    let directory = Directory::new("set");
    let file = written(&directory, "problem.toml", REFERENCE);
    for (key, value) in [
        ("reserved_memory", "0.5"),
        ("overlap_chunks", "7"),
        ("live_layers", "3"),
        ("shared_refresh_steps", "9"),
    ] {
        let set = format!("{key}={value}");
        let printed = run(&["plan", "--print-toml", "--cluster", &file, "--set", &set]).succeeded().stdout;
        assert!(printed.contains(&format!("\n{key} = {value} ")), "{printed}");
    }
}

#[test]
fn every_listed_preset_can_be_used() {
    let list = run(&["plan", "--list"]).succeeded().stdout;
    let names: Vec<&str> = list
        .lines()
        .filter(|line| line.starts_with("  "))
        .filter_map(|line| line.split_whitespace().next())
        .collect();
    assert_eq!(names.len(), 19, "{list}");
    for name in names {
        let options = match name {
            name if name.starts_with("paper-mix") || name.starts_with("paper-ag") => {
                vec!["plan", "--stream", name]
            }
            name if list.find(name) < list.find("Models") => {
                vec!["plan", "--cluster", name, "--model", "deepseek-v3", "--set", "memory_cap=24GB"]
            }
            name => vec![
                "plan",
                "--model",
                name,
                "--datacenters",
                "2",
                "--nodes",
                "1",
                "--set",
                "memory_cap=24GB",
            ],
        };
        let mut options = options;
        if options.contains(&"--cluster") && !name.starts_with("paper") {
            options.extend(["--gpus-per-node", "8", "--nodes", "2"]);
        }
        // These small clusters cannot hold the training state of the large models.
        if !options.contains(&"--stream") {
            options.push("--set=work=forward");
        }
        if name.starts_with("mixtral") {
            options.extend(["--gpus-per-node", "4"]);
        }
        run(&options).succeeded();
    }
}

#[test]
fn a_recorded_routing_gives_a_histogram() {
    let directory = Directory::new("plan-routing");
    let file = directory.file("routing.safetensors");
    std::fs::write(&file, trace([24, 16], |_| {})).unwrap();
    let options =
        ["--model", "mixtral-8x7b", "--nodes", "1", "--gpus-per-node", "4", "--set", "memory_cap=24GB"];
    let plan = planned(&[&options[..], &["--routing", &file, "--layer", "1"]].concat());
    assert_eq!(
        plan["problem"]["model"]["routing"]["histogram"],
        serde_json::json!([10.0, 10.0, 10.0, 10.0, 10.0, 10.0, 10.0, 10.0])
    );
    assert!(plan["problem"]["notes"][0].as_str().unwrap().contains("layer 1"));
    run(&["plan", "--routing", &file]).refused(2, &["--routing", "top-2 of 8 experts", "top-8 of 256"]);
    run(&[&["plan"], &options[..], &["--routing", &file, "--layer", "2"]].concat())
        .refused(2, &["--layer 2", "layers 0 to 1"]);
}
