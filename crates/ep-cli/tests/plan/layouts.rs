//! These tests check the layout of a plan: its stages, its groups of ranks, and strategies that have no layout.

use serde_json::Value;

use crate::common::{Directory, run};
use crate::{planned, written};

#[test]
fn a_runnable_plan_has_the_layout_of_the_training_runtime() {
    let directory = Directory::new("plan-runnable");
    let groups = directory.file("groups.json");
    // The best is a pipeline, which the runtime cannot run.
    let cluster = ["plan", "--nodes=2", "--uplink=100Gbit/s", "--set=memory=2000GB"];
    let text = run(&[&cluster[..], &["--runnable", "--groups", &groups]].concat()).succeeded().stdout;
    assert!(
        text.contains("Layers of the strategy `expert domains`, 1 stage, EP groups of 32 GPUs"),
        "{text}"
    );
    let written: Value = serde_json::from_str(&std::fs::read_to_string(&groups).unwrap()).unwrap();
    let all: Vec<usize> = (0..32).collect();
    let layout = serde_json::json!({
        "pipeline_stages": 1, "ep_groups_per_stage": 1, "tensor_parallel": 1, "ep_groups": [[all]],
        "datacenters": [all[..16], all[16..]]
    });
    assert_eq!((&written["layout"], &written["ranks"]), (&layout, &serde_json::json!(32)));
    // One EP group of all GPUs of a site is what the runtime runs on that site.
    assert!(
        text.contains("\nOne of the 2 datacenters alone (16 GPUs) trains")
            && text.contains("EP groups of 16 GPUs (1, 2, 8)"),
        "{text}"
    );
    // 24 GPUs would have copies of experts, which the runtime cannot run.
    let uneven = ["plan", "--nodes=3,1", "--set=memory=4000GB"];
    let alone = |more: &[&str]| {
        run(&[&uneven[..], more].concat())
            .succeeded()
            .stdout
            .contains("One of the 2 datacenters alone (24 GPUs)")
    };
    assert!(alone(&[]) && !alone(&["--runnable"]));
    let refused = [
        "--runnable: the number of GPUs must divide the 256 experts, and the cluster has 48 GPUs; possible: 32, 16, 8, \
         ...; change --nodes, --gpus-per-node",
    ];
    run(&["plan", "--nodes=3", "--runnable"]).refused(2, &refused);
    run(&["plan", "--nodes=32", "--runnable"]).refused(2, &["has 512 GPUs; possible: `--set pipeline_stages=2` in a program with a pipeline, or other numbers of GPUs: 256, 128, 64, ..."]);
    run(&["plan", "--runnable", "--set=work=forward"]).refused(2, &["--runnable", "work=training"]);
}

#[test]
fn a_runnable_plan_may_have_stages_whose_ranks_the_file_lists() {
    let directory = Directory::new("plan-stages");
    let file = directory.file("groups.json");
    let cluster =
        ["plan", "--nodes=2", "--gpus-per-node=2", "--set=memory=8000GB", "--set=pipeline_stages=2"];
    let text = run(&[&cluster[..], &["--runnable", "--groups", &file]].concat()).succeeded().stdout;
    assert!(
        text.contains(
            "Layers of the strategy `expert domains`, 2 stages of 2 datacenters each, EP groups of 4 GPUs"
        ),
        "{text}"
    );
    assert!(
        text.contains(
            "\n`ExpertMigration` can run the layers of each stage: the training program brings the pipeline"
        ),
        "{text}"
    );
    let written: Value = serde_json::from_str(&std::fs::read_to_string(&file).unwrap()).unwrap();
    assert_eq!(written["ranks"], 4);
    assert_eq!(
        written["layout"],
        serde_json::json!({
            "pipeline_stages": 2, "ep_groups_per_stage": 1, "tensor_parallel": 1,
            "ep_groups": [[[0, 1, 4, 5]], [[2, 3, 6, 7]]], "datacenters": [[0, 1, 2, 3], [4, 5, 6, 7]]
        })
    );
    // 96 GPUs do not divide 256 experts, but the 32 GPUs of one of three stages do.
    let uneven = ["plan", "--nodes=6", "--set=memory=8000GB", "--runnable"];
    run(&uneven)
        .refused(2, &["must divide the 256 experts, and the cluster has 96 GPUs; possible: `--set expert_parallel=32` (3 EP groups), `--set pipeline_stages=3` in a program with a pipeline, or other numbers of GPUs: 64, 32, 16, ..."]);
    run(&[&uneven[..], &["--set=pipeline_stages=3"]].concat()).succeeded();
    run(&[&uneven[..], &["--set=pipeline_stages=2"]].concat()).refused(
        2,
        &[
            "the number of GPUs in each stage must divide",
            "96 GPUs in 2 stages of 48; possible: `--set expert_parallel=16` (3 EP groups in each stage), `--set pipeline_stages=3` in a program with a pipeline, or other numbers of GPUs: 32, 16, 8, ...",
        ],
    );
    for stages in ["3", "500"] {
        let set = format!("--set=pipeline_stages={stages}");
        run(&["plan", "--runnable", &set])
            .refused(2, &[&format!("pipeline_stages is {stages}, and no division")]);
    }
}

