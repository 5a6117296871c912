//! These tests check the answer of a plan: the best strategy, its time, and what the text says about other choices.

use serde_json::Value;

use crate::common::{Directory, run};
use crate::{REFERENCE, planned, written};

fn speedup(plan: &Value, kind: &str) -> f64 {
    let baselines = plan["plan"]["baselines"].as_array().unwrap();
    baselines.iter().find(|baseline| baseline["kind"] == kind).unwrap()["speedup"].as_f64().unwrap()
}

#[test]
fn the_reference_plans_are_found() {
    let directory = Directory::new("plan-reference");
    let file = written(&directory, "reference.toml", REFERENCE);
    for (uplink, domains, milliseconds, over) in [
        ("10Gbit/s", [2, 8, 2], 187.0, 32.0),
        ("100Gbit/s", [2, 8, 2], 24.9, 25.0),
        ("400Gbit/s", [2, 4, 1], 15.5, 12.0),
    ] {
        let plan = planned(&["--cluster", &file, "--set", &format!("bandwidth={uplink}")]);
        assert_eq!(plan["plan"]["best"]["domain_sizes"], serde_json::json!(domains), "{uplink}");
        let found = 1e3 * plan["plan"]["best"]["layer_time"].as_f64().unwrap();
        assert!((found / milliseconds - 1.0).abs() < 0.02, "{uplink}: {found} ms");
        assert!((speedup(&plan, "hierarchical-ep") / over - 1.0).abs() < 0.02, "{uplink}");
    }
    for (uplink, over) in [("10Gbit/s", 1.28), ("100Gbit/s", 1.30), ("400Gbit/s", 1.37)] {
        let plan = planned(&[
            "--cluster",
            &file,
            "--set",
            "work=training",
            "--set",
            &format!("bandwidth.wan={uplink}"),
            "--set",
            "gradient_accumulation=1",
            "--set",
            "pipeline_stages=1",
            "--strategy",
            "expert-domains",
        ]);
        assert_eq!(plan["plan"]["best"]["domain_sizes"], serde_json::json!([2, 2, 1]), "{uplink}");
        assert!((speedup(&plan, "hierarchical-ep") / over - 1.0).abs() < 0.01, "{uplink}");
    }
}

/// Qwen3 on four distant datacenters, 64 micro-batches.
const DISTANT: &[&str] = &[
    "plan",
    "--model=qwen3-235b",
    "--datacenters=4",
    "--nodes=4",
    "--uplink=1Gbit/s",
    "--round-trip=80ms",
    "--set=gradient_accumulation=64",
];

/// The fastest strategy has the headline, and a ratio below 1 is called slower.
#[test]
fn the_headline_names_the_fastest_strategy() {
    let directory = Directory::new("plan-headline");
    let page = directory.file("page.html");
    let text = run(&[DISTANT, &["--html", &page]].concat()).succeeded().stdout;
    let html = std::fs::read_to_string(&page).unwrap();
    for shown in [&text, &html] {
        assert!(shown.contains("Best with all 128 GPUs: a pipeline of 2 stages"), "{shown}");
        assert!(
            shown.contains(
                "Moving experts between datacenters is not worth it here: expert domains (4, 2, 1)"
            ),
            "{shown}"
        );
        assert!(shown.contains("1.57x slower") && !shown.contains("0.03x"), "{shown}");
        assert!(shown.contains("follow a different training trajectory"), "{shown}");
    }
    // At 10 Gbit/s activations cost more than compressed experts.
    let slow =
        ["plan", "--nodes=32", "--uplink=10Gbit/s", "--set=pipeline_stages=4", "--set=weight_compression=50"];
    let text = run(&slow).succeeded().stdout;
    assert!(text.contains("Best with all 512 GPUs: expert domains"), "{text}");
    assert!(text.contains("Without lossy compression, the fastest is a pipeline"), "{text}");
    // The error does not present what `--runnable` fixes as requested, and layouts that no operator can run are refused.
    let without = ["plan", "--runnable", "--cluster=dgx-h100", "--nodes=16"];
    run(&without)
        .refused(2, &["--runnable: a GPU has", "has one EP group in a stage and no tensor parallelism"]);
    let small = ["plan", "--runnable", "--cluster=dgx-h200", "--nodes=16", "--set=memory_cap=12GB"];
    run(&small).refused(2, &["tokens move among 128 GPUs, and an operator of hybrid-ep supports at most 72"]);
    // Expert domains without compression are compared, too.
    let runnable = ["plan", "--runnable", "--cluster=dgx-h200", "--nodes=16"];
    let text = run(&runnable).succeeded().stdout;
    let exact = "Without lossy compression, the fastest is expert domains (2, 2, 1) with kept replicas, with exact weights and \
                 gradients, 1.21x slower.";
    assert!(text.contains(exact), "{text}");
    let carrier = "The plan gathers experts over rail at the bandwidth of this level. `ExpertMigration` sends them by its carrier";
    assert!(text.contains(carrier), "{text}");
    let exact = ["--set=weight_compression=1", "--set=gradient_compression=1"];
    let text = run(&[&runnable[..], &exact].concat()).succeeded().stdout;
    assert!(text.contains("A step of 62,914,560 tokens takes 288.3 s"), "{text}");
}

