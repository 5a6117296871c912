//! `hybrid-ep plan` and `simulate` on clusters whose datacenters or links are unequal.
#![allow(clippy::unwrap_used, reason = "a test that cannot go on panics")]

mod common;

use common::{Directory, run};
use serde_json::Value;

const THREE: [&str; 6] =
    ["--datacenters", "3", "--nodes", "8,8,4", "--uplink", "100Gbit/s,100Gbit/s,25Gbit/s"];

fn planned(options: &[&str]) -> Value {
    let finished = run(&[&["plan", "--json", "-"], options].concat()).succeeded();
    serde_json::from_str(&finished.stdout).unwrap()
}

#[test]
fn three_unequal_datacenters_are_planned_by_options_and_by_file() {
    let by_options = planned(&THREE);
    let prices = by_options["step"]["prices"].as_array().unwrap();
    // A site of 32 GPUs alone cannot hold all weights and their Adam state, as local steps require.
    assert_eq!(prices.len(), 5, "every other strategy has a layout");
    for price in prices {
        let factors = |list: &str| -> u64 {
            price["layout"][list].as_array().unwrap().iter().map(|count| count.as_u64().unwrap()).product()
        };
        let across = price["layout"]["stages_across"].as_u64().unwrap();
        let inside = price["layout"]["stages_inside"].as_u64().unwrap();
        assert_eq!(across * inside * factors("stage"), 160);
    }
    let pipeline = prices.iter().find(|price| price["strategy"] == "pipeline").unwrap();
    assert_eq!(pipeline["layout"]["stages_across"], 5);

    let directory = Directory::new("unequal-file");
    let file = directory.file("three.toml");
    let toml = run(&[&["plan", "--print-toml"], &THREE[..]].concat()).succeeded().stdout;
    assert!(toml.contains("members = [8, 8, 4]"), "{toml}");
    assert!(toml.contains("bandwidth = [\"100 Gbit/s\", \"100 Gbit/s\", \"25 Gbit/s\"]"), "{toml}");
    std::fs::write(&file, toml).unwrap();
    assert_eq!(planned(&["--cluster", &file])["step"], by_options["step"]);
}

/// The fragment of docs/planner.md, with the level and the GPU that it leaves out.
#[test]
fn the_example_of_the_guide_is_planned() {
    let guide = concat!(env!("CARGO_MANIFEST_DIR"), "/../../docs/planner.md");
    let guide = std::fs::read_to_string(guide).unwrap();
    let block = guide.split("```toml\n").find(|block| block.contains("[8, 8, 4]")).unwrap();
    let block = block.split("```").next().unwrap();
    let text = format!(
        "{block}\n[[cluster.level]]\nname = \"nvlink\"\nmembers = 8\nbandwidth = \"450 GB/s\"\n[cluster.gpu]\n\
         throughput = \"400 TFLOP/s\"\nmemory = \"141 GB\"\nmemory_bandwidth = \"4.8 TB/s\"\n"
    );
    let directory = Directory::new("unequal-guide");
    let file = directory.file("guide.toml");
    std::fs::write(&file, text).unwrap();
    let planned = planned(&["--cluster", &file]);
    assert_eq!(planned["problem"]["cluster"]["levels"][1]["site_members"], serde_json::json!([8, 8, 4]));
    assert_eq!(planned["step"]["prices"].as_array().unwrap().len(), 5);
}

#[test]
fn the_report_says_how_sites_divide() {
    let text = run(&[&["plan"], &THREE[..]].concat()).succeeded().stdout;
    let parts = "'rail' has 8, 8, 4 members in the 3 sites: the plan divides them into 5 equal parts of 4 (2, 2, 1 per \
                 site).";
    assert!(text.contains(parts), "{text}");
    assert!(text.contains("'wan' links of the sites: 100, 100, 25 Gbit/s."), "{text}");
    assert!(text.contains("160 GPUs"), "{text}");
    // One value holds for all sites again.
    let set =
        run(&[&["plan", "--set", "members.rail=8", "--set", "bandwidth=100Gbit/s"], &THREE[..]].concat());
    let equal = run(&["plan", "--datacenters", "3"]).succeeded().stdout;
    assert_eq!(
        set.succeeded().stdout.lines().skip(1).collect::<Vec<_>>(),
        equal.lines().skip(1).collect::<Vec<_>>()
    );
}

/// The runtime sums dense gradients inside a datacenter first, so the file must have the true sites, not their parts.
#[test]
fn the_file_of_groups_has_the_true_sites() {
    let directory = Directory::new("unequal-groups");
    let file = directory.file("groups.json");
    let groups = |nodes: &str| -> Value {
        let cluster = ["--nodes", nodes, "--gpus-per-node=4", "--set=memory=4000GB", "--groups", &file];
        run(&[&["plan", "--runnable"], &cluster[..]].concat()).succeeded();
        serde_json::from_str(&std::fs::read_to_string(&file).unwrap()).unwrap()
    };
    let ranks = |from: u64, to: u64| (from..to).collect::<Vec<u64>>();
    for (nodes, sites) in [
        ("6,6,4", vec![ranks(0, 24), ranks(24, 48), ranks(48, 64)]),
        ("7,1", vec![ranks(0, 28), ranks(28, 32)]),
        ("4", vec![ranks(0, 16), ranks(16, 32)]),
    ] {
        let groups = groups(nodes);
        assert_eq!(groups["datacenters"], serde_json::json!(sites), "{nodes}");
        // `from_file` of the runtime reads the site from the location.
        let of_rank = |rank: usize| groups["rank_groups"][rank]["location"][0].as_u64().unwrap() as usize;
        for (site, ranks) in sites.iter().enumerate() {
            assert!(ranks.iter().all(|&rank| of_rank(rank as usize) == site), "{nodes}: {groups}");
        }
    }
}

#[test]
fn what_cannot_be_done_is_refused_with_the_level() {
    let with = |command: &str, more: &[&str]| run(&[&[command], &THREE[..], more].concat());
    with("plan", &["--paper-model"])
        .refused(2, &["paper's model", "'rail' has 8, 8, 4 members", "without --paper-model"]);
    with("simulate", &[]).refused(2, &["the simulator", "'rail' has 8, 8, 4 members", "`simulate --steps`"]);
    let steps = with("simulate", &["--steps", "--set", "gradient_accumulation=1"]).succeeded().stdout;
    let why = "expert domains, hierarchical EP, plain EP: the simulator needs equal sites, and level 'rail' has 8, 8, 4";
    assert!(steps.contains(why), "{steps}");
    run(&["plan", "--datacenters", "3", "--nodes", "8,8"])
        .refused(2, &["--nodes", "2 entries for 3 datacenters"]);
    // A list has one entry per datacenter, so their number need not be given.
    let given = run(&[&["plan"], &THREE[..]].concat()).succeeded().stdout;
    let lists: Vec<&str> =
        THREE.iter().copied().filter(|part| !matches!(*part, "--datacenters" | "3")).collect();
    assert!(lists.len() < THREE.len());
    assert_eq!(run(&[&["plan"], &lists[..]].concat()).succeeded().stdout, given);
    run(&["plan", "--nodes", "8,4", "--uplink", "1Gbit/s,2Gbit/s,3Gbit/s"])
        .refused(2, &["--uplink: 3 entries for 2 datacenters", "the entries of --nodes"]);
    run(&["plan", "--uplink", "1Gbit/s,fast"]).refused(2, &["--uplink fast", "does not begin with a number"]);
}