#[test]
fn a_runnable_plan_may_have_several_ep_groups() {
    let directory = Directory::new("plan-ep-groups");
    let file = directory.file("groups.json");
    let uneven = ["plan", "--nodes=6", "--set=memory=8000GB", "--runnable"];
    let groups = ["--set=expert_parallel=32", "--groups", &file];
    let text = run(&[&uneven[..], &groups].concat()).succeeded().stdout;
    assert!(
        text.contains("EP groups of 32 GPUs (2, 2, 8), 3 groups per stage")
            && text.contains(
                "\n`ExpertMigration` can run this layout, with the process group of a rank's EP group"
            ),
        "{text}"
    );
    let written: Value = serde_json::from_str(&std::fs::read_to_string(&file).unwrap()).unwrap();
    let nodes = |first: usize| (first..first + 16).chain(first + 48..first + 64).collect::<Vec<_>>();
    let layout = &written["layout"];
    assert_eq!(layout["ep_groups"], serde_json::json!([[nodes(0), nodes(16), nodes(32)]]));
    let sites: [Vec<usize>; 2] = [(0..48).collect(), (48..96).collect()];
    assert_eq!(layout["datacenters"], serde_json::json!(sites));
    // The groups are those of one EP group.
    assert_eq!(written["ranks"], 32);
    run(&[&uneven[..], &["--set=expert_parallel=48"]].concat()).refused(
        2,
        &["--runnable: expert_parallel is 48, and must divide the 256 experts; possible: 32, 16, 8, ..."],
    );
}

#[test]
fn every_rank_is_in_one_group_of_each_kind() {
    let directory = Directory::new("plan-groups");
    let file = directory.file("groups.json");
    run(&["plan", "--strategy=expert-domains", "--groups", &file]).succeeded();
    let groups: Value = serde_json::from_str(&std::fs::read_to_string(&file).unwrap()).unwrap();
    let layout = &groups["layout"];
    assert_eq!(
        [&layout["pipeline_stages"], &layout["ep_groups_per_stage"], &layout["tensor_parallel"]],
        [1, 1, 2]
    );
    for kind in ["expert_domains", "dispatch_groups"] {
        let mut ranks: Vec<u64> = groups[kind]
            .as_array()
            .unwrap()
            .iter()
            .flat_map(|group| group.as_array().unwrap().iter().map(|rank| rank.as_u64().unwrap()))
            .collect();
        ranks.sort_unstable();
        assert_eq!(ranks, (0..128).collect::<Vec<u64>>(), "{kind}");
    }
}

/// Report, JSON and rank lists are those of the strategy that `--strategy` names.
#[test]
fn the_named_strategy_is_shown() {
    let directory = Directory::new("plan-strategy");
    let file = directory.file("groups.json");
    for (name, words) in [("hierarchical-ep", "hierarchical EP"), ("plain-ep", "plain EP")] {
        let options = ["--strategy", name, "--set=replicas=keep", "--nodes=16"];
        let plan = planned(&[&options[..], &["--groups", &file]].concat());
        let prices = plan["step"]["prices"].as_array().unwrap();
        let price = prices.iter().find(|price| price["strategy"] == name).unwrap();
        assert_eq!(plan["plan"]["best"], price["candidate"], "{name}");
        assert_eq!(plan["plan"]["best"]["domain_sizes"], serde_json::json!([1, 1, 1]));
        let groups: Value = serde_json::from_str(&std::fs::read_to_string(&file).unwrap()).unwrap();
        let domains = groups["expert_domains"].as_array().unwrap();
        assert!(domains.iter().all(|domain| domain.as_array().unwrap().len() == 1), "{name}");
        let text = run(&[&["plan"], &options[..]].concat()).succeeded().stdout;
        let layers = format!("Layers of the strategy `{words}`");
        let layers = text.lines().skip_while(|line| !line.starts_with(&layers)).nth(1).unwrap();
        assert!(layers.starts_with("In an EP group, domains (1, 1, 1): only tokens move."), "{text}");
        assert!(!text.contains("Compression is lossy"), "{text}");
    }
}

