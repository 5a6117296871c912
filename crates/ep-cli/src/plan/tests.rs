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
    let (step, plan) = solve(&Wanted { args: &args, unrestricted: None }, &problem).unwrap();
    let text = |explain| text::render(&problem, step.as_ref(), &plan, None, explain);
    [text(false), text(true), page(&problem, step.as_ref(), &plan)]
}

/// The HTML report, with names between backticks as in the text.
fn page(problem: &Problem, step: Option<&Shown>, plan: &Plan) -> String {
    let page = html::render(problem, step, plan, None).unwrap();
    page.replace("<code>", "`").replace("</code>", "`")
}

/// The lines of the report about what it assumes are in the text, with and without `--explain`, and in the page.
#[test]
fn every_report_says_what_it_assumes() {
    let plain = "links of levels wan, rail and nvlink with all of their bandwidth (`efficiency` 1), no loss (`loss` 0) and 1 \
                 connection each (`flows` 1, which counts only with loss)";
    let lossy = "links of level wan with 0.5 of their bandwidth (`efficiency` 0.5), 0.001 of the packets lost (`loss` \
                 0.001) and 64 connections each (`flows` 64), links of levels rail and nvlink with all of their bandwidth \
                 (`efficiency` 1), no loss (`loss` 0) and 1 connection each (`flows` 1, which counts only with loss)";
    let set = "--set=efficiency=0.5 --set=loss=0.001 --set=flows=64";
    for (options, links) in [("", plain), (set, lossy), ("--set=work=forward", plain)] {
        let line = format!(
            "Assumed: even routing, 400 TFLOP/s in each GPU, {links}. Activations are not counted: `reserved_memory` is kept \
             free for them and for dense parameters. Step times on GPUs were never compared with measured ones."
        );
        let rates = "Links: wan 100 Gbit/s for each member, shared by its GPUs, round trip 5.000 ms; rail 400 Gbit/s for each \
                     GPU, round trip 10.00 µs; nvlink 3600 Gbit/s for each GPU, round trip 2.000 µs.";
        for shown in reports(options) {
            assert_eq!(shown.matches(&line).count(), 1, "{line}\n{shown}");
            assert_eq!(shown.matches(rates).count(), 1, "{rates}\n{shown}");
        }
    }
}

/// A reader learns what can run the plan, and whether one site would be enough.
#[test]
fn the_answer_says_what_runs_the_plan_and_whether_one_site_holds_the_model() {
    let alone = "One of the 2 datacenters alone cannot train this model: weights, gradients and Adam state need 10.74 TB, and \
                 its 64 GPUs have 9.024 TB.";
    let neither = "`ExpertMigration` cannot run this layout. ";
    let migration = "`ExpertMigration` can run the layers of each stage: ";
    let operators =
        "This layout gathers no experts: a training program with a pipeline can run it with `MoELayer` ";
    let stage_of_several = "in each EP group. `--groups` lists the groups of all stages. `reduce_gradients` takes all ranks of a stage as \
                            `group` and those with the same experts as `expert_group`.";
    for (options, too_small, says) in [
        ("", 1, Some(operators)),
        ("--set=tensor_parallel=2", 1, Some(neither)),
        ("--nodes=16", 0, Some(operators)),
        ("--nodes=16", 0, Some(stage_of_several)),
        ("--nodes=16 --set=expert_parallel=64 --set=pipeline_stages=4 --uplink=10Gbit/s", 0, Some(migration)),
        (
            "--nodes=16 --set=memory_cap=0.1GB --set=pipeline_stages=4 --set=expert_parallel=64",
            0,
            Some(operators),
        ),
        ("--nodes=16 --set=pipeline_stages=1 --set=expert_parallel=256 --set=tensor_parallel=1", 0, None),
        ("--datacenters=1 --nodes=16", 0, Some(operators)),
    ] {
        for shown in reports(options) {
            assert_eq!(shown.matches(alone).count(), too_small, "{options}\n{shown}");
            for line in [neither, migration, operators] {
                let expected = usize::from(
                    says.is_some_and(|says| says == line || (says, line) == (stage_of_several, operators)),
                );
                assert_eq!(shown.matches(line).count(), expected, "{options}: {line}\n{shown}");
            }
            if let Some(says) = says {
                assert_eq!(shown.matches(says).count(), 1, "{options}: {says}\n{shown}");
            }
        }
    }
}