/// A part of the cluster may train faster than all of it. The report always says how fast one site alone trains.
#[test]
fn fewer_gpus_that_are_faster_are_named() {
    let text = run(&["plan", "--datacenters=4", "--nodes=64", "--uplink=10Gbit/s"]).succeeded().stdout;
    assert!(
        text.contains("Fewer GPUs are faster. One of the 4 datacenters alone (512 GPUs) trains 8"),
        "{text}"
    );
    assert!(text.contains("Layout: 2 stages of 2 datacenters each, EP groups"), "{text}");
    assert!(
        text.contains("58 % of a step makes replicas of parameters equal again: 524.7 s those of experts"),
        "{text}"
    );
    let text = run(&["plan", "--nodes=64,63", "--round-trip=20ms", "--json=-"]);
    let said = text.succeeded();
    assert!(
        said.stderr.contains("Fewer GPUs are faster. The 2 datacenters with 64, 60 members of level rail"),
        "{}",
        said.stderr
    );
    assert!(said.stderr.contains("One of the 2 datacenters alone (512 GPUs) trains"), "{}", said.stderr);
    assert!(
        said.stderr.contains("tokens move among 127 GPUs, and its GPU operators support at most 72"),
        "{}",
        said.stderr
    );
    assert!(said.stderr.contains("\nAssumed: even routing, 400 TFLOP/s in each GPU"), "{}", said.stderr);
    let report: serde_json::Value = serde_json::from_str(&said.stdout).unwrap();
    let assumed = report["assumed"].as_array().unwrap();
    let starts = [
        "Links: wan 100 Gbit/s for each member",
        "Assumed: even routing, 400 TFLOP/s in each GPU, links of levels wan",
    ];
    assert_eq!(assumed.len(), starts.len(), "{assumed:?}");
    assert!(
        assumed.iter().zip(starts).all(|(line, start)| line.as_str().unwrap().starts_with(start)),
        "{assumed:?}"
    );
    assert_eq!(report["fewer"][0]["members"], serde_json::json!([64, 60]));
    // A slower site is not recommended, but the report still names it.
    let text = run(&["plan", "--nodes=64", "--uplink=400Gbit/s"]).succeeded().stdout;
    assert!(
        !text.contains("Fewer GPUs") && text.contains("\nOne of the 2 datacenters alone (512 GPUs) trains"),
        "{text}"
    );
    // Nodes are not sites.
    let text = run(&["plan", "--datacenters=1", "--nodes=64"]).succeeded().stdout;
    assert!(!text.contains("alone ("), "{text}");
}

#[test]
fn without_arguments_an_example_is_planned() {
    let text = run(&["plan"]).succeeded().stdout;
    for part in [
        "DeepSeek-V3 on 2 x (8 x DGX H200)",
        "Best: a pipeline of 16 stages",
        "tokens/s",
        "Weights and gradients are sent exactly: `pipeline` compresses no experts, only `expert domains` do.",
        " int8 ",
        " 5x ",
        " 50x ",
        "all-gather",
        "bytes per link",
        "Memory of a GPU: own experts ",
        " are left, for activations and everything else.",
        "plain EP",
    ] {
        assert!(text.contains(part), "no `{part}` in: {text}");
    }
    let is_head = |line: &str| {
        ["phase, by itself", "forward", "backward"].into_iter().all(|column| line.contains(column))
    };
    assert!(text.lines().any(is_head), "no table of phases in: {text}");
    let domains = run(&["plan", "--strategy=expert-domains"]).succeeded().stdout;
    assert!(domains.contains("Compression is lossy: weights int8, gradients int8."), "{domains}");
    let explained = run(&["plan", "--explain"]).succeeded().stdout;
    assert!(explained.contains("one more member"), "{explained}");
    let explained = run(&["plan", "--explain", "--strategy=expert-domains"]).succeeded().stdout;
    assert!(explained.contains("would be best"), "{explained}");
}

/// A layout that is tight on memory is never called the best, but the report says that it is faster.
#[test]
fn the_answer_names_a_faster_strategy_that_is_tight_on_memory() {
    let cluster = ["plan", "--cluster=dgx-h100", "--nodes=8,8,10", "--uplink=10Gbit/s", "--round-trip=40ms"];
    let text = run(&cluster).succeeded().stdout;
    for part in [
        "Best with all 208 GPUs and memory to spare: expert domains (1, 1, 2).",
        "4 stages (each spans all 3 sites, with 1/4 of each of their 13 equal parts), EP groups",
        "Tight on memory, but faster: a pipeline of 13 stages across datacenters, ",
        "less than 30 % of a GPU's memory (`reserved_memory`) is left for activations.",
        "Without lossy compression, the fastest is expert domains (1, 1, 2), with exact weights and gradients, as fast",
    ] {
        assert!(text.contains(part), "no `{part}` in: {text}");
    }
    let directory = Directory::new("plan-tight");
    let page = directory.file("tight.html");
    run(&[&cluster[..], &["--html", &page]].concat()).succeeded();
    assert!(std::fs::read_to_string(&page).unwrap().contains("pipeline (tight)"));
    // With less memory reserved, the same pipeline is the best.
    let spare = run(&[&cluster[..], &["--set=reserved_memory=0.29"]].concat()).succeeded().stdout;
    assert!(
        spare.contains("a pipeline of 13 stages across datacenters. A step of")
            && !spare.contains("Tight on memory"),
        "{spare}"
    );
}