/// A strategy that does not exist on a cluster is not one that does not fit, and the error lists names to copy.
#[test]
fn strategies_without_a_layout_are_named() {
    let directory = Directory::new("plan-no-layout");
    let page = directory.file("page.html");
    // Five stages divide five nodes of one datacenter, not the two datacenters.
    let options = ["--nodes=5", "--set=pipeline_stages=5", "--set=memory=1000GB"];
    let text = run(&[&["plan", "--html", &page], &options[..]].concat()).succeeded().stdout;
    let row = |text: &str, name: &str| text.lines().find(|line| line.starts_with(name)).unwrap().to_owned();
    assert!(row(&text, " pipeline ").contains("no such layout"), "{text}");
    assert!(!text.contains("does not fit"), "{text}");
    assert!(std::fs::read_to_string(page).unwrap().contains("<td>pipeline</td><td>no such layout</td>"));
    run(&[&["plan", "--strategy=pipeline"], &options[..]].concat())
        .refused(2, &["--strategy pipeline: it has no layout", "possible: expert-domains, hierarchical-ep"]);
    run(&["plan", "--strategy=local-steps"]).refused(
        2,
        &[
            "--strategy local-steps: no layout of it fits into memory",
            "possible: expert-domains, hierarchical-ep, plain-ep, data-parallel, pipeline",
        ],
    );
    run(&["plan", "--set=pipeline_stages=3"])
        .refused(2, &["pipeline_stages is 3, and no division", "possible: 1, 2, 4, 8, 16, 32"]);
    let steps = run(&["simulate", "--steps", "--set=global_batch=1048576"]).succeeded().stdout;
    assert!(steps.contains("Not priced: local steps: does not fit"), "{steps}");
}

/// The report of `--runnable` begins with the plan that `--groups` writes, and names the faster plan without `--runnable`.
#[test]
fn a_runnable_report_heads_with_the_plan_that_is_written() {
    let directory = Directory::new("plan-runnable-head");
    let (file, page) = (directory.file("groups.json"), directory.file("page.html"));
    let cluster = ["plan", "--cluster=dgx-h100", "--model=qwen3-235b", "--datacenters=4", "--nodes=8"];
    let link = ["--uplink=10Gbit/s", "--round-trip=30ms"];
    let staged = ["--set=pipeline_stages=4", "--runnable", "--groups", &file, "--html", &page];
    let text = run(&[&cluster[..], &link, &staged].concat()).succeeded().stdout;
    let groups: Value = serde_json::from_str(&std::fs::read_to_string(&file).unwrap()).unwrap();
    let sizes: Vec<u64> = groups["levels"]
        .as_array()
        .unwrap()
        .iter()
        .map(|level| level["domain_size"].as_u64().unwrap())
        .collect();
    assert_eq!(sizes, [4, 2, 1]);
    let html = std::fs::read_to_string(&page).unwrap();
    let html = html.replace("<code>", "`").replace("</code>", "`");
    for shown in [&text, &html] {
        for part in [
            "Best for `ExpertMigration` with all 256 GPUs: expert domains (4, 2, 1) with kept replicas. A step of",
            "Layout: 4 stages of 4 datacenters each, EP groups of 64 GPUs (4, 2, 8), 16 micro-batches; at most 24 of the 94 MoE layers in a stage.",
            "Without `--runnable`, with the same number of stages: a pipeline of 4 stages across datacenters, 5.92x faster",
            "`ExpertMigration` can run the layers of each stage",
            "Fewer GPUs are faster. One of the 4 datacenters alone (64 GPUs) trains 154,325 tokens/s, 13.9x faster",
        ] {
            assert!(shown.contains(part), "no `{part}` in: {shown}");
        }
        assert!(!shown.contains("Best with all") && !shown.contains("is not worth it here"), "{shown}");
    }
    let row = |name: &str| text.lines().find(|line| line.starts_with(name)).unwrap().to_owned();
    assert!(text.contains("against this plan") && row(" pipeline ").contains("5.96x faster"), "{text}");
    assert!(
        row(" expert domains ").contains("this plan") && row(" hierarchical EP ").contains("22.7x slower"),
        "{text}"
    );
    // The other plan may have a different number of stages.
    let two = ["plan", "--cluster=dgx-h100", "--model=qwen3-235b", "--nodes=8"];
    let text = run(&[&two[..], &link, &["--runnable"]].concat()).succeeded().stdout;
    assert!(
        text.contains("\nBest for `ExpertMigration`: expert domains (2, 1, 1) with kept replicas. A step of"),
        "{text}"
    );
    let other = "\nWithout `--runnable`: a pipeline of 16 stages across datacenters, ";
    assert!(text.contains(other), "{text}");
}