/// If `ExpertMigration` cannot run a layout, the program must gather the experts itself.
#[test]
fn the_answer_says_which_gathers_the_program_must_do() {
    let gathers = "This plan also gathers experts among 4 GPUs of an EP group.";
    for (options, times) in [
        ("--set=pipeline_stages=2", 1),
        ("", 0),
        ("--nodes=16 --set=pipeline_stages=1 --set=expert_parallel=256 --set=tensor_parallel=1", 0),
    ] {
        for shown in reports(options) {
            assert_eq!(shown.matches(gathers).count(), times, "{options}\n{shown}");
        }
    }
}

/// The memory that is kept free by default excludes expert domains that are 20 times as fast.
#[test]
fn the_answer_says_when_memory_excludes_faster_expert_domains() {
    let hint = "With `reserved_memory` 0, expert domains (2, 1, 1) with kept replicas in EP groups of 32 GPUs would fit; they are ";
    for (options, times) in [("", 1), ("--set=reserved_memory=0.25", 0), ("--nodes=16", 0)] {
        for shown in reports(options) {
            assert_eq!(shown.matches(hint).count(), times, "{options}\n{shown}");
        }
    }
}

/// Without sizes of the attention, steps appear shorter than they are, and the report says so.
#[test]
fn attention_that_counts_as_nothing_is_named() {
    let remark = |parameters: f64, score_width: f64| {
        let args = <Options as clap::Parser>::try_parse_from(["plan"]).unwrap().args;
        let mut problem = Problem::resolve(&args.problem).unwrap();
        (problem.model.attention.parameters, problem.model.attention.score_width) = (parameters, score_width);
        let (step, plan) = solve(&Wanted { args: &args, unrestricted: None }, &problem).unwrap();
        let page = page(&problem, step.as_ref(), &plan);
        let texts = [true, false].map(|explain| text::render(&problem, step.as_ref(), &plan, None, explain));
        let line = text::assumed(&problem).into_iter().find(|line| line.starts_with("The model has no "));
        for shown in texts.iter().chain([&page]) {
            assert_eq!(
                shown.matches(line.as_deref().unwrap_or("The model has no ")).count(),
                usize::from(line.is_some())
            );
        }
        line.unwrap_or_default()
    };
    assert_eq!(remark(0.0, 0.0), "The model has no attention parameters: attention compute counts as 0.");
    let projections =
        "The model has no attention parameters: the compute of attention projections counts as 0.";
    assert_eq!(remark(0.0, 128.0), projections);
    assert_eq!(
        remark(1e6, 0.0),
        "The model has no attention `score_width`: the compute of attention scores counts as 0."
    );
    assert_eq!(remark(1e6, 128.0), "");
}

/// Local steps are faster than the best strategy here, but are never called the best.
#[test]
fn local_steps_have_the_last_card() {
    let [text, _, page] = reports("--datacenters=4 --nodes=64");
    assert!(text.contains("follow a different training trajectory"), "{text}");
    let cards: Vec<&str> =
        page.split("<div class=\"card").skip(1).filter(|card| card.contains("<span>")).collect();
    let last = cards.last().unwrap();
    assert!(last.contains("<span>local steps, "), "{last}");
    assert!(cards.iter().any(|card| card.starts_with(" main") && card.contains("the best")), "{page}");
}

/// The heading describes all strategies, so it gives the codecs of experts under the condition that experts move.
#[test]
fn the_heading_has_the_codecs_for_experts_that_move() {
    for shown in reports("") {
        assert!(shown.contains(", if experts move: weights as int8, gradients as int8"), "{shown}");
    }
    for shown in reports("--set=work=forward --set=weight_compression=1") {
        assert!(shown.contains(", if experts move: weights as they are"), "{shown}");
    }
}