/// The number of datacenters is a factor of the number of GPUs of every stage. If it does not divide the experts, the error
/// names no strategy that was not requested, and what the error advises can be planned.
#[test]
fn datacenters_that_do_not_divide_the_experts_are_refused_with_a_way_out() {
    let cluster = ["plan", "--cluster=dgx-h200", "--model=qwen3-235b", "--nodes=8", "--runnable"];
    let three = [&cluster[..], &["--datacenters=3"]].concat();
    let why = "--runnable: each stage spans all 3 datacenters, so its number of GPUs is a multiple of 3 and does not divide the \
               128 experts";
    let out = "leave out --runnable for a pipeline with stages inside datacenters";
    // 4 datacenters are not possible: their 256 GPUs do not divide the experts.
    run(&three).refused(
        2,
        &[why, "possible: 2 datacenters (`--datacenters 2`, `--set members=2`)", "`--nodes 8,4,4`", out],
    );
    run(&[&three[..], &["--set=pipeline_stages=3"]].concat()).refused(2, &[why, out]);
    run(&[&cluster[..], &["--datacenters=2"]].concat()).succeeded();
    run(&[&three[..], &["--set=members=2"]].concat()).succeeded();
    run(&["plan", "--cluster=dgx-h200", "--model=qwen3-235b", "--nodes=8,4,4", "--runnable"]).succeeded();
    // The advice gives no site more nodes than it has.
    for (nodes, fewer) in [("--nodes=8,8,4", "`--nodes 8,4,4`"), ("--nodes=4,8,8", "`--nodes 4,8,4`")] {
        run(&["plan", "--cluster=dgx-h200", "--model=qwen3-235b", nodes, "--runnable"]).refused(2, &[fewer]);
    }
    run(&[&cluster[..4], &["--datacenters=3"]].concat()).succeeded();
    // Without datacenters, nodes are the outermost level.
    let nodes =
        ["plan", "--cluster=dgx-h200", "--model=qwen3-235b", "--datacenters=1", "--nodes=3", "--runnable"];
    let way = "all 3 members of level rail, so its number of GPUs is a multiple of 3 and does not divide the 128 experts; \
               possible: 2 or 4 members of level rail (`--set members=2`), or leave out --runnable";
    run(&nodes).refused(2, &[way]);
    // 2 datacenters of 3 nodes can be divided into 2 stages, but not so that each stage spans both datacenters.
    let directory = Directory::new("plan-runnable-odd");
    let model = written(&directory, "model.toml", "[model]\npreset = \"deepseek-v3\"\nexperts = 240\n");
    let odd =
        ["plan", "--cluster=dgx-h200", "--model", &model, "--nodes=3", "--set=memory=8000GB", "--runnable"];
    let spans = "--runnable: no division of the cluster has 2 stages that each span all 2 datacenters; possible: pipeline_stages 1, \
                 3, 6, 12, 24, or leave out --runnable";
    run(&[&odd[..], &["--set=pipeline_stages=2"]].concat()).refused(2, &[spans]);
    run(&[&odd[..], &["--set=pipeline_stages=3"]].concat()).succeeded();
}