/// What is sent exactly is not called lossy, and a forward pass has no gradients.
#[test]
fn only_lossy_codecs_of_what_is_sent_are_called_lossy() {
    for (options, said) in [
        ("--set=work=forward", "Compression is lossy: weights int8. The paper"),
        ("--set=work=forward --set=weight_compression=1", "Weights are sent exactly."),
        (
            "--set=weight_compression=1 --strategy=expert-domains",
            "Compression is lossy: gradients int8. Weights of experts are sent exactly. The",
        ),
    ] {
        for shown in reports(&format!("--nodes=32 --uplink=10Gbit/s {options}")) {
            assert_eq!(shown.matches(said).count(), 1, "{options}\n{shown}");
        }
    }
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
        assert_eq!(shown.matches(" as much bandwidth (").count(), 1, "{shown}");
    }
    // The pipeline is shown, and is not the best strategy.
    for shown in reports(&format!("{slow} --set=weight_compression=50 --strategy=pipeline")) {
        assert!(shown.contains("Best with all 512 GPUs: expert domains"), "{shown}");
        assert_eq!(shown.matches("The stages wait for level wan: ").count(), 1, "{shown}");
    }
    // Of unequal uplinks, only that of the last datacenter is too slow: the faster one beside it has bandwidth left.
    let unequal = "--model=qwen3-235b --nodes=6,6,4 --uplink=50Gbit/s,50Gbit/s,20Gbit/s --round-trip=30ms";
    for shown in reports(unequal) {
        let line = "the link of datacenter 3 sends or receives for 107.4 ms per micro-batch in one direction";
        assert_eq!(shown.matches(line).count(), 1, "{shown}");
        assert!(
            shown.contains("would not wait with 1.11x as much bandwidth at datacenter 3 (22.3 Gbit/s)."),
            "{shown}"
        );
        assert!(shown.contains("bandwidth of wan at datacenter 3"), "{shown}");
        assert!(!shown.contains("Fewer GPUs are"), "{shown}");
    }
    // Links that keep up, and a step of one stage.
    for options in ["", "--nodes=16 --strategy=plain-ep --set=pipeline_stages=1"] {
        for shown in reports(options) {
            assert!(!shown.contains("stages wait for level"), "{shown}");
        }
    }
}

/// EP groups over several nodes are named, and so is what carries their tokens.
#[test]
fn ep_groups_over_several_nodes_are_named() {
    let over = "Inside an EP group, tokens cross level rail. Between machines hybrid-ep sends over libfabric";
    for (options, times) in [("", 0), ("--set=pipeline_stages=2", 1)] {
        for shown in reports(options) {
            assert_eq!(shown.matches(over).count(), times, "{options}\n{shown}");
        }
    }
}

/// Where a link between datacenters is the bound, fewer nodes are as fast.
#[test]
fn fewer_gpus_that_are_as_fast_are_named() {
    let slow = "--cluster=dgx-h100 --nodes=16 --uplink=20Gbit/s --round-trip=60ms";
    let line = "Fewer GPUs are as fast within 1 %. The 2 datacenters with 14 members of level rail each (224 GPUs) train ";
    for (options, times) in [(slow, 1), ("--nodes=16", 0)] {
        for shown in reports(options) {
            assert_eq!(shown.matches(line).count(), times, "{options}\n{shown}");
        }
    }
}

/// The report says which layout of each strategy it compares. Forward passes have no layouts.
#[test]
fn the_terms_say_which_layout_is_compared() {
    let layout = "of those within 1 % of the fastest, preferably one with EP groups inside nodes, then the one with the fewest \
                  stages. Inside a datacenter, experts are gathered only if that saves 5 %.";
    for (options, times) in [("", 1), ("--set=work=forward", 0)] {
        let [text, explained, page] = reports(options);
        for shown in [text, explained] {
            assert_eq!(shown.matches(layout).count(), times, "{options}\n{shown}");
        }
        let about = "each in its fastest layout (of those within 1 %, preferably one with EP groups inside nodes, then the one";
        assert_eq!(page.matches(about).count(), times, "{options}\n{page}");
    }
}

/// The report says where the time of a step goes, and what larger clusters bring.
#[test]
fn the_answer_says_where_the_time_goes_and_what_larger_clusters_bring() {
    let slow = "--nodes=32 --uplink=10Gbit/s --set=pipeline_stages=4 --set=weight_compression=1";
    for (options, time) in
        [("", "Time of a step: 89 % compute, "), (slow, "87 % waits for links between stages")]
    {
        for shown in reports(options) {
            assert_eq!(shown.matches("Time of a step: ").count(), 1, "{shown}");
            assert_eq!(shown.matches(time).count(), 1, "{time}\n{shown}");
        }
    }
    for shown in reports("") {
        for twice in ["bandwidth of wan", "bandwidth of rail", "nodes", "nodes and bandwidth of wan"] {
            assert!(shown.contains(twice), "{twice}\n{shown}");
        }
    }
    for shown in reports("--set=work=forward") {
        assert!(!shown.contains("with twice the") && !shown.contains("Time of a step"), "{shown}");
    }
}

/// A plan that gathers experts, and that no runtime runs, names the plan without gathers.
#[test]
fn a_plan_that_gathers_names_the_one_that_does_not() {
    let gathers = "hybrid-ep does that in `ExpertMigration` only, so the program must do it itself.";
    for shown in reports("--nodes=16 --uplink=1Gbit/s") {
        assert_eq!(shown.matches(gathers).count(), 1, "{shown}");
        assert_eq!(
            shown.matches("With `--set memory_cap=0GB` the plan gathers none: ").count(),
            1,
            "{shown}"
        );
    }
}
